"""Times on a device: medians between events, while the host is ahead."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from insum_nn.locks import new_lock

__all__ = ["device_time", "time_whole", "why_not"]

# Two threads that measure on one device at once would count each other's work.
_measuring = new_lock()
# Microseconds of work in front of what is measured: at least, and at most.
_LEAST_AHEAD, _MOST_AHEAD = 200.0, 40_000.0


def why_not() -> str:
    """Return why nothing can be measured here; empty where it can."""
    if not torch.cuda.is_available():
        return "torch sees no GPU, and library calls on a CPU have no schedules"
    return ""


def device_time(run: Callable[[], object], repeat: int, *, host: float | None = None) -> float:
    """Return the microseconds that a device takes for what ran before: medians, with its cache emptied and without.

    A layer finds in the cache what the layer before it wrote, and its weights and index tensors, which nothing touched
    since the last step, in memory. So each way counts half.

    Work in front keeps the device busy until the host has launched all of it; else the times would be the host's.

    Args:
        run: what is measured.
        repeat: how often, each way.
        host: microseconds for which it keeps the host; measured by one run more where it is not given.
    """
    if host is None:
        begin = time.perf_counter()
        run()
        host = 1e6 * (time.perf_counter() - begin)
    with _measuring:
        ways = ("cold", "warm") if (filler := _filler()) is not None else ("warm",)
        taken: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {way: [] for way in ways}
        ahead = 1.5 * repeat * (len(ways) * host + _BETWEEN)
        torch.cuda._sleep(int(2000 * min(_MOST_AHEAD, max(_LEAST_AHEAD, ahead))))
        for _ in range(repeat):
            if filler is not None:
                filler.zero_()
            for way in ways:
                begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begun.record()
                run()
                ended.record()
                taken[way].append((begun, ended))
        torch.cuda.synchronize()
    times = [sorted(a.elapsed_time(b) for a, b in pairs) for pairs in taken.values()]
    return 1000.0 * sum(way[len(way) // 2] for way in times) / len(times)


# Microseconds of the host that events, and emptying the cache, add to a run.
_BETWEEN = 20.0


def _filler() -> Tensor | None:
    """A tensor that fills the cache of the device when it is written; `None` where there is no room for it."""
    size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    try:
        return torch.empty(2 * size, dtype=torch.int8, device="cuda")
    except torch.OutOfMemoryError:
        return None


# Runs of which the median counts.
_RUNS = 10


def time_whole(run: Callable[[], object], repeat: int = _RUNS) -> float:
    """Return the microseconds of several kernels: the device's or the host's, whichever takes longer.

    Each is measured alone, since together they would vary with the host. Infinite where the device has no room.
    """
    try:
        run()
    except torch.OutOfMemoryError:
        return math.inf
    torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(repeat):
        begin = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - begin))
        torch.cuda.synchronize()
    # The least: other work of the host is no property of the program.
    host = min(times)
    return max(host, device_time(run, repeat, host=host))

"""Clocks: device time, host time and CPU time of a call, in milliseconds, one number for each call; and its kernels."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar, cast

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["Kernel", "captured", "kernels", "quantile", "synchronize", "times_cpu", "times_cuda", "times_host"]

Result = TypeVar("Result")

# Calls between two readings of the host's clock: few enough that the device's launch queue never fills up.
_BATCH = 20


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def times_cuda(call: Callable[[], object], warmup_ms: int, rep_ms: int) -> list[float]:
    """Time each call between CUDA events, with the L2 cache flushed before each."""
    from triton.testing import do_bench

    return cast(list[float], do_bench(call, warmup=warmup_ms, rep=rep_ms, return_mode="all"))


def captured(call: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture a call in a CUDA graph; also return its result, tensors that each replay writes again.

    A replay launches all kernels at once, so that its time is the device's alone.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = call()
    except Exception:
        # Without this the random number generator stays registered with the failed capture.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(torch.Generator(generator.device).graphsafe_get_state())
        raise
    return graph, result


def times_cpu(call: Callable[[], object], warmup_ms: int, rep_ms: int) -> list[float]:
    """Time each call, at least five: the processor's time with one thread, which other processes change little."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def until(budget_ms: float, least: int) -> list[float]:
        times: list[float] = []
        while len(times) < least or (sum(times) < budget_ms and len(times) < 10_000):
            start = clock()
            call()
            times.append((clock() - start) * 1e3)
        return times

    until(warmup_ms, 1)
    return until(rep_ms, 5)


def times_host(
    call: Callable[[], object], warmup_ms: int, rep_ms: int, device: torch.device, batch: int = _BATCH
) -> list[float]:
    """Time how long the host is busy with a call: kernels are launched, and waited for outside the clock.

    Each number is the mean of a batch of calls.
    """

    def one() -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(batch):
            call()
        elapsed = time.perf_counter() - start
        synchronize(device)
        return elapsed / batch * 1e3

    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        spent, times = 0.0, list[float]()
        while spent < warmup_ms:
            spent += one() * batch
        while len(times) < 5 or (sum(times) * batch < rep_ms and len(times) < 1_000):
            times.append(one())
    finally:
        if collects:
            gc.enable()
    return times


class Kernel(NamedTuple):
    """One kernel over the traced calls: microseconds and launches for each call."""

    name: str
    us: float
    launches: float


def kernels(call: Callable[[], object], calls: int = 5) -> list[Kernel]:
    """List the kernels of a call, the longest first; on a CPU the operators."""
    cuda = torch.cuda.is_available()
    for _ in range(3):
        call()
    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as trace:
        for _ in range(calls):
            call()
        if cuda:
            torch.cuda.synchronize()
    found = [
        Kernel(e.key, (e.self_device_time_total if cuda else e.self_cpu_time_total) / calls, e.count / calls)
        for e in trace.key_averages()
    ]
    return sorted((k for k in found if k.us > 0), key=lambda k: -k.us)


def quantile(times: Sequence[float], q: float) -> float:
    """Return a quantile, linear between neighbours."""
    ordered = sorted(times)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)

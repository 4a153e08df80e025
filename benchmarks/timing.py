"""Clocks: the device's time of a call, the host's, and a processor's; in milliseconds, one number for each call."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch

__all__ = ["captured", "quantile", "synchronize", "times_cpu", "times_cuda", "times_host"]

Result = TypeVar("Result")

# Calls between two readings of the host's clock: few enough that the queue of the device never fills up.
_BATCH = 20


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def times_cuda(call: Callable[[], object], warmup_ms: int, rep_ms: int) -> list[float]:
    """Each call between CUDA events, with the L2 cache flushed before each."""
    from triton.testing import do_bench

    return cast(list[float], do_bench(call, warmup=warmup_ms, rep=rep_ms, return_mode="all"))


def captured(call: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A call as a CUDA graph, and what it returned: tensors that each replay writes again.

    A replay hands over all kernels at once, so that its time is the device's alone.
    """
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = call()
    except Exception:
        # The generator of random numbers would wait for the end of the capture for ever.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(torch.Generator(generator.device).graphsafe_get_state())
        raise
    return graph, result


def times_cpu(call: Callable[[], object], warmup_ms: int, rep_ms: int) -> list[float]:
    """Each call by the process's clock; at least five calls."""

    def until(budget_ms: float, least: int) -> list[float]:
        times: list[float] = []
        while len(times) < least or (sum(times) < budget_ms and len(times) < 10_000):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        return times

    until(warmup_ms, 1)
    return until(rep_ms, 5)


def times_host(
    call: Callable[[], object], warmup_ms: int, rep_ms: int, device: torch.device, batch: int = _BATCH
) -> list[float]:
    """How long the host is busy with a call: the device's work is handed over, and waited for outside the clock.

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


def quantile(times: Sequence[float], q: float) -> float:
    """A quantile, linear between neighbours."""
    ordered = sorted(times)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)

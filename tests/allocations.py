"""How much memory an operation asks for."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["largest_allocation"]


def largest_allocation(work: Callable[[], object]) -> int:
    """Bytes of the largest piece of memory that one operation asks for."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    return max(event.self_cpu_memory_usage for event in profile.events() or ())

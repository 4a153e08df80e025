"""Kernels that are written by hand, of integers that no statement computes; launched as generated kernels are.

Every caller can compute the same numbers by torch's operators, and does so until other processes have compiled the
kernels: a first step does not wait for their machine code.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache

import torch

from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.kernels.ahead import collecting
from insum_nn.compiler.kernels.launch import Launcher, available, interpreted, launcher, load_ahead
from insum_nn.compiler.kernels.source import Source
from insum_nn.dtypes import dtype_of

__all__ = ["WrittenKernels", "written"]

# Seconds until machine code that was missing is looked for again, which takes as long as several launches.
_PAUSE = 0.2


class WrittenKernels:
    """Kernels that are used together.

    Args:
        kernels: of each its text, which serves all sizes, and Triton's types of its pointers, in the order of its
            parameters, with `None` for numbers of 32 bits.
    """

    def __init__(self, kernels: Sequence[tuple[Source, Sequence[str | None]]]) -> None:
        self.kernels = tuple(kernels)
        self._ready: dict[torch.device, tuple[Launcher, ...]] = {}
        self._again: dict[torch.device, float] = {}

    def launchers(self, device: torch.device) -> tuple[Launcher, ...] | None:
        """What launches each on a device; `None`: Triton does not serve it, or their machine code is not there yet."""
        return self._ready.get(device) or self._prepare(device)

    def _prepare(self, device: torch.device) -> tuple[Launcher, ...] | None:
        # Launchers ask torch for the stream.
        if device.type != "cuda" or not available():
            return None
        waits = collecting() is None and not interpreted()
        if waits and time.monotonic() < self._again.get(device, 0.0):
            return None
        found = tuple([launcher(source, types, (), device, wide=False) for source, types in self.kernels])
        if not load_ahead(found):
            if waits:
                self._again[device] = time.monotonic() + _PAUSE
            return None
        if not interpreted():
            self._ready[device] = found
        return found


@lru_cache(maxsize=64)
def written(*kernels: tuple[str, tuple[torch.dtype, ...]], warps: int = 4) -> WrittenKernels:
    """Kernels of these texts; each with what its pointers point to, behind which stand numbers."""
    found: list[tuple[Source, Sequence[str | None]]] = []
    for text, dtypes in kernels:
        numbers = text.partition("def kernel(")[2].partition(")")[0].count(",") + 1 - len(dtypes)
        source = Source(text, (), "", {}, Schedule(warps=warps), torch.int32, finished=True)
        found.append((source, [*(dtype_of(each).pointer for each in dtypes), *[None] * numbers]))
    return WrittenKernels(found)

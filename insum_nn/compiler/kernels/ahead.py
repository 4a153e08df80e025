"""Kernels found ahead of their launches: what a thread would launch is collected."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from insum_nn.compiler.kernels import machine_code
from insum_nn.compiler.kernels.machine_code import KernelCode, Target

__all__ = ["Collection", "collect", "collecting", "target_of"]


@dataclass
class Collection:
    """The kernels that calls of one thread would have launched.

    Attributes:
        target: what they are compiled for; `None`: the device that they would have run on.
        codes: each once, in the order in which they were met.
        launches: how often any was met.
    """

    target: Target | None = None
    codes: dict[KernelCode, None] = field(default_factory=dict[KernelCode, None])
    launches: int = 0

    def add(self, code: KernelCode) -> None:
        """Note one launch."""
        self.launches += 1
        self.codes[code] = None


class _OfThread(threading.local):
    """What this thread collects: others launch meanwhile."""

    collection: Collection | None = None


_of_thread = _OfThread()


def collecting() -> Collection | None:
    """Where launches of this thread are collected now, if they are."""
    return _of_thread.collection


@contextmanager
def collect(target: Target | None = None) -> Generator[Collection]:
    """Collect this thread's launches of kernels that are not loaded yet instead of making them; outputs are zero.

    Backward passes that this thread begins run in it, not in those that torch keeps for devices.

    Args:
        target: as of a `Collection`.
    """
    outer, own = _of_thread.collection, Collection(target)
    with torch.autograd.set_multithreading_enabled(False):
        _of_thread.collection = own
        try:
            yield own
        finally:
            _of_thread.collection = outer


def target_of(device: int) -> Target:
    """What kernels for a device of this number are compiled for."""
    if torch.version.hip is None:
        # Triton would first compile what it asks the driver with.
        major, minor = torch.cuda.get_device_capability(device)
        return "cuda", 10 * major + minor, 32
    with torch.cuda.device(device):
        return machine_code.active_target()

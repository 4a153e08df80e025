"""Tests in which two processes train together: on CPUs by Gloo, on two GPUs by NCCL."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["device_of", "meeting"]


def device_of(kind: str, rank: int) -> torch.device:
    """Return the device of a process, and make it the current one."""
    if kind == "cpu":
        torch.set_num_threads(1)
        return torch.device(kind)
    device = torch.device(kind, rank)
    torch.cuda.set_device(device)
    return device


@contextmanager
def meeting(device: torch.device, rank: int, folder: str) -> Generator[None]:
    """Join a group of two processes that meet in a folder."""
    distributed: Any = torch.distributed
    backend = "gloo" if device.type == "cpu" else "nccl"
    distributed.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        yield
    finally:
        distributed.destroy_process_group()

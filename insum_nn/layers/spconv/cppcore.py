"""`spconv.pytorch.cppcore`: facts about the device."""

from __future__ import annotations

import torch

__all__ = ["get_arch", "get_current_stream"]


def get_current_stream() -> int:
    """Return the address of the current CUDA stream; 0 without CUDA."""
    return torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0


def get_arch() -> tuple[int, int]:
    """Return the compute capability of the current CUDA device; (0, 0) without CUDA."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)

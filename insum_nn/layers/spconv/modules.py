"""`spconv.pytorch.modules`: containers and small modules."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from insum_nn.layers.voxel.conv import SparseConvolution
from insum_nn.layers.voxel.on_features import SparseBatchNorm, SparseReLU, SparseSyncBatchNorm
from insum_nn.layers.voxel.sequential import (
    SparseIdentity,
    SparseModule,
    SparseSequential,
    assign_name_for_sparse_modules,
)
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor

__all__ = [
    "PrintCurrentTime",
    "PrintTensorMeta",
    "SparseBatchNorm",
    "SparseIdentity",
    "SparseModule",
    "SparseReLU",
    "SparseSequential",
    "SparseSyncBatchNorm",
    "assign_name_for_sparse_modules",
    "is_sparse_conv",
    "is_spconv_module",
]


def is_spconv_module(module: nn.Module) -> bool:
    """Return whether a module takes sparse tensors itself."""
    return isinstance(module, SparseModule | SparseBatchNorm | SparseReLU)


def is_sparse_conv(module: nn.Module) -> bool:
    """Return whether a module is a sparse convolution."""
    return isinstance(module, SparseConvolution)


class PrintTensorMeta(nn.Module):
    """Print the least, the greatest and the mean number of a tensor, or of a sparse tensor's features."""

    def forward(self, x: Any) -> Any:
        """Print, and return `x`."""
        numbers = x.features if isinstance(x, SparseConvTensor) else x
        if isinstance(numbers, torch.Tensor):
            print(numbers.min(), numbers.max(), numbers.mean())
        return x


class PrintCurrentTime(nn.Module):
    """Print the seconds since the module was made, or since a call with `reset=True`, when all work is done."""

    def __init__(self) -> None:
        super().__init__()
        self.first_time = time.time()

    def forward(self, x: Any, msg: str = "", reset: bool = False) -> Any:
        """Print, and return `x`."""
        if reset:
            self.first_time = time.time()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(msg, time.time() - self.first_time)
        return x

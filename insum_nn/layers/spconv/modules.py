"""`spconv.pytorch.modules`: containers, and what kind of module one is."""

from __future__ import annotations

from torch import nn

from insum_nn.layers.voxel.conv import SparseConvolution
from insum_nn.layers.voxel.on_features import SparseBatchNorm, SparseReLU, SparseSyncBatchNorm
from insum_nn.layers.voxel.sequential import (
    SparseIdentity,
    SparseModule,
    SparseSequential,
    assign_name_for_sparse_modules,
)

__all__ = [
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

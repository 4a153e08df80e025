"""`spconv.pytorch.modules`: containers and small modules."""

from __future__ import annotations

from torch import nn

from insum_nn.layers.sparse_conv import SparseConvolution
from insum_nn.layers.sparse_sequential import (
    SparseBatchNorm,
    SparseIdentity,
    SparseModule,
    SparseReLU,
    SparseSequential,
    SparseSyncBatchNorm,
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
    """Whether a module takes sparse tensors itself."""
    return isinstance(module, SparseModule | SparseBatchNorm | SparseReLU)


def is_sparse_conv(module: nn.Module) -> bool:
    """Whether a module is a sparse convolution."""
    return isinstance(module, SparseConvolution)

"""`spconv.pytorch.core`: the tensor, and what is kept under its keys."""

from __future__ import annotations

from insum_nn.layers.sparse_tensor import SparseConvTensor
from insum_nn.structure.kernel_map import KernelMap

__all__ = ["KernelMap", "SparseConvTensor"]

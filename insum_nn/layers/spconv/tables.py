"""`spconv.pytorch.tables`: modules over several tensors."""

from __future__ import annotations

from insum_nn.layers.voxel.sequential import AddTable, AddTableMisaligned, ConcatTable, JoinTable, SparseModule
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor

__all__ = ["AddTable", "AddTableMisaligned", "ConcatTable", "JoinTable", "SparseConvTensor", "SparseModule"]

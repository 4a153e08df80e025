"""`spconv.pytorch.tables`: modules over several tensors."""

from __future__ import annotations

from insum_nn.layers.voxel.sequential import AddTable, AddTableMisaligned, ConcatTable, JoinTable

__all__ = ["AddTable", "AddTableMisaligned", "ConcatTable", "JoinTable"]

"""`spconv.pytorch.spatial`."""

from __future__ import annotations

from insum_nn.layers.voxel.sequential import RemoveDuplicate, SparseModule

__all__ = ["RemoveDuplicate", "SparseModule"]

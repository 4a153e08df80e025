"""`spconv.pytorch.spatial`."""

from __future__ import annotations

from insum_nn.layers.voxel.sequential import RemoveDuplicate

__all__ = ["RemoveDuplicate"]

"""`spconv.pytorch.spatial`."""

from __future__ import annotations

from insum_nn.layers.sparse_sequential import RemoveDuplicate

__all__ = ["RemoveDuplicate"]

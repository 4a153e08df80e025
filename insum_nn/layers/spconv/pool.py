"""`spconv.pytorch.pool`: the pools."""

from __future__ import annotations

from insum_nn.layers.voxel import pool as _kinds
from insum_nn.layers.voxel.pool import *
from insum_nn.layers.voxel.pool import SparseAvgPool, SparseMaxPool

__all__ = ["ALL_POOL_LAYERS"]
__all__ += _kinds.__all__

ALL_POOL_LAYERS: set[type[SparseMaxPool] | type[SparseAvgPool]] = {
    getattr(_kinds, name) for name in _kinds.__all__ if "Global" not in name
}

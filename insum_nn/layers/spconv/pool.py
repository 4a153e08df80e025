"""`spconv.pytorch.pool`: the pools."""

from __future__ import annotations

from insum_nn.layers.spconv import core
from insum_nn.layers.spconv.core import *
from insum_nn.layers.voxel import pool as _kinds
from insum_nn.layers.voxel.pool import *
from insum_nn.layers.voxel.pool import SparseAvgPool, SparseMaxPool
from insum_nn.layers.voxel.sequential import SparseModule

__all__ = ["ALL_POOL_LAYERS", "SparseModule"]
__all__ += _kinds.__all__
__all__ += core.__all__

ALL_POOL_LAYERS: set[type[SparseMaxPool] | type[SparseAvgPool]] = {
    getattr(_kinds, name) for name in _kinds.__all__ if "Global" not in name
}

"""`spconv.pytorch.conv`: the convolutions."""

from __future__ import annotations

from insum_nn.layers.spconv import core
from insum_nn.layers.spconv.core import *
from insum_nn.layers.voxel import conv as _kinds
from insum_nn.layers.voxel.conv import *
from insum_nn.layers.voxel.conv import SparseConvolution
from insum_nn.layers.voxel.conv_base import SparseConvolutionBase
from insum_nn.layers.voxel.sequential import SparseModule

__all__ = ["DEFAULT_SPARSE_CONV_TYPES", "SparseConvolutionBase", "SparseModule"]
__all__ += _kinds.__all__
__all__ += core.__all__

DEFAULT_SPARSE_CONV_TYPES: set[type[SparseConvolution]] = {
    getattr(_kinds, name) for name in _kinds.__all__ if name != "SparseConvolution"
}

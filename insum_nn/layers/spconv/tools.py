"""`spconv.tools`."""

from __future__ import annotations

from insum_nn.layers.voxel.sparse_tensor import CUDAKernelTimer

__all__ = ["CUDAKernelTimer"]

"""Pooling over sparse grids: the largest, or the mean, of the active voxels under a kernel or of a whole cloud."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.options import DEFAULT, Options, require_options
from insum_nn.layers.extents import IntOrInts, OfDimension, arguments_of
from insum_nn.layers.voxel.base import VOXEL_COUNT, MapLayer, StatementModule, store_map
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor
from insum_nn.ops.sparse_pool import (
    SPARSE_AVG_POOL,
    SPARSE_GLOBAL_AVG_POOL,
    SPARSE_GLOBAL_MAX_POOL,
    SPARSE_MAX_POOL,
    sparse_avg_pool,
    sparse_global_avg_pool,
    sparse_global_max_pool,
    sparse_max_pool,
)
from insum_nn.structure.kernel_map import Geometry, KernelMap

__all__ = [
    "SparseAvgPool",
    "SparseAvgPool1d",
    "SparseAvgPool2d",
    "SparseAvgPool3d",
    "SparseAvgPool4d",
    "SparseGlobalAvgPool",
    "SparseGlobalMaxPool",
    "SparseMaxPool",
    "SparseMaxPool1d",
    "SparseMaxPool2d",
    "SparseMaxPool3d",
    "SparseMaxPool4d",
]


class _SparsePool(MapLayer, StatementModule):
    """Base of pools: the kernel's geometry and its map.

    Attributes:
        geometry: how the kernel moves.
        options: compile options.
    """

    __call__: Callable[..., SparseConvTensor]

    def __init__(
        self,
        ndim: int,
        kernel_size: IntOrInts = 3,
        stride: IntOrInts | None = 1,
        padding: IntOrInts = 0,
        dilation: IntOrInts = 1,
        indice_key: str | None = None,
        subm: bool = False,
        algo: object = None,
        record_voxel_count: bool = False,
        name: str | None = None,
        *,
        options: Options = DEFAULT,
    ) -> None:
        """Store the kernel's geometry.

        Args:
            ndim: spatial dimensions.
            kernel_size: kernel cells along each axis.
            stride: step of the kernel; `None`: the kernel size.
            padding: cells added around the grid.
            dilation: step between kernel cells.
            indice_key: name under which the map is stored, for an inverse convolution.
            subm: outputs are the inputs' voxels, under a centred kernel.
            algo: not read: the compiler chooses.
            record_voxel_count: keep the largest number of output voxels in a buffer.
            name: kept for callers that label layers.
            options: compile options.
        """
        super().__init__(name=name)
        stride = kernel_size if stride is None else stride
        kept = (subm, indice_key, record_voxel_count, options)
        self._set_kernel(ndim, kernel_size, stride, padding, dilation, algo, 128, *kept)
        if record_voxel_count and not subm:
            self.register_buffer(VOXEL_COUNT, torch.zeros(1, dtype=torch.int32))
        self.geometry = Geometry.of(self.kernel_size, self.stride, self.padding, self.dilation, subm=subm)

    def extra_repr(self) -> str:
        """Arguments, as spconv writes them."""
        shown = ("kernel_size", "stride", "padding", "dilation", "algo")
        return ", ".join(f"{name}={getattr(self, name)}" for name in shown)

    def pool(self, features: Tensor, kernel_map: KernelMap) -> Tensor:
        """Return features of the output voxels."""
        raise NotImplementedError

    def forward(self, input: SparseConvTensor) -> SparseConvTensor:
        """Pool; the result has this layer's map under its key."""
        kernel_map = self.kernel_map(input)
        features = self.pool(input.features, kernel_map)
        maps = store_map(input.indice_dict, self.indice_key, kernel_map)
        if self.record_voxel_count:
            self._record_voxels(kernel_map.num_outputs)
        return input.with_sites(features, kernel_map.outputs, maps)


class SparseMaxPool(_SparsePool):
    """The largest feature among the active voxels under the kernel, and `at_least`, by default 0 as in spconv.

        Out[OutIdx[g,q],c] max= In[InIdx[g,q],c]

    Inactive voxels do not take part: with `at_least=None` the largest of negative features is negative. spconv
    gives 0 there, full window or not. Features that tie share the gradient; spconv gives each of them all of it.

    Attributes:
        at_least: what a smaller result becomes; `None`: it stays.
    """

    EXPRESSION = SPARSE_MAX_POOL
    # What spconv's layers do, which `swap` builds by the constructor of all pools.
    at_least: float | None = 0.0

    def __init__(self, *args: Any, at_least: float | None = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.at_least = at_least

    def extra_repr(self) -> str:
        """Arguments, as spconv writes them, and `at_least` where it is not 0."""
        shown = super().extra_repr()
        return shown if self.at_least == 0 else f"{shown}, at_least={self.at_least}"

    def pool(self, features: Tensor, kernel_map: KernelMap) -> Tensor:
        """Return the maximum."""
        found = sparse_max_pool(features, kernel_map, options=self.options)
        return found if self.at_least is None else found.clamp(min=self.at_least)


class SparseAvgPool(_SparsePool):
    """The mean feature of the active voxels under the kernel; inactive voxels do not count.

    Out[OutIdx[g,q],c] += Inv[OutIdx[g,q]] * In[InIdx[g,q],c]
    """

    EXPRESSION = SPARSE_AVG_POOL

    def pool(self, features: Tensor, kernel_map: KernelMap) -> Tensor:
        """Return the mean."""
        return sparse_avg_pool(features, kernel_map, options=self.options)


class _SizedPool(_SparsePool, OfDimension):
    """The constructor of pools of a fixed dimension; the stride is the kernel size unless given."""

    def __init__(
        self,
        kernel_size: IntOrInts,
        stride: IntOrInts | None = None,
        padding: IntOrInts = 0,
        dilation: IntOrInts = 1,
        indice_key: str | None = None,
        algo: object = None,
        record_voxel_count: bool = False,
        name: str | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(self.NDIM, **arguments_of(locals()))


class SparseMaxPool1d(_SizedPool, SparseMaxPool, ndim=1):
    """The largest feature of active voxels in 1 dimension; see `SparseMaxPool`."""


class SparseMaxPool2d(_SizedPool, SparseMaxPool, ndim=2):
    """The largest feature of active voxels in 2 dimensions; see `SparseMaxPool`."""


class SparseMaxPool3d(_SizedPool, SparseMaxPool, ndim=3):
    """The largest feature of active voxels in 3 dimensions; see `SparseMaxPool`."""


class SparseMaxPool4d(_SizedPool, SparseMaxPool, ndim=4):
    """The largest feature of active voxels in 4 dimensions; see `SparseMaxPool`."""


class SparseAvgPool1d(_SizedPool, SparseAvgPool, ndim=1):
    """The mean feature of active voxels in 1 dimension; see `SparseAvgPool`."""


class SparseAvgPool2d(_SizedPool, SparseAvgPool, ndim=2):
    """The mean feature of active voxels in 2 dimensions; see `SparseAvgPool`."""


class SparseAvgPool3d(_SizedPool, SparseAvgPool, ndim=3):
    """The mean feature of active voxels in 3 dimensions; see `SparseAvgPool`."""


class SparseAvgPool4d(_SizedPool, SparseAvgPool, ndim=4):
    """The mean feature of active voxels in 4 dimensions; see `SparseAvgPool`."""


class _SparseGlobalPool(StatementModule):
    """Base of pools over whole clouds."""

    __call__: Callable[..., Tensor]

    def __init__(self, name: str | None = None, *, options: Options = DEFAULT) -> None:
        super().__init__(name=name)
        self.options = require_options(options)


class SparseGlobalMaxPool(_SparseGlobalPool):
    """The largest feature of each cloud, (batch, C); 0 for a cloud without voxels.

    Out[Batch[p],c] max= In[p,c]
    """

    EXPRESSION = SPARSE_GLOBAL_MAX_POOL

    def forward(self, input: SparseConvTensor) -> Tensor:
        """Pool each cloud."""
        return sparse_global_max_pool(input.features, input.coordinates(), options=self.options)


class SparseGlobalAvgPool(_SparseGlobalPool):
    """The mean feature of each cloud, (batch, C); 0 for a cloud without voxels.

    Out[Batch[p],c] += Inv[Batch[p]] * In[p,c]
    """

    EXPRESSION = SPARSE_GLOBAL_AVG_POOL

    def forward(self, input: SparseConvTensor) -> Tensor:
        """Pool each cloud."""
        return sparse_global_avg_pool(input.features, input.coordinates(), options=self.options)

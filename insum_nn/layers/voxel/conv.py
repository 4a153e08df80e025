"""Convolutions over sparse grids in 1 to 4 dimensions: submanifold, strided, inverse and transposed.

The public classes at the end differ only in which constructor arguments they take.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from insum_nn.layers.extents import IntOrInts, OfDimension, arguments_of
from insum_nn.layers.voxel.base import VOXEL_COUNT, StatementModule
from insum_nn.layers.voxel.conv_base import SparseConvolutionBase, activation_name
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor
from insum_nn.ops.sparse_conv import sparse_conv_expression
from insum_nn.structure.conv_weights import import_weight

__all__ = [
    "SparseConv1d",
    "SparseConv2d",
    "SparseConv3d",
    "SparseConv4d",
    "SparseConvTranspose1d",
    "SparseConvTranspose2d",
    "SparseConvTranspose3d",
    "SparseConvTranspose4d",
    "SparseConvolution",
    "SparseInverseConv1d",
    "SparseInverseConv2d",
    "SparseInverseConv3d",
    "SparseInverseConv4d",
    "SubMConv1d",
    "SubMConv2d",
    "SubMConv3d",
    "SubMConv4d",
]

# The calls of a layer whose statement is over a table that run the statement over pairs.
_BY_PAIRS = "in graphs that torch records, under transforms, and for tables of more than 2^28 entries"


class SparseConvolution(SparseConvolutionBase, StatementModule):
    """A convolution over the active voxels of a `SparseConvTensor`; base of all kinds.

        Out[OutIdx[g,q],d] += In[InIdx[g,q],c] * W[Off[g],c,d]     on a CPU
        Out[Order[i],d] += In[Near[k,i],c] * W[d,k,c]              on a GPU

    Constructor, weights (O, k_1, .., k_d, I / groups) and results are those of `spconv.pytorch`'s layers, which
    correlate as torch's do. In addition: groups of channels, even submanifold kernels, kernels and grids of any size,
    bfloat16 and float64, second derivatives, output voxels always in lexicographic order, and no error where all
    output voxels vanish.

    States are exchanged with spconv's layers as they are, both ways, with or without torch's metadata. For this the
    weight has spconv's memory order, which for a kernel of one cell is not what its shape says: see `weight_layout` and
    `dense_weight`.

    Source: Won, Ahrens, Amarasinghe, Emer, Insum (ASPLOS 2026), section 5.

    Attributes:
        weight: (O, k_1, .., k_d, I / groups), in the order of `weight_layout`.
        bias: (O,) or `None`.
        geometry: how the kernel moves.
        options: compile options.
    """

    __call__: Callable[..., SparseConvTensor]

    def _make_parameters(
        self, bias: bool, name: str | None, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        StatementModule.__init__(self, name=name)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(self.weight_shape, **factory))
        if bias:
            self.bias: nn.Parameter | None = nn.Parameter(torch.empty(self.out_channels, **factory))
        else:
            self.register_parameter("bias", None)
        if self.record_voxel_count and not self.subm and not self.inverse:
            self.register_buffer(VOXEL_COUNT, torch.zeros(1, dtype=torch.int32, device=device))
            self.register_load_state_dict_pre_hook(_add_missing_count)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias uniformly within one over the root of the fan-in, as torch's convolutions do."""
        super().reset_parameters()
        fan_in = self.in_channels // self.groups * math.prod(self.kernel_size)
        bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
        with torch.no_grad():
            self.weight.uniform_(-bound, bound)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound)

    @property
    def dense_weight(self) -> Tensor:
        """`weight` as its shape says, (O, k_1, .., k_d, I / groups); differentiable, a view where it can be."""
        layout = self.weight_layout
        return self.weight if layout == "spconv" else import_weight(self.weight, layout, self.kernel_size)

    def _statements(self) -> tuple[str, ...]:
        return (
            sparse_conv_expression(
                groups=self.groups, pointwise=self.conv1x1, device=self.weight.device, options=self.options
            ),
        )

    def _elsewhere(self) -> dict[str, tuple[str, ...]]:
        pairs = sparse_conv_expression(groups=self.groups, pointwise=self.conv1x1)
        return {} if self._statements() == (pairs,) else {_BY_PAIRS: (pairs,)}

    def extra_repr(self) -> str:
        """Arguments, as spconv writes them."""
        parts = [f"{self.in_channels}, {self.out_channels}"]
        shown = ("kernel_size", "stride", "padding", "dilation", "output_padding")
        parts += [f"{name}={getattr(self, name)}" for name in shown]
        parts += [f"groups={self.groups}"] if self.groups != 1 else []
        parts += ["bias=False"] if self.bias is None else []
        parts += [f"algo={self.algo}"]
        parts += [f"act={self.act_type}"] if activation_name(self.act_type) != "None_" else []
        parts += [f"anchor={self.own_anchor}"] if self.own_anchor is not None else []
        return ", ".join(parts)

    def forward(self, input: SparseConvTensor, add_input: SparseConvTensor | None = None) -> SparseConvTensor:
        """Convolve.

        Args:
            input: (n, I) features.
            add_input: a tensor over the output's voxels, added to the result. With an activation, which spconv allows
                in inference only, `act(act(convolution) + add_input)` as there.

        Returns:
            (m, O) features over the output's voxels, with this layer's map under its key.
        """
        activation: dict[str, Any] = {"act_type": self.act_type, "act_alpha": self.act_alpha}
        return self._conv_forward(self.training, input, self.weight, self.bias, add_input, **activation)


def _add_missing_count(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Weights saved without the voxel count load all the same."""
    state_dict.setdefault(prefix + VOXEL_COUNT, torch.zeros(1, dtype=torch.int32))


class _Sized(SparseConvolution, OfDimension):
    """The constructor of `SparseConv` and `SparseConvTranspose`."""

    TRANSPOSED: ClassVar[bool] = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrInts,
        stride: IntOrInts = 1,
        padding: IntOrInts = 0,
        dilation: IntOrInts = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: str | None = None,
        algo: object = None,
        fp32_accum: bool | None = None,
        record_voxel_count: bool = False,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(self.NDIM, **arguments_of(locals()), transposed=self.TRANSPOSED)


class _Transposed(_Sized):
    TRANSPOSED = True


class _SubM(SparseConvolution, OfDimension):
    """The constructor of `SubMConv`."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrInts,
        stride: IntOrInts = 1,
        padding: IntOrInts = 0,
        dilation: IntOrInts = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: str | None = None,
        algo: object = None,
        fp32_accum: bool | None = None,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(self.NDIM, **arguments_of(locals()), subm=True)


class _Inverse(SparseConvolution, OfDimension):
    """The constructor of `SparseInverseConv`."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrInts,
        indice_key: str,
        bias: bool = True,
        algo: object = None,
        fp32_accum: bool | None = None,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(self.NDIM, **arguments_of(locals()), inverse=True)


class SparseConv1d(_Sized, ndim=1):
    """Sparse convolution in 1 dimension; writes every voxel that the kernel reaches. See `SparseConvolution`."""


class SparseConv2d(_Sized, ndim=2):
    """Sparse convolution in 2 dimensions; writes every voxel that the kernel reaches. See `SparseConvolution`."""


class SparseConv3d(_Sized, ndim=3):
    """Sparse convolution in 3 dimensions; writes every voxel that the kernel reaches. See `SparseConvolution`."""


class SparseConv4d(_Sized, ndim=4):
    """Sparse convolution in 4 dimensions; writes every voxel that the kernel reaches. See `SparseConvolution`."""


class SparseConvTranspose1d(_Transposed, ndim=1):
    """Transposed sparse convolution in 1 dimension, as `nn.ConvTranspose`. See `SparseConvolution`."""


class SparseConvTranspose2d(_Transposed, ndim=2):
    """Transposed sparse convolution in 2 dimensions, as `nn.ConvTranspose`. See `SparseConvolution`."""


class SparseConvTranspose3d(_Transposed, ndim=3):
    """Transposed sparse convolution in 3 dimensions, as `nn.ConvTranspose`. See `SparseConvolution`."""


class SparseConvTranspose4d(_Transposed, ndim=4):
    """Transposed sparse convolution in 4 dimensions, as `nn.ConvTranspose`. See `SparseConvolution`."""


class SparseInverseConv1d(_Inverse, ndim=1):
    """Convolution in 1 dimension back to the voxels before the layer of the same `indice_key`."""


class SparseInverseConv2d(_Inverse, ndim=2):
    """Convolution in 2 dimensions back to the voxels before the layer of the same `indice_key`."""


class SparseInverseConv3d(_Inverse, ndim=3):
    """Convolution in 3 dimensions back to the voxels before the layer of the same `indice_key`."""


class SparseInverseConv4d(_Inverse, ndim=4):
    """Convolution in 4 dimensions back to the voxels before the layer of the same `indice_key`."""


class SubMConv1d(_SubM, ndim=1):
    """Submanifold convolution in 1 dimension: writes the voxels that it reads. See `SparseConvolution`."""


class SubMConv2d(_SubM, ndim=2):
    """Submanifold convolution in 2 dimensions: writes the voxels that it reads. See `SparseConvolution`."""


class SubMConv3d(_SubM, ndim=3):
    """Submanifold convolution in 3 dimensions: writes the voxels that it reads. See `SparseConvolution`."""


class SubMConv4d(_SubM, ndim=4):
    """Submanifold convolution in 4 dimensions: writes the voxels that it reads. See `SparseConvolution`."""

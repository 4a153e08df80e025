"""A sparse convolution without its parameters: arguments, geometry, kernel maps, and the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumDtypeError, InsumFormatError, InsumNameError, InsumShapeError
from insum_nn.layers.extents import IntOrInts, channels, expand_nd
from insum_nn.layers.voxel.base import MapLayer, store_map, stored_map
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor
from insum_nn.ops.sparse_conv import sparse_conv
from insum_nn.structure.conv_weights import WeightLayout, import_weight
from insum_nn.structure.kernel_map import Geometry, KernelMap

__all__ = ["Activation", "SparseConvolutionBase", "activation_name", "apply_activation"]


class Activation(Enum):
    """What may be applied to a convolution's result; cumm's enumeration of these names is taken as well."""

    None_ = 0
    ReLU = 1
    Sigmoid = 2
    LeakyReLU = 3


def apply_activation(x: Tensor, act_type: object, act_alpha: float = 0.0) -> Tensor:
    """Return one of `Activation`, or of cumm's values of the same names, applied to features.

    Raises:
        InsumNameError: there is no such activation.

    >>> apply_activation(torch.tensor([-2.0, 3.0]), Activation.LeakyReLU, 0.5).tolist()
    [-1.0, 3.0]
    """
    # The usual case, in which calls are short.
    if act_type is Activation.None_:
        return x
    return _APPLIED[activation_name(act_type)](x, act_alpha)


_APPLIED: dict[str, Callable[[Tensor, float], Tensor]] = {
    "None_": lambda x, _: x,
    "ReLU": lambda x, _: F.relu(x),
    "Sigmoid": lambda x, _: torch.sigmoid(x),
    "LeakyReLU": F.leaky_relu,
}


def activation_name(act_type: object) -> str:
    """Return the name of an activation, `"None_"` for none."""
    name = "None_" if act_type is None else str(getattr(act_type, "name", act_type)).rpartition(".")[2]
    if name not in Activation.__members__:
        raise InsumNameError(
            f"there is no activation {act_type!r}",
            details=[f"expected one of {', '.join(Activation.__members__)}"],
            fix="pass a member of insum_nn.layers.spconv.core.Activation, or put the activation after the layer.",
            argument="act_type",
            got=act_type,
        )
    return name


class SparseConvolutionBase(MapLayer):
    """A sparse convolution without parameters, which each call is given.

    For modules that make their weight themselves (shared, low-rank, quantised): derive from it and from a module, and
    call `_conv_forward`.

    Attributes:
        geometry: how the kernel moves.
        options: compile options.
        conv1x1: every output voxel is the input voxel of the same row, and no map is needed.
        weight_shape: (O, k_1, .., k_d, I / groups).
    """

    def __init__(
        self,
        ndim: int,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrInts = 3,
        stride: IntOrInts = 1,
        padding: IntOrInts = 0,
        dilation: IntOrInts = 1,
        groups: int = 1,
        bias: bool = True,
        subm: bool = False,
        output_padding: IntOrInts = 0,
        transposed: bool = False,
        inverse: bool = False,
        indice_key: str | None = None,
        algo: object = None,
        fp32_accum: bool | None = None,
        record_voxel_count: bool = False,
        act_type: object = Activation.None_,
        act_alpha: float = 0,
        act_beta: float = 0,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        anchor: IntOrInts | None = None,
        options: Options = DEFAULT,
    ) -> None:
        """Store the arguments, and make the parameters of a layer that holds them.

        Args:
            ndim: spatial dimensions.
            in_channels: channels read.
            out_channels: channels written.
            kernel_size: kernel cells along each axis.
            stride: step of the kernel. Not read by submanifold layers, which keep their voxels.
            padding: cells added around the grid. Not read by submanifold layers, whose kernel is centred.
            dilation: step between kernel cells.
            groups: groups of channels.
            bias: add a learned constant.
            subm: outputs are the inputs' voxels.
            output_padding: added to the output shape of a transposed convolution.
            transposed: the transposed convolution.
            inverse: back to the voxels of the layer that stored `indice_key`.
            indice_key: name under which the map is stored in, or taken from, the tensor.
            algo: kept and printed as in spconv; the compiler chooses what runs.
            fp32_accum: `False` sums fp16 and bf16 in their own precision; else in float32.
            record_voxel_count: keep the largest number of output voxels in a buffer.
            act_type: applied to the result, one of `Activation`, or spconv's kernel library's value of that name.
            act_alpha: the slope of `Activation.LeakyReLU`.
            act_beta: not read: no activation has it.
            large_kernel_fast_algo: allows kernels of more cells in the default of `algo`.
            name: kept for callers that label layers; not read by modules that make their weight themselves, as are
                `device` and `dtype`.
            device: of the parameters.
            dtype: of the parameters.
            anchor: kernel cell that lies on the voxel in a submanifold layer; default `kernel_size // 2`.
            options: compile options.
        """
        owner = type(self).__name__
        moves, kept = (ndim, kernel_size, stride, padding, dilation), (subm, indice_key, record_voxel_count, options)
        self._set_kernel(*moves, algo, 128 if large_kernel_fast_algo else 32, *kept)
        self.output_padding = expand_nd(owner, "output_padding", self.ndim, output_padding, 0)
        self.in_channels, self.out_channels, self.groups = channels(owner, in_channels, out_channels, groups)
        self.transposed, self.inverse, self.fp32_accum = transposed, inverse, fp32_accum
        activation_name(act_type)
        self.act_type, self.act_alpha, self.act_beta = act_type, act_alpha, act_beta
        if fp32_accum is False:
            self.options = replace(options, accumulate="storage")
        self.geometry = self._make_geometry(owner, anchor)
        self.conv1x1 = self.geometry.is_pointwise and not inverse
        self.weight_shape = [self.out_channels, *self.kernel_size, self.in_channels // self.groups]
        self._make_parameters(bias, name, device, dtype)

    def _make_parameters(
        self, bias: bool, name: str | None, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        """Make the parameters of a layer that holds them; this class holds none."""

    def _make_geometry(self, owner: str, anchor: IntOrInts | None) -> Geometry:
        cells = None
        if self.subm and anchor is not None:
            cells = expand_nd(owner, "anchor", self.ndim, anchor, 0)
            if any(cell >= k for cell, k in zip(cells, self.kernel_size, strict=True)):
                raise InsumShapeError(
                    f"{owner}: 'anchor' {cells} is no cell of a kernel {self.kernel_size}",
                    fix="pass the place of a kernel cell along each axis.",
                    argument="anchor",
                    got=cells,
                )
        moves = (self.kernel_size, self.stride, self.padding, self.dilation, self.output_padding)
        return Geometry.of(*moves, subm=self.subm, transposed=self.transposed, anchor=cells)

    @property
    def weight_layout(self) -> WeightLayout:
        """In what order `weight` stores its numbers; see `insum_nn.structure.conv_weights`.

        `"spconv_pointwise"` for a kernel of one cell in a submanifold layer or one of stride 1: `spconv` multiplies by
        the numbers of (O, 1, .., 1, I) read as (I, O). Else `"spconv"`: what the shape says.
        """
        if self.geometry.volume != 1 or self.groups != 1:
            return "spconv"
        return "spconv_pointwise" if self.subm or all(step == 1 for step in self.stride) else "spconv"

    @property
    def own_anchor(self) -> list[int] | None:
        """The kernel cell that lies on the voxel in a submanifold layer, where that is not `kernel_size // 2`."""
        cells = [pad // step for pad, step in zip(self.geometry.padding, self.dilation, strict=True)]
        return cells if self.subm and cells != [k // 2 for k in self.kernel_size] else None

    def is_inverseable(self) -> bool:
        """Return whether a `SparseInverseConv` can go back from this layer's output."""
        return self.indice_key is not None and not self.subm

    def kernel_map(self, input: SparseConvTensor) -> KernelMap:
        """Return the map of a tensor, as `MapLayer.kernel_map`; an inverse layer's is a stored one's inverse.

        Raises:
            InsumNameError: an inverse layer's key is not stored.
        """
        if not self.inverse:
            return super().kernel_map(input)
        owner = type(self).__name__
        self._check_grid(input)
        known = stored_map(input, self.indice_key)
        if known is None:
            raise InsumNameError(
                f"{owner}: no map is stored under indice_key {self.indice_key!r}",
                details=[f"stored: {', '.join(map(repr, input.indice_dict)) or 'none'}"],
                fix="give the SparseConv or pooling layer to be inverted this indice_key.",
                indice_key=self.indice_key,
            )
        self._check_map(known, input, inverse=True)
        return known.inverse

    def _conv_forward(
        self,
        training: bool,
        input: SparseConvTensor,
        weight: Tensor,
        bias: Tensor | None,
        add_input: SparseConvTensor | None = None,
        channel_scale: Tensor | None = None,
        output_scale: float | None = None,
        name: str | None = None,
        sparse_unique_name: str = "",
        act_type: object = Activation.None_,
        act_alpha: float = 0,
        act_beta: float = 0,
    ) -> SparseConvTensor:
        """Convolve with a weight in the order of `weight_layout`; the arguments of spconv's method of this name.

        Args:
            training: not read: a call is differentiable in either mode.
            input: (n, I) features.
            weight: (O, k_1, .., k_d, I / groups).
            bias: (O,).
            add_input: a tensor over the output's voxels, added to the activated result; the layer's own activation,
                `self.act_type`, is then applied to the sum.
            channel_scale: of int8 layers, which are not supported.
            output_scale: see `channel_scale`.
            name: not read; nor is `sparse_unique_name`.
            sparse_unique_name: not read.
            act_type: applied to the result of the convolution.
            act_alpha: the slope of `Activation.LeakyReLU`.
            act_beta: not read: no activation has it.

        Returns:
            (m, O) features over the output's voxels, with this layer's map under its key.

        Raises:
            InsumDtypeError: the input is a plain tensor.
            InsumFormatError: scales of an int8 layer are given.
        """
        if channel_scale is not None or output_scale is not None:
            raise InsumFormatError(
                f"{type(self).__name__}: int8 convolutions are not supported",
                fix="convert the layer back to floating-point numbers.",
            )
        if not isinstance(input, SparseConvTensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            # Such as the tensor of spconv itself, in a model of which only the layers were replaced.
            kind: type = type(input)
            found = f"{kind.__module__}.{kind.__qualname__}"
            if isinstance(input, Tensor):
                found = f"a tensor of shape {tuple(input.shape)}"
            raise InsumDtypeError(
                f"{type(self).__name__} takes a SparseConvTensor of insum_nn, got {found}",
                fix="pass SparseConvTensor(features, indices, spatial_shape, batch_size) of insum_nn.layers.spconv.",
                expected=SparseConvTensor,
                got=type(input),
            )
        # A trace cannot hold maps, and a kernel of one cell needs none.
        stores = self.indice_key is not None and not self.subm and not torch.jit.is_tracing()
        kernel_map = None if self.conv1x1 and not stores else self.kernel_map(input)
        used = None if self.conv1x1 else kernel_map
        if kernel_map is None:
            input.check_rows()
        layout = self.weight_layout
        dense = weight if layout == "spconv" else import_weight(weight, layout, self.kernel_size)
        if used is None and torch.jit.is_tracing():
            features = _traced_pointwise(input.features, dense, bias, self.groups)
        else:
            features = sparse_conv(input._features, dense, used, bias, groups=self.groups, options=self.options)
        if act_type is not Activation.None_:
            features = apply_activation(features, act_type, act_alpha)
        if kernel_map is None or self.subm:
            output = input.replace_feature(features)
        else:
            output = input.with_sites(features, kernel_map.outputs, input.indice_dict)
        if kernel_map is not None and not self.inverse:
            output.indice_dict = store_map(input.indice_dict, self.indice_key, kernel_map)
        if self.record_voxel_count:
            self._record_voxels(features.shape[0])
        if add_input is None:
            return output
        # The layer's own activation, whatever the caller passed for the convolution, as in spconv.
        total = output + add_input
        return total.replace_feature(apply_activation(total.features, self.act_type, self.act_alpha))


def _traced_pointwise(features: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """Return a kernel of one cell in operators that `torch.jit.trace` records and its files can hold."""
    cells = weight.reshape(groups, weight.shape[0] // groups, weight.shape[-1])
    parts = [part @ cell.T for part, cell in zip(features.chunk(groups, 1), cells.unbind(0), strict=True)]
    total = torch.cat(parts, dim=1)
    return total if bias is None else total + bias

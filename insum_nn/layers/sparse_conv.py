"""Convolutions over sparse grids in 1 to 4 dimensions: submanifold, strided, inverse and transposed."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumFormatError, InsumNameError, InsumShapeError
from insum_nn.layers.sparse_maps import IntOrInts, check_ndim, expand_nd, map_differences, map_of, store_map
from insum_nn.layers.sparse_sequential import SparseModule
from insum_nn.layers.sparse_tensor import SparseConvTensor
from insum_nn.ops.sparse_conv import map_program, sparse_conv, sparse_conv_call, sparse_conv_expression
from insum_nn.structure.conv_weights import WeightLayout, export_weight, import_weight
from insum_nn.structure.kernel_map import Geometry, KernelMap

__all__ = ["SparseConvolution", "load_spconv_state_dict", "spconv_state_dict"]

# What a state says of a layer's weight. In version 2 it was always what its shape says; in version 1, which is torch's
# default and so spconv's, and from version 3 on it is in spconv's memory order (`SparseConvolution.weight_layout`).
_VERSION = 3
_VERSION_BY_SHAPE = 2
_VOXEL_COUNT = "max_num_voxels_during_training"


class SparseConvolution(SparseModule):
    """A convolution over the active voxels of a `SparseConvTensor`; base of all kinds.

        Out[OutIdx[g,q],d] += In[InIdx[g,q],c] * W[Off[g],c,d]     on a CPU
        Out[Order[i],d] += In[Near[k,i],c] * W[d,k,c]              on a GPU

    Constructor, weights (O, k_1, .., k_d, I / groups) and results are those of `spconv.pytorch`'s layers, which
    correlate as torch's do. Besides: groups of channels, even submanifold kernels, kernels and grids of any size,
    bfloat16 and float64, second derivatives, output voxels always in lexicographic order, and no error where all
    output voxels vanish.

    States are exchanged with spconv's layers as they are, both ways, with or without torch's metadata. For this the
    weight has spconv's memory order, which for a kernel of one cell is not what its shape says: see `weight_layout` and
    `dense_weight`. States that say they are of version 2 of this class, which had another order there, are converted.

    Source: Won, Ahrens, Amarasinghe, Emer, Insum (ASPLOS 2026), section 5.

    Attributes:
        weight: (O, k_1, .., k_d, I / groups), in the order of `weight_layout`.
        bias: (O,) or `None`.
        geometry: how the kernel moves.
        options: compile options.
    """

    _version: int = _VERSION  # type: ignore[assignment]

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
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        anchor: IntOrInts | None = None,
        options: Options = DEFAULT,
    ) -> None:
        """Make the parameters.

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
            algo: not read: the compiler chooses. So is `large_kernel_fast_algo`.
            fp32_accum: `False` sums half types in their own precision; else in float32.
            record_voxel_count: keep the largest number of output voxels in a buffer.
            large_kernel_fast_algo: not read.
            name: kept for callers that label layers.
            device: of the parameters.
            dtype: of the parameters.
            anchor: kernel cell that lies on the voxel in a submanifold layer; default `kernel_size // 2`.
            options: compile options.
        """
        super().__init__(name=name)
        owner = type(self).__name__
        self.ndim = ndim
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = expand_nd(owner, "kernel_size", ndim, kernel_size, 1)
        self.stride = expand_nd(owner, "stride", ndim, stride, 1)
        self.padding = expand_nd(owner, "padding", ndim, padding, 0)
        self.dilation = expand_nd(owner, "dilation", ndim, dilation, 1)
        self.output_padding = expand_nd(owner, "output_padding", ndim, output_padding, 0)
        self.groups = groups
        self.subm = subm
        self.transposed = transposed
        self.inverse = inverse
        self.indice_key = indice_key
        self.record_voxel_count = record_voxel_count
        self.fp32_accum = fp32_accum
        self.options = replace(options, accumulate="storage") if fp32_accum is False else options
        _check_channels(owner, in_channels, out_channels, groups)
        self.geometry = self._make_geometry(owner, anchor)
        self.conv1x1 = self.geometry.is_pointwise and not inverse
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(out_channels, *self.kernel_size, in_channels // groups, **factory))
        self._weight_version = _VERSION
        if bias:
            self.bias: nn.Parameter | None = nn.Parameter(torch.empty(out_channels, **factory))
        else:
            self.register_parameter("bias", None)
        if record_voxel_count and not subm and not inverse:
            self.register_buffer(_VOXEL_COUNT, torch.zeros(1, dtype=torch.int32, device=device))
            self.register_load_state_dict_pre_hook(_add_missing_count)
        self.reset_parameters()

    def _make_geometry(self, owner: str, anchor: IntOrInts | None) -> Geometry:
        kernel = tuple(self.kernel_size)
        ones, zeros = (1,) * self.ndim, (0,) * self.ndim
        if self.subm:
            cells = [k // 2 for k in kernel] if anchor is None else expand_nd(owner, "anchor", self.ndim, anchor, 0)
            if any(cell >= k for cell, k in zip(cells, kernel, strict=True)):
                raise InsumShapeError(
                    f"{owner}: 'anchor' {cells} is no cell of a kernel {list(kernel)}",
                    fix="pass the place of a kernel cell along each axis.",
                    argument="anchor",
                    got=cells,
                )
            padding = tuple(cell * step for cell, step in zip(cells, self.dilation, strict=True))
            return Geometry("subm", kernel, ones, padding, tuple(self.dilation), zeros)
        rest = (kernel, tuple(self.stride), tuple(self.padding), tuple(self.dilation))
        return (
            Geometry("transpose", *rest, tuple(self.output_padding))
            if self.transposed
            else Geometry("conv", *rest, zeros)
        )

    def reset_parameters(self) -> None:
        """Draw weight and bias uniformly within one over the root of the fan-in, as torch's convolutions do."""
        fan_in = self.in_channels // self.groups * math.prod(self.kernel_size)
        bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
        with torch.no_grad():
            self.weight.uniform_(-bound, bound)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound)

    @property
    def weight_layout(self) -> WeightLayout:
        """In what order `weight` stores its numbers; see `insum_nn.structure.conv_weights`.

        `"spconv_pointwise"` for a kernel of one cell in a submanifold layer or one of stride 1: `spconv` multiplies by
        the numbers of (O, 1, .., 1, I) read as (I, O). Else `"spconv"`: what the shape says.
        """
        steps = self.subm or all(step == 1 for step in self.stride)
        one_cell = math.prod(self.kernel_size) == 1 and steps and self.groups == 1
        return "spconv_pointwise" if one_cell else "spconv"

    @property
    def dense_weight(self) -> Tensor:
        """`weight` as its shape says, (O, k_1, .., k_d, I / groups); differentiable, a view where it can be."""
        layout = self.weight_layout
        return self.weight if layout == "spconv" else import_weight(self.weight, layout, self.kernel_size)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "weight"
        given = state_dict.get(key)
        if (
            local_metadata.get("version") == _VERSION_BY_SHAPE
            and given is not None
            and given.shape == self.weight.shape
        ):
            # The caller's dictionary is left as it is.
            state_dict = {**state_dict, key: export_weight(given, self.weight_layout)}
        rest = (strict, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A layer that was pickled whole. Version 2 wrote its number into no instance but those that `swap` made.
        by_shape = "_weight_version" not in state and state.get("_version", _VERSION_BY_SHAPE) == _VERSION_BY_SHAPE
        if by_shape and self.weight_layout != "spconv":
            with torch.no_grad():
                self.weight.copy_(export_weight(self.weight, self.weight_layout).clone())
        self.__dict__.pop("_version", None)
        self._weight_version = _VERSION

    @property
    def expression(self) -> str:
        """The statement that the layer runs on its device."""
        return sparse_conv_expression(
            groups=self.groups, pointwise=self.conv1x1, device=self.weight.device, options=self.options
        )

    def extra_repr(self) -> str:
        """Arguments that differ from their defaults, and the statement."""
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        defaults = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}
        parts += [f"{k}={getattr(self, k)}" for k, plain in defaults.items() if set(getattr(self, k)) != {plain}]
        parts += [f"groups={self.groups}"] if self.groups != 1 else []
        parts += ["bias=False"] if self.bias is None else []
        parts += [f"indice_key={self.indice_key!r}"] if self.indice_key is not None else []
        return ", ".join([*parts, repr(self.expression)])

    def is_inverseable(self) -> bool:
        """Whether a `SparseInverseConv` can go back from this layer's output."""
        return self.indice_key is not None and not self.subm

    def get_max_num_voxels(self) -> Tensor | None:
        """The largest number of output voxels seen, with `record_voxel_count`."""
        return getattr(self, _VOXEL_COUNT, None)

    def kernel_map(self, input: SparseConvTensor) -> KernelMap:
        """The map that the layer uses on a tensor: stored under its key, or built now.

        Raises:
            InsumNameError: an inverse layer's key is not stored.
            InsumFormatError: what is stored under the key does not fit, or a voxel stands twice.
            InsumRangeError: a voxel lies outside the grid.
            InsumShapeError: the grid has not the layer's dimensions, or the output's would be empty.
        """
        owner = type(self).__name__
        check_ndim(owner, self.ndim, input)
        if self.inverse:
            return self._inverse_map(owner, input)
        return map_of(owner, self.indice_key, input, self.geometry, again=self.options.validate)

    def _inverse_map(self, owner: str, input: SparseConvTensor) -> KernelMap:
        known = input.find_indice_pair(self.indice_key)
        if known is None:
            raise InsumNameError(
                f"{owner}: no map is stored under indice_key {self.indice_key!r}",
                details=[f"stored: {', '.join(map(repr, input.indice_dict)) or 'none'}"],
                fix="give the SparseConv or pooling layer to be inverted this indice_key.",
                indice_key=self.indice_key,
            )
        wrong = map_differences(known, input, self.geometry, known.outputs)
        # Only the kernel must agree: stride, padding and dilation are the other layer's.
        wrong = [line for line in wrong if not line.startswith(("stride", "padding", "dilation"))]
        if known.geometry.kind == "subm":
            wrong.insert(0, "kind: stored subm, which has nothing to invert")
        if wrong:
            raise InsumFormatError(
                f"{owner}: the map under indice_key '{self.indice_key}' does not lead to this input",
                details=wrong,
                fix="invert layers in reverse order, each with the kernel_size of its partner.",
                indice_key=self.indice_key,
            )
        return known.inverse

    def forward(self, input: SparseConvTensor, add_input: SparseConvTensor | None = None) -> SparseConvTensor:
        """Convolve.

        Args:
            input: (n, I) features.
            add_input: a tensor over the output's voxels, added to the result.

        Returns:
            (m, O) features over the output's voxels, with this layer's map under its key.
        """
        stores = self.indice_key is not None and not self.subm
        kernel_map = None if self.conv1x1 and not stores else self.kernel_map(input)
        used = None if self.conv1x1 else kernel_map
        if kernel_map is None:
            input.check_rows()
        features = sparse_conv(
            input.features, self.dense_weight, used, self.bias, groups=self.groups, options=self.options
        )
        if kernel_map is None or self.subm:
            output = input.replace_feature(features)
        else:
            output = input.with_sites(features, kernel_map.outputs, input.indice_dict)
        if kernel_map is not None and not self.inverse:
            output.indice_dict = store_map(input.indice_dict, self.indice_key, kernel_map)
        self._record(features.shape[0])
        return output if add_input is None else output + add_input

    def _record(self, voxels: int) -> None:
        if self.record_voxel_count and not self.subm and not self.inverse:
            cast(Tensor, getattr(self, _VOXEL_COUNT)).clamp_(min=voxels)

    def explain(self, input: SparseConvTensor | None = None, *, measure: bool = False) -> Any:
        """What becomes of the layer's statement; see `Program.explain`.

        Args:
            input: a tensor to explain the call with; without one, only what the text alone says is shown.
            measure: also time the program.

        Returns:
            The compiler's `Explanation`.
        """
        if input is None:
            return map_program(self.expression, self.options).explain()
        kernel_map = None if self.conv1x1 else self.kernel_map(input)
        expression, named, shape = sparse_conv_call(
            input.features, self.dense_weight, kernel_map, self.bias, groups=self.groups, options=self.options
        )
        return map_program(expression, self.options).explain(tensors=named, out_shape=shape, measure=measure)


def load_spconv_state_dict(model: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True) -> Any:
    """`model.load_state_dict` of weights in spconv's layout, whatever their metadata say.

    Args:
        model: any module with our layers in the places of spconv's.
        state: tensors by name.
        strict: whether keys must agree.

    Returns:
        What `load_state_dict` returns.

    >>> layer = SparseConvolution(1, 3, 2, 1, bias=False)
    >>> load_spconv_state_dict(layer, {"weight": torch.arange(6.0).reshape(2, 1, 3)})
    <All keys matched successfully>
    >>> layer.dense_weight.tolist()
    [[[0.0, 2.0, 4.0]], [[1.0, 3.0, 5.0]]]
    """
    marked: Any = OrderedDict(state)
    marked._metadata = OrderedDict((path, {"version": module._version}) for path, module in model.named_modules())
    return model.load_state_dict(marked, strict=strict)


def spconv_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a whole model for the same model made of spconv's layers, which loads them strictly.

    Weights have spconv's layout in memory already; what this adds to `state_dict()` is that every convolution is one
    that spconv has.

    Args:
        model: any module with our layers in the places of spconv's.

    Returns:
        Detached tensors by name, sharing the parameters' memory.

    Raises:
        InsumFormatError: a layer has groups of channels or an anchor, which spconv's have not.

    >>> layer = SparseConvolution(3, 4, 8, 3, subm=True)
    >>> {name: tuple(value.shape) for name, value in spconv_state_dict(layer).items()}
    {'weight': (8, 3, 3, 3, 4), 'bias': (8,)}
    """
    wrong: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, SparseConvolution):
            own = [k // 2 * step for k, step in zip(module.kernel_size, module.dilation, strict=True)]
            wrong += [f"{path or 'the model'}: groups={module.groups}"] if module.groups != 1 else []
            moved = module.subm and list(module.geometry.padding) != own
            wrong += [f"{path or 'the model'}: an anchor other than kernel_size // 2"] if moved else []
    if wrong:
        raise InsumFormatError(
            "spconv has no layers like some of this model's",
            details=wrong,
            fix="export models whose layers have groups=1 and no anchor.",
        )
    return dict(model.state_dict())


def _check_channels(owner: str, in_channels: int, out_channels: int, groups: int) -> None:
    if groups < 1 or in_channels % groups or out_channels % groups:
        raise InsumShapeError(
            f"{owner}: 'groups' is {groups}, with {in_channels} channels in and {out_channels} out",
            details=["expected a positive number that divides both"],
            fix="choose groups that divide in_channels and out_channels.",
            argument="groups",
            got=groups,
        )


def _add_missing_count(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Weights saved without the voxel count load all the same."""
    state_dict.setdefault(prefix + _VOXEL_COUNT, torch.zeros(1, dtype=torch.int32))

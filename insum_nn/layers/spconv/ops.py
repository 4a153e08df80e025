"""`spconv.pytorch.ops`: kernel maps as tables of pairs, the shapes of outputs, and what is computed over tables.

Tables come in two forms: lists of pairs by offset (2, o, q), and neighbours of each output (o, m); -1 is no entry.
Entries are checked at every call: a caller may pass any table.
Convolutions and pools are differentiable; the functions for gradients are for callers with autograd functions of their
own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumDtypeError
from insum_nn.facts import IndexFacts, NamedFacts
from insum_nn.faults import Faults
from insum_nn.layers.extents import expand_nd
from insum_nn.layers.spconv.core import AlgoHint, ConvAlgo
from insum_nn.layers.spconv.cppcore import get_current_stream
from insum_nn.layers.voxel.conv_base import Activation, apply_activation
from insum_nn.ops.statements import run
from insum_nn.structure.coordinates import Coordinates
from insum_nn.structure.kernel_map import Geometry, KernelMap, build_kernel_map, output_shape

__all__ = [
    "AlgoHint",
    "ConvAlgo",
    "get_conv_output_size",
    "get_current_stream",
    "get_deconv_output_size",
    "get_indice_pairs",
    "get_indice_pairs_implicit_gemm",
    "global_pool_rearrange",
    "implicit_gemm",
    "implicit_gemm_backward",
    "indice_avgpool_implicit_gemm",
    "indice_avgpool_implicit_gemm_backward",
    "indice_conv",
    "indice_conv_backward",
    "indice_maxpool",
    "indice_maxpool_backward",
    "indice_maxpool_implicit_gemm",
    "indice_maxpool_implicit_gemm_backward",
    "maximum_value_int_",
]

_CONV = "Out[OutIdx[o,q],d] += In[InIdx[o,q],c] * W[o,c,d]"
_CONV_BY_NEIGHBOURS = "Out[i,d] += In[Near[k,i],c] * W[d,k,c]"
_MAX = "Out[OutIdx[o,q],c] max= In[InIdx[o,q],c]"
_MAX_BY_NEIGHBOURS = "Out[i,c] max= In[Near[k,i],c]"
_SUM_BY_NEIGHBOURS = "Out[i,c] += In[Near[k,i],c]"
_FACTS = NamedFacts(dict.fromkeys(("InIdx", "OutIdx", "Near"), IndexFacts(masked=True)))

# Rows of a tile whose masks are joined; spconv's is its kernel's.
_MASK_WIDTH = 32

_MASK_BITS = 32


def get_conv_output_size(
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Return the spatial shape of a convolution's output; 1 along an axis where `kernel_size` is -1, the whole axis.

    Raises:
        InsumShapeError: the kernel is larger than the padded input.

    >>> get_conv_output_size([19, 18], [3, 2], [2, 1], [1, 0], [1, 1])
    [10, 17]
    """
    kernel = [1 if k == -1 else k for k in kernel_size]
    found = output_shape(input_size, Geometry.of(kernel, stride, padding, dilation))
    return [1 if k == -1 else extent for k, extent in zip(kernel_size, found, strict=True)]


def get_deconv_output_size(
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
) -> list[int]:
    """Return the spatial shape of a transposed convolution's output, as torch's, which the dilation enlarges.

    Raises:
        InsumShapeError: it would be empty.

    >>> get_deconv_output_size([10], [3], [2], [1], [1], [1])
    [20]
    """
    expand_nd("get_deconv_output_size", "kernel_size", len(kernel_size), kernel_size, 1)
    moves = (kernel_size, stride, padding, dilation, output_padding)
    return list(output_shape(input_size, Geometry.of(*moves, transposed=True)))


def get_indice_pairs(
    indices: Tensor,
    batch_size: int,
    spatial_shape: Sequence[int],
    algo: object,
    ksize: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    out_padding: Sequence[int],
    subm: bool = False,
    transpose: bool = False,
    num_out_act_bound: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find every pair of input and output voxels that a kernel joins.

    Args:
        indices: (n, 1 + d) int32 or int64.
        batch_size: clouds in the batch.
        spatial_shape: d extents.
        algo: not read.
        ksize: kernel cells along each axis.
        stride: steps; not read if `subm`.
        padding: cells added; not read if `subm`, whose kernel is centred.
        dilation: steps between kernel cells.
        out_padding: added to a transposed convolution's output shape.
        subm: outputs are the inputs.
        transpose: the transposed convolution.
        num_out_act_bound: not read: the number of outputs has no bound.

    Returns:
        The output voxels (m, 1 + d); rows (2, o, n) int32 of inputs and outputs by offset, from the left, then -1; and
        the pairs of each offset, (o,) int32. Of a submanifold kernel of odd extents these are counted, as in spconv,
        for the first half of the offsets: the other half mirrors them, and the middle pairs each voxel with itself.

    Raises:
        InsumRangeError: a voxel lies outside the grid.
        InsumFormatError: a voxel occurs twice.
    """
    moves = Geometry.of(ksize, stride, padding, dilation, out_padding, subm=subm, transposed=transpose)
    found = build_kernel_map(Coordinates(indices, tuple(spatial_shape), batch_size), moves)
    return found.out_indices, found.indice_pairs, _pair_num(found)


def get_indice_pairs_implicit_gemm(
    indices: Tensor,
    batch_size: int,
    spatial_shape: Sequence[int],
    algo: object,
    ksize: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    out_padding: Sequence[int],
    subm: bool = False,
    transpose: bool = False,
    is_train: bool = True,
    alloc: object = None,
    timer: object = None,
    num_out_act_bound: int = -1,
    direct_table: bool = True,
    do_sort: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Any]]:
    """Find the neighbours of each voxel under a kernel, as tables.

    Args:
        indices: (n, 1 + d) int32 or int64.
        batch_size: clouds in the batch.
        spatial_shape: d extents.
        algo: `ConvAlgo.MaskSplitImplicitGemm` gives masks in two halves of the offsets; else not read.
        ksize: kernel cells along each axis.
        stride: steps; not read if `subm`.
        padding: cells added; not read if `subm`, whose kernel is centred.
        dilation: steps between kernel cells.
        out_padding: added to a transposed convolution's output shape.
        subm: outputs are the inputs.
        transpose: the transposed convolution.
        is_train: also make the tables of inputs.
        alloc: not read; nor are `timer`, `num_out_act_bound` and `direct_table`.
        timer: not read.
        num_out_act_bound: not read: the number of outputs has no bound.
        direct_table: not read.
        do_sort: sort the masks; else they stay in the order of the voxels.

    Returns:
        The output voxels (m, 1 + d); the pairs of each offset, as `get_indice_pairs` counts them; `pair_fwd` (o, m)
        int32, the input of each output, or -1; `pair_bwd` (o, n) int32, the output of each input, empty without
        `is_train`; then lists of one or two tensors: of the sorted masks of outputs (m, words) int32, whose bit b of
        word w says that offset 32 w + b has a neighbour; of the same of inputs (none if `subm`, or without
        `is_train`); of the row of each mask of outputs, (m,) int32, and of inputs; and the offsets of each split as a
        number, in a uint32 array.

    Raises:
        InsumRangeError: a voxel lies outside the grid.
        InsumFormatError: a voxel occurs twice.
    """
    moves = Geometry.of(ksize, stride, padding, dilation, out_padding, subm=subm, transposed=transpose)
    found = build_kernel_map(Coordinates(indices, tuple(spatial_shape), batch_size), moves)
    volume = found.geometry.volume
    if algo is ConvAlgo.MaskSplitImplicitGemm and volume <= _MASK_BITS:
        first = volume - volume // 2
        filters = [(1 << first) - 1, ((1 << (volume - first)) - 1) << first]
    else:
        filters = [(1 << _MASK_BITS) - 1]
    forward = found.neighbours
    backward = found.inverse.neighbours if is_train else forward.new_empty(0)
    forward_masks = [_sorted_masks(forward, keep, do_sort) for keep in filters]
    backward_masks = [_sorted_masks(backward, keep, do_sort) for keep in filters] if is_train and not subm else []
    return (
        found.out_indices,
        _pair_num(found),
        forward,
        backward,
        [mask for mask, _ in forward_masks],
        [mask for mask, _ in backward_masks],
        [order for _, order in forward_masks],
        [order for _, order in backward_masks],
        [np.array([keep], dtype=np.uint32) for keep in filters],
    )


def indice_conv(
    features: Tensor,
    filters: Tensor,
    indice_pairs: Tensor,
    indice_pair_num: Tensor,
    num_activate_out: int,
    inverse: bool = False,
    subm: bool = False,
    algo: object = None,
    timer: object = None,
    bias: Tensor | None = None,
    act_alpha: float = 0.0,
    act_beta: float = 0.0,
    act_type: object = Activation.None_,
) -> Tensor:
    """Convolve over lists of pairs.

        Out[OutIdx[o,q],d] += In[InIdx[o,q],c] * W[o,c,d]

    Args:
        features: `In`, (n, I); differentiable.
        filters: (O, k_1, .., k_d, I); differentiable. `W` is this with the offset first.
        indice_pairs: (2, o, q) of `get_indice_pairs`: `InIdx`, then `OutIdx`.
        indice_pair_num: not read: what no pair fills is -1.
        num_activate_out: m.
        inverse: from the table's outputs back to its inputs.
        subm: not read: a submanifold table is complete.
        algo: not read; nor is `timer`.
        timer: not read.
        bias: (O,), added; differentiable.
        act_alpha: the slope of `Activation.LeakyReLU`.
        act_beta: not read.
        act_type: applied to the result.

    Returns:
        `Out`, (m, O).

    Raises:
        InsumShapeError: filters and table have different numbers of offsets.
        InsumRangeError: a row points outside.
    """
    weight = filters.flatten(1, -2)
    _check_table("indice_conv", "indice_pairs", indice_pairs, (2, weight.shape[1], "pairs"), filters)
    pairs = _lists(indice_pairs, inverse=inverse)
    out = _run(_CONV, {"In": features, "W": weight.permute(1, 2, 0).contiguous(), **pairs}, num_activate_out)
    return apply_activation(out if bias is None else out + bias, act_type, act_alpha)


def indice_conv_backward(
    features: Tensor,
    filters: Tensor,
    out_bp: Tensor,
    indice_pairs: Tensor,
    indice_pair_num: Tensor,
    *rest: Any,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `indice_conv` with respect to features and filters, from that of its result, `out_bp`.

    The other arguments are those of `indice_conv`.
    """
    pairs = (indice_pairs, indice_pair_num, out_bp.shape[0], *rest)
    return _gradients(lambda x, w: indice_conv(x, w, *pairs, **named), features, filters, out_bp)


def implicit_gemm(
    features: Tensor,
    filters: Tensor,
    pair_fwd: Tensor,
    pair_mask_fwd_splits: list[Tensor],
    mask_argsort_fwd_splits: list[Tensor],
    num_activate_out: int,
    masks: list[Any],
    is_train: bool,
    is_subm: bool,
    timer: object = None,
    fp32_accum: bool | None = None,
    bias: Tensor | None = None,
    act_alpha: float = 0.0,
    act_beta: float = 0.0,
    act_type: object = Activation.None_,
    output_scale: float = 1.0,
    scale: Tensor | None = None,
    output_add: Tensor | None = None,
    output_add_scale: float = 0.0,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, int]:
    """Convolve over a table of neighbours.

        Out[i,d] += In[Near[k,i],c] * W[d,k,c]

    Args:
        features: `In`, (n, I); differentiable.
        filters: (O, k_1, .., k_d, I), `W` with its cells as one axis; differentiable.
        pair_fwd: `Near`, (k, m) of `get_indice_pairs_implicit_gemm`.
        pair_mask_fwd_splits: (m, words) each, sorted.
        mask_argsort_fwd_splits: not read: the compiler orders the outputs.
        num_activate_out: m.
        masks: not read.
        is_train: also return the masks of tiles of outputs.
        is_subm: not read.
        timer: not read.
        fp32_accum: `False` sums fp16 and bf16 in their own precision; else in float32.
        bias: (O,), added; differentiable.
        act_alpha: the slope of `Activation.LeakyReLU`.
        act_beta: not read.
        act_type: applied to the result.
        output_scale: of int8, which is not supported; so are `scale`, `output_add` and `output_add_scale`.
        scale: see `output_scale`.
        output_add: see `output_scale`.
        output_add_scale: see `output_scale`.
        output_dtype: of the result; default: that of `features`.

    Returns:
        `Out`, (m, O); in training the masks of each `mask_width` sorted outputs joined, (splits, tiles, words) int32,
        else `None`; and `mask_width`.

    Raises:
        InsumShapeError: filters and table have different numbers of offsets, or the table other outputs.
        InsumDtypeError: features are quantised.
        InsumRangeError: a row points outside.
    """
    if features.is_quantized or scale is not None or output_add is not None:
        raise InsumDtypeError(
            "implicit_gemm: int8 convolutions are not supported",
            fix="pass features.dequantize() and floating-point filters.",
            argument="features",
            got=features.dtype,
        )
    weight = filters.flatten(1, -2)
    shape = (weight.shape[1], num_activate_out)
    _check_table("implicit_gemm", "pair_fwd", pair_fwd, shape, filters)
    options = Options(accumulate="storage") if fp32_accum is False else DEFAULT
    out = _run(_CONV_BY_NEIGHBOURS, {"In": features, "W": weight, "Near": pair_fwd}, num_activate_out, options)
    out = apply_activation(out if bias is None else out + bias, act_type, act_alpha)
    joined = torch.stack([_joined(mask) for mask in pair_mask_fwd_splits]) if is_train else None
    return out if output_dtype is None else out.to(output_dtype), joined, _MASK_WIDTH


def implicit_gemm_backward(
    features: Tensor,
    filters: Tensor,
    out_bp: Tensor,
    pair_fwd: Tensor,
    pair_bwd: Tensor,
    pair_mask_fwd_splits: list[Tensor],
    pair_mask_bwd_splits: list[Tensor],
    mask_argsort_fwd_splits: list[Tensor],
    mask_argsort_bwd_splits: list[Tensor],
    mask_output_fwd: Tensor | None,
    masks: list[Any],
    mask_width: int,
    is_subm: bool,
    timer: object = None,
    fp32_accum: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `implicit_gemm` with respect to features and filters, from that of its result, `out_bp`.

    Of the tables only `pair_fwd` is read.
    """
    table = (pair_fwd, [], [], out_bp.shape[0], masks, False, is_subm, timer, fp32_accum)
    return _gradients(lambda x, w: implicit_gemm(x, w, *table)[0], features, filters, out_bp)


def indice_maxpool(features: Tensor, indice_pairs: Tensor, indice_pair_num: Tensor, num_activate_out: int) -> Tensor:
    """Return the largest feature among the inputs of each output, or 0 where that is less.

        Out[OutIdx[o,q],c] max= In[InIdx[o,q],c]

    Args:
        features: `In`, (n, C); differentiable. Entries that tie share the gradient.
        indice_pairs: (2, o, q) of `get_indice_pairs`.
        indice_pair_num: not read.
        num_activate_out: m.

    Returns:
        `Out`, (m, C).
    """
    return _run(_MAX, {"In": features, **_lists(indice_pairs)}, num_activate_out).clamp(min=0)


def indice_maxpool_backward(
    features: Tensor, out_features: Tensor, out_bp: Tensor, indice_pairs: Tensor, indice_pair_num: Tensor
) -> Tensor:
    """Return the gradient of `indice_maxpool` as spconv has it: each input that ties gets the whole gradient."""
    used = (indice_pairs >= 0).all(0)
    source, target = indice_pairs[0][used].long(), indice_pairs[1][used].long()
    found = torch.where(features[source] == out_features[target], out_bp[target], 0)
    return torch.zeros_like(features).index_add_(0, source, found)


def indice_maxpool_implicit_gemm(features: Tensor, indice_pairs: Tensor, num_activate_out: int) -> Tensor:
    """`indice_maxpool` over a table of neighbours (k, m).

    Out[i,c] max= In[Near[k,i],c]
    """
    return _run(_MAX_BY_NEIGHBOURS, {"In": features, "Near": indice_pairs}, num_activate_out).clamp(min=0)


def indice_maxpool_implicit_gemm_backward(
    features: Tensor, out_features: Tensor, out_bp: Tensor, indice_pairs: Tensor
) -> Tensor:
    """`indice_maxpool_backward` over the outputs of each input, (k, n)."""
    source = torch.arange(indice_pairs.shape[1], device=indice_pairs.device).expand(indice_pairs.shape)
    lists = torch.stack([source.to(indice_pairs.dtype), indice_pairs])
    return indice_maxpool_backward(features, out_features, out_bp, lists, indice_pairs)


def indice_avgpool_implicit_gemm(
    features: Tensor, indice_pairs: Tensor, num_activate_out: int, calc_count: bool
) -> tuple[Tensor, Tensor]:
    """Return the mean feature of the neighbours of each output; 0 where it has none.

        Out[i,c] += In[Near[k,i],c]

    Returns:
        (m, C), and with `calc_count` the number of inputs of each output, (m,) int32, else an empty tensor.
    """
    total = _run(_SUM_BY_NEIGHBOURS, {"In": features, "Near": indice_pairs}, num_activate_out)
    counts = (indice_pairs >= 0).sum(0)
    return _over(total, counts), counts.int() if calc_count else torch.empty(0, device=features.device)


def indice_avgpool_implicit_gemm_backward(out_bp: Tensor, indice_pairs: Tensor, count_out: Tensor) -> Tensor:
    """Return the gradient of `indice_avgpool_implicit_gemm`, over the outputs of each input, (k, n).

    That of a mean; spconv 2.3.8 multiplies by the count where it should divide.
    """
    return _run(_SUM_BY_NEIGHBOURS, {"In": _over(out_bp, count_out), "Near": indice_pairs}, indice_pairs.shape[1])


def global_pool_rearrange(coords: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return the rows of each cloud of a batch.

    Args:
        coords: (n, 1 + d): the batch entry first; rows where it is negative belong to none.
        batch_size: b.

    Returns:
        (b, n) int32: the rows of each cloud from the left, then -1; and (b,) int32, how many they are.

    >>> rows, counts = global_pool_rearrange(torch.tensor([[1, 5], [0, 2], [1, 3]]), 2)
    >>> rows.tolist(), counts.tolist()
    ([[1, -1, -1], [0, 2, -1]], [1, 2])
    """
    entry, order = coords[:, 0].long().sort(stable=True)
    order, entry = order[entry >= 0], entry[entry >= 0]
    counts = torch.bincount(entry, minlength=batch_size)
    place = torch.arange(entry.shape[0], device=coords.device) - (counts.cumsum(0) - counts)[entry]
    rows = torch.full((batch_size, coords.shape[0]), -1, dtype=torch.int32, device=coords.device)
    rows[entry, place] = order.int()
    return rows, counts.int()


def maximum_value_int_(ten: Tensor, value: int) -> None:
    """Raise the numbers of `ten` that are less to `value`, in place."""
    ten.clamp_(min=value)


def _pair_num(found: KernelMap) -> Tensor:
    """Return (o,) int32: the pairs of each offset; of a mirrored kernel 0 from the middle on."""
    counts = found.indice_pair_num
    if found.geometry.is_mirrored:
        counts[found.geometry.volume // 2 :] = 0
    return counts


def _sorted_masks(neighbours: Tensor, keep: int, do_sort: bool) -> tuple[Tensor, Tensor]:
    """Masks (m, words) of the offsets that each column has, ascending by those of `keep`, and the column of each."""
    columns = neighbours.shape[1]
    words = list((neighbours >= 0).long().split(_MASK_BITS))
    numbers = [(word << torch.arange(len(word), device=word.device)[:, None]).sum(0) for word in words]
    order = torch.arange(columns, device=neighbours.device)
    for number in numbers if do_sort else []:
        # From the least word to the greatest, each keeping the order of those before it.
        order = order[(number & keep)[order].sort(stable=True).indices]
    mask = torch.stack(numbers, dim=1)[order]
    # As unsigned words of 32 bits, which torch keeps as signed ones.
    return torch.where(mask >= 1 << 31, mask - (1 << 32), mask).int(), order.int()


def _gradients(
    conv: Callable[[Tensor, Tensor], Tensor], features: Tensor, filters: Tensor, out_bp: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a convolution by its features and filters, from that of its result."""
    with torch.enable_grad():
        leaves = (features.detach().requires_grad_(), filters.detach().requires_grad_())
        din, dfilters = torch.autograd.grad(conv(*leaves), leaves, out_bp)
    return din, dfilters


def _check_table(caller: str, name: str, table: Tensor, shape: tuple[int | str, ...], filters: Tensor) -> None:
    faults = Faults(caller)
    fix = "pass the table that get_indice_pairs, or get_indice_pairs_implicit_gemm, made for this kernel size."
    faults.shape(name, table, shape, details=[f"filters: {tuple(filters.shape)}"], fix=fix)
    faults.raise_all()


def _run(expression: str, tensors: dict[str, Tensor], num_outputs: int, options: Options = DEFAULT) -> Tensor:
    return run(expression, _FACTS, tensors, options, (num_outputs, None))


def _lists(indice_pairs: Tensor, *, inverse: bool = False) -> dict[str, Tensor]:
    """Return (2, o, q) as the lists of inputs and outputs, or the other way around."""
    source, target = indice_pairs.flip(0).unbind(0) if inverse else indice_pairs.unbind(0)
    return {"InIdx": source, "OutIdx": target}


def _over(total: Tensor, counts: Tensor) -> Tensor:
    wide = torch.promote_types(total.dtype, torch.float32)
    return (total.to(wide) / counts.clamp(min=1).to(wide)[:, None]).to(total.dtype)


def _joined(mask: Tensor) -> Tensor:
    """Return the bits that any row of each tile has, (tiles, words)."""
    rows, words = mask.shape[0], mask.reshape(mask.shape[0], -1)
    tiles = (rows + _MASK_WIDTH - 1) // _MASK_WIDTH
    joined = pad(words, (0, 0, 0, tiles * _MASK_WIDTH - rows)).view(tiles, _MASK_WIDTH, words.shape[1])
    while joined.shape[1] > 1:
        joined = joined[:, ::2] | joined[:, 1::2]
    return joined[:, 0]

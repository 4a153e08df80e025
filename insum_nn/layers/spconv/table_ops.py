"""Convolution and pooling over tables of pairs that a caller has, and their gradients, for `ops` and `functional`.

Tables come in two forms: lists of pairs by offset (2, o, q), and neighbours of each output (o, m); -1 is no entry.
Entries are checked at every call: a caller may pass any table.
Every function is differentiable; the functions for gradients are for callers with autograd functions of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumDtypeError
from insum_nn.facts import IndexFacts, NamedFacts
from insum_nn.faults import Faults
from insum_nn.layers.voxel.conv_base import Activation, apply_activation
from insum_nn.ops.statements import run

__all__ = [
    "implicit_gemm",
    "implicit_gemm_backward",
    "indice_avgpool",
    "indice_avgpool_implicit_gemm",
    "indice_avgpool_implicit_gemm_backward",
    "indice_conv",
    "indice_conv_backward",
    "indice_maxpool",
    "indice_maxpool_backward",
    "indice_maxpool_implicit_gemm",
    "indice_maxpool_implicit_gemm_backward",
]

_CONV = "Out[OutIdx[o,q],d] += In[InIdx[o,q],c] * W[o,c,d]"
_CONV_BY_NEIGHBOURS = "Out[i,d] += In[Near[k,i],c] * W[d,k,c]"
_MAX = "Out[OutIdx[o,q],c] max= In[InIdx[o,q],c]"
_MAX_BY_NEIGHBOURS = "Out[i,c] max= In[Near[k,i],c]"
_SUM = "Out[OutIdx[o,q],c] += In[InIdx[o,q],c]"
_SUM_BY_NEIGHBOURS = "Out[i,c] += In[Near[k,i],c]"
_FACTS = NamedFacts(dict.fromkeys(("InIdx", "OutIdx", "Near"), IndexFacts(masked=True)))

# Rows of a tile whose masks are joined; spconv's is its kernel's.
_MASK_WIDTH = 32


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
    faults = Faults("indice_conv")
    fix = "pass the table that get_indice_pairs made for this kernel size."
    known = [f"filters: {tuple(filters.shape)}"]
    faults.shape("indice_pairs", indice_pairs, (2, weight.shape[1], "pairs"), details=known, fix=fix)
    faults.raise_all()
    pairs = _lists(indice_pairs, inverse=inverse)
    out = _run(_CONV, {"In": features, "W": weight.permute(1, 2, 0).contiguous(), **pairs}, num_activate_out)
    return apply_activation(out if bias is None else out + bias, act_type, act_alpha)


def indice_conv_backward(
    features: Tensor,
    filters: Tensor,
    out_bp: Tensor,
    indice_pairs: Tensor,
    indice_pair_num: Tensor,
    inverse: bool = False,
    subm: bool = False,
    algo: object = None,
    timer: object = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `indice_conv` with respect to features and filters, from that of its result, `out_bp`."""
    pairs = (indice_pairs, indice_pair_num, out_bp.shape[0], inverse, subm)
    return _gradients(lambda x, w: indice_conv(x, w, *pairs), features, filters, out_bp)


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
    faults = Faults("implicit_gemm")
    fix = "pass the table that get_indice_pairs_implicit_gemm made for this kernel size."
    known = [f"filters: {tuple(filters.shape)}"]
    faults.shape("pair_fwd", pair_fwd, (weight.shape[1], num_activate_out), details=known, fix=fix)
    faults.raise_all()
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


def indice_avgpool(features: Tensor, indice_pairs: Tensor, indice_pair_num: Tensor, num_activate_out: int) -> Tensor:
    """Return the mean feature of the inputs of each output; 0 where it has none.

        Out[OutIdx[o,q],c] += In[InIdx[o,q],c]

    Args:
        features: `In`, (n, C); differentiable.
        indice_pairs: (2, o, q) of `get_indice_pairs`.
        indice_pair_num: not read.
        num_activate_out: m.

    Returns:
        (m, C): `Out` over the number of inputs.
    """
    total = _run(_SUM, {"In": features, **_lists(indice_pairs)}, num_activate_out)
    used = (indice_pairs >= 0).all(0)
    return _over(total, torch.bincount(indice_pairs[1][used], minlength=num_activate_out))


def indice_avgpool_implicit_gemm(
    features: Tensor, indice_pairs: Tensor, num_activate_out: int, calc_count: bool
) -> tuple[Tensor, Tensor]:
    """`indice_avgpool` over a table of neighbours (k, m).

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


def _gradients(
    conv: Callable[[Tensor, Tensor], Tensor], features: Tensor, filters: Tensor, out_bp: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a convolution by its features and filters, from that of its result."""
    with torch.enable_grad():
        leaves = (features.detach().requires_grad_(), filters.detach().requires_grad_())
        din, dfilters = torch.autograd.grad(conv(*leaves), leaves, out_bp)
    return din, dfilters


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
    padded = torch.zeros(tiles * _MASK_WIDTH, words.shape[1], dtype=mask.dtype, device=mask.device)
    padded[:rows] = words
    joined = padded.view(tiles, _MASK_WIDTH, words.shape[1])
    while joined.shape[1] > 1:
        joined = joined[:, ::2] | joined[:, 1::2]
    return joined[:, 0]

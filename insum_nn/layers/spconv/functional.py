"""`spconv.pytorch.functional`: convolution and pooling over tables of pairs, and sums of sparse tensors."""

from __future__ import annotations

from torch import Tensor

from insum_nn.compiler.options import DEFAULT
from insum_nn.errors import InsumShapeError
from insum_nn.facts import IndexFacts
from insum_nn.layers.sparse_tensor import SparseConvTensor, sparse_add
from insum_nn.ops.arguments import run

__all__ = [
    "indice_conv",
    "indice_inverse_conv",
    "indice_maxpool",
    "indice_subm_conv",
    "sparse_add",
    "sparse_add_hash_based",
]

_CONV = "Out[OutIdx[o,q],d] += In[InIdx[o,q],c] * W[o,c,d]"
_MAX_POOL = "Out[OutIdx[o,q],c] max= In[InIdx[o,q],c]"
# A caller may pass any table, so that its values are proven by the call.
_FACTS = {"InIdx": IndexFacts(masked=True), "OutIdx": IndexFacts(masked=True)}


def sparse_add_hash_based(*tensors: SparseConvTensor) -> SparseConvTensor:
    """The same as `sparse_add`."""
    return sparse_add(*tensors)


def indice_conv(
    features: Tensor,
    filters: Tensor,
    indice_pairs: Tensor,
    indice_pair_num: Tensor,
    num_activate_out: int,
    *_: object,
) -> Tensor:
    """Convolve over a table of pairs.

        Out[OutIdx[o,q],d] += In[InIdx[o,q],c] * W[o,c,d]

    Args:
        features: `In`, (n, I); differentiable.
        filters: (O, k_1, .., k_d, I); differentiable. `W` is this with the offset first.
        indice_pairs: (2, o, q) of `get_indice_pairs`: `InIdx`, then `OutIdx`.
        indice_pair_num: not read: what no pair fills is -1.
        num_activate_out: m.

    Returns:
        `Out`, (m, O).

    Raises:
        InsumShapeError: filters and table have different numbers of offsets.
        InsumRangeError: a row points outside.
    """
    weight = filters.flatten(1, -2).permute(1, 2, 0).contiguous()
    if indice_pairs.ndim != 3 or tuple(indice_pairs.shape[:2]) != (2, weight.shape[0]):
        raise InsumShapeError(
            f"indice_conv: 'indice_pairs' has shape {tuple(indice_pairs.shape)}",
            details=[f"expected (2, {weight.shape[0]}, pairs) for filters {tuple(filters.shape)}"],
            fix="pass the table that get_indice_pairs made for this kernel size.",
            argument="indice_pairs",
            expected=weight.shape[0],
            got=tuple(indice_pairs.shape),
        )
    named = {"In": features, "W": weight, "InIdx": indice_pairs[0], "OutIdx": indice_pairs[1]}
    return run(_CONV, _FACTS, named, DEFAULT, (num_activate_out, None))


def indice_subm_conv(
    features: Tensor,
    filters: Tensor,
    indice_pairs: Tensor,
    indice_pair_num: Tensor,
    num_activate_out: int,
    *_: object,
) -> Tensor:
    """The same as `indice_conv`: a submanifold table is complete."""
    return indice_conv(features, filters, indice_pairs, indice_pair_num, num_activate_out)


def indice_inverse_conv(
    features: Tensor,
    filters: Tensor,
    indice_pairs: Tensor,
    indice_pair_num: Tensor,
    num_activate_out: int,
    *_: object,
) -> Tensor:
    """`indice_conv` from a table's outputs back to its inputs, of which there are `num_activate_out`."""
    return indice_conv(features, filters, indice_pairs.flip(0), indice_pair_num, num_activate_out)


def indice_maxpool(
    features: Tensor, indice_pairs: Tensor, indice_pair_num: Tensor, num_activate_out: int, *_: object
) -> Tensor:
    """The largest feature among the inputs of each output of a table of pairs.

        Out[OutIdx[o,q],c] max= In[InIdx[o,q],c]

    Args:
        features: `In`, (n, C); differentiable.
        indice_pairs: (2, o, q) of `get_indice_pairs`.
        indice_pair_num: not read.
        num_activate_out: m.

    Returns:
        `Out`, (m, C).
    """
    named = {"In": features, "InIdx": indice_pairs[0], "OutIdx": indice_pairs[1]}
    return run(_MAX_POOL, _FACTS, named, DEFAULT, (num_activate_out, None))

"""`spconv.pytorch.functional`: convolution and pooling over tables of pairs, and sums of sparse tensors.

These take the arguments of the functions of the same names in `ops` in another order.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from insum_nn.layers.spconv import ops
from insum_nn.layers.spconv.ops import indice_maxpool
from insum_nn.layers.voxel.sparse_tensor import sparse_add

__all__ = [
    "implicit_gemm",
    "indice_avgpool_implicit_gemm",
    "indice_conv",
    "indice_inverse_conv",
    "indice_maxpool",
    "indice_maxpool_implicit_gemm",
    "indice_subm_conv",
    "sparse_add",
    "sparse_add_hash_based",
]


# spconv has two ways to find equal voxels.
sparse_add_hash_based = sparse_add


def indice_conv(
    features: Tensor,
    filters: Tensor,
    indice_pairs: Tensor,
    indice_pair_num: Tensor,
    num_activate_out: int,
    *rest: Any,
    **named: Any,
) -> Tensor:
    """Convolve over lists of pairs: `ops.indice_conv` without its arguments `inverse` and `subm`."""
    tables = (indice_pairs, indice_pair_num, num_activate_out, False, False)
    return ops.indice_conv(features, filters, *tables, *rest, **named)


# A submanifold table is complete.
indice_subm_conv = indice_conv


def indice_inverse_conv(features: Tensor, filters: Tensor, indice_pairs: Tensor, *rest: Any, **named: Any) -> Tensor:
    """`indice_conv`, with its arguments, from a table's outputs back to its inputs: there are `num_activate_out`."""
    return indice_conv(features, filters, indice_pairs.flip(0), *rest, **named)


def implicit_gemm(
    features: Tensor,
    filters: Tensor,
    pair_fwd: Tensor,
    pair_bwd: Tensor,
    pair_mask_fwd_splits: list[Tensor],
    pair_mask_bwd_splits: list[Tensor],
    mask_argsort_fwd_splits: list[Tensor],
    mask_argsort_bwd_splits: list[Tensor],
    num_activate_out: int,
    masks: list[Any],
    is_train: bool,
    *rest: Any,
    **named: Any,
) -> Tensor:
    """Convolve over a table of neighbours: the result of `ops.implicit_gemm`. Of the tables `pair_fwd` is read."""
    tables = (pair_fwd, pair_mask_fwd_splits, mask_argsort_fwd_splits, num_activate_out, masks, False)
    return ops.implicit_gemm(features, filters, *tables, *rest, **named)[0]


def indice_maxpool_implicit_gemm(
    features: Tensor, indice_pairs_fwd: Tensor, indice_pairs_bwd: Tensor, num_activate_out: int
) -> Tensor:
    """Return the largest feature among each output's neighbours, at least 0; see `ops.indice_maxpool`."""
    return ops.indice_maxpool_implicit_gemm(features, indice_pairs_fwd, num_activate_out)


def indice_avgpool_implicit_gemm(
    features: Tensor, indice_pairs_fwd: Tensor, indice_pairs_bwd: Tensor, num_activate_out: int, calc_count: bool
) -> Tensor:
    """Return the mean feature of the neighbours of each output; `calc_count` is not read."""
    return ops.indice_avgpool_implicit_gemm(features, indice_pairs_fwd, num_activate_out, False)[0]

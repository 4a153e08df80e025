"""The symmetric normalisation of graph convolutions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from insum_nn.dtypes import wide_dtype
from insum_nn.structure.graph_entries import Flow, check_edge_index, check_edge_weight, ends_of, with_self_loops

__all__ = ["gcn_norm", "inverse_root"]


def inverse_root(degree: Tensor) -> Tensor:
    """`degree ** -0.5`, and 0 where the degree is 0; NaN of a negative degree stays.

    The zeros are constants: no gradient passes through them, of any order.

    >>> inverse_root(torch.tensor([4.0, 0.0])).tolist()
    [0.5, 0.0]
    """
    isolated = degree == 0
    return torch.where(isolated, 1.0, degree).pow(-0.5).masked_fill(isolated, 0.0)


def _added(row: Tensor, weights: Tensor, rows: int) -> Tensor:
    return weights.new_zeros(rows).index_add(0, row, weights)


def gcn_norm(
    edge_index: Tensor,
    edge_weight: Tensor | None = None,
    num_nodes: int | None = None,
    improved: bool = False,
    add_self_loops: bool = True,
    flow: Flow = "source_to_target",
    dtype: torch.dtype | None = None,
    *,
    fixed_size: bool = False,
    added: Callable[[Tensor, Tensor, int], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the edges of a graph with self-loops, and their weights normalised by the degrees of both ends.

        W'[p] = D[Row[p]] * W[p] * D[Col[p]],        D = (degree of the receiving side) ** -0.5

    As `torch_geometric.nn.conv.gcn_conv.gcn_norm` on an edge list: nodes without an edge get 0, and without
    `edge_weight` every weight is 1, that of self-loops too, whatever `improved` says.

    Source: Kipf, Welling, Semi-Supervised Classification with Graph Convolutional Networks (ICLR 2017), section 2.

    Args:
        edge_index: (2, e) integers.
        edge_weight: (e,) or (e, 1); differentiable.
        num_nodes: nodes; default one more than the largest.
        improved: self-loops that are added weigh 2 rather than 1.
        add_self_loops: give every node exactly one self-loop; one that is there keeps its weight.
        flow: which end of an edge receives.
        dtype: of the weights, without `edge_weight`; default torch's.
        fixed_size: keep self-loops of the input, with weight 0 where an added one takes their place, so that no
            size depends on values.
        added: sums weights by the rows of an index tensor, of so many rows; by default `index_add`, whose order is not
            fixed on a GPU.

    Returns:
        (2, e') int64 and (e',).

    Raises:
        InsumShapeError: not two rows, or not one weight per edge.
        InsumDtypeError: nodes are no integers, or weights no floating-point numbers.
        InsumRangeError: a node lies outside.

    >>> edges, weight = gcn_norm(torch.tensor([[0, 1], [1, 0]]), num_nodes=3)
    >>> edges.tolist(), [round(w, 6) for w in weight.tolist()]
    ([[0, 1, 0, 1, 2], [1, 0, 0, 1, 2]], [0.5, 0.5, 0.5, 0.5, 1.0])
    """
    if num_nodes is None:
        num_nodes = int(edge_index.max()) + 1 if edge_index.numel() else 0
    traced = torch.jit.is_tracing()
    if not traced:
        check_edge_index(edge_index, num_nodes, values=not fixed_size)
        if edge_weight is not None:
            edge_weight = check_edge_weight(edge_weight, edge_index, normalized=True)
    edges, number = edge_index.long(), None
    if add_self_loops:
        # Without weights all self-loops are alike.
        edges, number = with_self_loops(edges, num_nodes, kept=edge_weight is not None, fixed_size=fixed_size)
    row, col = ends_of(edges, flow)
    if edge_weight is None:
        weight = torch.ones(row.shape[0], dtype=dtype, device=edge_index.device)
    elif number is None:
        weight = edge_weight
    else:
        weight = torch.cat([edge_weight, edge_weight.new_full((1,), 2.0 if improved else 1.0)]).index_select(0, number)
    if fixed_size and add_self_loops:
        given = torch.arange(row.shape[0], device=edge_index.device) < edge_index.shape[1]
        weight = torch.where(given & (row == col), 0.0, weight)
    # Half types count far less than they can carry, so degrees are summed in float32.
    wide = weight.to(wide_dtype(weight.dtype))
    root = inverse_root((added or _added)(row, wide, num_nodes))
    # What is kept of the tensor that was passed is found again.
    return edges, (root.index_select(0, row) * wide * root.index_select(0, col)).to(weight.dtype)

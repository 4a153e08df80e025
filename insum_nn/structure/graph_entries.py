"""A graph's edges as entries of a sparse matrix, and the checks of an edge list."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from insum_nn.errors import InsumDtypeError, InsumNameError, InsumRangeError, InsumShapeError
from insum_nn.faults import Faults
from insum_nn.structure.plain_tensors import without_transforms

__all__ = [
    "Flow",
    "GraphEntries",
    "Loops",
    "check_edge_index",
    "check_edge_weight",
    "check_square",
    "edge_entries",
    "entry_weights",
]

Loops = Literal["none", "remaining", "replaced"]
Flow = Literal["source_to_target", "target_to_source"]


class GraphEntries(NamedTuple):
    """The entries of the matrix that carries features along the edges of a graph.

        Out[Row[p],n] += Weight[p] * X[Col[p],n]

    Attributes:
        row: (p,) int32 or int64: the node that receives.
        col: (p,) of the same dtype: the node that sends.
        edge: (p,) int32 or int64: which edge's weight an entry has; the number of edges for a self-loop of its own,
            whose weight is the fill value. `None`: entry `p` has the weight of edge `p`.
    """

    row: Tensor
    col: Tensor
    edge: Tensor | None


def check_edge_index(edge_index: Tensor, num_nodes: int, *, values: bool = True) -> None:
    """Raise unless an edge list has two rows of nodes that exist.

    Args:
        edge_index: (2, e), int32 or int64.
        num_nodes: nodes.
        values: also read the nodes; else only what needs no reading is checked.

    Raises:
        InsumShapeError: not two rows.
        InsumDtypeError: no integers.
        InsumRangeError: a node lies outside.
    """
    if edge_index.dtype in (torch.bool, torch.uint8) or edge_index.is_floating_point() or edge_index.is_complex():
        raise InsumDtypeError(
            f"'edge_index' must hold integers, got {edge_index.dtype}",
            details=["expected int64 (or int32, int16, int8)"],
            fix="pass edge_index.long().",
            got=edge_index.dtype,
        )
    faults = Faults()
    message, fix = "must have two rows, sources and targets", "pass edge_index.t() when edges are its rows."
    faults.shape("edge_index", edge_index, (2, "e"), message=message, fix=fix)
    faults.raise_all()
    if not values or edge_index.numel() == 0:
        return
    every = without_transforms(edge_index)
    low, high = torch.stack(torch.aminmax(every)).tolist()
    if low < 0 or high >= num_nodes:
        bad = ((every < 0) | (every >= num_nodes)).any(0)
        where = "in a batch of graphs"
        if every.ndim == 2:
            where = f"({int(bad.sum())} of {bad.numel()} edges; first at edge {int(bad.nonzero()[0])})"
        raise InsumRangeError(
            "Found negative indices in 'edge_index'"
            if low < 0
            else f"Found indices in 'edge_index' that are larger than {num_nodes - 1}",
            details=[f"expected 0 <= node < {num_nodes}; got minimum {low}, maximum {high} {where}"],
            fix="pass a row of node features for every node, or drop those edges.",
            expected=num_nodes,
            got=(low, high),
        )


def check_edge_weight(edge_weight: Tensor, num_edges: int, *, normalized: bool = False) -> Tensor:
    """Return the weights as (e,), from (e,) or (e, 1).

    Raises:
        InsumShapeError: not one weight per edge.
        InsumDtypeError: weights to be normalised are no floating-point numbers.
    """
    if normalized and not edge_weight.is_floating_point():
        raise InsumDtypeError(
            f"'edge_weight' must be floating-point to be normalised, got {edge_weight.dtype}",
            fix="pass edge_weight.float().",
            got=edge_weight.dtype,
        )
    if edge_weight.ndim == 2 and edge_weight.shape[1] == 1:
        edge_weight = edge_weight.squeeze(1)
    faults = Faults()
    message, fix = "must hold one number per edge", "pass one weight for each column of edge_index."
    faults.shape("edge_weight", edge_weight, (num_edges,), message=message, fix=fix)
    faults.raise_all()
    return edge_weight


def check_square(rows: int, num_nodes: int) -> None:
    """Raise unless a square adjacency has a row per node.

    Raises:
        InsumShapeError: it has others.
    """
    if rows != num_nodes:
        raise InsumShapeError(
            "the adjacency does not fit the node features",
            details=[f"expected ({num_nodes}, {num_nodes}), a row and a column per node; got ({rows}, {rows})"],
            fix="pass one row of features per node of the graph.",
            expected=num_nodes,
            got=(rows, rows),
        )


def edge_entries(
    edge_index: Tensor,
    num_nodes: int,
    *,
    loops: Loops = "remaining",
    flow: Flow = "source_to_target",
    fixed_size: bool = False,
) -> GraphEntries:
    """Return the entries that the edges of a graph give: those of edges first, then those of self-loops.

    Args:
        edge_index: (2, e): sources, targets.
        num_nodes: nodes; every entry of `edge_index` is one of them.
        loops: `"none"` adds nothing; `"remaining"` gives each node exactly one self-loop, whose weight is that of
            its last self-loop in `edge_index` where it has one; `"replaced"` the same, but its weight is the fill
            value.
        flow: which end of an edge receives.
        fixed_size: keep self-loops of the input where they stand, whatever `loops` says, so that no size depends
            on values; the caller gives those that do not count the weight 0.

    Returns:
        Entries in the order of edges.

    >>> entries = edge_entries(torch.tensor([[0, 1, 1], [1, 1, 0]]), 3)
    >>> entries.row.tolist(), entries.col.tolist(), entries.edge.tolist()
    ([1, 0, 0, 1, 2], [0, 1, 0, 1, 2], [0, 2, 3, 1, 3])
    """
    if flow not in ("source_to_target", "target_to_source"):
        raise InsumNameError(
            f"'flow' is {flow!r}", fix="pass 'source_to_target' or 'target_to_source'.", argument="flow", got=flow
        )
    edge_index = edge_index.long()
    num_edges = edge_index.shape[1]
    edge: Tensor | None = None
    if loops != "none":
        nodes = torch.arange(num_nodes, device=edge_index.device)
        remaining, own = torch.arange(num_edges, device=edge_index.device), torch.full_like(nodes, num_edges)
        is_loop = edge_index[0] == edge_index[1]
        if loops == "remaining":
            own = _last_loops(edge_index, is_loop, num_nodes)
        if not fixed_size:
            remaining = (~is_loop).nonzero().squeeze(1)
            edge_index = edge_index.index_select(1, remaining)
        edge_index = torch.cat([edge_index, nodes.expand(2, -1)], dim=1)
        edge = torch.cat([remaining, own])
    sends, receives = edge_index.unbind(0)
    if flow == "target_to_source":
        sends, receives = receives, sends
    return GraphEntries(receives, sends, edge)


def _last_loops(edge_index: Tensor, is_loop: Tensor, num_nodes: int) -> Tensor:
    """Return (n,) the last edge that is a self-loop of each node; the number of edges where there is none."""
    num_edges = edge_index.shape[1]
    numbers = torch.arange(num_edges, device=edge_index.device)
    # Of duplicates the last one counts, in whatever order the device writes: the largest number wins.
    last = torch.full((num_nodes,), -1, dtype=torch.int64, device=edge_index.device)
    last = last.scatter_reduce(0, edge_index[0], torch.where(is_loop, numbers, -1), "amax")
    return torch.where(last < 0, num_edges, last)


def entry_weights(entries: GraphEntries, edge_weight: Tensor, fill: float) -> Tensor:
    """Return (p,) the weight of each entry before normalisation; differentiable in `edge_weight` (e,)."""
    if entries.edge is None:
        return edge_weight
    return torch.cat([edge_weight, edge_weight.new_full((1,), fill)]).index_select(0, entries.edge)

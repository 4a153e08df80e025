"""The edges of a graph: their checks, their ends, and self-loops."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from insum_nn.errors import InsumDtypeError, InsumNameError, InsumRangeError
from insum_nn.faults import Faults, check_choice
from insum_nn.structure.plain_tensors import without_transforms

__all__ = ["Flow", "check_edge_index", "check_edge_weight", "ends_of", "with_self_loops"]

Flow = Literal["source_to_target", "target_to_source"]


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
    faults = Faults()
    integers = (torch.int64, torch.int32, torch.int16, torch.int8)
    if edge_index.dtype not in integers:
        message = f"must hold integers, got {edge_index.dtype}"
        faults.add(InsumDtypeError, "edge_index", message, fix="pass edge_index.long().", got=edge_index.dtype)
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


def check_edge_weight(edge_weight: Tensor, edge_index: Tensor, *, normalized: bool = False) -> Tensor:
    """Return the weights as (e,), from (e,) or (e, 1).

    Raises:
        InsumShapeError: not one weight per edge.
        InsumDtypeError: weights to be normalised are no floating-point numbers.
        InsumDeviceError: they are on another device than the edges.
    """
    faults = Faults()
    faults.device("edge_weight", edge_weight, "edge_index", edge_index)
    if normalized and not edge_weight.is_floating_point():
        message, fix = f"must be floating-point to be normalised, got {edge_weight.dtype}", "pass edge_weight.float()."
        faults.add(InsumDtypeError, "edge_weight", message, fix=fix, got=edge_weight.dtype)
    if edge_weight.ndim == 2 and edge_weight.shape[1] == 1:
        edge_weight = edge_weight.squeeze(1)
    message, fix = "must hold one number per edge", "pass one weight for each column of edge_index."
    faults.shape("edge_weight", edge_weight, (edge_index.shape[1],), message=message, fix=fix)
    faults.raise_all()
    return edge_weight


def ends_of(edge_index: Tensor, flow: Flow) -> tuple[Tensor, Tensor]:
    """Return (e,) the node that receives along each edge, and the one that sends, int64.

    Raises:
        InsumNameError: an unknown `flow`.
    """
    check_choice("'flow'", flow, get_args(Flow), InsumNameError)
    first, second = edge_index.long().unbind(0)
    return (second, first) if flow == "source_to_target" else (first, second)


def with_self_loops(
    edge_index: Tensor, num_nodes: int, *, kept: bool = True, fixed_size: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the edges of a graph that are no self-loops, then one self-loop of each node.

    Args:
        edge_index: (2, e); every entry is a node.
        num_nodes: nodes.
        kept: a self-loop has the weight of the node's last one in `edge_index`, where that has one.
        fixed_size: keep self-loops of the input where they stand, so that no size depends on values; the caller gives
            them the weight 0.

    Returns:
        (2, p) int64 edges; and (p,) which edge's weight each has, the number of edges for a self-loop of no edge, or
        `None` where none is kept.

    >>> edges, number = with_self_loops(torch.tensor([[0, 1, 1], [1, 1, 0]]), 3)
    >>> edges.tolist(), number.tolist()
    ([[0, 1, 0, 1, 2], [1, 0, 0, 1, 2]], [0, 2, 3, 1, 3])
    """
    edge_index, num_edges = edge_index.long(), edge_index.shape[1]
    first, second = edge_index.unbind(0)
    nodes, apart, own = torch.arange(num_nodes, device=first.device), first != second, None
    numbers = torch.arange(num_edges, device=first.device) if kept else apart
    if kept:
        # Of duplicates the last one counts, in whatever order the device writes: the largest number wins.
        last = torch.full_like(nodes, -1).scatter_reduce(0, first, torch.where(apart, -1, numbers), "amax")
        own = torch.where(last < 0, num_edges, last)
    if not fixed_size:
        numbers = apart.nonzero().squeeze(1)
        edge_index = edge_index.index_select(1, numbers)
    edges = torch.cat([edge_index, nodes.expand(2, -1)], dim=1)
    return edges, None if own is None else torch.cat([numbers, own])

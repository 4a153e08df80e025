"""Products with the matrix of a graph; their gradients are products of the same two kinds.

    Out[Row[g],n] += Val[g,q] * X[Col[g,q],n]         carry: from senders to receivers, or back by the transpose
    W[g,q] += A[Row[g],n] * B[Col[g,q],n]             compare: one number per edge

Gradients of any order are made of the two, so they write rows of one group each, and no tensor has both an axis of
edges and one of features.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from insum_nn.compiler.api import BoundProgram, BoundSums, multilinear
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.ops.graph_matrix import GraphMatrix

__all__ = ["CARRY", "COMPARE", "OPERANDS", "fixed_order", "graph_compare", "graph_product"]

CARRY = "Out[Row[g],n] += Val[g,q] * X[Col[g,q],n]"
COMPARE = "W[g,q] += A[Row[g],n] * B[Col[g,q],n]"
OPERANDS = MappingProxyType({"Out": ("Val", "X"), "X": ("Val", "Out"), "Val": ("Out", "X")})


def graph_product(
    graph: GraphMatrix,
    values: Tensor,
    dense: Tensor,
    *,
    bias: Tensor | None = None,
    transposed: bool = False,
    options: Options = DEFAULT,
) -> Tensor:
    """Carry features along the edges of a graph.

        Out[Row[g],n] += Val[g,q] * X[Col[g,q],n]

    Args:
        graph: the matrix.
        values: (p,) in the order of `graph.entries`; differentiable to any order.
        dense: (n, f); dtype and device of the values; differentiable to any order.
        bias: (f,), what every row starts from; dtype of the values; differentiable to any order.
        transposed: carry from receivers to senders.
        options: compile options.

    Returns:
        (n, f).
    """
    return multilinear(_Sums(graph, options), "X" if transposed else "Out", values, dense, initial=bias)


def graph_compare(graph: GraphMatrix, a: Tensor, b: Tensor, options: Options = DEFAULT) -> Tensor:
    """Compare features at both ends of every entry of a graph.

        W[g,q] += A[Row[g],n] * B[Col[g,q],n]

    Args:
        graph: the matrix.
        a: (n, f): what receivers have; differentiable to any order.
        b: (n, f): what senders have; differentiable to any order.
        options: compile options.

    Returns:
        (p,) in the order of `graph.entries`.
    """
    return multilinear(_Sums(graph, options), "Val", a, b)


@dataclass(slots=True)
class _Sums(BoundSums):
    """The sums of a graph over its entries: for receivers, for senders, and one number per entry."""

    graph: GraphMatrix
    options: Options

    operands = OPERANDS

    def call(
        self, requested: str, operands: tuple[Tensor, ...], made: dict[str, Tensor] | None
    ) -> tuple[BoundProgram, Sequence[Tensor], tuple[int | None, ...], Hashable]:
        graph, options, (a, b) = self.graph, fixed_order(self.options), operands
        if requested == "Val":
            key = (a.shape, b.shape, a.dtype, b.dtype, a.device, b.device)
            return graph.by_row.bound(COMPARE, options), operands, (graph.num_entries, 1), key
        transposed = requested == "X"
        grouped = graph.grouped(transposed)
        # The rest of the call's sizes follows from the graph and the direction.
        key = (b.shape, b.dtype, b.device)
        values, columns = (grouped.spread(a), None) if made is None else (graph.spread(a, transposed), b.shape[1])
        return grouped.bound(CARRY, options), (values, b), (graph.num_nodes, columns), key

    def result(self, requested: str, written: Tensor) -> Tensor:
        return written.squeeze(1) if requested == "Val" else written


def fixed_order(options: Options) -> Options:
    """Return the options, deterministic where torch's own switch says so."""
    if torch.are_deterministic_algorithms_enabled() and not options.deterministic:
        return replace(options, deterministic=True)
    return options

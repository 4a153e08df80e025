"""Products with the matrix of a graph; their gradients are products of the same two kinds.

    Out[Row[g],n] += Val[g,q] * X[Col[g,q],n]         carry: from senders to receivers, or back by the transpose
    W[g,q] += A[Row[g],n] * B[Col[g,q],n]             compare: one number per edge

Gradients of any order are made of the two, so they write rows of one group each, and no tensor has both an axis of
edges and one of features.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from insum_nn.compiler.api import built_program, multilinear
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.ops.graph_matrix import GraphMatrix, Grouped
from insum_nn.ops.spmm import SPMM

__all__ = ["CARRY", "COMPARE", "OPERANDS", "fixed_order", "graph_compare", "graph_product"]

# C[Row[g],n] += Val[g,q] * B[Col[g,q],n]: a graph's matrix is grouped along the rows of the product (`GraphMatrix`).
CARRY = SPMM["GroupCOO along rows"]
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


class _Sums(NamedTuple):
    """The sums of a graph over its entries: for receivers, for senders, and one number per entry."""

    graph: GraphMatrix
    options: Options

    operands = OPERANDS

    def eager(
        self, requested: str, operands: tuple[Tensor, ...], made: dict[str, Tensor], initial: Tensor | None = None
    ) -> Tensor:
        graph, (a, b) = self.graph, operands
        if requested == "Val":
            if graph.num_entries > graph.num_nodes**2:
                # torch's sampled product refuses a pattern with more entries than cells; there are few nodes then.
                return (a[graph.entries.row] * b[graph.entries.col]).sum(-1)
            return _compared(a, b, graph, self.options)
        transposed = requested == "X"
        grouped, spread = graph.grouped(transposed), graph.spread(a, transposed)
        options, shape = fixed_order(self.options), (graph.entries.num_nodes, b.shape[1])
        if options is DEFAULT or options == DEFAULT:
            # The rest of the call's sizes follows from the graph and the direction.
            key = (b.shape, b.dtype, b.device, initial is None)
            return grouped.product(spread, b, out_shape=shape, initial=initial, key=key)
        return _carried(grouped, spread, b, initial, shape, options)

    def in_modes(self, requested: str, operands: tuple[Tensor, ...], initial: Tensor | None = None) -> Tensor:
        a, b = operands
        if requested == "Val":
            return _compared(a, b, self.graph, self.options)
        grouped = self.graph.grouped(requested == "X")
        return _carried(grouped, grouped.spread(a), b, initial, (self.graph.num_nodes, None), fixed_order(self.options))


def fixed_order(options: Options) -> Options:
    """Return the options, deterministic where torch's own switch says so."""
    if torch.are_deterministic_algorithms_enabled() and not options.deterministic:
        return replace(options, deterministic=True)
    return options


def _carried(
    grouped: Grouped,
    values: Tensor,
    dense: Tensor,
    initial: Tensor | None,
    shape: tuple[int | None, ...],
    options: Options,
) -> Tensor:
    matrix = grouped.matrix
    named = {"Row": matrix.group_index, "Col": matrix.indices[0], "Val": values, "B": dense}
    if initial is not None:
        named["C"] = initial
    return built_program(CARRY, matrix.facts, options)(tensors=named, out_shape=shape)


def _compared(a: Tensor, b: Tensor, graph: GraphMatrix, options: Options) -> Tensor:
    grouped = graph.by_row
    matrix = grouped.matrix
    named = {"Row": matrix.group_index, "Col": matrix.indices[0], "A": a, "B": b}
    compare = built_program(COMPARE, matrix.facts, fixed_order(options))
    return compare(tensors=named, out_shape=tuple(matrix.values.shape)).squeeze(1)

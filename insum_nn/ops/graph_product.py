"""Products with the matrix of a graph, and their gradients, as products of the same two kinds.

    Out[Row[g],n] += Val[g,q] * X[Col[g,q],n]         carry: from senders to receivers, or back by the transpose
    W[g,q] += A[Row[g],n] * B[Col[g,q],n]             compare: one number per edge

The gradient of each is made of the two, so that gradients of any order write rows of one group each, and no tensor
has both an axis of edges and one of features.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.api import Program, compile_built, for_each_vector, is_plain_eager
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.facts import IndexFacts
from insum_nn.ops.column_sums import column_sums
from insum_nn.ops.graph_matrix import GraphMatrix
from insum_nn.ops.modes import without_autocast
from insum_nn.ops.spmm import SPMM

__all__ = ["CARRY", "COMPARE", "fixed_order", "graph_compare", "graph_product"]

CARRY = SPMM["GroupCOO along rows"]
COMPARE = "W[g,q] += A[Row[g],n] * B[Col[g,q],n]"


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
    if not is_plain_eager(values, dense, bias):
        # Tracers and transforms know the compiler's operator, and take its derivatives from there.
        grouped = graph.grouped(transposed)
        named = {**grouped.matrix.tensors, "Val": grouped.spread(values), "B": dense}
        named |= {} if bias is None else {"C": bias}
        program = _program(CARRY, tuple(grouped.matrix.facts.items()), fixed_order(options))
        return program(tensors=named, out_shape=(graph.num_nodes, None))
    learned = values.requires_grad or dense.requires_grad or (bias is not None and bias.requires_grad)
    if learned and torch.is_grad_enabled():
        return _Carry.apply(values, dense, graph, transposed, options, bias)  # type: ignore[no-any-return]
    return _carry(graph, values, dense, bias, transposed, options)


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
    if not is_plain_eager(a, b):
        return _compared_by_groups(a, b, graph, options)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Compare.apply(a, b, graph, options)  # type: ignore[no-any-return]
    return _compared(a, b, graph, options)


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        dense: Tensor,
        graph: GraphMatrix,
        transposed: bool,
        options: Options,
        bias: Tensor | None,
    ) -> Tensor:
        # Features are read again for the gradient of values alone, and are the largest of what could be kept.
        ctx.save_for_backward(values, dense if ctx.needs_input_grad[0] else None)
        ctx.rest = graph, transposed, options
        return _carry(graph, values, dense, bias, transposed, options)

    @staticmethod
    @for_each_vector
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values, dense = ctx.saved_tensors
        graph, transposed, options = ctx.rest
        of_values = of_dense = None
        if ctx.needs_input_grad[0]:
            ends = (dense, grads[0]) if transposed else (grads[0], dense)
            of_values = graph_compare(graph, *ends, options)
        if ctx.needs_input_grad[1]:
            of_dense = graph_product(graph, values, grads[0], transposed=not transposed, options=options)
        of_bias = column_sums(grads[0], options=options) if ctx.needs_input_grad[5] else None
        return of_values, of_dense, None, None, None, of_bias


class _Compare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, graph: GraphMatrix, options: Options) -> Tensor:
        of_a, of_b = ctx.needs_input_grad[:2]
        ctx.save_for_backward(a if of_b else None, b if of_a else None)
        ctx.rest = graph, options
        return _compared(a, b, graph, options)

    @staticmethod
    @for_each_vector
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        graph, options = ctx.rest
        of_a = graph_product(graph, grads[0], b, options=options) if ctx.needs_input_grad[0] else None
        of_b = graph_product(graph, grads[0], a, transposed=True, options=options) if ctx.needs_input_grad[1] else None
        return of_a, of_b, None, None


def _carry(
    graph: GraphMatrix, values: Tensor, dense: Tensor, bias: Tensor | None, transposed: bool, options: Options
) -> Tensor:
    """`graph_product` of plain tensors in eager mode, where nothing is recorded."""
    if torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
        with torch.no_grad(), without_autocast(dense.device):
            return _carry(graph, values, dense, bias, transposed, options)
    grouped = graph.grouped(transposed)
    spread = graph.spread(values, transposed)
    options = fixed_order(options)
    shape = (graph.num_nodes, dense.shape[1])
    if options is DEFAULT or options == DEFAULT:
        # The graph and the way decide the rest.
        key = (dense.shape, dense.dtype, dense.device, bias is None)
        return grouped.product(spread, dense, out_shape=shape, start=bias, key=key)
    matrix = grouped.matrix
    named = {"Row": matrix.group_index, "Col": matrix.indices[0], "Val": spread, "B": dense}
    if bias is not None:
        named["C"] = bias
    return _program(CARRY, tuple(matrix.facts.items()), options)(tensors=named, out_shape=shape)


def fixed_order(options: Options) -> Options:
    """The options, deterministic where torch's own switch says so."""
    if torch.are_deterministic_algorithms_enabled() and not options.deterministic:
        return replace(options, deterministic=True)
    return options


def _compared(a: Tensor, b: Tensor, graph: GraphMatrix, options: Options) -> Tensor:
    with torch.no_grad(), without_autocast(a.device):
        if graph.num_entries > graph.num_nodes**2:
            # torch's sampled product refuses a pattern with more entries than cells. So many duplicates mean few nodes.
            return (a[graph.entries.row] * b[graph.entries.col]).sum(-1)
        return _compared_by_groups(a, b, graph, options)


def _compared_by_groups(a: Tensor, b: Tensor, graph: GraphMatrix, options: Options) -> Tensor:
    grouped = graph.by_row
    matrix = grouped.matrix
    program = _program(COMPARE, tuple(matrix.facts.items()), fixed_order(options))
    named = {"Row": matrix.group_index, "Col": matrix.indices[0], "A": a, "B": b}
    return grouped.collect(program(tensors=named, out_shape=tuple(matrix.values.shape)))


_programs: dict[object, Program] = {}


def _program(expression: str, facts: tuple[tuple[str, IndexFacts], ...], options: Options) -> Program:
    key = (expression, facts, options)
    found = _programs.get(key)
    if found is None:
        found = _programs[key] = compile_built(expression, facts=dict(facts), options=options)
    return found

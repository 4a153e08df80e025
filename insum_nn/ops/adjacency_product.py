"""Products with the matrix of a graph that was normalised and sorted before: nothing of it is made in a call.

    Out[Row[g],n] += Val[g,q] * X[Col[g,q],n]         from senders to receivers, or back by the transpose
    W[g,q] += A[Row[g],n] * B[Col[g,q],n]             one number per edge, for the gradient of its weight

A graph that torch records takes the matrix and its transpose as inputs, and gradients are products with either.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from insum_nn.compiler.api import (
    built_program,
    inline_by_rows,
    is_traced,
    multilinear_traced,
    options_text,
)
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumDeviceError, InsumShapeError
from insum_nn.facts import IndexFacts, NamedFacts
from insum_nn.ops.graph_conv import graph_values, to_product_dtype
from insum_nn.ops.graph_matrix import GraphMatrix, Recipe
from insum_nn.ops.graph_product import CARRY, COMPARE, OPERANDS, fixed_order, graph_product
from insum_nn.ops.statements import static_shape
from insum_nn.structure.adjacency import Adjacency

__all__ = ["adjacency_product"]

_FACTS = NamedFacts(Row=IndexFacts(sorted=True, masked=False, proven=True), Col=IndexFacts(masked=False, proven=True))
_AS_IT_IS = Recipe(normalize=False, loops="none")


def adjacency_product(
    x: Tensor, adjacency: Adjacency, bias: Tensor | None = None, *, options: Options = DEFAULT
) -> Tensor:
    """Sum node features along the edges of a graph.

        Out[Row[g],n] += Val[g,q] * X[Col[g,q],n]

    Args:
        x: (n, f); differentiable.
        adjacency: the matrix; its `value` is differentiable. Dtypes are promoted as in a product.
        bias: (f,), added to every row; differentiable. Dtypes are promoted as in a sum.
        options: compile options.

    Returns:
        (n, f).

    Raises:
        InsumShapeError: the matrix has not one row per node.
        InsumDeviceError: tensors of two devices.

    >>> graph = Adjacency.from_edges(torch.tensor([[0, 1], [1, 2]]), num_nodes=3, normalize=False)
    >>> adjacency_product(torch.eye(3), graph).tolist()
    [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    x = _agree(x, adjacency)
    value = adjacency.value
    initial = bias if bias is not None and bias.dtype == x.dtype else None
    if torch.compiler.is_dynamo_compiling() or torch.jit.is_tracing() or is_traced(x, value, bias):
        out = torch.ops.insum_nn.adjacency_product(x, list(adjacency), initial, options_text(options))
    else:
        graph = GraphMatrix.of_adjacency(adjacency)
        values = graph_values(graph, value, _AS_IT_IS, x.dtype, options)
        out = graph_product(graph, values, x, bias=initial, options=options)
    return out if bias is None or initial is not None else out + bias


def _agree(x: Tensor, adjacency: Adjacency) -> Tensor:
    """Check that the operands fit; return the features, in the dtype of the product."""
    value, nodes = adjacency.value, static_shape(x)[0]
    if value.device != x.device:
        raise InsumDeviceError(
            "node features and the adjacency are on different devices",
            details=[f"x is on {x.device}, the adjacency on {value.device}"],
            fix=f"move its tensors to '{x.device}', or build it from an edge_index that is there.",
        )
    if nodes != adjacency.num_nodes:
        raise InsumShapeError(
            "the adjacency does not fit the node features",
            details=[f"expected a row of features for each of {adjacency.num_nodes} nodes; got {nodes}"],
            fix="pass one row of features per node of the graph.",
            expected=adjacency.num_nodes,
            got=nodes,
        )
    return to_product_dtype(x, value)


class _Sums(NamedTuple):
    """The sums of a matrix over its entries: for receivers, for senders, and one number per entry.

    Attributes:
        adjacency: the matrix.
        learned: there are gradients of its values, to which the transposed ones do not lead.
        options: compile options.
    """

    adjacency: Adjacency
    learned: bool
    options: Options

    operands = OPERANDS

    def eager(
        self, requested: str, operands: tuple[Tensor, ...], made: dict[str, Tensor], initial: Tensor | None = None
    ) -> Tensor:
        return self.in_modes(requested, operands, initial)

    def in_modes(self, requested: str, operands: tuple[Tensor, ...], initial: Tensor | None = None) -> Tensor:
        own, (a, b) = self.adjacency, operands
        row, col = own.row, own.col
        if requested == "Val":
            named, shape = {"Row": row, "Col": col.unsqueeze(1), "A": a, "B": b}, (row.shape[0], 1)
            return built_program(COMPARE, _FACTS, self.options)(tensors=named, out_shape=shape).squeeze(1)
        begin = own.begin
        if requested == "X":
            row, col, begin = own.t_row, own.t_col, own.t_begin
            a = a.index_select(0, own.order) if self.learned else own.t_value.to(b.dtype)
        named = {"Row": row, "Col": col.unsqueeze(1), "Val": a.unsqueeze(1), "X": b}
        if initial is not None:
            named["Out"] = initial
        program, shape = built_program(CARRY, _FACTS, self.options), (own.num_nodes, None)
        result = inline_by_rows(program.spec, named, "Row", begin, shape)
        return program(tensors=named, out_shape=shape) if result is None else result


# Dynamo and TorchScript keep this operator; AOTAutograd, export and make_fx decompose it into torch's operations.

torch.library.define(
    "insum_nn::adjacency_product", "(Tensor x, Tensor[] adjacency, Tensor? initial, str options) -> Tensor"
)


@torch.library.impl("insum_nn::adjacency_product", "CompositeImplicitAutograd")
def _composite(x: Tensor, adjacency: list[Tensor], initial: Tensor | None, options: str) -> Tensor:
    matrix, chosen = Adjacency(*adjacency), Options.from_json(options)
    if not is_traced(x, matrix.value, initial):
        return adjacency_product(x, matrix, initial, options=chosen)
    learned = torch.is_grad_enabled() and matrix.value.requires_grad
    sums = _Sums(matrix, learned, fixed_order(chosen))
    return multilinear_traced(sums, "Out", matrix.value.to(x.dtype), x, initial=initial)

"""Products with the matrix of a graph that was normalised and sorted before: nothing of it is made in a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from insum_nn.compiler.api import Sums, built_program, inline_by_rows, is_traced, options_text
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumDeviceError, InsumShapeError
from insum_nn.facts import IndexFacts, NamedFacts
from insum_nn.ops.statements import run, static_shape, to_autocast, under_autocast
from insum_nn.structure.adjacency import Adjacency

__all__ = ["ADJACENCY_PRODUCT", "adjacency_product"]

ADJACENCY_PRODUCT = "Out[Row[p],n] += Val[p] * X[Col[p],n]"
_COMPARE = "W[p] += A[Row[p],n] * B[Col[p],n]"
_FACTS = NamedFacts(Row=IndexFacts(sorted=True, masked=False, proven=True), Col=IndexFacts(masked=False, proven=True))


def adjacency_product(
    x: Tensor, adjacency: Adjacency, bias: Tensor | None = None, *, options: Options = DEFAULT
) -> Tensor:
    """Sum node features along the edges of a graph.

        Out[Row[p],n] += Val[p] * X[Col[p],n]

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
    value, nodes = adjacency.value, static_shape(x)[0]
    if value.device != x.device:
        raise InsumDeviceError(
            "node features and the adjacency are on different devices",
            details=[f"x is on {x.device}, the adjacency on {value.device}"],
            fix=f"move its tensors to '{x.device}', or build it from an edge_index that is there.",
        )
    if (rows := adjacency.num_nodes) != nodes:
        raise InsumShapeError(
            "the adjacency does not fit the node features",
            details=[f"expected ({nodes}, {nodes}), a row and a column per node; got ({rows}, {rows})"],
            fix="pass one row of features per node of the graph.",
        )
    if under_autocast(x.device) and x.is_floating_point() and x.dtype != torch.float64:
        x = to_autocast(x)
    else:
        x = x.to(torch.promote_types(x.dtype, value.dtype))
    initial = bias if bias is not None and bias.dtype == x.dtype else None
    if torch.compiler.is_dynamo_compiling() or torch.jit.is_tracing() or is_traced(x, value, bias):
        out = torch.ops.insum_nn.adjacency_product(x, list(adjacency), initial, options_text(options))
    else:
        named = {"Row": adjacency.row, "Col": adjacency.col, "Val": value.to(x.dtype), "X": x}
        named |= {} if initial is None else {"Out": initial}
        out = run(ADJACENCY_PRODUCT, _FACTS, named, options, (nodes, None))
    return out if bias is None or initial is not None else out + bias


@dataclass(slots=True, eq=False)
class _Sums(Sums):
    """The sums of a matrix over its entries: for receivers, for senders, and one number per entry.

    A graph that torch records takes the matrix and its transpose as inputs, and gradients are products with either.

    Attributes:
        adjacency: the matrix.
        learned: there are gradients of its values, to which the transposed ones do not lead.
        options: compile options.
    """

    adjacency: Adjacency
    learned: bool
    options: Options

    def run(
        self, requested: Sequence[str], operands: Mapping[str, Tensor], initial: Tensor | None = None, **_: bool
    ) -> dict[str, Tensor]:
        return {name: self._by_program(name, operands, initial) for name in requested}

    def _by_program(self, requested: str, operands: Mapping[str, Tensor], initial: Tensor | None) -> Tensor:
        own = self.adjacency
        row, col, begin = own.row, own.col, own.begin
        if requested == "Val":
            named = {"Row": row, "Col": col, "A": operands["Out"], "B": operands["X"]}
            return built_program(_COMPARE, _FACTS, self.options)(tensors=named, out_shape=(row.shape[0],))
        a, b = operands["Val"], operands["Out" if requested == "X" else "X"]
        if requested == "X":
            row, col, begin = own.t_row, own.t_col, own.t_begin
            a = a.index_select(0, own.order) if self.learned else own.t_value.to(b.dtype)
        named = {"Row": row, "Col": col, "Val": a, "X": b}
        if initial is not None:
            named["Out"] = initial
        program, shape = built_program(ADJACENCY_PRODUCT, _FACTS, self.options), (own.num_nodes, None)
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
    operands = {"Val": matrix.value.to(x.dtype), "X": x}
    return _Sums(matrix, learned, chosen).in_modes("Out", operands, initial)

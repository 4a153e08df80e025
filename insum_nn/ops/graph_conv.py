"""Graph convolution without its weights: the matrix of a graph, normalised by degrees, times node features.

    Out[Row[g],n] += Val[g,q] * X[Col[g,q],n]

The graph is an edge list, or an `Adjacency`, which was normalised and sorted before: nothing of it is made in a call.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from insum_nn.compiler.api import (
    adds_atomically,
    built_program,
    for_each_vector,
    inline_by_rows,
    is_traced,
    is_transformed,
    multilinear_traced,
    options_text,
    recorded,
    records_graph,
)
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.dtypes import wide_dtype
from insum_nn.errors import InsumDeviceError
from insum_nn.facts import IndexFacts, NamedFacts
from insum_nn.ops.graph_matrix import (
    CARRY,
    COMPARE,
    OPERANDS,
    SYMMETRIC,
    GraphMatrix,
    Recipe,
    fixed_order,
    graph_compare,
    graph_matrix,
    graph_product,
)
from insum_nn.ops.statements import run, static_shape, to_autocast, under_autocast, untraced
from insum_nn.structure.adjacency import Adjacency
from insum_nn.structure.gcn_norm import by_degrees, inverse_root
from insum_nn.structure.graph_entries import (
    check_edge_index,
    check_edge_weight,
    check_square,
    edge_entries,
    entry_weights,
)
from insum_nn.structure.plain_tensors import is_batched, plain_tensors, without_transforms

__all__ = [
    "GRAPH_ENTRIES",
    "adjacency_product",
    "graph_conv",
]


def _graph_values(
    graph: GraphMatrix, edge_weight: Tensor | None, recipe: Recipe, dtype: torch.dtype, options: Options = DEFAULT
) -> Tensor:
    """Return (p,) the values of a graph's entries.

        Val[p] = D[Row[p]] * Weight[p] * D[Col[p]],        D = (sum of weights that a node receives) ** -0.5

    Args:
        graph: the matrix.
        edge_weight: (e,) floating-point; differentiable. `None`: all weights are 1, also those of added self-loops.
        recipe: normalisation and the weight of added self-loops.
        dtype: of the values; fp16 and bf16 are normalised in float32.
        options: compile options.
    """
    options = fixed_order(options)
    if edge_weight is None:
        if not recipe.normalize:
            return graph.ones(dtype)
        return graph.constant(
            ("normal", dtype, options), lambda: _normalised(graph, graph.ones(wide_dtype(dtype)), options).to(dtype)
        )

    def build() -> Tensor:
        weights = entry_weights(graph.entries, edge_weight.to(wide_dtype(dtype)), recipe.fill)
        return (_normalised(graph, weights, options) if recipe.normalize else weights).to(dtype)

    if (torch.is_grad_enabled() and edge_weight.requires_grad) or is_transformed() or edge_weight.is_inference():
        return build()

    def steady() -> Tensor:
        with plain_tensors(edge_weight):
            return build()

    return graph.remembered.get([edge_weight], (recipe.normalize, recipe.fill, dtype, options), steady)


def _normalised(graph: GraphMatrix, weights: Tensor, options: Options) -> Tensor:
    row, col = graph.entries.row, graph.entries.col
    learned = (weights.requires_grad and torch.is_grad_enabled()) or is_transformed()
    if (learned or options.deterministic) and adds_atomically(weights.device):
        # By products with the matrix, whose gradients need no atomic additions.
        degree = graph_product(graph, weights, weights.new_ones(graph.num_nodes, 1), options=options)
        root = inverse_root(degree)
        return weights * graph_compare(graph, root, root, options)
    return by_degrees(row, col, weights, graph.num_nodes)


def graph_conv(
    x: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    recipe: Recipe = SYMMETRIC,
    options: Options = DEFAULT,
) -> Tensor:
    """Sum node features along the edges of a graph, normalised by degrees.

        Out[Row[g],n] += Val[g,q] * X[Col[g,q],n]

    Source: Kipf, Welling, Semi-Supervised Classification with Graph Convolutional Networks (ICLR 2017), eq. (2).

    Args:
        x: (n, f); differentiable.
        edge_index: (2, e): sources, targets; int32 or int64.
        edge_weight: (e,) or (e, 1); differentiable. Dtypes are promoted as in a product.
        bias: (f,), added to every row; differentiable. Dtypes are promoted as in a sum.
        recipe: normalisation, self-loops, flow.
        options: compile options.

    Returns:
        (n, f).

    Raises:
        InsumShapeError: `edge_index` has not two rows, or there is not one weight per edge.
        InsumDtypeError: nodes are no integers, or weights to be normalised no floating-point numbers.
        InsumRangeError: a node lies outside.
        InsumDeviceError: tensors of two devices.

    >>> edges = torch.tensor([[0, 1], [1, 2]])
    >>> graph_conv(torch.eye(3), edges, recipe=Recipe(normalize=False, loops="none")).tolist()
    [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    x, edge_weight = _agree(x, edge_index, edge_weight, recipe)
    initial = None
    if torch.compiler.is_dynamo_compiling() or torch.jit.is_tracing():
        out = torch.ops.insum_nn.graph_conv(x, edge_index, edge_weight, *recipe, options_text(options))
    elif is_traced(x, edge_index, edge_weight, bias):
        if records_graph((x,)) and not (options.validate or options.deterministic):
            out = _in_graph(x, edge_index, edge_weight, recipe, options)
        else:
            constants = *recipe, options_text(options), False
            out = torch.ops.insum_nn.graph_conv_call(x, edge_index, edge_weight, *constants)
    elif is_batched(edge_index):
        check_edge_index(edge_index, x.shape[0])
        out = _in_graph(x, edge_index, edge_weight, recipe, fixed_order(options))
    else:
        graph = graph_matrix(edge_index, x.shape[0], recipe, again=options.validate)
        values = _graph_values(graph, edge_weight, recipe, x.dtype, options)
        # As the sum's initial value the bias spares a pass over the output.
        initial = bias if bias is not None and bias.dtype == x.dtype else None
        out = graph_product(graph, values, x, bias=initial, options=options)
    return out if bias is None or initial is not None else out + bias


def _agree(x: Tensor, edge_index: Tensor, edge_weight: Tensor | None, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """Check the operands' devices and dtypes; return the features, in the dtype of the product, and the weights."""
    if edge_index.device != x.device or (edge_weight is not None and edge_weight.device != x.device):
        where = {"x": x, "edge_index": edge_index, "edge_weight": edge_weight}
        raise InsumDeviceError(
            "node features, edges and weights are on different devices",
            details=[f"{name} is on {tensor.device}" for name, tensor in where.items() if tensor is not None],
            fix=f"move the graph with edge_index.to('{x.device}').",
        )
    if edge_weight is not None:
        with untraced() if torch.jit.is_tracing() else nullcontext():
            check_edge_weight(edge_weight, edge_index.shape[1], normalized=recipe.normalize)
        edge_weight = edge_weight if edge_weight.ndim == 1 else edge_weight.squeeze(1)
    return _to_product_dtype(x, edge_weight), edge_weight


def _to_product_dtype(x: Tensor, weights: Tensor | None) -> Tensor:
    """Cast features to the dtype of their product with weights: autocast's where it is active, else promoted."""
    if under_autocast(x.device) and x.is_floating_point() and x.dtype != torch.float64:
        return to_autocast(x)
    return x if weights is None else x.to(torch.promote_types(x.dtype, weights.dtype))


# Dynamo and TorchScript keep this operator; AOTAutograd, export and make_fx decompose it into torch's operations.

_CONSTANTS = "bool normalize, str loops, float fill, str flow, str options"
torch.library.define(
    "insum_nn::graph_conv", f"(Tensor x, Tensor edge_index, Tensor? edge_weight, {_CONSTANTS}) -> Tensor"
)


def _of_constants(*constants: Any) -> tuple[Recipe, Options]:
    *recipe, options = constants
    return Recipe(*recipe), Options.from_json(options)


@torch.library.impl("insum_nn::graph_conv", "CompositeImplicitAutograd")
def _composite(x: Tensor, edge_index: Tensor, edge_weight: Tensor | None, *constants: Any) -> Tensor:
    recipe, options = _of_constants(*constants)
    return graph_conv(x, edge_index, edge_weight, recipe=recipe, options=options)


# An entry without a row is an edge that does not count.
GRAPH_ENTRIES = "Out[Row[p],n] += Val[p] * X[Col[p],n]"
_NORMALISED = "W[p] += X[Row[p],n] * Val[p] * X[Col[p],n]"
_ENTRY_FACTS = NamedFacts(Row=IndexFacts(masked=True, proven=True), Col=IndexFacts(masked=False, proven=True))


def _in_graph(x: Tensor, edge_index: Tensor, edge_weight: Tensor | None, recipe: Recipe, options: Options) -> Tensor:
    """Convolve so that no size depends on values: in graphs that torch records, and for a batch of graphs."""
    nodes, edges = x.shape[0], edge_index.shape[1]
    check_edge_index(edge_index, nodes, values=False)
    inside = without_transforms((edge_index >= 0) & (edge_index < nodes))
    torch.ops.aten._assert_async.msg(inside.all(), "'edge_index' holds a node that has no row of features")
    entries = edge_entries(edge_index, nodes, loops=recipe.loops, flow=recipe.flow, fixed_size=True)
    dtype = wide_dtype(x.dtype)
    if edge_weight is None:
        weights = torch.ones(entries.row.shape[0], dtype=dtype, device=x.device)
    else:
        weights = entry_weights(entries, edge_weight.to(dtype), recipe.fill)
    row, col = entries.row, entries.col
    if recipe.loops in ("remaining", "replaced"):
        # A self-loop of the input gives way to the one that each node is given.
        counts = (row != col) | (torch.arange(row.shape[0], device=x.device) >= edges)
        weights = torch.where(counts, weights, 0.0)
        row = torch.where(counts, row, -1)
    named = {"Row": row, "Col": col, "Val": weights, "X": weights.new_ones(nodes, 1)}
    if recipe.normalize and options.deterministic:
        # `by_degrees` adds in no fixed order on a GPU.
        root = inverse_root(run(GRAPH_ENTRIES, _ENTRY_FACTS, named, options, (nodes, 1)))
        weights = run(_NORMALISED, _ENTRY_FACTS, named | {"X": root}, options, None)
    elif recipe.normalize:
        weights = by_degrees(entries.row, col, weights, nodes)
    return run(GRAPH_ENTRIES, _ENTRY_FACTS, named | {"Val": weights.to(x.dtype), "X": x}, options, (nodes, None))


# Calls with `deterministic` or `validate` stay one operator, behind which the graph is kept as in eager calls.

_CALL = f"Tensor x, Tensor edge_index, Tensor? edge_weight, {_CONSTANTS}, bool transposed"


@torch.library.custom_op("insum_nn::graph_conv_call", mutates_args=(), schema=f"({_CALL}) -> Tensor")
def _operator(x: Tensor, edge_index: Tensor, edge_weight: Tensor | None, *rest: Any) -> Tensor:
    *constants, transposed = rest
    recipe, options = _of_constants(*constants)
    graph = graph_matrix(edge_index, x.shape[0], recipe, again=options.validate)
    values = _graph_values(graph, edge_weight, recipe, x.dtype, options)
    return graph_product(graph, values, x, transposed=transposed, options=options)


_operator.register_fake(lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format))


@torch.library.custom_op(
    "insum_nn::graph_conv_weight_gradient",
    mutates_args=(),
    schema=f"(Tensor grad, {_CALL.replace('Tensor?', 'Tensor')}) -> Tensor",
)
def _weight_gradient(grad: Tensor, x: Tensor, edge_index: Tensor, edge_weight: Tensor, *rest: Any) -> Tensor:
    *constants, transposed = rest
    recipe, options = _of_constants(*constants)
    graph = graph_matrix(edge_index, x.shape[0], recipe)
    of_values = graph_compare(graph, *((x, grad) if transposed else (grad, x)), options)
    with recorded():
        weight = edge_weight.detach().requires_grad_()
        values = _graph_values(graph, weight, recipe, x.dtype, options)
        (of_weight,) = torch.autograd.grad(values, weight, of_values)
    return of_weight


_weight_gradient.register_fake(lambda grad, x, edges, weight, *_: torch.empty_like(weight).contiguous())


def _operator_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, edge_index, edge_weight, *rest = inputs
    ctx.save_for_backward(x, edge_index, edge_weight)
    ctx.rest = rest


@for_each_vector
def _operator_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, edge_index, edge_weight = ctx.saved_tensors
    *rest, transposed = ctx.rest
    of_x = of_weight = None
    if ctx.needs_input_grad[0]:
        of_x = torch.ops.insum_nn.graph_conv_call(grad, edge_index, edge_weight, *rest, not transposed)
    if edge_weight is not None and ctx.needs_input_grad[2]:
        call = torch.ops.insum_nn.graph_conv_weight_gradient
        of_weight = call(grad.contiguous(), x, edge_index, edge_weight, *rest, transposed)
    return of_x, None, of_weight, *(None for _ in ctx.rest)


_operator.register_autograd(_operator_backward, setup_context=_operator_context)


# The same with a graph that was normalised and sorted before. A graph that torch records takes the matrix and its
# transpose as inputs, and gradients are products with either.

_SORTED = NamedFacts(Row=IndexFacts(sorted=True, masked=False, proven=True), Col=IndexFacts(masked=False, proven=True))
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
    x = _agree_with(x, adjacency)
    value = adjacency.value
    initial = bias if bias is not None and bias.dtype == x.dtype else None
    if torch.compiler.is_dynamo_compiling() or torch.jit.is_tracing() or is_traced(x, value, bias):
        out = torch.ops.insum_nn.adjacency_product(x, list(adjacency), initial, options_text(options))
    else:
        graph = GraphMatrix.of_adjacency(adjacency)
        values = _graph_values(graph, value, _AS_IT_IS, x.dtype, options)
        out = graph_product(graph, values, x, bias=initial, options=options)
    return out if bias is None or initial is not None else out + bias


def _agree_with(x: Tensor, adjacency: Adjacency) -> Tensor:
    """Check that the operands fit; return the features, in the dtype of the product."""
    value, nodes = adjacency.value, static_shape(x)[0]
    if value.device != x.device:
        raise InsumDeviceError(
            "node features and the adjacency are on different devices",
            details=[f"x is on {x.device}, the adjacency on {value.device}"],
            fix=f"move its tensors to '{x.device}', or build it from an edge_index that is there.",
        )
    if nodes != (rows := adjacency.num_nodes):
        check_square(rows, rows, nodes)
    return _to_product_dtype(x, value)


class _AdjacencySums(NamedTuple):
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

    def in_modes(self, requested: str, operands: tuple[Tensor, ...], initial: Tensor | None = None) -> Tensor:
        own, (a, b) = self.adjacency, operands
        row, col = own.row, own.col
        if requested == "Val":
            named, shape = {"Row": row, "Col": col.unsqueeze(1), "A": a, "B": b}, (row.shape[0], 1)
            return built_program(COMPARE, _SORTED, self.options)(tensors=named, out_shape=shape).squeeze(1)
        begin = own.begin
        if requested == "X":
            row, col, begin = own.t_row, own.t_col, own.t_begin
            a = a.index_select(0, own.order) if self.learned else own.t_value.to(b.dtype)
        named = {"Row": row, "Col": col.unsqueeze(1), "Val": a.unsqueeze(1), "X": b}
        if initial is not None:
            named["Out"] = initial
        program, shape = built_program(CARRY, _SORTED, self.options), (own.num_nodes, None)
        result = inline_by_rows(program.spec, named, "Row", begin, shape)
        return program(tensors=named, out_shape=shape) if result is None else result


# Dynamo and TorchScript keep this one too, as they keep `insum_nn::graph_conv`.

torch.library.define(
    "insum_nn::adjacency_product", "(Tensor x, Tensor[] adjacency, Tensor? initial, str options) -> Tensor"
)


@torch.library.impl("insum_nn::adjacency_product", "CompositeImplicitAutograd")
def _adjacency_composite(x: Tensor, adjacency: list[Tensor], initial: Tensor | None, options: str) -> Tensor:
    matrix, chosen = Adjacency(*adjacency), Options.from_json(options)
    if not is_traced(x, matrix.value, initial):
        return adjacency_product(x, matrix, initial, options=chosen)
    learned = torch.is_grad_enabled() and matrix.value.requires_grad
    sums = _AdjacencySums(matrix, learned, fixed_order(chosen))
    return multilinear_traced(sums, "Out", matrix.value.to(x.dtype), x, initial=initial)

"""Products with the matrix of a graph, and their gradients, as products of the same two kinds.

    Out[Row[g],n] += Val[g,q] * X[Col[g,q],n]         carry: from senders to receivers, or back by the transpose
    W[g,q] += A[Row[g],n] * B[Col[g,q],n]             compare: one number per edge

The gradient of each is made of the two, so that gradients of any order write rows that one group owns, and no tensor
has both an axis of edges and one of features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from insum_nn.compiler.api import Explanation, Program, compile
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumDeviceError, InsumDtypeError
from insum_nn.facts import IndexFacts
from insum_nn.ops.graph_matrix import GraphMatrix, Grouped, TensorCache
from insum_nn.ops.spmm import SPMM
from insum_nn.structure.gcn_norm import (
    Flow,
    Loops,
    check_edge_index,
    check_edge_weight,
    edge_entries,
    entry_weights,
    inverse_root,
)

__all__ = [
    "CARRY",
    "COMPARE",
    "Recipe",
    "clear_graphs",
    "explain_graph_conv",
    "graph_conv",
    "graph_matrix",
    "graph_product",
    "graph_values",
]

CARRY = SPMM["GroupCOO along rows"]
COMPARE = "W[g,q] += A[Row[g],n] * B[Col[g,q],n]"
_PARTIAL = "P[g,n] += Val[g,q] * B[Col[g,q],n]"
_COLLECT = "P[h,n] += Q[Idx[h,q],n]"
_PLACE = "C[m,n] = Q[Last[m],n]"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a graph's edges become the matrix that its features are multiplied by.

    Attributes:
        normalize: weigh each entry by the inverse roots of both ends' degrees.
        loops: self-loops that are added; see `edge_entries`.
        fill: weight of a self-loop that is added, where edges have weights.
        flow: which end of an edge receives.
    """

    normalize: bool = True
    loops: Loops = "remaining"
    fill: float = 1.0
    flow: Flow = "source_to_target"


# Building.

_graphs = TensorCache(limit=32)


def clear_graphs() -> None:
    """Forget the matrices of all graphs."""
    _graphs.clear()


def graph_matrix(edge_index: Tensor, num_nodes: int, recipe: Recipe, *, key: Tensor | None = None) -> GraphMatrix:
    """The matrix of a graph; built once for each edge list, by identity and version.

    Args:
        edge_index: (2, e) integers.
        num_nodes: nodes.
        recipe: self-loops and flow; the rest decides only values.
        key: the tensor that the matrix is remembered under, where `edge_index` was made from it just now.

    Raises:
        InsumShapeError: not two rows.
        InsumDtypeError: no integers.
        InsumRangeError: a node lies outside.
    """

    def build() -> GraphMatrix:
        with torch.inference_mode(False), torch.no_grad():
            edges = edge_index.clone() if edge_index.is_inference() else edge_index
            check_edge_index(edges, num_nodes)
            return GraphMatrix(edge_entries(edges, num_nodes, loops=recipe.loops, flow=recipe.flow))

    return _graphs.get([edge_index if key is None else key], (num_nodes, recipe.loops, recipe.flow), build)


def graph_values(graph: GraphMatrix, edge_weight: Tensor | None, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """(p,) the values of a graph's entries.

        Val[p] = D[Row[p]] * Weight[p] * D[Col[p]],        D = (sum of weights that a node receives) ** -0.5

    Args:
        graph: the matrix.
        edge_weight: (e,) floating-point; differentiable. `None`: all weights are 1, also those of added self-loops.
        recipe: normalisation and the weight of added self-loops.
        dtype: of the values; half types are normalised in float32.
    """
    if edge_weight is None:
        if not recipe.normalize:
            return graph.ones(dtype)
        return graph.constant(("normal", dtype), lambda: _normalised(graph, graph.ones(_wide(dtype))).to(dtype))

    def build() -> Tensor:
        weights = entry_weights(graph.entries, edge_weight.to(_wide(dtype)), recipe.fill)
        return (_normalised(graph, weights) if recipe.normalize else weights).to(dtype)

    if (torch.is_grad_enabled() and edge_weight.requires_grad) or _transformed() or edge_weight.is_inference():
        return build()

    def steady() -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return graph.keep(build())

    return graph.remembered.get([edge_weight], (recipe.normalize, recipe.fill, dtype), steady)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _normalised(graph: GraphMatrix, weights: Tensor) -> Tensor:
    if weights.requires_grad and torch.is_grad_enabled() or _transformed():
        # By the products, whose gradients need no atomic addition.
        degree = graph_product(graph, weights, weights.new_ones(graph.num_nodes, 1))
        root = inverse_root(degree)
        return weights * _compare(graph, root, root)
    degree = weights.new_zeros(graph.num_nodes).index_add(0, graph.entries.row, weights)
    root = inverse_root(degree)
    return root[graph.entries.row] * weights * root[graph.entries.col]


# Products.


def graph_product(
    graph: GraphMatrix, values: Tensor, dense: Tensor, *, transposed: bool = False, options: Options = DEFAULT
) -> Tensor:
    """Carry features along the edges of a graph.

        Out[Row[g],n] += Val[g,q] * X[Col[g,q],n]

    Args:
        graph: the matrix.
        values: (p,) in the order of `graph.entries`; differentiable to any order.
        dense: (n, f); dtype and device of the values; differentiable to any order.
        transposed: carry from receivers to senders.
        options: compile options. `deterministic`: on a GPU sums are formed level by level instead of by atomics.

    Returns:
        (n, f).
    """
    if _transformed():
        grouped = graph.grouped(transposed)
        named = {**grouped.matrix.tensors, "Val": grouped.spread(values), "B": dense}
        return grouped.program(tensors=named, out_shape=(graph.num_nodes, None))
    if torch.is_grad_enabled() and (values.requires_grad or dense.requires_grad):
        return _Carry.apply(values, dense, graph, transposed, options)  # type: ignore[no-any-return]
    return _carry(values, dense, graph, transposed, options)


def _compare(graph: GraphMatrix, a: Tensor, b: Tensor, options: Options = DEFAULT) -> Tensor:
    """(p,) the product of the receiver's row of `a` with the sender's row of `b`."""
    if _transformed():
        return (a[graph.entries.row] * b[graph.entries.col]).sum(-1)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Compare.apply(a, b, graph, options)  # type: ignore[no-any-return]
    return _compared(a, b, graph, options)


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, dense: Tensor, graph: GraphMatrix, transposed: bool, options: Options
    ) -> Tensor:
        ctx.save_for_backward(values, dense)
        ctx.rest = graph, transposed, options
        return _carry(values, dense, graph, transposed, options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values, dense = ctx.saved_tensors
        graph, transposed, options = ctx.rest
        of_values = of_dense = None
        if ctx.needs_input_grad[0]:
            ends = (dense, grads[0]) if transposed else (grads[0], dense)
            of_values = _compare(graph, *ends, options)
        if ctx.needs_input_grad[1]:
            of_dense = graph_product(graph, values, grads[0], transposed=not transposed, options=options)
        return of_values, of_dense, None, None, None


class _Compare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, graph: GraphMatrix, options: Options) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.rest = graph, options
        return _compared(a, b, graph, options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        graph, options = ctx.rest
        of_a = graph_product(graph, grads[0], b, options=options) if ctx.needs_input_grad[0] else None
        of_b = graph_product(graph, grads[0], a, transposed=True, options=options) if ctx.needs_input_grad[1] else None
        return of_a, of_b, None, None


def _carry(values: Tensor, dense: Tensor, graph: GraphMatrix, transposed: bool, options: Options) -> Tensor:
    with torch.no_grad(), _exact_dtypes(dense.device):
        grouped = graph.grouped(transposed)
        spread = graph.spread(values, transposed)
        if dense.device.type != "cpu" and (options.deterministic or torch.are_deterministic_algorithms_enabled()):
            return _by_levels(grouped, spread, dense)
        matrix = grouped.matrix
        named = {"Row": matrix.group_index, "Col": matrix.indices[0], "Val": spread, "B": dense}
        program = grouped.program if options == DEFAULT else _program(CARRY, tuple(matrix.facts.items()), options)
        return program(tensors=named, out_shape=(graph.num_nodes, dense.shape[1]))


def _by_levels(grouped: Grouped, values: Tensor, dense: Tensor) -> Tensor:
    """The product without two writers of one cell: sums of groups, then of eight sums at a time, then of rows."""
    levels, last = grouped.tree
    (_, col_facts) = grouped.matrix.index_facts
    column = _program(_PARTIAL, (("Col", col_facts),), DEFAULT)
    sums = column(Col=grouped.matrix.indices[0], Val=values, B=dense)
    for level in levels:
        sums = _program(_COLLECT, (("Idx", IndexFacts(masked=True, proven=True)),), DEFAULT)(Idx=level.index, Q=sums)
    return _program(_PLACE, (("Last", IndexFacts(masked=True, proven=True)),), DEFAULT)(Last=last, Q=sums)


def _compared(a: Tensor, b: Tensor, graph: GraphMatrix, options: Options) -> Tensor:
    with torch.no_grad(), _exact_dtypes(a.device):
        if graph.num_entries > graph.num_nodes**2:
            # torch's sampled product refuses a pattern with more entries than cells. So many duplicates mean few nodes.
            return (a[graph.entries.row] * b[graph.entries.col]).sum(-1)
        grouped = graph.by_row
        matrix = grouped.matrix
        # Each number is written once, so the default way is deterministic already.
        program = _program(COMPARE, tuple(matrix.facts.items()), DEFAULT)
        out_shape = tuple(matrix.values.shape)
        named = {"Row": matrix.group_index, "Col": matrix.indices[0], "A": a, "B": b}
        return grouped.collect(program(tensors=named, out_shape=out_shape))


_programs: dict[object, Program] = {}


def _program(expression: str, facts: tuple[tuple[str, IndexFacts], ...], options: Options) -> Program:
    key = (expression, facts, options)
    found = _programs.get(key)
    if found is None:
        found = _programs[key] = compile(expression, facts=dict(facts), options=options)
    return found


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _exact_dtypes(device: torch.device) -> Any:
    """Operands were given their dtype where autocast was in force; inside, it would mix what was equal."""
    return torch.autocast(device.type, enabled=False) if torch._C._is_any_autocast_enabled() else _Nothing()


def _transformed() -> bool:
    """Whether `torch.func` or forward-mode differentiation looks on: they know the compiler's operator."""
    return bool(peek_interpreter_stack()) or torch.autograd.forward_ad._current_level >= 0


# The whole operator.


def graph_conv(
    x: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor | None = None,
    *,
    recipe: Recipe = Recipe(),  # noqa: B008 - frozen
    options: Options = DEFAULT,
    key: Tensor | None = None,
) -> Tensor:
    """Carry node features along the edges of a graph, normalised by degrees.

        Out[Row[g],n] += Val[g,q] * X[Col[g,q],n]

    Source: Kipf, Welling, Semi-Supervised Classification with Graph Convolutional Networks (ICLR 2017), eq. (2).

    Args:
        x: (n, f); differentiable.
        edge_index: (2, e): sources, targets; int32 or int64.
        edge_weight: (e,) or (e, 1); differentiable. Dtypes are promoted as in a product.
        recipe: normalisation, self-loops, flow.
        options: compile options.
        key: the tensor that the graph is remembered under, where `edge_index` was made from it just now.

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
    if _traced(x, edge_index, edge_weight):
        return torch.ops.insum_nn.graph_conv(  # type: ignore[no-any-return]
            x,
            edge_index,
            edge_weight,
            recipe.normalize,
            recipe.loops,
            recipe.fill,
            recipe.flow,
            options.deterministic,
            options.backend,
            False,
        )
    graph = graph_matrix(edge_index, x.shape[0], recipe, key=key)
    return graph_product(graph, graph_values(graph, edge_weight, recipe, x.dtype), x, options=options)


def _agree(x: Tensor, edge_index: Tensor, edge_weight: Tensor | None, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """Operands on one device, and features in the dtype of the product."""
    if edge_index.device != x.device or (edge_weight is not None and edge_weight.device != x.device):
        where = {"x": x, "edge_index": edge_index, "edge_weight": edge_weight}
        raise InsumDeviceError(
            "node features, edges and weights are on different devices",
            details=[f"{name} is on {tensor.device}" for name, tensor in where.items() if tensor is not None],
            fix=f"move the graph with edge_index.to('{x.device}').",
        )
    if edge_weight is not None:
        if recipe.normalize and not edge_weight.is_floating_point():
            raise InsumDtypeError(
                f"'edge_weight' must be floating-point to be normalised, got {edge_weight.dtype}",
                fix="pass edge_weight.float().",
                got=edge_weight.dtype,
            )
        edge_weight = check_edge_weight(edge_weight, edge_index.shape[1])
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype in (torch.float16, torch.bfloat16, torch.float32):
        return x.to(torch.get_autocast_dtype(device)), edge_weight
    return (x if edge_weight is None else x.to(torch.promote_types(x.dtype, edge_weight.dtype))), edge_weight


def _traced(*tensors: Tensor | None) -> bool:
    """Whether somebody records or replaces torch's calls, and has to be shown one registered operator."""
    if torch.compiler.is_compiling():
        return True
    plain = (Tensor, torch.nn.Parameter)
    return torch._C._len_torch_dispatch_stack() > 0 or any(t is not None and type(t) not in plain for t in tensors)


def explain_graph_conv(
    x: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor | None = None,
    *,
    recipe: Recipe = Recipe(),
    measure: bool = False,  # noqa: B008
) -> Explanation:
    """What becomes of the product that `graph_conv` runs: loop nest, plan, code."""
    x, edge_weight = _agree(x, edge_index, edge_weight, recipe)
    graph = graph_matrix(edge_index, x.shape[0], recipe)
    grouped = graph.by_row
    values = grouped.spread(graph_values(graph, edge_weight, recipe, x.dtype).detach())
    named = {**grouped.matrix.tensors, "Val": values, "B": x.detach()}
    return grouped.program.explain(tensors=named, out_shape=(graph.num_nodes, None), measure=measure)


# The registered operator: what `torch.compile` and `torch.export` see. The structure stays behind it, where it is
# remembered as in eager calls.


@torch.library.custom_op("insum_nn::graph_conv", mutates_args=())
def _operator(
    x: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor | None,
    normalize: bool,
    loops: str,
    fill: float,
    flow: str,
    deterministic: bool,
    backend: str,
    transposed: bool,
) -> Tensor:
    recipe = Recipe(normalize, loops, fill, flow)  # type: ignore[arg-type]
    options = Options(deterministic=deterministic, backend=backend)  # type: ignore[arg-type]
    graph = graph_matrix(edge_index, x.shape[0], recipe)
    values = graph_values(graph, edge_weight, recipe, x.dtype)
    return graph_product(graph, values, x, transposed=transposed, options=options)


@_operator.register_fake
def _operator_fake(x: Tensor, edge_index: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("insum_nn::graph_conv_weight_gradient", mutates_args=())
def _weight_gradient(
    grad: Tensor,
    x: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor,
    normalize: bool,
    loops: str,
    fill: float,
    flow: str,
    deterministic: bool,
    backend: str,
    transposed: bool,
) -> Tensor:
    recipe = Recipe(normalize, loops, fill, flow)  # type: ignore[arg-type]
    options = Options(deterministic=deterministic, backend=backend)  # type: ignore[arg-type]
    graph = graph_matrix(edge_index, x.shape[0], recipe)
    entries = graph.entries
    of_values = _compare(graph, *((x, grad) if transposed else (grad, x)), options)
    wide = _wide(x.dtype)
    of_values, weights = of_values.to(wide), entry_weights(entries, edge_weight.to(wide), fill)
    if normalize:
        of_values = _through_norm(graph, weights, of_values, options)
    total = of_values.new_zeros(entries.num_edges + 1)
    source = torch.arange(0, device=x.device) if entries.source is None else entries.source
    # One entry per edge: nothing meets but at the fill value, which is cut off.
    return total.index_add(0, source, of_values)[:-1].to(edge_weight.dtype)


def _through_norm(graph: GraphMatrix, weights: Tensor, of_values: Tensor, options: Options) -> Tensor:
    """The gradient of weights from that of `D[row] * weight * D[col]`."""
    ones = weights.new_ones(graph.num_nodes, 1)
    degree = graph_product(graph, weights, ones, options=options)
    root = inverse_root(degree)
    scaled = weights * of_values
    # A root is read at both ends of its edges.
    of_root = graph_product(graph, scaled, root, options=options)
    of_root = of_root + graph_product(graph, scaled, root, transposed=True, options=options)
    of_degree = -0.5 * of_root * root.pow(3)
    entries = graph.entries
    return of_values * (root[entries.row] * root[entries.col]).squeeze(1) + of_degree.squeeze(1)[entries.row]


@_weight_gradient.register_fake
def _weight_gradient_fake(grad: Tensor, x: Tensor, edge_index: Tensor, edge_weight: Tensor, *_: object) -> Tensor:
    return torch.empty_like(edge_weight, memory_format=torch.contiguous_format)


def _operator_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, edge_index, edge_weight, *rest = inputs
    ctx.save_for_backward(x, edge_index, edge_weight)
    ctx.rest = rest


def _operator_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, edge_index, edge_weight = ctx.saved_tensors
    *rest, transposed = ctx.rest
    of_x = of_weight = None
    if ctx.needs_input_grad[0]:
        of_x = torch.ops.insum_nn.graph_conv(grad, edge_index, edge_weight, *rest, not transposed)
    if edge_weight is not None and ctx.needs_input_grad[2]:
        call = torch.ops.insum_nn.graph_conv_weight_gradient
        of_weight = call(grad.contiguous(), x, edge_index, edge_weight, *rest, transposed)
    return of_x, None, of_weight, *(None for _ in ctx.rest)


_operator.register_autograd(_operator_backward, setup_context=_operator_context)

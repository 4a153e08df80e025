"""A graph as a matrix over its nodes, kept for as long as the tensor lives from which it was built, and its products.

    Out[Row[g],n] += Val[g,q] * X[Col[g,q],n]         carry: from senders to receivers, or back by the transpose
    W[g,q] += A[Row[g],n] * B[Col[g,q],n]             compare: one number per edge

Gradients of products are products of the same two kinds, of any order, so they write rows of one group each, and no
tensor has both an axis of edges and one of features.

Sorting and grouping the edges costs more than one product with them, and a training loop multiplies by the same graph
at each step, forwards and backwards. So what is built from a tensor is kept under its identity and version.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from insum_nn.compiler.api import BoundSums, Program, built_program, multilinear
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.facts import IndexFacts
from insum_nn.formats import GroupCOO
from insum_nn.formats.convert import uncompressed
from insum_nn.locks import cached_property
from insum_nn.sorted_rows import entry_dtype, sort_pairs
from insum_nn.structure.adjacency import Adjacency
from insum_nn.structure.graph_entries import Flow, GraphEntries, Loops, check_edge_index, edge_entries
from insum_nn.structure.plain_tensors import plain_tensors
from insum_nn.tensor_cache import TensorCache, forget

__all__ = [
    "CARRY",
    "COMPARE",
    "EDGE_LISTS",
    "OPERANDS",
    "SYMMETRIC",
    "GraphMatrix",
    "Grouped",
    "Recipe",
    "clear_graphs",
    "edges_of_adjacency",
    "edges_of_sparse_tensor",
    "fixed_order",
    "graph_compare",
    "graph_matrix",
    "graph_product",
]


CARRY = "Out[Row[g],n] += Val[g,q] * X[Col[g,q],n]"
COMPARE = "W[g,q] += A[Row[g],n] * B[Col[g,q],n]"
OPERANDS = MappingProxyType({"Out": ("Val", "X"), "X": ("Val", "Out"), "Val": ("Out", "X")})


class Recipe(NamedTuple):
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


SYMMETRIC = Recipe()
"""The normalisation of Kipf and Welling."""


@dataclass(frozen=True, eq=False)
class Grouped:
    """The entries of a graph sorted by node, each a group: by receiver, or for the transpose by sender.

    Attributes:
        matrix: (n, n); its values are all 1.
        order: (p,) where each of its entries stands among the graph's; `None`: in the same order.
    """

    matrix: GroupCOO
    order: Tensor | None
    _programs: dict[Hashable, Program] = field(default_factory=dict[Hashable, Program])

    def bound(self, expression: str, options: Options, **named: Tensor) -> tuple[Program, Sequence[Tensor]]:
        """Return the program of a statement over this matrix, and its tensors in their order."""
        # To hash options takes a while.
        key = expression if options is DEFAULT else (expression, options)
        found = self._programs.get(key)
        if found is None:
            found = self._programs[key] = built_program(expression, self.matrix.facts, options)
        named["Row"], named["Col"] = self.matrix.group_index, self.matrix.indices[0]
        return found, [*map(named.__getitem__, found.names)]

    def spread(self, values: Tensor) -> Tensor:
        """Return values of the graph's entries (p,) in slots (g, q)."""
        return (values if self.order is None else values.index_select(0, self.order)).unsqueeze(1)


class GraphMatrix:
    """The matrix of a graph and its transpose, both sorted by the rows of their product.

        Out[Row[g],n] += Val[g,q] * X[Col[g,q],n]

    Duplicate edges stay separate entries. Groups have one slot: the library's product on a CPU takes single entries,
    and a generated kernel loops over a row's entries itself.

    Attributes:
        entries: sorted by receiver, then by sender; `values` everywhere are in this order.
    """

    def __init__(self, entries: GraphEntries) -> None:
        self.entries = entries
        # Values computed from weights that are not learned, by the weights.
        self.remembered: TensorCache[Tensor] = TensorCache(limit=8)
        self._constants: dict[Hashable, Tensor] = {}

    @classmethod
    def of_entries(cls, entries: GraphEntries) -> GraphMatrix:
        """Sort entries, every node in which is below `num_nodes`."""
        row, col, order = sort_pairs(entries.row, entries.col, entries.num_nodes)
        edge = order if entries.edge is None else entries.edge.index_select(0, order)
        edge = edge.to(entry_dtype(edge.device, entries.num_edges))
        return cls(GraphEntries(row, col, edge, entries.num_nodes, entries.num_edges))

    @classmethod
    def of_adjacency(cls, adjacency: Adjacency) -> GraphMatrix:
        """Take both orders as they are; built once for each adjacency, by the identity and version of its rows."""

        def build() -> GraphMatrix:
            row, num_entries = adjacency.row, adjacency.row.shape[0]
            graph = cls(GraphEntries(row, adjacency.col, None, adjacency.num_nodes, num_entries))
            graph.by_col = graph._group(adjacency.t_row, adjacency.t_col, adjacency.order)
            return graph

        return _graphs.get([adjacency.row], "adjacency", build)

    @property
    def num_nodes(self) -> int:
        """Rows, and columns."""
        return self.entries.num_nodes

    @property
    def num_entries(self) -> int:
        """Entries, self-loops that were added included."""
        return self.entries.row.shape[0]

    @cached_property
    def by_row(self) -> Grouped:
        """Grouped by receiver: what the product reads."""
        return self._group(self.entries.row, self.entries.col, None)

    @cached_property
    def by_col(self) -> Grouped:
        """Grouped by sender: what the product's gradient reads."""
        with plain_tensors(self.entries.row):
            col, row, order = sort_pairs(self.entries.col, self.entries.row, self.num_nodes)
        return self._group(col, row, order)

    def grouped(self, transposed: bool) -> Grouped:
        """`by_col` when transposed, else `by_row`."""
        return self.by_col if transposed else self.by_row

    def constant(self, key: Hashable, build: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that the graph alone decides, computed once."""
        found = self._constants.get(key)
        if found is None:
            with plain_tensors(self.entries.row):
                found = self._constants[key] = build()
        return found

    def ones(self, dtype: torch.dtype) -> Tensor:
        """Return (p,) ones."""
        return self.constant(("ones", dtype), lambda: self.entries.row.new_ones(self.num_entries, dtype=dtype))

    def _group(self, row: Tensor, col: Tensor, order: Tensor | None) -> Grouped:
        with plain_tensors(row, col):
            shape = (self.num_nodes, self.num_nodes)
            facts = (IndexFacts(sorted=True, masked=False, proven=True), IndexFacts(masked=False, proven=True))
            # Values are not read, and take no memory.
            values = row.new_ones(1, 1).expand(self.num_entries, 1)
            matrix = GroupCOO(shape, 0, row, (col[:, None],), values, facts)._guaranteed()  # pyright: ignore[reportPrivateUsage]
        return Grouped(matrix, order)


# What is built from a tensor is kept for as long as it lives and its version stays.
_graphs: TensorCache[GraphMatrix] = TensorCache(limit=32)
EDGE_LISTS: TensorCache[Any] = TensorCache(limit=32)


def clear_graphs() -> None:
    """Forget the matrices of all graphs."""
    _graphs.clear()


def graph_matrix(edge_index: Tensor, num_nodes: int, recipe: Recipe, *, again: bool = False) -> GraphMatrix:
    """Return the matrix of a graph; built once for each edge list, by identity and version.

    Args:
        edge_index: (2, e) integers.
        num_nodes: nodes.
        recipe: self-loops and flow; the rest decides only values.
        again: read the edges whatever is remembered of them.

    Raises:
        InsumShapeError: not two rows.
        InsumDtypeError: no integers.
        InsumRangeError: a node lies outside.
    """

    def build() -> GraphMatrix:
        with plain_tensors(edge_index):
            edges = edge_index.clone() if edge_index.is_inference() else edge_index
            check_edge_index(edges, num_nodes)
            return GraphMatrix.of_entries(edge_entries(edges, num_nodes, loops=recipe.loops, flow=recipe.flow))

    if again:
        forget([edge_index])
    return _graphs.get([edge_index], (num_nodes, recipe.loops, recipe.flow), build)


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
    ) -> tuple[Program, Sequence[Tensor], tuple[int | None, ...]]:
        graph, options, (a, b) = self.graph, fixed_order(self.options), operands
        if requested == "Val":
            return *graph.by_row.bound(COMPARE, options, A=a, B=b), (graph.num_entries, 1)
        transposed = requested == "X"
        grouped = graph.grouped(transposed)
        columns = None if made is None else b.shape[1]
        return *grouped.bound(CARRY, options, Val=grouped.spread(a), X=b), (graph.num_nodes, columns)

    def result(self, requested: str, written: Tensor) -> Tensor:
        return written.squeeze(1) if requested == "Val" else written


def fixed_order(options: Options) -> Options:
    """Return the options, deterministic where torch's own switch says so."""
    if torch.are_deterministic_algorithms_enabled() and not options.deterministic:
        return replace(options, deterministic=True)
    return options


def edges_of_adjacency(adj: Tensor) -> tuple[Tensor, Tensor]:
    """Return edges (sender, receiver) and values of a transposed adjacency in one of torch's sparse layouts.

    The same edge list for the same adjacency, so that its matrix is found again.
    """
    if adj.layout == torch.sparse_coo and adj.requires_grad and not adj.is_coalesced():
        adj = adj.coalesce()

    def build() -> tuple[Tensor, Tensor]:
        fixed = adj.detach()
        if fixed.layout == torch.sparse_coo:
            return fixed._indices().flip(0), fixed._values()
        row, col = uncompressed(fixed)
        return torch.stack((col, row)), fixed.values()

    edge_index, values = EDGE_LISTS.get([adj], "sparse", build)
    return edge_index, adj.values() if adj.requires_grad else values


def edges_of_sparse_tensor(adj: Any, dtype: torch.dtype, normalize: bool) -> tuple[Tensor, Tensor | None]:
    """Return edges (sender, receiver) and values of a transposed adjacency as a `torch_sparse.SparseTensor`."""
    row, col, value = adj.coo()

    def build() -> tuple[Tensor, Tensor]:
        return torch.stack((col, row)), torch.ones(row.shape[0], dtype=dtype, device=row.device)

    edge_index, ones = EDGE_LISTS.get([row, col], ("SparseTensor", dtype), build)
    # Where values are implied, self-loops that are added still get the weight of their own.
    return edge_index, ones if value is None and normalize else value

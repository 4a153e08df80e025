"""Cut an algorithm into the steps that library calls compute: every pass, in order.

free a: free b: sum c:                                   v0[a, c, b] = (t1[x1[a, c], b] if x1[a, c] >= 0 else 0)
out[x0[a], b] += t0[a, c] * (t1[x1[a, c], b] ...)  ->  v1[a, b] += t0[a, c] * v0[a, c, b]      by matmul
out[x0[a], b] += v1[a, b]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from insum_nn.compiler.ir.access import indices_of, loads_in_order, miss_conditions, scattered_axes
from insum_nn.compiler.ir.graph import Extent, Graph, GraphNode, factors_of, loops_of, store_of
from insum_nn.compiler.ir.nodes import (
    Buffer,
    Const,
    Expr,
    Index,
    Kernel,
    Load,
    Node,
    Op,
    Result,
    Size,
    Store,
    conjunction,
    conjuncts,
    operands,
)
from insum_nn.compiler.lang.combining import selecting
from insum_nn.compiler.passes.cpu.group_entries import factors_of_value
from insum_nn.compiler.passes.library.contraction_order import multiply_in_order
from insum_nn.compiler.passes.library.decisions import Decision
from insum_nn.compiler.passes.library.guard_factors import guard_factors, path_conditions
from insum_nn.compiler.passes.library.match_products import match_bag_product
from insum_nn.compiler.passes.library.read_factors import read_factors
from insum_nn.compiler.passes.library.steps import Cut, Target, product, read_of, wide

__all__ = ["LibraryGraph", "library_graph"]


@dataclass(frozen=True, slots=True)
class LibraryGraph:
    """A graph of library calls.

    Attributes:
        kernel: the algorithm that it computes.
        graph: its steps.
        decisions: the choices that led to it.
    """

    kernel: Kernel
    graph: Graph
    decisions: tuple[Decision, ...]


def library_graph(kernel: Kernel, sizes: Mapping[str, int], target: Target) -> LibraryGraph:
    """Cut an algorithm.

    Args:
        kernel: an algorithm of one store, without an activation.
        sizes: extents of its loops in the first call; they steer the order of products, never the result.
        target: what the graph is for.
    """
    cut = Cut(kernel, sizes, target)
    functions = _apply_functions(cut)
    adds = selecting(store_of(kernel).combine) is None
    bags = match_bag_product(cut) if adds and not functions else None
    steps = bags or (_sum(cut) if adds else _extremum(cut))
    graph = Graph(kernel.inputs, (*functions, *steps), (cut.output,), tuple(_extents(kernel)))
    return LibraryGraph(kernel, graph, tuple(cut.decisions))


def _apply_functions(cut: Cut) -> list[GraphNode]:
    """The steps that make the factors that are functions; where what they read misses, a factor is read as 0."""
    store, steps, replaced = store_of(cut.kernel), list[GraphNode](), dict[Node, Node]()
    for factor in factors_of_value(store.value):
        if isinstance(factor, Op) and factor not in replaced:
            step, read = cut.intermediate(indices_of(factor), factor, dtype=wide(cut.dtype))
            misses = (condition for each in operands(factor) for condition in miss_conditions(each))
            replaced[factor] = Load(read.buffer, read.subscripts, conjunction([*misses]))
            steps.append(step)
    if replaced:
        made = tuple(node.buffer for node in replaced.values() if isinstance(node, Load))
        kernel = cut.kernel.replace(replaced)
        assert isinstance(kernel, Kernel)
        cut.kernel = Kernel((*kernel.inputs, *made), kernel.results, kernel.body, kernel.exact)
    return steps


def _sum(cut: Cut) -> list[GraphNode]:
    """The steps of a sum."""
    store = store_of(cut.kernel)
    texts, _ = factors_of(store.value)
    store = guard_factors(cut, store)
    reads, number = factors_of(store.value)
    steps, reads = read_factors(cut, reads)
    output, value = indices_of(*store.subscripts), product([], number)
    if reads:
        product_steps, value = multiply_in_order(cut, reads, number, output, texts)
        steps += product_steps
    masks, where = _where_any(cut, store, value)
    steps += [*masks, cut.write(store.subscripts, value, output, where=where)]
    _decide_scatter(cut)
    return steps


def _where_any(cut: Cut, store: Store, value: Expr) -> tuple[list[GraphNode], Expr | None]:
    """The condition of the last step, whose terms are sums: a cell is written where any of its terms takes part."""
    free, path = indices_of(value), path_conditions(store)
    rest = [condition for condition in conjuncts(store.where) if condition not in path]
    if set(indices_of(*rest)) <= set(free):
        return [], store.where
    labels = tuple(label for label in indices_of(*rest) if label in free)
    sums = tuple(label for label in indices_of(*rest) if label not in free)
    mask = cut.buffer(labels, "bool")
    live = read_of(mask, labels)
    any_term = cut.step(
        Result(mask, "zero"), live.subscripts, Const(True, "bool"), labels, sums,
        combine="max", where=conjunction(rest),
    )  # fmt: skip
    return [any_term], conjunction((*path, live))


def _extremum(cut: Cut) -> list[GraphNode]:
    """The steps of a mode that selects a term: every term is formed, then reduced."""
    store = store_of(cut.kernel)
    reads, number = factors_of(store.value)
    # Each way to miss, those of index tensors inside of others too.
    misses = (condition for read in reads for condition in miss_conditions(read))
    where = conjunction((*path_conditions(store), *misses))
    steps = list[GraphNode]()
    value: Expr = product([], number)
    for position, read in enumerate(reads):
        made, (factor,) = read_factors(cut, [read])
        steps += made
        if position:
            step, factor = cut.intermediate(indices_of(value, factor), product([value, factor]), dtype=wide(cut.dtype))
            steps.append(step)
        value = factor
    if reads:
        if number != 1:
            step, value = cut.intermediate(indices_of(value), product([value], number), dtype=wide(cut.dtype))
            steps.append(step)
    written = indices_of(*store.subscripts)
    sums = tuple(loop.index.name for loop in loops_of(cut.kernel) if loop.index.name not in written)
    _decide_scatter(cut)
    return [*steps, cut.write(store.subscripts, value, written, sums, where=where)]


def _decide_scatter(cut: Cut) -> None:
    if scattered_axes(store_of(cut.kernel).subscripts):
        reason = "several terms may meet in one cell"
        if cut.target.deterministic:
            reason += "; in a fixed order, so that every run gives the same bits"
        cut.decide("combine", "scatter", reason)


def _extents(kernel: Kernel) -> Iterator[Extent]:
    """Where the sizes of an algorithm are read: along the first axis that shows one, else they are passed."""
    store = store_of(kernel)
    shown: dict[str, tuple[Buffer, int]] = {}
    for read in loads_in_order(*store.subscripts, store.value):
        for axis, subscript in enumerate(read.subscripts):
            if isinstance(subscript, Index):
                shown.setdefault(subscript.name, (read.buffer, axis))
    for loop in loops_of(kernel):
        if isinstance(loop.end, Size):
            yield Extent(loop.end, *shown.get(loop.index.name, (None, 0)))
    for axis, extent in enumerate(store.buffer.shape):
        if not isinstance(store.subscripts[axis], Index) and isinstance(extent, Size):
            yield Extent(extent)

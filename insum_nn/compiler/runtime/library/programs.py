"""A statement as calls of torch's library: the graph that its passes make, printed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from insum_nn.compiler.codegen.aten import print_aten
from insum_nn.compiler.codegen.calls import CallGraph
from insum_nn.compiler.ir.build import Names, build
from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.lang.epilogue import PLAIN
from insum_nn.compiler.options import Options
from insum_nn.compiler.passes.library.library_graph import LibraryGraph, library_graph
from insum_nn.compiler.passes.library.steps import Target

__all__ = ["Library", "extent_arguments", "library_calls_of"]


@dataclass(frozen=True, slots=True)
class Library:
    """A statement as calls of torch's library, which run as they are or are compiled by Inductor.

    Attributes:
        bound: the statement.
        names: its canonical names.
        made: its steps, and the choices behind them.
        graph: the calls that run, or that Inductor compiles.
    """

    bound: Bound
    names: Names
    made: LibraryGraph
    graph: CallGraph


def library_calls_of(
    bound: Bound, extents: Extents, options: Options, *, compiled: bool, bags: bool = False
) -> Library:
    """Write a statement as library calls.

    Args:
        bound: the statement; what follows its sum is left to the caller.
        extents: sizes of a call, by which the order of the products is chosen; 0: an index may have no values.
        options: compile options.
        compiled: for Inductor.
        bags: products with sparse matrices are sums of bags, which have first derivatives only.
    """
    names = Names(bound.statement)
    sizes = {names.indices[name]: size for name, size in zip(bound.layout.indices, extents.indices, strict=True)}
    target = Target(
        bound.device_type,
        compiled,
        bags=bags,
        search=options.order == "cost",
        deterministic=options.deterministic,
    )
    made = library_graph(build(replace(bound, epilogue=PLAIN), reads_ones=True), sizes, target)
    graph = print_aten(made.graph, bound.device_type, options, compiled=compiled, empty=0 in sizes.values())
    return Library(bound, names, made, graph)


def extent_arguments(bound: Bound) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the extents that a graph takes as integers: of indices and output axes that no tensor shows."""
    layout = bound.layout
    static = {name for name, _ in bound.static}
    indices = tuple(
        name for name, plain in zip(layout.indices, layout.plain, strict=True) if not plain and name not in static
    )
    axes = tuple(axis for axis, name in enumerate(layout.output_plain) if name is None)
    return indices, axes

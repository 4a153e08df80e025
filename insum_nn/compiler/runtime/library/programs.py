"""A statement as calls of torch's library, which run as they are or are compiled by Inductor."""

from __future__ import annotations

from dataclasses import replace

from insum_nn.compiler.codegen.aten import print_aten
from insum_nn.compiler.codegen.calls import CallGraph
from insum_nn.compiler.ir.build import Names, build
from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.lang.epilogue import PLAIN
from insum_nn.compiler.lang.syntax import Access
from insum_nn.compiler.options import Options

__all__ = ["extent_arguments", "library_calls_of"]


def library_calls_of(bound: Bound, extents: Extents, options: Options, *, compiled: bool) -> CallGraph:
    """Write a statement as library calls.

    Args:
        bound: the statement; what follows its sum is left to the caller.
        extents: sizes of a call, by which the order of the products is chosen; 0: an index may have no values.
        options: compile options.
        compiled: for a compiler that fuses.
    """
    names = Names(bound.statement)
    sizes = {names.indices[name]: size for name, size in zip(bound.layout.indices, extents.indices, strict=True)}
    factors = [str(factor) for factor in bound.statement.factors if isinstance(factor, Access)]
    kernel, empty = build(replace(bound, epilogue=PLAIN)), 0 in extents.indices
    return print_aten(kernel, sizes, options, compiled=compiled, empty=empty, factors=factors)


def extent_arguments(bound: Bound) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the extents that a graph takes as integers: of indices and output axes that no tensor shows."""
    layout = bound.layout
    static = {name for name, _ in bound.static}
    indices = tuple(
        name for name, plain in zip(layout.indices, layout.plain, strict=True) if not plain and name not in static
    )
    axes = tuple(axis for axis, name in enumerate(layout.output_plain) if name is None)
    return indices, axes

"""A statement as calls of torch's library, which run as they are, or which torch records."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from insum_nn.compiler.codegen.aten import print_aten
from insum_nn.compiler.codegen.calls import CallGraph
from insum_nn.compiler.ir.build import Names, build
from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.lang.epilogue import PLAIN
from insum_nn.compiler.lang.syntax import Number
from insum_nn.compiler.options import Options
from insum_nn.facts import IndexFacts

__all__ = ["integers_of", "library_calls_of", "without_unused_facts"]


@lru_cache(maxsize=1024)
def without_unused_facts(bound: Bound) -> Bound:
    """Return a statement with the facts of index tensors that its calls depend on."""
    return replace(bound, facts=tuple(IndexFacts(masked=facts.masked) for facts in bound.facts))


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
    factors = [str(factor) for factor in bound.statement.factors if not isinstance(factor, Number)]
    kernel, empty = build(replace(bound, epilogue=PLAIN), reads_ones=True), 0 in extents.indices
    return print_aten(kernel, sizes, options, compiled=compiled, empty=empty, factors=factors)


def integers_of(bound: Bound, extents: Extents) -> tuple[int, ...]:
    """Return the extents that a graph takes as integers: of indices and output axes that no tensor shows."""
    layout, static = bound.layout, {name for name, _ in bound.static}
    indices = zip(layout.indices, layout.plain, extents.indices, strict=True)
    axes = zip(layout.output_plain, extents.output, strict=True)
    own = (extent for name, plain, extent in indices if not plain and name not in static)
    return (*own, *(extent for name, extent in axes if name is None))

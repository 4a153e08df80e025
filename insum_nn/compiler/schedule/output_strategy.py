"""How a kernel writes its output: alone, by unique entries, by rows that a program owns, or by atomic additions.

direct   every cell belongs to one program: indices of its own, or entries of static tables
place    index tensors whose entries are unique, or affine subscripts: each term has a cell of its own
own      an index tensor gives terms to rows, each of which one program sums
atomic   terms meet in memory

On a CPU, where another rule fits, `passes/pipeline.py: lower` decides which rows are owned.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from insum_nn.compiler.ir.canonical import names_of
from insum_nn.compiler.ir.nodes import Index, Kernel
from insum_nn.compiler.lang.bind import Bound
from insum_nn.compiler.lang.syntax import Access
from insum_nn.compiler.passes.written_cells import written_cells
from insum_nn.compiler.schedule.choose_unrolling import Unrolling

__all__ = ["OutputStrategy", "in_order", "output_strategy"]

OutputStrategy = Literal["direct", "place", "own", "atomic"]


def output_strategy(
    bound: Bound, unrolling: Unrolling, kernel: Kernel, cells: Mapping[str, int] = MappingProxyType({})
) -> tuple[OutputStrategy, int]:
    """How terms of an algorithm reach the output, and the axis that is addressed by an index tensor.

    `cells`: indices of their own that axes have instead of their affine subscripts; see `passes/gather_writes.py`.
    """
    statement = bound.statement
    subscripts = statement.output.subscripts
    plain = [s.plain for s in subscripts]
    for name, axis in cells.items():
        plain[axis] = name
    # What tables address is known, but terms must not share cells unless they share all of them.
    literal = [axis for axis, s in enumerate(subscripts) if plain[axis] is None and unrolling.literal(s)]
    stepped = {i.name for axis in literal for i in subscripts[axis].indices()} & unrolling.steps
    if stepped & {i.name for axis, s in enumerate(subscripts) if axis not in literal for i in s.indices()}:
        return "atomic", -1
    if not unrolling.distinct(
        statement.output, [a for a in range(len(plain)) if a in literal or plain[a] in unrolling.names]
    ):
        return "atomic", -1
    loose = [
        axis
        for axis in range(len(subscripts))
        if axis not in literal and (plain[axis] is None or plain.count(plain[axis]) > 1)
    ]
    named = [i.name for a in loose for i in subscripts[a].indices()]
    if not loose:
        # A static table may send several terms to one cell; their sums share an accumulator.
        return "direct", -1
    indices = names_of(statement).indices
    told = [Index(indices[name]) for name in (*unrolling.names, *stepped)]
    # After affine writes became reads, what is left of them meets in memory still.
    bare = not cells or all(subscripts[axis].indirect for axis in loose)
    if bare and not {*named} & {*unrolling.names} and written_cells(kernel, told=told).once:
        return "place", loose[0]
    if len(loose) > 1 or len(set(named)) != len(named) or set(named) & {*plain}:
        return "atomic", -1
    (axis,) = loose
    row_index = subscripts[axis].indirect
    if (
        row_index is None
        or row_index.name in unrolling.tables
        or any(s.plain is None or s.plain in unrolling.names for s in row_index.subscripts)
    ):
        return "atomic", -1
    return "own", axis


def in_order(bound: Bound, row_index: Access) -> bool:
    """Whether the entries of an index tensor stand in the order of their rows."""
    facts = bound.facts_of(row_index.name)
    # Entries of -1 may stand anywhere between sorted ones.
    return facts.sorted and facts.masked is False

"""How a kernel writes its output: alone, by unique entries, by rows that a program owns, or by atomic additions.

direct   every cell belongs to one program: indices of its own, or entries of static tables
place    index tensors whose entries are unique, or affine subscripts: each term has a cell of its own
own      an index tensor gives terms to rows, each of which one program sums
atomic   terms meet in memory

On a CPU, where another rule fits, `passes/pipeline.py: lower` decides which rows are owned.
"""

from __future__ import annotations

from typing import Literal

from insum_nn.compiler.ir.access import indices_in
from insum_nn.compiler.ir.graph import stores_of
from insum_nn.compiler.ir.nodes import Const, Index, Kernel, Load, walk
from insum_nn.compiler.passes.written_cells import written_cells

__all__ = ["OutputStrategy", "in_order", "output_strategy"]

OutputStrategy = Literal["direct", "place", "own", "atomic"]


def output_strategy(kernel: Kernel, *, steps: bool, gathered: bool = False) -> tuple[OutputStrategy, int]:
    """How terms of an algorithm reach the output, and the axis that is addressed by an index tensor.

    Args:
        kernel: the algorithm, whose static tables are unrolled.
        steps: sums of indices and numbers are what tables say.
        gathered: affine writes became reads; what is left of them meets in memory still.
    """
    target = stores_of(kernel)[0].subscripts
    read = [axis for axis, s in enumerate(target) if any(isinstance(node, Load) for node in walk(s))]
    sums = [a for a, s in enumerate(target) if a not in read and not isinstance(s, Index | Const)]
    alone = len(indices_in(*target)) == sum(len(indices_in(s)) for s in target)
    if written_cells(kernel).once:
        if not read and alone and (steps or not sums):
            # A static table may send several terms to one cell; their sums share an accumulator.
            return "direct", -1
        if not gathered or not sums:
            return "place", (*read, *sums, 0)[0]
    row = target[read[0]] if len(read) == 1 else None
    places = row.subscripts if isinstance(row, Load) else ()
    one_each = alone and all(isinstance(s, Index) for s in places) and len({*places}) == len(places)
    # Its entries may be equal, and nothing else.
    if isinstance(row, Load) and one_each and written_cells(kernel, unique={row.buffer.name}).once:
        return "own", read[0]
    return "atomic", -1


def in_order(row_index: Load) -> bool:
    """Whether the entries of an index tensor stand in the order of their rows."""
    facts = row_index.buffer.facts
    # Entries of -1 may stand anywhere between sorted ones.
    return facts.sorted and facts.masked is False

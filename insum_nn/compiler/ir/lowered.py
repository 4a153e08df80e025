"""What the passes for a CPU decide of an algorithm, as the printer of C takes it: `passes/pipeline.py: lower`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from insum_nn.compiler.ir.nodes import Buffer, Expr, Index, Kernel, Loop, Size, Store
from insum_nn.compiler.ir.schedule import Schedule

__all__ = ["ROOM", "Copied", "Lowered", "Placement", "Reach", "Wide", "WrittenCells", "highest"]

# Cells by which a copy may be longer than twice its operand.
ROOM = 32

# From where to where a subscript runs.
Reach = tuple[Expr, Expr]


@dataclass(frozen=True, slots=True)
class WrittenCells:
    """What is known of the cells that a kernel writes.

    Attributes:
        once: each is written at one point of the free loops at most, by one sum.
        all: every cell of the output is.
        apart: loops of which no two values write one cell.
    """

    once: bool
    all: bool
    apart: frozenset[Index]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the loops of a kernel go.

    Attributes:
        schedule: `m` rows of the block, `n` numbers along the lanes of the output at a time, `k` along those of a sum.
        width: lanes of a vector.
        outer: loops over cells, outermost first.
        rows: the loop over cells of the register block.
        sums: loops over terms, outermost first.
        lanes: the loop along vectors; it is over cells, or over terms and then the innermost.
        batches: stores whose sums are made in the same walk over the terms.
    """

    schedule: Schedule
    width: int
    outer: tuple[Loop, ...]
    rows: Loop | None
    sums: tuple[Loop, ...]
    lanes: Loop | None
    batches: tuple[tuple[Store, ...], ...]


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy of an operand with zeros around it, or with its last axis in the place of another one.

    Attributes:
        copy: the copy; its subscripts are those of the operand, and may be negative.
        source: the operand.
        reached: by axis that has zeros, from where to where it is read.
        swapped: the axis in whose place the last one is; `None`: all are in order.
        row: the axis of which it holds one place, that of a row whose entries are walked; `None`: it holds all.
    """

    copy: Buffer
    source: Buffer
    reached: Mapping[int, Sequence[Reach]]
    swapped: int | None = None
    row: int | None = None


def highest(buffer: Buffer) -> Size:
    """The largest entry of an index tensor."""
    return Size(f"{buffer.name}_highest")


@dataclass(frozen=True, slots=True)
class Wide:
    """An algorithm that reads copies with zeros around them, where a call may make these.

    Attributes:
        kernel: the algorithm.
        place: where its loops go.
        padded: the copies.
        finite: what has to be finite, as it is multiplied by zeros.
        loops: those of the algorithm before it was lowered, by which a call says how long it takes.
    """

    kernel: Kernel
    place: Placement
    padded: tuple[Copied, ...]
    finite: tuple[Buffer, ...]
    loops: tuple[Loop, ...]


@dataclass(frozen=True, slots=True)
class Lowered:
    """An algorithm whose cells are written at as few points as can be, and where its loops go.

    Attributes:
        kernel: the algorithm.
        cells: what it writes.
        place: where its loops go.
        structure: the index tensor whose entries are walked by their values, and the number of values.
        copies: transposed copies of operands that it reads.
        wide: the same without conditions, where operands with zeros around them make it so.
    """

    kernel: Kernel
    cells: WrittenCells
    place: Placement
    structure: tuple[str, Expr] | None
    copies: tuple[Copied, ...]
    wide: Wide | None = None

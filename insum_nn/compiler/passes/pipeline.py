"""Every pass over a loop nest, in order: `lower` for a C function, `place` for a kernel of Triton.

Both take the algorithm that `ir.build` made of a statement, whose static tables `unrolled` made numbers. What they
return is verified before it is printed; where `verifies` is set, as in tests, what each pass returns is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from insum_nn.compiler.ir.graph import stores_of
from insum_nn.compiler.ir.nodes import Buffer, Expr, Kernel, Load, Store
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.ir.verify import verify_kernel
from insum_nn.compiler.passes.cpu.gather_writes import gather_writes, indices_in
from insum_nn.compiler.passes.cpu.group_entries import group_entries, plain_entry
from insum_nn.compiler.passes.cpu.transpose_operands import Transposed, transpose_operands
from insum_nn.compiler.passes.cpu.written_cells import WrittenCells, written_cells
from insum_nn.compiler.passes.fold_static_tables import fold_static_tables
from insum_nn.compiler.passes.fuse_outputs import clusters
from insum_nn.compiler.passes.own_rows import RowWalk, own_rows
from insum_nn.compiler.passes.tile import Tiling, tile
from insum_nn.compiler.passes.tile_outputs import tile_outputs
from insum_nn.facts import StaticTable

__all__ = ["Lowered", "lower", "place", "unrolled"]

OwnRows = Callable[[Kernel], RowWalk]

verifies = False


def _verified(kernel: Kernel) -> Kernel:
    if verifies:
        verify_kernel(kernel, placed=False)
    return kernel


def unrolled(
    kernel: Kernel, tables: Mapping[str, StaticTable], names: Sequence[str], places: Sequence[Mapping[str, int]]
) -> Kernel:
    """The algorithm with its static tables as numbers; see `fold_static_tables`."""
    return _verified(fold_static_tables(_verified(kernel), tables, names, places)) if tables else kernel


# For C.


@dataclass(frozen=True, slots=True)
class Lowered:
    """An algorithm whose cells are written at as few points as can be.

    Attributes:
        kernel: the algorithm.
        cells: what it writes.
        structure: the index tensor whose entries are walked by their values, and the number of values.
        copies: operands of which it reads a transposed copy.
    """

    kernel: Kernel
    cells: WrittenCells
    structure: tuple[str, Expr] | None
    copies: tuple[Transposed, ...]


def lower(kernel: Kernel, made: Collection[str] = ()) -> Lowered:
    """Choose how an algorithm writes its output on a CPU: by entries of one matrix, by owned rows, or as it says.

    `made` are inputs of which nothing can be copied before.
    """
    kernel, copies = transpose_operands(kernel, made)
    cells, structure, entries = written_cells(_verified(kernel)), None, ()
    if not cells.once:
        kernel = _verified(gather_writes(kernel))
        cells = written_cells(kernel)
    stores = stores_of(kernel)
    if grouped := group_entries(kernel):
        walk_, read, count = grouped
        kernel, structure, entries = _verified(walk_.kernel), (read.buffer.name, count), walk_.entries
    elif not cells.once and (found := _owned_rows(stores)) is not None:
        axis, read = found
        structure = read.buffer.name, stores[0].buffer.shape[axis]
        kernel = _verified(own_rows(kernel, read, axis, permuted=True).kernel)
    if structure is not None:
        # The caller sorts into int32.
        narrow = {b: Buffer(b.name, "int32", b.shape, b.facts) for b in kernel.inputs if b.name in ("begin", "order")}
        replaced = kernel.replace({**narrow})
        entries = tuple(e for e in (entry.replace({**narrow}) for entry in entries) if isinstance(e, Expr))
        assert isinstance(replaced, Kernel)
        kernel = replaced
    verify_kernel(kernel, placed=False)
    return Lowered(kernel, cells if structure is None else written_cells(kernel, entries), structure, copies)


def _owned_rows(stores: Sequence[Store]) -> tuple[int, Load] | None:
    """An axis of the output that an entry addresses whose own indices address nothing else of it."""
    first = stores[0]
    for axis, subscript in enumerate(first.subscripts):
        if isinstance(subscript, Load) and plain_entry(subscript):
            rest = indices_in(*(s for store in stores for at, s in enumerate(store.subscripts) if at != axis))
            alike = all(store.subscripts[axis] is subscript for store in stores)
            if alike and not rest & indices_in(subscript):
                return axis, subscript
    return None


# For Triton.


def place(kernel: Kernel, own: OwnRows | None, schedule: Schedule, tiling: Tiling, *, several: bool) -> Kernel:
    """Place every loop of an algorithm as a schedule says.

    Args:
        kernel: the algorithm, or those of several outputs.
        own: `own_rows` with its arguments, where programs own rows.
        schedule: the schedule.
        tiling: where it puts each loop.
        several: outputs go their own ways.
    """
    walk = RowWalk(_verified(kernel), 0) if own is None else own(_verified(kernel))
    _verified(walk.kernel)
    placed = tile_outputs(walk, schedule, tiling, clusters(walk.kernel)) if several else tile(walk, schedule, tiling)
    verify_kernel(placed, placed=True)
    return placed

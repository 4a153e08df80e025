"""Choose how an algorithm writes its output on a CPU: by entries of one matrix, by owned rows, or as it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from insum_nn.compiler.ir.graph import stores_of
from insum_nn.compiler.ir.nodes import Buffer, Expr, Kernel, Load, Store
from insum_nn.compiler.passes.cpu.gather_writes import gather_writes, indices_in
from insum_nn.compiler.passes.cpu.group_entries import group_entries, plain_entry
from insum_nn.compiler.passes.cpu.written_cells import WrittenCells, written_cells
from insum_nn.compiler.passes.own_rows import own_rows

__all__ = ["Lowered", "lower"]


@dataclass(frozen=True, slots=True)
class Lowered:
    """An algorithm whose cells are written at as few points as can be.

    Attributes:
        kernel: the algorithm.
        cells: what it writes.
        structure: the index tensor whose entries are walked by their values, and the number of values.
    """

    kernel: Kernel
    cells: WrittenCells
    structure: tuple[str, Expr] | None


def lower(kernel: Kernel) -> Lowered:
    """Rewrite an algorithm of `ir.build` for a CPU."""
    cells, structure, entries = written_cells(kernel), None, ()
    if not cells.once:
        kernel = gather_writes(kernel)
        cells = written_cells(kernel)
    stores = stores_of(kernel)
    if grouped := group_entries(kernel):
        walk_, read, count = grouped
        kernel, structure, entries = walk_.kernel, (read.buffer.name, count), walk_.entries
    elif not cells.once and (found := _owned_rows(stores)) is not None:
        axis, read = found
        structure = read.buffer.name, stores[0].buffer.shape[axis]
        kernel = own_rows(kernel, read, axis, permuted=True).kernel
    if structure is not None:
        # The caller sorts into int32.
        narrow = {b: Buffer(b.name, "int32", b.shape, b.facts) for b in kernel.inputs if b.name in ("begin", "order")}
        replaced = kernel.replace({**narrow})
        entries = tuple(e for e in (entry.replace({**narrow}) for entry in entries) if isinstance(e, Expr))
        assert isinstance(replaced, Kernel)
        kernel = replaced
    return Lowered(kernel, cells if structure is None else written_cells(kernel, entries), structure)


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

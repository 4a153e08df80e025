"""The passes of an algorithm, in order: `lower` for a C function, `place` for a kernel of Triton.

Both take the algorithm that `ir/build.py` made of a statement, whose static tables `unroll` made numbers. What they
return is verified before it is printed; where `verifies` is set, as in tests, what each pass returns is.

What else stands in `passes/` is called elsewhere. `tile` is made of `sum_terms`, `extrema` and `unify_variants`.
`cut_products` and `split_static_tables` change statements before they become algorithms: see
`runtime/statement_cuts.py`. By `fuse_outputs`, `schedule/additional.py` joins the algorithms of several outputs to one
that `place` takes; by `gather_writes`, `schedule/form.py` makes those that cells or rows own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from insum_nn.compiler.ir.access import indices_in
from insum_nn.compiler.ir.graph import ROW, loops_of, stores_of
from insum_nn.compiler.ir.lowered import Lowered, Wide
from insum_nn.compiler.ir.nodes import Buffer, Kernel, Load, Loop, Store, replacing
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.ir.verify import verify_kernel
from insum_nn.compiler.passes.cpu.group_entries import group_entries, plain_entry
from insum_nn.compiler.passes.cpu.pad_operands import pad_operands
from insum_nn.compiler.passes.cpu.place_lanes import place_lanes
from insum_nn.compiler.passes.cpu.transpose_operands import transpose_operands
from insum_nn.compiler.passes.gather_writes import gather_writes
from insum_nn.compiler.passes.own_rows import RowWalk, own_rows
from insum_nn.compiler.passes.tile import Tiler, Tiling
from insum_nn.compiler.passes.tile_outputs import OutputsTiler
from insum_nn.compiler.passes.unroll_static_tables import unroll_static_tables
from insum_nn.compiler.passes.written_cells import written_cells
from insum_nn.facts import StaticTable

__all__ = ["lower", "place", "unroll"]

OwnRows = Callable[[Kernel], RowWalk]

verifies = False


def _verified(kernel: Kernel) -> Kernel:
    if verifies:
        verify_kernel(kernel, placed=False)
    return kernel


def unroll(
    kernel: Kernel, tables: Mapping[str, StaticTable], names: Sequence[str], places: Sequence[Mapping[str, int]]
) -> Kernel:
    """The algorithm with its static tables as numbers; see `unroll_static_tables`."""
    return _verified(unroll_static_tables(_verified(kernel), tables, names, places)) if tables else kernel


# For C.


# Accumulators that stay in registers beside what is read, where vectors have 32 bytes; and of what few calls run.
_REGISTERS, _FEW = 12, 4


def lower(kernel: Kernel, made: Collection[str] = (), vector_bytes: int = 32) -> Lowered:
    """Choose how an algorithm writes its output on a CPU, by entries of one matrix, by owned rows, or as it says.

    Then its loops are placed. Where zero padding of operands makes conditions unnecessary, the result also holds a
    kernel that reads padded copies.

    Args:
        kernel: the algorithm; extents that are compiled in are numbers.
        made: inputs that earlier kernels of the same function write: nothing can be copied of them before.
        vector_bytes: bytes of a vector.
    """
    loops = tuple(loops_of(kernel))
    kernel, copies = transpose_operands(kernel, made)
    cells, structure, entries = written_cells(_verified(kernel)), None, ()
    if not cells.once:
        kernel = _verified(gather_writes(kernel))
        cells = written_cells(kernel)
    stores = stores_of(kernel)
    if grouped := group_entries(kernel):
        walk_, read, count = grouped
        kernel, rows = transpose_operands(_verified(walk_.kernel), row=ROW)
        structure, entries, copies = (read.buffer.name, count), walk_.entries, (*copies, *rows)
    elif not cells.once and (found := _owned_rows(stores, loops_of(kernel))) is not None:
        axis, read = found
        structure = read.buffer.name, stores[0].buffer.shape[axis]
        kernel = _verified(own_rows(kernel, read, axis, permuted=True).kernel)
    if structure is not None:
        # The caller sorts into int32.
        given = [b for b in kernel.inputs if b.name in ("begin", "order")]
        narrow = replacing({b: Buffer(b.name, "int32", b.shape, b.facts) for b in given})
        kernel, entries = narrow(kernel), tuple(map(narrow, entries))
    verify_kernel(kernel, placed=False)
    cells = cells if structure is None else written_cells(kernel, entries)
    registers = _REGISTERS * vector_bytes // 32
    placed = place_lanes(kernel, cells, vector_bytes, registers)
    without, padded, finite = pad_operands(kernel, placed.lanes)
    if not padded:
        return Lowered(kernel, cells, placed, structure, copies)
    verify_kernel(without, placed=False)
    wide = Wide(without, place_lanes(without, cells, vector_bytes, registers), padded, finite, loops)
    # Few calls run the one with conditions then, and it takes the longest to compile.
    return Lowered(kernel, cells, place_lanes(kernel, cells, vector_bytes, _FEW), structure, copies, wide)


def _owned_rows(stores: Sequence[Store], loops: Collection[Loop]) -> tuple[int, Load] | None:
    """An axis of the output that an entry addresses whose own indices address nothing else of it.

    Where an entry adds one number, that is read and added as it comes: rows would read numbers that are far apart.
    """
    first = stores[0]
    for axis, subscript in enumerate(first.subscripts):
        if isinstance(subscript, Load) and plain_entry(subscript):
            rest = indices_in(*(s for store in stores for at, s in enumerate(store.subscripts) if at != axis))
            alike = all(store.subscripts[axis] is subscript for store in stores)
            many = {loop.index for loop in loops} - indices_in(subscript)
            if alike and many and not rest & indices_in(subscript):
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
    placed = (OutputsTiler if several else Tiler)(walk, schedule, tiling).kernel()
    verify_kernel(placed, placed=True)
    return placed

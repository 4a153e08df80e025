"""Place the loops of an algorithm for a CPU: lanes of vectors, a block of rows in registers, loops outside and sums.

free n in 0 .. N:                            outer n
  free o in 0 .. 64:                 ->        lanes o, 64 at a time
    sum c in 0 .. C:                             sum c
      out[n, o] += t0[n, c] * t1[c, o]

The printer writes the loops in this order; which cell is summed in which order follows from the placement alone, never
from how many threads run it.
"""

from __future__ import annotations

from collections.abc import Sequence

from insum_nn.compiler.ir.access import apart, coefficient, indices_in, is_index, steps_of
from insum_nn.compiler.ir.graph import ENTRY, ROW, extent_of, factor_dtype, factors_of, loops_of, stores_of
from insum_nn.compiler.ir.lowered import Placement, WrittenCells
from insum_nn.compiler.ir.nodes import Const, Expr, Index, Kernel, Load, Loop, Op, Store, conjuncts, operands, walk
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.dtypes import dtype_of

__all__ = ["place_lanes"]

# Vectors of one row at a time.
_VECTORS = 4
# Cells of different places that share a walk over terms, if all need more registers.
_CELLS = 6
# Stores at most that are divided so.
_ALIKE = 192


def place_lanes(kernel: Kernel, cells: WrittenCells, vector_bytes: int, registers: int) -> Placement:
    """Place the loops of a kernel by what its accesses do along each of them.

    Args:
        kernel: the algorithm.
        cells: what it writes.
        vector_bytes: bytes of a vector.
        registers: accumulators that stay in registers beside what is read.
    """
    loops, stores, dtype = loops_of(kernel), stores_of(kernel), dtype_of(factor_dtype(kernel))
    # What is narrower is computed with in 4 bytes. Terms of integers are not selected in vectors.
    width = vector_bytes // max(4, dtype.torch.itemsize)
    vectors = stores[0].combine == "add" or (dtype.is_floating and cells.once)
    bounds = indices_in(*(bound for loop in loops for bound in (loop.begin, loop.end)))
    lanes = _lanes(loops, stores, bounds, width) if vectors else None
    batches = _batches(loops, stores, lanes)
    targets = max(len({store.subscripts for store in batch}) for batch in batches)
    # Several cells of a term share the registers.
    most = max(1, min(_VECTORS, registers // targets))
    each = width * min(most, -(-(extent_of(lanes) or width * most) // width)) if lanes else 1
    rows, count = _rows(loops, stores, lanes, bounds, each // width if lanes else 1, targets, registers)
    if len(batches) > 1:
        count = min(count, max(1, registers // (targets * max(1, each // width))))
        rows = rows if count > 1 else None
    written = indices_in(*(s for store in stores for s in store.subscripts if not isinstance(s, Index)))
    outer = [loop for loop in loops if loop.role == "free" and loop not in (lanes, rows)]
    # Loops that write apart can be divided among threads; a walk over entries is the longest.
    outer.sort(key=lambda loop: (loop.index is not ROW, loop.index not in cells.apart, loop.index not in written))
    sums = [loop for loop in loops if loop.role == "sum" and loop is not lanes]
    reads = [node for store in stores for node in walk(store.value) if isinstance(node, Load)]
    index_reads = [read for read in reads if is_index(read.buffer)]
    sums.sort(key=lambda loop: (loop.index is not ENTRY, -sum(loop.index in indices_in(read) for read in index_reads)))
    along_cells = lanes is not None and lanes.role == "free"
    schedule = Schedule(m=count, n=each if along_cells else 1, k=each if lanes and not along_cells else 1)
    return Placement(schedule, width, tuple(outer), rows, tuple(sums), lanes, batches)


def _batches(loops: Sequence[Loop], stores: Sequence[Store], lanes: Loop | None) -> tuple[tuple[Store, ...], ...]:
    """The stores whose cells are summed together: all, or those that share vectors where all need too many registers.

    A walk over entries is long, and asks whether each is there: it is not repeated.
    """
    sums = {loop.index for loop in loops if loop.role == "sum"}
    if lanes is None or lanes.role == "sum" or not sums or ENTRY in sums or len(stores) > _ALIKE:
        return (tuple(stores),)
    by_cell: dict[tuple[Expr, ...], list[Store]] = {}
    for store in stores:
        by_cell.setdefault(store.subscripts, []).append(store)
    if len(by_cell) <= _CELLS:
        return (tuple(stores),)
    alike: dict[frozenset[Expr], list[list[Store]]] = {}
    for each in by_cell.values():
        factors = [f for store in each for f in factors_of(store.value)]
        alike.setdefault(frozenset(f for f in factors if lanes.index in indices_in(f)), []).append(each)
    found: list[tuple[Store, ...]] = []
    for cells in alike.values():
        for at in range(0, len(cells), _CELLS):
            found.append(tuple(store for each in cells[at : at + _CELLS] for store in each))
    return tuple(found)


def _lanes(loops: Sequence[Loop], stores: Sequence[Store], bounds: set[Index], width: int) -> Loop | None:
    """The loop whose neighbours are read and written next to each other at the least cost."""
    values = [*dict.fromkeys(each for s in stores for f in factors_of(s.value) for each in [*operands(f)] or [f])]
    selects = any(store.combine != "add" for store in stores)
    # What is written after a sum weighs less than what each of its terms reads.
    cells = [*{store.subscripts: store for store in stores}.values()]
    sums = [loop for loop in loops if loop.role == "sum"]

    def cost(loop: Loop) -> float | None:
        index = loop.index
        conditions = [c for store in stores for c in conjuncts(store.where) if index in indices_in(c)]
        if loop.begin is not Const(0) or index in bounds or index in (ENTRY, ROW) or extent_of(loop) == 0:
            return None
        if not all(_bounds_range(c, index) for c in conditions) or (selects and conditions):
            return None
        total = 1.5 if loop.role == "sum" else 0.0
        for value in values:
            if not isinstance(value, Load):
                if index in indices_in(value):
                    return None
                continue
            if None in steps_of(value, index):
                return None
            total += (0.25, 1, 6)[apart(value, index)]
        for store in cells if loop.role == "free" else ():
            if None in steps_of(store, index):
                return None
            # A cell that all lanes write would be added to lane by lane.
            if not any(steps_of(store, index)):
                return None
            total += (0.25, 1, 6)[apart(store, index)] * (1.0 if not sums else 0.25)
        total += 0.3 * len(conditions) / len(stores)
        extent = extent_of(loop)
        # Lanes far apart are read one by one: of a loop as long as a batch only if nothing else is there.
        return (total + (8 if extent is None and total >= 8 else 0)) / min(extent or width, width)

    costs = [(found, number) for number, loop in enumerate(loops) if (found := cost(loop)) is not None]
    if not costs or min(costs)[0] >= 0.8 * (len([v for v in values if isinstance(v, Load)]) + 0.5):
        return None
    return loops[min(costs)[1]]


def _bounds_range(condition: Expr, index: Index) -> bool:
    """Whether a condition says from where to where an index may run."""
    if not isinstance(condition, Op) or condition.name not in ("at_least", "less"):
        return False
    value, bound = condition.args
    return coefficient(value, index) not in (None, 0) and index not in indices_in(bound)


def _rows(
    loops: Sequence[Loop],
    stores: Sequence[Store],
    lanes: Loop | None,
    bounds: set[Index],
    vectors: int,
    targets: int,
    registers: int,
) -> tuple[Loop | None, int]:
    """The loop whose values share most of what is read, and how many of them to keep in registers."""
    reads = [*dict.fromkeys(n for s in stores for n in walk(s.value) if isinstance(n, Load))]
    written = indices_in(*(s for store in stores for s in store.subscripts if not isinstance(s, Index)))
    sums = {loop.index for loop in loops if loop.role == "sum"}
    best: tuple[float, Loop] | None = None
    for loop in loops:
        index, extent = loop.index, extent_of(loop)
        if loop.role != "free" or loop is lanes or index in bounds or index is ROW or extent == 1:
            continue
        if index in written and index is not ENTRY:
            continue
        gain = 0.0
        for read in reads:
            inside = indices_in(read)
            along = lanes is not None and lanes.index in inside
            if index not in inside and (along or sums & inside):
                gain += 2.0 if along else 0.5
        gain *= 1 if extent is None or extent >= 4 else extent / 4
        # Of two loops the inner one: the outer one may be a batch of one.
        if gain and gain >= (best[0] if best else 0.0):
            best = gain, loop
    if best is None:
        return None, 1
    # Terms of static tables share numbers more than vectors: rows beyond the registers still took 0.4 of the time.
    room = registers // vectors if targets == 1 else 4 if len(stores) <= 128 else 2
    extent = extent_of(best[1])
    count = min(extent or room, room, 8)
    # A few registers too many, or too few, cost less than rows that are left over.
    if extent is not None:
        most = min((registers + 4) // vectors, 8)
        count = next((n for n in range(most, count // 2, -1) if extent % n == 0), count)
    return (best[1], count) if count > 1 else (None, 1)

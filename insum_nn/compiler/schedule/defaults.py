"""Default schedules: good ones without any measurement, by rules that depend on a form and its sizes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from insum_nn.compiler.ir.schedule import Schedule, power
from insum_nn.compiler.schedule.form import CELLS, ENTRY, ROW_LOOP, Form, Product
from insum_nn.compiler.schedule.placement import MANY_TERMS, element_axes
from insum_nn.dtypes import is_widened

__all__ = ["default_schedule", "is_swapped"]


def default_schedule(form: Form) -> Schedule:
    """A good schedule without any measurement."""
    if form.additional:
        return _default_of_several(form)
    if form.product is not None:
        return _default_product(form, form.product)
    if len(form.unrolled) > MANY_TERMS:
        return _default_unrolled(form)
    rows, columns, summed = element_axes(form)
    width = math.prod(form.size(i) for i in columns) if columns else 1
    length = math.prod(form.size(i) for i in summed) if summed else 1
    if not columns:
        # Long sums along lanes, a few rows at a time: of 8,000 dense rows of 8,000 an H200 read 4 by 256 in 0.5 of the
        # time of 16 by 128.
        dense = form.row_index is None and length >= 256
        k = min(power(length), 256 if dense else 128 if summed else 1)
        if few := _few(form, k):
            k = max(k, min(16, 4 * power(form.size(ENTRY))))
        tile = 1024 if dense else 512 if few else 2048
        m = max(1, min(tile // k, 64, power(_side_by_side(form, rows))))
        # What divided rows leave is added up by a kernel more, for which a small sum waits as long as for eight steps,
        # or for twelve where these are short.
        chunk = max(96, 8 * k) if few else _chunk_of_rows(form)
        return Schedule(m=m, k=k, warps=1 if m * k <= 2048 else 4, splits=_splits(form, m, 1, most=4096), chunk=chunk)
    if form.row_index is None and not summed and rows and _crossed(form, rows[-1]):
        # Read along one axis and written along the other: a square tile has whole lines of memory in either.
        return Schedule(m=min(power(form.size(rows[-1])), 64), n=min(power(width), 64), warps=4)
    n = min(power(width), 128)
    free = n * math.prod(form.size(i) for i in rows if i != ROW_LOOP)
    if form.row_index is not None and free >= _SHARING:
        # Each entry of a row is read once for all lanes; fewer of these where programs are short.
        lanes = min(512, power(form.rows * free // _WARPS))
        if lanes >= 4 * 32:
            return Schedule(m=max(1, lanes // n), n=n, warps=1, chunk=_chunk_of_rows(form))
    k = min(power(length), 8 if n >= 64 else 16 if n >= 16 else 32)
    if few := _few(form, n * k):
        # Rows four times as long as the mean take one step.
        k = max(k, min(32 if n < 16 else 16 if n <= 32 else 8, 4 * power(length)))
    # A tile waits for the longest of its rows.
    size = 512 if few and n < 16 else 1024
    m = 1 if not rows else max(1, min(power(form.size(rows[-1])), size // (n * k)))
    warps = 1 if m * n * k <= 2048 else 4
    chunk = max(1, 64 // form.terms) if few else _chunk_of_rows(form)
    return Schedule(m=m, n=n, k=k, warps=warps, splits=_splits(form, m, n), chunk=chunk)


# Cells of a row of the output from which on lanes go along these alone: an H200 took 0.6 and 0.5 of the time of steps
# of 8 and 16 entries for pruned convolutions of 64 x 56 x 56 and 256 x 14 x 14.
_SHARING = 1024
# Warps that a large GPU runs at a time.
_WARPS = 1 << 13
# Values of all rows, a step of each, up to which a large GPU is not busy enough to hide what a step waits for.
_FEW = 1 << 23


# Terms of an entry at most that are lanes of a step, with those of its neighbours.
_GROUP = 16


def _side_by_side(form: Form, indices: Sequence[str]) -> int:
    """How many points the last of some indices, and those before it, may take as lanes of one axis of a tile."""
    count = 1
    for index in reversed(indices):
        count *= form.size(index)
        if index not in form.static:
            break
    return count


def _few(form: Form, cells: int) -> bool:
    """Whether rows of terms, a step of which takes so many cells, leave a large GPU waiting for the longest of them."""
    return form.row_index is not None and form.rows * cells < _FEW


def _chunk_of_rows(form: Form) -> int:
    """Most entries of a row for one program: much longer rows are divided, so that no program waits for them."""
    if form.row_index is None:
        return 512
    # Entries of a few terms each count by these, and larger ones as they are: each is long enough for a program.
    terms = form.terms if form.terms <= _GROUP else 1
    return max(64, min(512, 8 * power(form.size(ENTRY) * terms))) // terms


def _crossed(form: Form, row: str) -> bool:
    """Whether some tensor has its values side by side along the rows of a tile."""
    reads = (read for reads in form.factors for read in reads if read.subscripts)
    return any(form.whole_axis(read, len(read.subscripts) - 1) == row for read in reads)


# Values of a tile that a program of straight-line code works on at a time: eight for each thread of four warps.
_TILE = 1024


def _each(form: Form) -> int:
    """Values of a tile for each thread: the more terms are unrolled, the more registers one value takes."""
    count = 8 if len(form.unrolled) <= 16 else 4 if len(form.unrolled) <= 128 else 2
    return max(1, count * 4 // max(4, form.bound.dtype.itemsize))


def _default_unrolled(form: Form) -> Schedule:
    rows, columns, summed = element_axes(form)
    accumulators = form.accumulators * (2 if form.bound.dtype.itemsize == 8 else 1)
    length = math.prod(form.size(i) for i in summed) if summed else 1
    m, n, k = 1, 1, 1
    static_rows = bool(rows) and rows[-1] in form.static
    if columns:
        n = min(128 if form.row_index is None else 64, power(math.prod(form.size(i) for i in columns)))
    if form.row_index is not None:
        if not columns:
            k = min(64, power(form.size(summed[-1]))) if summed else 1
            m = max(1, 64 // k)
        groups = max(1, min(4, round(accumulators / 24)))
        # The longer the code, the fewer entries are worth a part: of 1,500 lines an H200 took 5 us an entry.
        chunk = _chunk(form, n, max(8, power(4 * _LONG // len(form.unrolled))), 4 * _ENOUGH // groups)
        return Schedule(m=m, n=n, k=k, groups=groups, warps=1, chunk=chunk)
    if not columns and static_rows:
        k = min(64, power(form.size(summed[-1]))) if summed else 1
    elif summed:
        k = min(_TILE // n, power(length))
    if static_rows and (columns or summed):
        m = min(power(form.size(rows[-1])), max(1, _TILE // (n * k)))
    elif rows and n * k < 64:
        m = min(64 // (n * k), power(form.size(rows[-1])))
    warps = max(1, min(8, m * n * k // (32 * _each(form))))
    held = accumulators * m * n // (32 * warps)
    return Schedule(m=m, n=n, k=k, groups=max(1, held // 128), warps=warps, splits=_splits(form, m, n))


def _default_of_several(form: Form) -> Schedule:
    """One row in one program, of whose lanes each holds one column: with two, the values of long code spill.

    An H200 took 3.2 and 4.1 ms for the double backward of a large product so, and 11.1 and 11.6 with two.
    """
    columns = form.static[element_axes(form)[1][0]]
    n = max(2, min(32, power(columns)), power(-(-columns // _tiles_at_most(form))))
    return Schedule(n=n, chunk=256, warps=max(1, min(8, n // 32)), stages=1)


def _tiles_at_most(form: Form) -> int:
    """Into how many programs the columns of a sum in memory may be divided."""
    if is_widened(form.bound.dtype):
        # Each part would be rounded.
        return 1
    # What two programs add up is the same in either order, and what more of them do is not.
    return 8 if any(each.scattered for each in form.additional) else 2


def _default_product(form: Form, product: Product) -> Schedule:
    size = {a: math.prod(form.size(i) for i in getattr(product, a)) for a in "mkn"}
    if form.accumulators > 1:
        return _default_products(form, size)
    m, n = (max(16, min(128, power(size[a]))) for a in "mn")
    k = 64
    if form.bound.dtype.itemsize == 4:
        # Of entries that select a matrix: an H200 took 0.66 to 0.84 of the time of 64 rows, 32 at a time, with 128 rows
        # and short sums in one step, and 1.5 times that of 32 at a time with long ones in steps of 64.
        m, n = m if form.stack else min(m, 64), min(n, 64)
        k = 64 if form.stack and size["k"] <= 64 else 32
    k = max(16, min(k, power(size["k"])))
    swap = is_swapped(form, m, n)
    # A third stage takes shared memory from other programs, which short rows do not earn back: an H200 took 0.80 to
    # 0.92 times as long for convolutions of 32 to 256 channels, and 1.1 to 1.7 times for rows of thirteen blocks.
    short = form.row_index is not None and size["k"] <= _SHORT * k
    stages = 2 if short or swap or form.bound.dtype.itemsize != 2 else 3
    splits, chunk = _splits(form, m, n), _chunk(form, m * n)
    return Schedule(m=m, n=n, k=k, dot=True, swap=swap, splits=splits, chunk=chunk, warps=4, stages=stages)


def is_swapped(form: Form, m: int, n: int) -> bool:
    """Whether the matrix unit gets a product of m rows and n columns transposed, for a Hopper's takes 64 rows at least.

    Of float32, and of 64 rows, the other order was faster at every size.
    """
    return m < 64 <= n and form.bound.dtype.itemsize == 2


# Steps of the products of a row up to which two stages are faster than three.
_SHORT = 12


def _default_products(form: Form, size: Mapping[str, int]) -> Schedule:
    """Unrolled products of matrices, short ones one after the other.

    Each waits for its operands to pass through shared memory, and warps of one program for each other too. A warp by
    itself waits least, and many such programs have something to do meanwhile. A step of 16 leaves them registers.
    """
    n = max(16, min(32, power(size["n"])))
    # A few accumulators to a program: registers are what is short, and what their terms have in common is read again.
    groups = max(1, form.accumulators // 3)
    # Where the sum is long, few programs share a tile of the result, and a square one reads least.
    m = max(16, min(32, power(size["m"]))) if size["k"] > size["m"] else 16
    splits = _splits(form, m, n, groups)
    warps = max(1, m * n // 512)
    return Schedule(m=m, n=n, k=16, dot=True, groups=groups, splits=splits, warps=warps, stages=1)


# Bytes of the parts of one sum at most.
_PARTS = 1 << 24


# Programs that keep a large GPU busy.
_ENOUGH = 512
# Terms of a sum from which on parts of it are worth a launch more, which adds them up.
_LONG = 1024


def _chunk(form: Form, tile: int, step: int = 64, enough: int = _ENOUGH) -> int:
    """Most terms of a row that one program walks: fewer, by `step`, where rows and tiles are not enough programs."""
    if form.row_index is None:
        return 512
    cells = math.prod(form.size(i) for i in form.parallel if i != ROW_LOOP)
    programs = form.rows * max(1, cells // tile)
    if programs >= enough:
        # No row of about the mean length is divided: its parts would be written, read and added up.
        return max(512, 2 * power(form.size(ENTRY)))
    # Each part of a row costs a tile of sums in memory: no more parts than keep the device busy.
    return max(1, form.size(ENTRY) * programs // (step * enough)) * step


def _splits(form: Form, m: int, n: int, groups: int = 0, most: int = 512) -> int:
    """Programs for one long sum, where the output alone does not fill the device: at most so many.

    `groups`: programs among which straight-line code is divided already.
    """
    if form.row_index is not None or form.strategy == "atomic" or not form.reduce:
        return 1
    cells = math.prod(form.size(i) for i in form.parallel)
    programs = max(1, cells // (m * n)) * max(1, groups)
    length, outer = _summed(form)
    if programs >= _ENOUGH or length * len(form.unrolled) < _LONG:
        return 1
    if groups:
        return max(1, min(128, 4 * _ENOUGH // programs, length // 64, outer, _PARTS // (4 * cells * form.accumulators)))
    # Each part is a copy of the whole output, which is cleared and added up.
    copies = 2 * _PARTS // (4 * max(1, form.sizes[CELLS]))
    # Each program walks its part step by step: an H200 took 1.5 ms for 64 parts of 800,000 terms, each of two gathers.
    return max(1, min(most, 2 * most // programs, length // 256, outer, copies))


def _summed(form: Form) -> tuple[int, int]:
    """How many terms of a sum may be divided, and the extent of its longest index.

    Sums over several indices count by all their terms where each is there. A loop over entries that may be missing is
    not divided: it skips what no row of a tile has.
    """
    sizes = [form.size(i) for i in form.reduce]
    gathers = any(name not in form.tables for name in form.bound.layout.index_tensors)
    return max(sizes) if gathers else math.prod(sizes), max(sizes)

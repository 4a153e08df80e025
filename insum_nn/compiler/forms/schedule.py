"""How a generated kernel spreads its indices over programs, lanes and loops: the schedules, and their defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from insum_nn.compiler.forms.axes import MANY_POINTS, element_axes
from insum_nn.compiler.forms.form import Form
from insum_nn.compiler.forms.points import ENTRY, LONGEST, OWNER, Product

__all__ = [
    "Axis",
    "Layout",
    "Precision",
    "Schedule",
    "adds_rows",
    "default_schedule",
    "place_indices",
    "power",
    "precision_of",
    "segmented",
    "skips_steps",
    "tiles_at_most",
]

Precision = Literal["ieee", "tf32", "tf32x3"]


def precision_of(dtype: torch.dtype, asked: str) -> Precision:
    """How the matrix unit multiplies float32, following torch's float32 matmul precision unless asked for by name."""
    if asked != "auto":
        return asked  # type: ignore[return-value]
    if dtype != torch.float32:
        return "ieee"
    # Three products of 10-bit parts keep what float32 can hold of a product.
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The choices that change a kernel's speed and nothing else.

    Sgap (Zhang et al.) writes the space of a sparse sum with dense columns as {<x nnz or x row, y col>, r}: what a
    thread takes, and how many threads add up to one value. All of it can be said here, of any statement whose terms
    have owners; t stands for the elements of a tile that a thread holds, m * n * k / (32 * warps).

        {<x row, y col>, 1}     m rows, k = 1: no lanes along a row; t = x * y
        {<1/r row, y col>, r}   k = r lanes along a row, t = y
        {<1/g row, y col>, r}   the same, and `share` = g terms at most of a row to a program
        {<x nnz, y col>, 1}     segment, share = x, k = 1: m groups, each walks x terms one by one; t = y
        {<1 nnz, y col>, r}     segment, share = k = r: m groups of r lanes, a term a lane; t = y
        {<x nnz, y col>, r}     segment, share = x * r, k = r: a group takes x steps of r terms

    Attributes:
        m: lanes along the rows of a tile; 1: none.
        n: lanes along its columns.
        k: lanes along what is summed.
        dot: sum by the matrix unit.
        swap: hand the matrix unit the transposed product, so that the tile's columns are its long side.
        groups: programs among which the accumulators of written-out points are divided.
        splits: programs among which one long sum is divided; their results are added in order.
        share: most terms of an owned row that one program walks; longer rows are divided. Of a segment: its terms.
        segment: programs take equal shares of the terms, in the order of their rows, instead of rows; m counts shares.
        early: of a kernel with several outputs: the loop over a row's terms reads index tensors a step before their
            terms, and their order two.
        warps: warps a program.
        stages: depth of the software pipeline. Without a dot it is 3 at least, or there is none: the loop over an
            owner's terms then reads ahead.
    """

    m: int = 1
    n: int = 1
    k: int = 1
    dot: bool = False
    swap: bool = False
    groups: int = 1
    splits: int = 1
    share: int = 512
    warps: int = 4
    stages: int = 2
    segment: bool = False
    early: bool = False

    def __str__(self) -> str:
        tile = f"tile {self.m} x {self.n}, {self.k} at a time"
        how = "by dot" + (", transposed" if self.swap else "") if self.dot else "by products and sums"
        rest = f"{self.warps} warps, {self.stages} stages"
        if self.groups > 1:
            rest += f", accumulators over {self.groups} programs"
        if self.splits > 1:
            rest += f", sum over {self.splits} programs"
        if self.segment:
            rest += f", equal shares of {self.share} terms"
        if self.early:
            rest += ", indices read early"
        return f"{tile} {how}; {rest}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Axis:
    """Indices on the lanes of one tile axis, slowest first; `block` values of the first at a time.

    `lanes` is a power of two, at least `block` times the extents of the others.
    """

    indices: tuple[str, ...]
    lanes: int
    block: int
    inner: tuple[int, ...]

    @property
    def first(self) -> str:
        return self.indices[0]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each index of a form goes under a schedule.

    Attributes:
        m: rows of the tile.
        k: what is summed.
        n: columns of the tile.
        grid: indices of which a program has one value.
        loops: summed indices that are stepped through one by one, outermost first.
    """

    m: Axis | None
    k: Axis | None
    n: Axis | None
    grid: tuple[str, ...]
    loops: tuple[str, ...]


def power(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(0, number - 1).bit_length()


def _axis(form: Form, wanted: list[str], lanes: int, least: int = 1) -> Axis | None:
    """The last of `wanted`, and as many before it as fit; all but the first need a known extent."""
    if not wanted or lanes <= 1:
        return None
    taken: list[str] = []
    inner = 1
    for index in reversed(wanted):
        if taken:
            extent = form.static.get(taken[0])
            if extent is None or inner * extent * 2 > lanes or ENTRY == taken[0]:
                break
            inner *= extent
        taken.insert(0, index)
    extent = form.static.get(taken[0])
    block = max(1, lanes // inner)
    if extent is not None:
        block = min(block, power(extent) if inner == 1 else extent)
    sizes = tuple(form.static[i] for i in taken[1:])
    return Axis(tuple(taken), max(least, power(block * inner)), block, sizes)


def segmented(form: Form, schedule: Schedule) -> bool:
    """Whether programs take equal shares of terms: a choice that only terms with owners have, and no dot."""
    if form.owner is None or form.beside:
        return False
    return schedule.segment and not (schedule.dot and form.product is not None)


def adds_rows(form: Form, schedule: Schedule) -> bool:
    """Whether what belongs to one cell of a further output is added up in memory, over tiles of columns."""
    n = place_indices(form, schedule).n
    return any(each.reduce for each in form.beside) and n is not None and n.block < form.static[n.first]


def place_indices(form: Form, schedule: Schedule) -> Layout:
    """Where each index goes."""
    if schedule.dot and form.product is not None:
        return _place_product(form, schedule, form.product)
    rows, columns, summed = element_axes(form)
    n = _axis(form, columns, schedule.n)
    taken = set(n.indices) if n else set[str]()
    m = _axis(form, [i for i in rows if i not in taken], schedule.m)
    if m is not None and OWNER in m.indices and m.indices != (OWNER,):
        m = _axis(form, [OWNER], schedule.m)
    k = _axis(form, summed, schedule.k)
    return _rest(form, m, k, n)


def _place_product(form: Form, schedule: Schedule, product: Product) -> Layout:
    m = _axis(form, list(product.m), schedule.m, 16)
    n = _axis(form, list(product.n), schedule.n, 16)
    k = _axis(form, _steady(form, product), schedule.k, 16)
    return _rest(form, m, k, n)


def _steady(form: Form, product: Product) -> list[str]:
    """Indices for the lanes of k: without those at which a whole tile may lack entries, whose steps are skipped."""
    gaps: set[str] = set()
    for read in form.points[0].reads:
        for sub in read.subs:
            for _, atom in sub.terms:
                if not isinstance(atom, str) and form.bound.facts_of(atom.name).masked is not False:
                    names = set(atom.indices())
                    if names & set(product.m):
                        gaps |= names
    kept = [i for i in product.k if i not in gaps]
    return kept if math.prod(form.size(i) for i in kept) >= 16 else list(product.k)


def skips_steps(form: Form, schedule: Schedule, layout: Layout) -> bool:
    """Whether one loop goes over the steps of a matrix product at which some row of the tile has an entry."""
    if not schedule.dot or form.product is None or len(layout.loops) != 1:
        return False
    rows = layout.m
    return rows is not None and rows.block == rows.lanes and layout.loops[0] not in _steady(form, form.product)


def _rest(form: Form, m: Axis | None, k: Axis | None, n: Axis | None) -> Layout:
    placed = {i for axis in (m, k, n) if axis is not None for i in axis.indices}
    grid = tuple(i for i in form.parallel if i not in placed)
    summed = ((ENTRY,) if form.owner is not None else ()) + form.reduce
    return Layout(m, k, n, grid, tuple(i for i in summed if i not in placed))


def default_schedule(form: Form) -> Schedule:
    """A good schedule without any measurement."""
    if form.beside:
        return _default_beside(form)
    if form.product is not None:
        return _default_product(form, form.product)
    if len(form.points) > MANY_POINTS:
        return _default_written_out(form)
    rows, columns, summed = element_axes(form)
    width = math.prod(form.size(i) for i in columns) if columns else 1
    length = math.prod(form.size(i) for i in summed) if summed else 1
    if not columns:
        # Long sums along lanes, a few rows at a time.
        k = min(power(length), 128 if summed else 1)
        if few := _few(form, k):
            k = max(k, min(16, 4 * power(form.size(ENTRY))))
        m = 1 if not rows else max(1, min((512 if few else 2048) // k, 64, power(form.size(rows[-1]))))
        # What divided rows leave is added up by a kernel more, for which a small sum waits as long as for eight steps,
        # or for twelve where these are short.
        share = max(96, 8 * k) if few else _share_of_rows(form)
        return Schedule(m=m, k=k, warps=1 if m * k <= 2048 else 4, splits=_splits(form, m, 1), share=share)
    if form.owner is None and not summed and rows and _crossed(form, rows[-1]):
        # Read along one axis and written along the other: a square tile has whole lines of memory in either.
        return Schedule(m=min(power(form.size(rows[-1])), 64), n=min(power(width), 64), warps=4)
    n = min(power(width), 128)
    if (shares := _equal_shares(form, n)) is not None:
        return shares
    k = min(power(length), 8 if n >= 64 else 16 if n >= 16 else 32)
    longest = form.longest
    if few := _few(form, n * k):
        # Rows four times as long as the mean take one step.
        wide = min(32 if n < 16 else 16 if n <= 32 else 8, 4 * power(length))
        # Rows none of which takes many steps as it is need no more lanes.
        k = max(k, wide if longest is None else min(wide, power(longest // 8)))
    # A tile waits for the longest of its rows.
    size = 512 if few and n < 16 else 1024
    m = 1 if not rows else max(1, min(power(form.size(rows[-1])), size // (n * k)))
    warps = 1 if m * n * k <= 2048 else 4
    share = max(1, 64 // form.terms) if few else _share_of_rows(form)
    if longest is not None and longest <= _STEPS * k:
        # To divide rows takes a launch more, which so few steps are not worth.
        share = max(share, power(form.sizes[LONGEST]))
    return Schedule(m=m, n=n, k=k, warps=warps, splits=_splits(form, m, n), share=share)


# Values of all rows, a step of each, up to which a large GPU is not busy enough to hide what a step waits for.
_FEW = 1 << 23


# Terms of all rows that leave a large GPU waiting for memory, whatever the rows.
_FEW_TERMS = 1 << 19
# Steps that a row may take before it is divided.
_STEPS = 12
# Terms of an entry at most that are lanes of a step, with those of its neighbours.
_GROUP = 16


def _equal_shares(form: Form, n: int) -> Schedule | None:
    """Equal shares of the terms, for n columns, where rows are known to differ much; `None`: by rows."""
    size, stretch = form.bound.dtype.itemsize, form.stretch
    if stretch is None or size > 4 or n > (64 if size == 4 else 32):
        return None
    if form.terms > _GROUP or any(index not in form.static for index in form.reduce):
        # What an entry has is more than the lanes of a step, or steps of its own.
        return None
    length = form.size(ENTRY) * form.terms
    if stretch > 1024:
        # One row has a good part of all terms.
        m, k, share = 4 if n <= 32 else 2, 32 if n <= 16 else 16, 128
    elif n > 32 and stretch > 8 and length > 4 and form.rows * length <= _FEW_TERMS:
        # As many programs as keep the device busy, each of which has more terms on their way than one of rows.
        m, k, share = 2, 16, 64
    else:
        return None
    return Schedule(m=m, n=n, k=k, warps=1, share=share // power(form.terms), segment=True)


def _few(form: Form, cells: int) -> bool:
    """Whether rows of terms, a step of which takes so many cells, leave a large GPU waiting for the longest of them."""
    return form.owner is not None and form.rows * cells < _FEW


def _share_of_rows(form: Form) -> int:
    """Most entries of a row for one program: rows far longer than the others are divided, lest all wait for them."""
    if form.owner is None:
        return 512
    # Entries of a few terms each count by these, and larger ones as they are: each is long enough for a program.
    terms = form.terms if form.terms <= _GROUP else 1
    return max(64, min(512, 8 * power(form.size(ENTRY) * terms))) // terms


def _crossed(form: Form, row: str) -> bool:
    """Whether some tensor has its values side by side along the rows of a tile."""
    return any(read.subs[-1].plain == row for point in form.points for read in point.reads if read.subs)


# Values of a tile that a program of straight-line code works on at a time: eight for each thread of four warps.
_TILE = 1024


def _each(form: Form) -> int:
    """Values of a tile for each thread: the more terms are written out, the more registers one value takes."""
    count = 8 if len(form.points) <= 16 else 4 if len(form.points) <= 128 else 2
    return max(1, count * 4 // max(4, form.bound.dtype.itemsize))


def _default_written_out(form: Form) -> Schedule:
    rows, columns, summed = element_axes(form)
    accumulators = form.accumulators * (2 if form.bound.dtype.itemsize == 8 else 1)
    length = math.prod(form.size(i) for i in summed) if summed else 1
    m, n, k = 1, 1, 1
    known = bool(rows) and rows[-1] in form.static
    if columns:
        n = min(128 if form.owner is None else 64, power(math.prod(form.size(i) for i in columns)))
    if form.owner is not None:
        if not columns:
            k = min(64, power(form.size(summed[-1]))) if summed else 1
            m = max(1, 64 // k)
        return Schedule(m=m, n=n, k=k, groups=max(1, min(4, round(accumulators / 24))), warps=1)
    if not columns and known:
        k = min(64, power(form.size(summed[-1]))) if summed else 1
    elif summed:
        k = min(_TILE // n, power(length))
    if known and (columns or summed):
        m = min(power(form.size(rows[-1])), max(1, _TILE // (n * k)))
    elif rows and n * k < 64:
        m = min(64 // (n * k), power(form.size(rows[-1])))
    warps = max(1, min(8, m * n * k // (32 * _each(form))))
    held = accumulators * m * n // (32 * warps)
    return Schedule(m=m, n=n, k=k, groups=max(1, held // 128), warps=warps, splits=_splits(form, m, n))


# Numbers that a thread of straight-line code holds at a time, of the 255 that it can.
_HELD = 160


def _default_beside(form: Form) -> Schedule:
    """One row in one warp, whose lanes hold as many columns each as there is room for."""
    columns = form.static[element_axes(form)[1][0]]
    points = [point for each in form.statements for point in each]
    # Sums, and what is read of the row once for all of its terms.
    cells = {str(point.target) for point in points}
    cells |= {str(read) for point in points for read in point.reads if OWNER in read.indices()}
    held = len(cells) * form.bound.dtype.itemsize // 4
    n = max(2, min(64 if 2 * held <= _HELD else 32, power(columns)))
    n = max(n, power(-(-columns // tiles_at_most(form))))
    return Schedule(n=n, share=256, warps=max(1, min(8, n // 64)), stages=1, early=True)


def tiles_at_most(form: Form) -> int:
    """Into how many programs the columns of a sum in memory may be divided."""
    if form.bound.dtype.itemsize == 2:
        # Each part would be rounded.
        return 1
    # What two programs add up is the same in either order, and what more of them do is not.
    return 8 if any(each.scattered for each in form.beside) else 2


def _default_product(form: Form, product: Product) -> Schedule:
    size = {a: math.prod(form.size(i) for i in getattr(product, a)) for a in "mkn"}
    if form.accumulators > 1:
        return _default_products(form, size)
    m, n = (max(16, min(128, power(size[a]))) for a in "mn")
    if form.bound.dtype.itemsize == 4:
        m, n = min(m, 64), min(n, 64)
    k = max(16, min(32 if form.bound.dtype.itemsize == 4 else 64, power(size["k"])))
    # A Hopper's matrix unit takes 64 rows at least; of float32 the other order was faster at every size.
    swap = m < 64 <= n and form.bound.dtype.itemsize == 2
    warps = 8 if m * n >= 128 * 128 else 4
    return Schedule(m, n, k, True, swap, 1, _splits(form, m, n), _share(form, m * n), warps, 2)


def _default_products(form: Form, size: Mapping[str, int]) -> Schedule:
    """Written-out products of matrices, short ones one after the other.

    Each waits for its operands to pass through shared memory, and warps of one program for each other too. A warp by
    itself waits least, and many such programs have something to do meanwhile. A step of 16 leaves them registers.
    """
    n = max(16, min(32, power(size["n"])))
    # A few accumulators to a program: registers are what is short, and what their terms have in common is read again.
    groups = max(1, form.accumulators // 3)
    # Where the sum is long, few programs share a tile of the result, and a square one reads least.
    m = max(16, min(32, power(size["m"]))) if size["k"] > size["m"] else 16
    splits = _splits_of_parts(form, m * n, groups)
    return Schedule(m, n, 16, True, False, groups, splits, warps=max(1, m * n // 512), stages=1)


# Bytes of the parts of one sum at most.
_PARTS = 1 << 24


def _splits_of_parts(form: Form, tile: int, groups: int) -> int:
    """Programs for one long sum of code that is divided among programs already."""
    if form.owner is not None or form.combine == "atomic" or not form.reduce:
        return 1
    cells = math.prod(form.size(i) for i in form.parallel)
    length = max(form.size(i) for i in form.reduce)
    programs = max(1, cells // tile) * groups
    if programs >= _ENOUGH or length < 1024:
        return 1
    return max(1, min(128, 4 * _ENOUGH // programs, length // 64, _PARTS // (4 * cells * form.accumulators)))


# Programs that keep a large GPU busy.
_ENOUGH = 512


def _share(form: Form, tile: int) -> int:
    """Most terms of a row that one program walks: fewer where rows and tiles alone are too few programs."""
    if form.owner is None:
        return 512
    cells = math.prod(form.size(i) for i in form.parallel if i != OWNER)
    programs = form.rows * max(1, cells // tile)
    if programs >= _ENOUGH:
        return 512
    # Each part of a row costs a tile of sums in memory: no more parts than keep the device busy.
    return max(1, form.size(ENTRY) * programs // (64 * _ENOUGH)) * 64


def _splits(form: Form, m: int, n: int) -> int:
    """Programs for one long sum, where the output alone does not fill the device."""
    if form.owner is not None or form.combine == "atomic" or not form.reduce:
        return 1
    cells = math.prod(form.size(i) for i in form.parallel)
    programs = max(1, cells // (m * n))
    length = max(form.size(i) for i in form.reduce)
    if programs >= 512 or length < 1024:
        return 1
    return max(1, min(64, 1024 // programs, length // 256))

"""How a generated kernel spreads its indices over programs, lanes and loops: the schedules, and their defaults."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from insum_nn.compiler.kernel_form import ENTRY, OWNER, Form, Product

__all__ = ["Axis", "Layout", "Precision", "Schedule", "candidates", "default_schedule", "place_indices"]

Precision = Literal["ieee", "tf32", "tf32x3"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The choices that change a kernel's speed and nothing else.

    Attributes:
        m: lanes along the rows of a tile; 1: none.
        n: lanes along its columns.
        k: lanes along what is summed.
        dot: sum by the matrix unit.
        swap: hand the matrix unit the transposed product, so that the tile's columns are its long side.
        groups: programs among which the accumulators of written-out points are divided.
        splits: programs among which one long sum is divided; their results are added in order.
        share: most terms of an owned row that one program walks; longer rows are divided.
        warps: warps a program.
        stages: depth of the software pipeline.
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

    def __str__(self) -> str:
        tile = f"tile {self.m} x {self.n}, {self.k} at a time"
        how = "by dot" + (", transposed" if self.swap else "") if self.dot else "by products and sums"
        rest = f"{self.warps} warps, {self.stages} stages"
        if self.groups > 1:
            rest += f", accumulators over {self.groups} programs"
        if self.splits > 1:
            rest += f", sum over {self.splits} programs"
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


def _power(number: int) -> int:
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
        block = min(block, _power(extent) if inner == 1 else extent)
    sizes = tuple(form.static[i] for i in taken[1:])
    return Axis(tuple(taken), max(least, _power(block * inner)), block, sizes)


def place_indices(form: Form, schedule: Schedule) -> Layout:
    """Where each index goes."""
    if schedule.dot and form.product is not None:
        return _place_product(form, schedule, form.product)
    rows, columns, summed = _element_axes(form)
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


def _rest(form: Form, m: Axis | None, k: Axis | None, n: Axis | None) -> Layout:
    placed = {i for axis in (m, k, n) if axis is not None for i in axis.indices}
    grid = tuple(i for i in form.parallel if i not in placed)
    summed = ((ENTRY,) if form.owner is not None else ()) + form.reduce
    return Layout(m, k, n, grid, tuple(i for i in summed if i not in placed))


def _element_axes(form: Form) -> tuple[list[str], list[str], list[str]]:
    """Candidates for rows, columns and sums of a tile that is multiplied element by element."""
    last = {sub.plain for p in form.points for r in (*p.reads, p.target) if r.subs and (sub := r.subs[-1]).plain}
    parallel = [i for i in form.parallel if i != OWNER]
    columns = [i for i in parallel[-1:] if i in last and (form.owner is not None or len(form.parallel) > 1)]
    rows = [i for i in form.parallel if i not in columns]
    summed = [i for i in form.reduce if i in last] or list(form.reduce)
    # Lanes along what is summed: dense axes that lie side by side where columns do not, else the terms themselves.
    if form.owner is not None:
        known = [i for i in form.reduce if i in form.static]
        summed = [ENTRY, *known] if columns or not form.reduce else summed[-1:]
    elif columns:
        summed = list(form.reduce)
    return rows, columns, summed


def default_schedule(form: Form) -> Schedule:
    """A good schedule without any measurement."""
    if form.product is not None:
        return _default_product(form, form.product)
    if len(form.points) > _MANY_POINTS:
        return _default_written_out(form)
    rows, columns, summed = _element_axes(form)
    width = math.prod(form.size(i) for i in columns) if columns else 1
    length = math.prod(form.size(i) for i in summed) if summed else 1
    if not columns:
        # Long sums along lanes, a few rows at a time.
        k = min(_power(length), 128 if summed else 1)
        m = 1 if not rows else max(1, min(2048 // k, 64, _power(form.size(rows[-1]))))
        return Schedule(m=m, k=k, warps=1 if m * k <= 2048 else 4, splits=_splits(form, m, 1))
    n = min(_power(width), 128)
    k = min(_power(length), 8 if n >= 64 else 16 if n >= 16 else 32)
    m = 1 if not rows else max(1, min(_power(form.size(rows[-1])), 1024 // (n * k)))
    warps = 1 if m * n * k <= 2048 else 4
    return Schedule(m=m, n=n, k=k, warps=warps, splits=_splits(form, m, n))


# Points past which a kernel is straight-line code rather than a loop with a few terms.
_MANY_POINTS = 8


def _default_written_out(form: Form) -> Schedule:
    rows, columns, summed = _element_axes(form)
    accumulators = len({str(p.target) for p in form.points})
    double = form.bound.dtype.itemsize == 8
    if columns:
        n = min(64, _power(math.prod(form.size(i) for i in columns)))
        groups = max(1, accumulators * (2 if double else 1) // 48)
        return Schedule(n=n, groups=groups, warps=1, splits=_splits(form, 1, n))
    k = min(64, _power(form.size(summed[-1]))) if summed else 1
    m = min(_power(form.size(rows[-1])), max(1, 64 // k)) if rows else 1
    return Schedule(m=m, k=k, groups=max(1, accumulators // 48), warps=1, splits=_splits(form, m, 1))


def _default_product(form: Form, product: Product) -> Schedule:
    size = {a: math.prod(form.size(i) for i in getattr(product, a)) for a in "mkn"}
    m, n = (max(16, min(128, _power(size[a]))) for a in "mn")
    accumulators = len({str(p.target) for p in form.points})
    if form.bound.dtype.itemsize == 4:
        m, n = min(m, 64), min(n, 64)
    # Each accumulator to a program of its own, where many terms go into it: registers are what is short.
    groups = accumulators
    k = max(16, min(32 if form.bound.dtype.itemsize == 4 else 64, _power(size["k"])))
    # A Hopper's matrix unit takes 64 rows at least.
    swap = n > m and n >= 64
    warps = 8 if m * n >= 128 * 128 else 4
    return Schedule(m, n, k, True, swap, groups, _splits(form, m, n), _share(form, m * n), warps, 2)


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


# Candidates.


def candidates(form: Form) -> Iterator[Schedule]:
    """Schedules worth measuring, the default first."""
    base = default_schedule(form)
    seen: set[tuple[Schedule, Layout]] = set()
    for schedule in (base, *_varied(form, base)):
        # Different numbers may come to the same kernel.
        key = replace(schedule, m=0, n=0, k=0), place_indices(form, schedule)
        if key not in seen:
            seen.add(key)
            yield schedule


def _varied(form: Form, base: Schedule) -> Iterator[Schedule]:
    if base.dot:
        yield from _varied_products(form, base)
    elif len(form.points) > _MANY_POINTS:
        yield from _varied_written_out(base)
    elif base.n == 1:
        for m, k in ((base.m, base.k), (base.m * 2, base.k), (max(1, base.m // 2), base.k), (base.m, base.k // 2)):
            for warps in (1, 2, 4):
                yield replace(base, m=m, k=max(1, k), warps=warps)
    else:
        for k in (1, 4, 8, 16, 32):
            for m in (1, 2, 4, 8, 16):
                size = m * base.n * k
                if 512 <= size <= 4096 and (k <= 2 * base.k or k == 1):
                    yield replace(base, m=m, k=k, warps=1)
                    if size >= 2048:
                        yield replace(base, m=m, k=k, warps=2)
        if form.owner is not None:
            yield replace(base, share=128)


def _varied_written_out(base: Schedule) -> Iterator[Schedule]:
    wide = base.n > 1
    for lanes, groups, warps in (
        (2, 1, 1),
        (2, 1, 2),
        (2, 2, 1),
        (1, 1, 1),
        (1, 2, 1),
        (4, 1, 2),
        (4, 1, 4),
        (2, 4, 1),
    ):
        if wide:
            yield replace(base, n=max(1, base.n * lanes // 2), groups=groups, warps=warps)
        else:
            yield replace(base, m=max(1, base.m * lanes // 2), groups=groups, warps=warps)


# Tiles, steps, warps and stages of halves whose operands are addressed by index tensors. A step that takes the whole of
# a dense axis leaves one loop, where a shorter one makes a loop of two inside of another. The software pipeline gives
# each read of a chain (a list of steps, an index, what it addresses) a stage of its own: 3 to 4 stages hide a chain
# once, 5 to 7 twice. Taller tiles read the right side less often.
_CHAINED = (
    (64, 128, 128, 4, 3),
    (64, 128, 64, 4, 3),
    (64, 128, 64, 4, 4),
    (128, 128, 64, 8, 4),
    (64, 128, 128, 4, 4),
    (128, 128, 128, 8, 3),
    (128, 64, 64, 4, 3),
    (64, 64, 64, 4, 3),
    (64, 64, 64, 4, 4),
    (128, 64, 64, 4, 4),
    (64, 64, 128, 4, 3),
    (32, 64, 64, 2, 3),
    (32, 64, 128, 4, 3),
)


def _varied_chains(base: Schedule, most: dict[str, int]) -> Iterator[Schedule]:
    for m, n, k, warps, stages in _CHAINED:
        covers = min(most["n"], 128) <= n <= max(most["n"], 64)
        if covers and (m == most["m"] or 64 <= m <= most["m"]) and k <= most["k"]:
            yield replace(base, m=m, n=n, k=k, swap=False, warps=warps, stages=stages)


def _varied_products(form: Form, base: Schedule) -> Iterator[Schedule]:
    assert form.product is not None
    size = {a: math.prod(form.size(i) for i in getattr(form.product, a)) for a in "mkn"}
    most = {a: max(16, _power(size[a])) for a in "mkn"}
    many = base.groups > 1
    shapes = (
        ((16, 64), (32, 64), (64, 64), (128, 64))
        if many
        else ((base.m, base.n), (64, 128), (128, 64), (128, 128), (64, 64), (32, 128), (32, 256), (64, 256), (128, 32))
    )
    if form.bound.dtype.itemsize == 2 and not many and form.bound.layout.index_tensors:
        yield from _varied_chains(base, most)
    for m, n in shapes:
        if m > most["m"] or n > max(most["n"], 64):
            continue
        swaps = (False,) if n <= m or n < 64 else (True,) if m < 64 else (False, True)
        for k in sorted({32, 64} if most["k"] >= 64 else {most["k"], 32}):
            for swap in swaps:
                for warps, stages in ((4, 2), (4, 3), (8, 3)):
                    if warps == 8 and m * n < 64 * 128 and not many:
                        continue
                    for groups in {1, base.groups}:
                        yield replace(base, m=m, n=n, k=k, swap=swap, warps=warps, stages=stages, groups=groups)
    if form.owner is not None:
        for share in {max(1, base.share // 2), base.share * 2}:
            yield replace(base, share=share)

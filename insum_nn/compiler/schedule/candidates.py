"""Schedules worth measuring: variations of a default, the most promising first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from insum_nn.compiler.ir.schedule import Schedule, power
from insum_nn.compiler.passes.tile import Tiling
from insum_nn.compiler.schedule.defaults import default_schedule, is_swapped, tiles_at_most
from insum_nn.compiler.schedule.form import Form
from insum_nn.compiler.schedule.placement import MANY_TERMS, place_indices

__all__ = ["candidates"]


def candidates(form: Form) -> Iterator[Schedule]:
    """Schedules worth measuring, the default first."""
    base = default_schedule(form)
    seen: set[tuple[Schedule, Tiling]] = set()
    for schedule in (base, *_varied(form, base)):
        # Different numbers may come to the same kernel.
        key = replace(schedule, m=0, n=0, k=0), place_indices(form, schedule)
        if key not in seen:
            seen.add(key)
            yield schedule


def _varied(form: Form, base: Schedule) -> Iterator[Schedule]:
    if not form.bound.statement.combining.adds:
        return
    if form.additional:
        yield from _varied_of_several(form, base)
    elif base.dot:
        yield from _varied_products(form, base)
    elif len(form.unrolled) > MANY_TERMS:
        yield from _varied_owned(base) if form.row_index is not None else _varied_tiles(form, base)
    elif base.n == 1:
        for m, k in ((base.m, base.k), (base.m * 2, base.k), (max(1, base.m // 2), base.k), (base.m, base.k // 2)):
            for warps in (1, 2, 4):
                yield replace(base, m=m, k=max(1, k), warps=warps)
    else:
        yield from _varied_columns(form, base)


def _varied_columns(form: Form, base: Schedule) -> Iterator[Schedule]:
    """Every reduction width with rows to fill a warp."""
    # Elements of a program, and its warps: few columns take more of them to keep the device busy.
    if base.n < 32:
        sizes = [(256, 1), (1024, 1), (1024, 4)]
    else:
        sizes = [(512, 1), (1024, 1), *([(2048, 1)] if base.n > 32 else []), (2048, 2)]
    near = sorted(_WIDTHS, key=lambda k: abs(math.log2(k / base.k)))
    for size, warps in sizes:
        for k in near:
            m = size // (base.n * k)
            if 1 <= m <= 128 and (k <= 4 * base.k or k == 1) and (warps < 2 or k in (4, 8, 16)):
                yield replace(base, m=m, k=k, warps=warps)
    if form.row_index is not None:
        for chunk in (128, 512):
            yield replace(base, chunk=chunk)


# Reduction widths: lanes along what is summed. A warp has 32.
_WIDTHS = (1, 2, 4, 8, 16, 32)


def _varied_of_several(form: Form, base: Schedule) -> Iterator[Schedule]:
    """Of code with several outputs: the columns of a thread decide how many registers it needs."""
    columns = place_indices(form, replace(base, n=1 << 16)).n
    assert columns is not None
    for lanes in (2, 1, 4):
        for warps in (1, 2, 4, 8):
            n = min(32 * lanes * warps, columns.lanes)
            if n * tiles_at_most(form) >= columns.lanes and n > 16 * lanes * warps:
                yield replace(base, n=n, warps=warps)
    yield replace(base, chunk=64)


def _varied_owned(base: Schedule) -> Iterator[Schedule]:
    """Of code for owned rows: accumulators stay in registers, so lanes and groups decide how many a thread has."""
    wide = base.n > 1
    ways = ((2, 1, 1), (2, 2, 1), (2, 3, 1), (1, 1, 1), (1, 2, 1), (4, 3, 1), (4, 2, 2), (2, 4, 1))
    for lanes, groups, warps in ways:
        axis = "n" if wide else "m"
        yield replace(base, **{axis: max(1, getattr(base, axis) * lanes // 2)}, groups=groups, warps=warps)


def _varied_tiles(form: Form, base: Schedule) -> Iterator[Schedule]:
    """Of code for a tile: a longer or shorter one, in more or fewer warps."""
    axis = "k" if base.k > 1 else "m" if base.m > 1 else "n"
    whole = getattr(place_indices(form, replace(base, **{axis: 1 << 16})), axis)
    most = whole.lanes if whole is not None else 1
    lanes = getattr(base, axis)
    yield replace(base, warps=base.warps * 2)
    if base.warps > 1:
        yield replace(base, warps=base.warps // 2)
    if lanes >= 64:
        yield replace(base, **{axis: lanes // 2}, warps=max(1, base.warps // 2))
    if lanes * 2 <= most:
        yield replace(base, **{axis: lanes * 2}, warps=min(8, base.warps * 2))


# Tiles, steps, warps and stages of fp16 and bf16 operands that index tensors address. A step that takes the whole of
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
    most = {a: max(16, power(size[a])) for a in "mkn"}
    if form.accumulators > 1:
        yield from _varied_unrolled_products(form, base, most)
        return
    shapes = ((base.m, base.n), (64, 128), (128, 64), (128, 128), (64, 64), (32, 128), (32, 256), (64, 256), (128, 32))
    if form.bound.dtype.itemsize == 2 and form.bound.layout.index_tensors:
        yield from _varied_chains(base, most)
    for m, n in shapes:
        if m > most["m"] or n > max(most["n"], 64):
            continue
        for k in sorted({32, 64} if most["k"] >= 64 else {most["k"], 32}):
            for warps, stages in ((4, 2), (4, 3), (8, 3)):
                if warps == 8 and m * n < 64 * 128:
                    continue
                yield replace(base, m=m, n=n, k=k, swap=is_swapped(form, m, n), warps=warps, stages=stages)
    if form.row_index is not None:
        for chunk in {max(1, base.chunk // 2), base.chunk * 2}:
            yield replace(base, chunk=chunk)


def _varied_unrolled_products(form: Form, base: Schedule, most: Mapping[str, int]) -> Iterator[Schedule]:
    """Of long straight-line code: few, since each takes seconds to compile, the most promising first."""
    accumulators = form.accumulators
    four = replace(base, warps=4, groups=accumulators)
    if most["k"] > most["m"]:
        if min(most["m"], most["n"]) >= 64:
            for k in (base.k, 32):
                yield replace(base, m=64, n=64, k=k, warps=4)
    elif base.n == 32:
        if most["n"] >= 64:
            # More columns for what a row's operand passes through shared memory for, or more rows for a column's.
            yield replace(base, n=64, k=32, warps=2)
            yield replace(four, n=64, k=32)
            yield replace(four, m=64, n=64, k=64)
        yield replace(base, m=32, k=32, warps=2)
    for groups in (max(1, accumulators // 6), accumulators):
        yield replace(base, groups=groups)
    if form.bound.dtype.itemsize == 2:
        yield replace(four, m=64, k=min(64, most["k"]))

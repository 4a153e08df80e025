"""Schedules worth measuring: variations of a default, the most promising first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from insum_nn.compiler.ir.schedule import Schedule, power
from insum_nn.compiler.passes.tile import Tiling
from insum_nn.compiler.schedule.defaults import default_schedule, is_swapped
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
    if form.additional or len(form.unrolled) > MANY_TERMS or (base.dot and form.accumulators > 1):
        yield from _near(form, base)
    elif base.dot:
        yield from _varied_products(form, base)
    elif base.n == 1:
        for m, k in ((base.m, base.k), (base.m * 2, base.k), (max(1, base.m // 2), base.k), (base.m, base.k // 2)):
            for warps in (1, 2, 4):
                yield replace(base, m=m, k=max(1, k), warps=warps)
    else:
        yield from _varied_columns(form, base)


def _near(form: Form, base: Schedule) -> Iterator[Schedule]:
    """Of long straight-line code: one number doubled or halved, since each takes seconds to compile."""
    least = {"m": 16, "n": 16, "k": 16} if base.dot else {"n": base.n} if form.additional else {}
    used = ["chunk"] if form.row_index is not None else []
    for field in ("warps", *(each for each in ("n", "k", "m", "groups", *used) if getattr(base, each) > 1)):
        number = getattr(base, field)
        for other in (number * 2, number // 2):
            if max(1, least.get(field, 1)) <= other and (field != "warps" or other <= 8):
                yield replace(base, **{field: other})


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


def _varied_products(form: Form, base: Schedule) -> Iterator[Schedule]:
    assert form.product is not None
    size = {a: math.prod(form.size(i) for i in getattr(form.product, a)) for a in "mkn"}
    most = {a: max(16, power(size[a])) for a in "mkn"}
    shapes = ((base.m, base.n), (64, 128), (128, 64), (128, 128), (64, 64), (32, 128), (32, 256), (64, 256), (128, 32))
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

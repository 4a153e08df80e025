"""Where each index of a form goes under a schedule: programs, lanes of a tile, loops."""

from __future__ import annotations

import math
from dataclasses import replace

from insum_nn.compiler.ir.access import labels_of
from insum_nn.compiler.ir.nodes import Load, Store
from insum_nn.compiler.ir.schedule import Schedule, power
from insum_nn.compiler.passes.tile import WORD_BITS, Lanes, Tiling
from insum_nn.compiler.schedule.form import ENTRY, ROW_LOOP, Form, Product, atoms, reads_of

__all__ = [
    "MANY_TERMS",
    "SHARED_MULTIPLE",
    "adds_rows",
    "element_axes",
    "extent_arguments",
    "place_indices",
]

# Unrolled terms past which a kernel is straight-line code rather than a loop with a few terms.
MANY_TERMS = 8

# What an extent is a multiple of, so that rows begin at whole vectors of 16 bytes in every dtype.
SHARED_MULTIPLE = 16


def place_indices(form: Form, schedule: Schedule) -> Tiling:
    """Where each index goes."""
    if schedule.dot and form.product is not None:
        product = form.product
        lanes = [
            _lanes(form, list(product.m), schedule.m, 16),
            _lanes(form, _steady(form, product), schedule.k, 16),
            _lanes(form, list(product.n), schedule.n, 16),
        ]
        sides = (product.left, product.right)
    else:
        lanes, sides = _elements(form, schedule), None
    placed = {i for each in lanes if each is not None for i in each.indices}
    summed = ((ENTRY,) if form.row_index is not None else ()) + form.reduce
    loops = tuple(i for i in summed if i not in placed)
    tiling = Tiling(
        *lanes,
        grid=tuple(i for i in form.parallel if i not in placed),
        loops=loops,
        combine="add" if form.strategy == "atomic" else "set",
        product=sides,
        few=frozenset(i for i in loops if form.static.get(i, WORD_BITS + 1) <= WORD_BITS),
    )
    arguments = extent_arguments(form, tiling)

    def whole(each: Lanes | None) -> Lanes | None:
        fits = each is not None and each.first in arguments and form.static[each.first] % each.block == 0
        return replace(each, whole=True) if each is not None and fits else each

    return replace(tiling, m=whole(tiling.m), k=whole(tiling.k), n=whole(tiling.n))


def _elements(form: Form, schedule: Schedule) -> list[Lanes | None]:
    """The axes of a tile that is multiplied element by element."""
    rows, columns, summed = element_axes(form)
    n = _lanes(form, columns, schedule.n)
    taken = set(n.indices) if n else set[str]()
    m = _lanes(form, [i for i in rows if i not in taken], schedule.m)
    if m is not None and ROW_LOOP in m.indices and m.indices != (ROW_LOOP,):
        m = _lanes(form, [ROW_LOOP], schedule.m)
    return [m, _lanes(form, summed, schedule.k), n]


def _lanes(form: Form, indices: list[str], lanes: int, least: int = 1) -> Lanes | None:
    """The last of `indices`, and as many before it as fit; all but the first need a known extent."""
    if not indices or lanes <= 1:
        return None
    taken: list[str] = []
    inner = 1
    for index in reversed(indices):
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
    return Lanes(tuple(taken), max(least, power(block * inner)), block, tuple(form.static[i] for i in taken[1:]))


def element_axes(form: Form) -> tuple[list[str], list[str], list[str]]:
    """Candidates for rows, columns and sums of a tile that is multiplied element by element."""
    rows, columns, summed = form.plan.get("axes", lambda: _element_axes(form))
    return [*rows], [*columns], [*summed]


def _element_axes(form: Form) -> tuple[list[str], list[str], list[str]]:
    accesses = [access for output in form.stores for store in output for access in (*reads_of(store), store)]
    last = {_last(form, access) for access in accesses if access.subscripts}
    parallel = [i for i in form.parallel if i != ROW_LOOP]
    columns = [i for i in parallel[-1:] if i in last and (form.row_index is not None or len(form.parallel) > 1)]
    rows = [i for i in form.parallel if i not in columns]
    summed = [i for i in form.reduce if i in last] or list(form.reduce)
    # Lanes along what is summed: dense axes that lie side by side where columns do not, else the terms themselves.
    if form.row_index is not None:
        static = [i for i in form.reduce if i in form.static]
        summed = [ENTRY, *static] if columns or not form.reduce else summed[-1:]
    elif columns:
        summed = list(form.reduce)
    return rows, columns, summed


def _last(form: Form, access: Load | Store) -> str | None:
    """The index that goes over the whole last axis of a tensor."""
    return form.whole_axis(access, len(access.subscripts) - 1)


def _steady(form: Form, product: Product) -> list[str]:
    """Indices for the lanes of k: without those at which a whole tile may lack entries, whose steps are skipped."""
    missing: set[str] = set()
    for read in form.factors[0]:
        for entry in (atom for subscript in read.subscripts for atom, _ in atoms(subscript) if isinstance(atom, Load)):
            names = {*labels_of(entry)}
            if entry.buffer.facts.masked is not False and names & set(product.m):
                missing |= names
    present = [i for i in product.k if i not in missing]
    return present if math.prod(form.size(i) for i in present) >= 16 else list(product.k)


def adds_rows(form: Form, schedule: Schedule) -> bool:
    """Whether what belongs to one cell of an additional output is added up in memory, over tiles of columns."""
    n = place_indices(form, schedule).n
    return any(each.reduced for each in form.additional) and n is not None and n.block < form.static[n.first]


def extent_arguments(form: Form, tiling: Tiling) -> frozenset[str]:
    """Known extents that a kernel takes as arguments, so that widths which are multiples of a tile share its code.

    These belong to the rows and columns of a tile, and to sums of several steps. A sum of one step stays one, unless it
    becomes one loop with the one around it: as a loop of its own it would leave the software pipeline nothing to
    overlap. Terms of static tables stay too, whose places are literals of their addresses.
    """
    if len(form.unrolled) > 1 or form.tables or form.additional or form.cells:
        return frozenset()
    found: set[str] = set()
    for lanes in (tiling.m, tiling.n, tiling.k):
        extent = None if lanes is None else form.static.get(lanes.first)
        if lanes is None or extent is None or lanes.inner or extent % SHARED_MULTIPLE or extent < lanes.block:
            continue
        if extent > lanes.block or lanes is not tiling.k or _skips_steps(form, tiling):
            found.add(lanes.first)
    if tiling.product is not None:
        # The offsets of a kernel, whose number is a step of the weights.
        found |= {index for index in tiling.loops if index in form.static and form.static[index] > 1}
    return frozenset(found)


def _skips_steps(form: Form, tiling: Tiling) -> bool:
    """Whether one loop goes over the steps of a matrix product at which some row of the tile has an entry."""
    if tiling.product is None or form.product is None or len(tiling.loops) != 1:
        return False
    rows = tiling.m
    return rows is not None and rows.block == rows.lanes and tiling.loops[0] not in _steady(form, form.product)

"""Choose which indices of static tables are unrolled into terms; `unroll_static_tables` does it.

An index that addresses a table is unrolled, value by value, unless every table is affine in it: in a term the read
is then a start and a step, and the index stays one that lanes and loops run over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from insum_nn.compiler.lang.bind import Bound
from insum_nn.compiler.lang.index_checks import Points
from insum_nn.compiler.lang.misses import labels_of
from insum_nn.compiler.lang.syntax import Access, Index
from insum_nn.facts import StaticTable

__all__ = ["Unrolling", "choose_unrolling"]

# Most terms that are unrolled; past it, static tensors are read like any other.
_TERM_LIMIT = 6000

Place = Mapping[str, int]
_Places = Mapping[str, Any]
# Of NumPy, whose calls no mode of torch records while it traces.
_Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Unrolling:
    """The tables of a statement that are unrolled.

    Attributes:
        tables: the static tensors, by name; a kernel does not read them.
        names: the indices that are unrolled.
        places: their combinations whose known factors are not 0, and whose known entries are not missing.
        steps: indices in which every table is affine; they are not unrolled.
    """

    tables: Mapping[str, StaticTable]
    names: tuple[str, ...]
    places: tuple[Place, ...]
    steps: frozenset[str] = frozenset()


def choose_unrolling(bound: Bound, tables: Mapping[str, StaticTable], most: int | None = None) -> Unrolling:
    """Decide which indices are unrolled, and list the terms.

    Args:
        bound: the statement.
        tables: static tensors by name.
        most: of more terms than these nothing is listed, not even the one of no tables.
    """
    nothing = Unrolling({}, (), ({},))
    tables = _usable(bound, tables)
    statement = bound.statement
    fixed = dict(bound.static)
    accesses = [a for a in statement.accesses() if a.name in tables]
    if not accesses:
        return nothing
    indices = tuple(dict.fromkeys(i.name for a in accesses for i in a.indices()))
    steps = _steps(bound, tables, fixed)
    names = tuple(i for i in indices if i not in steps)
    shape = [fixed[name] for name in names]
    if math.prod(shape) > 64 * _TERM_LIMIT:
        return nothing
    values = np.indices((*shape, 1)).reshape(len(names) + 1, -1)[:-1]
    places = dict(zip(names, values, strict=True))
    kept = np.full(math.prod(shape), True)
    for access in accesses:
        is_factor = access in statement.reads
        if is_factor or steps.isdisjoint(labels_of(access)):
            # A missing entry is below 0.
            value, there = _points(places, tables).access(access)
            kept = kept & there & (value != 0 if is_factor else value >= 0)
    count = int(kept.sum())
    if most is not None and count > most:
        return replace(nothing, places=())
    if count > _TERM_LIMIT:
        return nothing
    terms = tuple([dict(zip(names, each, strict=True)) for each in values[:, kept].T.tolist()])
    return Unrolling(tables, names, terms, steps)


def _usable(bound: Bound, tables: Mapping[str, StaticTable]) -> dict[str, StaticTable]:
    """Tables of which every read is known once some indices of fixed extent are unrolled."""
    fixed = {name for name, _ in bound.static}
    accesses = list(bound.statement.accesses())
    usable = dict(tables)
    while unknown := {
        a.name
        for a in accesses
        if a.name in usable
        and (any(n.name not in usable for n in a.nested()) or any(i.name not in fixed for i in a.indices()))
    }:
        usable = {name: table for name, table in usable.items() if name not in unknown}
    return usable


def _steps(bound: Bound, tables: Mapping[str, StaticTable], fixed: Mapping[str, int]) -> frozenset[str]:
    """The indices in which all tables are affine, together."""
    statement, found = bound.statement, set[str]()
    unrolled = {i.name for f in statement.reads if f.name in tables for i in f.indices()}
    atoms = [t.atom for a in statement.accesses() if a.name not in tables for s in a.subscripts for t in s.terms]
    for access in atoms:
        if isinstance(access, Index) or access.name not in tables:
            continue
        names = labels_of(access)
        found |= {*names}
        entries = _values(access, names, tables, fixed)
        # Indices behind which others are left have to step alike at all values of these.
        for axis in reversed(range(len(names))):
            steps = None if entries is None else np.diff(entries, axis=axis)
            left = [other for other in range(axis, len(names)) if names[other] not in unrolled]
            if steps is None or bool((steps == 0).any()) or any(np.diff(steps, axis=other).any() for other in left):
                unrolled.add(names[axis])
    return frozenset(found - unrolled)


def _values(
    access: Access, names: Sequence[str], tables: Mapping[str, StaticTable], fixed: Mapping[str, int]
) -> _Array | None:
    """A table's entries over all values of its indices, one axis each; `None` if one is missing."""
    shape = [fixed[name] for name in names]
    entries, there = _points(dict(zip(names, np.indices(shape, sparse=True), strict=True)), tables).access(access)
    return np.broadcast_to(entries, shape).astype(np.int64) if bool((there & (entries >= 0)).all()) else None


def _points(places: _Places, tables: Mapping[str, StaticTable]) -> Points:
    """Tables at places."""
    return Points(lambda name: np.reshape(tables[name].values, tables[name].shape), places, np.array(0))

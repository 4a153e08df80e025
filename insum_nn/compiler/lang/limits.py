"""What sizes have to be for a statement's subscripts to stay inside their axes: found once, looked at in every call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from insum_nn.compiler.lang.bind import Bound, Extents, Layout, layout_of
from insum_nn.compiler.lang.syntax import Index, Statement

__all__ = ["INT32_AXIS", "INT64_MAX", "Limits", "limits_of", "limits_of_extents", "slot_indices"]

INT32_AXIS = 2**31
"""Entries that int32 tells apart."""
INT64_MAX = 2**63 - 1
"""The largest number of int64."""
# Longest sum over the slots of a group, or a window, that is unrolled; longer ones keep a loop.
_MOST_SLOTS = 32


@dataclass(frozen=True, slots=True)
class Limits:
    """What sizes must be for a statement to pass `check_extents`, unless they are extraordinary.

    Attributes:
        steep: with the largest extents that int32 addresses, some subscript may overflow int64.
        axes: addressed by more than an index: position of the tensor, or -1 for the output, axis, fewest entries.
        writes: affine subscripts of the output: its axis, the offset, and coefficients with the places of indices.
    """

    steep: bool
    axes: tuple[tuple[int, int, int], ...]
    writes: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]

    def hold(self, tensors: Sequence[Tensor], extents: Extents, *, drop_outside: bool) -> bool:
        """Whether nothing can be wrong with these sizes."""
        indices, output = extents.indices, extents.output
        if self.steep or max(indices, default=0) > INT32_AXIS:
            return False
        for position, axis, least in self.axes:
            extent = output[axis] if position < 0 else tensors[position].shape[axis]
            if not least <= extent <= INT32_AXIS:
                return False
        if drop_outside or not self.writes or 0 in indices:
            return True
        for axis, offset, terms in self.writes:
            low = high = offset
            for coefficient, place in terms:
                reach = coefficient * (indices[place] - 1)
                low, high = (low + reach, high) if reach < 0 else (low, high + reach)
            if low < 0 or high >= output[axis]:
                return False
        return True


@lru_cache(maxsize=1024)
def limits_of(statement: Statement) -> Limits:
    """Return the limits of a statement's sizes."""
    layout = layout_of(statement)
    steep = False
    axes: list[tuple[int, int, int]] = []
    writes: list[tuple[int, int, tuple[tuple[int, int], ...]]] = []
    for access in statement.accesses():
        is_output = access is statement.output
        position = -1 if is_output else layout.tensors.index(access.name)
        for axis, subscript in enumerate(access.subscripts):
            if subscript.plain is not None:
                continue
            far = abs(subscript.offset) + INT32_AXIS * sum(abs(term.coefficient) for term in subscript.terms)
            constant = not subscript.terms
            steep = steep or far > INT64_MAX or (constant and subscript.offset < 0)
            axes.append((position, axis, subscript.offset + 1 if constant else 0))
            if is_output and not constant and not any(True for _ in subscript.index_accesses()):
                terms = [(term.coefficient, term.atom) for term in subscript.terms]
                places = [(c, layout.indices.index(a.name)) for c, a in terms if isinstance(a, Index)]
                writes.append((axis, subscript.offset, tuple(places)))
    return Limits(steep, tuple(axes), tuple(writes))


def slot_indices(bound: Bound) -> tuple[str, ...]:
    """Return the indices that count the slots of a group: summed, and an axis of an index tensor of several axes.

    Their extent is a property of the format rather than of the data, so a compiled program may fix it.
    """
    statement = bound.statement
    written = {index.name for index in statement.output.indices()}
    inner = (access for read in statement.reads for access in read.nested() if len(access.subscripts) > 1)
    plain = (subscript.plain for access in inner for subscript in access.subscripts)
    return tuple(dict.fromkeys(name for name in plain if name is not None and name not in written))


@lru_cache(maxsize=1024)
def limits_of_extents(bound: Bound, tables: frozenset[str], features: float) -> tuple[tuple[bool, float], ...]:
    """For each index whether it is compiled in at any extent, and the largest extent at which it is; -1: at none.

    Compiled in are extents of a model rather than of its data: those of all indices of static tables, by their names,
    of slots of a group, of windows, which index no axis alone, and of dense feature axes, of at most so many
    `features`. Sizes alone decide, so that a call runs the same code in every process, whatever ran before.
    """
    layout, slots = bound.layout, {*slot_indices(bound)}
    slots |= {n for n, at in zip(layout.indices, layout.plain, strict=True) if not at and n not in layout.output_plain}
    accesses = [access for access in bound.statement.accesses() if access.name in tables]
    always = {index.name for access in accesses for index in access.indices()}
    found: list[tuple[bool, float]] = []
    for name in layout.indices:
        most = features if _is_of_model(layout, name) else _MOST_SLOTS if name in slots else -1
        found.append((name in always, math.inf if name in always else most))
    return tuple(found)


def _is_of_model(layout: Layout, index: str) -> bool:
    """Whether an index of no index tensor is behind the first axis of some tensor, or inside of rows that are written.

    So are dense feature axes.
    """
    places, written = layout.plain[layout.indices.index(index)], layout.output_plain
    if any(layout.tensors[where] in layout.index_tensors for where, _ in places):
        return False
    return any(axis > 0 for _, axis in places) or (index in written and None in written[: written.index(index)])

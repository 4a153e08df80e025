"""Which extents a program is compiled for: those of a model rather than of its data."""

from __future__ import annotations

import math
from functools import lru_cache

from insum_nn.compiler.kernels import launch
from insum_nn.compiler.lang.bind import Bound, Extents, Layout
from insum_nn.compiler.lang.limits import slot_indices
from insum_nn.compiler.options import Options
from insum_nn.compiler.schedule.placement import SHARED_MULTIPLE

__all__ = ["fixed_extents", "limits_of_fixed"]

# Longest in-group sum that is unrolled; longer ones keep a reduction loop.
_UNROLL_LIMIT = 32
# Widest features that have a kernel for each width; of wider ones, only widths that are multiples of a tile are fixed.
_WIDTH_LIMIT = 64


@lru_cache(maxsize=1024)
def limits_of_fixed(bound: Bound, options: Options, tables: frozenset[str]) -> tuple[tuple[bool, float], ...]:
    """For each index whether it is fixed at any size, and up to which size it may be; an extent of 1 always is.

    Fixed are the extents that are properties of a model rather than of its data, and those of 1, which broadcast. These
    are slots of a group, and dense feature axes: axes that no index tensor has and that some tensor carries behind its
    first axis: narrow ones, of which there are few, and multiples of a tile, which a generated kernel takes as
    arguments. Sizes alone decide, so that a call runs the same code whatever ran before. Axes of static tables, by
    their names, are fixed.
    """
    layout, slots = bound.layout, {*slot_indices(bound)}
    accesses = [access for access in bound.statement.accesses() if access.name in tables and options.specialize]
    always = {index.name for access in accesses for index in access.indices()}
    found: list[tuple[bool, float]] = []
    for name in layout.indices:
        of_model = _is_feature(layout, name) or _in_written_rows(layout, name)
        found.append((name in always, math.inf if of_model else _UNROLL_LIMIT if name in slots else -1))
    return tuple(found)


def fixed_extents(
    bound: Bound, options: Options, tables: frozenset[str], extents: Extents
) -> tuple[tuple[str, int], ...]:
    """Return the indices that are fixed in a call of these sizes, with their extents."""
    specializes = options.specialize and (bound.device_type == "cuda" or launch.interpreted())
    fixed: list[tuple[str, int]] = []
    limits = limits_of_fixed(bound, options, tables)
    for name, size, (always, most) in zip(bound.layout.indices, extents.indices, limits, strict=True):
        narrow = size <= _WIDTH_LIMIT or size % SHARED_MULTIPLE == 0
        if size == 1 or always or (specializes and size <= most and narrow):
            fixed.append((name, size))
    return tuple(sorted(fixed))


def _in_written_rows(layout: Layout, index: str) -> bool:
    """Return whether an index of no index tensor lies inside of the rows that are written, as features do."""
    places = layout.plain[layout.indices.index(index)]
    if any(layout.tensors[where] in layout.index_tensors for where, _ in places):
        return False
    written = layout.output_plain
    return index in written and None in written[: written.index(index)]


def _is_feature(layout: Layout, index: str) -> bool:
    """Return whether an index is a dense feature axis: of no index tensor, and not the first axis of some tensor."""
    places = layout.plain[layout.indices.index(index)]
    indexed = any(layout.tensors[where] in layout.index_tensors for where, _ in places)
    return not indexed and any(axis > 0 for _, axis in places)

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
        most = _UNROLL_LIMIT if name in slots else -1
        found.append((name in always, math.inf if _is_of_model(layout, name) else most))
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


def _is_of_model(layout: Layout, index: str) -> bool:
    """Whether an index of no index tensor is behind the first axis of some tensor, or inside of rows that are written.

    So are dense feature axes.
    """
    places, written = layout.plain[layout.indices.index(index)], layout.output_plain
    if any(layout.tensors[where] in layout.index_tensors for where, _ in places):
        return False
    return any(axis > 0 for _, axis in places) or (index in written and None in written[: written.index(index)])

"""Which extents a generated kernel is compiled for: those of a model rather than of its data."""

from __future__ import annotations

import math

from insum_nn.compiler.kernels import launch
from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.lang.limits import limits_of_extents
from insum_nn.compiler.options import Options
from insum_nn.compiler.schedule.placement import SHARED_MULTIPLE

__all__ = ["fixed_extents", "limits_of_fixed"]

# Widest features that have a kernel for each width; of wider ones, only widths that are multiples of a tile are fixed.
_WIDTH_LIMIT = 64


def limits_of_fixed(bound: Bound, options: Options, tables: frozenset[str]) -> tuple[tuple[bool, float], ...]:
    """`limits_of_extents` for generated kernels, which take any multiple of a tile."""
    return limits_of_extents(bound, tables if options.specialize else frozenset(), math.inf)


def fixed_extents(
    bound: Bound, options: Options, tables: frozenset[str], extents: Extents
) -> tuple[tuple[str, int], ...]:
    """Return the indices that are fixed in a call of these sizes, with their extents.

    Those of 1 always are, as they broadcast; of feature axes narrow ones, of which there are few, and multiples of a
    tile.
    """
    specializes = options.specialize and (bound.device_type == "cuda" or launch.interpreted())
    fixed: list[tuple[str, int]] = []
    limits = limits_of_fixed(bound, options, tables)
    for name, size, (always, most) in zip(bound.layout.indices, extents.indices, limits, strict=True):
        narrow = size <= _WIDTH_LIMIT or size % SHARED_MULTIPLE == 0
        if size == 1 or always or (specializes and size <= most and narrow):
            fixed.append((name, size))
    return tuple(sorted(fixed))

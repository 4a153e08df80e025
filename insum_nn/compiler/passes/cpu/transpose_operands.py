"""Read an operand along the lanes of what it adds to: through a transposed copy where its last axis is summed.

    free n, free c, sum d: out[n, c] += t0[n, d] * t1[c, d]      ->      out[n, c] += t0[n, d] * t1_1[d, c]

The copy is small: the operand has no axis of the data, which all of its numbers are multiplied by.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from insum_nn.compiler.ir.access import indices_in
from insum_nn.compiler.ir.graph import extent_of, loops_of, stores_of
from insum_nn.compiler.ir.lowered import Transposed
from insum_nn.compiler.ir.nodes import Buffer, Expr, Index, Kernel, Load, Loop, Node, walk

__all__ = ["swap", "transpose_operands"]

# Fewest neighbours that are worth a copy.
_LEAST = 8


def transpose_operands(kernel: Kernel, kept: Collection[str]) -> tuple[Kernel, tuple[Transposed, ...]]:
    """Return a kernel that reads transposed copies where that gives it lanes, and the copies.

    Args:
        kernel: the algorithm.
        kept: inputs of which there are to be none.
    """
    loops = {loop.index: loop for loop in loops_of(kernel)}
    stores = stores_of(kernel)
    if any(store.combine != "add" for store in stores):
        return kernel, ()
    lanes = set().union(*(indices_in(*s.subscripts[-1:]) for s in stores))
    if len(lanes) != 1:
        return kernel, ()
    (lane,) = lanes
    reads = [n for s in stores for n in walk(s.value) if isinstance(n, Load)]
    found: dict[str, Transposed] = {}
    changed: dict[Node, Node] = {}
    for buffer in dict.fromkeys(read.buffer for read in reads):
        own = [read for read in reads if read.buffer is buffer]
        axes = {_axis(read, lane, loops) for read in own}
        if len(axes) != 1 or None in axes or buffer.name in kept:
            continue
        (axis,) = axes
        assert axis is not None
        copy = f"{buffer.name}_{axis}"
        found[buffer.name] = Transposed(copy, buffer.name, axis)
        new = Buffer(copy, buffer.dtype, swap(buffer.shape, axis), buffer.facts)
        for read in own:
            changed[read] = Load(new, swap(read.subscripts, axis), read.where, read.fill)
        changed[buffer] = new
    if not found:
        return kernel, ()
    return kernel.replace(changed), tuple(found.values())


def swap(parts: Sequence[Expr], axis: int | None) -> tuple[Expr, ...]:
    """What belongs to the axes of an operand, with that of an axis and of the last one in each other's place."""
    swapped = [*parts]
    if axis is not None:
        swapped[axis], swapped[-1] = swapped[-1], swapped[axis]
    return tuple(swapped)


def _axis(read: Load, lane: Index, loops: dict[Index, Loop]) -> int | None:
    """The axis of a read that runs along the cells, where its last one is summed and it has none of the data."""
    *others, last = read.subscripts or (None,)
    if not isinstance(last, Index) or loops[last].role != "sum" or lane not in others:
        return None
    sizes = [extent_of(loops[index]) for index in indices_in(*read.subscripts) if index in loops]
    if None in sizes or (extent_of(loops[lane]) or 0) < _LEAST:
        return None
    return others.index(lane)

"""Read an operand along the lanes of what it adds to: through a transposed copy where its last axis is summed.

    free n, free c, sum d: out[n, c] += t0[n, d] * t1[c, d]      ->      out[n, c] += t0[n, d] * t1_0[d, c]

The copy is small: the operand has no axis of the data, which all of its numbers are multiplied by. Of a stack whose
matrices entries select, that is the one of the row whose entries are walked, copied when its turn comes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from insum_nn.compiler.ir.access import indices_in
from insum_nn.compiler.ir.graph import extent_of, loops_of, stores_of
from insum_nn.compiler.ir.lowered import Copied
from insum_nn.compiler.ir.nodes import Buffer, Const, Expr, Index, Kernel, Load, Loop, Node, walk

__all__ = ["swap", "swapped_axis", "transpose_operands"]

# Fewest neighbours that are worth a copy.
_LEAST = 8
# Numbers at most of the copy of one matrix, which lies on the stack.
_MOST = 1 << 14


def transpose_operands(
    kernel: Kernel, kept: Collection[str] = (), row: Index | None = None
) -> tuple[Kernel, tuple[Copied, ...]]:
    """Return a kernel that reads transposed copies where that gives it lanes, and the copies.

    Args:
        kernel: the algorithm.
        kept: inputs of which there are to be none.
        row: copy what the entries of one row read; `None`: whole operands.
    """
    loops = {loop.index: loop for loop in loops_of(kernel)}
    stores = stores_of(kernel)
    if any(store.combine != "add" for store in stores):
        return kernel, ()
    lanes = {*(each for store in stores for each in store.subscripts[-1:])}
    reads = [n for s in stores for n in walk(s.value) if isinstance(n, Load)]
    found: list[Copied] = []
    changed: dict[Node, Node] = {}
    for buffer in dict.fromkeys(read.buffer for read in reads):
        own = [read for read in reads if read.buffer is buffer]
        axes = {swapped_axis(read, [*lanes], loops, row) for read in own}
        if len(axes) != 1 or None in axes or buffer.name in kept:
            continue
        (axis,), (first, *_) = axes, own
        assert axis is not None
        at = None if row is None else first.subscripts.index(row)
        shape = [Const(1) if place == at else extent for place, extent in enumerate(buffer.shape)]
        new = Buffer(f"{buffer.name}_{axis}", buffer.dtype, swap(shape, axis), buffer.facts)
        found.append(Copied(new, buffer, {}, axis, at))
        for read in own:
            places = [Const(0) if each is row else each for each in read.subscripts]
            changed[read] = Load(new, swap(places, axis), read.where, read.fill)
        changed[buffer] = new
    if not found:
        return kernel, ()
    return kernel.replace(changed), tuple(found)


def swap(parts: Sequence[Expr], axis: int | None) -> tuple[Expr, ...]:
    """What belongs to the axes of an operand, with that of an axis and of the last one in each other's place."""
    swapped = [*parts]
    if axis is not None:
        swapped[axis], swapped[-1] = swapped[-1], swapped[axis]
    return tuple(swapped)


def swapped_axis(read: Load, lanes: Sequence[Expr], loops: Mapping[Index, Loop], row: Expr | None = None) -> int | None:
    """The axis of a read that runs along the cells, where its last one is summed and it has none of the data.

    Args:
        read: the read.
        lanes: the last subscripts of what is written.
        loops: all loops.
        row: the subscript that selects one of small matrices; `None`: none does.
    """
    *others, last = read.subscripts or (None,)
    found = indices_in(*lanes)
    if not isinstance(last, Index) or loops[last].role != "sum" or len(found) != 1 or not found <= {*others}:
        return None
    (lane,) = found
    own = [s for s in read.subscripts if s is not row]
    sizes = [extent_of(loops[index]) or 0 for index in indices_in(*own) if index in loops]
    if 0 in sizes or (extent_of(loops[lane]) or 0) < _LEAST:
        return None
    if row is not None and (row not in others or len(own) != len(sizes) or math.prod(sizes) > _MOST):
        return None
    return others.index(lane)

"""Place the loops of an algorithm under a schedule: which run as programs, as lanes, one after the other, unrolled.

free m in 0 .. M:                               grid m in 0 .. M:
  free b in 0 .. B:                               grid b_program in 0 .. cdiv(B, 64):
    sum a in r0[m] .. r0[m + 1]:            ->      tile b in b_program * 64 .. b_program * 64 + 64 of B:
      out[m, b] += t0[a] * t1[x1[a], b]               alloc acc = 0
                                                      serial a_step in r0[m] .. r0[m + 1] step 8:
                                                        tile a in a_step .. a_step + 8 of r0[m + 1]:
                                                          acc += t0[a] * t1[x1[a], b]
                                                      out[m, b] = acc
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from insum_nn.compiler.ir.graph import loops_of, store_of
from insum_nn.compiler.ir.nodes import Kernel
from insum_nn.compiler.passes.own_rows import RowWalk
from insum_nn.compiler.passes.tile import Lanes, Tiling, tile

__all__ = ["LoopSchedule", "place"]


@dataclass(frozen=True)
class LoopSchedule:
    """Where loops go.

    Attributes:
        lanes: lanes of a loop's tile, by the loop's index; 1, or missing: a free loop has a program for each value, a
            sum runs one by one.
        warps: warps of a program.
        stages: depth of the software pipeline.
    """

    lanes: Mapping[str, int] = field(default_factory=dict[str, int])
    warps: int = 4
    stages: int = 2


def place(kernel: Kernel, schedule: LoopSchedule) -> Kernel:
    """The kernel with every loop placed; each output cell is stored once, by one program.

    Raises:
        NotImplementedError: free loops do not address every cell of the output exactly once.
    """
    loops, store = loops_of(kernel), store_of(kernel)
    if store.combine != "add" or not store.buffer.dtype.startswith(("float", "bfloat")):
        raise NotImplementedError("a statement that is not a sum of floating-point products")
    if any(result.initial == "tensor" or result.activation is not None for result in kernel.results):
        raise NotImplementedError("an initial value or an activation")
    cells = {loop.index: loop.end for loop in loops if loop.role == "free"}
    covered = list(zip(store.subscripts, store.buffer.shape, strict=True))
    if len(cells) != len(covered) or any(cells.get(s) is not extent for s, extent in covered):  # type: ignore[call-overload]
        raise NotImplementedError("an output whose cells are not those of its free loops")
    free = [loop for loop in loops if loop.role == "free"]
    sums = [loop for loop in loops if loop.role == "sum"]
    wide = [loop for loop in free if schedule.lanes.get(loop.index.name, 1) > 1]
    along = [loop for loop in sums if schedule.lanes.get(loop.index.name, 1) > 1]
    if len(wide) > 2 or len(along) > 1:
        raise NotImplementedError("more than two axes of a tile, or more than one along a sum")
    lanes = {
        loop.index.name: Lanes((loop.index.name,), n, n)
        for loop in (*wide, *along)
        for n in [schedule.lanes[loop.index.name]]
    }
    tiling = Tiling(
        m=lanes[wide[0].index.name] if len(wide) == 2 else None,
        k=lanes[along[0].index.name] if along else None,
        n=lanes[wide[-1].index.name] if wide else None,
        grid=tuple(loop.index.name for loop in free if loop not in wide),
        loops=tuple(loop.index.name for loop in sums if loop not in along),
    )
    return tile(RowWalk(kernel, 0), tiling)

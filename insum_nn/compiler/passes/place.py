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

from insum_nn.compiler.ir.graph import loops_of, store_of
from insum_nn.compiler.ir.nodes import Const, Kernel, Loop
from insum_nn.compiler.passes.own_rows import RowWalk
from insum_nn.compiler.passes.tile import Lanes, Tiling, tile
from insum_nn.compiler.schedule.space import Schedule
from insum_nn.dtypes import dtype_of

__all__ = ["place"]


def place(kernel: Kernel, schedule: Schedule) -> Kernel:
    """The kernel with every loop placed; each output cell is stored once, by one program.

    Columns of a tile are the innermost free loop, rows the one around it; lanes of a sum are along the entries of a row
    where it has such, else along its innermost loop.

    Raises:
        NotImplementedError: free loops do not address every cell of the output exactly once.
    """
    loops, store = loops_of(kernel), store_of(kernel)
    if store.combine != "add" or not dtype_of(store.buffer.dtype).is_floating:
        raise NotImplementedError("a statement that is not a sum of floating-point products")
    if any(result.initial == "tensor" or result.activation is not None for result in kernel.results):
        raise NotImplementedError("an initial value or an activation")
    cells = {loop.index: loop.end for loop in loops if loop.role == "free"}
    covered = list(zip(store.subscripts, store.buffer.shape, strict=True))
    if len(cells) != len(covered) or any(cells.get(s) is not extent for s, extent in covered):  # type: ignore[call-overload]
        raise NotImplementedError("an output whose cells are not those of its free loops")
    free = [loop for loop in loops if loop.role == "free"]
    sums = [loop for loop in loops if loop.role == "sum"]
    ragged = [loop for loop in sums if loop.begin is not Const(0)]
    n = free[-1] if free and schedule.n > 1 else None
    rows = [loop for loop in free if loop is not n]
    m = rows[-1] if rows and schedule.m > 1 else None
    k = (ragged or sums[::-1])[0] if sums and schedule.k > 1 else None

    def lanes(loop: Loop | None, count: int) -> Lanes | None:
        return None if loop is None else Lanes((loop.index.name,), count, count)

    tiling = Tiling(
        m=lanes(m, schedule.m),
        k=lanes(k, schedule.k),
        n=lanes(n, schedule.n),
        grid=tuple(loop.index.name for loop in rows if loop is not m),
        loops=tuple(loop.index.name for loop in sums if loop is not k),
    )
    return tile(RowWalk(kernel, 0), schedule, tiling)

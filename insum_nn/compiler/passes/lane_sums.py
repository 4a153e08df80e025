"""Keep a sum in each lane along what is summed, and add the lanes up after the loop.

serial d_step in 0 .. 64 step 16:               alloc acc_lanes[16] = 0
  tile d in d_step .. d_step + 16:              serial d_step in 0 .. 64 step 16:
    acc += t0[d] * t1[d, c]               ->      tile d in d_step .. d_step + 16:
                                                    acc_lanes[d - d_step] += t0[d] * t1[d, c]
                                                alloc acc = 0
                                                tile d in 0 .. 16:
                                                  acc += acc_lanes[d]

To add lanes up at each step takes barriers where several warps have them, and the loads after it wait.
"""

from __future__ import annotations

from insum_nn.compiler.ir.nodes import Alloc, Buffer, Const, Load, Loop, Op, Stmt, Store
from insum_nn.compiler.passes.sum_terms import Sums

__all__ = ["MOST", "lane_sums"]

Block = tuple[Stmt, ...]

MOST = 64
"""Registers of a thread for the sums of its lanes."""


def lane_sums(sums: Sums, loop: Loop, lanes: int) -> tuple[Block, Block, Block]:
    """Rewrite sums, of which none is by matrix products, over the lanes of a tile loop that is stepped.

    Returns:
        What stands before the loop over what is summed, in it, and after it.
    """
    own = {b: Buffer(f"{b.name}_lanes", b.dtype, (Const(lanes),), local=True) for b in sums.buffers}
    lane = Op("sub", (loop.index, loop.begin))
    body: list[Stmt] = []
    for each in sums.body:
        assert isinstance(each, Store)
        body.append(Store(own[each.buffer], (lane,), each.value, "add", each.where))
    added = tuple(Store(total, (), Load(part, (loop.index,)), "add") for total, part in own.items())
    whole = Loop(loop.index, Const(0), Const(lanes), "tile", added, axis=loop.axis)
    return tuple(map(Alloc, own.values())), tuple(body), (*map(Alloc, own), whole)

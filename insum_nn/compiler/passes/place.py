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

from insum_nn.compiler.ir.nodes import (
    Alloc,
    Buffer,
    Const,
    Expr,
    Index,
    Kernel,
    Load,
    Loop,
    Op,
    Result,
    Stmt,
    Store,
    add,
)
from insum_nn.compiler.passes.combine import loops_and_store

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
    loops, store = loops_and_store(kernel)
    if store.combine != "add" or not store.buffer.dtype.startswith(("float", "bfloat")):
        raise NotImplementedError("a statement that is not a sum of floating-point products")
    if any(result.initial == "tensor" or result.activation is not None for result in kernel.results):
        raise NotImplementedError("an initial value or an activation")
    cells = {loop.index: loop.end for loop in loops if loop.role == "free"}
    covered = list(zip(store.subscripts, store.buffer.shape, strict=True))
    if len(cells) != len(covered) or any(cells.get(s) is not extent for s, extent in covered):  # type: ignore[call-overload]
        raise NotImplementedError("an output whose cells are not those of its free loops")
    wide = "float64" if store.buffer.dtype == "float64" else "float32"
    total = Buffer("acc", wide, (), local=True)
    body: Stmt = Store(total, (), store.value, "add", store.where)
    for loop in reversed([loop for loop in loops if loop.role == "sum"]):
        body = _serial(loop, schedule.lanes.get(loop.index.name, 1), body)
    inner: tuple[Stmt, ...] = (Alloc(total), body, Store(store.buffer, store.subscripts, Load(total, ())))
    free = [loop for loop in loops if loop.role == "free"]
    for loop in reversed(free):
        lanes = schedule.lanes.get(loop.index.name, 1)
        if lanes > 1:
            begin = Op("mul", (_program(loop), Const(lanes)))
            inner = (Loop(loop.index, begin, add(begin, Const(lanes)), "tile", inner, limit=loop.end),)
    for loop in reversed(free):
        lanes = schedule.lanes.get(loop.index.name, 1)
        if lanes > 1:
            count: Expr = Op("cdiv", (loop.end, Const(lanes)))
            inner = (Loop(_program(loop), Const(0), count, "grid", inner),)
        else:
            inner = (Loop(loop.index, loop.begin, loop.end, "grid", inner),)
    return Kernel(kernel.inputs, (Result(store.buffer, "none"),), inner)


def _program(loop: Loop) -> Index:
    return Index(f"{loop.index.name}_program")


def _serial(loop: Loop, lanes: int, body: Stmt) -> Stmt:
    if lanes == 1:
        return Loop(loop.index, loop.begin, loop.end, "serial", (body,))
    step = Index(f"{loop.index.name}_step")
    tile = Loop(loop.index, step, add(step, Const(lanes)), "tile", (body,), limit=loop.end)
    return Loop(step, loop.begin, loop.end, "serial", (tile,), step=lanes)

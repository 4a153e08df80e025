"""Turn affine writes into affine reads, so that each cell of the output is written at one point of the loops.

    free p in 0 .. P:                              free q in 0 .. Q:
      free r in 0 .. R:                    ->        sum r in 0 .. R:
        out[p + r] += t0[p] * t1[r]                    out[q] += t0[q - r] * t1[r]   where 0 <= q - r < P

What was scattered is then a sum in registers, whose result is written once.
"""

from __future__ import annotations

import math

from insum_nn.compiler.ir.access import coefficient, indices_in
from insum_nn.compiler.ir.graph import around, loops_of, stores_of
from insum_nn.compiler.ir.nodes import (
    Const,
    Expr,
    Index,
    Kernel,
    Load,
    Loop,
    Node,
    Op,
    Stmt,
    Store,
    add,
    conjunction,
    conjuncts,
    multiply,
)

__all__ = ["cells_of", "gather_writes", "nested"]


def nested(loops: list[Loop], stores: tuple[Store, ...], outermost: frozenset[Index] = frozenset()) -> tuple[Stmt, ...]:
    """Stores inside of loops, those that address the output outside of the others."""
    written = outermost | indices_in(*(subscript for store in stores for subscript in store.subscripts))
    ordered = sorted(loops, key=lambda each: each.index not in written)
    return around([Loop(e.index, e.begin, e.end, "free" if e.index in written else "sum", ()) for e in ordered], stores)


def gather_writes(kernel: Kernel) -> Kernel:
    """Read where an affine subscript wrote, along every axis of the output where that can be said without a division.

    A kernel of several stores is left as it is: they write different cells at one point.
    """
    while len(stores_of(kernel)) == 1 and (found := _gathered(kernel)) is not None:
        kernel = found
    return kernel


def cells_of(kernel: Kernel) -> dict[str, int]:
    """The indices that such steps made for cells of the output, and their axes."""
    (store,) = stores_of(kernel)
    return {s.name: axis for axis, s in enumerate(store.subscripts) if s is Index(f"cell{axis}")}  # type: ignore[union-attr]


def _gathered(kernel: Kernel) -> Kernel | None:
    """The kernel after one such step; `None`: there is nothing to turn."""
    loops, (store,) = loops_of(kernel), stores_of(kernel)
    bounds = indices_in(*(bound for loop in loops for bound in (loop.begin, loop.end)))
    for axis, written in enumerate(store.subscripts):
        if isinstance(written, Index | Const | Load):
            continue
        elsewhere = bounds | indices_in(*(s for other, s in enumerate(store.subscripts) if other != axis))
        # The longest loop: the others are summed for each cell, for most of which a longer one would have no term.
        own = [loop for loop in loops if coefficient(written, loop.index)]
        longest = max(map(_length, own), default=0)
        for loop in own:
            step = coefficient(written, loop.index)
            whole = _length(loop) == longest and loop.begin is Const(0)
            if step in (1, -1) and whole and loop.index not in elsewhere:
                return _moved(kernel, loops, store, axis, loop, step)
    return None


def _length(loop: Loop) -> float:
    return loop.end.value if isinstance(loop.end, Const) else math.inf


def _moved(kernel: Kernel, loops: list[Loop], store: Store, axis: int, loop: Loop, step: int) -> Kernel:
    written, extent = store.subscripts[axis], store.buffer.shape[axis]
    cell, rest = Index(f"cell{axis}"), written.replace({loop.index: Const(0)})
    # written = step * index + rest, and a step of 1 or -1 is its own inverse.
    back = add(multiply(Const(step), cell), multiply(Const(-step), rest))
    reached = [Op("at_least", (back, Const(0))), Op("less", (back, loop.end))]
    memo: dict[Node, Node] = {written: cell, loop.index: back}

    def move(node: Node) -> Node:
        found = memo.get(node)
        if found is None:
            found = node.rebuild(move) if node.children() else node
            if isinstance(node, Load) and isinstance(found, Load) and loop.index in indices_in(*node.subscripts):
                # What is read there is read where it is.
                found = Load(
                    found.buffer, found.subscripts, conjunction([*reached, *conjuncts(found.where)]), found.fill
                )
            memo[node] = found
        return found

    inside = (Op("at_least", (cell, Const(0))), Op("less", (cell, extent)))
    moved = [c for c in map(move, conjuncts(store.where)) if isinstance(c, Expr) and c not in inside]
    # These come first: the others may read at the point that they allow.
    where = conjunction([*reached, *moved])
    subscripts = tuple(s for s in map(move, store.subscripts) if isinstance(s, Expr))
    value = move(store.value)
    assert isinstance(value, Expr)
    stores = (Store(store.buffer, subscripts, value, store.combine, where),)
    placed = [Loop(cell, Const(0), extent, "free", ()) if each is loop else each for each in loops]
    return Kernel(kernel.inputs, kernel.results, nested(placed, stores), kernel.exact)

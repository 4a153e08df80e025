"""Give every cell of the output to one program: terms are walked by output row instead of scattered.

    free a in 0 .. A:                                structure r0 = rows(x0, M)
      free b in 0 .. B:                        ->    free m in 0 .. M:
        out[x0[a], b] += t0[a] * t1[x1[a], b]          free b in 0 .. B:
                                                         sum a in r0[m] .. r0[m + 1]:
                                                           out[m, b] += t0[a] * t1[x1[a], b]

Where x0 is not sorted, its entries are walked in sorted order: `a` becomes `o0[a]`, with `o0 = order(x0)`.
"""

from __future__ import annotations

from insum_nn.compiler.ir.graph import Structure, loops_of, store_of
from insum_nn.compiler.ir.nodes import (
    Buffer,
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
    walk,
)
from insum_nn.facts import IndexFacts

__all__ = ["combine"]

_ENTRIES = IndexFacts(masked=False)


def combine(kernel: Kernel) -> tuple[tuple[Structure, ...], Kernel]:
    """The structures that walk a kernel's terms by output row, in order, and the new algorithm.

    A kernel whose output is addressed by loops alone stays as it is.

    Raises:
        NotImplementedError: the output is addressed by more than one index tensor, or by one of several axes.
    """
    loops, store = loops_of(kernel), store_of(kernel)
    indirect = [(axis, s) for axis, s in enumerate(store.subscripts) if isinstance(s, Load)]
    if not indirect:
        return (), kernel
    if len(indirect) > 1 or len(indirect[0][1].subscripts) != 1 or not isinstance(indirect[0][1].subscripts[0], Index):
        raise NotImplementedError("an output addressed by several index tensors, or by one of several axes")
    axis, owner = indirect[0]
    entry = owner.subscripts[0]
    assert isinstance(entry, Index)
    if any(entry in walk(s) for place, s in enumerate(store.subscripts) if place != axis):
        raise NotImplementedError("an entry that also addresses another axis of the output")
    rows_of, structures = owner.buffer, list[Structure]()
    position: Expr = entry
    if not owner.buffer.facts.sorted:
        order = Buffer(f"{owner.buffer.name}_order", "int64", owner.buffer.shape, _ENTRIES)
        rows_of = Buffer(f"{owner.buffer.name}_sorted", owner.buffer.dtype, owner.buffer.shape)
        structures = [Structure("order", order, (owner.buffer,)), Structure("take", rows_of, (owner.buffer, order))]
        position = Load(order, (entry,))
    extent = store.buffer.shape[axis]
    bounds = Buffer(f"{owner.buffer.name}_rows", "int64", (Op("add", (extent, Const(1))),), _ENTRIES)
    structures.append(Structure("rows", bounds, (rows_of,), extent))
    row = Index("row")
    # Terms of a row have its number for an owner, and a row's number is never -1.
    known: dict[Node, Node] = {owner: row, Op("at_least", (owner, Const(0))): Const(True, "bool")}
    moved = store.replace(known)
    if position is not entry:
        moved = moved.replace({entry: position})
    assert isinstance(moved, Store)
    body: Stmt = _without_truth(moved)
    walked = Loop(entry, Load(bounds, (row,)), Load(bounds, (Op("add", (row, Const(1))),)), "sum", ())
    placed = [Loop(row, Const(0), extent, "free", ()) if loop.index is entry else loop for loop in loops]
    free = [loop for loop in placed if loop.role == "free"]
    for loop in reversed([*free, walked, *(loop for loop in placed if loop.role == "sum")]):
        body = Loop(loop.index, loop.begin, loop.end, loop.role, (body,))
    made = [structure.result for structure in structures]
    inputs = (*(b for b in kernel.inputs if b is not owner.buffer), *(b for b in made if b.name != rows_of.name))
    return tuple(structures), Kernel(inputs, kernel.results, (body,))


def _without_truth(store: Store) -> Store:
    """The store without conditions that always hold."""
    true = Const(True, "bool")

    def simplified(expr: Expr | None) -> Expr | None:
        if isinstance(expr, Op) and expr.name == "and":
            left, right = (simplified(arg) for arg in expr.args)
            if left is None or right is None:
                return left or right
            return Op("and", (left, right))
        return None if expr is true else expr

    return Store(store.buffer, store.subscripts, store.value, store.combine, simplified(store.where))

"""Give every row of the output to one program: a program walks the terms of the rows that it owns.

    free a in 0 .. A:                                free row in 0 .. M:
      free b in 0 .. B:                        ->      free b in 0 .. B:
        out[x0[a], b] += t0[a] * t1[x1[a], b]            sum entry in rows[row] .. rows[row + 1]:
                                                           out[row, b] += t0[entry] * t1[x1[entry], b]

`rows` is a structure of the index tensor: where the entries of each row begin. Where the tensor is not sorted, its
entries are walked in sorted order: `a` becomes `order[entry]`. Rows that are far longer than others are divided into
chunks, whose sums are added up by another kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from insum_nn.compiler.ir.graph import ENTRY, ROW, around, loops_of, stores_of
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
    Size,
    Store,
    add,
    conjunction,
    conjuncts,
    multiply,
    replacing,
    walk,
)
from insum_nn.facts import IndexFacts

__all__ = ["RowWalk", "own_rows"]

_FACTS = IndexFacts(masked=False)


@dataclass(frozen=True, slots=True)
class RowWalk:
    """A kernel whose rows are owned, and the buffers of the structure that it walks.

    Attributes:
        kernel: the algorithm.
        axis: the axis of the output that the rows are.
        entries: with rows: where an entry stands along each index of `row_index`.
        target: of divided rows: the row that a chunk's sum belongs to, or -1 minus its place among partial sums.
        row: the row whose terms a program walks.
    """

    kernel: Kernel
    axis: int
    entries: tuple[Expr, ...] = ()
    target: Expr | None = None
    row: Expr = ROW


def own_rows(
    kernel: Kernel,
    row_index: Load,
    axis: int,
    *,
    permuted: bool,
    divided: bool = False,
    tiled: bool = False,
    rows: Expr | None = None,
) -> RowWalk:
    """Walk the terms of a kernel by the rows of its first output.

    Args:
        kernel: the algorithm.
        row_index: the read that addresses the output's rows, at plain indices.
        axis: the axis of the output that it addresses; -1: of no output.
        permuted: its entries are not in order.
        divided: long rows are divided.
        tiled: programs have parts of rows, each of which writes for itself.
        rows: how many there are, where that is no extent of the output.
    """
    loops, stores = loops_of(kernel), stores_of(kernel)
    entries = [index for index in row_index.subscripts if isinstance(index, Index)]
    by_index = {loop.index: loop for loop in loops}
    first = kernel.results[0].buffer
    rows = first.shape[axis] if rows is None else rows
    length: Expr = Const(1)
    for index in entries:
        length = multiply(length, by_index[index].end)
    order = Buffer("order", "int64", (length,), _FACTS)
    place: Expr = Load(order, (ENTRY,)) if permuted else ENTRY
    replacements: dict[Node, Node] = {}
    for position in range(len(entries) - 1, -1, -1):
        extent = by_index[entries[position]].end
        replacements[entries[position]] = place if position == 0 else Op("mod", (place, extent))
        place = Op("floordiv", (place, extent))
    count: Expr = Size("rows") if divided or tiled else rows
    begin = Buffer("begin", "int64", (add(count, Const(1)),), _FACTS)
    made = [begin, *([order] if permuted else [])]
    target = None
    if divided or tiled:
        names = ("end", "target", "row_of")
        ends_of, targets, rows_of = (Buffer(name, "int64", (count,), _FACTS) for name in names)
        low, high = Load(begin, (ROW,)), Load(ends_of, (ROW,))
        target = None if tiled else Load(targets, (ROW,))
        owned, made = Load(rows_of, (ROW,)), [*made, ends_of, *([] if tiled else [targets]), rows_of]
    else:
        low, high, owned = Load(begin, (ROW,)), Load(begin, (add(ROW, Const(1)),)), ROW
    # A row of the output without terms may lie outside of what is read at its number.
    some = [] if tiled else [Op("less", (low, high))]
    present = Op("at_least", (row_index, Const(0)))

    def without(where: Expr | None, *more: Expr) -> Expr | None:
        """Conditions without what holds of every term of a row."""
        return conjunction([*(c for c in conjuncts(where) if c is not present), *more])

    changed = {**replacements, row_index: owned}
    move, guarded = replacing(changed), dict[Node, Node]()
    for node in walk(*(store.value for store in stores)):
        # What is read at a row's number is read only where the row has terms.
        if isinstance(node, Load) and node is not row_index and row_index in walk(node):
            guarded[node] = move(Load(node.buffer, node.subscripts, without(node.where, *some), node.fill))
    move_value, moved = replacing({**changed, **guarded}), list[Store]()
    for store in stores:
        subscripts, where = [*map(move, store.subscripts)], without(store.where)
        if axis >= 0 and store.buffer is first:
            subscripts[axis] = ROW if target is None else target
        where = None if where is None else move(where)
        moved.append(Store(store.buffer, tuple(subscripts), move_value(store.value), store.combine, where))
    free = [loop for loop in loops if loop.role == "free" and loop.index not in entries]
    sums = [loop for loop in loops if loop.role == "sum"]
    placed = [
        Loop(ROW, Const(0), count, "free", ()),
        *free,
        Loop(ENTRY, low, high, "sum", ()),
        *(loop for loop in sums if loop.index not in entries),
    ]
    read = {node.buffer for node in walk(*moved) if isinstance(node, Load)}
    inputs = tuple(b for b in kernel.inputs if b is not row_index.buffer or b in read)
    walked = Kernel((*inputs, *made), kernel.results, around(placed, tuple(moved)), kernel.exact)
    return RowWalk(walked, axis, tuple(replacements[index] for index in entries), target, owned)  # type: ignore[arg-type]

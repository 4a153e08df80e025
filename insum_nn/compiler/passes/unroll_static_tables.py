"""Unroll the loops that address static tables: their entries become numbers, and each point a term of its own.

    sum p in 0 .. 2:                                            out[z, 1] += 0.5 * t1[z, 3]
      out[z, x0[p]] += t0[p] * t1[z, x1[p]]         ->          out[z, 0] += -1.0 * t1[z, 2]

with x0 = (1, 0), t0 = (0.5, -1) and x1 = (3, 2). An index in which every table is affine stays a loop: what is read of
a table is then a number and a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from insum_nn.compiler.ir.graph import around, loops_of, stores_of
from insum_nn.compiler.ir.nodes import (
    OPERATIONS,
    Buffer,
    Cast,
    Const,
    Expr,
    Index,
    Kernel,
    Load,
    Node,
    Op,
    Store,
    add,
    conjunction,
    conjuncts,
    multiply,
    operation,
    replacing,
    walk,
)
from insum_nn.facts import StaticTable

__all__ = ["unroll_static_tables"]


def unroll_static_tables(
    kernel: Kernel, tables: Mapping[str, StaticTable], unrolled: Sequence[str], points: Sequence[Mapping[str, int]]
) -> Kernel:
    """Unroll a kernel over static tables.

    Args:
        kernel: the algorithm.
        tables: values by the canonical names of their buffers.
        unrolled: the loops that become terms.
        points: the combinations of their values that have a term.
    """
    loops, stores = loops_of(kernel), stores_of(kernel)
    shapes: dict[Node, Node] = {
        extent: Const(tables[buffer.name].shape[axis])
        for buffer in kernel.inputs
        if buffer.name in tables
        for axis, extent in enumerate(buffer.shape)
    }
    extents = {loop.index.name: int(loop.end.value) for loop in loops if isinstance(loop.end, Const)}
    values: dict[Node, list[Any]] = {Index(name): [Const(point[name]) for point in points] for name in unrolled}
    terms = _Terms(tables, extents, values, len(points))
    each = [terms.stores(store) for store in map(replacing(shapes), stores)]
    folded = tuple(store for point in zip(*each, strict=True) for store in point if store is not None)
    body = around([loop for loop in loops if loop.index.name not in unrolled], folded)
    inputs = tuple(buffer for buffer in kernel.inputs if buffer.name not in tables)
    return Kernel(inputs, kernel.results, body, kernel.exact)


class _Terms:
    """Replaces loops by their values and reads of tables by numbers, and computes what is known then, at all points.

    Args:
        tables: values by the canonical names of their buffers.
        extents: of the loops, where they are known.
        values: of loops, at each point.
        count: of points.
    """

    def __init__(
        self,
        tables: Mapping[str, StaticTable],
        extents: Mapping[str, int],
        values: Mapping[Node, list[Any]],
        count: int,
    ) -> None:
        self.tables, self.extents, self.count = tables, extents, count
        self.columns = dict(values)

    def stores(self, store: Store) -> list[Store | None]:
        """The store at each point; `None` where a condition that is known now does not hold."""
        points = zip(
            self.of(store.value), self.all_of(store.subscripts), self.all_of(conjuncts(store.where)), strict=True
        )
        return [
            None
            if any([isinstance(condition, Const) and not condition.value for condition in conditions])
            else Store(store.buffer, subscripts, value, store.combine, conjunction(conditions))
            for value, subscripts, conditions in points
        ]

    def all_of(self, nodes: Sequence[Node]) -> list[tuple[Any, ...]]:
        """What becomes of several nodes at each point."""
        return [*zip(*map(self.of, nodes), strict=True)] if nodes else [()] * self.count

    def of(self, node: Node) -> list[Any]:
        """What becomes of a node at each point: of an expression an expression."""
        found = self.columns.get(node)
        if found is None:
            children = () if isinstance(node, Buffer) else node.children()
            # Few of the values are different ones, and each is made once.
            made: dict[tuple[Node, ...], Node] = {}
            found = self.columns[node] = []
            for parts in self.all_of(children):
                each = made.get(parts)
                if each is None:
                    each = made[parts] = self.made(node, parts)
                found.append(each)
        return found

    def made(self, node: Node, parts: Sequence[Any]) -> Node:
        """What becomes of a node, made of what became of its parts."""
        if isinstance(node, Load) and (table := self.tables.get(node.buffer.name)) is not None:
            return self.entry(parts[1 : 1 + len(node.subscripts)], table)
        if isinstance(node, Load) and node.where is not None:
            return Load(node.buffer, tuple(parts[1:-1]), conjunction(conjuncts(parts[-1])), node.fill)
        if isinstance(node, Op):
            if node.name == "add":
                return add(*parts)
            # The last factor is none of several.
            if node.name == "mul" and all(map(_integer, reversed(parts))):
                return multiply(*parts)
            if node.name == "at_least" and self.least(parts[0]) >= 0 and parts[1] is Const(0):
                return Const(True, "bool")
            return operation(node.name, *parts)
        if isinstance(node, Cast) and isinstance(parts[0], Const):
            return parts[0]
        changed = iter(parts)
        return node.rebuild(lambda _: next(changed)) if parts else node

    def least(self, expr: Expr) -> float:
        """The least value of an affine sum of loops; minus infinity: it is not known."""
        if isinstance(expr, Const):
            return expr.value
        if isinstance(expr, Index):
            return 0
        if isinstance(expr, Op) and expr.name == "add":
            return sum(map(self.least, expr.args))
        if isinstance(expr, Op) and expr.name == "mul" and isinstance(expr.args[0], Const):
            index, step = expr.args[1], int(expr.args[0].value)
            extent = self.extents.get(index.name) if isinstance(index, Index) else None
            return -math.inf if extent is None else min(0, step * (extent - 1))
        return -math.inf

    def entry(self, subscripts: Sequence[Expr], table: StaticTable) -> Expr:
        """A table's entry: a number, or a number and steps along the loops that are left."""
        start = table.at([_value(each, None) for each in subscripts])
        found: Expr = Const(start, "float64" if isinstance(start, float) else "int64")
        left = [each for each in subscripts if not isinstance(each, Const)]
        for index in [node for node in walk(*left) if isinstance(node, Index)] if left else ():
            # With a single value any step will do; one that is not 0 keeps the index in the address, for its mask.
            step = (
                table.at([_value(each, index) for each in subscripts]) - start if self.extents[index.name] != 1 else 1
            )
            found = add(found, multiply(Const(int(step)), index))
        return found


def _value(expr: Expr, one: Index | None) -> int:
    """The value of an expression of numbers and loops, of which one is 1 and the others are 0."""
    if isinstance(expr, Const):
        return int(expr.value)
    if isinstance(expr, Cast):
        return _value(expr.value, one)
    if isinstance(expr, Op):
        return int(OPERATIONS[expr.name].evaluate(*[_value(arg, one) for arg in expr.args]))
    assert isinstance(expr, Index)
    return int(expr is one)


def _integer(expr: Expr) -> bool:
    return (
        isinstance(expr, Index)
        or (isinstance(expr, Const) and isinstance(expr.value, int))
        or (isinstance(expr, Op) and expr.name in ("add", "mul") and all(map(_integer, expr.args)))
    )

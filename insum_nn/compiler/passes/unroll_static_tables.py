"""Unroll the loops that address static tables: their entries become numbers, and each point a term of its own.

    sum p in 0 .. 2:                                            out[z, 1] += 0.5 * t1[z, 3]
      out[z, x0[p]] += t0[p] * t1[z, x1[p]]         ->          out[z, 0] += -1.0 * t1[z, 2]

with x0 = (1, 0), t0 = (0.5, -1) and x1 = (3, 2). An index in which every table is affine stays a loop: what is read of
a table is then a number and a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from insum_nn.compiler.ir.graph import around, loops_of, stores_of
from insum_nn.compiler.ir.nodes import (
    Cast,
    Const,
    Expr,
    Index,
    Kernel,
    Load,
    Loop,
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
    kernel: Kernel, tables: Mapping[str, StaticTable], unrolled: Sequence[str], points: Iterable[Mapping[str, int]]
) -> Kernel:
    """Unroll a kernel over static tables.

    Args:
        kernel: the algorithm.
        tables: values by the canonical names of their buffers.
        unrolled: the loops that become terms.
        points: the combinations of their values that have a term.
    """
    loops, stores = loops_of(kernel), stores_of(kernel)
    folded: list[Store] = []
    shapes: dict[Node, Node] = {
        extent: Const(tables[buffer.name].shape[axis])
        for buffer in kernel.inputs
        if buffer.name in tables
        for axis, extent in enumerate(buffer.shape)
    }
    stores = [*map(replacing(shapes), stores)]
    extents = {name: _extent(loops, name) for name in (loop.index.name for loop in loops)}
    varying = _varying(stores, frozenset([Index(name) for name in unrolled]))
    steady: dict[Node, Node] = {}
    for point in points:
        fold = _Fold(tables, extents, {Index(name): Const(point[name]) for name in unrolled}, varying, steady)
        for store in stores:
            folded += fold.store(store)
    body = around([loop for loop in loops if loop.index.name not in unrolled], tuple(folded))
    inputs = tuple(buffer for buffer in kernel.inputs if buffer.name not in tables)
    return Kernel(inputs, kernel.results, body, kernel.exact)


def _varying(nodes: Sequence[Node], unrolled: frozenset[Node]) -> frozenset[Node]:
    """The nodes that are not the same at all points."""
    memo = dict.fromkeys(unrolled, True)

    def varies(node: Node) -> bool:
        found = memo.get(node)
        if found is None:
            found = memo[node] = any([varies(child) for child in node.children()])
        return found

    for node in nodes:
        varies(node)
    return frozenset([node for node, found in memo.items() if found])


def _extent(loops: Sequence[Loop], name: str) -> int | None:
    end = next(loop.end for loop in loops if loop.index.name == name)
    return int(end.value) if isinstance(end, Const) else None


class _Fold:
    """Replaces loops by their values and reads of tables by numbers, and computes what is known then.

    Args:
        tables: values by the canonical names of their buffers.
        extents: of the loops, where they are known.
        values: of loops at this point.
        varying: nodes that are not the same at all points.
        steady: what became of the others, at this point or an earlier one.
    """

    def __init__(
        self,
        tables: Mapping[str, StaticTable],
        extents: Mapping[str, int | None],
        values: Mapping[Node, Node],
        varying: frozenset[Node],
        steady: dict[Node, Node],
    ) -> None:
        self.tables = tables
        self.extents = extents
        self.memo: dict[Node, Node] = dict(values)
        self.varying = varying
        self.steady = steady

    def store(self, store: Store) -> list[Store]:
        """The store at one point; none where a condition that is known now does not hold."""
        conditions = [self.fold(condition) for condition in conjuncts(store.where)]
        if any(isinstance(c, Const) and not c.value for c in conditions):
            return []
        subscripts = tuple(self.fold(s) for s in store.subscripts)
        return [Store(store.buffer, subscripts, self.fold(store.value), store.combine, conjunction(conditions))]

    def fold(self, node: Node) -> Any:
        """What becomes of a node: of an expression an expression."""
        memo = self.memo if node in self.varying else self.steady
        found = memo.get(node)
        if found is None:
            found = memo[node] = self.made(node)
        return found

    def made(self, node: Node) -> Node:
        """What becomes of a node, made of what becomes of its parts: no node that is only on the way."""
        if isinstance(node, Load):
            subscripts = tuple([self.fold(each) for each in node.subscripts])
            table = self.tables.get(node.buffer.name)
            if table is not None:
                return self.entry(subscripts, table)
            where = None if node.where is None else conjunction(conjuncts(self.fold(node.where)))
            return Load(node.buffer, subscripts, where, node.fill)
        if isinstance(node, Op):
            args = [self.fold(each) for each in node.args]
            if node.name == "add":
                return add(*args)
            if node.name == "mul" and all([_integer(arg) for arg in args]):
                return multiply(*args)
            if node.name == "at_least" and self.least(args[0]) >= 0 and args[1] is Const(0):
                return Const(True, "bool")
            return operation(node.name, *args)
        if isinstance(node, Cast) and isinstance(value := self.fold(node.value), Const):
            return value
        return node.rebuild(self.fold) if node.children() else node

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
        left: list[Index] = []
        if not all([isinstance(each, Const) for each in subscripts]):
            left = [node for node in walk(*subscripts) if isinstance(node, Index)]
        start = self.at(subscripts, table, {})
        found: Expr = Const(start, "float64" if isinstance(start, float) else "int64")
        for index in left:
            # With a single value any step will do; one that is not 0 keeps the index in the address, for its mask.
            step = self.at(subscripts, table, {index: 1}) - start if self.extents[index.name] != 1 else 1
            found = add(found, multiply(Const(int(step)), index))
        return found

    def at(self, subscripts: Sequence[Expr], table: StaticTable, point: Mapping[Index, int]) -> int | float:
        places: list[int] = []
        for value in subscripts:
            if not isinstance(value, Const):
                inside = [node for node in walk(value) if isinstance(node, Index)]
                values: dict[Node, Node] = {index: Const(point.get(index, 0)) for index in inside}
                every = _varying((value,), frozenset(inside))
                value = _Fold(self.tables, self.extents, values, every, {}).fold(value)
            assert isinstance(value, Const)
            places.append(int(value.value))
        return table.at(places)


def _integer(expr: Expr) -> bool:
    return (
        isinstance(expr, Index)
        or (isinstance(expr, Const) and isinstance(expr.value, int))
        or (isinstance(expr, Op) and expr.name in ("add", "mul") and all(map(_integer, expr.args)))
    )

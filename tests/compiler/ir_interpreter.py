"""Run kernels of the IR as the loops that they are: what every pass has to leave unchanged."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.ir.nodes import (
    OPERATIONS,
    Alloc,
    Buffer,
    Cast,
    Const,
    Dot,
    Expr,
    If,
    Index,
    Kernel,
    Load,
    Loop,
    Op,
    Result,
    Size,
    Stmt,
    Store,
)
from insum_nn.compiler.lang.combining import selecting
from insum_nn.dtypes import dtype_of

__all__ = ["interpret_kernel"]

# The values of the loops around a node; what an expression is worth there, and what a statement does.
Point = dict[str, int]
Value = Callable[[Point], Any]
Action = Callable[[Point], None]


def interpret_kernel(
    kernel: Kernel, tensors: Mapping[str, Tensor], sizes: Mapping[str, int], keep: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Run a kernel, and return its results by canonical name, in float64 (int64 for integers).

    Args:
        kernel: the kernel.
        tensors: its inputs by canonical name; they are not written.
        sizes: by name.
        keep: names of workspaces that are returned too.

    Raises:
        IndexError: an address outside of a tensor.
    """
    run = _Run(tensors, sizes)
    for result in kernel.results:
        run.begin(result)
    run.block(kernel.body)({})
    for result in kernel.results:
        if result.activation is not None:
            cells = run.memory[result.buffer.name]
            cells.update(zip(cells, map(OPERATIONS[result.activation].evaluate, cells.values()), strict=True))
    names = [*(result.buffer.name for result in kernel.results), *keep]
    return {name: run.memory[name].tensor() for name in names if name in run.memory}


class _Cells(dict[tuple[int, ...], Any]):
    """The cells of a tensor by their places, in order: Python reads and writes them faster than a tensor's."""

    def __init__(self, name: str, shape: Sequence[int], floating: bool, values: Iterable[Any]) -> None:
        super().__init__(zip(itertools.product(*map(range, shape)), values, strict=False))
        self.name, self.shape, self.floating = name, shape, floating
        # Those that hold a value: an extremum takes the first one as it is.
        self.written = set[tuple[int, ...]]()

    def __missing__(self, place: tuple[int, ...]) -> Any:
        raise IndexError(f"{self.name}{list(place)} is outside of {tuple(self.shape)}")

    def tensor(self) -> Tensor:
        dtype = torch.float64 if self.floating else torch.int64
        return torch.tensor([*self.values()], dtype=dtype).reshape([*self.shape])


class _Run:
    """Turns nodes into functions of a point, once, since a loop runs them often."""

    def __init__(self, tensors: Mapping[str, Tensor], sizes: Mapping[str, int]) -> None:
        self.memory = {
            name: _Cells(
                name,
                t.shape,
                t.is_floating_point(),
                (t.double() if t.is_floating_point() else t.long()).flatten().tolist(),
            )
            for name, t in tensors.items()
        }
        self.sizes = sizes
        self.values: dict[Expr, Value] = {}

    def fill(self, buffer: Buffer, value: int | float | None) -> None:
        """Fresh memory; cells that nothing filled hold NaN, or a number no index may have."""
        floating = dtype_of(buffer.dtype).is_floating
        empty = float("nan") if floating else -(2**62)
        shape = [int(self.value(extent)({})) for extent in buffer.shape]
        number = (float if floating else int)(empty if value is None else value)
        self.memory[buffer.name] = _Cells(buffer.name, shape, floating, itertools.repeat(number))

    def begin(self, result: Result) -> None:
        """Fill a result with what it holds before the first write."""
        self.fill(result.buffer, 0 if result.initial == "zero" else None)
        if result.initial == "tensor":
            cells = self.memory[result.buffer.name]
            cells.update(self.memory[f"{result.buffer.name}_initial"])
            cells.written.update(cells)

    def block(self, statements: Sequence[Stmt]) -> Action:
        actions = [self.action(statement) for statement in statements]

        def run(point: Point) -> None:
            for action in actions:
                action(point)

        return actions[0] if len(actions) == 1 else run

    def action(self, statement: Stmt) -> Action:
        if isinstance(statement, Loop):
            return self.loop(statement)
        if isinstance(statement, Alloc):
            return lambda _: self.fill(statement.buffer, statement.initial)
        if isinstance(statement, If):
            condition = self.value(statement.condition)
            then, otherwise = self.block(statement.then), self.block(statement.otherwise)
            return lambda point: then(point) if condition(point) else otherwise(point)
        assert isinstance(statement, Store)
        return self.store(statement)

    def loop(self, loop: Loop) -> Action:
        begin, end, name, body = self.value(loop.begin), self.value(loop.end), loop.index.name, self.block(loop.body)
        limit, word = (None if node is None else self.value(node) for node in (loop.limit, loop.word))

        def run(point: Point) -> None:
            first, last = begin(point), end(point)
            bits = None if word is None else word(point)
            for at in range(first, last if limit is None else min(last, limit(point)), loop.step):
                if bits is None or bits >> (at - first) & 1:
                    point[name] = at
                    body(point)

        return run

    def store(self, store: Store) -> Action:
        where = None if store.where is None else self.value(store.where)
        place, value, name = self.place(store.subscripts), self.value(store.value), store.buffer.name
        adds, mode, memory = store.combine == "add", selecting(store.combine), self.memory

        def run(point: Point) -> None:
            if where is not None and not where(point):
                return
            cells, at = memory[name], place(point)
            before, found = cells[at], value(point)
            if adds:
                found = before + found
            elif mode is not None and at in cells.written:
                # NaN stays, as in torch's own extrema.
                found = before if before != before else mode.fold(found, before)
            cells.written.add(at)
            cells[at] = float(found) if cells.floating else int(found)

        return run

    def place(self, subscripts: Sequence[Expr]) -> Callable[[Point], tuple[int, ...]]:
        parts = [self.value(subscript) for subscript in subscripts]
        return lambda point: tuple([part(point) for part in parts])

    def value(self, node: Expr) -> Value:
        # Nodes of a kernel have much in common.
        found = self.values.get(node)
        if found is None:
            found = self.values[node] = self._value(node)
        return found

    def _value(self, node: Expr) -> Value:
        if isinstance(node, Const):
            return lambda _: node.value
        if isinstance(node, Index):
            return operator.itemgetter(node.name)
        if isinstance(node, Size):
            return lambda _: self.sizes[node.name]
        if isinstance(node, Load):
            place, memory, name, fill = self.place(node.subscripts), self.memory, node.buffer.name, node.fill
            if node.where is None:
                return lambda point: memory[name][place(point)]
            where = self.value(node.where)
            return lambda point: memory[name][place(point)] if where(point) else fill
        if isinstance(node, Cast):
            return self.value(node.value)
        if isinstance(node, Dot):
            left, right = self.value(node.left), self.value(node.right)
            return lambda point: left(point) * right(point)
        assert isinstance(node, Op)
        evaluate, (first, *rest) = OPERATIONS[node.name].evaluate, map(self.value, node.args)
        if not rest:
            return lambda point: evaluate(first(point))
        second = rest[0]
        if node.name == "and":
            # The second condition may read an address that the first one guards.
            return lambda point: bool(first(point) and second(point))
        if node.name == "select":
            return lambda point: second(point) if first(point) else rest[1](point)
        return lambda point: evaluate(first(point), second(point))

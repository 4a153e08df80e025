"""Run kernels of the IR as the loops that they are: what every pass has to leave unchanged."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
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

Point = dict[str, int]


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
    run = _Run(dict(tensors), sizes)
    for result in kernel.results:
        run.begin(result)
    run.block(kernel.body, {})
    for result in kernel.results:
        if result.activation is not None:
            evaluate = OPERATIONS[result.activation].evaluate
            run.memory[result.buffer.name].apply_(evaluate)
    names = [*(result.buffer.name for result in kernel.results), *keep]
    return {name: run.memory[name] for name in names if name in run.memory}


class _Run:
    def __init__(self, memory: dict[str, Tensor], sizes: Mapping[str, int]) -> None:
        self.memory = {name: (t.double() if t.is_floating_point() else t.long()).cpu() for name, t in memory.items()}
        self.sizes = sizes
        # Cells that hold a value: an extremum takes the first one as it is.
        self.written = set[tuple[Buffer, tuple[int, ...]]]()

    def fill(self, buffer: Buffer, value: int | float | None) -> None:
        """Fresh memory; cells that nothing filled hold NaN, or a number no index may have."""
        floating = dtype_of(buffer.dtype).is_floating
        dtype = torch.float64 if floating else torch.int64
        shape = self.shape(buffer)
        empty = float("nan") if floating else -(2**62)
        self.memory[buffer.name] = torch.full(shape, empty if value is None else value, dtype=dtype)

    def begin(self, result: Result) -> None:
        """Fill a result with what it holds before the first write."""
        self.fill(result.buffer, 0 if result.initial == "zero" else None)
        if result.initial == "tensor":
            self.memory[result.buffer.name] = self.memory[f"{result.buffer.name}_initial"].clone()
            cells = itertools.product(*map(range, self.shape(result.buffer)))
            self.written.update((result.buffer, cell) for cell in cells)

    def shape(self, buffer: Buffer) -> list[int]:
        return [int(self.value(extent, {})) for extent in buffer.shape]

    def block(self, statements: Sequence[Stmt], point: Point) -> None:
        for statement in statements:
            if isinstance(statement, Loop):
                self.loop(statement, point)
            elif isinstance(statement, Alloc):
                self.fill(statement.buffer, statement.initial)
            elif isinstance(statement, If):
                self.block(statement.then if self.value(statement.condition, point) else statement.otherwise, point)
            else:
                assert isinstance(statement, Store)
                self.store(statement, point)

    def loop(self, loop: Loop, point: Point) -> None:
        begin, end = self.value(loop.begin, point), self.value(loop.end, point)
        if loop.limit is not None:
            end = min(end, self.value(loop.limit, point))
        word = None if loop.word is None else self.value(loop.word, point)
        for at in range(begin, end, loop.step):
            if word is not None and not word >> (at - begin) & 1:
                continue
            self.block(loop.body, {**point, loop.index.name: at})

    def store(self, store: Store, point: Point) -> None:
        cells, before = self.memory[store.buffer.name], None
        if store.where is not None and not self.value(store.where, point):
            return
        place = self.place(store.buffer, store.subscripts, point)
        value = self.value(store.value, point)
        mode = selecting(store.combine)
        if store.combine == "add":
            value = cells[place] + value
        elif mode is not None and (store.buffer, place) in self.written:
            before = cells[place].item()
            # NaN stays, as in torch's own extrema.
            value = before if before != before else mode.fold(value, before)
        self.written.add((store.buffer, place))
        cells[place] = value

    def place(self, buffer: Buffer, subscripts: Sequence[Expr], point: Point) -> tuple[int, ...]:
        place = tuple(int(self.value(subscript, point)) for subscript in subscripts)
        shape = self.memory[buffer.name].shape
        if any(not 0 <= at < extent for at, extent in zip(place, shape, strict=True)):
            raise IndexError(f"{buffer.name}{list(place)} is outside of {tuple(shape)}")
        return place

    def value(self, node: Expr, point: Point) -> Any:
        if isinstance(node, Const):
            return node.value
        if isinstance(node, Index):
            return point[node.name]
        if isinstance(node, Size):
            return self.sizes[node.name]
        if isinstance(node, Load):
            if node.where is not None and not self.value(node.where, point):
                return node.fill
            return self.memory[node.buffer.name][self.place(node.buffer, node.subscripts, point)].item()
        if isinstance(node, Cast):
            return self.value(node.value, point)
        if isinstance(node, Dot):
            return self.value(node.left, point) * self.value(node.right, point)
        assert isinstance(node, Op)
        if node.name == "and":
            # The second condition may read an address that the first one guards.
            return all(self.value(arg, point) for arg in node.args)
        if node.name == "select":
            return self.value(node.args[1 if self.value(node.args[0], point) else 2], point)
        return OPERATIONS[node.name].evaluate(*(self.value(arg, point) for arg in node.args))

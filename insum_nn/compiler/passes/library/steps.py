"""Small algorithms as steps of a graph: how passes that cut an algorithm write the pieces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from insum_nn.compiler.ir.access import Labels
from insum_nn.compiler.ir.graph import Step, loops_of, store_of
from insum_nn.compiler.ir.nodes import (
    Buffer,
    Combine,
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
    walk,
)
from insum_nn.compiler.passes.library.decisions import Decision, Phrase
from insum_nn.dtypes import dtype_of

__all__ = ["Cut", "Target", "product", "read_of", "wide"]


@dataclass(frozen=True, slots=True)
class Target:
    """What a graph of library calls is for.

    Attributes:
        device: its type, such as `cpu`.
        compiled: a compiler fuses the calls; otherwise each runs by itself.
        bags: products with sparse matrices are sums of bags.
        search: the order of products is searched for; otherwise it is the written one.
        deterministic: sums are formed in a fixed order.
    """

    device: str
    compiled: bool = False
    bags: bool = False
    search: bool = True
    deterministic: bool = False


@dataclass(slots=True)
class Cut:
    """An algorithm on its way to a graph of steps.

    Attributes:
        kernel: the algorithm.
        sizes: extents of its loops in the first call; they steer the order of products, never the result.
        target: what the graph is for.
        decisions: choices so far.
    """

    kernel: Kernel
    sizes: Mapping[str, int]
    target: Target
    decisions: list[Decision] = field(default_factory=list[Decision])
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def decide(self, topic: Phrase, choice: Phrase, reason: Phrase) -> None:
        """Record a choice."""
        self.decisions.append(Decision(topic, choice, reason))

    @property
    def output(self) -> Buffer:
        """What the algorithm computes."""
        return self.kernel.results[0].buffer

    @property
    def dtype(self) -> str:
        """The dtype of the factors."""
        return self.output.dtype

    def cells(self, labels: Sequence[str]) -> int:
        """How many values indices have together."""
        return math.prod(self.sizes[label] for label in labels)

    def extents(self) -> dict[str, Expr]:
        """The end of each loop."""
        return {loop.index.name: loop.end for loop in loops_of(self.kernel)}

    def buffer(self, labels: Labels, dtype: str | None = None) -> Buffer:
        """A fresh intermediate result over some indices."""
        ends = self.extents()
        return Buffer(f"v{next(self._numbers)}", dtype or self.dtype, tuple(ends[label] for label in labels))

    def step(
        self,
        result: Result,
        subscripts: Sequence[Expr],
        value: Expr,
        loops: Labels,
        sums: Labels = (),
        *,
        combine: Combine = "set",
        where: Expr | None = None,
        ends: Mapping[str, Expr] | None = None,
    ) -> Step:
        """A step that stores a value under loops; `ends` has the extents of those that the algorithm does not have."""
        store = Store(result.buffer, tuple(subscripts), value, combine, where)
        ends = {**self.extents(), **(ends or {})}
        body: Stmt = store
        for label in reversed((*loops, *sums)):
            role = "free" if label in loops else "sum"
            body = Loop(Index(label), Const(0), ends[label], role, (body,))
        inputs = dict.fromkeys(node.buffer for node in walk(store) if isinstance(node, Load))
        if result.initial == "tensor":
            inputs |= dict.fromkeys(b for b in self.kernel.inputs if b.name == f"{result.buffer.name}_initial")
        return Step(Kernel(tuple(inputs), (result,), (body,), self.kernel.exact))

    def intermediate(
        self, labels: Labels, value: Expr, sums: Labels = (), *, dtype: str | None = None, where: Expr | None = None
    ) -> tuple[Step, Load]:
        """A step that makes an intermediate result over some indices, and the read of it."""
        buffer = self.buffer(labels, dtype)
        result = Result(buffer, "zero" if sums else "none")
        made = self.step(
            result, read_of(buffer, labels).subscripts, value, labels, sums,
            combine="add" if sums else "set", where=where,
        )  # fmt: skip
        return made, read_of(buffer, labels)

    def write(
        self,
        cell: Sequence[Expr],
        value: Expr,
        loops: Labels,
        sums: Labels = (),
        *,
        where: Expr | None = None,
        ends: Mapping[str, Expr] | None = None,
    ) -> Step:
        """The last step: a value reaches the output as the algorithm combines it."""
        combine = store_of(self.kernel).combine
        return self.step(self.kernel.results[0], cell, value, loops, sums, combine=combine, where=where, ends=ends)


def read_of(buffer: Buffer, labels: Labels) -> Load:
    """The read of a buffer whose axes are indices."""
    return Load(buffer, tuple(Index(label) for label in labels))


def wide(dtype: str) -> str:
    """The dtype in which products of factors are formed and added up."""
    return dtype_of(dtype).wide.name


def product(reads: Sequence[Expr], number: int | float = 1) -> Expr:
    """A number times reads; a number of 1 is left out where there is a read."""
    factors: list[Expr] = [*reads]
    if number != 1 or not reads:
        factors.append(Const(number, "float64" if isinstance(number, float) else "int64"))
    value = factors[0]
    for factor in factors[1:]:
        value = Op("mul", (value, factor))
    return value

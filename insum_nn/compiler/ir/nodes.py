"""The nodes of the loop-nest IR: expressions, statements and kernels; graphs of kernels are in `ir.graph`.

Nodes are immutable and interned: two nodes with equal fields are one object, so `is` compares them and a printer that
remembers nodes finds common subexpressions. Names of tensors and loops are canonical (`t0`, `x0`, `a`); what a user
called them is kept outside of the IR. Sizes of a call are never in the IR, only their symbols.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, dataclass_transform

from insum_nn.facts import UNKNOWN, IndexFacts

__all__ = [
    "OPERATIONS",
    "Alloc",
    "Buffer",
    "Const",
    "Expr",
    "Index",
    "Initial",
    "Kernel",
    "Load",
    "Loop",
    "Node",
    "Op",
    "Operation",
    "Result",
    "Role",
    "Size",
    "Stmt",
    "Store",
    "add",
    "conjunction",
    "walk",
]

Role = Literal["free", "sum", "grid", "tile", "serial", "unroll"]
Combine = Literal["set", "add"]
Initial = Literal["none", "zero"]

_interned: weakref.WeakValueDictionary[tuple[object, ...], Any] = weakref.WeakValueDictionary()
_lock = threading.Lock()


@dataclass_transform(frozen_default=True, eq_default=False)
class _Interning(type):
    """Makes each subclass a frozen dataclass whose equal instances are one object."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> _Interning:
        cls = super().__new__(mcs, name, bases, namespace)
        return dataclass(frozen=True, eq=False)(cls) if bases else cls  # type: ignore[return-value]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        # 1, 1.0 and True are equal, 0.0 and -0.0 too, and are different constants.
        key = (
            cls,
            *((type(v), math.copysign(1, v), v) if isinstance(v, bool | int | float) else v for v in made.parts()),
        )
        with _lock:
            return _interned.setdefault(key, made)


class Node(metaclass=_Interning):
    """A node; `parts()` are its fields in order."""

    def parts(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]

    def children(self) -> Iterator[Node]:
        """The nodes directly inside this one."""
        for part in self.parts():
            if isinstance(part, Node):
                yield part
            elif isinstance(part, tuple):
                yield from (each for each in part if isinstance(each, Node))

    def rebuild(self, change: Callable[[Node], Node]) -> Node:
        """The node with `change` applied to each child."""
        parts = [
            change(part)
            if isinstance(part, Node)
            else tuple(change(each) if isinstance(each, Node) else each for each in part)
            if isinstance(part, tuple)
            else part
            for part in self.parts()
        ]
        return self if all(a is b for a, b in zip(parts, self.parts(), strict=True)) else type(self)(*parts)

    def replace(self, mapping: dict[Node, Node]) -> Node:
        """The node with every occurrence of a key replaced by its value."""
        memo: dict[Node, Node] = dict(mapping)

        def change(node: Node) -> Node:
            if node not in memo:
                memo[node] = node.rebuild(change)
            return memo[node]

        return change(self)


def walk(node: Node) -> Iterator[Node]:
    """The node and everything inside it, each once, outer before inner."""
    seen: set[Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            yield current
            waiting += reversed([*current.children()])


# Expressions.


class Expr(Node):
    """A value at one point of the iteration space."""


class Const(Expr):
    """A number."""

    value: int | float | bool
    dtype: str = "int64"


class Size(Expr):
    """The extent of a loop or an axis in a call."""

    name: str


class Index(Expr):
    """The value of the loop of this name."""

    name: str


class Buffer(Node):
    """A tensor in memory, contiguous; `local`: an accumulator of the kernel, indexed by loops."""

    name: str
    dtype: str
    shape: tuple[Expr, ...]
    facts: IndexFacts = UNKNOWN
    local: bool = False


class Load(Expr):
    """Read a cell. Where `where` is false nothing is read, and the value is `fill`."""

    buffer: Buffer
    subscripts: tuple[Expr, ...]
    where: Expr | None = None
    fill: int | float = 0


class Op(Expr):
    """An operation of `OPERATIONS` on numbers."""

    name: str
    args: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation on numbers: its operands, its value in Python, how the IR prints it."""

    arity: int
    evaluate: Callable[..., Any]
    text: str


OPERATIONS: dict[str, Operation] = {
    "add": Operation(2, lambda a, b: a + b, "({} + {})"),
    "sub": Operation(2, lambda a, b: a - b, "({} - {})"),
    "mul": Operation(2, lambda a, b: a * b, "({} * {})"),
    "floordiv": Operation(2, lambda a, b: a // b, "({} // {})"),
    "mod": Operation(2, lambda a, b: a % b, "({} % {})"),
    "less": Operation(2, lambda a, b: a < b, "({} < {})"),
    "at_least": Operation(2, lambda a, b: a >= b, "({} >= {})"),
    "and": Operation(2, lambda a, b: a and b, "({} & {})"),
    "cdiv": Operation(2, lambda a, b: -(-a // b), "cdiv({}, {})"),
}


def add(a: Expr, b: Expr) -> Expr:
    """`a + b` without a zero."""
    zero = Const(0)
    return b if a is zero else a if b is zero else Op("add", (a, b))


def conjunction(conditions: Sequence[Expr | None]) -> Expr | None:
    """All of these, each once; `None` is always true."""
    found: Expr | None = None
    for condition in dict.fromkeys(c for c in conditions if c is not None):
        found = condition if found is None else Op("and", (found, condition))
    return found


# Statements.


class Stmt(Node):
    """Something done at one point of the iteration space."""


class Loop(Stmt):
    """Run the body for each value of the index: `begin`, `begin + step`, ... below `end`.

    `free` and `sum` loops are not placed yet; the others are: `grid` over programs, `tile` over the lanes of one
    program (`end - begin` is a power of two, values at or past `limit` take no part), `serial` one after the other,
    `unroll` in straight-line code.
    """

    index: Index
    begin: Expr
    end: Expr
    role: Role
    body: tuple[Stmt, ...]
    step: int = 1
    limit: Expr | None = None


class Alloc(Stmt):
    """Make an accumulator and fill it."""

    buffer: Buffer
    initial: int | float = 0


class Store(Stmt):
    """Write a cell, or add to it, where `where` is true."""

    buffer: Buffer
    subscripts: tuple[Expr, ...]
    value: Expr
    combine: Combine = "set"
    where: Expr | None = None


# Kernels.


class Result(Node):
    """An output of a kernel, and what it holds before the first write."""

    buffer: Buffer
    initial: Initial = "none"


class Kernel(Node):
    """One kernel: what it reads, what it writes, its loops."""

    inputs: tuple[Buffer, ...]
    results: tuple[Result, ...]
    body: tuple[Stmt, ...]

"""The nodes of the loop-nest IR: expressions, statements and kernels.

Nodes are immutable and interned: two nodes with equal fields are one object, so `is` compares them and a printer that
remembers nodes finds common subexpressions. Names of tensors and loops are canonical (`t0`, `x0`, `a`); what a user
called them is kept outside of the IR. Sizes of a call are never in the IR, only their symbols.
"""

from __future__ import annotations

import math
import operator
import re
import struct
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform

from insum_nn.compiler.lang.functions import FUNCTIONS, SIGNS
from insum_nn.dtypes import DTYPES
from insum_nn.facts import UNKNOWN, IndexFacts

__all__ = [
    "OPERATIONS",
    "Alloc",
    "Buffer",
    "Cast",
    "Combine",
    "Const",
    "Dot",
    "Expr",
    "If",
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
    "conjuncts",
    "multiply",
    "operands",
    "operation",
    "replacing",
    "walk",
]

Role = Literal["free", "sum", "grid", "tile", "serial"]
# "set", or the name of a mode of `lang/combining.py: COMBINING`.
Combine = str
Initial = Literal["none", "zero", "tensor"]
Precision = Literal["ieee", "tf32", "tf32x3"]


class _Reference(weakref.ref[Any]):
    """Finds a node under its fields, as long as it lives."""

    __slots__ = ("key", "table")
    key: object
    table: dict[object, _Reference]


def _forget(reference: _Reference) -> None:
    """Drop a node that is gone, unless an equal one was made since."""
    with suppress(KeyError):
        if reference.table[reference.key] is reference:
            del reference.table[reference.key]


@dataclass_transform(frozen_default=True, eq_default=False)
class _Interning(type):
    """Makes each subclass a frozen dataclass whose equal instances are one object."""

    _names: tuple[str, ...]
    _defaults: tuple[Any, ...]
    # Places of numbers of several types: 1, 1.0 and True are equal, 0.0 and -0.0 too, and are different constants.
    _numbers: tuple[int, ...]
    # Places of nodes, and whether they are tuples of them.
    _places: tuple[tuple[int, bool], ...]
    _interned: dict[object, _Reference]
    _kinds: ClassVar[set[str]] = set()

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> _Interning:
        cls = super().__new__(mcs, name, bases, namespace)
        mcs._kinds.add(name)
        if not bases:
            return cls
        made = dataclass(frozen=True, eq=False)(cls)
        own = fields(made)  # type: ignore[arg-type]
        made._names = tuple(field.name for field in own)
        made._defaults = tuple(field.default for field in own)
        types = [str(field.type) for field in own]
        made._numbers = tuple(place for place, each in enumerate(types) if "float" in each)
        made._places = tuple(
            (place, each.startswith("tuple"))
            for place, each in enumerate(types)
            if not mcs._kinds.isdisjoint(re.findall(r"\w+", each))
        )
        made._interned = {}
        return made  # type: ignore[return-value]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # Most calls ask for a node that there is.
        parts = args + cls._defaults[len(args) :]
        if kwargs:
            parts = tuple([kwargs.get(name, part) for name, part in zip(cls._names, parts, strict=True)])
        key: object = parts
        for place in cls._numbers:
            value = parts[place]
            if type(value) is not int and value is not None:
                key = (key, type(value), math.copysign(1, value))
        table = cls._interned
        reference = table.get(key)
        found = None if reference is None else reference()
        if found is not None:
            return found
        made: Any = object.__new__(cls)
        children: tuple[Node, ...] = ()
        for place, several in cls._places:
            part = parts[place]
            if part is not None:
                children += part if several else (part,)
        # Faster than the dataclass, which sets one after the other.
        state = made.__dict__
        state.update(zip(cls._names, parts, strict=True))
        state["_parts"], state["_children"] = parts, children
        own = _Reference(made, _forget)
        own.key, own.table = key, table
        # Another thread may have made it meanwhile; what is gone is not forgotten yet.
        while (reference := table.setdefault(key, own)) is not own:
            found = reference()
            if found is not None:
                return found
            _forget(reference)
        return made


N = TypeVar("N", bound="Node")


class Node(metaclass=_Interning):
    """A node; `parts()` are its fields in order."""

    def parts(self) -> tuple[Any, ...]:
        return self._parts  # type: ignore[attr-defined, no-any-return]

    def children(self) -> tuple[Node, ...]:
        """Return the nodes directly inside this one."""
        return self._children  # type: ignore[attr-defined, no-any-return]

    def rebuild(self, change: Callable[[Node], Node]) -> Node:
        """Apply `change` to each child."""
        children = self.children()
        changed = tuple([change(child) for child in children])
        # Interned: most nodes of a kernel stay what they are.
        if changed == children:
            return self
        parts, first = [*self.parts()], 0
        for place, several in type(self)._places:
            part = parts[place]
            if part is None:
                continue
            last = first + (len(part) if several else 1)
            parts[place] = changed[first:last] if several else changed[first]
            first = last
        return type(self)(*parts)

    def replace(self: N, mapping: Mapping[Node, Node]) -> N:
        """Replace every occurrence of a key by its value."""
        return replacing(mapping)(self)


def replacing(mapping: Mapping[Node, Node]) -> Callable[[N], N]:
    """Return what replaces every occurrence of a key by its value, and remembers what became of each node.

    Expressions take the place of expressions, so what is returned is of the kind of what is passed.

    Nodes that have much in common, as the terms of a kernel have, are replaced in a fraction of the time together.
    """
    memo: dict[Node, Node] = dict(mapping)

    def change(node: Node) -> Node:
        found = memo.get(node)
        if found is None:
            found = memo[node] = node.rebuild(change) if node.children() else node
        return found

    return change  # type: ignore[return-value]


def walk(*nodes: Node, seen: set[Node] | None = None) -> Iterator[Node]:
    """Yield the nodes and everything inside them, each once, outer before inner; nothing of what was `seen`."""
    seen = set() if seen is None else seen
    waiting = [*reversed(nodes)]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            yield current
            waiting += reversed(current.children())


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
    """A tensor in memory; `local`: an accumulator of the kernel. Without `strides` it is contiguous."""

    name: str
    dtype: str
    shape: tuple[Expr, ...]
    facts: IndexFacts = UNKNOWN
    local: bool = False
    strides: tuple[Expr, ...] | None = None


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


class Cast(Expr):
    """A value in another dtype."""

    value: Expr
    dtype: str


class Dot(Expr):
    """A product of two factors that the matrix unit forms and sums over the tile loops that only the factors have."""

    left: Expr
    right: Expr
    precision: Precision = "ieee"


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation on numbers: its operands, its value in Python, how the IR prints it."""

    arity: int
    evaluate: Callable[..., Any]
    text: str


def _high_bits(value: float) -> float:
    """Round a float32 toward zero to 10 bits of mantissa: what the matrix unit reads of it in tf32."""
    bits = struct.unpack("<i", struct.pack("<f", value))[0] & -8192
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])


OPERATIONS: dict[str, Operation] = {
    "add": Operation(2, operator.add, "({} + {})"),
    "sub": Operation(2, operator.sub, "({} - {})"),
    "mul": Operation(2, operator.mul, "({} * {})"),
    "floordiv": Operation(2, operator.floordiv, "({} // {})"),
    "mod": Operation(2, operator.mod, "({} % {})"),
    "less": Operation(2, operator.lt, "({} < {})"),
    "at_least": Operation(2, operator.ge, "({} >= {})"),
    "and": Operation(2, lambda a, b: a and b, "({} & {})"),
    "minimum": Operation(2, min, "min({}, {})"),
    "equal": Operation(2, operator.eq, "({} == {})"),
    "select": Operation(3, lambda condition, a, b: a if condition else b, "({1} if {0} else {2})"),
    "high_bits": Operation(1, _high_bits, "high_bits({})"),
    "cdiv": Operation(2, lambda a, b: -(-a // b), "cdiv({}, {})"),
    "div": Operation(2, SIGNS["div"].of, "({} / {})"),
    **{
        name: Operation(len(each.derivatives), each.of, f"{name}({', '.join(['{}'] * len(each.derivatives))})")
        for name, each in FUNCTIONS.items()
        if name != "detach"
    },
    # What memory of a dtype would hold.
    **{row.name: Operation(1, row.rounded, f"{row.name}({{}})") for row in DTYPES if row.is_widened},
}


def operation(name: str, *args: Expr) -> Expr:
    """Return an operation; of constants, their value."""
    constants: list[int | float | bool] = []
    for arg in args:
        if not isinstance(arg, Const):
            return Op(name, args)
        constants.append(arg.value)
    value = OPERATIONS[name].evaluate(*constants)
    return Const(value, "bool" if isinstance(value, bool) else "float64" if isinstance(value, float) else "int64")


_ZERO, _ONE, _TRUE = Const(0), Const(1), Const(True, "bool")


def add(a: Expr, b: Expr) -> Expr:
    """`a + b`, of two constants their sum, without a zero."""
    return b if a is _ZERO else a if b is _ZERO else operation("add", a, b)


def multiply(a: Expr, b: Expr) -> Expr:
    """`a * b`, of two constants their product, without a one; 0 where either is."""
    if a is _ZERO or b is _ZERO:
        return _ZERO
    return b if a is _ONE else a if b is _ONE else operation("mul", a, b)


def operands(value: Expr) -> Iterator[Load]:
    """Yield the tensors that a value is computed of, without those inside of their subscripts."""
    if isinstance(value, Load):
        yield value
    for arg in value.args if isinstance(value, Op) else ():
        yield from operands(arg)


def conjuncts(condition: Expr | None) -> tuple[Expr, ...]:
    """Return the conditions of a conjunction, each once."""
    if condition is None:
        return ()
    if isinstance(condition, Op) and condition.name == "and":
        return tuple(dict.fromkeys(part for arg in condition.args for part in conjuncts(arg)))
    return (condition,)


def conjunction(conditions: Sequence[Expr | None]) -> Expr | None:
    """All of these, each once; `None` is always true, and so is a constant that is not false."""
    found: Expr | None = None
    for condition in dict.fromkeys(c for c in conditions if c is not None and c is not _TRUE):
        found = condition if found is None else Op("and", (found, condition))
    return found


# Statements.


class Stmt(Node):
    """Something done at one point of the iteration space."""


class Loop(Stmt):
    """Run the body for each value of the index: `begin`, `begin + step`, ... below `end`.

    `free` and `sum` loops are not placed yet; the others are: `grid` over programs, `tile` over the lanes of one
    program (`end - begin` is a power of two, values at or past `limit` take no part; `axis` orders the axes of values
    that vary with several tile loops), `serial` one after the other.
    """

    index: Index
    begin: Expr
    end: Expr
    role: Role
    body: tuple[Stmt, ...]
    step: int = 1
    limit: Expr | None = None
    axis: int = 0
    word: Expr | None = None


class Alloc(Stmt):
    """Make an accumulator and fill it; with `None` its cells are set before they are read.

    An accumulator of several cells has one for each value of tile loops: it is summed in one such loop, and read in
    another one over the same values.
    """

    buffer: Buffer
    initial: int | float | None = 0


class Store(Stmt):
    """Write a cell, or combine it with a value, where `where` is true."""

    buffer: Buffer
    subscripts: tuple[Expr, ...]
    value: Expr
    combine: Combine = "set"
    where: Expr | None = None


class If(Stmt):
    """Run one of two blocks."""

    condition: Expr
    then: tuple[Stmt, ...]
    otherwise: tuple[Stmt, ...] = ()


# Kernels.


class Result(Node):
    """An output of a kernel: what it holds before the first write, and the function of each cell at the end.

    With `initial` "tensor" it starts as the input of its name and `_initial`.
    """

    buffer: Buffer
    initial: Initial = "none"
    activation: str | None = None


class Kernel(Node):
    """One kernel: what it reads, what it writes, its loops.

    `exact`: a term whose condition is false adds nothing, whatever its factors are. Otherwise a printer may read a
    factor that misses as zero and multiply the others by it: the sum is NaN where one of these is infinite or NaN.
    """

    inputs: tuple[Buffer, ...]
    results: tuple[Result, ...]
    body: tuple[Stmt, ...]
    exact: bool = False

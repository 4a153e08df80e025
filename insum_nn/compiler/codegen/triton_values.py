"""Print expressions of a placed kernel in Triton: values with axes, written where they become known.

A value varies with the tile loops whose indices it contains; each is one of its axes. It is written at the outermost
loop at which all of its parts are known, and once: equal expressions are one node.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from insum_nn.compiler.ir.nodes import (
    OPERATIONS,
    Buffer,
    Cast,
    Const,
    Expr,
    Index,
    Load,
    Loop,
    Op,
    Size,
    conjuncts,
    multiply,
    walk,
)
from insum_nn.dtypes import DTYPES, dtype_of

__all__ = ["Axes", "Scope", "Value", "Values", "lanes_of"]

Axes = tuple[str, ...]
# Near 0, where 1 is added to what is small, the first terms of a series.
_LOG1P = "tl.where({0} < 1e-4, {0} * (1.0 - {0} * (0.5 - {0} * (1 / 3 - 0.25 * {0}))), tl.log(1.0 + {0}))"
_TANH = (
    "tl.where(tl.abs({0}) < 0.05, {0} * (1.0 - {0} * {0} * (1 / 3 - {0} * {0} * (2 / 15 - {0} * {0} * (17 / 315 - {0} "
    "* {0} * (62 / 2835 - {0} * {0} * 1382 / 155925))))), 2.0 / (1.0 + tl.exp(-2.0 * {0})) - 1.0)"
)
# Operations that Triton writes as the IR is printed.
_SIGNS = ("add", "sub", "mul", "floordiv", "mod", "less", "at_least", "equal", "and", "div")
# Every operation of `ir.nodes.OPERATIONS`, and how Triton writes it.
_TEXT = {
    **{name: OPERATIONS[name].text for name in _SIGNS},
    "cdiv": "tl.cdiv({}, {})",
    "minimum": "tl.minimum({}, {})",
    "select": "tl.where({}, {}, {})",
    "high_bits": "({}.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)",
    "exp": "tl.exp({})",
    "log": "tl.log({})",
    "sqrt": "tl.sqrt({})",
    "rsqrt": "tl.rsqrt({})",
    "sin": "tl.sin({})",
    "cos": "tl.cos({})",
    "tanh": _TANH,
    "sigmoid": "(1.0 / (1.0 + tl.exp(-{0})))",
    "silu": "({0} / (1.0 + tl.exp(-{0})))",
    "softplus": f"(tl.where({{0}} > 0.0, {{0}}, 0.0) + {_LOG1P.format('tl.exp(-tl.abs({0}))')})",
    "erf": "tl.erf({})",
    "gelu": "(0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476)))",
    "relu": "tl.where({0} < 0.0, 0.0, {0})",
    "leaky_relu": "tl.where({0} > 0.0, {0}, {0} * {1})",
    "abs": "tl.abs({})",
    "sign": "(tl.where({0} > 0.0, 1.0, 0.0) - tl.where({0} < 0.0, 1.0, 0.0))",
    "step": "tl.where({} > 0.0, 1.0, 0.0)",
    "eq": "tl.where({} == {}, 1.0, 0.0)",
    **{row.name: f"{{}}.to({row.tl}).to({row.wide.tl})" for row in DTYPES if row.is_widened},
}


class Value(NamedTuple):
    """A name or a short expression: the tile axes that it has, and the depth of the loop from which on it is known."""

    text: str
    axes: Axes = ()
    depth: int = 0


@dataclass(slots=True)
class Scope:
    """The lines of a block, and the values that they name; what a branch needs first is written in the branch."""

    lines: list[str] = field(default_factory=list[str])
    values: dict[Expr, Value] = field(default_factory=dict["Expr", Value])
    texts: dict[str, Value] = field(default_factory=dict[str, Value])
    branch: bool = False


def lanes_of(loop: Loop) -> int:
    """Return the number of lanes of a tile loop, whose end is its beginning plus a number."""
    end = loop.end
    if isinstance(end, Const):
        return int(end.value)
    assert isinstance(end, Op)
    lanes = end.args[1]
    assert isinstance(lanes, Const)
    return int(lanes.value)


class Values:
    """The values of a kernel, by scope."""

    def __init__(self, wide: bool, doubles: bool) -> None:
        self.doubles = doubles
        self.scopes = [Scope()]
        self.tiles: dict[str, Loop] = {}
        self.indices: dict[str, Value] = {}
        # Where the index of a loop is inside of it, for loops whose lanes may run past the end.
        self.inside: dict[Index, Expr] = {}
        self.totals: dict[Buffer, Axes] = {}
        self.accessed: set[Buffer] = set()
        self.dots: set[Buffer] = set()
        self.sizes: dict[str, None] = {}
        self.count = 0
        self.tag = ""
        self.integer = "int64" if wide else "int32"

    # Expressions.

    def value(self, expr: Expr) -> Value:
        for scope in self.scopes:
            if expr in scope.values:
                return scope.values[expr]
        made = self.compute(expr)
        self.scopes[self.place(made.depth)].values[expr] = made
        return made

    def place(self, depth: int) -> int:
        """Return the scope in which to define a value of this depth: not outside of a branch."""
        for number in range(len(self.scopes) - 1, depth, -1):
            if self.scopes[number].branch:
                return number
        return depth

    def compute(self, expr: Expr) -> Value:
        if isinstance(expr, Const):
            # A condition has to be a tensor, where it is the mask of a single value; Triton takes a number that has a
            # name, or is selected, for one of float32.
            typed = expr.dtype == "bool" or (expr.dtype == "float64" and self.doubles)
            return Value(f"tl.full((), {expr.value}, {dtype_of(expr.dtype).tl})" if typed else repr(expr.value))
        if isinstance(expr, Size):
            self.sizes[expr.name] = None
            # Names of loops and tensors are lower-case.
            return Value(expr.name.upper())
        if isinstance(expr, Index):
            return self.indices[expr.name]
        if isinstance(expr, Load):
            if not expr.buffer.local:
                return self.load(expr)
            # It changes from one statement to the next.
            return Value(self.name_of(expr.buffer), self.totals[expr.buffer], len(self.scopes) - 1)
        if isinstance(expr, Cast):
            return self.cast(expr)
        assert isinstance(expr, Op), expr
        if expr.name == "and":
            return self.all_of(expr.args)
        args = [self.value(arg) for arg in expr.args]
        if expr.name == "high_bits" and not args[0].text.isidentifier():
            args = [self.named(args[0].text, "v", args[0].axes, args[0].depth)]
        axes = self.joined(*args)
        texts = [self.spread(arg, axes) for arg in args]
        if expr.name == "select" and any(isinstance(n, Load) and n.buffer in self.dots for n in walk(expr.args[1])):
            # ptxas 12.8 (sm_90) takes a matrix product that begins with 0 and is selected against a literal 0 for 0,
            # and drops it. The grid has one axis, so this is a 0 that no compiler knows.
            texts[2] = "tl.program_id(2).to(tl.float32)"
        text = _TEXT[expr.name].format(*texts)
        depth = max(arg.depth for arg in args)
        plain = not axes and all(arg.text.isidentifier() or arg.text.isdigit() for arg in args)
        return Value(text, (), depth) if plain else self.named(text, "v", axes, depth)

    def cast(self, expr: Cast) -> Value:
        inner = expr.value
        if isinstance(inner, Load) and inner.buffer.dtype.startswith("int") and not inner.buffer.local:
            return self.load(inner, expr.dtype)
        value = self.value(inner)
        return self.named(f"{self.bracketed(value.text)}.to({dtype_of(expr.dtype).tl})", "w", value.axes, value.depth)

    def load(self, expr: Load, integer: str | None = None) -> Value:
        """Print a read; entries of index tensors in the type of addresses, or in the wider one that `integer` names."""
        offset, literal = self.address(expr.buffer, expr.subscripts)
        # Along an axis of stride 0 nothing is read again.
        varying = [s for s, step in zip(expr.subscripts, _strides(expr.buffer), strict=True) if step is not Const(0)]
        mask = self.mask([*conjuncts(expr.where), *self.past_ends(varying)])
        axes = self.joined(offset, *([mask] if mask else []))
        depth = max(offset.depth, mask.depth if mask else 0)
        pointer = self.pointer(expr.buffer, offset, literal, axes)
        integers = expr.buffer.dtype.startswith("int")
        guard = "" if mask is None else f", mask={self.full(mask, axes)}, other={expr.fill if integers else '0.0'}"
        text = f"tl.load({pointer}{guard})"
        if integers:
            text += f".to(tl.{integer or self.integer})"
        return self.named(text, expr.buffer.name, axes, depth)

    def name_of(self, buffer: Buffer) -> str:
        """Return an accumulator's name, which differs between parts: branches would have to agree on its type."""
        return f"{buffer.name}{self.tag}"

    # Addresses.

    def address(self, buffer: Buffer, subscripts: Sequence[Expr]) -> tuple[Value, int]:
        """Return the offset of a cell, and its constant part, which costs nothing in an address."""
        self.accessed.add(buffer)
        literal = 0
        groups: dict[Axes, list[Value]] = {}
        for subscript, stride in zip(subscripts, _strides(buffer), strict=True):
            for term in _terms(subscript):
                part = multiply(term, stride)
                if isinstance(part, Const):
                    literal += int(part.value)
                    continue
                value = self.value(part)
                groups.setdefault(value.axes, []).append(value)
        sums = [
            Value(" + ".join(v.text for v in group), axes, max(v.depth for v in group))
            for axes, group in groups.items()
        ]
        if len(sums) > 1:
            sums = [self.shared(v.text, "a", v.axes, v.depth) if "+" in v.text else v for v in sums]
        axes = self.joined(*sums)
        text = " + ".join(self.spread(v, axes) for v in sums) or "0"
        return Value(text, axes, max((v.depth for v in sums), default=0)), literal

    def pointer(self, buffer: Buffer, offset: Value, literal: int, axes: Axes) -> str:
        """Print the address, over all axes of what is read or written there."""
        text = offset.text
        if offset.axes != axes:
            text = f"(tl.zeros({self.shape(axes)}, tl.{self.integer}) + {self.spread(offset, axes)})"
        if literal and offset.text != "0":
            where = self.shared(f"{buffer.name} + {self.bracketed(text)}", "at", axes, offset.depth).text
            return f"{where} + {literal}"
        return f"{buffer.name} + {literal if not axes and offset.text == '0' else self.bracketed(text)}"

    # Conditions.

    def past_ends(self, exprs: Iterable[Expr]) -> list[Expr]:
        """Return the conditions under which the indices of these are inside of their loops."""
        used = dict.fromkeys(node for expr in exprs for node in walk(expr) if isinstance(node, Index))
        found = [(index, self.inside[index]) for index in used if index in self.inside]
        # Where one loop ends at a place that another one's index reads, the other is inside of its own.
        implied = {node for index, c in found for node in walk(c) if isinstance(node, Index) and node is not index}
        return [condition for index, condition in found if index not in implied]

    def mask(self, conditions: Sequence[Expr]) -> Value | None:
        """All of these; `None` where there are none."""
        return self.all_of(tuple(dict.fromkeys(conditions))) if conditions else None

    def all_of(self, conditions: Sequence[Expr]) -> Value:
        values = list(dict.fromkeys(self.value(c) for condition in conditions for c in conjuncts(condition)))
        if len(values) == 1:
            return values[0]
        axes = self.joined(*values)
        text = " & ".join(self.spread(self.wrapped(v), axes) for v in values)
        if axes and any(not v.axes for v in values):
            # A lone flag that meets a block becomes a block of integers under Triton's interpreter.
            text = f"({text}) != 0"
        return self.named(text, "ok", axes, max(v.depth for v in values))

    def full(self, mask: Value, axes: Axes) -> str:
        """Print a mask over all axes of a pointer."""
        if axes and not mask.axes:
            return f"((tl.zeros({self.shape(axes)}, tl.int32) == 0) & {mask.text}) != 0"
        return self.spread(mask, axes)

    # Text.

    def order(self, axis: str) -> int:
        return self.tiles[axis].axis

    def joined(self, *values: Value) -> Axes:
        """Return the axes that any of these have, in their order in a tile."""
        return tuple(sorted({axis for value in values for axis in value.axes}, key=self.order))

    def shape(self, axes: Axes) -> str:
        return f"({', '.join(str(lanes_of(self.tiles[axis])) for axis in axes)}{',' if len(axes) == 1 else ''})"

    def spread(self, value: Value, axes: Axes) -> str:
        """Print a value with an axis of length 1 for each that it lacks."""
        if not value.axes or value.axes == axes:
            return self.bracketed(value.text) if " + " in value.text and value.axes else value.text
        return f"{self.bracketed(value.text)}[{', '.join(':' if axis in value.axes else 'None' for axis in axes)}]"

    def whole(self, value: Value, axes: Axes) -> str:
        """Broadcast a value to all of these axes."""
        text = self.spread(value, axes)
        return text if value.axes == axes or not axes else f"tl.broadcast_to({text}, {self.shape(axes)})"

    def wrapped(self, value: Value) -> Value:
        return Value(self.bracketed(value.text), value.axes, value.depth)

    @staticmethod
    def bracketed(text: str) -> str:
        return text if text.isidentifier() or text.isdigit() else f"({text})"

    def shared(self, text: str, hint: str, axes: Axes, depth: int) -> Value:
        """Name a value unless it has a name; nothing of it may change."""
        texts = self.scopes[self.place(depth)].texts
        if text not in texts:
            texts[text] = self.named(text, hint, axes, depth)
        return texts[text]

    def named(self, text: str, hint: str, axes: Axes, depth: int) -> Value:
        """Name a value, where its parts are known."""
        self.count += 1
        name = f"{hint}_{self.count}"
        self.scopes[self.place(depth)].lines.append(f"{name} = {text}")
        return Value(name, axes, depth)


@lru_cache(maxsize=256)
def _strides(buffer: Buffer) -> tuple[Expr, ...]:
    """Return the strides of a buffer."""
    if buffer.strides is not None:
        return buffer.strides
    found: list[Expr] = []
    step: Expr = Const(1)
    for extent in reversed(buffer.shape):
        found.insert(0, step)
        step = multiply(step, extent)
    return tuple(found)


def _terms(subscript: Expr) -> list[Expr]:
    """Return the terms of a sum."""
    if isinstance(subscript, Op) and subscript.name == "add":
        return [part for arg in subscript.args for part in _terms(arg)]
    return [subscript]

"""The text of a kernel with several outputs: named quantities, and reads of tensors at addresses made of them.

Every quantity of a kernel varies with some of the tile's axes (m, k, n) and is known from some depth of the loop nest
on. The writer keeps both for each name it defines, writes a definition once, at the shallowest depth where all it needs
is known, and lets products meet by broadcasting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from insum_nn.compiler.forms.form import Form
from insum_nn.compiler.forms.points import OWNER, Read, Sub
from insum_nn.compiler.forms.schedule import Layout, Schedule

__all__ = ["Argument", "KernelText", "Parameters", "Scope", "Strides", "Value", "join_axes", "spread"]

_AXES = "mkn"


@dataclass(frozen=True, slots=True)
class Argument:
    """A kernel's parameter: `kind` and what it belongs to (`tensor` pointer, `stride`, `dim`, `extent`, ...)."""

    kind: str
    name: str = ""
    axis: int = -1


@dataclass(frozen=True, slots=True)
class Strides:
    """How tensors lie in memory, as far as a kernel's text depends on it.

    Attributes:
        contiguous: for each tensor of the layout.
        wide: some offset needs 64 bits.
        split: the owner's rows are divided among programs.
        start: how the starting value is addressed; see `start_steps`.
    """

    contiguous: tuple[bool, ...]
    wide: bool = False
    split: bool = False
    start: tuple[str, ...] | None = None


@dataclass(slots=True)
class Value:
    """A name in the kernel: the axes that it varies with, and the depth from which it is known."""

    text: str
    axes: str
    depth: int


@dataclass(slots=True)
class Scope:
    """One depth of the loop nest: the line that opens it, its statements, and those behind the loops inside it."""

    head: str
    lines: list[str] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)


def join_axes(*axes: str) -> str:
    """The axes that any of these vary with, in their order in a tile."""
    return "".join(a for a in _AXES if any(a in each for each in axes))


def spread(value: Value, axes: str) -> str:
    """The value's text with the axes that it lacks as axes of length 1."""
    if not value.axes or value.axes == axes:
        return value.text
    if len(axes) == 1:
        return value.text
    return f"{value.text}[{', '.join(':' if a in value.axes else 'None' for a in axes)}]"


class Parameters:
    """The parameters of a kernel, in the order in which they were first named."""

    def __init__(self) -> None:
        self.known: dict[Argument, str] = {}

    def __call__(self, kind: str, name: str = "", axis: int = -1) -> str:
        argument = Argument(kind, name, axis)
        if argument not in self.known:
            self.known[argument] = f"{kind}_{len(self.known)}"
        return self.known[argument]


class KernelText:
    """The names, scopes and reads of one kernel's body."""

    def __init__(
        self,
        form: Form,
        schedule: Schedule,
        layout: Layout,
        strides: Strides,
        parameters: Parameters,
    ) -> None:
        self.form = form
        self.schedule = schedule
        self.layout = layout
        self.strides = strides
        self.parameters = parameters
        self.count = 0
        self.scopes = [Scope("")]
        self.memo: dict[str, Value] = {}
        self.indices: dict[str, Value] = {}
        self.masks: dict[str, Value] = {}
        self.loaded: dict[str, Value] = {}
        # What is read of index tensors, and of the order of terms.
        self.entries: list[Value] = []
        self.order: Value | None = None
        self.lanes: dict[str, str] = {}
        # The number of a program's tile along an axis.
        self.tile_of: dict[str, str] = {"m": "0", "n": "0"}
        self.axes = {a: axis for a, axis in zip(_AXES, (layout.m, layout.k, layout.n), strict=True) if axis}
        self.type = "tl.float64" if form.bound.dtype == torch.float64 else "tl.float32"
        self.int = "tl.int64" if strides.wide else "tl.int32"

    def fresh(self, hint: str) -> str:
        self.count += 1
        return f"{hint}{self.count}"

    def define(self, hint: str, text: str, axes: str, depth: int) -> Value:
        """Give an expression a name, at the depth where it is known; the same text gets the same name."""
        key = f"{depth}:{axes}:{text}"
        if key not in self.memo:
            name = self.fresh(hint)
            self.scopes[depth].lines.append(f"{name} = {text}")
            self.memo[key] = Value(name, axes, depth)
        return self.memo[key]

    def literal(self, index: str) -> int | None:
        return self.form.static.get(index)

    def extent(self, index: str) -> str:
        known = self.literal(index)
        return str(known) if known is not None else self.parameters("extent", index)

    def may_lack(self, read: Read) -> bool:
        """Whether an index tensor may say "no entry" there: by -1, or because it is read outside of itself."""
        if self.form.bound.facts_of(read.name).masked is not False or not all(sub.safe for sub in read.subs):
            return True
        return any(self.may_lack(a) for sub in read.subs for _, a in sub.terms if not isinstance(a, str))

    def load(self, read: Read, *, integer: bool = False, wide: bool = False) -> Value:
        """Read a tensor: what lies outside, or has no entry, is 0; of an index tensor -1."""
        key = f"{read}{' wide' if wide else ''}"
        if key in self.loaded:
            return self.loaded[key]
        place = self.form.bound.layout.tensors.index(read.name)
        parts, conditions = self.parts(read.subs, lambda axis: self.stride(place, axis, read), read.name)
        pointer = self.parameters("tensor", read.name)
        literal: int | None = None
        if len(self.form.points) > 1 or self.form.beside:
            # Points differ by literals, which cost nothing if they are added to one pointer.
            literal = sum(int(v.text) for v in parts if v.text.isdigit())
            parts = [v for v in parts if not v.text.isdigit()]
        offset = self.total(parts)
        conditions = conditions + self.lane_masks(read)
        axes = join_axes(offset.axes, *(c.axes for c in conditions))
        depth = max([offset.depth, *(c.depth for c in conditions)])
        mask = self.all_of(conditions, axes)
        other = f", mask={mask}, other={-1 if integer else '0.0'}" if mask else ""
        where = f"{pointer} + {self.reach(offset, axes)}"
        if literal is not None:
            where = f"{self.define('at', where, axes, depth).text} + {literal}"
        text = f"tl.load({where}{other})"
        if integer:
            text += f".to({'tl.int64' if wide else self.int})"
        value = self.define("j" if integer else "v", text, axes, depth)
        if integer:
            self.entries.append(value)
        self.loaded[key] = value
        return value

    def shape(self, axes: str) -> str:
        return "(" + ", ".join(str(self.axes[a].lanes) for a in axes) + ("," if len(axes) == 1 else "") + ")"

    def all_of(self, conditions: Sequence[Value], axes: str) -> str:
        texts = list(dict.fromkeys(f"({spread(c, axes)})" for c in conditions))
        if axes and any(not c.axes for c in conditions):
            # A lone flag that meets a block becomes a block of integers under Triton's interpreter.
            whole = [] if any(c.axes for c in conditions) else [f"(tl.zeros({self.shape(axes)}, tl.int32) == 0)"]
            return f"({' & '.join([*texts, *whole])}) != 0"
        return " & ".join(texts)

    def lane_masks(self, read: Read) -> list[Value]:
        """Where the lanes of a read's indices are inside their extents."""
        found: list[Value] = []
        for index in dict.fromkeys(read.indices()):
            if index == OWNER:
                # A row without terms may lie outside of what is read there.
                low, high = self.indices["@begin"], self.indices["@end"]
                found.append(self.define("any", f"{low.text} < {high.text}", low.axes, low.depth))
            if index in self.form.entries and "e" in self.masks:
                found.append(self.masks["e"])
                continue
            axes = self.indices[index].axes
            found += [self.masks[a] for a in axes if a in self.masks]
        return found

    def address(self, subs: Sequence[Sub], stride: Callable[[int], str], name: str) -> tuple[Value, list[Value]]:
        """The offset of a cell, and the conditions under which there is one."""
        parts, conditions = self.parts(subs, stride, name)
        return self.total(parts), conditions

    def parts(self, subs: Sequence[Sub], stride: Callable[[int], str], name: str) -> tuple[list[Value], list[Value]]:
        """The offset of a cell as a sum of values, and the conditions under which there is one."""
        parts: list[Value] = []
        conditions: list[Value] = []
        for axis, sub in enumerate(subs):
            position, needs = self.position(sub, name, axis)
            conditions += needs
            step = stride(axis)
            for v in position:
                known = v.text.isdigit() and step.isdigit()
                text = str(int(v.text) * int(step)) if known else v.text if step == "1" else f"({v.text}) * {step}"
                parts.append(Value(text, v.axes, v.depth))
        return parts, conditions

    def total(self, parts: Sequence[Value]) -> Value:
        """A sum, with what varies with the same axes added first."""
        sums: dict[str, list[Value]] = {}
        for part in parts:
            if part.text != "0":
                sums.setdefault(part.axes, []).append(part)
        values = [
            Value(" + ".join(v.text for v in group), axes, max(v.depth for v in group)) for axes, group in sums.items()
        ]
        if not values:
            return Value("0", "", 0)
        axes = join_axes(*(v.axes for v in values))
        if len(values) > 1:
            values = [v if v.text.isdigit() else self.define("a", v.text, v.axes, v.depth) for v in values]
        depth = max(v.depth for v in values)
        text = values[0].text if len(values) == 1 else " + ".join(spread(v, axes) for v in values)
        return Value(text, axes, depth)

    def position(self, sub: Sub, name: str, axis: int) -> tuple[list[Value], list[Value]]:
        """A subscript as a sum of values, and its conditions."""
        conditions: list[Value] = []
        values: list[Value] = []
        for coefficient, atom in sub.terms:
            if isinstance(atom, str):
                value = self.indices[atom]
            else:
                # Entries that no axis bounds are added up without overflow.
                value = self.load(atom, integer=True, wide=not sub.safe)
                if self.may_lack(atom):
                    conditions.append(self.define("has", f"{value.text} >= 0", value.axes, value.depth))
            text = value.text if coefficient == 1 else f"{value.text} * {coefficient}"
            values.append(Value(text, value.axes, value.depth))
        if sub.offset or not values:
            values.append(Value(str(sub.offset), "", 0))
        if not sub.safe:
            total = self.total(values)
            total = self.define("s", f"{total.text} + tl.zeros((), tl.int32)", total.axes, total.depth)
            limit = self.parameters("dim", name, axis)
            text = f"({total.text} >= 0) & ({total.text} < {limit})"
            conditions.append(self.define("inside", text, total.axes, total.depth))
            values = [total]
        return values, conditions

    def stride(self, place: int, axis: int, read: Read) -> str:
        """The step along an axis: a literal where the model decides it, else a parameter."""
        if self.strides.contiguous[place]:
            known = self.known_stride(read.subs, axis)
            if known is not None:
                return str(known)
        return self.parameters("stride", read.name, axis)

    def known_stride(self, subs: Sequence[Sub], axis: int) -> int | None:
        product = 1
        for sub in subs[axis + 1 :]:
            extent = self.literal(sub.plain) if sub.plain else None
            if extent is None:
                return None
            product *= extent
        return product

    def reach(self, offset: Value, axes: str) -> str:
        """An offset over all axes of what is stored there."""
        text = spread(Value(f"({offset.text})", offset.axes, 0), axes)
        if offset.axes != axes:
            text = f"(tl.zeros({self.shape(axes)}, {self.int}) + {text})"
        return text

    def when(self, conditions: Sequence[Value], axes: str) -> str:
        mask = self.all_of(conditions, axes)
        return f", mask={mask}" if mask else ""

"""`KernelForm` + `Schedule` -> the text of a Triton kernel.

Every quantity of a kernel varies with some of the tile's axes (m, k, n) and is known from some depth of the loop nest
on. The writer keeps both for each name it defines, writes a definition once, at the shallowest depth where all it needs
is known, and lets products meet by broadcasting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from insum_nn.compiler.kernel_form import ENTRY, OWNER, Form, Point, Read, Sub
from insum_nn.compiler.kernel_schedule import Layout, Precision, Schedule, place_indices

__all__ = ["Argument", "Source", "Strides", "write_kernel"]

_TYPES = {
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}
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
    """

    contiguous: tuple[bool, ...]
    wide: bool = False
    split: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel's text, its parameters in order, and what each step of its grid counts.

    Attributes:
        grid: (index or "", values per program) for each factor of the number of programs, the fastest first.
        cells: number of different combinations of the output's written-out subscripts.
    """

    text: str
    arguments: tuple[Argument, ...]
    grid: tuple[tuple[str, int], ...]
    cells: int
    schedule: Schedule
    accumulator: torch.dtype


@dataclass(slots=True)
class _Value:
    """A name in the kernel: the axes that it varies with, and the depth from which it is known."""

    text: str
    axes: str
    depth: int


@dataclass(slots=True)
class _Scope:
    """One depth of the loop nest: the line that opens it, and its statements."""

    head: str
    lines: list[str] = field(default_factory=list)


def _join(*axes: str) -> str:
    return "".join(a for a in _AXES if any(a in each for each in axes))


def _spread(value: _Value, axes: str) -> str:
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


class _Writer:
    """Writes the body of a kernel for some of the points."""

    def __init__(
        self,
        form: Form,
        schedule: Schedule,
        layout: Layout,
        strides: Strides,
        parameters: Parameters,
        precision: Precision,
        tag: str,
    ) -> None:
        self.form = form
        self.schedule = schedule
        self.layout = layout
        self.strides = strides
        self.parameters = parameters
        self.precision = precision
        self.tag = tag
        self.count = 0
        self.scopes = [_Scope("")]
        self.memo: dict[str, _Value] = {}
        self.indices: dict[str, _Value] = {}
        self.masks: dict[str, _Value] = {}
        self.loaded: dict[str, _Value] = {}
        self.lanes: dict[str, str] = {}
        # The number of a program's tile along an axis.
        self.tile_of: dict[str, str] = {"m": "0", "n": "0"}
        self.axes = {a: axis for a, axis in zip(_AXES, (layout.m, layout.k, layout.n), strict=True) if axis}
        self.type = "tl.float64" if form.bound.dtype == torch.float64 else "tl.float32"
        self.int = "tl.int64" if strides.wide else "tl.int32"
        self.product = form.product if schedule.dot else None

    # Building blocks.

    def fresh(self, hint: str) -> str:
        self.count += 1
        return f"{hint}{self.count}{self.tag}"

    def define(self, hint: str, text: str, axes: str, depth: int) -> _Value:
        """Give an expression a name, at the depth where it is known; the same text gets the same name."""
        key = f"{depth}:{axes}:{text}"
        if key not in self.memo:
            name = self.fresh(hint)
            self.scopes[depth].lines.append(f"{name} = {text}")
            self.memo[key] = _Value(name, axes, depth)
        return self.memo[key]

    def literal(self, index: str) -> int | None:
        return self.form.static.get(index)

    def extent(self, index: str) -> str:
        known = self.literal(index)
        return str(known) if known is not None else self.parameters("extent", index)

    def write(self, points: Sequence[Point], tiles: Sequence[tuple[str, int]], pid: str) -> list[str]:
        """All lines of the kernel's body for these points."""
        self.programs(tiles, pid)
        tiled = {index for index, _ in tiles}
        for axis in "nm":
            if axis in self.axes and self.axes[axis].first not in tiled:
                self.lane_indices(axis, "0", 0)
        results = self.emit(points)
        tail = [line for name, order, target in results.values() for line in self.store(name, order, target)]
        lines: list[str] = []
        for depth, scope in enumerate(self.scopes):
            if scope.head:
                lines.append("    " * (depth - 1) + scope.head)
            lines += ["    " * depth + line for line in scope.lines]
        return lines + tail

    # Indices: of programs, lanes and loops.

    def programs(self, tiles: Sequence[tuple[str, int]], pid: str) -> None:
        """Define what a program's number says: tile positions, single indices, the split."""
        rest = pid
        for place, (index, block) in enumerate(tiles):
            if not index:
                continue
            last = place == len(tiles) - 1
            if last:
                position = rest
            else:
                count = self.steps(index, block)
                position = self.define("p", f"{rest} % {count}", "", 0).text
                rest = self.define("r", f"{rest} // {count}", "", 0).text
            if index == "@split":
                self.indices["@split"] = _Value(position, "", 0)
                continue
            axis = next((a for a, each in self.axes.items() if each.first == index), None)
            if axis is not None:
                self.tile_of[axis] = position
                self.lane_indices(axis, f"{position} * {block}", 0)
            elif index == OWNER:
                self.own(self.define("o", f"({position}).to({self.int})", "", 0))
            else:
                self.indices[index] = self.define("i", f"({position}).to({self.int})", "", 0)

    def steps(self, index: str, block: int) -> str:
        if index == "@split":
            return str(self.schedule.splits)
        if index == OWNER:
            count = self.parameters("rows")
        else:
            known = self.literal(index)
            if known is not None:
                return str(-(-known // block))
            count = self.parameters("extent", index)
        return count if block == 1 else f"tl.cdiv({count}, {block})"

    def lane_indices(self, axis: str, base: str, depth: int) -> None:
        """Define the indices on a tile's axis, and where they are inside their extents."""
        each = self.axes[axis]
        lanes = self.lane(axis)
        inner = 1
        for extent in each.inner:
            inner *= extent
        position = lanes if inner == 1 else f"{lanes} // {inner}"
        masks: list[str] = []
        if each.lanes != each.block * inner:
            masks.append(f"({lanes} < {each.block * inner})")
        if each.first == ENTRY:
            value = self.define("e", f"{base} + {position}", axis, depth)
            masks.append(f"({value.text} < {self.indices['@end'].text})")
            self.entry(value)
        elif each.first == OWNER:
            value = self.define("o", f"({base} + {position}).to({self.int})", axis, depth)
            masks.append(f"({value.text} < {self.parameters('rows')})")
        else:
            value = self.define("i", f"({base} + {position}).to({self.int})", axis, depth)
            self.indices[each.first] = value
            known = self.literal(each.first)
            if known is None or known % each.block:
                masks.append(f"({value.text} < {self.extent(each.first)})")
        if masks:
            self.masks[axis] = self.define("ok", " & ".join(masks), axis, depth)
        remaining = inner
        for index, extent in zip(each.indices[1:], each.inner, strict=True):
            remaining //= extent
            text = f"{lanes} // {remaining}" if remaining > 1 else lanes
            first = index == each.indices[1]
            # Lanes past the last value of the first index would run past the second one's extent.
            whole = first and each.block == 1 and each.lanes == inner
            text = text if whole else f"({text}) % {extent}"
            self.indices[index] = self.define("i", f"({text}).to({self.int})", axis, 0)
        if each.first == OWNER:
            self.own(value)

    def lane(self, axis: str) -> str:
        if axis not in self.lanes:
            self.lanes[axis] = self.define("lane", f"tl.arange(0, {self.axes[axis].lanes})", axis, 0).text
        return self.lanes[axis]

    def own(self, row: _Value) -> None:
        """Define the rows that a program owns, and the range of their terms."""
        mask = self.masks.get("m") if "m" in row.axes else None
        safe = f", mask={mask.text}, other=0" if mask else ""
        begin = self.parameters("begin")
        if self.strides.split:
            end = self.parameters("end")
            low = self.define("low", f"tl.load({begin} + {row.text}{safe})", row.axes, 0)
            high = self.define("high", f"tl.load({end} + {row.text}{safe})", row.axes, 0)
            target = self.define(
                "row", f"tl.load({self.parameters('target')} + {row.text}{safe}).to({self.int})", row.axes, 0
            )
            self.indices["@target"] = target
            # Rows that are divided are read, if at all, under their own number.
            self.indices[OWNER] = self.define(
                "own", f"tl.load({self.parameters('owner')} + {row.text}{safe}).to({self.int})", row.axes, 0
            )
        else:
            low = self.define("low", f"tl.load({begin} + {row.text}{safe})", row.axes, 0)
            high = self.define("high", f"tl.load({begin} + 1 + {row.text}{safe})", row.axes, 0)
            self.indices[OWNER] = row
        self.indices["@begin"], self.indices["@end"] = low, high

    def entry(self, value: _Value) -> None:
        """Define the indices of a term from its number."""
        form = self.form
        if form.permuted:
            inside = f"{value.text} < {_spread(self.indices['@end'], value.axes)}"
            mask = f", mask={inside}, other=0" if value.axes else ""
            value = self.define(
                "t", f"tl.load({self.parameters('order')} + {value.text}{mask})", value.axes, value.depth
            )
        rest = value
        names = form.entries
        for place in range(len(names) - 1, -1, -1):
            if place == 0:
                text = rest.text
            else:
                text = f"{rest.text} % {self.extent(names[place])}"
            self.indices[names[place]] = self.define("i", f"({text}).to({self.int})", value.axes, value.depth)
            if place:
                rest = self.define("q", f"{rest.text} // {self.extent(names[place])}", value.axes, value.depth)

    # Loops.

    def open_loops(self) -> None:
        """Open every loop over what is summed, outermost first, and the lanes along it last."""
        split = self.schedule.splits > 1
        for index in self.layout.loops:
            depth = len(self.scopes)
            if index == ENTRY:
                self.open_terms(1)
                continue
            gaps = None if split else self.gaps(index)
            if gaps is not None:
                self.open_steps(index, gaps, depth)
                continue
            name = self.fresh("l")
            if split:
                head = self.split_range(name, index, 1)
                split = False
            else:
                head = f"for {name} in range({self.extent(index)}):"
            self.scopes.append(_Scope(head))
            self.indices[index] = self.define("i", self.cast(name), "", depth)
        each = self.axes.get("k")
        if each is None:
            return
        if each.first == ENTRY:
            self.open_terms(each.block)
            return
        known = self.literal(each.first)
        if known is not None and known <= each.block and not split:
            self.lane_indices("k", "0", 0)
            return
        name = self.fresh("l")
        depth = len(self.scopes)
        if split:
            head = self.split_range(name, each.first, each.block)
        else:
            head = f"for {name} in range(0, {self.extent(each.first)}, {each.block}):"
        self.scopes.append(_Scope(head))
        self.lane_indices("k", name, depth)

    def cast(self, name: str) -> str:
        # A loop's variable is a 32-bit integer; literals have no type to cast.
        return f"{name} + tl.zeros((), tl.int64)" if self.strides.wide else f"{name} + 0"

    def split_range(self, name: str, index: str, block: int) -> str:
        """A loop over this program's share of a long sum."""
        extent = self.extent(index)
        steps = f"tl.cdiv({extent}, {block})"
        share = self.define("share", f"tl.cdiv({steps}, {self.schedule.splits}) * {block}", "", 0).text
        low = self.define("low", f"{self.indices['@split'].text} * {share}", "", 0).text
        high = self.define("high", f"tl.minimum({low} + {share}, {extent})", "", 0).text
        return f"for {name} in range({low}, {high}, {block}):"

    def open_terms(self, block: int) -> None:
        """The loop over the terms of owned rows."""
        low, high = self.indices["@begin"], self.indices["@end"]
        name = self.fresh("l")
        depth = len(self.scopes)
        lanes = "k" in self.axes and self.axes["k"].first == ENTRY
        if not low.axes:
            self.scopes.append(_Scope(f"for {name} in range({low.text}, {high.text}, {block}):"))
            if lanes:
                self.lane_indices("k", name, depth)
            else:
                self.entry(self.define("e", f"{name} + 0", "", depth))
            return
        # Several rows at a time: as many steps as the longest of them takes.
        longest = self.define("most", f"tl.max({high.text} - {low.text}, 0)", "", 0)
        self.scopes.append(_Scope(f"for {name} in range(0, {longest.text}, {block}):"))
        if lanes:
            each = self.axes["k"]
            inner = 1
            for extent in each.inner:
                inner *= extent
            lane = self.lane("k") if inner == 1 else f"({self.lane('k')} // {inner})"
            text = f"({low.text} + {name})[:, None] + {lane}[None, :]"
            value = self.define("e", text, "mk", depth)
            conditions = [f"({value.text} < {high.text}[:, None])"]
            if each.lanes != each.block * inner:
                conditions.append(f"({self.lane('k')} < {each.block * inner})[None, :]")
            remaining = inner
            for index, extent in zip(each.indices[1:], each.inner, strict=True):
                remaining //= extent
                position = f"({self.lane('k')} // {remaining}) % {extent}"
                self.indices[index] = self.define("i", f"({position}).to({self.int})", "k", 0)
        else:
            value = self.define("e", f"{low.text} + {name}", "m", depth)
            conditions = [f"({value.text} < {high.text})"]
        self.masks["e"] = self.define("ok", " & ".join(conditions), value.axes, depth)
        self.entry(value)

    def gaps(self, index: str) -> Read | None:
        """The index tensor `T[index, row]` over a tile's rows that may lack entries: its steps can be listed."""
        m = self.axes.get("m")
        if self.product is None or m is None or len(m.indices) > 1 or self.form.owner is not None:
            return None
        for read in self.form.points[0].reads:
            for sub in read.subs:
                for _, atom in sub.terms:
                    if not isinstance(atom, str) and [s.plain for s in atom.subs] == [index, m.first]:
                        facts = self.form.bound.facts_of(atom.name)
                        return atom if facts.masked is not False and m.block == m.lanes else None
        return None

    def open_steps(self, index: str, gaps: Read, depth: int) -> None:
        """A loop over the steps for which some row of the tile has an entry; the others add nothing."""
        name = self.fresh("l")
        steps = self.parameters("steps", gaps.name)
        width = f"({self.extent(index)} + 1)"
        place = self.define("t", f"{steps} + {self.tile_of['m']} * {width}", "", 0).text
        count = self.define("c", f"tl.load({place})", "", 0).text
        self.scopes.append(_Scope(f"for {name} in range({count}):"))
        self.indices[index] = self.define("i", f"tl.load({place} + 1 + {name}).to({self.int})", "", depth)

    def may_lack(self, read: Read) -> bool:
        """Whether an index tensor may say "no entry" there: by -1, or because it is read outside of itself."""
        if self.form.bound.facts_of(read.name).masked is not False or not all(sub.safe for sub in read.subs):
            return True
        return any(self.may_lack(a) for sub in read.subs for _, a in sub.terms if not isinstance(a, str))

    # Reads.

    def load(self, read: Read, *, integer: bool = False) -> _Value:
        """Read a tensor: what lies outside, or has no entry, is 0; of an index tensor -1."""
        key = str(read)
        if key in self.loaded:
            return self.loaded[key]
        place = self.form.bound.layout.tensors.index(read.name)
        offset, conditions = self.address(read.subs, lambda axis: self.stride(place, axis, read), read.name)
        pointer = self.parameters("tensor", read.name)
        conditions = conditions + self.lane_masks(read)
        axes = _join(offset.axes, *(c.axes for c in conditions))
        depth = max([offset.depth, *(c.depth for c in conditions)])
        mask = self.all_of(conditions, axes)
        other = f", mask={mask}, other={-1 if integer else '0.0'}" if mask else ""
        text = f"tl.load({pointer} + {self.reach(offset, axes)}{other})"
        if integer:
            text += f".to({self.int})"
        value = self.define("j" if integer else "v", text, axes, depth)
        self.loaded[key] = value
        return value

    def shape(self, axes: str) -> str:
        return "(" + ", ".join(str(self.axes[a].lanes) for a in axes) + ("," if len(axes) == 1 else "") + ")"

    def all_of(self, conditions: Sequence[_Value], axes: str) -> str:
        texts = list(dict.fromkeys(f"({_spread(c, axes)})" for c in conditions))
        if axes and any(not c.axes for c in conditions):
            # A lone flag that meets a block becomes a block of integers under Triton's interpreter.
            whole = [] if any(c.axes for c in conditions) else [f"(tl.zeros({self.shape(axes)}, tl.int32) == 0)"]
            return f"({' & '.join([*texts, *whole])}) != 0"
        return " & ".join(texts)

    def lane_masks(self, read: Read) -> list[_Value]:
        """Where the lanes of a read's indices are inside their extents."""
        found: list[_Value] = []
        for index in dict.fromkeys(read.indices()):
            if index in self.form.entries and "e" in self.masks:
                found.append(self.masks["e"])
                continue
            axes = self.indices[index].axes
            found += [self.masks[a] for a in axes if a in self.masks]
        return found

    def address(self, subs: Sequence[Sub], stride: Callable[[int], str], name: str) -> tuple[_Value, list[_Value]]:
        """The offset of a cell, and the conditions under which there is one."""
        parts: list[_Value] = []
        conditions: list[_Value] = []
        for axis, sub in enumerate(subs):
            position, needs = self.position(sub, name, axis)
            conditions += needs
            step = stride(axis)
            parts += [_Value(v.text if step == "1" else f"({v.text}) * {step}", v.axes, v.depth) for v in position]
        return self.total(parts), conditions

    def total(self, parts: Sequence[_Value]) -> _Value:
        """A sum, with what varies with the same axes added first."""
        sums: dict[str, list[_Value]] = {}
        for part in parts:
            if part.text != "0":
                sums.setdefault(part.axes, []).append(part)
        values = [
            _Value(" + ".join(v.text for v in group), axes, max(v.depth for v in group)) for axes, group in sums.items()
        ]
        if not values:
            return _Value("0", "", 0)
        axes = _join(*(v.axes for v in values))
        if len(values) > 1:
            values = [v if v.text.isdigit() else self.define("a", v.text, v.axes, v.depth) for v in values]
        depth = max(v.depth for v in values)
        text = values[0].text if len(values) == 1 else " + ".join(_spread(v, axes) for v in values)
        return _Value(text, axes, depth)

    def position(self, sub: Sub, name: str, axis: int) -> tuple[list[_Value], list[_Value]]:
        """A subscript as a sum of values, and its conditions."""
        conditions: list[_Value] = []
        values: list[_Value] = []
        for coefficient, atom in sub.terms:
            if isinstance(atom, str):
                value = self.indices[atom]
            else:
                value = self.load(atom, integer=True)
                if self.may_lack(atom):
                    conditions.append(self.define("has", f"{value.text} >= 0", value.axes, value.depth))
            text = value.text if coefficient == 1 else f"{value.text} * {coefficient}"
            values.append(_Value(text, value.axes, value.depth))
        if sub.offset or not values:
            values.append(_Value(str(sub.offset), "", 0))
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

    # Products.

    def emit(self, points: Sequence[Point]) -> dict[str, tuple[str, str, Read]]:
        """Write the sums of all points.

        Returns:
            For each output cell: its accumulator, the accumulator's axes, and the cell.
        """
        self.open_loops()
        by_target: dict[str, list[Point]] = {}
        for point in points:
            by_target.setdefault(str(point.target), []).append(point)
        axes = _join(*(a for a in self.axes if a != "k"))
        results: dict[str, tuple[str, str, Read]] = {}
        for key, group in by_target.items():
            name = self.fresh("acc")
            swapped = self.product is not None and self.schedule.swap
            order = axes[::-1] if swapped else axes
            shape = "(" + ", ".join(str(self.axes[a].lanes) for a in order) + ("," if len(order) == 1 else "") + ")"
            self.scopes[0].lines.append(f"{name} = tl.zeros({shape if order else '()'}, {self.type})")
            if self.product is None:
                self.sums(name, group, axes)
            results[key] = (name, order, group[0].target)
        if self.product is not None:
            names = [name for name, _, _ in results.values()]
            self.dots(list(zip(names, by_target.values(), strict=True)))
        return results

    def values(self, points: Sequence[Point]) -> list[list[_Value]]:
        return [[self.load(read) for read in point.reads] for point in points]

    def sums(self, name: str, points: Sequence[Point], axes: str) -> None:
        """Add the points' products, summed along the lanes of k, to an accumulator."""
        values = self.values(points)
        terms = [(p.number, tuple(v)) for p, v in zip(points, values, strict=True)]
        total = self.factored(terms)
        masks = [self.masks[a] for a in ("k", "e") if a in self.masks]
        if "k" in self.axes:
            whole = _join(total.axes, "k", *(m.axes for m in masks))
            lengths = self.shape(whole)
            text = f"tl.broadcast_to({_spread(self.named(total), whole)}, {lengths})"
            if masks:
                mask = self.all_of(masks, whole)
                text = f"tl.where(tl.broadcast_to({mask}, {lengths}), {text}, 0.0)"
            summed = _Value(f"tl.sum({text}, {whole.index('k')})", whole.replace("k", ""), 0)
        elif masks:
            whole = _join(total.axes, *(m.axes for m in masks))
            text = f"tl.where({self.all_of(masks, whole)}, {_spread(self.named(total), whole)}, 0.0)"
            summed = _Value(text, whole, 0)
        else:
            summed = total
        if summed.axes and summed.axes != axes:
            summed = self.define("x", summed.text, summed.axes, len(self.scopes) - 1)
        self.scopes[-1].lines.append(f"{name} += {_spread(summed, axes)}")

    def named(self, value: _Value) -> _Value:
        return self.define("x", value.text, value.axes, len(self.scopes) - 1)

    def factored(self, terms: Sequence[tuple[float, tuple[_Value, ...]]]) -> _Value:
        """A sum of products with common factors set before brackets, those that cost most outermost."""
        count = len(terms[0][1])
        order = sorted(
            range(count), key=lambda n: (-max(len(v[n].axes) for _, v in terms), len({v[n].text for _, v in terms}))
        )
        return self.bracket([(number, [v[n] for n in order]) for number, v in terms])

    def bracket(self, terms: Sequence[tuple[float, list[_Value]]]) -> _Value:
        if not terms[0][1]:
            return _Value(repr(float(sum(number for number, _ in terms))), "", 0)
        groups: dict[str, list[tuple[float, list[_Value]]]] = {}
        heads: dict[str, _Value] = {}
        for number, values in terms:
            heads[values[0].text] = values[0]
            groups.setdefault(values[0].text, []).append((number, values[1:]))
        parts: list[_Value] = []
        for key, rest in groups.items():
            head, inner = self.wide(heads[key]), self.bracket(rest)
            if inner.text == "1.0":
                parts.append(head)
                continue
            axes = _join(head.axes, inner.axes)
            bracketed = _Value(f"({inner.text})", inner.axes, inner.depth)
            parts.append(_Value(f"{_spread(head, axes)} * {_spread(bracketed, axes)}", axes, 0))
        axes = _join(*(p.axes for p in parts))
        texts = [
            p.text if p.axes == axes or not p.axes else _spread(_Value(f"({p.text})", p.axes, 0), axes) for p in parts
        ]
        return _Value(" + ".join(texts), axes, 0)

    def wide(self, value: _Value) -> _Value:
        """Half types take part in sums as float32."""
        if not self.form.wide:
            return value
        return self.define("w", f"{value.text}.to(tl.float32)", value.axes, value.depth)

    def dots(self, cells: Sequence[tuple[str, Sequence[Point]]]) -> None:
        """Add the points' matrix products to their accumulators.

        Products with one right side are written together, so that few operands are alive at any time.
        """
        product = self.product
        assert product is not None
        sides: dict[tuple[Read, ...], list[tuple[str, list[Point]]]] = {}
        for name, points in cells:
            by_right: dict[tuple[Read, ...], list[Point]] = {}
            for point in points:
                by_right.setdefault(tuple(point.reads[n] for n in product.right), []).append(point)
            for key, group in by_right.items():
                sides.setdefault(key, []).append((name, group))
        how = f", input_precision='{self.precision}'" if self.form.bound.dtype == torch.float32 else ""
        for reads, groups in sides.items():
            factors = tuple(self.load(read) for read in reads)
            right = self.side(factors[0] if len(factors) == 1 else self.factored([(1.0, factors)]), "kn")
            for name, points in groups:
                terms = [(p.number, tuple(self.load(p.reads[n]) for n in product.left)) for p in points]
                first, second = self.operand(terms, "mk"), right
                if self.schedule.swap:
                    first, second = f"tl.trans({second})", f"tl.trans({first})"
                self.scopes[-1].lines.append(f"{name} = tl.dot({first}, {second}, {name}{how})")

    def operand(self, terms: list[tuple[float, tuple[_Value, ...]]], axes: str) -> str:
        if len(terms) == 1 and terms[0][0] == 1.0 and len(terms[0][1]) == 1:
            return self.side(terms[0][1][0], axes)
        return self.side(self.factored(terms), axes)

    def side(self, value: _Value, axes: str) -> str:
        """One side of a matrix product: over both of its axes, in the storage type."""
        if value.text.isidentifier():
            text = _spread(value, axes)
        else:
            text = f"({_spread(self.named(value), axes)}).to({_TYPES[self.form.bound.dtype]})"
        if value.axes != axes:
            text = f"tl.broadcast_to({text}, {self.shape(axes)})"
        return self.define("d", text, axes, len(self.scopes) - 1).text

    # Writing the output.

    def store(self, name: str, order: str, target: Read) -> list[str]:
        """The lines that write one accumulator, after all loops."""
        form = self.form
        axes = _join(order)
        value = name if order == axes else f"tl.trans({name})"
        subs = list(target.subs)
        if form.owner is not None:
            subs[form.owner_axis] = Sub(((1, OWNER),), 0, True)
        offset, conditions = self.address(subs, lambda axis: self.out_stride(subs, axis), "@out")
        for index in dict.fromkeys(Read("@out", tuple(subs)).indices()):
            conditions += [self.masks[a] for a in self.indices[index].axes if a in self.masks]
        out = self.parameters("out")
        where = self.reach(offset, axes)
        if form.combine == "atomic":
            call = f"tl.atomic_add({out} + {where}, {value}{self.when(conditions, axes)}, sem='relaxed')"
            return [call]
        if self.schedule.splits > 1:
            whole = f"{self.indices['@split'].text} * {self.parameters('split_stride')}"
            return [f"tl.store({out} + {whole} + {where}, {value}{self.when(conditions, axes)})"]
        lines: list[str] = []
        if self.strides.split:
            row = self.indices["@target"]
            kept = self.define("whole", f"{row.text} >= 0", row.axes, 0)
            apart = self.define("apart", f"{row.text} < 0", row.axes, 0)
            slot = self.define("slot", f"-1 - {row.text}", row.axes, 0)
            saved = self.indices[OWNER]
            self.indices[OWNER] = slot
            scratch, _ = self.address(subs, lambda axis: self.parameters("scratch_stride", "", axis), "@out")
            self.indices[OWNER] = saved
            place = f"{self.parameters('scratch')} + {self.reach(scratch, axes)}"
            lines.append(f"tl.store({place}, {value}{self.when([*conditions, apart], axes)})")
            conditions = [*conditions, kept]
        when = self.when(conditions, axes)
        if form.bound.has_start:
            first = f"tl.load({self.parameters('start')} + {where}{when}).to({self.type})"
            value = f"{value} + {first}"
        lines.append(f"tl.store({out} + {where}, {value}{when})")
        return lines

    def reach(self, offset: _Value, axes: str) -> str:
        """An offset over all axes of what is stored there."""
        text = _spread(_Value(f"({offset.text})", offset.axes, 0), axes)
        if offset.axes != axes:
            text = f"(tl.zeros({self.shape(axes)}, {self.int}) + {text})"
        return text

    def when(self, conditions: Sequence[_Value], axes: str) -> str:
        mask = self.all_of(conditions, axes)
        return f", mask={mask}" if mask else ""

    def out_stride(self, subs: Sequence[Sub], axis: int) -> str:
        known = 1
        for subscript in self.form.bound.statement.output.subscripts[axis + 1 :]:
            extent = self.literal(subscript.plain) if subscript.plain else None
            if extent is None:
                return self.parameters("out_stride", "", axis)
            known *= extent
        return str(known)


def _tiles(form: Form, layout: Layout, schedule: Schedule) -> list[tuple[str, int]]:
    """The factors of the number of programs, the fastest first: an index and how many of its values one has."""
    tiles: list[tuple[str, int]] = []
    for axis in (layout.n, layout.m):
        if axis is None:
            continue
        known = form.static.get(axis.first)
        if known is None or known > axis.block:
            tiles.append((axis.first, axis.block))
    tiles += [(index, 1) for index in reversed(layout.grid)]
    if schedule.splits > 1:
        tiles.append(("@split", 1))
    return tiles


def _parts(points: Sequence[Point], groups: int) -> list[list[Point]]:
    """Points divided by the cells they add to, into parts of like work."""
    cells: dict[str, list[Point]] = {}
    for point in points:
        cells.setdefault(str(point.target), []).append(point)
    total = sum(4 + len(group) for group in cells.values())
    parts: list[list[Point]] = [[] for _ in range(min(groups, len(cells)))]
    done = 0
    for group in cells.values():
        parts[min(len(parts) - 1, done * len(parts) // total)] += group
        done += 4 + len(group)
    return [part for part in parts if part]


def write_kernel(form: Form, schedule: Schedule, strides: Strides, precision: Precision) -> Source:
    """The kernel of a form under a schedule."""
    layout = place_indices(form, schedule)
    tiles = _tiles(form, layout, schedule)
    parameters = Parameters()
    parts = _parts(form.points, schedule.groups)
    body: list[str] = ["pid = tl.program_id(0)"]
    pid = "pid"
    if len(parts) > 1:
        body += [f"part = pid % {len(parts)}", f"rest = pid // {len(parts)}"]
        pid = "rest"
    cells = 0
    for number, part in enumerate(parts):
        writer = _Writer(form, schedule, layout, strides, parameters, precision, f"_{number}" if number else "")
        lines = writer.write(part, tiles, pid)
        cells += len({str(p.target) for p in part})
        if len(parts) > 1:
            body.append(f"{'if' if number == 0 else 'elif'} part == {number}:")
            lines = [f"    {line}" for line in lines]
        body += lines
    arguments = tuple(parameters.known)
    names = ", ".join(parameters.known.values())
    text = "\n".join(
        ["import triton", "import triton.language as tl", "", "", "@triton.jit", f"def kernel({names}):"]
        + [f"    {line}" for line in body]
    )
    grid = (*((("@part", len(parts)),) if len(parts) > 1 else ()), *tiles)
    accumulator = torch.float64 if form.bound.dtype == torch.float64 else torch.float32
    return Source(text + "\n", arguments, grid, cells, replace(schedule, groups=len(parts)), accumulator)

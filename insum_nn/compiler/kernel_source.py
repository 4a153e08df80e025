"""`KernelForm` + `Schedule` -> the text of a Triton kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from insum_nn.compiler.kernel_form import OWNER, Form, Point, Read, Sub
from insum_nn.compiler.kernel_loops import KernelLoops
from insum_nn.compiler.kernel_schedule import Layout, Precision, Schedule, place_indices
from insum_nn.compiler.kernel_text import Argument, Parameters, Strides, Value, join_axes, spread

__all__ = ["Source", "write_kernel"]

_TYPES = {
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel's text, its parameters in order, and what each step of its grid counts.

    Attributes:
        grid: (index or "", values per program) for each factor of the number of programs, the fastest first.
    """

    text: str
    arguments: tuple[Argument, ...]
    grid: tuple[tuple[str, int], ...]
    schedule: Schedule
    accumulator: torch.dtype


class _Writer(KernelLoops):
    """Writes the body of a kernel for some of the points."""

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

    def emit(self, points: Sequence[Point]) -> dict[str, tuple[str, str, Read]]:
        """Write the sums of all points.

        Returns:
            For each output cell: its accumulator, the accumulator's axes, and the cell.
        """
        self.open_loops()
        by_target = _by_target(points)
        axes = join_axes(*(a for a in self.axes if a != "k"))
        results: dict[str, tuple[str, str, Read]] = {}
        for key, group in by_target.items():
            name = self.fresh("acc")
            swapped = self.product is not None and self.schedule.swap
            order = axes[::-1] if swapped else axes
            self.scopes[0].lines.append(f"{name} = tl.zeros({self.shape(order)}, {self.type})")
            if self.product is None:
                self.sums(name, group, axes)
            results[key] = (name, order, group[0].target)
        if self.product is not None:
            names = [name for name, _, _ in results.values()]
            self.dots(list(zip(names, by_target.values(), strict=True)))
        return results

    def sums(self, name: str, points: Sequence[Point], axes: str) -> None:
        """Add the points' products, summed along the lanes of k, to an accumulator."""
        total = self.factored([(p.number, tuple(self.load(read) for read in p.reads)) for p in points])
        masks = [self.masks[a] for a in ("k", "e") if a in self.masks]
        if "k" in self.axes:
            whole = join_axes(total.axes, "k", *(m.axes for m in masks))
            lengths = self.shape(whole)
            text = f"tl.broadcast_to({spread(self.named(total), whole)}, {lengths})"
            if masks:
                mask = self.all_of(masks, whole)
                text = f"tl.where(tl.broadcast_to({mask}, {lengths}), {text}, 0.0)"
            summed = Value(f"tl.sum({text}, {whole.index('k')})", whole.replace("k", ""), 0)
        elif masks:
            whole = join_axes(total.axes, *(m.axes for m in masks))
            text = f"tl.where({self.all_of(masks, whole)}, {spread(self.named(total), whole)}, 0.0)"
            summed = Value(text, whole, 0)
        else:
            summed = total
        if summed.axes and summed.axes != axes:
            summed = self.define("x", summed.text, summed.axes, len(self.scopes) - 1)
        self.scopes[-1].lines.append(f"{name} += {spread(summed, axes)}")

    def named(self, value: Value) -> Value:
        return self.define("x", value.text, value.axes, len(self.scopes) - 1)

    def factored(self, terms: Sequence[tuple[float, tuple[Value, ...]]]) -> Value:
        """A sum of products with common factors set before brackets, those that cost most outermost."""
        count = len(terms[0][1])
        order = sorted(
            range(count), key=lambda n: (-max(len(v[n].axes) for _, v in terms), len({v[n].text for _, v in terms}))
        )
        return self.bracket([(number, [v[n] for n in order]) for number, v in terms])

    def bracket(self, terms: Sequence[tuple[float, list[Value]]]) -> Value:
        if not terms[0][1]:
            return Value(repr(float(sum(number for number, _ in terms))), "", 0)
        groups: dict[str, list[tuple[float, list[Value]]]] = {}
        heads: dict[str, Value] = {}
        for number, values in terms:
            heads[values[0].text] = values[0]
            groups.setdefault(values[0].text, []).append((number, values[1:]))
        parts: list[Value] = []
        for key, rest in groups.items():
            head, inner = self.wide(heads[key]), self.bracket(rest)
            if inner.text == "1.0":
                parts.append(head)
                continue
            axes = join_axes(head.axes, inner.axes)
            bracketed = Value(f"({inner.text})", inner.axes, inner.depth)
            parts.append(Value(f"{spread(head, axes)} * {spread(bracketed, axes)}", axes, 0))
        axes = join_axes(*(p.axes for p in parts))
        texts = [
            p.text if p.axes == axes or not p.axes else spread(Value(f"({p.text})", p.axes, 0), axes) for p in parts
        ]
        return Value(" + ".join(texts), axes, 0)

    def wide(self, value: Value) -> Value:
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

    def operand(self, terms: list[tuple[float, tuple[Value, ...]]], axes: str) -> str:
        if len(terms) == 1 and terms[0][0] == 1.0 and len(terms[0][1]) == 1:
            return self.side(terms[0][1][0], axes)
        return self.side(self.factored(terms), axes)

    def side(self, value: Value, axes: str) -> str:
        """One side of a matrix product: over both of its axes, in the storage type."""
        if value.text.isidentifier():
            text = spread(value, axes)
        else:
            text = f"({spread(self.named(value), axes)}).to({_TYPES[self.form.bound.dtype]})"
        if value.axes != axes:
            text = f"tl.broadcast_to({text}, {self.shape(axes)})"
        return self.define("d", text, axes, len(self.scopes) - 1).text

    def store(self, name: str, order: str, target: Read) -> list[str]:
        """The lines that write one accumulator, after all loops."""
        form = self.form
        axes = join_axes(order)
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
        row: Value | None = None
        if self.strides.split:
            row = self.indices["@target"]
            slot = self.define("slot", f"-1 - {row.text}", row.axes, 0)
            saved = self.indices[OWNER]
            self.indices[OWNER] = slot
            scratch, _ = self.address(subs, self.scratch_stride, "@out")
            self.indices[OWNER] = saved
            place = f"{self.parameters('scratch')} + {self.reach(scratch, axes)}"
            needs = conditions
            if row.axes:
                needs = [*conditions, self.define("apart", f"{row.text} < 0", row.axes, 0)]
                conditions = [*conditions, self.define("whole", f"{row.text} >= 0", row.axes, 0)]
            lines.append(f"tl.store({place}, {value}{self.when(needs, axes)})")
        when = self.when(conditions, axes)
        if form.bound.has_start:
            first = f"tl.load({self.parameters('start')} + {where}{when}).to({self.type})"
            value = f"{value} + {first}"
        lines.append(f"tl.store({out} + {where}, {value}{when})")
        if row is None or row.axes:
            return lines
        # All of the tile goes to one of the two: a branch, as the addresses of both would fill the registers.
        apart, *whole = (f"    {line}" for line in lines)
        return [f"if {row.text} < 0:", apart, "else:", *whole]

    def out_stride(self, subs: Sequence[Sub], axis: int) -> str:
        return self.cells_of(range(axis + 1, len(subs)))

    def scratch_stride(self, axis: int) -> str:
        """The step along an axis of the sums of divided rows, whose slots stand before all other axes."""
        owner = self.form.owner_axis
        rest = range(len(self.form.bound.statement.output.subscripts))
        return self.cells_of([at for at in rest if at != owner and (axis == owner or at > axis)])

    def cells_of(self, axes: Iterable[int]) -> str:
        """Cells of some of the output's axes; what is known of the number tells the compiler how rows are aligned."""
        known = 1
        unknown: list[str] = []
        for axis in axes:
            plain = self.form.bound.statement.output.subscripts[axis].plain
            extent = self.literal(plain) if plain else None
            if extent is None:
                unknown.append(self.parameters("dim", "@out", axis))
            else:
                known *= extent
        if not unknown:
            return str(known)
        return f"({' * '.join([*unknown, str(known)] if known != 1 else unknown)})"


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


def _by_target(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Points by the output cell that they add to."""
    cells: dict[str, list[Point]] = {}
    for point in points:
        cells.setdefault(str(point.target), []).append(point)
    return cells


def _parts(points: Sequence[Point], groups: int) -> list[list[Point]]:
    """Points divided by the cells they add to, into parts of like work."""
    cells = _by_target(points)
    total = sum(4 + len(group) for group in cells.values())
    parts: list[list[Point]] = [[] for _ in range(min(groups, len(cells)))]
    done = 0
    for group in cells.values():
        parts[min(len(parts) - 1, done * len(parts) // total)] += group
        done += 4 + len(group)
    return [part for part in parts if part]


def write_kernel(form: Form, schedule: Schedule, strides: Strides, precision: Precision) -> Source:
    """The kernel of a form under a schedule."""
    if form.owner is not None and schedule.splits > 1:
        # Rows are divided by their owners.
        schedule = replace(schedule, splits=1)
    layout = place_indices(form, schedule)
    tiles = _tiles(form, layout, schedule)
    parameters = Parameters()
    parts = _parts(form.points, schedule.groups)
    body: list[str] = ["pid = tl.program_id(0)"]
    pid = "pid"
    if len(parts) > 1:
        body += [f"part = pid % {len(parts)}", f"rest = pid // {len(parts)}"]
        pid = "rest"
    for number, part in enumerate(parts):
        writer = _Writer(form, schedule, layout, strides, parameters, precision, f"_{number}" if number else "")
        lines = writer.write(part, tiles, pid)
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
    return Source(text + "\n", arguments, grid, replace(schedule, groups=len(parts)), accumulator)

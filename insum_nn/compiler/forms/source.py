"""`KernelForm` + `Schedule` -> the text of a Triton kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from insum_nn.compiler.forms.alike import branches
from insum_nn.compiler.forms.beside import KernelBeside, by_target
from insum_nn.compiler.forms.early import read_early
from insum_nn.compiler.forms.form import Form
from insum_nn.compiler.forms.kernel_epilogue import activated, finishes
from insum_nn.compiler.forms.kernel_misses import Condition, KernelMisses
from insum_nn.compiler.forms.loops import STEPS
from insum_nn.compiler.forms.nest import is_ported, write_nest
from insum_nn.compiler.forms.points import OWNER, Point, Read, Sub
from insum_nn.compiler.forms.schedule import Layout, Precision, Schedule, place_indices, segmented
from insum_nn.compiler.forms.segment import SCAN, KernelSegments
from insum_nn.compiler.forms.text import Argument, Parameters, Strides, Value, join_axes, spread

__all__ = ["Source", "steps_of_vectors", "write_kernel"]

_TYPES = {
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}

# A product: its number, its factors, and the conditions by which it is selected.
_Term = tuple[float, tuple[Value, ...], tuple[Condition, ...]]
# One side of a matrix product, and the conditions by which it is selected.
_Side = tuple[tuple[Read, ...], tuple[Condition, ...]]


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel's text, its parameters in order, and what each step of its grid counts.

    Attributes:
        grid: (index or "", values per program) for each factor of the number of programs, the fastest first.
        finished: it stores the output itself; else sums, to which the start and the epilogue are yet to come.
    """

    text: str
    arguments: tuple[Argument, ...]
    grid: tuple[tuple[str, int], ...]
    schedule: Schedule
    accumulator: torch.dtype
    finished: bool


class _Writer(KernelMisses, KernelSegments, KernelBeside):
    """Writes the body of a kernel for some of the points."""

    # What follows the loops inside of an outer one.
    closing: list[str]

    def write(self, points: Sequence[Point], tiles: Sequence[tuple[str, int]], pid: str) -> list[str]:
        """All lines of the kernel's body for these points."""
        self.closing = []
        self.programs(tiles, pid)
        tiled = {index for index, _ in tiles}
        for axis in "nm":
            if axis in self.axes and self.axes[axis].first not in tiled:
                self.lane_indices(axis, "0", 0)
        results = self.emit(points)
        if self.schedule.early and self.terms is not None:
            read_early(self.scopes, self.terms, self.order, self.entries, self.fresh)
        stores = [line for name, order, target in results.values() for line in self.store(name, order, target)]
        lines: list[str] = []
        for depth, scope in enumerate(self.scopes):
            if scope.head:
                lines.append("    " * (depth - 1) + scope.head)
            lines += ["    " * depth + line for line in scope.lines]
        for depth in range(len(self.scopes) - 1, -1, -1):
            lines += ["    " * depth + line for line in self.scopes[depth].tail]
        return lines + self.closing + stores

    def emit(self, points: Sequence[Point]) -> dict[str, tuple[str, str, Read]]:
        """Write the sums of all points.

        Returns:
            For each output cell: its accumulator, the accumulator's axes, and the cell.
        """
        owned = {name: self.indices[name] for name in (OWNER, "@begin", "@end") if name in self.indices}
        self.open_loops()
        cells = by_target(points)
        axes = join_axes(*(a for a in self.axes if a != "k"))
        results: dict[str, tuple[str, str, Read]] = {}
        if self.form.beside:
            results = self.together(axes, self.sums, self.products)
            self.indices |= owned
            return results
        if self.segment:
            self.open_runs()
            for group in cells.values():
                self.runs(self.products(group), axes, group[0].target)
            return results
        by_cell: list[tuple[str, str, list[Point], tuple[Condition, ...]]] = []
        for key, group in cells.items():
            name = self.fresh("acc")
            swapped = self.product is not None and self.schedule.swap
            order = axes[::-1] if swapped else axes
            self.settled = self.settle(group, axes)
            self.scopes[0].lines.append(f"{name} = tl.zeros({self.shape(order)}, {self.type})")
            if self.product is None:
                self.sums(name, group, axes)
            results[key] = (name, order, group[0].target)
            by_cell.append((name, order, group, self.settled))
        if self.product is not None:
            self.dots([(name, group, settled) for name, _, group, settled in by_cell])
        for name, order, group, self.settled in by_cell:
            if self.product is not None:
                self.closing += self.any_term(name, order, group, self.product)
            self.closing += self.selected(name, order, self.settled)
        self.settled = ()
        self.indices |= owned
        return results

    def sums(self, name: str, points: Sequence[Point], axes: str) -> None:
        """Add the points' products, summed along the lanes of k, to an accumulator."""
        summed = self.products(points)
        if "k" in self.axes:
            place = summed.axes.index("k")
            summed = Value(f"tl.sum({summed.text}, {place})", summed.axes.replace("k", ""), 0)
        if summed.axes and summed.axes != axes:
            summed = self.define("x", summed.text, summed.axes, len(self.scopes) - 1)
        self.scopes[-1].lines.append(f"{name} += {spread(summed, axes)}")

    def products(self, points: Sequence[Point]) -> Value:
        """The sum of the points' products on each lane, 0 past what is summed; with lanes of k it varies with them."""
        factors = [tuple(self.load(read) for read in p.reads) for p in points]
        loose = [self.loose(p.reads) for p in points]
        shared = [c for c in loose[0] if all(c in each for each in loose)]
        rest = [tuple(c for c in each if c not in shared) for each in loose]
        masks = [self.masks[a] for a in ("k", "e") if a in self.masks]
        if len(points) == 1 and shared and not masks:
            factors[0], shared = self.by_factor(points[0], factors[0], shared)
        total = self.combined([(p.number, f, own) for p, f, own in zip(points, factors, rest, strict=True)])
        masks += map(self.value_of, shared)
        if "k" in self.axes:
            whole = join_axes(total.axes, "k", *(m.axes for m in masks))
            lengths = self.shape(whole)
            text = f"tl.broadcast_to({spread(self.named(total), whole)}, {lengths})"
            if masks:
                mask = self.all_of(masks, whole)
                text = f"tl.where(tl.broadcast_to({mask}, {lengths}), {text}, 0.0)"
            return Value(text, whole, 0)
        if not masks:
            return total
        whole = join_axes(total.axes, *(m.axes for m in masks))
        return Value(f"tl.where({self.all_of(masks, whole)}, {spread(self.named(total), whole)}, 0.0)", whole, 0)

    def combined(self, terms: Sequence[_Term]) -> Value:
        """A sum of products, each 0 where its conditions do not hold."""
        groups: dict[tuple[Condition, ...], list[tuple[float, tuple[Value, ...]]]] = {}
        for number, factors, conditions in terms:
            groups.setdefault(conditions, []).append((number, factors))
        parts = [self.kept(self.factored(group), conditions) for conditions, group in groups.items()]
        if len(parts) == 1:
            return parts[0]
        parts = [self.named(part) for part in parts]
        axes = join_axes(*(part.axes for part in parts))
        return Value(" + ".join(spread(part, axes) for part in parts), axes, 0)

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

    def dots(self, cells: Sequence[tuple[str, Sequence[Point], tuple[Condition, ...]]]) -> None:
        """Add the points' matrix products to their accumulators, which are selected by some conditions at the end.

        Products with one right side are written together, so that few operands are alive at any time.
        """
        product = self.product
        assert product is not None
        sides: dict[_Side, list[tuple[str, list[Point]]]] = {}
        for name, points, self.settled in cells:
            by_right: dict[_Side, list[Point]] = {}
            for point in points:
                left, right = self.sides_of(point, product)
                by_right.setdefault((right, self.side_needs(right, left)), []).append(point)
            for key, group in by_right.items():
                sides.setdefault(key, []).append((name, group))
        settled = {name: each for name, _, each in cells}
        single = self.form.bound.dtype == torch.float32
        split = single and self.precision == "tf32x3" and len(self.form.points) > 1
        how = f", input_precision='{'tf32' if split else self.precision}'" if single else ""
        for (reads, needs), groups in sides.items():
            factors = tuple(self.load(read) for read in reads)
            value = factors[0] if len(factors) == 1 else self.factored([(1.0, factors)])
            right = self.side(self.kept(value, needs), "kn")
            for name, points in groups:
                self.settled = settled[name]
                terms: list[_Term] = []
                for point in points:
                    left, others = self.sides_of(point, product)
                    found = tuple(self.load(read) for read in left)
                    terms.append((point.number, found, self.side_needs(left, others)))
                first, second = self.operand(terms, "mk"), right
                if split:
                    # Triton's own way takes four times the code, much of it for infinities, which become NaN here.
                    (high, low), (high_right, low_right) = self.halves(first, "mk"), self.halves(second, "kn")
                    pairs = [(low, high_right), (high, low_right), (high, high_right)]
                else:
                    pairs = [(first, second)]
                for one, other in pairs:
                    sides_text = f"tl.trans({other}), tl.trans({one})" if self.schedule.swap else f"{one}, {other}"
                    self.scopes[-1].lines.append(f"{name} = tl.dot({sides_text}, {name}{how})")

    def halves(self, text: str, axes: str) -> tuple[str, str]:
        """The part of a float32 block that 10 bits of mantissa hold, and what is left of it."""
        depth = len(self.scopes) - 1
        bits = f"({text}.to(tl.int32, bitcast=True) & -8192)"
        high = self.define("h", f"{bits}.to(tl.float32, bitcast=True)", axes, depth)
        return high.text, self.define("l", f"{text} - {high.text}", axes, depth).text

    def operand(self, terms: Sequence[_Term], axes: str) -> str:
        number, factors, conditions = terms[0]
        if len(terms) == 1 and number == 1.0 and len(factors) == 1:
            return self.side(self.kept(factors[0], conditions), axes)
        return self.side(self.combined(terms), axes)

    def side(self, value: Value, axes: str) -> str:
        """One side of a matrix product: over both of its axes, in the storage type."""
        if value.text.isidentifier():
            text = spread(value, axes)
        else:
            text = f"({spread(self.named(value), axes)}).to({_TYPES[self.form.bound.dtype]})"
        if value.axes != axes:
            text = f"tl.broadcast_to({text}, {self.shape(axes)})"
        return self.define("d", text, axes, len(self.scopes) - 1).text

    def store(self, name: str, order: str, target: Read, needs: Sequence[Value] = ()) -> list[str]:
        """The lines that write one accumulator, after all loops that add to it, on lanes that meet all needs."""
        form = self.form
        axes = join_axes(order)
        value = name if order == axes else f"tl.trans({name})"
        subs = list(target.subs)
        if form.owner is not None:
            subs[form.owner_axis] = Sub(((1, OWNER),), 0, True)
        offset, conditions = self.address(subs, lambda axis: self.out_stride(subs, axis), "@out")
        conditions += needs
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
            slot = self.define("slot", f"-1 - {row.text}", row.axes, row.depth)
            saved = self.indices[OWNER]
            self.indices[OWNER] = slot
            scratch, _ = self.address(subs, self.scratch_stride, "@out")
            self.indices[OWNER] = saved
            place = f"{self.parameters('scratch')} + {self.reach(scratch, axes)}"
            needs = conditions
            if row.axes:
                needs = [*conditions, self.define("apart", f"{row.text} < 0", row.axes, row.depth)]
                conditions = [*conditions, self.define("whole", f"{row.text} >= 0", row.axes, row.depth)]
            lines.append(f"tl.store({place}, {value}{self.when(needs, axes)})")
        when = self.when(conditions, axes)
        if form.bound.has_start:
            first = self.first(subs, axes, where, when)
            value = f"{value} + {first}"
        if form.bound.epilogue.activation is not None:
            total = self.fresh("total")
            lines.append(f"{total} = {value}")
            value = activated(form, total)
        lines.append(f"tl.store({out} + {where}, {value}{when})")
        if row is None or row.axes:
            return lines
        # All of the tile goes to one of the two: a branch, as the addresses of both would fill the registers.
        apart, *whole = (f"    {line}" for line in lines)
        return [f"if {row.text} < 0:", apart, "else:", *whole]

    def first(self, subs: Sequence[Sub], axes: str, where: str, when: str) -> str:
        """The starting value of a tile: read where the output is written, or through strides of its own.

        Along an axis of stride 0 it is not read again: a bias is one number for each column.
        """
        start, steps = self.parameters("start"), self.strides.start
        if steps is None:
            return f"tl.load({start} + {where}{when}).to({self.type})"
        used = [axis for axis, step in enumerate(steps) if step != "0"]
        varying = [subs[axis] for axis in used]
        step = [steps[axis] or self.parameters("start_stride", "", axis) for axis in used]
        offset, conditions = self.address(varying, lambda place: step[place], "@start")
        for index in dict.fromkeys(Read("@out", tuple(varying)).indices()):
            conditions += [self.masks[a] for a in self.indices[index].axes if a in self.masks]
        own = join_axes(offset.axes, *(c.axes for c in conditions))
        mask = self.when(conditions, own)
        other = ", other=0.0" if mask else ""
        found = Value(f"tl.load({start} + {self.reach(offset, own)}{mask}{other}).to({self.type})", own, 0)
        found = self.define("first", found.text, own, max([offset.depth, *(c.depth for c in conditions)]))
        return spread(found, axes)

    def store_runs(self, value: str, axes: str, target: Read) -> list[str]:
        saved = self.indices.get(OWNER)
        self.indices[OWNER] = self.indices["@target"]
        lines = self.store(value, axes, target, [self.ends] if self.ends.axes else [])
        if saved is not None:
            self.indices[OWNER] = saved
        return lines

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
    blocks: list[tuple[str, int]] = []
    for axis in (layout.n, layout.m):
        if axis is None:
            continue
        known = form.static.get(axis.first)
        if known is None or known > axis.block:
            blocks.append((axis.first, axis.block))
    tiles = [*blocks, *((index, 1) for index in reversed(layout.grid))]
    if schedule.splits > 1:
        tiles.append(("@split", 1))
    return tiles


def _parts(points: Sequence[Point], groups: int) -> list[list[Point]]:
    """Points divided by the cells they add to, into parts of like work."""
    cells = by_target(points)
    if groups >= len(cells):
        return list(cells.values()) or [[]]
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
    if is_ported(form, schedule):
        text, arguments, finished = write_nest(form, schedule, strides, precision)
        accumulator = torch.float64 if form.bound.dtype == torch.float64 else torch.float32
        parts = len(_parts(form.points, schedule.groups))
        count = (("@part", parts),) if parts > 1 else ()
        return Source(text, arguments, (*count, *tiles), replace(schedule, groups=parts), accumulator, finished)
    parameters = Parameters()
    parts = _parts(form.points, schedule.groups)
    body: list[str] = []
    pid = "pid"
    if len(parts) > 1:
        pid = "rest"
        if schedule.dot:
            # Long code: programs that run at one time should be in the same part of it, which the cache holds.
            tiles_each = parameters("programs_each")
            body += [f"part = pid // {tiles_each}", f"rest = pid % {tiles_each}"]
        else:
            body += [f"part = pid % {len(parts)}", f"rest = pid // {len(parts)}"]
    written: list[list[str]] = []
    for number, part in enumerate(parts):
        writer = _Writer(form, schedule, layout, strides, parameters, precision, f"_{number}" if number else "")
        written.append(writer.write(part, tiles, pid))
    apart, lines = list[str](), written[0]
    if len(parts) > 1:
        # Parts without a matrix product were seen to compile in seconds as they are.
        given = ("rest", *parameters.known.values()) if schedule.dot else ()
        apart, lines = branches(written, exact=form.bound.dtype == torch.float64, given=given)
    body += lines
    body.insert(0, "pid = tl.program_id(0)")
    arguments = tuple(parameters.known)
    names = ", ".join(parameters.known.values())
    text = "\n".join(
        ["import triton", "import triton.language as tl", "", ""]
        + ([SCAN, ""] if segmented(form, schedule) else [])
        + ([STEPS, ""] if any(argument.kind == "words" for argument in arguments) else [])
        + apart
        + ["@triton.jit", f"def kernel({names}):"]
        + [f"    {line}" for line in body]
    )
    grid = (*((("@part", len(parts)),) if len(parts) > 1 else ()), *tiles)
    accumulator = torch.float64 if form.bound.dtype == torch.float64 else torch.float32
    schedule = replace(schedule, groups=len(parts))
    return Source(text + "\n", arguments, grid, schedule, accumulator, finishes(form, schedule))


def steps_of_vectors(form: Form, source: Source, values: Sequence[int | None]) -> tuple[int, ...]:
    """The arguments that are steps along an axis, or the length of the output's rows, multiples of 16."""
    last = form.bound.statement.output.subscripts[-1:]
    rows = {s.plain for s in last}
    return tuple(
        place
        for place, (argument, value) in enumerate(zip(source.arguments, values, strict=True))
        if value is not None
        and value % 16 == 0
        and (
            argument.kind.endswith("stride")
            or (argument.kind == "dim" and argument.name == "@out")
            or (argument.kind == "extent" and argument.name in rows)
        )
    )

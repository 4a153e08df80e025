"""`Form` + `Schedule` -> the text of a Triton kernel: by `nest`, or, of a kernel with several outputs, written here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from insum_nn.compiler.forms.beside import KernelBeside, by_target
from insum_nn.compiler.forms.early import read_early
from insum_nn.compiler.forms.form import Form
from insum_nn.compiler.forms.kernel_misses import Condition, KernelMisses
from insum_nn.compiler.forms.nest import write_nest
from insum_nn.compiler.forms.points import OWNER, Point, Read, Sub
from insum_nn.compiler.forms.schedule import Layout, Precision, Schedule, place_indices
from insum_nn.compiler.forms.text import Argument, Parameters, Strides, Value, join_axes, spread

__all__ = ["Source", "steps_of_vectors", "write_kernel"]

# A product: its number, its factors, and the conditions by which it is selected.
_Term = tuple[float, tuple[Value, ...], tuple[Condition, ...]]


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


class _Writer(KernelMisses, KernelBeside):
    """Writes the body of a kernel of several outputs."""

    def write(self, tiles: Sequence[tuple[str, int]]) -> list[str]:
        """All lines of the kernel's body."""
        self.programs(tiles, "pid")
        tiled = {index for index, _ in tiles}
        for axis in "nm":
            if axis in self.axes and self.axes[axis].first not in tiled:
                self.lane_indices(axis, "0", 0)
        results = self.emit()
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
        return lines + stores

    def emit(self) -> dict[str, tuple[str, str, Read]]:
        """Write the sums of the owned rows' points.

        Returns:
            For each output cell: its accumulator, the accumulator's axes, and the cell.
        """
        owned = {name: self.indices[name] for name in (OWNER, "@begin", "@end") if name in self.indices}
        self.open_loops()
        results = self.together(join_axes(*(a for a in self.axes if a != "k")), self.sums, self.products)
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

    def store(self, value: str, axes: str, target: Read) -> list[str]:
        """The lines that write one accumulator, after all loops that add to it."""
        form = self.form
        subs = list(target.subs)
        if form.owner is not None:
            subs[form.owner_axis] = Sub(((1, OWNER),), 0, True)
        offset, conditions = self.address(subs, lambda axis: self.out_stride(subs, axis), "@out")
        for index in dict.fromkeys(Read("@out", tuple(subs)).indices()):
            conditions += [self.masks[a] for a in self.indices[index].axes if a in self.masks]
        out = self.parameters("out")
        where = self.reach(offset, axes)
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
    accumulator = torch.float64 if form.bound.dtype == torch.float64 else torch.float32
    if not form.beside:
        text, arguments, finished = write_nest(form, schedule, strides, precision)
        parts = len(_parts(form.points, schedule.groups))
        count = (("@part", parts),) if parts > 1 else ()
        return Source(text, arguments, (*count, *tiles), replace(schedule, groups=parts), accumulator, finished)
    parameters = Parameters()
    body = ["pid = tl.program_id(0)", *_Writer(form, schedule, layout, strides, parameters).write(tiles)]
    names = ", ".join(parameters.known.values())
    head = ["import triton", "import triton.language as tl", "", "", "@triton.jit", f"def kernel({names}):"]
    text = "\n".join([*head, *(f"    {line}" for line in body)])
    return Source(text + "\n", tuple(parameters.known), tuple(tiles), schedule, accumulator, True)


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
            or (argument.kind == "dim" and (argument.name == "@out" or argument.axis > 0))
            or (argument.kind == "extent" and argument.name in rows)
        )
    )

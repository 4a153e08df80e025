"""Several outputs of one kernel: what else is made of the terms that a program walks for the rows that it owns.

The gradients of one product read the same rows, those of the gradient of its output most of all. A program that walks
the terms of a row `Dst[e] = i` reads `dZ[i]` once, and passes all that these are made of:

    dX[Src[e],i,u] += dZ[Dst[e],k,u] * Y[e,j] * W[e,l,u]
    dY[e,j]        += dZ[Dst[e],k,u] * X[Src[e],i,u] * W[e,l,u]
    dW[e,l,u]      += dZ[Dst[e],k,u] * X[Src[e],i,u] * Y[e,j]

It writes rows of `dY` and `dW` as it goes, and adds to rows of `dX`, which other programs add to as well. Walking the
terms by `Src` instead it owns rows of `dX`, adds to nothing, and reads a row of `dZ` for every term.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from insum_nn.compiler.forms.axes import element_axes
from insum_nn.compiler.forms.form import Form, FormError
from insum_nn.compiler.forms.loops import KernelLoops
from insum_nn.compiler.forms.points import OWNER, Beside, Point, Read, Sub
from insum_nn.compiler.forms.schedule import Schedule, adds_rows
from insum_nn.compiler.forms.text import Value, join_axes, spread
from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.lang.syntax import Statement

__all__ = ["KernelBeside", "Memory", "Walk", "by_target", "clusters", "is_owned", "memory_of", "read_at", "with_beside"]

Cell = tuple[str, str]


Walk = tuple[str, str]
"""An index tensor with an entry for each term, and the index of its entries."""


def with_beside(
    walk: Walk, forms: Sequence[tuple[Form, Extents]], bound: Bound, sizes: Mapping[str, int], *, deterministic: bool
) -> Form:
    """The form of several statements.

    Args:
        walk: whose rows a program owns.
        forms: of each statement, and its sizes; of one whose rows are the walk's own, first.
        bound: of a statement that writes what the first one does, or a number for each row, and reads what any reads.
        sizes: extents of the first call; `OWNER` is the number of the walk's rows.
        deterministic: several programs must not add to one cell.

    Raises:
        FormError: one kernel cannot compute them.
    """
    tensor, entry = walk
    first = forms[0][0]
    owns = is_owned(first, walk)
    axis = first.owner_axis if owns else 0
    facts = bound.facts_of(tensor)
    owner = bound.statement.output.subscripts[axis].indirect
    columns = [i for i in first.parallel if i not in (OWNER, entry)] or list(first.reduce)
    form = Form(
        bound,
        sizes,
        first.points if owns else (),
        "own",
        owner,
        axis,
        (entry,),
        not (facts.sorted and facts.masked is False),
        (OWNER, *columns),
        (),
        frozenset(),
        first.written,
    )
    beside: list[Beside] = []
    for each, extents in forms[owns:]:
        beside.append(_further(each, extents, walk, columns, [form.bound.statement for form, _ in forms]))
    form = replace(form, beside=tuple(beside))
    lanes = element_axes(form)[1]
    if len(columns) != 1 or lanes != columns or columns[0] not in form.static:
        raise FormError("there are no columns of a known number")
    if any(each.scattered for each in beside) and (deterministic or bound.dtype.itemsize < 4):
        raise FormError("several terms meet in one cell, in no fixed order or in a half type")
    return form


def is_owned(form: Form, walk: Walk) -> bool:
    """Whether a statement sums the rows of a walk, over its terms alone."""
    owner = form.owner
    return owner is not None and owner.name == walk[0] and form.entries == (walk[1],) and not form.reduce


def _further(
    form: Form, extents: Extents, walk: Walk, columns: Sequence[str], statements: Sequence[Statement]
) -> Beside:
    """An output that has a row for each term, or rows that another index tensor owns.

    Raises:
        FormError: it is of another kind.
    """
    statement = form.bound.statement
    tensor, entry = walk
    row = Read(tensor, (Sub(((1, entry),), 0, True),))
    if {*form.parallel, *form.reduce} - {OWNER, entry, *columns}:
        raise FormError(f"{statement} goes over other indices")
    like, scattered, points = (tensor, 0), form.combine == "own", form.points
    if scattered:
        assert form.owner is not None
        if form.entries != (entry,) or form.reduce or form.owner_axis:
            raise FormError(f"{statement} sums other terms")
        other = Read(form.owner.name, row.subs)
        points = tuple(_exchanged(point, {OWNER: other}) for point in points)
        like = read_at(statements, (form.owner.name, entry))
    elif form.combine != "direct" or statement.output.subscripts[0].plain != entry:
        raise FormError(f"{statement} has no row for each term")
    elif not form.covers(extents.output):
        raise FormError(f"{statement} leaves cells out")
    points = tuple(_exchanged(point, {row: OWNER}) for point in points)
    if any(not sub.safe for point in points for sub in point.target.subs):
        raise FormError(f"{statement} may write outside of its output")
    return Beside(points, extents.output[1:], form.reduce, like, scattered)


def read_at(statements: Sequence[Statement], rows: Walk) -> tuple[str, int]:
    """A tensor that is read at the rows that an index tensor says, and its axis of rows.

    Raises:
        FormError: there is none, so that nothing tells how many rows there are.
    """
    wanted = f"{rows[0]}[{rows[1]}]"
    for access in (access for statement in statements for access in statement.reads):
        for axis, subscript in enumerate(access.subscripts):
            if str(subscript.indirect) == wanted:
                return access.name, axis
    raise FormError(f"no tensor is read at rows of {wanted}")


def _exchanged(point: Point, instead: Mapping[str | Read, str | Read]) -> Point:
    """A point with some atoms of its subscripts in the place of others."""

    def read(each: Read) -> Read:
        return replace(each, subs=tuple(replace(s, terms=tuple((c, atom(a)) for c, a in s.terms)) for s in each.subs))

    def atom(each: str | Read) -> str | Read:
        if each in instead:
            return instead[each]
        return each if isinstance(each, str) else read(each)

    return replace(point, target=read(point.target), reads=tuple(read(each) for each in point.reads))


@dataclass(frozen=True, slots=True)
class Memory:
    """What memory a further output needs.

    Attributes:
        place: the position of a tensor, and its axis, with as many entries as this output has rows.
        axis: that axis.
        shape: of a row.
        zero: cells are added to.
    """

    place: int
    axis: int
    shape: tuple[int, ...]
    zero: bool


def memory_of(form: Form, schedule: Schedule) -> tuple[Memory, ...]:
    """The memory of each further output."""
    if not form.beside:
        return ()
    adds, names = adds_rows(form, schedule), form.bound.layout.tensors
    return tuple(
        Memory(names.index(each.like[0]), each.like[1], each.shape, each.scattered or (adds and bool(each.reduce)))
        for each in form.beside
    )


def by_target(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Points by the output cell that they add to."""
    cells: dict[str, list[Point]] = {}
    for point in points:
        cells.setdefault(str(point.target), []).append(point)
    return cells


def _cells(point: Point) -> dict[str, str]:
    """What a point has to do with: a cell of each tensor. A gradient has the cells of what it belongs to."""
    return {read.name.removeprefix("d"): str(read).removeprefix(read.name) for read in (point.target, *point.reads)}


def clusters(form: Form) -> list[list[list[Point]]]:
    """The points of all statements in the order in which they are computed: each a list for every statement.

    Points that share most come together, so that what they read and sum is alive for a short while.
    """
    statements = form.statements
    cells = {id(point): _cells(point) for points in statements for point in points}
    common = set.intersection(*(set(each) for each in cells.values()))
    if not common:
        return [[list(points) for points in statements]]

    def alone(kind: str) -> int:
        """Cells of all tensors that meet one cell of this one only."""
        met: dict[Cell, set[str]] = {}
        for each in cells.values():
            for other in common:
                met.setdefault((other, each[other]), set()).add(each[kind])
        return sum(len(mine) == 1 for mine in met.values())

    kind = max(sorted(common), key=alone)
    # In one order in all statements, so that equal sums are recognised.
    names = sorted(common, key=lambda name: (name != kind, name))
    found: dict[str, list[list[Point]]] = {}
    for number, points in enumerate(statements):
        for point in sorted(points, key=lambda p: [cells[id(p)][name] for name in names]):
            found.setdefault(cells[id(point)][kind], [[] for _ in statements])[number].append(point)
    return list(found.values())


class KernelBeside(KernelLoops):
    """Writes the loop over the terms of owned rows where there are further outputs."""

    def together(
        self,
        axes: str,
        sums: Callable[[str, Sequence[Point], str], None],
        products: Callable[[Sequence[Point]], Value],
    ) -> dict[str, tuple[str, str, Read]]:
        """Write what the loop does.

        Args:
            axes: of an accumulator.
            sums: writes the addition of points to an accumulator.
            products: writes the sum of points.

        Returns:
            For each cell that the program owns: its accumulator, the accumulator's axes, and the cell.
        """
        depth = len(self.scopes) - 1
        results: dict[str, tuple[str, str, Read]] = {}
        for key, group in by_target(self.form.points).items():
            name = self.fresh("acc")
            self.scopes[0].lines.append(f"{name} = tl.zeros({self.shape(axes)}, {self.type})")
            results[key] = (name, axes, group[0].target)
        parts: dict[tuple[int, str], tuple[Value, Read]] = {}
        for cluster in clusters(self.form):
            for number, points in enumerate(cluster):
                for key, group in by_target(points).items():
                    if number == 0:
                        sums(results[key][0], group, axes)
                        continue
                    value = products(group)
                    before = parts.get((number, key))
                    if before is not None:
                        whole = join_axes(before[0].axes, value.axes)
                        text = f"{spread(before[0], whole)} + {spread(Value(f'({value.text})', value.axes, 0), whole)}"
                        value = Value(text, whole, depth)
                    parts[number, key] = self.define("b", value.text, value.axes, depth), group[0].target
        # Behind all reads, which nothing keeps from being made early then.
        for (number, _), (value, target) in parts.items():
            self.put(number - 1, value, target)
        return results

    def put(self, number: int, value: Value, target: Read) -> None:
        """Write a cell of the rows of the terms at hand."""
        beside, depth = self.form.beside[number], len(self.scopes) - 1
        steps = beside.steps
        tile = self.axes["n"]
        parts, conditions = self.parts(target.subs, lambda axis: str(steps[axis]), "")
        literal = sum(int(v.text) for v in parts if v.text.isdigit())
        offset = self.total([v for v in parts if not v.text.isdigit()])
        conditions += self.lane_masks(target)
        text = value.text
        if beside.reduce:
            whole = join_axes(value.axes, "n")
            if whole != value.axes:
                text = f"tl.broadcast_to({spread(value, whole)}, {self.shape(whole)})"
                if "n" in self.masks:
                    mask = spread(self.masks["n"], whole)
                    text = f"tl.where(tl.broadcast_to({mask}, {self.shape(whole)}), {text}, 0.0)"
            axes = whole.replace("n", "")
            text = f"tl.sum({text}, {whole.index('n')})"
        else:
            axes = join_axes(value.axes, offset.axes)
            text = spread(value, axes)
        if axes and not set(axes) <= set(value.axes):
            text = f"tl.broadcast_to({text}, {self.shape(axes)})"
        pointer = f"{self.parameters('beside', str(number))} + {self.reach(offset, axes)}"
        pointer = f"{self.define('to', pointer, axes, max(offset.depth, 0)).text} + {literal}"
        mask = self.when(conditions, axes)
        if beside.scattered or (beside.reduce and tile.block < self.form.static[tile.first]):
            line = f"tl.atomic_add({pointer}, {text}{mask}, sem='relaxed')"
        else:
            line = f"tl.store({pointer}, {text}{mask})"
        self.scopes[depth].lines.append(line)

"""Several outputs of one kernel: what else is made of the terms that a program walks for the rows that it owns.

The gradients of one product read the same rows: those of the gradient of its output most of all. A program that walks
the terms of an owned row

    dX[Src[e],i,u] += dZ[Dst[e],k,u] * Y[e,j] * W[e,l,u]

has all that `dY[e,j]` and `dW[e,l,u]` are made of. It writes their rows as it passes the terms, so that everything is
read once, and adds to memory only where columns that it does not have belong to a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from insum_nn.compiler.bind import Bound, Extents
from insum_nn.compiler.kernel_axes import element_axes
from insum_nn.compiler.kernel_form import OWNER, Beside, Form, FormError, Point, Read, Sub
from insum_nn.compiler.kernel_loops import KernelLoops
from insum_nn.compiler.kernel_schedule import Schedule, adds_rows
from insum_nn.compiler.kernel_text import Value, join_axes, spread

__all__ = ["KernelBeside", "by_target", "further_outputs", "with_beside"]

Cell = tuple[str, str]


def with_beside(first: Form, others: Sequence[tuple[Form, Extents]], bound: Bound) -> Form:
    """The form of several statements.

    Args:
        first: of the statement whose rows are owned.
        others: of those with a row for each term, and their sizes.
        bound: of a statement that writes what the first one does, and reads what any of them reads.

    Raises:
        FormError: one kernel cannot compute them.
    """
    if first.combine != "own" or first.tail is not None or first.reduce or len(first.entries) != 1:
        raise FormError(f"{first.bound.statement} does not sum rows that have owners, and those alone")
    columns = element_axes(first)[1]
    if not columns or any(index not in first.static for index in columns):
        raise FormError("the rows have no columns of a known number")
    assert first.owner is not None
    (entry,) = first.entries
    row = Read(first.owner.name, (Sub(((1, entry),), 0, True),))
    found: list[Beside] = []
    for form, extents in others:
        statement = form.bound.statement
        if form.combine != "direct" or statement.output.subscripts[0].plain != entry:
            raise FormError(f"{statement} has no row for each term of the first statement")
        if {*form.parallel, *form.reduce} - {entry, *columns} or not form.covers(extents.output):
            raise FormError(f"{statement} goes over other indices, or leaves cells out")
        points = tuple(replace(p, reads=tuple(_owned(r, row) for r in p.reads)) for p in form.points)
        if any(not sub.safe for point in points for sub in point.target.subs):
            raise FormError(f"{statement} may write outside of its output")
        found.append(Beside(statement.output.name, points, extents.output[1:], form.reduce))
    return replace(first, bound=bound, beside=tuple(found))


def _owned(read: Read, row: Read) -> Read:
    """A read with the number of the owned row in the place of the index tensor's entry."""

    def atom(each: str | Read) -> str | Read:
        return each if isinstance(each, str) else OWNER if each == row else _owned(each, row)

    subs = (replace(sub, terms=tuple((c, atom(a)) for c, a in sub.terms)) for sub in read.subs)
    return replace(read, subs=tuple(subs))


def further_outputs(form: Form, schedule: Schedule, *, whole: bool, device: torch.device) -> list[Tensor]:
    """Memory for the further outputs: empty where every cell is written, once.

    Args:
        form: the statements.
        schedule: what decides whether programs add up what belongs to one cell.
        whole: every term has an owner, so that no row is left out.
        device: where it is.
    """
    adds = adds_rows(form, schedule)
    rows = math.prod(form.sizes[index] for index in form.entries)
    made: list[Tensor] = []
    for each in form.beside:
        make = torch.empty if whole and not (adds and each.reduce) else torch.zeros
        made.append(make((rows, *each.shape), dtype=form.bound.out_dtype, device=device))
    return made


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
        if beside.reduce and tile.block < self.form.static[tile.first]:
            line = f"tl.atomic_add({pointer}, {text}{mask}, sem='relaxed')"
        else:
            line = f"tl.store({pointer}, {text}{mask})"
        self.scopes[depth].lines.append(line)

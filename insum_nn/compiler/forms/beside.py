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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from insum_nn.compiler.forms.axes import element_axes
from insum_nn.compiler.forms.form import Form, FormError
from insum_nn.compiler.forms.points import OWNER, Beside, Point, Read, Sub
from insum_nn.compiler.forms.schedule import Schedule, adds_rows
from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.lang.syntax import Statement

__all__ = ["Memory", "Walk", "is_owned", "memory_of", "read_at", "with_beside"]

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
    form = replace(form, beside=tuple(beside), outputs=tuple(each for each, _ in forms))
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
    if {*form.parallel, *form.reduce} - {OWNER, entry} != {*columns}:
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

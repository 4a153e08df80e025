"""Which indices lie on which axis of a tile that is multiplied element by element."""

from __future__ import annotations

from collections.abc import Sequence

from insum_nn.compiler.forms.form import Form
from insum_nn.compiler.forms.points import ENTRY, OWNER, Read

__all__ = ["MANY_POINTS", "element_axes"]

# Points past which a kernel is straight-line code rather than a loop with a few terms.
MANY_POINTS = 8


def element_axes(form: Form) -> tuple[list[str], list[str], list[str]]:
    """Candidates for rows, columns and sums of a tile that is multiplied element by element."""
    if form.owner is None and len(form.points) > MANY_POINTS:
        return _along_the_largest(form)
    points = [p for each in form.statements for p in each]
    last = {sub.plain for p in points for r in (*p.reads, p.target) if r.subs and (sub := r.subs[-1]).plain}
    parallel = [i for i in form.parallel if i != OWNER]
    columns = [i for i in parallel[-1:] if i in last and (form.owner is not None or len(form.parallel) > 1)]
    rows = [i for i in form.parallel if i not in columns]
    summed = [i for i in form.reduce if i in last] or list(form.reduce)
    # Lanes along what is summed: dense axes that lie side by side where columns do not, else the terms themselves.
    if form.owner is not None:
        known = [i for i in form.reduce if i in form.static]
        summed = [ENTRY, *known] if columns or not form.reduce else summed[-1:]
    elif columns:
        summed = list(form.reduce)
    return rows, columns, summed


def _along_the_largest(form: Form) -> tuple[list[str], list[str], list[str]]:
    """Lanes side by side where the tensor that takes most of the time has its values side by side."""
    largest = max((*form.points[0].reads, form.points[0].target), key=lambda read: _cells(form, read))
    order = [i for sub in largest.subs if (i := sub.runs_along) is not None and i in (*form.parallel, *form.reduce)]
    inner = order[-1] if order else None
    columns = [inner] if inner in form.parallel and len(form.parallel) > 1 else []
    rows = [i for i in form.parallel if i not in columns]
    return rows, columns, _like(form.reduce, order)


def _cells(form: Form, read: Read) -> float:
    product = 1.0
    for index in dict.fromkeys(read.indices()):
        product *= form.size(index)
    return product


def _like(indices: Sequence[str], order: Sequence[str]) -> list[str]:
    """Indices in the order in which a tensor has them, those that it lacks first."""
    return [*(i for i in indices if i not in order), *(i for i in order if i in indices)]

"""Which cells of an output the terms of a form write: memory that is written whole is not filled first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

from insum_nn.compiler.ir.access import affine_terms, indices_in
from insum_nn.compiler.ir.nodes import Expr, Index, Load
from insum_nn.compiler.schedule.form import Form, atoms

__all__ = ["Coverage", "coverage_of"]


class Coverage(NamedTuple):
    """Says of the sizes of a call whether every cell of its output is written, if terms do not meet in memory.

    Attributes:
        never: whatever the sizes are, some cell may stay unwritten.
        entries: places, among the extents of a call, of those of entries that are unique.
        placed: the axes that these entries address.
        filled: axes whose subscripts are numbers, or step from one, and the lengths up to which these are all cells.
    """

    never: bool
    entries: tuple[int, ...] = ()
    placed: tuple[int, ...] = ()
    filled: tuple[tuple[int, int], ...] = ()

    @property
    def text(self) -> str:
        """The same as text of Python, which reads `indices` and `output`.

        In traced calls, which have a `launch`, how many entries there are is not to be asked of symbolic sizes.
        """
        parts = ["False"] if self.never else [f"output[{axis}] <= {length}" for axis, length in self.filled]
        if self.placed:
            # Unique, and as many as there are cells: every one of them.
            entries = " * ".join([f"indices[{place}]" for place in self.entries]) or "1"
            parts.append(f"launch is None and {entries} == {' * '.join([f'output[{axis}]' for axis in self.placed])}")
        return " and ".join(parts) or "True"

    def __call__(self, indices: tuple[int, ...], output: tuple[int, ...]) -> bool:
        """Whether every cell is written in a call of these sizes."""
        return bool(eval(self.text, {"indices": indices, "output": output, "launch": None}))


def coverage_of(form: Form) -> Coverage:
    """Return which cells of its output a form writes."""
    return form.plan.get("coverage", lambda: _covered(form))


def _covered(form: Form) -> Coverage:
    # An entry that selects no matrix is in no tile.
    masked = form.stack is not None and form.row_index is not None and form.row_index.buffer.facts.masked is not False
    if masked or form.strategy == "atomic" or not form.unrolled:
        return Coverage(masked or form.strategy == "atomic")
    first = form.unrolled[0]
    reads = [[node for node, _ in atoms(subscript) if isinstance(node, Load)] for subscript in first.subscripts]
    numbered = [axis for axis, each in enumerate(reads) if not each and form.whole_axis(first, axis) is None]
    each = [indices_in(subscript) for subscript in first.subscripts]
    # Cells of a diagonal, and those that steps reach which no text knows.
    shared = form.strategy == "place" and sum(map(len, each)) > len(frozenset().union(*each))
    if shared or not {index.name for axis in numbered for index in each[axis]} <= {*form.static}:
        return Coverage(never=True)
    targets = dict.fromkeys(tuple(store.subscripts[axis] for axis in numbered) for store in form.unrolled)
    cells = {
        c
        for each in targets
        for c in itertools.product(*(_cells_at(s, form.static) for s in each))
        if min(c, default=0) >= 0
    }
    lengths = [1 + max((cell[place] for cell in cells), default=-1) for place in range(len(numbered))]
    filled = tuple(zip(numbered, lengths, strict=True))
    never = len(cells) < math.prod(lengths)
    if form.strategy != "place":
        return Coverage(never, filled=filled)
    loads = [load for each in reads for load in each]
    never = never or any(load.buffer.facts.masked is not False for load in loads)
    entries = tuple(form.places[index.name] for index in indices_in(*loads))
    return Coverage(never, entries, tuple(axis for axis, each in enumerate(reads) if each), filled)


def _cells_at(subscript: Expr, extents: Mapping[str, int]) -> list[int]:
    """Where a subscript of numbers and steps points."""
    cells = [affine_terms(subscript)[1]]
    for index, step in atoms(subscript):
        assert isinstance(index, Index)
        cells = [cell + step * n for cell in cells for n in range(extents[index.name])]
    return cells

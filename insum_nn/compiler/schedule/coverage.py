"""Which cells of an output the terms of a form write: memory that is written whole is not filled first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import lru_cache, partial

from insum_nn.compiler.ir.access import affine_terms, indices_in
from insum_nn.compiler.ir.nodes import Expr, Index, Load
from insum_nn.compiler.schedule.form import Form, atoms

__all__ = ["Coverage"]

_Target = tuple[int, tuple[tuple[str, int], ...]]
_Covered = tuple[bool, tuple[int, ...], tuple[int, ...], tuple[int, ...], frozenset[tuple[_Target, ...]]]


class Coverage:
    """Says of the sizes of a call whether every cell of its output is written, if terms do not meet in memory.

    Args:
        form: what writes it.

    Attributes:
        never: whatever the sizes are, some cell may stay unwritten.
        numbered: whether numbers as subscripts, and steps from them, are all cells of the axes that have them, by the
            lengths of these; remembered.
    """

    def __init__(self, form: Form) -> None:
        static = tuple(form.static.items())
        # `_placed`, `_entries`: axes that entries address which are unique, and the places of these entries' extents.
        # `_numbered`, `targets`: axes whose subscripts are numbers, or step from one, rather than an index of the whole
        # axis; and these.
        found = form.plan.get("coverage", lambda: _covered(form))
        self.never, self._placed, self._entries, self._numbered, targets = found
        self.numbered = partial(_fills, targets, static)
        self._of_symbols = partial(_fills.__wrapped__, targets, static)

    @property
    def text(self) -> str:
        """The same as text of Python, which reads `indices`, `output`, and this object as `kernel.fills`.

        In traced calls, which have a `launch`, how many entries there are is not to be asked of symbolic sizes.
        """
        if self.never:
            return "False"
        parts: list[str] = []
        if self._placed:
            entries = " * ".join([f"indices[{place}]" for place in self._entries])
            parts.append(f"launch is None and {entries} == {' * '.join([f'output[{axis}]' for axis in self._placed])}")
        if self._numbered:
            lengths = "".join([f"output[{axis}], " for axis in self._numbered])
            parts.append(f"(kernel.fills.numbered(({lengths})) if launch is None else kernel.fills(indices, output))")
        return " and ".join(parts) or "True"

    def __call__(self, indices: tuple[int, ...], output: tuple[int, ...]) -> bool:
        """Whether every cell is written in a call of these sizes."""
        if self.never:
            return False
        # Unique, and as many as there are cells: every one of them.
        if self._placed and _product(indices, self._entries) != _product(output, self._placed):
            return False
        if not self._numbered:
            return True
        lengths = tuple([output[axis] for axis in self._numbered])
        # Symbolic sizes are no keys.
        return (self.numbered if all(type(length) is int for length in lengths) else self._of_symbols)(lengths)


def _covered(form: Form) -> _Covered:
    """What the attributes of a `Coverage` are."""
    # An entry that selects no matrix is in no tile.
    masked = form.stack is not None and form.row_index is not None and form.row_index.buffer.facts.masked is not False
    never = masked or form.strategy == "atomic"
    if never or not form.unrolled:
        return never, (), (), (), frozenset()
    first = form.unrolled[0]
    reads = [[node for node, _ in atoms(subscript) if isinstance(node, Load)] for subscript in first.subscripts]
    placed, entries = tuple[int, ...](), tuple[int, ...]()
    if form.strategy == "place":
        loads = [load for each in reads for load in each]
        never = any(load.buffer.facts.masked is not False for load in loads)
        placed = tuple(axis for axis, each in enumerate(reads) if each)
        entries = tuple(form.places[i.name] for i in frozenset[Index]().union(*map(indices_in, loads)))
    numbered = tuple(axis for axis, each in enumerate(reads) if not each and form.whole_axis(first, axis) is None)
    targets = frozenset(tuple(_target(store.subscripts[axis]) for axis in numbered) for store in form.unrolled)
    return never, placed, entries, numbered, targets


def _target(subscript: Expr) -> _Target:
    """A subscript of numbers and steps: a number, and indices with their steps."""
    steps = [(index.name, step) for index, step in atoms(subscript) if isinstance(index, Index)]
    assert len(steps) == len(atoms(subscript))
    return affine_terms(subscript)[1], tuple(steps)


def _product(extents: tuple[int, ...], places: tuple[int, ...]) -> int:
    return math.prod([extents[place] for place in places])


@lru_cache(maxsize=1024)
def _fills(
    targets: frozenset[tuple[_Target, ...]], static: tuple[tuple[str, int], ...], lengths: tuple[int, ...]
) -> bool:
    """Whether cells that are numbers, or step from one, are all cells of these axes."""
    extents = dict(static)
    written: set[tuple[int, ...]] = set()
    for target in targets:
        for cell in itertools.product(*(_cells_at(subscript, extents) for subscript in target)):
            if all(0 <= at < extent for at, extent in zip(cell, lengths, strict=True)):
                written.add(cell)
    return len(written) == math.prod(lengths)


def _cells_at(target: _Target, extents: Mapping[str, int]) -> list[int]:
    """Where a subscript of numbers and steps points."""
    first, steps = target
    cells = [first]
    for index, step in steps:
        cells = [cell + step * n for cell in cells for n in range(extents[index])]
    return cells

"""Which cells of an output the terms of a form write: memory that is written whole is not filled first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import lru_cache

from insum_nn.compiler.forms.form import Form, atoms
from insum_nn.compiler.ir.access import affine_terms
from insum_nn.compiler.ir.nodes import Expr, Index, Load
from insum_nn.compiler.passes.terms import indices_of

__all__ = ["Coverage"]


class Coverage:
    """Says of the sizes of a call whether every cell of its output is written, if terms do not meet in memory.

    Args:
        form: what writes it.

    Attributes:
        never: whatever the sizes are, some cell may stay unwritten.
    """

    def __init__(self, form: Form) -> None:
        self.never = form.combine == "atomic"
        self._static = tuple(form.static.items())
        # Axes that entries address which are unique, and the places of these entries' extents.
        self._placed: tuple[int, ...] = ()
        self._entries: tuple[int, ...] = ()
        # Axes whose subscripts are numbers, or step from one, rather than an index of the whole axis; and these.
        self._known: tuple[int, ...] = ()
        self._targets: frozenset[tuple[Expr, ...]] = frozenset()
        if self.never or not form.unrolled:
            return
        reads = [
            [node for node, _ in atoms(subscript) if isinstance(node, Load)]
            for subscript in form.unrolled[0].subscripts
        ]
        if form.combine == "place":
            loads = [load for each in reads for load in each]
            self.never = any(load.buffer.facts.masked is not False for load in loads)
            self._placed = tuple(axis for axis, each in enumerate(reads) if each)
            self._entries = tuple(form.places[i.name] for i in frozenset[Index]().union(*map(indices_of, loads)))
        first = form.unrolled[0]
        self._known = tuple(
            axis for axis, each in enumerate(reads) if not each and form.whole_axis(first, axis) is None
        )
        self._targets = frozenset(tuple(store.subscripts[axis] for axis in self._known) for store in form.unrolled)

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
        if self._known:
            parts.append("kernel.fills(indices, output)")
        return " and ".join(parts) or "True"

    def __call__(self, indices: tuple[int, ...], output: tuple[int, ...]) -> bool:
        """Whether every cell is written in a call of these sizes."""
        if self.never:
            return False
        # Unique, and as many as there are cells: every one of them.
        if self._placed and _product(indices, self._entries) != _product(output, self._placed):
            return False
        if not self._known:
            return True
        lengths = tuple([output[axis] for axis in self._known])
        # Symbolic sizes are no keys.
        fills = _fills if all(type(length) is int for length in lengths) else _fills.__wrapped__
        return fills(self._targets, lengths, self._static)


def _product(extents: tuple[int, ...], places: tuple[int, ...]) -> int:
    return math.prod([extents[place] for place in places])


@lru_cache(maxsize=1024)
def _fills(targets: frozenset[tuple[Expr, ...]], lengths: tuple[int, ...], static: tuple[tuple[str, int], ...]) -> bool:
    """Whether cells that are numbers, or step from one, are all cells of these axes."""
    extents = dict(static)
    written: set[tuple[int, ...]] = set()
    for target in targets:
        for cell in itertools.product(*(_cells_at(subscript, extents) for subscript in target)):
            if all(0 <= at < extent for at, extent in zip(cell, lengths, strict=True)):
                written.add(cell)
    return len(written) == math.prod(lengths)


def _cells_at(subscript: Expr, extents: Mapping[str, int]) -> list[int]:
    """Where a subscript of numbers and steps points."""
    cells = [affine_terms(subscript)[1]]
    for index, step in atoms(subscript):
        assert isinstance(index, Index)
        cells = [cell + step * n for cell in cells for n in range(extents[index.name])]
    return cells

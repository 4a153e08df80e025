"""Statements that read and write representations as they lie, for kernels that write static tables out.

A representation holds an entry's copies one after the other, each with its components side by side, or the other way
round. So the cells of one component are a start and a step, and a table that lists them for every coefficient is affine
in the copy: a generated kernel needs no packed operands. Library calls would gather every coefficient's cells, so a CPU
takes other statements.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from insum_nn.ops.tensor_product_form import POINTS, Form
from insum_nn.ops.tensor_product_spec import NUMBER, Group, others
from insum_nn.ops.tensor_product_statement import Reading, WeightAccess
from insum_nn.structure.clebsch_gordan import nonzeros

__all__ = ["Direct", "direct_of"]

# Groups of paths at most, since each but the first goes over the whole result again; and cells in a table.
_GROUPS = 3
_CELLS = 1 << 17
# The table of an operand's cells, and of the parts of a sum that a first step made.
_TABLE = {"x": "I", "y": "J", "z": "K"}
_PARTS = "P"
# The place of what is not an operand as it comes: weights, which are viewed first, and parts.
_MADE = -1


@dataclass(frozen=True, slots=True)
class _Terms:
    """The coefficients of a group: their values, paths (numbers in the group), and first cells in x, y and z."""

    value: NDArray[np.float64]
    path: NDArray[np.int64]
    cell: NDArray[np.int64]

    @classmethod
    def of(cls, form: Form, group: Group, role: str) -> _Terms:
        """All of a group, those that add to one cell of a role together."""
        values: list[NDArray[np.float64]] = []
        paths: list[NDArray[np.int64]] = []
        cells: list[NDArray[np.int64]] = []
        for number, path in enumerate(form.spec.paths[n] for n in group.paths):
            a, b, c = (form.entry(operand, path).l for operand in "xyz")
            index, value = nonzeros(a, b, c)
            first = [form.columns(operand, path.ends[NUMBER[operand]])[:, 0] for operand in "xyz"]
            values.append(value * path.coefficient)
            paths.append(np.full(value.size, number, np.int64))
            cells.append(np.stack([own[m] for own, m in zip(first, index, strict=True)]))
        value, path, cell = np.concatenate(values), np.concatenate(paths), np.concatenate(cells, axis=1)
        order = np.lexsort((path, path if role == "w" else cell[NUMBER[role]]))
        return cls(value[order], path[order], cell[:, order])


class _Cells(Reading):
    """What direct statements have in common: tables of cells, and the text of accesses through them."""

    def __init__(self, form: Form, group: Group) -> None:
        super().__init__(form, group)
        self.form = form

    def access(self, name: str, operand: str, first: NDArray[np.int64]) -> str:
        """Make the table of an operand's cells, one row for each of `first`; returns the access."""
        form, letters = self.form, self.group.letters(operand)
        ends = np.array(sorted({form.spec.paths[n].ends[NUMBER[operand]] for n in self.group.paths}))
        starts = np.array([form.starts[operand][end] for end in ends.tolist()])
        steps = np.array([form.steps(operand, end)[1] for end in ends.tolist()])
        step = steps[np.searchsorted(starts, first, side="right") - 1]
        extents = [self.group.extents[x] for x in letters]
        table = first[:, None] + step[:, None] * np.arange(math.prod(extents))
        self.tables[_TABLE[operand]] = torch.from_numpy(table.reshape((first.size, *extents)))
        return f"{name}[z,{_TABLE[operand]}[{','.join(['p', *letters])}]]"

    def weights(self, weight: WeightAccess, path: NDArray[np.int64]) -> str:
        """The access to the weights of the path of each term."""
        if not weight.single:
            self.tables["L"] = weight.places[torch.from_numpy(path)].contiguous()
        batch = [] if self.form.spec.shared else ["z"]
        return _join("W", [*batch, *weight.subscripts("L[p]")])


def _join(name: str, subscripts: Sequence[str]) -> str:
    return f"{name}[{','.join(subscripts)}]" if subscripts else name


class _Parts(_Cells):
    """What the weights make of the output's gradient, the first of two steps to the gradient of `y`.

        G[z,p,u,v] += dZ[z,K[p,w]] * W[L[p],u,v,w]

    `p` counts pairs of a path and a component that it ends in.
    """

    def __init__(self, form: Form, group: Group) -> None:
        super().__init__(form, group)
        terms = _Terms.of(form, group, "z")
        pairs, self.place = np.unique(np.stack([terms.path, terms.cell[2]]), axis=1, return_inverse=True)
        self.terms = terms
        self.count = pairs.shape[1]
        self.weight = weight = WeightAccess(form, group)
        self.letters = [x for x in weight.letters if x != "w"]
        read = f"{self.access('dZ', 'z', pairs[1])} * {self.weights(weight, pairs[0])}"
        self.reads = {"dZ": "z"}
        self._compile(f"{_join('G', ['z', 'p', *self.letters])} += {read}", {})

        self._row = (self.count, *(group.extents[x] for x in self.letters))

    @property
    def width(self) -> int:
        """Numbers per row of the result."""
        return math.prod(self._row)

    def out_shape(self, size: int) -> tuple[int, ...]:
        """(rows, pairs, copies...)."""
        return (size, *self._row)


class _Direct(_Cells):
    """A role's statement; `p` counts coefficients.

        Z[z,K[p,w]] += CG[p] * X[z,I[p,u]] * Y[z,J[p,v]] * W[L[p],u,v,w]

    Attributes:
        role: what it computes.
        parts: what makes `G`, which it reads in the place of the weights and the output's gradient.
    """

    def __init__(self, form: Form, role: str, group: Group, parts: _Parts | None) -> None:
        super().__init__(form, group)
        self.role = role
        self.parts = parts
        self.weight = WeightAccess(form, group) if group.weighted and parts is None and role != "w" else None
        terms = _Terms.of(form, group, role) if parts is None else parts.terms
        self.tables["CG"] = torch.from_numpy(terms.value)
        factors = ["CG[p]"]
        for operand in others(role):
            name = f"{'d' if operand == 'z' else ''}{operand.upper()}"
            if operand == "w":
                if self.weight is not None:
                    factors.append(self.weights(self.weight, terms.path))
            elif operand != "z" or parts is None:
                factors.append(self.access(name, operand, terms.cell[NUMBER[operand]]))
                self.reads[name] = operand
        if parts is not None:
            self.tables[_PARTS] = torch.from_numpy(parts.place.reshape(-1))
            factors.append(_join("G", ["z", f"{_PARTS}[p]", *parts.letters]))
        name = f"{'' if role == 'z' else 'd'}{role.upper()}"
        if role == "w":
            batch = [] if form.spec.shared else ["z"]
            single = len(group.paths) == 1
            if not single:
                self.tables["R"] = torch.from_numpy(terms.path)
            result = _join(name, [*batch, *([] if single else ["R[p]"]), *group.letters("w")])
        else:
            result = self.access(name, role, terms.cell[NUMBER[role]])
        self._compile(f"{result} += {' * '.join(factors)}", {})

        paths = (len(group.paths),) if len(group.paths) > 1 else ()
        self._row = (*paths, *group.shape("w")) if role == "w" else (form.dims[role],)
        self._batched = role != "w" or not form.spec.shared

    @property
    def width(self) -> int:
        """Columns of the result; for the weights, of one sample."""
        return math.prod(self._row)

    def out_shape(self, size: int) -> tuple[int, ...]:
        """(rows, dimension), or for the weights (rows if not shared, paths, copies...)."""
        return (size, *self._row) if self._batched else self._row


class Direct:
    """Runs the direct statements of a role; each adds to what those before it made.

    Attributes:
        statements: one for each group of paths.
        part_width: numbers per row between two steps.
    """

    def __init__(
        self, form: Form, role: str, groups: Sequence[Group], device: torch.device, dtype: torch.dtype, *, staged: bool
    ) -> None:
        self.form = form
        self.role = role
        self.order = others(role)
        feeds = [_Parts(form, group) if staged and form.in_steps(role, group) else None for group in groups]
        self.statements = [_Direct(form, role, g, parts) for g, parts in zip(groups, feeds, strict=True)]
        self.part_width = sum(parts.width for parts in feeds if parts is not None)
        self._steps = [
            (
                _Step(statement, device, dtype, self.order),
                None if parts is None else _Step(parts, device, dtype, self.order),
            )
            for statement, parts in zip(self.statements, feeds, strict=True)
        ]
        self._pieces = form.weight_pieces(self.statements) if role == "w" else []

    def __call__(self, given: Sequence[Tensor], size: int, key: Hashable | None = None) -> Tensor:
        """The role's tensor.

        Args:
            given: the operands, in the order of `others(role)`.
            size: rows of the result.
            key: where nothing is to be recorded and no mode is active: what decides the shapes of all of these.
        """
        if self.role == "w":
            return self.finish([step(given, size, key) for step, _ in self._steps], size)
        total: Tensor | None = None
        for step, first in self._steps:
            parts = None if first is None else first(given, size, key)
            total = step(given, size, key, parts, total)
        if total is None:
            raise ValueError("a tensor product without paths has no direct statements")
        return total

    @property
    def outputs(self) -> list[tuple[str, int]]:
        """What each statement adds to: the role's tensor, or for the weights a tensor of its own."""
        return [(self.role, at if self.role == "w" else 0) for at in range(len(self.statements))]

    def finish(self, results: Sequence[Tensor], size: int) -> Tensor:
        """The role's tensor, from those that `outputs` names."""
        if self.role == "w":
            return self.form.join_weights(self.statements, results, self._pieces, size)
        (result,) = results
        return result

    def all_arguments(
        self, given: Sequence[Tensor], edges: Sequence[Tensor | None], packed: object
    ) -> list[dict[str, Tensor]]:
        """Everything that each statement reads, by name, where none has a first step."""
        return [step.named(given) for step, _ in self._steps]

    def arguments(self, statement: int, given: Sequence[Tensor]) -> dict[str, Tensor]:
        """Everything that a statement of the output reads, by name."""
        return self._steps[statement][0].named(given)


class _Step:
    """A statement with its tables, and where each of its operands stands among those given."""

    def __init__(self, source: _Parts | _Direct, device: torch.device, dtype: torch.dtype, order: str) -> None:
        self.source = source
        self.program = source.program
        self.result = source.program.statement.output.name
        self.tables = source.tables_on(device, dtype)
        self.given = source.program.given(self.tables)
        self.weight = source.weight
        self.at_weight = order.find("w")
        places = {name: order.index(operand) for name, operand in source.reads.items()}
        # Where a call's operands are found, in the order of `given`; what a first step made comes after them.
        self.places = [places.get(name, _MADE) for name in self.given.names]
        self.slot = self.given.names.index("W") if self.weight is not None else _MADE

    def named(self, operands: Sequence[Tensor], parts: Tensor | None = None) -> dict[str, Tensor]:
        """Tables and operands by name."""
        return {**self.tables, **dict(zip(self.given.names, self._read(operands, parts), strict=True))}

    def _read(self, operands: Sequence[Tensor], parts: Tensor | None) -> list[Tensor]:
        found: list[Any] = [operands[place] if place != _MADE else parts for place in self.places]
        if self.weight is not None:
            found[self.slot] = self.weight.operand(operands[self.at_weight])
        return found

    def __call__(
        self,
        operands: Sequence[Tensor],
        size: int,
        key: Hashable | None,
        parts: Tensor | None = None,
        start: Tensor | None = None,
    ) -> Tensor:
        """Run it."""
        shape = self.source.out_shape(size)
        if key is not None:
            return self.given(*self._read(operands, parts), out_shape=shape, start=start, key=key)
        named = self.named(operands, parts)
        if start is not None:
            named[self.result] = start
        return self.program(tensors=named, out_shape=shape)


def direct_of(form: Form, role: str, device: torch.device, dtype: torch.dtype, *, joint: bool = False) -> Direct | None:
    """The direct statements of a role, remembered; `None` where packed operands are the better way.

    `joint`: all statements are computed together; else each goes over the result again, and the gradient of `y` is made
    in two steps where the first is a long matrix product.
    """

    def build() -> tuple[Direct | None]:
        groups = [g for g in form.groups(role, fused=True) if role != "w" or g.weighted]
        if not _fits(form, groups, most=len(groups) if joint else _GROUPS):
            return (None,)
        return (Direct(form, role, groups, device, dtype, staged=not joint),)

    return form.keep(("direct", role, device, dtype, joint), build)[0]


def _fits(form: Form, groups: Sequence[Group], most: int) -> bool:
    # Along edges rows are read many times, so they are worth packing.
    if form.spec.convolution or not 0 < len(groups) <= most:
        return False
    for group in groups:
        count = form.coefficients(group).value.size
        copies = max(math.prod(group.extents[x] for x in group.letters(operand)) for operand in "xyz")
        if group.mode.pairs or count > POINTS or count * copies > _CELLS:
            return False
    return True

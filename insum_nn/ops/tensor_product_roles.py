"""Run the statements of a tensor product's roles, one role at a time or several together."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial

import torch
from torch import Tensor

from insum_nn.compiler.api import (
    Program,
    fits_between,
    graph_constant,
    is_traced,
    joined_programs,
    paths_are_products,
    records_graph,
)
from insum_nn.dtypes import is_widened
from insum_nn.ops.tensor_product_spec import ProductLayout, TensorProductSpec, layout_of, others
from insum_nn.ops.tensor_product_statement import FirstStep, Operands, Statement, statements_of

__all__ = ["Role", "Roles", "expressions", "role_of", "roles_of"]


class Role:
    """Runs the statements of a role.

    Attributes:
        role: a letter of `ROLES`.
        statements: its statements.
        steps: what a call runs, in order.
        first_width: numbers per row of the first steps' results.
        count: tensors that its statements write.
    """

    def __init__(
        self, layout: ProductLayout, role: str, device: torch.device, dtype: torch.dtype, *, staged: bool
    ) -> None:
        self.layout = layout
        self.role = role
        self.statements = statements_of(layout, role, staged=staged)
        self.first_width = sum(s.first.width for s in self.statements if s.first is not None)
        self._device, self._dtype = device, dtype
        self.steps = [_Step(source, device, dtype) for s in self.statements for source in s.in_order]
        # One statement for each tensor that is written.
        self._written: dict[Hashable, Statement] = {}
        for statement in self.statements:
            self._written.setdefault(statement.written, statement)
        self.count = len(self._written)
        several = len(self.statements) > self.count and paths_are_products(device)
        # A sum of several statements is rounded once.
        self._sums = torch.float32 if several and is_widened(dtype) else None
        packed = [mul for mul in self._written if isinstance(mul, int)]
        self._order = layout.unpacking(role, packed, device) if packed else None
        self._widths = [statement.width for statement in self._written.values()]
        self._pieces = _pieces(layout, [*self._written.values()]) if role == "w" else []

    def of_gradient(self, operand: str) -> Role:
        """Return the same with the gradient of an operand, "gx" of `x`, in its place, for `Roles`."""
        other = copy(self)
        other.statements = [statement.of_gradient(operand) for statement in self.statements]
        other.steps = [_Step(statement, self._device, self._dtype) for statement in other.statements]
        return other

    @property
    def programs(self) -> list[tuple[str, Program, Hashable]]:
        """The program of each statement: the role, the program, and what it adds to."""
        return [(self.role, statement.program, (self.role, statement.written)) for statement in self.statements]

    def __call__(self, operands: Operands, size: int, key: Hashable | None = None) -> Tensor:
        """Return the role's tensor.

        Args:
            operands: of the call, those of `others(role)` among them.
            size: rows of the result.
            key: where nothing is to be recorded and no mode is active: what decides the shapes of all of these.
        """
        if self.first_width and not fits_between(size * self.first_width):
            # The result of a first step would be too large.
            whole = role_of(self.layout, self.role, self._device, self._dtype, staged=False)
            return whole(operands, size, key)
        results: dict[Hashable, Tensor] = {}
        given = list(map(operands.__getitem__, others(self.role)))
        traced = key is None and (records_graph(given) or is_traced(*given))
        for step in self.steps:
            written = step.source.written
            result = step(operands, size, key, results.get(written), traced=traced, sums=self._sums)
            if written == FirstStep.written:
                operands[FirstStep.written] = result
            else:
                results[written] = result
                operands.pop(FirstStep.written, None)
        total = self.finish(list(results.values()), size, traced=traced)
        return total if self._sums is None else total.to(self._dtype)

    def finish(self, results: Sequence[Tensor], size: int, *, traced: bool = False) -> Tensor:
        """Return the role's tensor, from those that the statements wrote, in the order of `programs`."""
        if self.role == "w":
            return self._weights(results, size)
        named = dict(zip(self._written, results, strict=True))
        total = named.pop(None, None)
        if self._order is not None:
            flat = [result.flatten(1) for result in named.values()]
            order, zero = self._order
            if zero:
                flat.append(flat[0].new_zeros(size, 1))
            whole = flat[0] if len(flat) == 1 else torch.cat(flat, 1)
            if order is not None:
                whole = whole.index_select(1, graph_constant(order) if traced else order)
            total = whole if total is None else total + whole
        if total is None:
            return torch.zeros(size, *self.layout.shape(self.role), dtype=self._dtype, device=self._device)
        return total

    def _weights(self, results: Sequence[Tensor], size: int) -> Tensor:
        """Return the gradient of the weights, put together path by path."""
        spec = self.layout.spec
        batch = () if spec.shared else (size,)
        if not results:
            return torch.zeros(*batch, spec.weight_numel, dtype=self._dtype, device=self._device)
        flats = [each.reshape(*batch, width) for each, width in zip(results, self._widths, strict=True)]
        if not self._pieces:
            return flats[0]
        zeros = flats[0].new_zeros(())
        columns = [
            zeros.expand(*batch, count) if at < 0 else flats[at].narrow(-1, first, count)
            for at, first, count in self._pieces
        ]
        return columns[0].contiguous() if len(columns) == 1 else torch.cat(columns, -1)


def _pieces(layout: ProductLayout, statements: Sequence[Statement]) -> list[tuple[int, int, int]]:
    """Return the gradient of the weights as pieces of the statements' results: (statement, first column, columns).

    Statement -1: zeros. No pieces: it is the first statement's result.
    """
    place: dict[int, tuple[int, int]] = {}
    for number, statement in enumerate(statements):
        paths = statement.group.paths
        size = statement.width // len(paths)
        place |= {path: (number, size * at) for at, path in enumerate(paths)}
    pieces: list[tuple[int, int, int]] = []
    for number, path in enumerate(layout.spec.paths):
        if not path.weighted or not path.numel:
            continue
        source, first = place.get(number, (-1, 0))
        if pieces and pieces[-1][0] == source and (source < 0 or sum(pieces[-1][1:]) == first):
            _, before, count = pieces.pop()
            pieces.append((source, before, count + path.numel))
        else:
            pieces.append((source, first, path.numel))
    return [] if statements and pieces == [(0, 0, statements[0].width)] else pieces


class _Step:
    """A statement on a device: its tables, and what makes each of the other tensors that it reads."""

    def __init__(self, source: FirstStep | Statement, device: torch.device, dtype: torch.dtype) -> None:
        self.source = source
        self.tables = source.tables_on(device, dtype)
        names = source.program.names
        self.reads = {name: source.reading(name, device) for name in names if name not in self.tables}
        self._order = [(name, self.reads.get(name)) for name in names]

    def named(self, operands: Operands) -> dict[str, Tensor]:
        """Tables and operands by name."""
        named = dict(self.tables)
        for name, read in self.reads.items():
            named[name] = read(operands)
        return named

    def __call__(
        self,
        operands: Operands,
        size: int,
        key: Hashable | None,
        initial: Tensor | None,
        *,
        traced: bool,
        sums: torch.dtype | None,
    ) -> Tensor:
        """Run it; `sums`: another dtype of the result, to which what is there already is then added."""
        shape = self.source.out_shape(size)
        # Packed entries of one multiplicity have one or two axes of copies.
        initial = None if initial is None else initial.reshape(shape)
        if key is not None and "Src" not in operands and sums is None:
            found = [read(operands) if read is not None else self.tables[name] for name, read in self._order]
            return self.source.program.run_plain(found, shape, initial)
        named = self.named(operands)
        if traced:
            named |= {name: graph_constant(table) for name, table in self.tables.items()}
        if sums is not None:
            result = self.source.program.writing(sums)(tensors=named, out_shape=shape)
            return result if initial is None else result + initial
        if initial is not None:
            named[self.source.program.statement.output.name] = initial
        return self.source.program(tensors=named, out_shape=shape)


class _Named(Mapping[str, Tensor]):
    """What a statement reads, by name: what is computed together reads each tensor once, of whichever statement."""

    __slots__ = ("operands", "step")

    def __init__(self, step: _Step, operands: Operands) -> None:
        self.step, self.operands = step, operands

    def __getitem__(self, name: str) -> Tensor:
        read = self.step.reads.get(name)
        return self.step.tables[name] if read is None else read(self.operands)

    def __iter__(self) -> Iterator[str]:
        return iter((*self.step.tables, *self.step.reads))

    def __len__(self) -> int:
        return len(self.step.tables) + len(self.step.reads)


def role_of(layout: ProductLayout, role: str, device: torch.device, dtype: torch.dtype, *, staged: bool = True) -> Role:
    """Return what runs a role; remembered. Without `staged` in one step always."""
    staged = staged and _is_staged(role, device)
    key = ("role", role, device, dtype, staged)
    return layout.keep(key, lambda: Role(layout, role, device, dtype, staged=staged))


def _is_staged(role: str, device: torch.device) -> bool:
    return role not in "wb" and not paths_are_products(device)


def expressions(
    spec: TensorProductSpec, role: str = "z", device: torch.device | None = None, *, staged: bool = True
) -> tuple[str, ...]:
    """Return the statements that run on a device, by default a CPU, in order.

    Args:
        spec: the representations and paths.
        role: the output, or the gradient of `x`, `y` or `w`; "b" is `tensor_product_right`.
        device: where a second statement may read what a first one made of one operand and the weights.
        staged: such statements; without, those that run where the first one's result takes too much memory.
    """
    layout = layout_of(spec.to_json())
    staged = staged and _is_staged(role, torch.device("cpu") if device is None else device)

    def build() -> tuple[str, ...]:
        statements = statements_of(layout, role, staged=staged)
        return tuple(source.expression for statement in statements for source in statement.in_order)

    return layout.keep(("text", role, staged), build)


class Roles:
    """Runs some roles of a spec: together where the compiler can, else one by one.

    Args:
        layout: of the tensor product.
        requested: letters of `ROLES`.
        device: of all tensors.
        dtype: of the factors.
        grads: roles whose gradients are given. Then each requested role is a sum, over these, of what it is with such a
            gradient in the operand's place: a gradient of gradients.

    Attributes:
        sources: what runs each role by itself.
        joint: what is computed together.
    """

    def __init__(
        self,
        layout: ProductLayout,
        requested: Sequence[str],
        device: torch.device,
        dtype: torch.dtype,
        grads: Sequence[str] = (),
    ) -> None:
        self.sources = {role: role_of(layout, role, device, dtype) for role in requested}
        parts = [*self.sources.values()]
        alone = any(part.first_width for part in parts)
        if grads:
            # Sums of several programs are made together by one kernel alone, which takes one statement of each role.
            alone = alone or paths_are_products(device) or any(len(part.statements) != 1 for part in parts)
            pairs = [] if alone else [(role, left) for left in grads for role in requested if role != left]
            parts = [self.sources[role].of_gradient(left) for role, left in pairs]
        each = [program for part in parts for program in part.programs]
        self.joint = [] if alone else joined_programs(each, device, dtype, sums=bool(grads))
        self._parts = [[part for part in parts if part.role in joint.results] for joint in self.joint]

    def __call__(self, operands: Operands, rows: Mapping[str, int], key: Hashable) -> dict[str, Tensor]:
        """Return the tensors of all roles.

        Args:
            operands: of the call.
            rows: of each role.
            key: what decides the shapes, dtypes and devices of all these: they are plain, and no mode is active.
        """
        found = self.jointly(operands, rows, key)
        for role, source in self.sources.items():
            if role not in found:
                found[role] = source(operands, rows[role], key)
        return found

    def jointly(self, operands: Operands, rows: Mapping[str, int], key: Hashable) -> dict[str, Tensor]:
        """Return the tensors of those that are computed together.

        Args:
            operands: of the call; "gx" is a gradient of `x`, which stands in its place.
            rows: of each role.
            key: as in a call.
        """
        found: dict[str, Tensor] = {}
        for joint, parts in zip(self.joint, self._parts, strict=True):
            named: list[Mapping[str, Tensor]] = []
            for part in parts:
                for step in part.steps:
                    named.append(_Named(step, operands))
            made = joint.programs.together(named, partial(_shapes, parts, rows), key)
            if made is None:
                continue
            at = 0
            for role in joint.results:
                source = self.sources[role]
                found[role] = source.finish(made[at : at + source.count], rows[role])
                at += source.count
        return found


def _shapes(parts: Sequence[Role], rows: Mapping[str, int]) -> list[tuple[int, ...]]:
    return [statement.out_shape(rows[part.role]) for part in parts for statement in part.statements]


def roles_of(
    layout: ProductLayout,
    requested: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    grads: tuple[str, ...] = (),
) -> Roles:
    """Return what runs some roles; remembered."""
    key = ("roles", tuple(requested), grads, device, dtype, torch._C._get_deterministic_algorithms())
    return layout.keep(key, lambda: Roles(layout, requested, device, dtype, grads))

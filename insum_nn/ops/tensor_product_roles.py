"""Run the statements of a tensor product's roles, one role at a time or several together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.api import (
    Program,
    fits_between,
    graph_constant,
    joined_programs,
    paths_are_products,
    records_graph,
)
from insum_nn.ops.tensor_product_spec import NUMBER, ProductLayout, others
from insum_nn.ops.tensor_product_statement import FirstStep, Statement, statements_of

__all__ = ["Edges", "Packed", "Role", "Roles", "expressions_of", "given_of", "role_of", "roles_of"]

# Receivers and senders; `None` where there are no edges.
Edges = tuple[Tensor | None, Tensor | None]
# Packed operands, by the tensor and its columns.
Packed = dict[tuple[int, int], Tensor]
# Returns a tensor that a statement reads, from operands, edges, packed operands and the first step's result.
_Read = Callable[[Sequence[Tensor], Edges, Packed, Tensor | None], Tensor]


class Role:
    """Runs the statements of a role.

    Attributes:
        role: a letter of `ROLES`.
        operands: what it reads, by role; "gx" is a gradient of `x`, in its place.
        statements: its statements.
        first_width: numbers per row of the first steps' results.
        count: tensors that its statements write.
    """

    def __init__(
        self, layout: ProductLayout, role: str, device: torch.device, dtype: torch.dtype, *, staged: bool
    ) -> None:
        self.layout = layout
        self.role = role
        self.operands = tuple(others(role))
        self.statements = statements_of(layout, role, staged=staged)
        self.first_width = sum(s.first.width for s in self.statements if s.first is not None)
        self._device, self._dtype = device, dtype
        self._steps = [_Step(source, role, device, dtype) for s in self.statements for source in s.in_order]
        # One statement for each tensor that is written.
        self._written: dict[Hashable, Statement] = {}
        for statement in self.statements:
            self._written.setdefault(statement.written, statement)
        self.count = len(self._written)
        packed = [mul for mul in self._written if isinstance(mul, int)]
        self._order = layout.unpacking(role, packed, device) if packed else None

    def of_gradient(self, operand: str) -> Role:
        """Return the same with the gradient of an operand in its place, for `Roles`."""
        other = copy(self)
        other.operands = tuple([f"g{x}" if x == operand else x for x in self.operands])
        other.statements = [statement.of_gradient(operand) for statement in self.statements]
        other._steps = [_Step(s, self.role, self._device, self._dtype) for s in other.statements]
        return other

    @property
    def programs(self) -> list[tuple[Program, Hashable]]:
        """The program of each statement, and what it adds to."""
        return [(statement.program, (self.role, statement.written)) for statement in self.statements]

    def __call__(self, given: Sequence[Tensor], edges: Edges, size: int, key: Hashable | None = None) -> Tensor:
        """Return the role's tensor.

        Args:
            given: the operands, in the order of `others(role)`.
            edges: receivers and senders.
            size: rows of the result.
            key: where nothing is to be recorded and no mode is active: what decides the shapes of all of these.
        """
        if (fitting := self.at_size(size)) is not self:
            return fitting(given, edges, size, key)
        packed: Packed = {}
        results: dict[Hashable, Tensor] = {}
        made: Tensor | None = None
        traced = key is None and records_graph(given)
        for step in self._steps:
            written = step.source.written
            result = step(given, edges, size, key, packed, made, results.get(written), traced=traced)
            if written == FirstStep.written:
                made = result
            else:
                results[written] = result
        return self.finish(list(results.values()), size, traced=traced)

    def at_size(self, size: int) -> Role:
        """Return what runs for a number of rows: in one step where the result of the first one would be too large."""
        if not self.first_width or fits_between(size * self.first_width):
            return self
        return role_of(self.layout, self.role, self._device, self._dtype, staged=False)

    @property
    def programs_in_order(self) -> list[Program]:
        """The program of each step of a call."""
        return [step.source.program for step in self._steps]

    def arguments_of(
        self, number: int, given: Sequence[Tensor], edges: Edges, size: int
    ) -> tuple[dict[str, Tensor], tuple[int, ...]]:
        """Return the tensors of one step of a call by name, and the shape of its result, to explain it.

        Zeros stand for what earlier steps make.
        """
        source, before = self._steps[number].source, [step.source for step in self._steps[:number]]
        made = {s.written: given[0].new_zeros(s.out_shape(size)) for s in before}
        named = dict(self._steps[number].named(given, edges, {}, made=made.get(FirstStep.written)))
        if source.written in made and source.written != FirstStep.written:
            named[source.program.statement.output.name] = made[source.written].reshape(source.out_shape(size))
        return named, source.out_shape(size)

    def arguments(
        self, given: Sequence[Tensor], edges: Edges, packed: Packed, *, reads_all: bool = True
    ) -> list[Mapping[str, Tensor]]:
        """Return the tensors of each statement by name, where none has a first step; operands are packed once.

        Without `reads_all` a tensor is made when it is read.
        """
        return [step.named(given, edges, packed, reads_all) for step in self._steps]

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
            return torch.zeros(size, self.layout.dims[self.role], dtype=self._dtype, device=self._device)
        return total

    def _weights(self, results: Sequence[Tensor], size: int) -> Tensor:
        """Return the gradient of the weights, put together path by path."""
        spec = self.layout.spec
        batch = () if spec.shared else (size,)
        flats = [r.reshape(*batch, s.width) for r, s in zip(results, self._written.values(), strict=True)]
        pieces = self.layout.keep(("pieces",), lambda: _pieces(self.layout, list(self._written.values())))
        if not flats:
            return torch.zeros(*batch, spec.weight_numel, dtype=self._dtype, device=self._device)
        if len(pieces) == 1 and pieces[0][0] >= 0 and pieces[0][2] == flats[pieces[0][0]].shape[-1]:
            return flats[pieces[0][0]]
        zeros = flats[0].new_zeros(())
        columns = [
            zeros.expand(*batch, count) if at < 0 else flats[at].narrow(-1, first, count) for at, first, count in pieces
        ]
        return columns[0].contiguous() if len(columns) == 1 else torch.cat(columns, -1)


def _pieces(layout: ProductLayout, statements: Sequence[Statement]) -> list[tuple[int, int, int]]:
    """Return the gradient of the weights as pieces of the statements' results: (statement, first column, columns).

    Statement -1: zeros.
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
    return pieces


class _Step:
    """A statement with its tables, and a function for each of the tensors that it reads."""

    def __init__(self, source: Any, role: str, device: torch.device, dtype: torch.dtype) -> None:
        self.source = source
        self.tables = source.tables_on(device, dtype)
        self.bound = source.program.bind(self.tables)
        order = others(role)
        reads: dict[str, _Read] = {
            "G": lambda given, edges, packed, made: made,  # type: ignore[dict-item, return-value]
            "Dst": lambda given, edges, packed, made: edges[0],  # type: ignore[dict-item, return-value]
            "Src": lambda given, edges, packed, made: edges[1],  # type: ignore[dict-item, return-value]
        }
        for name, operand in source.reads.items():
            reads[name] = _reading(source, operand, order.index(operand), device)
        if source.weight is not None:
            weight, place = source.weight, order.index("w")
            reads[source.weight_name] = lambda given, edges, packed, made: weight.operand(given[place])
        self.reads = {name: reads[name] for name in self.bound.names}
        self._reads = list(self.reads.values())

    def named(
        self,
        given: Sequence[Tensor],
        edges: Edges,
        packed: Packed,
        reads_all: bool = True,
        made: Tensor | None = None,
    ) -> Mapping[str, Tensor]:
        """Tables and operands by name."""
        if not reads_all:
            return _Named(self, given, edges, packed)
        named = dict(self.tables)
        for name, read in self.reads.items():
            named[name] = read(given, edges, packed, made)
        return named

    def __call__(
        self,
        given: Sequence[Tensor],
        edges: Edges,
        size: int,
        key: Hashable | None,
        packed: Packed,
        made: Tensor | None = None,
        initial: Tensor | None = None,
        *,
        traced: bool,
    ) -> Tensor:
        """Run it."""
        shape = self.source.out_shape(size)
        # Packed entries of one multiplicity have one or two axes of copies.
        initial = None if initial is None else initial.reshape(shape)
        found = [read(given, edges, packed, made) for read in self._reads]
        if key is not None and edges[1] is None:
            return self.bound(*found, out_shape=shape, initial=initial, key=key)
        tables = self.tables
        if traced:
            tables = {name: graph_constant(table) for name, table in tables.items()}
        named = {**tables, **dict(zip(self.bound.names, found, strict=True))}
        if initial is not None:
            named[self.source.program.statement.output.name] = initial
        return self.source.program(tensors=named, out_shape=shape)


class _Named(Mapping[str, Tensor]):
    """What a statement reads, by name: what is computed together reads each tensor once, of whichever statement."""

    __slots__ = ("edges", "given", "packed", "step")

    def __init__(self, step: _Step, given: Sequence[Tensor], edges: Edges, packed: Packed) -> None:
        self.step, self.given, self.edges, self.packed = step, given, edges, packed

    def __getitem__(self, name: str) -> Tensor:
        read = self.step.reads.get(name)
        return self.step.tables[name] if read is None else read(self.given, self.edges, self.packed, None)

    def __iter__(self) -> Iterator[str]:
        return iter((*self.step.tables, *self.step.reads))

    def __len__(self) -> int:
        return len(self.step.tables) + len(self.step.reads)


def _reading(source: Statement | FirstStep, operand: str, at: int, device: torch.device) -> _Read:
    """Return what makes the tensor that a statement reads of an operand."""
    if not source.packed:
        return lambda given, edges, packed, made: given[at]
    mul = source.group.muls[NUMBER[operand]]
    start, order = source.layout.packing(operand, mul, device)
    count = order.numel()
    shape = (count // mul, *source.group.shape(operand))

    def read(given: Sequence[Tensor], edges: Edges, packed: Packed, made: Tensor | None) -> Tensor:
        tensor = given[at]
        if start is not None:
            # Single copies are packed already.
            flat = tensor if count == tensor.shape[1] else tensor.narrow(1, start, count)
            return flat.reshape(tensor.shape[0], *shape)
        place = (id(tensor), id(order))
        flat = packed.get(place)
        if flat is None:
            flat = tensor.index_select(1, graph_constant(order) if records_graph(given) else order)
            packed[place] = flat
        return flat.reshape(tensor.shape[0], *shape)

    return read


def role_of(layout: ProductLayout, role: str, device: torch.device, dtype: torch.dtype, *, staged: bool = True) -> Role:
    """Return what runs a role; remembered. Without `staged` in one step always."""
    staged = staged and _is_staged(role, device)
    key = ("role", role, device, dtype, staged)
    return layout.keep(key, lambda: Role(layout, role, device, dtype, staged=staged))


def _is_staged(role: str, device: torch.device) -> bool:
    return role != "w" and not paths_are_products(device)


def expressions_of(layout: ProductLayout, role: str, device: torch.device, *, staged: bool = True) -> tuple[str, ...]:
    """Return the statements that make a role on a device, in order; remembered. Without `staged` in one step always."""
    staged = staged and _is_staged(role, device)

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
        pairs = [(role, left) for left in grads for role in requested if role != left]
        self.sources = {role: role_of(layout, role, device, dtype) for role in requested}
        self._parts = [*self.sources.values()]
        sums = bool(grads)
        steps = any(part.first_width or (sums and len(part.statements) != 1) for part in self._parts)
        # Of sums there are several programs, which are made only where one kernel takes them.
        each = self._programs() * (1 + sums)
        self.joint = [] if steps else joined_programs(each, device, dtype, sums=sums)
        if sums and self.joint:
            self._parts = [self.sources[role].of_gradient(operand) for role, operand in pairs]
            self.joint = joined_programs(self._programs(), device, dtype, sums=True)

    def _programs(self) -> list[tuple[str, Program, Hashable]]:
        return [(part.role, *each) for part in self._parts for each in part.programs]

    def __call__(
        self, operands: Mapping[str, Tensor], edges: Edges, rows: Mapping[str, int], key: Hashable
    ) -> dict[str, Tensor]:
        """Return the tensors of all roles.

        Args:
            operands: by role.
            edges: receivers and senders.
            rows: of each role.
            key: what decides the shapes, dtypes and devices of all these: they are plain, and no mode is active.
        """

        def alone(role: str) -> Tensor:
            return self.sources[role](given_of(operands, role), edges, rows[role], key)

        found = self.jointly(operands, edges, rows, key, lambda roles: [alone(role) for role in roles])
        for role in self.sources:
            if role not in found:
                found[role] = alone(role)
        return found

    def jointly(
        self,
        operands: Mapping[str, Tensor],
        edges: Edges,
        rows: Mapping[str, int],
        key: Hashable,
        separately: Callable[[Sequence[str]], list[Tensor]],
    ) -> dict[str, Tensor]:
        """Return the tensors of those that are computed together.

        Args:
            operands: by role; "gx" is a gradient of `x`, which stands in its place.
            edges: receivers and senders.
            rows: of each role.
            key: as in a call.
            separately: computes some roles one by one: what one kernel is measured against.
        """
        found: dict[str, Tensor] = {}
        packed: Packed = {}
        for joint in self.joint:
            parts = [part for part in self._parts if part.role in joint.results]
            named: list[Mapping[str, Tensor]] = []
            for part in parts:
                own = tuple(map(operands.__getitem__, part.operands))
                named += part.arguments(own, edges, packed, reads_all=joint.programs.reads_all)
            shapes = partial(_shapes, parts, rows)
            made = joint.programs.together(named, shapes, key, partial(separately, joint.results))
            if made is None:
                continue
            at = 0
            for role in joint.results:
                count = self.sources[role].count
                found[role] = self.sources[role].finish(made[at : at + count], rows[role])
                at += count
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


def given_of(operands: Mapping[str, Tensor], role: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the operands of a role, in the order of `others(role)`."""
    first, second, third = others(role)
    return operands[first], operands[second], operands[third]

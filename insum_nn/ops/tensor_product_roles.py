"""Run the statements of a tensor product's roles, one role at a time or several together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.api import FusedPrograms, SharedPaths, graph_constant, paths_are_products, records_graph
from insum_nn.dtypes import is_widened
from insum_nn.ops.tensor_product_spec import NUMBER, ProductLayout, others
from insum_nn.ops.tensor_product_statement import FirstStep, Statement, statements_of

__all__ = ["Edges", "Packed", "Role", "Sizes", "Together", "of_one_kernel", "role_of", "together_of", "totals_of"]

# Receivers and senders; `None` where there are no edges.
Edges = tuple[Tensor | None, Tensor | None]
# Packed operands, by the tensor and its columns.
Packed = dict[tuple[int, int], Tensor]
# Rows of the results of several roles, and the shapes of what their statements write.
Sizes = tuple[Sequence[int], list[tuple[int, ...]]]
# Returns a tensor that a statement reads, from operands, edges, packed operands and the first step's result.
_Read = Callable[[Sequence[Tensor], Edges, Packed, Tensor | None], Tensor]


class Role:
    """Runs the statements of a role.

    Attributes:
        role: a letter of `ROLES`.
        operands: what it reads, by role; "gx" is a gradient of `x`, in its place.
        statements: its statements.
        first_width: numbers per row of the first steps' results.
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
        self._steps = [
            (_Step(s, role, device, dtype), None if s.first is None else _Step(s.first, role, device, dtype))
            for s in self.statements
        ]
        # One statement for each tensor that is written.
        self._written: dict[Hashable, Statement] = {}
        for statement in self.statements:
            self._written.setdefault(statement.written, statement)
        packed = [mul for mul in self._written if isinstance(mul, int)]
        self._order = layout.unpacking(role, packed, device) if packed else None

    def of_gradient(self, operand: str) -> Role:
        """Return the same with the gradient of an operand in its place, for `Together`."""
        other = copy(self)
        other.operands = tuple([f"g{x}" if x == operand else x for x in self.operands])
        other.statements = [statement.of_gradient(operand) for statement in self.statements]
        other._steps = [(_Step(s, self.role, self._device, self._dtype), None) for s in other.statements]
        return other

    @property
    def outputs(self) -> list[tuple[str, Hashable]]:
        """What each statement adds to."""
        return [(self.role, statement.written) for statement in self.statements]

    def __call__(self, given: Sequence[Tensor], edges: Edges, size: int, key: Hashable | None = None) -> Tensor:
        """Return the role's tensor.

        Args:
            given: the operands, in the order of `others(role)`.
            edges: receivers and senders.
            size: rows of the result.
            key: where nothing is to be recorded and no mode is active: what decides the shapes of all of these.
        """
        packed: Packed = {}
        results: dict[Hashable, Tensor] = {}
        traced = key is None and records_graph(given)
        for step, first in self._steps:
            made = None if first is None else first(given, edges, size, key, packed, traced=traced)
            written = step.source.written
            initial = results.get(written)
            results[written] = step(given, edges, size, key, packed, made, initial, traced=traced)
        return self.finish(list(results.values()), size, traced=traced)

    def arguments(self, given: Sequence[Tensor], edges: Edges, packed: Packed) -> list[Mapping[str, Tensor]]:
        """Return the tensors of each statement by name, where none has a first step; operands are packed once."""
        return [step.named(given, edges, packed) for step, _ in self._steps]

    def finish(self, results: Sequence[Tensor], size: int, *, traced: bool = False) -> Tensor:
        """Return the role's tensor, from those that the statements wrote, in the order of `outputs`."""
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

    def named(self, given: Sequence[Tensor], edges: Edges, packed: Packed) -> Mapping[str, Tensor]:
        """Tables and operands by name."""
        return _Named(self, given, edges, packed)

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
    staged = staged and role == "y" and not paths_are_products(device)
    key = ("role", role, device, dtype, staged)
    return layout.keep(key, lambda: Role(layout, role, device, dtype, staged=staged))


class Together:
    """Several roles that the compiler computes together, reading or multiplying common operands once.

    Args:
        sources: the roles; those of one letter add up.
        programs: theirs: on a CPU as products path by path, on a GPU as one kernel.

    Attributes:
        roles: their letters, each once.
    """

    def __init__(self, sources: Sequence[Role], programs: FusedPrograms | SharedPaths) -> None:
        self.sources = tuple(sources)
        self.programs = programs
        self._firsts = {source.role: source for source in reversed(sources)}
        self.roles = "".join(dict.fromkeys(source.role for source in sources))
        # Of each role: how many tensors its statements write.
        self._counts = [len(set(self._firsts[role].outputs)) for role in self.roles]

    def sizes(self, rows: Mapping[str, int]) -> Sizes:
        """Rows of the results of all roles, and the shape of what each statement writes."""
        shapes = [s.out_shape(rows[source.role]) for source in self.sources for s in source.statements]
        return [rows[role] for role in self.roles], shapes

    def __call__(
        self,
        operands: Mapping[str, Tensor],
        edges: Edges,
        sizes: Sizes,
        key: Hashable,
        separately: Callable[[], list[Tensor]],
    ) -> dict[str, Tensor] | None:
        """Return the tensors of all roles; `None`: they are to be computed one by one.

        Args:
            operands: by role; "gx" is a gradient of `x`, where a role reads it in its place.
            edges: receivers and senders.
            sizes: of the results.
            key: what decides the shapes of all of these.
            separately: computes them one by one: what one kernel is measured against.
        """
        packed: Packed = {}
        rows, shapes = sizes
        named: list[Mapping[str, Tensor]] = []
        for source in self.sources:
            named += source.arguments([operands[name] for name in source.operands], edges, packed)
        results = self.programs.together(named, shapes, key, separately)
        if results is None:
            return None
        found: dict[str, Tensor] = {}
        for role, size, count in zip(self.roles, rows, self._counts, strict=True):
            found[role] = self._firsts[role].finish(results[:count], size)
            results = results[count:]
        return found


def together_of(
    layout: ProductLayout, roles: Sequence[str], device: torch.device, dtype: torch.dtype
) -> Together | None:
    """Return what computes some roles together, remembered; `None`: they are computed one by one.

    It is products of a library for all of them, or one kernel for those of them for which that can be.
    """
    fixed = layout.spec.options.deterministic or torch.are_deterministic_algorithms_enabled()
    by_path = paths_are_products(device)
    if not by_path:
        roles = next(iter(of_one_kernel(layout, roles)), [])
        if len(roles) < 2:
            return None

    def build() -> tuple[Together | None]:
        sources = [role_of(layout, role, device, dtype) for role in roles]
        programs = [statement.program for source in sources for statement in source.statements]
        if by_path:
            outputs = [output for source in sources for output in source.outputs]
            return (Together(sources, SharedPaths(programs, outputs)),)
        if len(programs) != len(roles) or any(source.first_width for source in sources):
            return (None,)
        return (Together(sources, FusedPrograms(programs, deterministic=fixed)),)

    return layout.keep(("together", tuple(roles), fixed, device, dtype), build)[0]


def totals_of(
    layout: ProductLayout, roles: Sequence[str], grads: Sequence[str], device: torch.device, dtype: torch.dtype
) -> Together | None:
    """Return what sums roles over the operands in whose place they read a gradient, remembered; `None`: nothing does.

    Such are the gradients of gradients, by one kernel for all of them.
    """
    pairs = [(role, left) for left in grads for role in roles if role != left]
    fixed = layout.spec.options.deterministic or torch.are_deterministic_algorithms_enabled()
    if paths_are_products(device) or len(pairs) < 2:
        return None

    def build() -> tuple[Together | None]:
        sources = [role_of(layout, role, device, dtype) for role, _ in pairs]
        if any(len(source.statements) != 1 or source.first_width for source in sources):
            return (None,)
        several = [role_of(layout, role, device, dtype).of_gradient(operand) for role, operand in pairs]
        programs = [source.statements[0].program for source in several]
        return (Together(several, FusedPrograms(programs, [role for role, _ in pairs], deterministic=fixed)),)

    return layout.keep(("totals", tuple(pairs), fixed, device, dtype), build)[0]


def of_one_kernel(layout: ProductLayout, roles: Sequence[str], dtype: torch.dtype | None = None) -> list[list[str]]:
    """Return the roles that sum over the edges of a node or have a row for each edge, those of one kernel together.

    `dtype`: where its sums are not to be added up in memory, one kernel forms those of one end of the edges alone.
    """
    if not layout.spec.convolution:
        return []
    # Weights that edges share have no row for each edge.
    found = [role for role in roles if role != "w" or not layout.spec.shared]
    fixed = layout.spec.options.deterministic or torch.are_deterministic_algorithms_enabled()
    if (fixed or (dtype is not None and is_widened(dtype))) and "x" in found and "z" in found:
        found.remove("z")
        return [found, ["z"]]
    return [found]

"""Run the statements of a tensor product's roles, one role at a time or several together."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from insum_nn.compiler.api import (
    Artifact,
    StatementGraph,
    Step,
    fits_between,
    fits_both_ends,
    graph_constant,
    is_traced,
    paths_are_products,
    watched,
)
from insum_nn.dtypes import is_widened
from insum_nn.ops.tensor_product_spec import ProductLayout, TensorProductSpec, layout_of, others
from insum_nn.ops.tensor_product_statement import FirstStep, Operands, Reader, Statement, statements_of
from insum_nn.tensor_cache import insert

__all__ = ["Role", "Roles", "Together", "expressions", "role_of", "roles_of"]

Sizes = tuple[int, ...]
# What runs a kind of call, if anything, and the sizes of its statements and outputs.
_Kind = tuple[Artifact | None, Sequence[Sizes], Sequence[Sizes]]
# Kinds of calls that are kept ready.
_LIMIT = 64


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
        self.steps = [step.put_on(device, dtype) for s in self.statements for step in s.in_order]
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
        traced = key is None and is_traced(*given)
        for step in self.steps:
            program, written, shape = step.program, step.written, step.out_shape(size)
            tensors = [step.placed[name] if read is None else read(operands) for name, _, read in step.inputs]
            if traced:
                reads = zip(tensors, step.inputs, strict=True)
                tensors = [graph_constant(tensor) if read is None else tensor for tensor, (_, _, read) in reads]
            initial = results.get(written)
            if initial is not None:
                # Packed entries of one multiplicity have one or two axes of copies.
                initial = initial.reshape(shape)
            if self._sums is not None:
                made = program.writing(self._sums)(tensors=program.named(tensors, None), out_shape=shape)
                made = made if initial is None else made + initial
            elif key is not None:
                made = program.run_plain(tensors, shape, initial)
            else:
                made = program(tensors=program.named(tensors, initial), out_shape=shape)
            if written == FirstStep.written:
                operands[FirstStep.written] = made
            else:
                results[written] = made
                operands.pop(FirstStep.written, None)
        total = self.finish(list(results.values()), size, traced=traced)
        return total if self._sums is None else total.to(self._dtype)

    def finish(self, results: Sequence[Tensor], size: int, *, traced: bool = False) -> Tensor:
        """Return the role's tensor, from those that the statements wrote, in their order."""
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


class Together:
    """Steps of one role or several as one C function, or as one kernel of several outputs.

    Args:
        steps: each with its role.
        deterministic: every run is to give the same bits.

    Attributes:
        roles: what they compute.
        reason: how one kernel was decided on last, or why there is none; "" for C functions.
    """

    def __init__(self, steps: Sequence[tuple[str, FirstStep | Statement]], *, deterministic: bool) -> None:
        self.roles = tuple(dict.fromkeys(role for role, _ in steps))
        self._steps = steps
        # Steps that write the same tensor add up.
        numbers: dict[Hashable, int] = {}
        slots: dict[Hashable, int] = {}
        self._tables: list[Any] = []
        self._reads: dict[int, Reader] = {}
        self._statements: list[Step] = []
        for number, (role, step) in enumerate(steps):
            for name, meaning, read in step.inputs:
                if slots.setdefault(meaning, len(slots)) == len(self._tables):
                    self._tables.append(step.placed.get(name))
                    if read is not None:
                        self._reads[slots[meaning]] = read
            output = numbers.setdefault((role, step.written), len(numbers))
            places = [slots[meaning] for _, meaning, _ in step.inputs]
            self._statements.append(Step.of(step.program.spec, places, output, number))
        fixed = {*slots.values()} - {*self._reads}
        self._graph = StatementGraph(self._statements, deterministic=deterministic, fixed=fixed)
        self._kinds: dict[Hashable, _Kind] = {}
        self.reason = ""

    def __call__(self, operands: Operands, rows: Mapping[str, int], key: Hashable) -> Sequence[Tensor] | None:
        """Return the tensors that they write; `None`: they are to run one by one, or until one function is compiled."""
        pool = list(self._tables)
        for slot, read in self._reads.items():
            pool[slot] = read(operands)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kind(pool, rows)
            insert(self._kinds, key, kind, _LIMIT)
        artifact, extents, shapes = kind
        if artifact is None:
            return None
        made = artifact.run(pool, extents, shapes, None)
        self.reason = artifact.reason
        return made

    def _kind(self, pool: Sequence[Tensor], rows: Mapping[str, int]) -> _Kind:
        """Find the sizes of a kind of call."""
        extents: list[Sizes] = []
        outputs: dict[int, Sizes] = {}
        for (role, step), (spec, places, output, _, _) in zip(self._steps, self._statements, strict=True):
            tensors = list(map(pool.__getitem__, places))
            found = spec.agree(tensors, step.program.sizes, step.out_shape(rows[role]))
            if found is None or outputs.setdefault(output, found.output) != found.output:
                # What adds up are two views of one tensor.
                return None, (), ()
            extents.append(found.indices)
        return self._graph.artifact(pool), extents, list(outputs.values())


def role_of(layout: ProductLayout, role: str, device: torch.device, dtype: torch.dtype, *, staged: bool = True) -> Role:
    """Return what runs a role; remembered. Without `staged` in one step always."""
    staged = staged and role not in "wb" and not paths_are_products(device)
    key = ("role", role, device, dtype, staged)
    return layout.keep(key, lambda: Role(layout, role, device, dtype, staged=staged))


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
    device = torch.device("cpu") if device is None else device
    found = role_of(layout_of(spec.to_json()), role, device, torch.float32, staged=staged)
    return tuple(step.expression for step in found.steps)


class Roles(NamedTuple):
    """Runs some roles of a spec: together where the compiler can, else one by one.

    Attributes:
        sources: what runs each role by itself.
        joint: what is computed together.
    """

    sources: Mapping[str, Role]
    joint: Sequence[Together]

    def __call__(self, operands: Operands, rows: Mapping[str, int], key: Hashable | None) -> dict[str, Tensor]:
        """Return the tensors of all roles.

        Args:
            operands: of the call.
            rows: of each role.
            key: as of a role.
        """
        # Who asks which statements run is shown each.
        found = {} if key is None or watched.get() is not None else self.jointly(operands, rows, key)
        for role, source in self.sources.items():
            if role not in found:
                found[role] = source(operands, rows[role], key)
        return found

    def jointly(self, operands: Operands, rows: Mapping[str, int], key: Hashable) -> dict[str, Tensor]:
        """Return the tensors of those that are computed together.

        Args:
            operands: of the call; "gx" is a gradient of `x`, which stands in its place.
            rows: of each role.
            key: what decides the shapes, dtypes and devices of all these: they are plain, and no mode is active.
        """
        found: dict[str, Tensor] = {}
        for joint in self.joint:
            made = joint(operands, rows, key)
            if made is None:
                continue
            at = 0
            for role in joint.roles:
                source = self.sources[role]
                found[role] = source.finish(made[at : at + source.count], rows[role])
                at += source.count
        return found


def _together(
    spec: TensorProductSpec, sources: Mapping[str, Role], grads: Sequence[str], device: torch.device, dtype: torch.dtype
) -> list[Together]:
    """Return what computes several roles at once."""
    steps = [(role, step) for role, source in sources.items() for step in source.steps]
    fixed = torch.are_deterministic_algorithms_enabled() or spec.options.deterministic
    if paths_are_products(device):
        # Sums of several statements are made together by one kernel alone.
        sets = [] if grads else [steps]
    elif not spec.convolution or any(source.first_width for source in sources.values()):
        sets = []
    else:
        # One kernel walks the entries of an index tensor: it makes their rows, and the rows that they name.
        names = [role for role, source in sources.items() if source.steps and (role != "w" or not spec.shared)]
        apart = fixed
        if grads:
            if any(len(source.steps) != 1 for source in sources.values()):
                return []
            pairs = [(sources[role], left) for left in grads for role in sources if role != left]
            steps = [(own.role, own.statements[0].of_gradient(left).put_on(device, dtype)) for own, left in pairs]
            cells = [source.statements[0].cells for source in sources.values()]
            apart = fixed or not fits_both_ends(max(cells), dtype)
        # By name, so that the choice does not depend on the order in which roles are requested.
        others = sorted({"x", "z"}.intersection(names))[1:] if apart else []
        kernels = [[name for name in names if name not in others], others]
        sets = [[each for each in steps if each[0] in kernel] for kernel in kernels]
        if not grads:
            sets = [each for each in sets[:1] if len(each) == len(kernels[0])]
    return [Together(each, deterministic=fixed) for each in sets if len(each) > 1]


def roles_of(
    layout: ProductLayout,
    requested: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    grads: tuple[str, ...] = (),
) -> Roles:
    """Return what runs some roles; remembered.

    Args:
        layout: of the tensor product.
        requested: letters of `ROLES`.
        device: of all tensors.
        dtype: of the factors.
        grads: roles whose gradients are given. Then each requested role is a sum, over these, of what it is with such a
            gradient in the operand's place: a gradient of gradients.
    """

    def build() -> Roles:
        sources = {role: role_of(layout, role, device, dtype) for role in requested}
        return Roles(sources, _together(layout.spec, sources, grads, device, dtype))

    key = ("roles", tuple(requested), grads, device, dtype, torch._C._get_deterministic_algorithms())
    return layout.keep(key, build)

"""Run the statements of a tensor product's roles: together where the compiler can, else one after the other."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from insum_nn.compiler.api import (
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
from insum_nn.ops.tensor_product_spec import ProductLayout, TensorProductSpec, layout_of
from insum_nn.ops.tensor_product_statement import Operands, Reader, Statement, statements_of
from insum_nn.tensor_cache import insert

__all__ = ["Joint", "expressions", "joint_of", "joints_of"]

# The statements of some roles in order, each with the role that it computes.
Steps = Sequence[tuple[str, Statement]]
Sizes = tuple[int, ...]
# Sizes of calls that are kept.
_LIMIT = 64
# Columns of a piece on average, from which on a representation is put together piece by piece.
_LONG_PIECES = 16


class Joint:
    """Runs the statements of one role or several: as one C function or kernel, or in order.

    Args:
        layout: of the tensor product.
        roles: letters of `ROLES`.
        steps: their statements.
        device: of all tensors.
        dtype: of the factors.
        together: several may be one C function or kernel.

    Attributes:
        roles: what it computes.
        steps: what runs.
        graph: the same as steps of one program, in which later ones read or add to what earlier ones wrote.
        between: numbers per row of what its first steps make.
    """

    def __init__(
        self,
        layout: ProductLayout,
        roles: Sequence[str],
        steps: Steps,
        device: torch.device,
        dtype: torch.dtype,
        *,
        together: bool = False,
    ) -> None:
        self.layout, self.roles, self.steps = layout, tuple(roles), steps
        self.between = sum(step.width for _, step in steps if step.role == "g")
        self._device, self._dtype = device, dtype
        # Statements that write the same tensor add up.
        outputs: dict[Hashable, int] = {}
        slots: dict[Hashable, int] = {}
        written: dict[str, dict[int, Statement]] = {role: {} for role in roles}
        self._tables: list[Any] = []
        self._reads: dict[int, Reader] = {}
        statements: list[Step] = []
        for number, (role, step) in enumerate(steps):
            places: list[int] = []
            for name, meaning, read in step.inputs:
                if isinstance(meaning, Statement):
                    places.append(-1 - outputs[role, meaning])
                    continue
                if slots.setdefault(meaning, len(slots)) == len(self._tables):
                    self._tables.append(step.placed.get(name))
                    if read is not None:
                        self._reads[slots[meaning]] = read
                places.append(slots[meaning])
            output = outputs.setdefault((role, step.written), len(outputs))
            statements.append(Step.of(step.program.spec, places, output, number))
            if step.role != "g":
                written[role].setdefault(output, step)
        self._results = {role: _Result(layout, role, own, device, dtype) for role, own in written.items()}
        # A sum of several statements is rounded once.
        sums = [role for role, step in steps if step.role != "g" and paths_are_products(device) and is_widened(dtype)]
        self._wide = {role for role in roles if sums.count(role) > len(written[role])}
        self._together = together and len(steps) > 1 and not self._wide
        self.graph = StatementGraph(statements)
        # Those of calls, by the shapes of their operands.
        self._sizes: dict[Hashable, tuple[Sequence[Sizes], Sequence[Sizes]]] = {}

    def __call__(
        self, operands: Operands, rows: Mapping[str, int], *, plain: bool = False, in_order: bool = True
    ) -> dict[str, Tensor]:
        """Return the tensors of its roles.

        Args:
            operands: of the call; "gx" is a gradient of `x`, which stands in its place.
            rows: of each role.
            plain: nothing is to be recorded, and no mode is active.
            in_order: run the statements one after the other where there is nothing for all of them; else return none.
        """
        if self.between and not fits_between(self.between * rows[self.roles[0]]):
            # The result of a first step would be too large.
            (role,) = self.roles
            return joint_of(self.layout, role, self._device, self._dtype, staged=False)(operands, rows, plain=plain)
        traced = not plain and is_traced(*operands.values())
        # Who asks which statements run is shown each.
        together = plain and self._together and watched.get() is None
        # Of a call, before what is packed joins the operands.
        key = (*[tensor.shape for tensor in operands.values()], *rows.values()) if together else ()
        pool: list[Any] = list(self._tables)
        if traced:
            pool = [table if table is None else graph_constant(table) for table in pool]
        for slot, read in self._reads.items():
            pool[slot] = read(operands)
        made = self._at_once(pool, rows, key) if together else None
        if made is None and not in_order:
            return {}
        made = made or self._in_order(pool, rows, plain=plain)
        return {role: result(made.__getitem__, rows[role], traced=traced) for role, result in self._results.items()}

    def _at_once(self, pool: Sequence[Tensor], rows: Mapping[str, int], key: Hashable) -> Sequence[Tensor] | None:
        """Run them as one C function or kernel; `None`: there is none, or it is not compiled yet."""
        sizes = self._sizes.get(key)
        if sizes is None:
            sizes = self._found_sizes(pool, rows)
            insert(self._sizes, key, sizes, _LIMIT)
        artifact = self.graph.artifact(pool) if sizes[0] else None
        return artifact and artifact.run(pool, *sizes, None)

    def _found_sizes(self, pool: Sequence[Tensor], rows: Mapping[str, int]) -> tuple[Sequence[Sizes], Sequence[Sizes]]:
        """Return the sizes of the statements and outputs of a call; none where it is to run in order."""
        extents: list[Sizes] = []
        shapes: dict[int, Sizes] = {}
        for (role, step), (spec, places, output, _, _) in zip(self.steps, self.graph.steps, strict=True):
            tensors = list(map(pool.__getitem__, places))
            found = spec.agree(tensors, step.program.sizes, step.out_shape(rows[role]))
            if found is None or shapes.setdefault(output, found.output) != found.output:
                # What adds up are two views of one tensor.
                return (), ()
            extents.append(found.indices)
        return extents, list(shapes.values())

    def _in_order(self, pool: Sequence[Tensor], rows: Mapping[str, int], *, plain: bool) -> dict[int, Tensor]:
        """Run statement after statement, each of which adds to what those before it made of the same tensor."""
        made: dict[int, Tensor] = {}
        for (role, step), (_, places, output, _, _) in zip(self.steps, self.graph.steps, strict=True):
            program, shape, initial = step.program, step.out_shape(rows[role]), made.get(output)
            # What a first step made is read once.
            tensors = [pool[at] if at >= 0 else made.pop(-1 - at) for at in places]
            if initial is not None:
                # Packed entries of one multiplicity have one or two axes of copies.
                initial = initial.reshape(shape)
            if role in self._wide:
                part = program.writing(torch.float32)(tensors=program.named(tensors, None), out_shape=shape)
                made[output] = part if initial is None else part + initial
            elif plain:
                made[output] = program.run_plain(tensors, shape, initial)
            else:
                made[output] = program(tensors=program.named(tensors, initial), out_shape=shape)
        return made


class _Result:
    """Puts a role together from what its statements wrote.

    Args:
        layout: of the tensor product.
        role: a letter of `ROLES`.
        written: the number of each of their outputs, and a statement that writes it.
        device: of all tensors.
        dtype: of the role.
    """

    def __init__(
        self,
        layout: ProductLayout,
        role: str,
        written: Mapping[int, Statement],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._shape, self._device, self._dtype = layout.shape(role), device, dtype
        self._batched = role != "w" or not layout.spec.shared
        self._whole = next((output for output, statement in written.items() if statement.columns is None), None)
        columns = {n: own for n, statement in written.items() if (own := statement.columns) is not None}
        self._packed = [(output, own.size) for output, own in columns.items()]
        # For each column which of these has it, none where it is zero, and where.
        source, place = np.full(self._shape[0], len(columns)), np.zeros(self._shape[0], np.int64)
        for number, own in enumerate(columns.values()):
            source[own], place[own] = number, np.arange(own.size)
        missing = source == len(columns)
        starts = np.cumsum([0, *(own.size for own in columns.values())])
        begins = np.flatnonzero((np.diff(source, prepend=-1) != 0) | ((np.diff(place, prepend=-1) != 1) & ~missing))
        sizes = np.diff(begins, append=source.size)
        self._pieces = [*zip(*(each.tolist() for each in (source[begins], place[begins], sizes)), strict=True)]
        self._order: Tensor | None = None
        self._gaps = bool(missing.any())
        if source.size < _LONG_PIECES * len(self._pieces):
            self._order = torch.from_numpy(starts[source] + place).to(device)

    def __call__(self, made: Callable[[int], Tensor], size: int, *, traced: bool) -> Tensor:
        """Return the role's tensor, from the outputs by number."""
        batch = (size,) if self._batched else ()
        total = None if self._whole is None else made(self._whole)
        if self._packed:
            packed = [made(at).reshape(*batch, width) for at, width in self._packed]
            found = packed[0] if len(self._pieces) == 1 else self._unpacked(packed, batch, traced=traced)
            total = found if total is None else total + found
        if total is None:
            return torch.zeros(*batch, *self._shape, dtype=self._dtype, device=self._device)
        return total if total.dtype == self._dtype else total.to(self._dtype)

    def _unpacked(self, packed: list[Tensor], batch: tuple[int, ...], *, traced: bool) -> Tensor:
        """Return a representation, or the weights, of what the statements wrote: pieces of these, and zeros."""
        if self._order is not None:
            if self._gaps:
                packed.append(packed[0].new_zeros(*batch, 1))
            whole = packed[0] if len(packed) == 1 else torch.cat(packed, -1)
            return whole.index_select(-1, graph_constant(self._order) if traced else self._order)
        zero = packed[0].new_zeros(()) if self._gaps else packed[0]
        pieces = [
            packed[at].narrow(-1, first, count) if at < len(packed) else zero.expand(*batch, count)
            for at, first, count in self._pieces
        ]
        return torch.cat(pieces, -1)


def joint_of(
    layout: ProductLayout, role: str, device: torch.device, dtype: torch.dtype, *, staged: bool = True
) -> Joint:
    """Return what runs one role statement by statement; remembered. Without `staged` in one step always."""

    def build() -> Joint:
        found = statements_of(layout, role, staged=staged and role not in "wb" and not paths_are_products(device))
        steps = [step.put_on(device, dtype) for each in found for step in (each.first, each) if step is not None]
        return Joint(layout, role, [(role, step) for step in steps], device, dtype)

    return layout.keep(("role", role, device, dtype, staged), build)


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
    found = joint_of(layout_of(spec.to_json()), role, device, torch.float32, staged=staged)
    return tuple(step.expression for _, step in found.steps)


def joints_of(
    layout: ProductLayout,
    requested: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    grads: tuple[str, ...] = (),
) -> list[Joint]:
    """Return what computes some roles, those first that are computed together; remembered.

    Args:
        layout: of the tensor product.
        requested: letters of `ROLES`.
        device: of all tensors.
        dtype: of the factors.
        grads: roles whose gradients are given. Then each requested role is a sum, over these, of what it is with such a
            gradient in the operand's place: a gradient of gradients. Only what is computed together is returned.
    """
    deterministic = torch._C._get_deterministic_algorithms() or layout.spec.options.deterministic

    def joint(roles: Sequence[str], steps: Steps) -> Joint:
        own = [each for each in steps if each[0] in roles]
        return Joint(layout, roles, own, device, dtype, together=True)

    def build() -> list[Joint]:
        single = {role: joint_of(layout, role, device, dtype) for role in requested}
        if paths_are_products(device):
            # Gradients of gradients are made together by one kernel alone.
            return [] if grads else [joint(requested, [each for own in single.values() for each in own.steps])]
        spec, together, others = layout.spec, list[str](), list[str]()
        steps = {role: statement for role, own in single.items() for _, statement in own.steps}
        once = {role for role, own in single.items() if len(own.steps) == 1}
        if spec.convolution and not any(own.between for own in single.values()):
            # One kernel walks the entries of an index tensor: it makes their rows, and the rows that they name.
            together = [role for role in steps if role != "w" or not spec.shared]
            cells = max((statement.cells for statement in steps.values()), default=0)
            apart = deterministic or (bool(grads) and not fits_both_ends(cells, dtype))
            # By name, so that the choice does not depend on the order in which roles are requested.
            others = sorted({"x", "z"}.intersection(together))[1:] if apart else []
            together = [role for role in together if role not in others]
        if grads:
            if not together or len(once) < len(single):
                return []
            pairs = [(role, left) for left in grads for role in steps if role != left]
            made = [(role, steps[role].of_gradient(left).put_on(device, dtype)) for role, left in pairs]
            return [joint(each, made) for each in (together, others) if each]
        if len(together) < 2 or not once.issuperset(together):
            together = []
        rest = [own for role, own in single.items() if role not in together]
        return [joint(together, [*steps.items()]), *rest] if together else rest

    return layout.keep(("roles", tuple(requested), grads, device, dtype, deterministic), build)

"""The run of one role of a tensor product, with everything decided that operands of one device and dtype share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from insum_nn.compiler.api import graph_constant
from insum_nn.ops.tensor_product_form import Form
from insum_nn.ops.tensor_product_spec import NUMBER, others
from insum_nn.ops.tensor_product_statement import Reading, Statement, WeightAccess

__all__ = ["Packed", "Plan", "plan_of"]

# Columns of operands, by the operand and their order.
Packed = dict[tuple[int, int], Tensor]


@dataclass(frozen=True, slots=True)
class _Columns:
    """An operand's entries of one multiplicity side by side, copies fastest.

    Attributes:
        position: of the operand among those given.
        start: the first column, if they lie so already.
        order: the columns.
        count: how many.
    """

    position: int
    start: int | None
    order: Tensor
    count: int

    def __call__(self, tensor: Tensor) -> Tensor:
        if self.start is None:
            return tensor.index_select(1, self.order)
        # Single copies side by side already lie as they are wanted.
        return tensor if self.count == tensor.shape[1] else tensor.narrow(1, self.start, self.count)


@dataclass(frozen=True, slots=True)
class _View:
    """What a statement reads of an operand: some of the columns, as (row, component, copies...)."""

    columns: int
    first: int
    components: int
    shape: tuple[int, ...]
    whole: bool

    def __call__(self, flats: Sequence[Tensor]) -> Tensor:
        flat = flats[self.columns]
        if self.whole:
            return flat.reshape(flat.shape[0], *self.shape)
        copies = flat.shape[1] // self.shape[0]
        packed = flat.reshape(flat.shape[0], self.shape[0], copies).narrow(1, self.first, self.components)
        return packed.reshape(flat.shape[0], self.components, *self.shape[1:])


@dataclass(frozen=True, slots=True)
class _Step:
    """One program: what it reads by name, and from where."""

    source: Reading
    tables: dict[str, Tensor]
    views: tuple[tuple[str, int], ...]
    weight: WeightAccess | None
    edges: tuple[str, ...]
    feed: int | None = None


class Plan:
    """Runs the statements of a role on tensors as they come, and puts the result together as it is expected."""

    def __init__(
        self, form: Form, role: str, statements: Sequence[Statement], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.form = form
        self.role = role
        self.statements = tuple(statements)
        self.device, self.dtype = device, dtype
        self._at_weight = others(role).find("w")
        self._columns: dict[tuple[str, int], int] = {}
        self._views: dict[_View, int] = {}
        self.columns: list[_Columns] = []
        feeds = list(dict.fromkeys(s.feed for s in self.statements if s.feed is not None))
        self.feeds = [self._step(feed) for feed in feeds]
        self.steps = [self._step(s, None if s.feed is None else feeds.index(s.feed)) for s in self.statements]
        self.views = list(self._views)
        self.feed_width = sum(feed.width for feed in feeds)
        self.row_bytes = dtype.itemsize * max([self.feed_width, *(s.between for s in self.statements)])
        if role == "w":
            self._pieces = form.weight_pieces(self.statements)
        else:
            self._orders, self._needs_zero = form.unpacking(role, self.statements, device)

    # Once.

    def _step(self, source: Reading, feed: int | None = None) -> _Step:
        views = tuple((name, self._view(source, operand)) for name, operand in source.reads.items())
        return _Step(
            source,
            source.tables_on(self.device, self.dtype),
            views,
            source.weight if self._at_weight >= 0 else None,
            source.edges,
            feed,
        )

    def _view(self, source: Reading, operand: str) -> int:
        form, group = self.form, source.group
        mul = group.muls[NUMBER[operand]]
        start, order = form.packing(operand, mul, self.device)
        if (operand, mul) not in self._columns:
            self._columns[operand, mul] = len(self.columns)
            self.columns.append(_Columns(others(self.role).index(operand), start, order, order.numel()))
        total = order.numel() // mul
        first, count = 0, total
        if operand == "z" and isinstance(source, Statement) and source.whole:
            (number,) = group.entries
            first, count = form.components["z"][number], form.entries["z"][number].size
        shape = (total, *group.shape(operand))
        view = _View(self._columns[operand, mul], first, count, shape, count == total)
        return self._views.setdefault(view, len(self._views))

    def in_graph(self) -> Plan:
        """The plan with its tables as constants of the graph that torch records."""

        def own(step: _Step) -> _Step:
            return replace(step, tables={name: graph_constant(table) for name, table in step.tables.items()})

        plan = copy(self)
        plan.feeds, plan.steps = list(map(own, self.feeds)), list(map(own, self.steps))
        plan.columns = [replace(each, order=graph_constant(each.order)) for each in self.columns]
        if self.role != "w":
            plan._orders = [None if order is None else graph_constant(order) for order in self._orders]
        return plan

    # Each time.

    def arguments(self, statement: int, given: Sequence[Tensor], edges: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Everything that a statement without a feed reads, by name."""
        return self._named(self.steps[statement], self._operands(given), given, edges, ())

    def _operands(self, given: Sequence[Tensor], packed: Packed | None = None) -> list[Tensor]:
        """What the statements read of the operands; those that are in `packed` already are taken from there."""
        packed = {} if packed is None else packed
        flats: list[Tensor] = []
        for columns in self.columns:
            place = (id(given[columns.position]), id(columns.order))
            if place not in packed:
                packed[place] = columns(given[columns.position])
            flats.append(packed[place])
        return [view(flats) for view in self.views]

    def _named(
        self,
        step: _Step,
        operands: Sequence[Tensor],
        given: Sequence[Tensor],
        edges: Sequence[Tensor | None],
        made: Sequence[Tensor],
    ) -> dict[str, Tensor]:
        named = dict(step.tables)
        for name, at in step.views:
            named[name] = operands[at]
        if step.weight is not None:
            named["W"] = step.weight.operand(given[self._at_weight])
        for name, index in zip(("Dst", "Src"), edges, strict=True):
            if index is not None and name in step.edges:
                named[name] = index
        if step.feed is not None:
            named["G"] = made[step.feed]
        return named

    def __call__(self, given: Sequence[Tensor], edges: Sequence[Tensor | None], size: int) -> Tensor:
        """The role's tensor, of `size` rows.

        Args:
            given: the operands, in the order of `others(role)`.
            edges: receivers and senders, or `None`.
            size: rows of the result.
        """
        operands = self._operands(given)
        made: list[Tensor] = []
        if self.feeds:
            # Rows of `y` are samples, or edges.
            made = [self._result(step, self._named(step, operands, given, edges, ()), size) for step in self.feeds]
        return self.finish(
            (self._result(s, self._named(s, operands, given, edges, made), size) for s in self.steps), size
        )

    def single(self, given: Sequence[Tensor], edges: Sequence[Tensor | None], packed: Packed) -> dict[str, Tensor]:
        """Everything that the only statement reads, by name; operands are brought side by side once for all plans."""
        (step,) = self.steps
        return self._named(step, self._operands(given, packed), given, edges, ())

    @property
    def outputs(self) -> list[tuple[str, int]]:
        """What each statement adds to: a tensor of its own."""
        return [(self.role, at) for at in range(len(self.steps))]

    def all_arguments(
        self, given: Sequence[Tensor], edges: Sequence[Tensor | None], packed: Packed
    ) -> list[dict[str, Tensor]]:
        """Everything that each statement reads, by name; operands are brought side by side once for all plans."""
        operands = self._operands(given, packed)
        return [self._named(step, operands, given, edges, ()) for step in self.steps]

    def finish(self, results: Iterable[Tensor], size: int) -> Tensor:
        """The role's tensor, from what its statements made."""
        return self._weights(results, size) if self.role == "w" else self._representation(results, size)

    def _result(self, step: _Step, named: dict[str, Tensor], size: int) -> Tensor:
        return step.source.program(tensors=named, out_shape=step.source.out_shape(size))

    def _representation(self, results: Iterable[Tensor], size: int) -> Tensor:
        if any(statement.in_place for statement in self.statements):
            (result,) = results
            return result
        columns = [r.reshape(size, s.width) for r, s in zip(results, self.statements, strict=True)]
        if not columns:
            return torch.zeros(size, self.form.dims[self.role], dtype=self.dtype, device=self.device)
        if self._needs_zero:
            columns.append(torch.zeros(size, 1, dtype=self.dtype, device=self.device))
        side_by_side = columns[0] if len(columns) == 1 else torch.cat(columns, 1)
        total: Tensor | None = None
        for order in self._orders:
            part = side_by_side if order is None else side_by_side.index_select(1, order)
            total = part if total is None else total + part
        # The widest representation may still have no components at all.
        return side_by_side if total is None else total

    def _weights(self, results: Iterable[Tensor], size: int) -> Tensor:
        made = list(results)
        if not made:
            batch = () if self.form.spec.shared else (size,)
            return torch.zeros(*batch, self.form.spec.weight_numel, dtype=self.dtype, device=self.device)
        return self.form.join_weights(self.statements, made, self._pieces, size)


def plan_of(
    form: Form,
    role: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    split: bool,
    staged: bool,
    in_place: bool = False,
) -> Plan:
    """The plan of a role; remembered. The arguments are those of `Form.statements`."""

    def build() -> Plan:
        statements = form.statements(role, split=split, staged=staged, in_place=in_place)
        return Plan(form, role, statements, device, dtype)

    return form.keep(("plan", role, device, dtype, split, staged, in_place), build)

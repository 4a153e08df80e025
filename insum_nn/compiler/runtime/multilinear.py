"""Sums over the same index tensors that are each other's gradients: differentiable to any order, from a few statements.

Where an output is linear in each of its operands, its derivative by an operand is a sum over the output's gradient and
the other operands. So derivatives of every order are made of one sum for each tensor, and a structure that is
kept (a transposed order, an inverse map) lets each of them write its result by rows, with no atomic addition.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from insum_nn.compiler.runtime.modes import (
    is_plain_eager,
    to_autocast,
    without_autocast,
)
from insum_nn.compiler.runtime.program import Program
from insum_nn.compiler.runtime.recorded import Recorded, record
from insum_nn.compiler.runtime.steps.needed_gradients import needed_gradients

__all__ = [
    "BoundSums",
    "JointSums",
    "Multilinear",
    "joint_gradients",
    "multilinear",
    "multilinear_jointly",
    "multilinear_traced",
]


class Multilinear(Protocol):
    """A sum for each of several tensors, from all the others that it names."""

    @property
    def operands(self) -> Mapping[str, tuple[str, ...]]:
        """What each sum reads, by the name of the tensor it computes; the relation is symmetric."""
        ...

    def in_modes(self, requested: str, operands: tuple[Tensor, ...], initial: Tensor | None = None) -> Tensor:
        """Compute it by programs, which follow every active mode and have derivatives of their own."""
        ...


class BoundSums(ABC):
    """A `Multilinear` of statements with their index tensors bound: a class says which, and what they read."""

    operands: Mapping[str, tuple[str, ...]]

    @abstractmethod
    def call(
        self, requested: str, operands: tuple[Tensor, ...], made: dict[str, Tensor] | None
    ) -> tuple[Program, Sequence[Tensor], tuple[Any, ...]]:
        """Return the statement that computes a tensor, what it reads in the order of its names, and its output's shape.

        `made` is for what one sum makes of an operand and the next sum of the same tensors can use, by name; `None`
        where a mode is active.
        """

    def result(self, requested: str, written: Tensor) -> Tensor:
        """Return the tensor of that name from what its statement wrote."""
        return written

    def eager(
        self, requested: str, operands: tuple[Tensor, ...], made: dict[str, Tensor], initial: Tensor | None = None
    ) -> Tensor:
        """Compute a tensor in eager mode without autocast, where nothing is recorded; `made` is as for `call`."""
        program, read, shape = self.call(requested, operands, made)
        initial = initial if initial is None else _in_axes(initial, shape)
        return self.result(requested, program.run_plain(read, shape, initial))

    def in_modes(self, requested: str, operands: tuple[Tensor, ...], initial: Tensor | None = None) -> Tensor:
        """Compute a tensor under any mode, as `Multilinear` says."""
        program, read, shape = self.call(requested, operands, None)
        named = program.named(read, _in_axes(initial, shape))
        return self.result(requested, program(tensors=named, out_shape=shape))


def _in_axes(initial: Tensor | None, shape: tuple[Any, ...]) -> Tensor | None:
    """Cut an initial value of every row (n,) into the other axes of a statement's output."""
    return initial if initial is None or initial.ndim == len(shape) - 1 else initial.reshape(shape[1:])


def multilinear(
    sums: BoundSums, requested: str, *operands: Tensor, initial: Tensor | None = None, plain: bool = False
) -> Tensor:
    """Compute one of the tensors from the others; differentiable to any order.

    Args:
        sums: the sum of each tensor.
        requested: the name of the result.
        *operands: those of `sums.operands[requested]`, in its order. Under autocast they take its dtype.
        initial: the initial value of every row of it: (n,), or the same cut into axes.
        plain: the caller knows that all of them are plain tensors in eager mode.
    """
    if not plain and not is_plain_eager(*operands, initial):
        return sums.in_modes(requested, tuple(map(to_autocast, operands)), initial)
    if torch._C._is_any_autocast_enabled():
        operands = tuple(map(to_autocast, operands))
    if torch.is_grad_enabled():
        # A loop instead of `any`: no generator in every call.
        for tensor in (*operands, initial):
            if tensor is not None and tensor.requires_grad:
                return record(_SumCall(sums, requested), initial, *operands)  # type: ignore[no-any-return]
    return _computed(sums, requested, operands, {}, initial)


class _SumCall(NamedTuple):
    """A call of `multilinear`."""

    sums: BoundSums
    requested: str

    def run(self, ctx: Any, initial: Tensor | None, tensors: tuple[Tensor, ...]) -> Tensor:
        sums, requested = self
        needed = ctx.needs_input_grad[2:]
        # An operand is read again for the gradients of the others alone.
        count = sum(needed)
        if count < len(needed) or count == 1:
            saved: list[Tensor | None] = list(tensors)
            for at, own in enumerate(needed):
                if count <= own:
                    saved[at] = None
            ctx.save_for_backward(*saved)
        else:
            ctx.save_for_backward(*tensors)
        ctx.initial_shape = None if initial is None else initial.shape
        if torch._C._is_any_autocast_enabled():
            return _computed(sums, requested, tensors, {}, initial)
        return sums.eager(requested, tensors, {}, initial)

    def gradients(self, ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        (sums, left), shape, (grad,) = self, ctx.initial_shape, grads
        assert grad is not None
        names = sums.operands[left]
        needed = needed_gradients(ctx, 2, len(names), (type(sums), left), before=shape is not None)
        unrecorded = not torch.is_grad_enabled() and is_plain_eager(grad)
        tensors: dict[str, Any] = dict(zip(names, ctx.saved_tensors, strict=True))
        tensors[left] = grad
        autocast = torch._C._is_any_autocast_enabled()
        made: dict[str, Tensor] = {}
        found: list[Tensor | None] = [None]
        for at, requested in enumerate(names):
            if not needed[at]:
                found.append(None)
                continue
            operands = tuple(map(tensors.__getitem__, sums.operands[requested]))
            if not unrecorded:
                found.append(multilinear(sums, requested, *operands))
            elif autocast:
                found.append(_computed(sums, requested, operands, made, None))
            else:
                found.append(sums.eager(requested, operands, made))
        if ctx.needs_input_grad[1]:
            total = grad.sum(0)
            found[0] = total if total.shape == shape else total.reshape(shape)
        return tuple(found)


def _computed(
    sums: BoundSums,
    requested: str,
    operands: tuple[Tensor, ...],
    made: dict[str, Tensor],
    initial: Tensor | None,
) -> Tensor:
    if torch.is_grad_enabled():
        with torch.no_grad():
            return _computed(sums, requested, operands, made, initial)
    with without_autocast(operands[0].device):
        return sums.eager(requested, operands, made, initial)


def multilinear_traced(sums: Multilinear, requested: str, *operands: Tensor, initial: Tensor | None = None) -> Tensor:
    """Compute the same in a graph that torch records: gradients are the sums' own, not their statements' derivatives.

    `initial` is (n,).
    """
    return Recorded.apply(_TracedCall(sums, requested), initial, *operands)  # type: ignore[no-any-return]


class _TracedCall(NamedTuple):
    sums: Multilinear
    requested: str

    def run(self, ctx: Any, initial: Tensor | None, tensors: tuple[Tensor, ...]) -> Tensor:
        ctx.save_for_backward(*tensors)
        return self.sums.in_modes(self.requested, tensors, initial)

    def gradients(self, ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        (sums, left), (grad,) = self, grads
        assert grad is not None
        names, (of_initial, *needed) = sums.operands[left], ctx.needs_input_grad[1:]
        tensors = {**dict(zip(names, ctx.saved_tensors, strict=True)), left: grad}
        found = [
            multilinear_traced(sums, name, *map(tensors.__getitem__, sums.operands[name])) if own else None
            for name, own in zip(names, needed, strict=True)
        ]
        return grad.sum(0) if of_initial else None, *found


class JointSums(Protocol):
    """Sums that are each other's gradients, several of which are computed at once: what they read is read once."""

    @property
    def kind(self) -> Hashable:
        """Equal for calls of the same statements."""
        ...

    @property
    def indices(self) -> tuple[Tensor | None, ...]:
        """The index tensors, which must not be written to before a backward pass."""
        ...

    def run(
        self, requested: Sequence[str], operands: Mapping[str, Tensor], *, plain: bool = False
    ) -> dict[str, Tensor]:
        """Compute the tensors of these names, without a record for gradients.

        `plain`: the caller knows that all are plain tensors in eager mode.
        """
        ...

    def totals(
        self, grads: Mapping[str, Tensor], requested: Sequence[str], operands: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Compute what the gradients of several results add up to, without a record: those that are made at once.

        Of the others each result's is computed, and they are added.

        Args:
            grads: those of the results, by name; of plain tensors, as all are.
            requested: the names of the operands whose gradients are requested.
            operands: what the results were computed from.
        """
        ...

    def in_modes(self, requested: str, operands: Mapping[str, Tensor]) -> Tensor:
        """Compute one of them under any active mode, differentiable to any order."""
        ...

    def derivative(
        self, left: str, requested: Sequence[str], operands: Mapping[str, Tensor]
    ) -> tuple[JointSums, dict[str, Tensor]]:
        """Return the sums that the gradients of `left` are, and those gradients that need no sum."""
        ...


def multilinear_jointly(
    sums: JointSums, requested: Sequence[str], operands: Mapping[str, Tensor], *, plain: bool = False
) -> dict[str, Tensor]:
    """Compute some tensors from others, all of them plain; differentiable to any order.

    Args:
        sums: the sum of each tensor.
        requested: the names of the results.
        operands: what they are computed from, by name; where one result is requested, it may be among them and is not
            read.
        plain: the caller knows that they are plain tensors in eager mode.
    """
    if torch.is_grad_enabled():
        # A loop instead of `any`: no generator in every call.
        for tensor in operands.values():
            if tensor.requires_grad:
                names, given = tuple(requested), operands
                if len(names) == 1 and names[0] in operands:
                    given = dict(operands)
                    del given[names[0]]
                read = tuple(given)
                call = _JointCall(sums, names, read, plain)
                made: Any = record(call, None, *given.values(), *sums.indices)
                return dict(zip(names, made, strict=True))
    return sums.run(requested, operands, plain=plain)


def joint_gradients(
    sums: JointSums, left: str, requested: Sequence[str], operands: Mapping[str, Tensor], *, plain: bool
) -> dict[str, Tensor]:
    """Compute the gradients of what one of the sums computed.

    Args:
        sums: the sum of each tensor.
        left: the name of what was computed.
        requested: the names of the operands whose gradients are requested.
        operands: of all names; under `left` the gradient of what was computed.
        plain: they were plain tensors when it was.
    """
    sums, found = sums.derivative(left, requested, operands)
    rest = requested
    if found:
        rest = [name for name in requested if name not in found]
    if not rest:
        return found
    if not plain or not is_plain_eager(*operands.values()):
        return found | {name: sums.in_modes(name, operands) for name in rest}
    made = multilinear_jointly(sums, rest, operands, plain=True)
    return found | made if found else made


class _JointCall(NamedTuple):
    """A call of `multilinear_jointly`: the names of its results and of what they are computed from."""

    sums: JointSums
    requested: tuple[str, ...]
    read: tuple[str, ...]
    plain: bool

    def run(self, ctx: Any, initial: Tensor | None, tensors: tuple[Any, ...]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        made = self.sums.run(self.requested, dict(zip(self.read, tensors, strict=False)), plain=self.plain)
        return tuple(map(made.__getitem__, self.requested))

    def gradients(self, ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        sums, made, read, _ = self
        # After the operands come the index tensors, whose versions torch has checked now.
        operands = dict(zip(read, ctx.saved_tensors, strict=False))
        total: dict[str, Tensor] = {}
        needed = list(compress(read, needed_gradients(ctx, 2, len(read), (sums.kind, made, read))))
        given: dict[str, Tensor] = {}
        for left, grad in zip(made, grads, strict=True):
            if grad is not None:
                given[left] = grad
        unrecorded = not torch.is_grad_enabled() and is_plain_eager(*operands.values(), *given.values())
        if len(given) > 1 and unrecorded:
            total = sums.totals(given, needed, operands)
            needed = [name for name in needed if name not in total]
        for left, grad in given.items():
            requested = needed
            if left in needed:
                requested = [name for name in needed if name != left]
            if not requested:
                continue
            found = joint_gradients(sums, left, requested, {**operands, left: grad}, plain=True)
            # Gradients of weights of edges are the largest tensors of a step: none stays longer than it is read.
            while found:
                name, part = found.popitem()
                if name not in total:
                    total[name] = part
                elif torch.is_grad_enabled():
                    total[name] = total[name] + part
                else:
                    total[name].add_(part)
                del part
        made_of_read = list(map(total.get, read))
        total.clear()
        if unrecorded:
            # A view keeps its base, and torch adds to memory that nothing else refers to.
            made_of_read = [g.detach() if g is not None and g._is_view() else g for g in made_of_read]
        return None, *made_of_read, *[None] * len(sums.indices)

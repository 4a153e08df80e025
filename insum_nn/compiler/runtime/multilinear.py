"""Sums over the same index tensors that are each other's gradients: differentiable to any order, from a few statements.

Where an output is linear in each of its operands, its derivative by an operand is a sum over the output's gradient and
the other operands. So derivatives of every order are made of one sum for each tensor, and a structure that is
kept (a transposed order, an inverse map) lets each of them write its result by rows, with no atomic addition.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from insum_nn.compiler.runtime.modes import is_plain_eager, without_autocast
from insum_nn.compiler.runtime.needed_gradients import needed_gradients
from insum_nn.compiler.runtime.recorded import Recorded, record

__all__ = ["Sums", "multilinear"]

Operands = Mapping[str, Tensor]


class Sums(Protocol):
    """A sum for each of several tensors, from the others: their gradients are each other."""

    @property
    def kind(self) -> Hashable:
        """Equal for calls of the same statements."""
        return type(self)

    @property
    def indices(self) -> tuple[Tensor | None, ...]:
        """The index tensors, which must not be written to before a backward pass."""
        return ()

    @abstractmethod
    def run(
        self, requested: Sequence[str], operands: Operands, initial: Tensor | None = None, *, plain: bool = False
    ) -> dict[str, Tensor]:
        """Compute the tensors of these names, without a record for gradients.

        `plain`: the caller knows that all are plain tensors in eager mode, and has suspended autocast.
        """

    def in_modes(self, requested: str, operands: Operands, initial: Tensor | None = None) -> Tensor:
        """Compute one of them under any active mode, differentiable to any order."""
        return multilinear(self, (requested,), operands, initial)[requested]

    def totals(self, grads: Operands, requested: Sequence[str], operands: Operands) -> dict[str, Tensor]:
        """Compute what the gradients of several results add up to, without a record: those that are made at once.

        Of the others each result's is computed, and they are added.

        Args:
            grads: those of the results, by name; of plain tensors, as all are.
            requested: the names of the operands whose gradients are requested.
            operands: what the results were computed from.
        """
        return {}

    def derivative(self, left: str) -> Sums:
        """Return the sums that the gradients of one of them are."""
        return self


def multilinear(
    sums: Sums, requested: Sequence[str], operands: Operands, initial: Tensor | None = None, *, plain: bool = False
) -> dict[str, Tensor]:
    """Compute some tensors from others; differentiable to any order.

    Args:
        sums: the sum of each tensor.
        requested: the names of the results.
        operands: what they are computed from, by name; where one result is requested, it may be among them and is not
            read.
        initial: the initial value of every row of a single result: (n,), or the same cut into axes.
        plain: the caller knows that they are plain tensors in eager mode.
    """
    if torch.is_grad_enabled():
        # A loop instead of `any`: no generator in every call.
        for tensor in (*operands.values(), initial):
            if tensor is not None and tensor.requires_grad:
                names, given = tuple(requested), operands
                if len(names) == 1 and names[0] in operands:
                    given = dict(operands)
                    del given[names[0]]
                apply = record if plain else Recorded.apply
                made: Any = apply(_Call(sums, names, tuple(given), plain), initial, *given.values(), *sums.indices)
                return dict(zip(names, [made] if len(names) == 1 else made, strict=True))
    if torch._C._is_any_autocast_enabled():
        # Operands have their dtypes already.
        with without_autocast(next(iter(operands.values())).device):
            return sums.run(requested, operands, initial, plain=plain)
    return sums.run(requested, operands, initial, plain=plain)


class _Call(NamedTuple):
    """A call of `multilinear`: the names of its results and of what they are computed from."""

    sums: Sums
    requested: tuple[str, ...]
    read: tuple[str, ...]
    plain: bool

    def run(self, ctx: Any, initial: Tensor | None, tensors: tuple[Any, ...]) -> Tensor | tuple[Tensor, ...]:
        sums, requested, read, plain = self
        run = partial(multilinear, sums) if torch._C._is_any_autocast_enabled() else sums.run
        made = run(requested, dict(zip(read, tensors, strict=False)), initial, plain=plain)
        needed = ctx.needs_input_grad[2:]
        # An operand is read again for the gradients of the others alone.
        count = sum(needed)
        if count < len(read) or count == 1:
            tensors = tuple([t if count > own else None for t, own in zip(tensors, needed, strict=True)])
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.initial_shape = None if initial is None else initial.shape
        return made[requested[0]] if len(requested) == 1 else tuple(map(made.__getitem__, requested))

    def gradients(self, ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        (sums, made, read, _), shape = self, ctx.initial_shape
        # After the operands come the index tensors, whose versions torch has checked now.
        operands = {name: t for name, t in zip(read, ctx.saved_tensors, strict=False) if t is not None}
        total: dict[str, Tensor] = {}
        where = (sums.kind, made, read)
        needed = list(compress(read, needed_gradients(ctx, len(read), where, before=shape is not None)))
        given = {left: grad for left, grad in zip(made, grads, strict=True) if grad is not None}
        plain = self.plain and is_plain_eager(*given.values())
        recorded = torch.is_grad_enabled()
        if len(given) > 1 and plain and not recorded:
            with without_autocast(next(iter(given.values())).device):
                total = sums.totals(given, needed, operands)
            needed = [name for name in needed if name not in total]
        for left, grad in given.items():
            requested = [name for name in needed if name != left] if left in needed else needed
            if not requested:
                continue
            own, factors = sums.derivative(left), {**operands, left: grad}
            if plain:
                found = multilinear(own, requested, factors, plain=True)
            else:
                found = {name: own.in_modes(name, factors) for name in requested}
            # Gradients of weights of edges are the largest tensors of a step: none stays longer than it is read.
            while found:
                name, part = found.popitem()
                if name not in total:
                    total[name] = part
                elif recorded:
                    total[name] = total[name] + part
                else:
                    total[name].add_(part)
                del part
        made_of_read = list(map(total.get, read))
        total.clear()
        if plain and not recorded:
            # A view keeps its base, and torch adds to memory that nothing else refers to.
            for at, found_grad in enumerate(made_of_read):
                if found_grad is not None and found_grad._is_view():
                    made_of_read[at] = found_grad.detach()
        of_initial = grads[0].sum(0).reshape(shape) if ctx.needs_input_grad[1] and grads[0] is not None else None
        return of_initial, *made_of_read, *[None] * len(sums.indices)

"""Three tensors of which each is a sum over the two others, so that each one's gradient is such a sum as well.

A sparse convolution and a linear map of blocks are of this kind: output, input and weight are linear in each other, and
the derivative of one of the three sums, by either of its operands, is another of them. So derivatives of every order
are made of three statements, each of which writes its output in the way that suits it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Trilinear", "contract"]


class Trilinear(Protocol):
    """Three names, and the sum that leaves each of them."""

    @property
    def operands(self) -> Mapping[str, tuple[str, str]]:
        """What a sum is made of, by what it leaves."""
        ...

    def sum(self, wanted: str, a: Tensor, b: Tensor, made: dict[str, Tensor]) -> Tensor:
        """The tensor of that name from its operands, in their order; nothing is recorded.

        `made` is for what one sum makes of an operand and the next sum of the same three tensors can use, by name.
        """
        ...


def contract(form: Trilinear, wanted: str, a: Tensor, b: Tensor) -> Tensor:
    """The tensor of a name from the two others; differentiable to any order.

    Args:
        form: the three sums.
        wanted: what is left.
        a: the first of `form.operands[wanted]`.
        b: the second.
    """
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Contract.apply(form, wanted, a, b)  # type: ignore[no-any-return]
    with torch.no_grad():
        return form.sum(wanted, a, b, {})


class _Contract(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Trilinear, wanted: str, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.rest = form, wanted
        return form.sum(wanted, a, b, {})

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        form, left = ctx.rest
        names = form.operands[left]
        known = {left: grads[0], **dict(zip(names, ctx.saved_tensors, strict=True))}
        learned = torch.is_grad_enabled()
        made: dict[str, Tensor] = {}
        found: list[Tensor | None] = []
        for wanted, needed in zip(names, ctx.needs_input_grad[2:], strict=True):
            if not needed:
                found.append(None)
                continue
            a, b = (known[other] for other in form.operands[wanted])
            found.append(contract(form, wanted, a, b) if learned else form.sum(wanted, a, b, made))
        return None, None, *found

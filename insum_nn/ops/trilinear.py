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

from insum_nn.compiler.api import for_each_vector, is_plain_eager
from insum_nn.compiler.options import Options
from insum_nn.ops.column_sums import column_sums

__all__ = ["Trilinear", "contract"]


class Trilinear(Protocol):
    """Three names, and the sum that leaves each of them."""

    @property
    def operands(self) -> Mapping[str, tuple[str, str]]:
        """What a sum is made of, by what it leaves."""
        ...

    @property
    def options(self) -> Options:
        """Compile options of every sum."""
        ...

    def sum(self, wanted: str, a: Tensor, b: Tensor, made: dict[str, Tensor], start: Tensor | None = None) -> Tensor:
        """The tensor of that name from its operands, in their order; in eager mode, where nothing is recorded.

        `made` is for what one sum makes of an operand and the next sum of the same three tensors can use, by name.
        """
        ...

    def watched(self, wanted: str, a: Tensor, b: Tensor, start: Tensor | None = None) -> Tensor:
        """The same by the compiler's operator, which follows every active mode, and has its own derivatives."""
        ...


def contract(form: Trilinear, wanted: str, a: Tensor, b: Tensor, start: Tensor | None = None) -> Tensor:
    """The tensor of a name from the two others; differentiable to any order.

    Args:
        form: the three sums.
        wanted: what is left.
        a: the first of `form.operands[wanted]`.
        b: the second.
        start: what every row of it starts from: (n,), or the same cut into axes.
    """
    if not is_plain_eager(a, b, start):
        return form.watched(wanted, a, b, start)
    if torch.is_grad_enabled():
        if a.requires_grad or b.requires_grad or (start is not None and start.requires_grad):
            return _Contract.apply(form, wanted, a, b, start)  # type: ignore[no-any-return]
        with torch.no_grad():
            return form.sum(wanted, a, b, {}, start)
    return form.sum(wanted, a, b, {}, start)


class _Contract(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Trilinear, wanted: str, a: Tensor, b: Tensor, start: Tensor | None) -> Tensor:
        _, _, of_a, of_b, _ = ctx.needs_input_grad
        ctx.save_for_backward(a if of_b else None, b if of_a else None)
        ctx.rest = form, wanted, None if start is None else start.shape
        return form.sum(wanted, a, b, {}, start)

    @staticmethod
    @for_each_vector
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        form, left, start = ctx.rest
        grad, names = grads[0], form.operands[left]
        known = {left: grad, **dict(zip(names, ctx.saved_tensors, strict=True))}
        alone = not torch.is_grad_enabled() and is_plain_eager(grad)
        made: dict[str, Tensor] = {}
        found: list[Tensor | None] = []
        for wanted, needed in zip(names, ctx.needs_input_grad[2:4], strict=True):
            if not needed:
                found.append(None)
                continue
            first, second = form.operands[wanted]
            a, b = known[first], known[second]
            found.append(form.sum(wanted, a, b, made) if alone else contract(form, wanted, a, b))
        of_start = None
        if ctx.needs_input_grad[4]:
            of_start = column_sums(grad, options=form.options).reshape(start)
        return None, None, *found, of_start

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

from insum_nn.ops.graph_product import transformed

__all__ = ["Trilinear", "contract", "ordinary"]


class Trilinear(Protocol):
    """Three names, and the sum that leaves each of them."""

    @property
    def operands(self) -> Mapping[str, tuple[str, str]]:
        """What a sum is made of, by what it leaves."""
        ...

    def sum(self, wanted: str, a: Tensor, b: Tensor) -> Tensor:
        """The tensor of that name from its operands, in their order; nothing is recorded."""
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
        return form.sum(wanted, a, b)


_PLAIN = (Tensor, torch.nn.Parameter)


def ordinary(*tensors: Tensor) -> bool:
    """Whether nobody records, replaces or differentiates torch's calls by other means than autograd."""
    if torch.compiler.is_compiling() or transformed() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all([type(t) in _PLAIN and not t.is_meta for t in tensors])


class _Contract(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Trilinear, wanted: str, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.rest = form, wanted
        return form.sum(wanted, a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        form, left = ctx.rest
        names = form.operands[left]
        known = {left: grads[0], **dict(zip(names, ctx.saved_tensors, strict=True))}
        found: list[Tensor | None] = []
        for wanted, needed in zip(names, ctx.needs_input_grad[2:], strict=True):
            a, b = (known[other] for other in form.operands[wanted])
            found.append(contract(form, wanted, a, b) if needed else None)
        return None, None, *found

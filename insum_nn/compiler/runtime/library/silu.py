"""The activation silu with derivatives that are few operators: torch's own become many where they are recorded.

Where a graph of the first derivative is recorded (`create_graph=True`), as for a loss on forces, torch computes it from
the sigmoid by six operators, and keeps what is between them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from insum_nn.compiler.runtime.batched_gradients import for_each_vector
from insum_nn.compiler.runtime.modes import is_plain_eager

__all__ = ["silu"]

# In fp16 and bf16 what is between the operators would be rounded.
_DTYPES = (torch.float32, torch.float64)


def silu(x: Tensor) -> Tensor:
    """Compute `x * sigmoid(x)`; differentiable to any order.

    >>> silu(torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.7311])
    """
    if x.requires_grad and torch.is_grad_enabled() and x.dtype in _DTYPES and is_plain_eager(x):
        return _Silu.apply(x)  # type: ignore[no-any-return]
    return functional.silu(x)


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return functional.silu(x)

    @staticmethod
    @for_each_vector
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad,), (x,) = grads, ctx.saved_tensors
        return (_slope(grad, x),)


def _slope(grad: Any, x: Tensor) -> Tensor:
    """The gradient of `x`."""
    if torch.is_grad_enabled() and is_plain_eager(grad, x):
        return _Slope.apply(grad, x)  # type: ignore[no-any-return]
    return torch.ops.aten.silu_backward(grad, x)  # type: ignore[no-any-return]


class _Slope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(grad, x)
        return torch.ops.aten.silu_backward(grad, x)  # type: ignore[no-any-return]

    @staticmethod
    @for_each_vector
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (second,), (grad, x) = grads, ctx.saved_tensors
        assert second is not None
        of_grad, of_x = ctx.needs_input_grad
        found = _slope(second, x) if of_grad else None
        if not of_x:
            return found, None
        # The second derivative is s (1 - s) (2 + x (1 - 2 s)), where s is the sigmoid.
        s = torch.sigmoid(x)
        rest = torch.sub(x, s * x, alpha=2)
        if torch.is_grad_enabled():
            return found, (rest + 2) * (second * grad) * (s * (1 - s))
        rest.add_(2).mul_(second).mul_(grad)
        return found, torch.ops.aten.sigmoid_backward(rest, s)

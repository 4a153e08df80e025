"""What autograd records of a call on plain tensors: one function, of whatever is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from insum_nn.compiler.runtime.batched_gradients import each_vector

__all__ = ["Recorded", "record"]


class Recorded(torch.autograd.Function):
    """A recorded call.

    `call.run(ctx, initial, tensors)` computes the results, and saves what `call.gradients(ctx, grads)` reads: that
    computes the gradients of the initial value and of each tensor from those of the results. They run, or where they
    are differentiated in turn, are recorded.
    """

    @staticmethod
    def forward(ctx: Any, call: Any, initial: Tensor | None, *tensors: Any) -> Any:
        ctx.call = call
        return call.run(ctx, initial, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # A loop instead of `any`: every backward pass comes here.
        for grad in grads:
            if grad is not None and (is_legacy_batchedtensor(grad) or grad.is_neg()):
                return each_vector(Recorded.backward, ctx, grads)
        return (None, *ctx.call.gradients(ctx, grads))


record: Callable[..., Any] = super(torch.autograd.Function, Recorded).apply  # type: ignore[misc]
"""`Recorded.apply` for calls on what `is_plain_eager` accepts: it looks for no transform of `torch.func`."""

"""The kernels of a call's gradients, found while the call itself is made for the first time.

A first step would compile one kernel after the other, each where it is launched. A recorded call that needed a new
kernel runs its backward pass at once, in place of the gradient with its own output: launches are collected and not
made, and other processes compile the kernels, while this one goes on with the forward pass. What the rehearsal prepares
besides, such as the order of an index tensor, the backward pass itself finds ready.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from itertools import compress, count
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.kernels import background
from insum_nn.compiler.kernels.ahead import UndecidedError, collecting, rehearse
from insum_nn.compiler.kernels.background import cold
from insum_nn.compiler.runtime.modes import is_plain_eager

__all__ = ["is_rehearsed", "rehearse_gradients"]

_log = logging.getLogger("insum_nn.prepare")


class _Rehearsed:
    """What a backward pass asks of the context of a call that is not recorded yet; some gradients are wanted."""

    def __init__(self, ctx: Any, wanted: Sequence[bool]) -> None:
        self._ctx = ctx
        self.saved_tensors: tuple[Tensor | None, ...] = ctx.to_save or ()
        self.needs_input_grad = tuple(wanted)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def is_rehearsed(ctx: Any) -> bool:
    """Whether a backward pass is a rehearsal; no engine can tell it what is wanted."""
    return isinstance(ctx, _Rehearsed)


def rehearse_gradients(function: Any, ctx: Any, *results: Tensor) -> None:
    """Find the kernels of a call's gradients and have them compiled; at the end of its forward, where `cold.due`.

    Args:
        function: the `torch.autograd.Function`.
        ctx: of the call, with all that its backward reads.
        *results: its outputs.
    """
    cold.due = False
    if collecting() is not None or not results[0].is_cuda or not is_plain_eager(*results):
        return
    if torch.cuda.is_current_stream_capturing():
        return
    needs: tuple[bool, ...] = ctx.needs_input_grad
    grads = [each.detach() for each in results]
    with rehearse() as collection, torch.no_grad(), torch.autocast(results[0].device.type, enabled=False):
        try:
            try:
                function.backward(_Rehearsed(ctx, needs), *grads)
            except UndecidedError:
                for place in compress(count(), needs):
                    with suppress(UndecidedError):
                        function.backward(_Rehearsed(ctx, [at == place for at in range(len(needs))]), *grads)
        except Exception as error:
            # The backward pass itself meets it again, unless it is for want of room.
            _log.debug("the gradients of %s were not found ahead: %s", function.__name__, error)
    cold.due = False
    background.submit(collection.codes)

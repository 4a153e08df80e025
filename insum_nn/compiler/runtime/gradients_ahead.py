"""The kernels of a call's gradients, found while the call itself is made for the first time.

A first step would compile one kernel after the other, each where it is launched. A recorded call that needs a new
kernel rehearses itself and its backward pass before it waits for that kernel, with its own output in place of the
gradient: launches are collected and not made, and other processes compile the kernels. What the rehearsal prepares
besides, such as the order of an index tensor, the step itself finds ready.

Where all three factors of a product record gradients, as in a potential whose forces are learned, the backward pass
will be differentiated too, and is rehearsed like that.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import compress, count
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.kernels import background
from insum_nn.compiler.kernels.ahead import Collection, UndecidedError, collect, collecting
from insum_nn.compiler.kernels.background import cold, rehearsals
from insum_nn.compiler.runtime.modes import is_plain_eager
from insum_nn.compiler.runtime.watch import watched

__all__ = ["Rehearsed", "rehearsal", "rehearse_gradients"]

_log = logging.getLogger("insum_nn.prepare")
# Factors that record gradients, from which on gradients of gradients are expected.
_FACTORS = 3


class Rehearsed:
    """In place of a call's context: for a rehearsal of it, or as a backward pass reads what its forward wrote there.

    No engine knows what is needed.

    Args:
        needed: which gradients are.
        of: the context of a forward pass.
        recorded: the backward pass is to be recorded as well.
    """

    def __init__(self, needed: Sequence[bool], of: Any = None, recorded: bool = False) -> None:
        vars(self).update(vars(of) if of is not None else {})
        self.to_save: tuple[Tensor | None, ...] = (of is not None and of.to_save) or ()
        self.saved_tensors = tuple(map(_learned, self.to_save)) if recorded else self.to_save
        self.needs_input_grad = tuple(needed)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.to_save = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Nothing: every output gets a gradient."""


# Whether a backward pass is rehearsed that is differentiated.
_recorded: ContextVar[bool] = ContextVar("recorded", default=False)


def _learned(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or not tensor.is_floating_point():
        return tensor
    made = tensor.detach().requires_grad_()
    # What was said of it, such as which passes need its gradient.
    vars(made).update(vars(tensor))
    return made


def rehearse_gradients(function: Any, ctx: Any, *results: Tensor) -> None:
    """Find the kernels of a call's gradients and have them compiled; at the end of its forward, where `cold.due`.

    Args:
        function: the `torch.autograd.Function`; its `first_operand` counts arguments that are no factors.
        ctx: of the call, with all that its backward reads.
        *results: its outputs.
    """
    cold.due = False
    if _recorded.get():
        # A gradient within a rehearsal: what collects there takes the kernels of its own gradients as well.
        _recorded.set(False)
        try:
            with torch.no_grad():
                _run_backward(function, ctx, results, False)
        finally:
            _recorded.set(True)
            cold.due = True
        return
    if not _may_rehearse(results):
        return
    # What a backward pass calls are gradients already, whose own gradients are not differentiated again.
    first = torch._C._current_graph_task_id() < 0
    with _collecting(function, results):
        _run_backward(function, ctx, results, first and sum(ctx.needs_input_grad[function.first_operand :]) >= _FACTORS)


def _rehearse_call(function: Any, ctx: Any, *arguments: Any) -> None:
    """Find the kernels of a recorded call and of its gradients, while its first kernel is compiled."""
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    if not _may_rehearse(tensors):
        return
    own = Rehearsed(ctx.needs_input_grad)
    results: tuple[Tensor, ...] = ()
    with _collecting(function, tensors):
        made = function.forward(own, *arguments)
        results = made if isinstance(made, tuple) else (made,)
    if results:
        rehearse_gradients(function, own, *results)


rehearsals.call = _rehearse_call


def _may_rehearse(tensors: Sequence[Tensor]) -> bool:
    if collecting() is not None or not tensors or not tensors[0].is_cuda or not is_plain_eager(*tensors):
        return False
    return not torch.cuda.is_current_stream_capturing()


@contextmanager
def _collecting(function: Any, tensors: Sequence[Tensor]) -> Generator[None]:
    """Rehearse; no error leaves it, since the step itself meets it again, unless it is for want of room."""
    cold.due = False
    device = tensors[0].device.type
    with rehearsal(), torch.no_grad(), torch.autocast(device, enabled=False):
        try:
            yield
        except Exception as error:
            _log.debug("the kernels of %s were not found ahead: %s", function.__name__, error)
    cold.due = False


@contextmanager
def rehearsal() -> Generator[Collection]:
    """Collect launches of this thread, and have each kernel compiled as it is found; leave no tensor to the step.

    Planning the other kernels takes as long as compiling one. Tensors are saved apart: a checkpoint of the step would
    count them among what it has to recompute. Intermediate tensors are zero, and are not to be read by the step.
    """
    collected = collect(found=lambda code: background.submit([code]))
    saved = torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)
    # What is rehearsed is no part of what a thread was asked to run.
    before = watched.set(None)
    try:
        with collected as collection, saved:
            yield collection
    finally:
        watched.reset(before)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _run_backward(function: Any, ctx: Any, results: Sequence[Tensor], recorded: bool) -> None:
    """Run a backward pass with the results in place of their gradients.

    Args:
        function: the `torch.autograd.Function`.
        ctx: of the call.
        results: its outputs.
        recorded: run the backward passes of what is recorded in it as well.
    """
    needs: tuple[bool, ...] = ctx.needs_input_grad
    _recorded.set(recorded)
    cold.due = recorded
    try:
        grads = [each.detach().requires_grad_(recorded) for each in results]
        with torch.set_grad_enabled(recorded):
            function.backward(Rehearsed(needs, ctx, recorded), *grads)
    except UndecidedError:
        grads = [each.detach() for each in results]
        for place in compress(count(), needs):
            with suppress(UndecidedError):
                function.backward(Rehearsed([at == place for at in range(len(needs))], ctx), *grads)
    finally:
        _recorded.set(False)
        cold.due = False

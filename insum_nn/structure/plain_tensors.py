"""Tensors that are made at a first call and kept, in the midst of whatever the caller does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TypeVar

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, peek_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["is_batched", "plain_integers", "plain_tensors", "without_transforms"]

Made = TypeVar("Made")
_AS_IT_IS = nullcontext()


def plain_tensors(*sources: Tensor) -> AbstractContextManager[object]:
    """Make tensors that later calls read too.

    Under a transform of `torch.func`, and while torch traces, new tensors belong to the transform or the graph and have
    no memory to be read; in inference mode they are of no use for training.

    Args:
        sources: what they are made of. Made of a transform's own tensors they belong to it in any case.

    >>> def f(x):
    ...     with plain_tensors():
    ...         two = (torch.ones(()) + 1).item()
    ...     return x * two
    >>> torch.func.grad(f)(torch.tensor(3.0))
    tensor(2.)
    """
    # Dynamo keeps nothing, and knows this context only.
    return torch.inference_mode(False) if torch.compiler.is_dynamo_compiling() else _outside(sources)


def _outside(sources: tuple[Tensor, ...]) -> AbstractContextManager[object]:
    transformed = peek_interpreter_stack() and not any(map(is_functorch_wrapped_tensor, sources))
    # What is made while torch traces would be of its graph, not tensors with values.
    traced = not sources and torch._C._len_torch_dispatch_stack() > 0
    if not (transformed or traced or torch.is_inference_mode_enabled()):
        return torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS
    stack = ExitStack()
    if transformed:
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        stack.enter_context(temporarily_clear_interpreter_stack())
    if traced:
        stack.enter_context(_disable_current_modes())
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


def without_transforms(tensor: Tensor) -> Tensor:
    """Return what transforms of `torch.func` have wrapped: of a batch all its tensors.

    >>> torch.vmap(lambda x: x * without_transforms(x).numel())(torch.ones(2, 3)).tolist()
    [[6.0, 6.0, 6.0], [6.0, 6.0, 6.0]]
    """
    # Dynamo, which does not know this function, meets no wrapped tensor.
    while not torch.compiler.is_dynamo_compiling() and is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def is_batched(tensor: Tensor) -> bool:
    """Return whether a tensor stands for several, each with values of its own, under `torch.vmap`."""
    return without_transforms(tensor).ndim > tensor.ndim


def plain_integers(make: Callable[[], Made], source: Tensor) -> Made:
    """Return what `make` makes within `plain_tensors(source)`: integers, which autograd does not record in any case.

    >>> with torch.inference_mode():
    ...     found = plain_integers(lambda: torch.arange(3), torch.zeros(()))
    >>> found.is_inference()
    False
    """
    # Most calls are in no mode, and need no context.
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or peek_interpreter_stack():
        with plain_tensors(source):
            return make()
    return make()

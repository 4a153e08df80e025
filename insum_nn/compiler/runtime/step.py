"""A training step on copies: what `prepare` and `tune` run, so that nothing of the caller's changes."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from insum_nn.errors import InsumFormatError

__all__ = ["Step", "copied", "run_step"]

Step = Callable[..., Any]


def copied(module: Step, inputs: Sequence[Any], named: dict[str, Any]) -> tuple[Step, Any, Any]:
    """Return copies that share nothing with the originals: what is kept of tensors must not come from such a step."""

    def leaf(value: Any) -> Any:
        # What was computed cannot be copied with its history.
        if isinstance(value, Tensor) and value.grad_fn is not None:
            return value.detach().requires_grad_()
        return value

    arguments = pytree.tree_map(leaf, (tuple(inputs), dict(named)))
    try:
        own, (args, kwargs) = copy.deepcopy((module, arguments))
    except Exception as error:
        raise InsumFormatError(
            f"the module and its inputs cannot be copied: {type(error).__name__}: {error}",
            fix="pass a module and tensors that copy.deepcopy takes; detach tensors inside of other objects.",
        ) from error
    return own, args, kwargs


@contextmanager
def _own_random_numbers() -> Generator[None]:
    """Draw random numbers of which the step knows nothing."""
    numbers: Any = sys.modules.get("numpy.random")
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    state, drawn = random.getstate(), numbers and numbers.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(state)
        if numbers:
            numbers.set_state(drawn)


@_own_random_numbers()
def run_step(module: Step, args: Any, kwargs: Any, backward: bool, double_backward: bool) -> None:
    """Run a call, and the gradients of its outputs by parameters and by inputs that require them.

    It draws random numbers of its own.
    """
    with torch.set_grad_enabled(backward or double_backward):
        outputs = _recorded(module(*args, **kwargs))
        if not outputs:
            return
        if double_backward:
            leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
            parameters = module.parameters() if isinstance(module, nn.Module) else ()
            leaves = leaves or [p for p in parameters if p.requires_grad]
            ones = [torch.ones_like(t) for t in outputs]
            found = torch.autograd.grad(outputs, leaves, ones, create_graph=True, allow_unused=True)
            outputs += _recorded(found)
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])


def _recorded(value: Any) -> list[Tensor]:
    """Return the tensors in a value, or in the attributes of its objects, that record gradients."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()

    def visit(each: Any, depth: int) -> None:
        if isinstance(each, Tensor):
            if each.requires_grad and each.grad_fn is not None:
                found[id(each)] = each
        elif id(each) not in seen and depth < 4:
            seen.add(id(each))
            leaves = pytree.tree_leaves(each)
            if len(leaves) == 1 and leaves[0] is each:
                leaves = list(getattr(each, "__dict__", {}).values())
            for leaf in leaves:
                visit(leaf, depth + 1)

    visit(value, 0)
    return [*found.values()]

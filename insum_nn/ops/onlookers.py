"""Who looks on while an operator runs: whoever records, replaces or differentiates torch's calls beside autograd."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.api import transformed

__all__ = ["asked_for", "exact_dtypes", "ordinary", "transformed"]

_PLAIN = (Tensor, torch.nn.Parameter)


def ordinary(*tensors: Tensor) -> bool:
    """Whether nobody records, replaces or differentiates torch's calls by other means than autograd."""
    if torch.compiler.is_compiling() or transformed() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all([type(t) in _PLAIN and not t.is_meta for t in tensors])


def exact_dtypes(device: torch.device) -> AbstractContextManager[object]:
    """Operands were given their dtype where autocast was in force; inside, it would mix what was equal."""
    return torch.autocast(device.type, enabled=False) if torch._C._is_any_autocast_enabled() else nullcontext()


def asked_for(ctx: Any, operand: int) -> bool:
    """Whether the backward pass at hand wants the gradient of an operand, which is more than that it has one.

    `torch.autograd.grad(energy, positions)` wants none of the weights, though `ctx.needs_input_grad` says that they
    could have one.

    Args:
        ctx: of a function of autograd, in its backward.
        operand: its number among the function's tensors.
    """
    node = ctx.next_functions[operand][0]
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # Torch does not say it of leaves whose gradient is asked for by name, nor outside of its engine.
        return True

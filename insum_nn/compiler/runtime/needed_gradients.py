"""Which gradients a backward pass computes, out of those that could be requested."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

__all__ = ["keep_inner", "needed_gradients"]

# Backward passes for which a leaf counts as needed after it was named: torch says that by an exception, which is slower
# than most kernels.
_PASSES = 16
_MOST_NAMED = 4096
_by_name: dict[Hashable, int] = {}
# What adds to a leaf's gradient.
_LEAF: type[Any] = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
# An attribute of leaves whose gradients are needed by recorded passes alone.
_INNER = "_insum_nn_inner"


def keep_inner(*leaves: Tensor) -> None:
    """Say of leaves that no backward pass has to compute their gradients unless it is recorded (`create_graph=True`).

    A loss on forces is differentiated by weights, through gradients by what the forces are derivatives of. To set
    `requires_grad` to false in between would not do: the graph that was recorded before leads to the leaves, and a
    checkpoint would not recompute what it has kept.
    """
    for leaf in leaves:
        setattr(leaf, _INNER, True)


def needed_gradients(ctx: Any, operands: int, where: Hashable, *, before: int = 0) -> list[bool]:
    """Tell which gradients of a function's tensors the current backward pass needs, out of those that they may have.

    `torch.autograd.grad(energy, positions)` needs none of the weights, though `ctx.needs_input_grad` says that they
    could have one. `torch.autograd.grad(loss, weights)` needs them, and torch is queried about them once in many
    passes: the gradient of a leaf is computed in vain for as many passes after the last that named it.

    Args:
        ctx: of a `torch.autograd.Function`, in its backward.
        operands: how many tensors it has.
        where: the function's kind, the same in every pass.
        before: how many other tensors are arguments before these.
    """
    recorded = torch.is_grad_enabled()
    # What is recorded must not depend on the passes before.
    traced = torch._C._len_torch_dispatch_stack() > 0
    found: list[bool] = []
    # A pass comes here for some gradient.
    alone = sum(ctx.needs_input_grad) == 1
    # In one loop, without a function for each: every backward pass runs it.
    for place, (node, _) in enumerate(ctx.next_functions[before : before + operands]):
        if node is None:
            found.append(False)
            continue
        leaf = type(node) is _LEAF
        if leaf:
            if not recorded and hasattr(node.variable, _INNER):
                found.append(False)
                continue
            # In most programs no leaf is ever named.
            if not alone and _by_name and not traced and (left := _by_name.get((where, place), 0)):
                _by_name[where, place] = left - 1
                found.append(True)
                continue
        try:
            found.append(alone or torch._C._will_engine_execute_node(node))
        except RuntimeError:
            # A leaf that is named in the call; or a call outside of torch's engine.
            if leaf:
                if len(_by_name) >= _MOST_NAMED:
                    _by_name.clear()
                _by_name[where, place] = _PASSES - 1
            found.append(True)
    return found

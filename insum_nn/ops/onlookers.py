"""Who looks on while an operator runs: whoever records, replaces or differentiates torch's calls beside autograd."""

from __future__ import annotations

from collections.abc import Generator, Hashable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.api import transformed

__all__ = ["asked_for", "at_least", "exact_dtypes", "numbers", "ordinary", "transformed", "unrecorded"]

_PLAIN = (Tensor, torch.nn.Parameter)


def ordinary(*tensors: Tensor) -> bool:
    """Whether torch's calls are neither recorded, replaced nor differentiated by other means than autograd.

    Nor is a tensor lazily negated: what a kernel finds in its memory is not its value.
    """
    if torch.compiler.is_compiling() or transformed() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    if torch.jit.is_tracing():
        return False
    return all([type(t) in _PLAIN and not t.is_meta and not t.is_neg() for t in tensors])


def at_least(size: int | torch.SymInt | Tensor, threshold: float) -> bool:
    """Whether a size reaches a threshold of speed, which must not limit the sizes that an exported graph takes.

    Dynamo may compare a symbolic size: it compiles again on the other side. An exported graph is for all sizes, and so
    is one of `make_fx`, so there a threshold counts only for sizes that are known.
    """
    if isinstance(size, Tensor):
        # Of torch.jit.trace.
        return False
    if torch.compiler.is_exporting() or (isinstance(size, torch.SymInt) and not torch.compiler.is_dynamo_compiling()):
        # It brings sympy with it.
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(size >= threshold)
    return bool(size >= threshold)


@contextmanager
def unrecorded() -> Generator[None]:
    """Leave torch.jit.trace out, for checks and for what a traced graph keeps as constants."""
    # torch's stubs lack one of the two.
    tracer: Any = torch._C
    state = tracer._get_tracing_state()
    tracer._set_tracing_state(None)
    try:
        yield
    finally:
        tracer._set_tracing_state(state)


def numbers(tensor: Tensor) -> tuple[int, ...]:
    """The extents of a tensor whose shape belongs to a model, as numbers; torch.jit.trace would record them."""
    if not torch.jit.is_tracing():
        return tensor.shape
    with unrecorded():
        return tuple(tensor.shape)


def exact_dtypes(device: torch.device) -> AbstractContextManager[object]:
    """Operands were given their dtype where autocast was in force; inside, it would mix what was equal."""
    return torch.autocast(device.type, enabled=False) if torch._C._is_any_autocast_enabled() else nullcontext()


# Backward passes for which a leaf counts as asked for after it was, by name: torch says that by an exception, which is
# slower than most kernels.
_PASSES = 16
_MOST_KNOWN = 4096
_by_name: dict[Hashable, int] = {}


def asked_for(ctx: Any, operands: int, where: Hashable) -> list[bool]:
    """Whether the backward pass at hand wants the gradients of a function's tensors, which is more than they have one.

    `torch.autograd.grad(energy, positions)` wants none of the weights, though `ctx.needs_input_grad` says that they
    could have one. `torch.autograd.grad(loss, weights)` wants them, and is asked about them once in many passes: the
    gradient of a leaf is made in vain for so long after whoever wanted it by name no longer does.

    Args:
        ctx: of a function of autograd, in its backward.
        operands: how many tensors it has, before everything else.
        where: the function's kind, the same in every pass.
    """
    return [_asked(node, (where, place)) for place, (node, _) in enumerate(ctx.next_functions[:operands])]


def _asked(node: Any, known: Hashable) -> bool:
    if node is None:
        return False
    # What is recorded must not depend on the passes before.
    leaf = hasattr(node, "variable")
    left = _by_name.get(known, 0) if leaf and not torch._C._len_torch_dispatch_stack() else 0
    if left:
        _by_name[known] = left - 1
        return True
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # A leaf that is asked for by name; or nobody asks, outside of torch's engine.
        if leaf:
            if len(_by_name) >= _MOST_KNOWN:
                _by_name.clear()
            _by_name[known] = _PASSES - 1
        return True

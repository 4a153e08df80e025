"""Whether an operator is being traced or exported, and what it does then."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.api import records_graph

__all__ = ["in_a_graph", "static_shape", "untraced"]


def in_a_graph(*tensors: Tensor) -> bool:
    """Return whether one of torch's tracers records what is done with tensors."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or records_graph(tensors)


@contextmanager
def untraced() -> Generator[None]:
    """Suspend torch.jit.trace, for checks and for what a traced graph keeps as constants."""
    # torch's stubs lack one of the two.
    tracer: Any = torch._C
    state = tracer._get_tracing_state()
    tracer._set_tracing_state(None)
    try:
        yield
    finally:
        tracer._set_tracing_state(state)


def static_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the extents of a tensor whose shape belongs to a model as numbers, which torch.jit.trace would record."""
    if not torch.jit.is_tracing():
        return tensor.shape
    with untraced():
        return tuple(tensor.shape)

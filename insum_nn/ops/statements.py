"""Run statements: compiled programs and their calls, checks of devices, and what torch's tracers ask of an operator."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.api import built_program, call_traced, records_graph, to_autocast, under_autocast
from insum_nn.compiler.options import Options
from insum_nn.errors import InsumDeviceError, InsumError, Span
from insum_nn.facts import IndexFacts, NamedFacts

__all__ = [
    "in_a_graph",
    "layer_elsewhere",
    "other_device",
    "pad_axis",
    "run",
    "span_of",
    "static_shape",
    "to_autocast",
    "under_autocast",
    "untraced",
]


def run(
    expression: str,
    facts: Mapping[str, IndexFacts],
    named: Mapping[str, Tensor],
    options: Options,
    out_shape: Sequence[int | None] | None,
) -> Tensor:
    """Run an expression on named tensors, with what is known of those that are index tensors."""
    if torch.compiler.is_dynamo_compiling():
        read = {name: fact for name, fact in facts.items() if name in named}
        return call_traced(expression, named, facts=read, options=options, out_shape=out_shape)
    if not facts.keys() <= named.keys():
        facts = NamedFacts((name, fact) for name, fact in facts.items() if name in named)
    known = facts if type(facts) is NamedFacts else NamedFacts(facts)
    return built_program(expression, known, options)(tensors=named, out_shape=out_shape)


def span_of(expression: str, symbol: str) -> list[Span]:
    """Return the spans of a tensor's name in an expression."""
    return [Span(*match.span()) for match in re.finditer(rf"\b{re.escape(symbol)}\b", expression)]


def pad_axis(tensor: Tensor, axis: int, extent: int) -> Tensor:
    """`tensor` with zeros after the end of one axis, up to `extent`; itself when it is that long."""
    missing = extent - static_shape(tensor)[axis]
    if missing == 0:
        return tensor
    shape = (*tensor.shape[:axis], missing, *tensor.shape[axis + 1 :])
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=axis)


def other_device(
    name: str, tensor: Tensor, first: str, anchor: Tensor, *, caller: str = "", fix: str | None = None
) -> list[InsumError]:
    """Return an error if a tensor is on another device than the first one."""
    if tensor.device == anchor.device:
        return []
    return [
        InsumDeviceError(
            f"{caller}'{name}' is on {tensor.device}, '{first}' on {anchor.device}",
            fix=f"pass {name}.to('{anchor.device}')." if fix is None else fix,
            argument=name,
            expected=anchor.device,
            got=tensor.device,
        )
    ]


def layer_elsewhere(caller: str, weight: Tensor, bias: Tensor | None, first: str, anchor: Tensor) -> list[InsumError]:
    """Return an error for each of a layer's tensors that is on another device than its input."""
    if weight.device == anchor.device and (bias is None or bias.device == anchor.device):
        # The usual case.
        return []
    parameters = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    fix = f"move the layer with .to('{anchor.device}')."
    return [
        fault
        for name, tensor in parameters.items()
        for fault in other_device(name, tensor, first, anchor, caller=f"{caller}: ", fix=fix)
    ]


def in_a_graph(*tensors: Tensor) -> bool:
    """Return whether one of torch's tracers records what is done with tensors."""
    return torch.compiler.is_compiling() or torch._C._is_tracing() or records_graph(tensors)


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

"""Run statements: compiled programs and their calls, and what torch's tracers ask of an operator."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.api import (
    Program,
    built_program,
    call_traced,
    compile,
    product_dtype,
    records_graph,
    to_autocast,
    under_autocast,
)
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.facts import IndexFacts, NamedFacts

__all__ = [
    "in_a_graph",
    "pad_axis",
    "product_dtype",
    "program_of",
    "promoted",
    "run",
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
    """Run an expression on named tensors, with what is known of those that are index tensors.

    Torch's own switch asks for the same bits at every run, as `deterministic` does.
    """
    if torch.are_deterministic_algorithms_enabled() and not options.deterministic:
        options = replace(options, deterministic=True)
    if torch.compiler.is_dynamo_compiling():
        read = {name: fact for name, fact in facts.items() if name in named}
        return call_traced(expression, named, facts=read, options=options, out_shape=out_shape)
    if not facts.keys() <= named.keys():
        facts = NamedFacts((name, fact) for name, fact in facts.items() if name in named)
    known = facts if type(facts) is NamedFacts else NamedFacts(facts)
    return built_program(expression, known, options)(tensors=named, out_shape=out_shape)


def program_of(expression: str, facts: Mapping[str, IndexFacts], options: Options) -> Program:
    """Return the program with which `run` runs an expression on the tensors of these facts."""
    read = compile(expression, options=DEFAULT).statement.tensors()
    return built_program(expression, NamedFacts((name, fact) for name, fact in facts.items() if name in read), options)


def pad_axis(tensor: Tensor, axis: int, extent: int) -> Tensor:
    """`tensor` with zeros after the end of one axis, up to `extent`; itself when it is that long."""
    missing = extent - static_shape(tensor)[axis]
    if missing == 0:
        return tensor
    shape = (*tensor.shape[:axis], missing, *tensor.shape[axis + 1 :])
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=axis)


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


def promoted(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return values in the dtype to which torch promotes all of theirs.

    >>> [value.dtype for value in promoted({"X": torch.ones(1), "W": torch.ones(1).double()}).values()]
    [torch.float64, torch.float64]
    """
    dtype = reduce(torch.promote_types, dtypes := {value.dtype for value in values.values()})
    return values if len(dtypes) == 1 else {name: value.to(dtype) for name, value in values.items()}

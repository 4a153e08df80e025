"""Calls under torch.compile and torch.jit.trace: the whole call is one operator, which neither follows inside."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from insum_nn.compiler.lang.epilogue import check_epilogue
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime.dispatch import Spec
from insum_nn.facts import IndexFacts

__all__ = ["call_operator", "call_traced", "option_values", "options_text", "spec_text"]

P = ParamSpec("P")
R = TypeVar("R")
_OPTION_NAMES = tuple(field.name for field in fields(Options))


def _constant(function: Callable[P, R]) -> Callable[P, R]:
    """Have Dynamo call a function while it traces, and keep the result.

    As `torch.compiler.assume_constant_result`, which imports all of Dynamo: that takes longer than torch itself.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# One statement or several: what is written as text, tensors, and sizes; results as a list.
torch.library.define("insum_nn::call", "(str spec, str call, Tensor[] tensors, SymInt[] sizes) -> Tensor[]")
# torch.jit.trace records sizes as tensors: they are arguments, and the graph for all.
torch.library.define("insum_nn::call_traced", "(str spec, str call, Tensor[] tensors, Tensor[] sizes) -> Tensor[]")


def call_operator(
    text: str, named: Mapping[str, Tensor], sizes: Mapping[str, int], shapes: Mapping[str, Sequence[int | None]]
) -> list[Tensor]:
    """Call a program, given as the JSON of its `Spec`, through the operator.

    Args:
        text: the program.
        named: its tensors.
        sizes: extents that no tensor shows.
        shapes: of what it writes, by name; of one statement alone under "".
    """
    named = {n: t for n, t in named.items() if t is not None}  # pyright: ignore[reportUnnecessaryComparison]
    known = [[name, [extent is not None for extent in shape]] for name, shape in shapes.items()]
    call = _call_text(list(named.keys()), list(sizes.keys()), known)
    extents = [*sizes.values(), *[extent for shape in shapes.values() for extent in shape if extent is not None]]
    if torch.jit.is_tracing():
        held = [each if isinstance(each, Tensor) else torch.full((), each) for each in extents]
        return torch.ops.insum_nn.call_traced(text, call, list(named.values()), held)  # type: ignore[no-any-return]
    return torch.ops.insum_nn.call(text, call, list(named.values()), extents)  # type: ignore[no-any-return]


@_constant
def _call_text(names: Sequence[str], sized: Sequence[str], known: Sequence[Any]) -> str:
    return json.dumps([names, sized, known])


def call_traced(
    expression: str,
    named: Mapping[str, Tensor],
    *,
    facts: Mapping[str, IndexFacts],
    options: Options,
    out_shape: Sequence[int | None] | None,
) -> Tensor:
    """Run a statement while Dynamo traces, with facts of index tensors."""
    claims = [(name, f.sorted, f.unique, f.masked, f.proven, f.unique_with) for name, f in facts.items()]
    text = spec_text(expression, option_values(options), claims)
    return call_operator(text, named, {}, {} if out_shape is None else {"": out_shape})[0]


def options_text(options: Options) -> str:
    """`options.to_json()`, also while Dynamo traces."""
    return _options_text(option_values(options)) if torch.compiler.is_dynamo_compiling() else options.to_json()


def option_values(options: Options) -> list[Any]:
    """Options as constants, which a function takes that Dynamo calls; `_options_of` makes options of them again."""
    return [getattr(options, name) for name in _OPTION_NAMES]


def _options_of(values: Sequence[Any]) -> Options:
    """Options of their `option_values`."""
    return Options(**dict(zip(_OPTION_NAMES, values, strict=True)))


@_constant
def _options_text(values: Sequence[Any]) -> str:
    return _options_of(values).to_json()


@_constant
def spec_text(
    expression: str,
    values: Sequence[Any],
    claims: Sequence[tuple[Any, ...]] = (),
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    validate: bool = False,
    drop_outside: bool = False,
) -> str:
    """The program as text, from plain constants: Dynamo calls it while it traces, and keeps the result."""
    options = _options_of(values)
    # Versions are unknown while tracing: the call reads the tensors once when it runs.
    facts = tuple((name, IndexFacts(*claim)) for name, *claim in sorted(claims, key=lambda claim: claim[0]))
    options = replace(options, validate=options.validate or validate)
    epilogue = check_epilogue(expression, activation, out_dtype)
    return Spec(expression, facts, options, drop_outside, epilogue=epilogue, origin="format").to_json()

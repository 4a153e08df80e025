"""Compute the gradient's shares under `max=` and `min=`, as a registered operator.

Terms that attain the extremum of their cell share its gradient equally; an initial value that attains it counts too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from insum_nn.compiler.lang.bind import Extents, layout_of
from insum_nn.compiler.lang.derivative import fresh_name
from insum_nn.compiler.lang.syntax import Statement
from insum_nn.compiler.runtime.dispatch import Spec, parse_cached, run_spec
from insum_nn.dtypes import wide_dtype

__all__ = ["shares", "shares_of"]

Run = Callable[[Spec, Sequence[Tensor], Tensor | None, Extents], Tensor]
# Runs a statement over the same index space: its text, tensors by name, extents, the output's shape.
Auxiliary = Callable[[str, dict[str, Tensor], dict[str, int], Sequence[int]], Tensor]


@torch.library.custom_op("insum_nn::shares", mutates_args=())
def shares(
    spec: str, tensors: list[Tensor], initial: Tensor | None, result: Tensor, indices: list[int], output: list[int]
) -> tuple[Tensor, Tensor]:
    """`shares_of`, as an operator."""
    extents = Extents(tuple(indices), tuple(output))
    return shares_of(Spec.from_json(spec), tensors, initial, result, extents, run_spec)


def shares_of(
    decoded: Spec, tensors: Sequence[Tensor], initial: Tensor | None, result: Tensor, extents: Extents, run: Run
) -> tuple[Tensor, Tensor]:
    """Return the share of each term, and of the initial value, in its output cell's gradient.

    Terms that take part and attain the extremum share equally; an initial value that attains it counts as one of them,
    and is alone where no term takes part.

    Args:
        decoded: the program.
        tensors: in the layout's order.
        initial: the initial value.
        result: the output.
        extents: the call's sizes.
        run: runs a statement.
    """
    statement = decoded.statement
    layout = layout_of(statement)
    shape = [extents.indices[i] for i in range(len(layout.indices))]
    auxiliary = partial(_auxiliary, run, decoded)
    terms, live = _terms(decoded, tensors, extents, auxiliary)
    seen = _gather_output(decoded, tensors, result, extents, auxiliary)
    # Fractions of a cell's terms: fp16 counts no more than 2,048 of them.
    wide = wide_dtype(result.dtype)
    hit = (live & (terms == seen)).to(wide)
    count = _scatter_output(decoded, tensors, hit, extents, auxiliary)
    if initial is None:
        of_initial = torch.zeros_like(result, dtype=wide)
    else:
        written = _scatter_output(decoded, tensors, live.to(wide), extents, auxiliary)
        of_initial = ((initial == result) | (written == 0)).to(wide)
        count = count + of_initial
    weight = 1 / count.clamp(min=1)
    share = hit * _gather_output(decoded, tensors, weight, extents, auxiliary)
    return share.reshape(shape).to(result.dtype).contiguous(), (of_initial * weight).to(result.dtype).contiguous()


@shares.register_fake
def _shares_fake(
    spec: str, tensors: list[Tensor], initial: Tensor | None, result: Tensor, indices: list[int], output: list[int]
) -> tuple[Tensor, Tensor]:
    return result.new_empty(indices), result.new_empty(output)


def _space(statement: Statement) -> tuple[str, str]:
    """Return a name for a tensor over the whole index space, and its access."""
    taken = {statement.output.name, *statement.tensors(), *statement.indices()}
    name = fresh_name("space", taken)
    indices = statement.indices()
    return name, f"{name}[{','.join(indices)}]" if indices else name


def _auxiliary(
    run: Run, spec: Spec, text: str, named: dict[str, Tensor], indices: dict[str, int], output: Sequence[int]
) -> Tensor:
    """Run another statement over the same index space."""
    statement = parse_cached(text)
    layout = layout_of(statement)
    sizes = Extents(tuple(indices[name] for name in layout.indices), tuple(output))
    return run(spec.with_statement(statement, drop_outside=True), [named[x] for x in layout.tensors], None, sizes)


def _terms(spec: Spec, tensors: Sequence[Tensor], extents: Extents, auxiliary: Auxiliary) -> tuple[Tensor, Tensor]:
    """Return every term, and which of them take part."""
    statement = spec.statement
    layout = layout_of(statement)
    named = dict(zip(layout.tensors, tensors, strict=True))
    sizes = dict(zip(layout.indices, extents.indices, strict=True))
    _, space = _space(statement)
    factors = " * ".join(map(str, statement.factors))
    # The same operator multiplies in the order of the forward pass, so that a term equals its extremum bit for bit.
    terms = auxiliary(f"{space} {statement.operator} {factors}", named, sizes, extents.indices)
    live = torch.ones(tuple(extents.indices), dtype=torch.bool, device=terms.device)
    for access in (statement.output, *statement.reads):
        if all(subscript.plain is not None for subscript in access.subscripts):
            continue
        # Ones of the tensor's shape are 0 where a read misses.
        ones = fresh_name("ones", {*named, *sizes, space.split("[")[0]})
        shape = extents.output if access is statement.output else named[access.name].shape
        inputs = {**named, ones: torch.ones((), dtype=terms.dtype, device=terms.device).expand(shape)}
        live &= auxiliary(f"{space} = {ones}{str(access)[len(access.name) :]}", inputs, sizes, extents.indices) != 0
    return terms, live


def _gather_output(
    spec: Spec, tensors: Sequence[Tensor], result: Tensor, extents: Extents, auxiliary: Auxiliary
) -> Tensor:
    """Gather the output's cell of every point of the index space."""
    statement = spec.statement
    layout = layout_of(statement)
    named = {**dict(zip(layout.tensors, tensors, strict=True)), statement.output.name: result}
    sizes = dict(zip(layout.indices, extents.indices, strict=True))
    return auxiliary(f"{_space(statement)[1]} = {statement.output}", named, sizes, extents.indices)


def _scatter_output(
    spec: Spec, tensors: Sequence[Tensor], values: Tensor, extents: Extents, auxiliary: Auxiliary
) -> Tensor:
    """Add up a tensor over the index space into the output's cells."""
    statement = spec.statement
    layout = layout_of(statement)
    name, space = _space(statement)
    named = {**dict(zip(layout.tensors, tensors, strict=True)), name: values}
    sizes = dict(zip(layout.indices, extents.indices, strict=True))
    return auxiliary(f"{statement.output} = {space}", named, sizes, extents.output)

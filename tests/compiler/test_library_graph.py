"""The calls that a statement is printed as compute what the reference interpreter does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from insum_nn.compiler.ir.nodes import Buffer
from insum_nn.compiler.lang.bind import Bound, Extents, bind, layout_of
from insum_nn.compiler.lang.derivative import derivatives
from insum_nn.compiler.lang.interpreter import interpret
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.lang.shapes import resolve_extents
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime.library_calls import library_calls_of
from tests.compiler.generated_cases import CASES
from tests.compiler.test_loop_nest import canonical, drawn_program

TARGETS = [(options, compiled) for options in (Options(), Options(deterministic=True)) for compiled in (False, True)]


def check(bound: Bound, tensors: Mapping[str, Tensor], extents: Extents, initial: Tensor | None = None) -> None:
    """The calls give the reference's numbers."""
    want = interpret(bound.statement, tensors, extents, initial, drop_outside=bound.drop_outside)
    memory, sizes = canonical(bound, tensors, extents, initial)
    for options, compiled in TARGETS:
        graph = library_calls_of(bound, extents, options, compiled=compiled)
        given = [memory[each.name] if isinstance(each, Buffer) else sizes[each.name] for _, each in graph.arguments]
        # Statements of numbers alone are of the default dtype.
        torch.testing.assert_close(graph(*given).to(want.dtype), want, rtol=1e-6, atol=1e-6)


def test_random_programs():
    checked = 0
    for seed in range(150):
        drawn = drawn_program(seed)
        if drawn is not None:
            check(*drawn)
            checked += 1
    assert checked > 60


def cases() -> Iterator[tuple[str, str, dict[str, Tensor], tuple[int | None, ...] | None]]:
    for name, case in CASES.items():
        torch.manual_seed(0)
        tensors = {n: t.mul(3).round() if t.is_floating_point() else t for n, t in case.draw(1).items()}
        yield name, case.expression, tensors, case.out_shape(1)


@pytest.mark.parametrize(("text", "tensors", "shape"), [pytest.param(*rest, id=name) for name, *rest in cases()])
def test_cases_and_their_gradients(text: str, tensors: dict[str, Tensor], shape: tuple[int | None, ...] | None):
    statement = parse(text)
    ordered = [tensors[name] for name in layout_of(statement).tensors]
    extents = resolve_extents(statement, ordered, None, {}, shape)
    bound = bind(statement, tensors, None)
    check(bound, tensors, extents)
    if statement.operator not in ("+=", "="):
        return
    for operand in layout_of(statement).value_tensors:
        derivative = derivatives(statement, operand)
        torch.manual_seed(1)
        named = {**tensors, derivative.seed: torch.randint(-3, 4, extents.output).to(bound.dtype)}
        for other in derivative.statements:
            own = {name: named[name] for name in layout_of(other).tensors}
            found = resolve_extents(other, list(own.values()), None, {}, tuple(tensors[operand].shape))
            check(bind(other, own, None, drop_outside=True), own, found)


def test_names_mean_nothing():
    tensors = {"Row": torch.zeros(3).long(), "V": torch.zeros(3), "B": torch.zeros(5, 4), "Col": torch.zeros(3).long()}
    first = bind(parse("C[Row[p],n] += V[p] * B[Col[p],n]"), tensors, None)
    renamed = {"V": tensors["Row"], "row": tensors["V"], "W": tensors["B"], "w": tensors["Col"]}
    second = bind(parse("B[V[n],p] += row[n] * W[w[n],p]"), renamed, None)
    for options, compiled in TARGETS:
        codes = [library_calls_of(b, Extents((3, 4), ()), options, compiled=compiled).code for b in (first, second)]
        assert codes[0] == codes[1]


def test_many_missing_entries_of_a_gradient_are_looked_at_apart():
    """What two index tensors of different indices miss needs no mask over all of them."""
    tensors = {"R": torch.tensor([0, -1]), "C": torch.tensor([[-1, 1, -1]]), "x": torch.ones(2), "y": torch.ones(2)}
    tensors |= {"w": torch.full((4,), torch.nan)}
    bound = bind(parse("d[k] += w[k] * x[R[i]] * y[C[k,j]]"), {**tensors, "C": tensors["C"].expand(4, 3)}, None)
    graph = library_calls_of(replace(bound, drop_outside=True), Extents((4, 2, 3), ()), Options(), compiled=False)
    assert graph.code.count("torch.any(") == 2

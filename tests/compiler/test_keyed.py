"""Deterministic kernels for sums whose terms meet in cells of several subscripts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import Options
from insum_nn.compiler.kernels.keyed import Keyed
from insum_nn.compiler.lang.bind import Extents
from insum_nn.compiler.lang.derivative import derivatives
from insum_nn.compiler.lang.interpreter import interpret
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.lang.shapes import resolve_extents
from insum_nn.compiler.runtime.dispatch import Spec, prepare
from insum_nn.errors import InsumFormatError
from tests.compiler.interpreted import interpreter
from tests.test_paper_expressions import CASES, runs

__all__ = ["interpreter"]

FIXED = Options(backend="triton", deterministic=True, tune=False)

pytestmark = pytest.mark.usefixtures("interpreter")

Call = tuple[Spec, list[Tensor], Extents]


def calls() -> Iterator[tuple[Call, list[Call]]]:
    """Every statement of the document with its derivatives, on tensors of one case."""
    for key, case in CASES.items():
        one = runs(key)[0]
        statement = parse(case.statement)
        layout = Spec(case.statement).layout
        named = {name: t.float() if t.is_floating_point() else t for name, t in one.tensors.items()}
        ordered = [named[name] for name in layout.tensors]
        extents = resolve_extents(statement, ordered, named.get(statement.output.name), one.sizes, one.out_shape)
        spec, sizes = Spec(case.statement, options=FIXED), dict(zip(layout.indices, extents.indices, strict=True))
        found: list[Call] = []
        for name in layout.tensors if statement.operator in ("+=", "=") else ():
            if name not in layout.value_tensors or not named[name].is_floating_point():
                continue
            derivative = derivatives(statement, name)
            seeded = {**named, derivative.seed: torch.randn(extents.output)}
            for each in derivative.statements:
                inner = spec.with_statement(each, drop_outside=True)
                shape = Extents(tuple(sizes[i] for i in inner.layout.indices), tuple(named[name].shape))
                found.append((inner, [seeded[x] for x in inner.layout.tensors], shape))
        yield (spec, ordered, extents), found


def ready(call: Call) -> object:
    spec, tensors, extents = call
    return prepare(spec, tensors, None, extents)[1]


def check(call: Call) -> None:
    spec, tensors, extents = call
    program = ready(call)
    first, second = (program(tensors, extents, None) for _ in range(2))
    assert torch.equal(first, second)
    assert first.is_contiguous()
    inputs = dict(zip(spec.layout.tensors, tensors, strict=True))
    want = interpret(spec.statement, inputs, extents, None, drop_outside=spec.drop_outside)
    torch.testing.assert_close(first.double(), want, rtol=1e-5, atol=1e-5)


def test_every_gradient_is_possible_where_the_statement_is():
    keyed: list[Call] = []
    for whole, derived in calls():
        operator, reads = whole[0].statement.operator, whole[0].statement.reads
        if operator not in ("+=", "=") or not reads:
            with pytest.raises(InsumFormatError, match="no kernel can be generated"):
                ready(whole)
            continue
        keyed += [call for call in (whole, *derived) if isinstance(ready(call).run, Keyed)]
    small = [call for call in keyed if math.prod(call[2].indices) < 1000]
    assert len(small) > 20
    for call in small:
        check(call)


STATEMENTS = {
    "two axes": ("C[Row[p],Col[p],n] += Val[p] * B[p,n]", (4, 3, None), {"Row": (4, 9), "Col": (3, 9)}),
    "one axis between": ("C[Row[p],n,Col[p]] += Val[p] * B[p,n]", (4, None, 3), {"Row": (4, 9), "Col": (3, 9)}),
    "a diagonal": ("C[i,i] += A[i,j]", None, {}),
    "an index twice": ("C[i,i+j] += A[i,j]", (5, 11), {}),
    "nested": ("C[A[R[p]],n] += B[p,n]", (4, None), {"A": (4, 6), "R": (6, 9)}),
    "a sum": ("C[Row[p]+j] += B[p,j]", (10,), {"Row": (5, 9)}),
    "steps": ("C[2*i+3*j] += A[i,j]", (30,), {}),
}
SHAPES = {"Val": (9,), "B": (9, 5)}


def drawn(name: str, *, holes: bool) -> tuple[str, tuple[int | None, ...] | None, dict[str, Tensor]]:
    text, shape, index = STATEMENTS[name]
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for tensor in parse(text).tensors():
        if tensor in index:
            high, count = index[tensor]
            tensors[tensor] = torch.randint(-1 if holes else 0, high, (count,), generator=generator)
        else:
            tensors[tensor] = torch.randn(SHAPES.get(tensor, (5, 6)), generator=generator)
    return text, shape, tensors


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("name", STATEMENTS)
def test_statements(name: str, holes: bool):
    text, shape, tensors = drawn(name, holes=holes)
    program = insum_nn.compile(text, options=FIXED)
    got = program(tensors=tensors, out_shape=shape)
    torch.testing.assert_close(got.double(), program.reference(tensors=tensors, out_shape=shape), rtol=1e-5, atol=1e-5)
    start = torch.randn(got.shape[-1]).expand(got.shape)
    named = {**tensors, "C": start}
    for activation in (None, "relu"):
        program = insum_nn.compile(text, activation=activation, options=FIXED)
        want = program.reference(tensors=named)
        torch.testing.assert_close(program(tensors=named).double(), want, rtol=1e-5, atol=1e-5)


def test_cells_follow_writes_to_their_index_tensors():
    text, shape, tensors = drawn("two axes", holes=False)
    program, want = insum_nn.compile(text, options=FIXED), torch.empty(0)
    for _ in range(3):
        tensors["Row"].copy_(torch.randint(0, 4, (9,)))
        want = program.reference(tensors=tensors, out_shape=shape)
        torch.testing.assert_close(program(tensors=tensors, out_shape=shape).double(), want, rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        fresh = {name: tensor.clone() for name, tensor in tensors.items()}
    for _ in range(2):
        torch.testing.assert_close(program(tensors=fresh, out_shape=shape).double(), want, rtol=1e-5, atol=1e-5)
    program = insum_nn.compile(text, options=replace(FIXED, validate=True))
    for _ in range(2):
        # torch does not count this.
        tensors["Row"].data.copy_(torch.randint(0, 4, (9,)))
        want = program.reference(tensors=tensors, out_shape=shape)
        torch.testing.assert_close(program(tensors=tensors, out_shape=shape).double(), want, rtol=1e-5, atol=1e-5)
    program = insum_nn.compile(text, options=FIXED)
    empty = {name: tensor[:0] for name, tensor in tensors.items()}
    assert not program(tensors=empty, out_shape=(4, 3, 5)).any()
    text = str(program.explain(tensors=tensors, out_shape=shape))
    assert "C[Cell[p],n] += Val[p] * B[p,n]" in text

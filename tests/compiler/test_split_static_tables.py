"""Statements over static tables as two: matrices are multiplied by once for each path, against the interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from insum_nn.compiler.api import Program, compile
from insum_nn.compiler.options import Options
from tests.compiler.fused_cases import Together

# Two paths: coefficients between components of the factors and of the output, and where each lies.
BLOCKS = (((0, 1, 2), (0, 1), (0, 1, 2)), ((3,), (2,), (0, 1, 2)), ((4, 5, 6), (3,), (3, 4, 5)))
COPIES = {"u": 8, "w": 6}
WAYS = ["library", pytest.param("c", marks=pytest.mark.c)]


def tables(step: dict[str, int], *, seed: int = 0) -> dict[str, Tensor]:
    """Static tables of the statements below; `step`: from one copy to the next in X and Z, 1 where copies are last."""
    generator = torch.Generator().manual_seed(seed)
    terms: list[tuple[int, int, int, int, float]] = []
    for path, (left, scale, right) in enumerate(BLOCKS):
        for i, j, k in itertools.product(left, scale, right):
            terms.append((i, j, k, path, torch.randn((), generator=generator).item()))
    i, j, k, path, value = zip(*terms, strict=True)

    def cells(component: tuple[int, ...], copy: str) -> Tensor:
        count = COPIES[copy]
        apart = 1 if step[copy] != 1 else count
        return torch.tensor(component)[:, None] * apart + step[copy] * torch.arange(count)

    return {
        "CG": torch.tensor(value, dtype=torch.float64),
        "I": cells(i, "u"),
        "J": torch.tensor(j),
        "K": cells(k, "w"),
        "L": torch.tensor(path),
    }


TEXT = {
    "Z": "Z[z,K[p,w]] += CG[p] * X[z,I[p,u]] * Y[z,J[p]] * W[L[p],u,w]",
    "X": "X[z,I[p,u]] += CG[p] * Y[z,J[p]] * W[L[p],u,w] * Z[z,K[p,w]]",
    "Y": "Y[z,J[p]] += CG[p] * X[z,I[p,u]] * W[L[p],u,w] * Z[z,K[p,w]]",
    "W": "W[L[p],u,w] += CG[p] * X[z,I[p,u]] * Y[z,J[p]] * Z[z,K[p,w]]",
}
EDGES = {name: text.replace("X[z", "X[Src[z]").replace("Z[z", "Z[Dst[z]") for name, text in TEXT.items()}
SAMPLES, NODES = 11, 5


def factors(*, shared: bool, edges: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    nodes = NODES if edges else SAMPLES
    weights = (3, 8, 6) if shared else (SAMPLES, 3, 8, 6)
    shapes = {"X": (nodes, 56), "Y": (SAMPLES, 4), "Z": (nodes, 36), "W": weights}
    return {n: torch.randn(s, dtype=torch.float64, generator=generator) for n, s in shapes.items()}


def ends(masked: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    found = {n: torch.randint(NODES, (SAMPLES,), generator=generator) for n in ("Src", "Dst")}
    if masked:
        found["Src"][3] = found["Dst"][3] = found["Dst"][7] = -1
    return found


def program_of(name: str, *, shared: bool, edges: bool, step: dict[str, int]) -> tuple[Program, dict[str, Tensor]]:
    text = (EDGES if edges else TEXT)[name]
    static = tables(step)
    return compile(text if shared else text.replace("W[L", "W[z,L"), static=static), static


def is_cut(program: Program, named: dict[str, Tensor], shape: tuple[int, ...]) -> bool:
    return program.explain(tensors=named, out_shape=shape).reason.startswith("the statement runs as 2")


@pytest.mark.parametrize("edges", ["none", "some"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("step", [{"u": 1, "w": 1}, {"u": 7, "w": 6}, {"u": 1, "w": 6}], ids=["last", "first", "both"])
@pytest.mark.parametrize("name", "ZXYW")
def test_every_side(name: str, shared: bool, edges: str, step: dict[str, int]):
    program, static = program_of(name, shared=shared, edges=edges != "none", step=step)
    given = factors(shared=shared, edges=edges != "none")
    shape = tuple(given.pop(name).shape)
    named = {**static, **given, **(ends(edges == "some") if edges != "none" else {})}
    named = {n: t for n, t in named.items() if n in program.statement.tensors()}
    expected = program.reference(tensors=named, out_shape=shape)
    # Nothing is stored of all edges.
    assert is_cut(program, named, shape) == (edges == "none")
    torch.testing.assert_close(program(tensors=named, out_shape=shape), expected)
    initial = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(program(tensors={**named, name: initial}, out_shape=shape), expected + initial)
    torch.testing.assert_close(program(tensors=named, out_shape=shape), expected)


@pytest.mark.c
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("edges", ["none", "some"])
@pytest.mark.parametrize("name", "ZXYW")
def test_every_side_in_c(name: str, shared: bool, edges: str):
    test_every_side(name, shared, edges, {"u": 1, "w": 6})


@pytest.mark.parametrize("count", [0, 1, 64, 200])
def test_numbers_of_samples(count: int):
    program, static = program_of("Z", shared=True, edges=False, step={"u": 1, "w": 1})
    named = {**static, "X": torch.randn(count, 56), "Y": torch.randn(count, 4), "W": torch.randn(3, 8, 6)}
    named["CG"] = named["CG"].float()
    expected = program.reference(tensors=named, out_shape=(count, 36)).float()
    torch.testing.assert_close(program(tensors=named, out_shape=(count, 36)), expected)


@pytest.mark.parametrize("way", WAYS)
def test_derivatives_of_a_program(way: str):
    """The derivative statements are of the same kind."""
    program, static = program_of("Z", shared=True, edges=True, step={"u": 7, "w": 6})
    given = factors(shared=True, edges=True)
    leaves = [given[n].requires_grad_() for n in "XYW"]
    index = ends(masked=False)

    def call(*leaves: Tensor) -> Tensor:
        named = dict(zip("XYW", leaves, strict=True))
        return program(tensors={**static, **index, **named}, out_shape=(NODES, 36))

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.c
def test_statements_together_share_products():
    step = {"u": 1, "w": 1}
    made = [program_of(name, shared=True, edges=False, step=step) for name in "ZXYW"]
    given = factors(shared=True, edges=False)
    named = [
        {n: t for n, t in {**static, **given}.items() if n in program.statement.tensors()} for program, static in made
    ]
    shapes = [tuple(given[name].shape) for name in "ZXYW"]
    shared = Together([program for program, _ in made], list("ZXYW"))
    found = shared(named, shapes)
    assert found is not None
    for (program, _), own, shape, got in zip(made, named, shapes, found, strict=True):
        torch.testing.assert_close(got, program.reference(tensors=own, out_shape=shape))


@pytest.mark.c
def test_a_tensor_in_two_places():
    """What is known of a call with one tensor in two places does not hold for two tensors of these shapes."""
    static = {"CG": torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64), "I": torch.tensor([0, 1, 1])}
    static |= {"J": torch.tensor([1, 0, 2]), "K": torch.tensor([1, 0, 1])}
    programs = [compile(f"Z[z,K[p]] += CG[p] * X[z,I[p]] * Y[z,J[p]]{end}", static=static) for end in ("", " * 2")]
    x, y = torch.randn(2, 4, 3, dtype=torch.float64)
    shared = Together(programs, "ZA")
    for other in (x, y, x):
        named = {**static, "X": x, "Y": other}
        found = shared([named, named], [(4, 2), (4, 2)])
        assert found is not None
        for program, got in zip(programs, found, strict=True):
            torch.testing.assert_close(got, program.reference(tensors=named, out_shape=(4, 2)))


@pytest.mark.parametrize(
    "text",
    [
        "Z[z,K[p,w]] max= CG[p] * X[z,I[p,u]] * Y[z,J[p]] * W[L[p],u,w]",
        "Z[z,K[p,w]] += CG[p] * X[z,I[p,u]] * Y[z,J[p]] * W[p,u,w]",
    ],
    ids=["maximum", "entries of another tensor"],
)
def test_others_run_as_they_are(text: str):
    static = tables({"u": 1, "w": 1})
    given = factors(shared=True, edges=False)
    if "W[p" in text:
        given["W"] = torch.randn(len(static["CG"]), 8, 6, dtype=torch.float64)
    del given["Z"]
    program = compile(text, static={name: table for name, table in static.items() if f"{name}[p" in text})
    named = {n: t for n, t in {**static, **given}.items() if n in program.statement.tensors()}
    assert not is_cut(program, named, (SAMPLES, 56))
    got = program(tensors=named, out_shape=(SAMPLES, 56))
    torch.testing.assert_close(got, program.reference(tensors=named, out_shape=(SAMPLES, 56)))


@pytest.mark.c
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("edges", ["none", "some"])
@pytest.mark.parametrize("name", "ZXYW")
def test_half_types_are_rounded_once(name: str, edges: str, dtype: torch.dtype):
    """Products and sums are formed in float32, so nothing is rounded between two statements."""
    program, static = program_of(name, shared=False, edges=edges != "none", step={"u": 1, "w": 1})
    given = factors(shared=False, edges=edges != "none")
    shape = tuple(given.pop(name).shape)
    named = {**static, **given, **(ends(True) if edges != "none" else {})}
    halves = {n: t.to(dtype) if n in given else t for n, t in named.items() if n in program.statement.tensors()}
    # Static numbers are known in float64.
    halves["CG"] = halves["CG"].to(dtype)
    wide = {n: t.double() if t.is_floating_point() else t for n, t in halves.items()} | {"CG": static["CG"]}
    initial = torch.randn(shape, dtype=dtype)
    assert not is_cut(program, halves, shape)
    for first in ({}, {name: initial}):
        got = program(tensors={**halves, **first}, out_shape=shape)
        expected = program.reference(tensors=wide, out_shape=shape) + (initial.double() if first else 0)
        assert got.dtype == dtype
        # Half of the distance between two numbers, and what float32 adds to it.
        near = 0.51 * torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), expected, rtol=near, atol=1e-5)


def test_other_orders_are_left_alone():
    program, static = program_of("Z", shared=True, edges=False, step={"u": 1, "w": 1})
    given = factors(shared=True, edges=False)
    del given["Z"]
    named = {**static, **given}
    assert is_cut(program, named, (SAMPLES, 36))
    written = compile(TEXT["Z"], static=static, options=Options(order="left"))
    assert not is_cut(written, named, (SAMPLES, 36))

"""Statements over static tables as dense products for each path, against the interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from insum_nn.compiler.api import Program, compile
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime.composite.shared_statements import SharedStatements

# Two paths: coefficients between components of the factors and of the output, and where each lies.
BLOCKS = (((0, 1, 2), (0, 1), (0, 1, 2)), ((3,), (2,), (0, 1, 2)), ((4, 5, 6), (3,), (3, 4, 5)))
COPIES = {"u": 4, "w": 3}


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
    weights = (3, 4, 3) if shared else (SAMPLES, 3, 4, 3)
    shapes = {"X": (nodes, 28), "Y": (SAMPLES, 4), "Z": (nodes, 18), "W": weights}
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


def takes_paths(program: Program, named: dict[str, Tensor], shape: tuple[int, ...]) -> bool:
    return program.explain(tensors=named, out_shape=shape).reason.startswith(
        "on a CPU, dense products of a library for each path"
    )


@pytest.mark.parametrize("edges", ["none", "all", "some"])
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
    assert takes_paths(program, named, shape)
    torch.testing.assert_close(program(tensors=named, out_shape=shape), expected)
    initial = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(program(tensors={**named, name: initial}, out_shape=shape), expected + initial)
    torch.testing.assert_close(program(tensors=named, out_shape=shape), expected)


@pytest.mark.parametrize("count", [0, 1, 64, 200])
def test_numbers_of_samples(count: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("insum_nn.compiler.runtime.composite.path_products.AT_ONCE", 1)
    program, static = program_of("Z", shared=True, edges=False, step={"u": 1, "w": 1})
    named = {**static, "X": torch.randn(count, 28), "Y": torch.randn(count, 4), "W": torch.randn(3, 4, 3)}
    named["CG"] = named["CG"].float()
    expected = program.reference(tensors=named, out_shape=(count, 18)).float()
    torch.testing.assert_close(program(tensors=named, out_shape=(count, 18)), expected)


def test_derivatives_of_a_program():
    """The derivative statements are of the same kind."""
    program, static = program_of("Z", shared=True, edges=True, step={"u": 7, "w": 6})
    given = factors(shared=True, edges=True)
    leaves = [given[n].requires_grad_() for n in "XYW"]
    index = ends(masked=False)

    def call(*leaves: Tensor) -> Tensor:
        named = dict(zip("XYW", leaves, strict=True))
        return program(tensors={**static, **index, **named}, out_shape=(NODES, 18))

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
    shared = SharedStatements([program for program, _ in made], list("ZXYW"))
    found = shared.together(named, lambda: shapes, key=0)
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
    shared = SharedStatements(programs, "ZA")
    for other in (x, y, x):
        named = {**static, "X": x, "Y": other}
        found = shared.together([named, named], lambda: [(4, 2), (4, 2)], key=0)
        assert found is not None
        for program, got in zip(programs, found, strict=True):
            torch.testing.assert_close(got, program.reference(tensors=named, out_shape=(4, 2)))


@pytest.mark.parametrize(
    "text",
    [
        "Z[z,K[p,w]] += CG[p] * X[z,I[p,u]] * Y[z,J[p]] * W[L[p],w]",
        "Z[z,K[p,w]] max= CG[p] * X[z,I[p,u]] * Y[z,J[p]] * W[L[p],u,w]",
        "Z[z,K[p,w]] += CG[p] * X[z,I[p,u]] * X[z,I[p,u]] * Y[z,J[p]] * W[L[p],u,w]",
        "Z[z,K[p,w]] += CG[p] * X[z,I[p,u]] * X[z,J[p]] * W[L[p],u,w]",
    ],
    ids=["no product of matrices", "maximum", "five factors", "one tensor twice"],
)
def test_others_run_as_they_are(text: str):
    static = tables({"u": 1, "w": 1})
    given = factors(shared=True, edges=False)
    given["W"] = given["W"] if "u,w]" in text else given["W"][:, 0]
    del given["Z"]
    program = compile(text, static=static)
    named = {n: t for n, t in {**static, **given}.items() if n in program.statement.tensors()}
    assert not takes_paths(program, named, (SAMPLES, 18))
    got = program(tensors=named, out_shape=(SAMPLES, 18))
    torch.testing.assert_close(got, program.reference(tensors=named, out_shape=(SAMPLES, 18)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("edges", ["none", "some"])
@pytest.mark.parametrize("name", "ZXYW")
def test_half_types_are_rounded_once(name: str, edges: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Products and sums are formed in float32, also where samples are taken a few at a time."""
    program, static = program_of(name, shared=False, edges=edges != "none", step={"u": 1, "w": 1})
    given = factors(shared=False, edges=edges != "none")
    shape = tuple(given.pop(name).shape)
    named = {**static, **given, **(ends(True) if edges != "none" else {})}
    halves = {n: t.to(dtype) if n in given else t for n, t in named.items() if n in program.statement.tensors()}
    # Static numbers are known in float64.
    halves["CG"] = halves["CG"].to(dtype)
    wide = {n: t.double() if t.is_floating_point() else t for n, t in halves.items()} | {"CG": static["CG"]}
    initial = torch.randn(shape, dtype=dtype)
    assert takes_paths(program, halves, shape)
    for size in (1 << 24, 1):
        monkeypatch.setattr("insum_nn.compiler.runtime.composite.path_products.AT_ONCE", size)
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
    assert takes_paths(program, named, (SAMPLES, 18))
    written = compile(TEXT["Z"], static=static, options=Options(order="left"))
    assert not takes_paths(written, named, (SAMPLES, 18))

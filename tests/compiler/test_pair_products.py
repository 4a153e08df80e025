"""Statements of two factors with copies over static tables: products of rows and a matrix product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from insum_nn.compiler.api import Program, compile
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime.composite import pair_program

TEXT = "Z[z,K[p,u]] += CG[p] * X[z,I[p,u]] * Y[z,J[p,u]]"
PACKED = "Z[z,K[p],u] += CG[p] * X[z,I[p],u] * Y[z,J[p],u]"
COPIES, SAMPLES = 3, 70


def tables(*, packed: bool, gaps: bool = False) -> dict[str, Tensor]:
    """Twelve terms over 4 rows of `X`, 3 of `Y` and 5 of `Z`, some of which share a pair or a row that is written."""
    generator = torch.Generator().manual_seed(3)
    rows = {name: torch.randint(n, (12,), generator=generator) for name, n in (("I", 4), ("J", 3), ("K", 5))}
    rows["K"][:5] = torch.arange(5)
    rows["I"][6], rows["J"][6] = rows["I"][5], rows["J"][5]
    found = {"CG": torch.randn(12, generator=generator, dtype=torch.float64)}
    for name, row in rows.items():
        # Copies of one row lie side by side, those of the others the rows apart.
        wide = 6 if gaps and name == "K" else int(row.max()) + 1
        cell = torch.where(row == 0, 0, COPIES - 1 + row)[:, None]
        step = torch.where(row == 0, 1, wide - 1)[:, None]
        found[name] = row if packed else cell + step * torch.arange(COPIES)
    return found


def call(program: Program, static: dict[str, Tensor], *, packed: bool, gaps: bool, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(4)
    shape = {"X": (4, COPIES), "Y": (3, COPIES), "Z": (6 if gaps else 5, COPIES)}
    if not packed:
        shape = {name: (a * b,) for name, (a, b) in shape.items()}
    made = {name: torch.randn(SAMPLES, *shape[name], generator=generator).to(dtype) for name in "XYZ"}
    initial = made.pop("Z")
    named = {**static, **made, "CG": static["CG"].to(dtype)}
    return named, tuple(initial.shape), initial


def takes_pairs(program: Program, named: dict[str, Tensor], shape: tuple[int, ...]) -> bool:
    return program.explain(tensors=named, out_shape=shape).reason.endswith("the products of rows")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 1 << 23])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_values(packed: bool, gaps: bool, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pair_program, "AT_ONCE", size)
    static = tables(packed=packed, gaps=gaps)
    program = compile(PACKED if packed else TEXT, static=static)
    named, shape, initial = call(program, static, packed=packed, gaps=gaps, dtype=dtype)
    wide = {n: t.double() if t.is_floating_point() else t for n, t in named.items()} | {"CG": static["CG"]}
    assert takes_pairs(program, named, shape)
    for first in ({}, {"Z": initial}):
        got = program(tensors={**named, **first}, out_shape=shape)
        expected = program.reference(tensors=wide, out_shape=shape) + (initial.double() if first else 0)
        assert got.dtype == dtype
        assert got.is_contiguous()
        # Half of the distance between two numbers, and what sums in float32 add to it.
        near = 0.51 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(got.double(), expected, rtol=near, atol=1e-5 if dtype.itemsize < 8 else 1e-12)


@pytest.mark.parametrize("packed", [False, True])
def test_derivatives_are_of_the_same_kind(packed: bool):
    static = tables(packed=packed)
    program = compile(PACKED if packed else TEXT, static=static)
    named, shape, _ = call(program, static, packed=packed, gaps=False, dtype=torch.float64)
    leaves = [named[name][:3].clone().requires_grad_() for name in "XY"]

    def run(x: Tensor, y: Tensor) -> Tensor:
        return program(tensors={**named, "X": x, "Y": y}, out_shape=(3, *shape[1:]))

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)
    grad = program.grad("X")
    assert isinstance(grad, Program)
    given = {**named, "dZ": torch.randn(shape, dtype=torch.float64)}
    given = {n: t for n, t in given.items() if n in grad.statement.tensors()}
    assert takes_pairs(grad, given, tuple(named["X"].shape))


@pytest.mark.parametrize("any_samples", [False, True])
def test_traced_graphs_multiply_a_matrix(any_samples: bool):
    static = tables(packed=False)
    program = compile(TEXT, static=static)
    named, shape, initial = call(program, static, packed=False, gaps=False, dtype=torch.float64)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, table in static.items():
                self.register_buffer(name, table)

        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
            whole = {**dict(self.named_buffers()), "X": x, "Y": y, "Z": z}
            return program(tensors=whole, out_shape=(x.shape[0], *shape[1:]))

    given = named["X"], named["Y"], initial
    samples = {0: torch.export.Dim("samples", min=2)} if any_samples else {}
    exported = torch.export.export(Model(), given, dynamic_shapes=(samples,) * 3)
    called = {str(node.target) for node in exported.graph.nodes}
    assert "aten.mm.default" in called
    assert not any("index_put" in name or "index_add" in name for name in called)
    for count in (SAMPLES, 5) if any_samples else (SAMPLES,):
        some = [tensor[:count] for tensor in given]
        torch.testing.assert_close(exported.module()(*some), Model()(*some))


def test_without_samples():
    static = tables(packed=False)
    program = compile(TEXT, static=static)
    empty = {**static, "X": torch.zeros(0, 12), "Y": torch.zeros(0, 9), "CG": static["CG"].float()}
    assert program(tensors=empty, out_shape=(0, 15)).shape == (0, 15)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        # Copies that are summed, or mixed.
        ("Z[z,K[p]] += CG[p] * X[z,I[p],u] * Y[z,J[p],u]", Options()),
        ("Z[z,K[p],u] += CG[p] * X[z,I[p],u] * Y[z,J[p],v]", Options()),
        # The order as written.
        (PACKED, Options(order="left")),
    ],
    ids=["summed", "mixed", "as written"],
)
def test_others_are_left_alone(text: str, options: Options):
    static = tables(packed=True)
    program = compile(text, static=static, options=options)
    named, shape, _ = call(program, static, packed=True, gaps=False, dtype=torch.float64)
    shape = shape if "u]" in text.split("+=")[0] else shape[:2]
    assert not takes_pairs(program, named, shape)
    got = program(tensors=named, out_shape=shape)
    torch.testing.assert_close(got, program.reference(tensors=named, out_shape=shape))


def test_cells_that_are_written_by_two_rows_are_left_alone():
    static = tables(packed=False)
    # The row that begins one cell further has two cells of the first one.
    static["K"][1] = static["K"][0] + 1
    program = compile(TEXT, static=static)
    named, shape, _ = call(program, static, packed=False, gaps=False, dtype=torch.float64)
    assert not takes_pairs(program, named, shape)
    got = program(tensors=named, out_shape=shape)
    torch.testing.assert_close(got, program.reference(tensors=named, out_shape=shape))


def test_a_matrix_of_zeros_is_not_multiplied():
    """As many pairs as rows, each pair in one term: the matrix would be diagonal."""
    count = 60
    row = torch.arange(count)
    static = {"I": row, "J": row, "K": row, "CG": torch.ones(count)}
    program = compile(PACKED, static=static)
    named = {**static, "X": torch.randn(4, count, 2), "Y": torch.randn(4, count, 2)}
    assert not takes_pairs(program, named, (4, count, 2))
    torch.testing.assert_close(program(tensors=named, out_shape=(4, count, 2)), named["X"] * named["Y"])

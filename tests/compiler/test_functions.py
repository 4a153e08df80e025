"""Functions, sums, quotients and powers in statements: library calls, C and Triton against torch's own calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import Options, insum
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.lang.derivative import derivatives
from insum_nn.compiler.lang.functions import FUNCTIONS, SIGNS
from insum_nn.compiler.lang.parser import parse
from insum_nn.testing.tolerances import assert_matches, tolerance
from tests.compiler import generated_cases
from tests.compiler.c_driver import COMPILER, case_of, compiled
from tests.compiler.function_cases import CASES, EVERY, Case, draw, every, summed
from tests.compiler.generated_cases import kernel_of
from tests.compiler.interpreted import interpreter

__all__ = ["interpreter"]

GENERATED = Options(backend="triton", tune=False)
ROWS = 5
EVERY_CASE = Case(EVERY, every)


def statement(case: Case) -> str:
    return f"Y[R[p],n] += W[p] * ({case.of('X[K[p],n]', 'B[p,n]')})"


def tensors(case: Case, *, terms: int = 19, columns: int = 7, seed: int = 0) -> dict[str, Tensor]:
    """Rows that are read and written several times or never, entries of -1, and row 0, whose numbers are at kinks."""
    generator = torch.Generator().manual_seed(seed)
    x, b = draw(case, 6, columns, seed=seed)[0], draw(case, terms, columns, seed=seed + 1)[1]
    k, r = (torch.randint(-1, 6 - at, (terms,), generator=generator) for at in (0, 1))
    k[:2], r[:2] = 0, 1
    w = torch.rand(terms, generator=generator, dtype=torch.float64) + 0.5
    # What is not read must not be seen: the last row of x, and whatever goes with an entry of -1.
    x[5] = float("nan")
    k[k == 5] = -1
    b[(k < 0) | (r < 0)] = float("nan")
    return {"X": x, "B": b, "W": w.bfloat16().double(), "K": k, "R": r}


def rounded(found: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in found.items()}


def read(text: str, found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: found[name] for name in parse(text).tensors()}


def orders(
    run: Callable[[dict[str, Tensor]], Tensor], found: dict[str, Tensor], names: str
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A result, gradients, and gradients of a function of these; 0 where there is none."""
    leaves = {n: found[n].clone().requires_grad_() for n in names}
    out = run({**found, **leaves})
    seeds = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).reshape(out.shape).to(out)
    first = torch.autograd.grad((out * seeds).sum(), [*leaves.values()], create_graph=True, allow_unused=True)
    first = tuple(torch.zeros_like(x) if g is None else g for g, x in zip(first, leaves.values(), strict=True))
    loss = sum((g.nan_to_num() ** 2).sum() for g in first)
    second: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if isinstance(loss, Tensor) and loss.requires_grad:
        second = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
    zeros = tuple(torch.zeros_like(x) if g is None else g for g, x in zip(second, leaves.values(), strict=True))
    return out, first, zeros


def finite(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same numbers, of which none is NaN: torch's own gradient of what is not read is 0."""
    return {n: t.nan_to_num(1.0) if t.is_floating_point() else t for n, t in found.items()}


def assert_orders(got: Any, want: Any, dtype: torch.dtype) -> None:
    assert_matches(got[0], want[0], dtype=dtype, kind="sum")
    # Values of functions are larger than those of the products that the table is for.
    for place, times in ((1, 20.0), (2, 100.0)):
        for a, b in zip(got[place], want[place], strict=True):
            kind: Any = ("gradient", "second")[place - 1]
            scale = float(b.detach().abs().max()) if b.numel() else 0.0
            assert_matches(a, b, dtype=dtype, kind=kind, scale=times * max(scale, 1e-3))


def test_every_function_has_a_case():
    assert {*CASES} >= {*FUNCTIONS, *SIGNS}


@pytest.mark.parametrize("name", CASES)
def test_values_and_derivatives(name: str, device: torch.device):
    """By library calls, or on a GPU by generated kernels."""
    case = CASES[name]
    text, found = statement(case), {n: t.to(device) for n, t in tensors(case).items()}
    names = "XBW" if "v" in case.reads else "XW"
    want = orders(lambda t: summed(case.oracle, t, ROWS), finite(found), names)

    def run(t: dict[str, Tensor]) -> Tensor:
        return insum(text, tensors=read(text, t), out_shape=(ROWS, None))

    assert_orders(orders(run, found, names), want, torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        # Sums are formed in float32, of terms that are not rounded.
        scale = summed(lambda u, v: case.oracle(u, v).abs(), finite(found), ROWS).max()
        assert_matches(run(rounded(found, dtype)), want[0], dtype=dtype, kind="sum", scale=float(scale))
    assert_matches(
        insum_nn.compile(text, out_shape=(ROWS, None)).reference(**read(text, tensors(case))),
        want[0].cpu(),
        dtype=torch.float64,
        kind="sum",
    )


@pytest.mark.parametrize("terms", [0, 1])
@pytest.mark.parametrize("columns", [0, 1, 5])
def test_few_terms(terms: int, columns: int, device: torch.device):
    found = {n: t.to(device) for n, t in tensors(EVERY_CASE, columns=columns).items()}
    found = {n: t[:terms] if n in "BWKR" else t for n, t in found.items()}
    text = statement(EVERY_CASE)
    run = lambda t: insum(text, tensors=read(text, t), out_shape=(ROWS, None))  # noqa: E731
    want = orders(lambda t: summed(every, t, ROWS), finite(found), "XBW")
    assert_orders(orders(run, found, "XBW"), want, torch.float64)


def test_strided_tensors():
    found = tensors(EVERY_CASE)
    text = statement(EVERY_CASE)
    want = insum(text, tensors=read(text, found), out_shape=(ROWS, None))
    moved = {n: torch.stack([t, t], -1)[..., 1].t().contiguous().t() if t.dim() > 1 else t for n, t in found.items()}
    moved["W"] = torch.stack([found["W"], -found["W"]])[:, ::1][0]
    moved["K"] = found["K"].int().repeat_interleave(2)[::2]
    assert not moved["X"].is_contiguous()
    assert_matches(
        insum(text, tensors=read(text, moved), out_shape=(ROWS, None)), want, dtype=torch.float64, kind="sum"
    )


@pytest.mark.c
def test_every_function_at_once_in_c():
    """As users call it; all functions one by one are below."""
    found = tensors(EVERY_CASE, terms=40, columns=21)
    text = statement(EVERY_CASE)
    want = orders(lambda t: summed(every, t, ROWS), finite(found), "XBW")
    run = lambda t: insum(text, tensors=read(text, t), out_shape=(ROWS, None))  # noqa: E731
    assert_orders(orders(run, found, "XBW"), want, torch.float64)
    assert_matches(run(rounded(found, torch.float32)), want[0], dtype=torch.float32, kind="sum")


def c_cases(dtype: torch.dtype, columns: int, *, gradients: bool) -> list[tuple[str, Any, Tensor]]:
    """Kernels of all functions and of their derivatives, and what each must give."""
    found: list[tuple[str, Any, Tensor]] = []
    for name, case in CASES.items():
        text, given = statement(case), tensors(case, terms=33, columns=columns)
        exact = finite(given)
        names = "XBW" if "v" in case.reads else "XW"
        leaves = {n: exact[n].requires_grad_() for n in names}
        want = summed(case.oracle, {**exact, **leaves}, ROWS)
        seeds = torch.linspace(0.5, 1.5, want.numel()).bfloat16().double().reshape(want.shape)
        grads = torch.autograd.grad((want * seeds).sum(), [*leaves.values()], allow_unused=True)
        own = rounded(given, dtype)
        found.append((name, case_of(parse(text), read(text, own), out_shape=(ROWS, None)), want.detach()))
        for operand, gradient in zip(names, grads, strict=True):
            if gradient is None or operand == "W" or not gradients:
                continue
            derivative = derivatives(parse(text), operand)
            # Where there are several, their results add up.
            for each in derivative.statements[: 2 - len(derivative.statements)]:
                values = {**own, derivative.seed: seeds.to(dtype)}
                sizes = {"n": columns, "p": 33}
                own_case = case_of(
                    each,
                    {n: values[n] for n in each.tensors()},
                    sizes={i: sizes[i] for i in each.indices()},
                    out_shape=tuple(exact[operand].shape),
                    drop_outside=True,
                )
                found.append((f"{name} d{operand}", own_case, gradient))
    return found


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
@pytest.mark.parametrize(
    ("dtype", "columns", "gradients"),
    [(torch.float32, 21, True), (torch.float64, 1, False), (torch.bfloat16, 37, False)],
)
def test_generated_c(dtype: torch.dtype, columns: int, gradients: bool, tmp_path: Path):
    """Vectors and the columns that remain of them, rows in sorted order, lanes that miss."""
    cases = c_cases(dtype, columns, gradients=gradients)
    printed = [case.printed(f"k{number}") for number, (_, case, _) in enumerate(cases)]
    library = compiled(printed, tmp_path, flags=["-O1"])
    for number, (name, case, want) in enumerate(cases):
        got = case.run(getattr(library, f"call_k{number}"), printed[number]).double()
        bound = tolerance(dtype, "gradient") * 10 * max(float(want.abs().max()), 1.0)
        assert got.shape == want.shape
        assert bool(((got - want).abs() <= bound).all()), f"{name}: {case.title}\n{(got - want).abs().max()}"


def triton_case(case: Case) -> generated_cases.Case:
    return generated_cases.Case(
        "a function",
        statement(case),
        lambda _: read(statement(case), tensors(case)),
        lambda t, _: t["W"],
        lambda _: (ROWS, None),
    )


# A lane that misses computes with what it has, and is then not selected.
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_generated_triton(name: str, dtype: torch.dtype):
    """Triton takes a number that is named for one of float32."""
    case = CASES[name]
    drawn = tensors(case)
    want = summed(case.oracle, finite(drawn), ROWS)
    scale = float(summed(lambda u, v: case.oracle(u, v).abs(), finite(drawn), ROWS).max())
    own = read(statement(case), rounded(drawn, dtype))
    for schedule in (Schedule(n=8, k=4), Schedule(m=2, n=4, k=2)):
        _, kernel, got = kernel_of(triton_case(case), own, schedule)
        assert "tl.dot" not in kernel.source.text
        assert_matches(got, want, dtype=dtype, kind="sum", scale=4 * scale)


# A lane that misses computes with what it has, and is then not selected.
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.usefixtures("interpreter")
def test_gradients_of_generated_triton():
    """Of all functions in one statement, to second order."""
    found, text = tensors(EVERY_CASE, terms=11), statement(EVERY_CASE)
    want = orders(lambda t: summed(every, t, ROWS), finite(found), "XBW")
    run = lambda t: insum(text, tensors=read(text, t), out_shape=(ROWS, None), options=GENERATED)  # noqa: E731
    assert_orders(orders(run, rounded(found, torch.float32), "XBW"), want, torch.float32)


FINITE = [0.0, -0.0, 1e-30, -1e-30, 1e-4, -0.3, 0.62, 1.0, -2.5, 3.0, 7.0, -9.0, 20.0, -60.0, 80.0, 86.0, -88.0, 5e3]


@pytest.mark.c
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 3, 7, 16, 61])
@pytest.mark.parametrize(
    "name", ["exp", "log", "sin", "cos", "tanh", "erf", "sigmoid", "silu", "softplus", "gelu", "rsqrt", "sqrt", "abs"]
)
def test_functions_of_vectors(name: str, length: int, dtype: torch.dtype):
    """Functions of the C library, of whole vectors and of what is left: within some units in the last place."""
    special = [float("nan"), float("inf"), -float("inf")] if name in ("exp", "log", "tanh", "erf", "sqrt") else []
    numbers = torch.tensor([*special, *FINITE], dtype=dtype)
    x = numbers.repeat(length)[torch.randperm(length * len(numbers))].reshape(-1, length)
    in_c, exact = (
        insum_nn.compile(f"Y[i,j] = {name}(X[i,j])", options=Options(backend=backend))(X=each)
        for backend, each in (("c", x), ("eager", x.double()))
    )
    units = 8 * torch.finfo(dtype).eps
    # The tail of gelu is a difference of like numbers.
    torch.testing.assert_close(
        in_c.double(), exact, rtol=units, atol=100 * units if name == "gelu" else 1e-37, equal_nan=True
    )


@pytest.mark.c
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("text", ["relu(X[i])", "leaky_relu(X[i], 0.1)", "step(X[i])", "eq(X[i], W[i])", "sign(X[i])"])
def test_functions_that_select_at_special_values(text: str, dtype: torch.dtype):
    """C computes them by masks of whole vectors, and the last numbers one by one."""
    special = [0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf"), 2.5, -2.5]
    named = {"X": torch.tensor(special * 9, dtype=dtype), "W": torch.tensor(special * 9, dtype=dtype).abs()}
    named = {name: tensor for name, tensor in named.items() if name in text}
    in_c, by_torch = (
        insum_nn.compile(f"Y[i] = {text}", options=Options(backend=backend))(tensors=named)
        for backend in ("c", "eager")
    )
    assert torch.equal(in_c.isnan(), by_torch.isnan())
    assert torch.equal(in_c.nan_to_num(7.0), by_torch.nan_to_num(7.0))

"""Gradients of `max=` and `min=` are statements too: compared with a float64 oracle that forms every term."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import insum_nn
from insum_nn import Options, insum
from insum_nn.compiler.kernels.c_compiler import find_compiler
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.runtime import backends
from insum_nn.compiler.runtime.dispatch import Spec
from insum_nn.errors import InsumRangeError
from tests.compiler.interpreted import interpreter

__all__ = ["interpreter"]

ENTRIES, NODES, ROWS, WIDTH = 41, 9, 7, 5
Tensors = dict[str, Tensor]

# The terms of each statement as texts of the language, and in torch, of tensors whose rows are looked up already.
TERMS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "a read": ("X[J[e],f]", lambda x, w, v, z: x),
    "a product": ("W[e] * X[J[e],f]", lambda x, w, v, z: w * x),
    "a difference": ("relu(X[J[e],f] - Z[I[e],f])", lambda x, w, v, z: torch.relu(x - z)),
    "a negative product": ("-1 * X[J[e],f] * W[e]", lambda x, w, v, z: -x * w),
    "several products": ("0.3 * W[e] * V[f] * X[J[e],f]", lambda x, w, v, z: 0.3 * w * v * x),
    "an exponential": ("exp(W[e] * X[J[e],f]) * V[f]", lambda x, w, v, z: torch.exp(w * x) * v),
}
ROUNDED_ONCE = ("a read", "a product", "a difference", "a negative product")
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def drawn(dtype: torch.dtype) -> Tensors:
    """Coarse numbers, so that terms tie; entries that miss; row 3 has none, and row 0 none but such."""
    rows, columns = torch.randint(-1, ROWS, (ENTRIES,)), torch.randint(-1, NODES, (ENTRIES,))
    rows[rows == 3] = 4
    columns[rows == 0] = -1
    values = {
        # As columns of a larger tensor lie.
        "X": torch.randn(WIDTH, 2 * NODES).mul(2).round().div(2).t()[::2],
        "W": torch.randint(1, 4, (ENTRIES,)) / 8 + torch.randint(0, 2, (ENTRIES,)) / 3,
        "V": torch.rand(WIDTH) + 0.5,
        "Z": torch.randn(ROWS, WIDTH).round(),
        "Y": torch.randn(ROWS, WIDTH).mul(2).round().div(2),
    }
    return {name: t.to(dtype).requires_grad_() for name, t in values.items()} | {"I": rows, "J": columns}


def of_statement(
    name: str, operator: str, given: Tensors, *, starts: bool, **options: object
) -> tuple[Tensor, list[str]]:
    text = f"Y[I[e],f] {operator} {TERMS[name][0]}"
    names = [n for n in given if n in parse(text).tensors() or (starts and n == "Y")]
    shape = None if starts else (ROWS, WIDTH)
    result = insum(text, tensors={n: given[n] for n in names}, out_shape=shape, options=Options(**options))  # type: ignore[arg-type]
    return result, [n for n in names if given[n].is_floating_point()]


def of_oracle(name: str, operator: str, given: Tensors, leaves: Tensors, *, starts: bool) -> Tensor:
    """The mean of those terms that attain the extremum of their cell: it is the extremum, and shares its gradient."""
    dtype = given["X"].dtype
    live = (given["I"] >= 0) & (given["J"] >= 0)
    rows, columns = given["I"][live], given["J"][live]
    terms = TERMS[name][1](leaves["X"][columns], leaves["W"][live, None], leaves["V"], leaves["Z"][rows])
    found: list[Tensor] = []
    for row in range(ROWS):
        own = torch.cat([terms[rows == row], leaves["Y"][row : row + 1] if starts else terms[:0]])
        if not len(own):
            found.append(torch.zeros(WIDTH, dtype=torch.float64))
            continue
        stored = own.detach().to(dtype)
        attains = stored == (stored.amax(0) if operator == "max=" else stored.amin(0))
        found.append((own * attains).sum(0) / attains.sum(0))
    return torch.stack(found)


def compare(name: str, operator: str, dtype: torch.dtype, *, starts: bool, **options: object) -> None:
    given = drawn(dtype)
    result, names = of_statement(name, operator, given, starts=starts, **options)
    grad = torch.randn(ROWS, WIDTH).to(dtype)
    got = torch.autograd.grad(result, [given[n] for n in names], grad)
    agrees(name, operator, given, result, names, grad, got, starts=starts)


def agrees(
    name: str,
    operator: str,
    given: Tensors,
    result: Tensor,
    names: list[str],
    grad: Tensor,
    got: tuple[Tensor, ...],
    *,
    starts: bool,
) -> None:
    leaves = {n: t.detach().double().requires_grad_() for n, t in given.items() if t.is_floating_point()}
    want = of_oracle(name, operator, given, leaves, starts=starts)
    exact = torch.autograd.grad(want, [leaves[n] for n in names], grad.double(), materialize_grads=True)
    tolerance = TOLERANCES[result.dtype]
    for mine, theirs in zip((result, *got), (want, *exact), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "route", ["library", pytest.param("c", marks=pytest.mark.c), pytest.param("gpu", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", TERMS)
def test_values_and_gradients(name: str, dtype: torch.dtype, route: str):
    if name not in ROUNDED_ONCE and dtype in (torch.float16, torch.bfloat16):
        # Which terms tie depends on how often they are rounded.
        return
    with torch.device("cuda" if route == "gpu" else "cpu"):
        for operator in ("max=", "min="):
            for starts in (False, True):
                for _ in range(3):
                    compare(name, operator, dtype, starts=starts)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ROUNDED_ONCE)
def test_generated_kernels(name: str, dtype: torch.dtype):
    compare(name, "max=", dtype, starts=name == "a product", backend="triton", tune=False)


@pytest.mark.c
def test_kernels_that_are_not_deterministic_ones_share_gradients_too():
    for deterministic in (False, True):
        compare("a product", "max=", torch.float32, starts=True, deterministic=deterministic)


@pytest.mark.parametrize("name", TERMS)
def test_terms_that_another_kernel_may_round_otherwise_are_stored(name: str):
    spec = Spec(f"Y[I[e],f] max= {TERMS[name][0]}")
    assert (spec.apart is None) == (name in ROUNDED_ONCE)
    assert spec.apart is None or spec.apart[1].apart is None
    assert Spec(f"Y[I[e],f] += {TERMS[name][0]}").apart is None


@pytest.mark.c
@pytest.mark.parametrize("name", TERMS)
def test_other_code_in_the_backward_pass(name: str, monkeypatch: pytest.MonkeyPatch):
    """Library calls serve a first call, and a C function computes its gradients: no gradient may be lost."""
    given = drawn(torch.float32)
    monkeypatch.setattr(backends, "find_compiler", lambda: None)
    insum_nn.clear_cache()
    result, names = of_statement(name, "max=", given, starts=False)
    monkeypatch.setattr(backends, "find_compiler", find_compiler)
    insum_nn.clear_cache()
    grad = torch.randn(ROWS, WIDTH)
    got = torch.autograd.grad(result, [given[n] for n in names], grad)
    agrees(name, "max=", given, result, names, grad, got, starts=False)


@pytest.mark.parametrize("name", ["a product", "an exponential"])
@pytest.mark.parametrize("starts", [False, True])
def test_compiled(name: str, starts: bool):
    given = drawn(torch.float32)
    names: list[str] = []

    def call(given: Tensors) -> Tensor:
        result, found = of_statement(name, "max=", given, starts=starts)
        names[:] = found
        return result

    torch._dynamo.reset()
    _ = call(given)
    text = f"Y[I[e],f] max= {TERMS[name][0]}"
    taken = {n: given[n] for n in (*names, "I", "J")}
    shape = None if starts else (ROWS, WIDTH)
    result = torch.compile(lambda t: insum(text, tensors=t, out_shape=shape), backend="aot_eager", fullgraph=True)(
        taken
    )
    grad = torch.randn(ROWS, WIDTH)
    got = torch.autograd.grad(result, [given[n] for n in names], grad)
    agrees(name, "max=", given, result, names, grad, got, starts=starts)


@pytest.mark.compile
@pytest.mark.usefixtures("made_on")
def test_a_compiler_that_leaves_out_roundings():
    """Inductor computes what it fuses in float32, and terms of bfloat16 are compared with what was rounded."""
    given = drawn(torch.bfloat16)
    taken = {n: given[n] for n in ("X", "W", "I", "J")}
    text = "Y[I[e],f] max= W[e] * X[J[e],f]"
    call = torch.compile(lambda t: insum(text, tensors=t, out_shape=(ROWS, WIDTH)), fullgraph=True)
    result, grad = call(taken), torch.randn(ROWS, WIDTH).bfloat16()
    got = torch.autograd.grad(result, [given["X"], given["W"]], grad)
    agrees("a product", "max=", given, result, ["X", "W"], grad, got, starts=False)


@pytest.mark.parametrize("name", TERMS)
def test_transforms(name: str):
    """Forward mode, batches and second derivatives, where all terms differ."""
    given = drawn(torch.float64)
    values = {n: torch.rand_like(t).add(0.5) for n, t in given.items() if t.is_floating_point()}
    text = f"Y[I[e],f] max= {TERMS[name][0]}"
    names = [n for n in values if n in parse(text).tensors()] + ["Y"]
    leaves = tuple(values[n].requires_grad_() for n in names)

    def function(*tensors: Tensor) -> Tensor:
        return insum(text, tensors={"I": given["I"], "J": given["J"], **dict(zip(names, tensors, strict=True))})

    torch.autograd.gradcheck(function, leaves, check_forward_ad=True, fast_mode=True)
    torch.autograd.gradgradcheck(function, leaves, fast_mode=True)
    loss = torch.func.grad(lambda *tensors: function(*tensors).sin().sum(), tuple(range(len(names))))
    batch = [torch.stack([t.detach(), 2 * t.detach(), t.detach() - 1]) for t in leaves]
    together = torch.func.vmap(loss)(*batch)
    for at in range(3):
        alone = loss(*(t[at] for t in batch))
        for mine, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(mine[at], theirs)


@pytest.mark.parametrize("route", ["library", pytest.param("c", marks=pytest.mark.c)])
@pytest.mark.parametrize("accumulate", ["float32", "storage"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_more_ties_than_a_dtype_counts(dtype: torch.dtype, accumulate: str, route: str):
    x = torch.ones(70_000, dtype=dtype, requires_grad=True)
    insum("y max= x[i]", x=x, options=Options(accumulate=accumulate)).backward(torch.tensor(7000, dtype=dtype))  # type: ignore[arg-type]
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), torch.full((70_000,), 0.1).double(), rtol=1e-2, atol=0)
    tangent = torch.full_like(x, 100).detach()
    along: Tensor = torch.func.jvp(lambda x: insum("y max= x[i]", x=x), (x.detach(),), (tangent,))[1]
    assert along.item() == pytest.approx(100, rel=0.02)


@pytest.mark.parametrize("route", ["library", pytest.param("c", marks=pytest.mark.c)])
def test_numbers_that_are_none_and_infinite_ones(route: str):
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[1.0, nan], [-inf, -inf], [inf, 2.0], [0.0, -0.0]], requires_grad=True)
    insum("y[i] max= x[i,j]", x=x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0, 0], [0.5, 0.5], [1, 0], [0.5, 0.5]]
    # Where no term takes part an initial value is alone, whatever it is.
    y = torch.tensor([nan, 5.0], requires_grad=True)
    insum("y[E[i]] max= x[i]", E=torch.tensor([-1]), x=torch.ones(1), y=y).sum().backward()
    assert y.grad is not None
    assert y.grad.tolist() == [1, 1]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_over_nothing(shape: tuple[int, int]):
    x = torch.ones(shape, requires_grad=True)
    y = torch.ones(shape[0], requires_grad=True)
    insum("y[i] max= x[i,j]", x=x, y=y).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert x.grad.shape == shape
    assert torch.equal(y.grad, torch.ones(shape[0]))
    z = torch.ones(shape, requires_grad=True)
    insum("y[i] max= exp(z[i,j]) * z[i,j]", z=z).sum().backward()
    assert z.grad is not None
    assert z.grad.shape == shape


@pytest.mark.parametrize("text", ["y[i] max= x[E[i]]", "y[i] max= exp(x[E[i]])", "y[E[i]] max= exp(x[i])"])
def test_entries_that_point_outside_are_refused(text: str):
    with pytest.raises(InsumRangeError, match="index tensor 'E' (points|writes) outside"):
        insum(
            text,
            E=torch.tensor([0, 7]),
            x=torch.ones(2, requires_grad=True),
            **({"out_shape": (3,)} if text.startswith("y[E") else {}),
        )


@pytest.mark.c
@pytest.mark.parametrize("name", ROUNDED_ONCE)
def test_no_tensor_of_entries_and_features_is_formed(name: str):
    entries, width = 2000, 64
    rows, columns = torch.randint(20, (entries,)), torch.randint(30, (entries,))
    values = {"X": torch.randn(30, width), "W": torch.rand(entries), "Z": torch.randn(20, width)}
    text = f"Y[I[e],f] max= {TERMS[name][0]}"
    leaves = {n: t.requires_grad_() for n, t in values.items() if n in parse(text).tensors()}
    tensors = {"I": rows, "J": columns, **leaves}

    def step() -> None:
        insum(text, tensors=tensors, out_shape=(20, None)).sum().backward()

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    largest = max(event.self_cpu_memory_usage for event in seen.events() or ())
    assert 0 < largest < entries * width

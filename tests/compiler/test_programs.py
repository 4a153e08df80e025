"""Programs of several statements against torch by hand: values, two orders of derivatives, misses, transforms."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import insum_nn
from insum_nn import insum
from insum_nn.compiler.lang.programs import parse_program
from insum_nn.errors import InsumNameError
from insum_nn.testing.tolerances import assert_matches

Tensors = dict[str, Tensor]
SOFTMAX = """
M[I[e],h] max= detach(S[e,h])     # no weight depends on it
P[e,h] = exp(S[e,h] - M[I[e],h])
Z[I[e],h] += P[e,h]
"""
N, E, H, C = 7, 23, 2, 3


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def put(terms: Tensor, rows: Tensor, count: int) -> Tensor:
    return terms.new_zeros(count, *terms.shape[1:]).index_add(0, rows, terms)


def softmax(scores: Tensor, rows: Tensor, count: int) -> Tensor:
    """Row by row."""
    parts = [scores[rows == row].softmax(0) for row in range(count)]
    places = torch.cat([(rows == row).nonzero()[:, 0] for row in range(count)])
    return torch.cat(parts)[places.argsort()]


@dataclass(frozen=True)
class Case:
    """A program, its tensors, and what it computes of those edges that exist.

    Attributes:
        text: the program.
        draw: its tensors: float64 values, and index tensors of which `I` and `J` have entries of -1.
        oracle: of tensors whose edges all exist.
        shapes: `out_shape` by name.
        edges: tensors with an axis of edges.
    """

    text: str
    draw: Callable[[], Tensors]
    oracle: Callable[[Tensors], Tensor | tuple[Tensor, ...]]
    shapes: dict[str, tuple[int | None, ...]] = field(default_factory=dict)
    edges: str = ""

    def run(self, tensors: Tensors) -> tuple[Tensor, ...]:
        found: Any = insum(self.text, tensors=tensors, out_shape=self.shapes or None)  # type: ignore[arg-type]
        return found if isinstance(found, tuple) else (found,)

    def want(self, tensors: Tensors) -> tuple[Tensor, ...]:
        kept = torch.ones(E, dtype=torch.bool)
        for name in "IJ":
            if name in tensors:
                kept &= tensors[name] >= 0
        found = self.oracle({n: t[kept] if n in "IJ" or n in self.edges else t for n, t in tensors.items()})
        return found if isinstance(found, tuple) else (found,)


def ends(names: str = "IJ") -> Tensors:
    """The last node receives nothing."""
    entries = torch.randint(0, N - 1, (2, E))
    entries[0, 5] = entries[1, 11] = -1
    return {name: entries["IJ".index(name)] for name in names}


def whole() -> Tensors:
    """The same, where no edge is missing."""
    return {name: entries.abs() for name, entries in ends().items()}


def values(**shapes: tuple[int, ...]) -> Callable[[], Tensors]:
    return lambda: {**{name: real(*shape) for name, shape in shapes.items()}, **ends()}


def attend(scores: Tensor, t: Tensors, sent: Tensor, gates: Tensor | None = None) -> Tensor:
    weights = softmax(scores, t["I"], N)
    return put((weights if gates is None else weights * gates)[:, :, None] * sent, t["I"], N)


def _gatv2(t: Tensors) -> Tensor:
    inner = functional.leaky_relu(t["L"][t["J"]] + t["R"][t["I"]] + t["F"], 0.2)
    return attend((inner * t["A"]).sum(-1), t, t["L"][t["J"]])


def _pna(t: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    rows = [t["X"][t["J"][t["I"] == row]] for row in range(N)]
    nothing = torch.zeros(C, dtype=torch.float64)
    mean = torch.stack([row.mean(0) if len(row) else nothing for row in rows])
    most = torch.stack([row.amax(0) if len(row) else nothing for row in rows])
    above = torch.stack([(row**2).mean(0) if len(row) else nothing for row in rows]) - mean**2 - 1e-5
    return mean, most, (above.relu() + 1e-5).sqrt() * (above > 0)


def _windows(t: Tensors) -> Tensor:
    out = torch.zeros(N, H, C, dtype=torch.float64)
    for window in t["O"]:
        own = window[window >= 0]
        q, k, v = (t[name][own].transpose(0, 1) for name in "QKV")
        weights = (q @ k.transpose(1, 2) * t["scale"]).softmax(-1)
        out = out.index_add(0, own, (weights @ v).transpose(0, 1))
    return out


def _radial(t: Tensors) -> Tensor:
    u = t["T"] / t["cutoff"]
    cut = torch.where(u < 1, 1 - 28 * u**6 + 48 * u**7 - 21 * u**8, 0.0)
    basis = torch.sin(t["w"] * u[:, None]) / u[:, None] * cut[:, None]
    return put(basis @ t["W"] * t["X"][t["J"]], t["I"], N)


def _layer_norm(t: Tensors) -> Tensor:
    return torch.cat([functional.layer_norm(x, x.shape) for x in t["X"].split([2, 4, 1])]) * t["W"] + t["b"]


GRAPHS = torch.tensor([0, 0, 1, 1, 1, 1, 2])
SCALE = torch.tensor(0.7, dtype=torch.float64)
CASES: dict[str, Case] = {
    "attention": Case(
        "S[e,h] = Q[I[e],h,c] * K[J[e],h,c] * scale" + SOFTMAX + "Y[I[e],h,c] += P[e,h] / Z[I[e],h] * V[J[e],h,c]",
        lambda: {**{n: real(N, H, C) for n in "QKV"}, "scale": SCALE, **ends()},
        lambda t: attend((t["Q"][t["I"]] * t["K"][t["J"]]).sum(-1) * t["scale"], t, t["V"][t["J"]]),
    ),
    "gatv2": Case(
        "S[e,h] = leaky_relu(L[J[e],h,c] + R[I[e],h,c] + F[e,h,c], 0.2) * A[h,c]"
        + SOFTMAX
        + "Y[I[e],h,c] += P[e,h] / Z[I[e],h] * L[J[e],h,c]",
        values(L=(N, H, C), R=(N, H, C), F=(E, H, C), A=(H, C)),
        _gatv2,
        edges="F",
    ),
    "gated transformer": Case(
        "S[e,h] += Q[I[e],h,c] * K[J[e],h,c]; S[e,h] += F[e,h]"
        + SOFTMAX
        + "Y[I[e],h,c] += P[e,h] / Z[I[e],h] * sigmoid(G[e,h]) * V[J[e],h,c]",
        lambda: {**{n: real(N, H, C) for n in "QKV"}, "F": real(E, H), "G": real(E, H), **whole()},
        lambda t: attend((t["Q"][t["I"]] * t["K"][t["J"]]).sum(-1) + t["F"], t, t["V"][t["J"]], t["G"].sigmoid()),
        edges="FG",
    ),
    "principal neighbourhood": Case(
        """
        N[I[e]] += 1
        Mean[I[e],c] += X[J[e],c] / N[I[e]]
        Square[I[e],c] += X[J[e],c]**2 / N[I[e]]
        Max[I[e],c] max= X[J[e],c]
        Above[i,c] = Square[i,c] - Mean[i,c]**2 - 1e-5
        Std[i,c] = sqrt(relu(Above[i,c]) + 1e-5) * step(Above[i,c])
        return Mean, Max, Std""",
        lambda: {"X": real(N, C), **whole()},
        _pna,
        {"Mean": (N, None)},
    ),
    "segment softmax": Case(
        SOFTMAX + "Y[e,h] = P[e,h] / Z[I[e],h]",
        lambda: {"S": real(E, H), "I": whole()["I"]},
        lambda t: softmax(t["S"], t["I"], N),
        {"Z": (N, None)},
        edges="S",
    ),
    "layer norm": Case(
        """
        N[B[i]] += one(X[i,c]); Mean[B[i]] += X[i,c] / N[B[i]]
        Var[B[i]] += (X[i,c] - Mean[B[i]])**2 / N[B[i]]
        Y[i,c] = (X[i,c] - Mean[B[i]]) * rsqrt(Var[B[i]] + 1e-5) * W[c] + b[c]""",
        lambda: {"X": real(N, C), "W": real(C), "b": real(C), "B": GRAPHS},
        _layer_norm,
        {"N": (3,)},
    ),
    "gated convolution": Case(
        """
        G[e,c] = sigmoid(K[I[e],c] + Q[J[e],c] + F[e,c])
        Z[I[e],c] += G[e,c]
        Y[I[e],c] += G[e,c] / (Z[I[e],c] + 1e-6) * V[J[e],c]""",
        values(K=(N, C), Q=(N, C), V=(N, C), F=(E, C)),
        lambda t: put(
            (g := (t["K"][t["I"]] + t["Q"][t["J"]] + t["F"]).sigmoid())
            / (put(g, t["I"], N)[t["I"]] + 1e-6)
            * t["V"][t["J"]],
            t["I"],
            N,
        ),
        edges="F",
    ),
    "windows": Case(
        """
        S[w,h,q,r] = Q[O[w,q],h,c] * K[O[w,r],h,c] * scale
        M[w,h,q] max= detach(S[w,h,q,r])
        P[w,h,q,r] = exp(S[w,h,q,r] - M[w,h,q])
        Z[w,h,q] += P[w,h,q,r]
        Y[O[w,q],h,c] += P[w,h,q,r] / Z[w,h,q] * V[O[w,r],h,c]""",
        lambda: {
            **{n: real(N, H, C) for n in "QKV"},
            "scale": SCALE,
            "O": torch.tensor([[0, 3, 1, -1], [2, 4, -1, -1], [-1, -1, -1, -1], [6, 5, -1, -1]]),
        },
        _windows,
    ),
    "radial basis": Case(
        """
        U[e] = T[e] / cutoff
        C[e] = (1 - 28 * U[e]**6 + 48 * U[e]**7 - 21 * U[e]**8) * step(1 - U[e])
        G[e,k] = sin(w[k] * U[e]) / U[e] * C[e]
        Y[I[e],c] += G[e,k] * W[k,c] * X[J[e],c]""",
        lambda: {
            "T": real(E).abs() * 3 + 0.1,
            "cutoff": SCALE * 5,
            "w": real(4),
            "W": real(4, C),
            "X": real(N, C),
            **ends(),
        },
        _radial,
        {"Y": (N, None)},
        edges="T",
    ),
    "log-sum-exp": Case(
        "M[B[i]] max= detach(X[i]); Z[B[i]] += exp(X[i] - M[B[i]]); Y[b] = M[b] + log(Z[b])",
        lambda: {"X": real(N) * 300, "B": GRAPHS},
        lambda t: torch.stack([x.logsumexp(0) for x in t["X"].split([2, 4, 1])]),
        {"Y": (3,)},
    ),
    "cross entropy": Case(
        "M[B[i]] max= detach(X[i]); Z[B[i]] += exp(X[i] - M[B[i]]); loss += M[b] + log(Z[b]) - X[T[b]]",
        lambda: {"X": real(N), "B": GRAPHS, "T": torch.tensor([1, -1, 6])},
        lambda t: t["X"][:2].logsumexp(0) - t["X"][1] + t["X"][6] - t["X"][6],
    ),
    "root mean square": Case(
        "N[i] += one(X[i,c]); V[i] += X[i,c]**2 / N[i]; Y[i,c] = X[i,c] * rsqrt(V[i] + 1e-6) * W[c]",
        lambda: {"X": real(N, C), "W": real(C)},
        lambda t: functional.rms_norm(t["X"], (C,), t["W"], 1e-6),
    ),
    "scatter mean": Case(
        "N[I[e]] += 1; Y[I[e],c] += X[e,c] / N[I[e]]",
        lambda: {"X": real(E, C), "I": ends("I")["I"]},
        lambda t: torch.stack([t["X"][t["I"] == row].sum(0) / max(int((t["I"] == row).sum()), 1) for row in range(N)]),
        {"Y": (N, None)},
        edges="X",
    ),
}


def orders(run: Callable[[Tensors], tuple[Tensor, ...]], tensors: Tensors) -> list[Tensor]:
    """Results, gradients, and gradients of a loss that mixes results with gradients."""
    leaves = {n: t.clone().requires_grad_() for n, t in tensors.items() if t.is_floating_point()}
    out = run({**tensors, **leaves})
    loss = sum((o.sin() * o.detach().cos()).sum() for o in out)
    first = torch.autograd.grad(loss, [*leaves.values()], create_graph=True, allow_unused=True)
    mixed = sum((g**2).sum() for g in first if g is not None) * sum(o.sum() for o in out) + sum(
        (o**2).sum() for o in out
    )
    second = torch.autograd.grad(mixed, [*leaves.values()], allow_unused=True)
    zeros = [torch.zeros_like(x) for x in leaves.values()] * 2
    return [*out, *(z if g is None else g for g, z in zip((*first, *second), zeros, strict=True))]


def on(device: torch.device, tensors: Tensors) -> Tensors:
    return {name: t.to(device) for name, t in tensors.items()}


def assert_same(got: Sequence[Tensor], want: Sequence[Tensor], least: float = 1.0) -> None:
    for a, b in zip(got, want, strict=True):
        scale = max(float(b.detach().abs().max()), least) if b.numel() else 1.0
        assert_matches(a, b, dtype=torch.float64, kind="second", scale=scale)


@pytest.mark.parametrize("name", CASES)
def test_values_and_derivatives(name: str, made_on: torch.device):
    case, tensors = CASES[name], on(made_on, CASES[name].draw())
    assert_same(orders(case.run, tensors), orders(case.want, tensors))


@pytest.mark.c
@pytest.mark.parametrize("name", ["gatv2", "principal neighbourhood", "windows"])
def test_in_c(name: str):
    case, tensors = CASES[name], CASES[name].draw()
    assert_same(orders(case.run, tensors), orders(case.want, tensors))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_temporaries_of_half_precision_are_float32(name: str, dtype: torch.dtype, made_on: torch.device):
    """Rounded once, where the result is returned."""
    case, tensors = CASES[name], on(made_on, CASES[name].draw())
    rounded = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    exact = {n: t.double() if t.is_floating_point() else t for n, t in rounded.items()}
    for got, want in zip(case.run(rounded), case.want(exact), strict=True):
        assert_matches(got, want, dtype=dtype, kind="sum", scale=max(1.0, float(want.abs().max())))
    wide = {n: t.float() if t.is_floating_point() else t for n, t in rounded.items()}
    for got, want in zip(case.run(rounded), case.run(wide), strict=True):
        assert torch.equal(got, want.to(dtype))


def test_scores_that_are_far_below_and_above(made_on: torch.device):
    """The exponential of a padded slot's score must not be seen, and the largest score of a row is its own shift."""
    case = CASES["windows"]
    tensors = on(made_on, case.draw())
    for factor in (-997.0, 997.0):
        moved = {**tensors, "Q": torch.ones(N, H, C, dtype=torch.float64), "K": tensors["K"] + factor}
        moved["scale"] = torch.full_like(tensors["scale"], 1 / C)
        # Scores of such a size have three digits less, and the derivatives by their scale multiply by them once more.
        assert_same(orders(case.run, moved), orders(case.want, moved), 1e5)
        single = {n: t.float() if t.is_floating_point() else t for n, t in moved.items()}
        assert_matches(case.run(single)[0], case.want(moved)[0], dtype=torch.float32, kind="second", scale=10.0)


@pytest.mark.usefixtures("made_on")
def test_ties_of_a_maximum_that_has_a_gradient():
    text = "M[I[e]] max= exp(x[e]) * w[J[e]]; Y[e] = x[e] * M[I[e]]"
    tensors = {
        "x": torch.tensor([0.0, 0.0, 1.0, 0.5, 9.0]).double(),
        "w": torch.tensor([2.0, 2.0]).double(),
        "I": torch.tensor([0, 0, 1, 1, -1]),
        "J": torch.tensor([0, 1, 1, 0, 0]),
    }

    def run(t: Tensors) -> tuple[Tensor, ...]:
        return (insum(text, tensors=t, out_shape={"M": (2,)}),)  # type: ignore[arg-type]

    def by_hand(t: Tensors) -> tuple[Tensor, ...]:
        x = t["x"].exp() * t["w"][t["J"]]
        most = torch.stack([x[:2].amax(), x[2:4].amax()])
        return (torch.cat([t["x"][:4] * most[t["I"][:4]], torch.zeros(1).double()]),)

    assert_same(orders(run, tensors), orders(by_hand, tensors))


# What runs.


def steps(text: str) -> list[str]:
    return [str(step) for step in parse_program(text).steps]


def test_a_name_is_written_out_where_it_is_read():
    assert steps("S[e] = Q[I[e]] * x[e]; Y[n,e] = S[e] - W[n]") == ["Y[n,e] = Q[I[e]] * x[e] - W[n]"]
    assert steps("S[i,j] = A[j,2*i]; Y[k] += exp(S[R[k],k])") == ["Y[k] += exp(A[k,2*R[k]])"]
    assert steps("S[i] = -x[i]; Y[i] = S[i]**2; return S, Y") == ["S[i] = -1 * x[i]", "Y[i] = (-x[i])**2"]
    assert steps("S[e] = Q[e,c] * x[c]; Y += S[e]") == ["S[e] = Q[e,c] * x[c]", "Y += S[e]"]
    assert steps("S[e] = Q[I[e],c] * x[c]; Y += S[e]") == ["S[e] = Q[I[e],c] * x[c]", "Y += S[e] * one(Q[I[e],0])"]
    assert steps("S[i] += x[i]; S[i] += y[i]; Y[i] = S[i]")[-1] == "Y[i] = S[i]"


def test_long_and_deep_names_are_computed_before():
    x = torch.rand(3, dtype=torch.float64)
    deep = "S0[i] = x[i+1];" + "".join(f"S{n + 1}[i] = sin(S{n}[i]);" for n in range(40)) + "Y[i] = S40[i] * x[i]"
    want = x.clone()
    for _ in range(40):
        want = want.sin()
    assert_matches(insum(deep, x=x), torch.cat([want[1:], x[:1] * 0]) * x, dtype=torch.float64, kind="sum")
    wide = "S0[i] = x[i];" + "".join(f"S{n + 1}[i] = S{n}[i] * S{n}[i];" for n in range(8)) + "Y[i] = S8[i]"
    assert_matches(insum(wide, x=x), x**256, dtype=torch.float64, kind="sum")
    assert all(len(step.factors) <= 64 for step in parse_program(wide).steps)


def test_absent_cells():
    """A cell of `=` that no term wrote is a miss; of all others it is 0. What is returned is 0."""
    x, row = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, -1, 0])
    read = "S[i] = x[R[i]] + 1; Y[i] = exp(S[i]); N[i] += one(S[i]); Z += exp(S[i]); return S, Y, N, Z"
    s, y, n, z = insum(read, x=x, R=row)
    e = torch.tensor([3.0, 0.0, 2.0]).exp() * torch.tensor([1.0, 0.0, 1.0])
    assert s.tolist() == [3.0, 0.0, 2.0]
    assert n.tolist() == [1.0, 0.0, 1.0]
    torch.testing.assert_close(y, e)
    torch.testing.assert_close(z, e.sum())
    _, y = insum("S[i] += x[R[i]] + 1; Y[i] = exp(S[i]); return S, Y", x=x, R=row)
    torch.testing.assert_close(y, torch.tensor([3.0, 0.0, 2.0]).exp())
    # A sum: whether its terms miss, a reader asks for.
    total = insum("S[i] = A[R[i],c] * w[c]; Z += exp(S[i])", A=torch.ones(3, 2), w=torch.ones(2), R=row)
    torch.testing.assert_close(total, 2 * torch.tensor(2.0).exp())
    empty = insum(
        "M[B[i]] max= X[i]; Z[B[i]] += exp(X[i] - M[B[i]]); Y[b] = M[b] + log(Z[b])",
        X=torch.ones(2),
        B=torch.tensor([0, 0]),
        out_shape={"Y": (2,)},
    )
    torch.testing.assert_close(empty, torch.tensor([1 + torch.tensor(2.0).log().item(), -torch.inf]))


READ_AND_RETURNED: dict[str, tuple[str, Callable[[Tensor], tuple[Tensor, ...]]]] = {
    "read later": ("a[i] += x[i]**2; b[i] += a[i] * x[i]; return a, b", lambda x: (x**2, x**3)),
    "written twice": (
        "a[i] = x[i]; a[i] += x[i]**2; b += a[i]**2; return a, b",
        lambda x: (x + x**2, ((x + x**2) ** 2).sum()),
    ),
    "read without a gradient": (
        "a[i] += x[i]**2; b[i] += detach(a[i]) * x[i]; return b, a",
        lambda x: (x.detach() ** 2 * x, x**2),
    ),
}


@pytest.mark.parametrize("extent", [0, 1, 5])
@pytest.mark.parametrize("name", READ_AND_RETURNED)
@pytest.mark.parametrize("route", ["library", pytest.param("c", marks=pytest.mark.c)])
def test_results_that_statements_read(name: str, extent: int, route: str):
    """The gradient of a result is what the caller does with it and what later statements do."""
    text, want = READ_AND_RETURNED[name]
    tensors = {"x": real(extent)}
    run = lambda t: insum(text, tensors=t)  # noqa: E731
    assert_same(orders(run, tensors), orders(lambda t: want(t["x"]), tensors))  # type: ignore[arg-type]
    x = tensors["x"].clone().requires_grad_()
    for result, expected in zip(run({"x": x}), want(x), strict=True):
        (got,) = torch.autograd.grad(result.sum(), [x], retain_graph=True)
        (of_torch,) = torch.autograd.grad(expected.sum(), [x])
        assert_matches(got, of_torch, dtype=torch.float64, kind="gradient")


def test_a_program_without_tensors():
    assert insum("a += 1; b += a * 2; return a, b", tensors={}) == (1, 2)


def test_initial_values():
    x, start = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 7.0])
    leaf = start.clone().requires_grad_()
    total, out = insum("S[i] += exp(x[i]); Y[i] = S[i] * 2; return S, Y", x=x, S=leaf)
    torch.testing.assert_close(out, 2 * (x.exp() + start))
    torch.testing.assert_close(total, x.exp() + start)
    (total.sum() + out.sum()).backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3.0, 3.0]
    most = insum("M[I[e]] max= x[e]; Y[i] = exp(M[i])", x=x, I=torch.tensor([0, 0]), M=start)
    torch.testing.assert_close(most, start.exp())
    assert insum("S[i] += x[i]; S[i] += y[i]; z += S[i]", x=x, y=x, S=start).item() == 18.0
    with pytest.raises(InsumNameError):
        insum("S[i] = exp(x[i]); Y[i] = S[i]", x=x, S=start)


def test_names_comments_and_lines():
    x = torch.tensor([0.0, 1.0])
    got = insum("exp[i] += x[i]; return[i] += exp(exp[i])   # a tensor of this name\nreturn return, exp", x=x)
    torch.testing.assert_close(got, (x.exp(), x))
    got = insum(
        """
        # a sum over lines
        Y[i] += (x[i] +   # one; two
            2 * x[
            i])
        """,
        x=x,
    )
    assert got.tolist() == [0.0, 3.0]
    assert insum("return += x[i]; one = return * 2", x=x).item() == 2.0
    assert insum("max max= x[i]; Y[i] = x[i] - max;", x=x).tolist() == [-1.0, 0.0]


def test_extents():
    x = torch.rand(4)
    ends_of = torch.tensor([0, 2, 1, 0])
    # Axes that the same entry addresses, an index, and what the caller says.
    text = "Z[I[e]] += exp(x[e]); Y[e] = Z[I[e]]; return Z, Y"
    assert insum(text, x=x, I=ends_of, out_shape={"Z": (3,)})[0].shape == (3,)
    assert insum("Z[I[e]] += exp(x[e]); Y[e] = Z[I[e]] * w[I[e]]", x=x, I=ends_of, w=torch.ones(3)).shape == (4,)
    assert insum("Z[I[e]] += exp(x[e]); Y[n] = Z[n] * w[n]", x=x, I=ends_of, w=torch.ones(5)).shape == (5,)
    assert insum("S[i] = x[i+1]; y += S[i]", x=x, out_shape={"S": (9,)}).item() == pytest.approx(x[1:].sum().item())
    assert insum("S[i] = x[2*i]; y += S[k] * S[k]", x=x, sizes={"i": 2}).item() == pytest.approx(
        (x[::2] ** 2).sum().item()
    )


def test_a_compiled_program():
    case, tensors = CASES["gatv2"], CASES["gatv2"].draw()
    program: Any = insum_nn.compile(case.text)
    for same in (
        program,
        copy.deepcopy(program),
        pickle.loads(pickle.dumps(program)),
        insum_nn.compile(program.expression),
    ):
        assert torch.equal(same(**tensors), case.run(tensors)[0])
        assert str(same) == str(program)
    counted: Any = insum_nn.compile(CASES["scatter mean"].text, out_shape={"Y": (N, None)})  # type: ignore[arg-type]
    tensors = CASES["scatter mean"].draw()
    assert torch.equal(counted(**tensors), CASES["scatter mean"].run(tensors)[0])


def test_autocast_casts_programs_of_products_alone():
    x = torch.rand(3)
    with torch.autocast("cpu", torch.bfloat16):
        assert insum("S[i] = x[i] * x[i]; y += S[i]", x=x).dtype == torch.bfloat16
        assert insum("S[i] = exp(x[i]); y += S[i] * x[i]", x=x).dtype == torch.float32
        assert insum("y += exp(x[i])", x=x).dtype == torch.float32


# Transforms.


def test_torch_compile_of_texts_and_programs():
    case = CASES["segment softmax"]
    program: Any = insum_nn.compile("S[e,h] = exp(S0[e,h]); Y[e,h] = S[e,h] - S[e,h]**2")

    def function(tensors: Tensors) -> Tensor:
        return case.run(tensors)[0] + program(S0=tensors["S"])

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for edges in (E, 11):
        tensors = {n: t[:edges] for n, t in case.draw().items()}
        leaves = {n: t.requires_grad_() for n, t in tensors.items() if t.is_floating_point()}
        got, want = compiled(tensors), function(tensors)
        assert_matches(got, want, dtype=torch.float64, kind="sum")
        a, b = (torch.autograd.grad(o.sin().sum(), [*leaves.values()]) for o in (got, want))
        assert_same(a, b)


class _Module(torch.nn.Module):
    def forward(self, x: Tensor, i: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        text = "Z[I[e]] += exp(x[e]); Y[e] = exp(x[e]) / Z[I[e]] * w[I[e]]; return Y, Z"
        return insum(text, x=x, I=i, w=w)  # type: ignore[return-value]


def test_export_and_trace():
    x, i, w = torch.rand(6), torch.tensor([0, 1, 1, 2, 0, 0]), torch.rand(3)
    edges = torch.export.Dim("edges", min=2, max=100)
    exported = torch.export.export(_Module(), (x, i, w), dynamic_shapes=({0: edges}, {0: edges}, None)).module()
    for count in (6, 4):
        torch.testing.assert_close(exported(x[:count], i[:count], w), _Module()(x[:count], i[:count], w))


def test_function_transforms():
    case = CASES["gated convolution"]
    tensors = case.draw()

    def of(v: Tensor, k: Tensor) -> Tensor:
        return case.run({**tensors, "V": v, "K": k})[0]

    batch = torch.stack([tensors["V"], real(N, C)])
    want = torch.stack([of(each, tensors["K"]) for each in batch])
    assert_matches(torch.func.vmap(of, (0, None))(batch, tensors["K"]), want, dtype=torch.float64, kind="sum")
    tangent = real(N, C)
    got: Any = torch.func.jvp(lambda k: of(tensors["V"], k), (tensors["K"],), (tangent,))[1]
    want = torch.autograd.functional.jvp(lambda k: case.want({**tensors, "K": k})[0], tensors["K"], tangent)[1]
    assert_matches(got, want, dtype=torch.float64, kind="gradient")
    jacobian = torch.func.jacrev(of, 1)(tensors["V"], tensors["K"])
    assert_matches(torch.einsum("ncmd,md->nc", jacobian, tangent), want, dtype=torch.float64, kind="gradient")


def test_compiled_transforms_and_traces_of_other_sizes():
    """A program is one operator for Dynamo and TorchScript, under their transforms and at other sizes too."""
    program: Any = insum_nn.compile("S[e,h] = exp(X[e,h]); Z[h] += S[e,h]; Y[e,h] = S[e,h] / Z[h]; return Y, Z")
    counted: Any = insum_nn.compile("C[j] += Y[e,h]; D[j] = C[j] * 2", sizes={"j": 3})

    def of(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return *program(X=x), counted(Y=x, out_shape={"C": (None,)})

    batched = torch.compile(lambda x: torch.func.vmap(of)(x), fullgraph=True, dynamic=True, backend="aot_eager")
    traced = torch.jit.trace(of, real(E, 2))
    for edges in (E, 3):
        x = real(2, edges, 2)
        want = [(torch.softmax(each, 0), each.exp().sum(0), 2 * each.sum().expand(3)) for each in x]
        for got, each in zip(batched(x), zip(*want, strict=True), strict=True):
            assert_matches(got, torch.stack(each), dtype=torch.float64, kind="sum")
        assert_same(traced(x[0]), want[0])

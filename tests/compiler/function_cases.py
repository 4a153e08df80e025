"""Expressions of every function and sign, each with torch's own calls that compute the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["CASES", "EVERY", "Case", "draw", "every", "summed"]


@dataclass(frozen=True)
class Case:
    """An expression in `u` and `v`, and the same by torch.

    Attributes:
        text: the expression, with `{u}` and `{v}`.
        oracle: of float64 tensors, differentiable.
        positive: u may not be 0 or below.
        bound: how far the values reach.
    """

    text: str
    oracle: Callable[[Tensor, Tensor], Tensor]
    positive: bool = False
    bound: float = 3.0

    def of(self, u: str, v: str) -> str:
        return self.text.format(u=u, v=v)

    @property
    def reads(self) -> str:
        """Which of `u` and `v` it reads."""
        return "uv" if "{v}" in self.text else "u"


def _step(u: Tensor) -> Tensor:
    return (u > 0).to(u.dtype)


CASES: dict[str, Case] = {
    "exp": Case("exp({u})", lambda u, v: u.exp()),
    "log": Case("log({u})", lambda u, v: u.log(), positive=True),
    "sqrt": Case("sqrt({u})", lambda u, v: u.sqrt(), positive=True),
    "rsqrt": Case("rsqrt({u})", lambda u, v: u.rsqrt(), positive=True),
    "sin": Case("sin({u})", lambda u, v: u.sin(), bound=20.0),
    "cos": Case("cos({u})", lambda u, v: u.cos(), bound=20.0),
    "tanh": Case("tanh({u})", lambda u, v: u.tanh(), bound=50.0),
    "sigmoid": Case("sigmoid({u})", lambda u, v: u.sigmoid(), bound=1000.0),
    "silu": Case("silu({u})", lambda u, v: functional.silu(u), bound=1000.0),
    "softplus": Case("softplus({u})", lambda u, v: functional.softplus(u, threshold=1e6), bound=500.0),
    "erf": Case("erf({u})", lambda u, v: u.erf(), bound=10.0),
    "gelu": Case("gelu({u})", lambda u, v: functional.gelu(u), bound=30.0),
    "relu": Case("relu({u})", lambda u, v: u.relu()),
    "leaky_relu": Case("leaky_relu({u}, 0.3)", lambda u, v: functional.leaky_relu(u, 0.3)),
    "leaky_relu of a sum": Case("leaky_relu({u} - {v}, -2)", lambda u, v: functional.leaky_relu(u - v, -2.0)),
    "abs": Case("abs({u})", lambda u, v: u.abs()),
    "sign": Case("sign({u}) * {v}", lambda u, v: u.sign() * v),
    "step": Case("step({u}) * {v}", lambda u, v: _step(u) * v),
    "eq": Case("eq({u}, 0) * {v}", lambda u, v: (u == 0).to(u.dtype) * v),
    "detach": Case("detach({u}) * {u} * {v}", lambda u, v: u.detach() * u * v),
    "one": Case("one({u}) * {v}", lambda u, v: v),
    "add": Case("({u} + {v} - 0.5)", lambda u, v: u + v - 0.5),
    "mul": Case("exp({u} * {v} * -0.5)", lambda u, v: (u * v * -0.5).exp()),
    "div": Case("{v} / {u} / (1 + {v}**2)", lambda u, v: v / u / (1 + v * v), positive=True),
    "pow": Case("{u}**2", lambda u, v: u * u),
    "cube": Case("({u} + {v})**3", lambda u, v: (u + v) ** 3),
    "first power": Case("({u} + {v})**1 * {u}**0", lambda u, v: (u + v) * u**0),
    "negative power": Case("{u}**-3", lambda u, v: u**-3, positive=True),
    "root": Case("{u}**0.5 * {u}**-0.5 * {v}", lambda u, v: u.sqrt() * u.rsqrt() * v, positive=True),
    "broken power": Case("{u}**1.7", lambda u, v: u**1.7, positive=True),
    "high power": Case("(0.4 * {u})**37 + (0.4 * {u})**40", lambda u, v: (0.4 * u) ** 37 + (0.4 * u) ** 40),
    "nested": Case("tanh(exp({u} - 3) + sigmoid({v}) / 2)", lambda u, v: ((u - 3).exp() + v.sigmoid() / 2).tanh()),
    "a number": Case("exp(-2) * {u} / 4 - 2 / 3", lambda u, v: torch.tensor(-2.0).double().exp() * u / 4 - 2 / 3),
}

EVERY = " + ".join(f"{n + 1} * ({case.of('{u}', '{v}')})" for n, case in enumerate(CASES.values()) if not case.positive)
"""A sum of all of them that take any number."""


def every(u: Tensor, v: Tensor) -> Tensor:
    """What `EVERY` is."""
    return sum(  # type: ignore[return-value]
        (n + 1) * case.oracle(u, v) for n, case in enumerate(CASES.values()) if not case.positive
    )


def draw(case: Case, *shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Numbers u and v in float64, of which bfloat16 holds each; 0 and the bounds are among those of u."""
    generator = torch.Generator().manual_seed(seed)
    u = (torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1) * 3
    v = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
    flat = u.reshape(-1)
    kinks = torch.tensor([0.0, -0.0, case.bound, -case.bound, 1e-3], dtype=torch.float64)[: flat.numel()]
    flat[: kinks.numel()] = kinks
    if case.positive:
        u = u.abs() + 0.25
    return u.bfloat16().double(), v.bfloat16().double()


def summed(case: Callable[[Tensor, Tensor], Tensor], t: dict[str, Tensor], rows: int) -> Tensor:
    """`Y[R[p],n] += W[p] * case(X[K[p],n], B[p,n])`, formed from the terms alone that take part."""
    kept = ((t["K"] >= 0) & (t["R"] >= 0)).nonzero()[:, 0]
    terms = t["W"][kept, None] * case(t["X"][t["K"][kept].long()], t["B"][kept])
    return terms.new_zeros(rows, terms.shape[1]).index_add(0, t["R"][kept].long(), terms)

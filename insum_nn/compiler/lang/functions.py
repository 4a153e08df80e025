"""List the functions that statements apply to what they read: values, by torch's functions, and derivatives, as texts.

Names and values at kinks are torch's. `add` and `mul` take any number of arguments; sums, products, quotients and
powers are written with signs, all others as calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["FUNCTIONS", "OPERATIONS", "SIGNS", "Function"]


@dataclass(frozen=True, slots=True)
class Function:
    """A function of numbers.

    Attributes:
        forward: its value, differentiable as torch's functions are.
        derivatives: by each argument, in terms of the arguments `u` and `v`; `None`: 0, or the argument is a number.
        integers: it is one of integers too.
        number: its last argument is a number.
    """

    forward: Callable[..., Tensor]
    derivatives: tuple[str | None, ...]
    integers: bool = False
    number: bool = False

    def of(self, *values: float) -> float:
        """Return the value at numbers, in float64."""
        last = len(values) - self.number
        given = [torch.tensor(value, dtype=torch.float64) for value in values[:last]]
        return self.forward(*given, *values[last:]).item()


def _step(u: Tensor) -> Tensor:
    return (u > 0).to(u.dtype)


def _eq(u: Tensor, v: Tensor) -> Tensor:
    return torch.eq(u, v).to(u.dtype)


SIGNS = {
    "add": Function(torch.add, (), integers=True),
    "mul": Function(torch.mul, (), integers=True),
    "div": Function(torch.div, ("1 / v", "-1 * (u / v) / v")),
    "pow": Function(torch.pow, (), number=True),
}
"""What signs stand for. Sums, products and powers are differentiated in `derivative.py`."""

FUNCTIONS = {
    "exp": Function(torch.exp, ("exp(u)",)),
    "log": Function(torch.log, ("1 / u",)),
    "sqrt": Function(torch.sqrt, ("0.5 * rsqrt(u)",)),
    "rsqrt": Function(torch.rsqrt, ("-0.5 * rsqrt(u)**3",)),
    "sin": Function(torch.sin, ("cos(u)",)),
    "cos": Function(torch.cos, ("-1 * sin(u)",)),
    "tanh": Function(torch.tanh, ("1 - tanh(u)**2",)),
    "sigmoid": Function(torch.sigmoid, ("sigmoid(u) * (1 - sigmoid(u))",)),
    "silu": Function(functional.silu, ("sigmoid(u) * (1 + u * (1 - sigmoid(u)))",)),
    "softplus": Function(functional.softplus, ("sigmoid(u)",)),
    "erf": Function(torch.erf, (f"{2 / math.sqrt(math.pi)!r} * exp(-1 * u * u)",)),
    "gelu": Function(
        functional.gelu,
        (f"0.5 + 0.5 * erf({math.sqrt(0.5)!r} * u) + {1 / math.sqrt(2 * math.pi)!r} * u * exp(-0.5 * u * u)",),
    ),
    "relu": Function(torch.relu, ("step(u)",), integers=True),
    "leaky_relu": Function(functional.leaky_relu, ("step(u) + v * (1 - step(u))", None), number=True),
    "abs": Function(torch.abs, ("sign(u)",), integers=True),
    "sign": Function(torch.sign, (None,), integers=True),
    "step": Function(_step, (None,), integers=True),
    "eq": Function(_eq, (None, None), integers=True),
    "detach": Function(torch.detach, (None,), integers=True),
    "one": Function(torch.ones_like, (None,), integers=True),
}
"""By name, as statements write them. `detach` is its argument, without a derivative; `one` is 1, which takes part
where its argument does."""

OPERATIONS = {**SIGNS, **FUNCTIONS}
"""Those of signs and of functions."""

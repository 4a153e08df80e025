"""Define the epilogue of a sum: an activation and a cast.

Every backend applies it to the same number, the sum including its initial value: generated kernels before they store
it, the others by calls of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from insum_nn.compiler.lang.functions import FUNCTIONS
from insum_nn.dtypes import FLOATS
from insum_nn.errors import InsumDtypeError, InsumFormatError

__all__ = ["ACTIVATIONS", "PLAIN", "Epilogue", "check_epilogue"]


def _relu_backward(grad: Tensor, output: Tensor) -> Tensor:
    return torch.ops.aten.threshold_backward(grad, output, 0)  # type: ignore[no-any-return]


ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor] | None] = {"relu": _relu_backward, "silu": None, "gelu": None}
"""Functions that map 0 to 0: (gradient, output) -> the gradient before them, where the output alone decides it.

Of the others the input must be saved.
"""


@dataclass(frozen=True, slots=True)
class Epilogue:
    """An activation and a cast after the sum.

    Attributes:
        activation: a name in `ACTIVATIONS`.
        dtype: of the output, by torch's name; the factors' where it is not given.
    """

    activation: str | None = None
    dtype: str | None = None

    def __bool__(self) -> bool:
        return self.activation is not None or self.dtype is not None

    def __str__(self) -> str:
        return ", then ".join(filter(None, (self.activation, self.dtype and f"cast to {self.dtype}"))) or "nothing"

    def out_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the output's dtype for factors of a dtype."""
        return dtype if self.dtype is None else getattr(torch, self.dtype)  # type: ignore[no-any-return]

    def activated(self, total: Tensor) -> Tensor:
        """Apply the activation alone."""
        return total if self.activation is None else FUNCTIONS[self.activation].forward(total)

    def __call__(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        """Apply the activation and the cast to a sum of factors of a dtype."""
        return self.activated(total).to(self.out_dtype(dtype))


PLAIN = Epilogue()


def check_epilogue(expression: str, activation: str | None, out_dtype: torch.dtype | None) -> Epilogue:
    """Check the arguments `activation=` and `out_dtype=` of a program, and return them as one value.

    Raises:
        InsumFormatError: there is no activation of that name.
        InsumDtypeError: `out_dtype` is no floating-point dtype.
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise InsumFormatError(
            f"activation={activation!r} is not known",
            expression=expression,
            details=[f"activations: {', '.join(ACTIVATIONS)}"],
            fix="name one of these, or None and activate the result.",
        )
    if out_dtype is None:
        return Epilogue(activation)
    if out_dtype not in FLOATS:
        raise InsumDtypeError(
            f"out_dtype= must be a floating-point torch.dtype, got {out_dtype!r}",
            expression=expression,
            fix=f"pass {', '.join(map(str, FLOATS[:-1]))} or {FLOATS[-1]}.",
            got=out_dtype,
        )
    return Epilogue(activation, str(out_dtype).removeprefix("torch."))

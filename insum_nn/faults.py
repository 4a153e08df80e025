"""What is wrong with the arguments of a call: errors that name the argument, what is expected and got, and the fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from insum_nn.errors import (
    InsumDeviceError,
    InsumDtypeError,
    InsumError,
    InsumFormatError,
    InsumShapeError,
    Span,
    raise_collected,
)

__all__ = ["Faults", "check_choice", "shown_shape"]

# An extent that is expected: a number, or a name of any number.
_Extent = int | str


class _AnyTensor(Protocol):
    """A tensor, or a sparse format."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its numbers."""
        ...

    @property
    def device(self) -> torch.device:
        """Where they are."""
        ...


def shown_shape(shape: Sequence[_Extent | None]) -> str:
    """Return a shape as a message shows it; `None`: any extent.

    >>> shown_shape((3,)), shown_shape((None, 2))
    ('(3,)', '(n, 2)')
    """
    names = ["n" if extent is None else str(extent) for extent in shape]
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def check_choice(name: str, value: str, choices: Sequence[str], kind: type[InsumError] = InsumFormatError) -> None:
    """Raise an error of a kind unless `value` is one of `choices`."""
    if value not in choices:
        raise kind(
            f"{name} is {value!r}",
            details=[f"expected one of {', '.join(map(repr, choices))}"],
            fix=f"choose one of these for {name}.",
            expected=tuple(choices),
            got=value,
        )


class Faults:
    """Collects what is wrong with the arguments of one call.

    Attributes:
        caller: the operator, with which each message begins; "": none.
        expression: its statement.
        found: the errors.

    >>> faults = Faults("spmm", "C[m,n] += A[m,k] * B[k,n]")
    >>> faults.add(InsumShapeError, "dense", "is empty", fix="pass a matrix.", symbols=["B"])
    >>> print(faults.found[0])
    spmm: 'dense' is empty
      C[m,n] += A[m,k] * B[k,n]
                         ^
      fix: pass a matrix.
    """

    def __init__(self, caller: str = "", expression: str = "") -> None:
        self.caller = caller
        self.expression = expression
        self.found: list[InsumError] = []

    def add(
        self,
        kind: type[InsumError],
        argument: str,
        message: str,
        *,
        fix: str,
        symbols: Sequence[str] = (),
        details: Sequence[str] = (),
        expected_got: tuple[object, object] | None = None,
        **fields: object,
    ) -> None:
        """Add one, which shows the statement with carets under these symbols; without any, not the statement."""
        text = f"{self.caller}: '{argument}' {message}" if self.caller else f"'{argument}' {message}"
        spans = [
            Span(*match.span())
            for symbol in symbols
            for match in re.finditer(rf"\b{re.escape(symbol)}\b", self.expression)
        ]
        shown = self.expression if symbols else None
        fields["argument"] = argument
        if expected_got is not None:
            fields["expected"], fields["got"] = expected_got
        self.found.append(kind(text, expression=shown, spans=spans, details=details, fix=fix, **fields))

    def raise_all(self) -> None:
        """Raise the first, whose text lists the others, if there are any."""
        raise_collected(self.found)

    def device(
        self, argument: str, tensor: _AnyTensor, first: str, anchor: _AnyTensor, *, fix: str | None = None
    ) -> None:
        """Add one if a tensor is on another device than the first one."""
        if tensor.device != anchor.device:
            message = f"is on {tensor.device}, '{first}' on {anchor.device}"
            fix = f"pass {argument}.to('{anchor.device}')." if fix is None else fix
            self.add(InsumDeviceError, argument, message, fix=fix, expected_got=(anchor.device, tensor.device))

    def dtype(
        self,
        argument: str,
        tensor: _AnyTensor,
        first: str,
        anchor: _AnyTensor,
        *,
        fix: str | None = None,
        symbols: Sequence[str] = (),
    ) -> None:
        """Add one if a tensor has another dtype than the first one."""
        if tensor.dtype != anchor.dtype:
            message = f"is {tensor.dtype}, '{first}' is {anchor.dtype}"
            fix = f"pass {argument}.to({anchor.dtype})." if fix is None else fix
            self.add(
                InsumDtypeError, argument, message, fix=fix, symbols=symbols, expected_got=(anchor.dtype, tensor.dtype)
            )

    def shape(
        self,
        argument: str,
        tensor: Tensor,
        expected: Sequence[_Extent | None],
        *,
        fix: str | Callable[[], str],
        message: str = "",
        details: Sequence[str] = (),
        symbols: Sequence[str] = (),
        kind: type[InsumError] = InsumShapeError,
        **fields: Any,
    ) -> None:
        """Add one if a tensor has another shape; `message`: what is wrong, where that is not the shape's own text."""
        got = tuple(tensor.shape)
        known = [(want, extent) for want, extent in zip(expected, got, strict=False) if not isinstance(want, str)]
        if len(got) != len(expected) or any(want is not None and want != extent for want, extent in known):
            fields |= {
                "fix": fix if isinstance(fix, str) else fix(),
                "symbols": symbols,
                "expected_got": (tuple(expected), got),
            }
            lines = [f"expected shape {shown_shape(expected)}; got {got}", *details]
            self.add(kind, argument, message or f"has shape {got}", details=lines, **fields)

    def dtype_among(
        self, argument: str, dtype: torch.dtype, accepted: Sequence[torch.dtype], *, fix: str, **fields: Any
    ) -> None:
        """Add one if a dtype is none of those that are accepted."""
        if dtype not in accepted:
            names = " or ".join(str(each).removeprefix("torch.") for each in accepted)
            message = f"must be {names}, got {dtype}"
            self.add(InsumDtypeError, argument, message, fix=fix, expected_got=(tuple(accepted), dtype), **fields)

    def floating(self, argument: str, tensor: Tensor) -> None:
        """Add one if a tensor holds no floating-point numbers."""
        if not tensor.dtype.is_floating_point:
            message = f"must be floating, got {str(tensor.dtype).removeprefix('torch.')}"
            self.add(InsumDtypeError, argument, message, fix=f"pass {argument}.float().", got=tensor.dtype)

    def bias(self, bias: Tensor | None, outputs: int, what: str) -> None:
        """Add one if a bias has not one entry per output."""
        if bias is not None:
            self.shape("bias", bias, (outputs,), fix=f"give the bias one entry per output {what}.")

    def layer_devices(self, weight: Tensor, bias: Tensor | None, first: str, anchor: Tensor) -> None:
        """Add one for each of a layer's parameters that is on another device than its input."""
        for name, tensor in {"weight": weight, "bias": bias}.items():
            if tensor is not None:
                self.device(name, tensor, first, anchor, fix=f"move the layer with .to('{anchor.device}').")

    def layer_input(
        self, tensor: Tensor, weight: Tensor, bias: Tensor | None, *, cast: bool, symbols: Sequence[str]
    ) -> None:
        """Add what is wrong with dtype and devices of a layer's `input`; `cast`: autocast makes them agree."""
        number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        if not number or (tensor.dtype != weight.dtype and not cast):
            unequal = f"is {tensor.dtype}, the weight is {weight.dtype}"
            message = unequal if number else f"must be floating, got {tensor.dtype}"
            fix, dtypes = f"pass input.to({weight.dtype})", (weight.dtype, tensor.dtype)
            fix += ", or run under torch.autocast." if number else "."
            self.add(InsumDtypeError, "input", message, fix=fix, symbols=symbols, expected_got=dtypes)
        self.layer_devices(weight, bias, "input", tensor)

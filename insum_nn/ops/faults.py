"""What is wrong with the arguments of a call: errors that name the argument, what is expected and got, and the fix."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor

from insum_nn.errors import InsumDeviceError, InsumDtypeError, InsumError, InsumShapeError, Span, raise_collected
from insum_nn.formats import SparseFormat

__all__ = ["Faults"]

AnyTensor = Tensor | SparseFormat


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
        self, argument: str, tensor: AnyTensor, first: str, anchor: AnyTensor, *, fix: str | None = None
    ) -> None:
        """Add one if a tensor is on another device than the first one."""
        if tensor.device != anchor.device:
            message = f"is on {tensor.device}, '{first}' on {anchor.device}"
            fix = f"pass {argument}.to('{anchor.device}')." if fix is None else fix
            self.add(InsumDeviceError, argument, message, fix=fix, expected_got=(anchor.device, tensor.device))

    def dtype(
        self,
        argument: str,
        tensor: AnyTensor,
        first: str,
        anchor: AnyTensor,
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

    def bias(self, bias: Tensor | None, outputs: int, what: str) -> None:
        """Add one if a bias has not one entry per output."""
        if bias is not None and tuple(bias.shape) != (outputs,):
            message, details = f"has shape {tuple(bias.shape)}", [f"expected ({outputs},)"]
            fix = f"give the bias one entry per output {what}."
            self.add(
                InsumShapeError, "bias", message, details=details, fix=fix, expected_got=((outputs,), tuple(bias.shape))
            )

    def layer_devices(self, weight: Tensor, bias: Tensor | None, first: str, anchor: Tensor) -> None:
        """Add one for each of a layer's parameters that is on another device than its input."""
        for name, tensor in {"weight": weight, "bias": bias}.items():
            if tensor is not None:
                self.device(name, tensor, first, anchor, fix=f"move the layer with .to('{anchor.device}').")

"""`out=`: a call that writes its result into a tensor of the caller's, under the rules of torch's own `out=`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from insum_nn.compiler.lang.bind import layout_of, show_dtype, show_shape
from insum_nn.compiler.lang.syntax import Statement
from insum_nn.errors import (
    InsumAliasError,
    InsumDeviceError,
    InsumDtypeError,
    InsumGradientError,
    InsumNameError,
    InsumShapeError,
    plural,
)

__all__ = ["check_out", "check_unrecorded", "shape_for", "write_out"]

Shape = Sequence[int | None]


def shape_for(statement: Statement, out: Tensor, sizes: Mapping[str, int], out_shape: Shape | None) -> Shape | None:
    """Return the `out_shape` of a call: extents that no tensor shows are taken from `out`.

    Raises:
        InsumShapeError: `out` has another rank than the output.
    """
    if out.ndim != len(statement.output.subscripts):
        rank = plural(len(statement.output.subscripts), "dimension")
        raise _shape_error(statement.text, f"{rank}, one for each subscript of '{statement.output.name}'", out)
    if out_shape is not None:
        return out_shape
    layout = layout_of(statement)
    shown = {name for name, places in zip(layout.indices, layout.plain, strict=True) if places} | set(sizes)
    return tuple(None if name in shown else extent for name, extent in zip(layout.output_plain, out.shape, strict=True))


def check_out(statement: Statement, out: Tensor, named: Mapping[str, Tensor]) -> None:
    """Check a tensor to write to against what the statement reads.

    Raises:
        InsumNameError: the statement has a tensor named `out`, which was not passed by `tensors=`.
        InsumGradientError: gradients would be recorded.
        InsumAliasError: two of its elements share memory.
    """
    if "out" in (statement.output.name, *statement.tensors()) and "out" not in named:
        raise InsumNameError(
            "out= is the tensor to write to, and the statement has a tensor of that name",
            expression=statement.text,
            spans=[access.name_span for access in statement.accesses() if access.name == "out"],
            fix="pass a tensor of that name as tensors={'out': ...}; to write in place, rename it in the statement.",
            tensor="out",
        )
    values = {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}  # pyright: ignore[reportUnnecessaryIsInstance]
    check_unrecorded(statement.text, out, values)
    if any(step == 0 and extent > 1 for extent, step in zip(out.shape, out.stride(), strict=True)):
        raise InsumAliasError(
            "elements of out= share memory, since it was expanded",
            expression=statement.text,
            details=[f"out is {show_shape(out.shape)} with strides {show_shape(out.stride())}"],
            fix="pass a tensor with memory for each element, e.g. out=torch.empty(...).",
            tensor="out",
        )


def check_unrecorded(expression: str, out: Tensor, named: Mapping[str, Tensor]) -> None:
    """Raise where gradients would be recorded.

    Raises:
        InsumGradientError: a tensor requires one.
    """
    if not torch.is_grad_enabled():
        return
    for name, tensor in {**named, "out": out}.items():
        if tensor.requires_grad:
            raise InsumGradientError(
                f"out= records no gradients, but '{name}' requires one",
                expression=expression,
                details=["as with the functions of torch that take out="],
                fix="call without out=, or under torch.no_grad().",
                tensor=name,
            )


def write_out(expression: str, out: Tensor, result: Tensor) -> Tensor:
    """Copy a result into the caller's tensor.

    Raises:
        InsumShapeError: the shapes differ; nothing is resized.
        InsumDtypeError: the dtypes differ; nothing is cast.
        InsumDeviceError: the devices differ.
    """
    if result.shape != out.shape:
        raise _shape_error(expression, f"shape {show_shape(result.shape)}, the output's", out)
    if result.dtype != out.dtype:
        raise InsumDtypeError(
            f"out= must be {show_dtype(result.dtype)}, the dtype of the result, got {show_dtype(out.dtype)}",
            expression=expression,
            fix="pass a tensor of that dtype, or choose the result's by out_dtype=; nothing is cast silently.",
            tensor="out",
            expected=result.dtype,
            got=out.dtype,
        )
    if result.device != out.device:
        raise InsumDeviceError(
            f"out= must be on {result.device}, the device of the result, got {out.device}",
            expression=expression,
            fix=f"pass a tensor on {result.device}.",
            tensor="out",
            expected=result.device,
            got=out.device,
        )
    return out.copy_(result)


def _shape_error(expression: str, expected: str, out: Tensor) -> InsumShapeError:
    return InsumShapeError(
        f"out= must have {expected}; got {show_shape(out.shape)}",
        expression=expression,
        fix="pass a tensor of the output's shape; it is not resized.",
        tensor="out",
        got=tuple(out.shape),
    )

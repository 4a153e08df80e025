"""Checks of a tensor product's operands, before any statement runs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from insum_nn.dtypes import INDEX_DTYPES
from insum_nn.errors import InsumDtypeError, InsumError, InsumShapeError, raise_collected
from insum_nn.ops.statements import other_device
from insum_nn.ops.tensor_product_spec import ProductLayout

__all__ = ["check_operands", "other_dtype"]

_CALLER = "tensor_product: "


def check_operands(
    layout: ProductLayout,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    receivers: Tensor | None,
    senders: Tensor | None,
    num_receivers: int | None,
) -> None:
    """Check the operands of `tensor_product`; the values of index tensors are not read here.

    Raises:
        InsumShapeError: an operand's shape does not fit the spec and the edges, or edges are missing or not
            asked for.
        InsumDtypeError: an operand is no tensor, dtypes differ, or an edge's end is no integer.
        InsumDeviceError: devices differ.
    """
    for name, value in {"x": x, "y": y, "weight": weight, "receivers": receivers, "senders": senders}.items():
        required = name in ("x", "y", "weight")
        if not isinstance(value, Tensor) and (required or value is not None):
            raise _kind(
                name, f"must be a tensor, got {type(value).__name__}", f"pass {name} as a tensor.", Tensor, value
            )
    faults: list[InsumError] = []
    spec = layout.spec
    ends = {"receivers": receivers, "senders": senders}
    given = {name: index for name, index in ends.items() if index is not None}
    for name, index in ends.items():
        if spec.convolution and index is None:
            faults.append(_fault(name, "is missing: the spec is a convolution", "give both ends of each edge."))
        elif not spec.convolution and index is not None:
            fix = "leave it out, or build the spec with convolution=True."
            faults.append(_fault(name, "is given, but the spec is no convolution", fix))
    if num_receivers is not None and not spec.convolution:
        faults.append(_fault("num_receivers", "is given, but the spec is no convolution", "leave it out."))
    elif num_receivers is not None and num_receivers < 0:
        faults.append(_fault("num_receivers", f"is {num_receivers}", "pass a number of nodes.", got=num_receivers))
    rows: Any = senders.shape[0] if senders is not None and senders.ndim == 1 else None
    rows, what = (rows, "edges") if spec.convolution else (x.shape[0] if x.ndim else None, "samples")
    expected: dict[str, tuple[Tensor, tuple[Any, ...]]] = {
        "x": (x, (None if spec.convolution else rows, layout.dims["x"])),
        "y": (y, (rows, layout.dims["y"])),
        "weight": (weight, (() if spec.shared else (rows,)) + (spec.weight_numel,)),
        **{name: (index, (rows,)) for name, index in given.items()},
    }
    for name, (tensor, shape) in expected.items():
        got = tuple(tensor.shape)
        if len(got) != len(shape) or any(e is not None and e != g for e, g in zip(shape, got, strict=True)):
            names = ["n" if e is None else str(e) for e in shape]
            shown = f"({', '.join(names)}{',' if len(names) == 1 else ''})"
            message, fix = f"has shape {got}", f"pass {name} of shape {shown}, for {rows} {what}."
            faults.append(_fault(name, message, fix, details=[f"expected {shown}; got {got}"], expected=shape, got=got))
    faults += _kinds(x, y, weight, given)
    raise_collected(faults)


def other_dtype(name: str, tensor: Tensor, first: str, anchor: Tensor, *, caller: str = "") -> list[InsumError]:
    """Return an error if a tensor has another dtype than the first one."""
    if tensor.dtype == anchor.dtype:
        return []
    return [
        InsumDtypeError(
            f"{caller}'{name}' is {tensor.dtype}, '{first}' is {anchor.dtype}",
            fix=f"pass {name}.to({anchor.dtype}).",
            argument=name,
            expected=anchor.dtype,
            got=tensor.dtype,
        )
    ]


def _kinds(x: Tensor, y: Tensor, weight: Tensor, ends: dict[str, Tensor]) -> list[InsumError]:
    faults: list[InsumError] = []
    # Where there are no weights, their dtype and device do not matter.
    factors = {"y": y} | ({"weight": weight} if weight.numel() else {})
    for name, tensor in (factors | ends).items():
        faults += other_device(name, tensor, "x", x, caller=_CALLER)
    if not x.dtype.is_floating_point:
        faults.append(_kind("x", f"must be floating-point, got {x.dtype}", "pass x.float().", None, x.dtype))
    for name, tensor in factors.items():
        faults += other_dtype(name, tensor, "x", x, caller=_CALLER)
    for name, index in ends.items():
        if index.dtype not in INDEX_DTYPES:
            message = f"must be int32 or int64, got {index.dtype}"
            faults.append(_kind(name, message, f"pass {name}.long().", INDEX_DTYPES, index.dtype))
    return faults


def _fault(name: str, message: str, fix: str, **fields: Any) -> InsumError:
    return InsumShapeError(f"{_CALLER}'{name}' {message}", fix=fix, argument=name, **fields)


def _kind(name: str, message: str, fix: str, expected: Any, got: Any) -> InsumError:
    return InsumDtypeError(f"{_CALLER}'{name}' {message}", fix=fix, argument=name, expected=expected, got=got)

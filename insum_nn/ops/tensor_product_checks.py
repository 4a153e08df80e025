"""Checks of a tensor product's operands, before any statement runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from insum_nn.dtypes import FLOATS, INDEX_DTYPES
from insum_nn.errors import InsumDtypeError, InsumError, InsumShapeError
from insum_nn.faults import Faults, shown_shape
from insum_nn.ops.tensor_product_spec import ProductLayout

__all__ = ["check_ends", "check_kinds", "check_operands", "check_shapes"]

# An extent is a number, or `None`: any.
Expected = Mapping[str, tuple[Tensor, tuple[Any, ...]]]


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
    faults = Faults("tensor_product")
    ends = {"receivers": receivers, "senders": senders}
    given = {name: index for name, index in ends.items() if index is not None}
    for name, value in {"x": x, "y": y, "weight": weight, **given}.items():
        if not isinstance(value, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            message, fix = f"must be a tensor, got {type(value).__name__}", f"pass {name} as a tensor."
            faults.add(InsumDtypeError, name, message, fix=fix, expected_got=(Tensor, value))
            faults.raise_all()
    spec = layout.spec
    unasked = "is given, but the spec is no convolution"
    for name, index in ends.items():
        if spec.convolution and index is None:
            message = "is missing: the spec is a convolution"
            faults.add(InsumShapeError, name, message, fix="give both ends of each edge.")
        elif not spec.convolution and index is not None:
            fix = "leave it out, or build the spec with convolution=True."
            faults.add(InsumShapeError, name, unasked, fix=fix)
    if num_receivers is not None and not spec.convolution:
        faults.add(InsumShapeError, "num_receivers", unasked, fix="leave it out.")
    elif num_receivers is not None and num_receivers < 0:
        message, fix = f"is {num_receivers}", "pass a number of nodes."
        faults.add(InsumShapeError, "num_receivers", message, fix=fix, got=num_receivers)
    rows: Any = senders.shape[0] if senders is not None and senders.ndim == 1 else None
    rows, what = (rows, "edges") if spec.convolution else (x.shape[0] if x.ndim else None, "samples")
    expected: Expected = {
        "x": (x, (None if spec.convolution else rows, layout.dims["x"])),
        "y": (y, (rows, layout.dims["y"])),
        "weight": (weight, (() if spec.shared else (rows,)) + (spec.weight_numel,)),
        **{name: (index, (rows,)) for name, index in given.items()},
    }
    check_shapes(faults, expected, rows, what)
    # Where there are no weights, their dtype and device do not matter.
    check_kinds(faults, {"x": x, "y": y} | ({"weight": weight} if weight.numel() else {}))
    check_ends(faults, given, "x", x)
    faults.raise_all()


def check_shapes(
    faults: Faults, expected: Expected, rows: Any, what: str, kind: type[InsumError] = InsumShapeError
) -> None:
    """Add an error of a kind for each tensor of another shape than is expected of so many samples or edges."""
    for name, (tensor, shape) in expected.items():
        # Written where it is shown alone: tracers know no text of an extent.
        faults.shape(
            name,
            tensor,
            shape,
            fix=lambda n=name, s=shape: f"pass {n} of shape {shown_shape(s)}, for {rows} {what}.",
            kind=kind,
        )


def check_kinds(faults: Faults, factors: Mapping[str, Tensor], *, cast: bool = False) -> None:
    """Add an error for each dtype and device that differs from the first factor's, or is not supported.

    `cast`: dtypes may differ.
    """
    (first, anchor), *rest = factors.items()
    for name, tensor in rest:
        faults.device(name, tensor, first, anchor)
    if anchor.dtype not in FLOATS:
        message, fix = f"must be floating-point, got {anchor.dtype}", f"pass {first}.float()."
        details = ["expected float16, bfloat16, float32 or float64"]
        faults.add(InsumDtypeError, first, message, details=details, fix=fix, expected_got=(FLOATS, anchor.dtype))
    for name, tensor in rest:
        if not cast:
            faults.dtype(name, tensor, first, anchor)


def check_ends(faults: Faults, ends: Mapping[str, Tensor], first: str, anchor: Tensor) -> None:
    """Add an error for each index tensor that is on another device than the first operand, or holds no integers."""
    for name, index in ends.items():
        faults.device(name, index, first, anchor)
        faults.dtype_among(name, index.dtype, INDEX_DTYPES, fix=f"pass {name}.long().")

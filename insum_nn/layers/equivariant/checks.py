"""Checks of a tensor product's inputs, before any kernel runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from insum_nn.dtypes import FLOATS
from insum_nn.errors import InsumShapeError, raise_collected
from insum_nn.faults import Faults
from insum_nn.ops.statements import under_autocast
from insum_nn.ops.tensor_product_checks import check_kinds

__all__ = [
    "InputError",
    "check_inputs",
    "check_weights",
    "fits_plainly",
]


class InputError(InsumShapeError, AssertionError, RuntimeError):
    """An input does not fit the module; also the two errors that e3nn and OpenEquivariance raise here."""


_PLAIN = (Tensor, torch.nn.Parameter)


def fits_plainly(x: Tensor, y: Tensor, weight: object, dims: tuple[int, int, int], *, shared: bool) -> bool:
    """Return whether inputs need no further checks: matrices of one dtype on one device, and no active mode.

    Args:
        x: wanted (any, in1).
        y: wanted (any, in2).
        weight: wanted (numel,) if shared, else (any, numel).
        dims: in1, in2, numel.
        shared: all samples share the weights.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if type(x) not in _PLAIN or type(y) not in _PLAIN or not isinstance(weight, Tensor) or type(weight) not in _PLAIN:
        return False
    dtype, device = x.dtype, x.device
    return (
        x.dim() == y.dim() == 2
        and weight.dim() == (1 if shared else 2)
        and (x.shape[1], y.shape[1], weight.shape[-1]) == dims
        and y.dtype == dtype
        and y.device == device
        and dtype in FLOATS
        and (dims[2] == 0 or (weight.dtype == dtype and weight.device == device))
        and not torch._C._is_any_autocast_enabled()
    )


def check_inputs(module: Any, x: Tensor, y: Tensor, weight: Tensor) -> None:
    """Check the inputs of a tensor product."""
    found = Faults()
    # Dynamo cannot guard e3nn's representations, so their own dimension is not read.
    wanted = (("x", x, module._in1_dim, module.irreps_in1), ("y", y, module._in2_dim, module.irreps_in2))
    for name, tensor, dim, irreps in wanted:
        if tensor.dim() == 0 or tensor.shape[-1] != dim:
            found.add(
                InputError,
                name,
                f"does not hold the representation {irreps}",
                details=[f"expected shape (..., {dim}); got {tuple(tensor.shape)}"],
                fix=f"pass {name} with {dim} components last.",
                expected_got=(dim, tuple(tensor.shape)),
            )
    factors = {"x": x, "y": y} | ({"weight": weight} if weight.numel() else {})
    check_kinds(found, factors, cast=under_autocast(x.device))
    faults = found.found
    shapes = [x.shape[:-1], y.shape[:-1]] + ([] if module.shared_weights else [weight.shape[:-1]])
    # While tracing, reading extents would fix them; torch raises for shapes that do not broadcast.
    free = torch.compiler.is_compiling() or any(isinstance(extent, torch.SymInt) for s in shapes for extent in s)
    if not faults and not free and not _do_broadcast(shapes):
        names = "x, y" if module.shared_weights else "x, y and weight"
        faults.append(
            InputError(
                f"the batch dimensions of {names} do not broadcast",
                details=["got " + ", ".join(str(tuple(s)) for s in shapes)],
                fix="give them equal batch dimensions, or 1.",
                got=shapes,
            )
        )
    raise_collected(faults)


def check_weights(module: Any, weight: Tensor | None) -> Tensor | None:
    """Check the weights that were passed to a tensor product; `None`: those that it holds."""
    if weight is None:
        if module.weight_numel > 0 and not module.internal_weights:
            raise InputError(
                "the weights are missing",
                details=[
                    f"expected a tensor of {module.weight_numel} weights{'' if module.shared_weights else ' a sample'}"
                ],
                fix="pass weight=, or build the module with internal_weights=True.",
                expected=module.weight_numel,
            )
        return None
    wanted = f"({module.weight_numel},)" if module.shared_weights else f"(..., {module.weight_numel})"
    fits = weight.dim() == 1 if module.shared_weights else weight.dim() > 1
    if not fits or weight.shape[-1] != module.weight_numel:
        raise InputError(
            "the weight has a wrong shape",
            details=[f"expected {wanted}, shared_weights={module.shared_weights}; got {tuple(weight.shape)}"],
            fix="pass weights of this shape; `weight_numel` is their number.",
            expected=wanted,
            got=tuple(weight.shape),
        )
    return weight


def _do_broadcast(shapes: Sequence[torch.Size]) -> bool:
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return False
    return True

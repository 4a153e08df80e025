"""Checks of a tensor product's inputs, before any kernel runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from insum_nn.dtypes import FLOATS, INDEX_DTYPES
from insum_nn.errors import InsumShapeError
from insum_nn.faults import Faults
from insum_nn.ops.statements import under_autocast
from insum_nn.ops.tensor_product_checks import check_kinds

__all__ = ["InputError", "batch_of", "check_inputs", "check_weights", "fits_plainly"]


class InputError(InsumShapeError, AssertionError, RuntimeError):
    """An input does not fit the module; also the two errors that e3nn and OpenEquivariance raise here."""


_PLAIN = (Tensor, torch.nn.Parameter)


def fits_plainly(product: Any, x: Tensor, y: Tensor, weight: object, ends: Sequence[object] = ()) -> bool:
    """Return whether inputs need no further checks: matrices of one dtype on one device, and no active mode.

    Args:
        product: a tensor product of ours.
        x: wanted (z, in1), or (any, in1) along edges.
        y: wanted (z, in2).
        weight: wanted (numel,) if all samples share the weights, else (z, numel).
        ends: of edges; wanted (z,) each.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if type(x) not in _PLAIN or type(y) not in _PLAIN or not isinstance(weight, Tensor) or type(weight) not in _PLAIN:
        return False
    if x.dim() != 2 or y.dim() != 2:
        return False
    dtype, device, numel, rows = x.dtype, x.device, product.weight_numel, y.shape[0]
    for end in ends:
        plain = type(end) is Tensor and end.shape == (rows,) and end.device == device
        if not plain or end.dtype not in INDEX_DTYPES:  # type: ignore[attr-defined]
            return False
    return (
        (bool(ends) or x.shape[0] == rows)
        and (x.shape[1], y.shape[1]) == (product._in1_dim, product._in2_dim)
        and weight.shape == ((numel,) if product.shared_weights else (rows, numel))
        and y.dtype == dtype
        and y.device == device
        and dtype in FLOATS
        and (numel == 0 or (weight.dtype == dtype and weight.device == device))
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
    found.raise_all()


def batch_of(module: Any, x: Tensor, y: Tensor, weight: Tensor) -> list[int]:
    """Return the batch dimensions of a call of a tensor product."""
    tensors = (x, y) if module.shared_weights else (x, y, weight)
    try:
        return list(torch.broadcast_tensors(*(tensor[..., :1] for tensor in tensors))[0].shape[:-1])
    except RuntimeError as error:
        heads = [tuple(tensor.shape[:-1]) for tensor in tensors]
        raise InputError(
            f"the batch dimensions of {'x, y' if module.shared_weights else 'x, y and weight'} do not broadcast",
            details=[f"got {', '.join(map(str, heads))}"],
            fix="give them equal batch dimensions, or 1.",
            got=heads,
        ) from error


def check_weights(module: Any, weight: Tensor | None) -> Tensor | None:
    """Check the weights that were passed to a tensor product; `None`: those that it holds."""
    numel, shared = module.weight_numel, module.shared_weights
    if weight is None:
        fits = module.internal_weights or numel == 0
    else:
        fits = (weight.dim() == 1 if shared else weight.dim() > 1) and weight.shape[-1] == numel
    if not fits:
        wanted, got = f"({numel},)" if shared else f"(..., {numel})", None if weight is None else tuple(weight.shape)
        raise InputError(
            "the weights are missing" if weight is None else "the weight has a wrong shape",
            details=[f"expected {wanted}, shared_weights={shared}; got {got}"],
            fix="pass weights of this shape, `weight_numel` in number, or build the module with internal_weights=True.",
            expected=wanted,
            got=got,
        )
    return weight

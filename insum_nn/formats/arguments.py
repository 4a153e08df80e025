"""Arguments of builders: shapes, dtypes, dimensions and masks, checked without reading an element."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from insum_nn.dtypes import INDEX_DTYPES, not_dense
from insum_nn.errors import InsumDeviceError, InsumDtypeError, InsumFormatError, InsumOverflowError, InsumShapeError

__all__ = [
    "check_block_shape",
    "check_dims",
    "check_mask",
    "check_permutation",
    "check_shape",
    "choose_index_dtype",
    "expand_nd",
    "integers",
    "require_dense",
    "require_matrix",
    "require_tensor",
]

_INT32_LIMIT = 1 << 31


def require_tensor(value: object, owner: str, name: str) -> Tensor:
    """`value` if it is a tensor."""
    if not isinstance(value, Tensor):
        raise InsumDtypeError(
            f"{owner} needs a torch.Tensor for {name}, got {type(value).__name__}",
            fix=f"pass torch.as_tensor({name}).",
            got=type(value),
        )
    return value


def require_dense(value: object, owner: str, name: str) -> Tensor:
    """`value` if it is a dense tensor."""
    tensor = require_tensor(value, owner, name)
    got = not_dense(tensor)
    if got is not None:
        raise InsumFormatError(
            f"{owner} needs a dense tensor for {name}, got {got}", fix="convert it; a sparse tensor by from_torch."
        )
    return tensor


def integers(extents: object) -> tuple[int, ...] | None:
    """Return a sequence of integers as a tuple; `None` for anything else, floats included."""
    try:
        return tuple(operator.index(extent) for extent in cast("Sequence[int]", extents))
    except TypeError:
        return None


def expand_nd(owner: str, name: str, ndim: int, value: object, least: int) -> list[int]:
    """Return one number repeated, or d numbers after a check.

    Raises:
        InsumShapeError: there are not d integers, or one is below `least`.

    >>> expand_nd("SubMConv3d", "kernel_size", 3, 5, 1)
    [5, 5, 5]
    """
    alone = integers((value,))
    values = integers(value) if alone is None else alone * ndim
    if values is None or len(values) != ndim or min(values) < least:
        one = f"an integer of at least {least}"
        raise InsumShapeError(
            f"{owner}: '{name}' is {value!r}",
            details=[f"expected {one if ndim == 1 else f'{ndim} integers of at least {least}, or one for all'}"],
            fix="pass one integer." if ndim == 1 else f"pass one integer, or {ndim} of them.",
            argument=name,
            expected=ndim,
            got=value,
        )
    return list(values)


def check_shape(shape: Sequence[int] | None, owner: str) -> tuple[int, ...]:
    """`shape` as a tuple of extents."""
    if shape is None:
        raise InsumShapeError(
            f"{owner} needs the shape of the dense tensor", fix="pass shape=(m, k); indices alone do not tell it."
        )
    extents = integers(shape)
    if not extents or any(extent < 0 for extent in extents):
        raise InsumShapeError(
            f"{owner} got the shape {shape}",
            details=["expected one or more extents of at least 0"],
            fix="pass the extents of the dense tensor.",
            got=shape,
        )
    return extents


def choose_index_dtype(extents: Sequence[int], index_dtype: torch.dtype | None) -> torch.dtype:
    """Return the caller's choice, or int32 wherever every index fits."""
    fits = max(extents, default=0) <= _INT32_LIMIT - 1
    if index_dtype is None:
        return torch.int32 if fits else torch.int64
    if index_dtype not in INDEX_DTYPES:
        raise InsumDtypeError(
            f"index_dtype must be torch.int32 or torch.int64, got {index_dtype}",
            fix="leave index_dtype out to get int32 wherever the shape allows it.",
            got=index_dtype,
        )
    if index_dtype == torch.int32 and not fits:
        raise InsumOverflowError(
            f"an extent of {max(extents)} does not fit index_dtype=torch.int32",
            details=[f"extents: {tuple(extents)}; int32 reaches {_INT32_LIMIT - 1}"],
            fix="pass index_dtype=torch.int64, or leave it out.",
            extents=tuple(extents),
        )
    return index_dtype


def check_mask(mask: Tensor, dense: Tensor, *shapes: tuple[int, ...]) -> Tensor:
    """`mask` if it is a bool tensor of one of `shapes` on the device of `dense`."""
    if mask.dtype != torch.bool:
        raise InsumDtypeError(f"mask must be bool, got {mask.dtype}", fix="pass mask != 0.", got=mask.dtype)
    if tuple(mask.shape) not in shapes:
        raise InsumShapeError(
            "mask does not fit the dense tensor",
            details=[f"expected {' or '.join(map(str, shapes))}; got {tuple(mask.shape)}"],
            fix="pass a mask with one element per element of the dense tensor.",
            expected=shapes,
            got=tuple(mask.shape),
        )
    if mask.device != dense.device:
        raise InsumDeviceError(
            f"mask is on {mask.device}, the dense tensor on {dense.device}", fix=f"pass mask.to('{dense.device}')."
        )
    return mask


def check_block_shape(block_shape: Sequence[int] | None) -> tuple[int, int]:
    """`block_shape` as two positive extents."""
    extents = integers(block_shape)
    if extents is None or len(extents) != 2 or min(extents) < 1:
        raise InsumShapeError(
            f"block_shape must be two extents of at least 1, got {block_shape}",
            fix="pass block_shape=(a, b), rows and columns of one block.",
            got=block_shape,
        )
    return extents[0], extents[1]


def check_dims(dims: Sequence[int], ndim: int, owner: str) -> tuple[int, ...]:
    """`dims` counted from 0; negative ones count from the end."""
    for dim in dims:
        if not -ndim <= dim < ndim:
            raise InsumShapeError(
                f"{owner} got dimension {dim} of a tensor with {ndim}",
                fix=f"pass a dimension from 0 to {ndim - 1}.",
                got=dim,
            )
    return tuple(dim % ndim for dim in dims)


def check_permutation(dims: Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """`dims` as a permutation of all dimensions; the reversal for `None`."""
    if dims is None:
        return tuple(reversed(range(ndim)))
    permutation = check_dims(dims, ndim, "transpose")
    if sorted(permutation) != list(range(ndim)):
        raise InsumShapeError(
            f"transpose needs a permutation of {ndim} dimensions, got {tuple(dims)}",
            fix="name every dimension once.",
            got=tuple(dims),
        )
    return permutation


def require_matrix(shape: Sequence[int], what: str) -> tuple[int, int]:
    """`shape` if it has two dimensions."""
    if len(shape) != 2:
        raise InsumShapeError(
            f"{what} needs a matrix, got shape {tuple(shape)}",
            fix="reshape it to two dimensions, or use COO or GroupCOO and their `indices`.",
            got=tuple(shape),
        )
    return shape[0], shape[1]

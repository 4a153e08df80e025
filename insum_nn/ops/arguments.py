"""Shared by the operators on formats: checks that name the caller's argument, and access patterns of formats."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from insum_nn.dtypes import not_dense
from insum_nn.errors import InsumDeviceError, InsumDtypeError, InsumFormatError, InsumShapeError, plural
from insum_nn.faults import Faults, shown_shape
from insum_nn.formats import COO, ELL, BlockCOO, BlockFormat, BlockGroupCOO, GroupCOO, SparseFormat
from insum_nn.ops.statements import pad_axis, to_autocast, under_autocast

__all__ = [
    "FORMATS",
    "Operand",
    "check_mode",
    "in_blocks",
    "matrix_layout",
    "named_tensors",
    "require_format",
    "subscripts",
]


class Operand(NamedTuple):
    """A dense argument of an operator.

    Attributes:
        argument: the parameter's name in Python.
        symbol: its name in the expression.
        tensor: what the caller passed; checked to be a dense tensor.
        axes: a letter and the extent it must have (`None`: any, but the same for every operand) for each axis.
    """

    argument: str
    symbol: str
    tensor: Any
    axes: tuple[tuple[str, int | None], ...]


FORMATS: tuple[type[SparseFormat], ...] = (COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO)


def require_format(
    value: object,
    caller: str,
    argument: str,
    kinds: tuple[type[SparseFormat], ...] = FORMATS,
    *,
    recommended: type[SparseFormat] = GroupCOO,
) -> None:
    """Raise unless `value` is a format for which an operator has an expression; the error recommends one of them."""
    # By identity first: formats are abstract base classes, of which `isinstance` takes longer.
    if type(value) in kinds or isinstance(value, kinds):
        return
    names = ", ".join(kind.__name__ for kind in kinds)
    if isinstance(value, Tensor):
        how = "from_dense" if value.layout == torch.strided else "from_torch"
        fix = f"convert it once, {recommended.__name__}.{how}({argument}), and keep the result."
    elif isinstance(value, SparseFormat) and not isinstance(value, FORMATS):
        fix = f"register its statement with insum_nn.ops.register, or convert it to a {recommended.__name__}."
    elif isinstance(value, SparseFormat):
        fix = f"convert it once, {recommended.__name__}.from_coo({argument}), and keep the result."
    else:
        fix = "build one of these formats."
    raise InsumFormatError(
        f"{caller} cannot take a {type(value).__name__} for '{argument}'",
        details=[f"expected one of {names}"],
        fix=fix,
        argument=argument,
        expected=kinds,
        got=type(value),
    )


def matrix_layout(matrix: SparseFormat, caller: str, argument: str) -> str:
    """Return the name under which tables of expressions list a matrix: its format, and what it is grouped along.

    Raises:
        InsumFormatError: no format.
        InsumShapeError: not two dimensions.

    >>> matrix_layout(GroupCOO.from_dense(torch.eye(2), group_dim=1), "spmm", "matrix")
    'GroupCOO along columns'
    """
    require_format(matrix, caller, argument)
    if matrix.ndim != 2:
        raise InsumShapeError(
            f"{caller} takes a matrix for '{argument}', got {plural(matrix.ndim, 'dimension')}",
            details=[f"expected shape (m, k); got {matrix.shape}"],
            fix="use ttm or mttkrp for tensors of more dimensions.",
            argument=argument,
            got=matrix.shape,
        )
    kind = type(matrix) if type(matrix) in FORMATS else next(kind for kind in FORMATS if isinstance(matrix, kind))
    if kind in (ELL, GroupCOO):
        return f"{kind.__name__} along {('rows', 'columns')[cast('ELL | GroupCOO', matrix).group_dim]}"
    return kind.__name__


def subscripts(tensor: SparseFormat) -> tuple[str, ...]:
    """Return how an expression addresses each dimension of a tensor that runs along with the stored values.

    >>> subscripts(GroupCOO.from_dense(torch.ones(2, 3, 2)))
    ('Index0[g]', 'Index1[g,q]', 'Index2[g,q]')
    """
    # A dimension without an index tensor is ELL's: the position is the index.
    found = ["m"] * tensor.ndim
    for part in tensor.index_parts:
        found[part.dim] = f"{part.name}[{','.join(part.axes)}]"
    if isinstance(tensor, BlockFormat):
        found = [f"{subscript},{letter}" for subscript, letter in zip(found, "ab", strict=True)]
    return tuple(found)


def in_blocks(matrix: SparseFormat, tensor: Tensor, axis: int, dim: int) -> Tensor:
    """`tensor` with an axis cut into the blocks of a matrix along a dimension, with zeros up to the grid's edge.

    Itself for a format without blocks.
    """
    if not isinstance(matrix, BlockFormat):
        return tensor
    extent, block = matrix.grid_shape[dim], matrix.block_shape[dim]
    return pad_axis(tensor, axis, extent * block).unflatten(axis, (extent, block))


def check_mode(mode: object, ndim: int, caller: str) -> int:
    """`mode` counted from 0."""
    if isinstance(mode, int) and not isinstance(mode, bool) and -ndim <= mode < ndim:
        return mode % ndim
    raise InsumShapeError(
        f"{caller} got mode {mode!r} of a tensor with {ndim} dimensions",
        fix=f"pass an integer from 0 to {ndim - 1}.",
        expected=ndim,
        got=mode,
    )


def named_tensors(caller: str, expression: str, matrix: SparseFormat, operands: Sequence[Operand]) -> dict[str, Tensor]:
    """Return the tensors of a call by their names in the expression, after checks of rank, extents, dtype and device.

    Under autocast float32 and half tensors take its dtype, as they do before a dense product.

    Raises:
        InsumError: the first fault; its text lists the others.
    """
    named = dict(matrix.tensors)
    if (torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled()) and under_autocast(matrix.device):
        named["Val"] = to_autocast(matrix.values)
        operands = [o._replace(tensor=to_autocast(o.tensor)) for o in operands]
    values = named["Val"]
    if not _fit(values, operands):
        _raise_faults(caller, expression, values, operands)
    for operand in operands:
        named[operand.symbol] = operand.tensor
    return named


def _fit(values: Tensor, operands: Sequence[Operand]) -> bool:
    """Return whether `_raise_faults` would find nothing; every call asks, and few calls are wrong."""
    dtype, device = values.dtype, values.device
    extents: dict[str, int] = {}
    for _, _, tensor, axes in operands:
        if not_dense(tensor) or tensor.dtype != dtype or tensor.device != device:
            return False
        shape = tensor.shape
        if len(shape) != len(axes):
            return False
        for (letter, extent), got in zip(axes, shape, strict=True):
            if got != (extents.setdefault(letter, got) if extent is None else extent):
                return False
    return True


def _raise_faults(caller: str, expression: str, values: Tensor, operands: Sequence[Operand]) -> None:
    """Raise what is wrong with one call's dense operands; one that has a free letter first binds it."""
    faults = Faults(caller, expression)
    bound: dict[str, tuple[str, int]] = {}
    for operand in operands:
        argument, symbol, tensor, axes = operand
        add = partial(faults.add, symbols=[symbol])
        if (kind := not_dense(tensor)) is not None:
            fix = f"pass {argument} as a dense torch.Tensor."
            add(InsumFormatError, argument, f"must be a dense tensor, got {kind}", fix=fix, got=kind)
            continue
        shape, known = tuple(tensor.shape), {letter: extent for letter, (_, extent) in bound.items()}
        expected = shown_shape([known.get(letter, letter) if extent is None else extent for letter, extent in axes])
        details = [f"expected {argument} ({symbol}) of shape {expected}; got {shape}"]
        if len(shape) != len(axes):
            message = f"must have {plural(len(axes), 'dimension')}, got {len(shape)}"
            fix, axes = f"reshape {argument} to {expected}.", ()
            add(InsumShapeError, argument, message, fix=fix, details=details, expected_got=(len(operand.axes), shape))
        for axis, ((letter, extent), got) in enumerate(zip(axes, shape, strict=False)):
            source = "the sparse tensor"
            if extent is None:
                source, extent = bound.setdefault(letter, (f"'{argument}'", got))
            if got != extent:
                message = f"has extent {got} along axis {axis}, {source} requires {extent}"
                fix = f"give axis {axis} of {argument} the extent {extent}."
                add(InsumShapeError, argument, message, fix=fix, details=details, expected_got=(extent, got), axis=axis)
        dtype, device = values.dtype, values.device
        if tensor.dtype != dtype:
            message = f"is {tensor.dtype}, the sparse values are {dtype}"
            fix = f"pass {argument}.to({dtype}), or convert the format with to(dtype={tensor.dtype})."
            both = ["Val", symbol]
            faults.add(InsumDtypeError, argument, message, fix=fix, symbols=both, expected_got=(dtype, tensor.dtype))
        if tensor.device != device:
            message, fix = f"is on {tensor.device}, the sparse tensor on {device}", f"pass {argument}.to('{device}')."
            add(InsumDeviceError, argument, message, fix=fix, expected_got=(device, tensor.device))
    faults.raise_all()

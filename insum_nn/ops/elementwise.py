"""Elementwise operators that keep the structure: with a dense tensor, a vector, or another sparse tensor."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumFormatError
from insum_nn.faults import Faults
from insum_nn.formats import SparseFormat
from insum_nn.ops.arguments import Operand, check_mode, in_blocks, named_tensors, require_format, subscripts
from insum_nn.ops.statements import run

__all__ = [
    "add",
    "multiply",
    "multiply_expression",
    "same_structure",
    "scale",
    "scale_cols",
    "scale_expression",
    "scale_rows",
]

Format = TypeVar("Format", bound=SparseFormat)


def multiply(tensor: Format, other: Tensor | SparseFormat, *, options: Options = DEFAULT) -> Format:
    """Multiply a sparse tensor entry by entry with a dense one, or with a sparse one of the same structure.

        COO of 3 dimensions     D[p] += Val[p] * B[Index0[p],Index1[p],Index2[p]]
        ELL along rows          D[m,q] += Val[m,q] * B[m,Col[m,q]]
        GroupCOO along rows     D[g,q] += Val[g,q] * B[Row[g],Col[g,q]]
        BlockGroupCOO           D[g,q,a,b] += Val[g,q,a,b] * B[Row[g],a,Col[g,q],b]
        a sparse `other`        D[g,q] += Val[g,q] * Other[g,q]

    and likewise for any format and number of dimensions: `multiply_expression` shows it. For blocks `B` is cut into
    blocks, with zeros up to the grid's edge.

    Args:
        tensor: any format; its values `Val` are differentiable.
        other: `B`, the shape of `tensor`, dense; or a format of the same structure (compared on the device, which
            waits for it, unless both share their index tensors). Dtype and device of the values; differentiable.
        options: compile options; see `insum_nn.Options`.

    Returns:
        The format of `tensor` with the products as values. Each duplicate of an entry is multiplied, which is right
        for a dense `other` only.

    Raises:
        InsumShapeError: the shapes differ.
        InsumDtypeError: dtypes differ.
        InsumDeviceError: devices differ.
        InsumFormatError: `tensor` is no sparse format, or the structures differ.

    >>> from insum_nn.formats import COO
    >>> multiply(COO.from_dense(torch.eye(2)), torch.tensor([[3.0, 4.0], [5.0, 6.0]])).to_dense().tolist()
    [[3.0, 0.0], [0.0, 6.0]]
    """
    require_format(tensor, "multiply", "tensor")
    if isinstance(other, SparseFormat):
        axes = ",".join(tensor.value_axes)
        named = {"Val": tensor.values, "Other": _checked_pair("multiply", tensor, other)}
        expression = f"D[{axes}] += Val[{axes}] * Other[{axes}]"
        return tensor.with_values(run(expression, {}, named, options, tuple(tensor.values.shape)))
    expression = multiply_expression(tensor)
    axes = tuple((f"d{dim}", extent) for dim, extent in enumerate(tensor.shape))
    named = named_tensors("multiply", expression, tensor, [Operand("other", "B", other, axes)])
    named["B"] = in_blocks(tensor, in_blocks(tensor, named["B"], 1, 1), 0, 0)
    return tensor.with_values(run(expression, tensor.facts, named, options, tuple(tensor.values.shape)))


def multiply_expression(tensor: SparseFormat) -> str:
    """Return the expression that multiplies a tensor of this format by a dense one.

    >>> from insum_nn.formats import GroupCOO
    >>> multiply_expression(GroupCOO.from_dense(torch.eye(2)))
    'D[g,q] += Val[g,q] * B[Row[g],Col[g,q]]'
    """
    axes = ",".join(tensor.value_axes)
    return f"D[{axes}] += Val[{axes}] * B[{','.join(subscripts(tensor))}]"


def scale(tensor: Format, vector: Tensor, dim: int, *, options: Options = DEFAULT) -> Format:
    """Multiply every slice of a sparse tensor along `dim` by its own number.

        GroupCOO along rows, dim 0      D[g,q] += Val[g,q] * S[Row[g]]
        GroupCOO along rows, dim 1      D[g,q] += Val[g,q] * S[Col[g,q]]
        BlockCOO, dim 1                 D[p,a,b] += Val[p,a,b] * S[Col[p],b]

    and likewise for any format and number of dimensions: `scale_expression` shows it.

    Args:
        tensor: any format; its values `Val` are differentiable.
        vector: `S`, one number per index of `dim`; dtype and device of the values; differentiable.
        dim: a dimension of `tensor`.
        options: compile options; see `insum_nn.Options`.

    Returns:
        The format of `tensor` with scaled values.

    Raises:
        InsumShapeError: `vector` has another extent, or `tensor` has not `dim`.
        InsumDtypeError: dtypes differ.
        InsumDeviceError: devices differ.
        InsumFormatError: `tensor` is no sparse format.

    >>> from insum_nn.formats import COO
    >>> scale(COO.from_dense(torch.ones(2, 2)), torch.tensor([2.0, 3.0]), 1).to_dense().tolist()
    [[2.0, 3.0], [2.0, 3.0]]
    """
    require_format(tensor, "scale", "tensor")
    dim = check_mode(dim, tensor.ndim, "scale")
    expression = scale_expression(tensor, dim)
    operand = Operand("vector", "S", vector, ((f"d{dim}", tensor.shape[dim]),))
    named = named_tensors("scale", expression, tensor, [operand])
    for part in tensor.index_parts:
        if part.dim != dim:
            del named[part.name]
    named["S"] = in_blocks(tensor, named["S"], 0, dim)
    return tensor.with_values(run(expression, tensor.facts, named, options, tuple(tensor.values.shape)))


def scale_expression(tensor: SparseFormat, dim: int) -> str:
    """Return the expression that scales a tensor of this format along a dimension.

    >>> from insum_nn.formats import GroupCOO
    >>> scale_expression(GroupCOO.from_dense(torch.eye(2)), 1)
    'D[g,q] += Val[g,q] * S[Col[g,q]]'
    """
    axes = ",".join(tensor.value_axes)
    return f"D[{axes}] += Val[{axes}] * S[{subscripts(tensor)[dim]}]"


def scale_rows(matrix: Format, vector: Tensor, *, options: Options = DEFAULT) -> Format:
    """Multiply row i by `vector[i]`: `D[g,q] += Val[g,q] * S[Row[g]]`; see `scale`.

    >>> from insum_nn.formats import COO
    >>> scale_rows(COO.from_dense(torch.ones(2, 2)), torch.tensor([2.0, 3.0])).to_dense().tolist()
    [[2.0, 2.0], [3.0, 3.0]]
    """
    return scale(matrix, vector, 0, options=options)


def scale_cols(matrix: Format, vector: Tensor, *, options: Options = DEFAULT) -> Format:
    """Multiply column j by `vector[j]`: `D[g,q] += Val[g,q] * S[Col[g,q]]`; see `scale`.

    >>> from insum_nn.formats import COO
    >>> scale_cols(COO.from_dense(torch.ones(2, 2)), torch.tensor([2.0, 3.0])).to_dense().tolist()
    [[2.0, 3.0], [2.0, 3.0]]
    """
    return scale(matrix, vector, 1, options=options)


def add(tensor: Format, other: SparseFormat) -> Format:
    """Add a sparse tensor of the same structure: `D[g,q] = Val[g,q] + Other[g,q]`.

    Args:
        tensor: any format; its values are differentiable.
        other: a format of the same structure, as in `multiply`; its values are differentiable.

    Returns:
        The format of `tensor` with the sums as values.

    Raises:
        InsumFormatError: one is no sparse format, or the structures differ.
        InsumDtypeError: dtypes differ.
        InsumDeviceError: devices differ.

    >>> from insum_nn.formats import COO
    >>> eye = COO.from_dense(torch.eye(2))
    >>> add(eye, eye.with_values(torch.tensor([2.0, 3.0]))).to_dense().tolist()
    [[3.0, 0.0], [0.0, 4.0]]
    """
    require_format(tensor, "add", "tensor")
    require_format(other, "add", "other")
    return tensor.with_values(tensor.values + _checked_pair("add", tensor, other))


def same_structure(a: SparseFormat, b: SparseFormat) -> bool:
    """Return whether two formats store the same entries in the same slots; free where they share their index tensors.

    >>> from insum_nn.formats import COO
    >>> eye = COO.from_dense(torch.eye(2))
    >>> same_structure(eye, eye.with_values(torch.ones(2))), same_structure(eye, COO.from_dense(torch.ones(2, 2)))
    (True, False)
    """
    if type(a) is not type(b) or a.shape != b.shape or a.values.shape != b.values.shape or a.device != b.device:
        return False
    return all(
        (x.dim, x.axes, x.tensor.dtype) == (y.dim, y.axes, y.tensor.dtype)
        and (x.tensor is y.tensor or torch.equal(x.tensor, y.tensor))
        for x, y in zip(a.index_parts, b.index_parts, strict=True)
    )


def _checked_pair(caller: str, tensor: SparseFormat, other: SparseFormat) -> Tensor:
    """Return the values of `other` if it can meet `tensor` slot by slot."""
    faults = Faults(caller)
    faults.dtype("other", other, "tensor", tensor, fix=f"pass other.to(dtype={tensor.dtype}).")
    faults.device("other", other, "tensor", tensor)
    faults.raise_all()
    if not same_structure(tensor, other):
        raise InsumFormatError(
            f"{caller}: 'tensor' and 'other' store different entries",
            details=[f"tensor: {tensor!r}", f"other: {other!r}"],
            fix="build both on one structure with with_values, or make one of them dense.",
        )
    return other.values

"""Sparse tensor times a dense matrix along one dimension."""

from __future__ import annotations

from torch import Tensor

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.formats import COO, ELL, GroupCOO, SparseFormat
from insum_nn.ops.arguments import Operand, check_mode, named_tensors, require_format, subscripts
from insum_nn.ops.statements import run

__all__ = ["ttm", "ttm_expression"]


def ttm(tensor: SparseFormat, matrix: Tensor, mode: int, *, options: Options = DEFAULT) -> Tensor:
    """Multiply a sparse tensor by a matrix along `mode`.

        GroupCOO of 3 dimensions, mode 2    Y[Index0[g],Index1[g,q],r] += Val[g,q] * U[Index2[g,q],r]
        COO of 3 dimensions, mode 0         Y[r,Index1[p],Index2[p]] += Val[p] * U[Index0[p],r]

    and likewise for any number of dimensions, grouped dimension and mode: `ttm_expression` shows it. The result is
    dense: its memory is proportional to the product of the remaining extents.

    Source: Zhang et al., Sgap, eq. (2b).

    Args:
        tensor: COO, ELL or GroupCOO; its values `Val` are differentiable.
        matrix: `U`, (extent of `mode`, r); dtype and device of the values; differentiable.
        mode: the dimension that is contracted.
        options: compile options; see `insum_nn.Options`.

    Returns:
        `Y`, the shape of `tensor` with r in place of the extent of `mode`; fp16 and bf16 accumulate in float32.

    Raises:
        InsumShapeError: `matrix` does not fit, or `tensor` has not `mode`.
        InsumDtypeError: dtypes differ.
        InsumDeviceError: devices differ.
        InsumFormatError: `tensor` is in no such format.

    >>> import torch
    >>> ttm(COO.from_dense(torch.ones(2, 3)), torch.ones(3, 1), 1).tolist()
    [[3.0], [3.0]]
    """
    expression = ttm_expression(tensor, mode)
    mode = check_mode(mode, tensor.ndim, "ttm")
    operand = Operand("matrix", "U", matrix, (("k", tensor.shape[mode]), ("r", None)))
    named = named_tensors("ttm", expression, tensor, [operand])
    shape = [None if dim == mode else extent for dim, extent in enumerate(tensor.shape)]
    return run(expression, tensor.facts, named, options, shape)


def ttm_expression(tensor: SparseFormat, mode: int) -> str:
    """Return the expression for a tensor of this format.

    Raises:
        InsumShapeError: `tensor` has not `mode`.
        InsumFormatError: `tensor` is in no such format.

    >>> import torch
    >>> ttm_expression(COO.from_dense(torch.ones(1, 1, 1)), 0)
    'Y[r,Index1[p],Index2[p]] += Val[p] * U[Index0[p],r]'
    """
    require_format(tensor, "ttm", "tensor", (COO, ELL, GroupCOO))
    mode = check_mode(mode, tensor.ndim, "ttm")
    at = subscripts(tensor)
    written = ["r" if dim == mode else subscript for dim, subscript in enumerate(at)]
    return f"Y[{','.join(written)}] += Val[{','.join(tensor.value_axes)}] * U[{at[mode]},r]"

"""Sparse matrix times dense matrix or vector."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from insum_nn.compiler.api import Program, built_program
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.dtypes import not_dense
from insum_nn.formats import BlockFormat, SparseFormat
from insum_nn.ops.arguments import Operand, in_blocks, matrix_layout, named_tensors
from insum_nn.ops.custom import registered
from insum_nn.ops.statements import run

__all__ = ["SPMM", "spmm", "spmm_expression", "spmm_program"]

SPMM: Mapping[str, str] = MappingProxyType(
    {
        "COO": "C[Row[p],n] += Val[p] * B[Col[p],n]",
        "ELL along rows": "C[m,n] += Val[m,q] * B[Col[m,q],n]",
        "ELL along columns": "C[Row[k,q],n] += Val[k,q] * B[k,n]",
        "GroupCOO along rows": "C[Row[g],n] += Val[g,q] * B[Col[g,q],n]",
        "GroupCOO along columns": "C[Row[g,q],n] += Val[g,q] * B[Col[g],n]",
        "BlockCOO": "C[Row[p],a,n] += Val[p,a,b] * B[Col[p],b,n]",
        "BlockGroupCOO": "C[Row[g],a,n] += Val[g,q,a,b] * B[Col[g,q],b,n]",
    }
)
"""The expression of each format, as `matrix_layout` names it."""


def spmm(matrix: SparseFormat, dense: Tensor, *, options: Options = DEFAULT) -> Tensor:
    """Multiply a sparse matrix by a dense matrix or vector.

        COO                     C[Row[p],n] += Val[p] * B[Col[p],n]
        ELL along rows          C[m,n] += Val[m,q] * B[Col[m,q],n]
        ELL along columns       C[Row[k,q],n] += Val[k,q] * B[k,n]
        GroupCOO along rows     C[Row[g],n] += Val[g,q] * B[Col[g,q],n]
        GroupCOO along columns  C[Row[g,q],n] += Val[g,q] * B[Col[g],n]
        BlockCOO                C[Row[p],a,n] += Val[p,a,b] * B[Col[p],b,n]
        BlockGroupCOO           C[Row[g],a,n] += Val[g,q,a,b] * B[Col[g,q],b,n]

    For blocks `B` is the dense operand cut into block rows, (grid columns, b, n), with zeros up to the grid's edge, and
    the rows of `C` beyond the matrix are cut off. A vector is a matrix of one column.

    Source: Won, Ahrens, Amarasinghe, Emer, Insum (ASPLOS 2026), sections 3 and 4.

    Args:
        matrix: (m, k), in any of these formats; its values `Val` are differentiable.
        dense: `B`, (k, n) or (k,); dtype and device of the values; differentiable.
        options: compile options; see `insum_nn.Options`.

    Returns:
        `C`, (m, n) or (m,), dtype of the operands; fp16 and bf16 accumulate in float32. Rows without an entry are zero.

    Raises:
        InsumShapeError: `matrix` is no matrix, or `dense` has not one row per column of it.
        InsumDtypeError: the two dtypes differ.
        InsumDeviceError: the two devices differ.
        InsumFormatError: `matrix` is no sparse format.

    >>> import torch
    >>> from insum_nn.formats import BlockCOO, GroupCOO
    >>> spmm(GroupCOO.from_dense(torch.eye(2), group_size=2), torch.ones(2, 1)).tolist()
    [[1.0], [1.0]]
    >>> spmm(BlockCOO.from_dense(torch.ones(3, 3), block_shape=(2, 2)), torch.tensor([1.0, 2.0, 3.0])).tolist()
    [6.0, 6.0, 6.0]
    """
    expression = spmm_expression(matrix)
    vector = not_dense(dense) is None and dense.ndim == 1
    if vector:
        # A matrix of one column.
        dense = dense.unsqueeze(1)
    m, k = matrix.shape
    named = named_tensors("spmm", expression, matrix, [Operand("dense", "B", dense, (("k", k), ("n", None)))])
    rows: tuple[int, ...] = (m,)
    if isinstance(matrix, BlockFormat):
        named["B"], rows = in_blocks(matrix, named["B"], 0, 1), (matrix.grid_shape[0], matrix.block_shape[0])
    result = run(expression, matrix.facts, named, options, (*rows, None))
    if len(rows) > 1:
        result = result.flatten(0, 1)[:m]
    return result.squeeze(1) if vector else result


def spmm_expression(matrix: SparseFormat) -> str:
    """Return the expression that multiplies a matrix of this format.

    Raises:
        InsumShapeError: `matrix` has not two dimensions.
        InsumFormatError: `matrix` is no sparse format.

    >>> import torch
    >>> from insum_nn.formats import COO
    >>> spmm_expression(COO.from_dense(torch.eye(2)))
    'C[Row[p],n] += Val[p] * B[Col[p],n]'
    """
    return registered("spmm", type(matrix)) or SPMM[matrix_layout(matrix, "spmm", "matrix")]


def spmm_program(matrix: SparseFormat, *, options: Options = DEFAULT) -> Program:
    """Return the program that `spmm` runs for a matrix, to explain it or to call it with other tensors.

    >>> import torch
    >>> from insum_nn.formats import COO
    >>> matrix = COO.from_dense(torch.eye(2))
    >>> spmm_program(matrix)(**matrix.tensors, B=torch.ones(2, 1), out_shape=(2, None)).tolist()
    [[1.0], [1.0]]
    """
    return built_program(spmm_expression(matrix), matrix.facts, options)

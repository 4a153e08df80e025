"""Dense times dense, at the stored entries of a sparse matrix only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from torch import Tensor

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.formats import SparseFormat
from insum_nn.ops.arguments import Operand, in_blocks, matrix_layout, named_tensors
from insum_nn.ops.custom import registered
from insum_nn.ops.statements import run

__all__ = ["SDDMM", "sddmm", "sddmm_expression"]

Format = TypeVar("Format", bound=SparseFormat)

SDDMM: Mapping[str, str] = MappingProxyType(
    {
        "COO": "D[p] += Val[p] * A[Row[p],k] * Bt[Col[p],k]",
        "ELL along rows": "D[m,q] += Val[m,q] * A[m,k] * Bt[Col[m,q],k]",
        "ELL along columns": "D[n,q] += Val[n,q] * A[Row[n,q],k] * Bt[n,k]",
        "GroupCOO along rows": "D[g,q] += Val[g,q] * A[Row[g],k] * Bt[Col[g,q],k]",
        "GroupCOO along columns": "D[g,q] += Val[g,q] * A[Row[g,q],k] * Bt[Col[g],k]",
        "BlockCOO": "D[p,a,b] += Val[p,a,b] * A[Row[p],a,k] * Bt[Col[p],b,k]",
        "BlockGroupCOO": "D[g,q,a,b] += Val[g,q,a,b] * A[Row[g],a,k] * Bt[Col[g,q],b,k]",
    }
)
"""The expression of each format, as `matrix_layout` names it."""


def sddmm(pattern: Format, a: Tensor, b: Tensor, *, options: Options = DEFAULT) -> Format:
    """Multiply two dense matrices where a sparse one has entries, and scale by these (sampled dense-dense product).

        COO                     D[p] += Val[p] * A[Row[p],k] * Bt[Col[p],k]
        ELL along rows          D[m,q] += Val[m,q] * A[m,k] * Bt[Col[m,q],k]
        ELL along columns       D[n,q] += Val[n,q] * A[Row[n,q],k] * Bt[n,k]
        GroupCOO along rows     D[g,q] += Val[g,q] * A[Row[g],k] * Bt[Col[g,q],k]
        GroupCOO along columns  D[g,q] += Val[g,q] * A[Row[g,q],k] * Bt[Col[g],k]
        BlockCOO                D[p,a,b] += Val[p,a,b] * A[Row[p],a,k] * Bt[Col[p],b,k]
        BlockGroupCOO           D[g,q,a,b] += Val[g,q,a,b] * A[Row[g],a,k] * Bt[Col[g,q],b,k]

    `Bt` is the transpose of `b`, so that both are read by whole rows; `b` given as the transpose of a contiguous
    matrix, `key.T`, is read in place. For blocks both are cut into block rows, with zeros up to the grid's edge.

    Source: Zhang et al., Sgap, eq. (2c).

    Args:
        pattern: (m, n), in any of these formats; its values `Val` are differentiable. For the plain products give it
            values of one.
        a: `A`, (m, k); dtype and device of the values; differentiable.
        b: (k, n); dtype and device of the values; differentiable.
        options: compile options; see `insum_nn.Options`.

    Returns:
        The format of `pattern` with the products as values; fp16 and bf16 accumulate in float32.

    Raises:
        InsumShapeError: `pattern` is no matrix, or the extents disagree.
        InsumDtypeError: dtypes differ.
        InsumDeviceError: devices differ.
        InsumFormatError: `pattern` is no sparse format.

    >>> import torch
    >>> from insum_nn.formats import COO
    >>> a = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> sddmm(COO.from_dense(torch.tensor([[0.0, 1.0], [2.0, 0.0]])), a, a.T).to_dense().tolist()
    [[0.0, 11.0], [22.0, 0.0]]
    """
    expression = sddmm_expression(pattern)
    m, n = pattern.shape
    left = Operand("a", "A", a, (("m", m), ("k", None)))
    right = Operand("b", "Bt", b, (("k", None), ("n", n)))
    named = named_tensors("sddmm", expression, pattern, [left, right])
    named["A"], named["Bt"] = in_blocks(pattern, named["A"], 0, 0), in_blocks(pattern, named["Bt"].T, 0, 1)
    # An unused slot has no term, so it stays 0 whatever a row of `a` holds.
    return pattern.with_values(run(expression, pattern.facts, named, options, tuple(pattern.values.shape)))


def sddmm_expression(pattern: SparseFormat) -> str:
    """Return the expression that samples a product at the entries of a matrix of this format.

    Raises:
        InsumShapeError: `pattern` has not two dimensions.
        InsumFormatError: `pattern` is no sparse format.
    """
    return registered("sddmm", type(pattern)) or SDDMM[matrix_layout(pattern, "sddmm", "pattern")]

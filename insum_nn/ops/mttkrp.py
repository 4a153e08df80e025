"""Sparse tensor times a Khatri-Rao product, the kernel of a canonical polyadic decomposition."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumShapeError
from insum_nn.formats import COO, ELL, GroupCOO, SparseFormat
from insum_nn.ops.arguments import Operand, check_mode, named_tensors, require_format, subscripts
from insum_nn.ops.statements import run

__all__ = ["mttkrp", "mttkrp_expression"]


def mttkrp(tensor: SparseFormat, factors: Sequence[Tensor | None], mode: int, *, options: Options = DEFAULT) -> Tensor:
    """Contract a sparse tensor with one factor matrix per dimension but `mode`.

        GroupCOO of 3 dimensions, mode 0    M[Index0[g],r] += Val[g,q] * F1[Index1[g,q],r] * F2[Index2[g,q],r]
        COO of 3 dimensions, mode 1         M[Index1[p],r] += Val[p] * F0[Index0[p],r] * F2[Index2[p],r]

    and likewise for any number of dimensions, grouped dimension and mode: `mttkrp_expression` shows it.

    Source: Zhang et al., Sgap, eq. (2a).

    Args:
        tensor: COO, ELL or GroupCOO of two dimensions or more; its values `Val` are differentiable.
        factors: one (extent of its dimension, r) matrix per dimension, `F0`, `F1`, ...; dtype and device of the values;
            differentiable. The one at `mode` is not read and may be `None`.
        mode: the dimension that stays.
        options: compile options; see `insum_nn.Options`.

    Returns:
        `M`, (extent of `mode`, r); fp16 and bf16 accumulate in float32.

    Raises:
        InsumShapeError: the number of factors, a shape or `mode` does not fit.
        InsumDtypeError: dtypes differ.
        InsumDeviceError: devices differ.
        InsumFormatError: `tensor` is in no such format.

    >>> import torch
    >>> tensor = COO.from_dense(torch.ones(2, 3, 4))
    >>> mttkrp(tensor, [None, torch.ones(3, 1), torch.ones(4, 1)], 0).tolist()
    [[12.0], [12.0]]
    """
    expression = mttkrp_expression(tensor, mode)
    mode = check_mode(mode, tensor.ndim, "mttkrp")
    if len(factors) != tensor.ndim:
        raise InsumShapeError(
            f"mttkrp got {len(factors)} factors for a tensor with {tensor.ndim} dimensions",
            expression=expression,
            fix=f"pass {tensor.ndim} factors; the one at mode {mode} may be None.",
            expected=tensor.ndim,
            got=len(factors),
        )
    operands = [
        Operand(f"factors[{dim}]", f"F{dim}", factor, (("i", extent), ("r", None)))
        for dim, (factor, extent) in enumerate(zip(factors, tensor.shape, strict=True))
        if dim != mode
    ]
    named = named_tensors("mttkrp", expression, tensor, operands)
    return run(expression, tensor.facts, named, options, (tensor.shape[mode], None))


def mttkrp_expression(tensor: SparseFormat, mode: int) -> str:
    """Return the expression for a tensor of this format.

    Raises:
        InsumShapeError: `tensor` has one dimension, or not `mode`.
        InsumFormatError: `tensor` is in no such format.

    >>> import torch
    >>> mttkrp_expression(COO.from_dense(torch.ones(1, 1, 1)), 1)
    'M[Index1[p],r] += Val[p] * F0[Index0[p],r] * F2[Index2[p],r]'
    """
    require_format(tensor, "mttkrp", "tensor", (COO, ELL, GroupCOO))
    if tensor.ndim < 2:
        raise InsumShapeError(
            "mttkrp needs a tensor of two dimensions or more, got 1",
            fix="multiply by the vector itself.",
            got=tensor.shape,
        )
    mode = check_mode(mode, tensor.ndim, "mttkrp")
    at = subscripts(tensor)
    factors = [f"F{dim}[{subscript},r]" for dim, subscript in enumerate(at) if dim != mode]
    return f"M[{at[mode]},r] += Val[{','.join(tensor.value_axes)}] * {' * '.join(factors)}"

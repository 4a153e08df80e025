"""The sums of a matrix's columns: the gradient of a bias."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from insum_nn.compiler.kernels.launch import available as generates_kernels
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.compiler.runtime.modes import is_plain_eager
from insum_nn.compiler.runtime.program import Program

__all__ = ["column_sums"]

# Numbers from which a look at other ways of summing is worth it; torch's sum over the first axis of a long matrix takes
# six times as long as its bytes on an H200.
_MANY = 1 << 22


def column_sums(matrix: Tensor, *, options: Options = DEFAULT) -> Tensor:
    """Sum a matrix over its rows.

        S[n] += G[i,n]

    Args:
        matrix: `G`, (m, n); differentiable to any order.
        options: compile options. Torch sums where they ask for the same bits at every run.

    Returns:
        `S`, (n,).

    >>> column_sums(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [4.0, 6.0]
    """
    if matrix.device.type != "cuda" or matrix.ndim != 2 or not is_plain_eager(matrix) or matrix.numel() < _MANY:
        return matrix.sum(0)
    fixed = options.deterministic or torch.are_deterministic_algorithms_enabled()
    if fixed or not generates_kernels():
        return matrix.sum(0)
    if torch.is_grad_enabled() and matrix.requires_grad:
        return _program(options)(G=matrix)
    key = (matrix.shape, matrix.dtype, matrix.device)
    return _program(options).unbound(matrix, out_shape=(matrix.shape[1],), key=key)


@lru_cache(maxsize=64)
def _program(options: Options) -> Program:
    return Program("S[n] += G[i,n]", options=options)

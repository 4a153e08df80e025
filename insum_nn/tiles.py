"""Cut a matrix into blocks."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

__all__ = ["tiles"]


def tiles(matrix: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """Return a matrix (m, k) as blocks (rows of the grid, columns of the grid, a, b), with 0 beyond the edges.

    >>> import torch
    >>> tiles(torch.tensor([[1, 2, 3]]), (1, 2)).tolist()
    [[[[1, 2]], [[3, 0]]]]
    """
    (a, b), (m, k) = block_shape, matrix.shape
    below, right = -m % a, -k % b
    if below or right:
        matrix = functional.pad(matrix, (0, right, 0, below))
    return matrix.reshape((m + below) // a, a, (k + right) // b, b).transpose(1, 2)

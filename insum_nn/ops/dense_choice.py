"""When a product with a matrix of blocks is better formed by the dense product of torch's library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.facts import IndexFacts
from insum_nn.ops.arguments import run

__all__ = ["block_tiles", "dense_is_faster"]

# Share of stored blocks from which a dense product of half types is the faster one, by the shorter side of a block.
# Measured on an H200 at 4096 x 4096 x 4096: blocks of 32 take as long as the dense product at 0.33, and forming the
# dense matrix comes on top. Larger blocks are read fewer times.
_SHARE_OF_SMALL, _SHARE_OF_LARGE = 0.37, 0.6
_LARGE = 64
# Fewest columns of the dense operand; with fewer, reading the matrix decides, and a sparse one is shorter.
_COLUMNS = 256


def dense_is_faster(values: Tensor, grid: Sequence[int], columns: int, options: Options) -> bool:
    """Whether to multiply by the dense matrix instead of its blocks.

    In float32 the library multiplies exactly unless it is told otherwise, and is slower than the blocks at any share.

    Args:
        values: (p, a, b) stored blocks.
        grid: block rows and columns of the matrix.
        columns: columns of the dense operand.
        options: compile options; only `backend="auto"` has a choice.
    """
    halves = values.dtype in (torch.float16, torch.bfloat16)
    if values.device.type != "cuda" or not halves or options.backend != "auto" or columns < _COLUMNS:
        return False
    share = _SHARE_OF_LARGE if min(values.shape[-2:]) >= _LARGE else _SHARE_OF_SMALL
    return values.shape[:-2].numel() >= share * grid[0] * grid[1]


def block_tiles(
    values: Tensor,
    index: Mapping[str, Tensor],
    grid: Sequence[int],
    facts: Mapping[str, IndexFacts],
    options: Options = DEFAULT,
) -> Tensor:
    """The dense matrix of blocks, (rows * a, cols * b); differentiable.

        D[Row[p],a,Col[p],b] += Val[p,a,b]
        D[Row[g],a,Col[g,q],b] += Val[g,q,a,b]          with groups of blocks that share their row

    It is formed anew at each call, of constant values too: a write through `values.data` leaves no trace by which a
    kept matrix could be told to be stale, and the matrix takes more memory than the blocks do.

    Args:
        values: `Val`.
        index: `Row` and `Col`.
        grid: block rows and columns of the matrix.
        facts: of `Row` and `Col`; blocks that stand once each (`unique_with`) are stored, others are added.
        options: compile options.

    >>> index = {"Row": torch.tensor([0, 1]), "Col": torch.tensor([0, 1])}
    >>> block_tiles(torch.ones(2, 1, 2), index, (2, 2), {}).tolist()
    [[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]
    """
    (rows, cols), (a, b) = grid, values.shape[-2:]
    expression = _BLOCKS if values.ndim == 3 else _GROUPS
    tensors = {"Row": index["Row"], "Col": index["Col"], "Val": values}
    return run(expression, facts, tensors, options, (rows, a, cols, b)).reshape(rows * a, cols * b)


_BLOCKS = "D[Row[p],a,Col[p],b] += Val[p,a,b]"
_GROUPS = "D[Row[g],a,Col[g,q],b] += Val[g,q,a,b]"

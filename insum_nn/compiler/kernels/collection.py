"""The kernel that adds up the parts of rows that are divided among programs, in a fixed order."""

from __future__ import annotations

import torch

from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.kernels.source import Source
from insum_nn.dtypes import dtype_of

__all__ = ["block_of", "collection_of"]

_COLLECTION = """import triton
import triton.language as tl


@triton.jit
def kernel(workspace, out, rows, first, cells, inner, step):
    pid = tl.program_id(0)
    tiles = tl.cdiv(cells, {n})
    row = pid // tiles
    cell = pid % tiles * {n} + tl.arange(0, {n})
    inside = cell < cells
    high = tl.load(first + row + 1)
    total = tl.zeros(({n},), {type})
    for low in range(tl.load(first + row), high, {k}):
        slot = low + tl.arange(0, {k})
        mask = (slot < high)[:, None] & inside[None, :]
        total += tl.sum(tl.load(workspace + (slot[:, None] * cells + cell[None, :]), mask=mask, other=0.0), 0)
    place = cell // inner * step + tl.load(rows + row) * inner + cell % inner
    tl.store(out + place, total, mask=inside)
"""


def block_of(cells: int) -> int:
    """The cells of a row that one program adds up."""
    return min(128, 1 << max(0, cells - 1).bit_length())


def collection_of(cells: int, dtype: torch.dtype) -> Source:
    """Return a kernel that adds up the parts of divided rows, in a fixed order: a program takes some cells of a row.

    Args:
        cells: values of one row.
        dtype: theirs.
    """
    n = block_of(cells)
    text = _COLLECTION.format(n=n, k=min(64, 2048 // n), type=dtype_of(dtype).tl)
    return Source(text, (), "", {}, Schedule(warps=2), dtype, finished=True)

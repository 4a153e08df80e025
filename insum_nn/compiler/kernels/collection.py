"""The kernel that combines the parts of rows that are divided among programs: sums in a fixed order, extrema.

Of an extremum, the parts of a row are pairs: the extremum of its terms, and a flag that is 0 where there are none.
"""

from __future__ import annotations

import torch

from insum_nn.compiler.codegen.triton import chooser
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.kernels.source import Source
from insum_nn.compiler.lang.combining import Combining
from insum_nn.dtypes import dtype_of

__all__ = ["block_of", "collection_of"]

_COLLECTION = """import triton
import triton.language as tl


{helpers}@triton.jit
def kernel(workspace, out, rows, first, cells, inner, step):
    pid = tl.program_id(0)
    tiles = tl.cdiv(cells, {n})
    row = pid // tiles
    cell = pid % tiles * {n} + tl.arange(0, {n})
    inside = cell < cells
    high = tl.load(first + row + 1)
    {begin}
    for low in range(tl.load(first + row), high, {k}):
        slot = low + tl.arange(0, {k})
        mask = (slot < high)[:, None] & inside[None, :]
        {step}
    place = cell // inner * step + tl.load(rows + row) * inner + cell % inner
    tl.store(out + place, {end}, mask=inside)
"""
# What stands before the loop, in it, and what it leaves.
_SUM = (
    "total = tl.zeros(({n},), {type})",
    "total += tl.sum(tl.load(workspace + (slot[:, None] * cells + cell[None, :]), mask=mask, other=0.0), 0)",
    "total",
)
_EXTREMUM = (
    """total = tl.full(({n},), float('{identity}'), {type})
    seen = tl.zeros(({n},), {type})""",
    """part = workspace + (slot[:, None] * (2 * cells) + cell[None, :])
        value = tl.load(part, mask=mask, other=float('{identity}'))
        total = {name}_of(total, tl.reduce(value, 0, {name}_of))
        flag = tl.load(part + cells, mask=mask, other=0.0)
        seen = {name}_of(seen, tl.reduce(flag, 0, {name}_of))""",
    "tl.where(seen != 0, total, 0.0)",
)


def block_of(cells: int) -> int:
    """The cells of a row that one program adds up."""
    return min(128, 1 << max(0, cells - 1).bit_length())


def collection_of(cells: int, dtype: torch.dtype, mode: Combining) -> Source:
    """Return a kernel that combines the parts of divided rows: a program takes some cells of a row.

    Args:
        cells: values of one row.
        dtype: theirs.
        mode: how terms of a cell are combined.
    """
    n = block_of(cells)
    numbers = {"n": n, "type": dtype_of(dtype).tl, "identity": mode.identity, "name": mode.name}
    begin, step, end = (text.format(**numbers) for text in (_SUM if mode.adds else _EXTREMUM))
    helpers = "" if mode.adds else chooser(mode)
    text = _COLLECTION.format(n=n, k=min(64, 2048 // n), helpers=helpers, begin=begin, step=step, end=end)
    return Source(text, (), "", {}, Schedule(warps=2), dtype, finished=True)

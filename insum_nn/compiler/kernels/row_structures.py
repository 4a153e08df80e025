"""What is made of an index tensor, by one kernel that is written by hand: ranges of rows, and tiles of them.

Of rows the host knows the lengths, so it knows how many ranges there are. To compute and send them all would take it
several times as long as a launch, at every new index tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from insum_nn.compiler.kernels.written import written

__all__ = ["divide_rows", "tile_rows"]

# Rows, and ranges of a row, that a program looks at together.
_BLOCK = 256
# Rows up to which one kernel divides them into tiles.
_FEW_ROWS = 1024
# Entries that 32 bits number, and a block more.
_NARROW = (1 << 31) - (1 << 16)

_DIVIDED = f"""import triton
import triton.language as tl


@triton.jit
def kernel(lengths, begin, end, target, row_of, divided, first, start_of_all, chunk):
    row = tl.program_id(0)
    some = tl.arange(0, {_BLOCK})
    # Of the rows before this one: ranges, ranges that are parts of divided rows, divided rows; where its terms begin.
    ranges = tl.sum(some * 0, 0)
    slots = ranges
    rows = ranges
    terms = ranges + start_of_all
    for start in range(0, row, {_BLOCK}):
        length = tl.load(lengths + (start + some), mask=start + some < row, other=0).to(tl.int32)
        parts = tl.where(start + some < row, tl.maximum((length + (chunk - 1)) // chunk, 1), 0)
        terms += tl.sum(length, 0)
        ranges += tl.sum(parts, 0)
        slots += tl.sum(tl.where(parts > 1, parts, 0), 0)
        rows += tl.sum((parts > 1).to(tl.int32), 0)
    length = tl.load(lengths + row).to(tl.int32)
    parts = tl.maximum((length + (chunk - 1)) // chunk, 1)
    for start in range(0, parts, {_BLOCK}):
        part = start + some
        low = terms + part * chunk
        tl.store(begin + ranges + part, low, mask=part < parts)
        tl.store(end + ranges + part, tl.minimum(low + chunk, terms + length), mask=part < parts)
        tl.store(target + ranges + part, tl.where(parts > 1, -1 - slots - part, row), mask=part < parts)
        tl.store(row_of + ranges + part, part * 0 + row, mask=part < parts)
    tl.store(first, rows.to(tl.int64), mask=row == 0)
    tl.store(divided + rows, row.to(tl.int64), mask=parts > 1)
    tl.store(first + rows + 1, (slots + parts).to(tl.int64), mask=parts > 1)
"""


_TILED = f"""import triton
import triton.language as tl


@triton.jit
def first_of(flat, row, terms, steps):
    low = row * 0
    high = low + terms
    for _ in range(steps):
        middle = (low + high) // 2
        below = tl.load(flat + middle, mask=low < high, other=0) < row
        searched = low < high
        low = tl.where(searched & below, middle + 1, low)
        high = tl.where(searched & (below == 0), middle, high)
    return low


@triton.jit
def kernel(flat, begin, end, row_of, rows, terms, steps, size, count):
    row = tl.program_id(0)
    some = tl.arange(0, {_BLOCK})
    tiles = tl.sum(some * 0, 0)
    for start in range(0, row, {_BLOCK}):
        low = first_of(flat, start + some, terms, steps)
        length = tl.where(start + some < row, first_of(flat, start + some + 1, terms, steps) - low, 0)
        tiles += tl.sum((length + (size - 1)) // size, 0)
    low = tl.max(first_of(flat, row + some * 0, terms, steps), 0)
    high = tl.max(first_of(flat, row + 1 + some * 0, terms, steps), 0)
    # Tiles behind the last one have no terms.
    last = tl.where(row == rows - 1, count, tiles + (high - low + (size - 1)) // size)
    for start in range(tiles, last, {_BLOCK}):
        tile = start + some
        place = tl.minimum(low + (tile - tiles) * size, high)
        tl.store(begin + tile, place, mask=tile < last)
        tl.store(end + tile, tl.minimum(place + size, high), mask=tile < last)
        tl.store(row_of + tile, tile * 0 + row, mask=tile < last)
"""


def tile_rows(flat: Tensor, rows: int, size: int, count: int) -> tuple[Tensor, ...] | None:
    """Divide the terms of each row into tiles.

    Args:
        flat: (terms,) int32 or int64: the row of each term, ascending.
        rows: how many rows there are, at least one.
        size: most terms of a tile.
        count: how many tiles there are, and of which the last ones may have no terms.

    Returns:
        (count,) int32: where each begins and ends, and its row; `None`: the kernel cannot be launched, or not yet.
    """
    terms = flat.shape[0]
    # A program looks for all rows before its own.
    if not 0 < rows <= _FEW_ROWS or terms >= _NARROW or torch._C._len_torch_dispatch_stack() > 0:
        return None
    launchers = written((_TILED, (flat.dtype, *[torch.int32] * 3))).launchers(flat.device)
    if launchers is None:
        return None
    # Each begins at a multiple of 16 bytes, or the machine code of what reads them would depend on their number.
    made = torch.empty((3, -(-count // 4) * 4), dtype=torch.int32, device=flat.device)[:, :count].unbind(0)
    launchers[0]([flat, *made, rows, terms, terms.bit_length(), size, count], rows)
    return made


def divide_rows(lengths: Tensor, begin: int, chunk: int, ranges: int, divided: int) -> tuple[Tensor, ...] | None:
    """Divide rows into ranges of at most `chunk` terms.

    Args:
        lengths: (rows,) int32 or int64: terms of each row, of which there are less than 2^31 with a chunk more.
        begin: the first term of the first row.
        chunk: most terms in a range.
        ranges: how many ranges there are; a row without terms has one.
        divided: rows with several.

    Returns:
        `begin`, `end`, `target`, `row_of` (int32), `divided` and `first` (int64) of a `RowPartition`; `None`: the
        kernel cannot be launched, or not yet.
    """
    launchers = written((_DIVIDED, (lengths.dtype, *[torch.int32] * 4, *[torch.int64] * 2))).launchers(lengths.device)
    if launchers is None:
        return None
    made = [torch.empty(ranges, dtype=torch.int32, device=lengths.device) for _ in range(4)]
    made += [torch.empty(count, dtype=torch.int64, device=lengths.device) for count in (divided, divided + 1)]
    launchers[0]([lengths, *made, begin, chunk], lengths.shape[0])
    return tuple(made)

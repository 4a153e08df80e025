"""The rows of sites written at their cells of a dense grid: look-ups by an address instead of a search.

Every axis but the batch has a margin after it, and the first cells of the grid are one too, so that the cell of a
neighbour is the cell of the site and a constant, and no step of a kernel needs a test. What a whole kernel reads is one
strided view of the grid.

Sites need not be proven: a cell that would lie outside is moved to the nearest end, so that no address is wrong, and
whoever looks for repeated sites finds the row there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SiteGrid", "fits", "steps_of"]

# Cells of the largest grid (512 MiB), and the share of a GPU's memory that it may take.
_MOST_CELLS = 1 << 27
_MEMORY_SHARE = 32
# Clearing a grid costs by its cells, searching sorted keys by the sites: the grid's cells up to which it is the cheaper
# way, in all and for each site, on a GPU and on a CPU.
_CELLS_ON_GPU = (1 << 24, 1 << 11)
_CELLS_ON_CPU = (1 << 16, 1 << 8)


@dataclass(frozen=True, eq=False)
class SiteGrid:
    """A dense grid of rows.

    Attributes:
        spans: cells of each axis, the batch first, with the margin of each.
        reach: the widest step along an axis that leads to no other site by mistake.
        table: (lead + cells,) int32: the row of the site in a cell, or -1.
        cells: (n,) int64: the cell of each site, without the lead.
        rows: (n,) int32: 0, 1, ..
    """

    spans: tuple[int, ...]
    reach: int
    table: Tensor
    cells: Tensor
    rows: Tensor

    @classmethod
    def build(cls, indices: Tensor, spans: tuple[int, ...], reach: int) -> SiteGrid:
        """Write the rows of sites (n, 1 + d) at their cells; `spans` hold a margin of `reach` after every axis."""
        device, steps = indices.device, steps_of(spans)
        # With one grid in the batch the first column is zero, or the sites are refused.
        first = 0 if spans[0] > 1 else 1
        columns = indices.unbind(1)[first:]
        key = columns[0]
        for extent, column in zip(spans[first + 1 :], columns[1:], strict=True):
            key = torch.add(column, key, alpha=extent)
        cells = key.clamp(0, _last(spans, reach)).long()
        rows = torch.arange(indices.shape[0], dtype=torch.int32, device=device)
        lead = reach * sum(steps[1:])
        table = torch.full((lead + math.prod(spans),), -1, dtype=torch.int32, device=device)
        table[lead:].scatter_(0, cells, rows)
        return cls(spans, reach, table, cells, rows)

    def repeats(self) -> Tensor:
        """0-d bool: whether some cell is of two sites. Of two rows written to one cell, one is not found there."""
        return (self.table[self.lead :].index_select(0, self.cells) != self.rows).any()

    @property
    def lead(self) -> int:
        """Cells before the first."""
        return self.reach * sum(steps_of(self.spans)[1:])

    def neighbours(self, first: Sequence[int], size: Sequence[int], step: Sequence[int]) -> Tensor:
        """(o, n) int32: the row at every cell of a box around each site, or -1; cells of the box row by row.

        Args:
            first: d, where the box begins, counted from the site.
            size: d cells.
            step: d, from one cell of the box to the next. Nothing of the box is more than `reach` away.
        """
        steps = steps_of(self.spans)[1:]
        begin = self.lead + sum(at * by for at, by in zip(first, steps, strict=True))
        strides = [by * each for by, each in zip(step, steps, strict=True)]
        last = _last(self.spans, self.reach) + 1
        # One view shows, behind every cell of the box, the grid moved by it.
        seen = self.table.as_strided((*size, last), (*strides, 1), self.table.storage_offset() + begin)
        return seen.gather(len(size), self.cells.expand(*size, -1)).view(-1, self.cells.shape[0])


def steps_of(spans: Sequence[int]) -> tuple[int, ...]:
    """By how much the number of a cell grows with each coordinate.

    >>> steps_of((2, 14, 14))
    (196, 14, 1)
    """
    return tuple(math.prod(spans[axis + 1 :]) for axis in range(len(spans)))


def _last(spans: Sequence[int], reach: int) -> int:
    """The last cell that can have a site."""
    return math.prod(spans) - 1 - reach * sum(steps_of(spans)[1:])


def fits(spans: Sequence[int], reach: int, sites: int, device: torch.device) -> bool:
    """Whether a grid is small enough to be the cheaper way; decided without a look at the device.

    >>> fits((1, 404, 404, 64), 4, 236_000, torch.device("cpu")), fits((1, 1 << 20, 1 << 20), 4, 9, torch.device("cpu"))
    (True, False)
    """
    cells = math.prod(spans) + reach * sum(steps_of(spans)[1:])
    if sites == 0 or cells > _MOST_CELLS:
        return False
    if device.type == "cuda":
        if 4 * _MEMORY_SHARE * cells > torch.cuda.get_device_properties(device).total_memory:
            return False
        least, each = _CELLS_ON_GPU
    elif device.type == "cpu":
        least, each = _CELLS_ON_CPU
    else:
        return False
    return cells <= max(least, each * sites)

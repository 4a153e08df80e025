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
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from insum_nn.structure.transfers import constant

__all__ = ["GridNumbers", "SiteGrid", "fits", "grid_numbers", "steps_of"]

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
    def build(cls, indices: Tensor, spans: tuple[int, ...], reach: int, cells: Tensor | None = None) -> SiteGrid:
        """Write the rows of sites (n, 1 + d) at their cells.

        Args:
            indices: the sites.
            spans: cells of each axis, with a margin of `reach` after every one but the first.
            reach: see `SiteGrid`.
            cells: (n,) int64: the cell of each site, where they are known.
        """
        device, numbers = indices.device, grid_numbers(spans, reach)
        if cells is None:
            cells = (indices * constant(numbers.steps, device)).sum(1).clamp_(0, numbers.last)
        rows = torch.arange(indices.shape[0], dtype=torch.int32, device=device)
        table = torch.full((numbers.lead + numbers.cells,), -1, dtype=torch.int32, device=device)
        table[numbers.lead :].scatter_(0, cells, rows)
        return cls(spans, reach, table, cells, rows)

    def repeats(self) -> Tensor:
        """0-d bool: whether some cell is of two sites. Of two rows written to one cell, one is not found there."""
        found = self.table[grid_numbers(self.spans, self.reach).lead :].index_select(0, self.cells)
        return (found != self.rows).any()

    def neighbours(self, first: Sequence[int], size: Sequence[int], step: Sequence[int]) -> Tensor:
        """Return (o, n) int32: the row at every cell of a box around each site, or -1; cells of the box row by row.

        Args:
            first: d, where the box begins, counted from the site.
            size: d cells.
            step: d, from one cell of the box to the next. Nothing of the box is more than `reach` away.
        """
        numbers = grid_numbers(self.spans, self.reach)
        steps = numbers.steps[1:]
        begin = numbers.lead + sum(at * by for at, by in zip(first, steps, strict=True))
        strides = [by * each for by, each in zip(step, steps, strict=True)]
        # One view shows, behind every cell of the box, the grid moved by it.
        seen = self.table.as_strided((*size, numbers.last + 1), (*strides, 1), self.table.storage_offset() + begin)
        return seen.gather(len(size), self.cells.expand(*size, -1)).view(-1, self.cells.shape[0])


@lru_cache(maxsize=256)
def steps_of(spans: tuple[int, ...]) -> tuple[int, ...]:
    """By how much the number of a cell grows with each coordinate.

    >>> steps_of((2, 14, 14))
    (196, 14, 1)
    """
    return tuple(math.prod(spans[axis + 1 :]) for axis in range(len(spans)))


class GridNumbers(NamedTuple):
    """What is known of a grid from its extents.

    Attributes:
        steps: by how much a cell's number grows with each coordinate.
        cells: without the lead.
        lead: cells before the first.
        last: the last cell that can have a site.
    """

    steps: tuple[int, ...]
    cells: int
    lead: int
    last: int


@lru_cache(maxsize=256)
def grid_numbers(spans: tuple[int, ...], reach: int) -> GridNumbers:
    """Return the numbers of a grid with margins of `reach`."""
    steps, cells = steps_of(spans), math.prod(spans)
    margin = reach * sum(steps[1:])
    return GridNumbers(steps, cells, margin, cells - 1 - margin)


@lru_cache(maxsize=64)
def _memory(device: torch.device) -> int:
    """Bytes of a GPU, of which torch asks in several functions."""
    return torch.cuda.get_device_properties(device).total_memory


def fits(spans: tuple[int, ...], reach: int, sites: int, device: torch.device) -> bool:
    """Return whether a grid is small enough to be the cheaper way; decided without a look at the device.

    >>> fits((1, 404, 404, 64), 4, 236_000, torch.device("cpu")), fits((1, 1 << 20, 1 << 20), 4, 9, torch.device("cpu"))
    (True, False)
    """
    numbers = grid_numbers(spans, reach)
    cells = numbers.cells + numbers.lead
    if sites == 0 or cells > _MOST_CELLS:
        return False
    if device.type == "cuda":
        if 4 * _MEMORY_SHARE * cells > _memory(device):
            return False
        least, each = _CELLS_ON_GPU
    elif device.type == "cpu":
        least, each = _CELLS_ON_CPU
    else:
        return False
    return cells <= max(least, each * sites)

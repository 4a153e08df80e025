"""Numbers of grid cells, also in graphs that torch traces, where neither values nor numbers of voxels are known."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["KEY_LIMIT", "CellNumbers", "assert_distinct", "find_numbers", "starts_of_runs"]

# Numbers of cells stay below this, so that none of them wraps, not even with an offset added.
KEY_LIMIT = 1 << 62
# More than there can be rows, and greater than any number of a cell.
_MOST_ROWS = 1 << 31
_NO_KEY = (1 << 63) - 1


class CellNumbers:
    """Numbers of cells; where a grid has too many, leading axes are replaced by their rank among the first voxels.

    Args:
        extents: of every axis.
    """

    def __init__(self, extents: Sequence[int]) -> None:
        self.extents = extents
        self.ranks: list[Tensor] = []

    def of(self, columns: Sequence[Tensor], inside: Tensor | None = None) -> Tensor:
        """Return the number of each cell; of one that is not inside, -1; of one that has no rank, a negative one."""
        key, bound, first, used = columns[0], self.extents[0], not self.ranks, iter(self.ranks)
        for extent, column in zip(self.extents[1:], columns[1:], strict=True):
            if bound * extent > KEY_LIMIT:
                if first:
                    self.ranks.append(key.reshape(-1).sort().values)
                at, found = find_numbers(next(used), key)
                key, bound = torch.where(found, at, -1), _MOST_ROWS
            key, bound = key * extent + column, bound * extent
        return key if inside is None else torch.where(inside, key, -1)


def find_numbers(keys: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first place of each number among sorted ones, and whether it is there; places may be one too far."""
    at = torch.searchsorted(keys, queries.contiguous())
    # There may be none at all.
    return at, torch.cat([keys, keys.new_full((1,), _NO_KEY)])[at] == queries


def starts_of_runs(keys: Tensor) -> Tensor:
    """Return where another number begins among sorted ones."""
    # Not by slices, of whose lengths a tracer would ask whether they are 0 or 1.
    place = torch.arange(keys.shape[0], device=keys.device)
    return (keys != keys.index_select(0, (place - 1).clamp(min=0))) | (place == 0)


def assert_distinct(indices: Tensor, extents: Sequence[int]) -> None:
    """Have the graph raise where a voxel lies outside of the grid, or occurs twice."""
    columns = indices.long().unbind(1)
    inside = indices.new_ones(indices.shape[0], dtype=torch.bool)
    for column, extent in zip(columns, extents, strict=True):
        inside = inside & (column >= 0) & (column < extent)
    torch.ops.aten._assert_async.msg(inside.all(), "'indices' holds voxels outside the grid")
    keys, order = CellNumbers(extents).of(columns).sort(stable=True)
    # Of two different rows: always so, but not where a packager of graphs for a GPU tries this kernel on zeros in place
    # of what was sorted, and must not find a fault.
    other = order != order.index_select(0, (torch.arange(order.shape[0], device=order.device) - 1).clamp(min=0))
    distinct = starts_of_runs(keys) | ~other
    torch.ops.aten._assert_async.msg(distinct.all(), "'indices' holds the same voxel more than once")

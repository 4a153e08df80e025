"""Define the library call of recorded graphs that torch does not have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

__all__ = ["EntryIndex", "bag_product"]

# What selects along an axis of a matrix at each entry of a grid: an index tensor, `None` for the position itself; the
# axes of the grid that it has; the axis' extent; whether it may be -1, which leaves the entry out. Or a sum: its terms,
# each a factor and what selects; an offset; the axis' extent, beyond which there is no entry.
EntryTerm = tuple[int, Tensor | None, tuple[int, ...]]
EntryIndex = tuple[Tensor | None, tuple[int, ...], int, bool] | tuple[tuple[EntryTerm, ...], int, int, bool]


def bag_product(
    value: Tensor | None,
    rows: Sequence[EntryIndex],
    columns: Sequence[EntryIndex],
    shape: Sequence[int],
    dense: Tensor,
    ascending: bool,
) -> Tensor:
    """`out[row[e],:] += value[e] * dense[col[e],:]` over a grid of entries `e`: each row is a bag of `embedding_bag`.

    Args:
        value: entries' values over the whole grid, or `None` for ones.
        rows: what selects an entry's row; the last axis counts fastest. Sorted in the graph, where they do not ascend.
        columns: what selects its column.
        shape: the grid of entries.
        dense: `(k, n)`.
        ascending: rows ascend over the grid, and none is missing.

    Returns:
        `(m, n)`.
    """
    row, col = (_over_grid(parts, tuple(shape), dense.device) for parts in (rows, columns))
    value = None if value is None else value.reshape(-1)
    masked = any(masked for *_, masked in (*rows, *columns))
    if masked:
        # Of several indices that select together, a missing one may make any negative number.
        row, col = torch.where(col < 0, -1, row.clamp(min=-1)), col.clamp(min=0)
    if masked or not ascending:
        row, order = row.sort(stable=True)
        col = col.index_select(0, order)
        value = None if value is None else value.index_select(0, order)
    # Entries that are left out are a bag of their own, before those of all rows.
    extent = math.prod(extent for _, _, extent, _ in rows)
    bags = torch.arange(-1 if masked else 0, extent, dtype=row.dtype, device=row.device)
    begins = torch.searchsorted(row, bags).to(col.dtype)
    out = torch.ops.aten._embedding_bag(dense, col, begins, False, 0, False, value)[0]
    return out[1:] if masked else out


def _over_grid(parts: Sequence[EntryIndex], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the row, or the column, of every entry of the grid, flattened; -1 where an index is."""
    total: Tensor | None = None
    for index, axes, extent, masked in parts:
        if isinstance(index, tuple):
            found = _affine(index, cast("int", axes), extent, shape, device)
        else:
            found = _term(index, cast("tuple[int, ...]", axes), shape, device)
        if total is None:
            total = found.long() if len(parts) > 1 else found
        else:
            number = total * extent + found
            # Where an earlier index is missing the number is below 0 already.
            total = torch.where(found < 0, -1, number) if masked else number
    assert total is not None
    return total.expand(shape).reshape(-1)


def _term(index: Tensor | None, axes: tuple[int, ...], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return an index tensor, or the position itself, at every entry, in a shape that broadcasts to the grid."""
    # An alias: a view keeps what it is a view of, and what is kept for as long as an index lives must not keep it.
    index = torch.arange(shape[axes[0]], device=device) if index is None else index.detach()
    order = sorted(range(len(axes)), key=lambda i: axes[i])
    view = [1] * len(shape)
    for axis in axes:
        view[axis] = shape[axis]
    return index.permute(order).reshape(view)


def _affine(
    terms: tuple[EntryTerm, ...], offset: int, extent: int, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """Return a sum of terms at every entry; -1 where one of them is missing, or the sum lies outside of the axis."""
    found = [(factor, _term(index, axes, shape, device).long()) for factor, index, axes in terms]
    total = torch.full((), offset, device=device)
    for factor, each in found:
        total = total + factor * each
    inside = (total >= 0) & (total < extent)
    for _, each in found:
        inside = inside & (each >= 0)
    return torch.where(inside, total, -1)

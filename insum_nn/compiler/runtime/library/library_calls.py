"""Define the library calls of eager programs that torch does not have."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from insum_nn.tensor_cache import TensorCache

__all__ = [
    "EntryIndex",
    "bag_product",
    "clear_structures",
    "csr_product",
    "keep_where",
    "sampled_product",
    "zero_where_missing",
]


@dataclass(frozen=True, slots=True)
class _Structure:
    """A sparse matrix's row pointers and columns, and the positions of its entries among the passed ones.

    `row`: the rows of a matrix whose entries are passed in order and have the columns 0, 1, 2 and so on.
    """

    crow: Tensor
    col: Tensor
    select: Tensor | None
    row: Tensor | None


# What selects along an axis of a matrix at each entry of a grid: an index tensor, `None` for the position itself; the
# axes of the grid that it has; the axis' extent; whether it may be -1, which leaves the entry out. Or a sum: its terms,
# each a factor and what selects; an offset; the axis' extent, beyond which there is no entry.
EntryTerm = tuple[int, Tensor | None, tuple[int, ...]]
EntryIndex = tuple[Tensor | None, tuple[int, ...], int, bool] | tuple[tuple[EntryTerm, ...], int, int, bool]

# Sorting the entries by row costs more than the product; a training loop multiplies by the same structure again and
# again. Kept for as long as all index tensors live and are not modified.
_structures: TensorCache[_Structure] = TensorCache(limit=512)
# Rows of at least so many numbers are added up one after the other: on one core in half the time of a product by ones.
# (2000 rows of 128, 256 and 512 numbers 0.34, 0.70 and 1.4 ms : 0.15, 0.34 and 0.64 ms.) More cores divide the product.
_WIDE, _FEW_THREADS = 128, 2


def clear_structures() -> None:
    """Forget every remembered sparse structure."""
    _structures.clear()


def csr_product(
    value: Tensor | None,
    rows: Sequence[EntryIndex],
    columns: Sequence[EntryIndex],
    shape: Sequence[int],
    dense: Tensor,
) -> Tensor:
    """`out[row[e],:] += value[e] * dense[col[e],:]` over a grid of entries `e`, by torch's CSR product.

    Args:
        value: entries' values over the whole grid, or `None` for ones.
        rows: what selects an entry's row; the last axis counts fastest.
        columns: what selects its column.
        shape: the grid of entries.
        dense: `(k, n)`.

    Returns:
        `(m, n)`, contiguous.
    """
    structure = _remembered(rows, columns, tuple(shape))
    num_rows, count = structure.crow.shape[0] - 1, structure.col.shape[0]
    flat = None if value is None else value.reshape(-1)
    if count == 0 or dense.numel() == 0:
        return dense.new_zeros(num_rows, dense.shape[1])
    wide = dense.shape[1] >= _WIDE and torch.get_num_threads() <= _FEW_THREADS
    if flat is None and structure.row is not None and wide:
        return dense.new_zeros(num_rows, dense.shape[1]).index_add_(0, structure.row, dense)
    if flat is not None and structure.select is not None:
        flat = flat.index_select(0, structure.select)
    values = dense.new_ones(count) if flat is None else flat
    _silence_beta_warning()
    matrix = torch.sparse_csr_tensor(
        structure.crow, structure.col, values, (num_rows, dense.shape[0]), check_invariants=False
    )
    return torch.mm(matrix, dense.contiguous())


def bag_product(
    value: Tensor | None,
    rows: Sequence[EntryIndex],
    columns: Sequence[EntryIndex],
    shape: Sequence[int],
    dense: Tensor,
    ascending: bool,
) -> Tensor:
    """`csr_product` by torch's operators alone, in graphs that torch records: each row is a bag of `embedding_bag`.

    Args:
        value: this and all to `dense` as in `csr_product`.
        rows: sorted in the graph, where they do not ascend.
        columns: as there.
        shape: as there.
        dense: as there.
        ascending: rows ascend over the grid, and none is missing.
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


def sampled_product(
    left: Tensor,
    right: Tensor,
    rows: Sequence[EntryIndex],
    columns: Sequence[EntryIndex],
    shape: Sequence[int],
) -> Tensor:
    """`out[e] = sum_k left[row[e],k] * right[col[e],k]` over a grid of entries `e`, by torch's sampled product.

    Args:
        left: `(m, k)`.
        right: `(n, k)`.
        rows: what selects an entry's row of `left`, as in `csr_product`.
        columns: what selects its row of `right`.
        shape: the grid of entries.

    Returns:
        `shape`, contiguous; 0 for entries that are left out.
    """
    structure = _remembered(rows, columns, tuple(shape))
    count = structure.col.numel()
    cells = math.prod(shape)
    output = left.new_zeros(cells) if count < cells else left.new_empty(cells)
    if count and left.numel() and right.numel():
        found = _sampled(structure, left, right)
        if structure.select is None:
            return found.reshape(tuple(shape))
        output.index_copy_(0, structure.select, found)
    else:
        output.zero_()
    return output.reshape(tuple(shape))


def _sampled(structure: _Structure, left: Tensor, right: Tensor) -> Tensor:
    count, cells = structure.col.numel(), left.shape[0] * right.shape[0]
    if count > cells:
        # torch's sampled product takes no more entries than cells; then the whole product is the smaller work anyway.
        rows = torch.repeat_interleave(structure.crow.diff().long())
        return torch.mm(left, right.t()).reshape(-1)[rows * right.shape[0] + structure.col]
    _silence_beta_warning()
    zeros = left.new_zeros(structure.col.numel())
    pattern = torch.sparse_csr_tensor(
        structure.crow, structure.col, zeros, (left.shape[0], right.shape[0]), check_invariants=False
    )
    return torch.sparse.sampled_addmm(pattern, left.contiguous(), right.contiguous().t(), beta=0.0).values()


def keep_where(present: Tensor, gathered: Tensor) -> Tensor:
    """Zero a gathered tensor, to which nothing else refers, in place where an entry is missing.

    Few entries are, so that writing the rows that they gathered is much cheaper than choosing for all.

    Args:
        present: bool, of as many axes as `gathered`; of extent 1 where it does not depend on the axis.
        gathered: fresh from a gather.
    """
    if present.shape == gathered.shape:
        # To look up the missing ones takes longer than to write all.
        return gathered.masked_fill_(present.logical_not(), 0)
    axes: list[int] = []
    for axis, extent in enumerate(present.shape):
        if extent != 1:
            axes.append(axis)
    missing = present.logical_not().squeeze().nonzero(as_tuple=True) if axes else None
    if missing is None:
        return gathered if bool(present) else gathered.zero_()
    if missing[0].numel():
        gathered.movedim(axes, list(range(len(axes))))[missing] = 0
    return gathered


def zero_where_missing(present: Tensor, value: Tensor) -> Tensor:
    """Zero a tensor where an entry is missing; a wide one is returned itself if it is, as formats fill unused slots.

    Args:
        present: as in `keep_where`.
        value: of any kind; it is not written to.
    """
    if present.shape == value.shape:
        # As in `keep_where`.
        return torch.where(present, value, 0)
    axes = [axis for axis, extent in enumerate(present.shape) if extent != 1]
    if axes:
        missing = present.logical_not().squeeze().nonzero(as_tuple=True)
        if not bool(value.movedim(axes, list(range(len(axes))))[missing].any()):
            return value
    return torch.where(present, value, 0)


@functools.cache
def _silence_beta_warning() -> None:
    """torch warns once per process that CSR support is in beta; take that warning here, out of the user's sight."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        index = torch.zeros(1, dtype=torch.int64)
        torch.sparse_csr_tensor(torch.tensor([0, 0]), index[:0], torch.ones(0), (1, 1))


def _remembered(rows: Sequence[EntryIndex], columns: Sequence[EntryIndex], shape: tuple[int, ...]) -> _Structure:
    # Loops: every product comes here, and a comprehension is a call.
    tensors: list[Tensor] = []
    key: list[Hashable] = [shape, len(rows)]
    for parts in (rows, columns):
        for index, axes, extent, masked in parts:
            if isinstance(index, tuple):
                tensors += [each for _, each, _ in index if each is not None]
                key.append((axes, extent, *[(factor, each is None, own) for factor, each, own in index]))
                continue
            if index is not None:
                tensors.append(index)
            key.append((index is None, axes, extent, masked))
    whole = tuple(key)
    found = _structures.find(tensors, whole)
    return _structures.keep(tensors, whole, _build(rows, columns, shape)) if found is None else found


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


def _build(rows: Sequence[EntryIndex], columns: Sequence[EntryIndex], shape: tuple[int, ...]) -> _Structure:
    every = (*rows, *columns)
    given = [index for index, *_ in every if isinstance(index, Tensor)]
    given += [index for terms, *_ in every if isinstance(terms, tuple) for _, index, _ in terms if index is not None]
    device = given[0].device
    num_rows = math.prod(extent for _, _, extent, _ in rows)
    row, col = (_over_grid(parts, shape, device) for parts in (rows, columns))
    select: Tensor | None = None
    if any(masked for *_, masked in every):
        keep = (row >= 0) & (col >= 0)
        if not bool(keep.all()):
            select = keep.nonzero().squeeze(1)
            row, col = row[select], col[select]
    if not bool((row[1:] >= row[:-1]).all()):
        row, order = row.sort(stable=True)
        col = col[order]
        select = order if select is None else select[order]
    # Libraries multiply by 32-bit indices; of others they make such at every call.
    largest = max(num_rows, row.numel(), int(col.max()) if col.numel() else 0)
    small = largest < 2**31
    crow = torch._convert_indices_from_coo_to_csr(row.contiguous(), num_rows, out_int32=small)
    in_order = (
        select is None and len(columns) == 1 and columns[0][0] is None and columns[0][1] == tuple(range(len(shape)))
    )
    # `row` may be an alias of an index tensor, with which it would then be kept. `index_add_` is fastest by int64.
    kept = row.to(torch.int64, copy=True) if in_order else None
    return _Structure(crow, col.to(torch.int32 if small else torch.int64).contiguous(), select, kept)

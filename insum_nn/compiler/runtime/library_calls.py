"""Library calls that eager programs are made of, beyond what torch offers by itself."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from insum_nn.kept import forgets

__all__ = ["clear_structures", "csr_product", "keep_where", "sampled_product", "zero_where_missing"]


@dataclass(frozen=True, slots=True)
class _Structure:
    """A sparse matrix's row pointers and columns, and where its entries stand among the given ones."""

    crow: Tensor
    col: Tensor
    select: Tensor | None


# Sorting the entries by row costs more than the product; a training loop multiplies by the same
# structure again and again. Kept for as long as both index tensors live and are not modified.
_structures: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def clear_structures() -> None:
    """Forget every remembered sparse structure."""
    _structures.clear()


@forgets
def _forget(index: Tensor) -> None:
    _structures.pop(index, None)
    for inner in _structures.values():
        inner.pop(index, None)


def csr_product(
    value: Tensor | None,
    row: Tensor | None,
    row_axes: tuple[int, ...],
    col: Tensor | None,
    col_axes: tuple[int, ...],
    shape: Sequence[int],
    dense: Tensor,
    num_rows: int,
    masked: bool,
) -> Tensor:
    """`out[row[e],:] += value[e] * dense[col[e],:]` over a grid of entries `e`, by torch's CSR product.

    Args:
        value: entries' values over the whole grid, or `None` for ones.
        row: an entry's row over the grid axes `row_axes`; `None`: the position along that one axis.
        row_axes: grid axes of `row`.
        col: an entry's column over `col_axes`; `None`: the position along that one axis.
        col_axes: grid axes of `col`.
        shape: the grid of entries.
        dense: `(k, n)`.
        num_rows: rows of the result.
        masked: some index may be -1; such entries take no part.

    Returns:
        `(num_rows, n)`, contiguous.
    """
    structure = _remembered(row, row_axes, col, col_axes, tuple(shape), num_rows, masked)
    count = structure.col.numel()
    flat = None if value is None else value.reshape(-1)
    if count == 0 or dense.numel() == 0:
        return dense.new_zeros(num_rows, dense.shape[1])
    values = dense.new_ones(count) if flat is None else flat if structure.select is None else flat[structure.select]
    _silence_beta_warning()
    matrix = torch.sparse_csr_tensor(
        structure.crow, structure.col, values, (num_rows, dense.shape[0]), check_invariants=False
    )
    return torch.mm(matrix, dense.contiguous())


def sampled_product(
    left: Tensor,
    right: Tensor,
    row: Tensor | None,
    row_axes: tuple[int, ...],
    col: Tensor | None,
    col_axes: tuple[int, ...],
    shape: Sequence[int],
    masked: bool,
) -> Tensor:
    """`out[e] = sum_k left[row[e],k] * right[col[e],k]` over a grid of entries `e`, by torch's sampled product.

    Args:
        left: `(m, k)`.
        right: `(n, k)`.
        row: an entry's row of `left`, as in `csr_product`.
        row_axes: grid axes of `row`.
        col: an entry's row of `right`.
        col_axes: grid axes of `col`.
        shape: the grid of entries.
        masked: some index may be -1; such entries are 0.

    Returns:
        `shape`, contiguous.
    """
    structure = _remembered(row, row_axes, col, col_axes, tuple(shape), left.shape[0], masked)
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
    """Zero a gathered tensor, which nobody else holds, in place where an entry is missing.

    Few entries are, so that writing them is much cheaper than choosing for all.

    Args:
        present: bool, of as many axes as `gathered`; of extent 1 where it does not depend on the axis.
        gathered: fresh from a gather.
    """
    axes = [axis for axis, extent in enumerate(present.shape) if extent != 1]
    missing = present.logical_not().squeeze().nonzero(as_tuple=True) if axes else None
    if missing is None:
        return gathered if bool(present) else gathered.zero_()
    if missing[0].numel():
        gathered.movedim(axes, list(range(len(axes))))[missing] = 0
    return gathered


def zero_where_missing(present: Tensor, value: Tensor) -> Tensor:
    """A tensor that others hold too, zero where an entry is missing: itself if it is, as formats fill unused slots.

    Args:
        present: as in `keep_where`.
        value: of any kind; it is not written to.
    """
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


def _version(tensor: Tensor | None) -> int | None:
    return None if tensor is None or tensor.is_inference() else tensor._version


def _remembered(
    row: Tensor | None,
    row_axes: tuple[int, ...],
    col: Tensor | None,
    col_axes: tuple[int, ...],
    shape: tuple[int, ...],
    num_rows: int,
    masked: bool,
) -> _Structure:
    first = row if row is not None else col
    second = col if row is not None and col is not None else first
    if first is None or second is None or first.is_inference() or second.is_inference():
        return _build(row, row_axes, col, col_axes, shape, num_rows, masked)
    inner = _structures.get(first)
    if inner is None:
        inner = _structures[first] = WeakTensorKeyDictionary()
    known: dict[tuple[object, ...], _Structure] | None = inner.get(second)
    if known is None:
        known = inner[second] = {}
    key = (row_axes, col_axes, shape, num_rows, masked, row is None, col is None, _version(row), _version(col))
    structure = known.get(key)
    if structure is None:
        if len(known) >= 4:
            known.clear()
        structure = known[key] = _build(row, row_axes, col, col_axes, shape, num_rows, masked)
    return structure


def _over_grid(index: Tensor | None, axes: tuple[int, ...], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The index of every entry of the grid, flattened."""
    # Of an alias: a view keeps what it is a view of, and what is kept for as long as an index lives must not keep it.
    index = torch.arange(shape[axes[0]], device=device) if index is None else index.detach()
    order = sorted(range(len(axes)), key=lambda i: axes[i])
    view = [1] * len(shape)
    for axis in axes:
        view[axis] = shape[axis]
    return index.permute(order).reshape(view).expand(shape).reshape(-1)


def _build(
    row: Tensor | None,
    row_axes: tuple[int, ...],
    col: Tensor | None,
    col_axes: tuple[int, ...],
    shape: tuple[int, ...],
    num_rows: int,
    masked: bool,
) -> _Structure:
    device = next(t.device for t in (row, col) if t is not None)
    rows = _over_grid(row, row_axes, shape, device)
    cols = _over_grid(col, col_axes, shape, device)
    select: Tensor | None = None
    if masked:
        keep = (rows >= 0) & (cols >= 0)
        if not bool(keep.all()):
            select = keep.nonzero().squeeze(1)
            rows, cols = rows[select], cols[select]
    if not bool((rows[1:] >= rows[:-1]).all()):
        rows, order = rows.sort(stable=True)
        cols = cols[order]
        select = order if select is None else select[order]
    # Libraries multiply by 32-bit indices; of others they make such at every call.
    largest = max(num_rows, rows.numel(), int(cols.max()) if cols.numel() else 0)
    small = largest < 2**31
    crow = torch._convert_indices_from_coo_to_csr(rows.contiguous(), num_rows, out_int32=small)
    return _Structure(crow, cols.to(torch.int32 if small else torch.int64).contiguous(), select)

"""The vectorised pieces that conversions share.

Everything runs on the device of its input and takes memory by entries, never by extents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from insum_nn.dtypes import wide_dtype
from insum_nn.errors import InsumFormatError, InsumShapeError
from insum_nn.facts import IndexFacts
from insum_nn.formats import arguments, checks
from insum_nn.formats.group_size import GroupSize, resolve_group_size
from insum_nn.tiles import tiles

__all__ = [
    "Groups",
    "block_grid",
    "check_entries",
    "check_torch",
    "dense_blocks",
    "dense_entries",
    "expand_blocks",
    "fill_slots",
    "group_entries",
    "lexicographic_order",
    "merge_duplicates",
    "pack_blocks",
    "ranks_in_runs",
    "run_starts",
    "scatter_rows",
    "smtx_entries",
    "sort_by_key",
    "sum_rows",
    "torch_entries",
    "uncompressed",
    "used_slots",
]

_FUSED_KEY_LIMIT = 1 << 62


class Groups(NamedTuple):
    """Entries in groups of equal length.

    Attributes:
        keys: (g,) what a group's entries share.
        indices: (g, q) each; -1 in unused slots.
        values: (g, q, ...); 0 in unused slots.
        facts: of `keys`, then of each of `indices`.
    """

    keys: Tensor
    indices: tuple[Tensor, ...]
    values: Tensor
    facts: tuple[IndexFacts, ...]


def check_entries(
    owner: str, shape: tuple[int, ...], indices: Sequence[Tensor], values: Tensor, fields: Sequence[str]
) -> None:
    """Prove caller-given coordinates: ranks, dtypes, devices, ranges. Reads the device once.

    Args:
        owner: The builder named in the message.
        shape: Extents that `indices` select along.
        indices: One (p,) tensor per dimension.
        values: (p, ...).
        fields: The names of `indices` in messages.
    """
    title = f"{owner} cannot build shape {shape} from these entries"
    faults: list[checks.Fault] = []
    if len(indices) != len(shape):
        fix = "pass one index tensor per dimension of shape."
        faults.append(checks.Fault("indices", "shape", f"{len(shape)} index tensors", str(len(indices)), fix))
    for field, index in zip(fields, indices, strict=False):
        arguments.require_dense(index, owner, field)
        if index.ndim != 1 or index.shape[0] != values.shape[0]:
            fix = "pass one index per value."
            got = f"shape {tuple(index.shape)}"
            faults.append(checks.Fault(field, "shape", f"shape ({values.shape[0]},) as values", got, fix))
        faults += checks.kind_faults(field, index, values.device)
    checks.raise_faults(title, faults, by_kind=True)
    if values.shape[0] == 0:
        return
    limits = torch.stack([torch.stack(torch.aminmax(index)).long() for index in indices]).tolist()
    for field, index, extent, (low, high) in zip(fields, indices, shape, limits, strict=True):
        if low < 0 or high >= extent:
            fault = checks.range_fault(field, "p", index, extent, padded=False)
            faults += [fault] if fault is not None else []
    checks.raise_faults(title, faults, by_kind=True)


def lexicographic_order(indices: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return the stable permutation that sorts entries by the first index tensor, then the second, and so on.

    One sort of a fused 64-bit key where the product of extents allows it, else one stable sort per dimension.
    """
    if math.prod(max(1, extent) for extent in shape) <= _FUSED_KEY_LIMIT:
        key = indices[0].long()
        for index, extent in zip(indices[1:], shape[1:], strict=True):
            key = key * extent + index
        return key.argsort(stable=True)
    order = indices[-1].argsort(stable=True)
    for index in reversed(indices[:-1]):
        order = order[index[order].argsort(stable=True)]
    return order


def run_starts(indices: Sequence[Tensor]) -> Tensor:
    """Return (p,) bool: the entries of sorted `indices` that differ from the one before."""
    new = torch.ones_like(indices[0], dtype=torch.bool)
    new[1:] = False
    for index in indices:
        new[1:] |= index[1:] != index[:-1]
    return new


def merge_duplicates(indices: Sequence[Tensor], rows: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Sum the rows of `rows` (p, ...) whose (already sorted) indices are equal; differentiable in `rows`."""
    new = run_starts(indices)
    kept = new.nonzero().squeeze(1)
    if kept.shape[0] == rows.shape[0]:
        return tuple(indices), rows
    return tuple(index[kept] for index in indices), sum_rows(rows, new.cumsum(0) - 1, kept.shape[0])


def sum_rows(rows: Tensor, slots: Tensor, num_slots: int) -> Tensor:
    """Add each of `rows` (p, ...) into its slot of a zero tensor (num_slots, ...).

    Half types accumulate in float32; bool combines by "or". Differentiable in `rows`.
    """
    if rows.dtype == torch.bool:
        return sum_rows(rows.to(torch.int32), slots, num_slots) > 0
    wide = rows.to(wide_dtype(rows.dtype))
    total = wide.new_zeros((num_slots, *rows.shape[1:])).index_add(0, slots, wide)
    return total.to(rows.dtype)


def scatter_rows(rows: Tensor, slots: Tensor, num_slots: int, fill: int = 0) -> Tensor:
    """Put each of `rows` (p, ...) into its own slot of a tensor full of `fill`; differentiable in `rows`."""
    return rows.new_full((num_slots, *rows.shape[1:]), fill).index_copy(0, slots, rows)


def ranks_in_runs(counts: Tensor, total: int) -> Tensor:
    """Return (p,) the place of each entry inside its run, for runs of `counts` consecutive entries."""
    starts = counts.cumsum(0) - counts
    return torch.arange(total, device=counts.device) - starts.repeat_interleave(counts, output_size=total)


def sort_by_key(
    keys: Tensor, others: Sequence[Tensor], values: Tensor, *, ordered: bool
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return entries (p,) by ascending key; those of one key keep their order."""
    if ordered:
        return keys, [*others], values
    order = keys.argsort(stable=True)
    return keys[order], [index[order] for index in others], values[order]


def group_entries(
    keys: Tensor,
    others: Sequence[Tensor],
    values: Tensor,
    group_size: GroupSize,
    index_dtype: torch.dtype,
    *,
    proven: bool = True,
) -> Groups:
    """Cut runs of equal ascending `keys` (p,) into groups; differentiable in `values` (p, ...)."""
    total = keys.shape[0]
    present, counts = torch.unique_consecutive(keys, return_counts=True)
    size = resolve_group_size(group_size, counts)
    per_key = (counts + (size - 1)) // size
    num_groups = int(per_key.sum())
    first = (per_key.cumsum(0) - per_key).repeat_interleave(counts, output_size=total)
    # Groups of one key follow each other, so its entries fill consecutive slots.
    slots = first * size + ranks_in_runs(counts, total)
    unique, full = num_groups == present.shape[0], num_groups * size == total
    return Groups(
        present.repeat_interleave(per_key, output_size=num_groups).to(index_dtype),
        tuple(fill_slots(index.to(index_dtype), slots, (num_groups, size), -1) for index in others),
        fill_slots(values, slots, (num_groups, size)),
        (
            IndexFacts(sorted=True, unique=unique, masked=False, proven=proven),
            *[IndexFacts(masked=not full, proven=proven)] * len(others),
        ),
    )


def fill_slots(entries: Tensor, slots: Tensor, grid: tuple[int, int], fill: int = 0) -> Tensor:
    """Return entries (p, ...) as (*grid, ...), each in its flat slot, with `fill` in unused slots."""
    return scatter_rows(entries, slots, grid[0] * grid[1], fill).reshape(*grid, *entries.shape[1:])


def used_slots(
    keys: Tensor, indices: Sequence[Tensor], values: Tensor, *, full: bool
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return the entries of groups in order, from `keys` (g,), `indices` (g, q) each and `values` (g, q, ...)."""
    keys = keys[:, None].expand(indices[0].shape).reshape(-1)
    flat, values = [index.reshape(-1) for index in indices], values.flatten(0, 1)
    if full:
        return keys, flat, values
    used = (flat[0] >= 0).nonzero().squeeze(1)
    return keys[used], [index[used] for index in flat], values[used]


def dense_entries(dense: Tensor, mask: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return coordinates (ascending) and values of the nonzero elements, or of those that `mask` selects."""
    arguments.check_shape(arguments.require_dense(dense, "from_dense", "dense").shape, "from_dense")
    chosen = dense != 0 if mask is None else arguments.check_mask(mask, dense, tuple(dense.shape))
    indices = _coordinates(chosen)
    return indices, dense[indices]


def block_grid(shape: Sequence[int], block_shape: tuple[int, int]) -> tuple[int, int]:
    """Return the grid of blocks that covers `shape`; blocks at the edges may reach beyond it."""
    return -(-shape[0] // block_shape[0]), -(-shape[1] // block_shape[1])


def _coordinates(chosen: Tensor) -> tuple[Tensor, ...]:
    """Ascending coordinates of the true elements; `nonzero` keeps them interleaved, kernels read them one by one."""
    return chosen.nonzero().T.contiguous().unbind(0)


def dense_blocks(dense: Tensor, block_shape: tuple[int, int], mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, column and values of the blocks of a dense matrix that hold a nonzero, or that `mask` touches."""
    rows, cols = dense.shape
    a, b = block_shape
    grid = block_grid((rows, cols), block_shape)
    whole_blocks = None
    if mask is not None:
        arguments.check_mask(mask, dense, (rows, cols), grid)
        if tuple(mask.shape) == (rows, cols):
            dense = torch.where(mask, dense, torch.zeros((), dtype=dense.dtype, device=dense.device))
        else:
            whole_blocks = mask
    blocks = tiles(dense, block_shape)
    if whole_blocks is None:
        chosen = dense != 0 if mask is None else mask
        whole_blocks = tiles(chosen, block_shape).any(3).any(2)
    row, col = _coordinates(whole_blocks)
    return row, col, blocks[row, col].reshape(-1, a, b)


def pack_blocks(
    row: Tensor, col: Tensor, values: Tensor, shape: Sequence[int], block_shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, column and values of the blocks that scalar entries (p,) touch; duplicates are summed."""
    a, b = block_shape
    row, col = row.long(), col.long()
    block_row, block_col = row // a, col // b
    order = lexicographic_order((block_row, block_col), block_grid(shape, block_shape))
    block_row, block_col = block_row[order], block_col[order]
    new = run_starts((block_row, block_col))
    kept = new.nonzero().squeeze(1)
    block = new.cumsum(0) - 1
    slots = (block * a + row[order] % a) * b + col[order] % b
    packed = sum_rows(values[order], slots, kept.shape[0] * a * b).reshape(-1, a, b)
    return block_row[kept], block_col[kept], packed


def expand_blocks(
    row: Tensor, col: Tensor, values: Tensor, shape: Sequence[int]
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the scalar entries of blocks inside `shape`, block after block."""
    _, a, b = values.shape
    device = values.device
    rows = (row.long() * a)[:, None, None] + torch.arange(a, device=device)[:, None]
    cols = (col.long() * b)[:, None, None] + torch.arange(b, device=device)
    flat_rows, flat_cols = (index.expand(values.shape).reshape(-1) for index in (rows, cols))
    flat = values.reshape(-1)
    if shape[0] % a == 0 and shape[1] % b == 0:
        return (flat_rows, flat_cols), flat
    kept = ((flat_rows < shape[0]) & (flat_cols < shape[1])).nonzero().squeeze(1)
    return (flat_rows[kept], flat_cols[kept]), flat[kept]


def check_torch(tensor: Tensor) -> None:
    """Raise unless `tensor` is a torch sparse tensor of scalar entries without batch dimensions."""
    if arguments.require_tensor(tensor, "from_torch", "tensor").layout in (torch.strided, torch.jagged):
        raise InsumFormatError("from_torch needs a sparse tensor, got a dense one", fix="call from_dense.")
    if tensor.dense_dim() or (tensor.layout != torch.sparse_coo and tensor.ndim != 2):
        raise InsumShapeError(
            f"from_torch needs scalar entries and no batch dimension, got {tensor.layout} of shape "
            f"{tuple(tensor.shape)} with {tensor.sparse_dim()} sparse and {tensor.dense_dim()} dense dimensions",
            fix="convert one batch element, or one feature, at a time.",
            got=tuple(tensor.shape),
        )


def torch_entries(tensor: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return coordinates and values of torch's sparse COO, CSR, CSC, BSR or BSC; differentiable in the values."""
    check_torch(tensor)
    if tensor.layout == torch.sparse_coo:
        # torch defines an uncoalesced tensor by its sum, and passes no gradient through _values().
        merged = tensor.coalesce()
        return merged.indices().contiguous().unbind(0), merged.values()
    if tensor.layout in (torch.sparse_bsr, torch.sparse_bsc):
        return expand_blocks(*uncompressed(tensor), tensor.values(), tensor.shape)
    return uncompressed(tensor), tensor.values()


def uncompressed(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return (row, col) of each stored value or block of a compressed tensor."""
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    pointers = tensor.crow_indices() if by_row else tensor.ccol_indices()
    plain = tensor.col_indices() if by_row else tensor.row_indices()
    owner = torch.arange(pointers.shape[0] - 1, dtype=plain.dtype, device=plain.device)
    owner = owner.repeat_interleave(pointers.diff(), output_size=plain.shape[0])
    return (owner, plain) if by_row else (plain, owner)


def smtx_entries(path: str | PathLike[str]) -> tuple[tuple[int, int], tuple[Tensor, Tensor]]:
    """Return shape, rows and columns of a file of three lines; see `COO.from_smtx`."""
    lines = [line.replace(",", " ").split() for line in Path(path).read_text(errors="replace").splitlines()]
    try:
        # A matrix without entries may end after the second line.
        numbers = [torch.tensor([int(word) for word in line], dtype=torch.int64) for line in [*lines, [], [], []][:3]]
        size, starts, col = numbers
        rows, cols, entries = size.tolist()
    except (ValueError, RuntimeError):
        fault = "its lines are not three numbers, offsets and columns, all of them integers"
    else:
        count = starts.diff()
        if any(lines[3:]) or min(rows, cols, entries) < 0:
            fault = "it has more than three lines, or negative sizes"
        elif starts.shape[0] != rows + 1 or [*starts[[0, -1]]] != [0, entries] or bool((count < 0).any()):
            fault = f"its second line is not {rows + 1} ascending offsets from 0 to {entries}"
        elif col.shape[0] != entries or bool(((col < 0) | (col >= cols)).any()):
            fault = f"its third line is not {entries} columns from 0 to {cols - 1}"
        else:
            return (rows, cols), (torch.arange(rows).repeat_interleave(count), col)
    raise InsumFormatError(f"'{path}' is no .smtx file: {fault}", fix="fetch or write the file again.")

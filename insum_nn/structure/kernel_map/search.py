"""Neighbours from cells or sorted keys of voxels: the way of building a kernel map that reads the device least.

In a grid with few cells for its voxels, every voxel's row is written at its cell, and a neighbour is read a constant
number of cells away. Else voxels are sorted: a voxel's neighbour under a kernel cell has the voxel's key plus a
constant, so all neighbours of all voxels are found by one search among the sorted keys. A submanifold kernel with a
middle cell is its own mirror: where a voxel meets another on one side, that one meets it on the other; half of the
cells are searched. Nothing of it reads the device.

How many voxels a strided kernel reaches depends on the coordinates: their keys are sorted, and their number is read,
once. Before that, and after it, all sizes are bounds that are known ahead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from insum_nn.structure.coordinates import Coordinates, SiteKeys, spans_of
from insum_nn.structure.kernel_map.geometry import Geometry
from insum_nn.structure.site_grid import steps_of
from insum_nn.structure.transfers import constant

__all__ = ["Neighbours", "reached_neighbours", "submanifold_neighbours"]

# (offset, voxel) looked at together: bounds the memory of a search, not the size of a map.
_CANDIDATES = 1 << 24
# Codes up to which those of what is missing, of which one for each axis may be added up, do not wrap.
_CELL_LIMIT = 1 << 59
_NARROW_CELLS = 1 << 31


class Neighbours(NamedTuple):
    """Who meets whom.

    Attributes:
        outputs: the voxels that own a column.
        near: (o, m) int32: the input row that each column's output meets at each offset, or -1.
        rows: (m,) int32: the output row of each column; `None`: the column.
    """

    outputs: Coordinates
    near: Tensor
    rows: Tensor | None

    @property
    def by_rows(self) -> Tensor:
        """`near` with columns in the order of the outputs' rows."""
        if self.rows is None:
            return self.near
        return torch.empty_like(self.near).index_copy_(1, self.rows.long(), self.near)


def submanifold_neighbours(sites: Coordinates, geometry: Geometry) -> Neighbours | None:
    """Return the neighbours of a submanifold map; `None` where the grid has more cells than a key can number.

        neighbour = voxel - padding + cell * dilation

    In a grid of moderate size they are looked up by their cells. Else by a search; columns then stand in the order of
    the keys, so that neighbours in space are searched, and later read, together.
    """
    moves = [
        range(-padding, extent * step - padding, step)
        for extent, step, padding in zip(geometry.kernel_size, geometry.dilation, geometry.padding, strict=True)
    ]
    grid = sites.grid(geometry.reach)
    if grid is not None:
        first = [-padding for padding in geometry.padding]
        return Neighbours(sites, grid.neighbours(first, geometry.kernel_size, geometry.dilation), None)
    keys = sites.keys(geometry.reach)
    if keys is None:
        return None
    rows = keys.order.int()
    if sites.num_sites == 0:
        return Neighbours(sites, rows.expand(geometry.volume, 0), None)
    # The batch entry never changes.
    steps = keys.steps[1:]
    deltas = tuple(
        sum(move * step for move, step in zip(cell, steps, strict=True)) for cell in itertools.product(*moves)
    )
    return Neighbours(sites, _by_search(keys, rows, deltas, mirrored=geometry.is_mirrored), rows)


def _by_search(keys: SiteKeys, rows: Tensor, deltas: tuple[int, ...], *, mirrored: bool) -> Tensor:
    """Return (k, n) the row that stands `deltas` away from each key, or -1.

    Of a symmetric kernel cells before the middle are searched, the others follow from them.
    """
    volume, count, device, known = len(deltas), rows.shape[0], rows.device, keys.keys
    half = volume // 2 if mirrored else volume
    # One row more takes what is not to be written; each column its own, as many writes to one cell would wait in line.
    table = torch.empty(volume + 1, count, dtype=torch.int32, device=device)
    table[half:] = -1
    if mirrored:
        table[half] = rows
    spare = torch.arange(volume * count, (volume + 1) * count, device=device)
    run = max(1, _CANDIDATES // count)
    for start in range(0, half, run):
        stop = min(start + run, half)
        queries = known + constant(deltas[start:stop], device, known.dtype)[:, None]
        # What is greater than all keys has no place among them.
        place = torch.searchsorted(known, queries, out_int32=True).clamp_(max=count - 1)
        flat, into = place.view(-1), table[start:stop]
        misses = known.index_select(0, flat).view_as(queries) != queries
        torch.index_select(rows, 0, flat, out=into.view(-1))
        into.masked_fill_(misses, -1)
        if mirrored:
            # Cell k of the searched half and cell volume - 1 - k are mirrors.
            first = torch.arange((volume - 1 - start) * count, (volume - 1 - stop) * count, -count, device=device)
            table.view(-1)[torch.where(misses, spare, place + first[:, None])] = rows
    return table[:volume]


def reached_neighbours(
    sites: Coordinates, geometry: Geometry, shape: tuple[int, ...], facts: Tensor | None
) -> Neighbours | None:
    """Return the voxels that a strided or transposed kernel reaches, and their neighbours; `None`: grid too large.

    conv:       output = (voxel + padding - cell * dilation) / stride, where that is whole
    transpose:  output = voxel * stride - padding + cell * dilation

    Args:
        sites: the voxels.
        geometry: the kernel's movement.
        shape: the output's grid.
        facts: the facts that check the voxels, read together with the number of outputs; `None`: they are proven.
    """
    spans, volume, rows = spans_of((sites.batch_size, *shape)), geometry.volume, sites.num_sites
    cells, bits = math.prod(spans), _bits(geometry)
    most = (cells + 2) << bits
    if most > _CELL_LIMIT:
        return None
    if not rows:
        none = torch.empty(volume, 0, dtype=torch.int32, device=sites.device)
        return Neighbours(Coordinates(sites.indices, shape, sites.batch_size), none, None)
    whole = _is_whole(sites, geometry, shape)
    # Of what leads nowhere, one for each axis may be added up.
    narrow = most <= _NARROW_CELLS // (1 if whole else 2 + sites.ndim)
    dtype = torch.int32 if narrow else torch.int64
    code, miss = _codes(sites, geometry, shape, spans, dtype, whole=whole, proven=facts is None)
    numbered = _sorted(code, bits, miss, cells)
    # The only read of the device.
    count, *limits = (numbered.total if facts is None else torch.cat([numbered.total, facts])).tolist()
    if facts is not None:
        sites.raise_faults(limits)
    offset = torch.sub(numbered.code, numbered.key, alpha=1 << bits)
    if numbered.spare:
        offset = offset.clamp_(max=volume)
    # An offset sends each voxel to an output of its own: no cell is written twice.
    place = torch.add(numbered.number, offset, alpha=count)
    entries = volume * count
    # Numbers begin with one: what is written begins one place before the table, which begins at a multiple of 16 bytes.
    size = 4 + entries + (count + numbered.spare if numbered.spare else 0)
    table = torch.full((size,), -1, dtype=torch.int32, device=sites.device)
    table[3:].scatter_(0, place, numbered.rows)
    known = torch.empty(1 + count + numbered.spare, dtype=numbered.key.dtype, device=sites.device)
    known.scatter_(0, numbered.number, numbered.key)
    outputs = Coordinates.of_keys(known[1 : 1 + count], shape, sites.batch_size, sites.indices.dtype)
    return Neighbours(outputs, table[4 : 4 + entries].view(volume, count), None)


class _Numbered(NamedTuple):
    """Candidates, in any order, with the numbers of their outputs, which begin with one.

    Attributes:
        code: (p,) of each candidate.
        key: of its output; of what leads nowhere, something else that is not less than the number of cells.
        number: int64: of its output, in the order of keys; past them all where the candidate leads nowhere.
        rows: int32: the voxels of the candidates.
        total: (1,) outputs.
        spare: by how much numbers may be greater than that.
    """

    code: Tensor
    key: Tensor
    number: Tensor
    rows: Tensor
    total: Tensor
    spare: int


def _bits(geometry: Geometry) -> int:
    """Bits that hold any offset."""
    return (geometry.volume - 1).bit_length()


def _is_whole(sites: Coordinates, geometry: Geometry, shape: tuple[int, ...]) -> bool:
    """Return whether every candidate of voxels that are proven leads to an output."""
    if any(geometry.padding):
        return False
    parts = zip(sites.spatial_shape, shape, geometry.kernel_size, geometry.stride, geometry.dilation, strict=True)
    return geometry.kind == "transpose" or all(k == s and gap == 1 and x <= m * s for x, m, k, s, gap in parts)


def _sorted(code: Tensor, bits: int, miss: int | None, cells: int) -> _Numbered:
    """Number the outputs by sorting. On a CPU, where reading a count costs no wait, only candidates that reach one."""
    device, flat = code.device, code.view(-1)
    rows = torch.arange(code.shape[1], dtype=torch.int32, device=device).expand(code.shape).reshape(-1)
    if miss is not None and device.type == "cpu":
        at, miss = (flat < miss).nonzero().squeeze(1), None
        flat, rows = flat.index_select(0, at), rows.index_select(0, at)
    flat, order = flat.sort()
    rows = rows.index_select(0, order)
    key = flat >> bits
    if miss is not None:
        key = key.clamp_(max=cells)
    new = torch.ones(key.shape, dtype=torch.bool, device=device)
    torch.ne(key[1:], key[:-1], out=new[1:])
    number = new.cumsum(0)
    count = number[-1:] if number.shape[0] else number.new_zeros(1)
    if miss is not None:
        # They are all of one number, the last.
        count = count - (key[-1:] == cells).long()
    return _Numbered(flat, key, number, rows, count, 0 if miss is None else 1)


def _codes(
    sites: Coordinates,
    geometry: Geometry,
    shape: tuple[int, ...],
    spans: tuple[int, ...],
    dtype: torch.dtype,
    *,
    whole: bool,
    proven: bool,
) -> tuple[Tensor, int | None]:
    """Return all places that the kernel takes voxels to.

    The first is (j, n): the output's key times 2 ** bits, plus the offset; of what leads nowhere, at least the second,
    which is greater than any code, by more than an offset. `None`: every candidate leads to an output.

    A step of `stride` along an axis, of a kernel without dilation, meets every stride-th of its cells: the first is the
    remainder of the place. Else all cells are tried.
    """
    # The batch is an axis along which the kernel has one cell.
    dims, bits = 1 + sites.ndim, _bits(geometry)
    kernel, stride, dilation = (1, *geometry.kernel_size), (1, *geometry.stride), (1, *geometry.dilation)
    padding, outer, inner = (0, *geometry.padding), [step << bits for step in steps_of(spans)], steps_of(kernel)

    def numbers(values: Iterable[int]) -> Tensor:
        return constant(tuple(values), sites.device, dtype).view(dims, -1, 1)

    def by_run(value: Callable[[int, int], int]) -> Tensor:
        return numbers(value(axis, run) for axis in range(dims) for run in range(longest))

    def inside(values: Tensor, extents: Sequence[int]) -> Tensor:
        return values.clamp(numbers([0] * dims), numbers(extent - 1 for extent in extents))

    few = geometry.kind == "conv" and all(step == 1 or gap == 1 for step, gap in zip(stride, dilation, strict=True))
    runs = tuple(-(-k // s) for k, s in zip(kernel, stride, strict=True)) if few else kernel
    longest = max(runs)
    columns = sites.indices.T[:, None]
    if whole and not proven:
        # What lies outside, and is refused later, is not to lead out of memory.
        columns = inside(columns, sites.extents)
    outside: Tensor | None = None
    if geometry.kind == "transpose":
        place = columns * numbers(stride) + by_run(lambda axis, run: run * dilation[axis] - padding[axis])
        part = place * numbers(outer) + by_run(lambda axis, run: run * inner[axis])
    elif few:
        ahead = columns + numbers(padding) if any(padding) else columns
        place = first = ahead.div(numbers(stride), rounding_mode="floor")
        # The cell is the remainder, plus a stride a run.
        part = first * numbers(a - s * b for a, s, b in zip(outer, stride, inner, strict=True))
        part = part.addcmul_(ahead, numbers(inner))
        if longest > 1:
            place = first - by_run(lambda axis, run: run * dilation[axis])
            part = part + by_run(lambda axis, run: run * (stride[axis] * inner[axis] - dilation[axis] * outer[axis]))
        if any(k % s for k, s in zip(kernel, stride, strict=True)):
            rest = ahead.remainder(numbers(stride))
            outside = rest >= by_run(lambda axis, run: kernel[axis] - run * stride[axis])
    else:
        ahead = columns + by_run(lambda axis, run: padding[axis] - run * dilation[axis])
        place = ahead.div(numbers(stride), rounding_mode="floor")
        part = place * numbers(outer) + by_run(lambda axis, run: run * inner[axis])
        outside = place * numbers(stride) != ahead
    miss = None
    if not whole:
        miss = outer[0] * spans[0] + (1 << bits)
        beyond = inside(place, (sites.batch_size, *shape)) != place
        part = part.masked_fill(beyond if outside is None else beyond.logical_or_(outside), miss)
    if longest == 1:
        return part.sum(0, dtype=part.dtype), miss
    code = part[0, :1]
    for axis in range(1, dims):
        code = (code[:, None] + part[axis, : runs[axis]]).flatten(0, 1)
    return code, miss

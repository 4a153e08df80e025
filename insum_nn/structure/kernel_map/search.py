"""Neighbours from cells or sorted keys of voxels: the way of building a kernel map that reads the device least.

In a grid with few cells for its voxels, every voxel's row is written at its cell, and a neighbour is read a constant
number of cells away. Else voxels are sorted: a voxel's neighbour under a kernel cell has the voxel's key plus a
constant, so all neighbours of all voxels are found by one search among the sorted keys. A submanifold kernel with a
middle cell is its own mirror: where a voxel meets another on one side, that one meets it on the other; half of the
cells are searched. Nothing of it reads the device.

How many voxels a strided kernel reaches depends on the coordinates: their cells are marked, or else their keys sorted,
which is where the device is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from insum_nn.structure.coordinates import Coordinates, SiteKeys, spans_of
from insum_nn.structure.kernel_map.geometry import Geometry
from insum_nn.structure.site_grid import constant, distinct_cells, fits, steps_of

__all__ = ["Neighbours", "identity_neighbours", "reached_neighbours", "submanifold_neighbours"]

# (offset, voxel) looked at together: bounds the memory of a search, not the size of a map.
_CANDIDATES = 1 << 24
# Numbers of cells up to which the keys of what is missing, of which d may be added up, do not wrap: of 64 and 32 bits.
_CELL_LIMIT = 1 << 59
_NARROW_CELLS = 1 << 27


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


def identity_neighbours(outputs: Coordinates) -> Neighbours:
    """The neighbours of a kernel of one cell, in which every row meets itself."""
    rows = torch.arange(outputs.num_sites, dtype=torch.int32, device=outputs.device)
    return Neighbours(outputs, rows[None], rows)


def submanifold_neighbours(sites: Coordinates, geometry: Geometry) -> Neighbours | None:
    """The neighbours of a submanifold map; `None` where the grid has more cells than a key can number.

        neighbour = voxel - padding + cell * dilation

    In a grid of moderate size they are looked up by their cells. Else by a search; columns then stand in the order of
    the keys, so that neighbours in space are searched, and later read, together.
    """
    moves = [
        range(-padding, extent * step - padding, step)
        for extent, step, padding in zip(geometry.kernel_size, geometry.dilation, geometry.padding, strict=True)
    ]
    reach = max(max(abs(axis[0]), abs(axis[-1])) for axis in moves)
    grid = sites.grid(reach)
    if grid is not None:
        first = [-padding for padding in geometry.padding]
        return Neighbours(sites, grid.neighbours(first, geometry.kernel_size, geometry.dilation), None)
    keys = sites.keys(reach)
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
    near = _by_halves(keys, rows, deltas) if geometry.is_mirrored else _by_search(keys, rows, deltas)
    return Neighbours(sites, near, rows)


def _search(keys: SiteKeys, deltas: tuple[int, ...], into: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Write the rows that stand `deltas` away from each key `into` (k, n), or -1; also their places, and which miss."""
    known = keys.keys
    wanted = known + constant(deltas, known.device, known.dtype)[:, None]
    place = torch.searchsorted(known, wanted, out_int32=True)
    if max(deltas) > 0:
        # What is greater than all keys has no place among them. Without a step forward there is none.
        place.clamp_(max=known.shape[0] - 1)
    flat = place.view(-1)
    misses = known.index_select(0, flat).view_as(wanted) != wanted
    torch.index_select(rows, 0, flat, out=into.view(-1))
    into.masked_fill_(misses, -1)
    return place, misses


def _by_search(keys: SiteKeys, rows: Tensor, deltas: tuple[int, ...]) -> Tensor:
    volume, count = len(deltas), rows.shape[0]
    near = torch.empty(volume, count, dtype=torch.int32, device=rows.device)
    run = max(1, _CANDIDATES // count)
    for start in range(0, volume, run):
        some = slice(start, start + run)
        _search(keys, deltas[some], near[some], rows)
    return near


def _by_halves(keys: SiteKeys, rows: Tensor, deltas: tuple[int, ...]) -> Tensor:
    """The same for a kernel that is its own mirror: the cells before the middle are searched, the others written."""
    volume, count, device = len(deltas), rows.shape[0], rows.device
    half = volume // 2
    # One row more takes what is not to be written; each column its own, as many writes to one cell would wait in line.
    table = torch.empty(volume + 1, count, dtype=torch.int32, device=device)
    table[half] = rows
    table[half + 1 :] = -1
    spare = torch.arange(volume * count, (volume + 1) * count, device=device)
    run = max(1, _CANDIDATES // count)
    for start in range(0, half, run):
        stop = min(start + run, half)
        place, misses = _search(keys, deltas[start:stop], table[start:stop], rows)
        # Cell k of the searched half and cell volume - 1 - k are mirrors.
        first = torch.arange((volume - 1 - start) * count, (volume - 1 - stop) * count, -count, device=device)
        cells = torch.where(misses, spare, place + first[:, None])
        table.view(-1)[cells] = rows
    return table[:volume]


def reached_neighbours(sites: Coordinates, geometry: Geometry, shape: tuple[int, ...]) -> Neighbours | None:
    """The voxels that a strided or transposed kernel reaches, and their neighbours; `None` where the grid is too large.

    conv:       output = (voxel + padding - cell * dilation) / stride, where that is whole
    transpose:  output = voxel * stride - padding + cell * dilation
    """
    spans = spans_of((sites.batch_size, *shape))
    cells = steps_of(spans)[0] * spans[0]
    if cells > _CELL_LIMIT:
        return None
    dtype = torch.int32 if cells <= _NARROW_CELLS else torch.int64
    plain = all(step == 1 for step in geometry.dilation) and not any(geometry.padding)
    if geometry.kind == "conv" and plain and geometry.stride == geometry.kernel_size:
        offset, row, key = _tiled(sites, geometry, shape, spans)
    else:
        at, key = _landings(sites, geometry, shape, spans, dtype)
        offset = at.div(max(1, sites.num_sites), rounding_mode="floor")
        row = torch.sub(at, offset, alpha=sites.num_sites)
    if _marks(spans, key):
        known, place = distinct_cells(key.long(), cells)
    else:
        known, place = torch.unique(key.to(dtype), return_inverse=True)
    outputs = Coordinates.of_keys(known, shape, sites.batch_size, sites.indices.dtype)
    near = torch.full((geometry.volume, outputs.num_sites), -1, dtype=torch.int32, device=sites.device)
    # An offset sends each voxel to an output of its own: no cell is written twice.
    near.view(-1).scatter_(0, torch.add(place, offset, alpha=outputs.num_sites), row.int())
    return Neighbours(outputs, near, None)


def _marks(spans: tuple[int, ...], key: Tensor) -> bool:
    """Whether to mark the cells that are reached: on a GPU, which sorts slower; torch's way on a CPU is faster yet."""
    return key.is_cuda and fits(spans, 0, key.shape[0], key.device)


def _tiled(
    sites: Coordinates, geometry: Geometry, shape: tuple[int, ...], spans: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Offset, row and output's key of the voxels, where the kernel's places do not overlap and leave no gap."""
    device = sites.device
    stride = constant((1, *geometry.stride), device)[:, None]
    place = sites.indices.T.div(stride, rounding_mode="floor")
    key = (place * constant(steps_of(spans), device)[:, None]).sum(0)
    inner = steps_of((1, *geometry.kernel_size))
    offset = ((sites.indices.T - place * stride) * constant(inner, device)[:, None]).sum(0)
    if all(extent % step == 0 for extent, step in zip(sites.spatial_shape, geometry.stride, strict=True)):
        return offset, torch.arange(sites.num_sites, device=device), key
    # The last voxels of an axis may lie behind the last place of the kernel.
    row = (place < constant((sites.batch_size, *shape), device)[:, None]).all(0).nonzero().squeeze(1)
    return offset[row], row, key[row]


def _landings(
    sites: Coordinates, geometry: Geometry, shape: tuple[int, ...], spans: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Where in (offset, row) a kernel cell takes a voxel to an output, ascending, and the output's key."""
    steps = steps_of(spans)
    axes = _axis_keys(sites, geometry, shape, steps, -steps[0] * spans[0]).to(dtype).unbind(0)
    parts = [axis[:extent] for axis, extent in zip(axes, geometry.kernel_size, strict=True)]
    batch = sites.indices[:, 0].to(dtype) * steps[0] if sites.batch_size > 1 else None
    rest = geometry.volume // geometry.kernel_size[0]
    run = max(1, _CANDIDATES // max(1, rest * sites.num_sites))
    found: list[tuple[Tensor, Tensor]] = []
    for start in range(0, geometry.kernel_size[0], run):
        key = parts[0][start : start + run]
        if batch is not None:
            key = key + batch
        for part in parts[1:]:
            key = (key[:, None] + part).flatten(0, 1)
        at = (key >= 0).view(-1).nonzero().squeeze(1)
        reached = key.view(-1).index_select(0, at)
        found.append((at + start * rest * sites.num_sites if start else at, reached))
    if len(found) == 1:
        return found[0]
    return torch.cat([at for at, _ in found]), torch.cat([key for _, key in found])


def _axis_keys(
    sites: Coordinates, geometry: Geometry, shape: Sequence[int], steps: tuple[int, ...], miss: int
) -> Tensor:
    """(d, k, n) what each axis adds to the key of the output under each of at most k cells; `miss` where there is none.

    `miss` is so far below zero that no key of the other axes makes up for it.
    """
    device, longest = sites.device, max(geometry.kernel_size)
    stride = constant(geometry.stride, device)[:, None, None]
    sign = 1 if geometry.kind == "transpose" else -1
    moves = tuple(
        sign * (cell * step - padding)
        for step, padding in zip(geometry.dilation, geometry.padding, strict=True)
        for cell in range(longest)
    )
    move = constant(moves, device).view(-1, longest, 1)
    columns = sites.indices[:, 1:].T[:, None, :]
    if geometry.kind == "transpose":
        place = columns * stride + move
        whole = place >= 0
    else:
        ahead = columns + move
        place = ahead.div(stride, rounding_mode="floor")
        whole = (place * stride == ahead) & (place >= 0)
    inside = whole & (place < constant(tuple(shape), device)[:, None, None])
    return torch.where(inside, place * constant(steps[1:], device)[:, None, None], miss)

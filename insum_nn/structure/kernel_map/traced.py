"""Kernel maps of any size: torch's own operations, whose sizes are known but for voxels and pairs, also to tracers.

    keys = sort(number of each voxel)
    near[o, v] = the row that stands at keys where searchsorted finds the neighbour of v under kernel cell o, or -1

Nothing is kept between calls and nothing is read by the host. A graph is for all clouds, so there is one way: by
search, whatever the grid's size; outside of graphs it serves where grids or tables are too large for the faster ways.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from insum_nn.structure.cell_numbers import CellNumbers, find_numbers, starts_of_runs
from insum_nn.structure.kernel_map.geometry import Geometry

__all__ = ["landings", "map_in_graph"]


def map_in_graph(
    indices: Tensor, extents: Sequence[int], geometry: Geometry, shape: Sequence[int], run: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the outputs of a kernel map, and who meets whom.

    Args:
        indices: (n, 1 + d) the voxels, distinct and inside.
        extents: the batch size, then the grid's shape.
        geometry: the kernel's movement.
        shape: the output's grid.
        run: kernel cells of a submanifold map that are searched at a time, to bound memory; default: all.

    Returns:
        (m, 1 + d) the outputs, in lexicographic order unless they are the inputs; and (o, m) int64: the input row that
        each meets at each offset, or -1.
    """
    columns = indices.long().unbind(1)
    if geometry.is_pointwise:
        return indices, torch.arange(indices.shape[0], device=indices.device)[None]
    if geometry.kind == "subm":
        return indices, _neighbours(columns, extents, geometry, run or geometry.volume)
    return _reached(indices, columns, (extents[0], *shape), geometry)


def _neighbours(columns: Sequence[Tensor], extents: Sequence[int], geometry: Geometry, run: int) -> Tensor:
    """Return (o, n) the row of each voxel's neighbours."""
    numbers = CellNumbers(extents)
    keys, order = numbers.of(columns).sort(stable=True)
    # What is not found has the place of no row.
    rows = torch.cat([order, order.new_full((1,), -1)])
    near: list[Tensor] = []
    for cells in _every_cell(geometry, columns[0]).split(run):
        places, inside = landings(columns, extents[1:], geometry, cells)
        at, found = find_numbers(keys, numbers.of(places, inside))
        near.append(torch.where(found, rows[at], -1))
    return torch.cat(near)


def _reached(
    indices: Tensor, columns: Sequence[Tensor], extents: Sequence[int], geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """Return the voxels that are reached, and (o, m) the row of each one's neighbours."""
    places, inside = landings(columns, extents[1:], geometry, _every_cell(geometry, columns[0]))
    keys = CellNumbers(extents).of(places, inside)
    volume, shape = geometry.volume, keys.shape
    flat, order = keys.reshape(-1).sort(stable=True)
    # Each number once, but for that of candidates outside.
    new = starts_of_runs(flat) & (flat >= 0)
    first = new.nonzero().squeeze(1)
    kept = order[first]
    outputs = torch.stack([place.expand(shape).reshape(-1)[kept] for place in places], 1).to(indices.dtype)
    number = torch.empty_like(order).scatter(0, order, new.long().cumsum(0) - 1).view(shape)
    # An offset sends each voxel to an output of its own; candidates outside write into one cell more.
    count = first.shape[0]
    # Rows are numbered in int32. Without this bound a tracer's bound of the pairs, volume * count, is beyond int64.
    torch._check(count < 2**31)
    offsets = torch.arange(volume, device=indices.device)[:, None]
    cell = torch.where(keys >= 0, offsets * count + number, volume * count)
    rows = torch.arange(indices.shape[0], device=indices.device).expand(volume, -1)
    near = torch.full((volume * count + 1,), -1, dtype=torch.int64, device=indices.device)
    return outputs, near.scatter(0, cell.reshape(-1), rows.reshape(-1))[:-1].view(volume, count)


def landings(
    columns: Sequence[Tensor], shape: Sequence[int], geometry: Geometry, cells: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Return where each voxel lands under kernel cells, by axes broadcast to (k, n), and which are inside.

        subm:       input = voxel - padding + cell * dilation
        transpose:  output = voxel * stride - padding + cell * dilation
        conv:       output = (voxel + padding - cell * dilation) / stride, where that is whole

    Args:
        columns: 1 + d, (n,) each.
        shape: the grid that is landed in.
        geometry: the kernel's movement.
        cells: (k, 1) the numbers of the cells.
    """
    # Not by an axis of its own for each of the kernel's: torch 2.10 and 2.11 cannot flatten those where n is symbolic.
    found, inside = [columns[0][None]], torch.ones_like(columns[0], dtype=torch.bool)[None]
    for axis, (column, extent) in enumerate(zip(columns[1:], shape, strict=True)):
        inner = math.prod(geometry.kernel_size[axis + 1 :])
        moves = cells.div(inner, rounding_mode="floor") % geometry.kernel_size[axis] * geometry.dilation[axis]
        stride, padding = geometry.stride[axis], geometry.padding[axis]
        if geometry.kind == "conv":
            ahead = column + padding - moves
            place = ahead.div(stride, rounding_mode="floor")
            inside = inside & (place * stride == ahead)
        else:
            place = (column if stride == 1 else column * stride) - padding + moves
        found.append(place)
        inside = inside & (place >= 0) & (place < extent)
    return found, inside


def _every_cell(geometry: Geometry, like: Tensor) -> Tensor:
    return torch.arange(geometry.volume, device=like.device)[:, None]

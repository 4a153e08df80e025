"""Kernel maps from coordinates: what a kernel reaches, and pairs cut into groups of equal length."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from insum_nn.errors import InsumShapeError
from insum_nn.structure.coordinates import MAX_EXTENT, Coordinates, unique_sites
from insum_nn.structure.kernel_map import Geometry, KernelMap, Pairs

__all__ = ["Groups", "build_kernel_map", "group_pairs", "output_shape"]

# Candidates (offset, voxel) looked at together: bounds the memory of building, not the size of a map.
_CANDIDATES = 1 << 23
# Slots of a group: the longest that leaves few slots unused is taken.
_GROUP_SIZES = (128, 64, 32, 16)
_MAX_UNUSED = 0.25

Groups = tuple[Tensor, Tensor, Tensor, Tensor, tuple[int, ...]]
"""`Off` (g,), `InIdx` (g, q), `OutIdx` (g, q), and the pairs of each offset, on the device and as numbers."""
# Offsets, rows and landing columns of voxels under kernel cells.
_Landed = tuple[Tensor, Tensor, list[Tensor]]


def output_shape(spatial_shape: Sequence[int], geometry: Geometry) -> tuple[int, ...]:
    """The spatial shape of the output, as of torch's dense convolutions.

    Raises:
        InsumShapeError: the kernel is larger than the padded input, or the output is too large to index.

    >>> rest = dict(kernel_size=(3,), stride=(2,), padding=(0,), dilation=(1,), output_padding=(0,))
    >>> output_shape((5,), Geometry("conv", **rest)), output_shape((2,), Geometry("transpose", **rest))
    ((2,), (5,))
    """
    if geometry.kind == "subm":
        return tuple(spatial_shape)
    parts = zip(
        spatial_shape,
        geometry.kernel_size,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        geometry.output_padding,
        strict=True,
    )
    if geometry.kind == "transpose":
        shape = tuple((x - 1) * s - 2 * p + d * (k - 1) + e + 1 for x, k, s, p, d, e in parts)
    else:
        shape = tuple((x + 2 * p - d * (k - 1) - 1) // s + 1 for x, k, s, p, d, _ in parts)
    if any(not 0 < extent <= MAX_EXTENT for extent in shape):
        raise InsumShapeError(
            f"the output's spatial shape would be {shape}",
            details=[
                f"spatial_shape {tuple(spatial_shape)}, kernel_size {geometry.kernel_size}, stride {geometry.stride}, "
                f"padding {geometry.padding}, dilation {geometry.dilation}",
                f"expected extents from 1 to {MAX_EXTENT}",
            ],
            fix="enlarge spatial_shape or padding, or use a smaller kernel.",
            expected=MAX_EXTENT,
            got=shape,
        )
    return shape


def build_kernel_map(inputs: Coordinates, geometry: Geometry, *, proven: bool = False) -> KernelMap:
    """Find every pair of input and output voxels that a kernel joins.

        subm, conv:  input = output * stride - padding + offset * dilation
        transpose:   output = input * stride - padding + offset * dilation

    Source: the rule of dense cross-correlation, restricted to active voxels.

    Args:
        inputs: the active voxels.
        geometry: the kernel's movement.
        proven: `inputs` is known to be in range and without repetition; else it is checked here, by one reading.

    Returns:
        A map on the device of `inputs`. Output rows are `inputs` themselves for `"subm"`, else every voxel that is
        reached, in lexicographic order of (batch, coordinates).

    Raises:
        InsumRangeError: a voxel lies outside the grid.
        InsumFormatError: a voxel stands twice.
        InsumShapeError: the output's spatial shape is empty.
    """
    shape = output_shape(inputs.spatial_shape, geometry)
    if not proven:
        inputs.prove()
    if geometry.is_pointwise:
        outputs = inputs if geometry.kind == "subm" else _with_shape(inputs, shape)
        return _with_counts(inputs, outputs, geometry, _identity_groups(inputs))
    if geometry.kind == "subm":
        outputs = inputs
        pairs = _submanifold_pairs(inputs, geometry)
    else:
        outputs, pairs = _reached_pairs(inputs, geometry, shape)
    return _with_counts(inputs, outputs, geometry, group_pairs(pairs, geometry.volume))


def _with_counts(inputs: Coordinates, outputs: Coordinates, geometry: Geometry, groups: Groups) -> KernelMap:
    """A map that knows its counts already, since they were read to cut the groups."""
    offset, in_index, out_index, filled, counts = groups
    cache: dict[tuple[str, bool], Any] = {("counts", False): counts}
    return KernelMap(inputs, outputs, geometry, offset, in_index, out_index, filled, _cache=cache)


def _with_shape(sites: Coordinates, shape: tuple[int, ...]) -> Coordinates:
    """The same sites in a grid of another shape."""
    return sites if shape == sites.spatial_shape else Coordinates(sites.indices, shape, sites.batch_size)


def group_pairs(pairs: Pairs, volume: int, group_size: int | None = None) -> Groups:
    """Cut the pairs of each offset into groups.

    Args:
        pairs: ascending by offset.
        volume: kernel offsets.
        group_size: slots of a group; default: the longest of 128, 64, 32 and 16 that leaves at most a quarter as many
            slots unused as there are pairs.

    Returns:
        `Off` (g,), `InIdx` (g, q), `OutIdx` (g, q), all int32, and the pairs of each offset, (o,) and as numbers.

    >>> rows = torch.tensor([0, 1, 2])
    >>> group_pairs(Pairs(torch.tensor([0, 0, 2]), rows, rows), 3, group_size=2)[:2]
    (tensor([0, 2], dtype=torch.int32), tensor([[ 0,  1],
            [ 2, -1]], dtype=torch.int32))
    """
    device = pairs.offset.device
    filled = torch.bincount(pairs.offset, minlength=volume)
    counts = tuple(filled.tolist())
    size = group_size or _choose_group_size(counts)
    num_groups = sum(-(-count // size) for count in counts)
    groups = (filled + (size - 1)) // size
    first_slot = (groups.cumsum(0) - groups) * size
    first_pair = filled.cumsum(0) - filled
    slots = torch.arange(sum(counts), device=device) + (first_slot - first_pair)[pairs.offset]
    offset = torch.arange(volume, dtype=torch.int32, device=device).repeat_interleave(groups, output_size=num_groups)
    tables: list[Tensor] = []
    for rows in (pairs.input, pairs.output):
        table = torch.full((num_groups * size,), -1, dtype=torch.int32, device=device)
        tables.append(table.scatter_(0, slots, rows.int()).reshape(num_groups, size))
    return offset, tables[0], tables[1], filled, counts


def _identity_groups(sites: Coordinates) -> Groups:
    """Groups of the identity of rows; no element is read."""
    count = sites.num_sites
    size = _choose_group_size((count,))
    rows = torch.arange(-(-count // size) * size, dtype=torch.int32, device=sites.device)
    table = torch.where(rows < count, rows, -1).reshape(-1, size)
    offset = torch.zeros(table.shape[0], dtype=torch.int32, device=sites.device)
    return offset, table, table, torch.full((1,), count, device=sites.device), (count,)


def _choose_group_size(counts: Sequence[int]) -> int:
    total = sum(counts)
    for size in _GROUP_SIZES:
        slots = size * sum(-(-count // size) for count in counts)
        if slots - total <= _MAX_UNUSED * total:
            return size
    return _GROUP_SIZES[-1]


def _kernel_cells(kernel_size: Sequence[int], limit: int) -> list[list[tuple[int, ...]]]:
    """All kernel cells, row by row, in runs of at most `limit`."""
    cells = list(itertools.product(*(range(extent) for extent in kernel_size)))
    return [cells[start : start + limit] for start in range(0, len(cells), limit)]


@dataclass(frozen=True, slots=True)
class _Axis:
    """For one axis: where each voxel lands under each kernel cell (k, n), and whether that is inside the grid."""

    place: Tensor
    inside: Tensor


def _landing(column: Tensor, axis: int, geometry: Geometry, extent: int) -> _Axis:
    cells = torch.arange(geometry.kernel_size[axis], device=column.device) * geometry.dilation[axis]
    stride, padding = geometry.stride[axis], geometry.padding[axis]
    if geometry.kind == "subm":
        # The voxel is an output; what is sought is the input that it reads.
        place = column[None, :] - padding + cells[:, None]
        inside = (place >= 0) & (place < extent)
    elif geometry.kind == "transpose":
        place = column[None, :] * stride - padding + cells[:, None]
        inside = (place >= 0) & (place < extent)
    else:
        numerator = column[None, :] + padding - cells[:, None]
        place = numerator.div(stride, rounding_mode="floor")
        inside = (place * stride == numerator) & (place >= 0) & (place < extent)
    return _Axis(place, inside)


def _candidates(sites: Coordinates, geometry: Geometry, shape: Sequence[int]) -> list[_Landed]:
    """(offset, row, landing columns) of all voxels and kernel cells that land inside, ascending by (offset, row)."""
    axes = [_landing(column, axis, geometry, shape[axis]) for axis, column in enumerate(sites.columns[1:])]
    found: list[_Landed] = []
    begin = 0
    for run in _kernel_cells(geometry.kernel_size, max(1, _CANDIDATES // max(1, sites.num_sites))):
        cells = torch.tensor(run, device=sites.device).unbind(1)
        inside = axes[0].inside[cells[0]]
        for axis, cell in zip(axes[1:], cells[1:], strict=True):
            inside = inside & axis.inside[cell]
        place, row = inside.nonzero(as_tuple=True)
        landed = [axis.place[cell[place], row] for axis, cell in zip(axes, cells, strict=True)]
        found.append((place + begin, row, [sites.columns[0][row], *landed]))
        begin += len(run)
    return found


def _submanifold_pairs(sites: Coordinates, geometry: Geometry) -> Pairs:
    parts: list[Pairs] = []
    for offset, output, columns in _candidates(sites, geometry, sites.spatial_shape):
        source = sites.find(columns)
        hit = (source >= 0).nonzero().squeeze(1)
        parts.append(Pairs(offset[hit], output[hit], source[hit]))
    return Pairs(*(torch.cat([getattr(part, name) for part in parts]) for name in ("offset", "output", "input")))


def _reached_pairs(sites: Coordinates, geometry: Geometry, shape: tuple[int, ...]) -> tuple[Coordinates, Pairs]:
    found = _candidates(sites, geometry, shape)
    offset = torch.cat([part[0] for part in found])
    source = torch.cat([part[1] for part in found])
    columns = [torch.cat([part[2][axis] for part in found]) for axis in range(sites.ndim + 1)]
    reached, place = unique_sites(columns, (sites.batch_size, *shape))
    outputs = Coordinates(torch.stack(reached, dim=1).to(sites.indices.dtype), shape, sites.batch_size)
    # An offset sends each input to an output of its own, so (offset, output) tells all pairs apart.
    order = (offset * max(1, outputs.num_sites) + place).argsort()
    return outputs, Pairs(offset[order], place[order], source[order])

"""Kernel maps: which input voxel meets which output voxel under which kernel offset.

A map holds triples (offset, output row, input row), grouped by offset into groups of equal length, so that a whole
group shares one slice of the weights. It is built on the device of the coordinates, by sorting 64-bit keys.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from insum_nn.errors import InsumFormatError, InsumRangeError, InsumShapeError
from insum_nn.facts import IndexFacts
from insum_nn.structure.coordinates import MAX_EXTENT, Coordinates, unique_sites

__all__ = ["Geometry", "KernelMap", "MapKind", "Pairs", "build_kernel_map", "group_pairs", "output_shape"]

MapKind = Literal["subm", "conv", "transpose"]

# Candidates (offset, voxel) looked at together: bounds the memory of building, not the size of a map.
_CANDIDATES = 1 << 23
# Slots of a group: the longest that leaves few slots unused is taken.
_GROUP_SIZES = (128, 64, 32, 16)
_MAX_UNUSED = 0.25


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a kernel moves over a grid.

    Attributes:
        kind: `"subm"`: outputs are the inputs' voxels; `"conv"`: every voxel that the kernel reaches; `"transpose"`: the
            same for the transposed convolution.
        kernel_size: d extents.
        stride: d steps; ones for `"subm"`.
        padding: d; for `"subm"` the kernel cell that lies on the voxel itself, times the dilation.
        dilation: d steps between kernel cells.
        output_padding: d; added to the shape of a transposed convolution's output.
    """

    kind: MapKind
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Kernel offsets, `o`."""
        return math.prod(self.kernel_size)

    @property
    def is_pointwise(self) -> bool:
        """Whether every output voxel is the input voxel of the same row."""
        ones = self.volume == 1 and all(step == 1 for step in self.stride)
        return ones and not any(self.padding) and not any(self.output_padding)


def output_shape(spatial_shape: Sequence[int], geometry: Geometry) -> tuple[int, ...]:
    """The spatial shape of the output, as of torch's dense convolutions.

    Raises:
        InsumShapeError: the kernel is larger than the padded input, or the output is too large to index.

    >>> ones = dict(padding=(0,), dilation=(1,), output_padding=(0,))
    >>> output_shape((5,), Geometry("conv", (3,), (2,), **ones)), output_shape((2,), Geometry("transpose", (3,), (2,), **ones))
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


@dataclass(frozen=True, slots=True)
class Pairs:
    """Triples (offset, output row, input row), ascending by offset, then output, then input: int64 (p,) each."""

    offset: Tensor
    output: Tensor
    input: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class KernelMap:
    """A kernel map, grouped by offset.

        Out[OutIdx[g,q],d] += In[InIdx[g,q],c] * W[Off[g],c,d]

    Laws: `Off` ascends and every group of it has a used slot; a slot is unused (-1) in `InIdx` exactly where it is in
    `OutIdx`; in a group, and over the groups of one offset, outputs stand at most once, inputs too. Used slots of one
    offset ascend by output row.

    Attributes:
        inputs: the voxels that are read, n of them.
        outputs: the voxels that are written, m of them.
        geometry: the kernel's movement.
        offset: `Off`, (g,) int32: place of the kernel cell, row by row.
        in_index: `InIdx`, (g, q) int32; -1 in unused slots.
        out_index: `OutIdx`, (g, q) int32; -1 in unused slots.
        counts: pairs of each offset.
        inverted: the map of another one read backwards.

    >>> sites = Coordinates(torch.tensor([[0, 0], [0, 1], [0, 3]], dtype=torch.int32), (4,), 1)
    >>> near = build_kernel_map(sites, Geometry("subm", (3,), (1,), (1,), (1,), (0,)))
    >>> near.counts, near.neighbours.tolist()
    ((1, 3, 1), [[-1, 0, -1], [0, 1, 2], [1, -1, -1]])
    """

    inputs: Coordinates
    outputs: Coordinates
    geometry: Geometry
    offset: Tensor
    in_index: Tensor
    out_index: Tensor
    counts: tuple[int, ...]
    inverted: bool = False
    _cache: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return (
            f"KernelMap({self.geometry.kind}{', inverted' if self.inverted else ''}, inputs={self.num_inputs}, "
            f"outputs={self.num_outputs}, offsets={self.geometry.volume}, pairs={self.num_pairs}, "
            f"groups={tuple(self.in_index.shape)})"
        )

    @property
    def num_inputs(self) -> int:
        """Rows of the features that are read."""
        return self.inputs.num_sites

    @property
    def num_outputs(self) -> int:
        """Rows of the result."""
        return self.outputs.num_sites

    @property
    def num_pairs(self) -> int:
        """Used slots."""
        return sum(self.counts)

    @property
    def group_size(self) -> int:
        """Slots of a group, `q`."""
        return self.in_index.shape[1]

    @property
    def is_pointwise(self) -> bool:
        """Whether the map is the identity of rows."""
        return self.geometry.is_pointwise

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The index tensors by their names in expressions."""
        return {"Off": self.offset, "InIdx": self.in_index, "OutIdx": self.out_index}

    @property
    def facts(self) -> Mapping[str, IndexFacts]:
        """What the builder guarantees of each index tensor. The same for every map, so that maps share programs."""
        return FACTS

    @property
    def inverse(self) -> KernelMap:
        """The map with inputs and outputs exchanged; shares its tensors."""
        return replace(
            self,
            inputs=self.outputs,
            outputs=self.inputs,
            in_index=self.out_index,
            out_index=self.in_index,
            inverted=not self.inverted,
            _cache={},
        )

    @property
    def pairs(self) -> Pairs:
        """The triples of used slots, in stored order; reads the device."""
        used = self.in_index >= 0
        offset = self.offset.long()[:, None].expand(self.in_index.shape)
        return Pairs(offset[used], self.out_index[used].long(), self.in_index[used].long())

    @property
    def neighbours(self) -> Tensor:
        """(o, m) int32: the input row that each output row meets at each offset, or -1; kept once built."""
        table = self._cache.get("neighbours")
        if table is None:
            pairs = self.pairs
            shape = (self.geometry.volume, self.num_outputs)
            table = torch.full(shape, -1, dtype=torch.int32, device=self.in_index.device)
            table[pairs.offset, pairs.output] = pairs.input.int()
            self._cache["neighbours"] = table
        return table

    def output_counts(self, dtype: torch.dtype) -> Tensor:
        """(m,) the pairs that meet in each output voxel; at least one of those of any kernel but a submanifold's."""
        counts = self._cache.get("counts")
        if counts is None:
            flat = self.out_index.reshape(-1).long()
            ones = (flat >= 0).long()
            zeros = torch.zeros(self.num_outputs, dtype=torch.int64, device=flat.device)
            counts = zeros.index_add_(0, flat.clamp(min=0), ones) if self.num_outputs else zeros
            self._cache["counts"] = counts
        return counts.to(dtype)

    def validate(self) -> None:
        """Prove the laws of the map against its values; reads the device.

        Raises:
            InsumRangeError: an index lies outside.
            InsumFormatError: another law is broken.
        """
        extents = {"offset": self.geometry.volume, "in_index": self.num_inputs, "out_index": self.num_outputs}
        for name, extent in extents.items():
            tensor: Tensor = getattr(self, name)
            low = 0 if name == "offset" else -1
            if tensor.numel() and (int(tensor.min()) < low or int(tensor.max()) >= extent):
                raise InsumRangeError(
                    f"kernel map: '{name}' points outside",
                    details=[f"expected {low} <= {name} < {extent}; got {int(tensor.min())} to {int(tensor.max())}"],
                    fix="rebuild the map with build_kernel_map.",
                    field=name,
                    expected=extent,
                )
        pairs = self.pairs
        keys = [pairs.offset * max(1, self.num_outputs) + pairs.output, pairs.offset * max(1, self.num_inputs) + pairs.input]
        laws = {
            "offsets ascend": bool((self.offset[1:] >= self.offset[:-1]).all()),
            "a slot is unused in both index tensors or in none": torch.equal(self.in_index < 0, self.out_index < 0),
            "every group has a used slot": bool((self.in_index >= 0).any(1).all()),
            "counts are those of the offsets": torch.bincount(pairs.offset, minlength=self.geometry.volume).tolist()
            == list(self.counts),
            "a voxel stands once at each offset": all(torch.unique(key).numel() == key.numel() for key in keys),
        }
        broken = [law for law, holds in laws.items() if not holds]
        if broken:
            raise InsumFormatError(
                "kernel map: a law is broken",
                details=[f"expected: {law}" for law in broken],
                fix="rebuild the map with build_kernel_map.",
                laws=tuple(broken),
            )

    # Names that callers of spconv's IndiceData read.

    @property
    def indices(self) -> Tensor:
        """Voxels of the layer's input, (n, 1 + d)."""
        return self.inputs.indices

    @property
    def out_indices(self) -> Tensor:
        """Voxels of the layer's output, (m, 1 + d)."""
        return self.outputs.indices

    @property
    def spatial_shape(self) -> list[int]:
        """Spatial shape of the layer's input."""
        return list(self.inputs.spatial_shape)

    @property
    def out_spatial_shape(self) -> list[int]:
        """Spatial shape of the layer's output."""
        return list(self.outputs.spatial_shape)

    @property
    def is_subm(self) -> bool:
        """Whether outputs are the inputs' voxels."""
        return self.geometry.kind == "subm"

    @property
    def ksize(self) -> list[int]:
        """Kernel size."""
        return list(self.geometry.kernel_size)

    @property
    def stride(self) -> list[int]:
        """Stride."""
        return list(self.geometry.stride)

    @property
    def padding(self) -> list[int]:
        """Padding."""
        return list(self.geometry.padding)

    @property
    def dilation(self) -> list[int]:
        """Dilation."""
        return list(self.geometry.dilation)

    @property
    def indice_pair_num(self) -> Tensor:
        """(o,) int32: pairs of each offset."""
        return torch.tensor(self.counts, dtype=torch.int32, device=self.in_index.device)

    @property
    def indice_pairs(self) -> Tensor:
        """(2, o, n) int32: input and output rows of each offset's pairs, from the left, then -1."""
        pairs = self.pairs
        counts = torch.tensor(self.counts, device=pairs.offset.device)
        rank = torch.arange(self.num_pairs, device=pairs.offset.device) - (counts.cumsum(0) - counts)[pairs.offset]
        shape = (2, self.geometry.volume, max(self.num_inputs, max(self.counts, default=0)))
        table = torch.full(shape, -1, dtype=torch.int32, device=pairs.offset.device)
        table[0, pairs.offset, rank] = pairs.input.int()
        table[1, pairs.offset, rank] = pairs.output.int()
        return table


# `masked` holds also where a map has no unused slot: one program serves maps of all sizes.
FACTS: Mapping[str, IndexFacts] = {
    "Off": IndexFacts(sorted=True, masked=False, proven=True),
    "InIdx": IndexFacts(masked=True, proven=True),
    "OutIdx": IndexFacts(masked=True, proven=True),
}


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
        outputs = inputs if geometry.kind == "subm" else replace_shape(inputs, shape)
        rows = torch.arange(inputs.num_sites, device=inputs.device)
        pairs = Pairs(torch.zeros_like(rows), rows, rows)
    elif geometry.kind == "subm":
        outputs = inputs
        pairs = _submanifold_pairs(inputs, geometry)
    else:
        outputs, pairs = _reached_pairs(inputs, geometry, shape)
    offset, in_index, out_index, counts = group_pairs(pairs, geometry.volume)
    return KernelMap(inputs, outputs, geometry, offset, in_index, out_index, counts)


def replace_shape(sites: Coordinates, shape: tuple[int, ...]) -> Coordinates:
    """The same sites in a grid of another shape."""
    return sites if shape == sites.spatial_shape else Coordinates(sites.indices, shape, sites.batch_size)


def group_pairs(pairs: Pairs, volume: int, group_size: int | None = None) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Cut the pairs of each offset into groups.

    Args:
        pairs: ascending by offset.
        volume: kernel offsets.
        group_size: slots of a group; default: the longest of 128, 64, 32 and 16 that leaves at most a quarter as many
            slots unused as there are pairs.

    Returns:
        `Off` (g,), `InIdx` (g, q), `OutIdx` (g, q), all int32, and the pairs of each offset.

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
    return offset, tables[0], tables[1], counts


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


def _candidates(sites: Coordinates, geometry: Geometry, shape: Sequence[int]) -> list[tuple[Tensor, Tensor, list[Tensor]]]:
    """(offset, row, landing columns) of all voxels and kernel cells that land inside, ascending by (offset, row)."""
    axes = [_landing(column, axis, geometry, shape[axis]) for axis, column in enumerate(sites.columns[1:])]
    found: list[tuple[Tensor, Tensor, list[Tensor]]] = []
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

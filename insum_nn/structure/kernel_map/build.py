"""Kernel maps from coordinates: what a kernel reaches, as pairs or as a table of neighbours.

Under `torch.compile` to build a map is one operator to Dynamo, and torch's own operations to what comes behind it
(`traced`). How many voxels a map leads to depends on the values of those it starts from: the compiler goes on with
sizes that it does not know; nothing is read while it traces. `torch.compile(fullgraph=True)` takes such operators as
they are; without it they end a graph unless `torch._dynamo.config.capture_dynamic_output_shape_ops` is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from insum_nn.structure.coordinates import Coordinates
from insum_nn.structure.kernel_map.device_kernels import reached_map, submanifold_table
from insum_nn.structure.kernel_map.geometry import Geometry, MapKind, output_shape
from insum_nn.structure.kernel_map.kernel_map import KernelMap
from insum_nn.structure.kernel_map.search import Neighbours, reached_neighbours, submanifold_neighbours
from insum_nn.structure.kernel_map.tables import (
    MOST_ENTRIES,
    Groups,
    NeighbourTable,
    groups_in_graph,
    groups_of_table,
    order_by_mask,
)
from insum_nn.structure.kernel_map.traced import map_in_graph
from insum_nn.structure.plain_tensors import plain_integers
from insum_nn.structure.transfers import read_later

__all__ = ["build_kernel_map"]

# Candidates (offset, voxel) looked at together: bounds the memory of building, not the size of a map.
_CANDIDATES = 1 << 21


def build_kernel_map(
    inputs: Coordinates, geometry: Geometry, *, proven: bool = False, by_table: bool | None = None
) -> KernelMap:
    """Find every pair of input and output voxels that a kernel joins.

        subm, conv:  input = output * stride - padding + offset * dilation
        transpose:   output = input * stride - padding + offset * dilation

    Source: the rule of dense cross-correlation, restricted to active voxels.

    Args:
        inputs: the active voxels.
        geometry: the kernel's movement.
        proven: `inputs` is known to be in range and without repetition; else it is checked here, by one reading. Under
            `torch.compile` it must be.
        by_table: make the table now, and the pairs when they are asked for; else the other way. Default: as the
            device's convolutions need it, the table on a GPU. Where the table would be very large, pairs come first
            in any case.

    Returns:
        A map on the device of `inputs`. Output rows are `inputs` themselves for `"subm"`, else every voxel that is
        reached, in lexicographic order of (batch, coordinates).

    Raises:
        InsumRangeError: a voxel lies outside the grid.
        InsumFormatError: a voxel occurs twice.
        InsumShapeError: the output's spatial shape is empty.
    """
    shape = output_shape(inputs.spatial_shape, geometry)
    if torch.compiler.is_compiling():
        return _traced_map(inputs, geometry, shape)
    # What is built of ordinary tensors keeps count of its changes, so that a compiler can keep what it made of them.
    return plain_integers(lambda: _built(inputs, geometry, shape, proven=proven, by_table=by_table), inputs.indices)


def _built(
    inputs: Coordinates, geometry: Geometry, shape: tuple[int, ...], *, proven: bool, by_table: bool | None
) -> KernelMap:
    by_table = inputs.indices.device.type == "cuda" if by_table is None else by_table
    if by_table and (found := _by_kernels(inputs, geometry, shape, proven=proven)) is not None:
        return found
    try:
        facts = None if proven else inputs.facts(by_cells=geometry.kind == "subm")
        return _build(inputs, geometry, shape, facts, by_table)
    finally:
        inputs.drop_grid()


def _by_kernels(inputs: Coordinates, geometry: Geometry, shape: tuple[int, ...], *, proven: bool) -> KernelMap | None:
    """Return the map made by a few hand-written kernels, where these can be launched and the grid is small."""
    if geometry.is_pointwise or geometry.volume * inputs.indices.shape[0] > MOST_ENTRIES:
        return None
    if geometry.kind == "subm":
        found = submanifold_table(inputs, geometry, proven=proven)
    else:
        found = reached_map(inputs, geometry, shape, proven=proven)
    if found is None:
        return None
    outputs, table, counts = found
    return KernelMap.of_table(inputs, outputs, geometry, NeighbourTable(*table), counts)


def _build(
    inputs: Coordinates, geometry: Geometry, shape: tuple[int, ...], facts: Tensor | None, by_table: bool
) -> KernelMap:
    """Return the map of voxels that `facts` check, which the host reads; `None`: they are proven."""
    small, subm = geometry.volume * inputs.num_sites <= MOST_ENTRIES, geometry.kind == "subm"
    found: Neighbours | None = None
    if not subm and not geometry.is_pointwise:
        # Which reads how many outputs there are, and the facts with them.
        found = reached_neighbours(inputs, geometry, shape, facts)
    answer = None if facts is None or found is not None else read_later(facts)
    if small and subm and not geometry.is_pointwise:
        # Look-ups are safe without the answer: the device goes on while it is on its way.
        found = submanifold_neighbours(inputs, geometry)
    if found is None:
        if answer is not None:
            inputs.raise_faults(answer())
        run = max(1, _CANDIDATES // max(1, inputs.num_sites))
        indices, near = map_in_graph(inputs.indices, inputs.extents, geometry, shape, run)
        same = indices is inputs.indices and shape == inputs.spatial_shape
        found = Neighbours(inputs if same else Coordinates(indices, shape, inputs.batch_size), near.int(), None)
    if by_table and small:
        result = KernelMap.of_table(inputs, found.outputs, geometry, order_by_mask(found.near, found.rows))
    else:
        result = KernelMap.of_groups(inputs, found.outputs, geometry, groups_of_table(found.by_rows))
    if answer is not None:
        inputs.raise_faults(answer())
    return result


def _traced_map(inputs: Coordinates, geometry: Geometry, shape: tuple[int, ...]) -> KernelMap:
    build: Any = torch.ops.insum_nn.kernel_map if torch.compiler.is_dynamo_compiling() else _operator
    indices, *groups = build(
        inputs.indices,
        list(inputs.spatial_shape),
        inputs.batch_size,
        geometry.kind,
        list(geometry.kernel_size),
        list(geometry.stride),
        list(geometry.padding),
        list(geometry.dilation),
        list(geometry.output_padding),
    )
    outputs = inputs if geometry.kind == "subm" else Coordinates(indices, shape, inputs.batch_size)
    return KernelMap.of_groups(inputs, outputs, geometry, Groups(*groups))


# Dynamo keeps this operator; AOTAutograd, export and make_fx decompose it into torch's operations.

torch.library.define(
    "insum_nn::kernel_map",
    "(Tensor indices, int[] spatial_shape, int batch_size, str kind, int[] kernel_size, int[] stride, int[] padding, "
    "int[] dilation, int[] output_padding) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _operator(
    indices: Tensor,
    spatial_shape: Sequence[int],
    batch_size: int,
    kind: str,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
) -> tuple[Tensor, ...]:
    moves = (kernel_size, stride, padding, dilation, output_padding)
    geometry = Geometry(_kind(kind), *(tuple(numbers) for numbers in moves))
    shape = output_shape(tuple(spatial_shape), geometry)
    outputs, near = map_in_graph(indices, (batch_size, *spatial_shape), geometry, shape)
    # The caller has the voxels where they stay as they are.
    kept = indices.new_empty(0, indices.shape[1]) if kind == "subm" else outputs
    return kept.clone() if kept is indices else kept, *groups_in_graph(near)[:5]


torch.library.impl("insum_nn::kernel_map", "CompositeImplicitAutograd", _operator)


def _kind(text: str) -> MapKind:
    return next(kind for kind in get_args(MapKind) if kind == text)

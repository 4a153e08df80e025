"""Kernel maps under `torch.compile`: proving voxels and building a map are one operator each.

How many voxels a map leads to depends on the values of those it starts from. The operators say so to the compiler,
which goes on with sizes that it does not know; nothing is read while it traces. `torch.compile(fullgraph=True)` takes
such operators as they are; without it they end a graph unless `torch._dynamo.config.capture_dynamic_output_shape_ops`
is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from insum_nn.structure.coordinates import Coordinates
from insum_nn.structure.kernel_map.build import build_kernel_map
from insum_nn.structure.kernel_map.geometry import Geometry, MapKind, output_shape
from insum_nn.structure.kernel_map.kernel_map import KernelMap
from insum_nn.structure.kernel_map.pairs import Groups

__all__ = ["kernel_map_of", "prove_sites"]

# What int32 can number. The compiler is told, for a statement asks whether its index tensors can address its operands.
_MOST = (1 << 31) - 1


def prove_sites(sites: Coordinates) -> Coordinates:
    """`sites.prove()`, also under `torch.compile`, where the proof takes place when the compiled code runs.

    Raises:
        InsumRangeError: a coordinate is negative or not below its extent.
        InsumFormatError: a site stands twice.
    """
    if not torch.compiler.is_compiling():
        return sites.prove()
    # What follows reads the operator's result, so that no part of it can go before the proof, or without it.
    proven = torch.ops.insum_nn.prove_sites(sites.indices, list(sites.spatial_shape), sites.batch_size)
    return Coordinates(proven, sites.spatial_shape, sites.batch_size, origin=sites.indices)


def kernel_map_of(inputs: Coordinates, geometry: Geometry, *, proven: bool = True) -> KernelMap:
    """`build_kernel_map`, also under `torch.compile`, where the voxels must be proven; see there.

    Raises:
        InsumRangeError: a voxel lies outside the grid.
        InsumFormatError: a voxel stands twice.
        InsumShapeError: the output's spatial shape is empty.
    """
    if not torch.compiler.is_compiling():
        return build_kernel_map(inputs, geometry, proven=proven)
    shape = output_shape(inputs.spatial_shape, geometry)
    indices, offset, in_index, out_index, filled = torch.ops.insum_nn.kernel_map(
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
    return KernelMap.of_groups(inputs, outputs, geometry, Groups(offset, in_index, out_index, filled, None))


@torch.library.custom_op("insum_nn::prove_sites", mutates_args=())
def _prove(indices: Tensor, spatial_shape: Sequence[int], batch_size: int) -> Tensor:
    Coordinates(indices, tuple(spatial_shape), batch_size).prove()
    return indices.clone()


@_prove.register_fake
def _prove_fake(indices: Tensor, spatial_shape: Sequence[int], batch_size: int) -> Tensor:
    return torch.empty_like(indices)


_Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("insum_nn::kernel_map", mutates_args=())
def _build(
    indices: Tensor,
    spatial_shape: Sequence[int],
    batch_size: int,
    kind: str,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    moves = (kernel_size, stride, padding, dilation, output_padding)
    geometry = Geometry(_kind(kind), *(tuple(numbers) for numbers in moves))
    inputs = Coordinates(indices, tuple(spatial_shape), batch_size)
    found = build_kernel_map(inputs, geometry, proven=True, by_table=False)
    # An operator's results share no memory, with one another or with its arguments.
    outputs = found.out_indices
    if kind == "subm":
        outputs = outputs.new_empty(0, outputs.shape[1])
    elif outputs is indices:
        outputs = outputs.clone()
    out_index = found.out_index.clone() if found.out_index is found.in_index else found.out_index
    return outputs, found.offset, found.in_index, out_index, found.filled


@_build.register_fake
def _build_fake(
    indices: Tensor, spatial_shape: Sequence[int], batch_size: int, kind: str, *moves: Sequence[int]
) -> _Parts:
    kernel_size, stride, padding, dilation, output_padding = (tuple(numbers) for numbers in moves)
    geometry = Geometry(_kind(kind), kernel_size, stride, padding, dilation, output_padding)
    context = torch.library.get_ctx()
    if kind == "subm":
        voxels = 0
    else:
        voxels = indices.shape[0] if geometry.is_pointwise else context.new_dynamic_size(max=_MOST)
    groups, slots = context.new_dynamic_size(max=_MOST), context.new_dynamic_size(max=_MOST)
    volume = geometry.volume
    return (
        indices.new_empty(voxels, indices.shape[1]),
        indices.new_empty(groups, dtype=torch.int32),
        indices.new_empty(groups, slots, dtype=torch.int32),
        indices.new_empty(groups, slots, dtype=torch.int32),
        indices.new_empty(volume, dtype=torch.int64),
    )


def _kind(text: str) -> MapKind:
    return next(kind for kind in get_args(MapKind) if kind == text)

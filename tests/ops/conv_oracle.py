"""Sparse convolution as torch's dense convolution of a grid with zeros, read at the voxels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from insum_nn.structure.coordinates import Coordinates
from insum_nn.structure.kernel_map import Geometry, MapKind


def geometry(
    kind: MapKind,
    kernel: Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | None = None,
    dilation: int | Sequence[int] = 1,
    output_padding: int | Sequence[int] = 0,
) -> Geometry:
    """A geometry with scalars repeated; a submanifold kernel lies with its middle cell on the voxel."""

    def each(value: int | Sequence[int]) -> tuple[int, ...]:
        return (value,) * len(kernel) if isinstance(value, int) else tuple(value)

    if padding is None:
        padding = [k // 2 * d for k, d in zip(kernel, each(dilation), strict=True)] if kind == "subm" else 0
    return Geometry(kind, tuple(kernel), each(stride), each(padding), each(dilation), each(output_padding))


def random_sites(
    shape: Sequence[int], batch: int, count: int, *, device: torch.device | str = "cpu", seed: int = 0
) -> Coordinates:
    """`count` distinct voxels of each grid, in no order."""
    generator = torch.Generator().manual_seed(seed)
    cells = int(torch.tensor(shape).prod())
    rows = []
    for entry in range(batch):
        flat = torch.randperm(cells, generator=generator)[: min(count, cells)]
        columns = torch.unravel_index(flat, tuple(shape))
        rows.append(torch.stack([torch.full_like(flat, entry), *columns], dim=1))
    indices = torch.cat(rows)[torch.randperm(sum(map(len, rows)), generator=generator)]
    return Coordinates(indices.int().to(device), tuple(shape), batch)


def to_dense(features: Tensor, sites: Coordinates) -> Tensor:
    """(batch, channels, x_1, .., x_d)."""
    columns = sites.indices.long().cpu().unbind(1)
    dense = features.new_zeros(sites.batch_size, *sites.spatial_shape, features.shape[1])
    return dense.index_put(columns, features).movedim(-1, 1)


def read(dense: Tensor, indices: Tensor) -> Tensor:
    """The rows of a channels-first grid at voxels."""
    return dense.movedim(1, -1)[indices.long().cpu().unbind(1)]


def dense_conv(
    features: Tensor, weight: Tensor, bias: Tensor | None, sites: Coordinates, how: Geometry, groups: int = 1
) -> Tensor:
    """The whole output grid, channels first, of weights (O, k.., I / groups)."""
    dense = to_dense(features, sites)
    if how.kind == "transpose":
        folded = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        kernel = folded.movedim(-1, 1).flatten(0, 1)
        run = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[len(how.kernel_size)]
        return run(dense, kernel, bias, how.stride, how.padding, how.output_padding, groups, how.dilation)
    before = list(how.padding)
    after = before
    if how.kind == "subm":
        spans = [(k - 1) * d for k, d in zip(how.kernel_size, how.dilation, strict=True)]
        after = [span - left for span, left in zip(spans, before, strict=True)]
    pads = [end for left, right in zip(reversed(before), reversed(after), strict=True) for end in (left, right)]
    return _conv(F.pad(dense, pads), weight.movedim(-1, 1), bias, how.stride, how.dilation, groups)


def _conv(
    dense: Tensor, kernel: Tensor, bias: Tensor | None, stride: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    ndim = dense.ndim - 2
    if ndim <= 3:
        run = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[ndim]
        return run(dense, kernel, bias, tuple(stride), 0, tuple(dilation), groups)
    # One dimension more is a sum of convolutions over slices along the first.
    extent = (dense.shape[2] - dilation[0] * (kernel.shape[2] - 1) - 1) // stride[0] + 1
    slices = []
    for place in range(extent):
        parts = [
            _conv(
                dense[:, :, place * stride[0] + k * dilation[0]],
                kernel[:, :, k],
                None,
                stride[1:],
                dilation[1:],
                groups,
            )
            for k in range(kernel.shape[2])
        ]
        slices.append(torch.stack(parts).sum(0))
    total = torch.stack(slices, dim=2)
    return total if bias is None else total + bias.reshape(-1, *(1,) * ndim)


def reached(sites: Coordinates, how: Geometry) -> Tensor:
    """Voxels that the kernel reaches from an active one, in lexicographic order."""
    ones = torch.ones(sites.num_sites, 1, dtype=torch.float64)
    weight = torch.ones(1, *how.kernel_size, 1, dtype=torch.float64)
    return (dense_conv(ones, weight, None, sites, how)[:, 0] > 0.5).nonzero()

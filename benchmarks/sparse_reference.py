"""Sparse convolutions in plain torch operators, with the class names of `spconv.pytorch`: the oracle of whole networks.

Every offset of a kernel is a gather, a dense product and an addition. Neighbours are found by binary search among the
voxels' keys. Nothing of the package that is measured is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["SparseConv3d", "SparseConvTensor", "SparseInverseConv3d", "SubMConv3d"]

Pairs = list[tuple[Tensor, Tensor]]
"""For each offset of a kernel the rows that are written, and the rows that are read."""


class SparseConvTensor:
    """Features of voxels.

    Attributes:
        features: (n, channels).
        indices: (n, 4): batch entry and coordinates.
        spatial_shape: extents of the grid.
        batch_size: grids in the batch.
        maps: kernel maps by `indice_key`, shared by all tensors made from one.
    """

    def __init__(self, features: Tensor, indices: Tensor, spatial_shape: Sequence[int], batch_size: int) -> None:
        self.features = features
        self.indices = indices.long()
        self.spatial_shape = list(spatial_shape)
        self.batch_size = batch_size
        self.maps: dict[str, tuple[Pairs, Tensor, list[int]]] = {}

    def replace_feature(self, features: Tensor) -> SparseConvTensor:
        """Return the same voxels with other features."""
        return self.over(features, self.indices, self.spatial_shape)

    def over(self, features: Tensor, indices: Tensor, spatial_shape: Sequence[int]) -> SparseConvTensor:
        """Return a tensor over other voxels that shares the kernel maps."""
        result = SparseConvTensor(features, indices, spatial_shape, self.batch_size)
        result.maps = self.maps
        return result


def _rows_at(indices: Tensor, wanted: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the row of each wanted voxel, or -1 where there is none."""
    extent = indices.new_tensor(shape)
    inside = ((wanted[:, 1:] >= 0) & (wanted[:, 1:] < extent)).all(1)

    def keys(voxels: Tensor) -> Tensor:
        batch, x, y, z = voxels.unbind(1)
        return ((batch * shape[0] + x) * shape[1] + y) * shape[2] + z

    ordered, order = keys(indices).sort()
    key = keys(wanted)
    place = torch.searchsorted(ordered, key).clamp_max(len(ordered) - 1)
    return torch.where(inside & (ordered[place] == key), order[place], -1)


def _pairs(table: Tensor) -> Pairs:
    """Turn (offset, out row) -> in row or -1 into pairs."""
    return [((rows >= 0).nonzero().squeeze(1), rows[rows >= 0]) for rows in table]


class _Convolution(nn.Module):
    """A kernel of `size` cells along each axis; the weight has spconv's layout."""

    def __init__(
        self, in_channels: int, out_channels: int, size: int, stride: int = 1, bias: bool = False, indice_key: str = ""
    ) -> None:
        super().__init__()
        if bias:
            raise ValueError("the reference convolutions have no bias")
        scale = (2 / (in_channels * min(size**3, 9))) ** 0.5
        self.size, self.stride, self.indice_key = size, stride, indice_key
        self.weight = nn.Parameter(torch.randn(out_channels, size, size, size, in_channels) * scale)

    def offsets(self, device: torch.device) -> Tensor:
        steps = torch.arange(self.size, device=device)
        return nn.functional.pad(torch.cartesian_prod(steps, steps, steps).reshape(-1, 3), (1, 0))

    def product(self, x: Tensor, pairs: Pairs, rows: int) -> Tensor:
        out = x.new_zeros(rows, self.weight.shape[0])
        kernels = self.weight.flatten(1, 3)
        for offset, (to, of) in enumerate(pairs):
            out = out.index_add(0, to, x.index_select(0, of) @ kernels[:, offset].T)
        return out


class SubMConv3d(_Convolution):
    """A submanifold convolution: the output's voxels are the input's."""

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        found = x.maps.get(self.indice_key)
        if found is None:
            offsets = self.offsets(x.indices.device)
            offsets[:, 1:] -= self.size // 2
            table = torch.stack([_rows_at(x.indices, x.indices + offset, x.spatial_shape) for offset in offsets])
            found = (_pairs(table), x.indices, x.spatial_shape)
            if self.indice_key:
                x.maps[self.indice_key] = found
        return x.replace_feature(self.product(x.features, found[0], len(x.indices)))


class SparseConv3d(_Convolution):
    """A convolution whose stride is its kernel's size: each voxel is read once."""

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        if self.stride != self.size:
            raise ValueError("the reference has strided convolutions whose stride is the kernel's size")
        coarse = torch.cat([x.indices[:, :1], x.indices[:, 1:] // self.stride], 1).unique(dim=0)
        shape = [extent // self.stride for extent in x.spatial_shape]
        corner = torch.cat([coarse[:, :1], coarse[:, 1:] * self.stride], 1)
        offsets = self.offsets(x.indices.device)
        pairs = _pairs(torch.stack([_rows_at(x.indices, corner + offset, x.spatial_shape) for offset in offsets]))
        x.maps[self.indice_key] = (pairs, x.indices, x.spatial_shape)
        return x.over(self.product(x.features, pairs, len(coarse)), coarse, shape)


class SparseInverseConv3d(_Convolution):
    """The transpose of the strided convolution of the same `indice_key`."""

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        pairs, indices, shape = x.maps[self.indice_key]
        swapped = [(of, to) for to, of in pairs]
        return x.over(self.product(x.features, swapped, len(indices)), indices, shape)

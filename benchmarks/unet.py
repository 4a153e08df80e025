"""A sparse U-Net of SpUNet's shape, whose layers come from any module with the classes of `spconv.pytorch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["UNet"]


class _Block(nn.Module):
    """Two submanifold convolutions and a shortcut."""

    def __init__(self, sparse: Any, read: int, width: int, key: str) -> None:
        super().__init__()
        self.conv1 = sparse.SubMConv3d(read, width, 3, bias=False, indice_key=key)
        self.norm1 = nn.BatchNorm1d(width)
        self.conv2 = sparse.SubMConv3d(width, width, 3, bias=False, indice_key=key)
        self.norm2 = nn.BatchNorm1d(width)
        self.shortcut = None if read == width else nn.Linear(read, width, bias=False)

    def forward(self, x: Any) -> Any:
        y = self.conv1(x)
        y = self.conv2(y.replace_feature(self.norm1(y.features).relu()))
        kept = x.features if self.shortcut is None else self.shortcut(x.features)
        return y.replace_feature((self.norm2(y.features) + kept).relu())


class UNet(nn.Module):
    """A sparse U-Net of the shape of Pointcept's SpUNet: four halvings, 55 convolutions, widths from 32 to 256.

    Args:
        sparse: module with the classes of `spconv.pytorch`.
        in_channels: features of a voxel.
        classes: labels.
        depths: blocks at each of the four resolutions down and up.
        planes: their channels.
        stem: channels of the first convolution, whose kernel has 5 cells along each axis.
    """

    def __init__(
        self,
        sparse: Any,
        in_channels: int,
        classes: int,
        depths: Sequence[int] = (2, 3, 4, 6, 2, 2, 2, 2),
        planes: Sequence[int] = (32, 64, 128, 256, 256, 128, 96, 96),
        stem: int = 32,
    ) -> None:
        super().__init__()
        self.tensor = sparse.SparseConvTensor
        self.stem = sparse.SubMConv3d(in_channels, stem, 5, bias=False, indice_key="stem")
        self.stem_norm = nn.BatchNorm1d(stem)
        self.down, self.down_norms, self.encoder = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        self.up, self.up_norms, self.decoder = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        widths = [stem]
        for level in range(4):
            read = widths[-1]
            self.down.append(
                sparse.SparseConv3d(read, planes[level], 2, stride=2, bias=False, indice_key=f"down{level}")
            )
            self.down_norms.append(nn.BatchNorm1d(planes[level]))
            self.encoder.append(self._blocks(sparse, planes[level], planes[level], depths[level], f"level{level + 1}"))
            widths.append(planes[level])
        read = widths.pop()
        for level in reversed(range(4)):
            width, kept = planes[7 - level], widths.pop()
            self.up.append(sparse.SparseInverseConv3d(read, width, 2, bias=False, indice_key=f"down{level}"))
            self.up_norms.append(nn.BatchNorm1d(width))
            self.decoder.append(self._blocks(sparse, width + kept, width, depths[7 - level], f"level{level}"))
            read = width
        self.head = nn.Linear(read, classes)

    def _blocks(self, sparse: Any, read: int, width: int, count: int, key: str) -> nn.Sequential:
        return nn.Sequential(*(_Block(sparse, read if n == 0 else width, width, key) for n in range(count)))

    def forward(self, features: Tensor, indices: Tensor, shape: Sequence[int], batch_size: int) -> Tensor:
        """Return the logits of every voxel, (n, classes)."""
        y = self.stem(self.tensor(features, indices, list(shape), batch_size))
        y = y.replace_feature(self.stem_norm(y.features).relu())
        kept: list[Any] = []
        for down, norm, blocks in zip(self.down, self.down_norms, self.encoder, strict=True):
            kept.append(y)
            y = down(y)
            y = blocks(y.replace_feature(norm(y.features).relu()))
        for up, norm, blocks in zip(self.up, self.up_norms, self.decoder, strict=True):
            y = up(y)
            joined = torch.cat([norm(y.features).relu(), kept.pop().features], 1)
            y = blocks(y.replace_feature(joined))
        return self.head(y.features)

"""MinkUNet: a U-shaped segmentation network of residual blocks over sparse grids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from insum_nn.errors import InsumShapeError
from insum_nn.layers.voxel.conv import SparseConvolution
from insum_nn.layers.voxel.on_features import on_features
from insum_nn.layers.voxel.sequential import SparseModule, SparseSequential
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor

__all__ = [
    "MinkUNet",
    "MinkUNet14",
    "MinkUNet18",
    "MinkUNet34",
    "MinkUNet50",
    "MinkUNet101",
    "SparseBasicBlock",
    "SparseBottleneck",
]

_LEVELS = 4


class _Residual(SparseModule):
    """Convolutions in a row, each normalised, and a shortcut around all of them.

    Layers are named `conv1`, `norm1`, `conv2` and so on, and the shortcut `downsample`.

    Args:
        in_channels: channels read.
        kernels: of each convolution.
        widths: channels that each convolution writes.
        ndim: spatial dimensions.
        indice_key: name of the map of the kernels wider than one cell.
    """

    EXPANSION: ClassVar[int] = 1

    def __init__(
        self, in_channels: int, kernels: Sequence[int], widths: Sequence[int], ndim: int, indice_key: str | None
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "subm": True}
        self._depth = len(widths)
        read = in_channels
        for place, (kernel, width) in enumerate(zip(kernels, widths, strict=True), 1):
            key = None if kernel == 1 else indice_key
            self.add_module(f"conv{place}", SparseConvolution(ndim, read, width, kernel, indice_key=key, **options))
            self.add_module(f"norm{place}", nn.BatchNorm1d(width))
            read = width
        self.relu = nn.ReLU()
        self.downsample: SparseSequential | None = None
        if in_channels != read:
            shortcut = SparseConvolution(ndim, in_channels, read, 1, **options)
            self.downsample = SparseSequential(shortcut, nn.BatchNorm1d(read))

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        """Convolve and add the shortcut."""
        y = x
        for place in range(1, self._depth + 1):
            y = on_features(getattr(self, f"norm{place}"), getattr(self, f"conv{place}")(y))
            if place < self._depth:
                y = on_features(self.relu, y)
        shortcut = x if self.downsample is None else self.downsample(x)
        return y.replace_feature(self.relu(y.features + shortcut.features))


class SparseBasicBlock(_Residual):
    """Two 3-wide submanifold convolutions and a shortcut, as in a residual network's basic block.

    Args:
        in_channels: channels read.
        planes: channels written; where they differ, the shortcut is a pointwise convolution.
        ndim: spatial dimensions.
        indice_key: name of the map, shared by all blocks of a resolution.
    """

    def __init__(self, in_channels: int, planes: int, *, ndim: int = 3, indice_key: str | None = None) -> None:
        super().__init__(in_channels, (3, 3), (planes, planes), ndim, indice_key)


class SparseBottleneck(_Residual):
    """A 3-wide submanifold convolution between two pointwise ones, and a shortcut, as in a residual network's.

    Args:
        in_channels: channels read.
        planes: channels between the pointwise convolutions; four times as many are written.
        ndim: spatial dimensions.
        indice_key: name of the map, shared by all blocks of a resolution.
    """

    EXPANSION = 4

    def __init__(self, in_channels: int, planes: int, *, ndim: int = 3, indice_key: str | None = None) -> None:
        super().__init__(in_channels, (1, 3, 1), (planes, planes, self.EXPANSION * planes), ndim, indice_key)


class MinkUNet(nn.Module):
    """A U-Net over sparse grids: four halvings of the resolution, four inverse convolutions back, skip connections.

    Source: Choy, Gwak, Savarese, "4D Spatio-Temporal ConvNets: Minkowski Convolutional Neural Networks" (CVPR 2019).
    Module names follow the published code, so that `insum_nn.structure.conv_weights.convert_state_dict` loads its
    weights.

    A grid whose extents are no multiples of 16 is enlarged to such, so that no voxel falls off its upper edge.

    Args:
        in_channels: features per voxel.
        out_channels: classes.
        layers: blocks at each of the four resolutions down and the four up.
        planes: their channels, which bottleneck blocks multiply by four on their way out.
        init_dim: channels of the first convolution.
        ndim: spatial dimensions.

    >>> model = MinkUNet14(4, 13)
    >>> sum(parameter.numel() for parameter in model.parameters())
    11584173
    """

    __call__: Callable[..., SparseConvTensor]
    LAYERS: ClassVar[tuple[int, ...]] = (1,) * 8
    PLANES: ClassVar[tuple[int, ...]] = (32, 64, 128, 256, 256, 128, 96, 96)
    BLOCK: ClassVar[type[SparseBasicBlock] | type[SparseBottleneck]] = SparseBasicBlock

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        layers: Sequence[int] | None = None,
        planes: Sequence[int] | None = None,
        init_dim: int = 32,
        ndim: int = 3,
    ) -> None:
        super().__init__()
        depths = self.LAYERS if layers is None else tuple(layers)
        widths = self.PLANES if planes is None else tuple(planes)
        for name, values in (("layers", depths), ("planes", widths)):
            if len(values) != 2 * _LEVELS or any(v < 1 for v in values):
                raise InsumShapeError(
                    f"MinkUNet: '{name}' is {list(values)}",
                    details=[f"expected {2 * _LEVELS} positive numbers: four resolutions down, four up"],
                    fix=f"pass {2 * _LEVELS} numbers.",
                    argument=name,
                    got=values,
                )
        self.ndim = ndim
        self.relu = nn.ReLU()
        self.conv0p1s1 = SparseConvolution(ndim, in_channels, init_dim, 5, bias=False, subm=True)
        self.bn0 = nn.BatchNorm1d(init_dim)
        skips = [init_dim]
        width = init_dim
        for level in range(_LEVELS):
            stride = 2**level
            down = SparseConvolution(ndim, width, width, 2, 2, bias=False, indice_key=f"down{level}")
            self.add_module(f"conv{level + 1}p{stride}s2", down)
            self.add_module(f"bn{level + 1}", nn.BatchNorm1d(width))
            self.add_module(f"block{level + 1}", self._blocks(width, widths[level], depths[level], 2 * stride))
            width = widths[level] * self.BLOCK.EXPANSION
            skips.append(width)
        for step in range(_LEVELS):
            level = _LEVELS - 1 - step
            stride, out = 2 ** (level + 1), widths[_LEVELS + step]
            up = SparseConvolution(ndim, width, out, 2, bias=False, inverse=True, indice_key=f"down{level}")
            self.add_module(f"convtr{_LEVELS + step}p{stride}s2", up)
            self.add_module(f"bntr{_LEVELS + step}", nn.BatchNorm1d(out))
            joined = out + skips[level]
            depth = depths[_LEVELS + step]
            self.add_module(f"block{_LEVELS + 1 + step}", self._blocks(joined, out, depth, stride // 2))
            width = out * self.BLOCK.EXPANSION
        self.final = SparseConvolution(ndim, width, out_channels, 1, subm=True)

    def _blocks(self, in_channels: int, planes: int, count: int, stride: int) -> SparseSequential:
        reads = [in_channels] + [planes * self.BLOCK.EXPANSION] * (count - 1)
        key = f"subm{stride}"
        return SparseSequential(*(self.BLOCK(read, planes, ndim=self.ndim, indice_key=key) for read in reads))

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        """Segment.

        Args:
            x: (n, in_channels) features.

        Returns:
            (n, out_channels) logits over the same voxels, in the same order.
        """
        multiple = 2**_LEVELS
        y = x.with_spatial_shape([-(-extent // multiple) * multiple for extent in x.spatial_shape]).shadow_copy()
        # Maps of another network over the same voxels may stand under the same keys.
        y.indice_dict = {}
        y = self._activate("bn0", self.conv0p1s1(y))
        skips = [y]
        for level in range(_LEVELS):
            y = self._activate(f"bn{level + 1}", self._run(f"conv{level + 1}p{2**level}s2", y))
            y = self._run(f"block{level + 1}", y)
            skips.append(y)
        for step in range(_LEVELS):
            level = _LEVELS - 1 - step
            y = self._run(f"convtr{_LEVELS + step}p{2 ** (level + 1)}s2", y)
            y = self._activate(f"bntr{_LEVELS + step}", y)
            y = y.replace_feature(torch.cat([y.features, skips[level].features], dim=1))
            y = self._run(f"block{_LEVELS + 1 + step}", y)
        return x.replace_feature(self.final(y).features)

    def _run(self, name: str, x: SparseConvTensor) -> SparseConvTensor:
        return getattr(self, name)(x)

    def _activate(self, norm: str, x: SparseConvTensor) -> SparseConvTensor:
        return on_features(self.relu, on_features(getattr(self, norm), x))


class MinkUNet14(MinkUNet):
    """One block at each resolution."""

    LAYERS = (1, 1, 1, 1, 1, 1, 1, 1)


class MinkUNet18(MinkUNet):
    """Two blocks at each resolution."""

    LAYERS = (2, 2, 2, 2, 2, 2, 2, 2)


class MinkUNet34(MinkUNet):
    """Two to six blocks at each resolution."""

    LAYERS = (2, 3, 4, 6, 2, 2, 2, 2)


class MinkUNet50(MinkUNet):
    """The depths of `MinkUNet34` in bottleneck blocks."""

    LAYERS = (2, 3, 4, 6, 2, 2, 2, 2)
    BLOCK = SparseBottleneck


class MinkUNet101(MinkUNet):
    """Two to twenty-three bottleneck blocks at each resolution."""

    LAYERS = (2, 3, 4, 23, 2, 2, 2, 2)
    BLOCK = SparseBottleneck

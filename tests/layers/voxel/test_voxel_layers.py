"""The case of every layer of sparse voxels, against pairs of voxels that are found in a dictionary."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from insum_nn.compiler.options import Options
from insum_nn.layers import spconv
from insum_nn.layers.spconv import SparseConvTensor
from tests.layers.layer_case import Inputs, LayerCase, real

# Each of 48 cells.
SHAPES = {1: [48], 2: [8, 6], 3: [4, 3, 4], 4: [2, 3, 2, 4]}
BATCH = 64
Site = tuple[int, ...]


def pairs(
    kind: str, sites: list[Site], shape: Sequence[int], kernel: int, stride: int
) -> tuple[list[Site], list[tuple[int, int, int]]]:
    """The voxels of the output, and (input, output, cell of the kernel) of each product."""
    cells = [*itertools.product(range(kernel), repeat=len(shape))]
    found: list[tuple[int, Site, int]] = []
    for row, (entry, *site) in enumerate(sites):
        for number, cell in enumerate(cells):
            if kind == "SubM":
                out = [x - c + kernel // 2 for x, c in zip(site, cell, strict=True)]
            elif kind == "Transpose":
                out = [x * stride + c for x, c in zip(site, cell, strict=True)]
            elif any((x - c) % stride or x < c for x, c in zip(site, cell, strict=True)):
                continue
            else:
                out = [(x - c) // stride for x, c in zip(site, cell, strict=True)]
                if any(o * stride + kernel > extent for o, extent in zip(out, shape, strict=True)):
                    continue
            found.append((row, (entry, *out), number))
    outputs = sites if kind == "SubM" else sorted({out for _, out, _ in found})
    rows = {site: row for row, site in enumerate(outputs)}
    return outputs, [(row, rows[out], number) for row, out, number in found if out in rows]


def summed(x: Tensor, weight: Tensor, entries: list[tuple[int, int, int]], count: int, groups: int = 1) -> Tensor:
    """The sum of products over pairs, of weights (O, cells, I / groups)."""
    read, write, cell = torch.tensor(entries, dtype=torch.int64).reshape(-1, 3).unbind(1)
    parts = zip(x.chunk(groups, 1), weight.chunk(groups, 0), strict=True)
    found = torch.cat([torch.einsum("pi,poi->po", part[read], w[:, cell].transpose(0, 1)) for part, w in parts], 1)
    return found.new_zeros(count, found.shape[1]).index_add(0, write, found)


class VoxelCase(LayerCase):
    """A subclass says how to make the layer, and what is made of features and sites.

    Attributes:
        NDIM: of the grid.
        CHANNELS: of the input.
    """

    # As spconv's pools and convolutions do.
    AUTOCAST = torch.bfloat16
    NDIM: ClassVar[int] = 3
    CHANNELS: ClassVar[int] = 2
    sizes = ({0: "voxels"}, {0: "voxels"})
    ERRORS: ClassVar[Mapping[str, Any]] = {
        "no voxel": (lambda x, sites: (x, sites + 7), r"'indices' holds voxels outside the grid(.|\n)*indices\[:,1\]"),
        "a voxel twice": (
            lambda x, sites: (x, sites[:1].expand_as(sites)),
            "'indices' holds the same voxel more than once",
        ),
        "fewer sites": (lambda x, sites: (x, sites[1:]), "'indices' must have one row .* per row of features"),
    }
    NOT_PROMISED: ClassVar[Mapping[str, str]] = {
        "test_traced_graphs_take_any_size": "how many voxels a layer makes is not known to a trace; test_conv_jit.py",
        "test_results_on_the_meta_device": "voxels are found by their values",
        "test_functions_of_torch": "a batch of clouds is one cloud, with a number for each",
    }

    def inputs(self, n: int) -> Inputs:
        # The batch grows with the voxels, so that a grid always has room for them.
        cells = torch.randperm(2 * n, generator=torch.Generator().manual_seed(0))[:n].sort().values
        where, place = [], cells
        for extent in reversed(SHAPES[self.NDIM]):
            where.insert(0, place % extent)
            place = place // extent
        return real(0, n, self.CHANNELS), torch.stack([place, *where], 1).int()

    def call(self, layer: nn.Module, features: Tensor, sites: Tensor) -> Tensor:  # type: ignore[override]
        result = self.of(layer, SparseConvTensor(features, sites, SHAPES[self.NDIM], BATCH))
        return result if isinstance(result, Tensor) else result.features

    def of(self, layer: nn.Module, cloud: SparseConvTensor) -> Any:
        return layer(cloud)


class ConvCase(VoxelCase):
    """A convolution: `KIND`, its class without the dimension, and what it is made with."""

    KIND: ClassVar[str]
    ARGUMENTS: ClassVar[tuple[Any, ...]]
    MORE: ClassVar[dict[str, Any]] = {}

    def make(self, options: Options) -> nn.Module:
        return getattr(spconv, f"{self.KIND}{self.NDIM}d")(*self.ARGUMENTS, **self.MORE, options=options)

    def oracle(self, layer: Any, *inputs: Tensor) -> Tensor:
        x, sites = inputs
        kernel, stride = layer.kernel_size[0], layer.stride[0]
        kind = self.KIND.removeprefix("Sparse").replace("Conv", "")
        outputs, entries = pairs(kind, [*map(tuple, sites.tolist())], SHAPES[self.NDIM], kernel, stride)
        weight = layer.dense_weight.flatten(1, -2)
        return summed(x, weight, entries, len(outputs), layer.groups) + layer.bias


class TestSubMConv3d(ConvCase):
    KIND, ARGUMENTS = "SubMConv", (2, 3, 3)


class TestSubMConv3d_groups(TestSubMConv3d):
    VARIANT, CHANNELS, ARGUMENTS, MORE = "groups", 4, (4, 4, 3), {"groups": 2}


class TestSubMConv3d_pointwise(TestSubMConv3d):
    VARIANT, ARGUMENTS = "pointwise", (2, 2, 1)
    # Where voxels lie does not matter.
    ERRORS: ClassVar[Mapping[str, Any]] = {"fewer sites": VoxelCase.ERRORS["fewer sites"]}


class TestSparseConv3d(ConvCase):
    KIND, ARGUMENTS = "SparseConv", (2, 3, 2, 2)


class TestSparseConvTranspose3d(ConvCase):
    KIND, ARGUMENTS = "SparseConvTranspose", (2, 3, 2, 2)


class TestSparseInverseConv3d(VoxelCase):
    def make(self, options: Options) -> nn.Module:
        down, up = (getattr(spconv, f"{kind}{self.NDIM}d") for kind in ("SparseConv", "SparseInverseConv"))
        return spconv.SparseSequential(
            down(2, 2, 2, 2, indice_key="d", options=options), up(2, 2, 2, "d", options=options)
        )

    def oracle(self, layer: Any, *inputs: Tensor) -> Tensor:
        x, sites = inputs
        down, up = layer
        outputs, entries = pairs("", [*map(tuple, sites.tolist())], SHAPES[self.NDIM], 2, 2)
        middle = summed(x, down.weight.flatten(1, -2), entries, len(outputs)) + down.bias
        turned = [(out, row, cell) for row, out, cell in entries]
        return summed(middle, up.weight.flatten(1, -2), turned, len(sites)) + up.bias


class PoolCase(VoxelCase):
    KIND: ClassVar[str]

    def make(self, options: Options) -> nn.Module:
        return getattr(spconv, f"{self.KIND}{self.NDIM}d")(2, 2, options=options)

    def oracle(self, layer: Any, *inputs: Tensor) -> Tensor:
        x, sites = inputs
        outputs, entries = pairs("", [*map(tuple, sites.tolist())], SHAPES[self.NDIM], 2, 2)
        members = [x[[row for row, out, _ in entries if out == at]] for at in range(len(outputs))]
        if self.KIND == "SparseMaxPool":
            parts = [rows.amax(0).clamp(min=0) for rows in members]
        else:
            parts = [rows.mean(0) for rows in members]
        return torch.stack(parts) if parts else x[:0] * 1


class TestSparseMaxPool3d(PoolCase):
    KIND = "SparseMaxPool"


class TestSparseAvgPool3d(PoolCase):
    KIND = "SparseAvgPool"


class TestSparseGlobalMaxPool(VoxelCase):
    def make(self, options: Options) -> nn.Module:
        return getattr(spconv, type(self).title())(options=options)

    def oracle(self, layer: Any, *inputs: Tensor) -> Tensor:
        x, sites = inputs
        clouds = [x[sites[:, 0] == entry] for entry in range(BATCH)]
        maxima = "Max" in type(self).title()
        return torch.stack([(c.amax(0) if maxima else c.mean(0)) if len(c) else c.sum(0) for c in clouds])


class TestSparseGlobalAvgPool(TestSparseGlobalMaxPool):
    # It multiplies by shares in float32.
    AUTOCAST = torch.float32


class WithoutOptions(VoxelCase):
    """Layers that take no options, since peers' do not."""

    def make(self, options: Options) -> nn.Module:
        return getattr(spconv, type(self).title())()


class TestToDense(WithoutOptions):
    def oracle(self, layer: Any, *inputs: Tensor) -> Tensor:
        x, sites = inputs
        grid = x.new_zeros(BATCH, *SHAPES[self.NDIM], 2).index_put(sites.long().unbind(1), x)
        return grid.movedim(-1, 1)


class TestAddTableMisaligned(WithoutOptions):
    NOT_PROMISED: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("test_compiled", "test_exported_graphs_take_any_size"), "it reads which voxels its inputs share"
    )

    def of(self, layer: nn.Module, cloud: SparseConvTensor) -> Any:
        corner = SparseConvTensor(cloud.features[:2], cloud.indices[:2], cloud.spatial_shape, BATCH)
        return layer([cloud, corner])

    def oracle(self, layer: Any, *inputs: Tensor) -> Tensor:
        x, _ = inputs
        return torch.cat([2 * x[:2], x[2:]])


# Grids of other dimensions run the same code.
OF_OTHER_DIMENSIONS = ("test_values_and_gradients", "test_other_sizes_and_strides", "test_state_and_copies")


def _of_dimension(case: type[Any], ndim: int) -> type[Any]:
    name = f"{case.__name__.removesuffix('3d')}{ndim}d"
    body = {"NDIM": ndim, "ONLY": OF_OTHER_DIMENSIONS, "ELSEWHERE": False, "__module__": __name__}
    return type(name, (case,), body)


_OF_3D = (TestSubMConv3d, TestSparseConv3d, TestSparseConvTranspose3d, TestSparseInverseConv3d)
_OTHERS = [_of_dimension(case, n) for case in (*_OF_3D, TestSparseMaxPool3d, TestSparseAvgPool3d) for n in (1, 2, 4)]
globals().update({case.__name__: case for case in _OTHERS})

"""The case of every pruned layer, against torch's own product or convolution with the dense weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from insum_nn import layers
from insum_nn.compiler.options import Options
from tests.layers.layer_case import Inputs, LayerCase, batch, real


class SparseCase(LayerCase):
    ERRORS: ClassVar[Mapping[str, Any]] = {
        "another width": (lambda x: (x[:, :-1],), r"'input' has \d+ features, the weight reads \d+\n.*X\["),
        "another dtype": (lambda x: (x.float(),), "'input' is torch.float32, the weight is torch.float64"),
        "integers": (lambda x: (x.long(),), "'input' must be floating, got torch.int64"),
    }


class TestSparseLinear(SparseCase):
    inputs, sizes = batch(5)

    def make(self, options: Options) -> nn.Module:
        return layers.SparseLinear(5, 4, density=0.5, options=options)

    def oracle(self, layer: Any, *inputs: Tensor) -> Tensor:
        weight = layer.weight.new_zeros(4, 5).masked_scatter(layer.mask, layer.weight)
        return F.linear(*inputs, weight, layer.bias)


class TestBlockSparseLinear(SparseCase):
    inputs, sizes = batch(5)

    def make(self, options: Options) -> nn.Module:
        return layers.BlockSparseLinear(5, 4, block_shape=2, density=0.5, options=options)

    def oracle(self, layer: Any, *inputs: Tensor) -> Tensor:
        m, k = layer.out_features, layer.in_features
        cells = layer.weight.new_zeros(*layer.mask.shape, *layer.weight.shape[1:])
        cells = cells.index_put(layer.mask.nonzero().unbind(1), layer.weight)
        weight = cells.transpose(1, 2).flatten(2).flatten(0, 1)[:m, :k]
        return F.linear(*inputs, weight, layer.bias)


class TestBlockSparseLinear_whole(TestBlockSparseLinear):
    VARIANT = "stored whole"
    inputs, sizes = batch(32)

    def make(self, options: Options) -> nn.Module:
        return layers.BlockSparseLinear(32, 16, block_shape=16, options=options)


class TestBlockSparseLinear_oblong(TestBlockSparseLinear):
    VARIANT = "oblong blocks"
    inputs, sizes = batch(64)

    def make(self, options: Options) -> nn.Module:
        return layers.BlockSparseLinear(64, 32, block_shape=(16, 32), density=0.5, options=options)


class TestBlockSparseLinear_grouped(TestBlockSparseLinear):
    VARIANT = "grouped"
    inputs, sizes = batch(6)

    def make(self, options: Options) -> nn.Module:
        return layers.BlockSparseLinear(6, 4, block_shape=2, density=0.7, group_size=2, options=options)


class TestPrunedConv2d(LayerCase):
    inputs, sizes = batch((2, 3, 3))
    ARGUMENTS: ClassVar[dict[str, Any]] = {"padding": 1}
    ERRORS: ClassVar[Mapping[str, Any]] = {
        "another width": (lambda x: (x[:, :-1],), r"'input' must be a batch with 2 channels\n.*I\["),
        "another dtype": (lambda x: (x.float(),), "'input' is torch.float32, the weight is torch.float64"),
        "two axes less": (lambda x: (x[0, 0],), "'input' must be a batch with 2 channels"),
    }

    def make(self, options: Options) -> nn.Module:
        kind = getattr(layers, type(self).title().partition(",")[0])
        return kind(2, 3, **{"kernel_size": 2, **self.ARGUMENTS}, density=0.5, options=options)

    def oracle(self, layer: Any, *inputs: Tensor) -> Tensor:
        (x,) = inputs
        weight = layer.weight.new_zeros(layer.mask.shape).masked_scatter(layer.mask, layer.weight)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[x.ndim - 3]
        how = {name: value for name, value in self.ARGUMENTS.items() if name != "kernel_size"}
        return convolve(x, weight, layer.bias, **how)


class TestPrunedConv1d(TestPrunedConv2d):
    inputs, sizes = batch((2, 5))


class TestPrunedConv3d(TestPrunedConv2d):
    inputs, sizes = batch((2, 3, 2, 3))
    ARGUMENTS: ClassVar[dict[str, Any]] = {}


class TestPrunedConv2d_strided(TestPrunedConv2d):
    VARIANT, ELSEWHERE = "strided", False
    ARGUMENTS: ClassVar[dict[str, Any]] = {"kernel_size": 3, "padding": 1, "stride": 2}
    sizes = ({0: "batch", 2: "height", 3: "width"},)

    def inputs(self, n: int) -> Inputs:
        return (real(0, n, 2, min(n, 30) + 3, min(n, 40) + 5),)

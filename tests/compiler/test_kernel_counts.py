"""How many kernels networks need for an H200, forward and backward: as many as a first step has to compile."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.clouds import room
from benchmarks.unet import UNet
from insum_nn.compiler.kernels.ahead import Collection, collect
from insum_nn.layers import BlockSparseLinear, GCNConv, spconv
from tests.pretended_gpu import H200, pretended_gpu


def kernels(run: Callable[[], Tensor]) -> Collection:
    with pretended_gpu(), collect(H200) as collection:
        out = run()
        torch.autograd.backward(out, torch.ones_like(out))
    assert collection.launches >= len(collection.codes) > 0
    return collection


@pytest.mark.parametrize("widths", [(128, 128, 128, 10), (1433, 16, 7), (64, 256, 96, 40), (100, 50, 3), (1, 1)])
@pytest.mark.parametrize("nodes", [300, 20_000])
def test_a_gcn_has_at_most_eight(widths: tuple[int, ...], nodes: int):
    edges = torch.randint(nodes, (2, 8 * nodes))
    layers = nn.ModuleList(GCNConv(a, b) for a, b in itertools.pairwise(widths))

    def run() -> Tensor:
        x = torch.randn(nodes, widths[0])
        for layer in layers:
            x = layer(x, edges).relu()
        return x

    assert len(kernels(run).codes) <= 8


@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_block_sparse_linear_has_at_most_six(block: int, dtype: torch.dtype):
    layer = BlockSparseLinear(1024, 2048, block, density=0.05).to(dtype)
    x = torch.randn(512, 1024, dtype=dtype, requires_grad=True)
    assert len(kernels(lambda: layer(x)).codes) <= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "most"),
    [
        (torch.float32, 20),
        # The target is 20; docs/performance.md says why each is separate.
        (torch.float16, 29),
    ],
    ids=str,
)
def test_a_network_of_many_widths(dtype: torch.dtype, most: int):
    points = room(100, 25, 6)
    indices = torch.cat([torch.zeros(len(points), 1), points], 1).int()
    shape = [-(-(int(extent) + 1) // 16) * 16 for extent in points.amax(0)]
    model, features = UNet(spconv, 6, 13).to(dtype), torch.randn(len(points), 6, dtype=dtype)
    found = kernels(lambda: model(features, indices, shape, 1))
    assert found.launches > 150
    # A first step waits for those of its sums; until those of its maps are there, torch's operators build maps.
    sums = [code for code in found.codes if "tl.dot" in code.text or "float" in code.text]
    assert len(sums) <= most
    # Those of maps by a grid, by a search, and of strided ones; each for words and for bytes.
    assert len(found.codes) - len(sums) <= 11

"""Layers equal the peers that they are compared with, and a fault in one is seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from insum_nn.errors import InsumError, InsumShapeError
from insum_nn.layers import BlockSparseLinear, SparseConvTensor
from insum_nn.layers.spconv import SparseConv3d, SparseInverseConv3d, SparseSequential, SubMConv3d
from insum_nn.testing.comparison import REFERENCES, Reference, compare_layers
from insum_nn.testing.tolerances import tolerance

Case = tuple[nn.Module, tuple[Any, ...], dict[str, int]]


def cloud(channels: int) -> SparseConvTensor:
    sites = (torch.rand(2, 8, 8, 8) < 0.2).nonzero().int()
    return SparseConvTensor(torch.randn(len(sites), channels), sites, [8, 8, 8], 2)


def gcn() -> Case:
    pytest.importorskip("torch_geometric")
    from insum_nn.datasets import karate_club
    from insum_nn.models import GCN

    graph = karate_club()
    model = GCN(graph.num_features, 8, num_layers=3, out_channels=4).eval()
    return model, (graph.x, graph.edge_index), {"GCNConv": 3}


def points() -> Case:
    model = SparseSequential(
        SubMConv3d(3, 4, 5),
        SubMConv3d(4, 4, 3, dilation=2, bias=False),
        SparseConv3d(4, 6, 2, 2, indice_key="down"),
        SparseInverseConv3d(6, 5, 2, indice_key="down"),
    )
    return model, (cloud(3),), {"SubMConv3d": 2, "SparseConv3d": 1, "SparseInverseConv3d": 1}


def minkunet() -> Case:
    from insum_nn.models import MinkUNet

    model = MinkUNet(3, 5, planes=(4,) * 8, init_dim=4).eval()
    return model, (cloud(3),), {"SubMConv3d": 22, "SparseConv3d": 4, "SparseInverseConv3d": 4}


def equivariant() -> Case:
    pytest.importorskip("e3nn")
    from insum_nn.models import TetrisClassifier, tetris_pieces

    positions, batch, labels = tetris_pieces()
    model = TetrisClassifier(num_features=2, lmax=1, num_layers=2)
    return model, (positions, batch, len(labels)), {"TensorProductConv": 2, "ElementwiseTensorProduct": 1}


def atoms() -> Case:
    """The convolutions of NequIP keep their features' components outside of the copies."""
    pytest.importorskip("e3nn")
    from insum_nn.models import NequIP

    model = NequIP([29, 79], cutoff=5.0, num_layers=2, num_features=4, lmax=1, radial_hidden=(8,))
    receivers, senders = torch.randint(6, (2, 20))
    positions, species = torch.randn(6, 3), torch.full((6,), 29)
    counts = {"TensorProductConv": 2, "FullyConnectedTensorProduct": 2, "ElementwiseTensorProduct": 1}
    return model, (positions, species, receivers, senders, torch.ones(20, 3)), counts


class Products(nn.Module):
    """Tensor products of other kinds, one of them normalised in another way than e3nn's default."""

    def __init__(self) -> None:
        from insum_nn.layers import FullyConnectedTensorProduct, TensorProduct, TensorSquare

        super().__init__()
        irreps = "4x0e + 3x1o"
        self.full = FullyConnectedTensorProduct(irreps, irreps, irreps, path_normalization="path")
        self.square = TensorSquare(irreps, irreps)
        rows = [(0, 0, 0, "uuu", True, 2.0), (0, 1, 1, "uvv", True, 0.5), (1, 1, 0, "uvuv", False)]
        self.mixed = TensorProduct(irreps, irreps, "4x0e + 3x1o", rows[:2], irrep_normalization="norm")

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(self.full(x, x), self.square(x))


def products() -> Case:
    pytest.importorskip("e3nn")
    counts = {"FullyConnectedTensorProduct": 1, "TensorSquare": 1, "TensorProduct": 1}
    return Products(), (torch.randn(5, 13),), counts


def blocks() -> Case:
    model = nn.Sequential(BlockSparseLinear(37, 21, block_shape=(8, 16), density=0.6), nn.ReLU())
    return model, (torch.randn(3, 5, 37),), {"BlockSparseLinear": 1}


@pytest.mark.parametrize("case", [gcn, points, minkunet, equivariant, atoms, products, blocks])
def test_layers_equal_their_peers_and_a_fault_is_seen(case: Callable[[], Case]):
    torch.manual_seed(0)
    model, inputs, counts = case()
    found = compare_layers(model, *inputs)
    assert found.layers == counts
    assert found.largest > 0.1
    assert found.relative <= tolerance(torch.float32, "sum")
    assert all(name in str(found) for name in counts)
    # The same layers with one of them bent. A hook that was there before is called before: its result is compared.
    layer = [module for module in model.modules() if type(module).__name__ in {*counts, "SparseConvolution"}][-1]
    layer.register_forward_hook(bent)
    assert compare_layers(model, *inputs).difference >= 0.0099
    assert not any(hook is not bent for m in model.modules() for hook in m._forward_hooks.values())


def bent(_layer: nn.Module, _inputs: object, output: Any) -> Any:
    if isinstance(output, SparseConvTensor):
        return output.replace_feature(output.features + 0.01)
    return output + 0.01


def test_nan_is_a_difference():
    model = BlockSparseLinear(8, 8, block_shape=(4, 4), density=0.5)
    model.register_forward_hook(lambda _layer, _inputs, output: output * math.nan)
    assert math.isnan(compare_layers(model, torch.ones(1, 8)).relative)


def test_no_samples_differ_by_nothing():
    found = compare_layers(BlockSparseLinear(8, 8, block_shape=(4, 4), density=0.5), torch.ones(0, 8))
    assert (found.difference, found.relative) == (0.0, 0.0)


def test_a_comparison_of_nothing_is_refused():
    with pytest.raises(InsumError, match="no layer was compared"):
        compare_layers(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2))


def test_another_shape_is_an_error():
    wrong = Reference(lambda layer, output, x: output[:1], lambda _: "a peer")
    model = BlockSparseLinear(8, 8, block_shape=(4, 4), density=0.5)
    with pytest.raises(InsumShapeError, match="another shape or dtype than the original"):
        compare_layers(model, torch.ones(2, 8), references={**REFERENCES, "BlockSparseLinear": wrong})
    assert not model._forward_hooks, "hooks are removed after an error too"

"""What a call of a layer returns, for static checkers: pyright fails here where it knows another type, or none."""

from __future__ import annotations

from typing import assert_type

import pytest
import torch
from torch import Tensor, nn

from insum_nn import layers
from insum_nn.layers import SparseConvTensor, spconv


def test_of_tensors():
    x = torch.ones(3, 4)
    assert isinstance(assert_type(layers.BlockSparseLinear(4, 4, density=0.5, block_shape=2)(x), Tensor), Tensor)
    image = torch.ones(1, 4, 5, 5)
    assert isinstance(assert_type(layers.PrunedConv2d(4, 4, 3, density=0.5)(image), Tensor), Tensor)
    pruned = layers.PrunedConv3d.from_conv3d(nn.Conv3d(4, 4, 3), density=0.5)
    assert isinstance(assert_type(pruned, layers.PrunedConv3d).weight, Tensor)
    assert isinstance(assert_type(pruned.to_conv3d(), nn.Conv3d), nn.Conv3d)
    linear = layers.SparseLinear.from_linear(nn.Linear(4, 4), density=0.5)
    assert isinstance(assert_type(assert_type(linear, layers.SparseLinear)(x), Tensor), Tensor)


def test_of_graphs():
    pytest.importorskip("torch_geometric")
    from insum_nn.models import GCN

    edges = torch.tensor([[0, 1], [1, 2]])
    assert isinstance(assert_type(layers.GCNConv(4, 4)(torch.ones(3, 4), edges), Tensor), Tensor)
    assert isinstance(assert_type(GCN(4, 4, 2)(torch.ones(3, 4), edges), Tensor), Tensor)


def test_of_irreps():
    pytest.importorskip("e3nn")
    x = torch.ones(3, 4)
    assert isinstance(assert_type(layers.Linear("4x0e", "4x0e")(x), Tensor), Tensor)
    product = layers.FullyConnectedTensorProduct("4x0e", "4x0e", "4x0e")
    assert isinstance(assert_type(product(x, x), Tensor), Tensor)
    assert isinstance(assert_type(layers.TensorSquare("4x0e")(x), Tensor), Tensor)
    assert isinstance(assert_type(layers.SphericalHarmonics("1o", normalize=True)(x[:, :3]), Tensor), Tensor)
    gate = layers.Gate("4x0e", [torch.tanh], "", [], "")
    assert isinstance(assert_type(gate(x), Tensor), Tensor)


def test_of_voxels():
    x = SparseConvTensor(torch.ones(1, 4), torch.zeros(1, 4, dtype=torch.int32), [2] * 3, 1)
    assert isinstance(assert_type(spconv.SubMConv3d(4, 4, 3)(x), SparseConvTensor), SparseConvTensor)
    assert isinstance(assert_type(spconv.SparseConv3d(4, 4, 2)(x), SparseConvTensor), SparseConvTensor)
    assert isinstance(assert_type(spconv.SparseMaxPool3d(2)(x), SparseConvTensor), SparseConvTensor)
    assert isinstance(assert_type(spconv.AddTable()([x, x]), SparseConvTensor), SparseConvTensor)
    assert isinstance(assert_type(spconv.SparseGlobalAvgPool()(x), Tensor), Tensor)
    assert isinstance(assert_type(spconv.ToDense()(x), Tensor), Tensor)

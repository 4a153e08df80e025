"""Pools over sparse grids against loops and torch's dense pools."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from insum_nn.errors import InsumFormatError, InsumShapeError
from insum_nn.layers import sparse_pool as pools
from insum_nn.layers.sparse_conv_kinds import SparseConv3d
from insum_nn.layers.sparse_pool import (
    SparseAvgPool,
    SparseAvgPool3d,
    SparseGlobalAvgPool,
    SparseGlobalMaxPool,
    SparseMaxPool,
    SparseMaxPool2d,
    SparseMaxPool3d,
)
from insum_nn.layers.sparse_tensor import SparseConvTensor
from tests.ops.conv_oracle import random_sites, reached, to_dense


def cloud(shape=(6, 5, 7), channels=3, count=25, batch=2, device="cpu") -> SparseConvTensor:
    sites = random_sites(shape, batch, count, device=device)
    features = torch.randn(sites.num_sites, channels, dtype=torch.float64, device=device)
    return SparseConvTensor(features, sites.indices, list(shape), batch)


@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["Max", "Avg"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"kernel_size": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 2, "stride": 1, "dilation": 2},
    ],
    ids=str,
)
def test_reduce_the_active_voxels_under_the_kernel(kind, ndim, arguments, device):
    x = cloud({1: (11,), 2: (6, 7), 3: (5, 6, 4), 4: (3, 4, 3, 3)}[ndim], count=9, device=device)
    layer = getattr(pools, f"Sparse{kind}Pool{ndim}d")(**arguments)
    y = layer(x)
    near = layer.kernel_map(x)
    assert y.indices.tolist() == reached(x.coordinates(), layer.geometry).tolist()
    pairs = near.pairs
    for row in range(near.num_outputs):
        members = x.features[pairs.input[pairs.output == row]]
        want = members.max(0).values if kind == "Max" else members.mean(0)
        torch.testing.assert_close(y.features[row], want)


def test_maximum_of_positive_features_is_the_dense_pool():
    x = cloud()
    x = x.replace_feature(x.features.abs() + 0.1)
    for arguments in (
        {"kernel_size": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 3, "stride": 1},
    ):
        want = nn.MaxPool3d(**arguments)(to_dense(x.features, x.coordinates()))
        torch.testing.assert_close(SparseMaxPool3d(**arguments)(x).dense(), want)
    # One output a voxel: the mean over a full window is torch's.
    full = cloud((4, 4, 4), count=64)
    want = nn.AvgPool3d(2)(to_dense(full.features, full.coordinates()))
    torch.testing.assert_close(SparseAvgPool3d(2)(full).dense(), want)


def test_a_least_result():
    x = cloud()
    layer = SparseMaxPool3d(2)
    want = layer(x).features
    assert (want < 0).any()
    layer.at_least = 0.0
    leaf = x.features.detach().requires_grad_()
    got = layer(x.replace_feature(leaf)).features
    torch.testing.assert_close(got, want.clamp(min=0))
    got.sum().backward()
    # What is not reached has no part in the result.
    assert not leaf.grad[(leaf < 0)].any()
    assert "at_least=0.0" in repr(layer)


@pytest.mark.parametrize("layer", [SparseMaxPool3d(3, 2, 1), SparseAvgPool3d(3, 2, 1)], ids=repr)
def test_gradients(layer):
    x = cloud(count=6)
    leaf = x.features.detach().requires_grad_()
    torch.autograd.gradcheck(lambda f: layer(x.replace_feature(f)).features, leaf)
    torch.autograd.gradgradcheck(lambda f: layer(x.replace_feature(f)).features, leaf)


def test_global_pools(device):
    x = cloud(device=device)
    chunks = [x.features[x.indices[:, 0] == entry] for entry in range(2)]
    torch.testing.assert_close(SparseGlobalMaxPool()(x), torch.stack([c.max(0).values for c in chunks]))
    torch.testing.assert_close(SparseGlobalAvgPool()(x), torch.stack([c.mean(0) for c in chunks]))
    # A cloud without voxels gives zeros, not NaN.
    wide = SparseConvTensor(x.features, x.indices, x.spatial_shape, 4)
    assert not SparseGlobalMaxPool()(wide)[2:].any()
    assert not SparseGlobalAvgPool()(wide)[2:].any()
    leaf = x.features[:6].detach().requires_grad_()
    few = SparseConvTensor(leaf, x.indices[:6], x.spatial_shape, 2)
    for pool in (SparseGlobalMaxPool(), SparseGlobalAvgPool()):
        torch.autograd.gradcheck(lambda f, pool=pool: pool(few.replace_feature(f)), leaf)


def test_half_mean_counts_exactly():
    count = 3000
    sites = torch.stack([torch.zeros(count, dtype=torch.int32), torch.arange(count, dtype=torch.int32)], 1)
    x = SparseConvTensor(torch.ones(count, 1, dtype=torch.float16), sites, [count], 1)
    assert SparseGlobalAvgPool()(x).item() == pytest.approx(1.0, abs=2e-3)


def test_keys_and_submanifold_pools():
    x = cloud()
    same = SparseMaxPool(3, 3, subm=True)(x)
    assert same.indices is x.indices
    assert (same.features >= x.features).all()
    y = SparseMaxPool3d(2, indice_key="p")(x)
    assert y.find_indice_pair("p").out_indices is y.indices
    assert SparseMaxPool2d(3).stride == [3, 3]
    with pytest.raises(InsumFormatError, match="is not of this layer"):
        SparseMaxPool3d(3, indice_key="p")(
            SparseConvTensor(x.features, x.indices, x.spatial_shape, 2, indice_dict=y.indice_dict)
        )
    recorded = SparseAvgPool(3, 2, 2, record_voxel_count=True)
    z = recorded(x)
    assert recorded.get_max_num_voxels().item() == z.indices.shape[0]


def test_empty_and_statements():
    x = SparseConvTensor(torch.ones(0, 3), torch.zeros(0, 4, dtype=torch.int32), [8] * 3, 2)
    for layer in (SparseMaxPool3d(2), SparseAvgPool3d(2)):
        assert layer(x).features.shape == (0, 3)
        assert layer.expression in repr(layer)
    assert SparseGlobalMaxPool()(x).shape == (2, 3)
    assert "max=" in SparseGlobalMaxPool().expression


def test_wrong_dimension():
    with pytest.raises(InsumShapeError, match="takes grids of 2 dimensions"):
        SparseMaxPool2d(2)(cloud())
    with pytest.raises(InsumShapeError, match="'kernel_size' is"):
        SparseMaxPool2d((2, 2, 2))
    with pytest.raises(InsumShapeError, match="would be"):
        SparseConv3d(3, 3, 9)(cloud())

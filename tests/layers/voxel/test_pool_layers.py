"""Pools over sparse grids against loops and torch's dense pools."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from insum_nn.errors import InsumFormatError, InsumShapeError
from insum_nn.layers.voxel import pool as pools
from insum_nn.layers.voxel.conv import SparseConv3d
from insum_nn.layers.voxel.pool import (
    SparseAvgPool,
    SparseAvgPool1d,
    SparseAvgPool3d,
    SparseGlobalAvgPool,
    SparseMaxPool,
    SparseMaxPool2d,
    SparseMaxPool3d,
)
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor
from insum_nn.testing.tolerances import assert_matches
from tests.ops.conv_oracle import random_sites, to_dense


def cloud(shape=(6, 5, 7), channels=3, count=25, batch=2, device="cpu") -> SparseConvTensor:
    sites = random_sites(shape, batch, count, device=device)
    features = torch.randn(sites.num_sites, channels, dtype=torch.float64, device=device)
    return SparseConvTensor(features, sites.indices, list(shape), batch)


def windows(
    x: SparseConvTensor, kernel_size: int, stride: int = 1, padding: int = 0, dilation: int = 1, subm: bool = False
) -> dict[tuple[int, ...], list[int]]:
    """Rows of the input under the kernel of each output voxel, by the definition; uses nothing of the package.

    A submanifold kernel has its outputs at the input's voxels, and the cell `kernel_size // 2` lies on the voxel.
    """
    sites = {tuple(site): row for row, site in enumerate(x.indices.tolist())}
    if subm:
        stride, padding = 1, kernel_size // 2 * dilation
        outputs = sorted(sites, key=sites.__getitem__)
    else:
        shape = [(extent + 2 * padding - dilation * (kernel_size - 1) - 1) // stride + 1 for extent in x.spatial_shape]
        outputs = list(itertools.product(range(x.batch_size), *map(range, shape)))
    found: dict[tuple[int, ...], list[int]] = {}
    for entry, *cell in outputs:
        under = itertools.product(
            *(range(c * stride - padding, c * stride - padding + dilation * kernel_size, dilation) for c in cell)
        )
        rows = [sites[entry, *place] for place in under if (entry, *place) in sites]
        if rows:
            found[entry, *cell] = rows
    return found


@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["Max", "Avg"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"kernel_size": 2, "stride": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 2, "stride": 1, "dilation": 2},
        {"kernel_size": 3, "dilation": 2, "subm": True},
        {"kernel_size": 2, "dilation": 3, "subm": True},
    ],
    ids=str,
)
def test_reduce_the_active_voxels_under_the_kernel(kind, ndim, arguments, device):
    x = cloud({1: (11,), 2: (6, 7), 3: (5, 6, 4), 4: (3, 4, 3, 3)}[ndim], count=9, device=device)
    more = {"at_least": None} if kind == "Max" else {}
    y = getattr(pools, f"Sparse{kind}Pool")(ndim, **arguments, **more)(x)
    under = windows(x, **arguments)
    assert [tuple(site) for site in y.indices.tolist()] == list(under)
    members = [x.features[rows] for rows in under.values()]
    want = torch.stack([m.max(0).values if kind == "Max" else m.mean(0) for m in members])
    torch.testing.assert_close(y.features, want)


@pytest.mark.parametrize("kind", ["Max", "Avg"])
def test_the_stride_of_a_sized_pool_is_its_kernel(kind):
    x = cloud((6, 7), count=20)
    y = getattr(pools, f"Sparse{kind}Pool2d")(2)(x)
    assert [tuple(site) for site in y.indices.tolist()] == list(windows(x, 2, stride=2))


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
    want = SparseMaxPool3d(2, at_least=None)(x).features
    assert (want < 0).any()
    layer = SparseMaxPool3d(2)
    leaf = x.features.detach().requires_grad_()
    got = layer(x.replace_feature(leaf)).features
    torch.testing.assert_close(got, want.clamp(min=0))
    got.sum().backward()
    # What is not reached has no part in the result.
    assert not leaf.grad[(leaf < 0)].any()
    assert torch.equal(SparseMaxPool3d(2, at_least=-0.5)(x).features, want.clamp(min=-0.5))
    # Of a pool whose own constructor did not run, as one that an earlier version pickled.
    del layer.__dict__["at_least"]
    assert torch.equal(layer(x).features, got)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_means_count_exactly(dtype):
    """More voxels than a half type can count to (2,048 or 256), or can hold (65,504), or can hold the inverse of."""
    values = torch.rand(500_000, 1).add(0.5).to(dtype)
    for count in (2309, 500_000):
        sites = torch.stack([torch.zeros(count, dtype=torch.int32), torch.arange(count, dtype=torch.int32)], 1)
        x = SparseConvTensor(values[:count], sites, [count], 1)
        want = values[:count].double().mean(0, keepdim=True)
        assert_matches(SparseGlobalAvgPool()(x), want, dtype=dtype, kind="sum")
    sites = sites[:2309]
    ones = SparseConvTensor(torch.ones(2309, 1, dtype=dtype), sites, [2309], 1)
    for window in (259, 2309):
        assert SparseAvgPool1d(window)(ones).features.unique().tolist() == [1.0]


def test_keys_and_submanifold_pools():
    x = cloud()
    same = SparseMaxPool(3, 3, subm=True, at_least=None)(x)
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


def test_wrong_dimension():
    with pytest.raises(InsumShapeError, match="takes grids of 2 dimensions"):
        SparseMaxPool2d(2)(cloud())
    with pytest.raises(InsumShapeError, match="'kernel_size' is"):
        SparseMaxPool2d((2, 2, 2))
    with pytest.raises(InsumShapeError, match="would be"):
        SparseConv3d(3, 3, 9)(cloud())

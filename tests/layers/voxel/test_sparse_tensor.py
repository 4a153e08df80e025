"""`SparseConvTensor` and the containers over it."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

from insum_nn.errors import (
    InsumDtypeError,
    InsumError,
    InsumFormatError,
    InsumNameError,
    InsumRangeError,
    InsumShapeError,
)
from insum_nn.layers.voxel.conv import SparseConv2d, SubMConv2d
from insum_nn.layers.voxel.pool import SparseGlobalAvgPool, SparseMaxPool2d
from insum_nn.layers.voxel.sequential import (
    AddTable,
    AddTableMisaligned,
    ConcatTable,
    JoinTable,
    RemoveGrid,
    SparseBatchNorm,
    SparseIdentity,
    SparseModule,
    SparseReLU,
    SparseSequential,
    ToDense,
    assign_name_for_sparse_modules,
)
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor, sparse_add
from tests.ops.conv_oracle import random_sites, to_dense


def cloud(shape=(6, 7), channels=3, count=10, batch=2, device="cpu", dtype=torch.float64, seed=0) -> SparseConvTensor:
    sites = random_sites(shape, batch, count, device=device, seed=seed)
    features = torch.randn(sites.num_sites, channels, dtype=torch.float64).to(device, dtype)
    return SparseConvTensor(features, sites.indices, shape, batch)


class TestTensor:
    def test_dense_and_back(self, device):
        x = cloud(device=device)
        grid = x.dense()
        assert grid.is_contiguous()
        torch.testing.assert_close(grid.cpu(), to_dense(x.features.cpu(), x.coordinates()))
        torch.testing.assert_close(x.dense(channels_first=False), grid.movedim(1, -1))
        back = SparseConvTensor.from_dense(grid.movedim(1, -1))
        torch.testing.assert_close(back.dense(), grid)
        assert back.spatial_shape == [6, 7]
        assert back.indices.dtype == torch.int32
        rows = back.indices.tolist()
        assert rows == sorted(rows)

    def test_dense_and_from_dense_are_differentiable(self):
        x = cloud(count=3)
        leaf = x.features.detach().requires_grad_()
        torch.autograd.gradcheck(lambda f: x.replace_feature(f).dense(), leaf)
        torch.autograd.gradgradcheck(lambda f: x.replace_feature(f).dense(), leaf)
        grid = x.dense(channels_first=False).detach().requires_grad_()
        # A step would make other sites active, so no finite differences: the gradient is that of the sites' own.
        back = torch.randn(6, 3, dtype=torch.float64)
        active = SparseConvTensor.from_dense(grid)
        active.features.backward(back)
        torch.testing.assert_close(grid.grad, active.replace_feature(back).dense(channels_first=False))

    def test_sizes(self):
        x = cloud((4, 5, 2), count=10, batch=3)
        assert x.spatial_size == 40
        assert x.sparity == 30 / 40 / 3
        assert repr(x) == "SparseConvTensor[shape=torch.Size([30, 3])]"
        assert x.find_indice_pair(None) is None

    def test_replace_feature_shares_what_is_known_of_the_voxels(self):
        x = cloud()
        y = x.replace_feature(x.features[:, :1])
        assert y.coordinates() is x.coordinates()
        assert y.indice_dict is x.indice_dict
        with pytest.raises(ValueError, match="replace_feature"):
            x.features = y.features

    def test_changed_voxels_are_checked_again(self):
        x = cloud()
        y = x.shadow_copy()
        known = x.coordinates()
        y.indices = x.indices.clone()
        assert y.coordinates() is not known
        assert x.coordinates() is known
        x.indices[0, 1] = 6
        with pytest.raises(InsumRangeError):
            x.dense()
        y.spatial_shape = [3, 3]
        with pytest.raises(InsumRangeError):
            y.dense()

    @pytest.mark.parametrize("indices_first", [False, True])
    def test_features_of_other_voxels_in_two_steps(self, indices_first):
        """As VoxelNeXt and Focal (OpenPCDet) merge tensors: indices may be wrong until the result is used."""
        x, more = cloud(), cloud((6, 7), count=7, seed=5)
        taken = {tuple(row) for row in x.indices.tolist()}
        new = torch.tensor([tuple(row) not in taken for row in more.indices.tolist()])
        features = torch.cat([x.features, more.features[new]])
        indices = torch.cat([x.indices, more.indices[new]])
        layers = [
            SubMConv2d(3, 3, 3, indice_key="a", dtype=torch.float64),
            SubMConv2d(3, 3, 1, dtype=torch.float64),
            SparseConv2d(3, 3, 3, 2, 1, dtype=torch.float64),
            SparseMaxPool2d(2),
            SparseGlobalAvgPool(),
            ToDense(),
        ]
        want = SparseConvTensor(features, indices, x.spatial_shape, 2)
        for layer in layers:
            y = x.shadow_copy()
            y.coordinates()
            if indices_first:
                y.indices = indices
                with pytest.raises(InsumShapeError, match=r"expected shape \(20, 3\)(.|\n)*set x.indices"):
                    layer(y)
                y = y.replace_feature(features)
            else:
                y = y.replace_feature(features)
                with pytest.raises(InsumShapeError, match=rf"expected shape \({len(features)}, 3\)"):
                    layer(y)
                y.indices = indices
            got, exact = layer(y), layer(want)
            for one in (got, exact):
                assert isinstance(one, torch.Tensor | SparseConvTensor)
            torch.testing.assert_close(getattr(got, "features", got), getattr(exact, "features", exact))
        assert x.coordinates().num_sites == 20

    def test_merged_resolutions(self):
        """As VoxelNeXt: coarser voxels are scaled in place and join the finer ones."""
        x = cloud((12, 8), count=20)
        fine = SubMConv2d(3, 3, 3, indice_key="a", dtype=torch.float64)(x)
        coarse = SparseConv2d(3, 3, 2, 2, indice_key="down", dtype=torch.float64)(fine)
        doubled = coarse.indices.clone()
        doubled[:, 1:] *= 2
        coarse.indices[:, 1:] *= 2
        merged = fine.replace_feature(torch.cat([fine.features, coarse.features]))
        merged.indices = torch.cat([fine.indices, coarse.indices])
        flat, place = torch.unique(merged.indices, dim=0, return_inverse=True)
        summed = merged.features.new_zeros(len(flat), 3).index_add_(0, place, merged.features)
        y = SparseConvTensor(summed, flat, [12, 8], 2)
        want = fine.dense().movedim(1, -1).index_put(doubled.long().unbind(1), coarse.features, accumulate=True)
        torch.testing.assert_close(y.dense(channels_first=False), want)
        # The map under a key is of the voxels as they were.
        fine.indices[:, 1] = fine.indices[:, 1].flip(0)
        with pytest.raises(InsumFormatError, match="written to since the map was made"):
            SubMConv2d(3, 3, 3, indice_key="a", dtype=torch.float64)(fine)

    def test_select_by_index(self):
        x = SubMConv2d(3, 3, 3, indice_key="a", dtype=torch.float64)(cloud())
        y = x.select_by_index(x.features[:, 0] > 0)
        assert y.indice_dict == {}
        assert x.indice_dict
        torch.testing.assert_close(y.dense(), (x.dense() * (x.dense()[:, :1] > 0)))

    def test_arithmetic(self):
        x = cloud()
        y = x.replace_feature(2 * x.features)
        torch.testing.assert_close((x + y).features, 3 * x.features)
        torch.testing.assert_close((x + x.features).features, 2 * x.features)
        z = x
        z += y
        torch.testing.assert_close(z.features, 3 * x.features)
        assert x is not z
        torch.testing.assert_close(x.minus().features, -x.features)
        with pytest.raises(InsumFormatError, match="use sparse_add"):
            x + cloud(seed=1)

    def test_sparse_add_of_different_voxels(self, device):
        x, y = cloud(device=device), cloud(seed=1, device=device)
        total = sparse_add(x, y, x)
        torch.testing.assert_close(total.dense(), 2 * x.dense() + y.dense())
        rows = total.indices.tolist()
        assert rows == sorted(rows)
        torch.testing.assert_close(AddTableMisaligned()([x, y]).dense(), x.dense() + y.dense())
        down = SparseConv2d(3, 3, 3, 1, 1, indice_key="k", dtype=torch.float64, device=device)(x)
        # Nothing new is added to all the voxels of an operand, so its maps still hold.
        assert sparse_add(down, x).indice_dict.keys() == {"k"}
        with pytest.raises(InsumShapeError, match="differ in grid or channels"):
            sparse_add(x, cloud((6, 8), device=device))

    def test_to(self):
        x = cloud()
        assert x.to(torch.float32).features.dtype == torch.float32
        assert x.to(torch.float32).indices is x.indices
        assert x.device.type == "cpu"

    @pytest.mark.parametrize(
        ("features", "indices", "error", "text"),
        [
            (torch.ones(3), torch.zeros(3, 3, dtype=torch.int32), InsumShapeError, r"got \(3,\)"),
            ([1.0], torch.zeros(1, 3, dtype=torch.int32), InsumShapeError, "got list"),
            (torch.ones(3, 1), torch.zeros(3, 3), InsumDtypeError, "must be int32 or int64, got torch.float32"),
            (torch.ones(3, 1), torch.zeros(3, 2, dtype=torch.int32), InsumShapeError, r"expected shape \(3, 3\)"),
            (torch.ones(3, 1), torch.zeros(2, 3, dtype=torch.int32), InsumShapeError, r"got \(2, 3\)"),
        ],
    )
    def test_wrong_members(self, features, indices, error, text):
        with pytest.raises(error, match=text):
            SparseConvTensor(features, indices, [4, 4], 1)


class TestSequential:
    def test_dense_modules_take_the_features(self):
        x = cloud(dtype=torch.float32)
        model = SparseSequential(
            SubMConv2d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2), ToDense(), nn.Conv2d(2, 1, 3)
        )
        assert model(x).shape == (2, 1, 4, 5)
        y = model[0](x).features
        want = nn.functional.relu(nn.functional.batch_norm(y, None, None, training=True))
        model.train()
        torch.testing.assert_close(model[:3](x).features, want)

    def test_building_and_reading(self):
        model = SparseSequential(OrderedDict(conv=SubMConv2d(3, 3, 3), act=nn.ReLU()))
        assert list(dict(model.named_children())) == ["conv", "act"]
        model.add(nn.ReLU())
        model.add(nn.ReLU(), "last")
        assert len(model) == 4
        assert model[-1] is model.last
        assert [type(m) for m in model[1:]] == [nn.ReLU] * 3
        named = SparseSequential(SubMConv2d(3, 3, 3), act=nn.ReLU())
        assert list(dict(named.named_children())) == ["0", "act"]
        with pytest.raises(InsumNameError, match="a module 'last' already"):
            model.add(nn.ReLU(), "last")
        with pytest.raises(IndexError):
            model[4]
        assign_name_for_sparse_modules(model)
        assert model.conv._sparse_unique_name == "conv"
        copy.deepcopy(model)

    def test_own_sparse_modules_get_the_tensor(self):
        class Doubled(SparseModule):
            def forward(self, x):
                return x + x

        x = cloud()
        torch.testing.assert_close(SparseSequential(Doubled())(x).features, 2 * x.features)

    def test_sparse_twins_of_dense_modules(self):
        x = cloud(dtype=torch.float32)
        for sparse, dense in (
            (SparseReLU(), nn.ReLU()),
            (SparseBatchNorm(3), nn.BatchNorm1d(3)),
            (SparseIdentity(), nn.Identity()),
        ):
            got = SparseSequential(sparse)(x).features
            torch.testing.assert_close(got, dense(x.features))
            torch.testing.assert_close(sparse(x.features), dense(x.features))

    def test_tables(self):
        x = cloud()
        branches = ConcatTable().add(SparseIdentity()).add(SubMConv2d(3, 3, 3, dtype=torch.float64))
        parts = branches(x)
        torch.testing.assert_close(AddTable()(parts).features, x.features + parts[1].features)
        assert JoinTable()(parts).features.shape == (20, 6)
        with pytest.raises(InsumError, match="needs tensors over the same voxels"):
            JoinTable()([x, cloud(seed=1)])
        x.grid = torch.zeros(1)
        assert RemoveGrid()(x).grid is None

    def test_an_empty_cloud_passes_through(self):
        x = SparseConvTensor(torch.ones(0, 3), torch.zeros(0, 3, dtype=torch.int32), [4, 4], 2)
        model = SparseSequential(SubMConv2d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2), SparseBatchNorm(2))
        assert model(x).features.shape == (0, 2)
        assert model.eval()(x).features.shape == (0, 2)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_members_that_spconv_has_stay_with_the_features():
    """TRELLIS copies them from tensor to tensor; convolutions hand them on."""
    x = SparseConvTensor(torch.ones(2, 3), torch.tensor([[0, 0, 0], [0, 1, 1]], dtype=torch.int32), [3, 3], 1)
    assert x.thrust_allocator is None
    assert x.int8_scale is None
    assert not x.is_quantized
    with x._timer.namespace("a"), x._timer.record("b", 0):
        assert x._timer.get_all_pair_time() == {}
    x.thrust_allocator, x.int8_scale, x._timer = "allocator", 0.5, "timer"
    layers = SubMConv2d(3, 3, 3), SparseConv2d(3, 3, 2)
    derived = [x.replace_feature(x.features + 1), x.shadow_copy(), x.select_by_index(torch.tensor([0])), x.dequantize()]
    for y in (*derived, *(layer(x) for layer in layers)):
        assert (y.thrust_allocator, y.int8_scale, y._timer) == ("allocator", 0.5, "timer")
    assert torch.equal(x.dequantize().features, x.features)
    with pytest.raises(InsumFormatError, match=r"q_scale: the features are torch\.float32, not quantized"):
        x.q_scale()
    rows = torch.quantize_per_tensor(torch.ones(2, 3), 0.25, 0, torch.qint8)
    quantized = SparseConvTensor(rows, x.indices, [3, 3], 1)
    assert quantized.is_quantized
    assert quantized.q_scale() == 0.25
    assert torch.equal(quantized.dequantize().features, torch.ones(2, 3))

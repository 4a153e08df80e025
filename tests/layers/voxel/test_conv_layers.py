"""Layers over sparse grids: kinds and dimensions, shared maps, modes of use, and what they refuse."""

from __future__ import annotations

import copy
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from insum_nn.errors import InsumDtypeError, InsumFormatError, InsumNameError, InsumRangeError, InsumShapeError
from insum_nn.layers.spconv.states import spconv_state_dict
from insum_nn.layers.voxel import conv as kinds
from insum_nn.layers.voxel import sparse_tensor
from insum_nn.layers.voxel.conv import (
    SparseConv2d,
    SparseConv3d,
    SparseConvolution,
    SparseConvTranspose3d,
    SparseInverseConv3d,
    SubMConv2d,
    SubMConv3d,
)
from insum_nn.layers.voxel.pool import SparseAvgPool3d, SparseGlobalMaxPool, SparseMaxPool3d
from insum_nn.layers.voxel.sequential import SparseBatchNorm, SparseModule, SparseSequential
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor
from insum_nn.ops.sparse_conv import SPARSE_CONV, SPARSE_CONV_GROUPS, SPARSE_CONV_POINTWISE
from tests.ops.conv_oracle import dense_conv, random_sites, read


def cloud(shape=(6, 5, 7), channels=4, count=25, batch=2, device="cpu", dtype=torch.float64) -> SparseConvTensor:
    sites = random_sites(shape, batch, count, device=device)
    features = torch.randn(sites.num_sites, channels, dtype=torch.float64).to(device, dtype)
    return SparseConvTensor(features, sites.indices, list(shape), batch)


SHAPES = {1: (11,), 2: (6, 7), 3: (5, 6, 4), 4: (3, 4, 3, 3)}


KINDS = [
    ("SubMConv", {"kernel_size": 3}),
    ("SubMConv", {"kernel_size": 2, "dilation": 2, "groups": 2}),
    ("SubMConv", {"kernel_size": 4, "anchor": 1}),
    ("SubMConv", {"kernel_size": 1, "bias": False}),
    ("SparseConv", {"kernel_size": 3, "stride": 2, "padding": 1}),
    ("SparseConv", {"kernel_size": 2, "stride": 2, "groups": 2, "bias": False}),
    ("SparseConv", {"kernel_size": 1}),
    ("SparseConvTranspose", {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1}),
    ("SparseConvTranspose", {"kernel_size": 2, "stride": 2, "groups": 2}),
]
# torch has no four-dimensional transposed convolution to compare with; the adjoint below covers it.
CASES = [(ndim, *kind) for ndim in SHAPES for kind in KINDS if not (ndim == 4 and kind[0] == "SparseConvTranspose")]


@pytest.mark.parametrize(("ndim", "kind", "arguments"), CASES, ids=str)
def test_every_kind_and_dimension_equals_dense(ndim, kind, arguments, device):
    x = cloud(SHAPES[ndim], count=12, device=device)
    layer: SparseConvolution = getattr(kinds, f"{kind}{ndim}d")(4, 6, dtype=torch.float64, device=device, **arguments)
    y = layer(x)
    leaves = [x.features, layer.dense_weight, *([layer.bias] if layer.bias is not None else [])]
    wide = [t.detach().cpu() for t in leaves]
    bias = wide[2] if len(wide) > 2 else None
    dense = dense_conv(wide[0], wide[1], bias, x.coordinates(), layer.geometry, layer.groups)
    torch.testing.assert_close(y.features.cpu(), read(dense, y.indices))
    assert tuple(y.spatial_shape) == tuple(dense.shape[2:])
    assert y.batch_size == x.batch_size
    if layer.bias is None:
        torch.testing.assert_close(y.dense().cpu() if kind != "SubMConv" else dense, dense)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kernel_size", [1, 3])
@pytest.mark.parametrize("channels", [(0, 6), (4, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", [SubMConv3d, SparseConv3d, SparseConvTranspose3d])
def test_no_channels(kind, groups, channels, kernel_size, bias, device):
    """A sum over no channels is the bias, as in `nn.Linear`; every gradient is there."""
    layer = kind(*channels, kernel_size, groups=groups, bias=bias, device=device)
    x = cloud(channels=channels[0], dtype=torch.float32, device=device)
    rows = x.features.clone().requires_grad_()
    y = layer(x.replace_feature(rows))
    assert y.features.shape == (y.indices.shape[0], channels[1])
    want = layer.bias.expand_as(y.features) if bias else torch.zeros_like(y.features)
    assert torch.equal(y.features, want)
    given = torch.randn_like(y.features)
    y.features.backward(given)
    for each in (rows, layer.weight):
        assert torch.equal(each.grad, torch.zeros_like(each))
    if bias:
        torch.testing.assert_close(layer.bias.grad, given.sum(0))


def test_no_channels_of_an_inverse_and_of_pools(device):
    x = cloud(dtype=torch.float32, device=device)
    down, up = SparseConv3d(4, 0, 2, 2, indice_key="d", device=device), SparseInverseConv3d(0, 3, 2, "d", device=device)
    y = up(SparseMaxPool3d(1)(down(x)))
    assert torch.equal(y.indices, x.indices)
    assert torch.equal(y.features, up.bias.expand(x.indices.shape[0], -1))
    assert SparseAvgPool3d(2)(down(x)).dense().shape[1] == SparseGlobalMaxPool()(down(x)).shape[1] == 0


@pytest.mark.parametrize("number", [np.int64, np.int32, np.uint8, np.array, torch.tensor])
@pytest.mark.parametrize("kind", [SubMConv3d, SparseConv3d, SparseConvTranspose3d])
def test_sizes_of_numpy(kind, number):
    """As in `nn.Conv3d`, for all arguments that are integers; arrays are one for each axis."""
    plain = kind(4, 6, 3, stride=1, padding=1, dilation=2, groups=2, dtype=torch.float64)
    sizes, x = {"stride": number(1), "padding": number(1), "dilation": number(2), "groups": number(2)}, cloud()
    for kernel_size in (number(3), np.array([3, 3, 3])):
        layer = kind(number(4), number(6), kernel_size, **sizes, dtype=torch.float64)
        assert repr(layer) == repr(plain)
        layer.load_state_dict(plain.state_dict())
        assert torch.equal(layer(x).features, plain(x).features)
    same = SparseConvTensor(x.features, x.indices, np.array([6, 5, 7]), number(2))
    pooled = SparseMaxPool3d(number(2), number(2))(same)
    assert torch.equal(pooled.features, SparseMaxPool3d(2, 2)(x).features)
    assert repr(kinds.SparseConvolution(number(3), 4, 6, number(3))) == repr(kinds.SparseConvolution(3, 4, 6, 3))


def test_default_anchor_of_even_kernels_is_the_upper_middle():
    x = SparseConvTensor(
        torch.ones(3, 1), torch.tensor([[0, 1, 0], [0, 2, 0], [0, 3, 0]], dtype=torch.int32), [5, 1], 1
    )
    layer = SubMConv2d(1, 1, (2, 1), bias=False)
    nn.init.ones_(layer.weight)
    with torch.no_grad():
        layer.weight[0, 0] = 10
    assert layer(x).features.flatten().tolist() == [1.0, 11.0, 11.0]
    lower = SubMConv2d(1, 1, (2, 1), bias=False, anchor=0)
    lower.load_state_dict(layer.state_dict())
    assert lower(x).features.flatten().tolist() == [11.0, 11.0, 10.0]


class TestKeys:
    def test_submanifold_layers_share_a_map(self):
        first, second = (SubMConv3d(4, 4, 3, indice_key="a", dtype=torch.float64) for _ in range(2))
        x = cloud()
        y = first(x)
        z = second(y)
        assert x.indice_dict == {}
        assert z.find_indice_pair("a") is y.find_indice_pair("a")
        torch.testing.assert_close(z.features, second(SparseConvTensor(y.features, x.indices, [6, 5, 7], 2)).features)

    def test_backward_uses_the_map_of_forward(self, monkeypatch):
        built: list[object] = []
        build = sparse_tensor.build_kernel_map
        monkeypatch.setattr(
            sparse_tensor, "build_kernel_map", lambda *a, **k: built.append(build(*a, **k)) or built[-1]
        )
        layers = SparseSequential(*(SubMConv3d(4, 4, 3, indice_key="a", dtype=torch.float64) for _ in range(3)))
        layers(cloud()).features.sum().backward()
        assert len(built) == 1

    def test_inverse_restores_voxels_and_shape(self, device):
        down = SparseConv3d(4, 6, 3, 2, 1, indice_key="down", dtype=torch.float64, device=device)
        same = SubMConv3d(6, 6, 3, dtype=torch.float64, device=device)
        up = SparseInverseConv3d(6, 5, 3, indice_key="down", dtype=torch.float64, device=device)
        x = cloud(device=device)
        middle = same(down(x))
        y = up(middle)
        assert y.indices is x.indices
        assert y.spatial_shape == x.spatial_shape
        # Restricted to the input's voxels it is the transposed convolution.
        wide = [t.detach().cpu() for t in (middle.features, up.weight, up.bias)]
        how = SparseConvTranspose3d(6, 5, 3, 2, 1, output_padding=(1, 0, 0)).geometry
        dense = dense_conv(*wide, middle.coordinates(), how)
        torch.testing.assert_close(y.features.cpu(), read(dense, x.indices))
        torch.autograd.gradcheck(
            lambda f: up(middle.replace_feature(f)).features, middle.features.detach().requires_grad_()
        )

    def test_inverse_of_a_pool_and_of_two_levels(self):
        from insum_nn.layers.voxel.pool import SparseMaxPool3d

        down = SparseSequential(
            SparseMaxPool3d(2, indice_key="p"), SparseConv3d(4, 4, 2, 2, indice_key="q", dtype=torch.float64)
        )
        up = SparseSequential(
            SparseInverseConv3d(4, 4, 2, indice_key="q", dtype=torch.float64),
            SparseInverseConv3d(4, 2, 2, "p", dtype=torch.float64),
        )
        x = cloud((8, 8, 8))
        y = up(down(x))
        assert torch.equal(y.indices, x.indices)
        assert y.features.shape == (50, 2)

    def test_pointwise_layer_can_be_inverted(self):
        x = cloud()
        y = SparseConv3d(4, 2, 1, indice_key="k", dtype=torch.float64)(x)
        back = SparseInverseConv3d(2, 4, 1, "k", dtype=torch.float64)
        want = y.features @ back.dense_weight.flatten(1).T + back.bias
        torch.testing.assert_close(back(y).features, want)

    @pytest.mark.parametrize(
        ("layer", "text"),
        [
            (SubMConv3d(4, 4, 5, indice_key="a"), r"kernel_size: stored \(3, 3, 3\), this layer \(5, 5, 5\)"),
            (SubMConv3d(4, 4, 3, dilation=2, indice_key="a"), r"dilation: stored \(1, 1, 1\)"),
            (SparseConv3d(4, 4, 3, indice_key="a"), "kind: stored subm, this layer conv"),
            (SparseInverseConv3d(4, 4, 3, "a"), "has nothing to invert"),
        ],
    )
    def test_a_key_of_another_layer_is_refused(self, layer, text):
        x = SubMConv3d(4, 4, 3, indice_key="a")(cloud(dtype=torch.float32))
        with pytest.raises(InsumFormatError, match=text):
            layer(x)

    def test_a_key_of_other_voxels_is_refused(self):
        layer = SubMConv3d(4, 4, 3, indice_key="a", dtype=torch.float64)
        x = layer(cloud())
        moved = SparseConvTensor(x.features, x.indices.flip(0), x.spatial_shape, 2, indice_dict=x.indice_dict)
        with pytest.raises(InsumFormatError, match="at other places or in another order"):
            layer(moved)
        fewer = SparseConvTensor(x.features[1:], x.indices[1:], x.spatial_shape, 2, indice_dict=x.indice_dict)
        with pytest.raises(InsumFormatError, match="voxels: stored 50, input 49"):
            layer(fewer)
        # The same voxels in another tensor are the same voxels.
        again = SparseConvTensor(x.features, x.indices.clone(), x.spatial_shape, 2, indice_dict=x.indice_dict)
        torch.testing.assert_close(layer(again).features, layer(x).features)

    def test_inverse_without_or_with_a_wrong_partner_is_refused(self):
        x = SparseConv3d(4, 4, 3, 2, 1, indice_key="a")(cloud(dtype=torch.float32))
        with pytest.raises(InsumNameError, match="no map is stored under indice_key 'b'.*\n.*stored: 'a'"):
            SparseInverseConv3d(4, 4, 3, "b")(x)
        with pytest.raises(InsumFormatError, match="kernel_size"):
            SparseInverseConv3d(4, 4, 2, "a")(x)
        with pytest.raises(InsumFormatError, match="does not lead to this input"):
            SparseInverseConv3d(4, 4, 3, "a")(SparseConv3d(4, 4, 3, 2, 1)(x))


class TestModes:
    def model(self) -> SparseSequential:
        return SparseSequential(
            SubMConv3d(4, 8, 3, indice_key="s0", bias=False),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            SparseConv3d(8, 8, 2, 2, indice_key="d"),
            SubMConv3d(8, 8, 3, groups=2),
            SparseInverseConv3d(8, 3, 2, "d"),
        )

    def test_the_state_is_spconvs(self):
        assert list(SubMConv3d(4, 8, 3).state_dict()) == ["weight", "bias"]
        assert SubMConv3d(4, 8, (3, 1, 2), groups=2).weight.shape == (8, 3, 1, 2, 2)

    def test_weights_of_one_cell_are_in_spconvs_order(self):
        """Where every voxel is its own output, spconv multiplies by the numbers of (O, 1.., I) read as (I, O)."""
        x = cloud()
        weight, bias = torch.randn(6, 1, 1, 1, 4, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
        want = x.features @ weight.reshape(4, 6) + bias
        state = {"weight": weight, "bias": bias}
        versions = {number: OrderedDict(state) for number in (1, 2, 3)}
        for number, marked in versions.items():
            marked._metadata = OrderedDict({"": {"version": number}})
        layer = SubMConv3d(4, 6, 1, dtype=torch.float64)
        # Whatever the metadata says, and without it: copies of states lose it.
        for same in (state, *versions.values()):
            layer.load_state_dict(same)
            torch.testing.assert_close(layer(x).features, want)
            assert torch.equal(layer.weight, weight)
            nn.init.zeros_(layer.weight)
        layer.load_state_dict(state)
        torch.testing.assert_close(x.features @ layer.dense_weight.flatten(1).T + bias, want)
        # A kernel of more cells, one that leaves voxels out, and one with groups are read by their shape.
        for other in (SubMConv3d(4, 6, (1, 1, 3)), SparseConv3d(4, 6, 1, 2), SubMConv3d(4, 6, 1, groups=2)):
            assert other.dense_weight is other.weight
            for number in versions:
                copied = OrderedDict((name, torch.randn_like(value)) for name, value in other.state_dict().items())
                copied._metadata = OrderedDict({"": {"version": number}})
                other.load_state_dict(copied)
                assert torch.equal(other.weight, copied["weight"])
        with pytest.raises(RuntimeError, match="size mismatch"):
            layer.load_state_dict(OrderedDict(weight=weight[:5], bias=bias))

    def test_states_under_the_loader_of_mmdetection3d(self, monkeypatch):
        """It replaces that of `SparseModule`, and moves the last axis of weights to the front unless told version 2."""

        def load(self, state, prefix, metadata, *_):
            for name, parameter in self.named_parameters(recurse=False):
                given = state[prefix + name]
                order = range(given.ndim) if metadata.get("version") == 2 else range(-1, given.ndim - 1)
                parameter.data.copy_(given.permute(*order))

        model, other = self.model(), self.model()
        # Written before it is registered, by a model that was swapped.
        states = [model.state_dict()]
        monkeypatch.setattr(SparseModule, "_load_from_state_dict", load)
        monkeypatch.setattr(SparseModule, "_version", 2)
        states.append(model.state_dict())
        for state in states:
            for parameter in other.parameters():
                nn.init.zeros_(parameter)
            other.load_state_dict(state)
            for name, value in model.state_dict().items():
                assert torch.equal(other.state_dict()[name], value), name
        # What it takes for a state of spconv 1.
        first = model.state_dict()
        first["0.weight"] = first["0.weight"].movedim(0, -1)
        first._metadata["0"]["version"] = 1
        other.load_state_dict(first)
        assert torch.equal(other[0].weight, model[0].weight)

    def test_the_state_for_spconv(self):
        model = SparseSequential(SubMConv3d(4, 6, 1), nn.BatchNorm1d(6), SubMConv3d(6, 6, 3, groups=2))
        with pytest.raises(InsumFormatError, match="2: groups=2"):
            spconv_state_dict(model)
        with pytest.raises(InsumFormatError, match=r"the model: anchor=\[1, 1, 1\]"):
            spconv_state_dict(SubMConv3d(4, 4, 4, anchor=1))
        state = spconv_state_dict(model[:2])
        assert list(state) == list(model[:2].state_dict())
        assert state._metadata["0"] == {"version": 2}
        assert state["0.weight"].data_ptr() == model[0].weight.data_ptr()

    def test_autocast_and_gradients(self, device):
        model = self.model().to(device)
        x = cloud(dtype=torch.float32, device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            y = model(x)
        assert y.features.dtype == torch.bfloat16
        y.features.float().square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.dtype == torch.float32
            assert parameter.grad.isfinite().all()
            assert parameter.grad.any(), name

    def test_low_precision_accumulation_is_chosen_by_name(self):
        assert SubMConv3d(4, 4, 3, fp32_accum=False).options.accumulate == "storage"
        assert SubMConv3d(4, 4, 3, fp32_accum=True).options.accumulate == "float32"

    @pytest.mark.parametrize(
        "layer",
        [
            SubMConv3d(4, 4, 3, indice_key="a"),
            SubMConv3d(4, 4, 3, indice_key="a", groups=2),
            SubMConv3d(4, 4, 1),
            SparseInverseConv3d(4, 4, 2, "d"),
        ],
        ids=["subm", "groups", "pointwise", "inverse"],
    )
    def test_torch_compile_without_graph_breaks(self, layer):
        x = SubMConv3d(4, 4, 3, indice_key="a")(SparseConv3d(4, 4, 2, 2, indice_key="d")(cloud(dtype=torch.float32)))
        x = x.replace_feature(x.features.detach().requires_grad_())

        def run(features):
            return layer(x.replace_feature(features)).features

        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        first, second = x.features.detach().requires_grad_(), x.features.detach().requires_grad_()
        want, got = run(first), compiled(second)
        torch.testing.assert_close(got, want)
        want.square().sum().backward()
        gradient = layer.weight.grad.clone()
        layer.weight.grad = None
        got.square().sum().backward()
        torch.testing.assert_close(second.grad, first.grad)
        torch.testing.assert_close(layer.weight.grad, gradient)

    def test_shows_its_statement(self):
        assert SubMConv3d(4, 4, 3).expression == SPARSE_CONV
        assert SubMConv3d(4, 4, 3, groups=2).expression == SPARSE_CONV_GROUPS
        assert SubMConv3d(4, 4, 1).expression == SPARSE_CONV_POINTWISE
        ones, zeros = [1, 1, 1], [0, 0, 0]
        shown, statement = repr(SubMConv3d(4, 6, 3, bias=False)).splitlines()
        assert shown == (
            f"SubMConv3d(4, 6, kernel_size=[3, 3, 3], stride={ones}, padding={zeros}, dilation={ones}, "
            f"output_padding={zeros}, bias=False, algo=ConvAlgo.MaskImplicitGemm)"
        )
        assert statement.strip() == SPARSE_CONV
        assert "groups=2, algo=ConvAlgo.Native, anchor=[0, 0, 0])" in repr(SubMConv3d(4, 4, 4, groups=2, anchor=0))
        layer, x = SparseConv2d(4, 4, 3), cloud((6, 6), dtype=torch.float32)
        assert SPARSE_CONV in str(layer.explain())
        assert SPARSE_CONV in str(layer.explain(x))

    def test_records_the_number_of_voxels(self):
        layer = SparseConv3d(4, 4, 2, 2, record_voxel_count=True, dtype=torch.float64)
        counts = [layer(cloud(count=n)).indices.shape[0] for n in (3, 20, 5)]
        assert layer.get_max_num_voxels().tolist() == [max(counts)]
        old = {k: v for k, v in layer.state_dict().items() if "voxels" not in k}
        layer.load_state_dict(old)

    def test_add_input(self):
        x = cloud()
        layer = SubMConv3d(4, 4, 3, dtype=torch.float64)
        torch.testing.assert_close(layer(x, add_input=x).features, layer(x).features + x.features)


class TestBadInput:
    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: SubMConv3d(4, 4, (3, 3)), r"'kernel_size' is \(3, 3\)"),
            (lambda: SubMConv3d(4, 4, 0), "'kernel_size' is 0"),
            (lambda: SubMConv3d(4, 4, [2.5, 3, 3]), r"'kernel_size' is \[2.5, 3, 3\]"),
            (lambda: SubMConv3d(4, 4, 3, stride=0), "'stride' is 0"),
            (lambda: SubMConv3d(4, 4, 3, anchor=3), "is no cell of a kernel"),
            (lambda: SparseConv3d(4, 4, 3, padding=-1), "'padding' is -1"),
            (lambda: SparseConv3d(4, 6, 3, groups=4), "'groups' is 4, with 4 channels in and 6 out"),
            (lambda: SparseConv3d(4, 4, 3, groups=0), "'groups' is 0"),
            (lambda: SubMConv3d(-4, 4, 3), "SubMConv3d: 'in_channels' is -4\n  expected an integer of at least 0"),
            (lambda: SparseConv3d(4, 4.0, 3), "'out_channels' is 4.0"),
            (lambda: SparseConv3d(4, 4, 3, groups=2.0), "'groups' is 2.0"),
            (lambda: SubMConv3d(4, 4, "3"), "'kernel_size' is '3'"),
            (lambda: SubMConv3d(4, 4, [3, 3, float("nan")]), r"'kernel_size' is \[3, 3, nan\]"),
            (lambda: SubMConv3d(4, 4, np.float64(3)), "'kernel_size' is np.float64"),
        ],
    )
    def test_arguments(self, make, text):
        with pytest.raises(InsumShapeError, match=text):
            make()

    def test_input(self, device):
        layer = SubMConv3d(4, 4, 3, device=device)
        with pytest.raises(InsumShapeError, match=r"takes grids of 3 dimensions, got spatial_shape \[6, 7\]"):
            layer(cloud((6, 7), dtype=torch.float32, device=device))
        with pytest.raises(InsumShapeError, match="'features' has 3 channels, 'weight' reads 4"):
            layer(cloud(channels=3, dtype=torch.float32, device=device))
        x = cloud(dtype=torch.float32, device=device)
        outside = SparseConvTensor(x.features, x.indices, [6, 5, 6], 2)
        with pytest.raises(InsumRangeError, match=r"indices\[:,3\]"):
            layer(outside)
        twice = SparseConvTensor(x.features, torch.cat([x.indices[:1], x.indices[:-1]]), [6, 5, 7], 2)
        with pytest.raises(InsumFormatError, match="row 1 repeats row 0"):
            layer(twice)

    def test_no_voxels(self, device):
        x = SparseConvTensor(
            torch.ones(0, 4, device=device), torch.zeros(0, 4, dtype=torch.int32, device=device), [8] * 3, 3
        )
        model = TestModes().model().to(device)
        y = model(x)
        assert y.features.shape == (0, 3)
        assert y.dense().shape == (3, 3, 8, 8, 8)
        y.features.sum().backward()

    @pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), SparseBatchNorm(4), nn.BatchNorm1d(4, affine=False)], ids=repr)
    @pytest.mark.parametrize("train", [True, False])
    def test_no_voxels_give_every_parameter_a_gradient(self, norm, train):
        """DistributedDataParallel waits for each."""
        model = SparseSequential(
            SubMConv3d(4, 4, 3, indice_key="s"),
            copy.deepcopy(norm),
            nn.ReLU(),
            SubMConv3d(4, 4, 1),
            SparseConv3d(4, 4, 2, 2, indice_key="d"),
            copy.deepcopy(norm),
            SubMConv3d(4, 4, 3, groups=2),
            SparseInverseConv3d(4, 4, 2, "d"),
            SparseConvTranspose3d(4, 4, 2, 2),
            nn.Linear(4, 4),
        ).train(train)
        x = SparseConvTensor(torch.ones(0, 4), torch.zeros(0, 4, dtype=torch.int32), [8] * 3, 1)
        before = copy.deepcopy(model.state_dict())
        y = model(x)
        y.features.square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert not parameter.grad.any(), name
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model(x).features.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [kinds.SubMConv3d, kinds.SparseConv3d, kinds.SparseInverseConv3d])
def test_what_is_not_our_tensor_is_refused(kind: type):
    layer = kind(4, 16, 3, indice_key="x")
    with pytest.raises(InsumDtypeError, match=r"takes a SparseConvTensor of insum_nn, got a tensor of shape \(2, 4\)"):
        layer(torch.randn(2, 4))
    with pytest.raises(InsumDtypeError, match=r"takes a SparseConvTensor of insum_nn, got types\.SimpleNamespace"):
        layer(SimpleNamespace(features=torch.randn(2, 4), indices=torch.zeros(2, 4)))

"""The functions, classes and constants of spconv that others import: tables of pairs, hash tables, voxel generators."""

from __future__ import annotations

import importlib
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import insum_nn.layers.spconv as spconv
from insum_nn.errors import (
    InsumDtypeError,
    InsumFormatError,
    InsumNameError,
    InsumRangeError,
    InsumShapeError,
)
from insum_nn.layers.spconv import constants, cppcore, functional, ops
from insum_nn.layers.spconv.core import Activation, ImplicitGemmIndiceData, IndiceData, expand_nd, scatter_nd
from insum_nn.layers.spconv.hash import HashTable
from tests.ops.conv_oracle import random_sites

SHAPE = [6, 5, 7]
CASES = {
    "subm": {"ksize": [3, 3, 3], "subm": True},
    "subm dilated": {"ksize": [3, 1, 5], "dilation": [2, 1, 1], "subm": True},
    "conv": {"ksize": [3, 2, 3], "stride": [2, 2, 1], "padding": [1, 0, 1]},
    # More cells than a word of a mask has bits.
    "large": {"ksize": [4, 3, 3], "stride": [2, 1, 1], "padding": [1, 1, 1]},
    "transpose": {"ksize": [2, 3, 2], "stride": [2, 1, 2], "transpose": True},
}


def how(case: str) -> dict:
    rest = {"stride": [1] * 3, "padding": [0] * 3, "dilation": [1] * 3, "out_padding": [0] * 3}
    return rest | CASES[case]


def triples(pairs: torch.Tensor) -> set[tuple[int, int, int]]:
    """(offset, input row, output row) of lists of pairs."""
    used = (pairs >= 0).all(0)
    offset = used.nonzero()[:, 0]
    return set(zip(offset.tolist(), pairs[0][used].tolist(), pairs[1][used].tolist(), strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("algo", [spconv.ConvAlgo.MaskImplicitGemm, spconv.ConvAlgo.MaskSplitImplicitGemm])
def test_tables_of_neighbours(case, algo, device):
    indices = random_sites(SHAPE, 2, 25, device=device).indices
    out, pairs, counts = ops.get_indice_pairs(indices, 2, SHAPE, None, **how(case))
    every = triples(pairs)
    found = ops.get_indice_pairs_implicit_gemm(indices, 2, SHAPE, algo, **how(case))
    out_again, counts_again, forward, backward, masks, back_masks, orders, back_orders, filters = found
    assert torch.equal(out_again, out)
    assert torch.equal(counts_again, counts)
    volume = pairs.shape[1]
    assert forward.shape == (volume, out.shape[0])
    assert backward.shape == (volume, indices.shape[0])
    assert {
        (k, i, o) for k, o in itertools.product(*map(range, forward.shape)) if (i := int(forward[k, o])) >= 0
    } == every
    assert {
        (k, i, o) for k, i in itertools.product(*map(range, backward.shape)) if (o := int(backward[k, i])) >= 0
    } == every
    # spconv counts the first half of a mirrored kernel only.
    exact = [sum(k == offset for k, _, _ in every) for offset in range(volume)]
    assert counts.tolist() == ([*exact[: volume // 2], *[0] * (volume - volume // 2)] if "subm" in case else exact)
    split = algo is spconv.ConvAlgo.MaskSplitImplicitGemm and volume <= 32
    assert [len(part) for part in (masks, orders, filters)] == [1 + split] * 3
    assert [len(part) for part in (back_masks, back_orders)] == [0 if "subm" in case else 1 + split] * 2
    assert all(f.dtype == np.uint32 for f in filters)
    if split:
        assert int(filters[0][0]) | int(filters[1][0]) == (1 << volume) - 1
        assert not int(filters[0][0]) & int(filters[1][0])
    for table, sorted_masks, rows in ((forward, masks, orders), (backward, back_masks, back_orders)):
        for mask, order, keep in zip(sorted_masks, rows, filters, strict=False):
            assert mask.shape == (table.shape[1], (volume + 31) // 32)
            assert sorted(order.tolist()) == list(range(table.shape[1]))
            numbers = [sum((int(w) & 0xFFFFFFFF) << 32 * at for at, w in enumerate(row)) for row in mask.tolist()]
            bits = [sum((table[k, row] >= 0).item() << k for k in range(volume)) for row in order.tolist()]
            assert numbers == bits
            kept = [number & int(keep[0]) if volume <= 32 else number for number in numbers]
            assert kept == sorted(kept)
    inference = ops.get_indice_pairs_implicit_gemm(indices, 2, SHAPE, algo, **how(case), is_train=False, do_sort=False)
    assert inference[3].numel() == 0
    assert inference[5] == inference[7] == []
    assert inference[6][0].tolist() == list(range(out.shape[0]))


@pytest.mark.parametrize("case", CASES)
def test_both_tables_convolve_and_pool_alike(case, device):
    indices = random_sites(SHAPE, 2, 25, device=device).indices
    out, pairs, counts = ops.get_indice_pairs(indices, 2, SHAPE, None, **how(case))
    tables = ops.get_indice_pairs_implicit_gemm(indices, 2, SHAPE, spconv.ConvAlgo.MaskImplicitGemm, **how(case))
    features = torch.randn(len(indices), 4, dtype=torch.float64, device=device, requires_grad=True)
    filters = torch.randn(6, *how(case)["ksize"], 4, dtype=torch.float64, device=device, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, device=device)
    # By loops over offsets.
    want = torch.zeros(len(out), 6, dtype=torch.float64, device=device)
    most = torch.zeros(len(out), 4, dtype=torch.float64, device=device)
    for offset, cell in enumerate(filters.flatten(1, -2).unbind(1)):
        used = pairs[1, offset] >= 0
        source, target = pairs[0, offset][used].long(), pairs[1, offset][used].long()
        want = want.index_add(0, target, features[source] @ cell.T)
        most[target] = torch.maximum(most[target], features[source])
    slope = {"act_type": Activation.LeakyReLU, "act_alpha": 0.25}
    act = nn.LeakyReLU(0.25)
    by_list = functional.indice_conv(features, filters, pairs, counts, len(out), bias=bias, **slope)
    torch.testing.assert_close(by_list, act(want + bias))
    igemm = (tables[2], tables[3], tables[4], tables[5], tables[6], tables[7], len(out), tables[8])
    by_table = functional.implicit_gemm(features, filters, *igemm, True, "subm" in case, None, None, bias, **slope)
    torch.testing.assert_close(by_table, act(want + bias))
    back = torch.randn_like(want)
    exact = torch.autograd.grad(want, (features, filters), back)
    plain, joined, width = ops.implicit_gemm(
        features, filters, tables[2], tables[4], tables[6], len(out), tables[8], True, "subm" in case
    )
    torch.testing.assert_close(plain, want)
    mask = tables[4][0].long()
    tiles = [mask[at : at + width] for at in range(0, len(mask), width)]
    for tile, got in zip(tiles, joined[0].long(), strict=True):
        for word in range(mask.shape[1]):
            assert int(got[word]) == int(np.bitwise_or.reduce(tile[:, word].cpu().numpy()))
    gradients = [
        torch.autograd.grad(plain, (features, filters), back),
        ops.indice_conv_backward(features, filters, back, pairs, counts, False, "subm" in case),
        ops.implicit_gemm_backward(features, filters, back, *igemm[:6], joined, tables[8], width, "subm" in case),
    ]
    for got in gradients:
        torch.testing.assert_close(got[0], exact[0])
        torch.testing.assert_close(got[1], exact[1])
    # From the outputs back to the inputs.
    returned = ops.indice_conv(
        want.detach(), filters.detach().movedim(-1, 0).movedim(1, -1), pairs, counts, len(indices), True
    )
    torch.testing.assert_close((returned * features).sum(), want.square().sum())
    # Pools: none below 0, and means over what is there.
    for pooled in (
        functional.indice_maxpool(features, pairs, counts, len(out)),
        functional.indice_maxpool_implicit_gemm(features, tables[2], tables[3], len(out)),
    ):
        torch.testing.assert_close(pooled, most)
    upstream = torch.randn_like(most)
    for got in (
        ops.indice_maxpool_backward(features, most, upstream, pairs, counts),
        ops.indice_maxpool_implicit_gemm_backward(features, most, upstream, tables[3]),
    ):
        torch.testing.assert_close(got, torch.autograd.grad(pooled, features, upstream, retain_graph=True)[0])
    mean, number = ops.indice_avgpool_implicit_gemm(features, tables[2], len(out), True)
    assert number.tolist() == (tables[2] >= 0).sum(0).tolist()
    used = (pairs >= 0).all(0)
    total = torch.zeros_like(most).index_add(0, pairs[1][used].long(), features[pairs[0][used].long()])
    torch.testing.assert_close(mean * number[:, None], total.detach().where(number[:, None] > 0, 0))
    got = ops.indice_avgpool_implicit_gemm_backward(upstream, tables[3], number)
    torch.testing.assert_close(got, torch.autograd.grad(mean, features, upstream)[0])


def test_features_that_tie_get_all_of_the_gradient_in_spconvs_backward():
    pairs = torch.tensor([[[0, 1]], [[0, 0]]], dtype=torch.int32)
    features, out = torch.tensor([[2.0], [2.0]]), torch.tensor([[2.0]])
    assert ops.indice_maxpool_backward(features, out, torch.tensor([[3.0]]), pairs, None).tolist() == [[3.0], [3.0]]


def test_tables_that_do_not_fit_are_refused():
    indices = random_sites(SHAPE, 1, 9).indices
    tables = ops.get_indice_pairs_implicit_gemm(indices, 1, SHAPE, None, **how("subm"))
    rest = (tables[4], tables[6], 9, tables[8], False, True)
    with pytest.raises(InsumShapeError, match=r"'pair_fwd' has shape \(27, 9\)(.|\n)*expected shape \(8, 9\)"):
        ops.implicit_gemm(torch.randn(9, 2), torch.randn(2, 2, 2, 2, 2), tables[2], *rest)
    with pytest.raises(InsumDtypeError, match="int8 convolutions are not supported"):
        ops.implicit_gemm(torch.randn(9, 2), torch.randn(2, 3, 3, 3, 2), tables[2], *rest, scale=torch.ones(2))
    with pytest.raises(InsumRangeError):
        ops.implicit_gemm(torch.randn(3, 2), torch.randn(2, 3, 3, 3, 2), tables[2], *rest)
    with pytest.raises(InsumNameError, match=r"no activation 'Tanh'(.|\n)*None_, ReLU, Sigmoid, LeakyReLU"):
        spconv.SparseConvolution(3, 2, 2, act_type="Tanh")
    assert ops.get_conv_output_size([13, 7], [-1, 3], [1, 1], [0, 0], [1, 1]) == [1, 5]
    with pytest.raises(ValueError, match="'kernel_size' is"):
        ops.get_deconv_output_size([8], [-1], [1], [0], [1], [0])


class TestStoredPairs:
    def layers(self) -> tuple[nn.Module, nn.Module, spconv.SparseConvTensor]:
        down = spconv.SparseConv3d(4, 6, 3, 2, 1, indice_key="k", dtype=torch.float64)
        up = spconv.SparseInverseConv3d(6, 4, 3, "k", dtype=torch.float64)
        sites = random_sites(SHAPE, 2, 25)
        return down, up, spconv.SparseConvTensor(torch.randn(50, 4, dtype=torch.float64), sites.indices, SHAPE, 2)

    @pytest.mark.parametrize("kind", [IndiceData, ImplicitGemmIndiceData])
    def test_a_callers_pairs_are_inverted(self, kind):
        down, up, x = self.layers()
        y = down(x)
        stored = y.find_indice_pair("k")
        assert isinstance(stored, IndiceData)
        assert not isinstance(stored, ImplicitGemmIndiceData)
        assert not isinstance(y, IndiceData)
        moves = ([3] * 3, [2] * 3, [1] * 3, [1] * 3)
        shapes = (SHAPE, y.spatial_shape, False, spconv.ConvAlgo.Native, *moves)
        if kind is IndiceData:
            theirs = IndiceData(y.indices, x.indices, stored.indice_pairs, stored.indice_pair_num, *shapes)
        else:
            tables = ops.get_indice_pairs_implicit_gemm(
                x.indices, 2, SHAPE, None, [3] * 3, [2] * 3, [1] * 3, [1] * 3, [0] * 3
            )
            theirs = ImplicitGemmIndiceData(y.indices, x.indices, *tables[2:], *shapes)
        assert isinstance(theirs, kind)
        names = ("indices", "out_indices", "is_subm", "ksize", "stride", "padding", "dilation", "algo", "spatial_shape")
        assert all(hasattr(data, name) for data in (stored, theirs) for name in names)
        other = y.shadow_copy()
        other.indice_dict = {"k": theirs}
        torch.testing.assert_close(up(other).features, up(y).features)
        assert torch.equal(up(other).indices, x.indices)

    def test_a_callers_submanifold_pairs_are_shared(self):
        _, _, x = self.layers()
        layer = spconv.SubMConv3d(4, 5, 3, indice_key="s", dtype=torch.float64)
        out, pairs, counts = ops.get_indice_pairs(x.indices, 2, SHAPE, None, **how("subm"))
        moves = ([3] * 3, [1] * 3, [1] * 3, [1] * 3)
        data = IndiceData(out, x.indices, pairs, counts, SHAPE, SHAPE, True, None, *moves)
        want = layer(x).features
        y = layer(spconv.SparseConvTensor(x.features, x.indices, SHAPE, 2, indice_dict={"s": data}))
        torch.testing.assert_close(y.features, want)
        with pytest.raises(InsumFormatError, match="is no kernel map, got str"):
            layer(spconv.SparseConvTensor(x.features, x.indices, SHAPE, 2, indice_dict={"s": "what"}))

    def test_wrong_pairs_are_refused(self):
        down, up, x = self.layers()
        y = down(x)
        stored = y.find_indice_pair("k")
        moves = ([3] * 3, [2] * 3, [1] * 3, [1] * 3)
        rest = (stored.indice_pair_num, SHAPE, y.spatial_shape, False, None, *moves)
        for row, text in ((0, "input voxels"), (1, "output voxels")):
            bad = stored.indice_pairs.clone()
            bad[row, 13, 0] = 10**6
            y.indice_dict = {"k": IndiceData(y.indices, x.indices, bad, *rest)}
            with pytest.raises(InsumRangeError, match=f"pairs of {text} point outside"):
                up(y)
        y.indice_dict = {"k": IndiceData(y.indices, x.indices, stored.indice_pairs[:, :5], *rest)}
        with pytest.raises(InsumShapeError, match="expected .offsets, output voxels"):
            up(y)


def test_a_base_without_parameters():
    """A module with a weight of its own, here a product of two, and an activation."""

    class LowRank(spconv.conv.SparseConvolutionBase, spconv.SparseModule):
        def __init__(self) -> None:
            spconv.SparseModule.__init__(self)
            spconv.conv.SparseConvolutionBase.__init__(self, 3, 4, 6, 3, subm=True, act_type=Activation.ReLU)
            self.left, self.right = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(2, 27 * 4))

        def forward(self, x: spconv.SparseConvTensor) -> spconv.SparseConvTensor:
            weight = (self.left @ self.right).reshape(self.weight_shape)
            return self._conv_forward(self.training, x, weight, None, act_type=self.act_type)

    layer, plain = LowRank(), spconv.SubMConv3d(4, 6, 3, bias=False)
    with torch.no_grad():
        plain.weight.copy_((layer.left @ layer.right).reshape(plain.weight.shape))
    x = spconv.SparseConvTensor(torch.randn(50, 4), random_sites(SHAPE, 2, 25).indices, SHAPE, 2)
    y = layer(x)
    torch.testing.assert_close(y.features, plain(x).features.relu())
    y.features.sum().backward()
    assert layer.left.grad.any()
    assert isinstance(plain, spconv.conv.SparseConvolutionBase)
    with pytest.raises(InsumFormatError, match="int8 convolutions are not supported"):
        plain._conv_forward(True, x, plain.weight, None, channel_scale=torch.ones(6))


@pytest.mark.parametrize("kind", [Activation.ReLU, Activation.Sigmoid, "LeakyReLU", SimpleNamespace(name="None_")])
def test_activations_of_layers(kind):
    layer = spconv.SparseConvolution(3, 4, 4, subm=True, act_type=kind, act_alpha=0.1)
    plain = spconv.SubMConv3d(4, 4, 3)
    plain.load_state_dict(layer.state_dict())
    name = getattr(kind, "name", kind)
    act = {"ReLU": nn.ReLU(), "Sigmoid": nn.Sigmoid(), "LeakyReLU": nn.LeakyReLU(0.1), "None_": nn.Identity()}[name]
    x = spconv.SparseConvTensor(torch.randn(50, 4), random_sites(SHAPE, 2, 25).indices, SHAPE, 2)
    torch.testing.assert_close(layer(x).features, act(plain(x).features))
    # spconv 2.3.8 activates the convolution and then, with the layer's own activation, the sum. Its quantized reference
    # modules pass no activation to `_conv_forward`, so there only the sum is activated.
    for mode in (True, False):
        layer.train(mode)
        torch.testing.assert_close(layer(x, add_input=x).features, act(act(plain(x).features) + x.features))
        total = layer._conv_forward(mode, x, layer.weight, layer.bias, add_input=x)
        torch.testing.assert_close(total.features, act(plain(x).features + x.features))


class TestHashTable:
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_is_a_dictionary(self, dtype, device):
        table, twin = HashTable(device, dtype, torch.int64, 500), {}
        generator = torch.Generator().manual_seed(0)
        for _ in range(6):
            keys = torch.randint(-50, 50, (40,), generator=generator).to(dtype)
            values = torch.randint(0, 10**6, (40,), generator=generator)
            table.insert(keys.to(device), values.to(device))
            twin.update(zip(keys.tolist(), values.tolist(), strict=True))
            asked = torch.randint(-60, 60, (30,), generator=generator).to(dtype)
            found, missing = table.query(asked.to(device))
            assert missing.tolist() == [key not in twin for key in asked.tolist()]
            assert [v for v, gone in zip(found.tolist(), missing.tolist(), strict=True) if not gone] == [
                twin[key] for key in asked.tolist() if key in twin
            ]
            unknown = table.insert_exist_keys(asked.to(device), torch.arange(30, device=device))
            assert unknown.tolist() == [int(key not in twin) for key in asked.tolist()]
            twin.update({key: place for place, key in enumerate(asked.tolist()) if key in twin})
        keys, values, count = table.items()
        assert int(count) == len(twin)
        assert dict(zip(keys.tolist()[: len(twin)], values.tolist()[: len(twin)], strict=True)) == twin
        assert int(table.assign_arange_()) == len(twin)
        assert sorted(table.items()[1].tolist()[: len(twin)]) == list(range(len(twin)))

    def test_keys_alone_and_places_to_write_to(self):
        table = HashTable(torch.device("cpu"), torch.int32, torch.float32)
        empty = table.query(torch.tensor([0, 1], dtype=torch.int32))
        assert empty[1].tolist() == [True, True]
        keys = torch.tensor([4, 2, 4], dtype=torch.int32)
        table.insert(keys, torch.tensor([1.0, 2.0, 3.0]))
        table.insert(torch.tensor([2, 9], dtype=torch.int32))
        out = torch.full((3,), -7.0)
        assert table.query(torch.tensor([2, 9, 5], dtype=torch.int32), out)[0] is out
        assert out.tolist() == [2.0, 0.0, -7.0]
        assert table.items()[0].tolist() == [2, 4, 9]

    def test_refuses(self):
        cpu = torch.device("cpu")
        with pytest.raises(InsumDtypeError, match="'key_dtype' must be int32 or int64"):
            HashTable(cpu, torch.float32, torch.int32)
        with pytest.raises(InsumShapeError, match="'max_size' is -1"):
            HashTable(torch.device("meta"), torch.int32, torch.int32)
        small = HashTable(cpu, torch.int32, torch.int32, 1)
        small.is_cpu = False
        with pytest.raises(InsumShapeError, match="'max_size' is 1, and there are 2 keys"):
            small.insert(torch.tensor([1, 2], dtype=torch.int32))
        assert small.items()[2].item() == 0
        table = HashTable(cpu, torch.int32, torch.int32)
        with pytest.raises(InsumDtypeError, match=r"'keys' must be int32, got torch.int64"):
            table.query(torch.tensor([1]))
        with pytest.raises(InsumShapeError, match="expected one axis"):
            table.insert(torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32))


def test_small_functions(device):
    coords = torch.tensor([[2, 1], [0, 2], [2, 0], [-1, 4], [0, 0]], dtype=torch.int32, device=device)
    rows, counts = ops.global_pool_rearrange(coords, 3)
    assert counts.tolist() == [2, 0, 2]
    assert rows.tolist() == [[1, 4, -1, -1, -1], [-1] * 5, [0, 2, -1, -1, -1]]
    assert (rows.dtype, counts.dtype) == (torch.int32, torch.int32)
    counter = torch.tensor([5], dtype=torch.int32)
    ops.maximum_value_int_(counter, 9)
    ops.maximum_value_int_(counter, 3)
    assert counter.item() == 9
    assert expand_nd(2, np.array([3, 4])) == [3, 4]
    with pytest.raises(InsumShapeError):
        expand_nd(3, (1, 2))
    indices = torch.tensor([[0, 2], [1, 0]], device=device)
    updates = torch.arange(6.0, device=device).reshape(2, 3).requires_grad_()
    dense = scatter_nd(indices, updates, [2, 3, 3])
    assert dense[0, 2].tolist() == [0.0, 1.0, 2.0]
    assert dense[1, 0].tolist() == [3.0, 4.0, 5.0]
    dense.sum().backward()
    assert updates.grad.sum() == 6


def test_constants_are_facts_and_hints(monkeypatch):
    assert constants.ALL_WEIGHT_IS_KRSC
    assert not constants.is_amp_enabled()
    assert constants.PYTORCH_VERSION >= [2, 0]
    # As OpenPCDet does, and spconv's README says: what changes no result may be set.
    for name in [name for name in vars(constants) if name.startswith("SPCONV_")]:
        value = getattr(constants, name)
        monkeypatch.setattr(constants, name, not value)
        assert getattr(constants, name) == (not value)
    constants.SAVED_WEIGHT_LAYOUT = ""
    for name, value in (("SAVED_WEIGHT_LAYOUT", "RSCK"), ("ALL_WEIGHT_IS_KRSC", False), ("FILTER_HWIO", True)):
        with pytest.raises(InsumNameError, match=rf"constants\.{name} is .*got {value!r}(.|\n)*convert_state_dict"):
            setattr(constants, name, value)
    assert isinstance(cppcore.get_current_stream(), int)
    assert len(cppcore.get_arch()) == 2


def test_modules_of_several_tensors():
    for kind in (spconv.JoinTable, spconv.AddTable, spconv.AddTableMisaligned):
        assert kind().input_spatial_size([4, 5]) == [4, 5]
    assert spconv.ConcatTable().add(spconv.Identity()).input_spatial_size([4, 5]) == [4, 5]
    x = spconv.SparseConvTensor(torch.ones(3, 1), torch.tensor([[0, 0], [0, 1], [0, 2]], dtype=torch.int32), [3], 1)
    assert repr(x) == "SparseConvTensor[shape=torch.Size([3, 1])]"
    assert {kind.__name__ for kind in spconv.pool.ALL_POOL_LAYERS} >= {"SparseMaxPool", "SparseAvgPool3d"}
    assert len(spconv.conv.DEFAULT_SPARSE_CONV_TYPES) == 16
    spatial = importlib.import_module("insum_nn.layers.spconv.spatial")
    assert spatial.RemoveDuplicate is spconv.RemoveDuplicate


@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
def test_generators_of_fixed_dimensions(ndim):
    edges, ranges = [1.0, 0.5, 2.0, 1.0][:ndim], [0.0] * ndim + [4.0] * ndim
    points = (torch.rand(200, ndim + 1) * 5 - 0.5).float()
    arguments = (edges, ranges, ndim + 1, 50, 3)
    want = spconv.utils.PointToVoxel(*arguments)(points)
    mean = spconv.utils.PointToVoxel(*arguments)(points, empty_mean=True)
    cpu = getattr(spconv.utils, f"Point2VoxelCPU{ndim}d")(*arguments)
    # What has `cpu().numpy()`, as cumm's tensors have.
    like_cumm = SimpleNamespace(cpu=lambda: SimpleNamespace(numpy=points.numpy))
    for given in (points, points.numpy(), like_cumm):
        for got, exact in zip(cpu.point_to_voxel(given), want, strict=True):
            assert np.array_equal(got.numpy(), exact.numpy())
            assert np.array_equal(got.numpy_view(), exact.numpy())
            assert type(got + 1) is torch.Tensor
    assert torch.equal(cpu.point_to_voxel_empty_mean(points)[0], mean[0])
    gpu = getattr(spconv.utils, f"Point2VoxelGPU{ndim}d")(*arguments)
    assert torch.equal(gpu.point_to_voxel_hash(points, empty_mean=True)[0], mean[0])
    assert cpu.grid_size == gpu.grid_size == spconv.utils.PointToVoxel(*arguments).grid_size
    more = ndim + 1
    with pytest.raises(InsumShapeError, match=f"expected {ndim} edges"):
        getattr(spconv.utils, f"Point2VoxelCPU{ndim}d")([1.0] * more, [0.0] * more + [4.0] * more, more, 50, 3)

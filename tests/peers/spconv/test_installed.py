"""Our point-cloud layers beside the installed spconv on the CPU: values, gradients, weights, swapped models.

On the CPU spconv has odd submanifold kernels, convolutions and the largest of a window; the rest is left out here.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import insum_nn.layers.spconv as ours
from insum_nn.layers.spconv.utils import PointToVoxel, gather_features_by_pc_voxel_id
from insum_nn.layers.swap import swap
from tests.layers.spconv.spconv_record import CASES as CASES_OF_RECORD
from tests.layers.spconv.spconv_record import RECORD, digest
from tests.ops.conv_oracle import random_sites

# Of what spconv does, in its own files.
pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]

SHAPE = [12, 11, 13]


@pytest.fixture(scope="module")
def theirs() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            package = importlib.import_module("spconv.pytorch")
        except ImportError as error:
            pytest.skip(f"needs spconv 2.3, pip install spconv: {error}")
    if not torch.cuda.is_available():
        # Its backward asks for the current CUDA stream on the CPU too.
        for part in ("ops", "functional"):
            vars(getattr(package, part))["get_current_stream"] = lambda: 0
    threads = torch.get_num_threads()
    # Its CPU code adds rows up in several threads without atomics.
    torch.set_num_threads(1)
    yield package
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES_OF_RECORD)
def test_the_record_is_of_the_installed_version(theirs, case):
    assert digest(theirs, case) == json.loads(RECORD.read_text())[case]


def cloud(channels: int = 8, count: int = 150) -> tuple[torch.Tensor, torch.Tensor]:
    sites = random_sites(SHAPE, 2, count)
    return torch.randn(sites.num_sites, channels), sites.indices


def in_order(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and voxels in lexicographic order of the voxels, which spconv does not keep."""
    keys = [x.batch_size, *x.spatial_shape]
    flat = x.indices[:, 0].long()
    for axis, extent in enumerate(keys[1:], 1):
        flat = flat * extent + x.indices[:, axis]
    order = flat.argsort()
    return x.features[order], x.indices[order]


CASES = {
    "subm": ("SubMConv3d", (8, 6, 3), {}),
    "subm without bias": ("SubMConv3d", (8, 6, 3), {"bias": False}),
    "subm 5 1 3": ("SubMConv3d", (8, 6, (5, 1, 3)), {}),
    "subm dilated": ("SubMConv3d", (8, 6, 3), {"dilation": 2}),
    "subm padded": ("SubMConv3d", (8, 6, 3), {"padding": 1, "indice_key": "a"}),
    "pointwise": ("SubMConv3d", (8, 6, 1), {}),
    "pointwise strided kind": ("SparseConv3d", (8, 6, 1), {"bias": False}),
    # One cell, but not on every voxel: spconv keeps these weights as their shape says.
    "one cell, stride 2": ("SparseConv3d", (8, 6, 1), {"stride": 2}),
    "strided": ("SparseConv3d", (8, 6, 3), {"stride": 2, "padding": 1}),
    "even": ("SparseConv3d", (8, 6, 2), {"stride": 2, "bias": False}),
    "uneven": ("SparseConv3d", (8, 6, (3, 2, 1)), {"stride": (2, 1, 1), "padding": (1, 0, 0)}),
    "dilated": ("SparseConv3d", (8, 6, 3), {"dilation": 2, "padding": 2}),
    "transposed": ("SparseConvTranspose3d", (8, 6, 3), {"stride": 2, "padding": 1}),
    "transposed even": ("SparseConvTranspose3d", (8, 6, 2), {"stride": 2}),
    "max": ("SparseMaxPool3d", (2, 2), {}),
    "max overlapping": ("SparseMaxPool3d", (3,), {"stride": 2, "padding": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_layers(theirs, name):
    kind, arguments, named = CASES[name]
    torch.manual_seed(0)
    their_layer = getattr(theirs, kind)(*arguments, **named)
    our_layer = getattr(ours, kind)(*arguments, **named)
    state = their_layer.state_dict()
    assert {k: v.shape for k, v in our_layer.state_dict().items()} == {k: v.shape for k, v in state.items()}
    our_layer.load_state_dict(state)
    features, indices = cloud()
    results = []
    for lib, layer in ((theirs, their_layer), (ours, our_layer)):
        leaf = features.clone().requires_grad_()
        y = layer(lib.SparseConvTensor(leaf, indices, SHAPE, 2))
        values, voxels = in_order(y)
        generator = torch.Generator().manual_seed(1)
        values.backward(torch.randn(values.shape, generator=generator))
        gradients = [leaf.grad, *(p.grad for p in layer.parameters())]
        results.append((values, voxels, y.spatial_shape, y.dense(), gradients))
    (want, want_voxels, want_shape, want_dense, want_grads), (got, voxels, shape, dense, grads) = results
    assert torch.equal(voxels, want_voxels)
    assert list(shape) == list(want_shape)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dense, want_dense, rtol=1e-4, atol=1e-5)
    for mine, other in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def network(lib: Any) -> nn.Module:
    """On the CPU spconv's convolutions take no bias in evaluation."""
    return lib.SparseSequential(
        lib.SubMConv3d(8, 16, 3, padding=1, bias=False, indice_key="s0"),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        lib.SparseConv3d(16, 24, 3, stride=2, padding=1, bias=False, indice_key="d1"),
        lib.SparseBatchNorm(24),
        lib.SparseReLU(),
        lib.SubMConv3d(24, 24, 3, indice_key="s1", bias=False),
        lib.SparseMaxPool3d(2, 2, indice_key="p"),
        lib.SparseInverseConv3d(24, 16, 2, indice_key="p", bias=False),
        lib.SparseInverseConv3d(16, 12, 3, indice_key="d1", bias=False),
        lib.SubMConv3d(12, 5, 1),
        lib.SparseIdentity(),
        lib.Identity(),
        lib.ToDense(),
        nn.Conv3d(5, 2, 1),
    )


@pytest.mark.parametrize("train", [False, True])
def test_a_swapped_model(theirs, train):
    torch.manual_seed(0)
    model = network(theirs).train(train)
    swapped = copy.deepcopy(model)
    parameters = list(swapped.parameters())
    report = swap(swapped)
    new = report.model
    assert not any(row.action == "left" and "spconv" in row.layer for row in report.rows), str(report)
    assert not any(type(m).__module__.startswith("spconv") for m in new.modules()), str(report)
    assert all(a is b for a, b in zip(new.parameters(), parameters, strict=True))
    assert list(new.state_dict()) == list(model.state_dict())
    features, indices = cloud()
    features = features + 2
    want = model(theirs.SparseConvTensor(features, indices, SHAPE, 2))
    got = new(ours.SparseConvTensor(features, indices, SHAPE, 2))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    want.square().mean().backward()
    got.square().mean().backward()
    for mine, other in zip(new.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-2, atol=1e-4)
    # The same network of our classes takes the weights, with and without metadata, and gives them back.
    x = ours.SparseConvTensor(features, indices, SHAPE, 2)
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    want = model.eval()(theirs.SparseConvTensor(features, indices, SHAPE, 2))
    own = [network(ours).eval() for _ in range(3)]
    own[0].load_state_dict(model.state_dict())
    own[1].load_state_dict(plain)
    own[2].load_state_dict(new.state_dict())
    for twin in own:
        torch.testing.assert_close(twin(x), want, rtol=1e-3, atol=1e-4)
    new.load_state_dict(own[0].state_dict())
    torch.testing.assert_close(new.eval()(x), want, rtol=1e-3, atol=1e-4)
    for state in (own[0].state_dict(), dict(own[0].state_dict()), ours.spconv_state_dict(own[0])):
        back = network(theirs).eval()
        back.load_state_dict(state)
        torch.testing.assert_close(back(theirs.SparseConvTensor(features, indices, SHAPE, 2)), want)


def test_constructors_take_the_same_arguments(theirs):
    for name in vars(theirs):
        kind = getattr(theirs, name)
        if not (inspect.isclass(kind) and issubclass(kind, nn.Module)):
            continue
        assert hasattr(ours, name), name
        expected = [p for p in inspect.signature(kind).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        taken = inspect.signature(getattr(ours, name)).parameters
        free = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        missing = [p.name for p in expected if p.name not in taken and not free]
        assert missing == [], f"{name} lacks {missing}"
        shared = list(taken)[: min(len(expected), 10)]
        assert shared == [p.name for p in expected][: len(shared)], name


@pytest.mark.parametrize("most", [(500, 4), (20, 2)], ids=str)
def test_points_to_voxels(theirs, most):
    utilities = importlib.import_module("spconv.pytorch.utils")
    points = torch.rand(2000, 4) * 12 - 1
    edges, ranges = [1.0, 0.5, 2.0], [0.0, 0.0, 0.0, 10.0, 10.0, 10.0]
    want = utilities.PointToVoxel(edges, ranges, 4, *most, torch.device("cpu"))
    got = PointToVoxel(edges, ranges, 4, *most)
    for mine, other in zip(got.generate_voxel_with_id(points), want.generate_voxel_with_id(points), strict=True):
        assert torch.equal(mine, other)
        assert mine.dtype == other.dtype
    for name in ("grid_size", "grid_stride", "vsize", "coors_range"):
        assert list(getattr(got, name)) == list(getattr(want, name))
    assert got.ndim == want.ndim
    ids = got.generate_voxel_with_id(points)[3]
    values = torch.randn(most[0], 3)
    back = utilities.gather_features_by_pc_voxel_id(values, ids)
    assert torch.equal(gather_features_by_pc_voxel_id(values, ids), back)


def test_sums_and_sizes(theirs):
    first, second = (random_sites(SHAPE, 2, 60, seed=seed).indices for seed in (0, 1))
    features = [torch.randn(120, 4) for _ in range(2)]
    sums = []
    for lib in (theirs, ours):
        tensors = [lib.SparseConvTensor(f, i, SHAPE, 2) for f, i in zip(features, (first, second), strict=True)]
        sums.append(lib.functional.sparse_add(*tensors))
    assert torch.equal(sums[1].indices, sums[0].indices)
    torch.testing.assert_close(sums[1].features, sums[0].features)
    how = ([19, 18, 17], [3, 2, 5], [2, 1, 3], [1, 0, 2], [1, 1, 1])
    assert ours.ops.get_conv_output_size(*how) == theirs.ops.get_conv_output_size(*how)
    assert ours.ops.get_deconv_output_size(*how, [0, 0, 1]) == theirs.ops.get_deconv_output_size(*how, [0, 0, 1])


PAIRS = {
    "subm": ([3, 3, 3], [1] * 3, [0] * 3, [1] * 3, True, False),
    "subm dilated": ([3, 1, 5], [1] * 3, [1] * 3, [2, 1, 1], True, False),
    "one cell": ([1, 1, 1], [1] * 3, [0] * 3, [1] * 3, True, False),
    "conv": ([3, 2, 3], [2, 2, 1], [1, 0, 1], [1, 1, 2], False, False),
    "transposed": ([2, 3, 2], [2, 1, 2], [0] * 3, [1] * 3, False, True),
}


@pytest.mark.parametrize("name", PAIRS)
def test_functions_over_tables(theirs, name):
    kernel, stride, padding, dilation, subm, transposed = PAIRS[name]
    features, indices = cloud(4, 60)
    pools, ways = [], []
    for lib in (theirs, ours):
        out, pairs, counts = lib.ops.get_indice_pairs(
            indices, 2, SHAPE, lib.ConvAlgo.Native, kernel, stride, padding, dilation, [0] * 3, subm, transposed
        )
        # Output rows by their voxel, for the two orders differ.
        names = [tuple(row) for row in out.tolist()]
        used = (pairs >= 0).all(0)
        rows = zip(used.nonzero()[:, 0].tolist(), pairs[0][used].tolist(), pairs[1][used].tolist(), strict=True)
        found = {(offset, source, names[target]) for offset, source, target in rows}
        order = torch.tensor(sorted(range(len(names)), key=names.__getitem__))
        generator = torch.Generator().manual_seed(3)
        leaf = features.clone().requires_grad_()
        filters = torch.randn(6, *kernel, 4, generator=generator).requires_grad_()
        table = (pairs, counts, len(out))
        conv = lib.functional.indice_subm_conv if subm else lib.functional.indice_conv
        result = conv(leaf, filters, *table, lib.ConvAlgo.Native)
        back = torch.empty(len(out), 6)
        back[order] = torch.randn(len(out), 6, generator=generator)
        result.backward(back)
        again = lib.ops.indice_conv_backward(features, filters.detach(), back, pairs, counts, False, subm)
        ways.append([pairs.shape, counts.tolist(), found, result[order], leaf.grad, filters.grad, *again])
        pooled = lib.ops.indice_maxpool(features, *table)
        share = torch.empty(len(out), 4)
        share[order] = torch.randn(len(out), 4, generator=generator)
        pools.append([pooled[order], lib.ops.indice_maxpool_backward(features, pooled, share, pairs, counts)])
    for mine, other in zip(ways[1], ways[0], strict=True):
        if isinstance(mine, torch.Tensor):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
        else:
            assert mine == other
    if not subm:
        # The middle of a submanifold kernel is no pair that spconv counts, so that its pool on the CPU leaves it out.
        torch.testing.assert_close(pools[1], pools[0])


def test_names_and_their_signatures(theirs):
    listed = {
        "ops": ops_names,
        "functional": [
            "indice_conv",
            "implicit_gemm",
            "indice_inverse_conv",
            "indice_subm_conv",
            "indice_maxpool",
            "indice_maxpool_implicit_gemm",
            "indice_avgpool_implicit_gemm",
        ],
        "core": ["IndiceData", "ImplicitGemmIndiceData", "expand_nd", "scatter_nd", "ConvAlgo"],
        "conv": [
            "SparseConvolutionBase",
            "SparseConvolution",
            "DEFAULT_SPARSE_CONV_TYPES",
            "SubMConv3d",
            "SparseConv2d",
        ],
        "hash": ["HashTable"],
        "pool": ["ALL_POOL_LAYERS", "SparseMaxPool3d"],
        # Not PrintTensorMeta and PrintCurrentTime: only spconv's quantization, which is not here, uses them.
        "modules": ["SparseSyncBatchNorm", "is_sparse_conv", "is_spconv_module"],
        "tables": ["JoinTable", "AddTable", "AddTableMisaligned", "ConcatTable"],
        # Without the classes that pass torch's memory to spconv's compiled code.
        "cppcore": ["get_current_stream", "get_arch"],
    }
    for home, names in listed.items():
        own, peer = (importlib.import_module(f"{root}.{home}") for root in (ours.__name__, theirs.__name__))
        for name in names:
            mine, other = getattr(own, name), getattr(peer, name)
            # Applied autograd functions take their forward's arguments.
            other = getattr(getattr(other, "__self__", None), "forward", other)
            if not callable(mine):
                continue
            expected = [p for p in inspect.signature(other).parameters if p != "ctx"]
            taken = inspect.signature(mine).parameters
            # `*rest, **named` goes to a function with the others.
            plain = [p.name for p in taken.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            assert plain[: len(expected)] == expected[: len(plain)], f"{home}.{name}"
            assert len(plain) >= len(expected) or "named" in taken, f"{home}.{name}"


ops_names = [
    "get_indice_pairs",
    "get_indice_pairs_implicit_gemm",
    "indice_conv",
    "indice_conv_backward",
    "implicit_gemm",
    "implicit_gemm_backward",
    "indice_maxpool",
    "indice_maxpool_backward",
    "indice_maxpool_implicit_gemm",
    "indice_maxpool_implicit_gemm_backward",
    "indice_avgpool_implicit_gemm",
    "indice_avgpool_implicit_gemm_backward",
    "global_pool_rearrange",
    "maximum_value_int_",
    "get_conv_output_size",
    "get_deconv_output_size",
]


def test_members_of_a_tensor(theirs):
    features, indices = cloud()
    x, y = (package.SparseConvTensor(features, indices, SHAPE, 2) for package in (ours, theirs))
    assert {name for name in dir(y) if not name.startswith("__") and not hasattr(x, name)} == set()
    for name in ("thrust_allocator", "int8_scale", "is_quantized", "force_algo", "benchmark"):
        assert getattr(x, name) == getattr(y, name), name
    for each in (x, y):
        with pytest.raises(ValueError, match="quantized"):
            each.q_scale()
        assert torch.equal(each.dequantize().features, features)


def test_a_sum_takes_the_activation_of_the_layer(theirs):
    """On the CPU spconv activates no convolution; the layer's activation is then applied to the sum alone."""
    relu = importlib.import_module("cumm.tensorview").gemm.Activation.ReLU
    features, indices = cloud(4)
    results = []
    state: dict[str, torch.Tensor] = {}
    for package in (theirs, ours):
        layer = package.conv.SparseConvolution(3, 4, 4, 3, subm=True, bias=False, act_type=relu).eval()
        state = state or layer.state_dict()
        layer.load_state_dict(state)
        x = package.SparseConvTensor(features, indices, SHAPE, 2)
        results.append(layer._conv_forward(False, x, layer.weight, None, add_input=x).features.detach())
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    assert results[0].min() == 0


def test_representations(theirs):
    for kind, arguments, named in (
        ("SubMConv3d", (4, 8, 3), {"padding": 1, "bias": False, "indice_key": "a"}),
        ("SparseConv2d", (4, 8, (3, 1)), {"stride": 2, "dilation": (1, 2)}),
        ("SparseConvTranspose1d", (4, 8, 2), {}),
        ("SparseInverseConv3d", (4, 8, 2, "a"), {}),
        ("SparseMaxPool3d", (2, 2), {}),
    ):
        algo = {"algo": theirs.ConvAlgo.Native}
        peer = getattr(theirs, kind)(*arguments, **named, **algo)
        mine = getattr(ours, kind)(*arguments, **named, **algo)
        assert repr(mine).splitlines()[0] == repr(peer)
        assert repr(mine).splitlines()[1].strip() == mine.expression.splitlines()[0]
    features, indices = cloud()
    assert repr(ours.SparseConvTensor(features, indices, SHAPE, 2)) == repr(
        theirs.SparseConvTensor(features, indices, SHAPE, 2)
    )


def test_parameters_are_drawn_alike(theirs):
    for kind, arguments in (("SubMConv3d", (4, 8, 3)), ("SparseConv2d", (6, 8, (5, 1))), ("SparseConv3d", (4, 8, 1))):
        drawn = []
        for lib in (theirs, ours):
            torch.manual_seed(7)
            drawn.append(getattr(lib, kind)(*arguments).state_dict())
        torch.testing.assert_close(drawn[1], drawn[0], rtol=1e-6, atol=0)


def test_generators_of_fixed_dimensions(theirs):
    peers = importlib.import_module("spconv.utils")
    tv = importlib.import_module("cumm.tensorview")
    points = (torch.rand(500, 4) * 12 - 1).float()
    arguments = ([1.0, 0.5, 2.0], [0.0, 0.0, 0.0, 10.0, 10.0, 10.0], 4, 200, 3)
    shared = tv.from_numpy(points.numpy())
    # Not the means: spconv's add up over all voxels before.
    peer = peers.Point2VoxelCPU3d(*arguments)
    want = peer.point_to_voxel(shared)
    for given in (shared, points, points.numpy()):
        got = ours.utils.Point2VoxelCPU3d(*arguments).point_to_voxel(given)
        for mine, other in zip(got, want, strict=True):
            torch.testing.assert_close(mine.numpy(), other.numpy())

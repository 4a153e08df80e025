"""The names of spconv beside its layers: voxels from points, tables of pairs, functions over them."""

from __future__ import annotations

import importlib
import math

import pytest
import torch

import insum_nn.layers.spconv as spconv
from insum_nn.errors import InsumDeviceError, InsumDtypeError, InsumRangeError, InsumShapeError
from insum_nn.layers.spconv import functional, ops
from insum_nn.layers.spconv.utils import PointToVoxel, gather_features_by_pc_voxel_id
from tests.ops.conv_oracle import random_sites


def test_submodules_hold_the_same_classes():
    homes = {
        "conv": ["SubMConv3d", "SparseConv2d", "SparseInverseConv1d", "SparseConvTranspose4d", "SparseConvolution"],
        "pool": ["SparseMaxPool3d", "SparseAvgPool2d", "SparseGlobalMaxPool"],
        "modules": ["SparseModule", "SparseSequential", "SparseBatchNorm", "assign_name_for_sparse_modules"],
        "tables": ["AddTable", "JoinTable", "ConcatTable", "AddTableMisaligned"],
        "core": ["SparseConvTensor"],
        "identity": ["Identity"],
        "ops": ["ConvAlgo"],
        "functional": ["sparse_add"],
    }
    for home, names in homes.items():
        module = importlib.import_module(f"insum_nn.layers.spconv.{home}")
        for name in names:
            assert getattr(module, name) is getattr(spconv, name)
    # Projects import a name from whichever of spconv's files they saw it in.
    shared = ["ConvAlgo", "SparseConvTensor", "SparseModule", "IndiceData", "ImplicitGemmIndiceData", "expand_nd"]
    seen = {"conv": shared, "pool": shared, "tables": shared[1:3], "spatial": ["SparseModule"], "ops": ["AlgoHint"]}
    seen |= {"core": ["AlgoHint", "CUDAKernelTimer", *shared[:2]], "tools": ["CUDAKernelTimer"]}
    for home, names in seen.items():
        module = importlib.import_module(f"insum_nn.layers.spconv.{home}")
        for name in names:
            assert getattr(module, name) is getattr(spconv.core, name, spconv.SparseModule)
    # How OpenPCDet asks which release it has.
    assert float(spconv.__version__[2:]) >= 2.2
    assert spconv.__version__ == ".".join(map(str, spconv.SPCONV_VERSION_NUMBERS))
    assert spconv.modules.is_spconv_module(spconv.SparseReLU())
    assert not spconv.modules.is_spconv_module(torch.nn.ReLU())
    assert spconv.modules.is_sparse_conv(spconv.SubMConv3d(2, 2, 3, algo=spconv.ConvAlgo.Native))
    x = torch.ones(2)
    assert spconv.Identity()(x) is x


def voxels_by_loops(points, edges, ranges, most_voxels, most_points, empty_mean):
    """The same in Python: voxels by their key in the order of points."""
    d = len(edges)
    cells = [round((ranges[d + a] - ranges[a]) / edges[a]) for a in range(d)]
    ids, members = [], {}
    numbers: dict[tuple[int, ...], int] = {}
    for row, point in enumerate(points.tolist()):
        key: tuple[int, ...] | None = None
        if all(math.isfinite(v) for v in point[:d]):
            key = tuple(math.floor((point[a] - ranges[a]) / edges[a]) for a in reversed(range(d)))
            if any(not 0 <= k < c for k, c in zip(key, reversed(cells), strict=True)):
                key = None
        if key is None or (key not in numbers and len(numbers) == most_voxels):
            ids.append(-1)
            continue
        number = numbers.setdefault(key, len(numbers))
        ids.append(number)
        members.setdefault(number, [])
        if len(members[number]) < most_points:
            members[number].append(row)
    voxels = torch.zeros(len(numbers), most_points, points.shape[1], dtype=points.dtype)
    for number, rows in members.items():
        voxels[number, : len(rows)] = points[rows]
        if empty_mean and rows:
            voxels[number, len(rows) :] = points[rows].mean(0)
    return voxels, list(numbers), [len(members[n]) for n in range(len(numbers))], ids


@pytest.mark.parametrize(
    ("edges", "ranges", "features", "most_voxels", "most_points"),
    [
        ([1.0, 2.0, 0.5], [-4.0, -4.0, -1.0, 4.0, 4.0, 1.0], 4, 1000, 5),
        ([1.0, 2.0, 0.5], [-4.0, -4.0, -1.0, 4.0, 4.0, 1.0], 3, 7, 2),
        ([0.25, 0.25], [0.0, 0.0, 1.0, 1.0], 5, 100, 3),
        # The last cells of a range that is no multiple of the edge are out of the grid.
        ([0.75], [0.0, 2.0], 1, 10, 100),
        ([1.0, 1.0], [0.0, 0.0, 4.0, 4.0], 2, 0, 4),
        ([1.0, 1.0], [0.0, 0.0, 4.0, 4.0], 2, 4, 0),
    ],
)
@pytest.mark.parametrize("empty_mean", [False, True])
def test_points_to_voxels(edges, ranges, features, most_voxels, most_points, empty_mean, device):
    torch.manual_seed(0)
    d = len(edges)
    least, greatest = torch.tensor(ranges[:d]), torch.tensor(ranges[d:])
    points = torch.rand(400, features, dtype=torch.float64)
    # Multiples of 1/64, so that no quotient is rounded; a tenth outside.
    points[:, :d] = ((points[:, :d] * 1.2 - 0.1) * (greatest - least) + least).mul(64).round() / 64
    points[7, 0] = float("nan")
    points[8, d - 1] = float("inf")
    want, cells, counts, ids = voxels_by_loops(points, edges, ranges, most_voxels, most_points, empty_mean)
    grid = PointToVoxel(edges, ranges, features, most_voxels, most_points, device)
    found = grid.generate_voxel_with_id(points.to(device), empty_mean=empty_mean)
    torch.testing.assert_close(found[0].cpu(), want)
    assert found[1].tolist() == [list(cell) for cell in cells]
    assert found[2].tolist() == counts
    assert found[3].tolist() == ids
    assert [t.dtype for t in found] == [torch.float64, torch.int32, torch.int32, torch.int64]
    assert {t.device.type for t in found} == {device.type}
    for again, first in zip(grid(points.to(device), True, empty_mean), found, strict=False):
        assert torch.equal(again, first)
    assert -1 in ids
    values = gather_features_by_pc_voxel_id(found[2].float(), found[3], -2)
    assert values.tolist() == [-2 if i < 0 else counts[i] for i in ids]


def test_points_to_voxels_of_nothing_and_of_much():
    grid = PointToVoxel([1.0, 1.0, 1.0], [0.0] * 3 + [2.0] * 3, 3, 10, 2)
    for points in (torch.zeros(0, 3), torch.full((4, 3), 9.0)):
        voxels, indices, counts, ids = grid.generate_voxel_with_id(points)
        assert (voxels.shape, indices.shape, counts.shape) == ((0, 2, 3), (0, 3), (0,))
        assert ids.tolist() == [-1] * len(points)
    # A grid that no dense buffer could hold, in half precision, whose cells are found in float32.
    wide = PointToVoxel([0.01] * 3, [-3e4] * 3 + [3e4] * 3, 3, 10, 2)
    half = torch.tensor([[100.5, -7.0, 3.0]], dtype=torch.float16)
    assert wide(half)[1].tolist() == wide(half.float())[1].tolist()
    assert wide(half)[0].dtype == torch.float16
    assert grid.grid_size == [2, 2, 2]
    assert grid.grid_stride == [4, 2, 1]


def test_points_to_voxels_refuses():
    grid = PointToVoxel([1.0, 1.0], [0.0, 0.0, 4.0, 4.0], 3, 10, 2)
    with pytest.raises(InsumShapeError, match=r"'pc' has shape \(5, 2\)"):
        grid(torch.zeros(5, 2))
    with pytest.raises(InsumDtypeError, match="must be floating, got int64"):
        grid(torch.zeros(5, 3, dtype=torch.int64))
    with pytest.raises(InsumDeviceError, match="'pc' is on meta"):
        grid(torch.zeros(5, 3, device="meta"))
    for edges, ranges, features in (([1.0], [0.0, 1.0, 2.0], 3), ([1.0, 1.0], [0.0, 0.0, 4.0, 4.0], 1)):
        with pytest.raises(InsumShapeError, match="range limits"):
            PointToVoxel(edges, ranges, features, 10, 2)
    for edge, upper, most in ((0.0, 4.0, 1), (1.0, 0.2, 1), (1.0, -4.0, 1), (1.0, 4.0, -1)):
        with pytest.raises(InsumShapeError, match="the grid has no voxel"):
            PointToVoxel([edge], [0.0, upper], 3, most, 2)


CASES = [
    ("subm", {"ksize": [3, 3, 3], "subm": True}),
    ("conv", {"ksize": [3, 2, 3], "stride": [2, 2, 1], "padding": [1, 0, 1]}),
    ("transpose", {"ksize": [2, 3, 2], "stride": [2, 1, 2], "transpose": True}),
]


@pytest.mark.parametrize(("kind", "how"), CASES, ids=[kind for kind, _ in CASES])
def test_tables_of_pairs_and_functions_over_them(kind, how, device):
    sites = random_sites((6, 5, 7), 2, 25, device=device)
    rest = {"stride": [1] * 3, "padding": [0] * 3, "dilation": [1] * 3, "out_padding": [0] * 3} | how
    algo = spconv.ConvAlgo.Native
    outputs, pairs, numbers = ops.get_indice_pairs(sites.indices, 2, [6, 5, 7], algo, **rest)
    layers = {"subm": spconv.SubMConv3d, "conv": spconv.SparseConv3d, "transpose": spconv.SparseConvTranspose3d}
    moves = {} if kind == "subm" else {"stride": rest["stride"], "padding": rest["padding"]}
    layer = layers[kind](4, 6, rest["ksize"], bias=False, dtype=torch.float64, device=device, **moves)
    features = torch.randn(sites.num_sites, 4, dtype=torch.float64).to(device).requires_grad_()
    want = layer(spconv.SparseConvTensor(features, sites.indices, [6, 5, 7], 2))
    assert torch.equal(outputs, want.indices)
    counts = (pairs[0] >= 0).sum(1)
    if kind == "subm":
        # The second half of a submanifold kernel mirrors the first, and spconv counts the first.
        counts[13:] = 0
    assert counts.tolist() == numbers.tolist()
    run = functional.indice_subm_conv if kind == "subm" else functional.indice_conv
    got = run(features, layer.weight, pairs, numbers, outputs.shape[0], algo)
    torch.testing.assert_close(got, want.features)
    grad = torch.randn_like(got)
    leaves = (features, layer.weight)
    for ours, theirs in zip(
        torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want.features, leaves, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    # Back again: the transposed product of the same pairs.
    back = torch.randn(6, *rest["ksize"], 6, dtype=torch.float64, device=device)
    returned = functional.indice_inverse_conv(got, back, pairs, numbers, sites.num_sites)
    exact = torch.zeros_like(returned)
    for offset, count in enumerate((pairs[0] >= 0).sum(1).tolist()):
        source, target = pairs[0, offset, :count].long(), pairs[1, offset, :count].long()
        exact.index_add_(0, source, got[target] @ back.flatten(1, -2)[:, offset].T)
    torch.testing.assert_close(returned, exact)
    pooled = functional.indice_maxpool(features, pairs, numbers, outputs.shape[0])
    row = int(numbers.argmax())
    target = pairs[1, row, 0]
    members = pairs[0][pairs[1] == target].long()
    torch.testing.assert_close(pooled[target], features[members].max(0).values.clamp(min=0))


def test_functions_over_tables_refuse():
    sites = random_sites((6, 5), 1, 10)
    same = [1, 1]
    _, pairs, numbers = ops.get_indice_pairs(
        sites.indices, 1, [6, 5], None, [3, 3], same, [0, 0], same, [0, 0], subm=True
    )
    features = torch.randn(10, 2)
    with pytest.raises(InsumShapeError, match=r"expected shape \(2, 4, pairs\)"):
        functional.indice_conv(features, torch.randn(2, 2, 2, 2), pairs, numbers, 10)
    with pytest.raises(InsumRangeError):
        functional.indice_conv(features, torch.randn(2, 3, 3, 2), pairs, numbers, 3)


def test_output_sizes():
    for shape, kernel, stride, padding, dilation in (
        ([19, 18], [3, 2], [2, 1], [1, 0], [1, 2]),
        ([7], [7], [1], [3], [1]),
    ):
        dense = torch.nn.functional.conv1d if len(shape) == 1 else torch.nn.functional.conv2d
        weight = torch.zeros(1, 1, *kernel)
        want = dense(torch.zeros(1, 1, *shape), weight, None, stride, padding, dilation).shape[2:]
        assert ops.get_conv_output_size(shape, kernel, stride, padding, dilation) == list(want)
    want = torch.nn.functional.conv_transpose2d(torch.zeros(1, 1, 5, 4), torch.zeros(1, 1, 3, 2), None, 2, 1, 1, 1, 2)
    got = ops.get_deconv_output_size([5, 4], [3, 2], [2, 2], [1, 1], [2, 2], [1, 1])
    assert got == list(want.shape[2:])


def test_repeated_voxels_are_dropped():
    indices = torch.tensor([[0, 3, 1], [0, 0, 0], [0, 3, 1], [0, 2, 2], [0, 0, 0]], dtype=torch.int32)
    x = spconv.SparseConvTensor(torch.arange(5.0)[:, None], indices, [4, 4], 1)
    y = spconv.RemoveDuplicate()(x)
    assert y.features.flatten().tolist() == [0.0, 1.0, 3.0]
    assert y.indices.tolist() == [[0, 3, 1], [0, 0, 0], [0, 2, 2]]
    assert spconv.RemoveDuplicate()(y) is y
    empty = spconv.SparseConvTensor(torch.ones(0, 1), indices[:0], [4, 4], 1)
    assert spconv.RemoveDuplicate()(empty) is empty

"""Sparse convolution against torch's dense convolution in float64: values and gradients."""

from __future__ import annotations

import pytest
import torch

from insum_nn.compiler.api import statement_calls
from insum_nn.compiler.options import Options
from insum_nn.errors import InsumDeviceError, InsumDtypeError, InsumShapeError
from insum_nn.ops.sparse_conv import SPARSE_CONV, sparse_conv
from insum_nn.ops.statements import program_of
from insum_nn.structure.coordinates import Coordinates
from insum_nn.structure.kernel_map import FACTS, Geometry
from insum_nn.structure.kernel_map.build import build_kernel_map
from insum_nn.testing.tolerances import assert_matches
from tests.allocations import largest_allocation
from tests.ops.conv_oracle import dense_conv, geometry, random_sites, read
from tests.ops.oracle import assert_gradients, assert_same, strided

# spatial shape, geometry, groups of channels
CASES = [
    ((9,), geometry("subm", (3,)), 1),
    ((9,), geometry("subm", (4,), dilation=2), 1),
    ((9,), geometry("conv", (2,), 2), 1),
    ((9,), geometry("conv", (3,), 3, 1, 2), 1),
    ((9,), geometry("transpose", (3,), 2, 1, output_padding=1), 1),
    ((6, 7), geometry("subm", (3, 5)), 1),
    ((6, 7), geometry("subm", (2, 3), dilation=(1, 2)), 2),
    ((6, 7), geometry("conv", (3, 2), (2, 1), (1, 0)), 1),
    ((6, 7), geometry("conv", (4, 1), (1, 3), (2, 0), (2, 1)), 3),
    ((6, 7), geometry("transpose", (3, 2), (2, 3), (1, 0), (2, 1)), 1),
    ((6, 7), geometry("transpose", (2, 2), 2), 2),
    ((5, 6, 4), geometry("subm", (3, 3, 3)), 1),
    ((5, 6, 4), geometry("subm", (1, 1, 1)), 2),
    ((5, 6, 4), geometry("subm", (5, 2, 3)), 1),
    ((5, 6, 4), geometry("conv", (3, 3, 3), 2, 1), 1),
    ((5, 6, 4), geometry("conv", (2, 2, 2), 2), 1),
    ((5, 6, 4), geometry("conv", (1, 1, 1)), 1),
    ((5, 6, 4), geometry("conv", (1, 1, 1), 2), 1),
    ((5, 6, 4), geometry("conv", (2, 3, 1), (1, 2, 3), (0, 2, 1), (2, 1, 1)), 6),
    ((5, 6, 4), geometry("transpose", (3, 3, 3), 2, 1, output_padding=1), 1),
    ((5, 6, 4), geometry("transpose", (2, 4, 1), (1, 2, 2), (1, 0, 0), (1, 2, 1), (0, 1, 1)), 2),
    ((3, 4, 3, 3), geometry("subm", (3, 3, 3, 3)), 1),
    ((3, 4, 3, 3), geometry("conv", (2, 3, 2, 1), (2, 1, 1, 2), (0, 1, 0, 0)), 2),
]


def label(case: tuple[tuple[int, ...], Geometry, int]) -> str:
    _, how, groups = case
    parts = [how.kind, f"k{how.kernel_size}", f"s{how.stride}", f"p{how.padding}", f"d{how.dilation}", f"h{groups}"]
    return "-".join(parts).replace(" ", "")


def operands(sites: Coordinates, how: Geometry, groups: int, dtype: torch.dtype = torch.float64, channels: int = 6):
    features = torch.randn(sites.num_sites, channels, dtype=torch.float64)
    weight = torch.randn(2 * groups, *how.kernel_size, channels // groups, dtype=torch.float64)
    bias = torch.randn(2 * groups, dtype=torch.float64)
    return [t.to(dtype).to(sites.device) for t in (features, weight, bias)]


@pytest.mark.parametrize("case", CASES, ids=label)
def test_equals_dense_convolution(case, device):
    shape, how, groups = case
    sites = random_sites(shape, 2, 11, device=device)
    near = build_kernel_map(sites, how)

    def oracle(features, weight, bias):
        return read(dense_conv(features, weight, bias, sites, how, groups), near.out_indices)

    for dtype in (torch.float64, torch.float32):
        leaves = operands(sites, how, groups, dtype)
        assert_same(lambda x, w, b: sparse_conv(x, w, near, b, groups=groups), oracle, leaves)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_accumulate_in_float32(dtype, device):
    sites = random_sites((6, 6, 6), 1, 100, device=device)
    how = geometry("subm", (3, 3, 3))
    near = build_kernel_map(sites, how)
    leaves = operands(sites, how, 1, dtype, channels=32)
    leaves[1] = leaves[1] / 16

    def oracle(features, weight, bias):
        return read(dense_conv(features, weight, bias, sites, how), near.out_indices)

    # The bias is added to the rounded sum: one rounding more.
    got = sparse_conv(leaves[0], leaves[1], near)
    assert_matches(got, oracle(*(t.cpu().double() for t in leaves[:2]), None), dtype=dtype, kind="sum")
    assert_same(lambda x, w, b: sparse_conv(x, w, near, b), oracle, leaves, kinds=("gradient", "second"))


@pytest.mark.parametrize(
    "how", [geometry("subm", (3, 2)), geometry("conv", (3, 3), 2, 1), geometry("transpose", (2, 3), 2)]
)
@pytest.mark.parametrize("groups", [1, 2])
def test_derivatives_of_first_and_second_order(how, groups):
    sites = random_sites((4, 5), 2, 5)
    near = build_kernel_map(sites, how)
    leaves = operands(sites, how, groups, channels=2)
    assert_gradients(lambda x, w, b: sparse_conv(x, w, near, b, groups=groups), leaves)


def test_inverse_map_is_the_transpose():
    sites = random_sites((6, 5, 4), 2, 20)
    how = geometry("conv", (3, 2, 3), 2, 1)
    near = build_kernel_map(sites, how)
    features, weight, _ = operands(sites, how, 1)
    back = torch.randn(near.num_outputs, 2, dtype=torch.float64)
    forward = (sparse_conv(features, weight, near) * back).sum()
    backward = (sparse_conv(back, weight.movedim(-1, 0).movedim(1, -1).contiguous(), near.inverse) * features).sum()
    torch.testing.assert_close(forward, backward)


def test_maps_of_different_sizes_share_a_program():
    how = geometry("subm", (3, 3, 3))
    program = program_of(SPARSE_CONV, FACTS, Options())
    for count in (0, 1, 2, 40, 90):
        sites = random_sites((5, 5, 5), 2, count)
        leaves = operands(sites, how, 1)
        near = build_kernel_map(sites, how)
        want = read(dense_conv(*leaves, sites, how), near.out_indices)
        torch.testing.assert_close(sparse_conv(leaves[0], leaves[1], near, leaves[2]), want)
    assert program_of(SPARSE_CONV, FACTS, Options()) is program


@pytest.mark.parametrize("kind", ["subm", "conv", "transpose"])
def test_no_voxels_and_vanished_outputs(kind, device):
    how = geometry(kind, (2, 2), 1 if kind == "subm" else 2)
    sites = random_sites((4, 4), 2, 0, device=device)
    near = build_kernel_map(sites, how)
    features, weight, bias = (t.requires_grad_() for t in operands(sites, how, 1))
    result = sparse_conv(features, weight, near, bias)
    assert result.shape == (0, 2)
    result.sum().backward()
    assert features.grad is not None
    assert features.grad.shape == (0, 6)
    assert weight.grad is not None
    assert not weight.grad.any()
    # A stride that steps over every voxel leaves no output.
    lonely = Coordinates(torch.tensor([[0, 1, 1]], dtype=torch.int32, device=device), (4, 4), 1)
    vanished = build_kernel_map(lonely, geometry("conv", (1, 1), 2))
    features, weight, bias = (t.requires_grad_() for t in operands(lonely, vanished.geometry, 1))
    result = sparse_conv(features, weight, vanished, bias)
    assert result.shape == (0, 2)
    result.sum().backward()
    assert features.grad is not None
    assert not features.grad.any()


def test_non_contiguous_operands():
    sites = random_sites((5, 6), 1, 12)
    how = geometry("subm", (3, 3))
    near = build_kernel_map(sites, how)
    leaves = [strided(t) for t in operands(sites, how, 1)]
    assert not leaves[0].is_contiguous()
    want = read(dense_conv(*leaves, sites, how), near.out_indices)
    torch.testing.assert_close(sparse_conv(leaves[0], leaves[1], near, leaves[2]), want)


def test_nan_stays_where_the_kernel_sees_it(device):
    sites = Coordinates(torch.tensor([[0, 0], [0, 1], [0, 5]], dtype=torch.int32, device=device), (9,), 1)
    near = build_kernel_map(sites, geometry("subm", (3,)))
    features = torch.tensor([[torch.nan], [1.0], [2.0]], device=device)
    result = sparse_conv(features, torch.ones(1, 3, 1, device=device), near)
    assert result.isnan().flatten().tolist() == [True, True, False]
    assert result[2].item() == 2.0


def test_autocast_takes_mixed_inputs(device):
    sites = random_sites((5, 5, 5), 1, 40, device=device)
    how = geometry("subm", (3, 3, 3))
    near = build_kernel_map(sites, how)
    features, weight, bias = (t.requires_grad_() for t in operands(sites, how, 1, torch.float32))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        first = sparse_conv(features, weight, near, bias)
        second = sparse_conv(features.half(), weight, near, bias)
    assert first.dtype == second.dtype == torch.bfloat16
    wide = [t.detach().cpu().double() for t in (features, weight, bias)]
    want = read(dense_conv(*wide, sites, how), near.out_indices)
    # Operands are rounded to bfloat16 too.
    torch.testing.assert_close(first.cpu().double(), want, rtol=0, atol=2e-2 * want.abs().max().item())
    first.float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert weight.grad.isfinite().all()


def test_deterministic_option_repeats_its_bits(device):
    sites = random_sites((6, 6, 6), 1, 150, device=device)
    how = geometry("subm", (3, 3, 3))
    near = build_kernel_map(sites, how)
    features, weight, _ = operands(sites, how, 1, torch.float32)
    options = Options(deterministic=True)
    runs = [sparse_conv(features, weight, near, options=options) for _ in range(3)]
    assert all(torch.equal(runs[0], run) for run in runs[1:])


def test_matches_the_reference_interpreter():
    sites = random_sites((3, 4), 1, 5)
    how = geometry("conv", (2, 2), 1, 1)
    near = build_kernel_map(sites, how)
    features, weight, _ = operands(sites, how, 1, channels=2)
    found = []
    (call,) = statement_calls(lambda: found.append(sparse_conv(features, weight, near)))
    assert call.program.expression == SPARSE_CONV
    want = call.program.reference(tensors=call.tensors, out_shape=call.out_shape)
    torch.testing.assert_close(found[0], want)


class TestBadInput:
    sites = random_sites((4, 4), 1, 5)
    near = build_kernel_map(sites, geometry("subm", (3, 3)))

    def run(self, features=None, weight=None, bias=None, groups=1):
        return sparse_conv(
            torch.ones(5, 4) if features is None else features,
            torch.ones(2, 3, 3, 4) if weight is None else weight,
            self.near,
            bias,
            groups=groups,
        )

    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            ({"features": torch.ones(4, 4)}, InsumShapeError, r"'features' must have one row.*\n.*\(5, channels\)"),
            ({"features": torch.ones(5)}, InsumShapeError, "'features' must have one row"),
            ({"features": torch.ones(5, 3)}, InsumShapeError, "'features' has 3 channels, 'weight' reads 4"),
            ({"features": torch.ones(5, 4, dtype=torch.int32)}, InsumDtypeError, "must be floating, got int32"),
            ({"features": torch.ones(5, 4).double()}, InsumDtypeError, "'features' is torch.float64, 'weight' is"),
            ({"weight": torch.ones(2, 3, 4)}, InsumShapeError, r"'weight' has shape \(2, 3, 4\)"),
            ({"weight": torch.ones(2, 3, 5, 4)}, InsumShapeError, r"expected \(out_channels, 3, 3, in_channels"),
            ({"weight": torch.ones(3, 3, 3, 2), "groups": 2}, InsumShapeError, "'weight' has shape"),
            ({"bias": torch.ones(3)}, InsumShapeError, r"'bias' has shape \(3,\)"),
            ({"weight": torch.ones(2, 3, 3, 4, device="meta")}, InsumDeviceError, "'weight' is on meta"),
            ({"features": torch.ones(5, 4, device="meta")}, InsumDeviceError, "'features' is on meta"),
        ],
    )
    def test_is_refused_before_any_kernel(self, arguments, error, text):
        with pytest.raises(error, match=text):
            self.run(**arguments)


@pytest.mark.c
def test_nothing_of_the_size_of_all_pairs_and_channels_is_formed():
    sites = random_sites((30, 30, 30), 1, 12_000)
    near = build_kernel_map(sites, geometry("subm", (3, 3, 3)))
    channels = 32
    features = torch.randn(sites.num_sites, channels, requires_grad=True)
    weight = torch.randn(channels, 3, 3, 3, channels, requires_grad=True)

    def step() -> None:
        sparse_conv(features, weight, near).square().sum().backward()

    step()
    all_pairs = near.num_pairs * channels * 4
    assert all_pairs > 8_000_000
    assert largest_allocation(step) < all_pairs / 3

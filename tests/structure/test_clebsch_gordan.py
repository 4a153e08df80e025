from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from insum_nn.structure.clebsch_gordan import nonzeros
from insum_nn.structure.irreps import (
    Entry,
    InstructionError,
    dimension,
    entries_of,
    make_paths,
    offsets,
    weight_offsets,
)
from tests.layers.equivariant.tensor_product_cases import MODE_NAMES, one_mode, random_case

o3 = pytest.importorskip("e3nn.o3")

TRIPLES = [(a, b, c) for a, b in itertools.product(range(4), range(3)) for c in range(abs(a - b), a + b + 1)]


def turned(degree: int, rotation: torch.Tensor) -> torch.Tensor:
    """The matrix of a rotation for a degree, by what it does to spherical harmonics at many points."""
    points = torch.randn(40, 3, dtype=torch.float64)
    before, after = (o3.spherical_harmonics(degree, x, normalize=True) for x in (points, points @ rotation.t()))
    return torch.linalg.lstsq(before, after).solution.t()


@pytest.mark.parametrize("degrees", TRIPLES, ids=str)
def test_nonzeros_are_the_one_invariant_of_unit_length(degrees: tuple[int, int, int]):
    """Which defines them but for the sign; e3nn's is met where products are compared with e3nn's."""
    index, values = nonzeros(*degrees)
    dense = torch.zeros([2 * l + 1 for l in degrees], dtype=torch.float64)
    dense[tuple(index)] = torch.from_numpy(values)
    rotation = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    matrices = (turned(l, rotation * rotation.det()) for l in degrees)
    torch.testing.assert_close(torch.einsum("ia,jb,kc,abc->ijk", *matrices, dense), dense, rtol=0, atol=1e-10)
    assert np.abs(values).min() > 1e-3
    assert math.isclose(np.square(values).sum(), 1.0, abs_tol=1e-12)


def test_degrees_that_do_not_couple_are_refused():
    with pytest.raises(AssertionError):
        nonzeros(1, 1, 3)


def test_entries_from_e3nn_and_from_tuples():
    expected = (Entry(2, 1, -1), Entry(0, 3, 1), Entry(3, 0, 1))
    assert entries_of(o3.Irreps("2x1o+0x3e+3x0e")) == expected
    assert entries_of([(2, (1, -1)), (0, 3, 1), (3, (0, 1))]) == expected
    assert dimension(expected) == o3.Irreps("2x1o+0x3e+3x0e").dim
    assert offsets(expected) == (0, 6, 6)
    assert str(expected[0]) == "2x1o"


@pytest.mark.parametrize("seed", range(4))
def test_shapes_of_weights_are_e3nns(seed: int):
    case = random_case(seed)
    peer = o3.TensorProduct(*case.args, compile_left_right=False)
    paths, _ = make_paths(*(entries_of(o3.Irreps(text)) for text in case.args[:3]), case.instructions)
    assert [p.shape for p in paths] == [i.path_shape for i in peer.instructions]


def test_weight_offsets_skip_paths_without_weights():
    entries = [Entry(2, 0, 1)]
    paths, _ = make_paths(entries, entries, entries, [(0, 0, 0, "uuu", w) for w in (True, False, True)])
    assert weight_offsets(paths) == (0, 2, 2)


A, B, C = Entry(4, 1, -1), Entry(3, 1, -1), Entry(4, 2, 1)


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ((0, 0, 0), "has 3 items"),
        ((0, 5, 0, "uvu", True), "points outside irreps_in2"),
        ((-1, 0, 0, "uvu", True), "points outside irreps_in1"),
        ((0, 0, 0, "uvx", True), "unknown mode 'uvx'"),
        ((0, 0, 0, "uvu", True, -1.0), "negative path weight"),
        ((0, 0, 1, "uvu", True), "breaks parity"),
        ((0, 0, 2, "uvu", True), "do not couple"),
        ((0, 0, 0, "uvw", False), "has no weight"),
        ((0, 0, 0, "uvv", True), r"expected 3 \(mul_in2\); got 4"),
        ((0, 0, 0, "uuu", True), "equal multiplicities"),
        ((0, 0, 0, "uvuv", True), "expected 12"),
        ((0, 1, 0, "uvu<v", True), "expected 6"),
        ((0, 1, 0, "uuw", False), "without weights u is summed"),
    ],
    ids=lambda v: str(v)[:30],
)
def test_impossible_instructions(instruction: tuple, message: str):
    out = [C, Entry(4, 2, -1), Entry(4, 4, 1)]
    with pytest.raises(InstructionError, match=message) as info:
        make_paths([A], [B, Entry(4, 1, -1)], out, [instruction])
    assert "fix: " in str(info.value)
    assert isinstance(info.value, AssertionError)


def test_all_faults_are_listed():
    with pytest.raises(InstructionError) as info:
        make_paths([A], [B], [C], [(0, 0, 0, "uvx", True), (0, 9, 0, "uvu", True)])
    assert "instruction 0" in str(info.value)
    assert "instruction 1" in str(info.value)


@pytest.mark.parametrize("mode", MODE_NAMES)
def test_empty_multiplicities_are_no_fault(mode: str):
    none = [Entry(0, 0, 1)]
    paths, _ = make_paths(none, none, [Entry(2, 0, 1)], [(0, 0, 0, mode, True)])
    assert paths[0].numel == 0
    assert one_mode(mode, True).instructions

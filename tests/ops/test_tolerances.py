"""The comparison itself: it passes what it should and fails on everything else."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch

from insum_nn.testing.tolerances import TOLERANCES, Kind, assert_matches, tolerance

EXACT = torch.tensor([[1.0, -2.0], [3.0, 1e-9]], dtype=torch.float64)


def test_the_table_is_whole_and_ordered():
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    assert set(TOLERANCES) == set(itertools.product(dtypes, get_args(Kind)))
    assert all(entry.reason for entry in TOLERANCES.values())
    for dtype in dtypes:
        bounds = [tolerance(dtype, kind) for kind in get_args(Kind)]
        assert bounds == sorted(bounds)
        assert bounds[0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rounded_result_matches(dtype: torch.dtype):
    assert_matches(EXACT.to(dtype), EXACT, dtype=dtype, kind="sum")


def test_an_error_is_told_with_its_place():
    wrong = EXACT.float()
    wrong[1, 0] += 1e-3
    with pytest.raises(AssertionError, match=r"1 of 4 elements differ; worst at \(1, 0\): got 3.000999.*allowed 1e-05"):
        assert_matches(wrong, EXACT, dtype=torch.float32, kind="sum")
    assert_matches(wrong, EXACT, dtype=torch.float32, kind="sum", scale=1e3)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite(value: float):
    other = EXACT.clone()
    other[0, 1] = value
    for got, want in ((other, EXACT), (EXACT, other)):
        with pytest.raises(AssertionError, match=r"worst at \(0, 1\)"):
            assert_matches(got, want, dtype=torch.float64, kind="sum")
    if value == value:
        assert_matches(other, other, dtype=torch.float64, kind="copy")
    else:
        with pytest.raises(AssertionError):
            assert_matches(other, other, dtype=torch.float64, kind="second")


def test_shape_dtype_and_nothing():
    with pytest.raises(AssertionError, match="expected shape"):
        assert_matches(EXACT[0], EXACT, dtype=torch.float64, kind="sum")
    with pytest.raises(AssertionError, match="expected dtype"):
        assert_matches(EXACT.float(), EXACT, dtype=torch.float64, kind="sum")
    assert_matches(torch.empty(0), torch.empty(0).double(), dtype=torch.float32, kind="copy")
    zero = torch.zeros(2, dtype=torch.float64)
    assert_matches(zero, zero, dtype=torch.float64, kind="sum")
    with pytest.raises(AssertionError):
        assert_matches(zero + 1e-300, zero, dtype=torch.float64, kind="sum")

"""Masks: how many parts they keep and which, ties, NaN, and moving parts while training."""

from __future__ import annotations

import pytest
import torch

from insum_nn.errors import InsumDtypeError, InsumFormatError, InsumShapeError
from insum_nn.structure.pruning import (
    cosine_fraction,
    group_norms,
    kept_count,
    magnitude_mask,
    prune_and_regrow,
    random_mask,
    take_rows,
    touched_blocks,
)


@pytest.mark.parametrize("shape", [(7, 11), (8, 12), (1, 1), (3, 40)], ids=str)
@pytest.mark.parametrize("block", [(2, 3), (4, 4), (8, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_norms_and_touched_blocks(shape, block, dtype):
    dense = torch.randn(shape, dtype=torch.float64).to(dtype)
    mask = torch.rand(shape) < 0.1
    norms, touched = group_norms(dense, block), touched_blocks(mask, block)
    assert norms.shape == touched.shape == (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    assert norms.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for i, rows in enumerate(zip(dense.split(block[0]), mask.split(block[0]), strict=True)):
        for j, (tile, own) in enumerate(zip(rows[0].split(block[1], 1), rows[1].split(block[1], 1), strict=True)):
            assert norms[i, j].item() == pytest.approx(tile.double().norm().item(), rel=1e-6)
            assert touched[i, j] == own.any()


@pytest.mark.parametrize("density", [0.01, 0.3, 0.5, 1.0, 1])
def test_counts(density):
    scores = torch.rand(6, 9)
    mask = magnitude_mask(scores, density)
    assert mask.sum() == random_mask((6, 9), density).sum() == kept_count(density, 54)
    if density < 1:
        assert scores[mask].min() > scores[~mask].max()
    assert magnitude_mask(torch.zeros(0, 3), density).shape == (0, 3)
    assert random_mask((0, 3), density).sum() == 0


def test_ties_and_nan():
    assert magnitude_mask(torch.ones(2, 3), 0.5).tolist() == [[True, True, True], [False, False, False]]
    scores = torch.tensor([torch.nan, 1.0, torch.inf, -torch.inf])
    assert magnitude_mask(scores, 0.5).tolist() == [False, True, True, False]


def test_random_masks_repeat_with_a_generator():
    masks = [random_mask((8, 8), 0.3, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


@pytest.mark.parametrize("density", [0, -0.1, 1.01, True, "half", None, float("nan")])
def test_bad_densities(density):
    with pytest.raises(InsumFormatError) as caught:
        magnitude_mask(torch.ones(3), density)
    assert str(caught.value) == (
        f"density must lie in (0, 1], got {density!r}\n"
        "  fix: pass the share of the weight to keep, such as density=0.1."
    )


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("density", [0.1, 0.5, 0.9, 1.0])
def test_moving_keeps_the_count(fraction, density):
    mask = random_mask((7, 9), density)
    keep, grow = torch.rand(7, 9), torch.rand(7, 9)
    moved = prune_and_regrow(mask, keep, grow, fraction)
    assert moved.sum() == mask.sum()
    number = min(round(fraction * int(mask.sum())), 63 - int(mask.sum()))
    survivors = torch.zeros_like(mask)
    survivors.view(-1)[torch.where(mask, keep, -1.0).flatten().topk(int(mask.sum()) - number).indices] = True
    assert moved[survivors].all(), "the heaviest stay"
    grown = moved & ~survivors
    if number and (~moved).any():
        assert grow[grown].min() > grow[~moved].max(), "the most promising of all others grow"


def test_moving_ignores_scores_where_they_mean_nothing():
    mask = torch.tensor([True, True, False, False])
    keep = torch.tensor([1.0, 2.0, torch.inf, torch.nan])
    grow = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])
    assert prune_and_regrow(mask, keep, grow, 0.5).sum() == 2
    assert prune_and_regrow(mask, keep, grow, 0.5)[1]


def test_bad_moves():
    mask = torch.ones(3, dtype=torch.bool)
    with pytest.raises(InsumShapeError, match="'grow_scores' has not the shape of the mask"):
        prune_and_regrow(mask, torch.ones(3), torch.ones(4), 0.5)
    with pytest.raises(InsumDtypeError, match="'mask' must be bool"):
        prune_and_regrow(torch.ones(3), torch.ones(3), torch.ones(3), 0.5)
    with pytest.raises(InsumFormatError, match=r"fraction must lie in \[0, 1\], got 1.5"):
        prune_and_regrow(mask, torch.ones(3), torch.ones(3), 1.5)


def test_schedule():
    values = [cosine_fraction(step, 10, 0.4) for step in range(12)]
    assert values[0] == pytest.approx(0.4)
    assert values[10] == values[11] == pytest.approx(0.0)
    assert values == sorted(values, reverse=True)
    assert cosine_fraction(0, 0) == 0.0


def test_rows():
    rows = torch.randn(3, 2)
    assert torch.equal(take_rows(rows, torch.tensor([2, -1, 0])), torch.stack([rows[2], torch.zeros(2), rows[0]]))
    assert torch.equal(take_rows(torch.zeros(0, 2), torch.tensor([-1])), torch.zeros(1, 2))
    assert take_rows(rows[:, 0], torch.tensor([-1, 1])).tolist() == [0.0, rows[1, 0].item()]

"""The count of indirect accesses, and the rule that chooses a group size by it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from insum_nn.errors import InsumFormatError
from insum_nn.formats import (
    COO,
    BlockCOO,
    BlockGroupCOO,
    GroupCOO,
    candidate_group_sizes,
    choose_group_size,
    estimate_group_size,
    indirect_accesses,
)
from tests.formats.registry import sparse_dense

occupancies = st.lists(st.integers(0, 40), max_size=12)


def counted_accesses(occupancy: list[int], group_size: int) -> int:
    """Fill groups entry by entry and count one scatter a group and one gather a slot."""
    accesses = 0
    for count in occupancy:
        left = count
        while left > 0:
            accesses += 1 + group_size
            left -= group_size
    return accesses


@given(occupancies, st.integers(1, 50))
def test_indirect_accesses_against_counting(occupancy, group_size):
    assert indirect_accesses(occupancy, group_size) == counted_accesses(occupancy, group_size)
    assert indirect_accesses(torch.tensor(occupancy, dtype=torch.int32), group_size) == counted_accesses(
        occupancy, group_size
    )


def test_example_of_the_paper():
    occupancy = [3, 1, 1, 2]
    # Groups of 2: rows of 3, 1, 1, 2 entries take 2 + 1 + 1 + 1 groups; groups of 3: one each.
    assert [indirect_accesses(occupancy, g) for g in (1, 2, 3)] == [2 * 7, 3 * 5, 4 * 4]
    assert estimate_group_size(7, 4) == pytest.approx(math.sqrt(7 / 4))
    assert candidate_group_sizes(occupancy) == (1, 2)
    assert choose_group_size(occupancy) == 1


def test_count_does_not_overflow_narrow_integers():
    occupancy = torch.full((100_000,), 30_000, dtype=torch.int32)
    assert indirect_accesses(occupancy, 3) == 4 * 10_000 * 100_000
    assert indirect_accesses(torch.tensor([100, 100], dtype=torch.uint8), 3) == 4 * 68


@given(occupancies)
def test_candidates_surround_the_estimate(occupancy):
    candidates = candidate_group_sizes(occupancy)
    estimate = estimate_group_size(sum(occupancy), sum(count > 0 for count in occupancy))
    assert 1 <= len(candidates) <= 2
    assert all(size & (size - 1) == 0 for size in candidates)
    assert candidates[0] <= estimate * (1 + 1e-12)
    assert candidates[-1] >= estimate * (1 - 1e-12)
    if len(candidates) == 2:
        assert candidates[1] == 2 * candidates[0]
    assert choose_group_size(occupancy) in candidates


@given(occupancies)
def test_choice_is_the_cheaper_candidate(occupancy):
    candidates = candidate_group_sizes(occupancy)
    costs = {size: counted_accesses(occupancy, size) for size in candidates}
    chosen = choose_group_size(occupancy)
    assert costs[chosen] == min(costs.values())
    assert choose_group_size(torch.tensor(occupancy, dtype=torch.int64)) == chosen


@given(occupancies.filter(any))
def test_estimate_minimises_the_relaxed_count(occupancy):
    nnz, rows = sum(occupancy), sum(count > 0 for count in occupancy)

    def relaxed(size: float) -> float:
        return (size + 1) * (nnz / size + rows)

    best = estimate_group_size(nnz, rows)
    assert relaxed(best) <= min(relaxed(best * 1.01), relaxed(max(1.0, best * 0.99))) * (1 + 1e-12)


@given(occupancies, st.integers(0, 1000))
def test_empty_rows_change_nothing(occupancy, empty):
    padded = occupancy + [0] * empty
    assert choose_group_size(padded) == choose_group_size(occupancy)
    assert indirect_accesses(padded, 4) == indirect_accesses(occupancy, 4)


def test_choice_by_measurement():
    occupancy = [8, 9, 10, 7]
    asked: list[int] = []

    def measure(size: int) -> float:
        asked.append(size)
        return {2: 5.0, 4: 1.0}[size]

    assert choose_group_size(occupancy, measure) == 4
    assert asked == [2, 4]
    assert choose_group_size(occupancy, lambda size: float(size)) == 2
    # A single candidate needs no measurement.
    assert choose_group_size([4, 4], lambda size: pytest.fail("measured")) == 2


def test_nothing_stored():
    assert estimate_group_size(0, 0) == 1.0
    assert candidate_group_sizes([]) == (1,)
    assert candidate_group_sizes([0, 0]) == (1,)
    assert choose_group_size(torch.zeros(0, dtype=torch.int64)) == 1
    assert indirect_accesses([], 8) == 0


@pytest.mark.parametrize("group_size", [0, -2, 1.5, "auto", None, True])
def test_group_size_is_checked(group_size):
    with pytest.raises(InsumFormatError, match="group_size must be an integer of at least 1 or 'auto'"):
        indirect_accesses([1], group_size)


def test_formats_follow_the_rule(device):
    dense = sparse_dense((40, 60), density=0.5).to(device)
    coo = COO.from_dense(dense)
    assert coo.occupancy().tolist() == [n for n in (dense != 0).sum(1).tolist() if n]
    assert coo.occupancy(1).tolist() == [n for n in (dense != 0).sum(0).tolist() if n]
    for dim in range(2):
        grouped = GroupCOO.from_dense(dense, group_dim=dim)
        assert grouped.group_size == choose_group_size(coo.occupancy(dim))
        # One scatter a group and one gather a slot is what the format stores.
        assert grouped.group_index.numel() + grouped.indices[0].numel() == indirect_accesses(
            coo.occupancy(dim), grouped.group_size
        )
    blocks = BlockCOO.from_dense(dense, block_shape=(4, 4))
    grouped_blocks = BlockGroupCOO.from_coo(blocks)
    assert grouped_blocks.group_size == choose_group_size(blocks.occupancy())
    assert grouped_blocks.row.numel() + grouped_blocks.col.numel() == indirect_accesses(
        blocks.occupancy(), grouped_blocks.group_size
    )

"""Who owns which terms: ranges against a plain Python oracle, divided rows, and how long they are remembered."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn.compiler.ir.schedule import UNDIVIDED
from insum_nn.compiler.kernels import row_partition
from insum_nn.compiler.kernels.row_partition import (
    RowPartition,
    bitmasks_of,
    clear_partitions,
    divisions_of,
    keep_bitmasks,
    keep_lengths,
    partition_of,
)
from insum_nn.compiler.kernels.row_structures import divide_rows
from tests.compiler.divided_rows import LENGTHS, divided, wait_for_kernel
from tests.compiler.interpreted import interpreter
from tests.device_calls import DeviceCalls, device_calls
from tests.pretended_gpu import pretended_gpu

__all__ = ["interpreter"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    clear_partitions()
    yield
    clear_partitions()


def cached_partition(index: Tensor, rows: int, permuted: bool, chunk: int) -> RowPartition | None:
    return divisions_of(index, rows, permuted).get(chunk)


def terms_by_row(index: Tensor, rows: int) -> list[list[int]]:
    """The terms of each row, in order; terms without a row, or with one past the end, have none."""
    found: list[list[int]] = [[] for _ in range(rows)]
    for term, row in enumerate(index.flatten().tolist()):
        if 0 <= row < rows:
            found[row].append(term)
    return found


def walked(built: RowPartition) -> list[tuple[int, list[int]]]:
    """Each range as its row and the terms that a program would walk, in order."""
    begin = built.begin.tolist()
    end = begin[1:] if built.end is None else built.end.tolist()
    owner = list(range(built.rows)) if built.row_of is None else built.row_of.tolist()
    order = None if built.order is None else built.order.tolist()
    return [(owner[r], [t if order is None else order[t] for t in range(begin[r], end[r])]) for r in range(built.rows)]


def assert_owns(index: Tensor, rows: int, share: int, *, permuted: bool) -> RowPartition:
    built = partition_of(index, rows, permuted, share)
    expected = terms_by_row(index, rows)
    got: list[list[int]] = [[] for _ in range(rows)]
    for row, terms in walked(built):
        assert len(terms) <= share
        got[row] += terms
    assert got == expected
    longest = max(map(len, expected), default=0)
    assert built.split == (longest > share)
    assert (built.order is None) == (not permuted)
    if not built.split:
        assert built.rows == rows
        return built
    check_division(built, expected, share)
    return built


def check_division(built: RowPartition, want: list[list[int]], share: int) -> None:
    """Rows with more than `share` terms have slots of their own, in order; the others are written directly."""
    parts = [max(1, math.ceil(len(terms) / share)) for terms in want]
    assert built.rows == sum(parts)
    assert built.target is not None
    assert built.divided is not None
    assert built.first is not None
    assert built.divided.tolist() == [row for row, count in enumerate(parts) if count > 1]
    assert built.first.diff().tolist() == [count for count in parts if count > 1]
    assert built.first[0] == 0
    assert built.slots == sum(count for count in parts if count > 1)
    slots = iter(range(built.slots))
    expected = [-1 - next(slots) if count > 1 else row for row, count in enumerate(parts) for _ in range(count)]
    assert built.target.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("share", [1, 2, 3, 7, 512])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_ranges_match_the_oracle(dtype: torch.dtype, share: int, rows: int):
    for count in (1, 2, 5, 40):
        drawn = torch.randint(0, rows, (count,)).to(dtype)
        assert_owns(drawn.sort().values, rows, share, permuted=False)
        assert_owns(drawn, rows, share, permuted=True)
        holes = torch.where(torch.rand(count) < 0.4, -1, drawn)
        assert_owns(holes, rows, share, permuted=True)
        assert_owns(holes.sort().values, rows, share, permuted=False)


@pytest.mark.parametrize("share", [1, 4, 100])
def test_of_several_axes_and_layouts(share: int):
    index = torch.randint(-1, 6, (4, 5, 3))
    for one in (index, index.permute(2, 0, 1), index[:, ::2], index[:, :1].expand(4, 5, 3), index[0, 0]):
        assert_owns(one, 6, share, permuted=True)


def test_a_strided_index_in_order_gives_no_warning():
    """Warnings are errors here: a search in strided memory copies it, and torch says so."""
    index = torch.tensor([0, 9, 0, 9, 2, 9, 5, 9])[::2]
    assert_owns(index, 6, 2, permuted=False)


def test_rows_past_the_end_own_nothing():
    """As in derivatives, which drop what is written outside."""
    assert_owns(torch.tensor([0, 0, 1, 4, 7, 7]), 3, 1, permuted=False)
    assert_owns(torch.tensor([7, 0, -1, 4, 0]), 3, 512, permuted=True)


def test_nothing_at_all():
    for rows in (0, 3):
        built = partition_of(torch.zeros(0, dtype=torch.int64), rows, False, 4)
        assert (built.rows, built.split) == (rows, False)
        assert built.begin.tolist() == [0] * (rows + 1)
    assert_owns(torch.full((5,), -1), 3, 2, permuted=True)


def test_one_row_has_nearly_everything():
    index = torch.cat([torch.tensor([0, 1]), torch.full((5000,), 2), torch.tensor([4])])
    built = assert_owns(index, 6, 512, permuted=False)
    assert built.slots == 10
    assert_owns(index[torch.randperm(index.numel())], 6, 512, permuted=True)


def test_the_parts_of_divided_rows_are_side_by_side():
    built = partition_of(torch.tensor([0] * 5 + [1] + [3] * 3), 5, False, 2)
    assert built.divided is not None
    assert built.first is not None
    assert (built.divided.tolist(), built.first.tolist(), built.slots) == ([0, 3], [0, 3, 5], 5)


def test_remembered_by_tensor_version_and_arguments():
    index = torch.tensor([0, 1, 1, 2])
    first = partition_of(index, 3, False, 512)
    assert partition_of(index, 3, False, 512) is first
    assert cached_partition(index, 3, False, 512) is first
    # Equal values in another tensor, other rows, another order, another division.
    assert partition_of(index.clone(), 3, False, 512) is not first
    for arguments in ((4, False, 512), (3, True, 512), (3, False, 1)):
        assert cached_partition(index, *arguments) is None
        assert partition_of(index, *arguments) is not first
    index[0] = 1
    assert cached_partition(index, 3, False, 512) is None
    assert partition_of(index, 3, False, 512).begin.tolist() == [0, 0, 3, 4]


def test_the_longest_row_is_known_and_shares_that_divide_none_are_one():
    index = torch.tensor([4, 0, 4, 2, 4, -1, 0])
    assert partition_of(index, 6, permuted=True, chunk=UNDIVIDED).longest == 3
    whole = partition_of(index, 6, permuted=True, chunk=3)
    assert not whole.split
    assert partition_of(index, 6, permuted=True, chunk=64) is whole
    divided = partition_of(index, 6, permuted=True, chunk=2)
    assert divided.split
    assert divided.longest == 3
    index[3] = 4
    assert partition_of(index, 6, permuted=True, chunk=UNDIVIDED).longest == 4
    assert partition_of(index, 6, permuted=True, chunk=3).split
    assert partition_of(torch.empty(0, dtype=torch.int32), 6, permuted=False, chunk=UNDIVIDED).longest == 0
    with torch.inference_mode():
        hidden = torch.tensor([1, 1, 0])
    assert partition_of(hidden, 2, permuted=True, chunk=UNDIVIDED).longest == 2, "nothing is kept of it"


def test_a_write_through_a_view_is_seen():
    index = torch.tensor([0, 1, 1, 2])
    partition_of(index, 3, False, 512)
    index[1:3].fill_(0)
    assert partition_of(index, 3, False, 512).begin.tolist() == [0, 3, 3, 4]


def test_forgotten_with_the_tensor():
    index = torch.tensor([0, 1, 1, 2])
    partition_of(index, 3, False, 512)
    partition_of(index, 3, True, 512)
    assert len(row_partition._structures) == 4, "two divisions, an order, lengths"
    del index
    gc.collect()
    assert not row_partition._structures


def test_no_more_than_the_limit_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_partition._structures, "limit", 4)
    kept = [torch.tensor([0, 1]) for _ in range(9)]
    for index in kept:
        partition_of(index, 2, False, 512)
    assert len(row_partition._structures) == 4
    assert cached_partition(kept[-1], 2, False, 512) is not None
    assert cached_partition(kept[0], 2, False, 512) is None


def test_inference_tensors_are_read_every_time():
    """Their writes leave no trace."""
    with torch.inference_mode():
        index = torch.tensor([0, 1, 1])
        assert partition_of(index, 2, False, 512).begin.tolist() == [0, 1, 3]
        index[0] = 1
        assert partition_of(index, 2, False, 512).begin.tolist() == [0, 0, 3]
    assert not row_partition._structures


def test_built_in_inference_mode_and_used_outside():
    index = torch.tensor([1, 0, 1])
    with torch.inference_mode():
        built = partition_of(index, 2, True, 512)
    assert not built.begin.is_inference()
    assert partition_of(index, 2, True, 512) is built


def test_cleared_with_the_cache():
    index = torch.tensor([0, 1])
    partition_of(index, 2, False, 512)
    insum_nn.clear_cache()
    assert cached_partition(index, 2, False, 512) is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (1, 1), (3, 7), (31, 5), (32, 5), (70, 9), (4, 0)])
def test_words_of_the_rows_that_have_an_entry(rows: int, columns: int, dtype: torch.dtype):
    index = torch.where(torch.rand(rows, columns) < 0.5, -1, torch.randint(0, 9, (rows, columns))).to(dtype)
    words = bitmasks_of(index)
    assert words.dtype == torch.int32
    assert words.shape == (max(1, math.ceil(rows / 31)), columns)
    for row in range(rows):
        assert torch.equal((words[row // 31] >> row % 31 & 1).bool(), index[row] >= 0)


def test_words_are_remembered_until_the_index_is_written_to():
    index = torch.tensor([[0, -1], [-1, -1]])
    first = bitmasks_of(index)
    assert bitmasks_of(index) is first
    assert first.tolist() == [[1, 0]]
    index[1, 1] = 3
    assert bitmasks_of(index).tolist() == [[1, 2]]
    del index
    gc.collect()
    assert not row_partition._structures


def test_words_that_are_known_are_taken():
    index = torch.tensor([[0, -1], [-1, -1]])
    known = torch.tensor([1, 0], dtype=torch.int32)
    keep_bitmasks(index, known)
    assert bitmasks_of(index).data_ptr() == known.data_ptr()
    index[0, 0] = -1
    assert bitmasks_of(index).tolist() == [[0, 0]]


@pytest.mark.parametrize("share", [1, 3, 7, 64, 512])
def test_lengths_that_are_known_are_not_read(share: int):
    lengths = [5, 0, 64, 1, 0, 7, 130, 2, 0]
    drawn = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).int()
    known, want = drawn.clone(), partition_of(drawn.clone(), len(lengths), False, share)
    with device_calls() as calls:
        keep_lengths(known, lengths)
        got = partition_of(known, len(lengths), False, share)
    assert not calls.reads
    assert not calls.answers
    # Of another number of rows nothing is known.
    with device_calls() as calls:
        partition_of(known, len(lengths) + 1, False, share)
    assert len(calls.reads) == 1
    for field in fields(RowPartition):
        one, other = getattr(got, field.name), getattr(want, field.name)
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other, field.name
    keep_lengths(drawn, lengths)
    drawn[0] = -1
    assert partition_of(drawn, len(lengths), False, 512).begin[0] == 1


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("chunk", [1, 8])
@pytest.mark.parametrize("name", LENGTHS)
def test_rows_are_divided_on_the_device(name: str, chunk: int):
    seen: list[DeviceCalls] = []

    @contextmanager
    def counted() -> Iterator[None]:
        with device_calls() as calls:
            yield
        seen.append(calls)

    with pretended_gpu():
        divided(LENGTHS[name], chunk, "cpu", counted)
        divided(LENGTHS[name], chunk, "cpu", counted, missing=3)
    assert [calls.kernels for calls in seen] == [1, 1]
    # Of rows that are not known, all is read at once.
    assert [len(calls.reads) for calls in seen] == [0, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", LENGTHS)
def test_rows_are_divided_on_a_gpu(gpu: torch.device, name: str):
    for dtype in (torch.int32, torch.int64):
        wait_for_kernel(lambda dtype=dtype: divide_rows(torch.tensor([1, 2], dtype=dtype, device=gpu), 0, 4, 2, 0))
    for chunk in (1, 3, 8):
        for missing in (0, 3):
            divided(LENGTHS[name], chunk, gpu, missing=missing)


@pytest.mark.parametrize("rows", [40, 5000])
def test_a_partition_is_built_with_one_reading(rows: int):
    index = torch.randint(-1, rows, (3000,)).sort().values
    index[-500:] = rows - 2
    with device_calls() as calls:
        got = partition_of(index, rows, False, 4)
    assert len(calls.reads) == 1
    assert got.split
    clear_partitions()
    index = index.sort().values
    assert_owns(index, rows, 4, permuted=False)
    assert_owns(index[torch.randperm(3000)], rows, 4, permuted=True)

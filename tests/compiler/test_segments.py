"""Equal shares of terms: who sums what, and kernels that do so against dense sums, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import insum_nn
from benchmarks.schedules import generated_of
from insum_nn import IndexFacts, Options, Program, compile
from insum_nn.compiler.forms.candidates import candidates
from insum_nn.compiler.forms.placement import place_indices
from insum_nn.compiler.kernels.row_partition import clear_partitions, partition_of
from insum_nn.compiler.lang.bind import layout_of
from insum_nn.compiler.schedule.canonical import names_of
from insum_nn.compiler.schedule.database import size_bucket
from insum_nn.compiler.schedule.space import Schedule
from insum_nn.testing.tolerances import assert_matches
from tests.compiler.generated_cases import CASES, SORTED, Case, entries, form_of, kernel_of, put, real, take
from tests.compiler.interpreted import interpreter
from tests.compiler.test_generated import assert_case, doubled, drawn, rounded

__all__ = ["interpreter"]

SHARES = (
    Schedule(n=4, chunk=3, segment=True),
    Schedule(n=4, k=4, chunk=10, segment=True),
    Schedule(m=4, n=8, k=2, chunk=7, segment=True),
    Schedule(m=8, k=8, chunk=8, segment=True),
)


def index_of(count: int, rows: int, holes: float) -> Tensor:
    """Skewed rows, some without terms, some terms without a row."""
    drawn = torch.where(torch.rand(count) < 0.3, rows // 2, torch.randint(0, rows, (count,)))
    return torch.where(torch.rand(count) < holes, -1, drawn)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("share", [1, 2, 3, 7, 512])
@pytest.mark.parametrize("rows", [1, 2, 9, 40])
def test_shares_match_the_oracle(dtype: torch.dtype, share: int, rows: int):
    """Every term is in one share; whole rows are stored once, and the parts of the others lie in order."""
    clear_partitions()
    for count, holes in ((0, 0.0), (1, 0.0), (5, 1.0), (40, 0.3), (41, 0.0)):
        index = index_of(count, rows, holes).to(dtype)
        built = partition_of(index, rows, True, share, True)
        assert built.target is not None
        assert built.order is not None
        low, high = built.begin.tolist()
        assert high - low == int((index >= 0).sum())
        assert built.rows == -(-(high - low) // share)
        values = torch.randn(count, dtype=torch.float64)
        whole: dict[int, float] = {}
        parts: dict[int, float] = {}
        for begin in range(low, high, share):
            total = None
            for term in range(begin, min(begin + share, high)):
                code = int(built.target[term])
                assert bool(code & 1) == (total is None)
                total = (total or 0.0) + float(values[int(built.order[term])])
                if code & 2:
                    found = whole if code >= 0 else parts
                    place = code >> 2 if code >= 0 else -1 - (code >> 2)
                    assert place not in found
                    found[place], total = total, None
            assert total is None
        assert sorted(parts) == list(range(built.slots))
        assert built.divided is not None
        assert built.first is not None
        at = iter(range(built.slots))
        for row, length in zip(built.divided.tolist(), built.first.diff().tolist(), strict=True):
            assert row not in whole
            whole[row] = sum(parts[next(at)] for _ in range(length))
        want = put(values, index, rows)
        met = set(index[index >= 0].tolist())
        assert set(whole) == met
        assert built.empty_rows == (len(met) < rows)
        for row, total in whole.items():
            assert total == pytest.approx(float(want[row]))


def test_chunks_are_cached_in_addition_to_rows():
    index = torch.tensor([0, 0, 1])
    assert partition_of(index, 2, False, 2, True) is partition_of(index, 2, False, 2, True)
    assert partition_of(index, 2, False, 2, True) is not partition_of(index, 2, False, 2)
    assert not partition_of(index, 2, False, 2, True).empty_rows
    index.fill_(1)
    assert partition_of(index, 2, False, 2, True).empty_rows


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("schedule", SHARES, ids=str)
@pytest.mark.parametrize("name", ["spmm", "spmv", "group spmm", "batched sddmm with scatter", "tensor product uvu"])
def test_output_rows_in_any_order(name: str, schedule: Schedule):
    case, tensors = drawn(name)
    row_tensor = {"tensor product uvu": "Dst", "batched sddmm with scatter": "Seg"}.get(name, "Row")
    shuffled = tensors[row_tensor][torch.randperm(tensors[row_tensor].numel())]
    tensors[row_tensor] = torch.where(torch.rand(shuffled.shape) < 0.2, -1, shuffled)
    facts = {row_tensor: IndexFacts(masked=True, proven=True)}
    shape = case.oracle(doubled(tensors), 1).shape
    for start in (None, torch.randn(shape)):
        form, kernel, got = kernel_of(case, tensors, schedule, facts=facts, start=start)
        assert form.permuted
        assert "target" in {argument.kind for argument in kernel.source.arguments}
        assert_case(case, tensors, got, start)


OTHERS = {
    # Two entry indices own a row, a third is summed beside them, and lies on the lanes with the terms.
    "two entry indices": Case(
        "two entry indices",
        "C[Row[g,h],n] += Val[g,h,q] * B[Col[g,h,q],n]",
        lambda s: {
            "Row": entries(5, 7, 3, holes=0.2),
            "Col": entries(6, 7, 3, 2, holes=0.3),
            "Val": real(7, 3, 2),
            "B": real(6, 5),
        },
        lambda t, s: put((t["Val"][..., None] * take(t["B"], t["Col"])).sum(2), t["Row"], 6),
        lambda s: (6, None),
        {"Row": IndexFacts(masked=True, proven=True), "Col": IndexFacts(masked=True, proven=True)},
        fixed="hqn",
    ),
    # A factor stands at the row of each term.
    "a factor at the row": Case(
        "a factor at the row",
        "C[Row[p],n] += Val[p] * D[Row[p],n] * B[Col[p],n]",
        lambda s: {
            "Row": torch.randint(0, 5, (31,)).sort().values,
            "Col": entries(4, 31),
            "Val": real(31),
            "D": real(5, 3),
            "B": real(4, 3),
        },
        lambda t, s: put(t["Val"][:, None] * t["D"][t["Row"]] * t["B"][t["Col"]], t["Row"], 9),
        lambda s: (9, None),
        {"Row": SORTED, "Col": IndexFacts(masked=False, proven=True)},
    ),
    # The rows are not the first axis, and cells beside it are never written.
    "the rows in the middle": Case(
        "the rows in the middle",
        "C[1,Row[p],n,2] += Val[p] * B[Col[p],n]",
        lambda s: {
            "Row": torch.full((37,), 2).index_fill(0, torch.tensor([0, 1]), 0),
            "Col": entries(4, 37),
            "Val": real(37),
            "B": real(4, 3),
        },
        lambda t, s: _middle(put(t["Val"][:, None] * t["B"][t["Col"]], t["Row"], 4)),
        lambda s: (2, 4, None, 4),
        {"Row": SORTED, "Col": IndexFacts(masked=False, proven=True)},
    ),
}


def _middle(sums: Tensor) -> Tensor:
    out = sums.new_zeros(2, 4, 3, 4)
    out[1, :, :, 2] = sums
    return out


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("schedule", SHARES, ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_statements_of_other_shapes(name: str, schedule: Schedule):
    case = OTHERS[name]
    tensors = rounded(case.draw(1), torch.float32)
    _, _, got = kernel_of(case, tensors, schedule)
    assert_case(case, tensors, got)
    # Extents as parameters, so that fewer indices share the lanes of the terms.
    _, _, got = kernel_of(case, tensors, schedule, fixed="")
    assert_case(case, tensors, got)


@pytest.mark.usefixtures("interpreter")
def test_lanes_along_terms_and_other_summed_indices():
    case = OTHERS["two entry indices"]
    tensors = rounded(case.draw(1), torch.float32)
    for lanes in (4, 8):
        schedule = Schedule(n=4, k=lanes, chunk=5, segment=True)
        form, _, got = kernel_of(case, tensors, schedule)
        layout = place_indices(form, schedule)
        assert layout.k is not None
        assert layout.k.indices == ("entry", names_of(form.bound.statement).indices["q"])
        assert_case(case, tensors, got)
    # An extent of 3 leaves lanes over.
    tensors["Col"], tensors["Val"] = entries(6, 7, 3, 3, holes=0.3), torch.randn(7, 3, 3)
    for schedule in (replace(SHARES[1], k=16), replace(SHARES[2], k=8)):
        _, _, got = kernel_of(case, tensors, schedule)
        assert_case(case, tensors, got)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("schedule", SHARES, ids=str)
def test_dtypes(dtype: torch.dtype, schedule: Schedule):
    case, tensors = drawn("group spmm", dtype)
    tensors["Row"] = tensors["Row"].int()
    start = torch.randn(6, 11).to(dtype)
    for given in (None, start):
        _, _, got = kernel_of(case, tensors, schedule, start=given)
        assert got.dtype == dtype
        assert_case(case, tensors, got, given)


@pytest.mark.usefixtures("interpreter")
def test_sums_of_halves_are_rounded_once():
    """A row over many shares: 2048 + 1 + 1 + ... in float16 would stay 2048."""
    case = CASES["spmv"]
    count = 301
    tensors = {
        "Row": torch.ones(count, dtype=torch.int64),
        "Col": torch.zeros(count, dtype=torch.int64),
        "Val": torch.ones(count, dtype=torch.float16),
        "x": torch.ones(1, dtype=torch.float16),
    }
    tensors["Val"][0] = 2048
    for schedule in SHARES:
        _, _, got = kernel_of(case, tensors, schedule)
        assert got.tolist() == [0, 2348, 0, 0, 0, 0]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("schedule", SHARES, ids=str)
def test_layouts_in_memory(schedule: Schedule):
    case, tensors = drawn("spmm")
    moved = {n: t.t().contiguous().t() if t.dim() == 2 else torch.stack([t, t], 1)[:, 0] for n, t in tensors.items()}
    assert all(not t.is_contiguous() for t in moved.values())
    _, _, got = kernel_of(case, moved, schedule)
    assert_case(case, tensors, got)


@pytest.mark.usefixtures("interpreter")
def test_nothing_to_add():
    case = CASES["spmm"]
    for count, index in ((0, 0), (5, -1)):
        tensors = {
            "Row": torch.full((count,), index, dtype=torch.int64),
            "Col": torch.zeros(count, dtype=torch.int64),
            "Val": torch.randn(count),
            "B": torch.randn(2, 3),
        }
        facts = {"Row": IndexFacts(masked=True, proven=True)}
        for start in (None, torch.randn(6, 3)):
            _, _, got = kernel_of(case, tensors, SHARES[1], facts=facts, start=start)
            assert torch.equal(got, torch.zeros(6, 3) if start is None else start)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")
def test_values_of_another_row_do_not_leak():
    """Infinity and NaN stay in their rows, though a scan passes over them."""
    case, tensors = drawn("spmm")
    row = tensors["Row"]
    tensors["Val"][row == 0] = float("inf")
    tensors["B"] = tensors["B"].abs() + 1
    tensors["Val"][row == 3] = float("nan")
    for schedule in SHARES:
        _, _, got = kernel_of(case, tensors, schedule)
        kept = [r for r in range(6) if r not in (0, 3)]
        want = case.oracle(doubled(tensors), 1)
        assert_matches(got[kept], want[kept], dtype=torch.float32, kind="sum", scale=10.0)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("share", [4, 16])
def test_one_row_among_many_gives_the_same_bits(share: int):
    row = torch.cat([torch.arange(40), torch.full((500,), 17), torch.arange(40)])
    row = row[torch.randperm(row.numel())]
    tensors = {"Row": row, "Col": entries(9, row.numel()), "Val": torch.randn(row.numel()), "B": torch.randn(9, 4)}
    case = replace(
        CASES["spmm"],
        out_shape=lambda s: (50, None),
        oracle=lambda t, s: put(t["Val"][:, None] * t["B"][t["Col"]], t["Row"], 50),
    )
    facts = {"Row": IndexFacts(masked=False, proven=True)}
    schedule = Schedule(m=2, n=4, k=4, chunk=share, segment=True)
    first = kernel_of(case, tensors, schedule, facts=facts)[2]
    clear_partitions()
    assert torch.equal(first, kernel_of(case, tensors, schedule, facts=facts)[2])
    assert_case(case, tensors, first)


def test_the_order_of_terms_is_found_once():
    index = index_of(50, 7, 0.2)
    for first, second in ((False, True), (True, False)):
        clear_partitions()
        one = partition_of(index, 7, True, 5, first)
        other = partition_of(index, 7, True, 5, second)
        assert one.order is other.order
        alone = partition_of(index.clone(), 7, True, 5, second)
        assert torch.equal(alone.begin, other.begin)
        assert (alone.target is None) == (other.target is None)
        if alone.target is not None and other.target is not None:
            assert torch.equal(alone.target, other.target)


def program_of(name: str) -> Program:
    case = CASES[name]
    return compile(case.expression, out_shape=case.out_shape(1), options=Options(backend="triton", tune=False))


@pytest.mark.usefixtures("interpreter")
def test_one_program_takes_other_rows():
    """As many shares, but other rows: without gaps, with gaps, with more and with fewer divided rows."""
    case, tensors = drawn("spmm")
    program = program_of("spmm")
    found, _ = generated_of(program, tensors)
    ordered, start = program._arrange(tensors)
    extents = program._extents(ordered, start, None, None)
    run = found.with_schedule(SHARES[1]).prepare(ordered, extents, start)
    names = layout_of(program.statement).tensors
    rows = (
        torch.arange(23) * 6 // 23,
        torch.full((23,), 5),
        torch.randint(0, 6, (23,)).sort().values,
        torch.zeros(23).long(),
    )
    for row in (*rows, *rows):
        other = {**tensors, "Row": row}
        assert_case(case, other, run([other[name] for name in names], None))
    # What was chosen for the program itself stays.
    assert found.with_schedule(SHARES[0]) is not found
    assert_case(case, tensors, program(tensors=tensors))


@pytest.mark.usefixtures("interpreter")
def test_explained():
    _, tensors = drawn("spmm")
    program = program_of("spmm")
    found, _ = generated_of(program, tensors)
    ordered, start = program._arrange(tensors)
    extents = program._extents(ordered, start, None, None)
    for schedule, word in ((SHARES[0], "segment"), (Schedule(n=4), "own")):
        made = found.with_schedule(schedule).described(ordered, extents, start)
        assert made.choices[0][1].partition(":")[0] == word
        assert ("equal chunks of 3 terms" in made.choices[1][1]) == schedule.segment
        assert made.schedules == (str(schedule),)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("columns", [1, 4, 16, 32, 64, 128, 300])
def test_candidates_are_few_and_hold_every_width(columns: int):
    case = CASES["spmm"]
    tensors = {
        "Row": torch.arange(2000) // 14,
        "Col": torch.zeros(2000, dtype=torch.int64),
        "Val": torch.ones(2000),
        "B": torch.ones(1, columns),
    }
    form, _, _ = form_of(replace(case, out_shape=lambda s: (200, None)), tensors)
    tried = list(candidates(form))
    assert len(tried) <= 32
    assert sum(schedule.segment for schedule in tried) >= 3
    if columns > 1:
        wanted = {1, 2, 4, 8, 16, 32} if columns < 64 else {1, 2, 4, 8, 16}
        assert {s.k for s in tried if not s.segment} >= wanted


@pytest.mark.usefixtures("interpreter")
def test_a_schedule_is_for_the_rows_of_its_call():
    """Not for those of the call that the program was made for."""
    program = compile("C[Row[p],n] += Val[p] * B[Col[p],n]", facts={"Row": SORTED}, options=Options(backend="triton"))

    def chosen(rows: int, terms: int, longest: int = 1) -> Schedule:
        row = (torch.arange(terms) * rows // terms).clamp(min=longest * rows // terms)
        tensors = {"Row": row, "Col": torch.zeros_like(row), "Val": torch.ones(terms), "B": torch.ones(1, 4)}
        ordered = [tensors[name] for name in layout_of(program.statement).tensors]
        found = generated_of(program, tensors, (rows, None))[0]
        extents = program._extents(ordered, None, None, (rows, None))
        return found._schedule(size_bucket(extents), ordered, extents, None).candidate

    few, many = (20, 2000), (2000, 2000)
    first = chosen(*few)
    later = chosen(*many)
    insum_nn.clear_cache()
    assert chosen(*many) == later != first
    assert chosen(*few) == first
    # Nor for those of another matrix of the same sizes.
    skewed = chosen(20_000, 60_000, 30_000)
    regular = chosen(20_000, 60_000)
    insum_nn.clear_cache()
    assert chosen(20_000, 60_000) == regular != skewed
    assert skewed.segment
    assert not regular.segment

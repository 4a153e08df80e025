"""Schedules without any measurement: what is known of the rows of a sparse sum decides how they are walked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from insum_nn import IndexFacts
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.lang.bind import bind
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.schedule.candidates import candidates
from insum_nn.compiler.schedule.defaults import default_schedule
from insum_nn.compiler.schedule.form import Form, make_form
from insum_nn.facts import StaticTable

SPMM = "C[Row[p],n] += Val[p] * B[Col[p],n]"
GROUPED = "C[Row[p],n] += Val[p,q] * B[Col[p,q],n]"
FACTS = {"Row": IndexFacts(sorted=True, masked=False, proven=True), "Col": IndexFacts(masked=False, proven=True)}


def product(rows: int, terms: int, columns: int, dtype: torch.dtype = torch.float32) -> Form:
    """The product of a sparse matrix."""
    tensors = {name: torch.zeros(2, dtype=torch.int32) for name in ("Row", "Col")}
    tensors |= {"Val": torch.ones(2, dtype=dtype), "B": torch.ones(2, columns, dtype=dtype)}
    bound = bind(parse(SPMM), tensors, None, facts=FACTS)
    return make_form(bound, {"p": terms, "n": columns}, (rows, columns), {}, deterministic=False)


def grouped(rows: int, groups: int, terms: int, columns: int) -> Form:
    """The product of a sparse matrix in groups of so many terms."""
    tensors = {"Row": torch.zeros(2, dtype=torch.int32), "Col": torch.zeros(2, terms, dtype=torch.int32)}
    tensors |= {"Val": torch.ones(2, terms), "B": torch.ones(2, columns)}
    bound = bind(parse(GROUPED), tensors, None, facts=FACTS)
    sizes = {"p": groups, "q": terms, "n": columns}
    return make_form(bound, sizes, (rows, columns), {}, deterministic=False)


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize(("terms", "length"), [(1, 8), (2, 16), (4, 8), (8, 32)])
def test_groups_are_divided_where_their_terms_would_be(terms: int, length: int, columns: int):
    rows = 60_000
    entries = product(rows, rows * length, columns)
    groups = grouped(rows, rows * length // terms, terms, columns)
    assert default_schedule(groups).chunk * terms == default_schedule(entries).chunk < 700


def test_large_entries_are_not_divided_by_their_terms():
    assert default_schedule(grouped(60_000, 480_000, 32, 128)).chunk == 64


def test_sizes_alone_give_a_schedule():
    schedule = default_schedule(product(20_000, 100_000, 64))
    assert schedule == Schedule(m=2, n=64, k=8, warps=1, chunk=64)


@pytest.mark.parametrize(
    ("text", "shape", "programs", "parts"),
    [
        ("Y[n] min= X[n,m]", (8000, 8000), 2000, 1),
        ("Y[n] max= X[n,m]", (300, 100_000), 75, 109),
        ("Y += X[n,m]", (800_000, 64), 1, 4096),
        ("Y[n] += X[n,m]", (800_000, 64), 25_000, 1),
    ],
)
def test_dense_reductions_fill_the_device(text: str, shape: tuple[int, int], programs: int, parts: int):
    bound = bind(parse(text), {"X": torch.zeros(2, 2)}, None)
    bound = replace(bound, static=(("m", 64),) if shape[1] == 64 else ())
    output = shape[:1] if "Y[n]" in text else ()
    form = make_form(bound, dict(zip("nm", shape, strict=True)), output, {}, deterministic=False)
    schedule = default_schedule(form)
    assert (-(-(output or (1,))[0] // schedule.m), schedule.splits) == (programs, parts)


def written(expression: str, points: int, copies: int, samples: int = 10_000) -> Form:
    """Products of matrices of so many copies, one for each of the points, whose tables are written out."""
    shapes = {"X": (2, points, copies), "Y": (2, points, copies), "W": (points, copies, copies)}
    tensors = {name: torch.ones(shape) for name, shape in shapes.items() if f"{name}[" in expression}
    # Out of order, as a table in steps would be addressed by its index.
    tensors |= {"I": torch.tensor([1, 0, *range(2, points)])}
    bound = bind(parse(expression), tensors, None, facts={"I": IndexFacts(masked=False, proven=True)})
    sizes = {"z": samples, "p": points, "u": copies, "w": copies}
    bound = replace(bound, static=tuple((name, size) for name, size in sizes.items() if name != "z"))
    shape = (points, copies, copies) if expression.startswith("G") else (samples, points, copies)
    tables = {"I": StaticTable.of(tensors["I"])}
    return make_form(bound, sizes, shape, tables, deterministic=False)


ROWS = "C[z,I[p],w] += X[z,I[p],u] * W[p,u,w]"
SUMS = "G[I[p],u,w] += X[z,I[p],u] * Y[z,I[p],w]"


@pytest.mark.parametrize(("copies", "columns"), [(16, 16), (32, 32), (128, 32)])
def test_unrolled_products_are_a_warp_each(copies: int, columns: int):
    """Warps of one program would wait for each other at every product."""
    schedule = default_schedule(written(ROWS, 16, copies))
    assert schedule == Schedule(m=16, n=columns, k=16, dot=True, groups=5, warps=1, stages=1)


@pytest.mark.parametrize(("copies", "tile", "warps"), [(16, 16, 1), (32, 32, 2), (64, 32, 2)])
def test_long_sums_of_unrolled_products_are_divided(copies: int, tile: int, warps: int):
    schedule = default_schedule(written(SUMS, 12, copies))
    assert (schedule.m, schedule.n, schedule.warps, schedule.groups) == (tile, tile, warps, 4)
    assert schedule.splits > 16
    # Every part of the sum has all cells of the result.
    assert 4 * schedule.splits * 12 * copies * copies <= 1 << 24
    assert default_schedule(written(SUMS, 12, copies, samples=100)).splits == 1
    # Many terms of each of few samples are a long sum, too.
    assert default_schedule(written(SUMS, 12, copies, samples=800)).splits == 12


@pytest.mark.parametrize(("samples", "splits"), [(100, 8), (864, 8), (100_000, 1)])
def test_sums_over_two_indices_are_divided_by_all_their_terms(samples: int, splits: int):
    """A fully connected product of few samples would keep few programs busy with 64 * 64 terms each."""
    shapes = {"X": (2, 64), "Y": (2, 64), "W": (64, 32, 64)}
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    bound = bind(parse("C[z,w] += X[z,u] * Y[z,v] * W[u,v,w]"), tensors, None)
    sizes = {"z": samples, "u": 64, "v": 32, "w": 64}
    bound = replace(bound, static=tuple((name, size) for name, size in sizes.items() if name != "z"))
    schedule = default_schedule(make_form(bound, sizes, (samples, 64), {}, deterministic=False))
    assert schedule.dot
    assert schedule.splits == splits


@pytest.mark.parametrize("expression", [ROWS, SUMS])
@pytest.mark.parametrize("points", [3, 16, 24, 25, 99])
def test_one_program_has_no_more_accumulators_than_registers(expression: str, points: int):
    for copies in (16, 32, 64):
        form = written(expression, points, copies)
        tried = list(candidates(form))
        assert tried[0] == default_schedule(form)
        # Each takes seconds to compile.
        assert len(tried) <= 10
        assert len({schedule.groups for schedule in tried}) == min(3, max(1, points // 3))


@pytest.mark.parametrize(("points", "groups"), [(24, (1, 1, 2)), (48, (2, 2, 4)), (96, (4, 4, 4))], ids=str)
def test_accumulators_of_float64_take_two_registers(points: int, groups: tuple[int, int, int]):
    """A written-out sum by receiver, whose cells are divided among programs once they fill the registers."""
    for dtype, wanted in zip((torch.float16, torch.float32, torch.float64), groups, strict=True):
        tensors = {
            "Dst": torch.arange(10),
            "I": torch.tensor([1, 0, *range(2, points)]),
            "X": torch.ones(10, points, 16, dtype=dtype),
            "Y": torch.ones(10, points, dtype=dtype),
        }
        facts = {"Dst": IndexFacts(sorted=True, masked=False, proven=True), "I": IndexFacts(masked=False, proven=True)}
        bound = bind(parse("Z[Dst[e],I[p],u] += X[e,I[p],u] * Y[e,p]"), tensors, None, facts=facts)
        sizes = {"e": 10, "p": points, "u": 16}
        bound = replace(bound, static=(("p", points), ("u", 16)))
        tables = {"I": StaticTable.of(tensors["I"])}
        form = make_form(bound, sizes, (10, points, 16), tables, deterministic=False)
        assert (form.strategy, form.accumulators) == ("own", points)
        assert default_schedule(form).groups == wanted


@pytest.mark.parametrize(("rows", "points", "chunk"), [(2, 1000, 8), (2, 32, 128), (4000, 1000, 512)])
def test_long_code_over_few_rows_is_divided(rows: int, points: int, chunk: int):
    """The gradient of weights by element: with two elements, two rows of a thousand atoms."""
    tensors = {
        "Z": torch.arange(2),
        "I": torch.tensor([1, 0, *range(2, points)]),
        "X": torch.ones(2, points, 64),
        "G": torch.ones(2, 64),
    }
    facts = {name: IndexFacts(masked=False, proven=True) for name in "ZI"}
    bound = bind(parse("W[Z[n],u] += G[n,u] * X[n,I[p],u]"), tensors, None, facts=facts)
    sizes = {"n": 2000, "p": points, "u": 64}
    bound = replace(bound, static=tuple((name, size) for name, size in sizes.items() if name != "n"))
    form = make_form(bound, sizes, (rows, 64), {"I": StaticTable.of(tensors["I"])}, deterministic=True)
    assert form.row_index is not None
    assert default_schedule(form).chunk == chunk

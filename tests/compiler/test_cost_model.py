"""The cost model: what it takes the place of, what it orders, and what fits on devices that were only imagined."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from insum_nn import IndexFacts
from insum_nn.compiler.forms.candidates import candidates
from insum_nn.compiler.forms.defaults import default_schedule
from insum_nn.compiler.forms.form import Form, FormError, make_form
from insum_nn.compiler.lang.bind import bind
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.schedule import cost_model
from insum_nn.compiler.schedule.cost_model import (
    H200,
    Device,
    device_of,
    fits,
    is_fitted,
    microseconds,
    models,
    predicted,
    ranked,
    rates_of,
    residents,
    without_measuring,
)
from insum_nn.compiler.schedule.kernel_work import count
from insum_nn.compiler.schedule.space import Schedule, precision_of
from tests.compiler.corpus.statements import Entry, entries
from tests.compiler.test_default_schedules import product

SMALL = Device((7, 5), 20, 48 << 10, 48 << 10, 65_536, 32, 4 << 20)
BIG = Device((12, 0), 240, 400 << 10, 400 << 10, 131_072, 64, 256 << 20)
DEVICES = {"small": SMALL, "H200": H200, "big": BIG}

MATMUL = "C[Row[p],m,n] += A[p,m,k] * B[Col[p],k,n]"


def blocks(size: int, dtype: torch.dtype = torch.float16, count: int = 4096, columns: int = 4096) -> Form:
    """Products of matrices of one size at some places of a longer one."""
    tensors = {"Row": torch.zeros(2, dtype=torch.int32), "Col": torch.zeros(2, dtype=torch.int32)}
    tensors |= {"A": torch.ones(2, size, size, dtype=dtype), "B": torch.ones(2, size, columns, dtype=dtype)}
    facts = {"Row": IndexFacts(sorted=True, masked=False, proven=True), "Col": IndexFacts(masked=False, proven=True)}
    bound = bind(parse(MATMUL), tensors, None, facts=facts)
    sizes = {"p": count, "m": size, "k": size, "n": columns}
    bound = replace(bound, static=tuple(sorted((name, extent) for name, extent in sizes.items() if name != "p")))
    return make_form(bound, sizes, (256, size, columns), {}, deterministic=False)


def forms() -> Iterator[tuple[Entry, Form]]:
    """Every tenth statement of the corpus that a kernel is generated for, and every test case of the generator."""
    for number, entry in enumerate(entries()):
        if number % 10 and not entry.name.startswith("case: "):
            continue
        try:
            form = make_form(entry.bound, entry.sizes, entry.extents.output, dict(entry.tables), deterministic=False)
        except FormError:
            continue
        yield entry, form


def test_every_statement_gets_a_schedule_that_fits():
    seen: set[str] = set()
    for entry, form in forms():
        precision = precision_of(form.bound.dtype, "auto")
        for name, device in DEVICES.items():
            schedule, reason = without_measuring(form, precision, device)
            time = microseconds(count(form, schedule, precision), device, rates_of(device))
            assert time > 0.0, entry.name
            assert math.isfinite(time), entry.name
            every = ranked(form, precision, device)
            assert schedule in every
            assert len(every) == 1 or all(fits(count(form, each, precision), device) for each in every), entry.name
            seen.add(f"{name}: {reason}")
    # Both ways of choosing were taken by some of them.
    assert {"small: the device has no room for the default", "H200: the default"} <= seen


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_what_does_not_fit_is_replaced_by_the_next(dtype: torch.dtype):
    form = blocks(128, dtype)
    precision = precision_of(dtype, "auto")
    default = default_schedule(form)
    needs = int(count(form, default, precision).shared)
    enough, less = replace(SMALL, shared=needs), replace(SMALL, shared=needs - 1)
    assert next(iter(ranked(form, precision, enough))) == default
    schedule, reason = without_measuring(form, precision, less)
    assert schedule != default
    assert count(form, schedule, precision).shared < needs
    assert reason == "the device has no room for the default"
    # Where no candidate fits, the default shrinks to the least there is.
    (least,) = ranked(form, precision, replace(SMALL, shared=4_096))
    assert count(form, least, precision).shared <= 4_096
    ((least, time),) = ranked(form, precision, replace(SMALL, shared=64)).items()
    assert (least.m, least.n, least.k, least.stages) == (16, 16, 16, 1)
    assert math.isinf(time)


def test_fewer_registers_hold_fewer_programs():
    work = count(product(40_000, 800_000, 128), Schedule(m=4, n=128, k=8, warps=1), "tf32x3")
    half = replace(H200, registers=H200.registers // 2)
    held = [residents(work, device, rates_of(H200)) for device in (H200, half)]
    assert held[0] == pytest.approx(2 * held[1], abs=1)
    assert not fits(work, replace(H200, registers=512))
    assert not fits(replace(work, warps=64), H200)


def test_a_default_that_fits_is_taken_whatever_is_predicted(monkeypatch: pytest.MonkeyPatch):
    form = product(200_000, 700_000, 128)
    default, *others = ranked(form, "tf32x3", H200).values()
    assert default > 1.5 * others[0]
    monkeypatch.setattr(cost_model, "ranked", None)
    assert without_measuring(form, "tf32x3", H200) == (default_schedule(form), "the default")


def test_more_work_takes_longer():
    schedule = Schedule(m=2, n=64, k=8, warps=1)

    def time(rows: int = 50_000, terms: int = 800_000, columns: int = 64, longest: int = 100) -> float:
        return predicted(product(rows, terms, columns, longest), schedule, "tf32x3", H200)

    assert time(terms=3_200_000) > 2.0 * time()
    assert time(columns=256) > 2.0 * time()
    assert time(rows=500_000, terms=8_000_000) > 5.0 * time()
    bytes_ = predicted(product(50_000, 800_000, 64, 100, torch.float16), schedule, "ieee", H200)
    assert bytes_ < time()


def test_a_long_row_is_waited_for_unless_it_is_divided_into_chunks():
    rows, parts = (Schedule(m=2, n=64, k=4, chunk=chunk, warps=1) for chunk in (1 << 20, 64))
    even, skewed = (product(50_000, 800_000, 64, longest) for longest in (20, 100_000))
    times = {
        (name, form is skewed): predicted(form, schedule, "tf32x3", H200)
        for name, schedule in (("rows", rows), ("parts", parts))
        for form in (even, skewed)
    }
    assert times["rows", True] > 10.0 * times["rows", False]
    assert times["parts", True] < 2.0 * times["parts", False]


def test_rows_that_are_divided_take_a_launch_more():
    form = product(50_000, 800_000, 64, 1_000)
    whole, divided = (count(form, Schedule(n=64, k=4, chunk=share, warps=1), "tf32x3") for share in (1_024, 128))
    assert (whole.collected, divided.collected) == (False, True)
    assert divided.programs > whole.programs
    assert divided.longest < whole.longest
    rates = rates_of(H200)
    assert microseconds(replace(divided, collected=False), H200, rates) == pytest.approx(
        microseconds(divided, H200, rates) - rates.collect
    )


def test_tiles_that_waste_the_matrix_unit_are_slower():
    form = blocks(32)
    fitting, wasteful = (Schedule(m=m, n=128, k=32, dot=True, warps=4) for m in (32, 128))
    assert count(form, fitting, "ieee").products < count(form, wasteful, "ieee").products or (
        count(form, fitting, "ieee").programs == count(form, wasteful, "ieee").programs
    )
    assert predicted(form, fitting, "ieee", H200) <= predicted(form, wasteful, "ieee", H200)


def test_a_larger_device_is_faster():
    for form in (product(400_000, 8_000_000, 128, 60), blocks(64)):
        times = [predicted(form, default_schedule(form), "ieee", device) for device in DEVICES.values()]
        assert times == sorted(times, reverse=True)
    assert not is_fitted(SMALL)
    assert is_fitted(H200)
    assert rates_of(H200) == cost_model.Rates()
    assert rates_of(SMALL).memory < rates_of(H200).memory < rates_of(BIG).memory


def test_straight_line_code_keeps_its_order():
    """How registers are given to it is not modelled."""
    for entry, form in forms():
        if not models(form):
            precision = precision_of(form.bound.dtype, "auto")
            every = list(ranked(form, precision, BIG))
            assert every == [each for each in candidates(form) if each in every], entry.name


def test_what_is_no_cuda_device_is_taken_for_the_one_that_was_measured():
    assert device_of(torch.device("cpu")) is H200
    assert device_of(torch.device("meta")) is H200

"""What fits on a device: the default wherever it does, the next candidate where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from insum_nn import IndexFacts
from insum_nn.compiler.lang.bind import bind
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.schedule.candidates import candidates
from insum_nn.compiler.schedule.defaults import default_schedule
from insum_nn.compiler.schedule.device import (
    H200,
    Device,
    device_of,
    fitting,
    is_measured,
    shared_memory,
    without_measuring,
)
from insum_nn.compiler.schedule.form import Form, FormError, make_form
from tests.compiler.corpus.statements import Entry, entries

SMALL, BIG = Device((7, 5), 48 << 10), Device((12, 0), 400 << 10)
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
        for name, device in DEVICES.items():
            schedule, reason = without_measuring(form, device)
            every = fitting(form, device)
            assert schedule == every[0], entry.name
            assert all(shared_memory(form, each) <= device.shared for each in every), entry.name
            assert every == [each for each in candidates(form) if each in every], "in their own order"
            seen.add(f"{name}: {reason}")
    # Both ways of choosing were taken by some of them.
    assert {"small: the device has no room for the default", "H200: the default"} <= seen


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_what_does_not_fit_is_replaced_by_the_next(dtype: torch.dtype):
    form = blocks(128, dtype)
    default = default_schedule(form)
    needs = shared_memory(form, default)
    # Both operands of a step of each stage.
    assert needs == (default.m + default.n) * default.k * dtype.itemsize * default.stages
    assert without_measuring(form, replace_shared(needs)) == (default, "the default")
    schedule, reason = without_measuring(form, replace_shared(needs - 1))
    assert schedule != default
    assert shared_memory(form, schedule) < needs
    assert reason == "the device has no room for the default"
    # Where no candidate fits, the default shrinks to the least there is.
    (least,) = fitting(form, replace_shared(4_096))
    assert shared_memory(form, least) <= 4_096
    (least,) = fitting(form, replace_shared(64))
    assert (least.m, least.n, least.k, least.stages) == (16, 16, 16, 1)


def replace_shared(shared: int) -> Device:
    return SMALL._replace(shared=shared)


def test_sums_without_the_matrix_unit_need_no_shared_memory():
    form = blocks(4)
    assert form.product is None
    assert shared_memory(form, default_schedule(form)) == 0


def test_what_is_no_cuda_device_is_taken_for_the_one_that_was_measured():
    assert device_of(torch.device("cpu")) is H200
    assert device_of(torch.device("meta")) is H200
    assert is_measured(H200)
    assert not is_measured(SMALL)

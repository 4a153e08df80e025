"""Index tensors read a step before their terms: the same sums, nothing read outside, and the chain really shorter."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import insum_nn
from benchmarks.schedules import generated_of
from insum_nn import Options
from insum_nn.compiler.forms.schedule import Schedule
from insum_nn.testing.tolerances import assert_matches
from tests.compiler.generated_cases import CASES, HOLES, kernel_of
from tests.compiler.interpreted import interpreter
from tests.compiler.sweep import OWNERS

__all__ = ["interpreter"]

pytestmark = pytest.mark.usefixtures("interpreter")
SCHEDULES = {
    "a term at a time": Schedule(n=32),
    "terms on lanes": Schedule(n=16, k=4),
    "rows on lanes": Schedule(m=4, n=16, share=3),
    "both": Schedule(m=2, n=8, k=4, warps=2),
    "equal shares": Schedule(n=16, k=2, share=5, segment=True),
}


def shuffled(name: str, rows: int | None = None) -> dict[str, Tensor]:
    """A case whose terms are in no order, some without a row; with `rows` all of them belong to the first few."""
    torch.manual_seed(0)
    drawn = CASES[name].draw(1)
    owner = drawn[OWNERS[name]]
    owner = owner[torch.randperm(owner.numel())] % (rows or 1 << 30)
    drawn[OWNERS[name]] = torch.where(torch.rand(owner.shape) < 0.2, -1, owner)
    return {n: t.float() if t.is_floating_point() else t for n, t in drawn.items()}


@pytest.mark.parametrize("few", [None, 1])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=list(SCHEDULES))
@pytest.mark.parametrize("name", [name for name in OWNERS if not CASES[name].dot])
def test_the_same_sums(name: str, schedule: Schedule, few: int | None):
    case, tensors = CASES[name], shuffled(name, few)
    early = replace(schedule, early=True)
    form, kernel, got = kernel_of(case, tensors, early, facts={OWNERS[name]: HOLES})
    assert form.permuted
    exact = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    scale = case.oracle({n: t.abs() if t.is_floating_point() else t for n, t in exact.items()}, 1).max()
    assert_matches(got, case.oracle(exact, 1), dtype=torch.float32, kind="sum", scale=float(scale))
    _, plain, _ = kernel_of(case, tensors, schedule, facts={OWNERS[name]: HOLES})
    assert plain.source.text != kernel.source.text
    # In the loop the order of the terms is read for two steps on.
    loop = kernel.source.text.split("for l", 1)[1]
    (order,) = re.findall(r"(next\w+) = tl\.load\(order_", loop)
    assert re.search(rf"^ +\w+ = {order}$", loop, re.MULTILINE)


def test_no_terms_at_all():
    case, tensors = CASES["spmm"], shuffled("spmm")
    tensors["Row"] = torch.full_like(tensors["Row"], -1)
    _, _, got = kernel_of(case, tensors, Schedule(n=32, early=True), facts={"Row": HOLES})
    assert not got.any()


def test_index_tensors_of_index_tensors():
    """What says where another is read comes early; the other is read in its own step."""
    torch.manual_seed(0)
    tensors = {
        "Row": torch.tensor([2, 0, 2, 1, 2, 0]),
        "Col": torch.tensor([1, 0, 3, 2, -1, 1]),
        "Name": torch.tensor([4, 0, 2, 2]),
        "B": torch.randn(5, 7),
    }
    text = "C[Row[p],n] += B[Name[Col[p]],n]"
    want = insum_nn.compile(text, options=Options(backend="eager"))(tensors=tensors, out_shape=(4, None))
    program = insum_nn.compile(text, options=Options(backend="triton", tune=False))
    _, scheduled = generated_of(program, tensors, (4, None))
    for schedule in SCHEDULES.values():
        torch.testing.assert_close(scheduled(replace(schedule, early=True))(), want)


def test_what_has_nothing_to_read_early_stays():
    """Terms in order, read where they stand: there is no index tensor but the owner."""
    tensors = {"Row": torch.tensor([0, 0, 1, 3]), "B": torch.randn(4, 8)}
    facts = {"Row": insum_nn.IndexFacts(sorted=True, masked=False)}
    program = insum_nn.compile("C[Row[p],n] += B[p,n]", facts=facts, options=Options(backend="triton", tune=False))
    made, scheduled = generated_of(program, tensors, (4, None))
    assert not made.form.permuted
    B = tensors["B"]
    want = torch.stack([B[0] + B[1], B[2], torch.zeros(8), B[3]])
    torch.testing.assert_close(scheduled(Schedule(n=8, early=True))(), want)

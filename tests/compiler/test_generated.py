"""Generated Triton kernels under Triton's interpreter: every class of statement, schedule, dtype and memory layout.

The interpreter runs the text that a GPU runs, and the fixture checks every address and fills fresh memory with NaN.
"""

from __future__ import annotations

import gc
import linecache
import math
import re
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import IndexFacts, Options
from insum_nn.compiler.codegen import triton as triton_printer
from insum_nn.compiler.ir.nodes import Buffer, Const, Kernel, Result, Store
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.kernels import launch as launch_module
from insum_nn.compiler.kernels import sized
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.schedule import device as devices
from insum_nn.compiler.schedule import tune
from insum_nn.compiler.schedule.candidates import candidates
from insum_nn.compiler.schedule.defaults import default_schedule
from insum_nn.compiler.tuning import timing
from insum_nn.dtypes import DTYPES, FLOATS
from insum_nn.errors import InsumDeviceError, InsumFormatError
from insum_nn.testing.random_programs import RandomProgram, random_program
from insum_nn.testing.tolerances import assert_matches
from tests.compiler.generated_cases import CASES, Case, form_of, kernel_of, take
from tests.compiler.interpreted import interpreter
from tests.compiler.test_property import assert_close_to_reference, gradients, run

__all__ = ["interpreter"]

pytestmark = pytest.mark.usefixtures("interpreter")
GENERATED = Options(backend="triton", tune=False)
EAGER = Options(backend="eager")
NAMES = list(CASES)
WIDENED_DOTS = tuple(row.torch for row in DTYPES if row.has_dot and row.is_widened)


# What a case is compared with.


def rounded(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def doubled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().double() if t.is_floating_point() else t for name, t in tensors.items()}


def assert_case(case: Case, tensors: dict[str, Tensor], got: Tensor, initial: Tensor | None = None) -> None:
    exact = doubled(tensors)
    want = case.oracle(exact, 1)
    # The size of the terms, not of what is left of them where they cancel.
    scale = case.oracle({n: t.abs() if t.is_floating_point() else t for n, t in exact.items()}, 1).max()
    if initial is not None:
        want, scale = want + initial.double(), scale + initial.double().abs().max()
    assert got.is_contiguous()
    dtype = next(t.dtype for t in tensors.values() if t.is_floating_point())
    assert_matches(got, want, dtype=dtype, kind="sum", scale=float(scale))


def compiled(case: Case, tensors: dict[str, Tensor], options: Options = GENERATED) -> insum_nn.Program:
    static = {name: tensors[name] for name in case.static}
    return insum_nn.compile(
        case.expression, out_shape=case.out_shape(1), facts=case.facts, static=static, options=options
    )


# Schedules chosen by hand.


def drawn(name: str, dtype: torch.dtype = torch.float32) -> tuple[Case, dict[str, Tensor]]:
    case = CASES[name]
    return case, rounded(case.draw(1), dtype)


ELEMENTS = {
    "wide": Schedule(n=32, k=4),
    "narrow": Schedule(n=4, k=2),
    "rows": Schedule(m=4, n=16),
    "rows and sums": Schedule(m=8, n=2, k=16),
    "divided": Schedule(n=32, k=4, chunk=2),
    "divided rows": Schedule(m=2, n=8, k=2, chunk=1),
    "groups": Schedule(n=8, groups=3),
}


# Products have many cells: small tiles would be many programs, which the interpreter runs one by one.
LARGE_TILES = ("wide", "rows", "divided")
PAIRS = [(name, which) for name in NAMES for which in ELEMENTS if not CASES[name].dot or which in LARGE_TILES]


@pytest.mark.parametrize(("name", "which"), PAIRS)
def test_schedules_by_element(name: str, which: str):
    case, tensors = drawn(name)
    _, _, got = kernel_of(case, tensors, ELEMENTS[which])
    assert_case(case, tensors, got)


DOTS = {
    "small": Schedule(m=16, n=16, k=16, dot=True),
    "small, transposed": Schedule(m=16, n=16, k=16, dot=True, swap=True),
    "large": Schedule(m=32, n=64, k=32, dot=True),
    "large, transposed": Schedule(m=64, n=16, k=32, dot=True, swap=True, groups=2),
    "divided": Schedule(m=16, n=32, k=16, dot=True, chunk=1),
    "groups": Schedule(m=16, n=16, k=16, dot=True, groups=2),
}


@pytest.mark.parametrize("name", [name for name in NAMES if CASES[name].dot])
@pytest.mark.parametrize("which", DOTS)
def test_schedules_by_dot(name: str, which: str):
    case, tensors = drawn(name)
    form, kernel, got = kernel_of(case, tensors, DOTS[which])
    assert form.product is not None
    assert "tl.dot(" in kernel.source.text
    assert_case(case, tensors, got)


@pytest.mark.parametrize("name", ["tensor product uvw", "tensor product of representations"])
@pytest.mark.parametrize("which", ["large, transposed", "groups"])
def test_long_parts_are_functions(monkeypatch: pytest.MonkeyPatch, name: str, which: str):
    case, tensors = drawn(name)
    _, whole, want = kernel_of(case, tensors, DOTS[which])
    monkeypatch.setattr(triton_printer, "_LONG", 0)
    _, kernel, got = kernel_of(case, tensors, DOTS[which])
    assert "noinline" in kernel.source.text
    assert "noinline" not in whole.source.text
    for part in kernel.source.text.split("noinline=True)")[1:]:
        head, _, body = part.partition(":")
        body = body.partition("@triton.jit")[0]
        assert "out" in head
        # A part takes what it reads, and no more.
        taken = head.partition("(")[2].rstrip(")").split(", ")
        assert all(re.search(rf"\b{name}\b", body) for name in taken)
    assert torch.equal(got, want)
    assert_case(case, tensors, got)


@pytest.mark.parametrize("name", [name for name in NAMES if CASES[name].dot])
@pytest.mark.parametrize("dtype", WIDENED_DOTS, ids=str)
def test_dots_of_fp16_and_bf16(name: str, dtype: torch.dtype):
    case, tensors = drawn(name, dtype)
    _, kernel, got = kernel_of(case, tensors, Schedule(m=16, n=32, k=32, dot=True))
    assert "tl.dot(" in kernel.source.text
    assert_case(case, tensors, got)


@pytest.mark.parametrize("name", ["convolution's weight gradient", "tensor product uvw", "sddmm", "convolution"])
@pytest.mark.parametrize("splits", [2, 3, 64])
@pytest.mark.parametrize("dot", [False, True])
def test_a_long_sum_divided_among_programs(name: str, splits: int, dot: bool):
    case, tensors = drawn(name)
    # Many parts have few programs each, as the interpreter runs them one after the other.
    tile = Schedule(m=16, n=16, k=16, dot=True) if dot else Schedule(m=16 if splits > 3 else 2, n=16, k=4)
    initial = None
    if name == "sddmm":
        initial = torch.randn(9, 3)
    _, _, got = kernel_of(case, tensors, replace(tile, splits=splits), initial=initial)
    assert_case(case, tensors, got, initial)


@pytest.mark.parametrize("name", ["spmm", "spmv", "group spmm", "block spmm", "tensor product uvu"])
@pytest.mark.parametrize(("chunk", "m"), [(1, 1), (4, 4), (512, 1)])
def test_output_rows_in_any_order(name: str, chunk: int, m: int):
    """Unsorted, with entries of -1, both by the terms in order and by adding to memory."""
    case, tensors = drawn(name)
    row_tensor = {"tensor product uvu": "Dst"}.get(name, "Row")
    shuffled = tensors[row_tensor][torch.randperm(tensors[row_tensor].numel())]
    tensors[row_tensor] = torch.where(torch.rand(shuffled.shape) < 0.2, -1, shuffled)
    facts = {row_tensor: IndexFacts(masked=True, proven=True)}
    rows = case.out_shape(1)
    assert rows is not None
    shape = case.oracle(doubled(tensors), 1).shape
    schedule = Schedule(m=16, n=32, k=16, dot=True, chunk=chunk) if case.dot else Schedule(m=m, n=16, k=2, chunk=chunk)
    for initial in (None, torch.randn(shape)):
        form, _, got = kernel_of(case, tensors, schedule, facts=facts, initial=initial)
        assert (form.strategy, form.permuted) in (("own", True), ("atomic", False))
        assert_case(case, tensors, got, initial)
        form, _, got = kernel_of(case, tensors, schedule, facts=facts, initial=initial, by_rows=False)
        assert form.strategy == "atomic"
        assert_case(case, tensors, got, initial)


@pytest.mark.parametrize("name", ["spmm", "group spmm", "sddmm", "tensor product uvu", "convolution"])
def test_extents_that_are_not_compiled_in(name: str):
    case, tensors = drawn(name)
    fixed = "krq" if case.static else ""
    for schedule in (Schedule(n=16, k=4), Schedule(m=4, n=8, k=2), Schedule(m=4, n=4, chunk=2)):
        _, _, got = kernel_of(case, tensors, schedule, fixed=fixed)
        assert_case(case, tensors, got)


@pytest.mark.parametrize("name", ["spmm", "spmv", "group spmm"])
def test_every_candidate_of_the_search_computes_the_same(name: str):
    case, tensors = drawn(name)
    form, _, _ = kernel_of(case, tensors, None)
    tried = list(candidates(form))[:12]
    assert tried[0] == default_schedule(form)
    for schedule in tried:
        _, _, got = kernel_of(case, tensors, schedule)
        assert_case(case, tensors, got)


@pytest.mark.parametrize(("dtype", "launches"), [(torch.float32, 1), (torch.float16, 2)])
@pytest.mark.parametrize("device", [5.0, 25.0, 80.0])
def test_a_search_counts_what_a_call_waits_for(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, launches: int, device: float
):
    case, drawn_tensors = drawn("convolution's weight gradient")
    tensors = rounded(drawn_tensors, dtype)
    form, ordered, extents = form_of(case, tensors)
    monkeypatch.setattr(timing, "device_time", lambda run, repeat: device)
    whole, divided = (
        tune._Trial(form, Schedule(m=16, n=32, k=16, dot=True, splits=splits), ordered, extents, None, "ieee").time(1)
        for splits in (1, 3)
    )
    assert whole == device
    # A call keeps the host for 20 us, and each launch beside for 12.
    waits = {5.0: 12.0 * launches, 25.0: 12.0 * launches - 5.0, 80.0: 0.0}[device]
    assert divided == device + waits


def test_the_sum_of_divided_rows_is_a_launch_more():
    case, tensors = drawn("spmm")
    form, ordered, extents = form_of(case, tensors)
    for chunk, launches in ((512, 0), (1, 1)):
        trial = tune._Trial(form, Schedule(n=32, chunk=chunk), ordered, extents, None, "ieee")
        assert trial.kernel.further_launches(trial.partition) == launches


def test_a_tile_without_neighbours_is_skipped():
    case, tensors = drawn("convolution")
    _, kernel, _ = kernel_of(case, tensors, Schedule(m=16, n=16, k=16, dot=True))
    names = kernel.form.bound.layout.tensors
    assert [names[a.place] for a in kernel.source.arguments if a.kind == "bitmasks"] == ["NB"]


@pytest.mark.parametrize("channels", [32, 48, 40])
def test_steps_in_pieces_of_a_dense_axis(channels: int):
    """One loop over the listed steps and the pieces of the summed axis, where these fill it."""
    torch.manual_seed(3)
    near = torch.where(torch.rand(4, 37) < 0.6, -1, torch.randint(0, 20, (4, 37)))
    near[1] = -1
    near[:, 16:32] = -1
    tensors = {"P": torch.randperm(37), "NB": near, "F": torch.randn(20, channels), "W": torch.randn(16, 4, channels)}
    facts = {"P": IndexFacts(unique=True, masked=False, proven=True), "NB": IndexFacts(masked=True, proven=True)}
    case = Case(
        "convolution by its weight as it lies",
        "O[P[i],d] += F[NB[k,i],c] * W[d,k,c]",
        lambda s: tensors,
        lambda t, s: torch.zeros(37, 16, dtype=t["F"].dtype).index_copy(
            0, t["P"], torch.einsum("kic,dkc->id", torch.where(t["NB"][..., None] >= 0, t["F"][t["NB"]], 0), t["W"])
        ),
        lambda s: (37, None),
        facts,
        fixed="cdk",
        dot=True,
    )
    _, kernel, got = kernel_of(case, tensors, Schedule(m=16, n=16, k=16, dot=True))
    # One loop goes over the steps and their pieces.
    assert "_at = tl.where(" in kernel.source.text
    assert kernel.source.text.count("    for ") == 1
    assert_case(case, tensors, got)


def test_a_condition_that_never_holds_masks_a_single_value():
    """As a subscript outside of its tensor gives one in a traced graph, where sizes are not checked."""
    out = Buffer("out", "float32", (Const(1),))
    stores = [Store(out, (Const(0),), Const(1.0), "add", Const(held, "bool")) for held in (True, False)]
    printed = triton_printer.print_kernel(Kernel((), (Result(out, "zero"),), (*stores,)))
    source = kernel_of(CASES["spmv"], CASES["spmv"].draw(1), Schedule(m=2, k=2))[1].source
    result = torch.zeros(1)
    launch_module.function_of(replace(source, text=printed.text))[(1,)](result)
    assert result.tolist() == [1]


# Whole programs.


@pytest.mark.parametrize("extent", [1, 2, 5])
@pytest.mark.parametrize(
    "expression",
    [
        "y[R[k,k]] += s[k,1]",
        "y[R[k,0]] += s[k,0] * w[0,k]",
        "y[R[0,0]] += s[k,1]",
        "y[2] += s[k,1] * w[0,k]",
        "y[R[k,0]+1] += s[k,1]",
        "y[R[k,k]] += s[k,1] * w[1,k]",
    ],
)
def test_constant_subscripts(expression: str, extent: int):
    """Where they lie is known, so no condition on them is left, which Triton would refuse as the mask of one value."""
    program = insum_nn.compile(expression, out_shape=(3,), options=GENERATED)
    tensors = {"R": torch.randint(2, (extent, extent)), "s": torch.randn(extent, 2), "w": torch.randn(2, extent)}
    named = {name: tensor for name, tensor in tensors.items() if name in program.statement.tensors()}
    torch.testing.assert_close(program(tensors=named), program.reference(tensors=named).float())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dtypes(name: str, dtype: torch.dtype):
    case, tensors = drawn(name, dtype)
    assert_case(case, tensors, compiled(case, tensors)(tensors=tensors))


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: str):
    """With the default schedules, for every value that is not written out."""
    case, tensors = drawn(name, torch.float64)
    named = [n for n, t in tensors.items() if t.is_floating_point() and n not in case.static]
    ours = {n: t.clone().requires_grad_() if n in named else t for n, t in tensors.items()}
    theirs = {n: t.clone().requires_grad_() if n in named else t for n, t in tensors.items()}
    out, want = compiled(case, tensors)(tensors=ours), case.oracle(theirs, 1)
    weights = torch.randn_like(want)
    got = torch.autograd.grad(out, [ours[n] for n in named], weights)
    expected = torch.autograd.grad(want, [theirs[n] for n in named], weights)
    for n, one, other in zip(named, got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11, msg=lambda m, n=n: f"d{n}\n{m}")


@pytest.mark.parametrize("name", [name for name in NAMES if CASES[name].dot])
def test_gradients_by_dot(name: str):
    """float64 takes no matrix unit, so the products' gradients are looked at in float32 too."""
    case, tensors = drawn(name, torch.float32)
    named = [n for n, t in tensors.items() if t.is_floating_point() and n not in case.static]
    ours = {n: t.clone().requires_grad_() if n in named else t for n, t in tensors.items()}
    theirs = {n: t.clone().requires_grad_() if n in named else t for n, t in doubled(tensors).items()}
    out, want = compiled(case, tensors)(tensors=ours), case.oracle(theirs, 1)
    weights = torch.randn_like(out)
    got = torch.autograd.grad(out, [ours[n] for n in named], weights)
    expected = torch.autograd.grad(want, [theirs[n] for n in named], weights.double())
    for one, other in zip(got, expected, strict=True):
        assert_matches(one, other, dtype=torch.float32, kind="gradient")


def layouts(tensor: Tensor) -> Iterator[Tensor]:
    """The same values transposed in memory, with gaps of NaN, and from an offset."""
    order = list(range(tensor.dim()))[::-1]
    yield tensor.permute(order).contiguous().permute(order)
    gaps = torch.full(
        (*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), float("nan") if tensor.is_floating_point() else -9
    )
    yield gaps.to(tensor.dtype)[..., 1::2].copy_(tensor)


@pytest.mark.parametrize("name", ["spmm", "group spmm", "block spmm", "convolution", "sddmm", "tensor product uvu"])
def test_layouts_in_memory(name: str):
    """One program takes every layout, in turn."""
    case, tensors = drawn(name)
    moved = [{n: list(layouts(t))[style] for n, t in tensors.items()} for style in (0, 1)]
    assert all(any(not t.is_contiguous() for t in given.values()) for given in moved)
    alone = [{**tensors, n: t} for n, t in moved[1].items()]
    program = compiled(case, tensors)
    for given in (*moved, tensors, *alone, *moved):
        assert_case(case, tensors, program(tensors=given))


@pytest.mark.parametrize("name", ["spmm", "sddmm"])
def test_layouts_of_a_start(name: str):
    case, tensors = drawn(name)
    program = compiled(case, tensors)
    initial = torch.randn(program(tensors=tensors).shape)
    moved = [t for t in layouts(initial) if not t.is_contiguous()]
    assert len(moved) == 2
    output = case.expression.partition("[")[0]
    for given in (*moved, initial, *moved):
        assert_case(case, tensors, program(tensors={**tensors, output: given}), initial)


def test_expanded_operands():
    case, tensors = drawn("spmm")
    tensors["Val"] = torch.tensor(1.5).expand(23)
    tensors["B"] = tensors["B"][:1].expand(7, 11)
    assert_case(case, tensors, compiled(case, tensors)(tensors=tensors))


@pytest.mark.parametrize("name", ["spmm", "group spmm", "convolution", "convolution by kernel map", "mttkrp"])
def test_index_dtypes(name: str):
    case, tensors = drawn(name)
    mixed = {n: t if t.is_floating_point() or i % 2 else t.int() for i, (n, t) in enumerate(tensors.items())}
    assert_case(case, tensors, compiled(case, tensors)(tensors=mixed))


@pytest.mark.parametrize("name", ["spmm", "spmv", "group spmm", "convolution", "strided stencil", "tensor product uvw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_start_is_added_to_and_not_changed(name: str, dtype: torch.dtype):
    case, tensors = drawn(name, dtype)
    shape = case.oracle(doubled(tensors), 1).shape
    output = parse(case.expression).output.name
    for initial in (torch.randn(shape), torch.randn(shape[::-1]).permute(*range(len(shape))[::-1])):
        initial = initial.to(dtype)
        before = initial.clone()
        got = compiled(case, tensors)(tensors={**tensors, output: initial})
        assert torch.equal(initial, before)
        assert_case(case, tensors, got, initial)


def test_one_row_of_many_entries():
    """More terms than one program walks; rows before and after it are short or empty."""
    for expression, width in (("C[Row[p],n] += Val[p] * B[Col[p],n]", 3), ("C[Row[p]] += Val[p] * B[Col[p]]", 0)):
        row = torch.cat([torch.tensor([0, 0, 2]), torch.full((1300,), 3), torch.tensor([5])])
        shape = (7, width) if width else (7,)
        value, dense = torch.randn(row.numel(), dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
        col = torch.randint(0, 7, row.shape)
        terms = value.reshape(-1, *[1] * (dense.dim() - 1)) * dense[col]
        for initial in (None, torch.randn(shape, dtype=torch.float64)):
            want = (torch.zeros(shape, dtype=torch.float64) if initial is None else initial).index_add(0, row, terms)
            for order in (torch.arange(row.numel()), torch.randperm(row.numel())):
                tensors = {"Row": row[order], "Col": col[order], "Val": value[order], "B": dense}
                if initial is not None:
                    tensors["C"] = initial
                got = insum_nn.insum(expression, tensors=tensors, out_shape=shape, options=GENERATED)
                torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_a_long_row_and_cells_that_nothing_is_added_to():
    row = torch.zeros(1300, dtype=torch.int64)
    value = torch.randn(1300, dtype=torch.float64)
    got = insum_nn.insum("C[1,Row[p],2] += Val[p]", Row=row, Val=value, out_shape=(2, 2, 4), options=GENERATED)
    want = torch.zeros(2, 2, 4, dtype=torch.float64)
    want[1, 0, 2] = value.sum()
    torch.testing.assert_close(got, want)


def test_a_factor_read_at_output_rows_with_fewer_rows_than_the_output():
    """Rows without terms own nothing, and what would stand beside them is not read."""
    row = torch.tensor([0, 1, 2, 2])
    value, scale = torch.randn(4), torch.randn(3, 5)
    got = insum_nn.insum(
        "C[Row[p],n] += Val[p] * D[Row[p],n]", Row=row, Val=value, D=scale, out_shape=(40, None), options=GENERATED
    )
    want = torch.zeros(40, 5).index_add(0, row, value[:, None] * scale[row])
    torch.testing.assert_close(got, want)


def test_a_step_is_skipped_only_if_every_unrolled_term_lacks_it():
    neighbours = torch.randint(0, 30, (5, 33, 2))
    neighbours[2, :, 0] = -1
    neighbours[4, :, 1] = -1
    tensors = {
        "CG": torch.randn(2),
        "NB": neighbours,
        "F": torch.randn(30, 16),
        "W": torch.randn(5, 16, 24),
    }
    program = insum_nn.compile(
        "O[i,d] += CG[r] * F[NB[k,i,r],c] * W[k,c,d]", static={"CG": tensors["CG"]}, options=GENERATED
    )
    want = torch.einsum("r,kirc,kcd->id", tensors["CG"], take(tensors["F"], neighbours), tensors["W"])
    torch.testing.assert_close(program(tensors=tensors), want, rtol=1e-4, atol=1e-4)


def test_index_sums_past_32_bits_read_outside():
    read = torch.randn(5)
    for dtype, far in ((torch.int64, 2**32), (torch.int64, 2**40 + 1), (torch.int32, 2**30)):
        at = torch.tensor([far, 0, 1, far, 0], dtype=dtype)
        program = insum_nn.compile("y[i] += A[4*At[i] + i]", options=GENERATED)
        want = program.reference(A=read, At=at)
        torch.testing.assert_close(program(A=read, At=at).double(), want)


@pytest.mark.parametrize("name", ["spmm", "group spmm", "convolution by kernel map", "mttkrp", "sddmm"])
def test_cells_that_are_not_read_do_not_leak(name: str):
    case, tensors = drawn(name)
    clean = compiled(case, tensors)(tensors=tensors)
    read = {"B": "Col", "F": "II", "Y": "Col", "D": "K0", "X": "Row"}
    poisoned = dict(tensors)
    for value, by in read.items():
        if value in poisoned and by in poisoned:
            unread = torch.ones(poisoned[value].shape[0], dtype=torch.bool)
            unread[poisoned[by].clamp(min=0)] = False
            wide = torch.cat([poisoned[value], torch.zeros(3, *poisoned[value].shape[1:])])
            wide[: unread.shape[0]][unread] = float("nan")
            wide[unread.shape[0] :] = float("nan")
            poisoned[value] = wide
    assert any(bool(t.isnan().any()) for t in poisoned.values() if t.is_floating_point())
    assert torch.equal(compiled(case, tensors)(tensors=poisoned), clean)


# Empty things.


def test_nothing_to_add_and_nowhere_to_add_it():
    spmm = CASES["spmm"].expression
    for entries, rows, width in ((0, 4, 3), (5, 4, 0), (0, 0, 3), (0, 0, 0)):
        tensors = {
            "Row": torch.zeros(entries, dtype=torch.int64),
            "Col": torch.zeros(entries, dtype=torch.int32),
            "Val": torch.randn(entries),
            "B": torch.randn(2, width),
        }
        got = insum_nn.insum(spmm, tensors=tensors, out_shape=(rows, None), options=GENERATED)
        assert torch.equal(got, torch.zeros(rows, width))
        if rows:
            initial = torch.randn(rows, width)
            assert torch.equal(insum_nn.insum(spmm, tensors={**tensors, "C": initial}, options=GENERATED), initial)


def test_only_missing_entries():
    case, tensors = drawn("group spmm")
    tensors["Col"] = torch.full_like(tensors["Col"], -1)
    assert torch.equal(compiled(case, tensors)(tensors=tensors), torch.zeros(6, 11))
    case, tensors = drawn("convolution by kernel map")
    tensors["OI"] = torch.full_like(tensors["OI"], -1)
    assert torch.equal(compiled(case, tensors)(tensors=tensors), torch.zeros(13, 16))


def test_a_gather_from_a_tensor_without_rows():
    tensors = {"Col": torch.full((4,), -1), "B": torch.randn(0, 3), "Row": torch.arange(4)}
    got = insum_nn.insum("C[Row[p],n] += B[Col[p],n]", tensors=tensors, out_shape=(4, None), options=GENERATED)
    assert torch.equal(got, torch.zeros(4, 3))


# Sizes, bits, refusals.


def test_twenty_sizes_make_one_program():
    case = CASES["group spmm"]
    program = insum_nn.compile(case.expression, facts=case.facts, options=GENERATED)
    insum_nn.clear_cache()
    for size in range(3, 23):
        tensors = {
            "Row": torch.randint(0, 4, (size,)).sort().values,
            "Col": torch.randint(-1, size, (size, 3)),
            "Val": torch.randn(size, 3),
            "B": torch.randn(size, 5),
        }
        got = program(tensors=tensors, out_shape=(size + 1, None))
        want = program.reference(tensors=tensors, out_shape=(size + 1, None))
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert insum_nn.cache_info().misses == 1


def test_an_index_tensor_that_is_written_to_is_read_again():
    case, tensors = drawn("spmm")
    program = insum_nn.compile(case.expression, out_shape=(6, None), options=GENERATED)
    for _ in range(3):
        tensors["Row"].copy_(torch.randint(0, 6, (23,)))
        assert_case(case, tensors, program(tensors=tensors))


@pytest.mark.parametrize("name", ["spmm", "group spmm", "tensor product uvu", "mttkrp"])
def test_deterministic_runs_agree_bit_for_bit(name: str):
    case, tensors = drawn(name)
    options = replace(GENERATED, deterministic=True)
    runs = [compiled(case, tensors, options)(tensors=tensors) for _ in range(2)]
    assert torch.equal(*runs)
    assert_case(case, tensors, runs[0])


def test_deterministic_sums_of_what_has_no_order():
    tensors = {"Row": torch.tensor([0, 1, 1]), "Col": torch.tensor([2, 0, 0]), "Val": torch.randn(3)}
    program = "C[Row[p],Col[p]] += Val[p]"
    want = torch.zeros(2, 3).index_put((tensors["Row"], tensors["Col"]), tensors["Val"], accumulate=True)
    for options in (Options(deterministic=True), GENERATED):
        got = insum_nn.insum(program, tensors=tensors, out_shape=(2, 3), options=options)
        torch.testing.assert_close(got, want)
    with pytest.raises(InsumFormatError, match="several terms meet in one cell, in no fixed order"):
        insum_nn.insum(program, tensors=tensors, out_shape=(2, 3), options=replace(GENERATED, deterministic=True))


@pytest.mark.parametrize(
    ("expression", "values", "reason"),
    [
        ("y[2*i+3*j] max= A[i,j]", torch.randn(2, 3), "several terms meet in one cell"),
        ("y[i] += A[i,j]", torch.ones(2, 3, dtype=torch.int64), "factors are integers"),
    ],
)
def test_refusals_name_the_reason(expression: str, values: Tensor, reason: str):
    with pytest.raises(InsumFormatError, match=reason):
        insum_nn.insum(expression, A=values, options=GENERATED, out_shape=(9,) if "+3" in expression else None)


def test_without_the_interpreter_the_cpu_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    insum_nn.clear_cache()
    with pytest.raises(insum_nn.errors.InsumError):
        insum_nn.insum("y[i] += A[i,j]", A=torch.randn(2, 3), options=GENERATED)


# Random programs.


def refused(program: RandomProgram) -> bool:
    """Whether the statement is of a kind of which the generator does not do all."""
    statement = parse(program.expression)
    return statement.operator in ("max=", "min=") or not statement.reads


def refuses(program: RandomProgram) -> bool:
    """Whether it says so; without terms or cells there is nothing to refuse."""
    try:
        run(program, GENERATED)
    except InsumFormatError as error:
        return "no kernel can be generated" in str(error)
    return False


@pytest.mark.parametrize("number", range(4))
def test_random_programs(number: int):
    """200 programs: those that sum run and agree, the others do too or are refused by name."""
    generated = refusals = 0
    for seed in range(50 * number, 50 * (number + 1)):
        program = random_program(seed)
        if refused(program) and refuses(program):
            refusals += 1
            continue
        assert_close_to_reference(program, run(program, GENERATED))
        generated += 1
    assert generated >= 20
    assert refusals >= 4


def test_gradients_of_random_programs():
    checked = 0
    for seed in range(30):
        program = random_program(seed, profile="smooth")
        if refused(program):
            continue
        expected: Sequence[Tensor] = gradients(program, EAGER)
        for got, want in zip(gradients(program, GENERATED), expected, strict=True):
            torch.testing.assert_close(
                got, want, rtol=1e-9, atol=1e-10, msg=lambda m, p=program: f"{p.expression}\n{m}"
            )
        checked += 1
    assert checked >= 20


def test_functions_are_forgotten_with_their_kernels(monkeypatch: pytest.MonkeyPatch):
    """A search makes dozens of kernels; what they were read from must not outlive them."""
    functions: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()
    monkeypatch.setattr(launch_module, "_functions", functions)

    def modules() -> set[str]:
        return {name for name in sys.modules if name.startswith("insum_nn_kernel_")}

    # What other tests left in cycles goes now, not while this one counts.
    gc.collect()
    before = modules()
    case = CASES["spmm"]
    tensors = case.draw(1)
    _, kernel, first = kernel_of(case, tensors, Schedule(m=2, n=2, k=2))
    made = modules() - before
    assert len(made) == len(functions) == 1
    path = f"<{next(iter(made))}>"
    assert linecache.getlines(path)
    gc.collect()
    # While the kernel lives, it runs, and its text can be shown.
    assert modules() - before == made
    again = kernel_of(case, tensors, Schedule(m=2, n=2, k=2))[2]
    torch.testing.assert_close(again, first)
    del kernel
    gc.collect()
    assert not functions
    assert modules() == before
    assert not linecache.getlines(path)


def test_machine_code_is_loaded_once_for_all_sizes(monkeypatch: pytest.MonkeyPatch):
    """A device takes no code back, so that a run over ever new sizes must not load it anew."""
    case = CASES["spmm"]
    source = kernel_of(case, case.draw(1), Schedule(m=2, n=2, k=2))[1].source
    count = [0]

    def load(self: object, aligned: Sequence[bool]) -> object:
        count[0] += 1
        return lambda *_: None

    monkeypatch.setattr(launch_module._Launch, "_load", load)
    monkeypatch.setattr(launch_module, "interpreted", lambda: False)
    types = ["*fp32", *[None] * (len(source.arguments) - 1)]
    launcher: Any = launch_module.launcher
    # What stands for a device: all that is asked of it is its number.
    device: Any = SimpleNamespace(index=0)
    other_device: Any = SimpleNamespace(index=1)
    first, second = (launcher(replace(source), types, (), device, False) for _ in range(2))
    assert first.load((True,)) is second.load((True,))
    assert count == [1]
    assert first.load((False,)) is not first.load((True,))
    other = launcher(source, types, (), other_device, False)
    wide = launcher(source, types, (), device, True)
    assert len({id(each.load((True,))) for each in (first, other, wide)}) == 3
    assert count == [4]


def test_a_pointer_of_another_device_is_refused():
    """The driver is not asked about pointers, so that a kernel would read what another device has there."""
    case = CASES["spmm"]
    source = kernel_of(case, case.draw(1), Schedule(m=2, n=2, k=2))[1].source
    types = ["*fp32" if argument.kind == "tensor" else None for argument in source.arguments]
    device: Any = SimpleNamespace(index=0)
    launch = launch_module._Launch(source, types, (), device, False)
    with pytest.raises(InsumDeviceError, match=r"of shape \(3,\) is on cpu, its kernel on cuda:0"):
        launch([torch.zeros(3)] * len(types), 1)


def test_a_kernel_is_written_once_for_sizes_within_a_factor_of_two(monkeypatch: pytest.MonkeyPatch):
    written: list[str] = []
    plain = sized.write_kernel

    def write(*given: object) -> object:
        made = plain(*given)  # type: ignore[arg-type]
        written.append(made.text)
        return made

    monkeypatch.setattr(sized, "write_kernel", write)
    program = insum_nn.compile("C[Row[p],n] += Val[p] * B[Col[p],n]", options=GENERATED)
    for entries in (9, 12, 16, 10):
        t = {"Row": torch.randint(5, (entries,)), "Col": torch.randint(6, (entries,)), "Val": torch.randn(entries)}
        t["B"] = torch.randn(6, 3)
        got = program(tensors=t, out_shape=(5, None))
        torch.testing.assert_close(got, torch.zeros(5, 3).index_add(0, t["Row"], t["Val"][:, None] * t["B"][t["Col"]]))
    # Once where no row is divided.
    assert len(written) == len(set(written)) <= 2


# Extrema of which several programs have parts.

PARTS_OF_EXTREMA = {
    "divided rows": Schedule(n=4, k=2, chunk=3),
    "rows and terms on lanes": Schedule(m=2, n=4, k=4, chunk=2),
    "one long reduction": Schedule(n=4, k=2, splits=5),
}
EXTREMA = {
    "rows": ("Y[Row[e],f] {} Val[e] * X[Col[e],f]", (7, 5)),
    "groups in rows": ("Y[Row[g],f] {} Val[g,q] * X[Col[g,q],f]", (7, 5)),
    "rows behind another axis": ("Y[f,Row[e]] {} X[Col[e],f] * Val[e]", (5, 7)),
    "numbers": ("Y[Row[e]] {} Val[e]", (7,)),
    "columns": ("Y[f] {} X[Col[e],f] * Val[e]", (5,)),
    "one number": ("Y {} X[Col[e],f] * Val[e]", ()),
}


@pytest.mark.parametrize("name", EXTREMA)
@pytest.mark.parametrize("operator", ["max=", "min="])
@pytest.mark.parametrize("which", PARTS_OF_EXTREMA)
def test_extrema_whose_terms_are_divided_among_programs(
    name: str, operator: str, which: str, monkeypatch: pytest.MonkeyPatch
):
    """Also of terms that are infinite, NaN or missing, of a long row that has none, and with an initial value."""
    torch.manual_seed(3)
    text, shape = EXTREMA[name]
    grouped = (26, 3) if "q" in text else (57,)
    row = torch.where(torch.arange(grouped[0]) < 20, 2, torch.randint(0, 5, grouped[:1]))
    row = torch.where(torch.rand(grouped[0]) < 0.2, -1, row)
    column = torch.where(torch.rand(grouped) < 0.3, -1, torch.randint(0, 6, grouped))
    of_row = row == 2 if len(grouped) == 1 else (row == 2)[:, None]
    x = torch.randn(6, 5)
    x[4, 1], x[:, 3] = math.nan, -math.inf if operator == "max=" else math.inf
    insum_nn.clear_cache()
    monkeypatch.setattr(devices, "default_schedule", lambda _: PARTS_OF_EXTREMA[which])
    for columns, dtype, initial, activation in (
        (column, torch.float32, False, None),
        (column, torch.float32, True, None),
        (torch.full_like(column, -1), torch.float64, False, None),
        (torch.where(of_row, -1, column), torch.float16, False, "relu"),
        (torch.where(of_row, -1, column), torch.float32, True, "relu"),
        (column.clamp(0), torch.float32, False, None),
    ):
        given = {"Row": row, "Col": columns, "Val": torch.rand(grouped).add(0.5).to(dtype), "X": x.to(dtype)}
        tensors = {each: tensor for each, tensor in given.items() if f"{each}[" in text}
        if initial:
            tensors["Y"] = torch.randn(shape).to(dtype)
        program = insum_nn.compile(
            text.format(operator), out_shape=None if initial else shape, activation=activation, options=GENERATED
        )
        got, want = program(tensors=tensors), program.reference(tensors=tensors)
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize(
    ("text", "x", "shape", "strategy"),
    [
        ("Y[b,2*h+p,2*w+q] += X[b,h,w,p,q]", (2, 3, 4, 2, 2), (2, 6, 8), "place"),
        ("Y[b,2*h+p,2*w+q] += X[b,h,w,p,q]", (2, 3, 4, 2, 2), (2, 7, 9), "place"),
        ("Y[b,2*h+p,2*w+q] += X[b,h,w,p,q]", (2, 3, 4, 3, 2), (2, 7, 8), "atomic"),
        ("Y[3*h+p,3*w+q] += X[h,w,p,q]", (40, 70, 2, 2), (120, 210), "place"),
        ("Y[h,h,w] += X[h,w]", (5, 4), (5, 5, 4), "place"),
        ("Y[h,2*h+w] += X[h,w]", (5, 4), (5, 12), "atomic"),
    ],
)
def test_affine_writes_of_which_no_two_meet(
    text: str, x: tuple[int, ...], shape: tuple[int, ...], strategy: str, monkeypatch: pytest.MonkeyPatch
):
    """Each is stored, among cells that are 0: as of the gradient of pooling, and of pixels that are put together."""
    program = insum_nn.compile(text, out_shape=shape, options=GENERATED)
    for numbers in (torch.randn(x), torch.randn((*reversed(x),)).permute(*reversed(range(len(x))))):
        got = program(X=numbers)
        torch.testing.assert_close(got.double(), program.reference(X=numbers), rtol=1e-6, atol=1e-6)
    assert f"combine: {strategy}" in str(program.explain(X=torch.randn(x)))

"""The passes of generated kernels: a placed kernel computes its statement, under the IR's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from insum_nn.compiler.codegen import triton_values
from insum_nn.compiler.ir.build import OUTPUT, Names
from insum_nn.compiler.ir.nodes import OPERATIONS, Alloc, Buffer, Const, If, Index, Kernel, Load, Loop, Op, Store
from insum_nn.compiler.ir.nodes import walk as walk_nodes
from insum_nn.compiler.ir.printer import show
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.ir.verify import verify_kernel
from insum_nn.compiler.kernels.row_partition import RowPartition, bitmasks_of, partition_for
from insum_nn.compiler.kernels.source import Strides, nest_of
from insum_nn.compiler.lang.bind import Extents, bind, layout_of
from insum_nn.compiler.lang.interpreter import interpret
from insum_nn.compiler.lang.shapes import resolve_extents
from insum_nn.compiler.passes import unify_variants as unify_variants_module
from insum_nn.compiler.passes.unify_variants import switch, unify_variants
from insum_nn.compiler.runtime.dispatch import parse_cached
from insum_nn.compiler.schedule.form import Form, FormError, make_form
from insum_nn.facts import IndexFacts
from insum_nn.testing.random_programs import random_program
from tests.compiler import fused_cases
from tests.compiler.generated_cases import CASES, form_of
from tests.compiler.ir_interpreter import interpret_kernel

SCHEDULES = {
    "default lanes": Schedule(n=8, k=4),
    "rows": Schedule(m=4, n=16),
    "rows and sums": Schedule(m=4, n=2, k=8),
    "divided rows": Schedule(m=2, n=8, k=2, chunk=1),
    "parts": Schedule(n=8, groups=3),
    "splits": Schedule(m=2, n=4, k=2, splits=3),
}
NAMES = ("spmm", "spmv", "group spmm", "sddmm", "mttkrp", "batched sddmm with scatter", "tensor product uvu")


def memory_of(
    form: Form, ordered: list[Tensor], extents: Extents, partition: RowPartition | None
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Tensors and sizes by their canonical names, those of the row partition among them."""
    names, layout = Names(form.bound.statement), form.bound.layout
    memory = {names.tensors[name]: tensor for name, tensor in zip(layout.tensors, ordered, strict=True)}
    sizes = {names.indices[name]: extent for name, extent in zip(layout.indices, extents.indices, strict=True)}
    for name, tensor in [*memory.items(), (OUTPUT, torch.empty(extents.output))]:
        sizes |= {f"{name}_{axis}": extent for axis, extent in enumerate(tensor.shape)}
        if name.startswith("x") and tensor.ndim == 2:
            memory[f"{name}_bitmasks"] = bitmasks_of(tensor)
    if partition is not None:
        for kind in ("begin", "end", "target", "row_of", "order"):
            if getattr(partition, kind) is not None:
                memory[kind] = getattr(partition, kind)
        sizes |= {"rows": partition.rows, "slots": partition.slots}
        memory["workspace"] = torch.zeros(
            partition.slots, *(e for a, e in enumerate(extents.output) if a != form.row_axis)
        )
    return memory, sizes


def interpreted(form: Form, ordered: list[Tensor], extents: Extents, schedule: Schedule) -> tuple[Kernel, Tensor]:
    """The placed kernel of a form, and what the interpreter says that it computes."""
    kernel, results = all_interpreted(form, ordered, extents, schedule)
    return kernel, results[0]


def all_interpreted(
    form: Form, ordered: list[Tensor], extents: Extents, schedule: Schedule
) -> tuple[Kernel, list[Tensor]]:
    """The same, with every result."""
    if form.row_index is not None:
        schedule = replace(schedule, splits=1)
    partition = partition_for(form, ordered, extents, schedule)
    split = partition is not None and partition.split
    kernel = nest_of(form, schedule, Strides(tuple(True for _ in ordered), split=split), "ieee")
    verify_kernel(kernel, placed=True)
    memory, sizes = memory_of(form, ordered, extents, partition)
    given = {**memory}
    found = interpret_kernel(kernel, given, sizes, keep=("workspace",))
    results = [found[result.buffer.name] for result in kernel.results]
    out = results[0]
    if schedule.splits > 1:
        out = out.sum(0)
    if partition is not None and partition.slots and form.unrolled:
        assert partition.divided is not None
        assert partition.first is not None
        moved = out.movedim(form.row_axis, 0)
        for place, row in enumerate(partition.divided.tolist()):
            moved[row] = found["workspace"][partition.first[place] : partition.first[place + 1]].sum(0)
    return kernel, [out, *results[1:]]


@pytest.mark.parametrize("which", SCHEDULES)
@pytest.mark.parametrize("name", NAMES)
def test_placed_kernels_compute_the_statement(name: str, which: str):
    case, schedule = CASES[name], SCHEDULES[which]
    torch.manual_seed(5)
    tensors = {n: t.mul(2).round() if t.is_floating_point() else t for n, t in case.draw(1).items()}
    form, ordered, extents = form_of(case, tensors)
    _, got = interpreted(form, ordered, extents, schedule)
    torch.testing.assert_close(got, case.oracle(tensors, 1), rtol=1e-12, atol=1e-9)


def test_random_programs_compute_their_statement():
    placed = {"default lanes": 0, "divided rows": 0, "splits": 0}
    for seed in range(300):
        program = random_program(seed, max_size=4, profile="smooth")
        statement = parse_cached(program.expression)
        nested = [inner for access in statement.accesses() for outer in access.nested() for inner in outer.nested()]
        if program.initial is not None or nested or any(t.numel() == 0 for t in program.tensors.values()):
            continue
        ordered = [program.tensors[name] for name in layout_of(statement).tensors]
        ordered = [t.mul(2).round() if t.is_floating_point() else t for t in ordered]
        extents = resolve_extents(statement, ordered, None, program.sizes, program.out_shape)
        bound = bind(statement, dict(zip(layout_of(statement).tensors, ordered, strict=True)), None)
        sizes = dict(zip(bound.layout.indices, extents.indices, strict=True))
        want = interpret(statement, dict(zip(bound.layout.tensors, ordered, strict=True)), extents)
        try:
            form = make_form(bound, sizes, extents.output, {}, deterministic=False)
        except FormError:
            continue
        # Only sums whose terms do not meet in memory are split.
        split = form.strategy in ("direct", "place") and bool(form.reduce)
        for which in ("default lanes", "divided rows", *(["splits"] if split else [])):
            _, got = interpreted(form, ordered, extents, SCHEDULES[which])
            torch.testing.assert_close(got, want, rtol=0, atol=0, msg=lambda m, text=program.expression: f"{text}: {m}")
            placed[which] += 1
    assert placed["default lanes"] == placed["divided rows"] > 60
    assert placed["splits"] > 20


@pytest.mark.parametrize("name", ["block spmm", "convolution", "convolution's weight gradient"])
def test_matrix_products_compute_the_statement(name: str):
    case = CASES[name]
    torch.manual_seed(5)
    tensors: dict[str, Any] = {
        n: t.mul(2).round().float() if t.is_floating_point() else t for n, t in case.draw(1).items()
    }
    form, ordered, extents = form_of(case, tensors)
    kernel, got = interpreted(form, ordered, extents, Schedule(m=16, n=16, k=16, dot=True))
    assert "dot(" in show(kernel)
    torch.testing.assert_close(
        got, case.oracle({n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}, 1)
    )


@pytest.mark.parametrize("groups", [1, 2])
def test_like_products_of_long_code_are_a_loop(groups: int, monkeypatch: pytest.MonkeyPatch):
    case = CASES["tensor product uvw"]
    torch.manual_seed(5)
    whole_numbers = {n: t.mul(2).round().float() if t.is_floating_point() else t for n, t in case.draw(1).items()}
    # Each product of one term, as with a second factor of scalars; they are read at places that no step leads through.
    tensors: dict[str, Any] = {
        **whole_numbers,
        "CG": torch.tensor([[0.5, 2.0, 0.25], [8.0, 4.0, 0.125]])[:, :, None],
        "I": torch.tensor([[0, 2, 0], [1, 0, 2]])[:, :, None],
        "J": torch.tensor([[3, 1, 0], [2, 2, 1]])[:, :, None],
        "W": torch.randint(-3, 3, (3, 8, 16)).float(),
    }
    form, ordered, extents = form_of(case, tensors)
    schedule = Schedule(m=16, n=16, k=16, dot=True, groups=groups)
    unrolled, whole = interpreted(form, ordered, extents, schedule)
    monkeypatch.setattr(unify_variants_module, "_LONG", 0)
    rolled, got = interpreted(form, ordered, extents, schedule)
    assert ("serial term" in show(unrolled), "serial term" in show(rolled)) == (False, True)
    assert show(rolled).count("dot(") < show(unrolled).count("dot(")
    torch.testing.assert_close(got, whole, rtol=0, atol=0)
    torch.testing.assert_close(
        got, case.oracle({n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}, 1)
    )


ROLES = ("xyw", "zyw", "yw", "xz", "wxzy")
WALKS = ("Src", "Dst")


def joint_form(
    roles: str, walk: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Form, list[Tensor], Extents, list[Tensor]]:
    """The form of several statements, what its kernel reads, and what each output is, in the kernel's order."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    torch.manual_seed(5)
    drawn = fused_cases.draw(5, holes=True)
    tensors = {n: t.mul(2).round() if t.is_floating_point() else t for n, t in drawn.items()}
    tables = fused_cases.TABLES | {"CG": fused_cases.TABLES["CG"].mul(4).round()}
    monkeypatch.setattr(fused_cases, "TABLES", tables)
    monkeypatch.setattr(fused_cases.programs, "__defaults__", (tables, fused_cases.GENERATED))
    ones, pool = fused_cases.ones_of(roles, tensors)
    found = fused_cases.kernel_along(ones, (walk, "e"))
    ordered, extents = [pool[at] for at in found.places], found.sizes(pool, fused_cases.shapes_of(ones))
    programs = zip(fused_cases.programs(roles), roles, fused_cases.named(roles, tensors), strict=True)
    exact = [p.reference(tensors=t, out_shape=fused_cases.shape_of(role, 5)).double() for p, role, t in programs]
    return found.generated.form, ordered, extents, [exact[found.order.index(n)] for n in sorted(found.order)]


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("roles", ROLES)
def test_fused_outputs_are_those_of_their_statements(roles: str, walk: str, monkeypatch: pytest.MonkeyPatch):
    form, ordered, extents, wanted = joint_form(roles, walk, monkeypatch)
    kernel = form.algorithm
    verify_kernel(kernel, placed=False)
    memory, sizes = memory_of(form, ordered, extents, None)
    found = interpret_kernel(kernel, memory, sizes)
    for result, want in zip(kernel.results, wanted, strict=True):
        torch.testing.assert_close(found[result.buffer.name], want)


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("which", fused_cases.SCHEDULES)
@pytest.mark.parametrize("roles", ["xyw", "wxzy", "yw"])
def test_placed_kernels_of_several_outputs(roles: str, which: str, walk: str, monkeypatch: pytest.MonkeyPatch):
    form, ordered, extents, wanted = joint_form(roles, walk, monkeypatch)
    schedule = fused_cases.SCHEDULES[which]
    _, results = all_interpreted(form, ordered, extents, replace(schedule, n=min(schedule.n, 4)))
    for got, want in zip(results, wanted, strict=True):
        torch.testing.assert_close(got, want)


PART, I = Index("part"), Index("i")
X, OUT, ACC = (Buffer(name, "float32", (Const(8),)) for name in ("x", "out", "y"))


def block(place: int, number: float, lanes: int = 4) -> tuple[Loop, ...]:
    total = Buffer("acc", "float32", (), local=True)
    value = Op("mul", (Load(X, (Const(place),)), Const(number, "float64")))
    body = (Alloc(total), Store(total, (), value, "add"), Store(OUT, (Const(place + 1),), Load(total, ())))
    return (Loop(I, Const(0), Const(lanes), "tile", body),)


def test_blocks_that_differ_in_numbers_become_one():
    order, variants = unify_variants(PART, [block(1, 0.5), block(3, 0.25), block(5, 4.0)], exact=False)
    assert order == [0, 1, 2]
    (variant,) = variants
    assert variant.count == 3
    text = "\n".join(map(show, variant.block))
    assert "x[(part * 2) + 1]" in text
    assert "(4.0 if (part == 2) else (0.25 if (part == 1) else 0.5))" in text


def test_numbers_that_the_compiler_has_to_know_keep_blocks_apart():
    order, variants = unify_variants(PART, [block(1, 0.5), block(3, 0.5, lanes=8), block(5, 0.5)], exact=False)
    assert [variant.count for variant in variants] == [2, 1]
    assert order == [0, 2, 1]


def test_fractions_that_must_stay_exact_keep_blocks_apart():
    _, variants = unify_variants(PART, [block(1, 0.5), block(1, 0.25)], exact=True)
    assert [variant.count for variant in variants] == [1, 1]
    _, variants = unify_variants(PART, [block(1, 0.5), block(3, 0.5)], exact=True)
    assert [variant.count for variant in variants] == [2], "whole numbers are exact"
    (chain,) = switch(PART, [block(1, 0.5), block(1, 0.25)], exact=True)
    assert isinstance(chain, If)
    assert chain.condition is Op("less", (PART, Const(1)))


def test_a_condition_masks_the_load_of_a_side_of_a_matrix_product():
    case = CASES["block spmm"]
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in case.draw(1).items()}
    form, ordered, _ = form_of(case, tensors, facts={"Col": IndexFacts(masked=True, proven=True)})
    kernel = nest_of(form, Schedule(m=16, n=32, k=16, dot=True), Strides(tuple(True for _ in ordered)), "ieee")
    loads = [node for node in walk_nodes(kernel) if isinstance(node, Load) and node.buffer.name == "t0"]
    assert loads
    assert all(load.where is not None for load in loads)


def test_triton_writes_every_operation():
    # Library calls alone have to multiply by something where a statement only counts.
    assert {*triton_values._TEXT} == {*OPERATIONS} - {"one"}

"""Programs that are called together: one kernel with several outputs, what it refuses, and the choice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import insum_nn
from insum_nn import Options
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.kernels import launch as launch_module
from insum_nn.compiler.runtime import artifact as artifact_module
from insum_nn.compiler.runtime import execution
from insum_nn.compiler.runtime import fused_kernels as fused_module
from insum_nn.compiler.schedule import additional as additional_module
from insum_nn.compiler.schedule import placement as placement_module
from insum_nn.compiler.schedule.candidates import candidates
from insum_nn.compiler.schedule.device import H200, without_measuring
from insum_nn.compiler.schedule.form import FormError
from insum_nn.compiler.schedule.placement import adds_rows
from insum_nn.testing.tolerances import assert_matches
from tests.compiler.fused_cases import (
    CELLS,
    EDGES,
    GENERATED,
    NODES,
    SCHEDULES,
    TABLES,
    Together,
    assert_right,
    by_terms,
    draw,
    exact,
    kernel_along,
    kernels_of,
    named,
    ones_of,
    programs,
    run,
    shape_of,
    together,
)
from tests.compiler.interpreted import interpreter

__all__ = ["interpreter"]

SETS = ("xyw", "xy", "xw", "wx", "zyw", "yz", "zw", "yw", "xz", "wxzy")


@pytest.mark.parametrize("role", "xywz")
def test_the_oracle_is_the_reference_interpreter(role: str):
    tensors = exact(draw(3, holes=True))
    (program,), (given,) = programs(role), named(role, tensors)
    want = program.reference(tensors=given, out_shape=shape_of(role, 3))
    torch.testing.assert_close(by_terms(role, tensors), want, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("interpreter")
# The interpreter takes seconds for wide rows.
@pytest.mark.parametrize(("u", "holes"), [(2, False), (3, True), (16, True)])
@pytest.mark.parametrize("roles", SETS)
def test_one_kernel(roles: str, u: int, holes: bool):
    assert_one_kernel(roles, u, holes=holes)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("roles", "holes"), [("xy", True), ("zw", False)])
def test_one_kernel_of_several_column_tiles(roles: str, holes: bool):
    assert_one_kernel(roles, 48, holes=holes)


def assert_one_kernel(roles: str, u: int, *, holes: bool):
    tensors = draw(u, holes=holes)
    fused = Together(programs(roles))
    shapes = [shape_of(role, u) for role in roles]
    found = run(fused, named(roles, tensors), shapes, "key")
    assert fused.reason.startswith("together")
    assert_right(roles, tensors, found)
    for walk in ("Src", "Dst"):
        assert_right(roles, tensors, together(roles, tensors, walk=(walk, "e")))
    # As it was found ready.
    assert_right(roles, tensors, run(fused, named(roles, tensors), shapes, "key"))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype):
    tensors = draw(20, dtype)
    assert_right("xyw", tensors, together("xyw", tensors))
    if dtype == torch.float64:
        assert_right("xyw", tensors, together("xyw", tensors, walk=("Dst", "e")))
    else:
        # Sums in memory would be rounded at every step.
        with pytest.raises(FormError, match="fp16 or bf16"):
            kernel_along(ones_of("xyw", tensors)[0], ("Dst", "e"))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("walk", "holes"), [("Src", True), ("Dst", False)])
@pytest.mark.parametrize("which", SCHEDULES)
def test_schedules(which: str, walk: str, holes: bool):
    tensors = draw(21, holes=holes)
    assert_right("xyw", tensors, together("xyw", tensors, SCHEDULES[which], (walk, "e")))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("walk", ["Src", "Dst"])
def test_every_candidate_is_right(walk: str):
    tensors = draw(40)
    form = kernel_along(ones_of("xyw", tensors)[0], (walk, "e")).generated.form
    tried = list(candidates(form))
    assert len(tried) > 3
    assert {adds_rows(form, schedule) for schedule in tried} == {True, False}
    for schedule in tried:
        # A sum of two does not depend on which comes first; what is scattered has no order anyway.
        assert 2 * schedule.n >= 40 or walk == "Dst"
        assert_right("xyw", tensors, together("xyw", tensors, schedule, (walk, "e")))


@pytest.mark.usefixtures("interpreter")
def test_a_call_that_was_made_before_decides_nothing(monkeypatch: pytest.MonkeyPatch):
    """What depends on shapes alone costs the host more than the launch."""
    tensors = draw(8)
    fused = Together(programs("xyw"))
    given, shapes = named("xyw", tensors), [shape_of(role, 8) for role in "xyw"]
    run(fused, given, shapes, 0)
    for module in (additional_module, placement_module, launch_module):
        for name in ("element_axes", "place_indices", "memory_of", "write_kernel"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *_: pytest.fail("decided again"))
    assert_right("xyw", tensors, run(fused, given, shapes, 0))


@pytest.mark.usefixtures("interpreter")
def test_memory_layouts():
    tensors = draw(6)
    for name in ("dZ", "X", "W"):
        tensors[name] = tensors[name].transpose(1, 2).contiguous().transpose(1, 2)
    tensors["Y"] = torch.randn(EDGES, 2 * CELLS["y"])[:, ::2]
    assert_right("xyw", tensors, together("xyw", tensors))


@pytest.mark.usefixtures("interpreter")
def test_other_edges_of_the_same_shapes(monkeypatch: pytest.MonkeyPatch):
    fused = Together(programs("xyw"))
    shapes = [shape_of(role, 4) for role in "xyw"]
    first, second, holes = draw(4), draw(4), draw(4, holes=True)
    decided: list[object] = []
    plain = artifact_module.choose
    monkeypatch.setattr(artifact_module, "choose", lambda *given, **how: decided.append(given) or plain(*given, **how))
    # Of the first two the same holds; of a tensor with missing entries something else does.
    for tensors, decisions in ((first, 1), (second, 1), (first, 1), (holes, 2)):
        assert_right("xyw", tensors, run(fused, named("xyw", tensors), shapes, 0))
        assert len(decided) == decisions
    first["Src"].copy_(second["Src"])
    assert_right("xyw", first, run(fused, named("xyw", first), shapes, 0))
    first["Dst"][0] = NODES
    with pytest.raises(insum_nn.errors.InsumRangeError, match="Dst"):
        run(fused, named("xyw", first), shapes, 0)


@pytest.mark.usefixtures("interpreter")
def test_what_does_not_fit_runs_one_by_one():
    tensors = draw(4)
    shapes = {role: shape_of(role, 4) for role in "xywz"}
    for roles, why in (("xz", "no fixed order"),):
        fused = Together(programs(roles), deterministic=True)
        assert_right(roles, tensors, run(fused, named(roles, tensors), [shapes[r] for r in roles], 0))
        assert fused.reason.startswith("one by one")
        assert why in fused.reason
    # A tensor of one name that is not the same.
    fused = Together(programs("xy"))
    given = named("xy", tensors)
    given[1]["W"] = torch.randn_like(tensors["W"])
    found = run(fused, given, [shapes["x"], shapes["y"]], 0)
    assert "not the same" in fused.reason
    assert_right("x", tensors, found[:1])
    assert_right("y", {**tensors, "W": given[1]["W"]}, found[1:])
    # No edges at all.
    none = {n: t[:0] if n in ("Src", "Dst", "Y", "W") else t for n, t in tensors.items()}
    fused = Together(programs("xyw"))
    found = run(fused, named("xyw", none), [(NODES, 4, 4), (0, 3), (0, 3, 4)], 0)
    assert not found[0].any()
    assert [f.shape[0] for f in found[1:]] == [0, 0]


@pytest.mark.usefixtures("interpreter")
def test_a_gradient_without_rows_for_terms_is_refused():
    shared = "dV[L[p],u] += CG[p] * dZ[Dst[e],K[p],u] * X[Src[e],I[p],u] * Y[e,J[p]]"
    tensors = draw(4)
    pair = [programs("x")[0], insum_nn.compile(shared, static=TABLES, options=GENERATED)]
    (first,) = named("x", tensors)
    second = {n: {**tensors, **TABLES}[n] for n in pair[1].statement.tensors()}
    fused = Together(pair)
    found = run(fused, [first, second], [shape_of("x", 4), (3, 4)], 0)
    assert "no row for each term" in fused.reason
    assert_matches(found[1], pair[1].reference(tensors=second, out_shape=(3, 4)), dtype=torch.float32, kind="sum")


@pytest.mark.usefixtures("interpreter")
def test_rows_without_columns_are_refused():
    scalar = [
        insum_nn.compile("dX[Src[e]] += dZ[Dst[e]] * W[e]", options=GENERATED),
        insum_nn.compile("dW[e] += dZ[Dst[e]] * X[Src[e]]", options=GENERATED),
    ]
    t = {"Src": torch.tensor([1, 0, 1]), "Dst": torch.tensor([0, 2, 1]), "W": torch.ones(3)}
    t |= {"dZ": torch.tensor([1.0, 2.0, 3.0]), "X": torch.tensor([5.0, 7.0])}
    fused = Together(scalar)
    found = run(fused, [{n: t[n] for n in p.statement.tensors()} for p in scalar], [(2,), (3,)], 0)
    assert "no columns" in fused.reason
    assert [f.tolist() for f in found] == [[3.0, 3.0], [7.0, 15.0, 14.0]]


@pytest.mark.usefixtures("interpreter")
def test_statements_that_nobody_planned_for():
    """A masked attention-like pair without tables: rows by an index tensor, and a score for each entry."""
    pair = [
        insum_nn.compile("Out[Row[e],n] += P[e] * V[Col[e],n]", options=GENERATED),
        insum_nn.compile("S[e] += Q[Row[e],n] * V[Col[e],n]", options=GENERATED),
    ]
    t = {"Row": torch.randint(5, (20,)), "Col": torch.randint(-1, 6, (20,)), "P": torch.randn(20)}
    t |= {"V": torch.randn(6, 10), "Q": torch.randn(5, 10)}
    fused = Together(pair)
    given = [{n: t[n] for n in p.statement.tensors()} for p in pair]
    found = run(fused, given, [(5, 10), (20,)], 0)
    assert fused.reason.startswith("together")
    for program, tensors, shape, got in zip(pair, given, [(5, 10), (20,)], found, strict=True):
        want = program.reference(tensors=tensors, out_shape=shape)
        assert_matches(got, want, dtype=torch.float32, kind="sum", scale=float(want.abs().max()))


@pytest.mark.usefixtures("interpreter")
def test_what_is_not_measured_adds_to_nothing_where_that_can_be(monkeypatch: pytest.MonkeyPatch):
    """Features of few cells are cheap to add to, so that the walk by receivers comes first; small sums do without."""
    taken: list[list[bool]] = []
    plain = fused_module.Generated.at

    def at(self: fused_module.Generated, *given: object) -> object:
        taken.append([each.scattered for each in self.form.additional])
        return plain(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(fused_module.Generated, "at", at)
    monkeypatch.setattr(fused_module, "_cost", lambda ones, walk: walk[0])
    tensors = draw(4)
    for roles in ("xyw", "xz"):
        fused = Together(programs(roles))
        assert_right(roles, tensors, run(fused, named(roles, tensors), [shape_of(role, 4) for role in roles], 0))
    assert taken == [[False, False], [True]]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_lane_has_a_column(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    """Fewer columns than lanes would need as many registers."""
    taken: list[Schedule] = []
    plain = fused_module.Generated.at

    def at(self: fused_module.Generated, *given: object) -> object:
        taken.append(without_measuring(self.form, H200)[0])
        return plain(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(fused_module.Generated, "at", at)
    tensors = draw(64, dtype)
    assert_right(
        "xyw", tensors, run(Together(programs("xyw")), named("xyw", tensors), [shape_of(r, 64) for r in "xyw"], 0)
    )
    assert [(each.n, each.warps) for each in taken] == [(32, 1)]


@pytest.mark.usefixtures("interpreter")
def test_static_tables_are_written_out_once_for_all_sizes(monkeypatch: pytest.MonkeyPatch):
    """Graphs of a data loader differ in their edges at each step."""
    forms: list[object] = []
    plain = execution.make_form
    monkeypatch.setattr(execution, "make_form", lambda *a, **more: (forms.append(a), plain(*a, **more))[1])
    fused, tensors, counts = Together(programs("xyw")), draw(16), list[int]()
    for edges in (EDGES, EDGES - 3, EDGES - 4):
        some = {n: t[:edges] if n in ("Src", "Dst", "Y", "W") else t for n, t in tensors.items()}
        given = named("xyw", some)
        shapes = [(edges if r in "yw" else NODES, *shape_of(r, 16)[1:]) for r in "xyw"]
        for program, own, shape, got in zip(
            fused.programs, given, shapes, run(fused, given, shapes, edges), strict=True
        ):
            want = program.reference(tensors=own, out_shape=shape)
            assert_matches(got, want, dtype=torch.float32, kind="sum", scale=float(want.abs().max()))
        assert fused.reason.startswith("together")
        counts.append(len(forms))
    assert counts[0] == counts[1] == counts[2] > 0


@pytest.mark.usefixtures("interpreter")
def test_an_output_of_other_rows_than_what_is_read():
    """`Out` is owned by `Row`, and `S` by `Col`: walked by either, the other is as long as its caller says."""
    pair = [
        insum_nn.compile("Out[Row[e],n] += P[e] * V[Col[e],n]", options=GENERATED),
        insum_nn.compile("S[Col[e],n] += P[e] * Q[Row[e],n]", options=GENERATED),
    ]
    t = {"Row": torch.randint(5, (20,)), "Col": torch.randint(6, (20,)), "P": torch.randn(20)}
    t |= {"V": torch.randn(6, 10), "Q": torch.randn(5, 10)}
    given = [{n: t[n] for n in p.statement.tensors()} for p in pair]
    for rows, columns, fits in ((5, 6, True), (8, 6, True), (5, 9, True), (8, 9, False)):
        fused = Together(pair)
        shapes = [(rows, 10), (columns, 10)]
        found = run(fused, given, shapes, 0)
        assert fused.reason.startswith("together" if fits else "one by one")
        for program, tensors, shape, got in zip(pair, given, shapes, found, strict=True):
            want = program.reference(tensors=tensors, out_shape=shape)
            assert_matches(got, want, dtype=torch.float32, kind="sum", scale=float(want.abs().max()))


@pytest.mark.usefixtures("interpreter")
def test_which_index_tensor_terms_are_walked_by():
    tensors = draw(4)
    # A row of dZ has 5 cells, and one of X 4, which are read, or added to: read and written.
    walks = {roles: kernels_of(ones_of(roles, tensors)[0])[0].walk[0] for roles in ("xyw", "zyw", "yw", "xz")}
    assert walks == {"xyw": "Src", "zyw": "Dst", "yw": "Dst", "xz": "Dst"}
    ones = ones_of("xyw", tensors)[0]
    assert [found.walk[0] for found in kernels_of(ones)] == ["Src", "Dst"]
    assert [found.walk[0] for found in kernels_of(ones, deterministic=True)] == ["Src"]
    with pytest.raises(FormError, match="no fixed order"):
        kernel_along(ones, ("Dst", "e"), deterministic=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("u", [5, 64, 112])
@pytest.mark.parametrize("roles", SETS)
def test_on_a_gpu(roles: str, u: int, dtype: torch.dtype):
    tensors = {n: t.cuda() for n, t in draw(u, dtype, holes=True).items()}
    shapes = [shape_of(role, u) for role in roles]
    fused = Together(programs(roles))
    found = run(fused, named(roles, tensors), shapes, "key")
    # Two outputs with partition: one is added to in memory, which fp16 and bf16 are not.
    added = {"x", "z"} <= set(roles) and dtype == torch.float16
    assert fused.reason.startswith("one by one" if added else "together")
    assert_right(roles, tensors, found)
    for walk in () if dtype == torch.float16 else ("Src", "Dst"):
        assert_right(roles, tensors, together(roles, tensors, walk=(walk, "e")))


@pytest.mark.gpu
def test_the_choice_is_measured_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path))
    edges, nodes, u = 20_000, 700, 64
    src, dst = (torch.randint(nodes, (edges,), device="cuda") for _ in range(2))
    t = {"Src": src, "Dst": dst, "dZ": torch.randn(nodes, 5, u), "X": torch.randn(nodes, 4, u)}
    t |= {"Y": torch.randn(edges, 3), "W": torch.randn(edges, 3, u), **TABLES}
    t = {n: each.cuda() for n, each in t.items()}
    own = programs("xyw", options=Options(tune=True))
    given = [{n: t[n] for n in p.statement.tensors()} for p in own]
    shapes = [(nodes, 4, u), (edges, 3), (edges, 3, u)]
    fused = Together(own)
    found = run(fused, given, shapes, 0)
    assert "the fastest of " in fused.reason
    again = Together(own)
    monkeypatch.setattr(fused_module, "time_whole", lambda *_: pytest.fail("measured again"))
    repeated = run(again, given, shapes, 0)
    assert again.reason.partition(": ")[0] == fused.reason.partition(": ")[0]
    assert "stored in " in again.reason
    for program, tensors, shape, a, b in zip(own, given, shapes, found, repeated, strict=True):
        want = program(tensors=tensors, out_shape=shape)
        # Not with each other: what was chosen may add atomically, in an order that differs from call to call.
        assert all((each - want).abs().max() <= 1e-5 * want.abs().max() for each in (a, b))

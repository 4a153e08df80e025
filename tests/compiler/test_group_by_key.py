"""Entries in the order of the matrix that they select: when, what the kernels compute, and the tiles that they walk."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

import insum_nn
from insum_nn import Options
from insum_nn.compiler.kernels import generated
from insum_nn.compiler.kernels.row_partition import clear_partitions, partition_of, tiles_of
from insum_nn.compiler.kernels.row_structures import tile_rows
from insum_nn.compiler.runtime import inline as inline_module
from insum_nn.compiler.runtime import statement_cuts
from insum_nn.compiler.schedule import product_cost
from insum_nn.compiler.schedule.form import Form
from insum_nn.testing.tolerances import assert_matches
from tests.compiler.divided_rows import wait_for_kernel
from tests.compiler.interpreted import Ranges, interpreter
from tests.compiler.test_inline_kernels import gradients, record
from tests.compiler.test_row_partition import terms_by_row, walked
from tests.compiler.test_statement_sequence import sequence, texts
from tests.compiler.traced_kernels import Interpreted, launches
from tests.device_calls import device_calls
from tests.pretended_gpu import H200

__all__ = ["interpreter"]

KERNELS, LIBRARY = Options(backend="triton", tune=False), Options(backend="eager")


def keys(count: int, *shape: int, holes: bool = False) -> Tensor:
    """Keys of which one is in no entry; with `holes`, entries without a key."""
    found = torch.randint(-1 if holes else 0, count - 1, shape)
    return torch.where(found == 1, count - 1, found)


def real(*shape: int) -> Tensor:
    return torch.randn(shape)


# What takes entries by key: its text, its tensors, and the output's shape where that does not follow.
CASES: dict[str, tuple[str, Callable[[], dict[str, Tensor]], tuple[int | None, ...] | None]] = {
    "experts": (
        "Y[t,o] += G[t,k] * X[t,c] * W[E[t,k],c,o]",
        lambda: {"G": real(60, 2), "X": real(60, 11), "W": real(5, 11, 19), "E": keys(5, 60, 2)},
        None,
    ),
    "experts without weights": (
        "Y[t,k,o] += X[t,c] * W[E[t,k],c,o]",
        lambda: {"X": real(60, 11), "W": real(5, 11, 19), "E": keys(5, 60, 2)},
        None,
    ),
    "relations": (
        "Y[D[e],o] += X[S[e],c] * W[T[e],c,o]",
        lambda: {
            "D": keys(13, 131, holes=True),
            "S": keys(17, 131, holes=True),
            "T": keys(4, 131, holes=True),
            "X": real(17, 16),
            "W": real(4, 16, 24),
        },
        (13, None),
    ),
    "species": (
        "Y[n,o] += X[n,u] * W[u,Z[n],o]",
        lambda: {"X": real(130, 9), "W": real(9, 6, 33), "Z": keys(6, 130)},
        None,
    ),
    "components": (
        "Y[n,m,o] += X[n,m,u] * W[Z[n],o,u]",
        lambda: {"X": real(70, 3, 16), "W": real(4, 16, 16), "Z": keys(4, 70, holes=True)},
        None,
    ),
    "the matrix first": (
        "Y[e,o] += W[c,o,T[e]] * X[e,c]",
        lambda: {"X": real(70, 16), "W": real(16, 20, 4), "T": keys(4, 70).sort().values},
        None,
    ),
    "rows of the key": (
        "Y[T[e],o] += X[e,c] * W[T[e],c,o]",
        lambda: {"X": real(70, 16), "W": real(4, 16, 20), "T": keys(4, 70, holes=True)},
        (4, None),
    ),
}


def drawn(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in CASES[name][1]().items()}


def doubled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.detach().double() if t.is_floating_point() else t for n, t in tensors.items()}


def call(name: str, tensors: dict[str, Tensor], options: Options = KERNELS, **more: Any) -> Tensor:
    text, _, shape = CASES[name]
    return insum_nn.compile(text, options=options, out_shape=shape, **more)(tensors=tensors)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few entries there are, and whatever their products cost."""
    monkeypatch.setattr(product_cost, "_OF_A_KEY", 0)
    monkeypatch.setattr(product_cost, "_GROUPED_FROM", 0)


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> list[Form]:
    """The forms of the kernels that are made."""
    found: list[Form] = []
    make: Any = generated.UnsizedKernel

    def made(form: Form, *rest: Any) -> Any:
        found.append(form)
        return make(form, *rest)

    monkeypatch.setattr(generated, "UnsizedKernel", made)
    return found


def assert_derivatives(name: str, tensors: dict[str, Tensor], dtype: torch.dtype, options: Options = KERNELS) -> None:
    """A call and its gradients are those of float64."""
    exact = doubled(tensors)
    names = [n for n, t in tensors.items() if t.is_floating_point()]
    ours, wide = ({n: t.requires_grad_() if n in names else t for n, t in each.items()} for each in (tensors, exact))
    got, want = call(name, ours, options), call(name, wide, LIBRARY)
    sizes = {n: t.detach().abs() if n in names else t for n, t in wide.items()}
    assert_matches(got, want, dtype=dtype, kind="sum", scale=3 * float(call(name, sizes, LIBRARY).max()))
    seed = torch.randn(want.shape).to(dtype)
    found = torch.autograd.grad(got, [ours[n] for n in names], seed)
    for one, other in zip(found, torch.autograd.grad(want, [wide[n] for n in names], seed.double()), strict=True):
        assert_matches(one, other, dtype=dtype, kind="gradient", scale=3 * float(other.abs().max()))


@pytest.mark.usefixtures("interpreter", "always")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, dtype: torch.dtype, forms: list[Form]):
    assert_derivatives(name, drawn(name, dtype), dtype)
    assert forms[0].stack is not None
    if name != "rows of the key":
        # That of the inputs is such a product too, and that of the matrices is one for each of them.
        assert sum(form.stack is not None for form in forms) >= 2
        assert any(form.strategy == "own" and form.product is not None for form in forms)


@pytest.mark.usefixtures("interpreter", "always")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", ["relations", "species"])
def test_keys_of_all_kinds(name: str, dtype: torch.dtype, forms: list[Form]):
    key = {"relations": "T", "species": "Z"}[name]
    for change in (torch.zeros_like, lambda t: torch.full_like(t, 3), lambda t: -torch.ones_like(t), lambda t: t):
        tensors = drawn(name)
        tensors[key] = change(tensors[key]).to(dtype)
        assert_derivatives(name, tensors, torch.float32)
    assert forms[0].stack is not None


@pytest.mark.usefixtures("interpreter", "always")
@pytest.mark.parametrize("name", ["relations", "components"])
def test_tensors_that_are_not_contiguous(name: str, forms: list[Form]):
    tensors = {
        n: torch.stack([t, t], -1)[..., 0] if n != "W" else t.transpose(0, 2).contiguous().transpose(0, 2)
        for n, t in drawn(name).items()
    }
    assert_derivatives(name, tensors, torch.float32)
    assert forms[0].stack is not None


@pytest.mark.usefixtures("interpreter", "always")
@pytest.mark.parametrize("name", ["experts", "relations", "components"])
def test_an_initial_value_and_what_follows_the_sum(name: str, forms: list[Form]):
    tensors = drawn(name)
    plain = call(name, doubled(tensors), LIBRARY)
    initial = torch.randn(plain.shape)
    got = call(name, {**tensors, "Y": initial}, activation="relu", out_dtype=torch.float16)
    assert_matches(got, (plain + initial).relu(), dtype=torch.float16, kind="sum", scale=30.0)
    assert forms[0].stack is not None


@pytest.mark.usefixtures("interpreter", "always")
@pytest.mark.parametrize("name", ["experts", "relations", "species"])
def test_second_derivatives(name: str):
    tensors = drawn(name)
    names = [n for n, t in tensors.items() if t.is_floating_point()]
    found: list[list[Tensor]] = []
    for each, options in ((tensors, KERNELS), (doubled(tensors), LIBRARY)):
        leaves = [each[n].requires_grad_() for n in names]
        first = torch.autograd.grad(call(name, each, options).square().sum(), leaves, create_graph=True)
        found.append([*torch.autograd.grad(sum(g.square().sum() for g in first), leaves)])  # type: ignore[arg-type]
    for one, other in zip(*found, strict=True):
        assert_matches(one, other, dtype=torch.float32, kind="gradient", scale=30 * float(other.abs().max()))


@pytest.mark.usefixtures("interpreter", "always")
def test_numbers_that_no_entry_reads_show_nowhere():
    tensors = drawn("relations")
    tensors["W"][1], tensors["X"][1] = math.nan, math.inf
    got = call("relations", tensors)
    assert got.isfinite().all()
    tensors["W"][1], tensors["X"][1] = 0.0, 0.0
    assert_matches(got, call("relations", doubled(tensors), LIBRARY), dtype=torch.float32, kind="sum", scale=50.0)


@pytest.mark.usefixtures("interpreter", "always")
@pytest.mark.parametrize("name", CASES)
def test_one_program_writes_a_cell_where_results_are_to_be_the_same(name: str, forms: list[Form]):
    assert_derivatives(name, drawn(name), torch.float32, Options(backend="triton", tune=False, deterministic=True))
    assert all(form.strategy != "atomic" for form in forms)
    assert (forms[0].stack is not None) == (name not in ("experts", "relations", "rows of the key"))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", ["relations", "species"])
def test_traced_calls_sort_in_the_graph(
    name: str, order: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    monkeypatch.setattr(inline_module, "require_triton", lambda _: None)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(get_current_target=lambda: GPUTarget(*H200)))
    names = [*drawn(name)]

    def run(options: Options) -> Callable[..., Sequence[Tensor]]:
        return gradients(lambda *inputs: call(name, dict(zip(names, inputs, strict=True)), options), order)

    graph = record(run(KERNELS), *drawn(name).values())
    assert any("row_of" in node.kwargs["kwargs"] for node in launches(graph))
    inputs = [drawn(name) for _ in range(2)]
    wants = [run(LIBRARY)(*doubled(each).values()) for each in inputs]
    ranges = request.getfixturevalue("interpreter")
    for each, want in zip(inputs, wants, strict=True):
        for one, other in zip(Interpreted(graph, ranges).run(*each.values()), want, strict=True):
            assert_matches(one, other, dtype=torch.float32, kind="gradient", scale=10 * float(other.abs().max()))


@pytest.mark.usefixtures("interpreter", "always")
def test_explain_names_the_key():
    text, draw, _ = CASES["species"]
    found = [
        each for each in insum_nn.compile(text, options=KERNELS).explain(**draw()).decisions if each.topic == "entries"
    ]
    assert [each.choice for each in found] == ["in tiles of one index of axis 1 of W"]


# When.


@pytest.mark.usefixtures("interpreter")
def test_few_entries_keep_the_kernels_that_they_had(forms: list[Form]):
    for name in CASES:
        assert_derivatives(name, drawn(name), torch.float32)
    assert all(form.stack is None for form in forms)


@pytest.mark.parametrize(
    ("entries", "count", "width", "grouped"), [(8192, 64, 64, True), (8191, 64, 64, False), (8192, 1025, 64, False)]
)
def test_where_it_pays(entries: int, count: int, width: int, *, grouped: bool):
    assert product_cost.worth_grouping(entries, count, entries * width * width) == grouped


def test_what_is_weighed_and_summed_is_multiplied_first(monkeypatch: pytest.MonkeyPatch):
    """Products of entries are made in tiles, and weighed by another kernel; scattered ones are added to memory."""
    machine = statement_cuts.machine_of
    monkeypatch.setattr(statement_cuts, "machine_of", lambda _, width, **about: machine("gpu", width, **about))
    shapes = {"G": (16384, 2), "X": (16384, 1024), "W": (64, 1024, 1024), "E": (16384, 2), "out": (16384, 1024)}
    found = texts(sequence(CASES["experts"][0], KERNELS, dtype=torch.bfloat16, **shapes))
    assert found == ["T[t,k,o] += X[t,c] * W[E[t,k],c,o]", "Y[t,o] += T[t,k,o] * G[t,k]"]
    edges = dict.fromkeys("DST", (400_000,))
    shapes = {"X": (20_000, 64), "W": (16, 64, 64), "out": (20_000, 64), **edges}
    assert texts(sequence(CASES["relations"][0], KERNELS, **shapes)) == []


# Tiles.


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_tiles_match_the_oracle(rows: int, size: int, dtype: torch.dtype, interpreter: Ranges, *, on_device: bool):
    """All terms of a row, in order, in tiles of one row; nothing is read on the host."""
    for count in (1, 37):
        some = torch.randint(-1, rows, (count,))
        for drawn_rows in (some, torch.full_like(some, rows - 1), torch.full_like(some, -1), some.clamp(max=rows // 2)):
            for index in (drawn_rows.to(dtype), drawn_rows.to(dtype).sort().values):
                clear_partitions()
                with device_calls() if on_device else contextlib.nullcontext() as calls:
                    built = partition_of(index, rows, True, -size)
                assert calls is None or (calls.kernels == 1 and not calls.reads)
                got: list[list[int]] = [[] for _ in range(rows)]
                for row, terms in walked(built):
                    assert len(terms) <= size
                    got[row] += terms
                assert got == terms_by_row(index, rows)
                assert built.rows == count // size + rows


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "terms", "size"), [(1, 1, 16), (300, 20_000, 64), (1024, 100_000, 128)])
def test_tiles_are_made_on_a_gpu(gpu: torch.device, rows: int, terms: int, size: int):
    index = torch.randint(-1, rows, (terms,)).sort().values
    made = wait_for_kernel(lambda: tile_rows(index.to(gpu), rows, size, terms // size + rows))
    want = tiles_of(index, None, rows, size, torch.int32)
    some = want.begin < want.end  # type: ignore[operator]
    for one, other in zip(made, (want.begin, want.end, want.row_of), strict=True):
        assert torch.equal(one.cpu()[some], other[some])  # type: ignore[index]
    assert torch.equal((made[0] < made[1]).cpu(), some)

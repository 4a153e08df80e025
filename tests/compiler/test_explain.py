"""Test the text and the page of `explain()`, and that an explanation holds no tensors."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import subprocess
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.schedules import under_schedule
from insum_nn.compiler.api import compile
from insum_nn.compiler.explain.report import Explanation
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.kernels import launch
from insum_nn.compiler.kernels.c_compiler import find_compiler
from insum_nn.compiler.kernels.generated import Generated
from insum_nn.compiler.kernels.source import Source
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime import execution
from insum_nn.compiler.runtime.dispatch import prepare
from insum_nn.compiler.runtime.execution import Executable, clear_cache, in_names_of
from insum_nn.facts import IndexFacts
from tests.compiler.interpreted import interpreter  # noqa: F401
from tests.golden_fixture import Golden

INDEX = torch.tensor


def spmm() -> Explanation:
    return compile("C[Row[g],n] += Val[g,q] * B[Col[g,q],n]").explain(
        Row=INDEX([0, 2, 3]),
        Col=INDEX([[0, 1], [2, -1], [1, 3]]),
        Val=torch.rand(3, 2),
        B=torch.rand(4, 5),
        out_shape=(4, None),
    )


def block_spmm() -> Explanation:
    return compile("C[Row[g],a,n] += Val[g,q,a,b] * B[Col[g,q],b,n]").explain(
        Row=INDEX([0, 2, 0]),
        Col=INDEX([[0, 1], [2, -1], [1, 3]]),
        Val=torch.rand(3, 2, 4, 6),
        B=torch.rand(4, 6, 5),
        C=torch.rand(3, 4, 5),
    )


def tensor_product() -> Explanation:
    return compile("Z[z,K[p],w] += CG[p] * X[z,I[p],u] * Y[z,J[p]] * W[z,L[p],u,w]").explain(
        tensors={
            "CG": torch.rand(8),
            **{name: INDEX([0, 1, 2, 0, 1, 2, 0, 1]) for name in "IJK"},
            "L": INDEX([0, 0, 0, 0, 1, 1, 1, 1]),
            "X": torch.rand(6, 3, 4),
            "Y": torch.rand(6, 3),
            "W": torch.rand(6, 2, 4, 5),
        },
        out_shape=(None, 3, None),
    )


def nested_convolution() -> Explanation:
    pairs = INDEX([[0, 3, -1], [1, 8, 2], [-1, -1, 4], [5, 6, 7]])
    return compile("Y[Out[Map[o,p]],d] += X[In[Map[o,p]],c] * W[Off[o],c,d]").explain(
        Map=pairs,
        Off=INDEX([0, 1, 2, 3]),
        In=torch.arange(9),
        Out=torch.arange(9) + 2,
        X=torch.rand(10, 4),
        W=torch.rand(4, 4, 6),
        out_shape=(12, None),
    )


def affine_convolution() -> Explanation:
    return compile("y[p,d] += x[2*p+r-1,c] * w[r,c,d]").explain(
        x=torch.rand(9, 3), w=torch.rand(3, 3, 4), sizes={"p": 5}
    )


def maximum() -> Explanation:
    return compile("y[D[e],f] max= x[S[e],f] * w[e]").explain(
        D=INDEX([0, 0, 2]), S=INDEX([1, -1, 2]), x=torch.rand(4, 3), w=torch.rand(3), y=torch.zeros(4, 3)
    )


def scalars() -> Explanation:
    return compile("s += 2 * a[i] * a[i] * alpha").explain(a=torch.rand(3), alpha=torch.tensor(2.0))


def number_alone() -> Explanation:
    return compile("y[i] += 2.5", sizes={"i": 3}).explain(y=torch.ones(3))


def read_twice() -> Explanation:
    return compile("y[i,j] += A[i,j] * A[j,i] * P[Q[i]] * P[Q[j]]").explain(
        A=torch.rand(3, 3), P=torch.rand(4), Q=INDEX([0, 1, 3])
    )


def very_long() -> Explanation:
    names = [f"a_rather_long_tensor_name_{i}" for i in range(12)]
    tensors = {name: torch.rand(2, 3) for name in names}
    tensors |= {f"Selected_rows_{i}": INDEX([0, 1, 1]) for i in range(12)}
    factors = [f"{name}[Selected_rows_{i}[i{i}],i{i + 1}]" for i, name in enumerate(names)]
    return compile(f"result_of_everything[i0,i12] += 2.5 * {' * '.join(factors)}").explain(tensors=tensors)


def text_alone() -> Explanation:
    return compile("Y[Out[Map[o,p]],d] += X[In[Map[o,p]],c] * W[Off[o],c,d]").explain()


def unicode_names() -> Explanation:
    return compile("Größe[Zeile[ñ],列] += Wert[ñ] * 行列[Zeile[ñ],列] * שם[ñ]").explain(
        tensors={
            "Zeile": INDEX([0, 1]),
            "Wert": torch.rand(2),
            "行列": torch.rand(3, 2),
            "שם": torch.rand(2),
            "Größe": torch.rand(3, 2),
        }
    )


def empty() -> Explanation:
    return compile("C[Row[p],n] += Val[p] * B[Col[p],n]").explain(
        Row=torch.empty(0, dtype=torch.int64),
        Col=torch.empty(0, dtype=torch.int64),
        Val=torch.empty(0),
        B=torch.rand(4, 5),
        out_shape=(4, None),
    )


CASES: list[Callable[[], Explanation]] = [
    spmm,
    block_spmm,
    tensor_product,
    nested_convolution,
    affine_convolution,
    maximum,
    scalars,
    number_alone,
    read_twice,
    very_long,
    text_alone,
    unicode_names,
    empty,
]
every_case = pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)


# Text -----------------------------------------------------------------------------------------------------------------


@pytest.mark.library_calls
@pytest.mark.parametrize("make", [block_spmm, tensor_product, nested_convolution], ids=lambda make: make.__name__)
def test_text(make: Callable[[], Explanation], golden: Golden):
    explanation = dataclasses.replace(make(), compile_seconds=None)
    golden(f"explain/{make.__name__}", str(explanation))


def test_text_alone(golden: Golden):
    golden("explain/text_alone", str(text_alone()))


@pytest.mark.library_calls
def test_the_text_names_the_backend_and_its_reason():
    explanation = tensor_product()
    assert repr(explanation) == str(explanation)
    assert "backend: eager; there is no C compiler" in str(explanation)
    assert "order: " in str(explanation)


def run_loops(nest: str, tensors: dict[str, torch.Tensor], **names: object) -> torch.Tensor:
    """The loop nests of += are Python as they stand."""
    scope = {"zeros": torch.zeros, "copy": torch.clone, **tensors, **names}
    exec(nest, scope)
    result = scope[nest.split(" ", 1)[0]]
    assert isinstance(result, torch.Tensor)
    return result


@pytest.mark.parametrize(
    ("expression", "shapes", "out_shape"),
    [
        ("C[Row[g],n] += Val[g,q] * B[Col[g,q],n]", {"Row": 3, "Col": (3, 2), "Val": (3, 2), "B": (4, 5)}, (4, 5)),
        ("s += a[i] * b[i]", {"a": (3,), "b": (3,)}, ()),
        ("y[i] += A[i,j] * x[j] * alpha", {"A": (3, 4), "x": (4,), "alpha": ()}, (3,)),
        ("y[2*p+r] += x[p] * w[r]", {"x": (3,), "w": (2,)}, (6,)),
    ],
)
@pytest.mark.parametrize("with_start", [False, True])
def test_the_loop_nest_is_the_meaning(expression, shapes, out_shape, with_start):
    tensors = {
        name: torch.randint(0, 4, (shape,) if isinstance(shape, int) else shape)
        if name in ("Row", "Col")
        else torch.rand(shape)
        for name, shape in shapes.items()
    }
    program = compile(expression)
    if with_start:
        tensors[program.statement.output.name] = torch.rand(out_shape)
    given = None if with_start else out_shape
    want = program(tensors=tensors, out_shape=given)
    called = program.explain(tensors=tensors, out_shape=given)
    torch.testing.assert_close(run_loops(called.loop_nest, tensors), want)
    if not with_start:
        torch.testing.assert_close(run_loops(program.explain().loop_nest, tensors, out_shape=out_shape), want)


def sources(explanation: Explanation) -> dict[str, tuple[int | None, str]]:
    return {row.name: (row.extent, row.source) for row in explanation.extents}


def test_extents_have_sources():
    assert sources(spmm()) == {
        "g": (3, "Row axis 0, Val axis 0, Col axis 0"),
        "n": (5, "B axis 1"),
        "q": (2, "Val axis 1, Col axis 1"),
        "C axis 0": (4, "out_shape= entry 0"),
    }
    assert sources(block_spmm())["C axis 0"] == (3, "the initial value, axis 0")
    assert sources(affine_convolution())["p"][0] == 5
    assert "sizes=" in sources(affine_convolution())["p"][1]
    assert sources(text_alone())["Y axis 0"] == (None, "out_shape= entry 0, or an initial value")


def test_an_extent_that_no_tensor_shows():
    inner = compile("y[i] += x[i+r]").explain(x=torch.rand(9), sizes={"i": 5, "r": 2})
    assert sources(inner)["r"] == (2, "sizes=")
    started = compile("y[i] += x[i+r] * w[r]").explain(x=torch.rand(9), w=torch.rand(2), y=torch.rand(7))
    assert sources(started)["i"] == (7, "the initial value, axis 0")


def test_notes_name_the_reads_that_may_be_out_of_bounds_or_missing():
    assert "# terms with x[2*p+r-1,c] out of bounds do not contribute" in affine_convolution().loop_nest
    inside = compile("y[p] += x[p+r] * w[r]").explain(x=torch.rand(7), w=torch.rand(3), sizes={"p": 5})
    assert "out of bounds" not in inside.loop_nest
    assert "terms with a missing entry (-1) in Col do not contribute" in spmm().loop_nest
    assert "terms with a missing entry (-1) in S do not contribute" in maximum().loop_nest
    complete = compile("y[Row[p]] += x[p]").explain(Row=INDEX([0, 1]), x=torch.rand(2), out_shape=(2,))
    assert "missing entry" not in complete.loop_nest
    promised = compile("y[Row[p]] += x[Col[p]]", facts={"Row": IndexFacts(masked=False)})
    assert "terms with a missing entry (-1) in Col do not contribute" in promised.explain().loop_nest


def test_tensors_with_their_facts():
    rows = {row.name: row for row in block_spmm().tensors}
    assert list(rows) == ["Row", "Val", "B", "Col", "C"]
    assert (rows["Col"].kind, rows["Col"].shape, rows["Col"].dtype) == ("index", (3, 2), torch.int64)
    assert (rows["C"].kind, rows["Val"].kind, rows["Val"].facts) == ("initial value", "factor", None)
    known = {row.name: row.facts.masked for row in block_spmm().tensors if row.facts is not None}
    assert known == {"Row": False, "Col": True}


def test_a_measured_call_shows_its_time():
    explanation = compile("y[i] += x[i]").explain(x=torch.rand(3), measure=True)
    assert explanation.call_seconds is not None
    assert 0 < explanation.call_seconds < 1
    assert "one call  " in str(explanation)
    assert "not measured" in str(compile("y[i] += x[i]").explain(x=torch.rand(3)))


def test_a_call_without_terms_has_no_program():
    explanation = empty()
    assert (explanation.backend, explanation.torch_code, explanation.schedule) == (None, None, None)
    assert explanation.kernel_source() is None
    assert explanation.output_shape == (4, 5)
    assert "none: the index space is empty, so no term is computed" in str(explanation)
    assert explanation.decisions == ()


# Kernel source --------------------------------------------------------------------------------------------------------


@pytest.mark.library_calls
def test_the_source_of_an_eager_program_is_its_torch_code():
    explanation = tensor_product()
    source = explanation.kernel_source()
    assert source == explanation.torch_code
    assert source is not None
    assert "torch.index_add(" in source
    assert "= None" not in source


@pytest.mark.c
def test_a_c_function_is_shown_and_compiles(tmp_path: Path):
    """What a call does around it names helpers of the package, and is not called torch code."""
    explanation = spmm()
    assert explanation.backend == "c"
    assert "around the C function\n" in str(explanation)
    assert "torch code" not in str(explanation)
    source = explanation.kernel_source()
    assert source is not None
    text = tmp_path / "kernel.c"
    text.write_text(source)
    command = find_compiler()
    assert command is not None
    subprocess.run([*command, "-fsyntax-only", str(text)], check=True)


@pytest.mark.usefixtures("interpreter")
def test_no_library_graph_is_made_for_a_generated_kernel(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("library calls are made for a call that does not run them")

    monkeypatch.setattr(execution, "library_calls_of", fail)
    clear_cache()
    tensors = {"Row": INDEX([0, 2, 3]), "Col": INDEX([[0, 1], [2, -1], [1, 3]])}
    tensors |= {"Val": torch.rand(3, 2), "B": torch.rand(4, 5)}
    program = compile("C[Row[g],n] += Val[g,q] * B[Col[g,q],n]", options=Options(backend="triton"))
    program(tensors=tensors, out_shape=(4, None))
    explanation = program.explain(tensors=tensors, out_shape=(4, None))
    assert explanation.backend == "triton"
    assert "launch" in (explanation.torch_code or "")
    source = explanation.kernel_source()
    assert source is not None
    assert "@triton.jit" in source
    assert "index_add" not in str(explanation)


SPMM = "C[Row[p],n] += Val[p] * B[Col[p],n]"
CHAIN = "C[Row[p],n] += Val[p] * X[Col[p],k] * W[k,n]"
GRADIENT = "dW[k,n] += X[p,k] * Y[p,n]"


def sparse(rows: int = 3, entries: int = 8, **dense: tuple[int, ...]) -> dict[str, torch.Tensor]:
    index = torch.arange(entries) % rows
    return {"Row": index, "Col": index, "Val": torch.ones(entries)} | {n: torch.ones(s) for n, s in dense.items()}


# name -> statement, tensors, what becomes of the sum, schedule, and how many kernels run.
LAUNCHES: dict[str, tuple[str, dict[str, torch.Tensor], dict[str, Any], Schedule | None, int]] = {
    "rows": (SPMM, sparse(B=(3, 5)), {}, None, 1),
    "activation in the kernel": (SPMM, sparse(B=(3, 5)), {"activation": "relu"}, None, 1),
    "divided rows": (SPMM, sparse(1, 3000, B=(3, 5)), {}, None, 2),
    "divided rows, with an epilogue": (SPMM, sparse(1, 3000, B=(3, 5), C=(3, 5)), {"activation": "relu"}, None, 2),
    "parts of one sum": (
        GRADIENT,
        {"X": torch.ones(64, 32, dtype=torch.float16), "Y": torch.ones(64, 16, dtype=torch.float16)},
        {},
        Schedule(m=16, n=16, k=16, dot=True, splits=2),
        1,
    ),
    "cells in no order": ("C[Row[p],Col[p]] += Val[p]", sparse(C=(3, 3)), {}, None, 1),
}


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", LAUNCHES)
def test_the_kernels_that_are_shown_are_those_that_run(name: str, monkeypatch: pytest.MonkeyPatch):
    statement, tensors, how, schedule, count = LAUNCHES[name]
    texts: dict[object, str] = {}
    make = launch._Interpret.__init__

    def remember(self: launch._Interpret, source: Source) -> None:
        texts[self] = source.text
        make(self, source)

    monkeypatch.setattr(launch._Interpret, "__init__", remember)
    clear_cache()
    shape = (3, 3 if "Row[p],Col[p]]" in statement else None) if "Row" in tensors and "C" not in tensors else None
    program = compile(statement, options=Options(backend="triton"), **how)
    ordered, initial, extents = program._checked(tensors, None, shape)
    bound, found = prepare(program.spec, ordered, initial, extents)
    assert isinstance(found, Executable)
    run = in_names_of(found, bound).run
    assert isinstance(run, Generated)
    if schedule is not None:
        run = under_schedule(run, schedule)
    made = run.described(ordered, extents, initial)
    assert len(made.sources) == count
    assert made.torch_code is not None
    assert made.torch_code.startswith("def call(tensors, initial,")

    launched: list[object] = []
    call = run.prepare(ordered, extents, initial)
    call(ordered, initial)
    monkeypatch.setattr(launch._Interpret, "__call__", lambda self, *_: launched.append(self))
    call(ordered, initial)
    assert [texts[each] for each in launched] == [source.text for source in made.sources]


# Keeping it -----------------------------------------------------------------------------------------------------------


@every_case
def test_copies_are_equal(make: Callable[[], Explanation]):
    explanation = make()
    again = pickle.loads(pickle.dumps(explanation))
    assert again == explanation
    assert hash(again) == hash(explanation)
    assert str(again) == str(explanation)
    assert copy.deepcopy(explanation) == explanation


def test_no_tensor_is_kept():
    tensor = torch.rand(300, 300)
    seen = weakref.ref(tensor)
    explanation = compile("y[i] += A[i,j]").explain(A=tensor)
    assert len(pickle.dumps(explanation)) < 20_000
    del tensor
    gc.collect()
    assert seen() is None

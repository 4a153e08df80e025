"""Names mean nothing to what is kept: programs, schedules and files are found under any of them."""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.registry import Setting, load
from insum_nn import IndexFacts, Options, cache_info, clear_cache, compile, insum
from insum_nn.compiler.ir.canonical import canonical, canonical_key, canonical_tables, named_as
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.kernels.ahead import collect
from insum_nn.compiler.lang.bind import Bound, bind
from insum_nn.compiler.lang.epilogue import Epilogue
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.schedule import tune
from insum_nn.compiler.schedule.form import Form
from insum_nn.compiler.tuning import database
from insum_nn.facts import StaticTable
from insum_nn.testing.random_programs import random_program
from tests.compiler.interpreted import interpreter
from tests.compiler.test_names import NAMINGS, ROLES, SPMM, operands
from tests.pretended_gpu import H200, pretended_gpu

__all__ = ["interpreter"]

CANONICAL = "out[x0[a],b] += t0[a] * t1[x1[a],b]"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("INSUM_NN_SCHEDULES", raising=False)
    clear_cache()
    yield
    clear_cache()
    database.unload()


def spmm_in(naming: tuple[str, ...]) -> tuple[str, dict[str, Tensor], dict[str, IndexFacts]]:
    names = dict(zip(ROLES, naming, strict=True))
    tensors = {names[role]: t for role, t in operands().items()}
    facts = {
        names["Row"]: IndexFacts(sorted=True, masked=False, proven=True, unique_with=(names["Col"],)),
        names["Col"]: IndexFacts(masked=True, proven=True),
    }
    return SPMM.format(**names), tensors, facts


def bound_in(naming: tuple[str, ...]) -> Bound:
    text, tensors, facts = spmm_in(naming)
    return replace(bind(parse(text), tensors, None, facts=facts), static=((naming[3], 2),))


# The form.


@pytest.mark.parametrize("naming", NAMINGS)
def test_one_form_for_all_names(naming: tuple[str, ...]):
    bound = bound_in(naming)
    own = canonical(bound)
    assert str(own.statement) == own.statement.text == CANONICAL
    assert own == canonical(bound_in(NAMINGS[0])) == canonical(own)
    assert own.static == (("b", 2),)
    assert own.facts_of("x0") == IndexFacts(sorted=True, masked=False, proven=True, unique_with=("x1",))
    # What stands by position stays where it is.
    assert (own.layout.ranks, own.index_dtypes) == (bound.layout.ranks, bound.index_dtypes)
    assert named_as(replace(bound, static=()), own) == bound
    table = StaticTable((1,), (3,))
    assert canonical_tables(bound.statement, ((naming[6], table),)) == (("x1", table),)
    keys = [canonical_key(each, {naming[6]: table}) for each, naming in ((bound, naming), (own, (*"abcdef", "x1")))]
    assert keys[0] == keys[1]


def test_other_statements_have_other_forms():
    """Everything but names tells statements apart, the order of factors too."""
    texts = [
        "y[i] += W[i] * w[i]",
        "y[i] += W[i] * W[i]",
        "y[i] += w[i,k] * W[i]",
        "y[i] += w[k,i] * W[i]",
        "y[i] += W[w[i]]",
        "y[i] += W[w[i]] * w[i]",
        "y[i] += W[i] * W[w[i]]",
        "y[i] = W[i] * w[i]",
        "y[i] max= W[i] * w[i]",
        "y[i] += W[i] * w[i] * 2",
        "y[i] += W[i] * w[i] * 2.5",
        "y[i] += W[i] * w[i+1]",
        "y[i] += W[i] * w[2*i]",
        "y[i,i] += W[i] * w[i]",
        "y[i,k] += W[i] * w[k]",
        "y[k,i] += W[i] * w[k]",
        "y[Row[i]] += row[i]",
        "y[Row[i]] += row[Row[i]]",
    ]
    forms: set[str] = set()
    for text in texts:
        statement = parse(text)
        index = statement.index_tensors()
        ranks = {a.name: len(a.subscripts) for a in statement.accesses()}
        tensors = {
            n: torch.zeros((1,) * ranks[n], dtype=torch.int64 if n in index else torch.float32)
            for n in statement.tensors()
        }
        if "* w[i]" in text or "row[Row[i]]" in text:
            tensors = {name: t.long() for name, t in tensors.items()} if index else tensors
        forms.add(str(canonical(bind(statement, tensors, None)).statement))
    assert len(forms) == len(texts)


def test_forms_of_random_programs_keep_their_meaning():
    for seed in range(60):
        program = random_program(seed)
        known = program.arguments()
        tensors, sizes = known["tensors"], known["sizes"]
        assert isinstance(tensors, dict)
        assert isinstance(sizes, dict)
        whole = compile(program.expression, sizes=sizes)
        bound = bind(whole.statement, tensors, program.initial)
        own = canonical(bound)
        assert str(parse(own.statement.text)) == own.statement.text
        indices = dict(zip(bound.layout.indices, own.layout.indices, strict=True))
        names = {**dict(zip(bound.layout.tensors, own.layout.tensors, strict=True)), program.output: "out"}
        exact = whole.reference(tensors=tensors, out_shape=program.out_shape)
        again = compile(own.statement.text, sizes={indices[name]: size for name, size in sizes.items()})
        renamed = {names[name]: tensor for name, tensor in tensors.items()}
        got = again.reference(tensors=renamed, out_shape=program.out_shape)
        torch.testing.assert_close(got, exact, rtol=0, atol=0, equal_nan=True)


def test_numbers_keep_their_kind():
    for factor, dtype in (("2.0", torch.float64), ("2", torch.int64), ("2", torch.float64)):
        got = insum(f"y[i] += x[i] * {factor}", x=torch.tensor([1, 3], dtype=dtype))
        assert (got.dtype, got.tolist()) == (dtype, [2, 6])


# Programs.


@pytest.mark.parametrize("options", [Options(), Options(backend="triton"), Options(order="left")], ids=str)
@pytest.mark.usefixtures("interpreter")
def test_statements_in_other_names_share_a_program(options: Options):
    expected = None
    for naming in NAMINGS:
        text, tensors, facts = spmm_in(naming)
        facts = {name: replace(fact, unique_with=()) for name, fact in facts.items()}
        got = compile(text, facts=facts, options=options)(tensors=tensors, out_shape=(4, None))
        expected = got if expected is None else expected
        assert torch.equal(got, expected)
    assert (cache_info().misses, cache_info().hits) == (1, len(NAMINGS) - 1)


def test_gradients_in_other_names_share_programs():
    built: set[int] = set()
    for names in ("XWw", "xuz", "wWX"):
        a, b, c = (torch.randn(3, 3, requires_grad=True) for _ in range(3))
        tensors = dict(zip(names, (a, b, c), strict=True))
        out = insum("y[i,l] += {}[i,j] * {}[j,k] * {}[k,l]".format(*names), tensors=tensors)
        grads = torch.autograd.grad(out.sum(), (a, b, c))
        want = torch.autograd.grad((a @ b @ c).sum(), (a, b, c))
        for got, exact in zip(grads, want, strict=True):
            torch.testing.assert_close(got, exact)
        built.add(cache_info().misses)
    assert len(built) == 1


def test_static_tables_follow_their_tensors():
    """Two tables that change places make another statement, and results of their own."""
    x = torch.arange(3.0)
    tables = {"A": torch.tensor([0, 1, 2]), "B": torch.tensor([2, 1, 0])}
    for one, other in (("A", "B"), ("B", "A")):
        got = compile(f"y[p] += x[{one}[p]] * w[{other}[p]]", static=tables)(x=x, w=x + 1, tensors=tables)
        assert torch.equal(got, x[tables[one]] * (x + 1)[tables[other]])


@pytest.mark.usefixtures("interpreter")
def test_explain_speaks_in_the_names_of_its_statement():
    """Of programs that others made first: kernels alone, and of two stages."""
    rows, cols, x, w = torch.tensor([0, 2, 1]), torch.tensor([1, 0, 3]), torch.randn(4, 5), torch.randn(5, 20)
    cases: list[tuple[str, dict[str, Tensor], tuple[int | None, ...], Options]] = [
        ("{y}[{R}[p],n] += {v}[p] * {x}[{C}[p],n]", {}, (4, None), Options(backend="triton")),
        ("{y}[{R}[p],n] += {v}[p] * {x}[{C}[p],k] * {w}[k,n]", {"w": w}, (4, None), Options(backend="triton")),
        ("{y}[{R}[p],n] += {v}[p] * {x}[{C}[p],n]", {}, (4, None), Options()),
    ]
    first, second = dict(y="Y", R="R", C="C", v="V", x="X", w="W"), dict(y="W", R="row", C="Row", v="x", x="X1", w="w")
    for text, more, shape, options in cases:
        given = {"R": rows, "C": cols, "v": torch.ones(3), "x": x, **more}
        clear_cache()
        shown: list[str] = []
        built: list[int] = []
        for names in (first, second):
            program = compile(text.format(**names), options=options)
            used = {names[role]: t for role, t in given.items() if f"{{{role}}}[" in text}
            torch.testing.assert_close(
                program(tensors=used, out_shape=shape), program.reference(tensors=used, out_shape=shape).float()
            )
            shown.append(str(program.explain(tensors=used, out_shape=shape)))
            built.append(cache_info().misses)
        assert built[0] == built[1]
        decided = [
            part.partition("decisions")[2].partition("kernel source")[0].partition("torch code")[0] for part in shown
        ]
        for words in decided:
            assert not any(f"{name}[" in words for name in ("out", "t0", "t1", "x0", "x1")), words
        if "Cell" in decided[0] or "T[" in decided[0]:
            assert "X[" in decided[0]
            assert "X1[" in decided[1]


# Schedules.


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, interpreter: None) -> list[str]:
    """What is measured, by a clock that prefers one schedule."""
    made: list[str] = []

    def measure(form: Form, trial: object, schedules: list[Schedule]) -> list[tuple[Schedule, float]]:
        made.append(str(form.bound.statement))
        return [(Schedule(n=8, k=2, warps=2), 10.0)]

    monkeypatch.setattr(tune, "_measure", measure)
    monkeypatch.setattr(tune, "worth_selecting", lambda extents: True)
    return made


def test_a_schedule_is_found_under_other_names(measured: list[str]):
    """In the process, and on disk by another one."""
    for again, naming in itertools.product((False, True), NAMINGS):
        if again:
            clear_cache()
        text, tensors, facts = spmm_in(naming)
        program = compile(text, facts=facts, options=Options(backend="triton", tune=True))
        program(tensors=tensors, out_shape=(4, None))
        shown = str(program.explain(tensors=tensors, out_shape=(4, None)))
        assert "2 warps" in shown
        assert ("stored in" in " ".join(shown.split())) is again
    assert measured == [CANONICAL]


# The package's schedules.

# W and w, Row and row, an index named as a tensor.
_TENSORS = ("W", "w", "Row", "row", "X", "x", "T", "t0", "x0", "out", "A", "a")
_INDICES = ("W", "i", "out", "a", "x0", "row", "I", "T", "n_", "z")


def _entries() -> list[Mapping[str, Any]]:
    (file,) = database._packaged()
    return [entry.key for entry in database._entries(file).values()]


def _bound_of(key: Mapping[str, Any], tensors: Mapping[str, str], indices: Mapping[str, str], output: str) -> Bound:
    """A statement with which a shipped entry could have been measured, in other names."""
    own = parse(key["statement"])
    text = _in_names(str(own), {**tensors, "out": output}, indices)
    statement = parse(text)
    facts = {
        tensors[name]: IndexFacts(
            **{**told, "unique_with": tuple(tensors[n] for n in told.get("unique_with", ()))}, proven=True
        )
        for name, told in key["facts"].items()
    }
    dtype = getattr(torch, key["dtype"])
    ranks = {a.name: len(a.subscripts) for a in statement.accesses()}
    kinds = {tensors[name]: getattr(torch, kind) for name, kind in key["index_dtypes"].items()}
    named = {n: torch.zeros((1,) * ranks[n], dtype=kinds.get(n, dtype)) for n in statement.tensors()}
    bound = bind(statement, named, None, facts=facts, drop_outside=ast.literal_eval(key["drop_outside"]))
    activation = None if key["epilogue"] == "nothing" else key["epilogue"]
    return replace(
        bound,
        device_type=key["device_type"],
        has_initial=ast.literal_eval(key["has_initial"]),
        epilogue=Epilogue(activation),
        static=tuple((indices[name], extent) for name, extent in key["static"].items()),
    )


def _in_names(text: str, tensors: Mapping[str, str], indices: Mapping[str, str]) -> str:
    """A canonical statement in other names: a name before a bracket is a tensor's."""
    result, word = "", ""
    for letter in text + " ":
        if letter.isalnum() or letter == "_":
            word += letter
            continue
        if word and not word[0].isdigit():
            word = tensors[word] if letter == "[" or word not in indices else indices[word]
        result += word + letter
        word = ""
    return result.strip()


def test_every_shipped_schedule_is_found_in_other_names(monkeypatch: pytest.MonkeyPatch):
    entries = _entries()
    assert len(entries) > 100
    monkeypatch.setattr(database, "_device", lambda device: "cuda 9.0, 132 multiprocessors")
    for number, key in enumerate(entries):
        own = parse(key["statement"])
        turn = number % len(_TENSORS)
        tensors = dict(zip(own.tensors(), (*_TENSORS[turn:], *_TENSORS[:turn]), strict=False))
        indices = dict(zip(own.indices(), _INDICES[number % 3 :], strict=False))
        bound = _bound_of(key, tensors, indices, "Y")
        more = {n: key[n] for n in ("precision", "combine", "rows", "algorithm") if n in key}
        found = database.key_of(key["kind"], bound, {}, key["bucket"], torch.device("cpu"), **more)
        # Of tables a key holds digests, which cannot be turned back into values.
        entry = database.find({**found, "tables": key["tables"]})
        assert entry is not None, key
        assert entry.key == key


def test_a_shipped_schedule_is_found_by_a_statement_as_a_user_writes_it(monkeypatch: pytest.MonkeyPatch):
    """The package measured `C[Row[g],n] += Val[g,q] * B[Col[g,q],n]`."""
    monkeypatch.setattr(database, "_device", lambda device: "cuda 9.0, 132 multiprocessors")
    ints, floats = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 2)
    tensors = {"w": ints, "W": ints.new_zeros(2, 2), "x": floats, "X": floats}
    bound = bind(parse("y[w[x],X] += x[x,q] * X[W[x,q],X]"), tensors, None)
    wanted = next(
        key for key in _entries() if key["statement"] == "out[x0[a],b] += t0[a,c] * t1[x1[a,c],b]" and key["static"]
    )
    facts = {name: IndexFacts(**told, proven=True) for name, told in zip("wW", wanted["facts"].values(), strict=True)}
    facts = {name: replace(f, unique_with=("W",) if f.unique_with else ()) for name, f in facts.items()}
    static = tuple(({"a": "x", "b": "X", "c": "q"}[name], extent) for name, extent in wanted["static"].items())
    known = tuple(facts.get(name, IndexFacts()) for name in bound.layout.tensors)
    bound = replace(
        bound,
        facts=known,
        static=static,
        device_type=wanted["device_type"],
        dtype=getattr(torch, wanted["dtype"]),
        index_dtypes=tuple(
            getattr(torch, wanted["index_dtypes"]["x0"]) if name in "wW" else getattr(torch, wanted["dtype"])
            for name in bound.layout.tensors
        ),
    )
    more = {n: wanted[n] for n in ("precision", "combine", "rows") if n in wanted}
    key = database.key_of("schedule", bound, {}, wanted["bucket"], torch.device("cpu"), **more)
    assert json.loads(json.dumps(key)) == wanted
    assert database.find(key) is not None


@pytest.mark.slow
def test_shipped_measurements_of_several_outputs_are_found_by_the_step_that_was_measured(
    monkeypatch: pytest.MonkeyPatch,
):
    """Their keys hold a digest of what the statements that share a kernel compute, deterministic or not."""
    pytest.importorskip("e3nn")
    # One problem for both: its tensors take seconds to make.
    problem = load()["tp_conv_double/shape=mace-large/dtype=float32"].problem(Setting(torch.device("cpu"), "full"))
    found: set[str] = set()
    find = database.find

    def noted(key: database.Key) -> database.Entry | None:
        entry = find(key)
        if entry is not None and "algorithm" in key:
            found.add(key["algorithm"])
        return entry

    monkeypatch.setattr(database, "find", noted)
    for provider, count in (("insum_nn", 2), ("insum_nn/deterministic", 1)):
        clear_cache()
        found.clear()
        work = problem.providers[provider]()
        with pretended_gpu(), collect(H200):
            out = work.forward()
            outs = (out,) if isinstance(out, Tensor) else tuple(out)
            torch.autograd.grad(outs, tuple(work.leaves), [torch.ones_like(each) for each in outs])
        assert len(found) >= count, provider
        assert found <= {key["algorithm"] for key in _entries() if "algorithm" in key}

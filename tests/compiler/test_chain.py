"""A sparse sum and a dense product in one statement: the ways to split it, every candidate, and the choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import IndexFacts, Options
from insum_nn.compiler.api import Program
from insum_nn.compiler.lang.bind import Extents, layout_of
from insum_nn.compiler.lang.derivative import derivatives
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.plans.chain import find_splits
from insum_nn.compiler.plans.chained import Chained
from insum_nn.compiler.runtime import execution
from insum_nn.testing.tolerances import assert_matches
from tests.compiler.generated_cases import put, take
from tests.compiler.interpreted import interpreter
from tests.compiler.test_generated import doubled, layouts, rounded

__all__ = ["interpreter"]

CHAIN = "C[Row[g],n] += Val[g,q] * X[Col[g,q],k] * W[k,n]"
GENERATED = Options(backend="triton", tune=False)
FACTS = {
    "Row": IndexFacts(sorted=True, masked=False, proven=True),
    "Col": IndexFacts(masked=True, proven=True),
}
ROWS, COLUMNS, SLOTS = 21, 19, 2


def tensors_of(k: int, n: int, dtype: torch.dtype = torch.float64, groups: int = 40) -> dict[str, Tensor]:
    """Row 3 has most entries, and some rows none; some slots are empty."""
    row = torch.where(torch.rand(groups) < 0.4, 3, torch.randint(4, ROWS - 1, (groups,))).sort().values
    col = torch.randint(COLUMNS, (groups, SLOTS))
    found = {
        "Row": row,
        "Col": torch.where(torch.rand(groups, SLOTS) < 0.2, -1, col),
        "Val": torch.randn(groups, SLOTS, dtype=torch.float64),
        "X": torch.randn(COLUMNS, k, dtype=torch.float64),
        "W": torch.randn(k, n, dtype=torch.float64),
    }
    return rounded(found, dtype)


def oracle(t: dict[str, Tensor], rows: int = ROWS) -> Tensor:
    return put((t["Val"][..., None] * take(t["X"], t["Col"])).sum(1), t["Row"], rows) @ t["W"]


def scale_of(t: dict[str, Tensor], rows: int = ROWS) -> float:
    exact = {name: x.abs() if x.is_floating_point() else x for name, x in doubled(t).items()}
    return float(oracle(exact, rows).max())


def chained() -> Iterator[Chained]:
    """The chained programs compiled since the cache was cleared."""
    for program in execution._cache.values():
        if isinstance(program.run, Chained):
            yield program.run


def all_candidates(program: Program, tensors: dict[str, Tensor], start: Tensor | None = None) -> dict[str, Tensor]:
    """What each candidate of a chained program computes."""
    output = program.statement.output.name
    program(tensors=tensors if start is None else {**tensors, output: start})
    (run,) = chained()
    ordered = [tensors[name] for name in layout_of(program.statement).tensors]
    extents = program._extents(ordered, start, None, None)
    start = None if start is None else start.expand(extents.output)
    return {name: each.prepare(ordered, extents, start)(ordered, start) for name, each in run.candidates.items()}


# Splitting.


def test_splits_of_the_statement_and_its_gradients():
    statement = parse(CHAIN)
    assert [str(s) for s in find_splits(statement)] == [
        "T[Row[g],k] += Val[g,q] * X[Col[g,q],k]; C[i,n] += T[i,k] * W[k,n]",
        "T[i,n] += X[i,k] * W[k,n]; C[Row[g],n] += Val[g,q] * T[Col[g,q],n]",
    ]
    gradients = {name: derivatives(statement, name).statements[0] for name in ("X", "Val", "W")}
    assert [str(s) for s in find_splits(gradients["X"])] == [
        "T[Col[g,q],n] += dC[Row[g],n] * Val[g,q]; dX[i,k] += T[i,n] * W[k,n]",
        "T[i,k] += dC[i,n] * W[k,n]; dX[Col[g,q],k] += T[Row[g],k] * Val[g,q]",
    ]
    assert [str(s) for s in find_splits(gradients["Val"])] == [
        "T[i,n] += X[i,k] * W[k,n]; dVal[g,q] += dC[Row[g],n] * T[Col[g,q],n]",
        "T[i,k] += dC[i,n] * W[k,n]; dVal[g,q] += T[Row[g],k] * X[Col[g,q],k]",
    ]
    assert [str(s) for s in find_splits(gradients["W"])] == [
        "T[Row[g],k] += Val[g,q] * X[Col[g,q],k]; dW[k,n] += T[i,k] * dC[i,n]",
        "T[Col[g,q],n] += dC[Row[g],n] * Val[g,q]; dW[k,n] += T[i,n] * X[i,k]",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "C[Row[p],n] += Val[p] * B[Col[p],n]",
        "O[P[i],d] += F[NB[k,i],c] * W[k,c,d]",
        "C[i,n] += A[i,k] * W[k,n]",
        "C[Row[p],n] max= Val[p] * X[Col[p],k] * W[k,n]",
        # The weight's column is looked up, or stands in a factor of both.
        "C[Row[p],Col[n]] += X[p,k] * W[k,n] * Y[k]",
        "C[Row[p],n] += Val[p] * X[Col[p],k] * W[k,n] * Y[k,n]",
        "V[g,q] += X[Row[g],c] * Y[Col[g,q],c]",
    ],
)
def test_statements_that_are_no_chain(text: str):
    assert find_splits(parse(text)) == ()


SPLIT = [
    CHAIN,
    "C[Row[g],n] += 0.5 * W[n,k] * Val[g,q] * X[Col[g,q],k]",
    "C[n,Row[g]] += Val[g,q] * X[k,Col[g,q]] * W[k,n]",
    "dW[n,k] += dC[Row[g],n] * Val[g,q] * X[Col[g,q],k]",
    "dVal[g,q] += dC[Row[g],n] * X[Col[g,q],k] * W[k,n]",
    "C[Row[g],b,n] += Val[g,q,b] * X[Col[g,q],k] * W[k,n]",
    "C[Row[g],n] += Val[g,q] * X[Col[g,q],3*k+1] * W[k,n]",
    "C[Row[g],n] += Val[g,q,n] * X[Col[g,q],k] * W[k,n]",
]


KNOWN = {"g": 7, "q": 2, "k": 3, "n": 4, "b": 2}


def drawn_for(text: str) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """Tensors for one of the statements above, and the output's shape."""
    statement = parse(text)
    shapes: dict[str, tuple[int, ...]] = {}
    for access in statement.accesses():
        plain = [s.plain for s in access.subscripts]
        # Rows and columns that are looked up; `X` is longer along what is summed than the statement reads.
        lengths = {"X": 5 if "3*k" not in text else 11, "dC": 6}
        shapes[access.name] = tuple(
            (5 if access.name == "X" and s.indirect else lengths.get(access.name, 6)) if i is None else KNOWN[i]
            for i, s in zip(plain, access.subscripts, strict=True)
        )
    index = {
        "Row": torch.randint(6, shapes["Row"]),
        "Col": torch.where(torch.rand(7, 2) < 0.2, -1, torch.randint(5, (7, 2))),
    }
    tensors = {n: index.get(n, torch.randn(shapes[n], dtype=torch.float64)) for n in statement.tensors()}
    return tensors, shapes[statement.output.name]


@pytest.mark.parametrize("text", SPLIT)
def test_both_parts_are_the_whole(text: str):
    """By the reference interpreter alone."""
    tensors, shape = drawn_for(text)
    splits = find_splits(parse(text))
    assert splits
    want = insum_nn.compile(text, out_shape=shape).reference(tensors=tensors)
    for split in splits:
        _, made = split.sizes(KNOWN, {name: t.shape for name, t in tensors.items()}, shape)
        first = {name: tensors[name] for name in split.first.tensors()}
        between = insum_nn.compile(str(split.first), out_shape=made).reference(tensors=first)
        second = {**tensors, split.made: between}
        second = {name: second[name] for name in split.second.tensors()}
        got = insum_nn.compile(str(split.second), out_shape=shape).reference(tensors=second)
        torch.testing.assert_close(got, want, msg=str(split))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("text", SPLIT)
@pytest.mark.parametrize("started", [False, True])
def test_every_candidate_of_every_statement(text: str, started: bool):
    tensors, shape = drawn_for(text)
    tensors = rounded(tensors, torch.float32)
    start = torch.randn(shape) if started else None
    program = insum_nn.compile(text, out_shape=shape, options=GENERATED)
    given = tensors if start is None else {**tensors, program.statement.output.name: start}
    want = program.reference(tensors=given)
    found = all_candidates(program, tensors, start)
    assert len(found) >= 2
    for name, got in found.items():
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4, msg=name)


# Candidates.


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("k", "n"), [(16, 32), (5, 37), (33, 70), (1, 16), (40, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_every_candidate(k: int, n: int, dtype: torch.dtype):
    tensors = tensors_of(k, n, dtype)
    program = insum_nn.compile(CHAIN, out_shape=(ROWS, None), facts=FACTS, options=GENERATED)
    found = all_candidates(program, tensors)
    want, scale = oracle(doubled(tensors)), scale_of(tensors)
    assert len(found) == 3
    for got in found.values():
        assert_matches(got, want, dtype=dtype, kind="sum", scale=scale)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("kind", ["bias", "residual", "transposed"])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_candidates_with_what_follows(kind: str, activation: str | None):
    tensors = tensors_of(9, 21, torch.float32)
    full = torch.randn(ROWS, 21)
    start = {"bias": full[0], "residual": full, "transposed": full.t().contiguous().t()}[kind]
    program = insum_nn.compile(
        CHAIN, out_shape=(ROWS, None), facts=FACTS, options=GENERATED, activation=activation, out_dtype=torch.float16
    )
    want = oracle(doubled(tensors)) + start.double()
    want = want if activation is None else getattr(torch.nn.functional, activation)(want)
    for got in all_candidates(program, tensors, start).values():
        assert_matches(got, want, dtype=torch.float16, kind="sum", scale=scale_of(tensors))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("style", [0, 1])
def test_candidates_take_any_layout(style: int):
    tensors = tensors_of(20, 17, torch.float32)
    program = insum_nn.compile(CHAIN, out_shape=(ROWS, None), facts=FACTS, options=GENERATED)
    moved = {name: list(layouts(t))[style] for name, t in tensors.items()}
    for got in all_candidates(program, moved).values():
        assert_matches(got, oracle(doubled(tensors)), dtype=torch.float32, kind="sum", scale=scale_of(tensors))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_row_that_is_divided_among_programs(index: torch.dtype):
    tensors = tensors_of(16, 16, torch.float32, groups=1300)
    tensors["Row"] = torch.full_like(tensors["Row"], 2).to(index)
    tensors["Row"][-1] = 5
    tensors["Col"] = tensors["Col"].to(index)
    start = torch.randn(ROWS, 16)
    program = insum_nn.compile(CHAIN, out_shape=(ROWS, None), facts=FACTS, options=GENERATED, activation="relu")
    want = torch.relu(oracle(doubled(tensors)) + start)
    for got in all_candidates(program, tensors, start).values():
        assert_matches(got, want, dtype=torch.float32, kind="sum", scale=scale_of(tensors))


@pytest.mark.usefixtures("interpreter")
def test_unsorted_rows_are_sorted_once():
    tensors = tensors_of(16, 16, torch.float32)
    order = torch.randperm(tensors["Row"].numel())
    tensors = {**tensors, **{name: tensors[name][order] for name in ("Row", "Col", "Val")}}
    program = insum_nn.compile(CHAIN, out_shape=(ROWS, None), options=GENERATED)
    found = all_candidates(program, tensors)
    assert len(found) == 3
    for got in found.values():
        assert_matches(got, oracle(doubled(tensors)), dtype=torch.float32, kind="sum", scale=scale_of(tensors))


# Gradients.


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("activation", [None, "relu"])
def test_gradients_of_both_orders(activation: str | None):
    tensors = tensors_of(3, 4, groups=9)
    program = insum_nn.compile(CHAIN, out_shape=(ROWS, None), facts=FACTS, options=GENERATED, activation=activation)
    leaves = [tensors[name].requires_grad_() for name in ("Val", "X", "W")]
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def call(value: Tensor, x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return program(tensors={**tensors, "Val": value, "X": x, "W": w, "C": bias})

    def plain(value: Tensor, x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        total = oracle({**tensors, "Val": value, "X": x, "W": w}) + bias
        return torch.relu(total) if activation else total

    leaves.append(bias)
    got, want = call(*leaves), plain(*leaves)
    torch.testing.assert_close(got, want)
    grads, wanted = (torch.autograd.grad(y.sin().sum(), leaves, create_graph=True) for y in (got, want))
    torch.testing.assert_close(grads, wanted)
    seconds, wanted = (
        torch.autograd.grad(sum((g * g).sum() for g in each), leaves)  # type: ignore[arg-type]
        for each in (grads, wanted)
    )
    torch.testing.assert_close(seconds, wanted)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_in_every_dtype_and_by_every_candidate(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    tensors = tensors_of(18, 20, dtype)
    seed = torch.randn(ROWS, 20).to(dtype)
    theirs = {name: t.double().requires_grad_() if t.is_floating_point() else t for name, t in tensors.items()}
    named = ("Val", "X", "W")
    want = torch.autograd.grad(oracle(theirs), [theirs[n] for n in named], seed.double())
    program = insum_nn.compile(CHAIN, out_shape=(ROWS, None), facts=FACTS, options=GENERATED)
    choices = ("one kernel over all terms", "then dX", "then dW", "then C", "then dVal")
    for wanted in choices:

        def choose(self: Chained, *_: object, wanted: str = wanted) -> str:
            fits = [name for name in self.candidates if wanted in name]
            return (fits or list(self.candidates))[-1]

        monkeypatch.setattr(Chained, "choose", choose)
        insum_nn.clear_cache()
        ours = {name: t.requires_grad_() if t.is_floating_point() else t for name, t in tensors.items()}
        got = torch.autograd.grad(program(tensors=ours), [ours[n] for n in named], seed)
        for one, other in zip(got, want, strict=True):
            assert_matches(one, other, dtype=dtype, kind="gradient")


# The choice.


def costs_of(k: int, n: int, entries: int, rows: int) -> dict[str, float]:
    statement = "C[Row[p],n] += Val[p] * X[Col[p],k] * W[k,n]"
    facts = {"Row": FACTS["Row"], "Col": IndexFacts(masked=False, proven=True)}
    program = insum_nn.compile(statement, facts=facts, options=GENERATED)
    zero = torch.zeros((), dtype=torch.long)
    tensors = {
        "Row": zero.expand(entries),
        "Col": zero.expand(entries),
        "Val": torch.zeros(()).expand(entries),
        "X": torch.zeros(()).expand(rows, k),
        "W": torch.zeros(()).expand(k, n),
    }
    ordered = [tensors[name] for name in layout_of(program.statement).tensors]
    extents = Extents(tuple({"p": entries, "n": n, "k": k}[i] for i in layout_of(program.statement).indices), (rows, n))
    from insum_nn.compiler.runtime.dispatch import prepare

    _, found = prepare(program._spec, ordered, None, extents)
    assert isinstance(found.run, Chained)
    return found.run.costs(ordered, extents)


@pytest.mark.usefixtures("interpreter")
def test_the_order_with_the_narrower_gather_wins():
    narrow = costs_of(32, 128, 500_000, 50_000)
    assert min(narrow, key=narrow.__getitem__).startswith("T[Row[p],k] += Val[p] * X[Col[p],k]")
    wide = costs_of(128, 16, 500_000, 50_000)
    assert min(wide, key=wide.__getitem__).startswith("T[i,n] += X[i,k] * W[k,n]")
    for costs in (narrow, wide):
        assert costs["one kernel over all terms"] > 2 * min(costs.values())


@pytest.mark.usefixtures("interpreter")
def test_explain_lists_the_orders():
    tensors = tensors_of(300, 16, torch.float32)
    program = insum_nn.compile(CHAIN, out_shape=(ROWS, None), facts=FACTS, options=GENERATED)
    text = " ".join(str(program.explain(tensors=tensors)).split())
    assert "order:" in text
    assert "one kernel over all terms" in text
    assert "the least bytes and multiplications" in text


@pytest.mark.usefixtures("interpreter")
def test_precision_asked_for_by_name_keeps_the_library_out():
    tensors = tensors_of(16, 16, torch.float32)
    options = replace(GENERATED, precision="ieee")
    program = insum_nn.compile(CHAIN, out_shape=(ROWS, None), facts=FACTS, options=options)
    for got in all_candidates(program, tensors).values():
        assert_matches(got, oracle(doubled(tensors)), dtype=torch.float32, kind="sum", scale=scale_of(tensors))
    (run,) = chained()
    assert not any("_Library" in repr(stage) for c in run.candidates.values() for stage in getattr(c, "stages", ()))


# On a device.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("k", "n"), [(64, 64), (32, 128), (100, 37), (256, 256)])
@pytest.mark.parametrize("longest", [0, 100_000])
def test_candidates_on_a_gpu(gpu: torch.device, dtype: torch.dtype, k: int, n: int, longest: int):
    insum_nn.clear_cache()
    rows = 4000
    row = torch.randint(rows, (30_000 + longest,))
    row[:longest] = 17
    row = row.sort().values
    t = {
        "Row": row,
        "Col": torch.randint(rows, (row.numel(), 1)),
        "Val": torch.randn(row.numel(), 1),
        "X": torch.randn(rows, k),
        "W": torch.randn(k, n) / k**0.5,
    }
    t = {name: x.to(gpu) if not x.is_floating_point() else x.to(gpu, dtype) for name, x in t.items()}
    program = insum_nn.compile(CHAIN, out_shape=(rows, None), facts=FACTS, activation="relu", options=GENERATED)
    bias = torch.randn(n, device=gpu).to(dtype)
    want = torch.relu(oracle(doubled(t), rows) + bias.double())
    for got in all_candidates(program, t, bias).values():
        assert_matches(got, want, dtype=dtype, kind="sum", scale=scale_of(t, rows))
    named = ("Val", "X", "W")
    ours = {name: x.requires_grad_() if x.is_floating_point() else x for name, x in t.items()}
    theirs = {name: x.detach().double().requires_grad_() if x.is_floating_point() else x for name, x in t.items()}
    linear = insum_nn.compile(CHAIN, out_shape=(rows, None), facts=FACTS, options=GENERATED)
    seed = torch.randn(rows, n, device=gpu).to(dtype)
    got = torch.autograd.grad(linear(tensors=ours), [ours[x] for x in named], seed)
    expected = torch.autograd.grad(oracle(theirs, rows), [theirs[x] for x in named], seed.double())
    for one, other in zip(got, expected, strict=True):
        assert_matches(one, other, dtype=dtype, kind="gradient")

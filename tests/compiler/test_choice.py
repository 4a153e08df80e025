"""The choice of a path: what is tried, what is taken, what is remembered, and what `explain()` says of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import IndexFacts, Options
from insum_nn.compiler.lang.bind import bind
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.plans import choice, paths
from insum_nn.compiler.plans.choice import Choice, Offer, choose_path
from insum_nn.compiler.plans.planner import make_plan
from insum_nn.compiler.runtime import execution
from insum_nn.compiler.schedule import database
from tests.compiler.interpreted import interpreter

__all__ = ["interpreter"]

CPU = torch.device("cpu")
KEY = {"format": 0, "kind": "path", "statement": "imagined"}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path))
    insum_nn.clear_cache()
    yield
    insum_nn.clear_cache()


class Clock:
    """Times by what runs, instead of a device's; and seconds that pass while something is made ready."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.tried: list[str] = []
        monkeypatch.setattr(choice, "_measure", lambda run, device: run())
        monkeypatch.setattr(choice.time, "perf_counter", lambda: self.now)

    def offer(self, backend: str, microseconds: float | Exception, takes: float = 0.0, **more: float) -> Offer:
        def ready() -> Callable[[], object]:
            self.tried.append(backend)
            self.now += takes
            if isinstance(microseconds, Exception):
                raise microseconds
            return lambda: microseconds

        return Offer(backend, ready, **more)  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def chosen(*offers: Offer, room: float = math.inf) -> Choice:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "_room", lambda device: room)
        found = choose_path(KEY, "imagined", offers, CPU)
    assert found is not None
    return found


def notes(found: Choice) -> dict[str, str]:
    return {c.backend: c.note for c in found.candidates if c.note}


# What is taken.


def test_the_fastest_is_taken(clock: Clock):
    found = chosen(clock.offer("triton", 30.0), clock.offer("eager", 10.0), clock.offer("inductor", 20.0))
    assert found.backend == "eager"
    assert found.reason == "measured: library calls 10.0 us against generated kernel 30.0 us, Inductor 20.0 us"
    assert [c.row for c in found.candidates] == [
        ("candidate", "generated kernel", "30.0 us"),
        ("candidate", "library calls", "10.0 us"),
        ("candidate", "Inductor", "20.0 us"),
    ]


def test_a_small_difference_is_none(clock: Clock):
    found = chosen(clock.offer("triton", 30.0), clock.offer("eager", 29.0))
    assert found.backend == "triton"
    assert found.reason.endswith("; the rule's path")


def test_what_cannot_win_is_not_tried(clock: Clock):
    found = chosen(clock.offer("triton", 30.0), clock.offer("eager", 1.0, least=31.0))
    assert found.backend == "triton"
    assert clock.tried == ["triton"]
    assert notes(found) == {"eager": "not tried: it takes 31 us at best, by what it moves and multiplies"}
    assert "no other path was worth a trial" in found.reason


def test_what_fills_the_memory_is_not_tried(clock: Clock):
    found = chosen(clock.offer("triton", 30.0), clock.offer("eager", 1.0, aside=2**21), room=2**20)
    assert notes(found) == {"eager": "not tried: it puts 2 MiB aside"}


def test_the_budget_is_for_everything(clock: Clock):
    found = chosen(clock.offer("triton", 300.0, takes=6.0), clock.offer("inductor", 1.0, seconds=12.0))
    assert notes(found) == {"inductor": "not tried: it compiles for about 12 s, and 9 s are left"}
    assert chosen(clock.offer("triton", 300.0), clock.offer("inductor", 1.0)).backend == "triton"


def test_what_is_left_of_the_budget_suffices(clock: Clock):
    found = chosen(clock.offer("triton", 300.0, takes=6.0), clock.offer("inductor", 1.0, seconds=5.0))
    assert found.backend == "inductor"


@pytest.mark.parametrize(
    ("error", "note"),
    [(RuntimeError("no such\nthing"), "it fails: no such"), (torch.OutOfMemoryError("x"), "it runs out of memory")],
)
def test_what_fails_is_no_candidate(clock: Clock, monkeypatch: pytest.MonkeyPatch, error: Exception, note: str):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    found = chosen(clock.offer("triton", 30.0), clock.offer("eager", error))
    assert (found.backend, notes(found)) == ("triton", {"eager": note})


def test_the_rule_s_path_has_to_run(clock: Clock):
    with pytest.raises(RuntimeError, match="broken"):
        choose_path(KEY, "imagined", [clock.offer("triton", RuntimeError("broken")), clock.offer("eager", 1.0)], CPU)


def test_a_compilation_that_saves_little_is_not_waited_for(clock: Clock):
    found = chosen(clock.offer("triton", 20.0), clock.offer("inductor", 1.0, least=10.0, seconds=12.0))
    assert notes(found) == {"inductor": "not tried: it saves 10 us at most, and compiles for about 12 s"}
    assert clock.tried == ["triton"]


# What is remembered.


def test_a_choice_is_remembered(clock: Clock):
    first = chosen(clock.offer("triton", 30.0), clock.offer("eager", 10.0), clock.offer("inductor", 1.0, least=50.0))
    again = chosen(clock.offer("triton", 1.0), clock.offer("eager", 1.0), clock.offer("inductor", 1.0))
    assert clock.tried == ["triton", "eager"]
    assert again.backend == "eager"
    assert again.candidates == first.candidates
    assert "; remembered in " in again.reason


def test_a_path_that_is_not_offered_is_not_taken(clock: Clock):
    chosen(clock.offer("triton", 30.0), clock.offer("eager", 10.0))
    with pytest.warns(UserWarning, match="'eager' is none of triton"):
        assert chosen(clock.offer("triton", 30.0)).backend == "triton"


def test_another_process_is_measuring(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choice, "WAIT", 0.0)
    with database.turn(KEY, 0.0) as mine:
        assert mine
        assert choose_path(KEY, "imagined", [clock.offer("triton", 1.0)], CPU) is None
    assert clock.tried == []


# Estimates.


def plan_of(expression: str, sizes: dict[str, int], compiled: bool = False, **tensors: Tensor):
    bound = bind(parse(expression), tensors, None, facts={"Col": IndexFacts(masked=False, proven=True)})
    return make_plan(bound, sizes, Options(), compiled=compiled)


COL = torch.zeros(6, dtype=torch.int64)
SIZES = {"i": 8, "k": 6, "n": 16, "b": 2}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("C[i,n] += A[i,k] * B[k,n]", True),
        ("C[b,i,n] += A[b,i,k] * B[b,k,n]", True),
        ("C[i] += A[i,k] * B[k]", True),
        ("C[i,n] += A[i] * B[n]", False),
        ("C[i,n] += A[i,k] * B[Col[k],n]", False),
        ("C[Col[k],n] += A[k] * B[k,n]", False),
    ],
)
def test_what_is_a_library_call(expression: str, expected: bool):
    ranks = {a.name: len(a.subscripts) for a in parse(expression).reads}
    tensors = {name: torch.ones((2,) * rank) for name, rank in ranks.items()}
    if "Col" in expression:
        tensors["Col"] = COL
    assert choice.is_library_call(plan_of(expression, SIZES, **tensors)) is expected


def test_a_dense_product_puts_nothing_aside():
    plan = plan_of("C[i,n] += A[i,k] * B[k,n]", SIZES, A=torch.ones(8, 6), B=torch.ones(6, 16))
    offer = choice.eager_offer(plan, SIZES, lambda: lambda: None)
    assert (offer.aside, offer.least) == (0, 0.0)


def test_gathered_operands_are_counted():
    plan = plan_of(
        "C[i,n] += A[i,k] * B[Col[k],n]", SIZES, A=torch.ones(8, 6).half(), B=torch.ones(9, 16).half(), Col=COL
    )
    offer = choice.eager_offer(plan, SIZES, lambda: lambda: None)
    assert offer.aside == 6 * 16 * 2
    assert offer.least == pytest.approx(2 * offer.aside / choice._MEMORY)


def test_inductor_is_expected_to_take_longer_with_a_product():
    dense = [torch.ones(8, 6), torch.ones(6, 16)]
    product = plan_of("C[i,n] += A[i,k] * B[k,n]", SIZES, True, A=dense[0], B=dense[1])
    outer = plan_of("C[i,n] += A[i] * B[n]", SIZES, True, A=torch.ones(8), B=torch.ones(16))
    with_product = choice.inductor_offer(product, SIZES, dense, (8, 16), lambda: lambda: None)
    without = choice.inductor_offer(outer, SIZES, [torch.ones(8), torch.ones(16)], (8, 16), lambda: lambda: None)
    assert with_product.seconds > without.seconds > 0
    assert without.least == pytest.approx((8 + 16 + 128) * 4 / choice._MEMORY)


# In the pipeline.


@pytest.fixture
def measuring(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Generated kernels are the rule on the CPU too, and times are taken from a table."""
    times = {"triton": 30.0, "eager": 10.0, "inductor": 20.0}
    monkeypatch.setattr(execution, "choose_backend", lambda bound, options: ("triton", "the rule"))
    monkeypatch.setattr(paths, "worth_measuring", lambda options, extents, **least: options.tune)

    def measured(offer: Offer, device: torch.device, *, rule: bool) -> choice.Candidate:
        if offer.backend != "inductor":
            offer.ready()()
        return choice.Candidate(offer.backend, times[offer.backend])

    monkeypatch.setattr(choice, "_measured", measured)
    monkeypatch.setattr(choice, "_unpromising", lambda offer, *rest: "compiles long" if offer.seconds else "")
    return times


A, B = torch.randn(5, 7), torch.randn(7, 6)


def matmul(options: Options | None = None) -> insum_nn.Program:
    return insum_nn.compile("C[i,n] += A[i,k] * B[k,n]", options=options or Options())


def test_a_dense_product_takes_the_library(measuring: dict[str, float]):
    program = matmul()
    torch.testing.assert_close(program(A=A, B=B), A @ B)
    explained = program.explain(A=A, B=B)
    assert explained.backend == "eager"
    text = str(explained)
    assert "measured: library calls 10.0 us against generated kernel 30.0 us" in text.replace("\n  ", " ")
    assert [str(d) for d in explained.decisions[1:5]] == [
        "rule: generated kernel; the rule",
        "candidate: generated kernel; 30.0 us",
        "candidate: library calls; 10.0 us",
        "candidate: Inductor; not tried: compiles long",
    ]


def test_a_generated_kernel_that_is_faster_stays(measuring: dict[str, float]):
    measuring["triton"] = 5.0
    program = matmul()
    torch.testing.assert_close(program(A=A, B=B), A @ B)
    explained = program.explain(A=A, B=B)
    assert explained.backend == "triton"
    topics = [d.topic for d in explained.decisions]
    assert topics[:5] == ["backend", "rule", "candidate", "candidate", "candidate"]
    assert "combine" in topics


def test_each_bucket_has_its_own_choice(measuring: dict[str, float]):
    program = matmul(Options(specialize=False))
    assert program.explain(A=A, B=B).backend == "eager"
    measuring["triton"] = 5.0
    assert program.explain(A=A, B=B).backend == "eager"
    # Of the same bucket, and of another one.
    assert program.explain(A=torch.randn(6, 7), B=B).backend == "eager"
    wide = torch.randn(40, 7)
    assert program.explain(A=wide, B=B).backend == "triton"
    torch.testing.assert_close(program(A=wide, B=B), wide @ B)


@pytest.mark.parametrize("options", [Options(tune=False), Options(deterministic=True), Options(backend="triton")])
def test_where_the_rule_stands(measuring: dict[str, float], options: Options):
    program = matmul(options)
    torch.testing.assert_close(program(A=A, B=B), A @ B)
    explained = program.explain(A=A, B=B)
    assert explained.backend == "triton"
    assert not any(d.topic == "candidate" for d in explained.decisions)


def test_a_choice_survives_the_process(measuring: dict[str, float]):
    matmul()(A=A, B=B)
    insum_nn.clear_cache()
    measuring["triton"] = 1.0
    explained = matmul().explain(A=A, B=B)
    assert explained.backend == "eager"
    assert "remembered in" in explained.reason


def test_a_starting_value_and_gradients(measuring: dict[str, float]):
    a, b, c = A.clone().requires_grad_(), B.clone().requires_grad_(), torch.randn(5, 6, requires_grad=True)
    out = matmul()(A=a, B=b, C=c)
    weights = torch.randn(5, 6)
    got = torch.autograd.grad(out, (a, b, c), weights)
    want = torch.autograd.grad(c + a @ b, (a, b, c), weights)
    torch.testing.assert_close(out, c + a @ b)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_exact_products_are_not_left_to_a_coarser_library(measuring: dict[str, float], monkeypatch: pytest.MonkeyPatch):
    options = Options(precision="ieee")
    assert matmul(options).explain(A=A, B=B).backend == "eager"
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert matmul(options).explain(A=A, B=B).backend == "triton"


def test_inductor_that_does_not_compile_here_is_not_taken(measuring: dict[str, float], monkeypatch: pytest.MonkeyPatch):
    measuring["inductor"] = 1.0
    monkeypatch.setattr(choice, "_unpromising", lambda *rest: "")

    def refuse(*args: object) -> None:
        raise insum_nn.errors.InsumBackendError("no compiler", fix="get one.")

    monkeypatch.setattr(execution.inductor, "compile_graph", refuse)
    program = matmul()
    torch.testing.assert_close(program(A=A, B=B), A @ B)
    explained = program.explain(A=A, B=B)
    assert explained.backend == "triton"
    assert "not here" in explained.reason


# On a CPU.


@pytest.mark.parametrize(
    "expression",
    [
        "C[i,n] += A[i,n] * B[i,n] * V[n]",
        "C[e,n] += A[E[e],n] * V[n]",
        "C[i,n] += A[i,k] * B[n,k]",
        "C[i] max= A[i,n] * V[n]",
    ],
)
def test_nothing_is_measured_or_compiled_on_a_cpu(monkeypatch: pytest.MonkeyPatch, expression: str):
    """However large: a first call would wait half a minute for a C++ compiler."""

    def refuse(*args: object) -> None:
        raise AssertionError("a first call compiles")

    monkeypatch.setattr(execution.inductor, "compile_graph", refuse)
    monkeypatch.setattr(paths, "worth_measuring", lambda options, extents, **least: True)
    tensors = {"A": torch.randn(4, 4), "B": torch.randn(4, 4), "V": torch.randn(4), "E": torch.tensor([2, 0, 3, 1])}
    tensors = {name: t for name, t in tensors.items() if f"{name}[" in expression}
    program = insum_nn.compile(expression)
    torch.testing.assert_close(program(tensors=tensors), program.reference(tensors=tensors).float())
    explained = program.explain(tensors=tensors)
    assert (explained.backend, [d for d in explained.decisions if d.topic == "candidate"]) == ("eager", [])


def test_the_clock_of_a_cpu():
    calls: list[int] = []
    assert choice._measure(lambda: calls.append(1), CPU) > 0
    assert 5 <= len(calls) <= 22


# On a device.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_dense_product_on_a_gpu(gpu: torch.device, dtype: torch.dtype):
    a, b = torch.randn(2048, 2048).to(gpu, dtype), torch.randn(2048, 2048).to(gpu, dtype)
    program = matmul()
    got = program(A=a, B=b)
    explained = program.explain(A=a, B=b)
    print(explained.short())
    times = {d.choice: d.reason for d in explained.decisions if d.topic == "candidate"}
    assert times["library calls"].endswith(" us")
    assert times["generated kernel"].endswith(" us")
    if dtype is torch.float16:
        assert explained.backend == "eager"
    # In float32 the library multiplies exactly and the kernel in three parts, which may be the faster way.
    taken, other = ("library calls", "generated kernel")[:: 1 if explained.backend == "eager" else -1]
    assert float(times[taken].split()[0]) <= 1.06 * float(times[other].split()[0])
    torch.testing.assert_close(got, a @ b, rtol=1e-2, atol=1e-1)


@pytest.mark.gpu
def test_a_batched_product_on_a_gpu(gpu: torch.device):
    a, b = torch.randn(64, 512, 512).to(gpu).half(), torch.randn(64, 512, 512).to(gpu).half()
    program = insum_nn.compile("C[b,i,n] += A[b,i,k] * B[b,k,n]")
    torch.testing.assert_close(program(A=a, B=b), a @ b, rtol=1e-2, atol=1e-1)
    explained = program.explain(A=a, B=b)
    print(explained.short())
    assert any(d.choice == "library calls" and d.reason.endswith(" us") for d in explained.decisions)


@pytest.mark.gpu
def test_spmm_on_a_gpu(gpu: torch.device):
    rows, entries = 20_000, 400_000
    tensors = {
        "Row": torch.randint(0, rows, (entries,)).sort().values.to(gpu),
        "Col": torch.randint(0, rows, (entries,)).to(gpu),
        "Val": torch.randn(entries).to(gpu),
        "B": torch.randn(rows, 64).to(gpu),
    }
    facts = {"Row": IndexFacts(sorted=True, masked=False, proven=True), "Col": IndexFacts(masked=False, proven=True)}
    program = insum_nn.compile("C[Row[p],n] += Val[p] * B[Col[p],n]", facts=facts, out_shape=(rows, None))
    program(tensors=tensors)
    explained = program.explain(tensors=tensors)
    print(explained.short())
    assert explained.backend == "triton"
    assert len([d for d in explained.decisions if d.topic == "candidate"]) >= 3

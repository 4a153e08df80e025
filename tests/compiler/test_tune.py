"""Tuning on request, by an invented clock: a step is collected, measured within a budget, stored and reported."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import insum_nn
from insum_nn import Options
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.runtime import tuning
from insum_nn.compiler.schedule import tune
from insum_nn.compiler.tuning import database, timing
from insum_nn.compiler.tuning import select as selecting
from insum_nn.compiler.tuning.cache_folder import cache_folder
from insum_nn.compiler.tuning.select import Tuned, TuneReport
from insum_nn.errors import InsumFormatError, InsumNameError
from tests.compiler.interpreted import interpreter
from tests.ranks import CONTEXT, new_process

__all__ = ["interpreter"]

SPMM = "C[Row[p],n] += Val[p] * B[Col[p],n]"
SDDMM = "D[p] += A[Row[p],n] * B[Col[p],n]"


class Sums(nn.Module):
    """A sum over edges whose factors have gradients, of so many widths."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, width) for width in widths)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.program = insum_nn.compile(SPMM, options=Options(backend="triton"))

    def forward(self, x: Tensor, edges: Tensor, values: Tensor) -> Tensor:
        self.calls += 1
        x = nn.functional.dropout(x, 0.5)
        outputs = [
            self.program(Row=edges[0], Col=edges[1], Val=values, B=x @ weight, out_shape=(len(x), None)).sum()
            for weight in self.weights
        ]
        return torch.stack(outputs).sum()


def operands() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(9, 8), torch.randint(9, (2, 20)), torch.rand(20, requires_grad=True)


def answer(schedule: Schedule) -> float:
    """The invented clock: programs of more warps are faster, and the default has few."""
    return 100.0 / schedule.warps + schedule.m / 100.0


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("INSUM_NN_SCHEDULES", raising=False)
    database.unload()
    insum_nn.clear_cache()
    yield
    database.unload()
    insum_nn.clear_cache()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, interpreter: None) -> list[Any]:
    """Kernels run in Triton's interpreter, and take what a clock says that knows their schedules."""
    asked: list[Any] = []

    def device_time(run: Callable[[], object], repeat: int, *, host: float | None = None) -> float:
        run()
        trial = getattr(run, "__self__", None)
        asked.append(trial.schedule if isinstance(trial, tune._Trial) else "step")
        return answer(trial.schedule) if isinstance(trial, tune._Trial) else 1000.0 / len(asked)

    monkeypatch.setattr(timing, "device_time", device_time)
    monkeypatch.setattr(timing, "why_not", lambda: "")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(tune, "worth_selecting", lambda extents: True)
    monkeypatch.setattr(tune, "_MOST", 4)
    monkeypatch.setattr(tuning, "_STEPS", 1)
    return asked


def entries() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((cache_folder() / "schedules").glob("*.json"))]


def test_a_step_is_tuned(clock: list[Any], tmp_path: Path):
    module, given = Sums(4), operands()
    state, seed = {name: t.clone() for name, t in module.state_dict().items()}, torch.get_rng_state()
    report = insum_nn.tune(module, *given)
    # The sum, and its gradients by B and by Val.
    assert {each.statement for each in report.statements} == {
        "out[x0[a],b] += t0[a] * t1[x1[a],b]",
        "out[x0[a],b] += t0[x1[a],b] * t1[a]",
        "out[a] += t0[x0[a],b] * t1[x1[a],b]",
    }
    assert report.measured == len(report.statements) == 3
    assert (report.left, report.reason) == (0, "")
    assert all(each.state == "measured" for each in report.statements)
    assert all(each.gain >= 1.0 for each in report.statements)
    assert any(each.gain > 1.0 for each in report.statements)
    assert report.step_before_us is not None
    assert report.step_after_us is not None
    # Of a clock on the wall, whatever else runs on the machine.
    assert report.gain == report.step_before_us / report.step_after_us
    # Nothing of the caller's has changed.
    assert all(torch.equal(t, state[name]) for name, t in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), seed)
    assert all(p.grad is None for p in (*module.parameters(), *given))
    # What was found is stored, and taken from now on.
    stored = entries()
    assert len(stored) == 3
    for entry in stored:
        times = [each["microseconds"] for each in entry["value"]["measured"]]
        assert times == sorted(times)
        assert entry["value"]["schedule"] == entry["value"]["measured"][0]["schedule"]
        assert times[0] == pytest.approx(answer(Schedule(**entry["value"]["schedule"])))
    shown = str(module.program.explain(tensors={**named(given, 4)}, out_shape=(9, None)))
    assert "stored in" in " ".join(shown.split())


def named(given: tuple[Tensor, Tensor, Tensor], width: int) -> dict[str, Tensor]:
    x, edges, values = given
    return {"Row": edges[0], "Col": edges[1], "Val": values, "B": torch.ones(len(x), width)}


def test_what_was_measured_is_exported(clock: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    insum_nn.tune(Sums(4), *operands())
    file = tmp_path / "mine.json"
    assert insum_nn.schedules.export(file) == 3
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert insum_nn.schedules.load(file) == 3
    again = insum_nn.tune(Sums(4), *operands())
    assert (again.measured, len(again.statements)) == (0, 3)
    assert again.reason == "the schedules of all 3 statements were measured before"
    assert {each.state for each in again.statements} == {"stored"}
    assert again.gain == 1.0


def test_without_gradients(clock: list[Any]):
    report = insum_nn.tune(Sums(4), *operands(), backward=False)
    assert [each.statement for each in report.statements] == ["out[x0[a],b] += t0[a] * t1[x1[a],b]"]


def test_the_budget_is_kept_and_another_call_goes_on(clock: list[Any], monkeypatch: pytest.MonkeyPatch):
    plain = selecting._measured

    def slow(task: Any, record: Any) -> Any:
        found = plain(task, record)
        time.sleep(0.05)
        return found

    monkeypatch.setattr(selecting, "_measured", slow)
    module, given = Sums(1, 2, 4, 32), operands()
    first = insum_nn.tune(module, *given, budget=0.04, backward=False)
    # One is measured whatever it takes, that on which most depends.
    assert (first.measured, first.left) == (1, 3)
    assert "; 3 left for another call; a step took " in str(first)
    (done,) = [each for each in first.statements if each.state == "measured"]
    assert sum(done.key["bucket"]) == max(sum(each.key["bucket"]) for each in first.statements)
    then = insum_nn.tune(module, *given, budget=60.0, backward=False)
    assert (then.measured, then.left) == (3, 0)
    assert sorted(each.state for each in then.statements) == ["measured", "measured", "measured", "stored"]
    assert len(entries()) == 4


def test_no_time_at_all_measures_nothing(clock: list[Any]):
    report = insum_nn.tune(Sums(4), *operands(), budget=0.0)
    assert (report.measured, report.left) == (0, 3)
    assert clock == ["step", "step"]
    assert not entries()


def test_a_kernel_for_which_there_is_no_memory(clock: list[Any], monkeypatch: pytest.MonkeyPatch):
    def refuse(self: tune._Trial, repeat: int) -> float:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(tune._Trial, "time", refuse)
    report = insum_nn.tune(Sums(4), *operands())
    assert {each.state for each in report.statements} == {"failed"}
    assert not entries()
    # Candidates that do not run leave nothing behind either.
    monkeypatch.setattr(tune._Trial, "time", lambda self, repeat: math.inf)
    report = insum_nn.tune(Sums(4), *operands())
    assert {each.state for each in report.statements} == {"failed"}
    assert not entries()


def test_entries_of_other_versions_are_measured_again(
    clock: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What the package brings may be older than the compiler in use; it is among what is measured."""
    insum_nn.tune(Sums(4), *operands(), backward=False)
    (entry,) = entries()
    odd = Schedule(m=1, n=4, k=1, chunk=7, warps=1)
    file = tmp_path / "older.json"
    entry["value"]["schedule"] = odd.to_json()
    file.write_text(json.dumps({**entry, "versions": {"torch": "1.0", "triton": "1.0"}}))
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "elsewhere"))
    insum_nn.schedules.load(file)
    clock.clear()
    report = insum_nn.tune(Sums(4), *operands(), backward=False)
    assert report.measured == 1
    assert odd in clock
    (found,) = report.statements
    assert found.gain == pytest.approx(answer(odd) / min(map(answer, {each for each in clock if each != "step"})))


def test_programs_and_functions_are_tuned_too(clock: list[Any]):
    given = operands()
    program = insum_nn.compile(SPMM, options=Options(backend="triton"))
    tensors = named(given, 4)
    assert insum_nn.tune(program, tensors=tensors, out_shape=(9, None)).measured == 2
    assert insum_nn.tune(lambda: program(**tensors, out_shape=(9, None))).measured == 0


@pytest.mark.parametrize("missing", [{}, {"v": None}])
def test_a_tensor_that_is_missing_is_named(clock: list[Any], missing: dict[str, Any]):
    with pytest.raises(InsumNameError, match="tensor 'v' was not passed"):
        insum_nn.tune(insum_nn.compile("y[i] += v[i] * x[i]"), x=torch.ones(4), **missing)
    # Nothing is left of the call: the next one is measured.
    test_programs_and_functions_are_tuned_too(clock)


def test_the_log_says_how_many_there_are(clock: list[Any], caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", logger="insum_nn.tuning"):
        report = insum_nn.tune(Sums(4), *operands())
    assert "3 statements to measure" in caplog.text
    assert str(report) in caplog.text
    assert str(report).splitlines()[-1].startswith("3 of 3 statements measured in ")


def test_two_calls_at_once_are_an_error(clock: list[Any]):
    with selecting.opened(TuneReport()), pytest.raises(RuntimeError, match="running in this process already"):
        insum_nn.tune(Sums(4), *operands())
    assert selecting.active() is None


def test_a_failing_step_leaves_nothing_open(clock: list[Any]):
    with pytest.raises(ZeroDivisionError):
        insum_nn.tune(lambda: 1 / 0)
    assert selecting.active() is None


def test_what_cannot_be_copied(clock: list[Any]):
    module = Sums(4)
    module.lock = __import__("threading").Lock()  # type: ignore[assignment]
    with pytest.raises(InsumFormatError, match="cannot be copied"):
        insum_nn.tune(module, *operands())


# Nothing to measure.


def test_on_a_cpu_there_is_nothing_to_tune(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = insum_nn.tune(nn.Linear(2, 2), torch.ones(1, 2))
    assert report.statements == ()
    assert report.reason == "torch sees no GPU, and library calls on a CPU have no schedules"
    assert str(report).startswith("0 of 0 statements measured in 0.0 s: torch sees no GPU")


def test_a_step_without_kernels(clock: list[Any]):
    report = insum_nn.tune(nn.Linear(2, 2), torch.ones(1, 2))
    assert report.reason == "no kernel of the step has enough work for its schedule to matter"


def test_without_a_folder_nothing_could_be_kept(clock: list[Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tuning, "own_folder", lambda name: None)
    assert "INSUM_NN_CACHE_DIR" in insum_nn.tune(Sums(4), *operands()).reason
    assert clock == []


# Several ranks.


def rank(number: int, folder: str, dies: bool, out: Any) -> None:
    """A process of a job of two; rank 0 measures without a GPU: entries that are invented."""
    os.environ["INSUM_NN_CACHE_DIR"] = f"{folder}/cache{number}"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=number, world_size=2)
    key = {"kind": "schedule", "statement": "y[i] += x[i]", "bucket": [14], "dtype": "float32"}

    def invented(report: TuneReport, *_: Any) -> str:
        if dies:
            os._exit(3)
        database.write(key, {"schedule": {"m": 4}})
        report._records["one"] = Tuned(key, 1.0, None, "measured")
        return ""

    tuning._measure = invented  # type: ignore[assignment]
    tuning._why_not = lambda: ""  # type: ignore[assignment]
    report = insum_nn.tune(nn.Linear(2, 2), torch.ones(1, 2), timeout=2.0 if dies else 30.0)
    entry = database.find(key)
    out.put((number, report.reason, None if entry is None else dict(entry.value)))
    out.close()
    out.join_thread()
    # The other rank may be gone.
    os._exit(0)


@pytest.mark.parametrize("dies", [False, True])
def test_one_rank_measures_for_all(tmp_path: Path, dies: bool):
    out = CONTEXT.Queue()
    ranks = [new_process(rank, number, str(tmp_path), dies, out) for number in range(2)]
    for process in ranks:
        process.start()
    found = {number: said for number, *said in (out.get(timeout=120) for _ in range(1 if dies else 2))}
    for process in ranks:
        process.join(30)
    if dies:
        reason, value = found[1]
        assert reason.startswith("rank 0 did not finish within 2 s; this rank goes on without")
        assert value is None
    else:
        # Each has a folder of its own, and both have the measurement.
        assert found[1] == ["rank 0 measured 1 statements for all", {"schedule": {"m": 4}}]
        assert found[0][1] == {"schedule": {"m": 4}}

"""Several threads: no lock is held while something is compiled or measured, and each thing is built once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import insum_nn
from insum_nn import Options, clear_cache
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.kernels import launch as launch_module
from insum_nn.compiler.runtime import execution
from insum_nn.compiler.schedule import tune
from insum_nn.compiler.schedule.form import Form
from insum_nn.compiler.tuning import database
from insum_nn.compiler.tuning.build_once import BuildOnce
from tests.compiler.interpreted import interpreter

__all__ = ["interpreter"]

# Longer than anything here takes; a deadlock ends in an error.
TIMEOUT = 30.0


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "cache"))
    clear_cache()
    yield
    clear_cache()
    database.unload()


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that are made at once."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result(TIMEOUT) for future in futures]


# The mechanism.


class Store:
    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self.building: BuildOnce[int] = BuildOnce()
        self.built: list[str] = []

    def get(self, key: str, during: Callable[[], object] = lambda: None) -> int:
        def build() -> int:
            self.built.append(key)
            during()
            self.known[key] = len(self.built)
            return self.known[key]

        return self.building.get(key, lambda: self.known.get(key), build)


def test_one_key_is_built_once():
    store, begun = Store(), threading.Barrier(8, timeout=TIMEOUT)

    def ask() -> int:
        begun.wait()
        return store.get("a", lambda: threading.Event().wait(0.05))

    assert at_once(*[ask] * 8) == [1] * 8
    assert store.built == ["a"]
    assert not store.building._locks


def test_other_keys_do_not_wait():
    """Both are inside at once, or the barrier breaks."""
    store, inside = Store(), threading.Barrier(2, timeout=TIMEOUT)
    at_once(*[lambda key=key: store.get(key, inside.wait) for key in "ab"])
    assert sorted(store.built) == ["a", "b"]


def test_a_failing_build_wakes_those_that_wait():
    """Each tries itself; the errors of others are not theirs."""
    store, inside, waiting = Store(), threading.Event(), threading.Event()

    def fail() -> None:
        inside.set()
        assert waiting.wait(TIMEOUT)
        raise RuntimeError("no compiler")

    def second() -> int:
        assert inside.wait(TIMEOUT)
        threading.Timer(0.05, waiting.set).start()
        return store.get("a")

    def first() -> str:
        with pytest.raises(RuntimeError, match="no compiler"):
            store.get("a", fail)
        return "failed"

    assert at_once(first, second) == ["failed", 2]
    assert store.built == ["a", "a"]
    assert not store.building._locks


def test_what_is_asked_for_while_it_is_built_does_not_wait_for_itself():
    store = Store()
    assert store.get("a", lambda: store.get("a")) == 2


# Programs.


def test_two_programs_are_compiled_at_once(monkeypatch: pytest.MonkeyPatch):
    inside, plain = threading.Barrier(2, timeout=TIMEOUT), execution._build

    def build(*given: Any) -> Any:
        inside.wait()
        return plain(*given)

    monkeypatch.setattr(execution, "_build", build)
    x = torch.arange(3.0)
    results = at_once(*[lambda n=n: insum_nn.insum(f"y[i] += x[i] * {n}", x=x) for n in (2, 3)])
    assert [r.tolist() for r in results] == [[0.0, 2.0, 4.0], [0.0, 3.0, 6.0]]
    assert insum_nn.cache_info().misses == 2


def test_one_program_is_compiled_once(monkeypatch: pytest.MonkeyPatch):
    """Under several names at once, too."""
    begun, plain, built = threading.Barrier(6, timeout=TIMEOUT), execution._build, list[object]()

    def build(*given: Any) -> Any:
        built.append(given)
        threading.Event().wait(0.05)
        return plain(*given)

    monkeypatch.setattr(execution, "_build", build)

    def call(name: str) -> list[float]:
        begun.wait()
        return insum_nn.insum(f"y[{name}] += {name}[{name}] * 5", tensors={name: torch.arange(3.0)}).tolist()

    assert at_once(*[lambda name=name: call(name) for name in "abcdef"]) == [[0.0, 5.0, 10.0]] * 6
    assert len(built) == 1
    assert (insum_nn.cache_info().misses, insum_nn.cache_info().hits) == (1, 5)


def test_a_program_that_fails_to_compile_fails_for_each_caller(monkeypatch: pytest.MonkeyPatch):
    plain, tries = execution._build, list[int]()
    lock = threading.Lock()

    def build(*given: Any) -> Any:
        with lock:
            tries.append(len(tries))
            number = tries[-1]
        threading.Event().wait(0.05)
        if number == 0:
            raise RuntimeError("the first one fails")
        return plain(*given)

    monkeypatch.setattr(execution, "_build", build)

    def call() -> list[float] | str:
        try:
            return insum_nn.insum("y[i] += x[i] * 7", x=torch.ones(2)).tolist()
        except RuntimeError as error:
            return str(error)

    results = at_once(*[call] * 4)
    assert sorted(map(str, results)) == sorted(["the first one fails", *["[7.0, 7.0]"] * 3])
    assert len(tries) == 2


def test_a_program_built_during_a_clearing_is_not_kept(monkeypatch: pytest.MonkeyPatch):
    plain = execution._build

    def build(*given: Any) -> Any:
        clear_cache()
        return plain(*given)

    monkeypatch.setattr(execution, "_build", build)
    assert insum_nn.insum("y[i] += x[i] * 9", x=torch.ones(1)).tolist() == [9.0]
    assert insum_nn.cache_info().size == 0


# Schedules.


@pytest.mark.usefixtures("interpreter")
def test_two_programs_are_tuned_at_once(monkeypatch: pytest.MonkeyPatch):
    inside, made = threading.Barrier(2, timeout=TIMEOUT), list[str]()

    def measure(form: Form, trial: object, schedules: list[Schedule]) -> list[tuple[Schedule, float]]:
        inside.wait()
        made.append(str(form.bound.statement))
        return [(Schedule(n=4, warps=2), 10.0)]

    # Triton's interpreter runs one kernel at a time, so none is run.
    monkeypatch.setattr(launch_module._Interpret, "__call__", lambda *_: None)
    monkeypatch.setattr(tune, "_measure", measure)
    monkeypatch.setattr(tune, "worth_selecting", lambda extents: True)
    x, row = torch.ones(4, 4), torch.tensor([0, 1, 1, 3])

    def call(text: str) -> torch.Tensor:
        return insum_nn.insum(text, x=x, Row=row, out_shape=(4, None), options=Options(backend="triton", tune=True))

    at_once(lambda: call("y[Row[p],n] += x[p,n]"), lambda: call("y[Row[p],n] += x[p,n] * 2"))
    assert len(set(made)) == 2


@pytest.mark.usefixtures("interpreter")
def test_one_program_is_tuned_once(monkeypatch: pytest.MonkeyPatch):
    made: list[str] = []

    def measure(form: Form, trial: object, schedules: list[Schedule]) -> list[tuple[Schedule, float]]:
        made.append("once")
        threading.Event().wait(0.05)
        return [(Schedule(n=4, warps=2), 10.0)]

    # Triton's interpreter runs one kernel at a time, so none is run.
    monkeypatch.setattr(launch_module._Interpret, "__call__", lambda *_: None)
    monkeypatch.setattr(tune, "_measure", measure)
    monkeypatch.setattr(tune, "worth_selecting", lambda extents: True)
    x, row = torch.ones(4, 4), torch.tensor([0, 1, 1, 3])
    begun = threading.Barrier(4, timeout=TIMEOUT)

    def call() -> torch.Tensor:
        begun.wait()
        return insum_nn.insum(
            "y[Row[p],n] += x[p,n]", x=x, Row=row, out_shape=(4, None), options=Options(backend="triton", tune=True)
        )

    at_once(*[call] * 4)
    assert made == ["once"]


# Machine code.


def test_two_kernels_are_loaded_at_once_and_each_once(monkeypatch: pytest.MonkeyPatch):
    inside, loaded = threading.Barrier(2, timeout=TIMEOUT), list[int]()

    def load(self: launch_module._Launch, aligned: object) -> Callable[..., None]:
        loaded.append(self.name)
        inside.wait()
        return lambda *_: None

    monkeypatch.setattr(launch_module._Launch, "_load", load)
    device: Any = SimpleNamespace(index=0)
    sources: list[Any] = [SimpleNamespace(text=text, schedule=Schedule()) for text in ("one", "other")]
    launches = [launch_module._Launch(source, ["*fp32"], (), device, False) for source in sources]
    found = at_once(*[lambda each=each: each.load((True,)) for each in (*launches, *launches)])
    assert found[0] is found[2]
    assert found[1] is found[3]
    assert sorted(loaded) == sorted(each.name for each in launches)

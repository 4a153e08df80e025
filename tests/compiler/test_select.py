"""The order of selection: stored for this bucket, measured now, stored for the nearest bucket, the rule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from insum_nn.compiler.tuning import database
from insum_nn.compiler.tuning import select as selecting
from insum_nn.compiler.tuning.select import Selected, Task, select

KEY = {"format": 0, "kind": "imagined", "statement": "y[i] += x[i]", "static": {}, "bucket": [14, 5]}
NEAR = {**KEY, "bucket": [15, 5]}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("INSUM_NN_SCHEDULES", raising=False)
    yield
    database.unload()


class Imagined:
    """A task whose candidates are words, and how often it was measured."""

    def __init__(self, *, finds: str | None = "measured", runs: bool = True, fails: bool = False) -> None:
        self.count, self.finds, self.fails = 0, finds, fails
        self.task: Task[str] = Task(
            KEY, lambda: Selected("rule", "the default"), self.read, str, self.measure, lambda _: runs
        )

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise TypeError("no word")
        return value

    def measure(self, before: str | None) -> list[tuple[str, float]]:
        self.count += 1
        if self.fails:
            raise RuntimeError("the device is gone")
        return [("slow", math.inf)] if self.finds is None else [(self.finds, 1.0), ("slow", 2.0)]


def test_what_is_stored_comes_first():
    database.write(KEY, {"schedule": "stored"})
    database.write(NEAR, {"schedule": "nearby"})
    imagined = Imagined()
    found = select(imagined.task, measure=True)
    assert (found.candidate, imagined.count) == ("stored", 0)
    assert found.reason.startswith("stored in ")


def test_then_it_is_measured_and_stored():
    database.write(NEAR, {"schedule": "nearby"})
    imagined = Imagined()
    assert select(imagined.task, measure=True).reason == "the fastest of 2 measured"
    assert select(imagined.task, measure=True).reason.startswith("stored in ")
    assert imagined.count == 1


def test_where_nothing_may_be_measured_the_nearest_bucket_speaks():
    imagined = Imagined()
    assert select(imagined.task).candidate == "rule"
    database.write({**KEY, "bucket": [17, 5]}, {"schedule": "too far"})
    assert select(imagined.task).candidate == "rule"
    database.write(NEAR, {"schedule": "nearby"})
    found = select(imagined.task)
    assert (found.candidate, imagined.count) == ("nearby", 0)
    assert found.reason.endswith(", for half or twice as many rows")


def test_what_did_not_run_is_not_stored():
    imagined = Imagined(finds=None)
    assert [select(imagined.task, measure=True).candidate for _ in range(2)] == ["rule"] * 2
    assert imagined.count == 2


def test_a_failing_measurement_is_not_stored_and_does_not_block_others():
    with pytest.raises(RuntimeError, match="gone"):
        select(Imagined(fails=True).task, measure=True)
    assert select(Imagined().task, measure=True).candidate == "measured"


def test_a_stored_value_that_makes_no_sense_is_named_and_replaced():
    database.write(KEY, {"schedule": 3})
    with pytest.warns(UserWarning, match="an entry is ignored: no word"):
        assert select(Imagined().task, measure=True).candidate == "measured"
    assert select(Imagined().task).candidate == "measured"


@pytest.mark.parametrize("runs", [True, False])
def test_of_otherversions_only_what_runs_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: bool):
    database.write(KEY, {"schedule": "older"})
    database.export(tmp_path / "older.json")
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "another"))
    monkeypatch.setattr(database, "versions", lambda: {"torch": "9.9"})
    database.load(tmp_path / "older.json")
    assert select(Imagined(runs=runs).task).candidate == ("older" if runs else "rule")


def test_another_process_that_measures_for_too_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(selecting, "WAIT", 0.0)
    imagined = Imagined()
    with database.turn(KEY, 0.0) as mine:
        assert mine
        found = select(imagined.task, measure=True)
        assert (found.candidate, imagined.count) == ("rule", 0)
        assert found.reason == "the default; another process measures, and was not done in time"
        database.write(NEAR, {"schedule": "nearby"})
        assert select(imagined.task, measure=True).candidate == "nearby"

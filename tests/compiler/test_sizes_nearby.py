"""Half or twice as many rows: what was measured for them says what is worth measuring."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import insum_nn
from insum_nn import IndexFacts, Options
from insum_nn.compiler import choice, schedule_store, tuning
from insum_nn.compiler.bind import Extents, bind
from insum_nn.compiler.choice import Offer, choose_path
from insum_nn.compiler.kernel_form import make_form
from insum_nn.compiler.kernel_schedule import Schedule, default_schedule
from insum_nn.compiler.parser import parse
from insum_nn.compiler.tuning import Measurement, choose_schedule

KEY = {"kind": "path", "statement": "imagined", "static": (("c", 4),), "bucket": [14, 5]}
PATHS = {
    "backend": "triton",
    "candidates": [
        {"backend": "triton", "microseconds": 100.0, "note": ""},
        {"backend": "eager", "microseconds": 149.0, "note": ""},
        {"backend": "inductor", "microseconds": 250.0, "note": ""},
    ],
}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("INSUM_NN_SCHEDULES", raising=False)
    schedule_store.unload()
    yield
    schedule_store.unload()


def key(*bucket: int, **more: object) -> dict[str, Any]:
    return {**KEY, "bucket": list(bucket), **more}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (key(13, 5), True),
        (key(15, 5), True),
        (key(14, 5), False),
        (key(16, 5), False),
        (key(14, 6), False),
        (key(13, 4), False),
        (key(13, 5, 5), False),
        (key(13, 5, statement="another"), False),
        (key(13, 5, static=(("c", 8),)), False),
        (key(13, 5, more="than that"), False),
    ],
)
def test_what_is_nearby(asked: dict[str, Any], found: bool):
    schedule_store.write(KEY, {"n": 1})
    entry = schedule_store.near(asked)
    assert (entry is not None) == found
    if entry is not None:
        assert entry.value == {"n": 1}


def test_small_sizes_are_never_nearby():
    schedule_store.write(key(9, 5), {})
    assert schedule_store.near(key(10, 5)) is None


def test_the_nearest_is_found():
    schedule_store.write(key(12, 12), {"n": "both"})
    assert schedule_store.near(key(13, 13)) is not None
    schedule_store.write(key(12, 13), {"n": "one"})
    entry = schedule_store.near(key(13, 13))
    assert entry is not None
    assert entry.value == {"n": "one"}


def test_what_was_measured_in_part_tells_nothing():
    schedule_store.write(KEY, {"nearby": True})
    assert schedule_store.near(key(13, 5)) is None


def test_a_key_without_sizes():
    schedule_store.write({"kind": "other"}, {})
    schedule_store.write({"kind": "path", "bucket": "many"}, {})
    assert schedule_store.near({"kind": "other"}) is None
    assert schedule_store.near({"kind": "path", "bucket": [14]}) is None


def test_files_that_were_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    schedule_store.write(KEY, {"n": 1})
    insum_nn.schedules.export(tmp_path / "some.json")
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "empty"))
    assert schedule_store.near(key(13, 5)) is None
    insum_nn.schedules.load(tmp_path / "some.json")
    assert schedule_store.near(key(13, 5)) is not None


def test_a_torn_file_is_named_once(tmp_path: Path):
    folder = tmp_path / "cache" / "schedules"
    folder.mkdir(parents=True)
    (folder / "torn.json").write_text("{")
    with pytest.warns(UserWarning, match=r"torn.json is no file of schedules"):
        assert schedule_store.near(KEY) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert schedule_store.near(KEY) is None


# Paths.


def offer(backend: str, microseconds: float, tried: list[str]) -> Offer:
    def ready():
        tried.append(backend)
        return lambda: microseconds

    return Offer(backend, ready)


def test_a_path_far_behind_is_not_tried(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choice, "_measure", lambda run, device: run())
    schedule_store.write(KEY, PATHS)
    tried: list[str] = []
    offers = [offer("triton", 200.0, tried), offer("eager", 150.0, tried), offer("inductor", 1.0, tried)]
    found = choose_path(key(15, 5), "imagined", offers, torch.device("cpu"))
    assert found is not None
    assert (found.backend, tried) == ("eager", ["triton", "eager"])
    assert found.candidates[2].note == "not tried: it took 2.5 times as long for half or twice as many rows"


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"backend": "another", "candidates": []},
        {**PATHS, "candidates": [{"backend": "triton"}]},
    ],
)
def test_an_entry_without_sense_is_named(monkeypatch: pytest.MonkeyPatch, value: dict[str, Any]):
    monkeypatch.setattr(choice, "_measure", lambda run, device: run())
    schedule_store.write(KEY, value)
    tried: list[str] = []
    offers = [offer("triton", 200.0, tried), offer("inductor", 1.0, tried)]
    with pytest.warns(UserWarning, match="an entry is ignored"):
        found = choose_path(key(15, 5), "imagined", offers, torch.device("cpu"))
    assert found is not None
    assert found.backend == "inductor"


# Schedules.

TEXT = "C[Row[p],n] += Val[p] * B[Col[p],n]"
FACTS = {"Row": IndexFacts(sorted=True, masked=False, proven=True), "Col": IndexFacts(masked=False, proven=True)}
TENSORS = {
    "Row": torch.tensor([0, 0, 2]),
    "Col": torch.tensor([1, 2, 0]),
    "Val": torch.ones(3),
    "B": torch.ones(4, 8),
}
# By microseconds: the last is too far behind to be tried elsewhere.
TIMES = {Schedule(n=8, k=4, warps=2): 10.0, Schedule(n=8, k=2): 12.0, Schedule(n=8): 20.0}


def test_a_search_takes_what_did_well(monkeypatch: pytest.MonkeyPatch):
    bound = bind(parse(TEXT), TENSORS, None, facts=FACTS)
    form = make_form(bound, {"p": 3, "n": 8}, (5, 8), {}, deterministic=False, prefer_own=True)
    default = default_schedule(form)
    searches: list[list[Schedule]] = []

    def measure(search: tuning._Search, schedules: list[Schedule]) -> tuple[Measurement, ...]:
        searches.append(list(schedules))
        times = {schedule: TIMES.get(schedule, math.inf) for schedule in (*TIMES, *schedules)}
        return tuple(Measurement(s, us) for s, us in sorted(times.items(), key=lambda pair: pair[1]))

    monkeypatch.setattr(tuning, "_measure", measure)
    monkeypatch.setattr(tuning, "worth_measuring", lambda options, extents: True)

    def choose(*bucket: int) -> tuning.Chosen:
        ordered = [TENSORS[name] for name in bound.layout.tensors]
        return choose_schedule(form, {}, bucket, ordered, Extents((3, 8), (5, 8)), None, "ieee", Options())

    first = choose(14, 3, 13, 3)
    assert len(searches[0]) > 4
    again = choose(15, 3, 13, 3)
    assert searches[1] == list(dict.fromkeys((default, *list(TIMES)[:2])))
    assert again.schedule == first.schedule
    assert again.reason.endswith(", the best of half or twice as many rows")
    # It is remembered as what it is: the next size is not guessed from a guess.
    (written,) = [
        entry
        for path in schedule_store._folder().glob("*.json")
        if "nearby" in (entry := json.loads(path.read_text()))["value"]
    ]
    assert written["key"]["bucket"] == [15, 3, 13, 3]
    choose(16, 3, 13, 3)
    assert searches[2] == searches[0]

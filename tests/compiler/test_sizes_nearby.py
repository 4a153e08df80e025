"""Other sizes: what was measured for them says what is worth measuring."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import insum_nn
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.lang.bind import bind
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.schedule import tune
from insum_nn.compiler.schedule.form import Form, make_form
from insum_nn.compiler.tuning import database
from tests.compiler.test_schedule_store import FACTS, TENSORS, TEXT

KEY = {"kind": "schedule", "statement": "imagined", "static": (("c", 4),), "bucket": [14, 5]}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("INSUM_NN_SCHEDULES", raising=False)
    database.unload()
    yield
    database.unload()


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
    database.write(KEY, {"n": 1})
    entry = database.near(asked)
    assert (entry is not None) == found
    if entry is not None:
        assert entry.value == {"n": 1}


def test_small_sizes_are_never_nearby():
    database.write(key(9, 5), {})
    assert database.near(key(10, 5)) is None


def test_the_nearest_is_found():
    database.write(key(12, 12), {"n": "both"})
    assert database.near(key(13, 13)) is not None
    database.write(key(12, 13), {"n": "one"})
    entry = database.near(key(13, 13))
    assert entry is not None
    assert entry.value == {"n": "one"}


def test_what_was_measured_in_part_tells_nothing():
    database.write(KEY, {"nearby": True})
    assert database.near(key(13, 5)) is None


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (key(14, 5, precision="tf32"), True),
        (key(15, 5, precision="tf32"), False),
        (key(14, 5, precision="ieee"), False),
        (key(14, 5), False),
    ],
)
def test_products_in_tf32_take_the_schedule_of_full_precision(asked: dict[str, Any], found: bool):
    database.write(key(14, 5, precision="tf32x3"), {"n": 1})
    entry = database.in_full_precision(asked)
    assert (entry is not None) == found


def test_full_precision_takes_no_schedule_of_tf32():
    database.write(key(14, 5, precision="tf32"), {"n": 1})
    assert database.in_full_precision(key(14, 5, precision="tf32x3")) is None


def test_a_key_without_sizes():
    database.write({"kind": "other"}, {})
    database.write({"kind": "schedule", "bucket": "many"}, {})
    database.write({"kind": "schedule", "bucket": [1.5]}, {})
    assert database.near({"kind": "other"}) is None
    assert database.near({"kind": "schedule", "bucket": [14]}) is None


def test_files_that_were_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    database.write(KEY, {"n": 1})
    insum_nn.schedules.export(tmp_path / "some.json")
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "empty"))
    assert database.near(key(13, 5)) is None
    insum_nn.schedules.load(tmp_path / "some.json")
    assert database.near(key(13, 5)) is not None


def test_a_torn_file_is_named_once(tmp_path: Path):
    folder = tmp_path / "cache" / "schedules"
    folder.mkdir(parents=True)
    (folder / "torn.json").write_text("{")
    with pytest.warns(UserWarning, match=r"torn.json is no file of schedules"):
        assert database.near(KEY) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert database.near(KEY) is None


# Schedules.


@pytest.fixture
def tunings(monkeypatch: pytest.MonkeyPatch) -> list[list[Schedule]]:
    """What is measured, by a clock for which the first is the fastest."""
    made: list[list[Schedule]] = []

    def measure(form: Form, trial: object, schedules: list[Schedule]) -> list[tuple[Schedule, float]]:
        made.append(list(schedules))
        return [(schedule, float(us)) for us, schedule in enumerate(schedules, start=1)]

    monkeypatch.setattr(tune, "_measure", measure)
    monkeypatch.setattr(tune, "worth_selecting", lambda extents: True)
    return made


def form_of(columns: int = 8) -> Form:
    tensors = {**TENSORS, "B": torch.ones(4, columns)}
    bound = bind(parse(TEXT), tensors, None, facts=FACTS)
    return make_form(bound, {"p": 3, "n": columns}, (5, columns), {}, deterministic=False)

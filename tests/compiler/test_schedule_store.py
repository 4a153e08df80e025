"""Remembered measurements: keys that are the same everywhere, files that are torn, one process that measures."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import insum_nn
import insum_nn.schedules
from insum_nn import IndexFacts, Options
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.kernels.background import Compiled, compile_all
from insum_nn.compiler.kernels.machine_code import KernelCode
from insum_nn.compiler.lang.bind import Extents, bind
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.schedule import tune
from insum_nn.compiler.schedule.candidates import candidates
from insum_nn.compiler.schedule.defaults import default_schedule
from insum_nn.compiler.schedule.device import H200
from insum_nn.compiler.schedule.form import Form, make_form
from insum_nn.compiler.schedule.tune import choose_schedule
from insum_nn.compiler.tuning import database, progress
from insum_nn.compiler.tuning import select as selecting
from insum_nn.compiler.tuning.cache_folder import cache_folder
from insum_nn.compiler.tuning.select import Selected
from tests.compiler.test_prepare import KERNEL, code
from tests.ranks import CONTEXT, new_process

ROOT = Path(__file__).parents[2]
TEXT = "C[Row[p],n] += Val[p] * B[Col[p],n]"
FACTS = {"Row": IndexFacts(sorted=True, masked=False, proven=True), "Col": IndexFacts(masked=False, proven=True)}
TENSORS = {
    "Row": torch.tensor([0, 0, 2]),
    "Col": torch.tensor([1, 2, 0]),
    "Val": torch.ones(3),
    "B": torch.ones(4, 8),
}
EXTENTS = Extents((3, 8), (5, 8))
FASTEST, SECOND = Schedule(n=8, k=4, warps=2), Schedule(n=8, k=2)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("INSUM_NN_SCHEDULES", raising=False)
    monkeypatch.setattr(tune, "worth_selecting", lambda extents: True)
    yield
    database.unload()


def choose(
    expression: str = TEXT, bucket: tuple[int, ...] = (2, 3, 3, 3), options: Options | None = None
) -> Selected[Schedule]:
    bound = bind(parse(expression), TENSORS, None, facts=FACTS)
    form = make_form(bound, {"p": 3, "n": 8}, (5, 8), {}, deterministic=False)
    ordered = [TENSORS[name] for name in bound.layout.tensors]
    return choose_schedule(form, {}, bucket, ordered, EXTENTS, None, "ieee", options or Options(tune=True))


def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A measurement that says it was made."""
    made: list[str] = []

    def measure(form: Form, trial: object, schedules: list[Schedule]) -> list[tuple[Schedule, float]]:
        made.append(str(form.bound.statement))
        return [(FASTEST, 10.0), (SECOND, 20.0), (Schedule(), float("inf"))]

    monkeypatch.setattr(tune, "_measure", measure)
    return made


def test_the_fastest_is_taken_and_remembered(monkeypatch: pytest.MonkeyPatch):
    made = measured(monkeypatch)
    first = choose()
    assert (first.candidate, first.reason) == (FASTEST, "the fastest of 3 measured")
    again = choose()
    assert again.candidate == FASTEST
    assert again.reason.startswith("stored in ")
    # The times are written too; what did not run is not.
    (file,) = (cache_folder() / "schedules").glob("*")
    times = json.loads(file.read_text())["value"]["measured"]
    assert [each["microseconds"] for each in times] == [10.0, 20.0]
    assert len(made) == 1
    choose(bucket=(3, 3, 3, 3))
    assert len(made) == 2


def test_nothing_is_measured_unasked(monkeypatch: pytest.MonkeyPatch):
    made = measured(monkeypatch)
    assert choose(options=Options()).reason == "the default"
    assert made == []
    choose()
    # What is stored is read all the same.
    chosen = choose(options=Options())
    assert chosen.candidate == FASTEST
    assert chosen.reason.startswith("stored in ")
    assert len(made) == 1


def test_where_a_choice_does_not_matter_nothing_is_looked_up(monkeypatch: pytest.MonkeyPatch):
    made = measured(monkeypatch)
    choose()
    monkeypatch.setattr(tune, "worth_selecting", lambda extents: False)
    chosen = choose()
    assert chosen.candidate != FASTEST
    assert chosen.reason == "the default"
    assert len(made) == 1


def test_nothing_ran(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tune, "_measure", lambda *_: [(FASTEST, float("inf"))])
    assert choose().reason == "the default; no candidate ran"
    assert not list((cache_folder() / "schedules").glob("*"))


class _Timed:
    """A trial without a kernel of its own, as fast as its place among those that were made says."""

    def __init__(self, made: list[_Timed], schedule: Schedule, times: Sequence[float]) -> None:
        self.schedule, self.own, self.us = schedule, code(f"candidate_{len(made)}", KERNEL), times[len(made)]
        made.append(self)

    def codes(self) -> list[KernelCode]:
        return [self.own]

    def time(self, repeat: int) -> float:
        return self.us


def measure_timed(monkeypatch: pytest.MonkeyPatch, times: Sequence[float], missing: int) -> list[tuple[Any, float]]:
    """Tuning itself, where the machine code of one candidate is missing."""
    bound = bind(parse(TEXT), TENSORS, None, facts=FACTS)
    form = make_form(bound, {"p": 3, "n": 8}, (5, 8), {}, deterministic=False)
    made: list[_Timed] = []

    def compile_all(codes: Sequence[KernelCode], workers: int, seconds: float) -> list[Compiled]:
        assert len(codes) == len(made)
        return [Compiled(each, False, "no code" * (n == missing)) for n, each in enumerate(codes)]

    monkeypatch.setattr(tune, "compile_all", compile_all)
    trial: Any = lambda schedule: _Timed(made, schedule, times)  # noqa: E731
    schedules = [*candidates(form)][: len(times)]
    return [(schedules.index(schedule), us) for schedule, us in tune._measure(form, trial, schedules)]


def test_times_of_candidates(monkeypatch: pytest.MonkeyPatch):
    """The fastest comes first; one without machine code last, and one that does not run."""
    inf = float("inf")
    found = measure_timed(monkeypatch, (1.0, 4.0, 2.0, 3.0, 5.0), 0)
    assert found == [(2, 2.0), (3, 3.0), (1, 4.0), (4, 5.0), (0, inf)]
    assert measure_timed(monkeypatch, (inf, 4.0), 1) == [(0, inf), (1, inf)]


def test_no_candidate_begins_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    texts = [KERNEL.replace("at.to(tl.float32)", f"at.to(tl.float32) + {n}") for n in range(3)]
    codes = [code(f"late_{n}", text) for n, text in enumerate(texts)]
    found = [not each.error for each in compile_all(codes, 2, 0.0)]
    assert found == [True, True, False]


# Keys.


def test_a_key_tells_apart_what_matters():
    bound = bind(parse(TEXT), TENSORS, None, facts=FACTS)
    device = torch.device("cpu")

    def key(changed: dict[str, object], bucket: tuple[int, ...] = (1, 2)) -> str:
        return json.dumps(database.key_of("schedule", replace(bound, **changed), {}, bucket, device))

    keys = [
        key({}),
        key({}, (1, 3)),
        key({"dtype": torch.float16}),
        key({"has_initial": True}),
        key({"drop_outside": True}),
        key({"static": (("n", 8),)}),
        key({"index_dtypes": (torch.int32,) * 4}),
        key({"facts": (IndexFacts(),) * 4}),
    ]
    assert len(set(keys)) == len(keys)
    assert key({}) == keys[0]


def test_buckets():
    def bucket(extent: int) -> tuple[int, ...]:
        return database.size_bucket(Extents((extent,), ()))

    assert [bucket(e) for e in (0, 1, 2, 3, 4, 5, 8, 9)] == [(0,), (0,), (1,), (2,), (2,), (3,), (3,), (4,)]


SCRIPT = """
import sys, json
import torch
from insum_nn import IndexFacts
from insum_nn.compiler.tuning import database
from insum_nn.compiler.lang.bind import bind
from insum_nn.compiler.lang.parser import parse
from insum_nn.facts import StaticTable
tensors = {"Row": torch.tensor([0, 1]), "Val": torch.ones(2)}
bound = bind(parse("C[Row[p]] += Val[p]"), tensors, None, facts={"Row": IndexFacts(unique=True, masked=False)})
key = database.key_of("schedule", bound, {"Row": StaticTable.of(tensors["Row"])}, (1,), torch.device("cpu"))
print(database._own(key).name)
"""


def test_keys_are_the_same_in_every_process(capsys: pytest.CaptureFixture[str]):
    """In this one too, whose seed of hashes is another."""
    exec(SCRIPT, {})
    command, environment = [sys.executable, "-W", "ignore", "-c", SCRIPT], {**os.environ, "PYTHONHASHSEED": "1"}
    assert capsys.readouterr().out == subprocess.check_output(command, env=environment, text=True, cwd=ROOT)


# Files.


def test_export_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = measured(monkeypatch)
    choose()
    choose(bucket=(9, 9, 9, 9))
    file = tmp_path / "shipped.json"
    assert insum_nn.schedules.export(file) == 2
    entry = json.loads(file.read_text())["entries"][0]
    assert entry["key"]["statement"] == "out[x0[a],b] += t0[a] * t1[x1[a],b]"
    assert "cpu" in entry["key"]["device"]
    assert entry["versions"]["torch"] == torch.__version__
    # Elsewhere.
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "elsewhere"))
    choose(bucket=(1, 1, 1, 1))
    assert len(made) == 3
    assert insum_nn.schedules.load(file) == 2
    found = choose()
    assert found.candidate == FASTEST
    assert str(file) in found.reason
    assert len(made) == 3


def test_files_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = measured(monkeypatch)
    choose()
    file = tmp_path / "shipped.json"
    insum_nn.schedules.export(file)
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("INSUM_NN_SCHEDULES", os.pathsep.join([str(file), ""]))
    assert choose().candidate == FASTEST
    assert len(made) == 1


def test_the_user_s_own_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measured(monkeypatch)
    choose()
    file = tmp_path / "shipped.json"
    insum_nn.schedules.export(file)
    text = file.read_text().replace('"warps": 2', '"warps": 8')
    assert text != file.read_text()
    file.write_text(text)
    insum_nn.schedules.load(file)
    assert choose().candidate.warps == 2
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert choose().candidate.warps == 8


def test_a_file_that_changes_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measured(monkeypatch)
    choose()
    file = tmp_path / "shipped.json"
    insum_nn.schedules.export(file)
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("INSUM_NN_SCHEDULES", str(file))
    for warps in (2, 8):
        file.write_text(file.read_text().replace('"warps": 2', f'"warps": {warps}'))
        # Clocks of some file systems are coarser than this test.
        os.utime(file, ns=(warps, warps))
        assert choose().candidate.warps == warps


@pytest.mark.parametrize("fits", [True, False])
def test_other_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool):
    """A schedule measured with another Triton is tried once: there may be no room for it here."""
    made = measured(monkeypatch)
    choose()
    file = tmp_path / "shipped.json"
    insum_nn.schedules.export(file)
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(database, "versions", lambda: {"torch": "9.9", "triton": "9.9"})
    insum_nn.schedules.load(file)

    class Trial:
        def __init__(self, *rest: object) -> None:
            pass

        def runs(self) -> bool:
            return fits

    monkeypatch.setattr(tune, "_Trial", Trial)
    found = choose()
    assert found.candidate == FASTEST
    assert len(made) == (1 if fits else 2)
    assert ("measured with torch" in found.reason) is fits
    # The user's own measurements are made anew with new versions.
    if not fits:
        assert choose().reason.startswith("stored in ")
        assert len(made) == 2


def test_on_a_device_that_was_never_measured_schedules_are_tried_in_turn(monkeypatch: pytest.MonkeyPatch):
    """What a program needs is an estimate: where it is wrong, the next schedule is taken."""
    tried: list[Schedule] = []

    class Trial:
        def __init__(self, form: object, schedule: Schedule, *rest: object) -> None:
            tried.append(schedule)

        def runs(self) -> bool:
            return len(tried) == 3

    monkeypatch.setattr(tune, "_Trial", Trial)
    monkeypatch.setattr(tune, "device_of", lambda device: H200._replace(architecture=(8, 0)))
    found = choose(options=Options())
    assert found.candidate == tried[2] != tried[0]
    assert found.reason.startswith("the next that the device has room for; ")
    assert len(set(tried)) == 3
    # Where none of the first few runs, the error names the first.
    tried.clear()
    monkeypatch.setattr(Trial, "runs", lambda self: False)
    assert choose(options=Options()).candidate == tried[0]
    assert len(tried) == 4
    # On one that was, the default runs.
    tried.clear()
    monkeypatch.setattr(tune, "device_of", lambda device: H200)
    choose(options=Options())
    assert tried == []


def test_of_several_versions_the_current_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = database.versions()
    key = database.key_of("schedule", bind(parse(TEXT), TENSORS, None), {}, (1,), torch.device("cpu"))
    database.write(key, {"number": 1})
    monkeypatch.setattr(database, "versions", lambda: {**real, "torch": "1.0"})
    database.write(key, {"number": 2})
    file = tmp_path / "all.json"
    assert insum_nn.schedules.export(file) == 1
    assert json.loads(file.read_text())["entries"][0]["value"] == {"number": 2}
    monkeypatch.undo()
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "cache"))
    insum_nn.schedules.export(file)
    assert json.loads(file.read_text())["entries"][0]["value"] == {"number": 1}


@pytest.mark.parametrize(
    "text", ['{"key": {', "[]", "3", '{"entries": [3]}', '{"entries": [{"key": 1, "value": {}, "versions": {}}]}', "\0"]
)
def test_a_torn_file_is_named_and_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str):
    made = measured(monkeypatch)
    choose()
    (own,) = (cache_folder() / "schedules").glob("*.json")
    own.write_text(text)
    with pytest.warns(UserWarning, match=own.name):
        assert choose().candidate == FASTEST
    assert len(made) == 2
    file = tmp_path / "shipped.json"
    file.write_text(text)
    with pytest.warns(UserWarning, match="shipped.json"):
        assert insum_nn.schedules.load(file) == 0
    assert choose().candidate == FASTEST


@pytest.mark.parametrize(
    "change",
    [
        {"m": 3},
        {"m": 0},
        {"warps": "4"},
        {"dot": 1},
        {"stages": True},
        {"unheard": 1},
    ],
)
def test_an_entry_that_is_no_schedule_is_ignored(monkeypatch: pytest.MonkeyPatch, change: dict[str, object]):
    made = measured(monkeypatch)
    choose()
    (own,) = (cache_folder() / "schedules").glob("*.json")
    data = json.loads(own.read_text())
    data["value"]["schedule"].update(change)
    own.write_text(json.dumps(data))
    with pytest.warns(UserWarning, match=own.name):
        assert choose().candidate == FASTEST
    assert len(made) == 2


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        insum_nn.schedules.load(tmp_path / "none.json")


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "file"))
    made = measured(monkeypatch)
    assert choose().candidate == FASTEST
    assert choose().candidate == FASTEST
    assert len(made) == 2


def test_packaged_files_are_whole():
    (file,) = database._packaged()
    entries = database._entries(file)
    assert len(entries) > 100
    for entry in entries.values():
        assert entry.key["format"] == database._FORMAT, "measured for schedules of another meaning"
        assert entry.key["device"] == "cuda 9.0, 132 multiprocessors"
        if entry.key["kind"] == "schedule":
            found = Schedule.from_json(entry.value["schedule"])
            assert found == Schedule.from_json(entry.value["measured"][0]["schedule"])


# One measures, the others read.


def racer(name: str, folder: Path, sleep: float, waits: float, out: Any) -> None:
    def measure(*_: object) -> list[tuple[Schedule, float]]:
        with (folder / "made").open("a") as file:
            file.write("x")
        (folder / "begun").touch()
        time.sleep(sleep)
        return [(FASTEST, 10.0)]

    changed: Any = tune
    changed.worth_selecting, changed._measure, selecting.WAIT = lambda extents: True, measure, waits
    (folder / f"ready{name}").touch()
    while len(list(folder.glob("ready*"))) < 2:
        time.sleep(0.01)
    while name == "b" and not (folder / "begun").exists():
        time.sleep(0.01)
    out.put((name, str(choose())))


def race(folder: Path, sleep: float, waits: float) -> list[str]:
    (folder / "made").write_text("")
    out = CONTEXT.SimpleQueue()
    processes = [new_process(racer, name, folder, sleep, waits, out) for name in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    return [said for _, said in sorted(out.get() for _ in processes)]


def test_one_of_two_processes_measures(tmp_path: Path):
    first, second = race(tmp_path, 1.0, 30.0)
    assert (tmp_path / "made").read_text() == "x"
    assert "the fastest of 1 measured" in first
    assert "stored in " in second
    assert str(FASTEST.to_json()["warps"]) in second


def test_the_wait_is_bounded(tmp_path: Path):
    _, second = race(tmp_path, 3.0, 0.2)
    assert (tmp_path / "made").read_text() == "x"
    assert "another process measures" in second


def test_a_process_that_died_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = measured(monkeypatch)
    choose()
    (own,) = (cache_folder() / "schedules").glob("*.json")
    own.unlink()
    # Its lock file stays behind.
    assert list((tmp_path / "cache" / "locks").iterdir())
    assert choose().candidate == FASTEST
    assert len(made) == 2


# Progress.


class Terminal:
    def __init__(self, tty: bool) -> None:
        self.tty = tty
        self.text = ""

    def isatty(self) -> bool:
        return self.tty

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_progress_is_a_bar_that_disappears(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    pytest.importorskip("tqdm")
    screen = Terminal(tty=True)
    monkeypatch.setattr(sys, "stderr", screen)
    with caplog.at_level(logging.INFO, logger="insum_nn.tuning"), progress.progress("tuning C[i]  += A[i]", 2) as step:
        assert "tuning C[i] += A[i]:   0%" in screen.text
        step(), step()
    assert screen.text.split("\r")[-2].strip() == ""
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert "2 of 2" in caplog.text


@pytest.mark.parametrize(("tty", "installed"), [(False, True), (True, False)])
def test_only_the_log_tells_without_a_terminal_or_tqdm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tty: bool, installed: bool
):
    screen = Terminal(tty=tty)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "find_spec", lambda name: object() if installed else None)
    with caplog.at_level(logging.INFO, logger="insum_nn.tuning"), progress.progress("tuning", 2) as step:
        step()
    assert screen.text == ""
    assert "tuning: 1 of 2 in" in caplog.text


def test_the_default_is_among_what_is_never_measured():
    bound = bind(parse(TEXT), TENSORS, None, facts=FACTS)
    form = make_form(bound, {"p": 3, "n": 8}, (5, 8), {}, deterministic=False)
    assert choose(options=Options(tune=False)).candidate == default_schedule(form)

"""The fit of the cost model: it runs without a GPU, lowers its loss, and judges what is shipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import fit_cost_model
from benchmarks.fit_cost_model import Problem, fit, judge, loss, main
from benchmarks.measured_schedules import of_shipped
from insum_nn.compiler.schedule import timing
from insum_nn.compiler.schedule.cost_model import Rates
from insum_nn.compiler.schedule.space import Schedule


def test_a_tiny_fit_prints_rates_and_draws(tmp_path: Path):
    said: list[str] = []
    found = main(["--tiny", "--plot", str(tmp_path / "fit.png")], said.append)
    assert said[0].startswith("Rates(launch=")
    assert any("default: 1." in line for line in said)
    assert found.candidates > 1
    assert (tmp_path / "fit.png").stat().st_size > 1000


def test_a_fit_finds_what_was_off():
    problems = [Problem.of(each) for each, _ in zip(of_shipped({}, None), range(4), strict=False)]
    off = Rates(latency=0.9)
    fitted = fit(problems, off, 1)
    assert loss(problems, fitted) < loss(problems, off)
    assert fitted.single == off.single, "too little is measured of it"


def test_without_its_entry_the_default_is_hardly_worse_than_what_was_measured():
    """Over all shipped entries; a change of the model or of the defaults has to keep this."""
    found = judge([Problem.of(each) for each in of_shipped({}, None)], Rates())
    assert found.default[0] < 1.15
    assert found.default[1] < 2.0
    assert found.rank < 0.4 * found.candidates


class Run:
    """A run of a schedule, which does nothing."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def __call__(self) -> None:
        pass


def test_a_grid_is_measured_by_an_invented_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fit_cost_model, "generated_of", lambda *_: (None, Run))
    monkeypatch.setattr(timing, "device_time", lambda run, repeat: float(run.schedule.warps * run.schedule.k))
    file = tmp_path / "grid.json"
    count = fit_cost_model.measure(file, seconds=60.0, tiny=True, device=torch.device("cpu"))
    (record,) = json.loads(file.read_text())
    assert count == len(record["times"]) > 4
    (measured,) = fit_cost_model.of_grid(file)
    assert measured.exact
    assert list(measured.times.values()) == sorted(measured.times.values())
    assert measured.form.rows == record["rows"]
    assert measured.form.longest == record["longest"]
    # No time is left.
    assert fit_cost_model.measure(file, seconds=0.0, tiny=True, device=torch.device("cpu")) == 0

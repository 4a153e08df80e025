"""First steps as benchmarks: two processes a provider, what they count, and what is said of those that fail."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import first_step
from benchmarks.first_step import FirstStep, OneStep
from benchmarks.records import this_machine
from benchmarks.registry import Problem, Setting, Work, load
from insum_nn.compiler.kernels.c_compiler import find_compiler
from insum_nn.compiler.tuning import timing

CPU = torch.device("cpu")
GCN = "network/network=gcn_2k/what=step"


def test_a_cold_and_a_warm_process(tmp_path: Path):
    out = tmp_path / "folder" / "first.json"
    words = ["gcn_2k", "--size", "tiny", "--device", "cpu", "--providers", "^insum_nn$", "--out", str(out)]
    assert first_step.main([*words, "--commit", "a_commit"]) == 0
    records = json.loads(out.read_text(encoding="utf-8"))
    assert [(r["case"], r["provider"], r["process"]) for r in records] == [
        (GCN, "insum_nn", "cold"),
        (GCN, "insum_nn", "warm"),
    ]
    for record in records:
        assert list(record) == list(FirstStep.__annotations__)
        assert (record["gate"], record["commit"], record["torch"]) == ("measured", "a_commit", torch.__version__)
        assert all(record[name] > 0 for name in ("torch_s", "import_s", "build_s"))
        on_cpu = [key for key in OneStep.__annotations__ if key != "peak_mib"]
        assert [list(step) for step in record["steps"]] == [on_cpu] * first_step.STEPS
        assert all(0 < step["seconds"] < 1 and step["measured"] == 0 for step in record["steps"])
        # Library calls serve while C functions are compiled; the second process finds these.
        compiles = record["process"] == "cold" and find_compiler() is not None
        assert (sum(step["compiled"] for step in record["steps"]) > 0) == compiles
        # Functions may be compiled before their step ends.
        assert compiles or sum(step["c_compiler_s"] for step in record["steps"]) < 0.01


def test_steps_count_what_they_compile_and_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def plain(*_: object) -> float:
        return 1.0

    monkeypatch.setattr(timing, "device_time", plain)
    calls: list[int] = []

    def forward() -> Tensor:
        calls.append(len(calls))
        if calls[-1] == 1:
            timing.device_time(lambda: None, 1)
        if calls[-1] < 2:
            (tmp_path / f"kernel{calls[-1]}").mkdir()
            for end in ("cubin", "ptx", "json"):
                (tmp_path / f"kernel{calls[-1]}" / f"kernel.{end}").touch()
        return leaf * 2

    leaf = torch.ones(3, requires_grad=True)
    problem = Problem(providers={"one": lambda: Work(forward, (leaf,))}, oracle=lambda: Work(forward), tolerance=0.0)
    built, steps = first_step.take(problem, "one", "fwdbwd", CPU)
    assert built >= 0
    assert [(step["compiled"], step["measured"]) for step in steps] == [(1, 0), (1, 1), (0, 0)]
    assert calls == [0, 1, 2]
    assert timing.device_time is plain, "nothing is counted afterwards"


def test_what_fails_has_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["gcn_2k", "--size", "tiny", "--device", "cpu", "--providers", "^insum_nn$", "--out", str(tmp_path / "x")]
    assert first_step.main([*words, "--budget", "0"]) == 1
    assert [r["gate"] for r in json.loads((tmp_path / "x").read_text())] == ["not run: the budget was spent"] * 2
    assert first_step.main([*words, "--limit", "0.2"]) == 1
    assert [r["gate"] for r in json.loads((tmp_path / "x").read_text())] == ["error: no result after 0 s"] * 2
    assert "no result" in capsys.readouterr().out


def test_a_process_that_is_killed_keeps_its_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """And the traceback of what it was doing is shown."""
    steps = [dict.fromkeys(OneStep.__annotations__, 1)]
    said = {"gate": "error: no result", "torch_s": 1.0, "import_s": 1.0, "build_s": 1.0, "steps": steps}
    script = tmp_path / "child.py"
    script.write_text(f"import time\nprint('answer: ' + {json.dumps(json.dumps(said))}, flush=True)\ntime.sleep(60)")
    # Before the patch, since it asks git, in a process.
    machine = this_machine(CPU, "a_commit")
    plain = first_step.subprocess.Popen
    monkeypatch.setattr(first_step.subprocess, "Popen", lambda _, **more: plain([sys.executable, script], **more))
    asked = first_step._Asked(GCN, "insum_nn", "fwd")
    cold, warm = first_step.measure(asked, machine, "cpu", "tiny", None, 2.0)
    assert cold["gate"] == warm["gate"] == "error: no result after 2 s"
    assert cold["steps"] == steps
    assert warm["steps"] is None
    assert "1 steps: first" in first_step._show(cold)


def test_a_provider_that_cannot_run_here_is_unavailable(capsys: pytest.CaptureFixture[str]):
    question = {"case": "network/network=spunet_fp32/what=step", "provider": "spconv", "mode": "fwd", "device": "cpu"}
    more = {"size": "tiny", "root": None, "spawned": time.time(), "limit": 60.0}
    assert first_step.main(["--answer", json.dumps({**question, **more})]) == 0
    (answer,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("answer: "))
    assert json.loads(answer.removeprefix("answer: ")) == {"gate": "unavailable: needs CUDA"}


def test_ours_come_first_and_layers_are_cases(capsys: pytest.CaptureFixture[str]):
    assert first_step.main(["--list", "--device", "cuda"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    ours = [provider == "insum_nn" for _, _, provider in lines]
    assert ours == sorted(ours, reverse=True)
    registry = load()
    for name, mode in first_step.LAYERS:
        assert [name, mode, "insum_nn"] in lines
        assert mode in registry[name].problem(Setting(CPU, "tiny")).modes

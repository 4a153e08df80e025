"""The benchmark harness: the registry, the comparison with the oracle, records, tables, plots; and every case."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import importlib
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import (
    archive,
    clouds,
    gate,
    graphs,
    irreps,
    plot,
    records,
    registry,
    report,
    run,
    sentences,
    supervise,
    tables,
)
from benchmarks.registry import Case, Floor, Problem, Registry, Setting, Unavailable, Work
from tests.source_tree import ROOT, sources

CPU = torch.device("cpu")
CASES = registry.load()


def families() -> list[Case]:
    """The first and the last point of each family's grid: enough to see that its code still runs."""
    by_family: dict[str, list[Case]] = {}
    for case in CASES:
        by_family.setdefault(case.family, []).append(case)
    ends = [name for cases in by_family.values() for name in (cases[0].name, cases[-1].name)]
    return [CASES[name] for name in dict.fromkeys(ends)]


@functools.cache
def tiny(name: str) -> Problem:
    """A case's problem at the tiny size: some of the baselines write the code of their products when it is built."""
    return CASES[name].problem(Setting(CPU, "tiny"))


# A small problem whose providers are right, wrong, missing and broken -------------------------------------------------


def small_problem(setting: Setting) -> Problem:
    """A dense product, solved in several ways."""
    generator = setting.generator()
    a = torch.randn(5, 7, generator=generator, device=setting.device)
    b = torch.randn(7, 3, generator=generator, device=setting.device)

    def product(dtype: torch.dtype, scale: float = 1.0) -> Work:
        x, y = (t.to(dtype).requires_grad_() for t in (a, b))
        return Work(lambda: scale * (x @ y), (x, y))

    def transposed() -> Work:
        x, y = a.t().clone().requires_grad_(), b.clone().requires_grad_()
        return Work(lambda: x.t() @ y, (x, y), lambda g: (g[0].t(), g[1]))

    def wrong_gradient() -> Work:
        x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
        return Work(lambda: x @ y.detach() + 0 * (x @ y), (x, y))

    def nan() -> Work:
        return Work(lambda: (a @ b).fill_(math.nan))

    def missing() -> Work:
        importlib.import_module("a_package_that_does_not_exist")
        raise AssertionError("unreachable")

    def elsewhere() -> Work:
        raise Unavailable("needs CUDA")

    def broken() -> Work:
        raise RuntimeError("first line\nsecond line")

    return Problem(
        providers={
            "insum_nn": transposed,
            "insum_nn/half": lambda: product(torch.bfloat16),
            "torch": lambda: product(torch.float32),
            "wrong": lambda: product(torch.float32, 1.01),
            "wrong_gradient": wrong_gradient,
            "nan": nan,
            "missing": missing,
            "elsewhere": elsewhere,
            "broken": broken,
        },
        oracle=lambda: product(torch.float64),
        tolerance=1e-5,
        tolerances={"insum_nn/half": 2e-2},
        floors={"fwd": Floor(bytes=4 * (35 + 21 + 15), flops=2 * 5 * 7 * 3)},
        modes=("fwd", "bwd", "fwdbwd"),
    )


@pytest.fixture(scope="module")
def small() -> Registry:
    own = Registry()
    own.case("product", n=(1, 2))(lambda setting, *, n: small_problem(setting))
    return own


@pytest.fixture(scope="module")
def results(small: Registry, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("results") / "deep" / "results.json"
    code = run.main(
        ["product", "--device", "cpu", "--out", str(path), "--warmup-ms", "1", "--rep-ms", "2"], registry=small
    )
    assert code == 0
    return path


def test_every_provider_has_a_record_with_exactly_the_keys(results: Path):
    found = json.loads(results.read_text())
    assert len(found) == 2 * 3 * 9
    assert all(tuple(r) == records.RECORD for r in found)
    assert records.RECORD == (
        *("gpu", "driver", "cores", "torch", "triton", "commit", "dirty"),
        *(
            "schema",
            "case",
            "provider",
            "mode",
            "ms",
            "runs",
            "replay",
            "busy",
            "repeats",
            "compile_s",
            "peak_bytes",
            "max_rel_err",
        ),
        *("gate", "floor", "utc"),
    )


@pytest.mark.parametrize(
    ("provider", "mode", "outcome"),
    [
        ("insum_nn", "fwd", "passed"),
        ("insum_nn", "bwd", "passed"),
        ("insum_nn", "fwdbwd", "passed"),
        ("insum_nn/half", "fwd", "passed"),
        ("torch", "bwd", "passed"),
        ("wrong", "fwd", "wrong: error 0.01"),
        ("wrong_gradient", "fwd", "passed"),
        ("wrong_gradient", "bwd", "wrong: error 1 >"),
        ("nan", "fwd", "wrong: error inf"),
        ("nan", "bwd", "unavailable: has no backward"),
        ("missing", "fwd", "unavailable: No module named 'a_package_that_does_not_exist'"),
        ("elsewhere", "fwd", "unavailable: needs CUDA"),
        ("broken", "fwd", "error: RuntimeError: first line"),
    ],
)
def test_outcomes(results: Path, provider: str, mode: str, outcome: str):
    record = next(r for r in json.loads(results.read_text()) if r["provider"] == provider and r["mode"] == mode)
    assert record["gate"].startswith(outcome)
    if outcome == "passed":
        ms = record["ms"]
        assert 0 < ms["p20"] <= ms["p50"] <= ms["p80"]
        assert record["repeats"] >= 5
        assert record["compile_s"] > 0
        assert record["max_rel_err"] <= 2e-2
    else:
        assert record["ms"] is None
        assert record["repeats"] == 0


def test_calls_are_profiled_when_all_has_been_timed(
    small: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path, profiled = tmp_path / "results.json", list[Any]()

    def busy(call: Any) -> records.Busy:
        # The file has all times.
        profiled.append(len(json.loads(path.read_text())))
        if len(profiled) == 2:
            raise RuntimeError("no profiler")
        call()
        return records.Busy(ms=0.25, launches=3)

    monkeypatch.setattr(run, "_busy", busy)
    monkeypatch.setattr(run, "_profiles", lambda options, device: options.busy)
    words = ["product/n=1", "--busy", "--device", "cpu", "--out", str(path), "--warmup-ms", "1", "--rep-ms", "2"]
    assert run.main(words, registry=small) == 0
    found = json.loads(path.read_text())
    timed = [r for r in found if r["ms"] is not None]
    assert profiled == [len(found)] * len(timed)
    assert [r["busy"] for r in found if r["ms"] is None] == [None] * (len(found) - len(timed))
    assert [r["busy"] is None for r in timed] == [n == 1 for n in range(len(timed))]
    assert "not profiled: " in capsys.readouterr().err


@pytest.mark.slow
def test_on_a_gpu(gpu: torch.device, small: Registry, tmp_path: Path):
    path = tmp_path / "results.json"
    assert run.main(["product/n=1", "--device", str(gpu), "--out", str(path), "--rep-ms", "20"], registry=small) == 0
    passed = [r for r in json.loads(path.read_text()) if r["gate"] == "passed"]
    assert {r["provider"] for r in passed} == {"insum_nn", "insum_nn/half", "torch", "wrong_gradient"}
    for record in passed:
        assert record["gpu"] == torch.cuda.get_device_name(gpu)
        assert record["driver"]
        assert record["repeats"] > 1
        assert record["peak_bytes"] > 0
        assert 0 < record["ms"]["p20"] <= record["ms"]["p50"] <= record["ms"]["p80"] < 10


@pytest.mark.slow
def test_cuda_graph_times_on_a_gpu(gpu: torch.device, small: Registry, tmp_path: Path):
    def waits() -> Work:
        x = torch.randn(3, 5, device=gpu)
        return Work(lambda: x * x.sum().item(), output=lambda _: torch.zeros(5, 3, device=gpu))

    problem = small_problem(Setting(gpu))
    wanted = gate.reference(problem, ("fwd", "fwdbwd"))
    times = {"warmup_ms": 5, "rep_ms": 20}
    for mode in ("fwd", "fwdbwd"):
        found = run.measure(problem, "insum_nn", mode, wanted, gpu, replay=True, **times)
        assert found.ms
        assert found.replay
        assert found.replay["gate"] == "passed"
        assert found.replay["ms"]
        # All kernels are launched at once, without the host between them.
        assert 0 < found.replay["ms"]["p20"] < 1.5 * found.ms["p50"]
    assert run.measure(problem, "insum_nn", "bwd", wanted, gpu, replay=True, **times).replay is None
    # A call that waits for the device keeps its time, and the device remains usable.
    patient = dataclasses.replace(problem, providers={"waits": waits}, tolerance=2.0)
    found = run.measure(patient, "waits", "fwd", wanted, gpu, replay=True, **times)
    assert found.ms
    assert found.replay
    assert found.replay["gate"].startswith("error: ")
    assert run.measure(problem, "torch", "fwd", wanted, gpu, replay=True, **times).replay["ms"]


def test_ours_is_not_timed_when_its_tests_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    red = tmp_path / "test_red.py"
    red.write_text("def test_no():\n    assert False\n")
    own = Registry()
    own.case("product", tests=(str(red),))(small_problem)
    monkeypatch.chdir(tmp_path)
    machine = records.this_machine(CPU)
    gate.operator_tests.cache_clear()
    found = [r for r in run.run_case(own["product"], Setting(CPU), ("fwd",), machine, warmup_ms=1, rep_ms=1)]
    by_provider = {r["provider"]: r for r in found}
    assert by_provider["insum_nn"]["gate"].startswith("tests: ")
    assert by_provider["insum_nn"]["ms"] is None
    assert by_provider["torch"]["gate"] == "passed"


def test_a_file_without_tests_is_a_failure(tmp_path: Path):
    empty = tmp_path / "test_empty.py"
    empty.write_text("")
    assert gate.operator_tests((str(empty),)) is not None


def test_command_fails_when_ours_fails(tmp_path: Path):
    def only_wrong(setting: Setting) -> Problem:
        whole = small_problem(setting)
        return Problem({"insum_nn": whole.providers["wrong"], "torch": whole.providers["torch"]}, whole.oracle, 1e-5)

    own = Registry()
    own.case("product")(only_wrong)
    arguments = ["product", "--device", "cpu", "--out", str(tmp_path / "x.json"), "--warmup-ms", "1", "--rep-ms", "1"]
    assert run.main(arguments, registry=own) == 1


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        (torch.zeros(2), torch.zeros(2), 0.0),
        (torch.ones(2), torch.zeros(2), 1.0),
        (torch.tensor([1.0, 101.0]), torch.tensor([0.0, 100.0]), 0.01),
        (torch.tensor([math.nan]), torch.tensor([math.nan]), math.inf),
        (torch.tensor([math.inf]), torch.tensor([1.0]), math.inf),
        (torch.zeros(1, 2), torch.zeros(2), math.inf),
        (torch.zeros(0), torch.zeros(0), 0.0),
    ],
)
def test_relative_error(got: Tensor, want: Tensor, error: float):
    assert gate.relative_error(got, want.double()) == error


def test_oracle_must_be_float64():
    problem = small_problem(Setting(CPU))
    with pytest.raises(TypeError, match="float64"):
        gate.reference(Problem(problem.providers, problem.providers["torch"], 1e-5), ("fwd",))


def test_report(results: Path):
    rows = report.rows(report.read([results]))
    assert [(r.case, r.mode) for r in rows] == [(f"product/n={n}", m) for n in (1, 2) for m in ("fwd", "bwd", "fwdbwd")]
    forward = rows[0]
    assert forward.ours
    assert forward.baseline
    assert registry.is_ours(forward.ours[0])
    assert forward.baseline[0] in {"torch", "wrong_gradient"}
    assert forward.ratio == pytest.approx(forward.baseline[1] / forward.ours[1])
    assert {m.partition(":")[0] for m in forward.missing} == {"wrong", "nan", "missing", "elsewhere", "broken"}
    text = report.table(report.read([results]))
    assert "| product/n=1 | fwd |" in text
    assert "geometric mean" in text
    assert "elsewhere: unavailable: needs CUDA" in text


def test_report_keeps_the_later_measurement(results: Path):
    records = report.read([results])
    again = [dict(r, utc="9999-01-01", ms={"p20": 1e9, "p50": 1e9, "p80": 1e9}) for r in records if r["ms"]]
    assert all(row.ours and row.ours[1] == 1e9 for row in report.rows([*again, *records]))


def test_report_shows_cuda_graph_times(results: Path):
    def with_replay(entry: records.Record) -> records.Record:
        us = {"insum_nn": 2.0, "torch": 3.0}.get(entry["provider"])
        ms = None if us is None else records.Milliseconds(p20=us / 1e3, p50=us / 1e3, p80=us / 1e3)
        return dict(entry, replay={"gate": "error: it waits" if ms is None else "passed", "ms": ms})

    found = report.read([results])
    assert "CUDA graph" not in report.table(found)
    lines = report.table([with_replay(r) if r["mode"] == "fwd" else r for r in found]).splitlines()
    head = next(line for line in lines if line.startswith("| case"))
    (row,) = (line for line in lines if line.startswith("| product/n=1 | fwd |"))
    at = head.split(" | ").index("CUDA graph: ours, best baseline, ratio")
    assert row.split(" | ")[at] == "2.0, 3.0, 1.50x"
    (row,) = (line for line in lines if line.startswith("| product/n=1 | bwd |"))
    assert row.split(" | ")[at] == "none, none"


def test_files_of_earlier_schemas_are_read(results: Path, tmp_path: Path):
    entries = json.loads(results.read_text())
    old = tmp_path / "old.json"
    for schema, lacks in (
        (4, {"busy", "runs"}),
        (3, {"busy", "runs", "cores"}),
        (2, {"busy", "runs", "cores", "replay"}),
        (1, {"busy", "runs", "cores", "replay", "floor"}),
    ):
        old.write_text(
            json.dumps([{k: v for k, v in e.items() if k not in lacks} | {"schema": schema} for e in entries])
        )
        found = report.read([old])
        assert [r["ms"] for r in found] == [e["ms"] for e in entries]
        assert all(tuple(r) == records.RECORD and r["schema"] == records.SCHEMA for r in found)


def test_report_has_tables_of_its_own_for_each_device(results: Path):
    """A host pinned to one core is a device of its own; no mean is over two devices."""
    entries = [dict(r, cores=8) for r in report.read([results])]
    pinned = [dict(r, cores=1) for r in entries if r["mode"] == "fwd"]
    other = [dict(r, gpu="NVIDIA H200", ms={"p20": 1e-3, "p50": 1e-3, "p80": 1e-3}) for r in entries if r["ms"]]
    here = entries[0]["gpu"]
    text = report.table([*entries, *pinned, *other])
    heads = [line for line in text.splitlines() if line.startswith("## ") and line.endswith("product")]
    assert heads == [f"## {here}: product", f"## {here}, host on one core: product", "## NVIDIA H200: product"]
    means = [line for line in text.splitlines() if "geometric mean" in line and "fwd on" in line]
    assert [line.partition(":")[0] for line in means] == [
        f"product fwd on {here}",
        f"product fwd on {here}, host on one core",
        "product fwd on NVIDIA H200",
    ]
    assert "geometric mean 1.00x over 2 cases" in means[2], "every provider takes the same time there"
    assert len(report.rows([*entries, *pinned])) == len(report.rows(entries)) + len(report.rows(pinned))


def test_report_refuses_other_files(tmp_path: Path, results: Path):
    records = json.loads(results.read_text())
    bad = tmp_path / "bad.json"
    for change in ({"extra": 1}, {"schema": 0}):
        bad.write_text(json.dumps([records[0] | change]))
        with pytest.raises(ValueError, match="expected"):
            report.read([bad])


def test_the_same_records_give_the_same_plot(results: Path, tmp_path: Path):
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    for path in (first, second):
        assert plot.main([str(results), "--out", str(path), "--mode", "bwd"]) == 0
    assert first.read_bytes() == second.read_bytes()
    text = first.read_text()
    assert all(name in text for name in ("insum_nn/half", "wrong_gradient", "product"))
    with pytest.raises(ValueError, match="no timing"):
        plot.draw(report.read([results]), tmp_path / "c.svg", mode="other")


# Runs that are cut short ----------------------------------------------------------------------------------------------


def test_budget_stops_a_run_and_resume_continues_it(small: Registry, tmp_path: Path):
    path = tmp_path / "x.json"
    arguments = ["product", "--device", "cpu", "--out", str(path), "--warmup-ms", "1", "--rep-ms", "1"]
    assert run.main([*arguments, "--budget", "0"], registry=small) == 1, "nothing was timed"
    cut = report.read([path])
    assert [(r["case"], r["gate"]) for r in cut] == [
        (f"product/n={n}", "not run: the budget was spent") for n in (1, 2)
    ]
    assert run.main([*arguments, "--modes", "fwd", "--providers", "^insum_nn$", "--resume"], registry=small) == 0
    first = report.read([path])
    assert [(r["provider"], r["gate"]) for r in first] == [("insum_nn", "passed")] * 2
    assert run.main([*arguments, "--resume"], registry=small) == 0
    assert report.read([path]) == first, "finished cases are not measured again"


def test_an_interrupted_case_is_completed(small: Registry, tmp_path: Path):
    machine, state = records.this_machine(CPU), supervise.State(tmp_path / "x.json")
    case, setting = small["product/n=1"], Setting(CPU)
    found = run.run_case(case, setting, ("fwd",), machine, warmup_ms=0, rep_ms=0, state=state)
    for _ in range(3):
        state.add(next(found))
    found.close()
    again = supervise.State.of(state.path, resume=True)
    assert not again.finished(case.name)
    rest = [r["provider"] for r in run.run_case(case, setting, ("fwd",), machine, warmup_ms=0, rep_ms=0, state=again)]
    assert [r["provider"] for r in state.records] + rest == list(small_problem(setting).providers)


WORKER = """
import os, sys, time
import torch
from benchmarks import run
from benchmarks.registry import Problem, Registry, Work

own = Registry()
x = torch.ones(3)

def right():
    return Work(lambda: x)

def oracle():
    return Work(lambda: x.double())

@own.case("deadly", n=(1, 2))
def deadly(setting, *, n):
    if n == 2:
        os._exit(7)
    providers = {"insum_nn": right, "dies": lambda: os._exit(7), "hangs": lambda: time.sleep(600), "torch": right}
    return Problem(providers, oracle, 0.0)

own.case("fine")(lambda setting: Problem({"insum_nn": right}, oracle, 0.0))
sys.exit(run.main(registry=own))
"""


@pytest.mark.slow
def test_a_provider_that_crashes_or_hangs_is_one_failed_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script, path = tmp_path / "worker.py", tmp_path / "x.json"
    script.write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    arguments = ["deadly", "fine", "--device", "cpu", "--out", str(path), "--warmup-ms", "0", "--rep-ms", "0"]
    command = (sys.executable, str(script))
    code = supervise.supervise([*arguments, "--supervise"], path, limit=2.0, budget=math.inf, command=command)
    gates = {(r["case"], r["provider"]): r["gate"] for r in report.read([path])}
    assert gates == {
        ("deadly/n=1", "insum_nn"): "passed",
        ("deadly/n=1", "dies"): "error: the process ended with 7",
        ("deadly/n=1", "hangs"): "error: no result after 2 s",
        ("deadly/n=1", "torch"): "passed",
        ("deadly/n=2", "insum_nn"): "error: the problem: the process ended with 7",
        ("fine", "insum_nn"): "passed",
    }
    assert code == 1, "ours failed in one case"


def test_a_problem_that_cannot_be_built_is_one_record(tmp_path: Path):
    def missing(setting: Setting) -> Problem:
        raise Unavailable("no such file")

    def broken(setting: Setting) -> Problem:
        raise RuntimeError("out of order")

    own = Registry()
    own.case("missing")(missing)
    own.case("broken")(broken)
    path = tmp_path / "x.json"
    assert run.main(["*", "--device", "cpu", "--out", str(path)], registry=own) == 1
    assert [r["gate"] for r in report.read([path])] == [
        "unavailable: no such file",
        "error: the problem: RuntimeError: out of order",
    ]


# Several outputs, clocks, precision -----------------------------------------------------------------------------------


def test_several_outputs_in_another_layout():
    a = torch.randn(4, 3, dtype=torch.float64)

    def oracle() -> Work:
        x = a.clone().requires_grad_()
        return Work(lambda: (x * 2, x.exp()), (x,))

    def provider(*, restores: bool) -> Work:
        x = a.clone().requires_grad_()
        back = (lambda found: (found[0], found[1].T)) if restores else (lambda found: found)
        return Work(lambda: (x * 2, x.exp().T), (x,), output=lambda o: (o[0], o[1].T), upstream=back)

    problem = Problem(
        {"insum_nn": lambda: provider(restores=True), "careless": lambda: provider(restores=False)}, oracle, 1e-12
    )
    wanted = gate.reference(problem, ("fwdbwd",))
    assert [tuple(t.shape) for t in wanted.outputs] == [(4, 3), (4, 3)]
    assert run.measure(problem, "insum_nn", "fwdbwd", wanted, CPU, warmup_ms=0, rep_ms=0).gate == "passed"
    assert run.measure(problem, "careless", "fwdbwd", wanted, CPU, warmup_ms=0, rep_ms=0).gate.startswith("error")


def test_the_host_clock_and_recording():
    seen: list[tuple[bool, str]] = []

    def ours() -> Work:
        x = torch.ones(3, requires_grad=True)

        def forward() -> Tensor:
            seen.append((torch.is_grad_enabled(), torch.get_float32_matmul_precision()))
            return x * 2

        return Work(forward)

    def problem(setting: Setting, *, recorded: bool) -> Problem:
        double = torch.full((3,), 2.0, dtype=torch.float64)
        options = {"clock": "host", "recorded": recorded, "precision": "high"}
        return Problem({"insum_nn": ours}, lambda: Work(lambda: double), 0.0, **options)

    own = Registry()
    own.case("clock", recorded=(False, True))(problem)
    machine = records.this_machine(CPU)
    for recorded in (False, True):
        seen.clear()
        (found,) = run.run_case(own[f"clock/recorded={recorded}"], Setting(CPU), ("fwd",), machine, rep_ms=0)
        assert found["gate"] == "passed"
        assert set(seen) == {(recorded, "high")}
    assert torch.get_float32_matmul_precision() == "highest"


# Tables ---------------------------------------------------------------------------------------------------------------


def measured(case: str, provider: str, us: float, *, mode: str = "fwd", gpu: str = "NVIDIA H200", **more):
    machine = records.Machine(gpu=gpu, driver=None, cores=None, torch="2", triton="3", commit=None, dirty=None)
    ms = {"p20": us / 1e3, "p50": us / 1e3, "p80": us / 1e3}
    return records.record(machine, case, provider, mode, "passed", ms=ms, max_rel_err=0.0, **more)


# Inputs ---------------------------------------------------------------------------------------------------------------


def test_graph_files(tmp_path: Path):
    np.savez(tmp_path / "a.npz", src_li=[1, 0, 1, 1], dst_li=[0, 2, 0, 2], num_nodes=4)
    (tmp_path / "a.csv").write_text("id_1,id_2\n0,2\n1,2\n")
    header = "%%MatrixMarket matrix coordinate pattern symmetric\n% note\n3 3 2\n"
    (tmp_path / "a.mtx").write_text(f"{header}3 1\n3 2\n")
    with gzip.open(tmp_path / "a.txt.gz", "wt") as file:
        file.write("# From To\n0\t1\n1\t0\n2\t0\n")
    wanted = {
        "a.npz": (4, [(0, 2), (1, 0), (1, 2)]),
        "a.csv": (3, [(0, 2), (1, 2), (2, 0), (2, 1)]),
        "a.mtx": (3, [(0, 2), (1, 2), (2, 0), (2, 1)]),
        "a.txt.gz": (3, [(0, 1), (1, 0), (2, 0)]),
    }
    for name, (nodes, entries) in wanted.items():
        found, row, col = graphs.load_pattern(tmp_path / name, CPU)
        assert (found, list(zip(row.tolist(), col.tolist(), strict=True))) == (nodes, entries), name


def test_graphs_are_of_the_stated_size():
    nodes, row, col = graphs.pattern(Setting(CPU), "hub")
    degree = torch.bincount(row, minlength=nodes)
    assert (int(degree[0]), int(degree[1:].max())) == (100_000, 3)
    assert bool(((row * nodes + col).diff() > 0).all())
    with pytest.raises(Unavailable, match="pubmed"):
        graphs.pattern(Setting(CPU), "pubmed")


def test_clouds_and_their_neighbours():
    points, extents = clouds.cloud(Setting(CPU), "room")
    assert len(points) == 236_160, "as large as the room that published times are of"
    assert bool((points < torch.tensor(extents)).all())
    assert int((clouds.neighbour_table(points) >= 0).sum()) == 1_925_908
    assert 85_000 < len(clouds.cloud(Setting(CPU), "sweep")[0]) < 100_000
    small, _ = clouds.cloud(Setting(CPU, "tiny"), "sweep")
    table = clouds.neighbour_table(small)
    near = (small[None, :, :] - small[:, None, :]).abs().amax(-1) <= 1
    assert int((table >= 0).sum()) == int(near.sum())
    offsets = torch.cartesian_prod(*[torch.arange(-1, 2)] * 3)
    for offset, rows in zip(offsets, table, strict=True):
        assert torch.equal(small[rows[rows >= 0]], small[rows >= 0] + offset)


def test_dense_oracle_of_tensor_products_is_e3nn_s():
    o3 = irreps.o3()
    shape = irreps.channelwise("3x0e+3x1o+3x2e", "1x0e+1x1o+1x2e", "0e+1o+2e")
    with irreps.e3nn_in_double():
        uvu = o3.TensorProduct(*shape[:4], shared_weights=False, internal_weights=False)
        in1, in2 = irreps.fully_connected(2, 3)
        uvw = o3.FullyConnectedTensorProduct(in1, in2, in1, shared_weights=True, internal_weights=False)
        for product, shared in ((uvu, False), (uvw, True)):
            x, y = torch.randn(5, product.irreps_in1.dim), torch.randn(5, product.irreps_in2.dim)
            w = torch.randn(product.weight_numel) if shared else torch.randn(5, product.weight_numel)
            found = torch.cat(irreps.in_pieces(irreps.path_tables(product, CPU), x, y, w, 2))
            torch.testing.assert_close(found, product(x, y, w), rtol=1e-12, atol=1e-12)
            if not shared:
                leaves = [t.clone().requires_grad_() for t in (x, y, w)]
                sent = torch.randn_like(found)
                wanted = torch.autograd.grad(product(*leaves), leaves, sent)
                got = irreps.dense_gradients(irreps.path_tables(product, CPU), x, y, w, sent)
                torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_bare_launch(gpu: torch.device):
    matrix = torch.randn(20, 30, device=gpu) * (torch.rand(20, 30, device=gpu) < 0.2)
    csr, dense = matrix.to_sparse_csr(), torch.randn(30, 16, device=gpu)
    multiply = importlib.import_module("benchmarks.bare_launch").multiply
    found = multiply(csr.crow_indices().int(), csr.col_indices().int(), csr.values(), dense)
    assert gate.relative_error(found, matrix.double() @ dense.double()) < 1e-6


# The registry ---------------------------------------------------------------------------------------------------------


def test_selection(small: Registry):
    assert [c.name for c in small.select(["product"])] == ["product/n=1", "product/n=2"]
    assert [c.name for c in small.select(["*n=2", "product/n=*"])] == ["product/n=2", "product/n=1"]
    with pytest.raises(KeyError, match="no case matches .*; families: product"):
        small.select(["nothing"])


def test_every_family_has_quick_cases():
    own = Registry()
    own.case("product", n=(1, 2), k=(3, 4), quick={"n": (2,)})(lambda setting, **_: small_problem(setting))
    assert [c.name for c in own if c.quick] == ["product/n=2/k=3", "product/n=2/k=4"]
    with pytest.raises(ValueError, match="n=5"):
        own.case("other", n=(1, 2), quick={"n": (5,)})
    assert {c.family for c in CASES if c.quick} == {c.family for c in CASES}


def test_registration_refuses_bad_names(small: Registry):
    with pytest.raises(ValueError, match="twice"):
        small.case("product", n=(1,))(small_problem)
    with pytest.raises(ValueError, match="letters"):
        small.case("Two words")(small_problem)
    with pytest.raises(ValueError, match="empty"):
        small.case("nothing", n=())


def test_every_benchmark_module_imports():
    for source in sources("benchmarks"):
        importlib.import_module(source.module)


def test_cases_are_described_and_tested():
    for case in families():
        assert case.build.__doc__, f"{case.name}: say what is measured"
        assert case.tests, f"{case.name}: name the tests of the operator"
        assert [t for t in case.tests if not (ROOT / t).exists()] == [], case.name


@pytest.mark.parametrize("case", families(), ids=lambda c: c.name)
def test_tiny_cases_agree_with_the_oracle(case: Case):
    """Ours must pass on the CPU at the tiny size; a baseline may be missing, but not fail."""
    if "cpu" not in case.devices:
        pytest.skip(f"{case.name} is not for the CPU")
    setting = Setting(CPU, "tiny")
    problem = tiny(case.name)
    assert any(registry.is_ours(name) for name in problem.providers), "ours takes part"
    assert set(problem.modes) <= set(registry.MODES)
    assert set(problem.tolerances) <= set(problem.providers)
    machine = records.this_machine(CPU)
    once = dataclasses.replace(case, build=lambda setting, **_: problem)
    found = [r for r in run.run_case(once, setting, problem.modes, machine, run_tests=False, warmup_ms=0, rep_ms=0)]
    if case.family == "peer_models" and found[0]["gate"].startswith("unavailable"):
        pytest.skip(f"{case.name}: {found[0]['gate']}")
    assert len(found) == len(problem.modes) * len(problem.providers)
    assert [r["gate"] for r in found if not r["gate"].startswith(("passed", "unavailable"))] == []
    ours = [r for r in found if registry.is_ours(r["provider"])]
    assert any(r["gate"] == "passed" for r in ours)


def test_locked_peers():
    text = (ROOT / "benchmarks" / "peers.lock").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    locked = {}
    for line in lines:
        name, version = re.fullmatch(r"([a-z0-9-]+)==(\d[\w.]*)", line).groups()
        locked[name] = version
    assert list(locked) == sorted(locked)
    assert len(locked) == len(lines)
    # A baseline that our own tests use has the same release there.
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pins = {name.replace("_", "-").lower(): version for name, version in pins.items()}
    assert {name: pins[name] for name in locked if name in pins} == {n: v for n, v in locked.items() if n in pins}
    assert {"e3nn", "torch-geometric"} <= set(pins)


# The folders of results -----------------------------------------------------------------------------------------------


def test_committed_results_are_readable():
    paths = sorted(archive.HISTORY.glob("*.json"))
    assert paths
    for path in paths:
        records = report.read([path])
        assert records, path.name
        assert all(r["utc"] and r["gpu"] and r["torch"] for r in records), path.name


def test_current_results_are_of_one_family_commit_and_machine():
    assert archive.stale() == [], "run: python -m benchmarks.archive"
    for path in archive.current_files():
        found = report.read([path])
        assert {r["case"].partition("/")[0] for r in found} == {path.stem}
        assert {archive.device_slug(r["gpu"], r["cores"]) for r in found} == {path.parent.name}
        assert len({(r["commit"], r["torch"], r["triton"]) for r in found}) == 1, path.name
    for path in archive.CURRENT.glob("*/*/*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        assert {archive.KINDS[path.parent.name].family(e) for e in found} == {path.stem}
        assert {archive.device_slug(e["gpu"], e["cores"]) for e in found} == {path.parent.parent.name}
        assert len({(e["commit"], e["torch"], e["triton"]) for e in found}) == 1, path.name


def test_the_newest_complete_candidate_is_selected(tmp_path: Path):
    quick = [case.name for case in CASES if case.family == "tp_conv"]

    def run_of(names: list[str], commit: str, hour: int) -> list[records.Record]:
        return [
            dict(measured(name, provider, 9.0), commit=commit, utc=f"2026-01-01T{hour:02}:00:00+00:00")
            for name in names
            for provider in ("insum_nn", "oeq")
        ]

    history = tmp_path / "history"
    records.write(history / "a.json", run_of(quick, "old", 1))
    records.write(history / "b.json", [*run_of(quick[1:], "new", 2), *run_of(quick[:1], "other", 3)])
    records.write(history / "c.json", [r for r in run_of(quick, "ours alone", 4) if r["provider"] == "insum_nn"])
    assert archive.stale(tmp_path) == ["nvidia-h200/tp_conv.json"]
    assert [path.name for path in archive.update(tmp_path)] == ["tp_conv.json"]
    (path,) = archive.current_files(tmp_path)
    assert path.parent.name == "nvidia-h200"
    assert {r["commit"] for r in report.read([path])} == {"new"}, "three of four cases are enough, one is not"
    assert archive.stale(tmp_path) == []
    records.write(path, run_of(quick, "edited", 5))
    assert archive.stale(tmp_path) == ["nvidia-h200/tp_conv.json"]


def test_save_writes_to_the_history_and_updates_current(
    small: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    saved: list[str] = []
    monkeypatch.setattr(archive, "HISTORY", tmp_path)
    monkeypatch.setattr(archive, "update", lambda: saved.append("updated"))
    arguments = ["product/n=1", "--device", "cpu", "--save", "--warmup-ms", "0", "--rep-ms", "0", "--runs", "3"]
    assert run.main([*arguments, "--modes", "fwd"], registry=small) == 0
    (path,) = tmp_path.glob("*.json")
    found = report.read([path])
    assert re.fullmatch(
        rf"\d{{4}}(-\d\d){{2}}-\d{{6}}-{archive.device_slug(found[0]['gpu'], found[0]['cores'])}\.json", path.name
    )
    assert saved == ["updated"]
    for entry in found:
        if entry["ms"]:
            assert sorted(entry["runs"])[1] == entry["ms"]["p50"]
            assert entry["repeats"] >= 15
        else:
            assert entry["runs"] is None


def test_tables_and_plots_are_up_to_date(capsys: pytest.CaptureFixture[str]):
    assert tables.main(["--check"]) == 0, capsys.readouterr().out
    assert {page.name for page in tables.pages()} >= {"README.md", "measurements.md", "performance.md"}
    for name in plot.FIGURES:
        assert (plot.PLOTS / name).stat().st_size < 100_000, name


def test_a_table_is_replaced_between_its_marks():
    text = "a\n<!-- table: begin -->\nold\n<!-- table: end -->\nb\n<!-- table: x-y begin -->\n<!-- table: x-y end -->\n"
    found = {"": lambda: "| 1 |", "x-y": lambda: "| 2 |"}
    new = tables.rewrite(text, found)
    assert new == (
        "a\n<!-- table: begin -->\n\n| 1 |\n\n<!-- table: end -->\nb\n"
        "<!-- table: x-y begin -->\n\n| 2 |\n\n<!-- table: x-y end -->\n"
    )
    assert tables.rewrite(new, found) == new
    with pytest.raises(ValueError, match="no table is named 'x-y'"):
        tables.rewrite(text, {"": lambda: ""})


def test_readme_table_shows_networks_that_have_records(monkeypatch: pytest.MonkeyPatch):
    """A first step is the one with empty caches, where a process with empty caches was measured."""
    found = report.rows(report.read(archive.current_files()))
    rows = [row for row in found if not row.case.startswith("network/")]
    step = f"{tables.SPUNET}/what=step"
    title = next(entry.title for entry in tables.README_ROWS if entry.case == step)
    assert title not in tables.readme_table(rows)
    entries = [
        measured(step, "insum_nn", 40_000.0, compile_s=2.0, peak_bytes=1 << 30),
        measured(step, "spconv_triton", 50_000.0, compile_s=3.0, peak_bytes=1 << 30),
    ]
    cold = {"case": step, "process": "cold", "gpu": entries[0]["gpu"], "provider": "insum_nn"}
    steps = [cold | {"steps": [{"seconds": 9.0}, {"seconds": 1.0}]}, cold | {"process": "warm", "steps": None}]
    monkeypatch.setattr(tables, "first_steps", lambda _="": steps)
    lines = tables.readme_table([*rows, *report.rows(entries)]).splitlines()
    assert f"| {title} | **40 ms** | 50 ms | spconv-triton |" in lines
    assert "| the same: first step, ours from empty caches | 9 s | **3 s** | spconv-triton |" in lines


def test_first_steps_are_those_of_the_newest_complete_file_whatever_its_name(tmp_path: Path):
    machine = {"gpu": "NVIDIA H200", "cores": 16, "process": "cold"}

    def write(name: str, commit: str, hour: int, cases: Sequence[str], **more: Any) -> None:
        utc = f"2026-11-24T{hour:02}:00:00"
        found = [{**machine, "steps": [{}], "case": case, "commit": commit, "utc": utc, **more} for case in cases]
        path = tmp_path / "history" / "first_steps" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found), encoding="utf-8")

    networks = [f"network/network={name}/what=step" for name in ("a", "b", "c", "d")]
    write("c", "old", 5, [*networks, "spmm/n=32"])
    write("b", "new", 7, networks[1:])
    write("a", "few", 8, networks[:1])
    write("d", "failed", 9, networks, steps=None)
    write("e", "another device", 9, networks, gpu="another")
    archive.update(tmp_path)
    found = archive.current_entries("first_steps", "nvidia-h200", tmp_path)
    assert [(entry["case"], entry["commit"]) for entry in found] == [
        *((n, "new") for n in networks[1:]),
        ("spmm/n=32", "old"),
    ]
    assert archive.stale(tmp_path) == []
    write("c", "old", 5, [*networks, "gcn/n=32"])
    assert archive.stale(tmp_path) == ["nvidia-h200/first_steps/gcn.json", "nvidia-h200/first_steps/spmm.json"]


def test_files_of_other_machines_are_taken_into_the_history(tmp_path: Path):
    """Each kind goes to its folder, under the time at which its last measurement ended."""
    kinds = {path.parent.name: path for path in sorted(archive.HISTORY.glob("*/*.json"))}
    assert set(kinds) == set(archive.KINDS)
    kinds |= {"history": max(archive.HISTORY.glob("*-nvidia-h200.json"))}
    for name, source in kinds.items():
        found = [{"utc": "2026-01-02T03:04:05+00:00", **entry} for entry in json.loads(source.read_text("utf-8"))]
        found[-1]["utc"] = "2027-01-02T03:04:05+00:00"
        file = tmp_path / "x.json"
        file.write_text(json.dumps(found), encoding="utf-8")
        path = archive.add(file, tmp_path)
        assert (path.parent.name, path.name) == (name, "2027-01-02-030405-nvidia-h200.json")
        assert json.loads(path.read_text(encoding="utf-8")) == found


def test_losses_are_counted_for_each_family():
    times = {"spmm/n=32": (20.0, 10.0), "spmm/n=64": (10.1, 10.0), "gcn/input=csr": (5.0, 10.0)}
    entries = [
        measured(case, who, us)
        for case, pair in times.items()
        for who, us in zip(("insum_nn", "torch_csr"), pair, strict=True)
    ]
    lines = tables.loss_summary(report.rows(entries)).splitlines()
    # 1 % is within the variation between runs.
    assert lines[2:] == ["| NVIDIA H200 | `spmm` | 1 | 2 | 0.50x | torch CSR |"]


@pytest.mark.parametrize(
    ("ms", "text"), [(0.0434, "43.4 us"), (0.9999, "1000 us"), (1.5, "1.5 ms"), (136.5, "136 ms"), (1_030.0, "1.03 s")]
)
def test_durations(ms: float, text: str):
    assert tables.duration(ms) == text


def test_sentences_hold_the_numbers_of_the_records():
    network = {name: f"network/network={name}/what=step" for name in ("gcn_14k", "spunet_fp16")}
    seconds = {("gcn_14k", "cold"): 1.44, ("gcn_14k", "warm"): 0.4, ("spunet_fp16", "cold"): 12.4}
    steps = [
        {"case": network[name], "process": process, "provider": "insum_nn", "steps": [{"seconds": took}]}
        for (name, process), took in seconds.items()
    ]
    # A network of which only one process was measured is left out.
    text = " ".join(sentences.first_steps(steps, "NVIDIA H200").split())
    assert "it took 1.4 s for a GCN; in the next process 0.4 s." in text
    layer = [{**entry, "case": "spmm/n=32"} for entry in steps[:2]]
    assert sentences.first_steps_by_kind([*steps, *layer]).splitlines()[2:] == [
        "| a GCN | 1.4 | 0.4 |",
        "| a single layer | 1.4 | 0.4 |",
    ]

"""The benchmark harness: laws of the registry, the gate, records, tables and pictures; and every registered case."""

from __future__ import annotations

import importlib
import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import gate, plot, registry, report, run
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
    records = json.loads(results.read_text())
    assert len(records) == 2 * 3 * 9
    assert all(tuple(r) == run.RECORD for r in records)
    assert run.RECORD == (
        *("schema", "case", "provider", "mode", "ms", "repeats", "compile_s", "peak_bytes", "max_rel_err", "gate"),
        *("gpu", "driver", "torch", "triton", "commit", "dirty", "utc"),
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


def test_our_red_tests_stop_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    red = tmp_path / "test_red.py"
    red.write_text("def test_no():\n    assert False\n")
    own = Registry()
    own.case("product", tests=(str(red),))(small_problem)
    monkeypatch.chdir(tmp_path)
    machine = run.Machine.here(CPU)
    gate.operator_tests.cache_clear()
    found = [r for r, _ in run.run_case(own["product"], Setting(CPU), ("fwd",), machine, warmup_ms=1, rep_ms=1)]
    by_provider = {r["provider"]: r for r in found}
    assert by_provider["insum_nn"]["gate"].startswith("tests: ")
    assert by_provider["insum_nn"]["ms"] is None
    assert by_provider["torch"]["gate"] == "passed"


def test_a_file_without_tests_does_not_pass_the_gate(tmp_path: Path):
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
    assert forward.peer
    assert registry.is_ours(forward.ours[0])
    assert forward.peer[0] in {"torch", "wrong_gradient"}
    assert forward.ratio == pytest.approx(forward.peer[1] / forward.ours[1])
    assert {m.partition(":")[0] for m in forward.missing} == {"wrong", "nan", "missing", "elsewhere", "broken"}
    text = report.table(report.read([results]))
    assert "| product/n=1 | fwd |" in text
    assert "geometric mean" in text
    assert "elsewhere: unavailable: needs CUDA" in text


def test_report_keeps_the_later_measurement(results: Path):
    records = report.read([results])
    again = [dict(r, utc="9999-01-01", ms={"p20": 1e9, "p50": 1e9, "p80": 1e9}) for r in records if r["ms"]]
    assert all(row.ours and row.ours[1] == 1e9 for row in report.rows([*again, *records]))


def test_report_refuses_other_files(tmp_path: Path, results: Path):
    records = json.loads(results.read_text())
    bad = tmp_path / "bad.json"
    for change in ({"extra": 1}, {"schema": 0}):
        bad.write_text(json.dumps([records[0] | change]))
        with pytest.raises(ValueError, match="expected"):
            report.read([bad])


def test_plot_is_drawn_from_the_file_alone(results: Path, tmp_path: Path):
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    for path in (first, second):
        assert plot.main([str(results), "--out", str(path), "--mode", "bwd"]) == 0
    assert first.read_bytes() == second.read_bytes()
    text = first.read_text()
    assert all(name in text for name in ("insum_nn/half", "wrong_gradient", "product"))
    with pytest.raises(ValueError, match="no timing"):
        plot.draw(report.read([results]), tmp_path / "c.svg", mode="other")


# Laws of the registry -------------------------------------------------------------------------------------------------


def test_selection(small: Registry):
    assert [c.name for c in small.select(["product"])] == ["product/n=1", "product/n=2"]
    assert [c.name for c in small.select(["*n=2", "product/n=*"])] == ["product/n=2", "product/n=1"]
    with pytest.raises(KeyError, match="no case matches"):
        small.select(["nothing"])


def test_registration_refuses_bad_names(small: Registry):
    with pytest.raises(ValueError, match="twice"):
        small.case("product", n=(1,))(small_problem)
    with pytest.raises(ValueError, match="letters"):
        small.case("Two words")(small_problem)
    with pytest.raises(ValueError, match="empty"):
        small.case("nothing", n=())


@pytest.mark.parametrize("source", sources("benchmarks"), ids=lambda s: s.name)
def test_every_benchmark_module_imports(source):
    importlib.import_module(source.module)


@pytest.mark.parametrize("case", list(CASES), ids=lambda c: c.name)
def test_cases_are_described_and_tested(case: Case):
    assert case.build.__doc__, "say what is measured"
    assert case.tests, "name the tests of the operator"
    assert [t for t in case.tests if not (ROOT / t).exists()] == []


@pytest.mark.parametrize("case", families(), ids=lambda c: c.name)
def test_tiny_cases_pass_the_gate(case: Case):
    """Ours must pass on the CPU at the tiny size; a peer may be missing, but not fail."""
    if "cpu" not in case.devices:
        pytest.skip(f"{case.name} is not for the CPU")
    setting = Setting(CPU, "tiny")
    problem = case.problem(setting)
    assert any(registry.is_ours(name) for name in problem.providers), "ours takes part"
    assert set(problem.modes) <= set(registry.MODES)
    assert set(problem.tolerances) <= set(problem.providers)
    machine = run.Machine.here(CPU)
    found = [r for r, _ in run.run_case(case, setting, problem.modes, machine, run_tests=False, warmup_ms=0, rep_ms=0)]
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
    # A peer that our own tests run against is the same release there.
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pins = {name.replace("_", "-").lower(): version for name, version in pins.items()}
    assert {name: pins[name] for name in locked if name in pins} == {n: v for n, v in locked.items() if n in pins}
    assert {"e3nn", "torch-geometric"} <= set(pins)


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda p: p.name)
def test_committed_results_are_readable(path: Path):
    records = report.read([path])
    assert records
    assert all(r["utc"] and r["gpu"] and r["torch"] for r in records)

"""`python -m insum_nn`: it says what is there, runs each path, and fails where the default path is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from insum_nn import __main__ as report
from insum_nn.compiler.kernels import c_compiler
from insum_nn.compiler.options import Options
from insum_nn.version import __version__


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Leave out C, which is compiled for seconds, and keep to folders of the test's own."""
    hints = {"backend": Literal["auto", "eager", "triton"]}
    monkeypatch.setattr(report, "get_type_hints", lambda _: hints)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    folder = tmp_path / "my cache"
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(folder))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return folder


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    return {line[:22].rstrip(): line[23:] for line in capsys.readouterr().out.splitlines()}


def test_what_is_here(quick: Path, capsys: pytest.CaptureFixture[str]):
    quick.mkdir()
    (quick / "plan").write_text("x" * 2**20)
    assert report.main() == 0
    said = lines(capsys)
    assert said["insum_nn"].startswith(__version__)
    assert said["torch"] == torch.__version__
    assert said["auto on cpu"].startswith("works, ")
    assert said["eager on cpu"].startswith("works, ")
    assert said["triton on cpu"].startswith("not available: ")
    assert said["cache folder"] == f"{quick} (1 files, 1.0 MiB)"
    assert said["to empty both"] == f"rm -rf '{quick}' {quick.parent / 'triton'}"


def test_compilers_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CXX", "mine")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "mine").touch(mode=0o755)
    monkeypatch.setattr(report, "_tried", lambda *_: (True, ""))
    c_compiler._find.cache_clear()
    try:
        assert report.main() == 0
    finally:
        c_compiler._find.cache_clear()
    said = lines(capsys)
    assert said["C compiler"] == "none on the PATH; CC names one elsewhere"
    assert said["C++ compiler"] == str(tmp_path / "mine")


@pytest.mark.parametrize("named", [None, "gcc"])
def test_the_compiler_is_the_one_that_runs(
    named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """One rule finds it for the report and for C functions: CC, else cc before gcc."""
    monkeypatch.delenv("CC", raising=False)
    if named is not None:
        monkeypatch.setenv("CC", named)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("gcc", "cc"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr(report, "_tried", lambda *_: (True, ""))
    c_compiler._find.cache_clear()
    try:
        assert report.main() == 0
        found = c_compiler.find_compiler()
    finally:
        c_compiler._find.cache_clear()
    assert found is not None
    assert lines(capsys)["C compiler"] == found[0] == str(tmp_path / (named or "cc"))


def test_every_backend_is_tried(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """One that is added to `Options` has its line without a change here."""
    monkeypatch.undo()
    tried: list[Any] = []
    monkeypatch.setattr(report, "_tried", lambda backend, device: (tried.append((backend, device)), (True, "works"))[1])
    assert report.main() == 0
    for backend, _ in tried:
        Options(backend=backend)
    assert {backend for backend, _ in tried} >= {"auto", "c", "eager", "triton"}
    assert {"cpu"} <= {device for _, device in tried}


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (torch.zeros(7, 5), "WRONG VALUES"),
        (RuntimeError("no driver\nand a long trace"), "not available: RuntimeError: no driver"),
    ],
    ids=["wrong", "raises"],
)
def test_a_path_that_does_not_work(
    outcome: Any, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def insum(*_: object, **__: object) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(report, "insum", insum)
    assert report.main() == 1
    assert lines(capsys)["auto on cpu"] == said

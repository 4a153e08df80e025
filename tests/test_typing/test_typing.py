"""The types that users see: pyright accepts `passes.py` and refuses `fail.py` exactly where it says so."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import ROOT

pytest.importorskip("pyright")

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, str, str]]]:
    """What pyright says of both files: file name -> (line, rule, message)."""
    # A project of its own, as a user's would be: ours leaves these files out, and relaxes what tests may do.
    folder = tmp_path_factory.mktemp("typing")
    for name in ("passes.py", "fail.py"):
        shutil.copy(HERE / name, folder)
    settings = {
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "standard",
        "reportMissingModuleSource": False,
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert report["summary"]["filesAnalyzed"] == 2
    result: dict[str, list[tuple[int, str, str]]] = {"passes.py": [], "fail.py": []}
    for item in report["generalDiagnostics"]:
        entry = (item["range"]["start"]["line"] + 1, item.get("rule", "syntax"), item["message"])
        result[Path(item["file"]).name].append(entry)
    return result


def test_correct_uses_are_accepted(found: dict[str, list[tuple[int, str, str]]]):
    assert found["passes.py"] == []


def test_misuses_are_refused(found: dict[str, list[tuple[int, str, str]]]):
    lines = (HERE / "fail.py").read_text(encoding="utf-8").splitlines()
    marks = [(number, re.search(r"# expect: (\w+)", line)) for number, line in enumerate(lines, 1)]
    want = {(number, mark.group(1)) for number, mark in marks if mark}
    assert want
    assert {(line, rule) for line, rule, _ in found["fail.py"]} == want, found["fail.py"]

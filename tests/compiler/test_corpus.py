"""The corpus of statements: its digests are those of the code, and a change of the code is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from insum_nn.compiler.codegen.calls import CallGraph
from insum_nn.compiler.ir.nodes import Size
from tests.compiler.corpus import __main__ as commands
from tests.compiler.corpus import digests
from tests.compiler.corpus.statements import entries, recorded
from tests.source_tree import ROOT

CASE = "case: spmm, scale 8, torch.float32"


def test_every_source_of_statements_is_read():
    names = [entry.name for entry in entries()]
    assert len(names) == len(set(names))
    kinds = {name.split()[0].rstrip(":") for name in names}
    assert kinds == {"case", "shipped", "recorded", "random"}
    assert any(entry.tables for entry in recorded())


def test_a_change_of_a_kernel_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    path = str(tmp_path / "before.json")
    assert commands.main(["write", path, "--only", CASE, "--text-only"]) == 0
    assert commands.main(["compare", path, "--only", CASE, "--text-only"]) == 0
    write = digests.write_kernel

    def changed(*arguments: Any) -> Any:
        source = write(*arguments)
        return replace(source, text=source.text.replace("tl.load", "tl.load "))

    monkeypatch.setattr(digests, "write_kernel", changed)
    assert commands.main(["compare", path, "--only", CASE, "--text-only"]) == 1
    assert f"differs: {CASE}: kernel" in capsys.readouterr().out
    assert commands.main(["compare", path, "--only", "case: sddmm, scale 1, torch.float16", "--text-only"]) == 1
    assert "new: case: sddmm" in capsys.readouterr().out


def test_intermediate_code_is_made_without_a_gpu(tmp_path: Path):
    # In a process of its own: Triton decides once whether it interprets kernels.
    path = tmp_path / "digests.json"
    command = [sys.executable, "-m", "tests.compiler.corpus", "write", str(path), "--only", CASE]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True)
    kinds = {kind.partition(",")[0] for kind in json.loads(path.read_text())[CASE]}
    assert kinds == {"graph", "kernel", "ttir"}


def test_names_are_left_out_of_intermediate_code():
    text = digests.without_names("%x = f %y\n%z_1 = g %x")
    assert text == "%0 = f %1\n%2 = g %0"


def test_names_of_calls_are_left_out_of_graphs():
    def written(name: str, *, twice: bool = False) -> str:
        graph = CallGraph()
        total = graph.function(torch.relu, (graph.argument(Size("A")),), {})
        total.name = name
        graph.finish(graph.function(torch.relu, (total,), {}) if twice else total)
        return digests.without_call_names(graph)

    assert written("a") == written("b") != written("a", twice=True)
    assert "%0" in written("a")

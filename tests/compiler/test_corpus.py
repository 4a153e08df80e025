"""The corpus of statements: its digests are those of the code, and a change of the code is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compiler.corpus import __main__ as commands
from tests.compiler.corpus import digests
from tests.compiler.corpus.statements import entries, recorded

CASE = "case: spmm, scale 8, torch.float32"


def test_every_source_of_statements_is_read():
    names = [entry.name for entry in entries()]
    assert len(names) == len(set(names))
    kinds = {name.split()[0].rstrip(":") for name in names}
    assert kinds == {"case", "shipped", "recorded", "random"}
    assert any(entry.tables for entry in recorded())


def test_a_change_of_a_kernel_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    path = str(tmp_path / "before.json")
    assert commands.main(["write", path, "--only", CASE]) == 0
    assert commands.main(["compare", path, "--only", CASE]) == 0
    ttir = digests.ttir
    monkeypatch.setattr(digests, "ttir", lambda *arguments: ttir(*arguments).replace("tt.return", "tt.return "))
    assert commands.main(["compare", path, "--only", CASE]) == 1
    assert f"differs: {CASE}: ttir" in capsys.readouterr().out
    assert commands.main(["compare", path, "--only", "case: sddmm, scale 1, torch.float16"]) == 1
    assert "new: case: sddmm" in capsys.readouterr().out


def test_names_are_left_out_of_intermediate_code():
    text = digests.without_names("%x = f %y\n%z_1 = g %x")
    assert text == "%0 = f %1\n%2 = g %0"

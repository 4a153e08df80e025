"""What is run of the peers' suites where the package index has them, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.peers.e3nn.substitute import E3nn
from tests.peers.run_from_index import NOT_RUN
from tests.peers.runner import ROOT


def items(*names: str) -> list[Any]:
    return [SimpleNamespace(nodeid=name) for name in names]


def test_a_sample_keeps_the_first_and_the_last_parameter_set():
    plugin = E3nn()
    plugin.most = 3
    many = items(
        *(f"a.py::test_many[{n}]" for n in range(10)), "a.py::test_one", "b.py::test_two[x]", "b.py::test_two[y]"
    )
    kept = [item.nodeid for item in plugin.sampled(many)]
    few = [f"a.py::test_many[{n}]" for n in (0, 4, 9)]
    assert kept == [*few, "a.py::test_one", "b.py::test_two[x]", "b.py::test_two[y]"]
    assert plugin.left_out == {"a.py::test_many": (7, 10)}


def test_every_change_is_checked_against_them():
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8").replace("\\\n", " ")
    assert any(" make " in f" {line}" and " peers " in line for line in text.splitlines())
    assert all(NOT_RUN.values())


def test_versions_are_pinned():
    pins = Path(__file__).with_name("spconv") / "requirements.txt"
    lines = [line for line in pins.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert lines
    assert all(line.count("==") == 1 for line in lines)
    assert any(
        line.startswith("e3nn==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    )

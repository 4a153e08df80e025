"""Another package's own tests, run on our classes: what every such run needs.

A run is a pytest plugin that puts our classes in the place of the peer's before the tests are imported, skips what a
list names (each line with its reason), and counts that our classes were really met.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import pytest

__all__ = ["Substitution", "read_skips", "run_suite"]


def read_skips(path: Path) -> dict[str, str]:
    """Tests to skip (`file.py::test`, up to a parameter list, or a whole file), with the reason of each."""
    found: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            name, reason = line.split("|", 1)
            found[name.strip()] = reason.strip()
    return found


class Substitution(ABC):
    """The plugin.

    Attributes:
        met: how often our classes did what they are for.
        outcomes: tests by outcome.
        skipped: tests that the list names, with their reasons.
    """

    def __init__(self, skips: Path) -> None:
        self.skips = read_skips(skips)
        self.met = 0
        self.outcomes: dict[str, int] = {}
        self.skipped: dict[str, str] = {}

    @abstractmethod
    def substitute(self) -> None:
        """Replace the peer's classes, and have `met` counted."""

    def pytest_configure(self, config: pytest.Config) -> None:
        self.substitute()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            plain = item.nodeid.split("[")[0]
            names = {item.nodeid, plain, plain.split("::")[0]}
            for name, reason in self.skips.items():
                if any(own == name or own.endswith(f"/{name}") for own in names):
                    item.add_marker(pytest.mark.skip(reason=reason))
                    self.skipped[item.nodeid] = reason

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
            self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1


def run_suite(
    name: str, plugin: Substitution, suite: Path, files: Sequence[str], arguments: Sequence[str]
) -> tuple[int, str]:
    """Run files of a suite in this process; returns pytest's exit status and a line that sums up."""
    missing = [file for file in files if not (suite / file).exists()]
    if missing:
        return int(pytest.ExitCode.USAGE_ERROR), f"{suite} lacks {', '.join(missing)}"
    options = ["-c", os.devnull, "--rootdir", str(suite), "-p", "no:cacheprovider", "-p", "no:dash", "-q"]
    status = pytest.main([*options, *arguments, *(str(suite / file) for file in files)], plugins=[plugin])
    numbers = ", ".join(f"{count} {outcome}" for outcome, count in sorted(plugin.outcomes.items())) or "no tests"
    summary = (
        f"{name}'s suite: {numbers} ({len(plugin.skipped)} skipped by our list); our classes ran {plugin.met} times"
    )
    if status == 0 and (plugin.met == 0 or not plugin.outcomes.get("passed")):
        return 1, summary + "; the suite never met our classes"
    return int(status), summary

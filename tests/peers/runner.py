"""Another package's own tests, run on our classes: what every such run needs.

A run is a pytest plugin that puts our classes in the place of the peer's before the tests are imported, skips what a
list names (each line with its reason), and counts that our classes were really met.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

__all__ = ["ROOT", "Substitution", "main", "read_skips", "run_apart", "run_code", "run_suite"]

ROOT = Path(__file__).resolve().parents[2]
# Seconds that one test may take.
LONGEST = 900


def read_skips(path: Path) -> dict[str, str]:
    """Tests to skip (`file.py::test`, to a parameter list or its first dash, or a file), with the reason of each."""
    found: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            name, reason = line.split("|", 1)
            found[name.strip()] = reason.strip()
    return found


class Substitution(ABC):
    """The plugin; what is particular to a peer stands in the class attributes of its own.

    Attributes:
        NAME: the peer.
        SCRIPT: what runs its suite, in this folder; the name also tells the environment variable of the suite's folder.
        FOLDER: the folder of the peer's repository that holds its tests.
        FILES: files of the suite, or folders.
        MORE: files that meet our classes in passing; run with `--more`.
        SKIPS: the list of tests that are not run.
        suite: the folder that was given.
        met: how often our classes did what they are for.
        outcomes: tests by outcome.
        skipped: tests, and whole files, that the list names, with their reasons.
        most: of a test with more parameter sets, only so many are run, evenly spaced; 0: all.
        left_out: how many were not run, of how many, by test.
    """

    NAME: ClassVar[str]
    SCRIPT: ClassVar[str]
    FOLDER: ClassVar[str]
    FILES: ClassVar[tuple[str, ...]]
    MORE: ClassVar[tuple[str, ...]] = ()
    SKIPS: ClassVar[Path]

    def __init__(self) -> None:
        self.skips = read_skips(self.SKIPS)
        self.suite = Path()
        self.met = 0
        self.outcomes: dict[str, int] = {}
        self.skipped: dict[str, str] = {}
        self.most = 0
        self.left_out: dict[str, tuple[int, int]] = {}

    @classmethod
    def environment(cls) -> str:
        """The variable that may name the suite's folder."""
        return f"INSUM_PEER_{cls.SCRIPT.removeprefix('run_').removesuffix('.py').upper()}"

    @abstractmethod
    def substitute(self) -> None:
        """Replace the peer's classes, and have `met` counted."""

    def pytest_configure(self, config: pytest.Config) -> None:
        # A suite may draw parameter sets when it is imported: each run draws the same ones.
        random.seed(0)
        self.substitute()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            plain, _, parameters = item.nodeid.partition("[")
            names = {item.nodeid, plain, plain.split("::")[0], f"{plain}[{parameters.split('-')[0]}"}
            for name, reason in self.skips.items():
                if any(own == name or own.endswith(f"/{name}") for own in names):
                    item.add_marker(pytest.mark.skip(reason=reason))
                    self.skipped[item.nodeid] = reason
        if self.most:
            items[:] = self.sampled(items)

    def sampled(self, items: Sequence[pytest.Item]) -> list[pytest.Item]:
        """A few parameter sets of each test, the first and the last among them."""
        by_test: dict[str, list[pytest.Item]] = {}
        for item in items:
            by_test.setdefault(item.nodeid.split("[")[0], []).append(item)
        kept: list[pytest.Item] = []
        for name, each in by_test.items():
            if len(each) <= self.most:
                kept += each
                continue
            last = len(each) - 1
            kept += [each[round(at * last / max(1, self.most - 1))] for at in range(self.most)]
            self.left_out[name] = len(each) - self.most, len(each)
        return kept

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
            self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1


def run_suite(plugin: Substitution, suite: Path, arguments: Sequence[str], *, more: bool = False) -> tuple[int, str]:
    """Run files of a suite in this process; returns pytest's exit status and a line that sums up."""
    files = plugin.FILES + plugin.MORE if more else plugin.FILES
    missing = [file for file in files if not (suite / file).exists()]
    if missing:
        return int(pytest.ExitCode.USAGE_ERROR), f"{suite} lacks {', '.join(missing)}"
    plugin.suite = suite
    # A file that is skipped as a whole may not even be importable here.
    plugin.skipped = {file: plugin.skips[file] for file in files if file in plugin.skips}
    options = ["-c", os.devnull, "--rootdir", str(suite), "-p", "no:cacheprovider", "-p", "no:dash", "-q"]
    # Where a test takes longer than any should, its line is printed, and the run ends.
    options += ["-o", f"faulthandler_timeout={LONGEST}", "-o", "faulthandler_exit_on_timeout=true"]
    paths = [str(suite / file) for file in files if file not in plugin.skipped]
    status = pytest.main([*options, *arguments, *paths], plugins=[plugin])
    numbers = ", ".join(f"{count} {outcome}" for outcome, count in sorted(plugin.outcomes.items())) or "no tests"
    summary = (
        f"{plugin.NAME}'s suite: {numbers} ({len(plugin.skipped)} skipped by our list); "
        f"our classes ran {plugin.met} times"
    )
    if plugin.left_out:
        tests = ", ".join(f"{name.split('::')[-1]} {out} of {of}" for name, (out, of) in plugin.left_out.items())
        summary += f"\n  parameter sets left out for the time they take: {tests}"
    if status == 0 and (plugin.met == 0 or not plugin.outcomes.get("passed")):
        return 1, summary + "; the suite never met our classes"
    return int(status), summary


def main(plugin: Substitution, description: str | None) -> int:
    """The command line of a peer's script; returns the exit status."""
    variable = plugin.environment()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = f"the peer's folder `{plugin.FOLDER}`"
    parser.add_argument("--suite", type=Path, default=os.environ.get(variable), help=text)
    if plugin.MORE:
        parser.add_argument("--more", action="store_true", help="also files that meet our classes in passing")
    parser.add_argument("--most", type=int, default=0, help="parameter sets of each test that are run; all by default")
    known, rest = parser.parse_known_args()
    plugin.most = known.most
    if known.suite is None:
        parser.error(f"give --suite PATH, or set {variable}")
    status, summary = run_suite(plugin, Path(known.suite).resolve(), rest, more=getattr(known, "more", False))
    print(summary)
    return status


# For the tests of each peer.


def run_apart(kind: type[Substitution], *arguments: str) -> None:
    """Run a peer's suite in a process of its own, for a substitution lasts as long as its process; skip without one."""
    suite = os.environ.get(kind.environment())
    if not suite:
        pytest.skip(f"set {kind.environment()} to the folder `{kind.FOLDER}` of a checkout of {kind.NAME}")
    command = [sys.executable, str(ROOT / "tests" / "peers" / kind.SCRIPT), "--suite", suite, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def run_code(code: str) -> list[str]:
    """Run lines of Python in a process of its own; returns the words that they print."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()

"""Supervised runs: the records of a run on disk, and the process that restarts a crashed one.

While a measurement is in progress, the last record of the result file says so. When the subprocess crashes, hangs, or
leaves the device unusable, the supervisor makes that record a failed one and starts another process, which continues
after it.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from benchmarks.records import Record, read, write
from benchmarks.registry import Mode

__all__ = ["BUILDING", "MEASURING", "State", "supervise"]

_POLL_S = 0.5
# Consecutive processes that may end without a measurement.
_FRUITLESS = 3
# Gates of the last record of an unfinished file: what is in progress, and that more of its case follows.
BUILDING, MEASURING = "not run: the problem is being built", "not run: in progress"
_MORE = "not run: the run was interrupted"


@dataclass
class State:
    """Records of a run, in memory and, with a path, on disk.

    Attributes:
        path: the result file.
        records: all that was measured.
        unfinished: cases of which a continued run lacks something.
    """

    path: Path | None = None
    records: list[Record] = field(default_factory=list[Record])
    unfinished: set[str] = field(default_factory=set[str])

    @classmethod
    def of(cls, path: Path | None, *, resume: bool) -> State:
        """Read the state of a result file, or make a new one. Measurements that were not run are dropped, to be run."""
        found = read(path) if path is not None and resume and path.exists() else []
        measured = [entry for entry in found if _was_run(entry)]
        state = cls(path, measured, {entry["case"] for entry in found if not _was_run(entry)})
        state.keep()
        return state

    def known(self, case: str, provider: str, mode: Mode) -> bool:
        """Whether there is a record of a measurement."""
        return any((r["case"], r["provider"], r["mode"]) == (case, provider, mode) for r in self.records)

    def finished(self, case: str) -> bool:
        """Whether nothing is left to measure of a case, before it is begun."""
        return case not in self.unfinished and any(r["case"] == case for r in self.records)

    def begin(self, entry: Record) -> None:
        """Note in the file what is in progress, as a record whose gate is `BUILDING` or `MEASURING`."""
        self.keep(entry)

    def add(self, entry: Record) -> None:
        """Add a record, and write the file: an interrupted run keeps its records."""
        self.records.append(entry)
        self.keep(cast(Record, {**entry, "gate": _MORE, "ms": None}))

    def keep(self, *unfinished: Record) -> None:
        """Write the file; without arguments it says that what was begun is finished."""
        if self.path is not None:
            write(self.path, [*self.records, *unfinished])


def _was_run(entry: Record) -> bool:
    return not entry["gate"].startswith("not run")


def supervise(
    arguments: Sequence[str],
    out: Path,
    *,
    limit: float,
    budget: float,
    command: Sequence[str] = (sys.executable, "-m", "benchmarks.run"),
) -> int:
    """Run `benchmarks.run` with these arguments in another process, and restart it when it crashes or hangs.

    Args:
        arguments: of the command line, `--supervise` among them.
        out: the result file.
        limit: seconds that one measurement may take.
        budget: seconds for all.
        command: what runs the benchmarks.

    Returns:
        The last process's result.
    """
    end = time.monotonic() + budget
    own = [argument for argument in arguments if argument != "--supervise"]
    fruitless = 0
    while fruitless < _FRUITLESS:
        before = _count(out) if "--resume" in own else 0
        left = [] if math.isinf(end) else ["--budget", str(max(0.0, end - time.monotonic()))]
        # Of a repeated option the last one counts.
        ended = _watch(subprocess.Popen([*command, *own, *left]), out, limit)
        if ended in ("0", "1", "2"):
            return int(ended)
        _blame(out, ended if " " in ended else f"the process ended with {ended}")
        fruitless = 0 if _count(out) > before + 1 else fruitless + 1
        own = [*own, "--resume"]
    print(f"gave up after {fruitless} processes in a row that measured nothing", file=sys.stderr)
    return 1


def _watch(worker: subprocess.Popen[bytes], out: Path, limit: float) -> str:
    """Wait for the process; return its exit status, or why it was killed."""
    start = time.time()
    try:
        while True:
            try:
                return str(worker.wait(_POLL_S))
            except subprocess.TimeoutExpired:
                # The file was last written when the measurement began.
                since = max(start, out.stat().st_mtime) if out.exists() else math.inf
                if time.time() - since > limit and _last(out) in (BUILDING, MEASURING):
                    return f"no result after {limit:g} s"
    finally:
        if worker.poll() is None:
            worker.kill()
            worker.wait()


def _count(out: Path) -> int:
    return sum(map(_was_run, read(out))) if out.exists() else 0


def _last(out: Path) -> str:
    """The gate of the last record."""
    return next((entry["gate"] for entry in reversed(read(out))), "")


def _blame(out: Path, why: str) -> None:
    """Record the measurement that was in progress as failed; a problem that could not be built is the whole case."""
    records = read(out) if out.exists() else []
    if records and (gate := records[-1]["gate"]) in (BUILDING, MEASURING):
        *measured, last = records
        failed: Record = {**last, "gate": f"error: {'the problem: ' if gate == BUILDING else ''}{why}"}
        more: Record = {**last, "gate": _MORE}
        write(out, [*measured, failed, *([] if gate == BUILDING else [more])])

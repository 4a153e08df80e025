"""Supervised runs: the state of a run on disk, and the process that restarts a crashed one.

Next to the result file `x.json` the file `x.state` holds the finished cases and the measurement in progress. When the
subprocess crashes, hangs, or leaves the device unusable, the supervisor records that measurement as failed and starts
another process, which continues after it.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, cast

import torch

from benchmarks.records import Machine, Record, read, record, this_machine, write
from benchmarks.registry import OURS, Mode

__all__ = ["State", "supervise"]

_POLL_S = 0.5
# Consecutive processes that may end without a measurement.
_FRUITLESS = 3


class _Running(TypedDict):
    """The measurement in progress; without provider and mode, the problem and its oracle are being built."""

    case: str
    provider: str | None
    mode: Mode | None
    since: float


@dataclass
class State:
    """Records and progress of a run, in memory and, with a path, on disk.

    Attributes:
        path: the result file.
        records: all that was measured.
        done: names of finished cases.
        running: what is in progress.
    """

    path: Path | None = None
    records: list[Record] = field(default_factory=list[Record])
    done: list[str] = field(default_factory=list[str])
    running: _Running | None = None

    @classmethod
    def of(cls, path: Path | None, *, resume: bool) -> State:
        """Read the state of a result file, or make a new one. Measurements that were not run are dropped, to be run."""
        if path is None or not resume or not path.exists():
            state = cls(path)
            state._store()
            if path is not None:
                write(path, [])
            return state
        records = [entry for entry in read(path) if not entry["gate"].startswith("not run")]
        beside = path.with_suffix(".state")
        known = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {"done": []}
        unfinished = {entry["case"] for entry in read(path)} - {entry["case"] for entry in records}
        return cls(path, records, [name for name in known["done"] if name not in unfinished])

    def known(self, case: str, provider: str, mode: Mode) -> bool:
        """Whether there is a record of a measurement."""
        return any((r["case"], r["provider"], r["mode"]) == (case, provider, mode) for r in self.records)

    def finished(self, case: str) -> bool:
        """Whether nothing is left to measure of a case."""
        return case in self.done

    def begin(self, case: str, provider: str | None = None, mode: Mode | None = None) -> None:
        """Note what is in progress."""
        self.running = _Running(case=case, provider=provider, mode=mode, since=time.time())
        self._store()

    def add(self, entry: Record) -> None:
        """Add a record, and write the file: an interrupted run keeps its records."""
        self.records.append(entry)
        self.keep()

    def keep(self) -> None:
        """Write the file."""
        if self.path is not None:
            write(self.path, self.records)

    def finish(self, case: str) -> None:
        """Note that a case is finished, unless the budget ended it."""
        if not any(r["case"] == case and r["gate"].startswith("not run") for r in self.records):
            self.done.append(case)
        self.running = None
        self._store()

    def end(self) -> None:
        """Note that nothing is in progress."""
        self.running = None
        self._store()

    def _store(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".state")
        temporary = beside.with_suffix(".state.part")
        temporary.write_text(json.dumps({"done": self.done, "running": self.running}), encoding="utf-8")
        temporary.replace(beside)


def supervise(
    arguments: Sequence[str],
    out: Path,
    *,
    limit: float,
    budget: float,
    commit: str | None = None,
    command: Sequence[str] = (sys.executable, "-m", "benchmarks.run"),
) -> int:
    """Run `benchmarks.run` with these arguments in another process, and restart it when it crashes or hangs.

    Args:
        arguments: of the command line, `--supervise` among them.
        out: the result file.
        limit: seconds that one measurement may take.
        budget: seconds for all.
        commit: see `benchmarks.records.this_machine`.
        command: what runs the benchmarks.

    Returns:
        The last process's result.
    """
    end = time.monotonic() + budget
    fruitless = 0
    extra = ["--resume"] if "--resume" in arguments else []
    while True:
        before = len(read(out)) if extra and out.exists() else 0
        left = [] if math.isinf(end) else ["--budget", str(max(0.0, end - time.monotonic()))]
        own = [argument for argument in arguments if argument != "--supervise"]
        # Of a repeated option the last one counts.
        worker = subprocess.Popen([*command, *own, *left, *extra])
        ended = _watch(worker, out, limit)
        if ended in ("0", "1", "2"):
            return int(ended)
        _blame(out, ended, commit)
        extra = ["--resume"]
        fruitless = 0 if len(read(out)) > before + 1 else fruitless + 1
        if fruitless >= _FRUITLESS:
            print(f"gave up after {fruitless} processes in a row that measured nothing", file=sys.stderr)
            return 1


def _watch(worker: subprocess.Popen[bytes], out: Path, limit: float) -> str:
    """Wait for the process; return its exit status, or why it was killed."""
    try:
        while True:
            try:
                return str(worker.wait(_POLL_S))
            except subprocess.TimeoutExpired:
                running = _running(out)
                if running is not None and time.time() - running["since"] > limit:
                    return f"no result after {limit:g} s"
    finally:
        if worker.poll() is None:
            worker.kill()
            worker.wait()


def _running(out: Path) -> _Running | None:
    beside = out.with_suffix(".state")
    return json.loads(beside.read_text(encoding="utf-8"))["running"] if beside.exists() else None


def _blame(out: Path, ended: str, commit: str | None) -> None:
    """Record the measurement that was in progress as failed."""
    running = _running(out)
    records = read(out) if out.exists() else []
    if running is None:
        return
    case, provider, mode = running["case"], running["provider"] or OURS, running["mode"] or "fwd"
    known = any((r["case"], r["provider"], r["mode"]) == (case, provider, mode) for r in records)
    if not known:
        machine = (
            cast(Machine, {key: records[-1][key] for key in Machine.__annotations__})
            if records
            else this_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"), commit)
        )
        why = ended if " " in ended else f"the process ended with {ended}"
        what = "error: " if running["provider"] else "error: the problem: "
        write(out, [*records, record(machine, case, provider, mode, what + why)])
    beside = out.with_suffix(".state")
    done = json.loads(beside.read_text(encoding="utf-8"))["done"]
    # Where the problem could not be built, nothing is left to measure in this case.
    done += [case] if running["provider"] is None else []
    beside.write_text(json.dumps({"done": done, "running": None}), encoding="utf-8")

"""Folders of results: every run as measured, and of these, for each device and family, the one that tables are made of.

    results/history/<date>-<device>*.json     one file a run, never changed
    results/current/<device>/<family>.json    copied from one of them: one family, one commit, one machine

`python -m benchmarks.archive` writes `current` anew; `--check` only compares. A family's records of one file and one
commit are candidates; of those that cover at least three quarters of the representative measurements that the most
complete candidate covers, the newest is taken. Records of different commits are never combined.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import records
from benchmarks.records import Record
from benchmarks.registry import REGISTRY, is_ours, load

__all__ = [
    "CURRENT",
    "HISTORY",
    "Candidate",
    "candidates",
    "current_files",
    "device_slug",
    "new_file",
    "select",
    "update",
]

RESULTS = Path(__file__).with_name("results")
HISTORY, CURRENT = RESULTS / "history", RESULTS / "current"
COMPLETE = 0.75


class Candidate(NamedTuple):
    """The records of one family on one device, of one commit, from one file.

    Attributes:
        device: folder name of the device; see `device_slug`.
        family: first part of the cases' names.
        commit: of this project.
        source: the file of the history.
        records: in the file's order.
    """

    device: str
    family: str
    commit: str | None
    source: Path
    records: Sequence[Record]

    @property
    def utc(self) -> str:
        """When its last measurement ended."""
        return max(r["utc"] for r in self.records)

    def compared(self) -> set[tuple[str, str]]:
        """The cases and modes in which both we and a baseline were timed."""
        timed: dict[tuple[str, str], set[bool]] = {}
        for record in self.records:
            if record["ms"] is not None:
                timed.setdefault((record["case"], record["mode"]), set()).add(is_ours(record["provider"]))
        return {where for where, who in timed.items() if len(who) == 2}


def device_slug(gpu: str, cores: int | None) -> str:
    """Return the folder name of a device; a host pinned to one core is a device of its own."""
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return f"{slug}-one-core" if cores == 1 else slug


def new_file(gpu: str, cores: int | None) -> Path:
    """Return the path of a new file of the history."""
    now = datetime.datetime.now(datetime.UTC)
    return HISTORY / f"{now:%Y-%m-%d-%H%M%S}-{device_slug(gpu, cores)}.json"


def candidates(files: Iterable[Path]) -> list[Candidate]:
    """Split files into candidates, in the files' order."""
    found: list[Candidate] = []
    for file in files:
        groups: dict[tuple[str, str, str | None], list[Record]] = {}
        for record in records.read(file):
            family = record["case"].partition("/")[0]
            key = (device_slug(record["gpu"], record["cores"]), family, record["commit"])
            groups.setdefault(key, []).append(record)
        found += [Candidate(*key, file, mine) for key, mine in groups.items()]
    return found


def select(found: Iterable[Candidate]) -> dict[tuple[str, str], Candidate]:
    """Choose one candidate for each device and family; see the module's description."""
    quick = {case.name for case in load() if case.quick}
    groups: dict[tuple[str, str], list[tuple[int, Candidate]]] = {}
    for candidate in found:
        compared = candidate.compared()
        # Of a case that no longer exists nothing can be measured again, so it does not count.
        known = {where for where in compared if where[0] in quick}
        if any(r["case"] in {case.name for case in REGISTRY} for r in candidate.records):
            groups.setdefault((candidate.device, candidate.family), []).append((len(known), candidate))
    chosen: dict[tuple[str, str], Candidate] = {}
    for key, group in sorted(groups.items()):
        most = max(count for count, _ in group)
        if most:
            complete = [candidate for count, candidate in group if count >= COMPLETE * most]
            chosen[key] = max(complete, key=lambda c: c.utc)
    return chosen


def _wanted(history: Path) -> Mapping[str, Candidate]:
    """The files of `current`, relative to it."""
    chosen = select(candidates(sorted(history.glob("*.json"))))
    return {f"{device}/{family}.json": candidate for (device, family), candidate in chosen.items()}


def update(results: Path = RESULTS) -> list[Path]:
    """Write `current` anew from `history`."""
    current = results / "current"
    shutil.rmtree(current, ignore_errors=True)
    written: list[Path] = []
    for name, candidate in _wanted(results / "history").items():
        records.write(current / name, candidate.records)
        written.append(current / name)
    return written


def stale(results: Path = RESULTS) -> list[str]:
    """Name the files of `current` that differ from what `history` gives."""
    current = results / "current"
    wanted = _wanted(results / "history")
    there = {path.relative_to(current).as_posix() for path in current.rglob("*.json")}
    differs = [
        name
        for name, candidate in wanted.items()
        if name in there and records.read(current / name) != list(candidate.records)
    ]
    return sorted({*there ^ set(wanted), *differs})


def current_files(results: Path = RESULTS) -> list[Path]:
    """List the files of `current`."""
    return sorted((results / "current").rglob("*.json"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.archive", description="Update results/current.")
    parser.add_argument("--check", action="store_true", help="write nothing; return 1 when current is out of date")
    options = parser.parse_args(arguments)
    if options.check:
        wrong = stale()
        print("\n".join(f"out of date: benchmarks/results/current/{name}" for name in wrong) or "up to date")
        return 1 if wrong else 0
    print("\n".join(str(path) for path in update()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

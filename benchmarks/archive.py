"""Folders of results: every run as measured, and of these, for each device and family, the one that tables are made of.

    results/history/<date>-<device>*.json            one file a run, never changed
    results/current/<device>/<family>.json           copied from one of them: one family, one commit, one machine
    results/history/<kind>/<date>-<device>*.json     runs of commands with a layout of their own; see `KINDS`
    results/current/<device>/<kind>/<family>.json    copied from one of these

`python -m benchmarks.archive` rewrites `current`; `--check` only compares. Files that `--out` wrote, on another machine
for example, come into the history by `python -m benchmarks.archive FILE ...`.

A family's records of one file and one commit are candidates; of those that have at least three quarters of the
comparisons that the most complete candidate has, the newest is taken. A comparison is a representative case and mode in
which we and a strong baseline were timed: one whose least time in all of the history is within a quarter of the least
of any. For the other kinds `Kind.counts` says what a comparison is. Records of different commits are never combined.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import records
from benchmarks.records import Record
from benchmarks.registry import is_ours, load

__all__ = [
    "CPU",
    "CURRENT",
    "DEVICE",
    "HISTORY",
    "KINDS",
    "Candidate",
    "Kind",
    "add",
    "candidates",
    "current_entries",
    "current_files",
    "device_slug",
    "new_file",
    "select",
    "update",
]

RESULTS = Path(__file__).with_name("results")
HISTORY, CURRENT = RESULTS / "history", RESULTS / "current"
# The device whose numbers README and the plots show.
DEVICE = "nvidia-h200"
# The same of a CPU.
CPU = "intel-r-xeon-r-processor-1-threads-one-core"
# Devices whose records are kept but not shown: they were made before C functions, which are what runs on a CPU.
RETIRED = ("amd-epyc-2-threads",)
COMPLETE = 0.75
STRONG = 1.25


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

    def timed(self) -> Iterator[tuple[tuple[str, str], str, float]]:
        """List case and mode, provider, and milliseconds of what was timed."""
        for record in self.records:
            if record["ms"] is not None:
                yield (record["case"], record["mode"]), record["provider"], record["ms"]["p50"]


class Kind(NamedTuple):
    """Results that are not `Record`s: lists of dictionaries with the keys of `Machine`.

    Attributes:
        key: that entries of this kind alone have.
        family: which file of `current` an entry belongs to.
        counts: whether an entry makes a run more complete.
    """

    key: str
    family: Callable[[Any], str]
    counts: Callable[[Any], bool]


# Folder -> what lies in it.
KINDS = {
    "first_steps": Kind(
        "process", lambda e: e["case"].partition("/")[0], lambda e: e["process"] == "cold" and bool(e["steps"])
    ),
    "data_parallel": Kind("ranks", lambda e: e["network"], lambda e: bool(e["seconds"])),
    "selection": Kind("stored_us", lambda _: "all", lambda _: True),
}


def device_slug(gpu: str, cores: int | None) -> str:
    """Return the folder name of a device; a host pinned to one core is a device of its own."""
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return f"{slug}-one-core" if cores == 1 else slug


def new_file(gpu: str, cores: int | None, kind: str = "") -> Path:
    """Return the path of a new file of the history, of a kind of `KINDS` or of records."""
    now = datetime.datetime.now(datetime.UTC)
    return HISTORY / kind / f"{now:%Y-%m-%d-%H%M%S}-{device_slug(gpu, cores)}.json"


def add(file: Path, results: Path = RESULTS) -> Path:
    """Copy a file of results into the history, under the time of its last measurement and its device."""
    entries = json.loads(file.read_text(encoding="utf-8"))
    kind = next((name for name, kind in KINDS.items() if kind.key in entries[0]), "")
    ended = datetime.datetime.fromisoformat(max(entry["utc"] for entry in entries))
    name = f"{ended:%Y-%m-%d-%H%M%S}-{device_slug(entries[0]['gpu'], entries[0]['cores'])}.json"
    target = results / "history" / kind / name
    records.write(target, entries)
    return target


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


def select(found: Sequence[Candidate]) -> dict[tuple[str, str], Candidate]:
    """Choose one candidate for each device and family; see the module's description."""
    quick = {case.name for case in load() if case.quick}
    groups: dict[tuple[str, str], list[Candidate]] = {}
    for candidate in found:
        groups.setdefault((candidate.device, candidate.family), []).append(candidate)
    chosen: dict[tuple[str, str], Candidate] = {}
    for key, group in sorted(groups.items()):
        least: dict[tuple[str, str], dict[str, float]] = {}
        for candidate in group:
            for where, provider, ms in candidate.timed():
                if where[0] in quick and not is_ours(provider):
                    times = least.setdefault(where, {})
                    times[provider] = min(times.get(provider, ms), ms)
        strong = {
            where: {provider for provider, ms in times.items() if ms <= STRONG * min(times.values())}
            for where, times in least.items()
        }
        counts = [_comparisons(candidate, strong) for candidate in group]
        if most := max(counts):
            complete = [c for c, count in zip(group, counts, strict=True) if count >= COMPLETE * most]
            chosen[key] = max(complete, key=lambda c: c.utc)
    return chosen


def _comparisons(candidate: Candidate, strong: Mapping[tuple[str, str], set[str]]) -> int:
    """Count the cases and modes in which we and a strong baseline were timed."""
    timed: dict[tuple[str, str], set[str]] = {}
    for where, provider, _ in candidate.timed():
        timed.setdefault(where, set()).add("ours" if is_ours(provider) else provider)
    found = [timed.get(where, set()) & {"ours", *providers} for where, providers in strong.items()]
    return sum("ours" in mine and len(mine) > 1 for mine in found)


def _newest(history: Path, kind: str) -> dict[tuple[str, str], list[Any]]:
    """The entries of a kind, by device and family: those of the newest complete file and commit."""
    rule = KINDS[kind]
    groups: dict[tuple[str, str], dict[tuple[str, Path], list[Any]]] = {}
    for file in sorted((history / kind).glob("*.json")):
        for entry in json.loads(file.read_text(encoding="utf-8")):
            runs = groups.setdefault((device_slug(entry["gpu"], entry["cores"]), rule.family(entry)), {})
            runs.setdefault((str(entry["commit"]), file), []).append(entry)
    found: dict[tuple[str, str], list[Any]] = {}
    for key, runs in groups.items():
        counts = {run: sum(map(rule.counts, entries)) for run, entries in runs.items()}
        if most := max(counts.values()):
            complete = [run for run, count in counts.items() if count >= COMPLETE * most]
            found[key] = runs[max(complete, key=lambda run: (max(e.get("utc", "") for e in runs[run]), run[1].name))]
    return found


def _wanted(history: Path) -> Mapping[str, Sequence[Any]]:
    """The files of `current`, relative to it, and what they hold."""
    chosen = select([c for c in candidates(sorted(history.glob("*.json"))) if c.device not in RETIRED])
    found: dict[str, Sequence[Any]] = {f"{device}/{family}.json": c.records for (device, family), c in chosen.items()}
    for kind in KINDS:
        found |= {f"{device}/{kind}/{family}.json": e for (device, family), e in _newest(history, kind).items()}
    return found


def update(results: Path = RESULTS) -> list[Path]:
    """Rewrite `current` from `history`."""
    current = results / "current"
    shutil.rmtree(current, ignore_errors=True)
    written: list[Path] = []
    for name, entries in _wanted(results / "history").items():
        records.write(current / name, entries)
        written.append(current / name)
    return written


def stale(results: Path = RESULTS) -> list[str]:
    """Name the files of `current` that differ from what `history` gives."""
    current = results / "current"
    wanted = _wanted(results / "history")
    there = {path.relative_to(current).as_posix() for path in current.rglob("*.json")}
    differs = [
        name
        for name, entries in wanted.items()
        if name in there and json.loads((current / name).read_text(encoding="utf-8")) != list(entries)
    ]
    return sorted({*there ^ set(wanted), *differs})


def current_files(results: Path = RESULTS) -> list[Path]:
    """List the files of records in `current`."""
    return sorted((results / "current").glob("*/*.json"))


def current_entries(kind: str, device: str = "*", results: Path = RESULTS) -> list[Any]:
    """Read what `current` holds of a kind, of one device or all."""
    files = sorted((results / "current").glob(f"{device}/{kind}/*.json"))
    return [entry for file in files for entry in json.loads(file.read_text(encoding="utf-8"))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.archive", description="Update results/current.")
    parser.add_argument("--check", action="store_true", help="write nothing; return 1 when current is out of date")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="to take into the history first")
    options = parser.parse_args(arguments)
    if options.check:
        wrong = stale()
        print("\n".join(f"out of date: benchmarks/results/current/{name}" for name in wrong) or "up to date")
        return 1 if wrong else 0
    for file in options.files:
        print(f"{file} is {add(file)}")
    update()
    return 0


if __name__ == "__main__":
    sys.exit(main())

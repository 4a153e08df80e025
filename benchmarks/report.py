"""Tables of ours beside every peer, from result files alone: `python -m benchmarks.report results/*.json`.

Times are medians in microseconds. A peer's cell says `absent`, `error`, `wrong` or `not run` where it has no time, and
why stands below the tables; `wrong` is a result outside the tolerance. The last column holds the marks.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import marks, records
from benchmarks.records import Record
from benchmarks.registry import is_ours
from benchmarks.widths import width_table

__all__ = ["Row", "main", "read", "rows", "table"]

FIRST_CALL_S = 15.0
# Of rows whose host was held to one core, where a call does not wait for a thread to move.
ONE_CORE = ", host on one core"


class Row(NamedTuple):
    """One line: a case in one mode on one device.

    Attributes:
        case: the case's name.
        mode: what was timed.
        gpu: the device; and that the host was held to one core, where it was.
        ours: our fastest provider that passed, and its median in milliseconds.
        peer: the fastest other provider that passed.
        ratio: the peer's time over ours; above 1 we are faster.
        missing: providers without a timing, with the reason.
        group: the records, by provider.
    """

    case: str
    mode: str
    gpu: str
    ours: tuple[str, float] | None
    peer: tuple[str, float] | None
    ratio: float | None
    missing: tuple[str, ...]
    group: Mapping[str, Record]

    @property
    def family(self) -> str:
        """First part of the case's name."""
        return self.case.partition("/")[0]


def read(paths: Iterable[Path]) -> list[Record]:
    """The records of result files.

    Raises:
        ValueError: a file is not a list of records of a known schema.
    """
    return [entry for path in paths for entry in records.read(path)]


def rows(entries: Sequence[Record]) -> list[Row]:
    """One row for each case, mode and device; of a provider measured twice the later result counts."""
    latest: dict[tuple[str, str, str], dict[str, Record]] = {}
    for record in sorted(entries, key=lambda r: r["utc"]):
        where = record["gpu"] + (ONE_CORE if record["cores"] == 1 else "")
        latest.setdefault((record["case"], record["mode"], where), {})[record["provider"]] = record
    result: list[Row] = []
    for (case, mode, gpu), group in latest.items():
        timed = [(r["ms"]["p50"], name) for name, r in group.items() if r["ms"] is not None]
        ours = min(((name, t) for t, name in timed if is_ours(name)), key=lambda x: x[1], default=None)
        peer = min(((name, t) for t, name in timed if not is_ours(name)), key=lambda x: x[1], default=None)
        ratio = peer[1] / ours[1] if ours and peer else None
        missing = tuple(f"{name}: {r['gate']}" for name, r in group.items() if r["ms"] is None)
        result.append(Row(case, mode, gpu, ours, peer, ratio, missing, group))
    return result


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _cell(record: Record | None) -> str:
    """A time with its error, or why there is none."""
    if record is None:
        return ""
    if record["ms"] is None:
        word = record["gate"].partition(":")[0]
        return "absent" if word == "unavailable" else word
    return f"{record['ms']['p50'] * 1e3:.1f} ({record['max_rel_err']:.0e})"


def _family_table(found: Sequence[Row]) -> list[str]:
    peers = list(dict.fromkeys(name for row in found for name in row.group if not is_ours(name)))
    head = ["case", "mode", "ours", "us (error)", *peers, "best peer / ours", "peak MiB, ours / least", "marks"]
    replayed = any(r["replay"] is not None for row in found for r in row.group.values())
    if replayed:
        head.insert(-2, "replayed: ours, best peer, ratio")
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(["---"] * len(head)) + "|"]
    for row in found:
        name = row.ours[0] if row.ours else "none passed"
        mine = row.group.get(name)
        own = _cell(mine) if mine else "; ".join(m for m in row.missing if is_ours(m.partition(":")[0]))
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
        verdicts = marks.judge(row.case, row.mode, row.group)
        judged = "; ".join(f"{'met' if v.met else '**missed**'} {v.asked}: {v.found}" for v in verdicts)
        mode = row.mode + (ONE_CORE if row.gpu.endswith(ONE_CORE) else "")
        cells = [row.case, mode, name, own, *(_cell(row.group.get(p)) for p in peers), ratio, _peak(row), judged]
        if replayed:
            cells.insert(-2, _replays(row.group))
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    for mode in dict.fromkeys(row.mode for row in found):
        ratios = [row.ratio for row in found if row.mode == mode and row.ratio is not None]
        if ratios:
            summary = f"geometric mean {geometric_mean(ratios):.2f}x over {len(ratios)} cases, least {min(ratios):.2f}x"
            lines += ["", f"{found[0].family} {mode}: {summary}"]
    return lines


def _replays(group: Mapping[str, Record]) -> str:
    """The fastest replays from a CUDA graph, of ours and of a peer's."""
    times = {n: r["replay"]["ms"]["p50"] * 1e3 for n, r in group.items() if r["replay"] and r["replay"]["ms"]}
    mine = min((t for n, t in times.items() if is_ours(n)), default=None)
    other = min((t for n, t in times.items() if not is_ours(n)), default=None)
    cells = ["none" if t is None else f"{t:.1f}" for t in (mine, other)]
    return ", ".join([*cells, f"{other / mine:.2f}x"] if mine and other else cells)


def _peak(row: Row) -> str:
    mine = row.group[row.ours[0]]["peak_bytes"] if row.ours else None
    other = [r["peak_bytes"] for n, r in row.group.items() if not is_ours(n) and r["peak_bytes"] is not None]
    return "" if mine is None or not other else f"{mine / 2**20:.1f} / {min(other) / 2**20:.1f}"


def _summary(found: Sequence[Row]) -> list[str]:
    """Marks over many cases, first calls, and how many marks were met."""
    verdicts = [v for row in found for v in marks.judge(row.case, row.mode, row.group)]
    over = marks.judge_means({(row.case, row.mode): row.group for row in found})
    lines = [f"- {'met' if v.met else '**missed**'} {v.asked}: {v.found}" for v in over]
    first = [
        (r["compile_s"], f"{row.case} {row.mode} {name}")
        for row in found
        for name, r in row.group.items()
        if is_ours(name) and r["compile_s"] is not None
    ]
    if first:
        slow, where = max(first)
        word = "met" if slow <= FIRST_CALL_S else "**missed**"
        lines.append(f"- {word} first call <= {FIRST_CALL_S:g} s: {slow:.1f} s ({where})")
    both = [*verdicts, *over]
    if both:
        lines.append(f"- {sum(v.met for v in both)} of {len(both)} marks met")
    return lines


def table(entries: Sequence[Record]) -> str:
    """Markdown: a table for each family, marks, machines, and what has no timing."""
    found = rows(entries)
    lines: list[str] = []
    for family in dict.fromkeys(row.family for row in found):
        mine = [row for row in found if row.family == family]
        lines += [f"## {family}", "", *_family_table(mine), ""]
        for gpu in dict.fromkeys(row.gpu for row in mine):
            widths = width_table({row.case: row.group for row in mine if row.gpu == gpu and row.mode == "fwd"})
            lines += [f"### Reduction widths, {gpu}", "", *widths, ""] if widths else []
    summary = _summary(found)
    lines += ["## Marks", "", *summary, ""] if summary else []
    machines = sorted({f"{r['gpu']}, torch {r['torch']}, triton {r['triton']}, driver {r['driver']}" for r in entries})
    lines += [*(f"measured on {machine}" for machine in machines)]
    commits = sorted({f"{r['commit']}{' with changes' if r['dirty'] else ''}" for r in entries})
    lines += [f"at commit {commit}" for commit in commits]
    gaps: dict[str, list[str]] = {}
    for row in found:
        for reason in row.missing:
            gaps.setdefault(reason, []).append(f"{row.case} {row.mode}")
    if gaps:
        lines += ["", "Without a timing:", ""]
        lines += [f"- {why} ({len(of)}: {of[0]}{', ..' if of[1:] else ''})" for why, of in gaps.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--missed", action="store_true", help="only the lines that missed a mark, slowest first")
    options = parser.parse_args(arguments)
    entries = read(options.files)
    if options.missed:
        missed = [
            (row.ratio or 0.0, f"{row.case} {row.mode}: {v.asked}, found {v.found}")
            for row in rows(entries)
            for v in marks.judge(row.case, row.mode, row.group)
            if not v.met
        ]
        print("\n".join(line for _, line in sorted(missed)))
        return 0
    print(table(entries))
    return 0


if __name__ == "__main__":
    sys.exit(main())

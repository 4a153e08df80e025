"""A table of ours against the best peer, from result files alone: `python -m benchmarks.report results/*.json`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.registry import is_ours
from benchmarks.run import RECORD, SCHEMA, Record

__all__ = ["Row", "main", "read", "rows", "table"]


class Row(NamedTuple):
    """One line: a case in one mode on one device.

    Attributes:
        case: the case's name.
        mode: what was timed.
        gpu: the device.
        ours: our fastest provider that passed, and its median in milliseconds.
        peer: the fastest other provider that passed.
        ratio: the peer's time over ours; above 1 we are faster.
        missing: providers without a timing, with the reason.
    """

    case: str
    mode: str
    gpu: str
    ours: tuple[str, float] | None
    peer: tuple[str, float] | None
    ratio: float | None
    missing: tuple[str, ...]


def read(paths: Iterable[Path]) -> list[Record]:
    """The records of result files.

    Raises:
        ValueError: a file is not a list of records of this schema.
    """
    records: list[Record] = []
    for path in paths:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, list) or any(set(record) != set(RECORD) for record in found):
            raise ValueError(f"{path}: a list of records with exactly the keys {', '.join(RECORD)} was expected")
        if any(record["schema"] != SCHEMA for record in found):
            raise ValueError(f"{path}: schema {SCHEMA} was expected")
        records.extend(found)
    return records


def rows(records: Sequence[Record]) -> list[Row]:
    """One row for each case, mode and device; of a provider measured twice the later result counts."""
    latest: dict[tuple[str, str, str], dict[str, Record]] = {}
    for record in sorted(records, key=lambda r: r["utc"]):
        latest.setdefault((record["case"], record["mode"], record["gpu"]), {})[record["provider"]] = record
    result: list[Row] = []
    for (case, mode, gpu), providers in latest.items():
        timed = [(r["ms"]["p50"], name) for name, r in providers.items() if r["ms"] is not None]
        ours = min(((name, t) for t, name in timed if is_ours(name)), key=lambda x: x[1], default=None)
        peer = min(((name, t) for t, name in timed if not is_ours(name)), key=lambda x: x[1], default=None)
        ratio = peer[1] / ours[1] if ours and peer else None
        missing = tuple(f"{name}: {r['gate']}" for name, r in providers.items() if r["ms"] is None)
        result.append(Row(case, mode, gpu, ours, peer, ratio, missing))
    return result


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def table(records: Sequence[Record]) -> str:
    """Markdown: a line for each row, the geometric mean for each family, and what has no timing."""
    found = rows(records)
    lines = ["| case | mode | ours | ms | best peer | ms | ratio |", "|---|---|---|---:|---|---:|---:|"]
    for row in found:
        ours = row.ours or ("none passed", math.nan)
        peer = row.peer or ("none passed", math.nan)
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
        lines.append(f"| {row.case} | {row.mode} | {ours[0]} | {ours[1]:.4f} | {peer[0]} | {peer[1]:.4f} | {ratio} |")
    families: dict[tuple[str, str], list[float]] = {}
    for row in found:
        if row.ratio is not None:
            families.setdefault((row.case.partition("/")[0], row.mode), []).append(row.ratio)
    lines.append("")
    for (family, mode), ratios in families.items():
        mean, worst = geometric_mean(ratios), min(ratios)
        lines.append(f"{family} {mode}: geometric mean {mean:.2f}x over {len(ratios)} cases, least {worst:.2f}x")
    machines = sorted({f"{r['gpu']}, torch {r['torch']}, triton {r['triton']}, driver {r['driver']}" for r in records})
    lines += ["", *(f"measured on {machine}" for machine in machines)]
    commits = sorted({f"{r['commit']}{' with changes' if r['dirty'] else ''}" for r in records})
    lines += [f"at commit {commit}" for commit in commits]
    gaps = [f"- {row.case} {row.mode}: {reason}" for row in found for reason in row.missing]
    if gaps:
        lines += ["", "Without a timing:", "", *gaps]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args(arguments)
    print(table(read(options.files)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

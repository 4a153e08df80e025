"""Print tables of ours and every baseline from result files: `python -m benchmarks.report [FILE ...]`.

Without files, those of `benchmarks/results/current/`. Each device has tables of its own, one a family. Times are
medians in microseconds. A cell says `absent`, `error`, `wrong` or `not run` where there is no time, and the reasons are
listed below the tables; `wrong` is a result outside the tolerance.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import archive, records
from benchmarks.records import Record
from benchmarks.registry import is_ours

__all__ = ["Row", "baseline_name", "main", "read", "rows", "table"]

# Suffix of a device whose host process was pinned to one core.
ONE_CORE = ", host on one core"
BASELINES = {
    "cue": "cuEquivariance",
    "e3nn": "e3nn",
    "oeq": "OpenEquivariance",
    "pyg": "PyTorch Geometric",
    "spconv": "spconv",
    "spconv_triton": "spconv-triton",
    "torch": "torch by hand",
    "torch_bmm": "gathered blocks, `torch.bmm`",
    "torch_bsr": "torch BSR",
    "torch_bsr_linear": "torch BSR",
    "torch_csr": "torch CSR",
    "torch_dense": "dense product",
    "torch_gather": "gathered rows",
    "torch_index_add": "gathered rows, `index_add`",
    "torch_sampled_addmm": "torch `sampled_addmm`",
    "warpconvnet": "WarpConvNet",
}


def baseline_name(provider: str) -> str:
    """Say a provider's name as a reader knows it; ours is the package's."""
    name, _, variant = provider.partition("/")
    return ", ".join([BASELINES.get(name, name), *variant.replace("_", " ").split("/")]).removesuffix(", ")


class Row(NamedTuple):
    """One line: a case in one mode on one device.

    Attributes:
        case: the case's name.
        mode: what was timed.
        gpu: the device; and that the host was pinned to one core, where it was.
        ours: our fastest provider that passed, and its median in milliseconds.
        baseline: the fastest other provider that passed.
        ratio: the baseline's time over ours; above 1 we are faster.
        missing: providers without a timing, with the reason.
        group: the records, by provider.
    """

    case: str
    mode: str
    gpu: str
    ours: tuple[str, float] | None
    baseline: tuple[str, float] | None
    ratio: float | None
    missing: tuple[str, ...]
    group: Mapping[str, Record]

    @property
    def family(self) -> str:
        """First part of the case's name."""
        return self.case.partition("/")[0]


def read(paths: Iterable[Path]) -> list[Record]:
    """Read the records of result files.

    Raises:
        ValueError: a file is not a list of records of a known schema.
    """
    return [entry for path in paths for entry in records.read(path)]


def rows(entries: Sequence[Record]) -> list[Row]:
    """Make one row for each case, mode and device; of a provider measured twice the later result counts."""
    latest: dict[tuple[str, str, str], dict[str, Record]] = {}
    for record in sorted(entries, key=lambda r: r["utc"]):
        where = record["gpu"] + (ONE_CORE if record["cores"] == 1 else "")
        latest.setdefault((record["case"], record["mode"], where), {})[record["provider"]] = record
    result: list[Row] = []
    for (case, mode, gpu), group in latest.items():
        timed = [(r["ms"]["p50"], name) for name, r in group.items() if r["ms"] is not None]
        ours = min(((name, t) for t, name in timed if is_ours(name)), key=lambda x: x[1], default=None)
        baseline = min(((name, t) for t, name in timed if not is_ours(name)), key=lambda x: x[1], default=None)
        ratio = baseline[1] / ours[1] if ours and baseline else None
        missing = tuple(f"{name}: {r['gate']}" for name, r in group.items() if r["ms"] is None)
        result.append(Row(case, mode, gpu, ours, baseline, ratio, missing, group))
    return result


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _cell(record: Record | None) -> str:
    """Format a time with its error, or why there is none."""
    if record is None:
        return ""
    if record["ms"] is None:
        word = record["gate"].partition(":")[0]
        return "absent" if word == "unavailable" else word
    return f"{record['ms']['p50'] * 1e3:.1f} ({record['max_rel_err']:.0e})"


def _family_table(found: Sequence[Row]) -> list[str]:
    """The rows of one family on one device."""
    baselines = list(dict.fromkeys(name for row in found for name in row.group if not is_ours(name)))
    head = ["case", "mode", "ours", "us (error)", *baselines, "best baseline / ours"]
    more: list[tuple[str, Callable[[Row], str]]] = [("peak MiB, ours / least", _peak)]
    if any(r["replay"] is not None for row in found for r in row.group.values()):
        more.insert(0, ("CUDA graph: ours, best baseline, ratio", lambda row: _replays(row.group)))
    if any(r["busy"] is not None for row in found for r in row.group.values()):
        more.insert(0, ("device busy: ours, best baseline", _busy))
    head += [name for name, _ in more]
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(["---"] * len(head)) + "|"]
    for row in found:
        name = row.ours[0] if row.ours else "none passed"
        mine = row.group.get(name)
        own = _cell(mine) if mine else "; ".join(m for m in row.missing if is_ours(m.partition(":")[0]))
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
        cells = [row.case, row.mode, name, own, *(_cell(row.group.get(p)) for p in baselines), ratio]
        cells += [cell(row) for _, cell in more]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    for mode in dict.fromkeys(row.mode for row in found):
        ratios = [row.ratio for row in found if row.mode == mode and row.ratio is not None]
        if ratios:
            summary = f"geometric mean {geometric_mean(ratios):.2f}x over {len(ratios)} cases, least {min(ratios):.2f}x"
            lines += ["", f"{found[0].family} {mode} on {found[0].gpu}: {summary}"]
    return lines


def _busy(row: Row) -> str:
    chosen = [row.group[who[0]]["busy"] if who else None for who in (row.ours, row.baseline)]
    return ", ".join("none" if b is None else f"{b['ms'] * 1e3:.1f} in {b['launches']}" for b in chosen)


def _replays(group: Mapping[str, Record]) -> str:
    """Format the fastest CUDA-graph times, ours and a baseline's."""
    times = {n: r["replay"]["ms"]["p50"] * 1e3 for n, r in group.items() if r["replay"] and r["replay"]["ms"]}
    mine = min((t for n, t in times.items() if is_ours(n)), default=None)
    other = min((t for n, t in times.items() if not is_ours(n)), default=None)
    cells = ["none" if t is None else f"{t:.1f}" for t in (mine, other)]
    return ", ".join([*cells, f"{other / mine:.2f}x"] if mine and other else cells)


def _peak(row: Row) -> str:
    mine = row.group[row.ours[0]]["peak_bytes"] if row.ours else None
    other = [r["peak_bytes"] for n, r in row.group.items() if not is_ours(n) and r["peak_bytes"] is not None]
    return "" if mine is None or not other else f"{mine / 2**20:.1f} / {min(other) / 2**20:.1f}"


def table(entries: Sequence[Record]) -> str:
    """Format Markdown: for each device a table for each family; machines, commits, missing times."""
    found = rows(entries)
    lines: list[str] = []
    for gpu in dict.fromkeys(row.gpu for row in found):
        here = [row for row in found if row.gpu == gpu]
        for family in dict.fromkeys(row.family for row in here):
            mine = [row for row in here if row.family == family]
            lines += [f"## {gpu}: {family}", "", *_family_table(mine), ""]
    machines = sorted({f"{r['gpu']}, torch {r['torch']}, triton {r['triton']}, driver {r['driver']}" for r in entries})
    lines += [*(f"measured on {machine}" for machine in machines)]
    commits = sorted({f"{r['commit']}{' with changes' if r['dirty'] else ''}" for r in entries})
    lines += [f"at commit {commit}" for commit in commits]
    gaps: dict[str, list[str]] = {}
    for row in found:
        for reason in row.missing:
            gaps.setdefault(reason, []).append(f"{row.case} {row.mode}")
    if gaps:
        lines += ["", "Without a time:", ""]
        lines += [f"- {why} ({len(of)}: {of[0]}{', ..' if of[1:] else ''})" for why, of in gaps.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="default: benchmarks/results/current/")
    options = parser.parse_args(arguments)
    entries = read(options.files or archive.current_files())
    print(table(entries))
    return 0


if __name__ == "__main__":
    sys.exit(main())

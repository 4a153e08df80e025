"""The table of reduction widths from the records of family `sgap`: the best width compared with r = 32."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from benchmarks.records import Record

__all__ = ["width_table"]

_PROVIDER = re.compile(r"insum_nn/(row|segment)-r(\d+)")
_CASE = re.compile(r"sgap/graph=(\w+)/n=(\d+)")


def _times(group: Mapping[str, Record]) -> dict[tuple[str, int], float]:
    """Median microseconds by kind and width."""
    found: dict[tuple[str, int], float] = {}
    for name, record in group.items():
        match = _PROVIDER.fullmatch(name)
        if match and record["ms"] is not None:
            found[match[1], int(match[2])] = record["ms"]["p50"] * 1e3
    return found


def _mean(values: Sequence[float]) -> str:
    return f"{math.exp(sum(map(math.log, values)) / len(values)):.2f}x" if values else ""


def width_table(groups: Mapping[str, Mapping[str, Record]]) -> list[str]:
    """Format Markdown: for each case the best width of either kind and its ratio to r = 32; for each n geometric means.

    Args:
        groups: case -> provider -> record, of one device.
    """
    head = ["graph", "n", "best by row", "us", "r = 32 / best", "best by segment", "us", "r = 32 / best", "wins"]
    head += ["row / segment", "cuSPARSE / best"]
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(["---"] * len(head)) + "|"]
    gains: dict[int, dict[str, list[float]]] = {}
    wins: dict[int, dict[str, int]] = {}
    for case, group in groups.items():
        match = _CASE.fullmatch(case)
        times = _times(group)
        if match is None or not times:
            continue
        n = int(match[2])
        cells, best = [match[1], match[2]], dict[str, float]()
        for kind in ("row", "segment"):
            mine = {width: us for (which, width), us in times.items() if which == kind}
            if not mine:
                cells += ["", "", ""]
                continue
            best[kind], width = min((us, w) for w, us in mine.items())
            ratio = mine[32] / mine[width] if 32 in mine else None
            cells += [f"r = {width}", f"{mine[width]:.1f}", "" if ratio is None else f"{ratio:.2f}x"]
            if ratio is not None:
                gains.setdefault(n, {}).setdefault(kind, []).append(ratio)
        _, winner = min((us, kind) for kind, us in best.items())
        wins.setdefault(n, {}).setdefault(winner, 0)
        wins[n][winner] += 1
        baseline = group.get("torch_csr")
        cells.append(winner)
        cells.append(f"{best['row'] / best['segment']:.2f}x" if len(best) == 2 else "")
        cells.append(
            "" if baseline is None or baseline["ms"] is None else f"{baseline['ms']['p50'] * 1e3 / best[winner]:.2f}x"
        )
        lines.append("| " + " | ".join(cells) + " |")
    if not wins:
        return []
    lines += ["", "| n | r = 32 / best, by row | by segment | won by row | by segment |", "|---|---|---|---|---|"]
    for n in sorted(wins):
        mine = gains.get(n, {})
        won = wins[n]
        lines.append(
            f"| {n} | {_mean(mine.get('row', []))} | {_mean(mine.get('segment', []))} "
            f"| {won.get('row', 0)} | {won.get('segment', 0)} |"
        )
    return lines

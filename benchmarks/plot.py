"""A picture of result files, drawn from them alone: `python -m benchmarks.plot results/x.json --out plots/x.svg`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.records import Record
from benchmarks.registry import is_ours
from benchmarks.report import read

__all__ = ["draw", "main"]

# Ours in one hue, peers in greys and muted hues: the eye finds ours first, in print too.
OURS_COLORS = ("#0b6e99", "#4aa3c7", "#8ecae6", "#023047")
PEER_COLORS = ("#6c757d", "#adb5bd", "#b08968", "#9c89b8", "#7f8c5d", "#c9ada7", "#495057", "#d5bdaf")


def draw(records: Sequence[Record], path: Path, *, mode: str = "fwd") -> None:
    """Draw the medians of one mode as bars, with the 20th to 80th percentile; a bar group is a case.

    Args:
        records: of one device.
        path: `.svg`, `.png` or `.pdf`.
        mode: "fwd", "bwd" or "fwdbwd".

    Raises:
        ValueError: there is nothing of that mode, or records are of several devices.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    chosen = [r for r in records if r["mode"] == mode]
    if not any(r["ms"] for r in chosen):
        raise ValueError(f"no timing of mode {mode!r}")
    devices = {r["gpu"] for r in chosen}
    if len(devices) > 1:
        raise ValueError(f"records of several devices: {', '.join(sorted(devices))}")
    cases = list(dict.fromkeys(r["case"] for r in chosen))
    providers = sorted(dict.fromkeys(r["provider"] for r in chosen), key=lambda p: not is_ours(p))
    colors = _colors(providers)

    figure = Figure(figsize=(max(6.0, 1.6 + 0.28 * len(cases) * (len(providers) + 1)), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.8 / len(providers)
    for i, provider in enumerate(providers):
        timed = {r["case"]: r["ms"] for r in chosen if r["provider"] == provider and r["ms"] is not None}
        where = [cases.index(case) + (i + 0.5) * width - 0.4 for case in timed]
        middle = [ms["p50"] for ms in timed.values()]
        low = [ms["p50"] - ms["p20"] for ms in timed.values()]
        high = [ms["p80"] - ms["p50"] for ms in timed.values()]
        axes.bar(
            where, middle, width, yerr=[low, high], label=provider, color=colors[provider], ecolor="#333", capsize=2
        )
        for record in chosen:
            if record["provider"] == provider and record["ms"] is None:
                # A gap would read as a provider that was not tried.
                x = cases.index(record["case"]) + (i + 0.5) * width - 0.4
                note = record["gate"].partition(":")[0]
                axes.annotate(note, (x, 0.02), xycoords=("data", "axes fraction"), rotation=90, ha="center", fontsize=7)
    axes.set_yscale("log")
    axes.set_ylabel("milliseconds (median; 20th to 80th percentile)")
    axes.set_xticks(range(len(cases)), [case.replace("/", "\n") for case in cases], fontsize=8)
    first = chosen[0]
    axes.set_title(f"{mode} on {first['gpu']}, torch {first['torch']}", fontsize=10)
    axes.grid(axis="y", which="both", linewidth=0.4, alpha=0.5)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, ncols=min(4, len(providers)), loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a date and with fixed ids the same records give the same file.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    with mpl.rc_context({"svg.hashsalt": "insum_nn"}):
        figure.savefig(path, dpi=150, metadata=metadata)


def _colors(providers: Sequence[str]) -> dict[str, str]:
    ours = [p for p in providers if is_ours(p)]
    peers = [p for p in providers if not is_ours(p)]
    chosen = {p: OURS_COLORS[i % len(OURS_COLORS)] for i, p in enumerate(ours)}
    return chosen | {p: PEER_COLORS[i % len(PEER_COLORS)] for i, p in enumerate(peers)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mode", default="fwd")
    parser.add_argument("--case", default="", help="only the cases whose name begins so")
    options = parser.parse_args(arguments)
    records = [r for r in read(options.files) if r["case"].startswith(options.case)]
    draw(records, options.out, mode=options.mode)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Plots of result files, drawn from them alone.

    python -m benchmarks.plot x.json --out x.svg            bars of one mode
    python -m benchmarks.plot                               the figures of docs/plots/, from benchmarks/results/current/

An SVG of `docs/plots/` carries a digest of the records and of this file; `stale_figures` compares it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import archive, report
from benchmarks.records import ROOT, Record
from benchmarks.registry import is_ours
from benchmarks.report import Row, read

__all__ = ["FIGURES", "draw", "main", "stale_figures", "write_figures"]

PLOTS = ROOT / "docs" / "plots"
# Ours in one hue, baselines in greys and muted hues: the eye finds ours first, in print too.
OURS_COLORS = ("#0b6e99", "#4aa3c7", "#8ecae6", "#023047")
BASELINE_COLORS = ("#6c757d", "#adb5bd", "#b08968", "#9c89b8", "#7f8c5d", "#c9ada7", "#495057", "#d5bdaf")


def draw(records: Sequence[Record], path: Path, *, mode: str = "fwd") -> None:
    """Draw the medians of one mode as bars, with the 20th to 80th percentile; a bar group is a case.

    Args:
        records: of one device.
        path: `.svg`, `.png` or `.pdf`.
        mode: "fwd", "bwd" or "fwdbwd".

    Raises:
        ValueError: there is nothing of that mode, or records are of several devices.
    """
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
    _save(figure, path)


def _save(figure: Any, path: Path, digest: str = "") -> None:
    """Write a figure; without a date and with fixed ids the same records give the same file."""
    import matplotlib as mpl

    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None, "Description": digest} if path.suffix == ".svg" else None
    # Text stays text: it is smaller, can be found, and needs no fonts of this machine.
    with mpl.rc_context({"svg.hashsalt": "insum_nn", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=150, metadata=metadata)


def _label(provider: str) -> str:
    return report.baseline_name(provider).replace(", ", "\n")


def _colors(providers: Sequence[str]) -> dict[str, str]:
    ours = [p for p in providers if is_ours(p)]
    others = [p for p in providers if not is_ours(p)]
    chosen = {p: OURS_COLORS[i % len(OURS_COLORS)] for i, p in enumerate(ours)}
    return chosen | {p: BASELINE_COLORS[i % len(BASELINE_COLORS)] for i, p in enumerate(others)}


# The figures of the docs ---------------------------------------------------------------------------------------------

MODE_COLORS = {"fwd": "#0b6e99", "fwdbwd": "#d1495b", "bwd": "#edae49"}
# What a family of cases is called in a plot of all of them.
FAMILY_NAMES = {
    "ablation_block_spmm": "block-sparse x dense matrix (ablation)",
    "ablation_spmm": "sparse x dense matrix (ablation)",
    "block_linear": "block-sparse linear layer",
    "block_spmm": "block-sparse x dense matrix",
    "chain": "sparse x dense x dense matrix",
    "cpu_block_linear": "block-sparse linear layer",
    "cpu_fctp": "fully connected tensor product",
    "cpu_gcn_layer": "graph convolution",
    "cpu_graph_layer": "graph layers",
    "cpu_pruned_conv2d": "pruned convolution",
    "cpu_tp_conv": "tensor product along edges",
    "cpu_uvu": "tensor product, weights by sample",
    "cpu_voxel": "voxel convolutions and pools",
    "cpu_weights": "weights by species; maxima",
    "cpu_block_spmm": "block-sparse x dense matrix",
    "cpu_sddmm": "product at sparse places",
    "cpu_spmm": "sparse x dense matrix",
    "fctp": "fully connected tensor product",
    "gcn": "GCN",
    "gcn_layer": "graph convolution",
    "gcn_step": "GCN, training step",
    "host": "smallest calls",
    "network": "networks",
    "peer_models": "models of other packages",
    "sgap": "sparse x dense matrix (widths)",
    "spmm": "sparse x dense matrix",
    "statements": "plain statements",
    "subm_conv": "submanifold convolution",
    "subm_map": "kernel map of a convolution",
    "tp_conv": "tensor product along edges",
    "tp_conv_double": "the same, differentiated twice",
}
MODE_NAMES = {"fwd": "forward", "fwdbwd": "forward + backward", "bwd": "backward"}


def _rows(device: str, families: Sequence[str] = ()) -> list[Row]:
    """Read the rows of a folder of `current`, of some families or all."""
    folder = archive.CURRENT / device
    files = [folder / f"{name}.json" for name in families] if families else sorted(folder.glob("*.json"))
    return report.rows(read([file for file in files if file.exists()]))


def _ratios(device: str, families: Sequence[str] = ()) -> Any:
    """Draw a dot for each case: the best baseline's time over ours, a line for each family or, of some, each case."""
    from matplotlib.figure import Figure

    rows = [row for row in _rows(device, families) if row.ratio is not None]
    names = [row.case.replace("/", "  ") if families else FAMILY_NAMES.get(row.family, row.family) for row in rows]
    lines = list(dict.fromkeys(names)) if families else sorted(set(names))
    figure = Figure(figsize=(8, 0.9 + (0.24 if families else 0.42) * len(lines)), layout="constrained")
    axes = figure.add_subplot()
    for mode, color in MODE_COLORS.items():
        shift = 0.0 if families else {"fwd": -0.16, "fwdbwd": 0.16, "bwd": 0.0}[mode]
        dots = [
            (row.ratio, lines.index(name) + shift) for row, name in zip(rows, names, strict=True) if row.mode == mode
        ]
        if dots:
            style: dict[str, Any] = {"color": color, "markersize": 4, "alpha": 0.75, "markeredgewidth": 0}
            axes.plot(*zip(*dots, strict=True), "o", label=MODE_NAMES[mode], **style)
    axes.axvline(1.0, color="#333", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.set_yticks(range(len(lines)), lines, fontsize=8 if families else None)
    axes.invert_yaxis()
    axes.set_xlabel("time of the best baseline / our time; right of 1x we are faster")
    axes.set_title(rows[0].gpu, fontsize=10)
    axes.grid(axis="both" if families else "x", linewidth=0.4, alpha=0.5)
    figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=3)
    return figure


def _networks() -> Any:
    """Draw a bar for each network and library: a training step's time, and in it that of the kernels."""
    from matplotlib.figure import Figure

    rows = [row for row in _rows(GPU, ["network"]) if row.case.endswith("what=step")]
    bars = [max(3, sum(record["ms"] is not None for record in row.group.values())) for row in rows]
    figure = Figure(figsize=(0.75 * sum(bars) + 0.5 * len(bars), 3.4), layout="constrained")
    panels = figure.subplots(1, len(rows), squeeze=False, width_ratios=bars)[0]
    for panel, row in zip(panels, rows, strict=True):
        timed = {name: record["ms"] for name, record in row.group.items() if record["ms"] is not None}
        names = sorted(timed, key=lambda name: (not is_ours(name), name))
        for place, name in enumerate(names):
            record, middle = row.group[name], timed[name]["p50"]
            ends = record["runs"] or [timed[name]["p20"], timed[name]["p80"]]
            color = OURS_COLORS[0] if is_ours(name) else BASELINE_COLORS[0]
            error = [[middle - min(ends)], [max(ends) - middle]]
            panel.bar(place, middle, 0.7, yerr=error, color=color, alpha=0.45, ecolor="#333", capsize=3)
            if record["busy"] is not None:
                panel.bar(place, record["busy"]["ms"], 0.7, color=color)
        panel.set_xticks(range(len(names)), [_label(name).replace(" ", "\n") for name in names], fontsize=7)
        panel.set_title(row.case.partition("=")[2].partition("/")[0], fontsize=10)
        panel.grid(axis="y", linewidth=0.4, alpha=0.5)
        panel.set_axisbelow(True)
    panels[0].set_ylabel("milliseconds; dark: kernels")
    figure.suptitle(rows[0].gpu, fontsize=10)
    return figure


def _first_steps() -> Any:
    """Draw the first step of each case, with empty and with full caches."""
    from matplotlib.figure import Figure

    entries = archive.current_entries("first_steps", archive.DEVICE)
    measured = sorted((e for e in entries if e["steps"]), key=lambda e: not e["case"].startswith("network/"))
    cases = list(dict.fromkeys(entry["case"] for entry in measured))
    figure = Figure(figsize=(8, 1.0 + 0.34 * len(cases)), layout="constrained")
    axes = figure.add_subplot()
    for shift, process, color in ((-0.2, "cold", OURS_COLORS[0]), (0.2, "warm", OURS_COLORS[2])):
        mine = [entry for entry in measured if entry["process"] == process]
        places = [cases.index(entry["case"]) + shift for entry in mine]
        label = {"cold": "caches empty", "warm": "caches full"}[process]
        axes.barh(places, [entry["steps"][0]["seconds"] for entry in mine], 0.38, color=color, label=label)
    names = [case.removeprefix("network/network=").removesuffix("/what=step").replace("/", "  ") for case in cases]
    axes.set_yticks(range(len(cases)), names, fontsize=8)
    axes.set_title(measured[0]["gpu"], fontsize=10)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.grid(axis="x", linewidth=0.4, alpha=0.5)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, frameon=False)
    return figure


def _lines(device: str, family: str, pattern: str, modes: Sequence[str], axis: str) -> Any:
    """Draw times against one parameter of the cases, a line for each provider and a panel for each mode."""
    from matplotlib import ticker
    from matplotlib.figure import Figure

    rows = [row for row in _rows(device, [family]) if re.search(pattern, row.case)]
    names = [name for name in dict.fromkeys(n for row in rows for n in row.group) if name in SHOWN]
    colors = _colors(sorted(names, key=lambda p: not is_ours(p)))
    figure = Figure(figsize=(4.2 * len(modes), 3.6), layout="constrained")
    panels = figure.subplots(1, len(modes), squeeze=False)[0]
    values = sorted({float(found[1]) for row in rows if (found := re.search(pattern, row.case))})
    # Sizes on a logarithmic axis; parts of a whole, which lie too close together near 1, at equal distances.
    places = {value: value if values[0] >= 1 else place for place, value in enumerate(values)}
    for panel, mode in zip(panels, modes, strict=True):
        for name in names:
            points: list[tuple[float, float]] = []
            for row in rows:
                # Of ours the fastest provider, which the table shows too.
                who = row.ours[0] if row.ours and is_ours(name) else name
                found, timed = re.search(pattern, row.case), row.group.get(who)
                if row.mode == mode and found and timed is not None and timed["ms"] is not None:
                    points.append((places[float(found[1])], timed["ms"]["p50"] * 1e3))
            if points:
                points.sort()
                panel.plot(*zip(*points, strict=True), "o-", color=colors[name], label=_label(name), markersize=4)
        panel.set_xscale("log" if values[0] >= 1 else "linear")
        panel.set_yscale("log")
        panel.set_xticks(list(places.values()), [f"{value:g}" for value in places])
        panel.xaxis.set_minor_locator(ticker.NullLocator())
        for set_formatter in (panel.yaxis.set_major_formatter, panel.yaxis.set_minor_formatter):
            set_formatter(lambda value, _: f"{value:g}" if f"{value:g}"[0] in "125" else "")
        panel.set_xlabel(axis)
        panel.set_title(MODE_NAMES[mode], fontsize=10)
        panel.grid(linewidth=0.4, alpha=0.5, which="both")
    panels[0].set_ylabel("microseconds (median)")
    figure.suptitle(rows[0].gpu, fontsize=10)
    panels[0].legend(fontsize=8, frameon=False)
    return figure


SHOWN = ("insum_nn", "torch_csr", "torch_dense", "torch_bsr", "spconv", "spconv_triton", "warpconvnet", "oeq")
GPU, CPU = archive.DEVICE, archive.CPU
FIRST_STEPS = "first steps"
HALF = "dtype=float16"
GRAPHS, PRODUCTS = ("gcn_layer", "gcn", "gcn_step", "spmm"), ("tp_conv", "tp_conv_double", "fctp")
FIGURES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "networks.svg": (_networks, (f"{GPU}/network.json",)),
    "first-steps.svg": (_first_steps, (FIRST_STEPS,)),
    "graphs.svg": (lambda: _ratios(GPU, GRAPHS), tuple(f"{GPU}/{name}.json" for name in GRAPHS)),
    "tensor-products.svg": (lambda: _ratios(GPU, PRODUCTS), tuple(f"{GPU}/{name}.json" for name in PRODUCTS)),
    "ratios-gpu.svg": (lambda: _ratios(GPU), (GPU,)),
    "ratios-cpu.svg": (lambda: _ratios(CPU), (CPU,)),
    "block-spmm.svg": (
        lambda: _lines(
            GPU, "block_spmm", rf"block=64/sparsity=([\d.]+)/{HALF}", ["fwd"], "sparsity, blocks of 64 x 64"
        ),
        (f"{GPU}/block_spmm.json",),
    ),
    "subm-conv.svg": (
        lambda: _lines(GPU, "subm_conv", rf"room/channels=(\d+)/{HALF}", ["fwd", "fwdbwd"], "channels"),
        (f"{GPU}/subm_conv.json",),
    ),
}
"""File -> what draws it, and which files or folders of `current` it is drawn from, or the files of first steps."""


def _digest(sources: Sequence[str]) -> str:
    """Return a digest of records, whatever their layout on disk, and of this file, which draws them."""
    paths = [archive.CURRENT / name for name in sources if name != FIRST_STEPS]
    files = sorted(file for path in paths for file in (path.glob("*.json") if path.suffix == "" else [path]))
    text = json.dumps([report.read([file]) for file in files], sort_keys=True)
    if FIRST_STEPS in sources:
        text += json.dumps(archive.current_entries("first_steps", GPU), sort_keys=True)
    text += Path(__file__).read_text(encoding="utf-8")
    return "records " + hashlib.sha256(text.encode()).hexdigest()[:16]


def stale_figures() -> list[Path]:
    """List the figures that are missing or were drawn from other records."""
    found: list[Path] = []
    for name, (_, sources) in FIGURES.items():
        path = PLOTS / name
        if not path.exists() or _digest(sources) not in path.read_text(encoding="utf-8"):
            found.append(path)
    return found


def write_figures() -> None:
    """Draw the figures whose records have changed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for path in stale_figures():
        drawing, sources = FIGURES[path.name]
        figure = drawing()
        FigureCanvasAgg(figure)
        _save(figure, path, _digest(sources))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description="Draw bars of result files.")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="result files of one device")
    parser.add_argument("--out", type=Path, help="the file to draw; without it those of docs/plots/ are drawn")
    parser.add_argument("--mode", default="fwd", help="fwd, bwd or fwdbwd")
    parser.add_argument("--case", default="", help="only the cases whose name begins so")
    options = parser.parse_args(arguments)
    if options.out is None:
        write_figures()
        return 0
    records = [r for r in read(options.files) if r["case"].startswith(options.case)]
    draw(records, options.out, mode=options.mode)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

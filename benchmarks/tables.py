"""Write the tables of README and docs from the records: `make bench-table`, or `python -m benchmarks.tables`.

A page holds `<!-- table: begin -->` and `<!-- table: end -->`, with a name (`<!-- table: NAME begin -->`) where it is
not README's table; the text between them, a table or sentences with numbers, is replaced. `--check` writes nothing and
returns 1 when a table or a plot is out of date; CI runs it. Numbers come from `benchmarks/results/current/`.
"""

from __future__ import annotations

import argparse
import functools
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from benchmarks import archive, data_parallel, plot, report, sentences
from benchmarks.archive import DEVICE
from benchmarks.data_parallel import Throughput
from benchmarks.first_step import FirstStep
from benchmarks.records import ROOT, Machine, Record, read
from benchmarks.registry import is_ours
from benchmarks.report import Row, baseline_name

__all__ = ["README_ROWS", "Entry", "main", "pages", "rewrite", "tables"]

H100 = "nvidia-h100-80gb-hbm3"
MARKED = re.compile(r"(<!-- table: (?:([a-z-]+) )?begin -->\n).*?(<!-- table: (?:\2 )?end -->)", re.DOTALL)
README_LENGTH = 8
NOISE = 0.97

Quantity = Literal["step", "first step", "memory", "time"]
MODES = {"fwd": "forward", "bwd": "backward", "fwdbwd": "forward + backward"}


@dataclass(frozen=True)
class Entry:
    """One row of README's table.

    Attributes:
        title: the problem, in words.
        case: of the registry, in `mode`; without a record of it there is no row.
        quantity: what is shown.
        mode: of the records.
    """

    title: str
    case: str
    quantity: Quantity = "time"
    mode: str = "fwd"


ROOM = "subm_conv/cloud=room"
SPUNET, NEQUIP, GCN = "network/network=spunet_fp16", "network/network=nequip_864", "network/network=gcn_14k"
# In the order in which they are shown; the first eight for which there are numbers.
README_ROWS: tuple[Entry, ...] = (
    Entry("Sparse U-Net of SpUNet's shape, 162 k voxels, float16: training step", f"{SPUNET}/what=step", "step"),
    Entry("the same: first step, ours from empty caches", f"{SPUNET}/what=step", "first step"),
    Entry("NequIP, 864 atoms, forces in the loss: training step", f"{NEQUIP}/what=step", "step"),
    Entry("the same: peak memory", f"{NEQUIP}/what=step", "memory"),
    Entry("GCN of three layers, 14 k nodes: training step", f"{GCN}/what=step", "step"),
    Entry(
        "`SubMConv3d`, 236 k voxels, 64 channels, float16, existing kernel map: forward",
        "subm_conv/cloud=room/channels=64/dtype=float16",
    ),
    Entry("`TensorProductConv`, 158 k edges, 128 channels, l <= 2: forward", "tp_conv/shape=mace-large/dtype=float32"),
    Entry(
        "`BlockSparseLinear` 4096 x 4096, 10 % of 64 x 64 blocks, float16: forward",
        "block_linear/block=64/density=0.1/dtype=float16",
    ),
)


def duration(ms: float) -> str:
    """Format a time with three digits, in the unit that suits it."""
    for unit, scale in (("s", 1e-3), ("ms", 1.0), ("us", 1e3)):
        if ms * scale >= 1 or unit == "us":
            return f"{ms * scale:.3g} {unit}" if ms * scale < 999.5 else f"{ms * scale:.0f} {unit}"
    raise AssertionError("unreachable")


def spread(record: Record) -> str:
    """Format the range of a time: over runs where there were several, else the 20th to 80th percentile of the calls."""
    ends = record["runs"] or ([record["ms"]["p20"], record["ms"]["p80"]] if record["ms"] else [])
    return f"{duration(min(ends))} to {duration(max(ends))}" if ends else ""


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Format a table."""
    cells = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in cells)


# README ---------------------------------------------------------------------------------------------------------------


def _measured(row: Row, quantity: Quantity) -> dict[str, float]:
    """The numbers of a row's providers. A first step is one with empty caches, where that was measured."""
    found: dict[str, float] = {}
    for name, record in row.group.items():
        value: float | None = None
        if record["ms"] is not None:
            if quantity == "memory":
                value = None if record["peak_bytes"] is None else record["peak_bytes"] / 2**20
            elif quantity == "first step":
                value = None if record["compile_s"] is None else record["compile_s"] * 1e3
            else:
                value = record["ms"]["p50"]
        if value is not None:
            found[name] = value
    if quantity == "first step":
        for entry in first_steps():
            if (entry["case"], entry["process"], entry["gpu"]) == (row.case, "cold", row.gpu) and entry["steps"]:
                found[entry["provider"]] = entry["steps"][0]["seconds"] * 1e3
    return found


def readme_table(rows: Sequence[Row]) -> str:
    """Write the table of whole networks and kernels, one number a cell; the better one is bold."""
    by_case = {(row.case, row.mode): row for row in rows if archive.device_slug(row.gpu, None) == DEVICE}
    lines: list[list[str]] = []
    dates: set[str] = set()
    versions: set[str] = set()
    for entry in README_ROWS:
        row = by_case.get((entry.case, entry.mode))
        found = _measured(row, entry.quantity) if row else {}
        if row is None or not _both(found) or len(lines) == README_LENGTH:
            continue
        dates |= {r["utc"][:10] for r in row.group.values()}
        versions |= {f"torch {_minor(r['torch'])}, Triton {_minor(r['triton'] or '')}" for r in row.group.values()}
        # What a change of the import gives.
        ours = found.get("insum_nn") or min(value for name, value in found.items() if is_ours(name))
        value, baseline = min((value, name) for name, value in found.items() if not is_ours(name))
        show: Callable[[float], str] = (lambda v: f"{v:.0f} MiB") if entry.quantity == "memory" else duration
        cells = [f"**{show(v)}**" if v == min(ours, value) else show(v) for v in (ours, value)]
        lines.append([entry.title, *cells, baseline_name(baseline)])
    gpu = next((row.gpu for row in by_case.values()), "GPU")
    when = " to ".join(dict.fromkeys((min(dates), max(dates))))
    software = " and ".join(sorted(versions))
    caption = f"One {gpu}, {software}; medians, measured from {when}, [not all at one commit](docs/measurements.md)."
    table = markdown(["", "ours", "best baseline", "baseline"], lines)
    return f"{table}\n\n{caption}\n\n{sentences.first_steps(first_steps(DEVICE), gpu)}"


def _both(found: Mapping[str, float]) -> bool:
    return len({is_ours(name) for name in found}) == 2


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


# docs -----------------------------------------------------------------------------------------------------------------


def network_table(rows: Sequence[Row], family: str = "network", device: str = DEVICE) -> str:
    """Write a line for each network and provider."""
    chosen = [row for row in rows if _slug(row) == device and row.family == family]
    lines: list[list[str]] = []
    for row in sorted(chosen, key=lambda row: row.case):
        for name, record in row.group.items():
            if record["ms"] is None:
                continue
            busy = "" if record["busy"] is None else duration(record["busy"]["ms"])
            launches = "" if record["busy"] is None else f"{record['busy']['launches']:.0f}"
            # A CUDA graph's memory has been taken before.
            memory = None if name.endswith("cuda_graphs") else record["peak_bytes"]
            peak = "" if memory is None else f"{memory / 2**20:.0f} MiB"
            case = row.case.partition("=")[2].replace("/what=", ": ")
            lines.append([f"`{case}`", baseline_name(name), duration(record["ms"]["p50"]), busy, launches, peak])
    # First steps have records of their own, from empty caches; here a process may have found kernels on disk.
    head = ["network", "layers", "time", "device busy", "launches", "peak memory"]
    return f"{markdown(head, lines)}\n\n{_provenance(chosen)}"


def peer_model_table(rows: Sequence[Row]) -> str:
    """Write for each device a table of the models of other packages."""
    devices = dict.fromkeys(_slug(row) for row in rows if row.family == "peer_models")
    return "\n\n".join(network_table(rows, "peer_models", device) for device in sorted(devices, reverse=True))


def first_step_table() -> str:
    """Write for each device a line for each process whose first steps were measured."""
    parts: list[str] = []
    measured = [entry for entry in first_steps() if entry["gate"] == "measured" and entry["steps"]]
    for gpu in dict.fromkeys(entry["gpu"] for entry in measured):
        mine, lines = [entry for entry in measured if entry["gpu"] == gpu], list[list[str]]()
        for entry in mine:
            first, *later = entry["steps"] or []
            provider = baseline_name(entry["provider"])
            caches = {"cold": "empty", "warm": "full"}[entry["process"]]
            then = duration(later[-1]["seconds"] * 1e3) if later else ""
            compiled = [at for at, step in enumerate(entry["steps"] or [], 1) if step["compiled"]]
            # On a CPU library calls serve until C functions are compiled.
            waited = sum(s["seconds"] + s["c_compiler_s"] for s in (entry["steps"] or [])[: max(compiled, default=0)])
            after = f", all after {duration(waited * 1e3)}" if entry["driver"] is None and compiled else ""
            count = sum(step["compiled"] for step in entry["steps"] or [])
            peaks = [f"{s['peak_mib']} MiB" if "peak_mib" in s else "" for s in (first, *later[-1:])]
            cells = [duration(first["seconds"] * 1e3), f"{count}{after}", then, " / ".join(filter(None, peaks))]
            lines.append([f"`{_first_step_name(entry)}`", provider, caches, *cells])
        head = ["case", "layers", "caches", "first step", "kernels compiled", "third step", "memory of both"]
        found: dict[str, set[str]] = {}
        for entry in mine:
            found.setdefault(_state(entry, entry["utc"]), set()).add(entry["case"].partition("/")[0])
        parts.append(f"{markdown(head, lines)}\n\n{_measured_on(gpu, found)}")
    return "\n\n".join(parts)


def _first_step_name(entry: FirstStep) -> str:
    return entry["case"].removeprefix("network/network=").removesuffix("/what=step")


def data_parallel_table(entries: Sequence[Throughput]) -> str:
    """Write a line for each device and network: a step in one process and in several, and what is gained."""
    passed = [entry for entry in entries if entry["seconds"] and entry["batches_per_s"]]
    measured = dict.fromkeys((e["gpu"], e["network"], e["provider"]) for e in passed)
    known = {network for _, network, _ in measured}
    lines: list[list[str]] = []
    for gpu, network, provider in [*measured, *(("", n, "insum_nn") for n in data_parallel.DEFAULT if n not in known)]:
        chosen = [e for e in passed if (e["gpu"], e["network"], e["provider"]) == (gpu, network, provider)]
        most = max([e["ranks"] for e in chosen], default=0)
        cells: list[str] = []
        for way, ranks in (("plain", 1), ("ddp", 1), ("plain", most), ("ddp", most)):
            times = [e["seconds"] for e in chosen if (e["way"], e["ranks"]) == (way, ranks)]
            cells.append(duration(statistics.median(times[0] or []) * 1e3) if times else "not measured")
        gain = data_parallel.speedup(chosen, network, provider)
        ratio = "not measured"
        if gain is not None:
            least = data_parallel.EFFICIENCY * most
            ratio = f"{gain:.2f}x (target {least:.1f}x: {'met' if gain >= least else '**not met**'})"
        firsts = [e["first_step_s"] for e in chosen if e["first_step_s"] is not None]
        first = f"{firsts[0]:.1f} s" if firsts else "not measured"
        gpus = f"{most} x {gpu}" if chosen else ""
        lines.append([f"`{network}`", baseline_name(provider), gpus, *cells, ratio, first])
    steps = ["one", "one, DDP", "all", "all, DDP"]
    head = ["network", "layers", "GPUs", *steps, "batches/s, all : one, DDP", "first step"]
    table = markdown(head, lines)
    where = dict.fromkeys(f"{_state(e, e['utc'])}, NCCL {e['nccl']}" for e in passed)
    return f"{table}\n\nMeasured at {'; '.join(where)}." if where else table


def _state(machine: Machine, utc: str) -> str:
    """Name the state of the project, the day, and the versions that something was measured with."""
    commit = (machine["commit"] or "an unknown commit")[:7] + (" with changes" if machine["dirty"] else "")
    triton = f", Triton {machine['triton']}" if machine["triton"] else ""
    return f"commit {commit}, {utc[:10]}, torch {machine['torch']}{triton}"


@functools.cache
def first_steps(device: str = "*") -> Sequence[FirstStep]:
    """The current first steps of one device or all, of whole networks before those of layers; read once."""
    found = cast("list[FirstStep]", archive.current_entries("first_steps", device))
    return sorted(found, key=lambda entry: not entry["case"].startswith("network/"))


def family_table(rows: Sequence[Row], device: str, families: Sequence[str]) -> str:
    """Write a line for each case and mode in which we and a baseline were timed, the smallest ratio first."""
    chosen = [r for r in rows if _slug(r) == device and r.family in families and r.ratio is not None]
    lines: list[list[str]] = []
    for row in sorted(chosen, key=lambda r: (families.index(r.family), r.ratio or 0.0)):
        mine, other = row.ours or ("", 0.0), row.baseline or ("", 0.0)
        times = [part for who in (mine, other) for part in (duration(who[1]), spread(row.group[who[0]]))]
        lines.append([f"`{row.case}`", MODES[row.mode], *times, baseline_name(other[0]), f"{row.ratio:.2f}x"])
    head = ["case", "mode", "ours", "range", "best baseline", "range", "baseline", "baseline / ours"]
    return f"{markdown(head, lines)}\n\n{_provenance(chosen)}"


def _slug(row: Row) -> str:
    cores = {record["cores"] for record in row.group.values()}
    gpu = next(iter(row.group.values()))["gpu"]
    return archive.device_slug(gpu, 1 if cores == {1} else None)


def _provenance(rows: Sequence[Row]) -> str:
    found: dict[str, set[str]] = {}
    for row in rows:
        for record in row.group.values():
            found.setdefault(_state(record, record["utc"]), set()).add(row.family)
    return _measured_on(rows[0].gpu if rows else "no device", found)


def _measured_on(gpu: str, found: Mapping[str, set[str]]) -> str:
    parts = [f"{', '.join(f'`{name}`' for name in sorted(names))}: {where}" for where, names in found.items()]
    return f"Measured on {gpu}. {'; '.join(parts)}."


def summary_table(rows: Sequence[Row]) -> str:
    """Write a line for each device, family and mode: geometric mean, least and largest ratio."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row.ratio is not None:
            groups.setdefault((row.gpu, row.family, row.mode), []).append(row.ratio)
    lines: list[list[str]] = []
    for (gpu, family, mode), ratios in sorted(groups.items()):
        values = (report.geometric_mean(ratios), min(ratios), max(ratios))
        lines.append([gpu, f"`{family}`", MODES[mode], str(len(ratios)), *(f"{value:.2f}x" for value in values)])
    return markdown(["device", "family", "mode", "cases", "geometric mean", "least", "largest"], lines)


def loss_table(rows: Sequence[Row]) -> str:
    """Write a line for each case and mode in which a baseline is faster, the smallest ratio first."""
    lines: list[list[str]] = []
    for row in sorted(_lost(rows), key=lambda r: r.ratio or 0.0):
        mine, other = row.ours or ("", 0.0), row.baseline or ("", 0.0)
        times = [duration(mine[1]), duration(other[1]), baseline_name(other[0])]
        lines.append([row.gpu, f"`{row.case}`", MODES[row.mode], *times, f"{row.ratio:.2f}x"])
    return markdown(["device", "case", "mode", "ours", "best baseline", "baseline", "baseline / ours"], lines)


def loss_summary(rows: Sequence[Row]) -> str:
    """Write a line for each device and family in which a baseline is faster somewhere."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.ratio is not None:
            groups.setdefault((row.gpu, row.family), []).append(row)
    lines: list[list[str]] = []
    for (gpu, family), group in sorted(groups.items()):
        if lost := _lost(group):
            worst = min(lost, key=lambda r: r.ratio or 0.0)
            baselines = dict.fromkeys(baseline_name(row.baseline[0]) for row in lost if row.baseline)
            count = [str(len(lost)), str(len(group))]
            lines.append([gpu, f"`{family}`", *count, f"{worst.ratio:.2f}x", "; ".join(baselines)])
    return markdown(["device", "family", "slower in", "of", "least baseline / ours", "faster baselines"], lines)


def _lost(rows: Sequence[Row]) -> list[Row]:
    """The rows in which a baseline is faster by more than runs differ."""
    return [row for row in rows if row.ratio is not None and row.ratio < NOISE]


def record_table(rows: Sequence[Row]) -> str:
    """Write a line for each device and state of the project: which families were measured there."""
    found: dict[tuple[str, str, str, str], set[str]] = {}
    for row in rows:
        for record in row.group.values():
            commit = (record["commit"] or "unknown")[:7] + (" with changes" if record["dirty"] else "")
            versions = f"{_minor(record['torch'])}, {_minor(record['triton'] or '')}"
            found.setdefault((row.gpu, record["utc"][:10], commit, versions), set()).add(f"`{row.family}`")
    lines = [[*key, ", ".join(sorted(families))] for key, families in sorted(found.items())]
    return markdown(["device", "date", "commit", "torch, Triton", "families"], lines)


def rare_baseline_table(provider: str) -> str:
    """Write a line for each case and mode of the newest run with a baseline that few machines have."""
    for file in sorted(archive.HISTORY.glob("*.json"), key=_ended, reverse=True):
        rows = [row for row in report.rows(read(file)) if row.ours is not None and provider in _measured(row, "time")]
        if rows:
            lines: list[list[str]] = []
            for row in sorted(rows, key=lambda row: (row.case, row.mode)):
                mine, other = (row.ours or ("", 0.0))[1], _measured(row, "time")[provider]
                cells = (duration(mine), duration(other), f"{other / mine:.2f}x")
                lines.append([f"`{row.case}`", MODES[row.mode], *cells])
            head = ["case", "mode", "ours", baseline_name(provider), "baseline / ours"]
            return f"{markdown(head, lines)}\n\n{_provenance(rows)}"
    raise ValueError(f"no run has {provider!r}")


def _ended(file: Path) -> str:
    return max((record["utc"] for record in read(file)), default="")


def tables() -> dict[str, Callable[[], str]]:
    """Name -> what writes the table; README's has no name."""
    rows = report.rows(report.read(archive.current_files()))
    families = {
        "graphs": ("gcn_layer", "gcn", "gcn_step", "spmm"),
        "chain": ("chain",),
        "blocks": ("block_spmm", "block_linear"),
        "voxels": ("subm_conv", "subm_map"),
        "tensor-products": ("tp_conv", "tp_conv_double", "fctp"),
        "host": ("host",),
        "sgap": ("sgap",),
        "ablation": ("ablation_spmm", "ablation_block_spmm"),
    }
    found: dict[str, Callable[[], str]] = {
        "": lambda: readme_table(rows),
        "networks": lambda: network_table(rows),
        "peer-models": lambda: peer_model_table(rows),
        "first-steps": first_step_table,
        "data-parallel": lambda: data_parallel_table(archive.current_entries("data_parallel")),
        "first-step-kinds": lambda: sentences.first_steps_by_kind(first_steps(DEVICE)),
        "selection-sentence": lambda: sentences.selection(archive.current_entries("selection", DEVICE)),
        "cuequivariance": lambda: rare_baseline_table("cue"),
        "warpconvnet": lambda: rare_baseline_table("warpconvnet"),
        "summary": lambda: summary_table(rows),
        "cpu-summary": lambda: summary_table([row for row in rows if row.gpu.endswith("threads)")]),
        "losses": lambda: loss_table(rows),
        "loss-summary": lambda: loss_summary(rows),
        "records": lambda: record_table(rows),
        "cpu": lambda: family_table(rows, archive.CPU, list(dict.fromkeys(r.family for r in rows))),
        "second-gpu": lambda: family_table(rows, H100, list(dict.fromkeys(r.family for r in rows))),
        "one-core": lambda: family_table(rows, f"{DEVICE}-one-core", list(dict.fromkeys(r.family for r in rows))),
    }
    return found | {name: lambda f=f: family_table(rows, DEVICE, f) for name, f in families.items()}


# Pages ----------------------------------------------------------------------------------------------------------------


def pages(root: Path = ROOT) -> list[Path]:
    """List the pages that hold a table."""
    return [
        page
        for page in (root / "README.md", *sorted((root / "docs").rglob("*.md")))
        if MARKED.search(page.read_text(encoding="utf-8"))
    ]


def rewrite(text: str, found: Mapping[str, Callable[[], str]]) -> str:
    """Replace the tables of a page.

    Raises:
        ValueError: a table is unknown.
    """

    def one(match: re.Match[str]) -> str:
        name = match[2] or ""
        if name not in found:
            raise ValueError(f"no table is named {name!r}; there are {', '.join(sorted(found))}")
        return f"{match[1]}\n{found[name]()}\n\n{match[3]}"

    return MARKED.sub(one, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description="Write the tables and plots.")
    parser.add_argument("--check", action="store_true", help="write nothing; return 1 when something is out of date")
    options = parser.parse_args(arguments)
    wrong = [f"benchmarks/results/current/{name}" for name in archive.stale()]
    if wrong and not options.check:
        archive.update()
    found = tables()
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = rewrite(text, found)
        if new != text:
            wrong.append(page.relative_to(ROOT).as_posix())
            if not options.check:
                page.write_text(new, encoding="utf-8")
    wrong += [path.relative_to(ROOT).as_posix() for path in plot.stale_figures()]
    if not options.check:
        plot.write_figures()
        print("\n".join(f"wrote {name}" for name in wrong) or "nothing changed")
        return 0
    print("\n".join(f"out of date: {name}; run: make bench-table" for name in wrong) or "up to date")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

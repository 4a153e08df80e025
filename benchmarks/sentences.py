"""Sentences of README and docs that hold numbers, written from the records as `benchmarks.tables` writes tables."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from benchmarks.first_step import FirstStep
from benchmarks.records import Record
from benchmarks.registry import is_ours
from benchmarks.report import Row, baseline_name, geometric_mean
from benchmarks.selection import Compared

__all__ = ["NETWORKS", "busy", "first_steps", "first_steps_by_kind", "host", "maps", "peer_models", "selection"]

# Name in a sentence -> the network.
NETWORKS = {"a GCN": "gcn_14k", "a sparse U-Net": "spunet_fp16", "NequIP": "nequip_864"}
Seconds = dict[str, tuple[float, float]]


def _both_caches(entries: Sequence[FirstStep]) -> Seconds:
    """Case -> our first step in seconds with empty and with full caches, where both were measured."""
    found: dict[str, dict[str, float]] = {}
    for entry in entries:
        if is_ours(entry["provider"]) and entry["steps"]:
            found.setdefault(entry["case"], {})[entry["process"]] = entry["steps"][0]["seconds"]
    return {case: (by["cold"], by["warm"]) for case, by in found.items() if len(by) == 2}


def _of_layers(entries: Sequence[FirstStep], process: str) -> list[float]:
    """Our first steps of single layers in one kind of process, in seconds."""
    return [
        entry["steps"][0]["seconds"]
        for entry in entries
        if is_ours(entry["provider"]) and entry["steps"] and entry["process"] == process
        if not entry["case"].startswith("network/")
    ]


def _shown(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}"


def _interval(values: Sequence[float]) -> str:
    ends = [_shown(end) for end in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def first_steps(entries: Sequence[FirstStep], device: str) -> str:
    """Say how long the first step of each network takes, with empty caches and in the next process; for README."""
    found = _both_caches(entries)
    networks = {name: found.get(f"network/network={network}/what=step") for name, network in NETWORKS.items()}
    times = {name: pair for name, pair in networks.items() if pair is not None}
    empty = _joined([f"{_shown(cold)} s for {name}" for name, (cold, _) in times.items()])
    full = _joined([f"{_shown(warm)} s" for _, warm in times.values()])
    layers = _of_layers(entries, "cold")
    single = f" A single layer took {_interval(layers)} s." if layers else ""
    return _wrapped(
        f"**The first step** compiles kernels and keeps them on disk. On an {_short(device)} it took {empty}; in the"
        f" next process {full}.{single} [`insum_nn.prepare`](docs/how-to/tune.md#before-the-first-step) compiles"
        " beforehand; on a CPU library calls serve in the meantime. No schedule is measured on your machine unless you"
        " [ask for it](docs/how-to/tune.md)."
    )


def first_steps_by_kind(entries: Sequence[FirstStep]) -> str:
    """Write a table of the networks' first steps, and of the range over layers."""
    found = _both_caches(entries)
    lines = ["| | kernels are compiled | the next process finds them on disk |", "|---|---|---|"]
    networks = {f"network/network={network}/what=step": name for name, network in NETWORKS.items()}
    for case, name in networks.items():
        if case in found:
            lines.append(f"| {name} | {' | '.join(map(_shown, found[case]))} |")
    cold, warm = (_of_layers(entries, process) for process in ("cold", "warm"))
    if cold and warm:
        lines.append(f"| a single layer | {_interval(cold)} | {_interval(warm)} |")
    return "\n".join(lines)


def busy(rows: Sequence[Row], device: str) -> str:
    """Say which part of a training step the GPU works."""
    parts: list[str] = []
    for name, network in NETWORKS.items():
        for row in rows:
            record = row.group.get("insum_nn")
            if row.case == f"network/network={network}/what=step" and row.gpu == device and record is not None:
                if record["ms"] is not None and record["busy"] is not None:
                    parts.append(f"{100 * record['busy']['ms'] / record['ms']['p50']:.0f} % of the step of {name}")
    return _wrapped(f"**GPU time and CPU time.** On an {_short(device)} the GPU works for {_joined(parts)}.")


def peer_models(rows: Sequence[Row]) -> str:
    """Compare steps of other packages' models with our layers and with the fastest other ones, in the same mode."""
    parts: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: row.gpu, reverse=True):
        if row.family != "peer_models":
            continue
        for mode in ("", "/compiled"):
            timed = {
                name: record["ms"]["p50"]
                for name, record in row.group.items()
                if record["ms"] is not None and name.endswith("/compiled") == bool(mode)
            }
            ours = timed.pop(f"insum_nn{mode}", None)
            if ours is None or not timed:
                continue
            best = min(timed, key=lambda name: timed[name])
            mine, other = row.group[f"insum_nn{mode}"], row.group[best]
            text = f"a step of `{row.case.partition('model=')[2]}` takes {ours / timed[best]:.2f} of the time"
            if mine["busy"] is not None and other["busy"] is not None:
                launches = mine["busy"]["launches"] / other["busy"]["launches"]
                share = mine["busy"]["ms"] / other["busy"]["ms"]
                text += f", {launches:.2f} of the launches and {share:.2f} of the GPU's time"
            replays = _replayed(mine), _replayed(other)
            if all(replays):
                text += f" ({replays[0] / replays[1]:.2f} in a CUDA graph)"
            parts.setdefault(_short(row.gpu), []).append(f"{text} that it takes with {baseline_name(best)}")
    if not parts:
        return "No model was measured with our layers and with others."
    return "\n".join(_wrapped(f"With ours, on an {gpu}, {'; '.join(found)}.") for gpu, found in parts.items())


def _replayed(record: Record) -> float:
    """Milliseconds of a replay of its CUDA graph; 0: not measured."""
    found = record["replay"]
    return found["ms"]["p50"] if found is not None and found["ms"] is not None else 0.0


def host(rows: Sequence[Row], device: str) -> str:
    """Say how long a call of a compiled program takes, compared with a bare launch and with torch's own product."""
    ratios: dict[str, list[float]] = {"bare_launch": [], "torch_csr": []}
    for row in rows:
        mine = row.group.get("insum_nn/program")
        if row.family != "host" or row.gpu != device or mine is None or mine["ms"] is None:
            continue
        for name, found in ratios.items():
            other = row.group.get(name)
            if other is not None and other["ms"] is not None:
                found.append(mine["ms"]["p50"] / other["ms"]["p50"])
    bare, csr = (_interval(found) for found in ratios.values())
    return _wrapped(
        f"On an {_short(device)} a call of a compiled program takes {bare} times as long as a bare launch of a Triton"
        f" kernel, and {csr} times as long as torch's product of a CSR matrix (family `host`, in which the GPU has next"
        " to nothing to do)."
    )


def maps(rows: Sequence[Row]) -> str:
    """Compare the building of kernel maps with the fastest baseline's, on each GPU."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.family == "subm_map" and row.ratio is not None:
            found.setdefault(row.gpu, []).append(row)
    parts: list[str] = []
    for gpu, mine in found.items():
        ratios = [row.ratio or 0.0 for row in mine]
        record = next(iter(mine[0].group.values()))
        names = _joined(list(dict.fromkeys(baseline_name(row.baseline[0]) for row in mine if row.baseline)))
        parts.append(
            f"on {gpu}, at commit {(record['commit'] or 'unknown')[:7]} of {record['utc'][:10]},"
            f" {min(ratios):.2f} to {max(ratios):.2f} of the time of ours ({names})"
        )
    return _wrapped(f"To build a map the fastest baseline took {'; '.join(parts)}.")


def _short(device: str) -> str:
    return device.removeprefix("NVIDIA ")


def _joined(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def _wrapped(text: str) -> str:
    # A line does not end between a number and its percent sign.
    lines = textwrap.fill(text.replace(" %", "_%"), 124, break_long_words=False, break_on_hyphens=False)
    return lines.replace("_%", " %")


def selection(found: Sequence[Compared]) -> str:
    """Say what it costs to run without schedules that were measured for a case."""
    if not found:
        return "This was not measured on the device of the other numbers."
    ratios = {(c["case"], c["provider"], c["mode"]): c["selected_us"] / c["stored_us"] for c in found}
    slow = [ratio for ratio in ratios.values() if ratio > 1.3]
    some = found[0]
    return _wrapped(
        f"On an {_short(some['gpu'])} (commit {(some['commit'] or 'unknown')[:7]}) {len(ratios)} calls took"
        f" {geometric_mean(list(ratios.values())):.2f} times as long without them, as a geometric mean; {len(slow)} of"
        f" them took more than 1.3 times, at most {max(ratios.values()):.2f}."
    )

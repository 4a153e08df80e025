"""Sentences of README and docs whose numbers no table holds, written from the records as tables are."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from benchmarks.first_step import FirstStep
from benchmarks.registry import is_ours
from benchmarks.report import geometric_mean
from benchmarks.selection import Compared

__all__ = ["NETWORKS", "first_steps", "first_steps_by_kind", "selection"]

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

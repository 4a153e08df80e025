"""The performance targets on one H200, as conditions on measurements: which cases, which quantity, how much.

A target is judged from records alone. Where what it compares with was not measured, it is not judged.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.records import Record
from benchmarks.registry import is_ours

__all__ = [
    "MEANS",
    "TARGETS",
    "Group",
    "Mean",
    "Target",
    "Verdict",
    "counts_memory",
    "gather_us",
    "judge",
    "judge_means",
]

# Run-to-run variation of one kernel: "no slower" cannot ask for more.
NOISE = 0.97
DEVICE = "H200"
# Bandwidth of a device-to-device copy on it, bytes read and written together, per second.
COPY = 4.3e12
MIB = 1 << 20

Group = Mapping[str, Record]
"""The records of one case in one mode, by provider."""


@dataclass(frozen=True)
class Verdict:
    """Outcome of a target: the condition, what was measured, and whether the condition holds."""

    target: str
    measured: str
    met: bool


def ours(group: Group) -> Record | None:
    """Return our fastest provider that passed."""
    return _fastest(group, is_ours)


def _fastest(group: Group, wanted: Callable[[str], object]) -> Record | None:
    timed = [r for name, r in group.items() if r["ms"] is not None and wanted(name)]
    return min(timed, key=lambda r: r["ms"]["p50"] if r["ms"] else math.inf, default=None)


def _p50(record: Record) -> float:
    return record["ms"]["p50"] if record["ms"] else math.nan


def counts_memory(provider: str) -> bool:
    """Return whether a provider's peak of memory is that of its call: a CUDA graph's has been taken before."""
    return not provider.endswith("cuda_graphs")


def gather_us(record: Record) -> float | None:
    """Return the microseconds in which the gathered rows of the floor arrive, at the rates measured on an H200.

    Random rows arrive at 9 TB/s from a table that fits into the L2 cache (up to 40 MiB), and at 5 TB/s from 170 MiB on;
    rows of 128 bytes and less at 7 and 4.2 TB/s.
    """
    floor = record["floor"]
    if floor is None or not floor["gathered"] or not floor["row"] or not floor["table"]:
        return None
    near, far = (7.0e12, 4.2e12) if floor["row"] <= 128 else (9.0e12, 5.0e12)
    fraction = (math.log2(floor["table"]) - math.log2(40 * MIB)) / (math.log2(170 * MIB) - math.log2(40 * MIB))
    rate = near + (far - near) * min(1.0, max(0.0, fraction))
    return floor["gathered"] / rate * 1e6


# Judges ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Faster:
    """At least `times` as fast as the best of the baselines whose name matches."""

    times: float
    baselines: str = ""

    def __str__(self) -> str:
        return f">= {self.times:g}x the best {f'of {self.baselines}' if self.baselines else 'baseline'}"

    def compares(self, provider: str) -> bool:
        """Whether a provider is one of the baselines."""
        return not is_ours(provider) and re.search(self.baselines, provider) is not None

    def __call__(self, group: Group) -> Verdict | None:
        mine, other = ours(group), _fastest(group, self.compares)
        if mine is None or other is None:
            return None
        ratio = _p50(other) / _p50(mine)
        limit = NOISE if self.times == 1 else self.times
        return Verdict(f">= {self.times:g}x {other['provider']}", f"{ratio:.2f}x", ratio >= limit)


@dataclass(frozen=True)
class Within:
    """At most `us` microseconds."""

    us: float
    provider: str = ""

    def __str__(self) -> str:
        return f"<= {self.us:g} us"

    def __call__(self, group: Group) -> Verdict | None:
        mine = _fastest(group, lambda name: is_ours(name) and re.search(self.provider, name))
        if mine is None:
            return None
        return Verdict(f"<= {self.us:g} us", f"{_p50(mine) * 1e3:.1f} us", _p50(mine) * 1e3 <= self.us)


@dataclass(frozen=True)
class NearGather:
    """At most `times` the gather floor."""

    times: float

    def __str__(self) -> str:
        return f"<= {self.times:g}x the gather floor"

    def __call__(self, group: Group) -> Verdict | None:
        mine = ours(group)
        floor = None if mine is None else gather_us(mine)
        if mine is None or floor is None:
            return None
        ratio = _p50(mine) * 1e3 / floor
        return Verdict(f"<= {self.times:g}x gather floor {floor:.1f} us", f"{ratio:.2f}x", ratio <= self.times)


@dataclass(frozen=True)
class NearBytes:
    """At most `times` the time of moving each byte once at the bandwidth of a copy."""

    times: float

    def __str__(self) -> str:
        return f"<= {self.times:g}x the byte floor"

    def __call__(self, group: Group) -> Verdict | None:
        mine = ours(group)
        counted = None if mine is None or mine["floor"] is None else mine["floor"]["bytes"]
        if mine is None or not counted:
            return None
        floor = counted / COPY * 1e6
        ratio = _p50(mine) * 1e3 / floor
        return Verdict(f"<= {self.times:g}x byte floor {floor:.1f} us", f"{ratio:.2f}x", ratio <= self.times)


@dataclass(frozen=True)
class NoMoreMemory:
    """A peak of memory no higher than the lowest of the baselines."""

    def __str__(self) -> str:
        return "peak memory <= the least of the baselines"

    def __call__(self, group: Group) -> Verdict | None:
        group = {name: record for name, record in group.items() if counts_memory(name)}
        mine = ours(group)
        other = [r["peak_bytes"] for name, r in group.items() if not is_ours(name) and r["peak_bytes"] is not None]
        if mine is None or mine["peak_bytes"] is None or not other:
            return None
        limit, peak = min(other) / MIB, mine["peak_bytes"] / MIB
        return Verdict(f"peak <= {limit:.1f} MiB", f"{peak:.1f} MiB", peak <= limit)


@dataclass(frozen=True)
class NearBusy:
    """At most `times` the device-busy time of the same call."""

    times: float

    def __str__(self) -> str:
        return f"<= {self.times:g}x its device-busy time"

    def __call__(self, group: Group) -> Verdict | None:
        mine = ours(group)
        if mine is None or mine["busy"] is None:
            return None
        ratio = _p50(mine) / mine["busy"]["ms"]
        return Verdict(
            f"<= {self.times:g}x device busy {mine['busy']['ms']:.3g} ms", f"{ratio:.2f}x", ratio <= self.times
        )


@dataclass(frozen=True)
class FirstStep:
    """At most `seconds` until the end of the first step in eager mode, all of its compilation included."""

    seconds: float

    def __str__(self) -> str:
        return f"first step <= {self.seconds:g} s"

    def __call__(self, group: Group) -> Verdict | None:
        mine = ours({n: r for n, r in group.items() if not n.endswith(("/compiled", "/cuda_graphs"))})
        if mine is None or mine["compile_s"] is None:
            return None
        first = mine["compile_s"]
        return Verdict(f"first step <= {self.seconds:g} s", f"{first:.1f} s", first <= self.seconds)


@dataclass(frozen=True)
class Target:
    """A condition, and the cases and modes that it is for.

    Attributes:
        cases: shell pattern of names.
        modes: those judged.
        judge: the condition.
    """

    cases: str
    modes: tuple[str, ...]
    judge: Callable[[Group], Verdict | None]

    def covers(self, case: str, mode: str) -> bool:
        """Whether the target is for a case in a mode."""
        return mode in self.modes and fnmatch.fnmatchcase(case, self.cases)


BOTH = ("fwd", "fwdbwd")
TARGETS: tuple[Target, ...] = (
    Target("network/network=gcn*/what=step", ("fwd",), Faster(2, "pyg")),
    Target("network/network=spunet*/what=step", ("fwd",), Faster(2, "spconv")),
    Target("network/network=spunet*/what=step", ("fwd",), NearBusy(2)),
    Target("network/network=nequip_864/what=step", ("fwd",), Faster(1, "oeq")),
    Target("network/network=nequip_32/what=step", ("fwd",), Faster(1.25, "e3nn")),
    Target("network/*/what=step", ("fwd",), NoMoreMemory()),
    Target("network/network=gcn*/what=step", ("fwd",), FirstStep(2)),
    Target("network/network=spunet*/what=step", ("fwd",), FirstStep(10)),
    Target("network/network=minkunet/what=step", ("fwd",), FirstStep(10)),
    Target("network/network=nequip*/what=step", ("fwd",), FirstStep(12)),
    Target("network/network=spunet_fp16/what=inference", ("fwd",), Within(20_000)),
    Target("peer_models/*", ("fwd",), Faster(1, "oeq")),
    Target("peer_models/model=nequip*", ("fwd",), Faster(1.25, "oeq/compiled")),
    Target("peer_models/model=nequip*", ("fwd",), NearBusy(1.5)),
    Target("block_spmm/*/dtype=float16", ("fwd",), Faster(1, "torch_dense")),
    Target("block_spmm/block=32/sparsity=0.9/dtype=float16", ("fwd",), Within(65)),
    Target("block_spmm/block=32/sparsity=0.9/dtype=float16", ("fwd",), Faster(3.6, "torch_bsr")),
    Target("block_spmm/block=32/sparsity=0.95/dtype=float16", ("fwd",), Within(40)),
    Target("block_spmm/block=32/sparsity=0.99/dtype=float16", ("fwd",), Within(20)),
    Target("spmm/*", ("fwd",), Faster(1, "torch_csr")),
    Target("spmm/*/n=64/*", ("fwd",), NearGather(1.5)),
    Target("spmm/*/n=128/*", ("fwd",), NearGather(1.5)),
    Target("spmm/*/n=256/*", ("fwd",), NearGather(1.5)),
    Target("gcn_step/*", ("fwd",), Faster(2)),
    Target("gcn_step/*", ("fwd",), NoMoreMemory()),
    Target("gcn_layer/*", BOTH, Faster(1)),
    Target("gcn/*", BOTH, Faster(1)),
    Target("subm_conv/*/dtype=float16", BOTH, Faster(1.3)),
    Target("subm_conv/*/dtype=bfloat16", BOTH, Faster(1.3)),
    Target("subm_conv/*/dtype=float32", BOTH, Faster(1)),
    Target("subm_conv/*/dtype=tf32", BOTH, Faster(1)),
    Target("subm_map/*", ("fwd",), Faster(1.3)),
    Target("tp_conv/*", ("fwd",), Faster(3, "oeq")),
    Target("tp_conv/*", ("fwdbwd",), Faster(2.5, "oeq")),
    Target("tp_conv_double/*", ("bwd",), Faster(2, "oeq")),
    Target("fctp/*/channels=[!1]*/weights=shared/dtype=float32", ("fwd",), Faster(2.5)),
    Target("fctp/*/channels=128/weights=shared/dtype=float32", ("fwd",), Faster(2.5)),
    Target("fctp/*/channels=[!1]*/weights=shared/dtype=tf32", ("fwd",), Faster(4)),
    Target("fctp/*/channels=128/weights=shared/dtype=tf32", ("fwd",), Faster(4)),
    Target("fctp/*/weights=sample/*", ("fwd",), NearBytes(1.3)),
    Target("fctp/*/dtype=float32", ("fwdbwd",), Faster(1)),
    Target("block_linear/*", BOTH, Faster(1)),
    Target("host/call=program/autograd=off", ("fwd",), Within(20, "program")),
    Target("host/call=program/autograd=on", ("fwd",), Within(60, "program")),
)


def judge(case: str, mode: str, group: Group) -> list[Verdict]:
    """Judge one case in one mode; nothing where another device was measured than the targets are for."""
    if not all(DEVICE in record["gpu"] for record in group.values()):
        return []
    found = [target.judge(group) for target in TARGETS if target.covers(case, mode)]
    return [verdict for verdict in found if verdict is not None]


# Over many cases ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mean:
    """A geometric mean of ratios over cases.

    Attributes:
        cases: regular expression of names, matched whole.
        mode: that judged.
        times: the least that meets the target.
        baselines: regular expression; the fastest of those that match is compared.
    """

    cases: str
    mode: str
    times: float
    baselines: str


MEANS: tuple[Mean, ...] = (
    Mean(r"spmm/.*/n=(16|32|64|128|256)/dtype=float32", "fwd", 1.4, "torch_csr"),
    Mean(r"spmm/.*/n=(16|32|64|128|256)/dtype=b?float16", "fwd", 1.8, "torch_csr"),
)


def judge_means(groups: Mapping[tuple[str, str], Group], means: Sequence[Mean] = MEANS) -> list[Verdict]:
    """Judge geometric means over cases; `groups` is keyed by case and mode."""
    verdicts: list[Verdict] = []
    for mean in means:
        ratios: list[float] = []
        for (case, mode), group in groups.items():
            if not all(DEVICE in record["gpu"] for record in group.values()):
                continue
            if mode != mean.mode or not re.fullmatch(mean.cases, case):
                continue
            mine, wanted = ours(group), re.compile(mean.baselines)
            other = _fastest(group, lambda name, wanted=wanted: not is_ours(name) and wanted.search(name))
            if mine is not None and other is not None:
                ratios.append(_p50(other) / _p50(mine))
        if ratios:
            value = math.exp(sum(map(math.log, ratios)) / len(ratios))
            target = f"{mean.cases}: geometric mean >= {mean.times:g}x {mean.baselines}"
            verdicts.append(Verdict(target, f"{value:.2f}x over {len(ratios)} cases", value >= mean.times))
    return verdicts

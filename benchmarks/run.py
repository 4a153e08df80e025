"""Run benchmarks and write their results.

    python -m benchmarks.run spmm 'conv/c=*' --modes fwd,bwd --out benchmarks/results/x.json

The file is a list of records, one for each case, provider and mode, with the keys of `RECORD` and no others. Nothing
is left out: a provider that is not installed, raises, or fails the gate has a record that says so, without timings.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import math
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, cast

import torch
from torch import Tensor

from benchmarks import gate
from benchmarks.registry import (
    MODES,
    Case,
    Floor,
    Mode,
    Problem,
    Registry,
    Setting,
    Unavailable,
    Work,
    is_ours,
    load,
)

__all__ = ["RECORD", "SCHEMA", "Machine", "Milliseconds", "Record", "main", "measure", "run_case"]

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent
LOCK = Path(__file__).with_name("peers.lock")


class Milliseconds(TypedDict):
    """Percentiles of the time of one call."""

    p20: float
    p50: float
    p80: float


class Record(TypedDict):
    """One measurement. What could not be measured is `None`.

    Attributes:
        schema: version of this layout.
        case: the case's name.
        provider: who solved it.
        mode: "fwd", "bwd" (backward alone) or "fwdbwd".
        ms: time of one call.
        repeats: timed calls.
        compile_s: from the start of the provider's builder to the end of its first call in this mode.
        peak_bytes: device memory that the provider holds and needs at its peak, beyond the problem's own tensors.
        max_rel_err: against the oracle; see `benchmarks.gate.relative_error`.
        gate: "passed", or why there are no timings: "unavailable: ...", "error: ...", "wrong: ...", "tests: ...".
        gpu: the device's name; on a CPU, its name and the number of threads.
        driver: of the GPU.
        torch: version.
        triton: version.
        commit: of this project.
        dirty: whether files differed from the commit.
        utc: when the measurement ended.
    """

    schema: int
    case: str
    provider: str
    mode: Mode
    ms: Milliseconds | None
    repeats: int
    compile_s: float | None
    peak_bytes: int | None
    max_rel_err: float | None
    gate: str
    gpu: str
    driver: str | None
    torch: str
    triton: str | None
    commit: str | None
    dirty: bool | None
    utc: str


RECORD = tuple(Record.__annotations__)


class Machine(NamedTuple):
    """What the numbers were measured on."""

    gpu: str
    driver: str | None
    torch: str
    triton: str | None
    commit: str | None
    dirty: bool | None

    @classmethod
    def here(cls, device: torch.device, commit: str | None = None) -> Machine:
        """Read this machine; `commit` stands in where the files are a copy without their history."""
        if device.type == "cuda":
            gpu = torch.cuda.get_device_name(device)
            driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
            driver = driver.splitlines()[0] if driver else None
        else:
            gpu, driver = f"{_processor()} ({torch.get_num_threads()} threads)", None
        found = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
        status = _output("git", "-C", str(ROOT), "status", "--porcelain") if found else None
        dirty = None if status is None else status != ""
        return cls(gpu, driver, torch.__version__, _version("triton"), found or commit, dirty)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", information.read_text()) if information.exists() else None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


# Timing ---------------------------------------------------------------------------------------------------------------


def _times_cuda(call: Callable[[], object], warmup_ms: int, rep_ms: int) -> list[float]:
    """Milliseconds of each call between CUDA events, with the L2 cache flushed before each."""
    from triton.testing import do_bench

    return cast(list[float], do_bench(call, warmup=warmup_ms, rep=rep_ms, return_mode="all"))


def _times_cpu(call: Callable[[], object], warmup_ms: int, rep_ms: int) -> list[float]:
    """Milliseconds of each call by the process's clock; at least five calls."""

    def until(budget_ms: float, least: int) -> list[float]:
        times: list[float] = []
        while len(times) < least or (sum(times) < budget_ms and len(times) < 10_000):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        return times

    until(warmup_ms, 1)
    return until(rep_ms, 5)


def _quantile(times: Sequence[float], q: float) -> float:
    ordered = sorted(times)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _call(work: Work, mode: Mode, back: Tensor | None) -> Callable[[], object]:
    """The function that is timed; for `bwd`, the graph of one forward is kept and walked again and again."""
    if mode == "fwd":

        def forward() -> Tensor:
            with torch.no_grad():
                return work.forward()

        return forward
    if back is None or not work.leaves:
        raise Unavailable("has no backward")
    leaves = tuple(work.leaves)
    output = work.forward()
    sent = back.to(output)
    if mode == "bwd":
        return lambda: torch.autograd.grad(output, leaves, sent, retain_graph=True)
    return lambda: torch.autograd.grad(work.forward(), leaves, sent)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(call: Callable[[], object], device: torch.device, before: int) -> int | None:
    """Peak of allocated bytes during a call, less what was there before the provider was built."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    call()
    _synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


# Running --------------------------------------------------------------------------------------------------------------


class Measurement(NamedTuple):
    """What one provider did in one mode."""

    gate: str
    ms: Milliseconds | None = None
    repeats: int = 0
    compile_s: float | None = None
    peak_bytes: int | None = None
    max_rel_err: float | None = None


def measure(
    problem: Problem,
    provider: str,
    mode: Mode,
    wanted: gate.Reference,
    device: torch.device,
    *,
    warmup_ms: int = 25,
    rep_ms: int = 200,
) -> Measurement:
    """Build a provider, pass it through the gate, and time it.

    Args:
        problem: what is solved.
        provider: a key of `problem.providers`.
        mode: what is timed.
        wanted: from `gate.reference`.
        device: where the problem's tensors live.
        warmup_ms: not counted.
        rep_ms: counted.

    Returns:
        The measurement; without timings when the provider is missing, raises or is wrong.
    """
    before = 0
    if device.type == "cuda":
        gc.collect()  # what the last provider left in reference cycles is not this one's
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
    start = time.perf_counter()
    try:
        work = problem.providers[provider]()
        call = _call(work, mode, wanted.upstream)
        call()
        _synchronize(device)
        compile_s = time.perf_counter() - start
        error = gate.accuracy(work, wanted, mode)
        limit = problem.tolerances.get(provider, problem.tolerance)
        if not error <= limit:
            shown = None if math.isinf(error) else error
            return Measurement(f"wrong: error {error:.3g} > {limit:.3g}", compile_s=compile_s, max_rel_err=shown)
        peak = _peak(call, device, before)
        times = (_times_cuda if device.type == "cuda" else _times_cpu)(call, warmup_ms, rep_ms)
    except (ModuleNotFoundError, Unavailable) as fault:
        return Measurement(f"unavailable: {_one_line(fault)}")
    except Exception as fault:
        # Whatever a peer raises is its result; the other providers go on.
        return Measurement(f"error: {type(fault).__name__}: {_one_line(fault)}")
    ms = Milliseconds(p20=_quantile(times, 0.2), p50=_quantile(times, 0.5), p80=_quantile(times, 0.8))
    return Measurement("passed", ms, len(times), compile_s, peak, error)


def _one_line(fault: BaseException) -> str:
    return (str(fault).strip().splitlines() or [type(fault).__name__])[0][:300]


def run_case(
    case: Case,
    setting: Setting,
    modes: Sequence[Mode],
    machine: Machine,
    *,
    only: str = "",
    run_tests: bool = True,
    warmup_ms: int = 25,
    rep_ms: int = 200,
) -> Iterator[tuple[Record, Floor | None]]:
    """Measure every provider of a case in every mode that the case has.

    Args:
        case: what is run.
        setting: device and size.
        modes: those wanted; the ones that the case does not have are passed over.
        machine: goes into each record.
        only: regular expression; other providers are not run and not recorded.
        run_tests: whether the operator's tests stand before the timing, as they should.
        warmup_ms: see `measure`.
        rep_ms: see `measure`.

    Yields:
        Records with the problem's floor for their mode, as they are measured.
    """
    failed = gate.operator_tests(case.tests) if run_tests else None
    problem = case.problem(setting)
    chosen: list[Mode] = [mode for mode in modes if mode in problem.modes]
    wanted = gate.reference(problem, chosen)
    for mode in chosen:
        for provider in problem.providers:
            if not re.search(only, provider):
                continue
            if failed is not None and is_ours(provider):
                result = Measurement(f"tests: {failed}")
            else:
                result = measure(problem, provider, mode, wanted, setting.device, warmup_ms=warmup_ms, rep_ms=rep_ms)
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            fields: dict[str, Any] = {
                "schema": SCHEMA,
                "case": case.name,
                "provider": provider,
                "mode": mode,
                "utc": now,
            }
            fields |= result._asdict() | machine._asdict()
            yield cast(Record, {key: fields[key] for key in RECORD}), problem.floors.get(mode)


def _show(record: Record, floor: Floor | None) -> str:
    """One line for the terminal; the rates are of the floor's work, so they say how far from it the time is."""
    head = f"{record['case']:<48} {record['mode']:<7} {record['provider']:<28}"
    if record["ms"] is None:
        return f"{head} {record['gate']}"
    ms = record["ms"]
    parts = [f"{ms['p50'] * 1e3:10.1f} us [{ms['p20'] * 1e3:.1f}, {ms['p80'] * 1e3:.1f}]"]
    parts.append(f"err {record['max_rel_err']:.1e}")
    if record["peak_bytes"] is not None:
        parts.append(f"{record['peak_bytes'] / 2**20:.1f} MiB")
    if floor is not None and floor.bytes is not None:
        parts.append(f"{floor.bytes / ms['p50'] * 1e-9:.3f} TB/s")
    if floor is not None and floor.flops is not None:
        parts.append(f"{floor.flops / ms['p50'] * 1e-9:.3f} TFLOP/s")
    return "  ".join([head, *parts])


def _compare_peers() -> Iterator[str]:
    """Installed peers whose version is not the locked one."""
    for line in LOCK.read_text(encoding="utf-8").splitlines():
        name, _, locked = line.partition("#")[0].strip().partition("==")
        here = _version(name) if name else None
        if here is not None and here != locked:
            yield f"note: {name} {here} is installed, peers.lock says {locked}"


def main(arguments: Sequence[str] | None = None, registry: Registry | None = None) -> int:
    """The command line; 1 when no timing was made or one of our own providers failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description="Run benchmarks and write their results."
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="family, name or shell pattern")
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--modes", default=",".join(MODES), help="of fwd,bwd,fwdbwd")
    parser.add_argument("--providers", default="", metavar="REGEX", help="run only these")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=["tiny", "full"], default="full")
    parser.add_argument("--commit", help="where the files are a copy without history, the commit they are of")
    parser.add_argument("--skip-tests", action="store_true", help="do not run the operators' tests first")
    parser.add_argument("--warmup-ms", type=int, default=25)
    parser.add_argument("--rep-ms", type=int, default=200)
    options = parser.parse_args(arguments)

    registry = load() if registry is None else registry
    if options.list or not options.cases:
        print("\n".join(case.name for case in registry))
        return 0 if options.list else 2
    modes: list[Mode] = [mode for mode in MODES if mode in options.modes.split(",")]
    unknown = set(options.modes.split(",")) - set(MODES)
    if unknown:
        parser.error(f"unknown mode {', '.join(sorted(unknown))}")
    device = torch.device(options.device)
    try:
        cases = registry.select(options.cases)
    except KeyError as fault:
        parser.error(str(fault.args[0]))

    print(*_compare_peers(), sep="\n", file=sys.stderr)
    machine = Machine.here(device, options.commit)
    print(f"{machine.gpu}, torch {machine.torch}, triton {machine.triton}, commit {machine.commit}")
    records: list[Record] = []
    for case in cases:
        if device.type not in case.devices:
            print(f"{case.name:<48} not for {device.type}")
            continue
        for record, floor in run_case(
            case,
            Setting(device, options.size),
            modes,
            machine,
            only=options.providers,
            run_tests=not options.skip_tests,
            warmup_ms=options.warmup_ms,
            rep_ms=options.rep_ms,
        ):
            print(_show(record, floor), flush=True)
            records.append(record)
            # Written as it grows: a run that is cut short keeps what it has.
            if options.out:
                _write(options.out, records)
    fine = ("passed", "unavailable")
    ours_failed = [r for r in records if is_ours(r["provider"]) and not r["gate"].startswith(fine)]
    return 1 if ours_failed or not any(r["ms"] for r in records) else 0


def _write(path: Path, records: Sequence[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())

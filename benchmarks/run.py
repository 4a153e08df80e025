"""Run benchmarks and write their results.

    python -m benchmarks.run spmm 'subm_conv/cloud=room/*' --modes fwd,fwdbwd --save

The file is a list of records, one for each case, provider and mode, with the keys of `RECORD` and no others. Nothing
is left out: a provider that is not installed, raises, or fails the gate has a record that says so, without timings.
`--save` writes to `benchmarks/results/history/` under the date and the device, and brings `results/current/` up to
date. With `--supervise` the measurements are made in a subprocess, which is started again after a provider crashed it
or did not return; with `--budget` a run stops in time and its file says what was not run; `--resume` continues there.
`--replay` adds CUDA-graph times, `--busy` the sum of the kernels' times, `--runs N` the medians of N runs.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._inductor.config

from benchmarks import archive, gate, timing
from benchmarks.command_line import add_limits, add_machine, add_out
from benchmarks.records import (
    LOCK,
    RECORD,
    SCHEMA,
    Busy,
    Machine,
    Milliseconds,
    Record,
    Replay,
    record,
    shown,
    this_machine,
    version,
)
from benchmarks.registry import MODES, OURS, Case, Mode, Problem, Registry, Setting, Unavailable, Work, is_ours, load
from benchmarks.supervise import BUILDING, MEASURING, State, supervise
from insum_nn.compiler.kernels.background import settle

__all__ = ["RECORD", "SCHEMA", "Machine", "Milliseconds", "Record", "main", "measure", "run_case", "timed_call"]

# Exit status when the device no longer responds; a supervisor starts another process then.
BROKEN_DEVICE = 3


class Measurement(NamedTuple):
    """Result of one provider in one mode."""

    gate: str
    ms: Milliseconds | None = None
    repeats: int = 0
    compile_s: float | None = None
    peak_bytes: int | None = None
    max_rel_err: float | None = None
    replay: Replay | None = None
    runs: list[float] | None = None


class BrokenDeviceError(Exception):
    """An earlier error left the device unusable for this process."""


# One provider ---------------------------------------------------------------------------------------------------------


def timed_call(work: Work, mode: Mode, back: Sequence[torch.Tensor] | None) -> Callable[[], object]:
    """Return the function that is timed; for `bwd`, the graph of one forward is kept and traversed by each call."""
    if mode == "fwd":
        return work.forward
    if back is None or not work.leaves:
        raise Unavailable("has no backward")
    leaves = tuple(work.leaves)
    output = work.forward()
    sent, outputs = gate.sent_back(work, output, back), gate.as_tuple(output)
    if mode == "bwd":
        return lambda: torch.autograd.grad(outputs, leaves, sent, retain_graph=True)
    return lambda: torch.autograd.grad(gate.as_tuple(work.forward()), leaves, sent)


def _peak(call: Callable[[], object], device: torch.device, before: int) -> int | None:
    """Return the peak of allocated bytes during a call, minus what was allocated before the provider was built."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    call()
    timing.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def measure(
    problem: Problem,
    provider: str,
    mode: Mode,
    wanted: gate.Reference,
    device: torch.device,
    *,
    warmup_ms: int = 25,
    rep_ms: int = 200,
    replay: bool = False,
) -> Measurement:
    """Build a provider, compare its result with the oracle, and time it.

    Args:
        problem: what is solved.
        provider: a key of `problem.providers`.
        mode: what is timed.
        wanted: from `gate.reference`.
        device: where the problem's tensors live.
        warmup_ms: not counted.
        rep_ms: counted.
        replay: whether the call is also timed from a CUDA graph; a backward alone is not, whose forward is outside.

    Returns:
        The measurement; without timings when the provider is missing, raises or is wrong.
    """
    before = 0
    if device.type == "cuda":
        gc.collect()  # collect what the last provider left in reference cycles
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
    start = time.perf_counter()
    try:
        work = problem.providers[provider]()
        call = timed_call(work, mode, wanted.upstream)
        with torch.set_grad_enabled(mode != "fwd" or problem.recorded):
            call()
            timing.synchronize(device)
            compile_s = time.perf_counter() - start
            error = gate.accuracy(work, wanted, mode, recorded=problem.recorded)
            limit = problem.limit(provider, mode)
            if not error <= limit:
                shown = None if math.isinf(error) else error
                return Measurement(f"wrong: error {error:.3g} > {limit:.3g}", compile_s=compile_s, max_rel_err=shown)
            # A compiler thread that still runs would compete for the interpreter with what is timed.
            settle(60.0)
            peak = _peak(call, device, before)
            times = _times(problem, call, device, warmup_ms, rep_ms)
            again = None
            if replay and device.type == "cuda" and problem.clock == "device" and mode != "bwd":
                again = _replayed(work, call, wanted, mode, limit, warmup_ms, rep_ms)
    except (ModuleNotFoundError, Unavailable) as fault:
        return Measurement(f"unavailable: {_one_line(fault)}")
    except Exception as fault:
        # Whatever a provider raises is its result; the other providers are still measured.
        return Measurement(f"error: {type(fault).__name__}: {_one_line(fault)}")
    return Measurement("passed", _percentiles(times), len(times), compile_s, peak, error, again)


def middle(found: Sequence[Measurement]) -> Measurement:
    """Combine the runs of one measurement: the run of the middle median, the first call of the first run.

    A run that failed is the result, whatever the others did.
    """
    failed = [one for one in found if one.ms is None]
    if failed or len(found) == 1:
        return (failed or found)[0]
    ordered = sorted(found, key=_median)
    return ordered[(len(found) - 1) // 2]._replace(
        runs=[_median(one) for one in found],
        repeats=sum(one.repeats for one in found),
        compile_s=found[0].compile_s,
    )


def _median(one: Measurement) -> float:
    return one.ms["p50"] if one.ms else math.inf


def _busy(call: Callable[[], object]) -> Busy:
    found = timing.kernels(call)
    return Busy(ms=sum(k.us for k in found) / 1e3, launches=round(sum(k.launches for k in found)))


def _percentiles(times: Sequence[float]) -> Milliseconds:
    p20, p50, p80 = (timing.quantile(times, q) for q in (0.2, 0.5, 0.8))
    return Milliseconds(p20=p20, p50=p50, p80=p80)


def _replayed(
    work: Work,
    call: Callable[[], Any],
    wanted: gate.Reference,
    mode: Mode,
    limit: float,
    warmup_ms: int,
    rep_ms: int,
) -> Replay:
    """Time a call from a CUDA graph, after the result of a replay has been compared with the oracle too."""
    try:
        graph, result = timing.captured(call)
        graph.replay()
        if mode == "fwd":
            error = gate.largest_error(gate.as_tuple(work.output(result)), wanted.outputs)
        else:
            error = gate.largest_error(work.gradients(result), wanted.gradients)
        if not error <= limit:
            return Replay(gate=f"wrong: error {error:.3g} > {limit:.3g}", ms=None)
        return Replay(gate="passed", ms=_percentiles(timing.times_cuda(graph.replay, warmup_ms, rep_ms)))
    except Exception as fault:
        # A call that waits for the device cannot be captured; its own time remains valid.
        first: BaseException = fault
        while first.__context__ is not None:
            first = first.__context__
        return Replay(gate=f"error: {type(first).__name__}: {_one_line(first)}", ms=None)


def _times(
    problem: Problem, call: Callable[[], object], device: torch.device, warmup_ms: int, rep_ms: int
) -> list[float]:
    if problem.clock == "host":
        return timing.times_host(call, warmup_ms, rep_ms, device)
    return (timing.times_cuda if device.type == "cuda" else timing.times_cpu)(call, warmup_ms, rep_ms)


def _one_line(fault: BaseException) -> str:
    return (str(fault).strip().splitlines() or [type(fault).__name__])[0][:300]


def _release(device: torch.device) -> None:
    """Release memory held for reuse: the next problem needs it in blocks of other sizes."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _require_device(device: torch.device) -> None:
    """Raise where an earlier error, such as an invalid address, makes every later call fail."""
    try:
        timing.synchronize(device)
    except RuntimeError as fault:
        raise BrokenDeviceError(_one_line(fault)) from fault


# One case -------------------------------------------------------------------------------------------------------------


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
    replay: bool = False,
    runs: int = 1,
    state: State | None = None,
    deadline: float = math.inf,
) -> Iterator[Record]:
    """Measure every provider of a case in every mode that the case has.

    Args:
        case: what is run.
        setting: device and size.
        modes: those to measure; modes that the case does not have are ignored.
        machine: goes into each record.
        only: regular expression; other providers are not run and not recorded.
        run_tests: whether the operator's tests are run first, as they should be.
        warmup_ms: see `measure`.
        rep_ms: see `measure`.
        replay: see `measure`.
        runs: how often each provider is built and measured; see `middle`.
        state: what was measured before and is not measured again; it also keeps what is in progress.
        deadline: of `time.monotonic()`; later measurements are recorded as not run.

    Yields:
        Records, as they are measured.

    Raises:
        BrokenDeviceError: the device no longer responds; everything up to then was yielded.
    """
    state = State() if state is None else state
    failed = gate.operator_tests(case.tests) if run_tests else None
    state.begin(record(machine, case.name, OURS, modes[0], BUILDING))
    try:
        problem = case.problem(setting)
        torch.set_float32_matmul_precision(problem.precision)
        chosen: list[Mode] = [mode for mode in modes if mode in problem.modes]
        wanted = gate.reference(problem, chosen)
    except (ModuleNotFoundError, Unavailable) as fault:
        yield record(machine, case.name, OURS, modes[0], f"unavailable: {_one_line(fault)}")
        return
    except Exception as fault:
        # A problem that cannot be built is one record; the other cases are still measured.
        why = f"error: the problem: {type(fault).__name__}: {_one_line(fault)}"
        yield record(machine, case.name, OURS, modes[0], why)
        _require_device(setting.device)
        return
    try:
        for mode in chosen:
            for provider in problem.providers:
                if not re.search(only, provider) or state.known(case.name, provider, mode):
                    continue
                state.begin(record(machine, case.name, provider, mode, MEASURING))
                if failed is not None and is_ours(provider):
                    result = Measurement(f"tests: {failed}")
                elif time.monotonic() > deadline:
                    result = Measurement("not run: the budget was spent")
                else:
                    more: dict[str, Any] = {"warmup_ms": warmup_ms, "rep_ms": rep_ms, "replay": replay}
                    result = middle(
                        [measure(problem, provider, mode, wanted, setting.device, **more) for _ in range(runs)]
                    )
                fields: dict[str, Any] = result._asdict()
                yield record(
                    machine, case.name, provider, mode, fields.pop("gate"), floor=problem.floors.get(mode), **fields
                )
                said = [result.gate] + ([result.replay["gate"]] if result.replay else [])
                if any(word.startswith("error") for word in said):
                    _require_device(setting.device)
                    _release(setting.device)
    finally:
        torch.set_float32_matmul_precision("highest")


def profile_case(case: Case, setting: Setting, state: State) -> None:
    """Profile what was timed of a case, and add the sum of its kernels' times to the records.

    When all has been timed: a profiler can slow the launches of its process down even after it was closed.
    """
    found = [r for r in state.records if r["case"] == case.name and r["ms"] is not None and r["busy"] is None]
    if not found:
        return
    problem = case.problem(setting)
    if problem.clock != "device":
        return
    wanted = gate.reference(problem, list(dict.fromkeys(entry["mode"] for entry in found)))
    torch.set_float32_matmul_precision(problem.precision)
    try:
        for entry in found:
            try:
                call = timed_call(problem.providers[entry["provider"]](), entry["mode"], wanted.upstream)
                with torch.set_grad_enabled(entry["mode"] != "fwd" or problem.recorded):
                    entry["busy"] = _busy(call)
            except Exception as fault:
                # Its times remain valid.
                print(f"not profiled: {entry['provider']}: {_one_line(fault)}", file=sys.stderr)
                _require_device(setting.device)
                continue
            print(shown(entry), flush=True)
            state.keep()
    finally:
        torch.set_float32_matmul_precision("highest")


# The command ----------------------------------------------------------------------------------------------------------


def _compare_peers() -> Iterator[str]:
    """Yield the installed baselines whose version is not the locked one."""
    for line in LOCK.read_text(encoding="utf-8").splitlines():
        name, _, locked = line.partition("#")[0].strip().partition("==")
        here = version(name) if name else None
        if here is not None and here != locked:
            yield f"note: {name} {here} is installed, peers.lock says {locked}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description="Run benchmarks and write their results."
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="family, name or shell pattern")
    parser.add_argument("--list", action="store_true", help="list the cases (with CASE: those chosen) and stop")
    parser.add_argument("--quick", action="store_true", help="a few representative cases of each family, timed briefly")
    add_out(parser)
    parser.add_argument("--resume", action="store_true", help="keep the records of --out, and measure what is missing")
    parser.add_argument("--supervise", action="store_true", help="measure in a subprocess; restart it when it crashes")
    add_limits(parser, of="one measurement, supervised")
    add_machine(parser)
    parser.add_argument("--root", type=Path, help="folder of data sets (default: the variable INSUM_DATA)")
    parser.add_argument("--modes", default=",".join(MODES), help="of fwd,bwd,fwdbwd")
    parser.add_argument("--skip-tests", action="store_true", help="do not run the operators' tests first")
    parser.add_argument("--warmup-ms", type=int, help="default 25; quick 10")
    parser.add_argument("--rep-ms", type=int, help="default 200; quick 50")
    parser.add_argument("--replay", action="store_true", help="time each call from a CUDA graph too")
    parser.add_argument(
        "--busy", action="store_true", help="at the end, profile each call: sum of its kernels' times, launches"
    )
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="build and time each provider N times")
    return parser


def main(arguments: Sequence[str] | None = None, registry: Registry | None = None) -> int:
    """Run the command line; return 1 when nothing was timed or one of our own providers failed."""
    start = time.monotonic()
    parser = _parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    registry = load() if registry is None else registry
    if not options.cases:
        print("\n".join(case.name for case in registry))
        return 0 if options.list else 2
    modes: list[Mode] = [mode for mode in MODES if mode in options.modes.split(",")]
    unknown = set(options.modes.split(",")) - set(MODES)
    if unknown:
        parser.error(f"unknown mode {', '.join(sorted(unknown))}")
    if options.runs < 1:
        parser.error("--runs must be at least 1")
    device = torch.device(options.device)
    if options.save:
        machine = this_machine(device, options.commit)
        options.out = archive.new_file(machine["gpu"], machine["cores"])
        given = [word for word in given if word != "--save"] + ["--out", str(options.out)]
    if not options.out and (options.resume or options.supervise):
        parser.error("--resume and --supervise need --out or --save")
    try:
        cases = registry.select(options.cases)
    except KeyError as fault:
        parser.error(str(fault.args[0]))
    cases = [case for case in cases if device.type in case.devices and (case.quick or not options.quick)]
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    if options.supervise:
        outcome = supervise(given, options.out, limit=options.limit, budget=options.budget)
    else:
        outcome = _run(options, cases, modes, device, start + options.budget)
    if options.save:
        print(f"wrote {options.out}")
        archive.update()
    return outcome


def _run(
    options: argparse.Namespace, cases: Sequence[Case], modes: Sequence[Mode], device: torch.device, deadline: float
) -> int:
    # The processes of Inductor's pool would compete for the cores with what is timed.
    torch._inductor.config.compile_threads = 1
    # Calls wait for what is compiled, which is what is checked and timed.
    os.environ.setdefault("INSUM_NN_COMPILE_WORKERS", "0")
    print(*_compare_peers(), sep="\n", file=sys.stderr)
    machine = this_machine(device, options.commit)
    print("{gpu}, torch {torch}, triton {triton}, commit {commit}".format(**machine), f"{len(cases)} cases", sep=", ")
    state = State.of(options.out, resume=options.resume)
    root = options.root or (Path(os.environ["INSUM_DATA"]) if "INSUM_DATA" in os.environ else None)
    setting = Setting(device, options.size, root=root)
    for case in cases:
        if state.finished(case.name):
            continue
        if time.monotonic() > deadline:
            state.add(record(machine, case.name, OURS, modes[0], "not run: the budget was spent"))
            continue
        found = run_case(
            case,
            setting,
            modes,
            machine,
            only=options.providers,
            run_tests=not options.skip_tests,
            warmup_ms=(10 if options.quick else 25) if options.warmup_ms is None else options.warmup_ms,
            rep_ms=(50 if options.quick else 200) if options.rep_ms is None else options.rep_ms,
            replay=options.replay,
            runs=options.runs,
            state=state,
            deadline=deadline,
        )
        try:
            for entry in found:
                print(shown(entry), flush=True)
                state.add(entry)
        except BrokenDeviceError as fault:
            print(f"the device no longer responds: {fault}", file=sys.stderr)
            return BROKEN_DEVICE
        state.keep()
        _release(device)
    if _profiles(options, device):
        try:
            for case in cases:
                profile_case(case, setting, state)
                _release(device)
        except BrokenDeviceError as fault:
            print(f"the device no longer responds: {fault}", file=sys.stderr)
            return BROKEN_DEVICE
    state.keep()
    return _outcome(state.records)


def _profiles(options: argparse.Namespace, device: torch.device) -> bool:
    return options.busy and device.type == "cuda"


def _outcome(records: Sequence[Record]) -> int:
    fine = ("passed", "unavailable", "not run")
    ours_failed = [r for r in records if is_ours(r["provider"]) and not r["gate"].startswith(fine)]
    return 1 if ours_failed or not any(r["ms"] for r in records) else 0


if __name__ == "__main__":
    sys.exit(main())

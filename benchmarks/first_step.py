"""Measure first steps: what a new user waits for, and what each later process waits for.

    python -m benchmarks.first_step [CASE ...] --save
    python -m benchmarks.first_step [CASE ...] --out FILE

Each provider of a case runs in two new processes, one after the other: the first finds empty caches, the second finds
what the first one left. Each takes three steps, of which the second and third have other batches where the case has
several. On a CPU library calls serve while C functions are compiled; after each step these are waited for. Imports are
timed apart, and so is building the model and its data, with the device's context.

Without names, the whole networks of `benchmarks.networks` are measured, and a layer of each family, forward and
backward, without baselines; names are those of `benchmarks.run`, and networks may be called by their short names. Ours
come first, so that a budget that ends leaves out baselines. Each record of the file has the keys of `FirstStep`.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import importlib
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, Self, TextIO, TypedDict, cast

import torch

from benchmarks import archive, timing
from benchmarks.command_line import add_limits, add_machine, add_out
from benchmarks.networks import NETWORKS, Step
from benchmarks.records import ROOT, Machine, this_machine
from benchmarks.registry import Mode, Problem, Setting, Unavailable, Work, is_ours, load

__all__ = ["CACHES", "LAYERS", "FirstStep", "OneStep", "main", "measure", "take"]

SCHEMA = 1
STEPS = 3
# A layer of each family; the last is differentiated twice.
LAYERS: tuple[tuple[str, Mode], ...] = (
    ("gcn_layer/graph=cora/input=edge_index", "fwdbwd"),
    ("subm_conv/cloud=room/channels=64/dtype=float16", "fwdbwd"),
    ("block_linear/block=32/density=0.05/dtype=float16", "fwdbwd"),
    ("fctp/degree=2/channels=64/weights=shared/dtype=float32", "fwdbwd"),
    ("tp_conv/shape=nequip/dtype=float32", "fwdbwd"),
    ("pruned_conv2d/channels=64/pattern=MC/density=0.05", "fwd"),
    ("tp_conv_double/shape=mace-large/dtype=float32", "fwdbwd"),
)
# Of the providers without those that `torch.compile` builds.
PROVIDERS = "^(insum_nn|pyg|spconv|spconv_triton|e3nn|oeq)$"
# What a user of a provider imports.
_PACKAGES = {
    "insum_nn": "insum_nn",
    "pyg": "torch_geometric.nn",
    "spconv": "spconv.pytorch",
    "spconv_triton": "spconv_triton.pytorch",
    "e3nn": "e3nn.o3",
    "oeq": "openequivariance",
}
CACHES = ("INSUM_NN_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
_ANSWER = "answer: "
# Seconds before its limit at which a process shows what it is doing.
_BEFORE_LIMIT_S = 3.0


class OneStep(TypedDict):
    """What happened in one step.

    Attributes:
        seconds: that the step took.
        compiled: kernels whose machine code was new on disk afterwards, whichever process compiled them.
        loaded: kernels whose machine code this process found on disk.
        compile_s: seconds that Triton compiled in this process.
        c_compiler_s: seconds that Triton ran a C compiler for this process; and from the end of the step until the C
            functions that it asked for served.
        measured: how often the times of a kernel or of a program were measured.
        peak_mib: most memory of the GPU that tensors had at a time, in MiB; absent on a CPU.
    """

    seconds: float
    compiled: int
    loaded: int
    compile_s: float
    c_compiler_s: float
    measured: int
    peak_mib: NotRequired[int]


class FirstStep(Machine):
    """The first steps of one process, with the machine. What could not be measured is `None`.

    Attributes:
        schema: version of this layout.
        case: the case's name.
        provider: whose layers.
        mode: see `benchmarks.records.Record`.
        process: "cold": all caches were empty; "warm": they held what the cold process left.
        gate: "measured", or why there are no numbers: "unavailable: ...", "error: ...", "not run: ...".
        torch_s: from the start of the process until torch was imported.
        import_s: importing the provider's package after that.
        build_s: making the model and its data, and the device's context.
        steps: the first steps in order; of a process that ended or was killed, those that it had taken.
        python: version.
        utc: when the process ended.
    """

    schema: int
    case: str
    provider: str
    mode: Mode
    process: str
    gate: str
    torch_s: float | None
    import_s: float | None
    build_s: float | None
    steps: list[OneStep] | None
    python: str
    utc: str


# In the measured process ----------------------------------------------------------------------------------------------


class _Counters:
    """Count compilations and measurements of this process, within a `with`."""

    def __init__(self) -> None:
        self.loaded, self.measured, self.compile_s, self.c_compiler_s = 0, 0, 0.0, 0.0
        self._requested: list[Any] = []
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        measuring: Any = importlib.import_module("insum_nn.compiler.tuning.timing")
        device_time = measuring.device_time

        def counted(*arguments: Any, **named: Any) -> float:
            self.measured += 1
            return device_time(*arguments, **named)

        self._replace(measuring, "device_time", counted)
        functions: Any = importlib.import_module("insum_nn.compiler.kernels.c_compiler").CFunction
        request = functions.request

        def requested(function: Any) -> None:
            request(function)
            self._requested.append(function)

        self._replace(functions, "request", requested)
        if importlib.util.find_spec("triton") is not None:
            self._listen_to_triton()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _listen_to_triton(self) -> None:
        knobs: Any = importlib.import_module("triton.knobs")
        build: Any = importlib.import_module("triton.runtime.build")
        run_c_compiler = build._build

        def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
            if cache_hit:
                self.loaded += 1
            else:
                self.compile_s += times.total / 1e6

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return run_c_compiler(*arguments, **named)
            finally:
                self.c_compiler_s += time.perf_counter() - begin

        self._replace(knobs.compilation, "listener", listen)
        self._replace(build, "_build", timed)

    def _replace(self, owner: Any, name: str, value: object) -> None:
        self._undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def state(self) -> OneStep:
        """What happened up to now, and until the C functions that were asked for are compiled."""
        seconds = time.perf_counter()
        # Waiting asks again.
        for function in tuple(self._requested):
            function.wait()
        if self._requested:
            self.c_compiler_s += time.perf_counter() - seconds
            self._requested.clear()
        return OneStep(
            seconds=seconds,
            compiled=_machine_codes(),
            loaded=self.loaded,
            compile_s=self.compile_s,
            c_compiler_s=self.c_compiler_s,
            measured=self.measured,
        )


def _machine_codes() -> int:
    patterns = [("TRITON_CACHE_DIR", "*/*.cubin"), ("TRITON_CACHE_DIR", "*/*.hsaco"), ("INSUM_NN_CACHE_DIR", "c/*.so")]
    return sum(1 for name, files in patterns if name in os.environ for _ in Path(os.environ[name]).glob(files))


def take(
    problem: Problem,
    provider: str,
    mode: Mode,
    device: torch.device,
    taken: Callable[[float, list[OneStep]], object] = lambda *_: None,
) -> tuple[float, list[OneStep]]:
    """Take the first steps of a provider; return the seconds that building it took, and the steps.

    Args:
        problem: of a case.
        provider: a key of its providers.
        mode: what a step is.
        device: of the problem.
        taken: called with what would be returned, before the first step and after each.

    Raises:
        ModuleNotFoundError: the provider's package is not installed.
        Unavailable: it does not run here.
    """
    torch.set_float32_matmul_precision(problem.precision)
    begin = time.perf_counter()
    work = problem.providers[provider]()
    if isinstance(work.forward, Step):
        # Batches are built before the clock of the steps starts, as a data loader prefetches them.
        _ = work.forward.batches[:STEPS]
    timing.synchronize(device)
    built = time.perf_counter() - begin
    steps: list[OneStep] = []
    taken(built, steps)
    with _Counters() as counters:
        before = counters.state()
        for _ in range(STEPS):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            with torch.set_grad_enabled(mode != "fwd" or problem.recorded):
                _step(work, mode)
            timing.synchronize(device)
            after = counters.state()
            steps.append(cast(OneStep, {key: after[key] - before[key] for key in before}))
            if device.type == "cuda":
                steps[-1]["peak_mib"] = torch.cuda.max_memory_allocated(device) >> 20
            taken(built, steps)
            before = counters.state()
    return built, steps


def _step(work: Work, mode: Mode) -> None:
    output = work.forward()
    if mode != "fwd":
        outputs = (output,) if isinstance(output, torch.Tensor) else output
        torch.autograd.grad(outputs, tuple(work.leaves), [torch.ones_like(each) for each in outputs])


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure in this process what the other one asked for."""
    torch_s = time.time() - asked["spawned"]
    case, provider, mode, device = asked["case"], asked["provider"], asked["mode"], torch.device(asked["device"])
    begin = time.perf_counter()
    with suppress(ImportError):
        importlib.import_module(_PACKAGES.get(provider, "torch"))
    import_s = time.perf_counter() - begin
    root = None if asked["root"] is None else Path(asked["root"])
    registry = load()
    # The process that waits kills this one: what it did then, and which steps it had taken, is to be known.
    shown_after = max(1.0, asked["limit"] - (time.time() - asked["spawned"]) - _BEFORE_LIMIT_S)
    faulthandler.dump_traceback_later(shown_after, file=cast(TextIO, sys.__stderr__))

    def found(gate: str, built: float, steps: list[OneStep]) -> dict[str, Any]:
        return {"gate": gate, "torch_s": torch_s, "import_s": import_s, "build_s": made + built, "steps": list(steps)}

    try:
        begin = time.perf_counter()
        problem = registry[case].problem(Setting(device, asked["size"], root=root))
        made = time.perf_counter() - begin
        built, steps = take(problem, provider, mode, device, lambda *so_far: _say(found("error: no result", *so_far)))
    except (ModuleNotFoundError, Unavailable) as fault:
        return {"gate": f"unavailable: {_one_line(fault)}"}
    except Exception as fault:
        # Whatever a provider raises is its result.
        return {"gate": f"error: {type(fault).__name__}: {_one_line(fault)}"}
    finally:
        faulthandler.cancel_dump_traceback_later()
    return found("measured", built, steps)


def _say(answer: dict[str, Any]) -> None:
    print(f"\n{_ANSWER}{json.dumps(answer)}", flush=True)


def _one_line(fault: BaseException) -> str:
    return (str(fault).strip().splitlines() or [type(fault).__name__])[0][:300]


# In the process that starts them --------------------------------------------------------------------------------------


class _Asked(NamedTuple):
    case: str
    provider: str
    mode: Mode


def measure(
    asked: _Asked, machine: Machine, device: str, size: str, root: Path | None, limit: float, deadline: float = math.inf
) -> Iterator[FirstStep]:
    """Measure the cold and the warm process of a provider.

    Args:
        asked: case, provider and mode.
        machine: goes into each record.
        device: of the case.
        size: "tiny" or "full".
        root: folder of data sets.
        limit: seconds that a process may take.
        deadline: of `time.monotonic()`; later processes are recorded as not run.
    """
    with tempfile.TemporaryDirectory(prefix="first_step_") as folder:
        failed = ""
        for process in ("cold", "warm"):
            left = min(limit, deadline - time.monotonic())
            if failed:
                found: dict[str, Any] = {"gate": failed}
            elif left <= 0:
                found = {"gate": "not run: the budget was spent"}
            else:
                question = {**asked._asdict(), "device": device, "size": size, "root": root and str(root)}
                found = _in_new_process(question, Path(folder), left)
            failed = "" if found["gate"] == "measured" else found["gate"]
            yield _record(asked, process, machine, found)


def _in_new_process(question: dict[str, Any], folder: Path, limit: float) -> dict[str, Any]:
    environment = {**os.environ, **{name: str(folder / name.lower()) for name in CACHES}}
    for name in CACHES:
        (folder / name.lower()).mkdir(mode=0o700, exist_ok=True)
    question |= {"spawned": time.time(), "limit": limit}
    worker = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.first_step", "--answer", json.dumps(question)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        out, errors = worker.communicate(timeout=limit)
        why = ""
    except subprocess.TimeoutExpired:
        os.killpg(worker.pid, signal.SIGKILL)
        out, errors = worker.communicate()
        why = f"error: no result after {limit:.0f} s"
        print(errors[-6000:], file=sys.stderr, flush=True)
    answers = [line.removeprefix(_ANSWER) for line in out.splitlines() if line.startswith(_ANSWER)]
    found: dict[str, Any] = json.loads(answers[-1]) if answers else {"gate": "error: no result"}
    if not why and found["gate"] == "error: no result":
        last = (errors.strip().splitlines() or [""])[-1][:300]
        why = f"error: the process ended with {worker.returncode}: {last}"
    return found | {"gate": why} if why else found


def _record(asked: _Asked, process: str, machine: Machine, found: dict[str, Any]) -> FirstStep:
    fields: dict[str, Any] = dict.fromkeys(FirstStep.__annotations__)
    fields |= {"schema": SCHEMA, **asked._asdict(), "process": process, **found, **machine}
    fields["python"] = ".".join(map(str, sys.version_info[:3]))
    fields["utc"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return cast(FirstStep, fields)


def _show(entry: FirstStep) -> str:
    head = f"{entry['case']:<56} {entry['provider']:<13} {entry['process']:<4}"
    steps = entry["steps"]
    if steps is not None and entry["gate"] != "measured":
        head += f" {entry['gate']}, built in {entry['build_s']:.1f} s, {len(steps)} steps:"
    if not steps:
        return head if steps is not None else f"{head} {entry['gate']}"
    one = steps[0]
    later = "  ".join(f"{step['seconds']:.3f} s ({step['compiled']} compiled)" for step in steps[1:])
    return (
        f"{head} first {one['seconds']:7.3f} s: {one['compiled']} compiled ({one['compile_s']:.2f} s here, C "
        f"{one['c_compiler_s']:.2f} s), {one['loaded']} loaded, {one['measured']} measured; then {later}; "
        f"torch {entry['torch_s']:.1f} s, import {entry['import_s']:.1f} s, build {entry['build_s']:.1f} s"
    )


def _chosen(names: Sequence[str], providers: str, setting: Setting) -> list[_Asked]:
    """List what is measured, ours first."""
    registry = load()
    modes = dict(LAYERS)
    if names:
        patterns = [f"network/network={name}/what=step" if name in NETWORKS else name for name in names]
        cases = [case.name for case in registry.select(patterns) if not case.name.endswith("/what=inference")]
    else:
        cases = [f"network/network={name}/what=step" for name in NETWORKS] + list(modes)
    cases = [name for name in cases if setting.device.type in registry[name].devices]
    found: list[_Asked] = []
    for name in cases:
        mode: Mode = "fwd" if name.startswith("network/") else modes.get(name, "fwdbwd")
        # Of a problem only the names of its providers are wanted, which the smallest one has too.
        problem = registry[name].problem(Setting(torch.device("cpu"), "tiny"))
        for provider in problem.providers:
            if re.search(providers, provider) and (names or name.startswith("network/") or is_ours(provider)):
                found.append(_Asked(name, provider, mode))
    return sorted(found, key=lambda each: not is_ours(each.provider))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_step", description="Measure first steps with empty and with full caches."
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(NETWORKS)}, or as in benchmarks.run")
    parser.add_argument("--list", action="store_true", help="list what would be measured and stop")
    add_out(parser)
    parser.add_argument("--root", type=Path, help="folder of data sets")
    add_limits(parser, of="one process", providers=PROVIDERS, budget=350.0)
    add_machine(parser)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 when nothing was measured or one of our own processes failed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.answer:
        _say(_answer(json.loads(options.answer)))
        return 0
    deadline = time.monotonic() + options.budget
    device = torch.device(options.device)
    try:
        chosen = _chosen(options.cases, options.providers, Setting(device, options.size))
    except KeyError as fault:
        parser.error(str(fault.args[0]))
    if options.list:
        print(*(f"{each.case} {each.mode} {each.provider}" for each in chosen), sep="\n")
        return 0
    machine = this_machine(device, options.commit)
    print("{gpu}, torch {torch}, triton {triton}, commit {commit}".format(**machine), f"{len(chosen)} pairs", sep=", ")
    if options.save:
        options.out = archive.new_file(machine["gpu"], machine["cores"], "first_steps")
    records: list[FirstStep] = []
    for asked in chosen:
        for entry in measure(asked, machine, options.device, options.size, options.root, options.limit, deadline):
            print(_show(entry), flush=True)
            records.append(entry)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    if options.save:
        archive.update()
    failed = [r for r in records if is_ours(r["provider"]) and r["gate"].startswith("error")]
    return 1 if failed or not any(r["gate"] == "measured" for r in records) else 0


if __name__ == "__main__":
    sys.exit(main())

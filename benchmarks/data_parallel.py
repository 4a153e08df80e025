"""Measure training steps of whole networks with `DistributedDataParallel`: one process, and one for each GPU.

    python -m benchmarks.data_parallel [NETWORK ...] --save
    python -m benchmarks.data_parallel [NETWORK ...] --out FILE

The processes of a network start from empty caches and first check gradients: those of `DistributedDataParallel` must be
the same in all processes, and the mean of what the processes compute without it. Then four ways of training take turns
in the same processes: "plain", which exchanges nothing, and "ddp", each in one process while the others wait, and in
all. A round takes the same batches whichever way: with two processes each takes half of them. So every process has a
batch of the same number of samples at each step, and other data than the others. Each record of the file has the keys
of `Throughput`.

On a CPU the processes talk by Gloo, on GPUs by NCCL.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import archive, networks, timing
from benchmarks.command_line import add_limits, add_machine, add_out
from benchmarks.first_step import CACHES
from benchmarks.networks import NETWORKS, Batch, Losses, Network, Step
from benchmarks.records import ROOT, Machine, this_machine
from benchmarks.registry import Setting, Unavailable, is_ours
from insum_nn.compiler.kernels.background import settle

__all__ = ["DEFAULT", "EFFICIENCY", "Throughput", "main", "speedup"]

SCHEMA = 1
DEFAULT = ("spunet_fp16", "nequip_864")
# How often a round goes through the batches.
EPOCHS = 2
# Largest difference between averaged gradients and the mean of gradients, as a part of the mean's norm.
TOLERANCE = {None: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
# Target: batches a second of each process, as a part of those of one process alone.
EFFICIENCY = 0.9
_ANSWER = "answer: "


class Throughput(Machine):
    """Training steps of one way, with the machine. What could not be measured is `None`.

    Attributes:
        schema: version of this layout.
        network: of `benchmarks.networks`.
        provider: whose layers.
        way: "plain" or "ddp".
        ranks: processes that trained, each on a GPU of its own; the name in `gpu` is that of one.
        backend: "nccl" or "gloo".
        gate: "passed", or why there are no numbers: "wrong: ...", "unavailable: ...", "error: ...", "not run: ...".
        seconds: of one step, one number a round: that of the slowest process.
        batches_per_s: of all processes together; the median over rounds.
        first_step_s: forward and backward from empty caches, of the slowest process.
        between_ranks: largest difference of a gradient between processes; 0 when all have the same.
        from_mean: distance of the gradients from the mean of those computed without the wrapper, over its norm.
        nccl: version.
        python: version.
        utc: when the processes ended.
    """

    schema: int
    network: str
    provider: str
    way: str
    ranks: int
    backend: str
    gate: str
    seconds: list[float] | None
    batches_per_s: float | None
    first_step_s: float | None
    between_ranks: float | None
    from_mean: float | None
    nccl: str | None
    python: str
    utc: str


class Asked(TypedDict):
    """What the processes of one network are asked for."""

    network: str
    provider: str
    ranks: int
    device: str
    size: str
    rounds: int
    limit: float


class Way(NamedTuple):
    """A way of training: processes, and the step that this process takes; `None` where it waits."""

    way: str
    ranks: int
    step: Step | None


# In the measured processes --------------------------------------------------------------------------------------------


def _gradients(found: Network, model: nn.Module, batch: Batch, device: torch.device) -> list[Tensor]:
    """The gradients of one batch, scaled where float16 would lose small ones."""
    model.zero_grad()
    with networks.autocast(device, found.dtype):
        loss = found.loss(model, batch)
    (loss * (256.0 if found.dtype is torch.float16 else 1.0)).backward()
    return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def _check(got: Sequence[Tensor], own: Sequence[Tensor], ranks: int) -> tuple[float, float]:
    """Compare averaged gradients between processes, and with the mean of their own."""
    distributed: Any = torch.distributed
    between, distance, norm = 0.0, 0.0, 0.0
    if len(got) != len(own):
        raise ValueError(f"{len(got)} parameters have gradients under DistributedDataParallel, {len(own)} without it")
    for averaged, mine in zip(got, own, strict=True):
        ends = torch.stack([averaged, -averaged])
        distributed.all_reduce(ends, op=distributed.ReduceOp.MAX)
        between = max(between, float((ends[0] + ends[1]).abs().max()))
        mean = mine.double() / ranks
        distributed.all_reduce(mean)
        distance += float((averaged.double() - mean).square().sum())
        norm += float(mean.square().sum())
    return between, (distance / norm) ** 0.5 if norm else float("nan")


def _seconds(way: Way, steps: int, device: torch.device, control: Any) -> float:
    """Seconds a step, of the slowest process; each process calls this."""
    distributed: Any = torch.distributed
    timing.synchronize(device)
    distributed.barrier(group=control)
    begin = time.perf_counter()
    if way.step is not None:
        for _ in range(steps):
            way.step()
        timing.synchronize(device)
    mine = time.perf_counter() - begin if way.step is not None else 0.0
    found: list[float] = [0.0] * distributed.get_world_size()
    distributed.all_gather_object(found, mine, group=control)
    return max(found) / steps


def _train(asked: Asked, rank: int, device: torch.device, control: Any, alone: Any) -> list[dict[str, Any]]:
    ranks = asked["ranks"]
    found = networks.network(asked["network"], Setting(device, cast(Any, asked["size"])))
    build, loss = found.models[asked["provider"]], found.loss
    # Forces are gradients inside the forward pass: the wrapper must see the loss.
    found = replace(found, loss=lambda model, batch: model(*batch))
    batches = list(found.batches) if rank == 0 else []
    shared = batches[::ranks] if rank == 0 else found.batches[rank::ranks]

    def model() -> nn.Module:
        return Losses(build(), loss).train()

    def wrapped(group: Any = None) -> nn.Module:
        ids = [device.index] if device.type == "cuda" else None
        # As SpUNet is trained by its authors: each process keeps its own statistics of batches.
        return DistributedDataParallel(model(), device_ids=ids, process_group=group, broadcast_buffers=False)

    together = wrapped()
    torch.distributed.barrier(group=control)
    begin = time.perf_counter()
    averaged = _gradients(found, together, shared[0], device)
    timing.synchronize(device)
    firsts: list[float] = [0.0] * ranks
    torch.distributed.all_gather_object(firsts, time.perf_counter() - begin, group=control)
    between, from_mean = _check(averaged, _gradients(found, model(), shared[0], device), ranks)
    del averaged
    unwrapped = model()
    ways = [
        Way("plain", 1, Step(found, unwrapped, batches, device) if rank == 0 else None),
        Way("ddp", 1, Step(found, wrapped(alone), batches, device) if rank == 0 else None),
        Way("plain", ranks, Step(found, unwrapped, shared, device)),
        Way("ddp", ranks, Step(found, together, shared, device)),
    ]
    once = len(found.batches)
    for way in ways:
        _seconds(way, once * EPOCHS // way.ranks, device, control)
    # Kernels that other processes still compile would share the cores with what is timed.
    settle(60.0)
    rounds: list[list[float]] = [[] for _ in ways]
    for _ in range(asked["rounds"]):
        for way, of_way in zip(ways, rounds, strict=True):
            of_way.append(_seconds(way, once * EPOCHS // way.ranks, device, control))
    good = between == 0.0 and from_mean <= TOLERANCE[found.dtype]
    gate = "passed" if good else f"wrong: gradients differ by {between:.2g}, and from the mean by {from_mean:.2g}"
    answers: list[dict[str, Any]] = []
    for way, of_way in zip(ways, rounds, strict=True):
        checks = {"first_step_s": max(firsts), "between_ranks": between, "from_mean": from_mean}
        speed = way.ranks / statistics.median(of_way)
        numbers = {"seconds": of_way, "batches_per_s": speed} if good else {}
        of_all = checks if way.ranks == ranks and way.way == "ddp" else {}
        answers.append({"way": way.way, "ranks": way.ranks, "gate": gate, **numbers, **of_all})
    return answers


def _answer(asked: Asked) -> None:
    """Train in this process, one of several; the first one prints what was found."""
    distributed: Any = torch.distributed
    rank, folder = int(os.environ["RANK"]), os.environ["MEETING"]
    device = torch.device(asked["device"], rank) if asked["device"] == "cuda" else torch.device(asked["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=asked["limit"])
    distributed.init_process_group(
        _backend(device.type),
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=asked["ranks"],
        timeout=wait,
    )
    # Waiting must not occupy the GPU, so it is Gloo's.
    control = distributed.new_group(backend="gloo", timeout=wait)
    alone = [distributed.new_group([number]) for number in range(asked["ranks"])][rank]
    try:
        answers = _train(asked, rank, device, control, alone)
    except (ModuleNotFoundError, Unavailable) as fault:
        answers = [{"gate": f"unavailable: {fault}"}]
    if rank == 0:
        print(f"\n{_ANSWER}{json.dumps(answers)}", flush=True)
    distributed.barrier(group=control)
    distributed.destroy_process_group()


def _backend(device_type: str) -> str:
    return "nccl" if device_type == "cuda" else "gloo"


# In the process that starts them --------------------------------------------------------------------------------------


def _in_new_processes(asked: Asked, limit: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="data_parallel_") as folder:
        environment = {**os.environ, **{name: f"{folder}/{name.lower()}" for name in CACHES}, "MEETING": folder}
        for name in CACHES:
            Path(environment[name]).mkdir(mode=0o700)
        command = [sys.executable, "-m", "benchmarks.data_parallel", "--answer", json.dumps(asked)]
        number = str(asked["ranks"])
        # As torchrun does: processes share the cores.
        environment.setdefault("OMP_NUM_THREADS", "1")
        workers = [
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
                env={
                    **environment,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": number,
                    "LOCAL_WORLD_SIZE": number,
                },
                cwd=ROOT,
                start_new_session=True,
            )
            for rank in range(asked["ranks"])
        ]
        try:
            why = _wait(workers, limit)
        finally:
            for worker in workers:
                if worker.poll() is None:
                    os.killpg(worker.pid, signal.SIGKILL)
        out, _ = workers[0].communicate()
        for worker in workers:
            worker.wait()
        lines = [line.removeprefix(_ANSWER) for line in out.splitlines() if line.startswith(_ANSWER)]
        return json.loads(lines[-1]) if lines else [{"gate": f"error: {why}"}]


def _wait(workers: Sequence[subprocess.Popen[str]], limit: float) -> str:
    """Wait until all processes ended, one failed, or it takes too long; return which."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        codes = [worker.poll() for worker in workers]
        if failed := [(rank, code) for rank, code in enumerate(codes) if code]:
            return "process {} ended with {}".format(*failed[0])
        if None not in codes:
            return "no result"
        time.sleep(0.1)
    return f"no result after {limit:.0f} s"


def measure(asked: Asked, machine: Machine, deadline: float) -> Iterator[Throughput]:
    """Train a network of a provider in new processes; yield a record for each way.

    Args:
        asked: which, and how.
        machine: goes into each record.
        deadline: of `time.monotonic()`.
    """
    left = min(asked["limit"], deadline - time.monotonic())
    answers = _in_new_processes(asked, left) if left > 0 else [{"gate": "not run: the budget was spent"}]
    fields: dict[str, Any] = dict.fromkeys(Throughput.__annotations__)
    fields |= {"schema": SCHEMA, "network": asked["network"], "provider": asked["provider"], "way": "ddp"}
    fields |= {"ranks": asked["ranks"], "backend": _backend(asked["device"]), "nccl": None}
    if asked["device"] == "cuda":
        library: Any = importlib.import_module("torch.cuda.nccl")
        fields["nccl"] = ".".join(map(str, library.version()))
    fields["python"] = ".".join(map(str, sys.version_info[:3]))
    fields["utc"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    for answer in answers:
        yield cast(Throughput, {**fields, **answer, **machine})


def speedup(records: Sequence[Throughput], network: str, provider: str) -> float | None:
    """How many times as many batches a second all processes train on as one does, both wrapped."""
    speeds = {
        record["ranks"]: record["batches_per_s"]
        for record in records
        if (record["network"], record["provider"], record["way"]) == (network, provider, "ddp")
    }
    one, most = speeds.get(1), speeds.get(max(speeds, default=1))
    return most / one if one and most and len(speeds) > 1 else None


def _show(entry: Throughput) -> str:
    head = f"{entry['network']:<14} {entry['provider']:<10} {entry['way']:<5} ranks {entry['ranks']} {entry['gate']}"
    if entry["seconds"] is None:
        return head
    ms = [1e3 * value for value in entry["seconds"]]
    checks = ""
    if entry["first_step_s"] is not None:
        checks = f"; first step {entry['first_step_s']:.1f} s, gradients between processes {entry['between_ranks']:.1g}"
        checks += f", from the mean {entry['from_mean']:.1g}"
    return (
        f"{head}: {entry['batches_per_s']:.2f} batches/s, step {statistics.median(ms):.2f} ms ({min(ms):.2f} to"
        f" {max(ms):.2f}){checks}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.data_parallel", description="Measure training steps on one GPU and on several."
    )
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"of {', '.join(NETWORKS)}")
    add_out(parser)
    parser.add_argument("--ranks", type=int, default=2, help="processes, each with a GPU of its own")
    parser.add_argument("--rounds", type=int, default=5)
    add_limits(parser, of="one network", providers="^insum_nn$", budget=350.0)
    add_machine(parser, devices=("cuda", "cpu"))
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 when nothing was measured, or ours failed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.answer:
        _answer(json.loads(options.answer))
        return 0
    if unknown := [name for name in options.networks if name not in NETWORKS]:
        parser.error(f"no network is named {', '.join(unknown)}; there are {', '.join(NETWORKS)}")
    if options.device == "cuda" and torch.cuda.device_count() < options.ranks:
        parser.error(f"{options.ranks} processes need as many GPUs; there are {torch.cuda.device_count()}")
    deadline = time.monotonic() + options.budget
    machine = this_machine(torch.device(options.device), options.commit)
    print(
        f"{options.ranks} processes, {{gpu}}, torch {{torch}}, triton {{triton}}, commit {{commit}}".format(**machine)
    )
    chosen: list[tuple[str, str]] = []
    for name in options.networks or DEFAULT:
        found = networks.network(name, Setting(torch.device("cpu"), options.size))
        if len(found.batches) % options.ranks:
            parser.error(f"{len(found.batches)} batches of {name} cannot be divided among {options.ranks} processes")
        chosen += [(name, provider) for provider in found.models if re.search(options.providers, provider)]
    how = {"ranks": options.ranks, "device": options.device, "size": options.size, "rounds": options.rounds}
    if options.save:
        options.out = archive.new_file(machine["gpu"], machine["cores"], "data_parallel")
    records: list[Throughput] = []
    for name, provider in sorted(chosen, key=lambda pair: not is_ours(pair[1])):
        asked = cast(Asked, {"network": name, "provider": provider, "limit": options.limit, **how})
        for entry in measure(asked, machine, deadline):
            print(_show(entry), flush=True)
            records.append(entry)
        if (ratio := speedup(records, name, provider)) is not None:
            least = EFFICIENCY * options.ranks
            print(
                f"{name:<14} {provider:<10} {options.ranks} processes: {ratio:.2f} times the batches a second of one,"
                f" of a target of {least:.1f}"
            )
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    if options.save:
        archive.update()
    failed = [r for r in records if is_ours(r["provider"]) and r["gate"].startswith(("error", "wrong"))]
    return 1 if failed or not any(r["gate"] == "passed" for r in records) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compare the schedules that are selected without a case's own measurements with those that were measured for it.

    python -m benchmarks.selection --save        # on a GPU, some minutes

Each case is timed twice: as users run it, with the schedules that the package ships, and with every stored schedule of
exactly its statement and sizes left out, so that the nearest measured sizes or the rules decide. Times are the sums of
a call's kernels; both are taken on one machine, one after the other. All kernels are compiled beforehand, in
`--workers` processes. A record of the file has the keys of `Compared`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from unittest import mock

import torch

from benchmarks import archive, gate
from benchmarks.command_line import add_machine, add_out
from benchmarks.records import Machine, this_machine
from benchmarks.registry import Mode, Setting, Size, Unavailable, is_ours, load
from benchmarks.run import timed_call
from benchmarks.timing import kernels
from insum_nn.compiler.tuning import database

__all__ = ["FAMILIES", "Compared", "main"]

# Whose kernels have schedules to select.
FAMILIES = "spmm", "block_spmm", "gcn_layer", "block_linear", "pruned_conv2d", "subm_conv", "fctp", "tp_conv"
# Calls that are averaged.
CALLS = 10

Times = dict[tuple[str, str, Mode], float]


class Compared(Machine):
    """One call of one provider: microseconds of its kernels with the schedules stored for it, and without."""

    utc: str
    case: str
    provider: str
    mode: Mode
    stored_us: float
    selected_us: float


def _calls(name: str, setting: Setting) -> Iterator[tuple[tuple[str, str, Mode], Callable[[], object]]]:
    """Yield our providers' calls, after their first one."""
    (case,) = load().select([name])
    problem = case.problem(setting)
    torch.set_float32_matmul_precision(problem.precision)
    for provider, build in problem.providers.items():
        if not is_ours(provider):
            continue
        try:
            work = build()
            made = gate.as_tuple(work.forward())
            generator = setting.generator()
            back = [torch.randn(t.shape, dtype=t.dtype, device=t.device, generator=generator) for t in made]
            for mode in problem.modes:
                if mode == "fwd" or (mode == "bwd" and work.leaves):
                    call = timed_call(work, mode, back)
                    call()
                    yield (name, provider, mode), call
        except (ModuleNotFoundError, Unavailable) as fault:
            print(f"{name} {provider}: unavailable: {fault}", flush=True)


def _run(name: str, device: str, size: Size, stored: bool, timed: bool) -> Times:
    """Run a case, in a process of its own: what was selected before is kept for the life of a process."""
    setting = Setting(torch.device(device), size)
    left_out = mock.patch.object(database, "find", database.find if stored else lambda _: None)
    with left_out:
        try:
            return {
                key: sum(k.us for k in kernels(call, CALLS)) if timed else 0.0 for key, call in _calls(name, setting)
            }
        except Unavailable as fault:
            print(f"{name}: unavailable: {fault}", flush=True)
            return {}


def _all(names: Sequence[str], device: str, size: Size, stored: bool) -> Times:
    found: Times = {}
    for name in names:
        found |= _run(name, device, size, stored, True)
        if device == "cuda":
            torch.cuda.empty_cache()
    return found


def _report(records: Sequence[Compared]) -> None:
    ratios = {f"{r['case']} {r['provider']} {r['mode']}": r["selected_us"] / r["stored_us"] for r in records}
    logs = [math.log(ratio) for ratio in ratios.values()]
    print(f"{len(logs)} calls: geometric mean {math.exp(sum(logs) / len(logs)):.3f}")
    for name in sorted(ratios, key=lambda name: -ratios[name])[:12]:
        print(f"{ratios[name]:6.2f}  {name}")


def main(arguments: Sequence[str] | None = None) -> Mapping[str, float]:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.selection", description="Compare selected schedules.")
    parser.add_argument("cases", nargs="*", default=list(FAMILIES), help="family, name or shell pattern")
    add_out(parser, required=True)
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    add_machine(parser)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    names = [c.name for c in load().select(options.cases) if c.quick and device.type in c.devices]
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(options.workers) as pool:
        compiled = [(name, options.device, options.size, stored, False) for name in names for stored in (True, False)]
        pool.starmap(_run, compiled, chunksize=1)
    times: list[Times] = []
    for stored in (True, False):
        with spawn.Pool(1) as pool:
            times.append(pool.apply(_all, (names, options.device, options.size, stored)))
    with_store, without = times
    machine = this_machine(device, options.commit)
    utc = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    records = [
        Compared(
            **machine,
            utc=utc,
            case=key[0],
            provider=key[1],
            mode=key[2],
            stored_us=with_store[key],
            selected_us=without[key],
        )
        for key in with_store
        if key in without and with_store[key] > 0
    ]
    if options.save:
        options.out = archive.new_file(machine["gpu"], machine["cores"], "selection")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    if options.save:
        archive.update()
    _report(records)
    return {f"{r['case']} {r['provider']} {r['mode']}": r["selected_us"] / r["stored_us"] for r in records}


if __name__ == "__main__":
    main()

"""Show where a benchmark's time goes: the kernels of one call, the longest first.

    python -m benchmarks.profile fctp 'subm_conv/cloud=room/*' --modes fwd,fwdbwd --providers insum_nn

Tracing slows the host, so only the device's times are meaningful. Nothing is written to a file.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

import torch

from benchmarks import gate
from benchmarks.registry import MODES, Case, Mode, Setting, Unavailable, load
from benchmarks.run import timed_call
from benchmarks.timing import kernels

__all__ = ["main"]


def _show(case: Case, setting: Setting, modes: Sequence[Mode], only: str, most: int) -> None:
    problem = case.problem(setting)
    torch.set_float32_matmul_precision(problem.precision)
    wanted = gate.reference(problem, [mode for mode in modes if mode in problem.modes])
    for mode in modes:
        for provider, build in problem.providers.items():
            if mode not in problem.modes or not re.search(only, provider):
                continue
            head = f"{case.name} {mode} {provider}"
            try:
                call = timed_call(build(), mode, wanted.upstream)
                with torch.set_grad_enabled(mode != "fwd" or problem.recorded):
                    found = kernels(call)
            except (ModuleNotFoundError, Unavailable) as fault:
                print(f"{head}: unavailable: {fault}")
                continue
            print(f"{head}: {sum(k.us for k in found):.1f} us in {sum(k.launches for k in found):.0f} kernels")
            for kernel in found[:most]:
                print(f"  {kernel.us:9.1f} us {kernel.launches:5.1f} x  {kernel.name[:110]}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description="Kernels of benchmarks, by time.")
    parser.add_argument("cases", nargs="+", metavar="CASE", help="family, name or shell pattern")
    parser.add_argument("--modes", default=",".join(MODES), help="of fwd,bwd,fwdbwd")
    parser.add_argument("--providers", default="insum_nn", metavar="REGEX", help="only these")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=["tiny", "full"], default="full")
    parser.add_argument("--quick", action="store_true", help="only the representative cases of each family")
    parser.add_argument("--most", type=int, default=12, help="kernels shown of each call")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    setting = Setting(device, options.size)
    modes: list[Mode] = [mode for mode in MODES if mode in options.modes.split(",")]
    for case in load().select(options.cases):
        if device.type in case.devices and (case.quick or not options.quick):
            _show(case, setting, modes, options.providers, options.most)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

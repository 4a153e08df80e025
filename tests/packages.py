"""Run packages of AOTInductor in a process that cannot import this package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["run_all_alone", "run_alone"]

_ALONE = """
import sys
sys.modules["insum_nn"] = None
import torch
rtol, atol = map(float, sys.argv[1:3])
for path in sys.argv[3:]:
    package, cases = torch.load(path)
    package = torch._inductor.aoti_load_package(package)
    for inputs, want in cases:
        torch.testing.assert_close(package(*inputs), want, rtol=rtol, atol=atol)
print("equal")
"""

Packaged = tuple[Callable[..., Any], Sequence[Sequence[Tensor]], str]


def run_alone(
    module: Callable[..., Any],
    cases: Sequence[Sequence[Tensor]],
    package: str,
    folder: Path,
    *,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> str:
    """Compare a package with the module that it was made of, in one process for all cases.

    Returns:
        "equal", or what the process left behind.
    """
    return run_all_alone([(module, cases, package)], folder, rtol=rtol, atol=atol)


def run_all_alone(models: Sequence[Packaged], folder: Path, *, rtol: float = 1e-4, atol: float = 1e-5) -> str:
    """`run_alone` of several modules, cases and packages, in one process: it imports torch for seconds."""
    paths: list[str] = []
    for module, cases, package in models:
        pairs: list[tuple[Sequence[Tensor], Any]] = []
        for inputs in cases:
            want = module(*[x.clone() for x in inputs])
            several = isinstance(want, (tuple, list))
            pairs.append((inputs, type(want)(x.detach() for x in want) if several else want.detach()))
        paths.append(str(folder / f"model{len(paths)}.pt"))
        torch.save((package, pairs), paths[-1])
    command = [sys.executable, "-W", "ignore", "-c", _ALONE, str(rtol), str(atol), *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or f"status {done.returncode}: {done.stderr}"

"""Run packages of AOTInductor in a process that cannot import this package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["run_alone"]

_ALONE = """
import sys
sys.modules["insum_nn"] = None
import torch
package = torch._inductor.aoti_load_package(sys.argv[1])
rtol, atol = map(float, sys.argv[2:4])
for case in sys.argv[4:]:
    inputs, want = torch.load(case)
    torch.testing.assert_close(package(*inputs), want, rtol=rtol, atol=atol)
print("equal")
"""


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
    paths: list[str] = []
    for inputs in cases:
        want = module(*[x.clone() for x in inputs])
        want = type(want)(x.detach() for x in want) if isinstance(want, (tuple, list)) else want.detach()
        paths.append(str(folder / f"case{len(paths)}.pt"))
        torch.save((inputs, want), paths[-1])
    command = [sys.executable, "-W", "ignore", "-c", _ALONE, package, str(rtol), str(atol), *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or f"status {done.returncode}: {done.stderr}"

"""The gate: nothing is timed that is wrong.

Two checks stand before the clock: the operator's own tests are green, and the provider's result (its gradients too,
where they are timed) agrees with the case's float64 oracle.
"""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.registry import Mode, Problem, Work

__all__ = ["Reference", "accuracy", "gradients", "operator_tests", "reference", "relative_error", "upstream"]

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def operator_tests(files: tuple[str, ...]) -> str | None:
    """Run test files once in a process of their own; the last line of their output when they fail, else `None`.

    Args:
        files: paths from the project's root.

    Returns:
        `None` when all passed and at least one ran.
    """
    if not files:
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    # No GPU machine may pass by skipping: the tests that need one fail where one is wanted.
    environment = os.environ | {"INSUM_REQUIRE_GPU": "1" if torch.cuda.is_available() else "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[-1] if lines else f"pytest ended with {done.returncode}"


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest absolute difference over the largest magnitude of the oracle, both in float64.

    Element by element the ratio would be unbounded wherever the exact sum cancels, for every provider alike. A wrong
    shape, NaN, or infinity where the oracle has none gives infinity.
    """
    if got.shape != want.shape:
        return math.inf
    if want.numel() == 0:
        return 0.0
    difference = (got.detach().to(want) - want).abs().max().item()
    scale = want.abs().max().item()
    error = difference if scale == 0 else difference / scale
    return error if math.isfinite(error) else math.inf


class Reference:
    """The oracle's output, the gradient sent back through it, and the oracle's gradients."""

    def __init__(self, output: Tensor, upstream: Tensor | None, gradients: Sequence[Tensor]) -> None:
        self.output = output
        self.upstream = upstream
        self.gradients = gradients


def upstream(output: Tensor, seed: int = 1) -> Tensor:
    """The gradient that is sent back: normal numbers, the same for every provider."""
    generator = torch.Generator(device=output.device).manual_seed(seed)
    return torch.randn(output.shape, generator=generator, device=output.device, dtype=torch.float64)


def gradients(work: Work, back: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """A provider's output and its gradients, in the oracle's layout."""
    output = work.forward()
    found = torch.autograd.grad(output, tuple(work.leaves), back.to(output))
    return output, work.gradients(found)


def reference(problem: Problem, modes: Sequence[Mode]) -> Reference:
    """Run the oracle once, backward too when a mode needs it."""
    work = problem.oracle()
    if not any(mode != "fwd" for mode in modes):
        with torch.no_grad():
            output = work.forward()
        found: Sequence[Tensor] = ()
        back = None
    else:
        output = work.forward()
        back = upstream(output)
        found = tuple(torch.autograd.grad(output, tuple(work.leaves), back))
    if output.dtype != torch.float64:
        raise TypeError(f"an oracle computes in float64, got {output.dtype}")
    return Reference(output.detach(), back, found)


def accuracy(work: Work, wanted: Reference, mode: Mode) -> float:
    """The provider's relative error: of its output, and of each gradient for `bwd` and `fwdbwd`."""
    if mode == "fwd" or wanted.upstream is None:
        with torch.no_grad():
            return relative_error(work.forward(), wanted.output)
    output, found = gradients(work, wanted.upstream)
    if len(found) != len(wanted.gradients):
        return math.inf
    errors = [relative_error(g, w) for g, w in zip(found, wanted.gradients, strict=True)]
    return max([relative_error(output, wanted.output), *errors])

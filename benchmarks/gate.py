"""Checks before timing: nothing wrong is timed.

The operator's own tests must pass, and the provider's result (its gradients too, where they are timed) must agree with
the case's float64 oracle.
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

from benchmarks.registry import Mode, Output, Problem, Work

__all__ = [
    "Reference",
    "accuracy",
    "as_tuple",
    "gradients",
    "largest_error",
    "operator_tests",
    "reference",
    "relative_error",
    "sent_back",
    "upstream",
]

ROOT = Path(__file__).resolve().parent.parent
_PIECE = 1 << 27


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
    # Where there is a GPU, a skipped GPU test is a failure.
    environment = os.environ | {"INSUM_REQUIRE_GPU": "1" if torch.cuda.is_available() else "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[-1] if lines else f"pytest ended with {done.returncode}"


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the largest absolute difference over the largest magnitude of the oracle, both in float64.

    Element by element the ratio would be unbounded wherever the exact sum cancels, for every provider. A wrong
    shape, NaN, or infinity where the oracle has none gives infinity.
    """
    if got.shape != want.shape:
        return math.inf
    if want.numel() == 0:
        return 0.0
    got = got.detach()
    # In pieces: a gradient of several gigabytes would need three times its float64 size at once.
    pairs = zip(got.reshape(-1).split(_PIECE), want.reshape(-1).split(_PIECE), strict=True)
    difference = torch.stack([(g.to(w) - w).abs().max() for g, w in pairs]).max().item()
    scale = torch.stack([w.abs().max() for w in want.reshape(-1).split(_PIECE)]).max().item()
    error = difference if scale == 0 else difference / scale
    return error if math.isfinite(error) else math.inf


class Reference:
    """Outputs and gradients of the oracle, and the upstream gradients."""

    def __init__(
        self, outputs: tuple[Tensor, ...], upstream: tuple[Tensor, ...] | None, gradients: Sequence[Tensor]
    ) -> None:
        self.outputs = outputs
        self.upstream = upstream
        self.gradients = gradients


def as_tuple(output: Output) -> tuple[Tensor, ...]:
    """Return one output as a tuple of one."""
    return (output,) if isinstance(output, Tensor) else tuple(output)


def upstream(output: Tensor, seed: int = 1) -> Tensor:
    """Draw the upstream gradient: normal numbers, the same for every provider."""
    generator = torch.Generator(device=output.device).manual_seed(seed)
    return torch.randn(output.shape, generator=generator, device=output.device, dtype=torch.float64)


def sent_back(work: Work, output: Output, back: Sequence[Tensor]) -> list[Tensor]:
    """Return the upstream gradients in the layout and the dtypes of a provider's outputs."""
    return [b.to(o) for b, o in zip(work.upstream(back), as_tuple(output), strict=True)]


def gradients(work: Work, back: Sequence[Tensor]) -> tuple[Output, Sequence[Tensor]]:
    """Compute a provider's output and its gradients, in the oracle's layout."""
    output = work.forward()
    found = torch.autograd.grad(as_tuple(output), tuple(work.leaves), sent_back(work, output, back))
    return work.output(output), work.gradients(found)


def reference(problem: Problem, modes: Sequence[Mode]) -> Reference:
    """Run the oracle once, backward too when a mode needs it."""
    work = problem.oracle()
    found: Sequence[Tensor] = ()
    back = None
    if not any(mode != "fwd" for mode in modes):
        with torch.set_grad_enabled(problem.recorded):
            outputs = as_tuple(work.output(work.forward()))
    else:
        raw = work.forward()
        back = tuple(upstream(tensor, seed) for seed, tensor in enumerate(as_tuple(raw), 1))
        found = tuple(torch.autograd.grad(as_tuple(raw), tuple(work.leaves), back))
        outputs = as_tuple(work.output(raw))
    if any(tensor.dtype != torch.float64 for tensor in outputs):
        raise TypeError(f"an oracle computes in float64, got {', '.join(str(t.dtype) for t in outputs)}")
    return Reference(tuple(tensor.detach() for tensor in outputs), back, found)


def accuracy(work: Work, wanted: Reference, mode: Mode, *, recorded: bool = False) -> float:
    """Return the provider's relative error: of its outputs, and of each gradient for `bwd` and `fwdbwd`."""
    if mode == "fwd" or wanted.upstream is None:
        with torch.set_grad_enabled(recorded):
            return largest_error(as_tuple(work.output(work.forward())), wanted.outputs)
    output, found = gradients(work, wanted.upstream)
    return max(largest_error(found, wanted.gradients), largest_error(as_tuple(output), wanted.outputs))


def largest_error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Return the largest `relative_error` of several tensors."""
    if len(got) != len(want):
        return math.inf
    return max((relative_error(g, w) for g, w in zip(got, want, strict=True)), default=0.0)

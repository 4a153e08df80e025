"""Run a statement under one particular schedule, to compare schedules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from benchmarks.registry import Unavailable
from insum_nn import Program
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.kernels.generated import Generated
from insum_nn.compiler.runtime.dispatch import prepare
from insum_nn.compiler.runtime.execution import Executable
from insum_nn.compiler.tuning.select import Selected

__all__ = ["generated_of", "run_scheduled", "under_schedule"]


def under_schedule(run: Generated, schedule: Schedule) -> Generated:
    """The same kernels under one schedule at all sizes, whatever would be chosen."""
    other: Any = copy.copy(run)
    other._schedule = lambda *_: Selected(schedule, "requested")
    other._by_length = lambda form: False
    return other


def generated_of(
    program: Program, tensors: Mapping[str, Tensor], out_shape: Sequence[int | None] | None = None
) -> tuple[Generated, Callable[[Schedule], Callable[[], Tensor]]]:
    """Return the kernels of a program for these tensors, and a function that runs them under a schedule.

    Raises:
        Unavailable: the program has no generated kernel here, for example on a CPU.
    """
    ordered, initial, extents = program._checked(tensors, None, None if out_shape is None else tuple(out_shape))
    _, executable = prepare(program.spec, ordered, initial, extents)
    found = executable.run if isinstance(executable, Executable) else None
    if not isinstance(found, Generated):
        raise Unavailable(f"needs a generated kernel: {executable.reason}")

    def scheduled(schedule: Schedule) -> Callable[[], Tensor]:
        run = under_schedule(found, schedule).prepare(ordered, extents, initial)
        return lambda: run(ordered, initial)

    return found, scheduled


def run_scheduled(
    program: Program,
    tensors: Mapping[str, Tensor],
    schedule: Schedule,
    out_shape: Sequence[int | None] | None = None,
) -> Callable[[], Tensor]:
    """Return a function that runs a program's statement on these tensors under one schedule.

    Raises:
        Unavailable: the program has no generated kernel here, for example on a CPU.
    """
    return generated_of(program, tensors, out_shape)[1](schedule)

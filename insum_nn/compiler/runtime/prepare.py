"""`prepare`: compile the kernels of a module's step before the first step, by several processes."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from torch import nn

from insum_nn.compiler.kernels.ahead import Collection, collect
from insum_nn.compiler.kernels.background import Compiled, compile_all, default_workers
from insum_nn.compiler.runtime.step import copied, run_step
from insum_nn.compiler.tuning.progress import progress
from insum_nn.errors import InsumBackendError

__all__ = ["PrepareReport", "prepare"]

_log = logging.getLogger("insum_nn.prepare")


@dataclass(frozen=True)
class PrepareReport:
    """What `prepare` found and compiled; `str()` is a line.

    Attributes:
        kernels: the kernels of a step that were not loaded yet.
        launches: how often a step launches them.
        trace_seconds: that it took to find them.
        compile_seconds: that it took to compile them.
        workers: processes that compiled.
    """

    kernels: tuple[Compiled, ...]
    launches: int
    trace_seconds: float
    compile_seconds: float
    workers: int

    @property
    def compiled(self) -> int:
        """Kernels that were compiled now; the others were on disk."""
        return sum(not each.found and not each.error for each in self.kernels)

    @property
    def found(self) -> int:
        """Kernels whose machine code was on disk."""
        return sum(each.found for each in self.kernels)

    def __str__(self) -> str:
        if not self.launches:
            return (
                f"nothing to compile: no generated kernel in a step, as on a CPU; planned in {self.trace_seconds:.1f} s"
            )
        return (
            f"{len(self.kernels)} kernels for {self.launches} launches, found in {self.trace_seconds:.1f} s: "
            f"{self.compiled} compiled in {self.compile_seconds:.1f} s by {self.workers} processes, "
            f"{self.found} were on disk"
        )


def prepare(
    module: nn.Module,
    *inputs: Any,
    backward: bool = True,
    double_backward: bool = False,
    workers: int | None = None,
    **named: Any,
) -> PrepareReport:
    """Compile every kernel that a step of a module needs, in parallel, before the first step.

    A copy of the module runs once on copies of the inputs, under the caller's autocast and in the module's mode.
    Generated kernels are noted and not run, and what they would write is zero; everything else runs, since the kernels
    of a step depend on sizes that index tensors decide. Nothing is measured, and neither the module, its gradients nor
    the state of random numbers changes. The machine code is kept on disk, for this process and all that follow.
    A module on a CPU has no such kernels; then its programs are planned, which takes a part of a first call too.

    Args:
        module: a module; it must be possible to copy it.
        *inputs: as in a call, of the sizes, dtypes and device of a training step.
        backward: also the gradients of the outputs by parameters, and by inputs that require them.
        double_backward: also the gradients of these gradients, where a loss contains derivatives, such as forces.
        workers: number of processes; by default as many as this one may use processors, 16 at most.
        **named: as in a call.

    Returns:
        What was found and compiled.

    Raises:
        InsumFormatError: the module or an input cannot be copied.
        InsumBackendError: a kernel could not be compiled.

    >>> import torch
    >>> layer = torch.nn.Linear(4, 2)
    >>> report = prepare(layer, torch.ones(3, 4))
    >>> len(report.kernels), layer.weight.grad
    (0, None)
    """
    begin = time.perf_counter()
    own, args, kwargs = copied(module, inputs, named)
    with collect() as collection:
        run_step(own, args, kwargs, backward, double_backward)
    traced = time.perf_counter() - begin
    del own, args, kwargs
    kernels, seconds, count = _compile(collection, workers)
    report = PrepareReport(tuple(kernels), collection.launches, traced, seconds, count)
    _log.info("%s", report)
    return report


def _compile(collection: Collection, workers: int | None) -> tuple[list[Compiled], float, int]:
    codes = [*collection.codes]
    count = default_workers(len(codes)) if workers is None else max(1, min(workers, len(codes)))
    begin = time.perf_counter()
    if not codes:
        return [], 0.0, 0
    with progress("compiling kernels", len(codes)) as step:
        done = compile_all(codes, count, step=lambda _: step())
    failed = [each for each in done if each.error]
    if failed:
        raise InsumBackendError(
            f"{len(failed)} of {len(done)} kernels could not be compiled; the first: {failed[0].error}",
            fix="report the statement and its sizes; Options(backend='eager') runs it by library calls.",
        )
    return done, time.perf_counter() - begin, count

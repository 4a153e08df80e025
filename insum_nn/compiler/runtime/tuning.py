"""`tune`: measure the schedules of a module's step, within a budget, and say what was gained."""

from __future__ import annotations

import json
import logging
import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from insum_nn.compiler.runtime.execution import clear_cache
from insum_nn.compiler.runtime.step import Step, copied, run_step
from insum_nn.compiler.tuning import database, timing
from insum_nn.compiler.tuning.cache_folder import own_folder
from insum_nn.compiler.tuning.select import TuneReport, opened

__all__ = ["TuneReport", "tune"]

_log = logging.getLogger("insum_nn.tuning")

# Runs of a whole step of which the median counts.
_STEPS = 5
# Further seconds that other ranks wait for the one that measures: it compiles, and runs the step several times.
_GRACE = 120.0


def tune(
    module: Step,
    *inputs: Any,
    budget: float = 60.0,
    backward: bool = True,
    double_backward: bool = False,
    timeout: float | None = None,
    **named: Any,
) -> TuneReport:
    """Measure the schedules of all kernels of a step, keep the fastest on disk, and say what was gained.

    A copy of the module runs on copies of the inputs: once to find every statement and size that a kernel computes,
    gradients included, then some times to measure their schedules, those of most multiplications first. So
    neither the module, its gradients nor the state of random numbers changes. What was measured before with the same
    versions of torch and Triton is not measured again; what the budget leaves out, another call goes on with.
    `insum_nn.schedules.export` writes what was measured to a file for other machines with the same device.

    In a `torch.distributed` job every rank calls it. Rank 0 alone runs and measures; the others wait for what it
    measured and keep it too. The wrapper of a `DistributedDataParallel` is taken off, as it would wait for all ranks.

    Args:
        module: a module, a `Program` or another function of tensors; it must be possible to copy it.
        *inputs: as in a call, of the sizes, dtypes and device of a training step.
        budget: seconds to measure; a kernel that is being compiled when they are over is waited for.
        backward: also the gradients of the outputs by parameters, and by inputs that require them.
        double_backward: also the gradients of these gradients.
        timeout: seconds for which other ranks wait for rank 0, and then go on without; by default the budget and two
            minutes.
        **named: as in a call.

    Returns:
        What was measured and gained; empty, with the reason, where there is nothing to measure, as on a CPU.

    Raises:
        InsumFormatError: the module or an input cannot be copied.

    >>> report = tune(torch.nn.Linear(4, 2), torch.ones(3, 4))
    >>> report.measured, report.gain
    (0, 1.0)
    """
    begin = time.perf_counter()
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module = module.module
    report = TuneReport()
    rank, others = _ranks()
    if rank:
        report.reason = _wait(budget + _GRACE if timeout is None else timeout)
    else:
        try:
            report.reason = _why_not() or _measure(report, module, (inputs, named), budget, backward, double_backward)
        finally:
            if others:
                _publish(report)
    report.seconds = time.perf_counter() - begin
    _log.info("%s", report)
    return report


def _why_not() -> str:
    if reason := timing.why_not():
        return reason
    if own_folder("schedules") is None:
        return "there is no folder of this user's alone to keep measurements in; see INSUM_NN_CACHE_DIR"
    return ""


def _measure(
    report: TuneReport, module: Step, given: tuple[Any, Any], budget: float, backward: bool, double_backward: bool
) -> str:
    """Run a step until its tasks are measured or the budget is spent; return why nothing was measured."""
    own, args, kwargs = copied(module, *given)

    def step() -> None:
        run_step(own, args, kwargs, backward, double_backward)
        if isinstance(own, nn.Module):
            own.zero_grad(set_to_none=True)

    def select_again() -> None:
        # Programs look their schedules up again.
        clear_cache()
        with opened(report):
            step()

    try:
        select_again()
        if not report.left:
            stored = f"the schedules of all {len(report.statements)} statements were measured before"
            return stored if report.statements else "no kernel of the step has enough work for its schedule to matter"
        _log.info("%d statements to measure", report.left)
        report.step_before_us = timing.time_whole(step, _STEPS)
        until, left = time.perf_counter() + budget, 0
        while report.left not in (0, left) and time.perf_counter() < until:
            left = report.left
            report.admit(until)
            select_again()
        clear_cache()
        step()
        report.step_after_us = timing.time_whole(step, _STEPS)
        return ""
    finally:
        clear_cache()


# Several ranks.

# How often a process called `tune`: all ranks of a job do so alike.
_calls = 0


def _ranks() -> tuple[int, bool]:
    """Return this process's rank, and whether there are others."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, False
    return distributed.get_rank(), distributed.get_world_size() > 1


def _job() -> tuple[Any, str]:
    """Return the store that all ranks of the job share, and this call's name in it."""
    global _calls
    _calls += 1
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    return store, f"insum_nn/tune/{_calls}"


def _publish(report: TuneReport) -> None:
    """Hand what was measured to the other ranks, which may not see this one's files."""
    found = [database.find(each.key) for each in report.statements if each.state == "measured"]
    store, name = _job()
    store.set(name, json.dumps([[entry.key, entry.value] for entry in found if entry is not None]))


def _wait(seconds: float) -> str:
    """Wait for what rank 0 measures, and keep it; return what became of it."""
    store, name = _job()
    try:
        store.wait([name], timedelta(seconds=seconds))
        entries = json.loads(store.get(name))
    except RuntimeError as error:
        # Rank 0 died, or its step takes longer: a schedule is a matter of speed alone.
        return f"rank 0 did not finish within {seconds:.0f} s; this rank goes on without ({type(error).__name__})"
    for key, value in entries:
        database.write(key, value)
    clear_cache()
    return f"rank 0 measured {len(entries)} statements for all"

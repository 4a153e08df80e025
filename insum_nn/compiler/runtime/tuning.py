"""`tune`: measure the schedules of a module's step, within a budget, and say what was gained."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from insum_nn.compiler.runtime.execution import clear_cache
from insum_nn.compiler.runtime.step import Step, copied, run_step
from insum_nn.compiler.tuning import database, session, timing
from insum_nn.compiler.tuning.cache_folder import own_folder

__all__ = ["TuneReport", "tune"]

_log = logging.getLogger("insum_nn.tuning")

# Runs of a whole step of which the median counts, and runs in which tasks are measured at most.
_STEPS, _PASSES = 5, 8
# Further seconds that other ranks wait for the one that measures: it compiles, and runs the step several times.
_GRACE = 120.0


@dataclass(frozen=True)
class TuneReport:
    """What `tune` measured and gained; `str()` is a line for each statement, and one for all.

    Attributes:
        statements: those whose kernels a step runs with enough work for a choice to matter.
        reason: why nothing was measured; empty where something was.
        seconds: that all of it took.
        step_before_us: microseconds of the whole step before; `None`: nothing was measured.
        step_after_us: the same afterwards.
    """

    statements: tuple[session.Tuned, ...]
    reason: str
    seconds: float
    step_before_us: float | None = None
    step_after_us: float | None = None

    @property
    def measured(self) -> int:
        """Statements that were measured now."""
        return sum(each.state == "measured" for each in self.statements)

    @property
    def left(self) -> int:
        """Statements for which there was no time; another call goes on with them."""
        return sum(each.state == "left" for each in self.statements)

    @property
    def gain(self) -> float:
        """How many times as fast as before the whole step is; 1.0 where nothing was measured."""
        return self.step_before_us / self.step_after_us if self.step_before_us and self.step_after_us else 1.0

    def __str__(self) -> str:
        lines = [str(each) for each in self.statements]
        count = f"{self.measured} of {len(self.statements)} statements measured in {self.seconds:.1f} s"
        if self.reason:
            lines.append(f"{count}: {self.reason}")
        elif self.step_before_us is not None and self.step_after_us is not None:
            before, after = self.step_before_us / 1000.0, self.step_after_us / 1000.0
            left = f"; {self.left} left for another call" if self.left else ""
            lines.append(f"{count}{left}; a step took {before:.2f} ms, and takes {after:.2f} ({self.gain:.2f} times)")
        return "\n".join(lines)


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
    rank, others = _ranks()
    if rank:
        return _wait(budget + _GRACE if timeout is None else timeout, begin)
    entries: list[session.Tuned] = []
    try:
        if reason := _why_not():
            report = TuneReport((), reason, time.perf_counter() - begin)
        else:
            own, args, kwargs = copied(module, inputs, named)
            report = _tuned(lambda: _step(own, args, kwargs, backward, double_backward), budget, entries, begin)
    finally:
        if others:
            _publish(entries)
    _log.info("%s", report)
    return report


def _why_not() -> str:
    if reason := timing.why_not():
        return reason
    if own_folder("schedules") is None:
        return "there is no folder of this user's alone to keep measurements in; see INSUM_NN_CACHE_DIR"
    return ""


def _step(module: Step, args: Any, kwargs: Any, backward: bool, double_backward: bool) -> None:
    run_step(module, args, kwargs, backward, double_backward)
    if isinstance(module, nn.Module):
        module.zero_grad(set_to_none=True)


def _tuned(step: Callable[[], None], budget: float, entries: list[session.Tuned], begin: float) -> TuneReport:
    """Run a step until its tasks are measured or the budget is spent; what was measured goes to `entries`."""
    tasks = session.Session()
    try:
        clear_cache()
        with session.opened(tasks):
            step()
        if not tasks.remaining:
            stored = f"the schedules of all {len(tasks.records)} statements were measured before"
            reason = stored if tasks.records else "no kernel of the step has enough work for its schedule to matter"
            return TuneReport(_statements(tasks), reason, time.perf_counter() - begin)
        _log.info(
            "%d statements to measure, in about %.0f s", len(tasks.remaining), len(tasks.remaining) * tasks.expected
        )
        before = timing.time_whole(step, _STEPS)
        until = time.perf_counter() + budget
        for _ in range(_PASSES):
            count = len(tasks.remaining)
            if not count or time.perf_counter() >= until:
                break
            tasks.admit(until)
            # Programs look their schedules up again.
            clear_cache()
            with session.opened(tasks):
                step()
            if len(tasks.remaining) == count:
                break
        clear_cache()
        step()
        after = timing.time_whole(step, _STEPS)
        return TuneReport(_statements(tasks), "", time.perf_counter() - begin, before, after)
    finally:
        entries += [each for each in tasks.records.values() if each.state == "measured"]
        clear_cache()


def _statements(tasks: session.Session) -> tuple[session.Tuned, ...]:
    return tuple(sorted(tasks.records.values(), key=lambda each: -each.weight))


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


def _publish(entries: list[session.Tuned]) -> None:
    """Hand what was measured to the other ranks, which may not see this one's files."""
    found = [database.find(each.key) for each in entries]
    store, name = _job()
    store.set(name, json.dumps([[entry.key, entry.value] for entry in found if entry is not None]))


def _wait(seconds: float, begin: float) -> TuneReport:
    """Wait for what rank 0 measures, and keep it."""
    store, name = _job()
    try:
        store.wait([name], timedelta(seconds=seconds))
        entries = json.loads(store.get(name))
    except RuntimeError as error:
        # Rank 0 died, or its step takes longer: a schedule is a matter of speed alone.
        reason = f"rank 0 did not finish within {seconds:.0f} s; this rank goes on without ({type(error).__name__})"
        _log.warning("%s", reason)
        return TuneReport((), reason, time.perf_counter() - begin)
    for key, value in entries:
        database.write(key, value)
    clear_cache()
    return TuneReport((), f"rank 0 measured {len(entries)} statements for all", time.perf_counter() - begin)

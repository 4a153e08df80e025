"""Tuning: the candidate schedules of a form are compiled by other processes and measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from insum_nn.compiler.ir.canonical import shown_statement
from insum_nn.compiler.ir.schedule import Precision, Schedule
from insum_nn.compiler.kernels import background
from insum_nn.compiler.kernels.ahead import collect, collecting
from insum_nn.compiler.kernels.background import compile_all, default_workers
from insum_nn.compiler.kernels.launch import interpreted
from insum_nn.compiler.kernels.machine_code import KernelCode
from insum_nn.compiler.kernels.row_partition import partition_for
from insum_nn.compiler.kernels.sized import UnsizedKernel, strides_of
from insum_nn.compiler.lang.bind import Extents
from insum_nn.compiler.options import Options
from insum_nn.compiler.schedule.device import device_of, fitting, is_measured, without_measuring
from insum_nn.compiler.schedule.form import Form
from insum_nn.compiler.schedule.plan import NO_PLAN
from insum_nn.compiler.tuning import database as store
from insum_nn.compiler.tuning import timing
from insum_nn.compiler.tuning.progress import progress
from insum_nn.compiler.tuning.select import Selected, Task, active, select
from insum_nn.facts import StaticTable

__all__ = ["capturing", "choose_schedule", "select_or_tune", "worth_selecting"]

T = TypeVar("T")

# Seconds after which no candidate for one statement and size begins to be compiled.
_BUDGET = 5.0
# Seconds that measuring waits for what is compiled in the background.
_SETTLE = 3.0
# Fewest multiplications for which a schedule other than the default pays.
_WORTH = 2**24
# Microseconds of the host that a call takes, and that a further launch costs. Device times do not show
# them, and a call waits for them where the device takes less.
_CALL, _LAUNCH = 20.0, 12.0
# Candidates that are measured. Of 86 searches whose times are known none has its best behind the first 24.
_MOST = 24
# Schedules that are compiled to find one that runs on a device of an architecture that was never measured.
_TRIES = 4


def worth_selecting(extents: Extents) -> bool:
    """Whether a schedule other than the default pays for sizes like these."""
    return not interpreted() and math.prod(max(1, e) for e in extents.indices) >= _WORTH


def capturing() -> bool:
    """Whether a CUDA graph is captured, or launches are collected: then nothing can be measured."""
    if collecting() is not None:
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def select_or_tune(task: Task[T], options: Options) -> Selected[T]:
    """Select: by what is stored, measured where the options or a call of `insum_nn.tune` ask for it, else by the rule.

    Args:
        task: what is to be selected.
        options: of the program.
    """
    current = active()
    if current is None or capturing():
        return select(task, measure=options.tune and not capturing())
    return current.select(task)


def choose_schedule(
    form: Form,
    tables: Mapping[str, StaticTable],
    bucket: tuple[int, ...],
    given: Sequence[Tensor] | torch.device,
    extents: Extents,
    initial: Tensor | None,
    precision: Precision,
    options: Options,
) -> Selected[Schedule]:
    """Select the schedule of a form for a bucket of sizes; `given`: tensors to measure it on, or else their device."""
    where = given if isinstance(given, torch.device) else given[0].device
    device = device_of(where)

    def unmeasured() -> Selected[Schedule]:
        return Selected(*without_measuring(form, device))

    if not worth_selecting(extents):
        return unmeasured()
    more = {"precision": precision, "combine": form.strategy if form.stack is None else f"{form.strategy} by key"}
    if form.additional:
        more["algorithm"] = store.digest(form.plan.at(bucket=None).key)
    key, weight = store.key_of("schedule", form.bound, tables, bucket, where, **more), math.prod(extents.indices)
    task = Task(key, unmeasured, Schedule.from_json, Schedule.to_json, weight=float(weight))
    if isinstance(given, torch.device):
        return select(task)
    # What is tried is not what is decided.
    tried, tensors = replace(form, plan=NO_PLAN), [t.detach() for t in given]

    def trial(schedule: Schedule) -> _Trial:
        return _Trial(tried, schedule, tensors, extents, initial, precision)

    def measure(before: Schedule | None) -> Sequence[tuple[Schedule, float]]:
        schedules = fitting(form, device)[:_MOST]
        return _measure(form, trial, list(dict.fromkeys(schedules if before is None else (before, *schedules))))

    def runs(schedule: Schedule) -> bool:
        # Another version of Triton may need more room for the same text than the device has.
        if collecting() is not None:
            # It is compiled now, and tried by the first call.
            return True
        return not capturing() and trial(schedule).runs()

    def rule() -> Selected[Schedule]:
        schedule, reason = unmeasured()
        if is_measured(device) or capturing():
            return Selected(schedule, reason)
        # What a program needs is estimated; on a device that was never measured, it is compiled to see.
        order = [schedule, *(each for each in fitting(form, device) if each != schedule)][:_TRIES]
        found = next((each for each in order if runs(each)), schedule)
        return Selected(found, reason if found == schedule else f"the next that the device has room for; {reason}")

    return select_or_tune(replace(task, rule=rule, measure=measure, runs=runs), options)


def _measure(
    form: Form, trial: Callable[[Schedule], _Trial], schedules: Sequence[Schedule]
) -> list[tuple[Schedule, float]]:
    """Schedules with their times, the fastest first; infinite where one was not compiled in time, or does not run."""
    with progress(f"tuning {shown_statement(form.bound.statement)}", len(schedules)) as step:
        trials = [trial(schedule) for schedule in schedules]
        needed = [each.codes() for each in trials]
        codes = list(dict.fromkeys(code for each in needed for code in each))
        compiled = {each.code for each in compile_all(codes, default_workers(len(codes)), _BUDGET) if not each.error}
        # Another thread's compiler holds the interpreter for milliseconds.
        background.settle(_SETTLE)
        times: list[tuple[float, _Trial]] = []
        for each, own in zip(trials, needed, strict=True):
            times.append((each.time(5) if compiled.issuperset(own) else math.inf, each))
            step()
        times.sort(key=lambda pair: pair[0])
        # The first few again: differences among them are small.
        best = sorted(((each.time(20), each) for us, each in times[:3] if not math.isinf(us)), key=lambda pair: pair[0])
    return [(each.schedule, us) for us, each in (*best, *times[len(best) :])]


class _Trial:
    """One schedule on the tensors of a call."""

    def __init__(
        self,
        form: Form,
        schedule: Schedule,
        tensors: Sequence[Tensor],
        extents: Extents,
        initial: Tensor | None,
        precision: Precision,
    ) -> None:
        self.schedule, self.tensors, self.initial, self.extents = schedule, tensors, initial, extents
        self.partition = partition_for(form, tensors, extents, schedule)
        divided = self.partition is not None and self.partition.split
        strides = strides_of(form, tensors, extents, divided, initial)
        self.kernel = UnsizedKernel(form, schedule, strides, precision)
        self.additional: list[Tensor] | None = None

    def codes(self) -> list[KernelCode]:
        """The kernels that a run would load."""
        with collect() as collection:
            self.runs()
        return [*collection.codes]

    def runs(self) -> bool:
        """Run once; `False` where Triton has no code, or the device no room, for the schedule."""
        try:
            self.run()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if type(error).__module__.startswith("triton") or "PassManager" in str(error):
                return False
            raise
        return True

    def time(self, repeat: int) -> float:
        """Microseconds of one run; infinite if the device has no room for the schedule.

        Of further launches counts what a call waits for: the device's work hides what is shorter.
        """
        if not self.runs():
            return math.inf
        device = timing.device_time(self.run, repeat)
        host = _CALL + _LAUNCH * self.kernel.further_launches(self.partition)
        waits = max(device, host) - max(device, _CALL)
        return device + waits

    def run(self) -> Tensor:
        if self.additional is None:
            self.additional = self.kernel.additional(self.tensors, self.partition)
        return self.kernel.call(self.tensors, self.initial, *self.extents, self.partition, self.additional)

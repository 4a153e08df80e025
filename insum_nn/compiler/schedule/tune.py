"""Tuning: the candidates of a task are measured, and the database keeps what was found."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from insum_nn.compiler.ir.canonical import shown_statement
from insum_nn.compiler.ir.schedule import Precision, Schedule
from insum_nn.compiler.kernels import background
from insum_nn.compiler.kernels.ahead import UndecidedError, collecting, rehearsing
from insum_nn.compiler.kernels.launch import interpreted
from insum_nn.compiler.kernels.row_partition import partition_for
from insum_nn.compiler.kernels.sized import UnsizedKernel, strides_of
from insum_nn.compiler.lang.bind import Extents
from insum_nn.compiler.options import Options
from insum_nn.compiler.schedule.defaults import default_schedule
from insum_nn.compiler.schedule.device import device_of, fitting, is_measured, without_measuring
from insum_nn.compiler.schedule.form import Form
from insum_nn.compiler.schedule.plan import NO_PLAN
from insum_nn.compiler.tuning import database as store
from insum_nn.compiler.tuning import session, timing
from insum_nn.compiler.tuning.progress import Progress
from insum_nn.compiler.tuning.select import Measured, Measurement, Selected, Task, select, stored
from insum_nn.facts import StaticTable

__all__ = [
    "WAIT",
    "capturing",
    "choose_schedule",
    "choose_unmeasured",
    "select_or_tune",
    "settle",
    "tune",
    "worth_selecting",
]

T = TypeVar("T")

# Seconds in which the candidates for one statement and size are compiled; and how many times as long as the first
# kernel took where that is longer, since those that compile at the same time are nearly done by then.
_BUDGET = 5.0
_WITH_FIRST = 1.3
_LONGEST = 15.0
# Longest wait for another process that measures the same, in seconds.
WAIT = 30.0
# Fewest multiplications for which a schedule other than the default pays.
_WORTH = 2**24
# Microseconds of the host that a call takes, and that a further launch costs. Device times do not show
# them, and a call waits for them where the device takes less.
_CALL, _LAUNCH = 20.0, 12.0
# Measurements that are stored with the fastest, as a record.
_SHOWN = 6
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


def select_or_tune(task: Task[T], options: Options, weight: float = math.inf) -> Selected[T]:
    """Select: by what is stored, measured where the options or a call of `insum_nn.tune` ask for it, else by the rule.

    Args:
        task: what is to be selected.
        options: of the program.
        weight: multiplications that depend on it; `insum_nn.tune` begins with the most.
    """
    if rehearsing() and (options.tune or session.active() is not None):
        raise UndecidedError("it is measured when it runs")
    if capturing():
        return select(task, None)
    current = session.active()
    if current is not None:
        return current.select(task, weight, tune)
    return select(task, tune if options.tune else None)


def tune(task: Task[T], *, again: bool = False) -> Selected[T] | None:
    """Measure the candidates of a task and write what was found to the database.

    Nothing else measures. One process on a cache folder measures a key, while the others wait for what it writes.

    Args:
        task: what is measured.
        again: also where something is stored that was measured with other versions of torch and Triton.

    Returns:
        `None`: another process measures, and was not done in time.
    """
    with store.turn(task.key, WAIT) as mine:
        found = None if again and not session.is_current(task.key) else stored(task)
        if found is not None or not mine:
            return found
        measured = task.measure()
        if measured.value is not None:
            store.write(task.key, measured.value)
        return measured.selected


def choose_schedule(
    form: Form,
    tables: Mapping[str, StaticTable],
    bucket: tuple[int, ...],
    tensors: Sequence[Tensor],
    extents: Extents,
    initial: Tensor | None,
    precision: Precision,
    options: Options,
) -> Selected[Schedule]:
    """Select the schedule of a form for a bucket of sizes."""
    device = device_of(tensors[0].device)
    if not worth_selecting(extents):
        return Selected(*without_measuring(form, device))
    key = _key_of(form, tables, bucket, tensors[0].device, precision)
    # What is tried is not what is decided.
    tried, given = replace(form, plan=NO_PLAN), [t.detach() for t in tensors]

    def trial(schedule: Schedule) -> _Trial:
        return _Trial(tried, schedule, given, extents, initial, precision)

    def measure() -> Measured[Schedule]:
        schedules = fitting(form, device)[:_MOST]
        if (previous := _decoded(store.find(key))) is not None:
            schedules = list(dict.fromkeys((previous.candidate, *schedules)))
        measured = _measure(form, trial, schedules)
        if not measured or math.isinf(measured[0].microseconds):
            return Measured(Selected(default_schedule(form), "the default: no candidate ran", measured), None)
        found = Selected(measured[0].candidate, f"the fastest of {len(measured)} measured", measured)
        return Measured(found, _to_json(measured))

    def runs(schedule: Schedule) -> bool:
        # Another version of Triton may need more room for the same text than the device has.
        if rehearsing():
            trial(schedule).run()
            raise UndecidedError("it is tried when it runs")
        if collecting() is not None:
            # It is compiled now, and tried by the first call.
            return True
        return not capturing() and trial(schedule).runs()

    def rule() -> Selected[Schedule]:
        schedule, reason = without_measuring(form, device)
        if is_measured(device) or (capturing() and not rehearsing()):
            return Selected(schedule, reason)
        # What a program needs is estimated; on a device that was never measured, it is compiled to see.
        order = [schedule, *(each for each in fitting(form, device) if each != schedule)][:_TRIES]
        found = next((each for each in order if runs(each)), schedule)
        return Selected(found, reason if found == schedule else f"the next that the device has room for; {reason}")

    task = Task(key, rule, _decode, measure, runs)
    return select_or_tune(task, options, float(math.prod(extents.indices)))


def choose_unmeasured(
    form: Form,
    tables: Mapping[str, StaticTable],
    bucket: tuple[int, ...],
    extents: Extents,
    where: torch.device,
    precision: Precision,
) -> Selected[Schedule]:
    """Select the schedule of a form where there are no values to measure it on."""
    device = device_of(where)
    if not worth_selecting(extents):
        return Selected(*without_measuring(form, device))

    def measure() -> Measured[Schedule]:
        raise AssertionError("there is nothing to measure on")

    key = _key_of(form, tables, bucket, where, precision)
    task = Task(key, lambda: Selected(*without_measuring(form, device)), _decode, measure)
    return select(task, None)


def _key_of(
    form: Form, tables: Mapping[str, StaticTable], bucket: tuple[int, ...], where: torch.device, precision: Precision
) -> store.Key:
    """What the schedule of a form is stored under."""
    more = {"precision": precision, "combine": form.strategy if form.stack is None else f"{form.strategy} by key"}
    if form.even:
        # In one bucket of sizes, what suits rows of equal length need not suit those of a power law.
        more["rows"] = "even"
    if form.additional:
        more["algorithm"] = store.digest(form.plan.at(bucket=None).key)
    return store.key_of("schedule", form.bound, tables, bucket, where, **more)


def _to_json(measured: Sequence[Measurement[Schedule]]) -> dict[str, Any]:
    shown = [m for m in measured[:_SHOWN] if not math.isinf(m.microseconds)]
    return {
        "schedule": measured[0].candidate.to_json(),
        "measured": [{"schedule": m.candidate.to_json(), "microseconds": m.microseconds} for m in shown],
    }


def _decode(value: Mapping[str, Any], origin: str) -> Selected[Schedule]:
    """Read a stored value; raises one of `database.UNREADABLE` if it holds no schedule."""
    return Selected(Schedule.from_json(value["schedule"]), origin)


def _decoded(entry: store.Entry | None) -> Selected[Schedule] | None:
    """Return the schedule of an entry; `None`, and a warning, if it holds none."""
    if entry is None:
        return None
    try:
        return _decode(entry.value, entry.origin())
    except store.UNREADABLE as error:
        entry.broken(error)
        return None


_Try = Callable[[Schedule], "_Trial"]


def _measure(form: Form, trial: _Try, schedules: Sequence[Schedule]) -> tuple[Measurement[Schedule], ...]:
    """Schedules with their times, the fastest first."""
    with Progress(f"tuning {shown_statement(form.bound.statement)}", len(schedules)) as progress:
        found = _compile(trial, schedules, progress)
        measured = [(trial.time(5) if fits else math.inf, trial) for trial, fits in found]
        measured.sort(key=lambda pair: pair[0])
        # The first few again: differences among them are small.
        best = sorted(
            ((trial.time(20), trial) for us, trial in measured[:3] if not math.isinf(us)), key=lambda pair: pair[0]
        )
        if best:
            progress.result = f"{best[0][0]:.1f} us: {best[0][1].schedule}"
    return tuple(Measurement(trial.schedule, us) for us, trial in (*best, *measured[len(best) :]))


def _compile(trial: _Try, schedules: Sequence[Schedule], progress: Progress) -> list[tuple[_Trial, bool]]:
    """Return those that are compiled in time, in parallel, and whether the device has room for them.

    Nothing is measured before the last one is done: another thread's compiler holds the interpreter for milliseconds.
    """
    begin, until = time.perf_counter(), math.inf
    workers = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    compiled: dict[Future[bool], _Trial] = {}
    try:
        for schedule in schedules:
            tried = trial(schedule)
            compiled[workers.submit(tried.compile)] = tried
        waiting = set(compiled)
        while waiting and (left := until - time.perf_counter()) > 0:
            done, waiting = wait(waiting, None if math.isinf(left) else left, FIRST_COMPLETED)
            progress.step(len(done))
            if math.isinf(until) and any(each.result() for each in done):
                spent = time.perf_counter() - begin
                until = begin + max(_BUDGET, min(_WITH_FIRST * spent, _LONGEST))
    finally:
        workers.shutdown(wait=False, cancel_futures=True)
    _behind.update(each for each in compiled if not each.cancelled() and not each.done())
    settle()
    return [(trial, each.result()) for each, trial in compiled.items() if each.done() and not each.cancelled()]


# Compilations that tuning did not wait for, and seconds that it waits for those it has begun.
_behind: set[Future[bool]] = set()
_SETTLE = 3.0


def settle(seconds: float = _SETTLE) -> bool:
    """Wait until nothing is compiled in the background, and say whether what is measured next runs alone."""
    until = time.monotonic() + seconds
    _behind.difference_update([each for each in _behind if each.done()])
    alone = not wait(list(_behind), seconds).not_done
    return background.settle(max(0.0, until - time.monotonic())) and alone


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

    def compile(self) -> bool:
        """Whether there is machine code for the schedule."""
        try:
            arguments, grid = self.kernel.arguments(self.tensors, self.initial, self.extents, self.partition)
            if grid:
                self.kernel.launcher(arguments, self.tensors, self.partition).compile_ahead()
        except Exception as error:
            return self.refused(error)
        return True

    @staticmethod
    def refused(error: Exception) -> bool:
        """`False` where Triton has no code or no room for a schedule; other errors are errors."""
        if type(error).__module__.startswith("triton") or "PassManager" in str(error):
            return False
        raise error

    def runs(self) -> bool:
        """Run once, and say whether the device has room for the schedule."""
        try:
            self.run()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return self.refused(error)
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

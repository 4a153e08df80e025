"""The choice of a schedule: by measurement where it pays, remembered on disk, else by the default rules."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from insum_nn.compiler.bind import Extents
from insum_nn.compiler.inductor import cache_folder
from insum_nn.compiler.kernel_form import Form
from insum_nn.compiler.kernel_schedule import Precision, Schedule, candidates, default_schedule
from insum_nn.compiler.options import Options
from insum_nn.compiler.owners import owners_for
from insum_nn.compiler.triton_lowering import interpreted, prepare_kernel
from insum_nn.facts import StaticTable

__all__ = ["Measurement", "choose_schedule", "time_calls", "worth_measuring"]

_VERSION = 2
# Seconds of search for one statement and size.
_BUDGET = 5.0
# Fewest multiplications for which a search pays.
_WORTH = 2**24


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a schedule took, in microseconds; infinite where it did not run."""

    schedule: Schedule
    microseconds: float


def worth_measuring(options: Options, extents: Extents) -> bool:
    """Whether a search at these sizes is wanted, possible, and soon regained."""
    work = math.prod(max(1, e) for e in extents.indices)
    return options.tune and not interpreted() and work >= _WORTH and not torch.cuda.is_current_stream_capturing()


def choose_schedule(
    form: Form,
    tables: Mapping[str, StaticTable],
    bucket: tuple[int, ...],
    tensors: Sequence[Tensor],
    extents: Extents,
    start: Tensor | None,
    precision: Precision,
    options: Options,
) -> tuple[Schedule, tuple[Measurement, ...]]:
    """The schedule for a form at some sizes, and what was measured to find it."""
    default = default_schedule(form)
    if not worth_measuring(options, extents):
        return default, ()
    path = _path(form, tables, bucket, tensors[0].device, precision)
    found = _read(path)
    if found is not None:
        return found, ()
    measured = _measure(form, tensors, extents, start, precision)
    if not measured or math.isinf(measured[0].microseconds):
        return default, measured
    _write(path, measured[0])
    return measured[0].schedule, measured


def _measure(
    form: Form, tensors: Sequence[Tensor], extents: Extents, start: Tensor | None, precision: Precision
) -> tuple[Measurement, ...]:
    """Candidates with their times, the fastest first."""
    begin = time.perf_counter()
    plain = [t.detach() for t in tensors]
    trials: list[_Trial] = []
    measured: list[tuple[float, _Trial]] = []
    workers = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        for schedule in candidates(form):
            trial = _Trial(form, schedule, plain, extents, start, precision)
            trial.compiled = workers.submit(trial.compile)
            trials.append(trial)
        for trial in trials:
            left = _BUDGET - (time.perf_counter() - begin)
            if measured and left <= 0:
                break
            try:
                assert trial.compiled is not None
                fits = trial.compiled.result(timeout=left if measured else None)
            except TimeoutError:
                continue
            measured.append((trial.time(5) if fits else math.inf, trial))
    finally:
        workers.shutdown(wait=False, cancel_futures=True)
    measured.sort(key=lambda pair: pair[0])
    # The first few again: differences among them are small.
    best = sorted(
        ((trial.time(20), trial) for us, trial in measured[:3] if not math.isinf(us)), key=lambda pair: pair[0]
    )
    return tuple(Measurement(trial.schedule, us) for us, trial in (*best, *measured[len(best) :]))


class _Trial:
    """One schedule on the tensors of the call at hand."""

    def __init__(
        self,
        form: Form,
        schedule: Schedule,
        tensors: Sequence[Tensor],
        extents: Extents,
        start: Tensor | None,
        precision: Precision,
    ) -> None:
        self.schedule = schedule
        self.tensors = tensors
        self.start = start
        self.compiled: Future[bool] | None = None
        self.owners = owners_for(form, tensors, extents, schedule)
        self.kernel = prepare_kernel(form, schedule, tensors, start, extents, precision, self.owners)

    def compile(self) -> bool:
        """Whether there is machine code for the schedule."""
        try:
            if self.kernel.launch is not None:
                self.kernel.launch.compile_ahead()
        except Exception as error:
            return self.refused(error)
        return True

    @staticmethod
    def refused(error: Exception) -> bool:
        """`False` where Triton has no code or no room for a schedule; other errors are errors."""
        if type(error).__module__.startswith("triton") or "PassManager" in str(error):
            return False
        raise error

    def time(self, repeat: int) -> float:
        """Microseconds of one run; infinite if the device has no room for the schedule."""
        try:
            self.kernel(self.tensors, self.start, self.owners)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.refused(error)
            return math.inf
        return _median(lambda: self.kernel(self.tensors, self.start, self.owners), repeat)


def _median(call: Callable[[], object], repeat: int) -> float:
    """Median microseconds of a call that ran before."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
    # Work in front keeps the device busy while the host launches, so that the times are the device's.
    torch.cuda._sleep(400_000)
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return 1000.0 * times[len(times) // 2]


def time_calls(
    run: Callable[[Sequence[Tensor], Tensor | None], Tensor], tensors: Sequence[Tensor], start: Tensor | None
) -> float:
    """Median microseconds of a program on these tensors; infinite where the device has no room for its kernels."""
    try:
        run(tensors, start)
    except torch.OutOfMemoryError:
        return math.inf
    return _median(lambda: run(tensors, start), 20)


# On disk.


def _path(
    form: Form, tables: Mapping[str, StaticTable], bucket: tuple[int, ...], device: torch.device, precision: str
) -> Path:
    properties = torch.cuda.get_device_properties(device)
    parts = (_VERSION, repr(form.bound), sorted(tables.items()), bucket, precision, properties.name)
    parts = (*parts, torch.__version__, form.combine, form.tail)
    return cache_folder() / "schedules" / f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.json"


def _read(path: Path) -> Schedule | None:
    try:
        return Schedule(**json.loads(path.read_text())["schedule"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(path: Path, measurement: Measurement) -> None:
    """Written whole or not at all: several processes may do so at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"schedule": measurement.schedule.to_json(), "microseconds": measurement.microseconds}, file)
        os.replace(file.name, path)
    except OSError:
        return

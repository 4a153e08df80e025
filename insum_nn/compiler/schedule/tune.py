"""The choice of a schedule: by measurement where it pays, remembered on disk, else by the default rules."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.forms.candidates import candidates
from insum_nn.compiler.forms.form import Form
from insum_nn.compiler.forms.launch import interpreted, prepare_kernel
from insum_nn.compiler.forms.points import canonical_points
from insum_nn.compiler.forms.schedule import Precision, Schedule, default_schedule
from insum_nn.compiler.lang.bind import Extents
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime.row_partition import owners_for
from insum_nn.compiler.schedule import budget
from insum_nn.compiler.schedule import database as store
from insum_nn.compiler.schedule.canonical import shown_statement
from insum_nn.compiler.schedule.progress import Progress
from insum_nn.facts import StaticTable

__all__ = [
    "WAIT",
    "Chosen",
    "Measurement",
    "choose_schedule",
    "device_time",
    "settle",
    "time_whole",
    "worth_measuring",
]

# Seconds of search for one statement and size; and what a first kernel that takes longer to compile adds, since those
# that are compiled beside it are nearly done by then.
_BUDGET = 5.0
_BESIDE = 1.3
_LONGEST = 15.0
# Longest wait for another process that measures the same, in seconds.
WAIT = 30.0
# Fewest multiplications for which a search pays.
_WORTH = 2**24
# Microseconds of the host that a call takes, and that a launch beside the kernel's costs. Device times do not show
# them, and a call waits for them where the device takes less.
_CALL, _LAUNCH = 20.0, 12.0
# Measurements that are remembered beside the fastest, to show them.
_SHOWN = 6
# Of those, the ones that are measured again for half or twice as many rows: so many, and no slower than this.
_FEW, _ALIKE = 4, 1.3
# Other sizes, the nearest first, of which the fastest are measured again where all of them would take too long.
_OTHERS = 8


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a schedule took, in microseconds, further launches counted; infinite where it did not run."""

    schedule: Schedule
    microseconds: float


@dataclass(frozen=True, slots=True)
class Chosen:
    """A schedule, why it was taken, and what was measured, the fastest first."""

    schedule: Schedule
    reason: str
    measured: tuple[Measurement, ...] = ()


def worth_measuring(options: Options, extents: Extents) -> bool:
    """Whether a measurement pays for sizes like these, and can be made now."""
    if not options.tune or interpreted() or math.prod(max(1, e) for e in extents.indices) < _WORTH:
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def choose_schedule(
    form: Form,
    tables: Mapping[str, StaticTable],
    bucket: tuple[int, ...],
    tensors: Sequence[Tensor],
    extents: Extents,
    start: Tensor | None,
    precision: Precision,
    options: Options,
) -> Chosen:
    """The schedule for a form at some sizes.

    One process measures it, and others on the same cache folder wait and read what it found.
    """
    default = default_schedule(form)
    if not worth_measuring(options, extents):
        return Chosen(default, "the default" if not options.tune else "the default: too little work to measure")
    more = {"precision": precision, "combine": form.combine}
    if form.even:
        # Where sizes are alike, what suits rows of like length need not suit those of a power law.
        more["rows"] = "even"
    if form.beside:
        points = [point for output in form.statements for point in output]
        more["beside"] = store.digest(canonical_points(form.bound.statement, points))
    key = store.key_of("schedule", form.bound, tables, bucket, tensors[0].device, **more)
    search = _Search(form, tensors, extents, start, precision)

    def measure() -> Chosen:
        with budget.spending():
            some, which = search.some(key)
            measured = _measure(search, some or list(candidates(form)))
        if not measured or math.isinf(measured[0].microseconds):
            return Chosen(default, "the default: no candidate ran", measured)
        store.write(key, {**_to_json(measured), **({"nearby": True} if some else {})})
        return Chosen(measured[0].schedule, f"the fastest of {len(measured)} measured{which}", measured)

    late = Chosen(default, f"the default: another process measures, and was not done after {WAIT:.0f} s")
    return store.once(key, WAIT, lambda: search.remembered(key), measure) or late


def _to_json(measured: Sequence[Measurement]) -> dict[str, Any]:
    shown = [m for m in measured[:_SHOWN] if not math.isinf(m.microseconds)]
    return {
        "schedule": measured[0].schedule.to_json(),
        "measured": [{"schedule": m.schedule.to_json(), "microseconds": m.microseconds} for m in shown],
    }


def _from_json(value: Any) -> Schedule:
    """A schedule that can be used.

    Raises:
        ValueError: it is none.
    """
    known = Schedule().to_json()
    if not isinstance(value, dict) or not value.keys() <= known.keys():
        raise ValueError(f"{value!r} is no schedule")
    for name, number in value.items():
        if type(number) is not type(known[name]):
            raise ValueError(f"{name} of a schedule is {number!r}")
        if type(number) is int and (number < min(1, known[name]) or (name in _POWERS and number & (number - 1))):
            raise ValueError(f"{name} of a schedule is {number}")
        if type(number) is int and number > _LARGEST.get(name, _MANY):
            raise ValueError(f"{name} of a schedule is {number}")
    schedule = Schedule(**value)
    if schedule.m * schedule.n * schedule.k > _LANES:
        raise ValueError(f"a schedule of {schedule} holds more than {_LANES} numbers")
    return schedule


_POWERS = ("m", "n", "k", "warps")
# No schedule that was measured comes near to these; Triton's tensors hold as many numbers as `_LANES` at most.
_LARGEST = {"warps": 32, "stages": 16}
_MANY, _LANES = 2**31 - 1, 1 << 20


def _known(entry: store.Entry | None) -> tuple[Schedule, tuple[Measurement, ...]] | None:
    """The schedule of an entry and what was measured; `None`, and a warning, if it holds none."""
    if entry is None:
        return None
    try:
        shown = [(_from_json(m["schedule"]), float(m["microseconds"])) for m in entry.value["measured"]]
        return _from_json(entry.value["schedule"]), tuple(Measurement(*m) for m in shown)
    except store.UNREADABLE as error:
        entry.broken(error)
        return None


class _Search:
    """The search for the fastest schedule of a form, on the tensors of the call at hand."""

    def __init__(
        self, form: Form, tensors: Sequence[Tensor], extents: Extents, start: Tensor | None, precision: Precision
    ) -> None:
        self.form = form
        self.tensors = [t.detach() for t in tensors]
        self.extents = extents
        self.start = start
        self.precision: Precision = precision

    def trial(self, schedule: Schedule) -> _Trial:
        return _Trial(self.form, schedule, self.tensors, self.extents, self.start, self.precision)

    def remembered(self, key: store.Key) -> Chosen | None:
        """What is remembered, if it can be used here."""
        entry = store.find(key)
        known = _known(entry)
        if entry is None or known is None:
            return None
        schedule, measured = known
        # Another version of Triton may need more room for the same text than the device has.
        if not entry.current and math.isinf(self.trial(schedule).time(1)):
            return None
        return Chosen(schedule, entry.origin(), measured)

    def some(self, key: store.Key) -> tuple[list[Schedule], str]:
        """The candidates that other sizes speak for, the default first, and which; none where all are to be measured.

        Sizes that change from step to step pass through several buckets, each of which would wait for a search; and so
        would each of the many sizes of a network.
        """
        default = default_schedule(self.form)
        known = _known(store.near(key))
        if known is not None and known[1]:
            best = known[1][0].microseconds
            good = [m.schedule for m in known[1] if m.microseconds <= _ALIKE * best]
            return list(dict.fromkeys((default, known[0], *good[:_FEW]))), ", the best of half or twice as many rows"
        if budget.left() > 0:
            return [], ""
        taken = {_code(found[0]) for entry in store.alike(key)[:_OTHERS] if (found := _known(entry)) is not None}
        liked = [schedule for schedule in candidates(self.form) if _code(schedule) in taken]
        which = f", the best of other sizes: {budget.spent():.0f} s went into searches before"
        return (list(dict.fromkeys((default, *liked[:_FEW]))), which) if taken else ([], "")


def _code(schedule: Schedule) -> Schedule:
    """What makes the same code of a schedule for other sizes: all but how a sum is divided."""
    return replace(schedule, splits=1, share=1)


def _measure(search: _Search, schedules: Sequence[Schedule]) -> tuple[Measurement, ...]:
    """Schedules with their times, the fastest first."""
    with Progress(f"tuning {shown_statement(search.form.bound.statement)}", len(schedules)) as progress:
        found = _compile(search, schedules, progress)
        measured = [(trial.time(5) if fits else math.inf, trial) for trial, fits in found]
        measured.sort(key=lambda pair: pair[0])
        # The first few again: differences among them are small.
        best = sorted(
            ((trial.time(20), trial) for us, trial in measured[:3] if not math.isinf(us)), key=lambda pair: pair[0]
        )
        if best:
            progress.result = f"{best[0][0]:.1f} us: {best[0][1].schedule}"
    return tuple(Measurement(trial.schedule, us) for us, trial in (*best, *measured[len(best) :]))


def _compile(search: _Search, schedules: Sequence[Schedule], progress: Progress) -> list[tuple[_Trial, bool]]:
    """Those that are compiled while there is time, side by side, and whether the device has room for them.

    Nothing is measured before the last one is done: a compiler that runs beside takes the interpreter for milliseconds.
    """
    begin, until = time.perf_counter(), math.inf
    workers = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    compiled: dict[Future[bool], _Trial] = {}
    try:
        for schedule in schedules:
            trial = search.trial(schedule)
            compiled[workers.submit(trial.compile)] = trial
        waiting = set(compiled)
        while waiting and (left := until - time.perf_counter()) > 0:
            done, waiting = wait(waiting, None if math.isinf(left) else left, FIRST_COMPLETED)
            progress.step(len(done))
            if math.isinf(until) and any(each.result() for each in done):
                spent = time.perf_counter() - begin
                until = begin + max(_BUDGET, min(_BESIDE * spent, _LONGEST))
    finally:
        workers.shutdown(wait=False, cancel_futures=True)
    _behind.update(each for each in compiled if not each.cancelled() and not each.done())
    settle()
    return [(trial, each.result()) for each, trial in compiled.items() if each.done() and not each.cancelled()]


# Compilations that a search did not wait for, and seconds that it waits for those it has begun.
_behind: set[Future[bool]] = set()
_SETTLE = 3.0


def settle(seconds: float = _SETTLE) -> bool:
    """Wait until nothing is compiled beside, so that what is measured next is measured alone; whether that is so."""
    _behind.difference_update([each for each in _behind if each.done()])
    return not wait(list(_behind), seconds).not_done


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
        self.owners = owners_for(form, tensors, extents, schedule)
        self.kernel = prepare_kernel(form, schedule, tensors, start, extents, precision, self.owners)
        self.beside: list[Tensor] | None = None

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
        """Microseconds of one run; infinite if the device has no room for the schedule.

        Of further launches counts what a call waits for: the device's work hides what is shorter.
        """
        try:
            self.run()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.refused(error)
            return math.inf
        device = device_time(self.run, repeat)
        host = _CALL + _LAUNCH * self.kernel.further_launches(self.owners)
        waits = max(device, host) - max(device, _CALL)
        return device + waits

    def run(self) -> Tensor:
        if self.beside is None:
            self.beside = self.kernel.beside(self.tensors, self.owners)
        return self.kernel(self.tensors, self.start, self.owners, self.beside)


# Microseconds of work in front of what is measured: at least, and at most.
_LEAST_AHEAD, _MOST_AHEAD = 200.0, 40_000.0


def device_time(run: Callable[[], object], repeat: int, *, host: float | None = None) -> float:
    """Microseconds that the device takes for something that ran before: medians, with its cache emptied and without.

    A layer finds in the cache what the layer before it wrote, and its weights and index tensors, which nothing touched
    since the last step, in memory. So each way counts half.

    Work in front keeps the device busy until the host has launched all of it; else the times would be the host's.

    Args:
        run: what is measured.
        repeat: how often, each way.
        host: microseconds for which it keeps the host; measured by one run more where it is not given.
    """
    if host is None:
        begin = time.perf_counter()
        run()
        host = 1e6 * (time.perf_counter() - begin)
    ways = ("cold", "warm") if (filler := _filler()) is not None else ("warm",)
    taken: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {way: [] for way in ways}
    ahead = 1.5 * repeat * (len(ways) * host + _BETWEEN)
    torch.cuda._sleep(int(2000 * min(_MOST_AHEAD, max(_LEAST_AHEAD, ahead))))
    for _ in range(repeat):
        if filler is not None:
            filler.zero_()
        for way in ways:
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            run()
            ended.record()
            taken[way].append((begun, ended))
    torch.cuda.synchronize()
    times = [sorted(a.elapsed_time(b) for a, b in pairs) for pairs in taken.values()]
    return 1000.0 * sum(way[len(way) // 2] for way in times) / len(times)


# Microseconds of the host that events, and emptying the cache, take beside a run.
_BETWEEN = 20.0


def _filler() -> Tensor | None:
    """What fills the cache of the device when it is written; `None` where there is no room for it."""
    size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    try:
        return torch.empty(2 * size, dtype=torch.int8, device="cuda")
    except torch.OutOfMemoryError:
        return None


def _has_room(run: Callable[[], object]) -> bool:
    """Run it once; whether the device has room for it."""
    try:
        run()
    except torch.OutOfMemoryError:
        return False
    return True


# Runs of which the median counts.
_RUNS = 10


def time_whole(run: Callable[[], object], repeat: int = _RUNS) -> float:
    """Microseconds of something of several kernels: the device's or the host's, whichever takes longer.

    Both are taken apart, since together they would vary with the host. Infinite where the device has no room.
    """
    if not _has_room(run):
        return math.inf
    torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(repeat):
        begin = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - begin))
        torch.cuda.synchronize()
    # The least: what keeps a host from its work is no property of the program.
    host = min(times)
    return max(host, device_time(run, repeat, host=host))

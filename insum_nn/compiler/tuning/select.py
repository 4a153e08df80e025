"""Selection: what was measured for a bucket of sizes, or is measured now; else the nearest bucket; else a rule.

A `Task` says what is to be selected, and how its candidates are measured; `select` does both. While `insum_nn.tune`
runs a step, its report is `active`: a first run of the step notes each task and selects without measuring. Later runs
measure the tasks of most multiplications, on the tensors of that run, so that no tensor is kept between runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch

from insum_nn.compiler.tuning import database
from insum_nn.locks import new_lock

__all__ = ["WAIT", "Selected", "Task", "TuneReport", "Tuned", "active", "opened", "select"]

T = TypeVar("T")
# Longest wait for another process that measures the same, in seconds.
WAIT = 30.0
# Measurements that are stored with the fastest, as a record.
_SHOWN = 6
# Tasks that depend on so many times fewer multiplications than the largest are measured by a later run of a step.
_FEWER = 4


class Selected(NamedTuple, Generic[T]):
    """A candidate, and why it was selected."""

    candidate: T
    reason: str


@dataclass(frozen=True, slots=True)
class Task(Generic[T]):
    """What is to be selected for a statement, a bucket of sizes and a device.

    Attributes:
        key: of the measurement in the database.
        rule: selects without any measurement.
        read: a candidate from JSON. It raises one of `database.UNREADABLE` where there is none.
        write: the same as JSON.
        measure: candidates and their microseconds, the fastest first, infinite where one did not run; it is given what
            was measured before, with other versions of torch and Triton.
        runs: whether what was measured with other versions of torch and Triton runs here.
        weight: multiplications that depend on it.
    """

    key: database.Key
    rule: Callable[[], Selected[T]]
    read: Callable[[Any], T]
    write: Callable[[T], Any]
    measure: Callable[[T | None], Sequence[tuple[T, float]]] = lambda _: ()
    runs: Callable[[T], bool] = lambda _: True
    weight: float = math.inf


def select(task: Task[T], *, measure: bool = False, record: Tuned | None = None) -> Selected[T]:
    """Return the first there is: stored for this bucket, measured now, stored for the nearest bucket, the rule's.

    One process on a cache folder measures a key, while the others wait for what it writes.

    Args:
        task: what is to be selected.
        measure: measure it where nothing is stored.
        record: of a step that is tuned: where it is noted what was measured. What is stored counts only where it was
            measured with the versions of torch and Triton in use.
    """
    found, why = _stored(task, database.find(task.key)), ""
    if measure and (found is None or record is not None):
        with database.turn(task.key, WAIT) as mine:
            found = _stored(task, database.find(task.key, current=record is not None))
            if found is None and mine:
                found, why = _measured(task, record), "; no candidate ran"
            elif found is None:
                why = "; another process measures, and was not done in time"
    if found is None:
        found = _stored(task, database.in_full_precision(task.key), ", for products of full precision")
        found = found or _stored(task, database.near(task.key), ", for half or twice as many rows") or task.rule()
        found = Selected(found.candidate, found.reason + why)
    return found


def _stored(task: Task[T], entry: database.Entry | None, where: str = "") -> Selected[T] | None:
    candidate = _read(task, entry)
    if entry is None or candidate is None or not (entry.current or task.runs(candidate)):
        return None
    return Selected(candidate, f"{entry.origin()}{where}")


def _read(task: Task[T], entry: database.Entry | None) -> T | None:
    """The candidate of an entry; `None`, and a warning, if it holds none."""
    if entry is None:
        return None
    try:
        return task.read(entry.value["schedule"])
    except database.UNREADABLE as error:
        entry.broken(error)
        return None


def _measured(task: Task[T], record: Tuned | None) -> Selected[T] | None:
    """Measure, and write what was found to the database; `None`: no candidate ran."""
    measured = task.measure(_read(task, database.find(task.key)))
    times = [(candidate, us) for candidate, us in measured if not math.isinf(us)]
    if not times:
        return None
    shown = [{"schedule": task.write(candidate), "microseconds": us} for candidate, us in times[:_SHOWN]]
    database.write(task.key, {"schedule": shown[0]["schedule"], "measured": shown})
    if record is not None:
        before = next((us for candidate, us in times if candidate == record.before), times[0][1])
        record.gain = before / times[0][1]
    return Selected(times[0][0], f"the fastest of {len(measured)} measured")


# A whole step.


@dataclass
class Tuned:
    """A tuning task of a step: a statement and its sizes.

    Attributes:
        key: of the database.
        weight: multiplications that depend on it.
        before: what was selected without measuring.
        state: "measured" now; "stored": measured before; "left": there was no time; "failed": no candidate ran, there
            was not enough memory, or another process measured for too long.
        after: what is used from now on, as text.
        gain: how many times as fast as before it is; 1.0 where that was not measured.
    """

    key: Mapping[str, Any]
    weight: float
    before: object
    state: Literal["stored", "left", "measured", "failed"]
    after: str = ""
    gain: float = 1.0

    @property
    def statement(self) -> str:
        """The statement in canonical names."""
        return str(self.key["statement"])

    def __str__(self) -> str:
        sizes = ",".join(f"2^{size}" for size in self.key["bucket"])
        gained = f", {self.gain:.2f} times as fast as before: {self.after}" if self.after else ""
        return f"{self.statement} [{sizes}] {self.key['dtype']}: {self.state}{gained}"


@dataclass
class TuneReport:
    """What `tune` measured and gained; `str()` is a line for each statement, and one for all.

    Attributes:
        reason: why nothing was measured; empty where something was.
        seconds: that all of it took.
        step_before_us: microseconds of the whole step before; `None`: nothing was measured.
        step_after_us: the same afterwards.
    """

    reason: str = ""
    seconds: float = 0.0
    step_before_us: float | None = None
    step_after_us: float | None = None
    # By the digests of their keys.
    _records: dict[str, Tuned] = field(default_factory=dict[str, Tuned], repr=False)
    _least: float = field(default=math.inf, repr=False)
    _until: float = field(default=0.0, repr=False)
    # Backward runs in threads of torch's own.
    _lock: Any = field(default_factory=new_lock, repr=False, compare=False)

    @property
    def statements(self) -> tuple[Tuned, ...]:
        """Those whose kernels a step runs with enough work for a choice to matter; of most multiplications first."""
        return tuple(sorted(self._records.values(), key=lambda each: -each.weight))

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

    def admit(self, until: float) -> None:
        """Let the next run of the step measure the largest tasks that are left, until then."""
        largest = max((each.weight for each in self.statements if each.state == "left"), default=math.inf)
        self._least, self._until = largest / _FEWER, until

    def select(self, task: Task[T]) -> Selected[T]:
        """Select for a task, by measuring where it was admitted."""
        with self._lock:
            name = database.digest(task.key)
            record = self._records.get(name)
            if record is None:
                found = select(task)
                state = "left" if database.find(task.key, current=True) is None else "stored"
                self._records[name] = Tuned(task.key, task.weight, found.candidate, state)
                return found
            # The first is measured whatever it takes: a budget that ends before it would never bring anything.
            done = any(each.state in ("measured", "failed") for each in self.statements)
            late = done and time.perf_counter() >= self._until
            if record.state != "left" or record.weight < self._least or late:
                return select(task)
            record.state = "failed"
            try:
                found = select(task, measure=True, record=record)
            except torch.OutOfMemoryError:
                return select(task)
            if database.find(task.key, current=True) is not None:
                record.state, record.after = "measured", str(found.candidate)
            return found

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


_active: TuneReport | None = None


def active() -> TuneReport | None:
    """The report of the step that is tuned in this process."""
    return _active


@contextmanager
def opened(report: TuneReport) -> Generator[None]:
    """Let a report answer all tasks within; one at a time is open."""
    global _active
    if _active is not None:
        raise RuntimeError("insum_nn.tune is running in this process already")
    _active = report
    try:
        yield
    finally:
        _active = None

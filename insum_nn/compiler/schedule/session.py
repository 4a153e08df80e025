"""What `insum_nn.tune` keeps of a step: the tuning tasks of its kernels, and which of them are measured next.

A first run of the step records each task and selects without measuring. Later runs measure the tasks that were
admitted, on the tensors of that run, so that no tensor is kept between runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch

from insum_nn.compiler.schedule import database
from insum_nn.compiler.schedule.select import Selected, Task, select
from insum_nn.locks import new_lock

__all__ = ["Session", "State", "TaskRecord", "active", "is_current", "opened"]

T = TypeVar("T")
State = Literal["stored", "left", "measured", "failed"]
# Seconds that a task is expected to take before any was measured.
_FIRST = 4.0


class _Tune(Protocol):
    def __call__(self, task: Task[T], *, again: bool = False) -> Selected[T] | None: ...


@dataclass
class TaskRecord:
    """A tuning task of a step.

    Attributes:
        key: of the database.
        weight: multiplications that depend on it.
        before: what was selected without measuring.
        state: "stored": measured before; "left": not measured; "measured"; "failed": no candidate ran, or there was no
            memory, or another process measured for too long.
        after: what was selected in the end.
        reason: why.
        before_us, after_us: microseconds of both; `None`: not measured.
        count: candidates that were measured.
        seconds: that it took.
    """

    key: Mapping[str, Any]
    weight: float
    before: object
    state: State
    after: object
    reason: str
    before_us: float | None = None
    after_us: float | None = None
    count: int = 0
    seconds: float = 0.0


class Session:
    """The tuning tasks of a step, by the digests of their keys.

    Attributes:
        records: every task.
    """

    def __init__(self) -> None:
        self.records: dict[str, TaskRecord] = {}
        self._admitted: set[str] = set()
        self._until = math.inf
        # Backward runs in threads of torch's own.
        self._lock = new_lock()

    @property
    def remaining(self) -> list[str]:
        """Tasks that were not measured, those on which most depends first."""
        remaining = [name for name, record in self.records.items() if record.state == "left"]
        return sorted(remaining, key=lambda name: -self.records[name].weight)

    @property
    def expected(self) -> float:
        """Seconds that a task is expected to take."""
        taken = [record.seconds for record in self.records.values() if record.state == "measured"]
        return sum(taken) / len(taken) if taken else _FIRST

    def admit(self, until: float) -> int:
        """Let the next run of the step measure what fits into the time until then; return how many those are."""
        count = max(1, int((until - time.perf_counter()) / max(self.expected, 1e-3)))
        self._admitted, self._until = set(self.remaining[:count]), until
        return len(self._admitted)

    def select(self, task: Task[T], weight: float, tune: _Tune) -> Selected[T]:
        """Select for a task, by measuring where it was admitted."""
        with self._lock:
            name = database.digest(task.key)
            record = self.records.get(name)
            if record is None:
                found = select(task, None)
                state: State = "stored" if is_current(task.key) else "left"
                self.records[name] = TaskRecord(task.key, weight, found.candidate, state, found.candidate, found.reason)
                return found
            # The first is measured whatever it takes: a budget that ends before it would never bring anything.
            done = any(each.state in ("measured", "failed") for each in self.records.values())
            if name not in self._admitted or (done and time.perf_counter() >= self._until):
                return select(task, None)
            self._admitted.discard(name)
            return self._measured(record, task, tune)

    def _measured(self, record: TaskRecord, task: Task[T], tune: _Tune) -> Selected[T]:
        begin = time.perf_counter()
        try:
            found = tune(task, again=True)
        except torch.OutOfMemoryError:
            found = None
        record.seconds = time.perf_counter() - begin
        if found is None or not is_current(task.key):
            record.state = "failed"
            return select(task, None)
        times = {repr(each.candidate): each.microseconds for each in reversed(found.measured)}
        record.state, record.after, record.reason, record.count = "measured", found.candidate, found.reason, len(times)
        record.before_us, record.after_us = times.get(repr(record.before)), times.get(repr(found.candidate))
        return found


def is_current(key: Mapping[str, Any]) -> bool:
    """Whether a key was measured with the versions of torch and Triton in use."""
    entry = database.find(key)
    return entry is not None and entry.current


_active: Session | None = None


def active() -> Session | None:
    """Return the session that is open in this process."""
    return _active


@contextmanager
def opened(session: Session) -> Generator[None]:
    """Let a session answer all tasks within; one at a time is open."""
    global _active
    if _active is not None:
        raise RuntimeError("insum_nn.tune is running in this process already")
    _active = session
    try:
        yield
    finally:
        _active = None

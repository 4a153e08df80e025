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

from insum_nn.compiler.tuning import database
from insum_nn.compiler.tuning.select import Selected, Task, select
from insum_nn.locks import new_lock

__all__ = ["Session", "State", "Tuned", "active", "is_current", "opened"]

T = TypeVar("T")
State = Literal["stored", "left", "measured", "failed"]
# Seconds that a task is expected to take before any was measured.
_FIRST = 4.0


class _Tune(Protocol):
    def __call__(self, task: Task[T], *, again: bool = False) -> Selected[T] | None: ...


@dataclass
class Tuned:
    """A tuning task of a step: a statement and its sizes.

    Attributes:
        key: of the database.
        weight: multiplications that depend on it.
        before: what was selected without measuring.
        state: "measured" now; "stored": measured before; "left": there was no time; "failed": no candidate ran, there
            was not enough memory, or another process measured for too long.
        after: what is used from now on.
        reason: why.
        before_us: microseconds of what was used before; `None`: not measured.
        after_us: microseconds of what is used from now on.
        candidates: how many were measured.
        seconds: that measuring took.
    """

    key: Mapping[str, Any]
    weight: float
    before: object
    state: State
    after: object
    reason: str
    before_us: float | None = None
    after_us: float | None = None
    candidates: int = 0
    seconds: float = 0.0

    @property
    def statement(self) -> str:
        """The statement in canonical names."""
        return str(self.key["statement"])

    @property
    def gain(self) -> float:
        """How many times as fast as before it is; 1.0 where that was not measured."""
        return self.before_us / self.after_us if self.before_us and self.after_us else 1.0

    def __str__(self) -> str:
        sizes = ",".join(f"2^{size}" for size in self.key["bucket"])
        head = f"{self.statement} [{sizes}] {self.key['dtype']}: "
        if self.before_us is None or self.after_us is None:
            return f"{head}{self.state}"
        times = f"{self.before_us:.1f} us before, {self.after_us:.1f} now ({self.gain:.2f} times as fast)"
        return f"{head}{times}: {self.after if self.key['kind'] == 'schedule' else self.reason}"


class Session:
    """The tuning tasks of a step, by the digests of their keys.

    Attributes:
        records: every task.
    """

    def __init__(self) -> None:
        self.records: dict[str, Tuned] = {}
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
                self.records[name] = Tuned(task.key, weight, found.candidate, state, found.candidate, found.reason)
                return found
            # The first is measured whatever it takes: a budget that ends before it would never bring anything.
            done = any(each.state in ("measured", "failed") for each in self.records.values())
            if name not in self._admitted or (done and time.perf_counter() >= self._until):
                return select(task, None)
            self._admitted.discard(name)
            return self._measured(record, task, tune)

    def _measured(self, record: Tuned, task: Task[T], tune: _Tune) -> Selected[T]:
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
        record.state, record.candidates = "measured", len(times)
        record.after, record.reason = found.candidate, found.reason
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

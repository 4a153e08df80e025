"""What `insum_nn.tune` keeps of a step: the questions that its kernels asked, and which of them are measured next.

A first run of the step notes each question and answers it without measuring. Later runs measure the questions that were
let through, on the tensors of that run, so that no tensor is kept between runs.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch

from insum_nn.compiler.schedule import database
from insum_nn.compiler.schedule.select import Question, Selected, select

__all__ = ["Asked", "Session", "State", "active", "is_current", "opened"]

T = TypeVar("T")
State = Literal["known", "left", "measured", "failed"]
# Seconds that a question is expected to take before any was measured.
_FIRST = 4.0


class _Tune(Protocol):
    def __call__(self, question: Question[T], *, again: bool = False) -> Selected[T] | None: ...


@dataclass
class Asked:
    """A question of a step.

    Attributes:
        key: of the database.
        weight: about how many microseconds depend on it.
        before: what was selected without measuring.
        state: "known": measured before; "left": not measured; "measured"; "failed": no candidate ran, or there was no
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
    """The questions of a step, by the digests of their keys.

    Attributes:
        asked: every question.
        place: which of how many is measured now, for messages.
    """

    def __init__(self) -> None:
        self.asked: dict[str, Asked] = {}
        self.place = ""
        self._through: set[str] = set()
        self._until = math.inf
        # Backward runs in threads of torch's own.
        self._lock = threading.RLock()

    @property
    def left(self) -> list[str]:
        """Questions that were not measured, those on which most depends first."""
        left = [name for name, asked in self.asked.items() if asked.state == "left"]
        return sorted(left, key=lambda name: -self.asked[name].weight)

    @property
    def expected(self) -> float:
        """Seconds that a question is expected to take."""
        taken = [asked.seconds for asked in self.asked.values() if asked.state == "measured"]
        return sum(taken) / len(taken) if taken else _FIRST

    def let_through(self, until: float) -> int:
        """Let the next run of the step measure what fits into the time until then; return how many those are."""
        count = max(1, int((until - time.perf_counter()) / max(self.expected, 1e-3)))
        self._through, self._until = set(self.left[:count]), until
        return len(self._through)

    def ask(self, question: Question[T], weight: Callable[[T], float], tune: _Tune) -> Selected[T]:
        """Answer a question, by measuring where it was let through."""
        with self._lock:
            name = database.digest(question.key)
            asked = self.asked.get(name)
            if asked is None:
                found = select(question, None)
                state: State = "known" if is_current(question.key) else "left"
                self.asked[name] = Asked(
                    question.key, weight(found.candidate), found.candidate, state, found.candidate, found.reason
                )
                return found
            # The first is measured whatever it takes: a budget that ends before it would never bring anything.
            done = any(each.state in ("measured", "failed") for each in self.asked.values())
            if name not in self._through or (done and time.perf_counter() >= self._until):
                return select(question, None)
            self._through.discard(name)
            return self._measured(asked, question, tune)

    def _measured(self, asked: Asked, question: Question[T], tune: _Tune) -> Selected[T]:
        done = sum(each.state in ("measured", "failed") for each in self.asked.values())
        waiting = len(self._through) + 1
        self.place = f"{done + 1} of {done + waiting}, about {waiting * self.expected:.0f} s left:"
        begin = time.perf_counter()
        try:
            found = tune(question, again=True)
        except torch.OutOfMemoryError:
            found = None
        asked.seconds = time.perf_counter() - begin
        if found is None or not is_current(question.key):
            asked.state = "failed"
            return select(question, None)
        times = {repr(each.candidate): each.microseconds for each in reversed(found.measured)}
        asked.state, asked.after, asked.reason, asked.count = "measured", found.candidate, found.reason, len(times)
        asked.before_us, asked.after_us = times.get(repr(asked.before)), times.get(repr(found.candidate))
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
    """Let a session answer all questions within; one at a time is open."""
    global _active
    if _active is not None:
        raise RuntimeError("insum_nn.tune is running in this process already")
    _active = session
    try:
        yield
    finally:
        _active = None

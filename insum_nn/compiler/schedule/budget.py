"""The tuning budget: how long a process measures all candidates of every statement and size.

The first statements are tuned among all candidates. When the budget is spent, those that follow are tuned among what
was fastest for the same statement in other sizes: a network of many sizes would wait minutes for a few percent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["forget", "granted", "left", "spending", "spent"]

# Seconds that a process tunes in full.
_BUDGET = 60.0
_limit = _BUDGET
_spent = 0.0
_lock = threading.Lock()


def spent() -> float:
    """Return the seconds that went into tuning."""
    return _spent


def left() -> float:
    """Return the seconds for which tuning goes on in full."""
    return max(0.0, _limit - _spent)


@contextmanager
def spending() -> Generator[None]:
    """Count the time of what is done within."""
    global _spent
    begin = time.perf_counter()
    try:
        yield
    finally:
        with _lock:
            _spent += time.perf_counter() - begin


@contextmanager
def granted(seconds: float) -> Generator[None]:
    """Let the process tune in full for so many seconds within, whatever it spent before."""
    global _limit, _spent
    before = _limit, _spent
    _limit, _spent = seconds, 0.0
    try:
        yield
    finally:
        _limit, _spent = before


def forget() -> None:
    """Restore the whole budget."""
    global _spent
    _spent = 0.0

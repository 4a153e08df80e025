"""How long a process searches in full: a network of many sizes would wait minutes for what differs by a few percent.

The first statements are searched among all candidates. When that has taken as long as anyone likes to wait, those that
follow are searched among what did best for the same statement in other sizes, and nothing is compiled that would only
be compared.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["forget", "left", "spending", "spent"]

# Seconds that a process searches in full.
_PATIENCE = 60.0
_spent = 0.0


def spent() -> float:
    """Seconds that went into searches."""
    return _spent


def left() -> float:
    """Seconds for which searches go on in full."""
    return max(0.0, _PATIENCE - _spent)


@contextmanager
def spending() -> Generator[None]:
    """Count the time of what is done within."""
    global _spent
    begin = time.perf_counter()
    try:
        yield
    finally:
        _spent += time.perf_counter() - begin


def forget() -> None:
    """Begin anew."""
    global _spent
    _spent = 0.0

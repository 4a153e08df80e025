"""Locks, and cached properties, that a forked process never finds taken by a thread that it does not have."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

__all__ = ["cached_property", "new_lock"]

T = TypeVar("T")
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> threading.RLock:
    """Return a reentrant lock that is released in a forked process, unless the thread that forks holds it.

    What it guards must be valid whenever another thread may run: the others end in the middle of what they do.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


class cached_property(functools.cached_property[T]):
    """`functools.cached_property` without the lock that all instances of a class share before Python 3.12.

    Threads that ask at once may each compute the value, and one of the values is kept.
    """

    def __init__(self, func: Callable[[Any], T]) -> None:
        super().__init__(func)
        self.lock = nullcontext()


def _in_child() -> None:
    for lock in _locks:
        if not lock._is_owned():
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)

"""Values that are built where they are missing: each once, and without a lock held while it is built."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic, TypeVar

__all__ = ["BuildOnce", "CacheKey", "shared_key"]

T = TypeVar("T")


class CacheKey:
    """What a value depends on; to hash all of it at each look-up would cost more than the look-up."""

    __slots__ = ("_hash", "parts")

    def __init__(self, parts: tuple[object, ...]) -> None:
        self.parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CacheKey) and self.parts == other.parts


def shared_key(*parts: object) -> CacheKey:
    """Return the same key for equal parts: a look-up by another one would compare whole statements.

    >>> shared_key(1, "a") is shared_key(1, "a")
    True
    """
    return _same(CacheKey(parts))


@lru_cache(maxsize=4096)
def _same(key: CacheKey) -> CacheKey:
    return key


@dataclass(frozen=True, slots=True)
class _Flight:
    """A value that a thread is building."""

    thread: int = field(default_factory=threading.get_ident)
    over: threading.Event = field(default_factory=threading.Event)


class BuildOnce(Generic[T]):
    """Builds values by key. Threads that want the same key wait for the one that builds it, others do not.

    >>> cache = {}
    >>> building = BuildOnce()
    >>> building.get("a", lambda: cache.get("a"), lambda: cache.setdefault("a", 1))
    1
    """

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, find: Callable[[], T | None], build: Callable[[], T]) -> T:
        """Return a value.

        Args:
            key: what of all that is built here.
            find: looks it up; `None` where it is missing.
            build: builds it and puts it where `find` looks. If that fails, the next thread that waits tries itself.
        """
        while True:
            found = find()
            if found is not None:
                return found
            own = _Flight()
            with self._lock:
                flight = self._flights.setdefault(key, own)
            if flight is own:
                try:
                    # Another thread may have built it since the first look.
                    found = find()
                    return build() if found is None else found
                finally:
                    with self._lock:
                        del self._flights[key]
                    own.over.set()
            if flight.thread == own.thread:
                # Needed by what builds it: waiting would never end.
                return build()
            flight.over.wait()

"""Values that are built where they are missing: each once, and without a lock that others wait for."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from insum_nn.locks import new_lock

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


class BuildOnce(Generic[T]):
    """Builds values by key. Threads that want the same key wait for the one that builds it, others do not.

    >>> cache = {}
    >>> building = BuildOnce()
    >>> building.get("a", lambda: cache.get("a"), lambda: cache.setdefault("a", 1))
    1
    """

    def __init__(self) -> None:
        # Of what is being built now. Reentrant: a value may be needed by what builds it.
        self._locks: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()
        self._lock = new_lock()

    def get(self, key: Hashable, find: Callable[[], T | None], build: Callable[[], T]) -> T:
        """Return a value.

        Args:
            key: what of all that is built here.
            find: looks it up; `None` where it is missing.
            build: builds it and puts it where `find` looks. If that fails, the next thread that waits tries itself.
        """
        found = find()
        if found is not None:
            return found
        with self._lock:
            own = self._locks.setdefault(key, new_lock())
        with own:
            # Another thread may have built it in the meantime.
            found = find()
            return build() if found is None else found

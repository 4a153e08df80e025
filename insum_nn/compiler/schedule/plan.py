"""What was decided for a statement, on disk: a later process builds no algorithm, selects nothing and writes no text.

A file of the cache folder holds it by name, for one canonical statement and bucket of sizes, one version of torch and
Triton, and one state of the compiler's own files. What is not found there is made, and noted. Files of other versions
and states are deleted `_DAYS` after they were written, by the first process that writes then. Decisions are pickled: as
texts of kernels are among them, which are run, no other folder is read than one of this user alone.
"""

from __future__ import annotations

import functools
import hashlib
import json
import pickle
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from insum_nn.compiler.tuning.cache_folder import read, remove, sealed, times, unsealed, write
from insum_nn.compiler.tuning.database import digest, versions
from insum_nn.locks import cached_property, new_lock
from insum_nn.version import __version__

__all__ = ["NO_PLAN", "Plan", "keep_plans"]

T = TypeVar("T")
_changed: dict[Plan, None] = {}
_lock = new_lock()
_DAYS = 30
_cleared = False


@functools.cache
def _compiler() -> str:
    """A digest of all files on which a decision may depend."""
    root = Path(__file__).parents[2]
    found = hashlib.sha256()
    for file in sorted([*root.glob("*.py"), *root.glob("compiler/**/*.py")]):
        text = file.read_bytes()
        found.update(f"{file.relative_to(root)} {len(text)}\n".encode() + text)
    return found.hexdigest()


def _state() -> str:
    """What all decisions of this process depend on, whatever they are about: a digest that begins a file's name."""
    return digest([versions(), __version__, _compiler()])[:16]


class Plan:
    """Decisions by name, about what a key says.

    Args:
        key: JSON of all that they depend on, apart from their names; `None`: they are neither looked for nor noted.
    """

    def __init__(self, key: Mapping[str, Any] | None) -> None:
        self.key = key

    @cached_property
    def _text(self) -> str:
        return json.dumps([self.key, versions(), __version__, _compiler()], sort_keys=True)

    @cached_property
    def _decisions(self) -> dict[Hashable, Any]:
        return self._read()

    def at(self, **more: Any) -> Plan:
        """The plan of a key with more, or other, entries."""
        if self.key is None or all(name in self.key and self.key[name] == value for name, value in more.items()):
            return self
        return Plan({**self.key, **more})

    def get(self, name: Hashable, make: Callable[[], T]) -> T:
        """Return a stored decision, or make and store it; callers must not modify it."""
        if self.key is None:
            return make()
        if name not in self._decisions:
            self._decisions[name] = make()
            with _lock:
                _changed[self] = None
        return self._decisions[name]  # type: ignore[no-any-return]

    @property
    def _name(self) -> str:
        return f"{_state()}-{digest(self._text)}"

    def _read(self) -> dict[Hashable, Any]:
        """What is on disk; nothing if that is damaged, or was written for another key."""
        # What is whole was written by `write`.
        data = unsealed(read("plans", self._name))
        key, found = ("", {}) if data is None else pickle.loads(data)
        return found if key == self._text else {}

    def write(self) -> None:
        """Write it to disk, with what another process noted in the meantime."""
        if write("plans", self._name, sealed(pickle.dumps((self._text, {**self._read(), **self._decisions})))):
            _clear()


def _clear() -> None:
    """Delete old files of other versions and states, once in a process: one that finds a file gone plans again."""
    global _cleared
    if not _cleared:
        _cleared = True
        own, oldest = _state(), (time.time() - _DAYS * 86_400) * 1e9
        remove("plans", [name for name, when in times("plans").items() if when < oldest and not name.startswith(own)])


NO_PLAN = Plan(None)


def keep_plans() -> None:
    """Write to disk what was noted since."""
    while True:
        with _lock:
            if not _changed:
                return
            plan, _ = _changed.popitem()
        plan.write()

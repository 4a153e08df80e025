"""Selection: what was measured for a bucket of sizes, or is measured now; else the nearest bucket; else a rule.

A `Task` says what is to be selected. This file reads the database and never measures; `schedule.tune` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from insum_nn.compiler.tuning import database

__all__ = ["Measured", "Measurement", "Selected", "Task", "nearest", "select", "stored"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Measurement(Generic[T]):
    """What a candidate took, in microseconds, further launches counted; infinite where it did not run."""

    candidate: T
    microseconds: float


@dataclass(frozen=True, slots=True)
class Selected(Generic[T]):
    """A candidate, why it was selected, and what was measured now, the fastest first."""

    candidate: T
    reason: str
    measured: tuple[Measurement[T], ...] = ()


@dataclass(frozen=True, slots=True)
class Measured(Generic[T]):
    """What measuring found, and the value under which the database keeps it; `None`: it is not kept."""

    selected: Selected[T]
    value: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Task(Generic[T]):
    """What is to be selected for a statement, a bucket of sizes and a device.

    Attributes:
        key: of the measurement in the database.
        rule: selects without any measurement.
        decode: reads a stored value, with a text that says where it is from. It raises one of
            `database.UNREADABLE` where the value makes no sense.
        runs: whether what was measured with other versions of torch and Triton runs here.
        measure: measures the candidates.
    """

    key: database.Key
    rule: Callable[[], Selected[T]]
    decode: Callable[[Mapping[str, Any], str], Selected[T]]
    measure: Callable[[], Measured[T]]
    runs: Callable[[T], bool] = lambda _: True


def stored(task: Task[T]) -> Selected[T] | None:
    """Return what was measured for this bucket of sizes, here or elsewhere."""
    return _read(task, database.find(task.key), "")


def nearest(task: Task[T]) -> Selected[T] | None:
    """Return what was measured for products of full precision, else for half or twice as many rows."""
    found = _read(task, database.in_full_precision(task.key), ", for products of full precision")
    return found or _read(task, database.near(task.key), ", for half or twice as many rows")


def _read(task: Task[T], entry: database.Entry | None, where: str) -> Selected[T] | None:
    if entry is None:
        return None
    try:
        found = task.decode(entry.value, f"{entry.origin()}{where}")
    except database.UNREADABLE as error:
        entry.broken(error)
        return None
    return found if entry.current or task.runs(found.candidate) else None


def select(task: Task[T], tune: Callable[[Task[T]], Selected[T] | None] | None) -> Selected[T]:
    """Return the first there is: stored for this bucket, measured now, stored for the nearest bucket, the rule's.

    Args:
        task: what is to be selected.
        tune: measures it; `None`: nothing is measured. It returns `None` where another process measures for too long,
            of which the reason then tells.
    """
    found = stored(task)
    late = False
    if found is None and tune is not None:
        found = tune(task)
        late = found is None
    if found is None:
        found = nearest(task) or task.rule()
        if late:
            found = replace(found, reason=f"{found.reason}; another process measures, and was not done in time")
    return found

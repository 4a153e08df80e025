"""What a call runs, for `explain()`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["Description", "Printed"]

Choice = tuple[str, str, str]


class Printed(Protocol):
    """Something whose code can be shown."""

    @property
    def text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Description:
    """What a call runs, and why.

    Attributes:
        schedule: how it is carried out; of a kernel, how it spreads over programs and lanes.
        sources: functions or kernels, in order.
        choices: topic, choice and reason of every choice.
        torch_code: library calls; of functions and kernels what is around them.
    """

    schedule: str | None = None
    sources: tuple[Printed, ...] = ()
    choices: tuple[Choice, ...] = ()
    torch_code: str | None = None

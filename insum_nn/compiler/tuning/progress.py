"""The progress of tuning: a bar on a terminal where tqdm is installed, and the log."""

from __future__ import annotations

import logging
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Self

__all__ = ["Progress"]

_log = logging.getLogger("insum_nn.tuning")


class Progress:
    """Show `total` steps of something that takes seconds: a bar that disappears, and two log lines.

    Args:
        what: what is being done.
        total: number of steps.

    >>> with Progress("tuning nothing", 2) as progress:
    ...     progress.step()
    """

    def __init__(self, what: str, total: int) -> None:
        self.what = " ".join(what.split())
        self.total = total
        self.done = 0
        self.result = ""
        self._bar: Any = None
        self._begin = time.perf_counter()

    def __enter__(self) -> Self:
        _log.info("%s: %d candidates", self.what, self.total)
        # A user's own bar may be on the screen: tqdm knows of it, and a line of ours would overwrite it.
        if sys.stderr.isatty() and find_spec("tqdm") is not None:
            self._bar = import_module("tqdm").tqdm(total=self.total, desc=self.what, leave=False, unit="kernel")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        seconds = time.perf_counter() - self._begin
        outcome = self.result if error is None else f"failed: {error}"
        _log.info("%s: %d of %d in %.1f s; %s", self.what, self.done, self.total, seconds, outcome)

    def step(self, count: int = 1) -> None:
        """Count steps as done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)

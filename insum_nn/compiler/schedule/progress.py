"""The progress of tuning: one passing line on a terminal, and the log."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Self

__all__ = ["Progress"]

_log = logging.getLogger("insum_nn.tuning")


class Progress:
    """Show `total` steps of something that takes seconds: a line that disappears on a terminal, and two log lines.

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
        self._width = 0
        self._begin = time.perf_counter()

    def __enter__(self) -> Self:
        _log.info("%s: %d candidates", self.what, self.total)
        if sys.stderr.isatty():
            # A user's own bar may be on the screen: tqdm knows of it, and a line of ours would overwrite it.
            if find_spec("tqdm") is not None:
                self._bar = import_module("tqdm").tqdm(total=self.total, desc=self.what, leave=False, unit="kernel")
            else:
                self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
        seconds = time.perf_counter() - self._begin
        outcome = self.result if error is None else f"failed: {error}"
        _log.info("%s: %d of %d in %.1f s; %s", self.what, self.done, self.total, seconds, outcome)

    def step(self, count: int = 1) -> None:
        """Count steps as done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._width:
            self._show()

    def _show(self) -> None:
        room = max(20, shutil.get_terminal_size().columns - 1)
        count = f" {self.done} of {self.total}"
        line = self.what[: room - len(count)] + count
        sys.stderr.write("\r" + line.ljust(self._width))
        sys.stderr.flush()
        self._width = max(self._width, len(line))

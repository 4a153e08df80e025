"""The progress of tuning: a bar on a terminal where tqdm is installed, and the log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["progress"]

_log = logging.getLogger("insum_nn.tuning")


@contextmanager
def progress(what: str, total: int) -> Generator[Callable[[], None]]:
    """Show `total` steps of something that takes seconds: a bar that disappears, and two log lines.

    Args:
        what: what is being done.
        total: number of steps.

    Yields:
        What counts one step as done.

    >>> with progress("tuning nothing", 2) as step:
    ...     step()
    """
    what, begin, done = " ".join(what.split()), time.perf_counter(), 0
    _log.info("%s: %d candidates", what, total)
    bar: Any = None
    # A user's own bar may be on the screen: tqdm knows of it, and a line of ours would overwrite it.
    if sys.stderr.isatty() and find_spec("tqdm") is not None:
        bar = import_module("tqdm").tqdm(total=total, desc=what, leave=False, unit="kernel")

    def step() -> None:
        nonlocal done
        done += 1
        if bar is not None:
            bar.update()

    try:
        yield step
    finally:
        if bar is not None:
            bar.close()
        _log.info("%s: %d of %d in %.1f s", what, done, total, time.perf_counter() - begin)

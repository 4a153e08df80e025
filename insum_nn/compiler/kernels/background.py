"""Kernels compiled in the background of a first step: by other processes, while this one compiles what it needs next.

Until a process has compiled two kernels, nothing of this happens: most processes find theirs on disk, and some need
only one. A kernel whose turn has not come when it is needed is compiled by who needs it, and so is one whose process
ended.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
from collections.abc import Iterable

from insum_nn.compiler.kernels.ahead import Worker, processors
from insum_nn.compiler.kernels.machine_code import KernelCode, to_json
from insum_nn.compiler.kernels.stored_code import remember_code

__all__ = ["Background", "cold", "default_background_workers", "missed", "prepared", "submit", "take"]

# Processes at most, and processors from which on there are some.
_MOST, _FEWEST_PROCESSORS = 8, 3
# Seconds without work after which a process ends, and for which one kernel is waited for.
_IDLE, _LONGEST = 10.0, 60.0


def default_background_workers() -> int:
    """Processes that compile in the background: all processors of this rank but its own; none where there are few."""
    asked = os.environ.get("INSUM_NN_COMPILE_WORKERS", "")
    if asked.isdecimal():
        return int(asked)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    own = processors() // max(1, int(ranks) if ranks.isdecimal() else 1)
    return min(own - 1, _MOST) if own >= _FEWEST_PROCESSORS else 0


class Background:
    """Kernels that other processes compile for the cache on disk.

    Args:
        most: processes.

    Attributes:
        missing: kernels that this process did not find on disk.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.missing = 0
        self._known: set[KernelCode] = set()
        self._waiting: dict[KernelCode, None] = {}
        self._running: dict[KernelCode, threading.Event] = {}
        self._workers: set[Worker] = set()
        self._threads = 0
        self._changed = threading.Condition()

    def missed(self) -> None:
        """Note that this process compiles a kernel itself."""
        with self._changed:
            self.missing += 1
            self._start()

    def submit(self, codes: Iterable[KernelCode]) -> None:
        """Have kernels compiled, unless they were named before; the last ones first, as backward needs them first."""
        with self._changed:
            for code in codes:
                if code not in self._known:
                    self._known.add(code)
                    self._waiting[code] = None
            self._start()
            self._changed.notify_all()

    def take(self, code: KernelCode) -> None:
        """Return when this process may load or compile a kernel: no other compiles it, or the wait was too long."""
        with self._changed:
            self._known.add(code)
            self._waiting.pop(code, None)
            running = self._running.get(code)
        if running is not None:
            running.wait(_LONGEST)

    def close(self) -> None:
        """End all processes at once."""
        with self._changed:
            self._waiting.clear()
            for worker in self._workers:
                worker.process.kill()

    def _start(self) -> None:
        if self.missing < 2:
            return
        for _ in range(min(self.most, len(self._waiting) + len(self._running)) - self._threads):
            self._threads += 1
            # What waits for a process must not keep this one from ending.
            threading.Thread(target=self._work, name="insum_nn_compile", daemon=True).start()

    def _work(self) -> None:
        """Have one process compile what waits, until nothing comes any more or the process ends."""
        worker: Worker | None = None
        try:
            # Interrupted or not, the step decides; what a compiler prints, the step's own attempt prints again.
            worker = Worker(stderr=subprocess.DEVNULL, start_new_session=True)
            with self._changed:
                self._workers.add(worker)
            if worker.ask("") is None:
                return
            while (code := self._next()) is not None:
                try:
                    answer = worker.ask(to_json(code))
                    if answer is None:
                        return
                    if "hash" in answer:
                        remember_code(code, answer["hash"])
                finally:
                    with self._changed:
                        self._running.pop(code).set()
        except OSError:
            # No process, or no pipe: the step compiles its kernels itself.
            return
        finally:
            with self._changed:
                self._threads -= 1
                if worker is not None:
                    self._workers.discard(worker)
            if worker is not None:
                worker.close()

    def _next(self) -> KernelCode | None:
        with self._changed:
            if not self._waiting:
                self._changed.wait_for(lambda: bool(self._waiting), _IDLE)
            if not self._waiting:
                return None
            code, _ = self._waiting.popitem()
            self._running[code] = threading.Event()
            return code


class _Cold:
    """What a recorded call looks at after it ran.

    Attributes:
        due: it needed a kernel that was not there, so what its gradients need is not there either.
    """

    __slots__ = ("due",)

    def __init__(self) -> None:
        self.due = False


cold = _Cold()
_background: Background | None = None
_lock = threading.Lock()


def missed() -> None:
    """Note that this process compiles a kernel that was not on disk."""
    global _background
    with _lock:
        if _background is None:
            _background = Background(default_background_workers())
            atexit.register(_background.close)
    cold.due = _background.most > 0
    _background.missed()


def prepared() -> None:
    """Note that a statement was prepared for sizes that it had not met: its gradients are, too, where kernels miss."""
    if _background is not None:
        cold.due = _background.most > 0


def submit(codes: Iterable[KernelCode]) -> None:
    """Have kernels compiled that a later call needs."""
    if _background is not None:
        _background.submit(codes)


def take(code: KernelCode) -> None:
    """Return when this process may load or compile a kernel."""
    if _background is not None:
        _background.take(code)


def _in_child() -> None:
    """Threads do not survive a fork, and the processes are the parent's."""
    global _background, _lock
    if _background is not None:
        atexit.unregister(_background.close)
    _background, _lock, cold.due = None, threading.Lock(), False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)

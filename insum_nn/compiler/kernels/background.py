"""Kernels compiled by other processes: all of a step before it runs, or while a first step goes on.

Triton holds the interpreter's lock for a part of each compilation, and a kernel takes 0.2 to 2 s. Processes that import
nothing but Triton share neither the lock nor the device; what they compile is found in Triton's cache on disk.

In a first step nothing of this happens until a kernel is known to be missing: most processes find theirs on disk.
A call whose kernel is missing falls back to library calls, so that the kernels of later calls are requested too and all
are compiled in parallel. A kernel that is still in the queue when a call waits for it is compiled by the process that
needs it, and so is one whose worker process ended.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from insum_nn.compiler.kernels import machine_code
from insum_nn.compiler.kernels.machine_code import KernelCode
from insum_nn.compiler.kernels.stored_code import is_storable, is_stored, remember_code
from insum_nn.locks import new_lock

__all__ = [
    "Background",
    "Compiled",
    "NotCompiledYetError",
    "Worker",
    "compile_all",
    "default_background_workers",
    "default_workers",
    "processors",
    "run_or_compile",
    "settle",
    "shared",
    "take",
]

T = TypeVar("T")
# Processes at most: of more than 16 kernels few networks are made. In a first step, processors from which on there are
# some.
_MOST, _MOST_OF_STEPS, _FEWEST_PROCESSORS = 16, 12, 3
# Seconds without work after which a process ends, and for which one kernel is waited for.
_IDLE, _LONGEST = 10.0, 60.0


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers(kernels: int) -> int:
    """Processes for so many kernels: no more than processors that this one may use."""
    return max(1, min(kernels, processors(), _MOST))


def default_background_workers() -> int:
    """Processes that compile in the background: all processors of this rank but its own; none where there are few."""
    requested = os.environ.get("INSUM_NN_COMPILE_WORKERS", "")
    if requested.isdecimal():
        return int(requested)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    own = processors() // max(1, int(ranks) if ranks.isdecimal() else 1)
    return min(own - 1, _MOST_OF_STEPS) if own >= _FEWEST_PROCESSORS else 0


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of one kernel.

    Attributes:
        code: the kernel.
        found: the machine code was on disk.
        error: why there is no machine code; empty where there is.
    """

    code: KernelCode
    found: bool
    error: str = ""


class Worker:
    """A process that compiles kernels one after the other.

    Raises:
        OSError: it could not be started.
    """

    process: subprocess.Popen[str]

    def __init__(self, **streams: Any) -> None:
        self._streams = streams
        self._start()

    def _start(self) -> None:
        self.process = subprocess.Popen(
            # -P: a script's folder would come first among the places of modules, and ours has a `numbers`.
            [sys.executable, "-P", machine_code.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            **self._streams,
        )
        # From its answer on a kernel takes what it takes to compile.
        if self._ask(json.dumps(sys.path)) is None:
            self.close()
            raise OSError("the process ended")

    def compile(self, code: KernelCode) -> Compiled:
        """Compile a kernel; a process that ended over another one is started again."""
        if self.process.poll() is not None:
            self.close()
            self._start()
        answer = self._ask(machine_code.to_line(code))
        if answer is None:
            answer = {"error": f"the process that compiled it ended with status {self.process.wait()}"}
        if "hash" in answer:
            remember_code(code, answer["hash"])
        return Compiled(code, bool(answer.get("found")), str(answer.get("error", "")))

    def _ask(self, line: str) -> dict[str, Any] | None:
        """The answer to a line; `None`: the process has ended."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(line + "\n")
            stdin.flush()
            answer = stdout.readline()
        except BrokenPipeError:
            return None
        return json.loads(answer) if answer.endswith("\n") else None

    def close(self) -> None:
        """End the process, after the kernel that it compiles."""
        try:
            self.process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


def _nothing(_: Compiled) -> None: ...


class Background:
    """Kernels that other processes compile for the cache on disk.

    Args:
        most: processes.
        done: called with what became of each, by several threads.
        **streams: of the processes, as `subprocess.Popen` takes them.
    """

    def __init__(self, most: int, done: Callable[[Compiled], object] = _nothing, **streams: Any) -> None:
        self.most, self._done, self._streams = most, done, streams
        self._known: set[KernelCode] = set()
        self._waiting: dict[KernelCode, None] = {}
        self._running: dict[KernelCode, threading.Event] = {}
        self._workers: set[Worker] = set()
        self._threads = 0
        self._changed = threading.Condition()

    def submit(self, codes: Iterable[KernelCode]) -> None:
        """Have kernels compiled that are not on disk, unless they were named before."""
        self.add([code for code in codes if code not in self._known and not is_stored(code)])

    @property
    def requested(self) -> int:
        """How many kernels were needed that were not on disk."""
        return len(self._known)

    def add(self, codes: Iterable[KernelCode]) -> None:
        """Have kernels compiled, unless they were named before."""
        with self._changed:
            self._waiting.update(dict.fromkeys(code for code in codes if code not in self._known))
            self._known.update(self._waiting)
            self._start()
            self._changed.notify_all()

    def drop(self, codes: Iterable[KernelCode]) -> None:
        """Forget kernels whose turn has not come."""
        with self._changed:
            for code in codes:
                self._waiting.pop(code, None)

    def take(self, code: KernelCode) -> None:
        """Return when this process may load or compile a kernel: no other compiles it, or the wait was too long."""
        with self._changed:
            self._known.add(code)
            self._waiting.pop(code, None)
            running = self._running.get(code)
        if running is not None:
            running.wait(_LONGEST)

    def settle(self, seconds: float | None) -> bool:
        """Wait until nothing is compiled any more; `False`: that takes longer."""
        with self._changed:
            # If no worker process could be started, queued kernels stay queued, and are not waited for.
            return self._changed.wait_for(lambda: not self._running and not (self._waiting and self._threads), seconds)

    def close(self) -> None:
        """End all processes at once."""
        with self._changed:
            self._waiting.clear()
            self.most = 0
            self._changed.notify_all()
            for worker in self._workers:
                worker.process.kill()

    def _start(self) -> None:
        for _ in range(min(self.most, len(self._waiting) + len(self._running)) - self._threads):
            self._threads += 1
            # What waits for a process must not keep this one from ending.
            threading.Thread(target=self._work, name="insum_nn_compile", daemon=True).start()

    def _work(self) -> None:
        """Have one process compile what waits, until nothing comes any more or no process can be started."""
        worker: Worker | None = None
        try:
            worker = Worker(**self._streams)
            with self._changed:
                self._workers.add(worker)
            while (code := self._next()) is not None:
                try:
                    self._done(worker.compile(code))
                finally:
                    with self._changed:
                        self._running.pop(code).set()
                        self._changed.notify_all()
        except OSError:
            # No process, or no pipe: the step compiles its kernels itself.
            return
        finally:
            with self._changed:
                self._threads -= 1
                if worker is not None:
                    self._workers.discard(worker)
                    # A kernel may have come since this thread found none.
                    self._start()
                self._changed.notify_all()
            if worker is not None:
                worker.close()

    def _next(self) -> KernelCode | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self.most, _IDLE)
            if not self._waiting:
                return None
            # All wait for the last to end.
            code = max(self._waiting, key=lambda each: each.effort)
            del self._waiting[code]
            self._running[code] = threading.Event()
            return code


def compile_all(
    codes: Sequence[KernelCode],
    workers: int,
    seconds: float | None = None,
    step: Callable[[Compiled], object] = _nothing,
) -> list[Compiled]:
    """Compile kernels in processes of their own, for the cache on disk.

    Args:
        codes: the kernels; those that take longest begin first, since all wait for the last to end.
        workers: number of processes.
        seconds: after which none begins; each process compiles one all the same.
        step: called after each.
    """
    found: dict[KernelCode, Compiled] = {}

    def done(compiled: Compiled) -> None:
        found[compiled.code] = compiled
        step(compiled)

    pool = Background(workers, done)
    try:
        pool.add(codes)
        if not pool.settle(seconds):
            pool.drop(sorted(codes, key=lambda code: -code.effort)[workers:])
            pool.settle(None)
    finally:
        pool.close()
    return [found.get(code) or Compiled(code, False, "there was no process or no time") for code in codes]


class NotCompiledYetError(Exception):
    """Other processes compile a kernel that a call needs, and the call has a fallback."""


class _OfThread(threading.local):
    """Whether what this thread calls now has a fallback."""

    has_fallback = False


_of_thread = _OfThread()
_background: Background | None = None
_lock = new_lock()


def run_or_compile(run: Callable[[], T]) -> T | None:
    """Run what launches kernels; `None`: some are not on disk, and other processes compile the first of these now."""
    before, _of_thread.has_fallback = _of_thread.has_fallback, shared().most > 0
    try:
        return run()
    except NotCompiledYetError:
        return None
    finally:
        _of_thread.has_fallback = before


def take(code: KernelCode) -> None:
    """Return when this process may load or compile a kernel that is not on disk.

    Raises:
        NotCompiledYetError: other processes were requested to, as the call has a fallback; see `run_or_compile`.
    """
    if _of_thread.has_fallback and is_storable(code):
        shared().submit([code])
        raise NotCompiledYetError
    shared().take(code)


def shared() -> Background:
    """Return the one whose processes compile for all threads of this one."""
    global _background
    with _lock:
        if _background is None:
            # Interrupted or not, the step decides; what a compiler prints, the step's own attempt prints again.
            _background = Background(default_background_workers(), stderr=subprocess.DEVNULL, start_new_session=True)
            atexit.register(_background.close)
    return _background


def settle(seconds: float) -> bool:
    """Wait until no other process compiles for this one; `False`: that takes longer."""
    return _background is None or _background.settle(seconds)


def _in_child() -> None:
    """Threads do not survive a fork, and the processes are the parent's."""
    global _background
    if _background is not None:
        atexit.unregister(_background.close)
    _background = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)

"""What is compiled in the background: one kind of queue, of Triton's kernels and of C functions, and who compiles them.

Triton holds the interpreter's lock for a part of each compilation, and a kernel takes 0.2 to 2 s. Processes that import
nothing but Triton share neither the lock nor the device; what they compile is found in Triton's cache on disk.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from insum_nn.compiler.kernels import machine_code
from insum_nn.compiler.kernels.machine_code import KernelCode
from insum_nn.compiler.kernels.stored_code import remember_code

__all__ = ["Compiled", "Queue", "Worker", "compile_all", "default_workers", "processors"]

J = TypeVar("J")

# Processes at most; of more than this many kernels few networks are made.
_MOST = 16
# Seconds without work after which a thread ends, and for which one job is waited for.
_IDLE, _LONGEST = 10.0, 60.0


class Queue(Generic[J]):
    """Jobs that threads compile in the background, those of most effort first.

    A job is a key: whoever needs one that is waiting does it, and waits for one that is being done. A child of a fork
    needs another queue, as threads do not survive it.

    Args:
        most: threads.
        begin: enters what a thread compiles with, one job after the other; an `OSError` ends the thread.
    """

    def __init__(self, most: int, begin: Callable[[], AbstractContextManager[Callable[[J], object]]]) -> None:
        self.most, self._begin = most, begin
        self._waiting: dict[J, None] = {}
        self._running: dict[J, threading.Event] = {}
        self._threads = 0
        self._changed = threading.Condition()

    def add(self, *jobs: J) -> None:
        """Have jobs done."""
        with self._changed:
            self._waiting.update(dict.fromkeys(jobs))
            self._start()
            self._changed.notify_all()

    def take(self, job: J) -> None:
        """Return when the caller may do a job: no thread does it, or the wait was too long."""
        with self._changed:
            self._waiting.pop(job, None)
            running = self._running.get(job)
        if running is not None:
            running.wait(_LONGEST)

    def settle(self, seconds: float | None) -> bool:
        """Wait until nothing is done any more, for so long at most; `False`: that takes longer."""
        with self._changed:
            # Where no thread could begin, jobs stay, and are not waited for.
            return self._changed.wait_for(lambda: not self._running and not (self._waiting and self._threads), seconds)

    def close(self) -> None:
        """Forget what waits, and end each thread after its job."""
        with self._changed:
            self._waiting.clear()
            self.most = 0
            self._changed.notify_all()

    def _start(self) -> None:
        for _ in range(min(self.most, len(self._waiting) + len(self._running)) - self._threads):
            self._threads += 1
            # What is done in the background must not keep this process from ending.
            threading.Thread(target=self._work, name="insum_nn_compile", daemon=True).start()

    def _work(self) -> None:
        able = True
        try:
            with self._begin() as compile:
                while self._compile_next(compile):
                    pass
        except OSError:
            # Whoever needs a job does it.
            able = False
        finally:
            with self._changed:
                self._threads -= 1
                # A job may have come since this thread found none.
                if able:
                    self._start()
                self._changed.notify_all()

    def _compile_next(self, compile: Callable[[J], object]) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self.most, _IDLE)
            if not self._waiting:
                return False
            # All wait for the last to end.
            job = max(self._waiting, key=lambda each: getattr(each, "effort", 0))
            del self._waiting[job]
            done = self._running[job] = threading.Event()
        try:
            compile(job)
        finally:
            with self._changed:
                del self._running[job]
                done.set()
                self._changed.notify_all()
        return True


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of one kernel.

    Attributes:
        code: the kernel.
        seconds: that it took.
        found: the machine code was on disk.
        error: why there is no machine code; empty where there is.
    """

    code: KernelCode
    seconds: float
    found: bool
    error: str = ""


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers(kernels: int) -> int:
    """Processes for so many kernels: no more than processors that this one may use."""
    return max(1, min(kernels, processors(), _MOST))


def compile_all(
    codes: Sequence[KernelCode],
    workers: int,
    seconds: float = math.inf,
    step: Callable[[Compiled], None] = lambda _: None,
) -> list[Compiled]:
    """Compile kernels in processes of their own, for the cache on disk.

    Args:
        codes: the kernels; those that take longest begin first, since all wait for the last to end.
        workers: number of processes.
        seconds: after which none begins; each process compiles one all the same.
        step: called after each.
    """
    until = time.perf_counter() + seconds
    done: dict[KernelCode, Compiled] = {}

    class Own(Worker):
        late = False

        def compile(self, code: KernelCode) -> Compiled:
            done[code] = Compiled(code, 0.0, False, "there was no time") if self.late else super().compile(code)
            self.late = time.perf_counter() > until
            step(done[code])
            return done[code]

    queue: Queue[KernelCode] = Queue(workers, Own)
    queue.add(*codes)
    queue.settle(None)
    queue.close()
    return [done.get(code) or Compiled(code, 0.0, False, "no process could be started") for code in codes]


class Worker:
    """A process that compiles kernels one after the other.

    Raises:
        OSError: it ended before it could.
    """

    def __init__(self, **streams: Any) -> None:
        self._streams = streams
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        self.process = subprocess.Popen(
            # -P: a script's folder would come first among the places of modules, and ours has a `numbers`.
            [sys.executable, "-P", machine_code.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            **self._streams,
        )
        if self._ask(json.dumps(sys.path) + "\n") is None:
            self.close()
            raise OSError("the process ended")
        return self.process

    def __enter__(self) -> Callable[[KernelCode], Compiled]:
        return self.compile

    def __exit__(self, *_: object) -> None:
        self.close()

    def compile(self, code: KernelCode) -> Compiled:
        """Compile a kernel; a process that ended over another is started again."""
        if self.process.poll() is not None:
            self.close()
            self._start()
        begin = time.perf_counter()
        answer = self._ask(machine_code.to_json(code))
        if answer is None:
            answer = {"error": f"the process that compiled it ended with status {self.process.wait()}"}
        seconds = time.perf_counter() - begin
        if "hash" in answer:
            remember_code(code, answer["hash"])
        return Compiled(code, seconds, bool(answer.get("found")), str(answer.get("error", "")))

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
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None and not stream.closed:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

"""Kernels compiled ahead of their launches: what would be launched is collected, and compiled by several processes.

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
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from insum_nn.compiler.kernels import machine_code
from insum_nn.compiler.kernels.machine_code import KernelCode, Target
from insum_nn.compiler.kernels.stored_code import remember_code

__all__ = [
    "Collection",
    "Compiled",
    "UndecidedError",
    "Worker",
    "collect",
    "collecting",
    "compile_all",
    "default_workers",
    "processors",
    "rehearsing",
    "target_of",
]

# Processes at most; of more than this many kernels few networks are made.
_MOST = 16
# Launches without a new kernel after which a rehearsal ends: a loop until results are good enough would not end.
_LONGEST_REPETITION = 2000


@dataclass
class Collection:
    """The kernels that calls of one thread would have launched.

    Attributes:
        target: what they are compiled for; `None`: the device that they would have run on.
        found: called with each when it is met first; then a long repetition of known ones is an error.
        codes: each once, in the order in which they were met.
        launches: how often any was met.
    """

    target: Target | None = None
    found: Callable[[KernelCode], None] | None = None
    codes: dict[KernelCode, None] = field(default_factory=dict[KernelCode, None])
    launches: int = 0
    _last_new: int = 0

    def add(self, code: KernelCode) -> None:
        """Note one launch.

        Raises:
            UndecidedError: a rehearsal has met no other kernel for long.
        """
        self.launches += 1
        if code not in self.codes:
            self.codes[code], self._last_new = None, self.launches
            if self.found is not None:
                self.found(code)
        elif self.found is not None and self.launches - self._last_new > _LONGEST_REPETITION:
            raise UndecidedError("the same kernels were met again and again")


class _OfThread(threading.local):
    """What this thread collects: others launch meanwhile."""

    collection: Collection | None = None


_of_thread = _OfThread()


class UndecidedError(Exception):
    """A rehearsal came to a choice that depends on a launch."""


def collecting() -> Collection | None:
    """Where launches of this thread are collected now, if they are."""
    return _of_thread.collection


def rehearsing() -> bool:
    """Whether this thread collects what it runs later: nothing may be decided otherwise than by that run."""
    collection = _of_thread.collection
    return collection is not None and collection.found is not None


@contextmanager
def collect(target: Target | None = None, found: Callable[[KernelCode], None] | None = None) -> Generator[Collection]:
    """Collect this thread's launches of kernels that are not loaded yet instead of making them; outputs are zero.

    The arguments are attributes of a `Collection`. Backward passes that this thread begins run in it, not in those that
    torch keeps for devices.
    """
    outer, own = _of_thread.collection, Collection(target, found)
    with torch.autograd.set_multithreading_enabled(False):
        _of_thread.collection = own
        try:
            yield own
        finally:
            _of_thread.collection = outer


def target_of(device: int) -> Target:
    """What kernels for a device of this number are compiled for."""
    if torch.version.hip is None:
        # Triton would first compile what it asks the driver with.
        major, minor = torch.cuda.get_device_capability(device)
        return "cuda", 10 * major + minor, 32
    with torch.cuda.device(device):
        return machine_code.active_target()


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
    idle: SimpleQueue[Worker] = SimpleQueue()
    order = sorted(codes, key=lambda code: -code.effort)

    def one(code: KernelCode) -> Compiled:
        worker = idle.get()
        try:
            late = code not in order[:workers] and time.perf_counter() > until
            compiled = Compiled(code, 0.0, False, "there was no time") if late else worker.compile(code)
        finally:
            idle.put(worker)
        step(compiled)
        return compiled

    with ExitStack() as stack:
        for _ in range(workers):
            idle.put(stack.enter_context(closing(Worker())))
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        done = {compiled.code: compiled for compiled in pool.map(one, order)}
    return [done[code] for code in codes]


class Worker:
    """A process that compiles kernels one after the other."""

    def __init__(self, **streams: Any) -> None:
        self._streams = streams
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            # -P: a script's folder would come first among the places of modules, and ours has a `numbers`.
            [sys.executable, "-P", machine_code.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            **self._streams,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(sys.path) + "\n")
        return process

    def compile(self, code: KernelCode) -> Compiled:
        """Compile a kernel; a process that ends over it is started again."""
        begin = time.perf_counter()
        answer = self.ask(machine_code.to_json(code))
        if answer is None:
            status = self.process.wait()
            self.close()
            self.process = self._start()
            answer = {"error": f"the process that compiled it ended with status {status}"}
        seconds = time.perf_counter() - begin
        if "hash" in answer:
            remember_code(code, answer["hash"])
        return Compiled(code, seconds, bool(answer.get("found")), str(answer.get("error", "")))

    def ask(self, line: str) -> dict[str, Any] | None:
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

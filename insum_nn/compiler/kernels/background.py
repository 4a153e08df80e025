"""Kernels compiled in the background of a first step: by other processes, while this one compiles what it needs next.

Until two kernels are known to be missing, nothing of this happens: most processes find theirs on disk, and some need
only one. Before a kernel of a recorded call is compiled, those of its gradients are found. A kernel whose turn has not
come when it is needed is compiled by who needs it, and so is one whose process ended.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
from collections.abc import Callable, Iterable
from typing import Any

from insum_nn.compiler.kernels.ahead import Worker, processors
from insum_nn.compiler.kernels.machine_code import KernelCode, to_json
from insum_nn.compiler.kernels.stored_code import is_stored, remember_code
from insum_nn.locks import new_lock

__all__ = [
    "Background",
    "cold",
    "default_background_workers",
    "helped",
    "missed",
    "prepared",
    "rehearsals",
    "settle",
    "submit",
    "take",
]

# Processes at most, and processors from which on there are some.
_MOST, _FEWEST_PROCESSORS = 12, 3
# Seconds without work after which a process ends, and for which one kernel is waited for.
_IDLE, _LONGEST = 10.0, 60.0


def default_background_workers() -> int:
    """Processes that compile in the background: all processors of this rank but its own; none where there are few."""
    requested = os.environ.get("INSUM_NN_COMPILE_WORKERS", "")
    if requested.isdecimal():
        return int(requested)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    own = processors() // max(1, int(ranks) if ranks.isdecimal() else 1)
    return min(own - 1, _MOST) if own >= _FEWEST_PROCESSORS else 0


class Background:
    """Kernels that other processes compile for the cache on disk.

    Args:
        most: processes.

    Attributes:
        missing: kernels that this process needed and did not find on disk.
        of_steps: kernels of whole steps that were rehearsed, and whether with their backward passes.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.missing = 0
        self.of_steps: dict[KernelCode, bool] = {}
        self._known: set[KernelCode] = set()
        self._waiting: dict[KernelCode, None] = {}
        self._running: dict[KernelCode, threading.Event] = {}
        self._workers: set[Worker] = set()
        self._threads = 0
        self._changed = threading.Condition()

    def rehearsed(self, code: KernelCode, recorded: bool) -> bool:
        """Whether a rehearsal of a step met a kernel; `recorded`: one that came to the end of its backward pass."""
        return self.of_steps.get(code, False) if recorded else code in self.of_steps

    def missed(self, code: KernelCode, later: bool) -> None:
        """Note that this process needs a kernel that is not on disk.

        Args:
            code: the kernel.
            later: this process plans something else first, and others may compile it meanwhile.
        """
        with self._changed:
            self.missing += 1
            if later and self._threads:
                self.submit([code])
            else:
                self._start()

    def submit(self, codes: Iterable[KernelCode], *, alone: bool = False) -> None:
        """Have kernels compiled that are not on disk, unless they were named before.

        `alone`: this process goes on without them, so a single one is worth another process too.
        """
        missing = [code for code in codes if code not in self._known and not is_stored(code)]
        with self._changed:
            for code in missing:
                if code not in self._known:
                    self._known.add(code)
                    self._waiting[code] = None
            self._start(least=1 if alone else 2)
            self._changed.notify_all()

    def take(self, code: KernelCode) -> None:
        """Return when this process may load or compile a kernel: no other compiles it, or the wait was too long."""
        with self._changed:
            self._known.add(code)
            self._waiting.pop(code, None)
            running = self._running.get(code)
        if running is not None:
            running.wait(_LONGEST)

    def settle(self, seconds: float) -> bool:
        """Wait until nothing is compiled any more; `False`: that takes longer."""
        with self._changed:
            # If no worker process could be started, queued kernels stay queued, and are not waited for.
            return self._changed.wait_for(lambda: not self._running and not (self._waiting and self._threads), seconds)

    def close(self) -> None:
        """End all processes at once."""
        with self._changed:
            self._waiting.clear()
            for worker in self._workers:
                worker.process.kill()

    def _start(self, least: int = 2) -> None:
        if self.missing + len(self._waiting) + len(self._running) < least:
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
                        self._changed.notify_all()
        except OSError:
            # No process, or no pipe: the step compiles its kernels itself.
            return
        finally:
            with self._changed:
                self._threads -= 1
                self._changed.notify_all()
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
            # All wait for the last to end.
            code = max(self._waiting, key=lambda each: each.effort)
            del self._waiting[code]
            self._running[code] = threading.Event()
            return code


class _Cold(threading.local):
    """What a recorded call and its kernels tell each other, in the thread that runs it.

    Attributes:
        due: it needed a kernel that was not there, so what its gradients need is not there either.
        call: the function of the recorded call that runs now, its context, and its arguments.
    """

    due = False
    call: tuple[Any, ...] | None = None


class _Rehearsals:
    """How kernels are found ahead; set by the files that know.

    Attributes:
        call: finds the kernels of a recorded call and of its gradients, and submits them.
        step: finds and submits the kernels of the step that runs now, of which one is missing, and returns them and
            whether those of its backward pass are among them; its second argument tells whether a recorded call needs
            that one.
    """

    call: Callable[..., None] | None = None
    step: Callable[[KernelCode, bool], tuple[Iterable[KernelCode], bool]] | None = None


cold = _Cold()
rehearsals = _Rehearsals()
_background: Background | None = None
_lock = new_lock()


def missed(code: KernelCode) -> None:
    """Note that a kernel is needed that is not on disk; those of a recorded call's gradients are found before."""
    begun = _begun()
    aided = begun.most > 0
    call = cold.call if aided else None
    rehearsed = begun.rehearsed(code, call is not None)
    begun.missed(code, later=call is not None and not rehearsed)
    if aided and not rehearsed and rehearsals.step is not None:
        found, whole = rehearsals.step(code, call is not None)
        begun.of_steps.update({each: whole or begun.rehearsed(each, True) for each in found})
        rehearsed = begun.rehearsed(code, call is not None)
    if rehearsed:
        return
    cold.due = begun.most > 0
    if call is not None and rehearsals.call is not None:
        cold.call = None
        rehearsals.call(*call)


def _begun() -> Background:
    global _background
    with _lock:
        if _background is None:
            _background = Background(default_background_workers())
            atexit.register(_background.close)
    return _background


def helped() -> bool:
    """Return whether other processes may compile for this one."""
    return _begun().most > 0


def prepared() -> None:
    """Note that a statement was prepared for sizes that it had not met: its gradients are, too, where kernels miss."""
    if _background is not None:
        cold.due = _background.most > 0


def submit(codes: Iterable[KernelCode], *, alone: bool = False) -> None:
    """Have kernels compiled that a later call needs; see `Background.submit`."""
    if _background is not None:
        _background.submit(codes, alone=alone)


def take(code: KernelCode) -> None:
    """Return when this process may load or compile a kernel."""
    if _background is not None:
        _background.take(code)


def settle(seconds: float) -> bool:
    """Wait until no other process compiles for this one; `False`: that takes longer."""
    return _background is None or _background.settle(seconds)


def _in_child() -> None:
    """Threads do not survive a fork, and the processes are the parent's."""
    global _background
    if _background is not None:
        atexit.unregister(_background.close)
    _background, cold.due = None, False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)

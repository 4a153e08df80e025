"""The system's C compiler: texts become functions of shared libraries, at once or while other code serves.

What a text became is kept in the cache folder under all that the machine code depends on: the text, the compiler and
its flags, and what the processor can do. Compilation runs in a process of its own, several at once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from insum_nn.compiler.kernels.background import processors
from insum_nn.compiler.tuning.cache_folder import located, write

__all__ = ["CFunction", "background", "find_compiler", "submit", "vector_bytes", "vector_functions"]

# Lanes and accumulators are explicit in the text, so nothing may reorder sums. No `-ffast-math`: a library linked with
# it makes the whole process flush denormal numbers. gcc's own vectorizers gain nothing, and take most of the time.
_FLAGS = (
    "-std=gnu11 -O2 -fno-tree-vectorize -fno-tree-slp-vectorize -fno-math-errno -fno-trapping-math -fPIC -w"
).split()
# What tells, of a library that was compiled before, whether it has threads.
_SAYS_ALONE = "#ifndef _OPENMP\nint insum_alone;\n#endif\n"
# Seconds after which a compilation is given up; the slowest of the kernels of all tests takes a tenth.
_LONGEST = 60.0
# Of the cache folder.
_KIND = "c"
# Compilations at one time.
_SEVERAL = min(4, processors())


def find_compiler() -> tuple[str, ...] | None:
    """The command of the system's C compiler with its flags: `CC`, else cc, gcc or clang; `None`: there is none."""
    return _find(os.environ.get("CC"))


@functools.cache
def _find(named: str | None) -> tuple[str, ...] | None:
    if sys.platform == "win32":
        # Sizes and addresses have the C type `long`, which is too short there.
        return None
    for name in (named,) if named else ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path is not None:
            # An interpreted or cross-compiled environment may know no native processor.
            native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
            return (path, *_FLAGS, native, *vector_functions())
    return None


@functools.cache
def vector_functions() -> tuple[str, ...]:
    """The flag by which generated C calls glibc's functions of whole vectors, where it has them all.

    Loaded here, they are found by every library that calls them: no path of the linker has to have them.
    """
    try:
        found = hasattr(ctypes.CDLL("libmvec.so.1", mode=ctypes.RTLD_GLOBAL), "_ZGVdN8v_erff")
    except OSError:
        found = False
    return ("-DINSUM_VECTORS",) if found else ()


@functools.cache
def _environment(command: tuple[str, ...]) -> str:
    """What machine code depends on besides its text: the compiler, its flags, the processor's features."""
    compiler = os.stat(os.path.realpath(command[0]))
    return json.dumps([command, compiler.st_size, compiler.st_mtime_ns, _processor()])


def _processor() -> Sequence[str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = file.read().partition("\n\n")[0].splitlines()
    except OSError:
        return [platform.machine(), platform.processor()]
    return [x for x in lines if x.startswith(("model name", "flags", "Features", "CPU part", "CPU implementer"))]


@functools.cache
def vector_bytes() -> int:
    """Bytes of the processor's vectors; on most others two registers or one hold as many."""
    return 64 if any("avx512f" in line.split() for line in _processor()) else 32


def background() -> bool:
    """Whether functions are compiled while other code serves; `INSUM_NN_COMPILE_WORKERS=0`: calls wait for them."""
    return os.environ.get("INSUM_NN_COMPILE_WORKERS") != "0"


class CFunction:
    """A function of a C text, which is given a row of pointers and integers: to pass each one by one takes longer.

    Attributes:
        text: the C text.
        name: the function's name in it.
        arguments: how many pointers and integers it is given.
        row: makes the row of them.
        run: the function of a row; `None`: it is not compiled yet, or could not be.
        error: why it could not be compiled; empty where it could, or nothing was tried yet.
        alone: it runs on one thread, as no library of the compiler's OpenMP is loaded.
    """

    __slots__ = ("_compiled", "_room", "alone", "arguments", "error", "name", "row", "run", "text")

    def __init__(self, text: str, name: str, arguments: int) -> None:
        self.text, self.name, self.arguments = text, name, arguments
        self.row = struct.Struct(f"{arguments}q").pack
        self.run: Any = None
        self.error, self.alone = "", False
        self._room: threading.Semaphore | None = None
        self._compiled = threading.Event()

    def request(self) -> None:
        """Have it compiled, unless this process did so before; others run in the meantime."""
        if self._room is not _room and not self._compiled.is_set():
            self._room = _room
            submit(self)

    def wait(self) -> None:
        """Return when it is compiled, or could not be."""
        self.request()
        self._compiled.wait()

    def find(self) -> bool:
        """Load it where some process compiled it before, and tell whether it did."""
        with located(_KIND, f"{self._key()}.so") as path:
            if path is None or not self._load(path):
                return False
        self._compiled.set()
        return True

    def compile(self) -> None:
        """Compile and load it now."""
        try:
            if not self.find():
                self._build()
        except (OSError, subprocess.SubprocessError, AttributeError) as error:
            self.error = str(error)
        finally:
            self._compiled.set()

    def _key(self) -> str:
        command = find_compiler()
        assert command is not None
        return hashlib.sha256(f"{_environment(command)}\n{self.text}".encode()).hexdigest()[:40]

    def _build(self) -> None:
        command = find_compiler()
        assert command is not None
        with tempfile.TemporaryDirectory(prefix="insum_nn-") as place:
            library = Path(place, "kernel.so")
            run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=_LONGEST, cwd=place)
            # Linked without a library of threads: torch has loaded one, and two would not know of each other. It is
            # gcc's, so that functions of clang run on one thread, unless something has loaded LLVM's.
            for threads in ("-fopenmp", "-fno-openmp"):
                done = run([*command, threads, "-c", "-x", "c", "-", "-o", "kernel.o"], input=self.text + _SAYS_ALONE)
                done = done if done.returncode else run([command[0], "-shared", "kernel.o", "-o", str(library)])
                if done.returncode:
                    self.error = f"{command[0]} ended with status {done.returncode}: {done.stderr[:2000]}"
                elif self._load(str(library)):
                    write(_KIND, f"{self._key()}.so", library.read_bytes())
                    return

    def _load(self, path: str) -> bool:
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            self.error = str(error)
            return False
        function, self.alone, self.error = library[self.name], hasattr(library, "insum_alone"), ""
        function.restype, function.argtypes = ctypes.c_long, [ctypes.c_char_p]
        self.run = function
        return True


# Compilations that may still begin; a child of a fork has none of its parent's threads.
_room = threading.BoundedSemaphore(_SEVERAL)


def submit(task: Any) -> None:
    """Have a thread call the `compile` of something, as soon as no more than a few others do."""

    def work() -> None:
        with room:
            task.compile()

    room = _room
    threading.Thread(target=work, name="insum_nn_cc", daemon=True).start()


def _in_child() -> None:
    global _room
    _room = threading.BoundedSemaphore(_SEVERAL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)

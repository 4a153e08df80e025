"""The private folder on disk that outlives a process: files by kind and name, written and read by one process or many.

What lies in it is run as code, or believed. So its folders are made for their owner alone, and a folder or a file that
somebody else owns or may write to is not used, of which one warning tells. What is checked is what is used: each
folder and file is opened once, and reached through its descriptor from then on, so that it cannot be exchanged between.

    read(kind, name)             the bytes of a file, or `None`
    write(kind, name, data)      whole or not at all, as several processes may do so at once; a failure leaves nothing
    opened(kind, name)           the open file; with `make=True` it may be locked
    located(kind, name)          a path under which a checked file can be opened again, as `dlopen` does
    times(kind), remove(...)     list and clear
    own_folder(kind), path_of    whether anything can be kept; paths for messages
    sealed(data), unsealed(...)  bytes that are recognised as damaged

A kind is the name of a folder in the cache (`"plans"`), or the path of another folder, of which the same holds. Where
there is no such folder (no home, a full or read-only disk, a system without such descriptors) nothing is kept, and
everything is computed again; only `own_folder` says so.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
import warnings
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from insum_nn.locks import new_lock

__all__ = [
    "cache_folder",
    "located",
    "opened",
    "own_folder",
    "path_of",
    "read",
    "remove",
    "sealed",
    "times",
    "unsealed",
    "write",
]

_TEMPORARY = ".being-written-"
# Written files take seconds; what is older belongs to a process that was killed.
_SECONDS = 3600
_warned: set[Path] = set()
_swept: set[Path] = set()
_lock = new_lock()


def cache_folder() -> Path | None:
    """Where files are kept: `INSUM_NN_CACHE_DIR`, or a folder of the user's cache; `None`: the user has no home."""
    named = os.environ.get("INSUM_NN_CACHE_DIR")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "insum_nn"
    except RuntimeError:
        return None


def path_of(kind: str | Path, name: str = "") -> Path:
    """The path of a kind's folder or file, for messages: nothing is read or written by it."""
    return (kind if isinstance(kind, Path) else (cache_folder() or Path()) / kind) / name


def own_folder(kind: str | Path) -> Path | None:
    """The path of a kind's folder, made where it is missing; `None`: there is none that may be used."""
    with ExitStack() as stack:
        return None if _open_folder(kind, stack) is None else path_of(kind)


@contextmanager
def opened(kind: str | Path, name: str, *, make: bool = False) -> Generator[BinaryIO | None]:
    """Open a file of a kind for reading.

    Args:
        kind: a folder of the cache, or the path of another.
        name: of the file.
        make: make an empty one where there is none.

    Yields:
        The file; `None`: there is none that may be used.
    """
    with ExitStack() as stack:
        place = _open_folder(kind, stack)
        file = None if place is None else _open_file(kind, name, place, stack, make)
        yield None if file is None else stack.enter_context(open(file, "rb", closefd=False))


def read(kind: str | Path, name: str) -> bytes | None:
    """The bytes of a file; `None`: there is none that may be used."""
    with opened(kind, name) as file, suppress(OSError):
        return None if file is None else file.read()
    return None


@contextmanager
def located(kind: str | Path, name: str) -> Generator[str | None]:
    """A path that leads through the checked folder's descriptor, for calls that take a path; valid inside of `with`.

    It ends with the file's name, as `dlopen` takes two libraries under the same path for one.

    Yields:
        The path; `None`: there is no file that may be used.
    """
    with ExitStack() as stack:
        place = _open_folder(kind, stack)
        path = f"/proc/self/fd/{place}/{name}"
        if place is None or _open_file(kind, name, place, stack) is None:
            yield None
        else:
            yield path if os.path.exists(path) else str(path_of(kind, name))


def write(kind: str | Path, name: str, data: bytes) -> bool:
    """Write a file by renaming; return whether it could be written."""
    temporary = f"{_TEMPORARY}{uuid4().hex}"
    with suppress(OSError), ExitStack() as stack:
        place = _open_folder(kind, stack)
        if place is None:
            return False
        _sweep(kind, place)
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=place), "wb") as file:
                file.write(data)
            os.replace(temporary, name, src_dir_fd=place, dst_dir_fd=place)
        except BaseException:
            _unlink(temporary, place)
            raise
        return True
    return False


def times(kind: str | Path) -> dict[str, int]:
    """The names of all files of a kind, and when each was last written, in nanoseconds."""
    with ExitStack() as stack:
        place = _open_folder(kind, stack)
        found = {} if place is None else _times(place)
        return {name: when for name, when in found.items() if not name.startswith(_TEMPORARY)}


def remove(kind: str | Path, names: Iterable[str]) -> None:
    """Delete files; other processes may do the same at the same time."""
    with ExitStack() as stack:
        place = _open_folder(kind, stack)
        for name in names:
            if place is not None:
                _unlink(name, place)


def sealed(data: bytes) -> bytes:
    """Bytes with their digest in a line before them."""
    return hashlib.sha256(data).hexdigest().encode() + b"\n" + data


def unsealed(found: bytes | None) -> bytes | None:
    """The bytes that were `sealed`; `None`: there are none, or they are damaged."""
    data = (found or b"").partition(b"\n")[2]
    return data if sealed(data) == found else None


def _open_folder(kind: str | Path, stack: ExitStack) -> int | None:
    """A descriptor of a kind's folder, made where it is missing, which the stack closes."""
    root = kind if isinstance(kind, Path) else cache_folder()
    if root is None or os.open not in os.supports_dir_fd:
        return None
    place = None
    for path in (root,) if root is kind else (root, root / kind):
        with suppress(OSError):
            if place is None:
                # Folders above are the user's affair, and get the mode that they always get.
                path.parent.mkdir(parents=True, exist_ok=True)
            os.mkdir(path if place is None else path.name, 0o700, dir_fd=place)
        try:
            place = os.open(path if place is None else path.name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=place)
        except OSError:
            return None
        stack.callback(os.close, place)
        if _is_shared(os.fstat(place), path):
            return None
    return place


def _open_file(kind: str | Path, name: str, place: int, stack: ExitStack, make: bool = False) -> int | None:
    """A descriptor of a file, which the stack closes."""
    # A link leads elsewhere, and to open a pipe waits for who writes to it.
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT | os.O_RDWR if make else os.O_RDONLY)
    try:
        file = os.open(name, flags, 0o600, dir_fd=place)
    except OSError:
        return None
    stack.callback(os.close, file)
    found = os.fstat(file)
    return file if stat.S_ISREG(found.st_mode) and not _is_shared(found, path_of(kind, name)) else None


def _is_shared(found: os.stat_result, path: Path) -> bool:
    """Whether a folder or a file is not this user's alone, of which one warning for each folder tells."""
    if found.st_uid != os.getuid():
        why = f"it belongs to user {found.st_uid}, not to {os.getuid()}"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"others may write to it (mode {stat.S_IMODE(found.st_mode):o})"
    else:
        return False
    once = path if stat.S_ISDIR(found.st_mode) else path.parent / "*"
    with _lock:
        first = once not in _warned
        _warned.add(once)
    if first:
        warnings.warn(
            f"{path} is not used, because {why}; each process makes again what it would keep. Do not change its mode: "
            "files that others put there would be run. Delete the folder, or name another in INSUM_NN_CACHE_DIR",
            stacklevel=2,
        )
    return True


def _times(place: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in os.listdir(place):
        with suppress(OSError):
            found[name] = os.stat(name, dir_fd=place, follow_symlinks=False).st_mtime_ns
    return found


def _unlink(name: str, place: int) -> None:
    with suppress(OSError):
        os.unlink(name, dir_fd=place)


def _sweep(kind: str | Path, place: int) -> None:
    """Delete what processes that were killed left half written, once in a process."""
    path = path_of(kind)
    if path in _swept:
        return
    _swept.add(path)
    for name, written in _times(place).items():
        if name.startswith(_TEMPORARY) and written < (time.time() - _SECONDS) * 1e9:
            _unlink(name, place)

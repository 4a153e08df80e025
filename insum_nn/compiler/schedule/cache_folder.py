"""The folder on disk that outlives a process: where it is, and whether it is this user's alone.

What lies in it is run as code. So our folders are made for their owner alone, and one that somebody else owns or may
write to is not used: then nothing is kept.
"""

from __future__ import annotations

import os
import stat
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

__all__ = ["cache_folder", "own_folder", "write_file"]

_PRIVATE = 0o700
_warned: set[Path] = set()
_lock = threading.Lock()


def cache_folder() -> Path:
    """Where compiled programs are kept: `INSUM_NN_CACHE_DIR`, or a folder of the user's cache."""
    named = os.environ.get("INSUM_NN_CACHE_DIR")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "insum_nn"


def own_folder(name: str) -> Path | None:
    """A folder of the cache, made where it is missing.

    Returns:
        `None`: it cannot be made, or is not this user's alone, of which one warning tells.
    """
    root = cache_folder()
    folder = root / name
    for path in (root, folder):
        try:
            if path is root:
                # Folders above are the user's affair, and get the mode that they always get.
                path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=_PRIVATE, exist_ok=True)
            found = path.stat()
        except OSError:
            return None
        why = _shared(found)
        if why:
            _warn(path, why)
            return None
    return folder


def write_file(path: Path, text: str) -> None:
    """Write a file of such a folder: whole or not at all, as several processes may do so at once, or none can."""
    temporary = path.with_name(f"{path.name}.{uuid4().hex}")
    with suppress(OSError):
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


def _shared(found: os.stat_result) -> str:
    """Why a folder is not this user's alone; empty where it is."""
    if not hasattr(os, "getuid"):
        # Where there are no such modes, a user's folders are the user's.
        return ""
    if found.st_uid != os.getuid():
        return f"it belongs to user {found.st_uid}, not to {os.getuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _warn(path: Path, why: str) -> None:
    with _lock:
        if path in _warned:
            return
        _warned.add(path)
    warnings.warn(
        f"{path} is not used, because {why}: each process compiles its programs; run chmod go-w on it, or name "
        "another folder in INSUM_NN_CACHE_DIR",
        stacklevel=2,
    )

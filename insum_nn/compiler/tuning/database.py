"""The database of measurements: the user's cache folder, files that were loaded, and those of the package.

An entry is a *key* (the canonical statement, the bucket of its sizes, dtypes, facts, tables, the device), the
*versions* it was measured with, and a *value*, such as a schedule and the times of candidates. All of it is JSON, and
nothing in it depends on the process or on the version of Python. The cache folder holds one file an entry, found by key
and versions, so that new versions measure again. In files of many entries the key alone decides: a schedule is valid
code under any version of Triton, if perhaps not the fastest one. `_FORMAT` is part of the key: raise it when schedules
come to mean something else, or the same statement another kernel.
"""

from __future__ import annotations

import json
import os
import platform
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from insum_nn.compiler.ir.canonical import canonical_key, digest
from insum_nn.compiler.kernels.machine_code import triton_version
from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.tuning import cache_folder
from insum_nn.facts import StaticTable
from insum_nn.locks import new_lock

__all__ = [
    "UNREADABLE",
    "Entry",
    "Key",
    "digest",
    "export",
    "find",
    "in_full_precision",
    "key_of",
    "load",
    "near",
    "size_bucket",
    "turn",
    "unload",
    "versions",
    "write",
]

_FORMAT = 8
Key = Mapping[str, Any]

UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)
"""Exceptions that reading a damaged value raises."""


class Entry(NamedTuple):
    """One stored measurement.

    Attributes:
        key: what it is for.
        value: what was selected, and what was measured.
        versions: of torch and Triton, when it was measured.
        source: the file it was found in.
    """

    key: Key
    value: Mapping[str, Any]
    versions: Mapping[str, str]
    source: Path | None = None

    @property
    def current(self) -> bool:
        """Whether it was measured with the versions in use."""
        return dict(self.versions) == versions()

    def origin(self) -> str:
        """Return a text that says where it comes from."""
        if self.current:
            return f"stored in {self.source}"
        numbers = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return f"stored in {self.source}, measured with {numbers}"

    def broken(self, why: object) -> None:
        """Warn that the value is not valid."""
        _warn(self.source, f"an entry is ignored: {why}")


def versions() -> dict[str, str]:
    """Return the versions of torch and Triton in use."""
    return {"torch": torch.__version__, "triton": triton_version()}


# Keys.


def size_bucket(extents: Extents) -> tuple[int, ...]:
    """Return the bucket of sizes: all within a factor of two share one selection."""
    return tuple([(e - 1).bit_length() if e else 0 for e in (*extents.indices, *extents.output)])


def key_of(
    kind: str,
    bound: Bound,
    tables: Mapping[str, StaticTable],
    bucket: Sequence[int],
    device: torch.device,
    **more: str,
) -> Key:
    """Return the key of a statement's measurement.

    Args:
        kind: what is selected.
        bound: the statement.
        tables: its static tensors.
        bucket: `size_bucket` of the call.
        device: where it runs.
        more: what else the selection depends on.
    """
    return {
        "format": _FORMAT,
        "kind": kind,
        **canonical_key(bound, tables),
        "bucket": list(bucket),
        "device": _device(device),
        **more,
    }


def _device(device: torch.device) -> str:
    """Return what decides which schedule is fast on a device; devices that agree in it share entries.

    The name of a GPU says too much: an H100 and an H200 differ in their memory alone.
    """
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return f"cuda {found.major}.{found.minor}, {found.multi_processor_count} multiprocessors"
    return f"{platform.machine()} {device.type}, {torch.get_num_threads()} threads"


# Other sizes.

# Two to this power and more: sizes that change from call to call, such as numbers of rows; smaller ones may be tiles'.
_LARGE = 10


def near(key: Key) -> Entry | None:
    """Return what was measured for the same key with half or twice as many rows, and no other difference."""
    key = json.loads(json.dumps(dict(key)))
    found: list[tuple[int, Entry]] = []
    own = sorted(_files().items())
    for entries in (*(_read(*each) for each in own), *map(_entries, _shared())):
        for entry in entries.values():
            # Of a few entries that the package ships, only the schedules that were fast in other sizes were measured.
            if entry.value.get("nearby") or {**entry.key, "bucket": key.get("bucket")} != key:
                continue
            with suppress(TypeError, ValueError):
                differ = [(a, b) for a, b in zip(key["bucket"], entry.key["bucket"], strict=True) if a != b]
                if differ and all(abs(a - b) == 1 and min(a, b) >= _LARGE for a, b in differ):
                    found.append((len(differ), entry))
    return min(found, key=lambda each: each[0])[1] if found else None


def in_full_precision(key: Key) -> Entry | None:
    """Return what was measured for the same float32 products by three products in tf32, where one is asked for.

    What fits three fits one; and where sums of products beat the matrix unit by three, they mostly do by one.
    """
    return find({**key, "precision": "tf32x3"}) if key.get("precision") == "tf32" else None


# One entry a file: the user's cache folder.


def _files() -> dict[Path, int]:
    """The files of the cache folder, and when each was written."""
    found = cache_folder.times("schedules")
    return {cache_folder.path_of("schedules", name): when for name, when in found.items() if name.endswith(".json")}


def _own(key: Key) -> Path:
    return cache_folder.path_of("schedules", f"{digest([key, versions()])}.json")


def find(key: Key, *, current: bool = False) -> Entry | None:
    """Return the entry of a key: from the cache folder, the files loaded last, or those of the package.

    `current`: one that was measured with the versions in use.
    """
    name = digest(key)
    for path in (_own(key), *_shared()):
        entry = _entries(path).get(name)
        if entry is not None and (entry.current or not current):
            return entry
    return None


def write(key: Key, value: Mapping[str, Any]) -> None:
    """Store a value: whole or not at all, as several processes may do so at once."""
    # Without a folder to write to, each process measures for itself.
    cache_folder.write("schedules", _own(key).name, json.dumps(_to_json(Entry(key, value, versions()))).encode())
    # Clocks of some file systems are too coarse to tell that a file has changed.
    _read.cache_clear()


# Files of many entries.

_loaded: list[Path] = []
_lock = new_lock()


def export(path: str | os.PathLike[str]) -> int:
    """Write all entries of the cache folder to one JSON file, which `load` reads anywhere.

    Of measurements with several versions of torch and Triton, those of the versions in use are taken, else the latest.

    Args:
        path: the file; replaced if it exists.

    Returns:
        The number of entries written.
    """
    found: dict[str, Entry] = {}
    files = _files()
    for file in sorted(files, key=lambda file: (files[file], file)):
        for name, entry in _read(file, files[file]).items():
            if entry.current or name not in found or not found[name].current:
                found[name] = entry
    # A line each: where one is measured again, the others stay.
    entries = [json.dumps(_to_json(found[name]), sort_keys=True) for name in sorted(found)]
    text = ",\n".join(entries)
    Path(path).write_text(f'{{"entries": [\n{text}\n]}}\n', encoding="utf-8")
    return len(entries)


def load(path: str | os.PathLike[str]) -> int:
    """Use the measurements of a file that `export` wrote; they are looked up after the user's own.

    The file is only read, and its entries serve GPUs of the compute capability and number of multiprocessors that they
    were measured with. What this process has chosen already stays until `insum_nn.clear_cache()`. A file that is no
    such file gives a warning.

    Args:
        path: the file. `INSUM_NN_SCHEDULES` names such files too, separated like the folders of `PATH`.

    Returns:
        The number of entries found.

    Raises:
        FileNotFoundError: there is no such file.
    """
    file = Path(path).resolve()
    if not file.exists():
        raise FileNotFoundError(f"there is no file of schedules at {file}")
    with _lock:
        if file in _loaded:
            _loaded.remove(file)
        _loaded.append(file)
    return len(_entries(file))


def unload() -> None:
    """Forget the files that were loaded."""
    with _lock:
        _loaded.clear()
        _read.cache_clear()


def _shared() -> list[Path]:
    """Files of many entries: those loaded last first, those that the environment names, the package's."""
    named = [Path(part) for part in os.environ.get("INSUM_NN_SCHEDULES", "").split(os.pathsep) if part]
    return [*reversed(_loaded), *named, *_packaged()]


def _packaged() -> list[Path]:
    return sorted((Path(__file__).parents[2] / "schedules").glob("*.json"))


def _entries(path: Path) -> dict[str, Entry]:
    """Return a file's entries by their keys; it is read again when it changes."""
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError:
        return _read(path, -1)


def _to_json(entry: Entry) -> dict[str, Any]:
    return {"key": entry.key, "value": entry.value, "versions": entry.versions}


@lru_cache(maxsize=4096)
def _read(path: Path, _: int) -> dict[str, Entry]:
    """The entries of a file by its path; one that cannot be read gives a warning."""
    own = path.parent == cache_folder.path_of("schedules")
    try:
        data = cache_folder.read("schedules", path.name) if own else path.read_bytes()
        if data is None:
            return {}
        read = json.loads(data.decode())
        found = [(each["key"], each["value"], each["versions"]) for each in read.get("entries", [read])]
        if not all(isinstance(part, dict) for each in found for part in each):
            raise TypeError("an entry is not made of objects")
        return {digest(key): Entry(key, value, versions, path) for key, value, versions in found}
    except (OSError, *UNREADABLE) as error:
        _warn(path, f"{type(error).__name__}: {error}")
        return {}


def _warn(path: Path | None, why: str) -> None:
    warnings.warn(f"{path} is no file of schedules, and is ignored ({why}); delete it or export it again", stacklevel=2)


# One process measures, the others read.


@contextmanager
def turn(key: Key, seconds: float) -> Generator[bool]:
    """Wait until no other process on this cache folder measures a key; the caller then looks it up again.

    Args:
        key: what is measured.
        seconds: the longest wait.

    Yields:
        Whether it is this process's turn; `False` after a wait in vain.
    """
    # Closing the file gives the lock back; so does the end of a process, however it comes.
    with cache_folder.opened("locks", digest([key, versions()]), make=True) as file:
        until = time.monotonic() + seconds
        while not (taken := _take(file)) and time.monotonic() < until:
            time.sleep(0.05)
        yield taken


def _take(file: IO[bytes] | None) -> bool:
    if file is None:
        return True
    # Where a file can be opened as these are, there is such a module.
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # On a file system without locks every process measures.
        return not isinstance(error, BlockingIOError)
    return True

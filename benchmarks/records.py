"""What a result file holds: a list of records, one for each case, provider and mode, and the machine they are of."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, cast

import torch

from benchmarks.registry import Floor, Mode

__all__ = [
    "LOCK",
    "RECORD",
    "SCHEMA",
    "Floors",
    "Machine",
    "Milliseconds",
    "Record",
    "Replay",
    "read",
    "record",
    "version",
    "write",
]

SCHEMA = 4
ROOT = Path(__file__).resolve().parent.parent
LOCK = Path(__file__).with_name("peers.lock")


class Milliseconds(TypedDict):
    """Percentiles of the time of one call."""

    p20: float
    p50: float
    p80: float


class Floors(TypedDict):
    """The least work of a problem; see `benchmarks.registry.Floor`."""

    bytes: int | None
    flops: int | None
    gathered: int | None
    row: int | None
    table: int | None


class Replay(TypedDict):
    """The same call from a CUDA graph, without the host: `gate` is "passed", or why there are no timings."""

    gate: str
    ms: Milliseconds | None


class Record(TypedDict):
    """One measurement. What could not be measured is `None`.

    Attributes:
        schema: version of this layout.
        case: the case's name.
        provider: who solved it.
        mode: "fwd", "bwd" (backward alone) or "fwdbwd".
        ms: time of one call: the device's, or the host's where the case says so.
        replay: the call captured in a CUDA graph and replayed, where that was asked for.
        repeats: timed calls.
        compile_s: from the start of the provider's builder to the end of its first call in this mode.
        peak_bytes: device memory that the provider holds and needs at its peak, beyond the problem's own tensors.
        max_rel_err: against the oracle; see `benchmarks.gate.relative_error`.
        gate: "passed", or why there are no timings: "unavailable: ...", "error: ...", "wrong: ...", "tests: ...",
            "not run: ...".
        floor: the least work of the problem in this mode, where it is counted.
        gpu: the device's name; on a CPU, its name and the number of threads.
        driver: of the GPU.
        cores: of the CPU, that the process could use; one where it was held to it, so that no thread moves.
        torch: version.
        triton: version.
        commit: of this project.
        dirty: whether files differed from the commit.
        utc: when the measurement ended.
    """

    schema: int
    case: str
    provider: str
    mode: Mode
    ms: Milliseconds | None
    replay: Replay | None
    repeats: int
    compile_s: float | None
    peak_bytes: int | None
    max_rel_err: float | None
    gate: str
    floor: Floors | None
    gpu: str
    driver: str | None
    cores: int | None
    torch: str
    triton: str | None
    commit: str | None
    dirty: bool | None
    utc: str


RECORD = tuple(Record.__annotations__)


class Machine(NamedTuple):
    """What the numbers were measured on."""

    gpu: str
    driver: str | None
    cores: int | None
    torch: str
    triton: str | None
    commit: str | None
    dirty: bool | None

    @classmethod
    def here(cls, device: torch.device, commit: str | None = None) -> Machine:
        """Read this machine; `commit` stands in where the files are a copy without their history."""
        if device.type == "cuda":
            gpu = torch.cuda.get_device_name(device)
            driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
            driver = driver.splitlines()[0] if driver else None
        else:
            gpu, driver = f"{_processor()} ({torch.get_num_threads()} threads)", None
        found = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
        status = _output("git", "-C", str(ROOT), "status", "--porcelain") if found else None
        dirty = None if status is None else status != ""
        if commit is not None:
            # Said of a copy, whose own history, if it has one, may be another's.
            found, dirty = commit, None
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return cls(gpu, driver, cores, torch.__version__, version("triton"), found, dirty)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def version(name: str) -> str | None:
    """The installed release of a package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", information.read_text()) if information.exists() else None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def record(
    machine: Machine, case: str, provider: str, mode: Mode, gate: str, *, floor: Floor | None = None, **measured: Any
) -> Record:
    """A record of now; what was not measured is `None`."""
    fields: dict[str, Any] = dict.fromkeys(RECORD) | {"repeats": 0}
    fields |= {"schema": SCHEMA, "case": case, "provider": provider, "mode": mode, "gate": gate}
    fields |= measured | machine._asdict()
    fields["floor"] = None if floor is None else Floors(**vars(floor))
    fields["utc"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return cast(Record, {key: fields[key] for key in RECORD})


def write(path: Path, records: Sequence[Record]) -> None:
    """Write a result file; a reader sees the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def read(path: Path) -> list[Record]:
    """The records of a result file; earlier schemas, without floors, replays or cores, are brought to this one.

    Raises:
        ValueError: the file is not a list of records of a known schema.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, list):
        raise ValueError(f"{path}: a list of records was expected")
    for entry in found:
        if entry.get("schema") == 1 and "floor" not in entry:
            entry |= {"schema": 2, "floor": None}
        if entry.get("schema") == 2 and "replay" not in entry:
            entry |= {"schema": 3, "replay": None}
        if entry.get("schema") == 3 and "cores" not in entry:
            entry |= {"schema": SCHEMA, "cores": None}
        if set(entry) != set(RECORD):
            raise ValueError(f"{path}: records with exactly the keys {', '.join(RECORD)} were expected")
        if entry["schema"] != SCHEMA:
            raise ValueError(f"{path}: schema {SCHEMA} was expected")
    return [cast(Record, {key: entry[key] for key in RECORD}) for entry in found]

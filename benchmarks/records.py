"""The result file: a list of records, one for each case, provider and mode, with the machine they were measured on."""

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
from typing import Any, TypedDict, cast

import torch

from benchmarks.registry import Floor, Mode

__all__ = [
    "LOCK",
    "RECORD",
    "SCHEMA",
    "Busy",
    "Floors",
    "Machine",
    "Milliseconds",
    "Record",
    "Replay",
    "read",
    "record",
    "shown",
    "this_machine",
    "version",
    "write",
]

SCHEMA = 5
ROOT = Path(__file__).resolve().parent.parent
LOCK = Path(__file__).with_name("peers.lock")


class Milliseconds(TypedDict):
    """Percentiles of the time of one call, in milliseconds."""

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
    """CUDA-graph time of the same call, without the host: `gate` is "passed", or why there are no timings."""

    gate: str
    ms: Milliseconds | None


class Busy(TypedDict):
    """Device-busy time of one call: the sum of its kernels' times, and how many were launched."""

    ms: float
    launches: int


class Machine(TypedDict):
    """Machine and versions that the numbers were measured with, the first keys of every record.

    Attributes:
        gpu: the device's name; on a CPU, its name and the number of threads.
        driver: of the GPU.
        cores: CPU cores that the process could use; 1 where it was pinned to one core.
        torch: version.
        triton: version.
        commit: of this project.
        dirty: whether files differed from the commit.
    """

    gpu: str
    driver: str | None
    cores: int | None
    torch: str
    triton: str | None
    commit: str | None
    dirty: bool | None


class Record(Machine):
    """One measurement, with the machine. What could not be measured is `None`.

    Attributes:
        schema: version of this layout.
        case: the case's name.
        provider: who solved it.
        mode: "fwd", "bwd" (backward alone) or "fwdbwd".
        ms: time of one call: the device's, or the host's where the case says so.
        runs: median of each run in milliseconds, where a case was measured more than once; `ms` is the middle run's.
        replay: the call captured in a CUDA graph and replayed, where that was requested.
        busy: kernel time of one call, where that was requested.
        repeats: timed calls; of all runs together.
        compile_s: seconds from the start of the provider's builder to the end of its first call in this mode.
        peak_bytes: device memory that the provider holds and needs at its peak, beyond the problem's own tensors.
        max_rel_err: against the oracle; see `benchmarks.gate.relative_error`.
        gate: "passed", or why there are no timings: "unavailable: ...", "error: ...", "wrong: ...", "tests: ...",
            "not run: ...".
        floor: the least work of the problem in this mode, where it is counted.
        utc: when the measurement ended.
    """

    schema: int
    case: str
    provider: str
    mode: Mode
    ms: Milliseconds | None
    runs: list[float] | None
    replay: Replay | None
    busy: Busy | None
    repeats: int
    compile_s: float | None
    peak_bytes: int | None
    max_rel_err: float | None
    gate: str
    floor: Floors | None
    utc: str


RECORD = tuple(Record.__annotations__)


def this_machine(device: torch.device, commit: str | None = None) -> Machine:
    """Describe this machine; `commit` is used where the files are a copy without their history."""
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
        # The files are a copy, whose own history, if it has one, may be of another project.
        found, dirty = commit, None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Machine(
        gpu=gpu,
        driver=driver,
        cores=cores,
        torch=torch.__version__,
        triton=version("triton"),
        commit=found,
        dirty=dirty,
    )


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
    """Make a record with the present time; what was not measured is `None`."""
    fields: dict[str, Any] = dict.fromkeys(RECORD) | {"repeats": 0}
    fields |= {"schema": SCHEMA, "case": case, "provider": provider, "mode": mode, "gate": gate}
    fields |= {**measured, **machine}
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
    """Read the records of a result file; records of earlier schemas get the fields that they lack, as `None`.

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
            entry |= {"schema": 4, "cores": None}
        if entry.get("schema") == 4 and "busy" not in entry:
            entry |= {"schema": SCHEMA, "busy": None, "runs": None}
        if set(entry) != set(RECORD):
            raise ValueError(f"{path}: records with exactly the keys {', '.join(RECORD)} were expected")
        if entry["schema"] != SCHEMA:
            raise ValueError(f"{path}: schema {SCHEMA} was expected")
    return [cast(Record, {key: entry[key] for key in RECORD}) for entry in found]


def shown(entry: Record) -> str:
    """Format a record as one line; rates are the floor's work over the time."""
    head = f"{entry['case']:<48} {entry['mode']:<7} {entry['provider']:<28}"
    if entry["ms"] is None:
        return f"{head} {entry['gate']}"
    ms, floor = entry["ms"], entry["floor"] or {}
    parts = [f"{ms['p50'] * 1e3:10.1f} us [{ms['p20'] * 1e3:.1f}, {ms['p80'] * 1e3:.1f}]"]
    if entry["replay"] is not None:
        again = entry["replay"]
        parts.append(
            f"CUDA graph {again['ms']['p50'] * 1e3:.1f} us" if again["ms"] else f"CUDA graph: {again['gate'][:60]}"
        )
    if entry["busy"] is not None:
        parts.append(f"device busy {entry['busy']['ms'] * 1e3:.1f} us, {entry['busy']['launches']} launches")
    parts.append(f"err {entry['max_rel_err']:.1e}  first {entry['compile_s']:.1f} s")
    if entry["peak_bytes"] is not None:
        parts.append(f"{entry['peak_bytes'] / 2**20:.1f} MiB")
    for key, unit in (("bytes", "TB/s"), ("gathered", "TB/s gathered"), ("flops", "TFLOP/s")):
        if floor.get(key):
            parts.append(f"{floor[key] / ms['p50'] * 1e-9:.3f} {unit}")
    return "  ".join([head, *parts])

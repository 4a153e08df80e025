"""Machine code that is on disk, loaded without reading the kernel's text.

Triton keeps machine code under a digest of the text's syntax tree and of Triton's own files. To find it there, every
process parses each text several times, 80 ms for two thousand lines, and once reads all of Triton's library, half a
second. Here a file of the cache folder holds that digest, under all that the machine code depends on and that can be
told without parsing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from insum_nn.compiler.kernels.machine_code import KernelCode, Target
from insum_nn.compiler.tuning.cache_folder import own_folder, read, write

__all__ = ["find_code", "is_storable", "is_stored", "remember_code", "source_of"]

_DIGITS = frozenset("0123456789abcdef")


def remember_code(code: KernelCode, found: str) -> None:
    """Note under which digest Triton keeps the machine code of a kernel."""
    name = _name_of(code)
    if name is not None:
        write("kernels", name, found.encode())


def is_stored(code: KernelCode) -> bool:
    """Whether some process noted where the machine code of a kernel is."""
    return _digest_of(code) is not None


def is_storable(code: KernelCode) -> bool:
    """Whether this process finds what another compiles."""
    return _name_of(code) is not None and own_folder("kernels") is not None


def find_code(code: KernelCode) -> Any:
    """Triton's compiled kernel; `None`: no process has noted it, or it is no longer on disk."""
    found = _digest_of(code)
    if found is None:
        return None
    from triton import knobs
    from triton.compiler.compiler import CompiledKernel, CompileTimer
    from triton.runtime.cache import get_cache_manager

    timer = CompileTimer()
    name = f"{code.module}.json"
    group: dict[str, Any] = get_cache_manager(found).get_group(name) or {}
    # Only metadata and binary are needed; the text of each intermediate representation is long.
    group = {each: path for each, path in group.items() if each.endswith((".json", ".cubin", ".hsaco"))}
    if name not in group or len(group) != 2:
        return None
    source = source_of(code.module, code.signature)
    try:
        kernel = CompiledKernel(source, group, found)
    except (OSError, ValueError, KeyError):
        return None
    if knobs.compilation.listener is not None:
        metadata = kernel.metadata._asdict()
        knobs.compilation.listener(
            src=source, metadata=metadata, metadata_group=group, times=timer.end(), cache_hit=True
        )
    return kernel


def source_of(name: str, types: Sequence[str]) -> Any:
    """All that a launcher asks of what was compiled."""
    return SimpleNamespace(name=name, constants={}, attrs={}, signature=dict(enumerate(types)), fn=None)


def _digest_of(code: KernelCode) -> str | None:
    """The digest under which Triton keeps the machine code of a kernel, if a process noted it."""
    name = _name_of(code)
    found = (b"" if name is None else read("kernels", name) or b"").decode("latin-1")
    return found if len(found) == 64 and _DIGITS.issuperset(found) else None


def _name_of(code: KernelCode) -> str | None:
    """The file that holds the digest of a kernel; `None`: none, as Triton is asked to look at what it compiles."""
    from triton import knobs
    from triton._C import libtriton

    compilation = knobs.compilation
    if compilation.always_compile or compilation.override or compilation.dump_ir:
        return None
    if getattr(knobs.runtime, "add_stages_inspection_hook", None) is not None:
        return None
    # Variables on which machine code depends.
    environment: dict[str, str] = libtriton.get_cache_invalidating_env_vars()  # type: ignore[attr-defined]
    options = _options(code.target, code.options)
    depends = [code.module, code.text, code.signature, code.aligned, options, sorted(environment.items()), _triton()]
    return hashlib.sha256(json.dumps(depends).encode()).hexdigest()


@functools.lru_cache(maxsize=1024)
def _options(target: Target, options: tuple[tuple[str, int], ...]) -> list[str]:
    """What Triton's own digest holds of the target's compilers and of the options, given or not."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    backend: Any = make_backend(GPUTarget(*target))
    return [backend.hash(), backend.parse_options(dict(options)).hash()]


@functools.cache
def _triton() -> list[object]:
    """Triton's version, and when which of its files were written."""
    import triton

    root = Path(str(triton.__file__)).parent
    files = [*root.glob("_C/libtriton*")]
    for folder in ("backends", "compiler", "language", "runtime"):
        files += root.glob(f"{folder}/**/*.py")
    found = [(str(file.relative_to(root)), os.stat(file)) for file in sorted(files)]
    return [triton.__version__, *((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)]

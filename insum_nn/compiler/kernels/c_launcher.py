"""Triton's launcher in C: one for kernels of all signatures, compiled while the first kernel is.

Triton before 3.7 writes C for each list of parameter types and runs a C compiler on it, which takes 0.3 s. A launcher
only copies numbers to where the driver reads them, and of each the driver reads as many bytes as the kernel's parameter
has. Where the low bytes come first, one for eight-byte numbers serves for pointers and for all integers; numbers beyond
a kernel's last parameter are not read.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from insum_nn.compiler.kernels.stored_code import source_of
from insum_nn.locks import new_lock

__all__ = ["build_ahead", "prepare_launcher"]

# The number of parameters is a multiple of this; hardly any kernel has more.
_PARAMETERS = 12
_building: threading.Thread | None = None
_lock = new_lock()


def prepare_launcher(kernel: Any, signature: Sequence[str]) -> int:
    """Have a compiled kernel be launched by the shared launcher; return by how many numbers its arguments are short.

    Args:
        kernel: Triton's, that was not run yet.
        signature: types of its parameters.
    """
    if _building is not None:
        _building.join()
    metadata = kernel.metadata
    # Memory that a launch has to provide is passed behind the last parameter, where none may be missing.
    plain = not getattr(metadata, "global_scratch_size", 0) and not getattr(metadata, "profile_scratch_size", 0)
    if not plain or not _is_written(metadata.target.backend) or sys.byteorder != "little":
        return 0
    short = -len(signature) % _PARAMETERS
    kernel.src = source_of("kernel", ("i64",) * (len(signature) + short))
    return short


def build_ahead() -> None:
    """Have the driver's helpers and the shared launcher compiled, or found on disk, in a thread."""
    global _building
    with _lock:
        if _building is None and _is_written("cuda"):
            _building = threading.Thread(target=_build, name="insum_nn_launcher", daemon=True)
            _building.start()


def _is_written(backend: str) -> bool:
    """Whether Triton writes a launcher for each signature, of which pointers and integers are alike."""
    if backend != "cuda":
        return False
    from triton.backends.nvidia import driver

    return hasattr(driver, "make_launcher")


def _build() -> None:
    try:
        from triton.runtime import driver

        # Memory sizes and switches of a launch have no part in what is compiled.
        zeros = ("global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align")
        switches = ("launch_cooperative_grid", "launch_pdl")
        metadata = SimpleNamespace(**dict.fromkeys(zeros, 0), **dict.fromkeys(switches, False), num_ctas=1)
        active: Any = driver.active
        active.launcher_cls(source_of("kernel", ("i64",) * _PARAMETERS), metadata)
    except Exception:
        # The launch itself meets it again, where it can be told.
        return

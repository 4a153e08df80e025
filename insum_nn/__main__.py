"""`python -m insum_nn`: what is installed here, which ways of running a statement there are, and whether each works."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import torch

from insum_nn.compiler.api import insum
from insum_nn.compiler.kernels.c_compiler import find_compiler
from insum_nn.compiler.options import Options
from insum_nn.compiler.tuning.cache_folder import cache_folder
from insum_nn.errors import InsumError
from insum_nn.version import __version__

__all__ = ["main"]

_PACKAGES = ("torch", "triton", "torch_geometric", "e3nn", "spconv", "numpy")
_TEXT = "C[Row[e],n] += Val[e] * B[Col[e],n]"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> Iterator[tuple[str, str]]:
    """Return the devices on which statements are tried, with what they are called."""
    yield "cpu", f"{platform.processor() or platform.machine()}, torch uses {torch.get_num_threads()} threads"
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        memory = f"{found.total_memory / 2**30:.0f} GiB"
        yield f"cuda:{number}", f"{found.name}, compute capability {found.major}.{found.minor}, {memory}"


def _compilers() -> Iterator[tuple[str, str]]:
    """Return the compilers of C and C++ that are on the PATH."""
    command = find_compiler() or (None,)
    plus = filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "c++", "clang++")))
    for language, variable, path in (("C", "CC", command[0]), ("C++", "CXX", next(plus, None))):
        yield f"{language} compiler", path or f"none on the PATH; {variable} names one elsewhere"


def _tried(backend: str, device: str) -> tuple[bool, str]:
    """Run a small product on one path, and return whether its values are right, and what to say of it."""
    matrix, dense = torch.eye(7, device=device).roll(1, 0) * 3, torch.randn(7, 5, device=device)
    row, col = matrix.nonzero(as_tuple=True)
    tensors = {"Row": row, "Col": col, "Val": matrix[row, col], "B": dense}
    begin = time.perf_counter()
    try:
        options = Options(backend=backend)  # pyright: ignore[reportArgumentType]
        out = insum(_TEXT, tensors=tensors, out_shape=(7, None), options=options).cpu()
    except Exception as error:
        # Whatever a compiler or a driver raises is what the reader came for.
        message = error.message if isinstance(error, InsumError) else f"{type(error).__name__}: {error}"
        return False, f"not available: {message.strip().splitlines()[0]}"
    if not torch.allclose(out, 3 * dense.cpu().roll(1, 0), atol=1e-4):
        return False, "WRONG VALUES"
    return True, f"works, {time.perf_counter() - begin:.2g} s with its compilation"


def _cache() -> Iterator[tuple[str, str]]:
    """Return the folders that outlive a process, and the command that empties them."""
    kernels = os.environ.get("TRITON_CACHE_DIR") or Path(
        os.environ.get("TRITON_HOME") or Path.home(), ".triton", "cache"
    )
    own = cache_folder()
    folders = ({} if own is None else {"cache folder": own}) | {"Triton's cache folder": Path(kernels)}
    for name, folder in folders.items():
        files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
        yield name, f"{folder} ({len(files)} files, {sum(files) / 2**20:.1f} MiB)"
    yield "to empty both", shlex.join(["rm", "-rf", *map(str, folders.values())])


def main() -> int:
    """Print the report; 1 if the path that is chosen by default does not work on some device."""
    facts = [("insum_nn", f"{__version__}, {Path(__file__).parent}")]
    facts.append(("Python", f"{platform.python_version()}, {platform.platform()}"))
    facts += [(name, _version(name)) for name in _PACKAGES]
    devices = list(_devices())
    for name, text in (*facts, *devices, *_compilers(), *_cache()):
        print(f"{name:22} {text}")
    failed = False
    # "auto" comes first: it is what runs unless Options(backend=...) says otherwise.
    for backend in get_args(get_type_hints(Options)["backend"]):
        for device, _ in devices:
            # The name goes before, since a compiler may take a while.
            print(f"{f'{backend} on {device}':22}", end=" ", flush=True)
            works, text = _tried(backend, device)
            failed |= backend == "auto" and not works
            print(text, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Run generated C under sanitizers for addresses and undefined behaviour.

    python -m tests.compiler.sanitize_cpu [random programs]

Every statement of the tests of generated C and its derivatives, statements over static tables, functions, and random
programs with theirs, in float32 and in the dtypes that random programs draw. Memory is torch's, each tensor of it an
allocation of its own, so that an address next to any of them ends the process. The tests compare the results.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.compiler.c_driver import COMPILER, Case, case_of, compiled, random_cases
from tests.compiler.test_c_kernels import STATEMENTS, in_dtype, products, with_derivatives
from tests.compiler.test_functions import c_cases

_SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all -g1 -O0".split()
# Kernels of one library: the sanitizers' compiler takes more than a linear time.
_BATCH = 40


def _cases(programs: int) -> Iterator[Case]:
    for statements in (iter(STATEMENTS), products()):
        for _, statement, tensors, options in with_derivatives(statements):
            yield case_of(statement, in_dtype(tensors, torch.float32), **options)
    for columns in (1, 21):
        for _, case, _ in c_cases(torch.float32, columns, gradients=True):
            yield case
    for seed in range(programs):
        for case, _ in random_cases(seed):
            yield case


def main() -> None:
    """Run all kernels in a process with the sanitizers' library before all others."""
    if COMPILER is None:
        sys.exit("there is no C compiler")
    if "LD_PRELOAD" not in os.environ:
        # Torch's exceptions are those of the library that the sanitizers' one finds.
        names = ("libasan.so", "libstdc++.so")
        found = [subprocess.run([COMPILER, f"-print-file-name={n}"], capture_output=True, text=True) for n in names]
        libraries = " ".join(os.path.realpath(each.stdout.strip()) for each in found)
        # Python leaves memory behind when it ends.
        own = {"LD_PRELOAD": libraries, "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "2"}
        command = [sys.executable, "-m", "tests.compiler.sanitize_cpu", *sys.argv[1:]]
        sys.exit(subprocess.run(command, env={**os.environ, **own}).returncode)
    cases = [*_cases(int(sys.argv[1]) if len(sys.argv) > 1 else 60)]
    for first in range(0, len(cases), _BATCH):
        part = cases[first : first + _BATCH]
        printed = [case.printed(f"k{number}") for number, case in enumerate(part)]
        with tempfile.TemporaryDirectory() as folder:
            # The compiler itself is not the one to watch.
            preloaded = os.environ.pop("LD_PRELOAD")
            library = compiled(printed, Path(folder), threads=True, flags=_SANITIZERS)
            os.environ["LD_PRELOAD"] = preloaded
            for number, case in enumerate(part):
                case.run(getattr(library, f"call_k{number}"), printed[number])
        print(f"{first + len(part)} of {len(cases)} kernels", flush=True)


if __name__ == "__main__":
    main()

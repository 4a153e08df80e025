"""Run generated C under sanitizers for addresses and undefined behaviour.

    python -m tests.compiler.sanitize_cpu [random programs]

Kernels alone: every statement of the tests of generated C and its derivatives, statements over static tables,
functions, and random statements in the dtypes that they draw. Whole calls, with what checks and sorts entries and
allocates: random programs and their gradients, as they are drawn and with entries that point anywhere; statements that
are cut at random, and programs of several statements, with two orders of derivatives. Memory is torch's, each tensor of
it an allocation of its own, so that an address next to any of them ends the process. Kernels are compared by the tests,
calls here, with library calls.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from ctypes import CDLL
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn.compiler.codegen.c_prelude import PIECES
from insum_nn.compiler.kernels import c_compiler, c_program
from insum_nn.compiler.kernels.c_compiler import CFunction
from insum_nn.dtypes import FLOATS
from insum_nn.errors import InsumError
from insum_nn.testing.random_programs import random_program
from tests.compiler import cuts, test_programs
from tests.compiler.c_driver import COMPILER, FLAGS, Case, case_of, random_cases, translation_unit
from tests.compiler.test_c_kernels import STATEMENTS, in_dtype, products, with_derivatives
from tests.compiler.test_functions import c_cases
from tests.compiler.test_property import gradients, moved, run

# Reads of some lanes by one instruction are not watched, those lane by lane are. An address is watched where it is
# used: to watch where it is formed too takes the compiler a sixth longer.
_SANITIZERS = (
    "-fsanitize=address,undefined -fno-sanitize=null,object-size,pointer-overflow -fno-sanitize-recover=all "
    "-U__AVX__ -U__AVX512F__ -fopenmp -g1 -O0 -w"
).split()
# Where helpers are not copied to where they are called, the compiler takes half as long.
_INLINE, _CALLED = "static inline __attribute__((always_inline, unused))", "static __attribute__((noinline, unused))"
# What every text defines, each for itself.
_OWN = re.compile(r"\b(insum|call|k\d*(?:_careful|_wide)?|sort|range)\b(?=\()")
# Texts of one library, which share helpers; calls whose programs are kept at one time.
_TEXTS, _CALLS = 40, 40
_PROCESSES = os.cpu_count() or 1
_RANDOM_KERNELS = 60
# Entries that are too low, of a few rows, and too high.
_ENTRIES = (-(2**31), -2, 0, 1, 2, 3, 5, 8, 13, 21, 10**6, 2**31 - 1)
# Of numbers that differ by rounding.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}

Call = Callable[[], Sequence[Tensor]]


class _Asked:
    """In place of the compiler's threads: keeps what they were to compile."""

    def __init__(self) -> None:
        self.functions: list[CFunction] = []

    def submit(self, task: Any) -> None:
        if isinstance(task, CFunction):
            self.functions.append(task)
        else:
            # Prints a program of many terms, and asks for its functions.
            task.compile()


class _Sanitized:
    """Texts compiled and run; a library stays where it is, as its functions may be called later.

    Attributes:
        count: how many functions of how many texts were compiled.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def compiled(self, texts: Sequence[str]) -> list[tuple[Path, str]]:
        """Compile many texts as one library; of each that, and what its functions' names now end with."""
        found: list[tuple[Path, str]] = []
        for first in range(0, len(texts), _TEXTS):
            part = texts[first : first + _TEXTS]
            numbers = [f"_{self.count + n}" for n in range(len(part))]
            own = [_OWN.sub(rf"\1{n}", text).replace(_INLINE, _CALLED) for n, text in zip(numbers, part, strict=True)]
            source = self.folder / f"from{numbers[0]}.c"
            # What several have in common stands there once.
            source.write_text(PIECES.join(dict.fromkeys(piece for text in own for piece in text.split(PIECES))))
            library = source.with_suffix(".so")
            # The compiler itself is not the one to watch.
            environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
            command = [str(COMPILER), *FLAGS, *_SANITIZERS, str(source), "-o", str(library), "-lm"]
            subprocess.run(command, env=environment, check=True)
            found += [(library, n) for n in numbers]
            self.count += len(part)
        return found

    def run_kernels(self, cases: Sequence[Case]) -> None:
        printed = [case.printed("k") for case in cases]
        made = self.compiled([translation_unit([kernel], "call") for kernel in printed])
        for case, kernel, (library, number) in zip(cases, printed, made, strict=True):
            case.run(CDLL(str(library))[f"call{number}"], kernel)

    def run_calls(self, calls: Sequence[Call]) -> None:
        """Run by library calls, then again until no other C function is asked for, and compare."""
        insum_nn.clear_cache()
        asked, c_compiler._room = _Asked(), threading.BoundedSemaphore(1)
        c_compiler.submit = c_program.submit = asked.submit
        want = got = [call() for call in calls]
        while asked.functions:
            functions, asked.functions = asked.functions, []
            made = self.compiled([function.text for function in functions])
            for function, (library, number) in zip(functions, made, strict=True):
                function.name += number
                function._load(str(library))
            got = [call() for call in calls]
        for call, one, other in zip(calls, want, got, strict=True):
            assert len(one) == len(other), call
            for a, b in zip(one, other, strict=True):
                scale = max([1.0, *a.detach().abs().nan_to_num(0, 0, 0).flatten().tolist()])
                tolerance = _TOLERANCES[a.dtype]
                torch.testing.assert_close(
                    b, a, rtol=tolerance, atol=tolerance * scale, equal_nan=True, msg=lambda m, c=call: f"{c}: {m}"
                )


def kernels() -> Iterator[Case]:
    for statements in (iter(STATEMENTS), products()):
        for _, statement, tensors, options in with_derivatives(statements):
            yield case_of(statement, in_dtype(tensors, torch.float32), **options)
    for columns in (1, 21):
        for _, case, _ in c_cases(torch.float32, columns, gradients=True):
            yield case
    for seed in range(_RANDOM_KERNELS):
        for case, _ in random_cases(seed):
            yield case


def random_call(seed: int) -> Sequence[Tensor]:
    program = random_program(seed, max_size=5 if seed % 3 else 19)
    program = moved(program, torch.device("cpu"), FLOATS[seed % len(FLOATS)])
    options, rng = insum_nn.Options(), random.Random(seed)
    found = [run(program), *gradients(program, options)]
    for name, table in program.tensors.items():
        if table.is_floating_point() or not table.numel():
            continue
        changed = table.flatten().clone()
        changed[rng.randrange(table.numel())] = rng.choice(_ENTRIES)
        other = replace(program, tensors={**program.tensors, name: changed.view(table.shape)})
        try:
            found += [run(other), *gradients(other, options)]
        except InsumError:
            found.append(torch.tensor(float("nan")))
    return found


def cut_call(statement: str) -> Sequence[Tensor]:
    torch.manual_seed(0)
    program = insum_nn.compile(
        statement, sizes={"i": 2} if "+i" in statement else None, out_shape=cuts.out_shape(statement)
    )
    return test_programs.orders(lambda tensors: (program(tensors=tensors),), cuts.drawn(statement))


def program_call(name: str) -> Sequence[Tensor]:
    torch.manual_seed(0)
    case = test_programs.CASES[name]
    return test_programs.orders(case.run, case.draw())


def run_part(part: int, programs: int) -> None:
    """Run one part of the kernels and calls, in a process that loads the sanitizers' library before all others."""
    mine = slice(part, None, _PROCESSES)
    # All that is called again is compiled, here and nowhere else.
    c_program._PATIENCE = 0
    CFunction.find = lambda self: False  # type: ignore[method-assign]
    # What a sanitizer prints names lines of the texts in it, so it is left where one ends the process.
    sanitized = _Sanitized(Path(tempfile.mkdtemp(prefix="insum_nn-sanitized-")))
    sanitized.run_kernels([*kernels()][mine])
    print(f"{sanitized.count} kernels", flush=True)
    with pytest.MonkeyPatch.context() as patch:
        cuts.cut_at_random(patch, 0)
        sanitized.run_calls([partial(cut_call, each) for each in [*cuts.STATEMENTS.values()][mine]])
    sanitized.run_calls([partial(program_call, each) for each in [*test_programs.CASES][mine]])
    print(f"{sanitized.count} with calls of several statements", flush=True)
    seeds = range(programs)[mine]
    for first in range(0, len(seeds), _CALLS):
        sanitized.run_calls([partial(random_call, seed) for seed in seeds[first : first + _CALLS]])
    print(f"{sanitized.count} with {len(seeds)} random programs", flush=True)
    shutil.rmtree(sanitized.folder)


def main() -> None:
    """Run all parts, a process for each."""
    if COMPILER is None:
        sys.exit("there is no C compiler")
    programs = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    if len(sys.argv) > 2:
        return run_part(int(sys.argv[2]), programs)
    # Torch's exceptions are those of the library that the sanitizers' one finds.
    names = ("libasan.so", "libstdc++.so")
    found = [subprocess.run([COMPILER, f"-print-file-name={n}"], capture_output=True, text=True) for n in names]
    libraries = " ".join(os.path.realpath(each.stdout.strip()) for each in found)
    # Python leaves memory behind when it ends.
    own = {"LD_PRELOAD": libraries, "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.compiler.sanitize_cpu", str(programs)]
    parts = [subprocess.Popen([*command, str(n)], env={**os.environ, **own}) for n in range(_PROCESSES)]
    sys.exit(max(abs(part.wait()) for part in parts))


if __name__ == "__main__":
    main()

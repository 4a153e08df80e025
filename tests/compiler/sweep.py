"""Generated kernels of every kind on a GPU, small, under NVIDIA's compute-sanitizer: `python -m tests.compiler.sweep`.

    python -m tests.compiler.sweep                       runs the kernels and compares what they compute
    python -m tests.compiler.sweep memcheck racecheck    does so first, then again under each of these tools
    python -m tests.compiler.sweep memcheck --only uvw   only kernels in whose description this is found

Without torch's cache of memory every tensor is an allocation of its own, so that memcheck sees a step past its end.
Kernels are compiled in the run before, whose machine code Triton keeps on disk. A tool that finds nothing has to have
looked: memcheck must also find the one wild read that is made on purpose.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from insum_nn.compiler.codegen import triton as triton_printer
from insum_nn.compiler.ir.schedule import Precision, Schedule
from insum_nn.compiler.kernels import background
from insum_nn.compiler.kernels.row_structures import divide_rows
from insum_nn.compiler.schedule.form import Form
from insum_nn.errors import InsumError
from insum_nn.facts import IndexFacts
from insum_nn.structure.kernel_map import Geometry, build_kernel_map
from insum_nn.testing.tolerances import assert_matches
from tests.compiler import fused_cases
from tests.compiler.divided_rows import LENGTHS, divided, wait_for_kernel
from tests.compiler.generated_cases import CASES, HOLES, Case, Tensors, kernel_of
from tests.ops.conv_oracle import geometry
from tests.structure.kernel_map.map_cases import BAD_ROWS, MOVES, bad_sites, both, made_by_kernels, sites_of

__all__ = ["KINDS", "Setting", "kinds_of", "main", "settings"]

HERE = Path(__file__).resolve().parents[2]
SECONDS = 90.0
FOUND = 9
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")

_drawing = threading.Lock()

ELEMENTS = (
    Schedule(n=32, k=4),
    Schedule(m=4, n=16),
    Schedule(m=8, n=2, k=16, warps=4),
    Schedule(n=32, k=4, chunk=2),
    Schedule(m=2, n=8, k=2, chunk=1, warps=2),
    Schedule(n=8, groups=3),
)
DOTS = (
    Schedule(m=16, n=16, k=16, dot=True),
    Schedule(m=16, n=64, k=16, dot=True, swap=True),
    Schedule(m=64, n=64, k=32, dot=True, groups=2, stages=3),
    Schedule(m=16, n=32, k=16, dot=True, chunk=1),
    Schedule(m=64, n=128, k=32, dot=True, swap=True, warps=8, stages=3),
    Schedule(m=16, n=32, k=16, dot=True, groups=2, warps=1, stages=1),
)
SPLITS = (
    Schedule(m=2, n=16, k=4, splits=3),
    Schedule(m=16, n=32, k=16, dot=True, splits=3),
    Schedule(m=32, n=32, k=16, dot=True, splits=3, warps=2, stages=1),
)

# RowPartition that the cases give in order; here they are shuffled, some without a row.
ROW_TENSORS = {"spmm": "Row", "spmv": "Row", "group spmm": "Row", "block spmm": "Row", "tensor product uvu": "Dst"}

KINDS = frozenset(
    (
        *("direct", "place", "own", "atomic", "permuted", "divided", "splits", "groups", "initial"),
        *("dot", "dot transposed", "steps", "static tables", "strided", "extents as parameters", "indices of 64 bits"),
        *(
            "indices of 32 bits",
            "float64",
            "float32",
            "float16",
            "bfloat16",
            "tf32",
            "tf32x3",
            "ieee",
        ),
    )
)


@dataclass(frozen=True)
class Setting:
    """One kernel: a case under a schedule (`None`: its default), and what is out of the ordinary about its tensors."""

    name: str
    schedule: Schedule | None = None
    dtype: torch.dtype = torch.float32
    small: bool = False
    shuffled: bool = False
    own: bool = True
    strided: bool = False
    initial: bool = False
    loose: bool = False
    precision: Precision = "ieee"

    @property
    def case(self) -> Case:
        return CASES[self.name]

    def __str__(self) -> str:
        extras = [n for n in ("small", "shuffled", "own", "strided", "initial", "loose") if getattr(self, n)]
        return f"{self.name}, {self.dtype}, {self.schedule}, {self.precision} {' '.join(extras)}"

    def tensors(self, device: torch.device) -> tuple[Tensors, Tensors, Tensor | None]:
        """The tensors, the same numbers in float64 on the CPU, and the initial value."""
        # The numbers come from one generator.
        with _drawing:
            torch.manual_seed(0)
            drawn = self.case.draw(1)
            if self.shuffled:
                row_tensor = drawn[ROW_TENSORS[self.name]]
                row_tensor = row_tensor[torch.randperm(row_tensor.numel())]
                drawn[ROW_TENSORS[self.name]] = torch.where(torch.rand(row_tensor.shape) < 0.2, -1, row_tensor)
        rounded = {n: t.to(self.dtype) if t.is_floating_point() else t for n, t in drawn.items()}
        exact = {n: t.double() if t.is_floating_point() else t for n, t in rounded.items()}
        there = {n: self.placed(t, device) for n, t in rounded.items()}
        initial = None
        if self.initial:
            initial = torch.randn(self.case.oracle(exact, 1).shape).to(device, self.dtype)
        return there, exact, initial

    def placed(self, tensor: Tensor, device: torch.device) -> Tensor:
        if self.small and not tensor.is_floating_point():
            tensor = tensor.int()
        if self.strided:
            order = list(range(tensor.dim()))[::-1]
            if tensor.dim() == 1:
                return torch.stack([tensor, tensor], 1).to(device)[:, 1]
            return tensor.permute(order).contiguous().to(device).permute(order)
        return tensor.to(device)

    @property
    def facts(self) -> dict[str, IndexFacts]:
        return {ROW_TENSORS[self.name]: HOLES} if self.shuffled else {}


def settings() -> Iterator[Setting]:
    """Every kernel of the sweep."""
    for place, (name, case) in enumerate(CASES.items()):
        dots = DOTS if case.dot else ()
        for number, schedule in enumerate((None, *ELEMENTS, *dots)):
            # Products by element are many small programs.
            if not (case.dot and schedule in ELEMENTS[1:3]):
                yield Setting(name, schedule, small=(place + number) % 2 == 0)
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            yield Setting(name, None, dtype)
            if case.dot and dtype != torch.float64:
                yield Setting(name, Schedule(m=64, n=64, k=32, dot=True, swap=True), dtype)
            elif not case.dot:
                yield Setting(name, ELEMENTS[3], dtype, small=True)
        yield Setting(name, None, strided=True)
        yield Setting(name, ELEMENTS[3], initial=True)
        if not case.static:
            yield Setting(name, ELEMENTS[4], loose=True)
        if case.dot:
            for precision in ("tf32", "tf32x3"):
                yield Setting(name, DOTS[2], precision=precision)
    for name in ("convolution's weight gradient", "tensor product uvw", "sddmm", "convolution"):
        for schedule in SPLITS:
            yield Setting(name, schedule)
    for name in ROW_TENSORS:
        dot = CASES[name].dot
        for schedule in (DOTS[3],) if dot else (ELEMENTS[3], ELEMENTS[4]):
            yield Setting(name, schedule, shuffled=True)
        yield Setting(name, DOTS[0] if dot else ELEMENTS[0], shuffled=True, own=False)


def kinds_of(setting: Setting, form: Form, schedule: Schedule, arguments: Sequence[str], divided: bool) -> set[str]:
    """What a kernel is an example of."""
    dot = schedule.dot and form.product is not None
    found = {
        form.strategy: True,
        "permuted": form.permuted,
        "divided": divided,
        "splits": schedule.splits > 1,
        "groups": schedule.groups > 1,
        "initial": setting.initial,
        "dot": dot and not schedule.swap,
        "dot transposed": dot and schedule.swap,
        "steps": "bitmasks" in arguments,
        "static tables": bool(form.tables),
        "strided": setting.strided,
        "extents as parameters": "extent" in arguments,
        "indices of 32 bits": setting.small,
        "indices of 64 bits": not setting.small,
        str(setting.dtype).removeprefix("torch."): True,
        setting.precision: dot and setting.dtype == torch.float32,
    }
    return {kind for kind, holds in found.items() if holds}


def run_all(device: torch.device, chosen: Sequence[Setting], threads: int = 1) -> Counter[str]:
    """Run kernels, compare them, and count what they are examples of.

    Raises:
        AssertionError: one computed something else.
    """
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(partial(run_one, device=device), chosen), Counter[str]())


def run_one(setting: Setting, device: torch.device) -> Counter[str]:
    tensors, exact, initial = setting.tensors(device)
    form, kernel, got = kernel_of(
        setting.case,
        tensors,
        setting.schedule,
        facts=setting.facts,
        initial=initial,
        by_rows=setting.own,
        fixed="" if setting.loose else None,
        precision=setting.precision,
    )
    want = setting.case.oracle(exact, 1)
    scale = setting.case.oracle({n: t.abs() if t.is_floating_point() else t for n, t in exact.items()}, 1).max()
    if initial is not None:
        want, scale = want + initial.cpu().double(), scale + initial.cpu().double().abs().max()
    if setting.precision == "tf32":
        assert (got.cpu().double() - want).abs().max() < 2e-3 * scale, str(setting)
    else:
        assert_matches(got, want, dtype=setting.dtype, kind="sum", scale=float(scale))
    arguments = [argument.kind for argument in kernel.source.arguments]
    divided = "end" in arguments
    return Counter(kinds_of(setting, form, kernel.source.schedule, arguments, divided))


# Several outputs of one kernel: which, by which end of the edges they are walked, and how.
JOINT = [
    (roles, walk, name)
    for roles, walk in (("xyw", "Src"), ("xyw", "Dst"), ("zyw", "Dst"), ("wxzy", "Dst"))
    for name in fused_cases.SCHEDULES
]


def run_joint(setting: tuple[str, str, str], device: torch.device) -> Counter[str]:
    roles, walk, name = setting
    with _drawing:
        torch.manual_seed(0)
        tensors = {n: t.to(device) for n, t in fused_cases.draw(21, holes=True).items()}
    found = fused_cases.together(roles, tensors, fused_cases.SCHEDULES[name], (walk, "e"))
    fused_cases.assert_right(roles, tensors, found)
    return Counter(["several outputs"])


# Kernels of several parts, each of which is to be a function of its own.
PARTED = ("tensor product uvw", "tensor product of representations")
PARTS = (
    Schedule(m=64, n=32, k=32, dot=True, groups=2),
    Schedule(m=16, n=64, k=16, dot=True, swap=True, groups=3, stages=3),
    Schedule(m=16, n=32, k=16, dot=True, groups=2, warps=1, stages=1),
)
FUNCTIONS = [
    Setting(name, schedule, dtype) for name in PARTED for schedule in PARTS for dtype in (torch.float32, torch.bfloat16)
]


def run_functions(device: torch.device, chosen: Sequence[Setting] = FUNCTIONS, threads: int = 1) -> Counter[str]:
    """`run_all` with parts of any length as functions."""
    least, triton_printer._LONG = triton_printer._LONG, 0
    try:
        met = run_all(device, chosen, threads)
    finally:
        triton_printer._LONG = least
    return Counter({"parts as functions": met["groups"]})


# Kernel maps: one of each number of axes and kind.
MAPS = [MOVES[place] for place in (0, 3, 5, 6, 7, 12, 15, 17, 19)]


def run_maps(device: torch.device, chosen: Sequence[Geometry] = MAPS) -> Counter[str]:
    """Maps and divided rows by hand-written kernels are those made without them; bad voxels are refused.

    Raises:
        AssertionError: one is another, or was not built by these kernels.
    """
    bad = [geometry(kind, (3, 3), 2, 1) if kind != "subm" else geometry(kind, (3, 3)) for kind in ("subm", "conv")]
    for how in chosen:
        build_kernel_map(sites_of(how, device)[0], how, proven=True)
    # Until other processes have compiled them, torch's operators build maps.
    background.settle(60.0)
    for how in chosen:
        sites, proven = sites_of(how, device)
        assert made_by_kernels(both(sites, how, proven=proven)), str(how)
    wait_for_kernel(lambda: divide_rows(torch.tensor([1, 2], device=device), 0, 4, 2, 0))
    for lengths in LENGTHS.values():
        for chunk in (1, 8):
            assert divided(lengths, chunk, device).split
    refused = 0
    for row, text in BAD_ROWS.items():
        for how in bad:
            try:
                build_kernel_map(bad_sites(row, device), how)
            except InsumError as error:
                refused += text in str(error)
    assert refused == len(BAD_ROWS) * len(bad)
    return Counter({"kernel maps": len(chosen)})


def read_wildly(device: torch.device) -> None:
    """A kernel that reads far past its operand, because a fact that is not true says that it does not."""
    setting = Setting("spmm")
    tensors, _, _ = setting.tensors(device)
    tensors["Col"][3] = 100_000
    kernel_of(setting.case, tensors, None)
    torch.cuda.synchronize()


# Under a tool.


def command(tool: str | None, *arguments: str) -> list[str]:
    """The command line that runs this file, under a tool."""
    inner = [sys.executable, "-m", "tests.compiler.sweep", *arguments]
    if tool is None:
        return inner
    extra = ["--report-api-errors", "no"] if tool == "memcheck" else []
    return [sanitizer(), "--tool", tool, "--error-exitcode", str(FOUND), *extra, *inner]


def sanitizer() -> str:
    """Where compute-sanitizer is.

    Raises:
        SystemExit: nowhere.
    """
    folders = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    path = shutil.which("compute-sanitizer")
    for folder in folders:
        path = path or shutil.which("compute-sanitizer", path=os.path.join(folder, "bin"))
    if path is None:
        raise SystemExit("compute-sanitizer was not found: install the CUDA toolkit, or put it on PATH")
    return path


Runner = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def in_process(line: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(line, cwd=HERE, env=environment, capture_output=True, text=True, check=False)


# One instruction: threads that hold copies of a value write it to one place of shared memory. Triton does so where a
# tile has fewer values than a program has threads; what comes of it is compared with the oracle in the same run.
_WRITE = r"Write access at (\S+) in <(\w+)>:\d+"
COPIES = re.compile(rf"reported between {_WRITE}\s*\n=+ +and Write access at \1 in <\2>:")


def only_copies(output: str) -> int:
    """The hazards that racecheck reports, if all of them are copies of one value written to one place; else 0."""
    found = len(COPIES.findall(output))
    return found if found == output.count("Race reported between") else 0


def checked(tool: str | None, run: Runner, *more: str) -> bool:
    """Run the sweep, under a tool; print what came of it, and say whether it is clean."""
    initial = time.monotonic()
    # Eight threads compile what the tools then find compiled.
    done = run(command(tool, *more, *(() if tool else ("--threads", "8"))))
    seconds = time.monotonic() - initial
    output = done.stdout + done.stderr
    count = re.search(r"(\d+) kernels ran", output)
    clean = done.returncode == 0 and count is not None and int(count[1]) > 0
    if tool is not None:
        # A tool that was not at work has no summary.
        clean = clean and re.search(r"SUMMARY: 0 ", output) is not None
        copies = only_copies(output) if tool == "racecheck" and done.returncode == FOUND and count is not None else 0
        if copies:
            print(f"racecheck: {copies} stores by threads that hold copies of one value")
        clean = (clean or copies > 0) and seconds <= SECONDS
    print(f"{tool or 'without a tool'}: {count[0] if count else 'no kernel ran'}, {seconds:.0f} s, ", end="")
    print("clean" if clean else f"NOT clean (exit {done.returncode}, at most {SECONDS:g} s are allowed)", flush=True)
    if not clean:
        print(output[-6000:])
    return clean


def check(tools: Sequence[str], run: Runner = in_process, *, only: str = "") -> int:
    """Run without a tool, under each, and with a wild read that memcheck has to find."""
    more = ("--only", only) if only else ()
    fine = checked(None, run, *more)
    fine = fine and all([checked(tool, run, *more) for tool in tools])
    if fine and "memcheck" in tools:
        done = run(command("memcheck", "--wild"))
        fine = done.returncode == FOUND or "Invalid __global__ read" in done.stdout + done.stderr
        print(f"memcheck {'finds' if fine else 'does NOT find'} a wild read")
    return 0 if fine else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compiler.sweep", description=__doc__)
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"of {', '.join(TOOLS)}")
    parser.add_argument("--threads", type=int, default=1, help="that compile and run kernels")
    parser.add_argument("--only", metavar="TEXT", default="", help="kernels in whose description this is found")
    parser.add_argument("--wild", action="store_true", help="only a kernel that reads where it must not")
    options = parser.parse_args(arguments)
    if unknown := set(options.tools) - set(TOOLS):
        parser.error(f"unknown tool {', '.join(sorted(unknown))}")
    if options.tools:
        sanitizer()
        return check(options.tools, only=options.only)
    if not torch.cuda.is_available():
        print("no GPU: 0 kernels ran", file=sys.stderr)
        return 1
    device = torch.accelerator.current_accelerator()
    assert device is not None
    if options.wild:
        read_wildly(device)
        return 0
    chosen, joint, functions = (
        [setting for setting in every if options.only in str(setting)] for every in (settings(), JOINT, FUNCTIONS)
    )
    met = run_all(device, chosen, options.threads)
    with ThreadPoolExecutor(options.threads) as pool:
        met += sum(pool.map(partial(run_joint, device=device), joint), Counter[str]())
    met += run_functions(device, functions, threads=options.threads)
    maps = [how for how in MAPS if options.only in str(how)]
    met += run_maps(device, maps)
    missing = set[str]() if options.only else KINDS - met.keys()
    torch.cuda.synchronize()
    print(
        f"{len(chosen) + len(joint) + len(functions) + len(maps)} kernels ran; "
        + ", ".join(f"{kind} {met[kind]}" for kind in sorted(met))
    )
    if missing:
        print(f"no kernel was an example of: {', '.join(sorted(missing))}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())

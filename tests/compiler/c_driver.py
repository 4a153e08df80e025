"""A bench for generated C: print statements, compile many at once, run them on tensors, beside the interpreter."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from insum_nn.compiler.codegen.c import CKernel, c_kernel
from insum_nn.compiler.codegen.c_prelude import PIECES
from insum_nn.compiler.ir.build import INITIAL, OUTPUT, Names, build
from insum_nn.compiler.ir.nodes import Const, Expr, Kernel, Op, Size
from insum_nn.compiler.kernels.c_compiler import vector_bytes, vector_functions
from insum_nn.compiler.lang.bind import bind, layout_of
from insum_nn.compiler.lang.derivative import derivatives
from insum_nn.compiler.lang.epilogue import PLAIN, Epilogue
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.lang.shapes import resolve_extents
from insum_nn.compiler.lang.syntax import Statement
from insum_nn.compiler.passes.pipeline import lower
from insum_nn.compiler.passes.unroll_static_tables import unroll_static_tables
from insum_nn.dtypes import VALUE_DTYPES
from insum_nn.facts import IndexFacts, StaticTable
from insum_nn.testing.random_programs import random_program
from tests.compiler.ir_interpreter import interpret_kernel

__all__ = ["COMPILER", "FLAGS", "Case", "case_of", "check", "compiled", "extent", "random_cases", "sorted_entries"]

COMPILER = shutil.which("cc")
FLAGS = [
    *"-O2 -fno-tree-vectorize -fno-tree-slp-vectorize -march=native -fno-math-errno -fno-trapping-math".split(),
    *("-shared", "-fPIC", "-Wno-psabi"),
    *vector_functions(),
]


def extent(expr: Expr, sizes: Mapping[str, int]) -> int:
    """The value of an extent."""
    if isinstance(expr, Const):
        return int(expr.value)
    if isinstance(expr, Size):
        return sizes[expr.name]
    assert isinstance(expr, Op)
    a, b = (extent(arg, sizes) for arg in expr.args)
    return a + b if expr.name == "add" else a * b


def sorted_entries(entries: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Where the entries of each row begin, and the entries in the order of their rows; none of -1."""
    flat = entries.reshape(-1).numpy()
    order = np.argsort(flat, kind="stable")
    order = order[flat[order] >= 0]
    begin = np.searchsorted(flat[order], np.arange(rows + 1))
    return torch.from_numpy(begin.astype(np.int32)), torch.from_numpy(order.astype(np.int32))


def translation_unit(kernels: Sequence[CKernel], entry: str) -> str:
    """Return the text of kernels and of one function that calls them in order.

    `entry` takes the pointers of all kernels, each once, in the order in which they are met, then their numbers,
    likewise, and the number of threads, as `long`. It returns 0, or 1 if a kernel got no memory. Arguments go by place,
    so a caller may first give pointers and numbers of its kernels other names (`dataclasses.replace`), as those of a
    graph's tensors.
    """
    pieces = dict.fromkeys(piece for kernel in kernels for piece in kernel.prelude.split(PIECES))
    pointers = dict.fromkeys(pointer for kernel in kernels for pointer in kernel.pointers)
    numbers = dict.fromkeys(number for kernel in kernels for number in kernel.numbers)
    arguments = ", ".join([*(f"void *{p}" for p in pointers), *(f"long {n}" for n in numbers), "long threads"])
    calls = [f"{k.name}({', '.join((*k.pointers, *k.numbers, 'threads'))})" for k in kernels]
    body = f"int {entry}({arguments}) {{\n  return {' || '.join(calls) or '0'};\n}}\n"
    return PIECES.join([*pieces, *(kernel.text for kernel in kernels), body])


@dataclass
class Case:
    """A kernel with everything that a call takes, by canonical names.

    Attributes:
        title: what it is.
        kernel: the algorithm.
        memory: its inputs.
        sizes: by name.
        shape: of the output.
    """

    title: str
    kernel: Kernel
    memory: dict[str, Tensor]
    sizes: dict[str, int]
    shape: tuple[int, ...]

    @property
    def out_dtype(self) -> torch.dtype:
        return getattr(torch, self.kernel.results[0].buffer.dtype)  # type: ignore[no-any-return]

    def printed(self, name: str, **options: Any) -> CKernel:
        return c_kernel(lower(self.kernel, **{"vector_bytes": vector_bytes(), **options}), name)

    def expected(self) -> Tensor:
        """What the interpreter computes, in float64 or int64."""
        return interpret_kernel(self.kernel, self.memory, self.sizes)[OUTPUT]

    def run(self, function: Any, printed: CKernel) -> Tensor:
        """Call a function of the kernel's own arguments."""
        memory = {name: tensor.contiguous() for name, tensor in self.memory.items()}
        if printed.structure is not None:
            index, rows = printed.structure
            memory["begin"], memory["order"] = sorted_entries(self.memory[index], extent(rows, self.sizes))
        for copy in printed.copies:
            memory[copy.copy.name] = memory[copy.source.name].transpose(copy.swapped, -1).contiguous()
        out = torch.zeros(self.shape, dtype=self.out_dtype)
        if not printed.filled:
            # What no kernel may leave.
            out.fill_(float("nan") if out.is_floating_point() else 77)
        memory[OUTPUT] = out
        pointers = [ctypes.c_void_p(memory[name].data_ptr()) for name in printed.pointers]
        function.restype = ctypes.c_int
        numbers = (*(self.sizes[name] for name in printed.numbers), torch.get_num_threads())
        status = function(*pointers, *map(ctypes.c_long, numbers))
        assert status == 0
        return out


def case_of(
    statement: Statement,
    tensors: Mapping[str, Tensor],
    *,
    initial: Tensor | None = None,
    sizes: Mapping[str, int] | None = None,
    out_shape: Sequence[int | None] | None = None,
    drop_outside: bool = False,
    fixed: Sequence[str] = (),
    static: Sequence[str] = (),
    unrolled: Sequence[str] = (),
    epilogue: Epilogue = PLAIN,
    facts: Mapping[str, IndexFacts] | None = None,
    compiled_in: int = 0,
) -> Case:
    """The kernel of a call; `compiled_in`: the greatest extent of axes that becomes a number."""
    known = {n: IndexFacts(masked=bool((tensors[n] < 0).any())) for n in statement.index_tensors()}
    bound = bind(
        statement, tensors, initial, facts={**known, **(facts or {})}, drop_outside=drop_outside, epilogue=epilogue
    )
    layout, names = bound.layout, Names(statement)
    ordered = [tensors[name] for name in layout.tensors]
    extents = resolve_extents(statement, ordered, initial, dict(sizes or {}), out_shape)
    by_index = dict(zip(layout.indices, extents.indices, strict=True))
    bound = replace(
        bound, static=tuple((name, by_index[name]) for name in layout.indices if name in {*fixed, *unrolled})
    )
    kernel = build(bound)
    memory = {names.tensors[name]: tensor for name, tensor in zip(layout.tensors, ordered, strict=True)}
    found = {names.indices[name]: n for name, n in by_index.items()}
    found |= {f"{name}_{axis}": n for name, tensor in memory.items() for axis, n in enumerate(tensor.shape)}
    found |= {f"{OUTPUT}_{axis}": n for axis, n in enumerate(extents.output)}
    if static:
        tables = {names.tensors[name]: StaticTable.of(tensors[name]) for name in static}
        loops = [names.indices[name] for name in unrolled]
        points: list[dict[str, int]] = [{}]
        for name in unrolled:
            points = [{**p, names.indices[name]: k} for p in points for k in range(by_index[name])]
        kernel = unroll_static_tables(kernel, tables, loops, points)
        for name in static:
            del memory[names.tensors[name]]
    if initial is not None:
        memory[INITIAL] = initial.expand(extents.output)
    small: Any = {
        Size(name): Const(n) for name, n in found.items() if "_" in name and n <= compiled_in and name[-1] != "0"
    }
    replaced = kernel.replace(small)
    assert isinstance(replaced, Kernel)
    return Case(str(statement), replaced, memory, found, tuple(extents.output))


def compiled(kernels: Sequence[CKernel], folder: Path, *, threads: bool = False, flags: Sequence[str] = ()) -> Any:
    """Compile kernels of different names as one library, with an entry `call_NAME` for each."""
    assert COMPILER is not None
    parts = [translation_unit([kernel], f"call_{kernel.name}") for kernel in kernels]
    # Preludes of several kernels may stand in one file, each piece once.
    pieces = dict.fromkeys(piece for part in parts for piece in part.split("\n\n"))
    source, library = folder / "kernels.c", folder / "kernels.so"
    source.write_text("\n\n".join(pieces))
    own = [*FLAGS, *(["-fopenmp"] if threads else []), *flags]
    made = subprocess.run([COMPILER, *own, str(source), "-o", str(library), "-lm"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[:3000]
    assert "warning" not in made.stderr, made.stderr[:3000]
    return ctypes.CDLL(str(library))


def random_cases(seed: int) -> list[tuple[Case, torch.dtype]]:
    """The kernels of a random program and of its derivatives, with numbers of a random dtype."""
    program = random_program(seed, max_size=5 if seed % 3 else 12)
    statement, rng = parse(program.expression), random.Random(seed)
    indices, tables = statement.indices(), {*statement.index_tensors()}
    floats = tables != {*program.tensors} or program.initial is not None
    dtype = rng.choice(VALUE_DTYPES) if floats else torch.float32
    if not dtype.is_floating_point and any(mark in program.expression for mark in (".", "e-")):
        dtype = torch.float32

    def cast(tensor: Tensor) -> Tensor:
        """The same layout, gaps included, with small numbers whose sums of products every dtype holds."""
        tensor = tensor.resolve_neg()
        flat = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // 8,), (1,), 0)
        values = flat.mul(2).round().clamp(0 if dtype is torch.uint8 else -2, 2)
        values = values if dtype.is_floating_point else values.nan_to_num(99)
        return torch.as_strided(values.to(dtype), tensor.shape, tensor.stride(), tensor.storage_offset())

    tensors = {name: t if name in tables else cast(t) for name, t in program.tensors.items()}
    initial = None if program.initial is None else cast(program.initial)
    fixed = [index for index in indices if rng.random() < 0.5]
    options = {"fixed": fixed, "compiled_in": rng.choice((0, 128))}
    sizes, shape = program.sizes, program.out_shape
    cases = [case_of(statement, tensors, initial=initial, sizes=sizes, out_shape=shape, **options)]
    if statement.combining.adds and initial is None:
        layout = layout_of(statement)
        extents = resolve_extents(statement, [tensors[n] for n in layout.tensors], None, sizes, shape)
        by_index = dict(zip(layout.indices, extents.indices, strict=True))
        for operand in sorted(layout.value_tensors - tables):
            derivative = derivatives(statement, operand)
            for each in derivative.statements:
                own = {index: n for index, n in by_index.items() if index in each.indices()}
                gradient = torch.randint(-2, 3, extents.output).to(dtype)
                read = {n: gradient if n == derivative.seed else tensors[n] for n in layout_of(each).tensors}
                options["fixed"] = [index for index in fixed if index in own]
                where: Any = {"sizes": own, "out_shape": tensors[operand].shape, "drop_outside": True}
                cases.append(case_of(each, read, **where, **options))
    return [(case, dtype) for case in cases]


TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}


def check(case: Case, got: Tensor) -> None:
    """Compare what C computed with what the interpreter does; integers wrap as torch's do."""
    want = case.expected()
    if not got.is_floating_point():
        want = want.to(got.dtype)
        assert torch.equal(got, want), case.title
        return
    kinds = [t.dtype for t in (got, *case.memory.values()) if t.is_floating_point()]
    tolerance = max(TOLERANCES[dtype] for dtype in kinds)
    scale = want[want.isfinite()].abs().max().item() if want.isfinite().any() else 0
    torch.testing.assert_close(
        got.double(),
        want.double(),
        rtol=tolerance,
        atol=tolerance * scale,
        equal_nan=True,
        msg=lambda m: f"{case.title}: {m}",
    )

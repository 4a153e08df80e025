"""Generated C: every kernel computes what the interpreter of the IR does."""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from insum_nn.compiler.codegen.c import CKernel, NotInC, c_kernel
from insum_nn.compiler.codegen.c_prelude import Helpers, number_of
from insum_nn.compiler.ir.verify import verify_kernel
from insum_nn.compiler.lang.derivative import derivatives
from insum_nn.compiler.lang.epilogue import Epilogue
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.lang.syntax import Statement
from insum_nn.compiler.passes.cpu.group_entries import group_entries
from insum_nn.compiler.passes.gather_writes import gather_writes
from insum_nn.compiler.passes.pipeline import lower
from insum_nn.compiler.passes.written_cells import written_cells
from insum_nn.dtypes import VALUE_DTYPES, dtype_of
from insum_nn.facts import IndexFacts
from tests.compiler.c_driver import (
    COMPILER,
    FLAGS,
    Case,
    case_of,
    check,
    compiled,
    extent,
    random_cases,
    sorted_entries,
    translation_unit,
)
from tests.compiler.ir_interpreter import interpret_kernel

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")

Text = TypeVar("Text")
# A name, a statement, its tensors, options of `case_of`.
Given = tuple[str, Text, dict[str, Tensor], dict[str, Any]]


def numbers(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape).double()


def entries(high: int, *shape: int, missing: bool = False) -> Tensor:
    found = torch.randint(0, high, shape)
    return torch.where(torch.rand(shape) < 0.3, -1, found) if missing else found


def _statements() -> Iterator[Given[str]]:
    torch.manual_seed(3)
    n = numbers
    yield (
        "spmm",
        "C[R[p],n] += V[p] * B[K[p],n]",
        {"V": n(40), "B": n(7, 21), "R": entries(9, 40, missing=True), "K": entries(7, 40)},
        {"out_shape": (9, None)},
    )
    yield (
        "sddmm",
        "A[e,h] += Q[D[e],h,k] * X[S[e],h,k]",
        {"Q": n(5, 3, 17), "X": n(6, 3, 17), "D": entries(5, 33), "S": entries(6, 33, missing=True)},
        {},
    )
    yield (
        "attention",
        "Y[D[e],h,k] += A[e,h] * X[S[e],h,k]",
        {"A": n(33, 2), "X": n(6, 2, 16), "D": entries(5, 33), "S": entries(6, 33)},
        {"out_shape": (5, None, None), "fixed": "hk"},
    )
    yield (
        "mttkrp",
        "Y[I[p],r] += V[p] * A[J[p],r] * B[K[p],r]",
        {"V": n(30), "A": n(4, 9), "B": n(5, 9), "I": entries(6, 30), "J": entries(4, 30), "K": entries(5, 30)},
        {"out_shape": (6, None)},
    )
    yield "histogram", "H[B[i]] += W[i]", {"W": n(50), "B": entries(5, 50)}, {"out_shape": (5,)}
    yield (
        "species",
        "Y[n,o] += X[n,c] * W[Z[n],c,o]",
        {"X": n(23, 5), "W": n(4, 5, 19), "Z": entries(4, 23, missing=True)},
        {"fixed": "co"},
    )
    yield (
        "experts",
        "Y[t,o] += G[t,k] * X[t,c] * W[E[t,k],c,o]",
        {"G": n(11, 2), "X": n(11, 5), "W": n(4, 5, 40), "E": entries(4, 11, 2, missing=True)},
        {"fixed": "kco"},
    )
    yield (
        "relations",
        "Y[D[e],o] += X[S[e],c] * W[T[e],c,o]",
        {"X": n(6, 5), "W": n(4, 5, 8), "D": entries(7, 29), "S": entries(6, 29), "T": entries(4, 29)},
        {"out_shape": (7, None), "fixed": "co"},
    )
    # Of whose gradient each matrix has many terms, walked in parts; that of X reads a copy of each matrix.
    yield (
        "wide relations",
        "Y[D[e],o] += X[S[e],c] * W[T[e],c,o]",
        {"X": n(6, 16), "W": n(2, 16, 32), "D": entries(7, 150), "S": entries(6, 150), "T": entries(2, 150)},
        {"out_shape": (7, None), "fixed": "co"},
    )
    yield (
        "wide table",
        "dW[k,c,d] += Y[i,d] * X[N[i,k],c]",
        {"X": n(7, 16), "Y": n(7, 32), "N": entries(7, 7, 2, missing=True)},
        {"fixed": "kcd", "drop_outside": True},
    )
    yield (
        "table",
        "Y[i,d] += X[N[i,k],c] * W[k,c,d]",
        {"X": n(13, 8), "W": n(5, 8, 24), "N": entries(13, 13, 5, missing=True)},
        {"fixed": "kcd"},
    )
    yield (
        "pairs",
        "Y[O[p],d] += X[I[p],c] * W[F[p],c,d]",
        {"X": n(13, 3), "W": n(5, 3, 7), "O": entries(13, 40), "I": entries(13, 40), "F": entries(5, 40).sort().values},
        {"out_shape": (13, None), "fixed": "cd"},
    )
    yield (
        "convolution",
        "O[n,m,p] += X[n,c,2*p+3*r-4] * W[m,c,r]",
        {"X": n(2, 3, 40), "W": n(5, 3, 4)},
        {"sizes": {"p": 21}, "fixed": "mcr"},
    )
    moved = {"A": n(7, 13), "S": entries(5, 7, missing=True)}
    yield "moved by terms", "Y[S[k],i-2*j+9] += A[k,j]", moved, {"sizes": {"i": 9}, "out_shape": (5, 24)}
    yield "backwards", "O[p,r] += X[9-p] * W[r-p,r]", {"X": n(12), "W": n(19, 19)}, {"sizes": {"p": 25}}
    yield (
        "pruned",
        "O[n,M[f],p,q] += F[f] * I[n,C[f],p+R[f]-1,q+S[f]-1]",
        {
            "F": n(30),
            "I": n(2, 3, 6, 21),
            "M": entries(4, 30),
            "C": entries(3, 30, missing=True),
            "R": entries(3, 30),
            "S": entries(3, 30),
        },
        {"sizes": {"p": 6, "q": 21}, "out_shape": (2, 4, 6, 21), "compiled_in": 128},
    )
    yield (
        "chain",
        "Y[A[B[i]],j] += X[C[A[E[i]]] + D[i] - 1, j]",
        {
            "X": n(9, 18),
            "A": entries(8, 8, missing=True),
            "B": entries(8, 20, missing=True),
            "C": entries(5, 8),
            "E": entries(8, 20),
            "D": entries(4, 20),
        },
        {"out_shape": (8, None), "sizes": {"i": 20}},
    )
    yield "diagonal", "Y[i,i] += X[i,j] * 0.5", {"X": n(17, 4)}, {}
    yield "rank 0", "s += X[i,j] * W[j]", {"X": n(17, 43), "W": n(43)}, {}
    yield "broadcast", "Y[i,j] = 2 * a", {"a": numbers()}, {"sizes": {"i": 3, "j": 37}}


def _padded() -> Iterator[Given[str]]:
    """Statements whose terms miss an operand at its borders, and read it many times."""
    n = numbers
    yield (
        "dilated",
        "O[n,m,p] += X[n,c,p+2*r-4] * W[m,c,r]",
        {"X": n(2, 3, 19), "W": n(17, 3, 5)},
        {"sizes": {"p": 21}, "fixed": "mcr"},
    )
    yield (
        "strided",
        "O[n,m,p] += X[n,c,2*p-r+3] * W[m,c,r]",
        {"X": n(2, 3, 33), "W": n(19, 3, 3)},
        {"sizes": {"p": 18}, "fixed": "mcr"},
    )
    entry = {"M": entries(9, 120), "C": entries(3, 120), "R": entries(3, 120, missing=True), "S": entries(3, 120)}
    yield (
        "pruned",
        "O[n,M[f],p,q] += I[n,C[f],p+R[f]-1,q+S[f]-1] * F[f]",
        {"I": n(2, 3, 7, 21), "F": n(120), **entry},
        {"sizes": {"p": 7, "q": 21}, "out_shape": (None, 9, None, None)},
    )
    # Entries address the last axis: what is read along the lanes is transposed.
    yield (
        "columns",
        "Y[a,I[b]] += V[b] * X[a,J[b]]",
        {"V": n(130), "X": n(19, 21), "I": entries(5, 130), "J": entries(21, 130, missing=True)},
        {"out_shape": (None, 5)},
    )
    yield (
        "two operands",
        "O[p,m] += X[p+r-1,s] * W[m,p+s-2]",
        {"X": n(24, 5), "W": n(33, 24)},
        {"sizes": {"p": 24, "r": 3}, "fixed": "mrs"},
    )


_PADDED = [*_padded()]
STATEMENTS = [*_statements(), *_PADDED]
TABLES = {
    "CG": torch.tensor([0.5, -1.0, 2.0, 1.5, 0.25]).double(),
    "I": torch.tensor([0, 1, 2, 2, 0]),
    "J": torch.tensor([1, 0, 1, 2, 2]),
    "K": torch.tensor([0, 3, 1, 0, 2]),
}


def products() -> Iterator[Given[str]]:
    """Statements over static tables."""
    torch.manual_seed(4)
    own = {"static": tuple(TABLES), "unrolled": ("p",)}
    x, y, w = numbers(9, 21, 3), numbers(9, 3), numbers(9, 21)
    yield (
        "uvu",
        "O[z,u,K[p]] += CG[p] * X[z,u,I[p]] * Y[z,J[p]] * W[z,u]",
        {"X": x, "Y": y, "W": w, **TABLES},
        {**own, "out_shape": (None, None, 4)},
    )
    yield (
        "uvw",
        "O[z,w,K[p]] += CG[p] * X[z,u,I[p]] * Y[z,v,J[p]] * W[u,v,w]",
        {"X": x, "Y": numbers(9, 2, 3), "W": numbers(21, 2, 18), **TABLES},
        {**own, "out_shape": (None, None, 5), "fixed": "uvw"},
    )
    scatter = {"D": entries(5, 9, missing=True)}
    yield (
        "message",
        "O[D[z],u,K[p]] += CG[p] * X[z,u,I[p]] * Y[z,J[p]]",
        {"X": x, "Y": y, **scatter, **TABLES},
        {**own, "out_shape": (5, None, 4), "fixed": "u"},
    )
    yield (
        "shifted",
        "O[z,K[p]+q] += CG[p] * X[z,q,I[p]] * Y[z,J[p]+q-1]",
        {"X": x, "Y": y, **TABLES},
        {**own, "out_shape": (None, 24), "fixed": "q"},
    )


def with_derivatives(found: Iterator[Given[str]]) -> Iterator[Given[Statement]]:
    """Statements, each followed by those of its gradients."""
    for name, text, tensors, options in found:
        statement = parse(text)
        yield name, statement, tensors, options
        case = case_of(statement, tensors, **options)
        for operand in tensors:
            if operand in statement.index_tensors() or operand in options.get("static", ()):
                continue
            derivative = derivatives(statement, operand)
            for number, each in enumerate(derivative.statements):
                read = {**tensors, derivative.seed: numbers(*case.shape)}
                read = {n: read[n] for n in each.tensors()}
                by_letter = dict(zip(statement.indices(), map(chr, range(97, 123)), strict=False))
                sizes = {i: case.sizes[letter] for i, letter in by_letter.items() if i in each.indices()}
                own: dict[str, Any] = {
                    **options,
                    "sizes": sizes,
                    "out_shape": tuple(tensors[operand].shape),
                    "drop_outside": True,
                }
                own["fixed"] = [i for i in own.get("fixed", ()) if i in sizes]
                yield f"{name} d{operand}{number}", each, read, own


def in_dtype(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    if dtype is torch.uint8:
        tensors = {n: t.abs() if t.is_floating_point() else t for n, t in tensors.items()}
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}


def run(cases: list[Case], folder: Path, *, threads: bool = False, **options: Any) -> list[Tensor]:
    """Print and compile kernels together, and run each."""
    printed = [case.printed(f"k{number}", **options) for number, case in enumerate(cases)]
    library = compiled(printed, folder, threads=threads)
    return [case.run(getattr(library, f"call_k{n}"), printed[n]) for n, case in enumerate(cases)]


# One of each way to place loops: the others differ in nothing that a dtype shows in.
_EACH_DTYPE = {"spmm", "experts", "wide table", "convolution", "backwards", "rank 0"}


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
def test_statements_in_every_dtype(dtype: torch.dtype, tmp_path: Path):
    cases = [
        case_of(parse(text), in_dtype(tensors, dtype), **options)
        for name, text, tensors, options in STATEMENTS
        if name in _EACH_DTYPE
    ]
    for case, got in zip(cases, run(cases, tmp_path), strict=True):
        check(case, got)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_statements_and_their_derivatives(dtype: torch.dtype, tmp_path: Path):
    cases = [
        case_of(statement, in_dtype(tensors, dtype), **options)
        for _, statement, tensors, options in with_derivatives(iter(STATEMENTS))
    ]
    for case, got in zip(cases, run(cases, tmp_path), strict=True):
        check(case, got)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_static_tables_are_straight_line_code(dtype: torch.dtype, tmp_path: Path):
    cases: list[Case] = []
    for _, statement, tensors, options in with_derivatives(products()):
        static = tuple(n for n in options["static"] if n in tensors)
        # Values of a table have the factors' dtype; these are numbers that every dtype holds.
        cases.append(
            case_of(
                statement,
                in_dtype(tensors, dtype),
                **{**options, "static": static},
                facts={n: IndexFacts(masked=False, proven=True) for n in static if n != "CG"},
            )
        )
    for case, got in zip(cases, run(cases, tmp_path), strict=True):
        check(case, got)


def test_random_programs_and_their_derivatives(tmp_path: Path):
    cases = [case for seed in range(40) for case, _ in random_cases(seed)]
    for case, got in zip(cases, run(cases, tmp_path), strict=True):
        check(case, got)


def test_threads_change_no_bit(tmp_path: Path):
    torch.manual_seed(1)
    cases = [
        case_of(
            statement, {n: torch.randn(t.shape) if t.is_floating_point() else t for n, t in tensors.items()}, **options
        )
        for _, statement, tensors, options in with_derivatives(iter(STATEMENTS))
    ]
    printed = [case.printed(f"k{number}") for number, case in enumerate(cases)]
    library = compiled(printed, tmp_path, threads=True)
    for number, case in enumerate(cases):
        found = list[Tensor]()
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(case.run(getattr(library, f"call_k{number}"), printed[number]).nan_to_num(5))
        assert torch.equal(*found), case.title
    assert sum("#pragma omp" in each.text for each in printed) > 30


def _endings() -> Iterator[Case]:
    """Initial values, activations and casts, where cells are sums in registers, sums in memory, and not written."""
    torch.manual_seed(6)
    v, x, row, col = numbers(20), numbers(6, 19), entries(5, 20, missing=True), entries(6, 20)
    texts = {
        "Y[R[p],n] += V[p] * X[K[p],n]": {"V": v, "X": x, "R": row, "K": col},
        "Y[R[p] + 0*n,n] += V[p] * X[K[p],n]": {"V": v, "X": x, "R": row, "K": col},
        "Y[K[p],R[p]] += V[p]": {"V": v, "R": row, "K": col},
        "Y[i,i] += X[i,j]": {"X": numbers(4, 9)},
        "Y[i,j] += X[i,j+3]": {"X": x},
        "Y += X[i,j]": {"X": x},
        "Y[R[p],n] max= V[p] * X[K[p],n]": {"V": v, "X": x, "R": row, "K": col},
        "Y[K[p],R[p]] min= V[p]": {"V": v, "R": row, "K": col},
        "Y[T[e],i,j] += A[e,i] * B[e,j]": {"A": numbers(150, 16), "B": numbers(150, 32), "T": entries(2, 150)},
    }
    shapes = [(5, 19), (5, 19), (6, 5), (4, 4), (6, 19), (), (5, 19), (6, 5), (2, 16, 32)]
    for (text, tensors), shape in zip(texts.items(), shapes, strict=True):
        statement = parse(text.replace("R[p] + 0*n", "R[Z[p]] + 1 - 1") if "0*n" in text else text)
        if "0*n" in text:
            tensors = {**tensors, "Z": torch.arange(20)}
        for dtype, epilogue in (
            (torch.float32, Epilogue("relu")),
            (torch.float32, Epilogue("gelu", "float64")),
            (torch.bfloat16, Epilogue("silu", "float16")),
            (torch.float64, Epilogue(None, "bfloat16")),
            (torch.float16, Epilogue()),
            (torch.float32, Epilogue()),
        ):
            given = in_dtype(tensors, dtype)
            for initial in (None, numbers(*shape).to(dtype), numbers(*shape[1:]).to(dtype).expand(shape)):
                sizes = {"j": 19} if "j+3" in text else {}
                options: dict[str, Any] = {"out_shape": shape, "sizes": sizes, "fixed": "ij" if "T[e]" in text else ""}
                yield case_of(statement, given, initial=initial, epilogue=epilogue, **options)


def test_initial_values_activations_and_casts(tmp_path: Path):
    cases = [*_endings()]
    for case, got in zip(cases, run(cases, tmp_path), strict=True):
        check(case, got)


@pytest.mark.parametrize("operator", ["max=", "min="])
def test_extrema_keep_what_is_no_number(operator: str, tmp_path: Path):
    v = torch.randn(30, 11)
    v[torch.rand(30, 11) < 0.2] = math.nan
    v[torch.rand(30, 11) < 0.2] = -math.inf if operator == "max=" else math.inf
    row = entries(12, 30, missing=True)
    cases = [
        case_of(parse(f"Y[R[p],n] {operator} V[p,n]"), {"V": v, "R": row}, out_shape=(12, None)),
        case_of(parse(f"Y[R[p]] {operator} V[p,n]"), {"V": v, "R": row}, out_shape=(12,)),
        case_of(parse(f"Y[p+n] {operator} V[p,n]"), {"V": v}, out_shape=(45,)),
        *(
            case_of(parse(f"{y} {operator} {value}"), {"V": each}, fixed=fixed)
            for each in (v, v.repeat(1, 19), v[:, :5].double(), v[:, :0])
            for y in ("Y[p]", "Y")
            for value in ("V[p,n]", "-2 * abs(V[p,n])")
            for fixed in ("", "n")
        ),
        case_of(
            parse(f"Y[p,n] {operator} V[p+q-1,n+r-1]"),
            {"V": v},
            out_shape=(30, 11),
            sizes={"p": 30, "n": 11, "q": 3, "r": 3},
        ),
    ]
    for case, got in zip(cases, run(cases, tmp_path), strict=True):
        check(case, got)


def test_what_only_missed_terms_read_does_not_show(tmp_path: Path):
    w, x = numbers(5, 3, 5), numbers(2, 3, 40)
    w[:, :, 0] = math.inf
    near = entries(9, 9, 4, missing=True)
    near[:, 2] = -1
    stack = numbers(4, 3, 9)
    stack[2] = math.inf
    seeds = {"dO": numbers(2, 5, 36), "W": w}
    cases = [
        # Cell 39 is met by no term of the first offset, whose weight is infinite.
        case_of(parse("dX[n,c,p+r] += dO[n,m,p] * W[m,c,r]"), seeds, out_shape=(2, 3, 40), drop_outside=True),
        case_of(
            parse("Y[i,d] += X[N[i,k],c] * W[k,c,d]"),
            {"X": numbers(9, 3), "N": near, "W": stack},
            drop_outside=True,
            fixed="kcd",
        ),
        case_of(
            parse("dX[N[i,k],c] += Y[i,d] * W[k,c,d]"),
            {"Y": numbers(9, 9), "N": near, "W": stack},
            out_shape=(9, 3),
            drop_outside=True,
            fixed="kcd",
        ),
    ]
    for case, got in zip(cases, run(cases, tmp_path), strict=True):
        check(case, got)
    del x


def test_empty_extents(tmp_path: Path):
    none = torch.empty(0, dtype=torch.int64)
    cases = [
        case_of(
            parse("C[R[p],n] += V[p] * B[K[p],n]"),
            {"V": numbers(0), "B": numbers(7, 21), "R": none, "K": none},
            out_shape=(9, None),
        ),
        case_of(
            parse("C[R[p],n] max= V[p] * B[K[p],n]"),
            {"V": numbers(0), "B": numbers(7, 0), "R": none, "K": none},
            out_shape=(0, None),
        ),
        case_of(
            parse("Y[n,o] += X[n,c] * W[Z[n],c,o]"), {"X": numbers(5, 0), "W": numbers(3, 0, 9), "Z": entries(3, 5)}
        ),
        case_of(parse("Y[n,o] += X[n,c] * W[Z[n],c,o]"), {"X": numbers(0, 4), "W": numbers(3, 4, 9), "Z": none}),
        case_of(parse("s += X[i,j]"), {"X": numbers(0, 4)}),
        case_of(parse("Y[p+r] += X[p] * W[r]"), {"X": numbers(0), "W": numbers(3)}, out_shape=(5,)),
    ]
    for case, got in zip(cases, run(cases, tmp_path), strict=True):
        check(case, got)


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda s: s[0])
def test_passes_leave_a_kernel_as_it_is(statement: Given[str]):
    for _, each, tensors, options in with_derivatives(iter([statement])):
        case = case_of(each, tensors, **options)
        want = case.expected()
        gathered = gather_writes(case.kernel)
        verify_kernel(gathered, placed=False)
        assert torch.equal(interpret_kernel(gathered, case.memory, case.sizes)["out"], want)
        if grouped := group_entries(case.kernel):
            walk, read, count = grouped
            verify_kernel(walk.kernel, placed=False)
            begin, order = sorted_entries(case.memory[read.buffer.name], extent(count, case.sizes))
            memory = {**case.memory, "begin": begin, "order": order}
            assert torch.equal(interpret_kernel(walk.kernel, memory, case.sizes)["out"], want)


def _cells(text: str, shape: tuple[int, ...], fixed: str = "abcdefghijkl", **tensors: Tensor) -> tuple[bool, bool]:
    found = written_cells(case_of(parse(text), tensors, out_shape=shape, fixed=fixed, compiled_in=128).kernel)
    return found.once, found.all


def test_cells_that_are_written():
    x, e = numbers(4, 6), entries(5, 4)
    assert _cells("Y[i,j] += X[i,j]", (4, 6), X=x) == (True, True)
    assert _cells("Y[i,i] += X[i,j]", (4, 4), X=x) == (True, False)
    assert _cells("Y[E[i],j] += X[i,j]", (5, 6), X=x, E=e) == (False, False)
    assert _cells("Y[E[i],i] += X[i,j]", (5, 4), X=x, E=e) == (True, False)
    assert _cells("Y[i,2*j] += X[i,j]", (4, 11), X=x) == (True, False)
    assert _cells("Y[k,6*i+j] += X[i,j] * A[k]", (3, 24), X=x, A=numbers(3)) == (True, True)
    assert _cells("Y[k,i+j] += X[i,j] * A[k]", (3, 9), X=x, A=numbers(3)) == (False, True)
    # Of one extent, the kernel knows nothing.
    assert _cells("Y[6*i+j] += X[i,j]", (24,), fixed="j", X=x) == (True, False)
    assert _cells("Y[6*i+j+3] += X[i,j]", (27,), fixed="j", X=x) == (True, False)
    assert _cells("Y[5*i+j] += X[i,j]", (21,), fixed="j", X=x) == (False, False)
    assert _cells("Y[6*i+j] += X[i,j]", (24,), fixed="i", X=x) == (False, False)
    assert _cells("Y[6*i+j] += X[i,j]", (24,), fixed="", X=x) == (False, False)
    assert _cells("Y[i,6*i+j] += X[i,j]", (4, 24), fixed="j", X=x) == (False, False)


@pytest.mark.parametrize("fixed", ["", "j", "ij"])
@pytest.mark.parametrize(
    "text", ["Y[k,6*i+j] += X[i,j] * A[k]", "Y[7*i+j+2,k] += X[i,j] * A[k]", "Y[k,4*j+i] += X[i,j] * A[k]"]
)
def test_writes_to_cells_of_their_own(text: str, fixed: str, tmp_path: Path):
    shape = (3, 40) if text.startswith("Y[k") else (40, 3)
    case = case_of(parse(text), {"X": numbers(4, 6), "A": numbers(3)}, out_shape=shape, fixed=fixed)
    (got,) = run([case], tmp_path)
    check(case, got)
    if fixed == "ij":
        # Were they gathered, each cell would ask of each entry whether it writes there.
        assert lower(case.kernel).kernel is case.kernel


def test_kernels_of_several_dtypes_stand_in_one_file(tmp_path: Path):
    text = parse("C[R[p],n] += V[p] * B[K[p],n]")
    cases = [
        case_of(
            text,
            in_dtype({"V": numbers(40), "B": numbers(7, 21), "R": entries(9, 40), "K": entries(7, 40)}, dtype),
            out_shape=(9, None),
        )
        for dtype in VALUE_DTYPES
    ]
    for case, got in zip(cases, run(cases, tmp_path), strict=True):
        check(case, got)


def test_gradients_of_pruned_filters_are_summed_in_vectors():
    """A walk divides the number of an entry by the slots of a group: this says where pixels are, not how far apart."""
    text = "O[n,M[g],p,q] += F[Slot[g,k]] * I[n,C[g,k],p+R[g,k]-1,q+S[g,k]-1]"
    tensors = {"F": numbers(30), "I": numbers(2, 3, 6, 21), "Slot": torch.arange(30).view(10, 3), "M": entries(4, 10)}
    tensors |= {name: entries(3, 30).view(10, 3) for name in "CRS"}
    options: dict[str, Any] = {"sizes": {"p": 6, "q": 21}, "out_shape": (2, 4, 6, 21), "compiled_in": 128}
    for title, each, read, own in with_derivatives(iter([("pruned", text, tensors, options)])):
        printed = case_of(each, read, **own).printed("k", vector_bytes=32).text
        assert " % " in printed or title == "pruned"
        # Pixels are neighbours: no lane is read by itself.
        assert re.search(r"\bldm?4_float64\(", printed), title
        assert "lds" not in printed, title


def test_one_entry_calls_kernels_in_order():
    kernel = case_of(parse("Y[i] += X[i,j]"), {"X": numbers(4, 6)}).kernel
    first, second = (c_kernel(lower(kernel), name) for name in ("first", "second"))
    text = translation_unit([first, second], "entry")
    assert "int entry(void *t0, void *out, long a, long b, long threads)" in text
    assert "first(t0, out, a, b, threads) || second(t0, out, a, b, threads)" in text


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_what_is_not_printed_says_why(activation: str):
    with pytest.raises(NotInC, match=f"{activation} of int32"):
        case_of(parse("Y[i] += X[i]"), {"X": numbers(4).int()}, epilogue=Epilogue(activation)).printed("k")
    with pytest.raises(NotInC, match="sign of int32"):
        case_of(parse("Y[i] += sign(X[i])"), {"X": numbers(4).int()}).printed("k")


def test_c_has_every_dtype_of_factors():
    for dtype in VALUE_DTYPES:
        kernel = case_of(parse("Y[i,j] += X[i] * Z[j]"), {"X": numbers(3).to(dtype), "Z": numbers(99).to(dtype)}).kernel
        lowered = lower(kernel, vector_bytes=64)
        assert lowered.place.width * number_of(dtype_of(dtype).name).bytes == 64


@pytest.mark.parametrize("flags", [[], ["-U__FLT16_MAX__", "-U__AVX__"]], ids=["builtin", "portable"])
def test_conversions_of_16_bits_are_exact(flags: list[str], tmp_path: Path):
    assert COMPILER is not None
    helpers = Helpers(dtype_of("float32"))
    kinds = ("float16", "bfloat16")
    loops = [
        f"void {way}_all_{kind}(const {a} *p, {b} *r, long n) {{ while (n--) r[n] = {function}(p[n]); }}"
        for kind in kinds
        for way, a, b, function in (
            ("get", "unsigned short", "float", helpers.get(kind)),
            ("put", "float", "unsigned short", helpers.put(kind)),
        )
    ]
    source, made = tmp_path / "halves.c", tmp_path / "halves.so"
    source.write_text("\n\n".join([helpers.prelude, *loops]))
    subprocess.run([COMPILER, *FLAGS, *flags, str(source), "-o", str(made)], check=True)
    library = ctypes.CDLL(str(made))

    def call(name: str, given: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty(given.shape, dtype=dtype)
        pointers = ctypes.c_void_p(given.data_ptr()), ctypes.c_void_p(out.data_ptr())
        getattr(library, name)(*pointers, ctypes.c_long(given.numel()))
        return out

    bits = torch.arange(-(2**15), 2**15).short()
    generator = torch.Generator().manual_seed(0)
    floats = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).int().view(torch.float32)
    # Ties, and numbers that a half has no normal form for.
    floats = torch.cat([floats, bits.view(torch.float16).float() * (1 + 2**-11), torch.linspace(-7e-5, 7e-5, 9999)])
    for kind, dtype in zip(kinds, (torch.float16, torch.bfloat16), strict=True):
        wide = call(f"get_all_{kind}", bits, torch.float32)
        assert torch.equal(wide.nan_to_num(7), bits.view(dtype).float().nan_to_num(7))
        narrow = call(f"put_all_{kind}", floats, torch.int16).view(dtype)
        assert torch.equal(narrow.nan_to_num(7), floats.to(dtype).nan_to_num(7))


def test_kernels_run_without_the_processor_s_own_reads(tmp_path: Path):
    cases = [
        case_of(parse(text), in_dtype(tensors, dtype), **options)
        for name, text, tensors, options in STATEMENTS
        if name in ("convolution", "pruned", "table")
        for dtype in (torch.float32, torch.float16)
    ]
    printed = [case.printed(f"k{number}") for number, case in enumerate(cases)]
    library = compiled(printed, tmp_path, flags=["-U__AVX__", "-U__FLT16_MAX__"])
    for number, case in enumerate(cases):
        check(case, case.run(getattr(library, f"call_k{number}"), printed[number]))


def _padded_cases(dtype: torch.dtype) -> list[Case]:
    cases = [case_of(s, in_dtype(t, dtype), **options) for _, s, t, options in with_derivatives(iter(_PADDED))]
    return [case for case in cases if "k_careful" in case.printed("k").text]


def _without_conditions(case: Case, name: str, **options: Any) -> CKernel:
    """A kernel that fails where the one with conditions would run."""
    printed = case.printed(name, **options)
    return replace(printed, text=re.sub(r"return \w+_careful\(.*\);", "return 2;", printed.text))


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float32, 64), (torch.float64, 32), (torch.bfloat16, 64), (torch.int32, 32)], ids=str
)
def test_operands_are_read_among_zeros(dtype: torch.dtype, width: int, tmp_path: Path):
    cases = _padded_cases(dtype)
    assert len(cases) >= 12
    printed = [_without_conditions(case, f"k{n}", vector_bytes=width) for n, case in enumerate(cases)]
    library = compiled(printed, tmp_path, threads=True)
    for number, case in enumerate(cases):
        check(case, case.run(getattr(library, f"call_k{number}"), printed[number]))


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e36])
def test_what_zeros_are_multiplied_by_is_finite(value: float, tmp_path: Path):
    # Terms that miss do not count in gradients, whatever they are multiplied by.
    cases = [case for case in _padded_cases(torch.float32) if case.kernel.exact]
    printed = [_without_conditions(case, f"k{n}") for n, case in enumerate(cases)]
    careful = [case.printed(f"c{n}") for n, case in enumerate(cases)]
    library = compiled([*printed, *careful], tmp_path)
    for number, case in enumerate(cases):
        checked = re.findall(r"finite_float32\((\w+),", printed[number].text)
        if not checked:
            assert "J[b]" in case.title
            continue
        case.memory = {n: t.clone() for n, t in case.memory.items()}
        case.memory[checked[0]].view(-1)[3] = value
        with pytest.raises(AssertionError):
            case.run(getattr(library, f"call_k{number}"), printed[number])
        check(case, case.run(getattr(library, f"call_c{number}"), careful[number]))


def test_entries_far_outside_need_no_copy(tmp_path: Path):
    (case,) = [c for c in _padded_cases(torch.float32) if "F" in c.title and c.title.startswith("O")]
    far = next(name for name in case.memory if "x" in name and int(case.memory[name].min()) < 0)
    case.memory[far] = torch.where(torch.arange(120) % 7 == 0, 1 << 40, case.memory[far])
    printed, careful = _without_conditions(case, "k0"), case.printed("k1")
    library = compiled([printed, careful], tmp_path)
    with pytest.raises(AssertionError):
        case.run(library.call_k0, printed)
    check(case, case.run(library.call_k1, careful))


def test_functions_of_one_name_are_one_function():
    """Kernels of several dtypes stand in one translation unit."""
    found: dict[str, str] = {}
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        helpers = Helpers(dtype_of(dtype))
        for combine in ("add", "max", "min"):
            for width in (1, 2, 8):
                helpers.total(width, combine)
                helpers.totals(min(width, 2), width, combine)
                helpers.only(width, combine)
        for piece in helpers.pieces:
            if piece.startswith("INSUM_INLINE"):
                name = piece.partition("(")[0].split()[-1]
                assert found.setdefault(name, piece) == piece, name

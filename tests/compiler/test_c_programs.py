"""Statements as C functions: what calls them, when they are compiled, and what runs where they are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import Options, insum
from insum_nn.compiler.codegen.c import NotInC
from insum_nn.compiler.kernels import c_compiler, c_program
from insum_nn.compiler.runtime import execution
from insum_nn.errors import InsumBackendError, InsumFormatError, InsumRangeError

SPMM = "C[Row[p],n] += Val[p] * B[Col[p],n]"
pytestmark = pytest.mark.c


def entries(count: int = 60, rows: int = 20, width: int = 5, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    row, col = torch.randint(-1, rows, (2, count))
    return {"Row": row, "Val": torch.randn(count, dtype=dtype), "B": torch.randn(rows, width, dtype=dtype), "Col": col}


def dense(row: Tensor, val: Tensor, col: Tensor, b: Tensor, rows: int) -> Tensor:
    kept = (row >= 0) & (col >= 0)
    matrix = torch.zeros(rows, b.shape[0], dtype=val.dtype)
    return matrix.index_put((row[kept], col[kept]), val[kept], accumulate=True) @ b


def oracle(given: dict[str, Tensor], rows: int = 20) -> Tensor:
    return dense(given["Row"], given["Val"], given["Col"], given["B"], rows)


@pytest.mark.parametrize("count", [0, 1, 60])
def test_derivatives_to_second_order(count: int):
    """By a loss that mixes the output with its gradients: each reads what the others wrote."""
    given = entries(count)
    leaves = [given[name].requires_grad_() for name in ("Val", "B")]

    def derivatives(y: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(y.sin().sum() + y.square().sum(), leaves, create_graph=True)
        mixed = sum((g.square().sum() for g in first), y.square().sum())
        return [y, *first, *torch.autograd.grad(mixed, leaves)]

    program = insum_nn.compile(SPMM)
    for _ in range(2):
        found = derivatives(program(tensors=given, out_shape=(20, None)))
        for got, want in zip(found, derivatives(oracle(given)), strict=True):
            torch.testing.assert_close(got, want)


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many statements each C function has that is made from now on."""
    made: list[int] = []
    create = c_program.CProgram.__init__

    def counted(self: c_program.CProgram, parts: list[c_program.Part], *others: Any, **named: Any) -> None:
        made.append(len(parts))
        create(self, parts, *others, **named)

    monkeypatch.setattr(c_program.CProgram, "__init__", counted)
    insum_nn.clear_cache()
    return made


def test_all_gradients_of_a_call_are_one_function(functions: list[int]):
    given = entries()
    leaves = [given[name].requires_grad_() for name in ("Val", "B")]
    torch.autograd.grad(insum(SPMM, tensors=given, out_shape=(20, None)).sum(), leaves)
    assert functions == [1, 2]


def test_gradients_of_gradients_are_one_function(functions: list[int]):
    given = entries()
    leaves = [given[name].requires_grad_() for name in ("Val", "B")]
    y = insum(SPMM, tensors=given, out_shape=(20, None))
    found = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
    torch.autograd.grad(sum(each.square().sum() for each in found), leaves)
    # Of each of the two gradients by the two tensors that it reads; after that the call's own gradients again.
    assert functions == [1, 2, 4]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_statement_is_printed_once(ordered: bool, monkeypatch: pytest.MonkeyPatch):
    """What looks at a first call, and what runs the others, know the same of its entries."""
    made: list[c_program.CProgram] = []
    printed = c_program.CProgram._print

    def counted(self: c_program.CProgram) -> None:
        made.append(self)
        printed(self)

    monkeypatch.setattr(c_program.CProgram, "_print", counted)
    insum_nn.clear_cache()
    given = entries()
    if ordered:
        given["Row"] = given["Row"].clamp(min=0).sort().values
    program = insum_nn.compile(SPMM)
    for _ in range(3):
        torch.testing.assert_close(program(tensors=given, out_shape=(20, None)), oracle(given))
    assert len({id(each) for each in made}) == 1
    (call,) = program.spec.calls.values()
    ordered_tensors = [given[name] for name in program.spec.layout.tensors]
    assert call.call(ordered_tensors, None, {}, (20, None)) is not None


def test_new_sizes_and_entries_compile_nothing():
    program = insum_nn.compile(SPMM)

    def step(count: int, rows: int) -> None:
        given = entries(count, rows)
        # Whether entries are missing is a kind of its own.
        given["Row"][0] = given["Col"][1] = -1
        leaves = [given[name].requires_grad_() for name in ("Val", "B")]
        y = program(tensors=given, out_shape=(rows, None))
        torch.testing.assert_close(y, oracle(given, rows))
        torch.autograd.grad(y.sum(), leaves)

    step(60, 20)
    before = execution.cache_info().misses
    for count, rows in ((61, 20), (7, 300), (1000, 3)):
        step(count, rows)
    assert execution.cache_info().misses == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_initial_value_and_an_activation(dtype: torch.dtype):
    given = entries(dtype=dtype)
    start = torch.randn(5, dtype=dtype)
    got = insum(SPMM, tensors={**given, "C": start}, out_shape=(20, None))
    exact = {name: t.double() if t.is_floating_point() else t for name, t in given.items()}
    torch.testing.assert_close(got.double(), oracle(exact) + start.double(), atol=0.05, rtol=0.02)
    program = insum_nn.compile(SPMM, activation="relu")
    torch.testing.assert_close(
        program(tensors=given, out_shape=(20, None)).double(), oracle(exact).relu(), atol=0.05, rtol=0.02
    )


def test_entries_are_checked_at_every_version():
    given = entries()
    program = insum_nn.compile(SPMM)
    for _ in range(2):
        program(tensors=given, out_shape=(20, None))
    given["Col"][3] = 20
    with pytest.raises(InsumRangeError, match="'Col' points outside axis 0 of 'B'"):
        program(tensors=given, out_shape=(20, None))
    given["Col"][3] = -2
    with pytest.raises(InsumRangeError, match="holds -2"):
        program(tensors=given, out_shape=(20, None))
    given["Col"][3] = 4
    torch.testing.assert_close(program(tensors=given, out_shape=(20, None)), oracle(given))
    with pytest.raises(InsumRangeError, match="writes outside axis 0 of 'C'"):
        program(tensors=given, out_shape=(int(given["Row"].max()), None))


def test_operands_that_are_not_contiguous():
    given = entries()
    wide = torch.randn(40, 10, dtype=torch.float64)
    given["B"] = wide[::2, 1::2]
    given["Val"] = torch.tensor(2.0, dtype=torch.float64).expand(60)
    torch.testing.assert_close(insum(SPMM, tensors=given, out_shape=(20, None)), oracle(given))


def test_a_default_device_is_not_that_of_results():
    given, new = entries(), entries()
    leaves = [given["Val"].requires_grad_(), given["B"].requires_grad_()]
    program = insum_nn.compile(SPMM)
    for _ in range(2):
        program(tensors=given, out_shape=(20, None)).sum().backward()
    with torch.device("meta"):
        got = program(tensors=given, out_shape=(20, None))
        found = torch.autograd.grad(got.sum(), leaves)
        unseen = program(tensors=new, out_shape=(20, None))
    want = oracle(given)
    torch.testing.assert_close([got, *found], [want, *torch.autograd.grad(want.sum(), leaves)])
    torch.testing.assert_close(unseen, oracle(new))


def test_bits_do_not_depend_on_threads():
    given = entries(200_000, 3_000, 16, torch.float32)
    program = insum_nn.compile(SPMM)
    found: list[Tensor] = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(program(tensors=given, out_shape=(3_000, None)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_library_calls_serve_until_the_function_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("INSUM_NN_COMPILE_WORKERS")
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path))
    waiting: list[c_compiler.CFunction] = []
    monkeypatch.setattr(c_compiler, "submit", waiting.append)
    insum_nn.clear_cache()
    given, program = entries(), insum_nn.compile(SPMM)
    call = lambda: program(tensors=given, out_shape=(20, None))  # noqa: E731
    torch.testing.assert_close(call(), oracle(given))
    # A statement that runs once is not worth a compilation.
    assert not waiting
    torch.testing.assert_close(call(), oracle(given))
    assert waiting
    assert "until it is compiled" in str(program.explain(tensors=given, out_shape=(20, None)))
    for function in waiting:
        function.compile()
    torch.testing.assert_close(call(), oracle(given))
    (own,) = [p.run for p in execution._cache.values() if isinstance(p.run, c_program.CProgram)]
    assert own.compiled
    # The next process finds it on disk.
    function = next(each for each in waiting if each.text == own.text)
    assert c_compiler.CFunction(own.text, "insum", function.arguments).find()


def test_library_calls_serve_several_statements_until_their_function_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """None of them has a function of its own compiled in the meantime."""
    monkeypatch.delenv("INSUM_NN_COMPILE_WORKERS")
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path))
    waiting: list[c_compiler.CFunction] = []
    monkeypatch.setattr(c_compiler, "submit", waiting.append)
    insum_nn.clear_cache()
    x, program = torch.randn(5), insum_nn.compile("S[i] = exp(x[i]); Z += S[i]; Y[i] = S[i] / Z")
    for _ in range(3):
        torch.testing.assert_close(program(x=x), x.softmax(0))
    (function,) = waiting
    function.compile()
    torch.testing.assert_close(program(x=x), x.softmax(0))
    assert [p.run.compiled for p in execution._cache.values() if isinstance(p.run, c_program.CProgram)] == [True]


def test_deterministic_calls_wait_for_the_compiler(monkeypatch: pytest.MonkeyPatch):
    """Rounding may not change when the function takes over."""
    monkeypatch.delenv("INSUM_NN_COMPILE_WORKERS")
    insum_nn.clear_cache()
    insum(SPMM, tensors=entries(), out_shape=(20, None), options=Options(deterministic=True))
    (own,) = [p.run for p in execution._cache.values() if isinstance(p.run, c_program.CProgram)]
    assert own.compiled


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho no space left >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "cache"))
    insum_nn.clear_cache()
    given, program = entries(), insum_nn.compile(SPMM)
    for _ in range(3):
        torch.testing.assert_close(program(tensors=given, out_shape=(20, None)), oracle(given))
    assert "no space left" in str(program.explain(tensors=given, out_shape=(20, None)))
    assert not any(name.startswith("build-") for _, names, _ in os.walk(tmp_path) for name in names)
    insum_nn.clear_cache()


@pytest.mark.parametrize("fault", ["not an option", "no library of threads"])
def test_a_compiler_without_threads(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As clang's where only gcc's library is loaded: the function runs on one thread."""
    compiler = c_compiler.find_compiler()
    assert compiler is not None
    also = "exit 1" if fault == "not an option" else 'set -- "$@" -include "$0.h"'
    alone = tmp_path / "clang"
    alone.write_text(f'#!/bin/sh\ncase "$*" in *-fopenmp*) {also};; esac\nexec {compiler[0]} "$@"\n')
    Path(f"{alone}.h").write_text(
        "void no_such_library(void);\n__attribute__((constructor)) void f(void) { no_such_library(); }"
    )
    alone.chmod(0o755)
    monkeypatch.setenv("CC", str(alone))
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "cache"))
    given, program = entries(), insum_nn.compile(SPMM)
    # Made, then found.
    for _ in range(2):
        insum_nn.clear_cache()
        torch.testing.assert_close(program(tensors=given, out_shape=(20, None)), oracle(given))
        assert "compiled, for one thread" in str(program.explain(tensors=given, out_shape=(20, None)))
    insum_nn.clear_cache()


KEPT = """
import torch
from insum_nn import Options, compile
program = compile("y[i] += 7 * x[i]", options=Options(backend="c"))
print(program(x=torch.ones(2)).tolist(), "compiled" in str(program.explain(x=torch.ones(2))))
"""


def test_a_kept_library_that_cannot_be_loaded_is_made_again(tmp_path: Path):
    """By processes that end as soon as they have run: what is waited for is kept."""
    environment = {**os.environ, "INSUM_NN_CACHE_DIR": str(tmp_path)}
    for _ in range(4):
        command = [sys.executable, "-W", "ignore", "-c", KEPT]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == "[7.0, 7.0] True\n"
        (library,) = tmp_path.rglob("*.so")
        assert library.read_bytes() != b"damaged"
        library.unlink()
        library.write_bytes(b"damaged")
        library.chmod(0o600)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CC", "no-compiler")
    insum_nn.clear_cache()
    given, program = entries(), insum_nn.compile(SPMM)
    torch.testing.assert_close(program(tensors=given, out_shape=(20, None)), oracle(given))
    found = program.explain(tensors=given, out_shape=(20, None))
    assert (found.backend, found.reason) == ("eager", "there is no C compiler")
    with pytest.raises(InsumBackendError, match="C compiler"):
        insum(SPMM, tensors=given, out_shape=(20, None), options=Options(backend="c"))
    insum_nn.clear_cache()


def test_what_c_does_not_print(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise NotInC("such sums")

    monkeypatch.setattr(c_program, "c_kernel", refuse)
    insum_nn.clear_cache()
    given, program = entries(), insum_nn.compile(SPMM)
    torch.testing.assert_close(program(tensors=given, out_shape=(20, None)), oracle(given))
    assert "as C has no such sums" in program.explain(tensors=given, out_shape=(20, None)).decisions[0].reason
    with pytest.raises(InsumFormatError, match="no C function can be printed: such sums"):
        insum(SPMM, tensors=given, out_shape=(20, None), options=Options(backend="c"))
    insum_nn.clear_cache()


def test_the_text_that_runs_is_shown():
    given = entries()
    found = insum_nn.compile(SPMM).explain(tensors=given, out_shape=(20, None))
    assert found.backend == "c"
    source = found.kernel_source()
    assert source is not None
    assert "insum(" in source


FORKED = """
import os
import torch
from insum_nn import insum
row, col, val, dense = torch.tensor([0, 2, 0]), torch.tensor([1, 1, 0]), torch.rand(3), torch.rand(2, 5)
given = {"Row": row, "Col": col, "Val": val, "B": dense}
want = torch.zeros(3, 5).index_add(0, row, val[:, None] * dense[col])
assert torch.allclose(insum("C[Row[p],n] += Val[p] * B[Col[p],n]", tensors=given, out_shape=(3, None)), want)
child = os.fork()
if child == 0:
    got = insum("y[Row[p],n] += Val[p] * B[Col[p],n] * 3", tensors=given, out_shape=(3, None))
    os._exit(0 if torch.allclose(got, 3 * want) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_forked_process_compiles_by_itself(tmp_path: Path):
    """In a new process: here other tests ran threads, which a fork does not survive."""
    environment = {**os.environ, "INSUM_NN_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], env=environment, check=True, timeout=100)


THREADS = """
import torch
from insum_nn import insum
torch.set_num_threads(2)
row, dense = torch.arange(4000), torch.rand(4000, 32)
assert torch.equal(insum("C[Row[p],n] += B[p,n] * 2", Row=row, B=dense, out_shape=(4000, None)), 2 * dense)
with open("/proc/self/maps") as file:
    mapped = {line.split()[-1] for line in file if "libgomp" in line or "libomp" in line or "libiomp" in line}
assert len(mapped) == 1, mapped
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of a process")
def test_threads_are_those_of_torch(tmp_path: Path):
    """A second library of threads would not know of the first one's."""
    environment = {**os.environ, "INSUM_NN_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", THREADS], env=environment, check=True, timeout=100)


@pytest.mark.parametrize("name", ["Y", "X"])
def test_a_stack_of_matrices_is_not_multiplied_as_a_whole(name: str):
    """An entry multiplies by the matrix that it selects, which is in a cache: one of eight, not all."""
    sizes = {"t": 256, "k": 2, "c": 64, "o": 128}
    drawn = {"G": torch.randn(256, 2), "X": torch.randn(256, 64), "W": torch.randn(8, 64, 128)}
    drawn |= {"E": torch.randint(8, (256, 2)), "dY": torch.randn(256, 128)}
    program = insum_nn.compile("Y[t,o] += G[t,k] * X[t,c] * W[E[t,k],c,o]")
    program = program if name == "Y" else program.grad(name)
    given = {n: t for n, t in drawn.items() if n in program.statement.tensors()}
    shape = tuple(sizes[letter] for letter in ("to" if name == "Y" else "tc"))
    assert program.explain(tensors=given, out_shape=shape).backend == "c"
    selected = torch.einsum("tk,tkco->tco", drawn["G"], drawn["W"][drawn["E"]])
    want = torch.einsum("to,tco->tc", drawn["dY"], selected) if name == "X" else None
    want = torch.einsum("tc,tco->to", drawn["X"], selected) if want is None else want
    torch.testing.assert_close(program(tensors=given, out_shape=shape), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_large_call_waits_for_the_compiler(recorded: bool, large: bool, monkeypatch: pytest.MonkeyPatch):
    """Library calls would take longer, and hold what they gather."""
    waited: list[c_program.CProgram] = []
    wait = c_program.CProgram.wait
    monkeypatch.setattr(c_program.CProgram, "wait", lambda self: (waited.append(self), wait(self))[1])
    monkeypatch.setattr(c_program, "background", lambda: True)
    # 300 terms of five columns, of one statement and of two gradients.
    monkeypatch.setattr(c_program, "_LARGE", 1499 if large else 3000)
    insum_nn.clear_cache()
    given = entries(count=300)
    leaves = [given[name].requires_grad_(recorded) for name in ("Val", "B")]
    y = insum(SPMM, tensors=given, out_shape=(20, None))
    torch.testing.assert_close(y, oracle(given))
    if recorded:
        torch.autograd.grad(y.sum(), leaves)
    assert len(waited) == (1 + recorded if large else 0)

"""The rule that names the backend of a statement."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import insum_nn
from insum_nn import IndexFacts, Options
from insum_nn.compiler.lang.bind import Bound, bind
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.runtime.backends import choose_backend, is_matrix_product, require_triton
from insum_nn.errors import InsumBackendError

# The rule asks for the kind of a device, and runs nothing on it.
GPU = "cuda"
MATMUL = "C[i,n] += A[i,k] * B[k,n]"


def bound_on_gpu(expression: str, dtype: torch.dtype = torch.float16) -> Bound:
    statement = parse(expression)
    index = set(statement.index_tensors())
    ranks = {a.name: len(a.subscripts) for a in statement.accesses() if a is not statement.output}
    tensors = {
        name: torch.zeros((2,) * rank, dtype=torch.int64 if name in index else dtype) for name, rank in ranks.items()
    }
    return replace(bind(statement, tensors, None), device_type=GPU)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (MATMUL, True),
        ("C[i,n] = 2 * A[k,i] * B[n,k]", True),
        ("C[b,i,n] += A[b,i,k] * B[b,k,n]", True),
        ("C[i,n] += M[i,n] * A[i,k] * B[k,n]", True),
        ("C[i,n] += A[i,k] * B[k,l] * D[l,n]", True),
        ("C[i,n] += A[i,k,l] * B[k,l,n]", True),
        ("C[i,n] += exp(A[i,k] - M[i]) * B[k,n]", True),
        # A library would form the second factor at every point.
        ("C[i,n] += exp(A[i,k] - M[i]) * (B[k,n] / Z[i])", False),
        # A kernel reads the matrix once, as the library does, and needs no intermediate result.
        ("C[i] += A[i,k] * B[k]", False),
        ("C[i] += A[i,k] * B[i,k]", False),
        ("C[i,n] += A[i] * B[n]", False),
        ("C[i,n] += A[i,n]", False),
        ("C[i,n] max= A[i,k] * B[k,n]", False),
        ("C[i,n] += A[i,k] * B[Col[k],n]", False),
        ("C[Col[k],n] += A[k,l] * B[l,n]", False),
        ("C[i,n] += A[i,k] * B[k+n,n]", False),
        ("C[i,n] += A[i,k] * B[k,n] * D[n,n]", False),
    ],
)
def test_dense_matrix_products(expression: str, expected: bool):
    assert is_matrix_product(parse(expression)) is expected
    backend, reason = choose_backend(bound_on_gpu(expression), Options())
    assert backend == ("eager" if expected else "triton")
    assert ("dense matrix product" in reason) is expected


@pytest.mark.parametrize(
    ("options", "dtype", "backend"),
    [
        (Options(tune=False), torch.float32, "eager"),
        (Options(deterministic=True), torch.float32, "triton"),
        (Options(backend="triton"), torch.float32, "triton"),
        # A precision by name is a kernel's; the library's float32 products follow torch's own setting.
        (Options(precision="ieee"), torch.float32, "triton"),
        (Options(precision="tf32"), torch.float32, "triton"),
        (Options(precision="ieee"), torch.float16, "eager"),
        (Options(precision="ieee"), torch.float64, "eager"),
    ],
    ids=str,
)
def test_options_that_decide(options: Options, dtype: torch.dtype, backend: str):
    assert choose_backend(bound_on_gpu(MATMUL, dtype), options)[0] == backend


def test_static_tensors_are_unrolled_by_kernels():
    bound = bound_on_gpu("Z[z,k] += CG[i,k] * X[z,i]")
    assert choose_backend(bound, Options())[0] == "eager"
    assert choose_backend(bound, Options(), tables=True)[0] == "triton"


def test_without_a_generator(monkeypatch: pytest.MonkeyPatch):
    from insum_nn.compiler.kernels import launch

    monkeypatch.setattr(launch, "available", lambda: False)
    bound = bound_on_gpu("y[Row[p]] += x[p]")
    with pytest.raises(InsumBackendError, match="fix: install a GPU build of torch, .* and pass GPU tensors"):
        require_triton(bound)
    monkeypatch.setattr(launch, "available", lambda: True)
    with pytest.raises(InsumBackendError, match="these tensors are on cpu(?s:.*)fix: pass GPU tensors"):
        require_triton(replace(bound, device_type="cpu"))
    monkeypatch.setattr(launch, "available", lambda: False)
    assert choose_backend(bound, Options()) == ("eager", "Triton is not installed")
    assert choose_backend(bound_on_gpu("y[i] += x[i]", torch.int64), Options()) == ("eager", "integer factors")


@pytest.mark.library_calls
@pytest.mark.parametrize(
    "expression",
    [
        "C[i,n] += A[i,n] * B[i,n] * V[n]",
        "C[e,n] += A[E[e],n] * V[n]",
        "C[i,n] += A[i,k] * B[n,k]",
        "C[i] max= A[i,n] * V[n]",
    ],
)
def test_library_calls_without_a_compiler(expression: str):
    insum_nn.clear_cache()
    tensors = {"A": torch.randn(4, 4), "B": torch.randn(4, 4), "V": torch.randn(4), "E": torch.tensor([2, 0, 3, 1])}
    tensors = {name: t for name, t in tensors.items() if f"{name}[" in expression}
    program = insum_nn.compile(expression)
    torch.testing.assert_close(program(tensors=tensors), program.reference(tensors=tensors).float())
    assert program.explain(tensors=tensors).backend == "eager"


def test_the_package_holds_none():
    (file,) = (Path(insum_nn.schedules.__file__).parent).glob("*.json")
    kinds = {entry["key"]["kind"] for entry in json.loads(file.read_text())["entries"]}
    assert kinds <= {"schedule", "together"}


# On a device.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_dense_product_on_a_gpu(gpu: torch.device, dtype: torch.dtype):
    a, b = torch.randn(2048, 2048).to(gpu, dtype), torch.randn(2048, 2048).to(gpu, dtype)
    program = insum_nn.compile(MATMUL)
    torch.testing.assert_close(program(A=a, B=b), a @ b, rtol=1e-2, atol=1e-1)
    assert program.explain(A=a, B=b).backend == "eager"


@pytest.mark.gpu
def test_spmm_on_a_gpu(gpu: torch.device):
    rows, entries = 20_000, 400_000
    tensors = {
        "Row": torch.randint(0, rows, (entries,)).sort().values.to(gpu),
        "Col": torch.randint(0, rows, (entries,)).to(gpu),
        "Val": torch.randn(entries).to(gpu),
        "B": torch.randn(rows, 64).to(gpu),
    }
    facts = {"Row": IndexFacts(sorted=True, masked=False, proven=True), "Col": IndexFacts(masked=False, proven=True)}
    options = insum_nn.Options(tune=True)
    program = insum_nn.compile(
        "C[Row[p],n] += Val[p] * B[Col[p],n]", facts=facts, out_shape=(rows, None), options=options
    )
    program(tensors=tensors)
    explained = program.explain(tensors=tensors)
    assert explained.backend == "triton"
    reasons = {d.topic: d.reason for d in explained.decisions}
    assert "measured" in reasons["schedule"] or "stored" in reasons["schedule"]

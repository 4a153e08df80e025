"""What Inductor makes of the four applications on a GPU: one fused kernel beside the initialisation, with a dot."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import insum_nn
from insum_nn import IndexFacts, Options
from insum_nn.errors import InsumBackendError

pytestmark = pytest.mark.gpu

FULL = IndexFacts(masked=False, proven=True)
HOLES = IndexFacts(masked=True, proven=True)


def table(high, *shape, device, masked=False):
    generator = torch.Generator().manual_seed(0)
    entries = torch.randint(-1 if masked else 0, high, shape, generator=generator, dtype=torch.int32)
    return entries.to(device)


def applications(device, dtype):
    """Name, statement, tensors, output shape, facts, and whether m, k and n of a dot all exceed 1."""

    def floats(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    row = table(12, 40, device=device).sort().values
    col = table(16, 40, 4, device=device, masked=True)
    yield (
        "block spmm",
        "C[Row[g],a,n] += Val[g,q,a,b] * B[Col[g,q],b,n]",
        {"Row": row, "Col": col, "Val": floats(40, 4, 32, 32), "B": floats(16, 32, 64)},
        (12, None, None),
        {"Row": FULL, "Col": HOLES},
        True,
    )
    yield (
        "spmm",
        "C[Row[g],n] += Val[g,q] * B[Col[g,q],n]",
        {"Row": row, "Col": col, "Val": floats(40, 4), "B": floats(16, 64)},
        (12, None),
        {"Row": FULL, "Col": HOLES},
        False,
    )
    yield (
        "sparse convolution",
        "Out[Y[t,i],d] += In[X[t,i],c] * W[O[t],c,d]",
        {
            "Y": table(50, 27, 64, device=device, masked=True),
            "X": table(50, 27, 64, device=device, masked=True),
            "O": table(27, 27, device=device),
            "In": floats(50, 32),
            "W": floats(27, 32, 64),
        },
        (50, None),
        {"Y": HOLES, "X": HOLES, "O": FULL},
        True,
    )
    yield (
        "tensor product",
        "Z[z,Io[p],w] += CG[p] * X[z,J[p],u] * Y[z,K[p]] * W[L[p],u,w]",
        {
            # Of a real size: on a tiny one Inductor prefers several kernels.
            **{name: table(9, 20, device=device) for name in ("Io", "J", "K", "L")},
            "CG": floats(20),
            "X": floats(10_000, 9, 64),
            "Y": floats(10_000, 9),
            "W": floats(9, 64, 64),
        },
        (None, 9, None),
        dict.fromkeys(("Io", "J", "K", "L"), FULL),
        True,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", range(4), ids=["block_spmm", "spmm", "conv", "tensor_product"])
def test_one_fused_kernel(gpu, dtype, which):
    """Half types sum in their own dtype here; summed in float32 they take one more pass, which rounds the output."""
    _, expression, tensors, shape, facts, dot = list(applications(gpu, dtype))[which]
    options = Options(backend="inductor", accumulate="storage")
    program = insum_nn.compile(expression, facts=facts, out_shape=shape, options=options)
    source = program.explain(tensors=tensors).kernel_source()
    kernels = set(re.findall(r"def (triton_\w+)\(", source))
    assert len(kernels) == 2, kernels
    assert "extern_kernels." not in source
    assert ("tl.dot(" in source) is dot
    exact = insum_nn.compile(expression, facts=facts, out_shape=shape, options=Options(backend="eager"))
    expected = exact(tensors={k: t.double() if t.is_floating_point() else t for k, t in tensors.items()})
    error = (program(tensors=tensors).double() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype is torch.float32 else 2e-2)


def test_twenty_sizes_compile_once(gpu):
    program = insum_nn.compile("C[Row[g],n] += Val[g,q] * B[Col[g,q],n]", options=Options(backend="inductor"))
    insum_nn.clear_cache()
    for size in range(3, 23):
        row = torch.arange(size, device=gpu) % 3
        col = table(size, size, 4, device=gpu)
        tensors = {
            "Row": row,
            "Col": col,
            "Val": torch.randn(size, 4, device=gpu),
            "B": torch.randn(size, 32, device=gpu),
        }
        found = program(tensors=tensors, out_shape=(size + 1, None)).double().cpu()
        torch.testing.assert_close(
            found, program.reference(tensors=tensors, out_shape=(size + 1, None)), rtol=1e-5, atol=1e-5
        )
    # Sorted or not is no matter to this path, so one program serves all.
    assert insum_nn.cache_info().misses == 1


def test_deterministic_runs_agree_bit_for_bit(gpu):
    program = insum_nn.compile("C[Row[p],n] += X[p,n]", options=Options(deterministic=True), out_shape=(5, None))
    tensors = {"Row": table(5, 20_000, device=gpu), "X": torch.randn(20_000, 33, device=gpu)}
    runs = [program(tensors=tensors) for _ in range(5)]
    assert all(torch.equal(runs[0], run) for run in runs)


def test_captured_in_a_cuda_graph(gpu):
    program = insum_nn.compile("C[Row[g],n] += Val[g,q] * B[Col[g,q],n]", out_shape=(9, None))
    tensors = {
        "Row": table(9, 50, device=gpu),
        "Col": table(20, 50, 2, device=gpu),
        "Val": torch.randn(50, 2, device=gpu),
        "B": torch.randn(20, 64, device=gpu),
    }
    program(tensors=tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = program(tensors=tensors)
    tensors["Val"].copy_(torch.randn(50, 2, device=gpu))
    graph.replay()
    torch.testing.assert_close(captured.double().cpu(), program.reference(tensors=tensors), rtol=1e-4, atol=1e-4)


def test_where_a_fused_product_does_not_compile_the_error_names_separate_kernels(gpu, monkeypatch):
    """Few groups of small blocks: Inductor's native matmul has had no code for some of them."""
    from insum_nn.compiler.codegen import inductor

    compile_all = inductor._standalone

    def refuse(traced, fake, chosen):
        if chosen.get("triton.native_matmul"):
            raise RuntimeError("planted")
        return compile_all(traced, fake, chosen)

    monkeypatch.setattr(inductor, "_standalone", refuse)
    insum_nn.clear_cache()
    text, options = "Out[Y[g,q],d] += In[X[g,q],c] * W[O[g],c,d]", insum_nn.Options(backend="inductor")
    tensors = {
        "Y": table(18, 5, 16, device=gpu, masked=True),
        "X": table(18, 5, 16, device=gpu, masked=True),
        "O": table(3, 5, device=gpu),
        "In": torch.randn(18, 6, device=gpu),
        "W": torch.randn(3, 6, 2, device=gpu),
    }
    with pytest.raises(InsumBackendError, match="planted(?s:.*)native_matmul=False"):
        insum_nn.compile(text, out_shape=(18, None), options=options)(tensors=tensors)
    program = insum_nn.compile(text, out_shape=(18, None), options=replace(options, native_matmul=False))
    torch.testing.assert_close(
        program(tensors=tensors).double().cpu(), program.reference(tensors=tensors), rtol=1e-4, atol=1e-4
    )
    insum_nn.clear_cache()


@pytest.mark.parametrize("groups", [1, 2, 5, 16, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_number_of_groups(gpu, groups, dtype):
    program = insum_nn.compile("Out[Y[g,q],d] += In[X[g,q],c] * W[O[g],c,d]", out_shape=(18, None))
    tensors = {
        "Y": table(18, groups, 16, device=gpu, masked=True),
        "X": table(18, groups, 16, device=gpu, masked=True),
        "O": table(3, groups, device=gpu),
        "In": torch.randn(18, 6, device=gpu).to(dtype),
        "W": torch.randn(3, 6, 2, device=gpu).to(dtype),
    }
    exact = program.reference(tensors=tensors)
    error = (program(tensors=tensors).double().cpu() - exact).norm() / exact.norm()
    assert error < (1e-5 if dtype is torch.float32 else 2e-2)

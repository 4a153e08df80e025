"""Machine code for an H200, compiled without one: the short way of narrow kernels gives the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import insum_nn
from insum_nn import Options
from insum_nn.compiler.kernels import machine_code
from insum_nn.compiler.kernels.ahead import collect
from insum_nn.compiler.kernels.background import compile_all
from insum_nn.compiler.kernels.machine_code import KernelCode, compile_code, drop_module, make_module
from insum_nn.layers import TensorProductConv
from tests.pretended_gpu import H200, pretended_gpu

GENERATED = Options(backend="triton", tune=False)


def product(width: int) -> list[KernelCode]:
    """The kernels of a sum over edges, forward and backward."""
    row, col = torch.randint(9, (40,)).sort().values, torch.randint(9, (40,))
    val, dense = torch.randn(40, requires_grad=True), torch.randn(9, width, requires_grad=True)
    with pretended_gpu(), collect(H200) as collection:
        named = {"Row": row, "Col": col, "Val": val, "B": dense}
        out = insum_nn.insum(
            "C[Row[p],n] += Val[p] * B[Col[p],n]", tensors=named, options=GENERATED, out_shape=(9, None)
        )
        torch.autograd.backward(out, torch.ones_like(out))
    return [*collection.codes]


def tensor_product(width: int) -> list[KernelCode]:
    """The kernels of messages along edges, forward and backward, with static tables written out."""
    o3 = pytest.importorskip("e3nn.o3")
    paths = [(*path, "uvu", True) for path in ((0, 0, 0), (1, 1, 0), (0, 1, 1), (1, 0, 1))]
    irreps = f"{width}x0e+{width}x1o"
    layer = TensorProductConv(o3.TensorProduct(irreps, "0e+1o", irreps, paths, shared_weights=False))
    edges = torch.randint(9, (2, 40))
    x = torch.randn(9, 4 * width, requires_grad=True)
    y, w = torch.randn(40, 4, requires_grad=True), torch.randn(40, 4 * width, requires_grad=True)
    with pretended_gpu(), collect(H200) as collection:
        out = layer(x, y, w, edges[0], edges[1])
        torch.autograd.backward(out, torch.ones_like(out))
    return [*collection.codes]


@pytest.fixture
def coalesced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for each kernel that Triton coalesces; nothing is found on disk."""
    triton = pytest.importorskip("triton")
    passes = triton._C.libtriton.passes.ttgpuir
    plain, calls = passes.add_coalesce, list[object]()
    monkeypatch.setattr(passes, "add_coalesce", lambda manager: (calls.append(manager), plain(manager))[1])
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return calls


def cubin(code: KernelCode) -> bytes:
    module = make_module(code.module, code.text)
    try:
        return compile_code(module.__dict__[code.module], code).asm["cubin"]
    finally:
        drop_module(module)


@pytest.mark.parametrize("width", [8, 16, 20, 32])
def test_narrow_kernels_have_the_same_machine_code(coalesced: list[Any], width: int):
    narrow = [code for code in tensor_product(width) if code.narrow]
    assert narrow
    for code in narrow:
        coalesced.clear()
        short = cubin(code)
        assert not coalesced
        assert short == cubin(replace(code, narrow=False))
        assert len(coalesced) == 1


def test_wide_kernels_are_coalesced(coalesced: list[Any]):
    """Threads with several values load them at once, and which lanes those of two axes are is for the pass to say."""
    wide = [code for code in (*product(16), *tensor_product(64)) if not code.narrow]
    assert wide
    for code in wide:
        coalesced.clear()
        cubin(code)
        assert len(coalesced) == 1


def test_narrow_kernels_are_compiled_by_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = next(code for code in tensor_product(16) if code.narrow)
    (compiled,) = compile_all([code], 1)
    assert (compiled.error, compiled.found) == ("", False)
    (again,) = compile_all([replace(code, narrow=False)], 1)
    assert again.found, "on disk they have one place"


def products(count: int) -> KernelCode:
    """A kernel of so many matrix products, one after the other."""
    product = "    acc = tl.dot(tl.load(one + at + {0}), tl.load(other + at + {0}), acc, input_precision='tf32')"
    lines = [
        "import triton",
        "import triton.language as tl",
        "@triton.jit",
        "def kernel(one, other, out):",
        "    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]",
        "    acc = tl.full((16, 16), 0.0, tl.float32)",
        *(product.format(256 * number) for number in range(count)),
        "    tl.store(out + at, acc)",
    ]
    text, types, options = "\n".join(lines) + "\n", ("*fp32",) * 3, (("num_warps", 1), ("num_stages", 1))
    return KernelCode(f"test_kernel_of_{count}_products", text, types, (0, 1, 2), options, H200)


def test_llvm_leaves_many_products_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    llvm: Any = pytest.importorskip("triton")._C.libtriton.llvm
    plain, levels = llvm.optimize_module, list[object]()
    monkeypatch.setattr(llvm, "optimize_module", lambda *given: (levels.append(given[1]), plain(*given))[1])
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    few, many = products(machine_code._MANY_DOTS - 1), products(machine_code._MANY_DOTS)
    for code, level in ((few, llvm.OPTIMIZE_O3), (many, llvm.OPTIMIZE_O0), (products(1), llvm.OPTIMIZE_O3)):
        levels.clear()
        module = make_module(code.module, code.text)
        try:
            ptx = compile_code(module.__dict__[code.module], code).asm["ptx"]
        finally:
            drop_module(module)
        assert levels == [level]
        assert ptx.count("mma.sync") == 4 * code.text.count("tl.dot(")


def test_a_triton_that_is_built_otherwise_compiles_as_it_does():
    def function() -> int:
        return 1

    assert machine_code._with_globals(function, make_backend=None) is function

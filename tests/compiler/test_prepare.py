"""Kernels compiled ahead: what a step on a GPU needs is found without one, and a second process compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import insum_nn
from insum_nn import Options
from insum_nn.compiler.kernels import ahead, launch
from insum_nn.compiler.kernels.ahead import collect
from insum_nn.compiler.kernels.background import compile_all
from insum_nn.compiler.kernels.launch import OnDevice
from insum_nn.compiler.kernels.machine_code import KernelCode
from insum_nn.compiler.runtime import prepare as prepare_module
from insum_nn.errors import InsumBackendError, InsumFormatError
from insum_nn.testing.tolerances import assert_matches
from tests.pretended_gpu import H200, Pretence, pretended_gpu

ROOT = Path(__file__).parents[2]
SPMM = "C[Row[p],n] += Val[p] * B[Col[p],n]"


@pytest.fixture
def for_h200(monkeypatch: pytest.MonkeyPatch):
    """What is collected is compiled for a GPU that is not there."""
    monkeypatch.setattr(prepare_module, "collect", lambda: collect(H200))
    with pretended_gpu():
        yield


class Sums(nn.Module):
    """Two sums over edges, a buffer that a call writes, and random numbers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.program = insum_nn.compile(SPMM, options=Options(tune=False))

    def forward(self, x: Tensor, edges: Tensor, values: Tensor) -> Tensor:
        self.calls += 1
        for _ in range(2):
            x = nn.functional.dropout(x @ self.weight, 0.5)
            x = self.program(Row=edges[0], Col=edges[1], Val=values, B=x, out_shape=(len(x), None))
        return x


def operands(nodes: int = 40, width: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(nodes, width), torch.randint(nodes, (2, 160)), torch.rand(160, requires_grad=True)


def without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "_compile", lambda collection, workers: ([*collection.codes], 0.0, 0))


def test_kernels_of_both_passes_are_found(for_h200: None, monkeypatch: pytest.MonkeyPatch):
    without_compiling(monkeypatch)
    module, inputs = Sums(), operands()
    forward = insum_nn.prepare(module, *inputs, backward=False)
    both = insum_nn.prepare(module, *inputs)
    double = insum_nn.prepare(module, *inputs, double_backward=True)
    # The sum; by B the sum along columns, by Val one that is no sum over rows.
    assert (len(forward.kernels), forward.launches) == (1, 2)
    assert set(forward.kernels) < set(both.kernels) <= set(double.kernels)
    assert (len(both.kernels), both.launches) == (3, 6)
    assert double.launches > both.launches


def test_the_module_stays_as_it_is(for_h200: None, monkeypatch: pytest.MonkeyPatch):
    without_compiling(monkeypatch)
    module, inputs = Sums(), operands()
    versions = [tensor._version for tensor in (*module.parameters(), *module.buffers(), *inputs)]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    insum_nn.prepare(module, *inputs)
    assert torch.equal(torch.rand(3), expected)
    assert module.calls == 0
    assert module.weight.grad is None
    assert inputs[2].grad is None
    assert versions == [tensor._version for tensor in (*module.parameters(), *module.buffers(), *inputs)]


def test_computed_inputs_are_taken(for_h200: None, monkeypatch: pytest.MonkeyPatch):
    without_compiling(monkeypatch)
    x, edges, values = operands()
    assert insum_nn.prepare(Sums(), x, edges, values * 2).launches == 6


def test_outputs_are_zero_while_launches_are_collected(for_h200: None):
    x, edges, values = operands()
    with collect(H200) as collection:
        found = insum_nn.insum(SPMM, Row=edges[0], Col=edges[1], Val=values.detach(), B=x, out_shape=(40, None))
    assert collection.launches == 1
    assert not found.any()


def test_other_threads_launch_while_a_step_is_collected(for_h200: None, monkeypatch: pytest.MonkeyPatch):
    """In the forward pass and in the backward pass of the step; what runs elsewhere is no part of it."""
    without_compiling(monkeypatch)
    launched: list[str] = []
    loaded = OnDevice(lambda *_: launched.append(threading.current_thread().name), 0, (), (), None)
    monkeypatch.setattr(launch._Launch, "_load", lambda *_: loaded)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    x, edges, values = operands()

    def other() -> None:
        with Pretence():
            insum_nn.insum("y[Row[p]] += 3 * v[p]", Row=edges[0], v=values.detach(), out_shape=(40,))

    def meanwhile(*_: object) -> None:
        thread = threading.Thread(target=other, name="other")
        thread.start()
        thread.join()

    class Interrupted(Sums):
        def forward(self, x: Tensor, edges: Tensor, values: Tensor) -> Tensor:
            meanwhile()
            out = super().forward(x, edges, values)
            out.register_hook(meanwhile)
            return out

    assert insum_nn.prepare(Interrupted(), x, edges, values).launches == 6
    assert launched == ["other", "other"]
    assert ahead.collecting() is None


def test_what_a_thread_collects_it_runs_itself():
    """Torch would run backward passes of a GPU's tensors in another thread, which launches."""
    with collect() as outer:
        assert not torch.autograd.is_multithreading_enabled()
        with collect() as inner:
            assert ahead.collecting() is inner
        assert ahead.collecting() is outer
    assert ahead.collecting() is None
    assert torch.autograd.is_multithreading_enabled()


@pytest.mark.gpu
def test_other_threads_compute_while_a_gpu_step_is_collected(gpu: torch.device):
    """The backward pass, which torch would run in a thread of the device, is collected as well."""
    insum_nn.clear_cache()
    x, edges, values = (each.to(gpu) for each in operands())
    found: list[Tensor] = []

    def other() -> None:
        found.append(insum_nn.insum("y[Row[p]] += 3 * v[p]", Row=edges[0], v=values.detach(), out_shape=(40,)))

    class Interrupted(Sums):
        def forward(self, x: Tensor, edges: Tensor, values: Tensor) -> Tensor:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return super().forward(x, edges, values)

    module = Interrupted().to(gpu)
    forward = insum_nn.prepare(module, x, edges, values, backward=False)
    both = insum_nn.prepare(module, x, edges, values)
    assert (len(forward.kernels), forward.launches) == (1, 2)
    assert (len(both.kernels), both.launches) == (3, 6)
    expected = torch.zeros(40, dtype=torch.float64).index_add(0, edges[0].cpu(), 3 * values.detach().cpu().double())
    for each in found:
        assert_matches(each.cpu(), expected, dtype=torch.float32, kind="sum")


def test_on_a_cpu_there_is_nothing_to_compile():
    report = insum_nn.prepare(Sums(), *operands())
    assert report.kernels == ()
    assert str(report).startswith("nothing to compile: no generated kernel in a step, as on a CPU")


def test_what_cannot_be_copied_is_an_error():
    module = Sums()
    module.lock = open(os.devnull)
    with module.lock, pytest.raises(InsumFormatError, match="cannot be copied"):
        insum_nn.prepare(module, *operands())


KERNEL = """import triton
import triton.language as tl


@triton.jit
def kernel(out, N):
    at = tl.program_id(0) * 64 + tl.arange(0, 64)
    tl.store(out + at, at.to(tl.float32), mask=at < N)
"""


def code(name: str, text: str) -> KernelCode:
    return KernelCode(f"test_kernel_{name}", text, ("*fp32", "i32"), (0,), (("num_warps", 1), ("num_stages", 2)), H200)


def test_a_process_that_ends_takes_no_other_kernel_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    codes = [code("ends", f"import os\nos._exit(3)\n{KERNEL}"), code("good", KERNEL), code("bad", "kernel = None\n")]
    ended, good, bad = compile_all(codes, 1)
    assert ended.error == "the process that compiled it ended with status 3"
    assert (good.error, good.found) == ("", False)
    assert "Error" in bad.error
    (again,) = compile_all([code("good", KERNEL)], 1)
    assert again.found


def test_a_kernel_without_machine_code_is_an_error(for_h200: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        prepare_module, "compile_all", lambda codes, *_, **__: compile_all([code("bad", "kernel = None\n")], 1)
    )
    with pytest.raises(InsumBackendError, match="1 of 1 kernels could not be compiled"):
        insum_nn.prepare(Sums(), *operands())


SCRIPT = """
import json, torch
import insum_nn
from insum_nn.compiler.kernels.ahead import collect
from insum_nn.compiler.runtime import prepare as prepare_module
from tests.compiler.test_prepare import Sums, operands
from tests.pretended_gpu import H200, pretended_gpu

torch.manual_seed(0)
prepare_module.collect = lambda: collect(H200)
with pretended_gpu():
    report = insum_nn.prepare(Sums(), *operands(), double_backward=True)
print(json.dumps([len(report.kernels), report.compiled, report.found]))
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Path):
    counts: list[list[int]] = []
    for seed in ("1", "2"):
        environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "triton"), "PYTHONHASHSEED": seed}
        environment |= {"INSUM_NN_CACHE_DIR": str(tmp_path / "ours"), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        counts.append(json.loads(done.stdout))
    (kernels, compiled, _), second = counts
    assert compiled == kernels >= 3
    assert second == [kernels, 0, kernels]

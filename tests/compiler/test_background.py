"""Kernels compiled in the background of first steps, and what serves meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import insum_nn
from insum_nn import Options
from insum_nn.compiler.kernels import ahead, background, launch, machine_code
from insum_nn.compiler.kernels.background import Background
from insum_nn.compiler.kernels.machine_code import KernelCode
from insum_nn.compiler.kernels.stored_code import find_code
from insum_nn.compiler.runtime import artifact, execution
from insum_nn.compiler.runtime.execution import Executables
from insum_nn.compiler.schedule.product_cost import Cost
from insum_nn.layers import BlockSparseLinear, GCNConv, spconv
from insum_nn.testing.tolerances import assert_matches
from tests.compiler.generated_cases import CASES, Case
from tests.compiler.test_prepare import KERNEL, ROOT, Sums, code, operands
from tests.pretended_gpu import H200, Pretence, pretended_gpu


@pytest.fixture
def pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Background]]:
    """Pools whose processes end with the test."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "ours"))
    made: list[Background] = []
    yield made
    for pool in made:
        pool.close()


def pool_of(pools: list[Background], workers: int) -> Background:
    """A pool of so many processes."""
    pool = Background(workers)
    pools.append(pool)
    return pool


def wait_until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def is_missing(kernel: KernelCode) -> bool:
    """Return whether a kernel is not on disk."""
    return find_code(kernel) is None


def numbered(count: int) -> list[KernelCode]:
    """Kernels whose functions differ, as those on disk are told apart by them."""
    texts = [KERNEL.replace("at.to(tl.float32)", f"at.to(tl.float32) + {n}") for n in range(count)]
    return [code(f"background_{n}", text) for n, text in enumerate(texts)]


# Other processes.


def test_what_others_compiled_is_on_disk(pools: list[Background]):
    pool, kernels = pool_of(pools, 2), numbered(3)
    pool.submit(kernels)
    assert not pool.settle(0.0)
    assert pool.settle(60.0)
    for kernel in kernels:
        pool.take(kernel)
        assert not is_missing(kernel)


def test_nothing_starts_before_a_second_kernel_is_missing(pools: list[Background]):
    pool, kernels = pool_of(pools, 2), numbered(2)
    assert not pool._threads
    pool.take(kernels[0])
    pool.submit(kernels)
    assert pool._threads == 1
    assert pool.settle(60.0)
    assert is_missing(kernels[0])
    assert not is_missing(kernels[1])


def test_what_is_needed_later_is_compiled_by_those_that_compile(pools: list[Background]):
    pool, kernels = pool_of(pools, 1), numbered(2)
    pool.submit(kernels[:1])
    assert pool._threads == 1
    pool.submit(kernels[1:])
    assert pool.settle(60.0)
    assert not any(map(is_missing, kernels))


def test_without_processes_all_is_compiled_where_it_is_needed(pools: list[Background]):
    pool, kernels = pool_of(pools, 0), numbered(2)
    pool.submit(kernels)
    assert not pool._threads
    assert pool.settle(0.0)
    pool.take(kernels[0])
    assert is_missing(kernels[0])


def test_a_process_that_ends_leaves_its_kernel_to_the_step(pools: list[Background]):
    pool = pool_of(pools, 1)
    ends = code("background_ends", f"import os\nos._exit(3)\n{KERNEL}")
    rest = numbered(1)
    pool.submit([*rest, ends])
    begin = time.monotonic()
    wait_until(lambda: ends not in pool._waiting)
    pool.take(ends)
    assert time.monotonic() - begin < 20
    assert is_missing(ends)
    # The next kernel has a process again.
    assert pool.settle(60.0)
    assert not is_missing(rest[0])


def test_a_killed_process_is_not_waited_for(pools: list[Background]):
    pool = pool_of(pools, 1)
    slow = code("background_slow", f"import time\ntime.sleep(300)\n{KERNEL}")
    pool.submit([slow])
    wait_until(lambda: pool._running)
    taken = threading.Thread(target=pool.take, args=(slow,))
    taken.start()
    (worker,) = pool._workers
    assert worker is not None
    worker.process.kill()
    taken.join(20)
    assert not taken.is_alive()


def test_a_stalled_process_is_waited_for_some_time(pools: list[Background], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(background, "_LONGEST", 0.2)
    stalled, other = pool_of(pools, 1), pool_of(pools, 1)
    slow = code("background_stalled", f"import time\ntime.sleep(300)\n{KERNEL}")
    stalled.submit([slow])
    wait_until(lambda: stalled._running)
    (worker,) = stalled._workers
    assert worker is not None
    os.kill(worker.process.pid, signal.SIGSTOP)
    begin = time.monotonic()
    stalled.take(slow)
    assert time.monotonic() - begin < 20
    # Another rank, on the same folder, does not wait.
    kernels = numbered(2)
    stalled.submit(kernels)
    other.submit(kernels)
    wait_until(lambda: not other._waiting and not other._running)
    assert not any(is_missing(kernel) for kernel in kernels)


def test_no_kernel_is_lost_to_a_thread_that_ends(pools: list[Background], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(background, "_IDLE", 0.0)
    pool, kernels = pool_of(pools, 1), numbered(2)
    plain = pool._next

    def following() -> KernelCode | None:
        found = plain()
        if found is None and kernels[1] not in pool._known:
            # As another thread may, just before this one ends.
            pool.submit(kernels[1:])
        return found

    monkeypatch.setattr(pool, "_next", following)
    pool.submit(kernels[:1])
    wait_until(lambda: not is_missing(kernels[1]))


def test_idle_processes_end(pools: list[Background], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(background, "_IDLE", 0.1)
    pool = pool_of(pools, 2)
    pool.submit(numbered(2))
    wait_until(lambda: not pool._threads)
    assert not pool._workers


SCRIPT = """
import os, time
from insum_nn.compiler.kernels.background import Background
from insum_nn.compiler.kernels.machine_code import KernelCode

pool = Background(1)
options = (("num_warps", 1), ("num_stages", 1))
kernel = KernelCode("long", "import time; time.sleep(3)", (), (), options, ("cuda", 90, 32))
pool.submit([kernel])
while not pool._running:
    time.sleep(0.01)
print([worker.process.pid for worker in pool._workers][0], flush=True)
%s
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "raise SystemExit"])
def test_processes_end_with_the_one_that_started_them(tmp_path: Path, end: str):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "INSUM_NN_CACHE_DIR": str(tmp_path / "ours")}
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", SCRIPT % end], env=environment, stdout=subprocess.PIPE, check=False)
    pid = int(done.stdout)
    assert time.monotonic() - begin < 60

    def is_gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "Z"
        except OSError:
            return True

    wait_until(is_gone)


@pytest.mark.parametrize(
    ("processors", "ranks", "asked", "expected"),
    [
        (16, "", "", 12),
        (16, "4", "", 3),
        (16, "8", "", 0),
        (2, "", "", 0),
        (4, "", "", 3),
        (16, "4", "0", 0),
        (2, "", "5", 5),
    ],
)
def test_number_of_processes(monkeypatch: pytest.MonkeyPatch, processors: int, ranks: str, asked: str, expected: int):
    monkeypatch.setattr(background, "processors", lambda: processors)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setenv("INSUM_NN_COMPILE_WORKERS", asked)
    assert background.default_background_workers() == expected


# What serves meanwhile.


class Launched:
    """A first step on a pretended GPU whose kernels compute zeros.

    Attributes:
        compiled: kernels in the order in which the step asked for them.
        submitted: those that other processes were asked for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: dict[KernelCode, None] = {}
        self.submitted: dict[KernelCode, None] = {}
        # What other tests were served counts for their calls.
        insum_nn.clear_cache()
        pool = Background(2)
        monkeypatch.setattr(pool, "_start", lambda: None)
        plain = pool.submit

        def submit(codes: Any) -> None:
            self.submitted.update(dict.fromkeys(codes))
            plain(codes)

        monkeypatch.setattr(pool, "submit", submit)
        monkeypatch.setattr(background, "_background", pool)
        monkeypatch.setattr(machine_code, "active_target", lambda: H200)
        monkeypatch.setattr(launch, "compile_code", self._compile)
        monkeypatch.setattr(launch, "find_code", lambda each: each if each in self.compiled else None)
        monkeypatch.setattr(launch, "remember_code", lambda *_: None)
        monkeypatch.setattr(launch._Launch, "__call__", _launch)

    def _compile(self, function: Any, kernel: KernelCode) -> Any:
        self.compiled[kernel] = None
        return SimpleNamespace(hash="")


def _launch(self: Any, arguments: list[Any], grid: int | None = None) -> None:
    collection = ahead.collecting()
    if collection is None:
        self.compile(self.aligned)
        collection = ahead.Collection(H200)
    self.collect(collection, self.aligned, arguments)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    with pretended_gpu():
        yield Launched(monkeypatch)


def graph() -> tuple[nn.Module, tuple[Any, ...]]:
    return Sums(), operands()


def gcn() -> tuple[nn.Module, tuple[Any, ...]]:
    return GCNConv(16, 32), (torch.randn(30, 16, requires_grad=True), torch.randint(30, (2, 90)))


def blocks() -> tuple[nn.Module, tuple[Any, ...]]:
    return BlockSparseLinear(256, 128, 16, density=0.2), (torch.randn(64, 256, requires_grad=True),)


class Voxels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = spconv.SubMConv3d(16, 32, 3)

    def forward(self, x: Tensor, indices: Tensor) -> Tensor:
        return self.conv(spconv.SparseConvTensor(x, indices, [8, 8, 8], 1)).features


def voxels() -> tuple[nn.Module, tuple[Any, ...]]:
    sites = torch.unique(torch.randint(0, 8, (60, 3)), dim=0)
    indices = torch.cat([torch.zeros(len(sites), 1), sites], 1).int()
    return Voxels(), (torch.randn(len(sites), 16, requires_grad=True), indices)


def product() -> tuple[nn.Module, tuple[Any, ...]]:
    o3 = pytest.importorskip("e3nn.o3")
    from insum_nn.layers import TensorProductConv

    paths = [(*path, "uvu", True) for path in ((0, 0, 0), (1, 1, 0), (0, 1, 1))]
    layer = TensorProductConv(o3.TensorProduct("8x0e+8x1o", "0e+1o", "8x0e+8x1o", paths, shared_weights=False))
    weight = torch.randn(40, layer.weight_numel, requires_grad=True)
    edges = torch.randint(9, (2, 40))
    return layer, (torch.randn(9, 32, requires_grad=True), torch.randn(40, 4, requires_grad=True), weight, *edges)


CASES_OF_LAYERS = pytest.mark.parametrize("case", [graph, gcn, blocks, voxels, product])


def step(model: nn.Module, inputs: Sequence[Any]) -> list[Tensor]:
    """The output of a step and its gradients."""
    torch.manual_seed(1)
    out = model(*inputs)
    leaves = [each for each in (*model.parameters(), *inputs) if each.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@CASES_OF_LAYERS
def test_library_calls_serve_a_first_step(
    monkeypatch: pytest.MonkeyPatch, case: Callable[[], tuple[nn.Module, tuple[Any, ...]]]
):
    model, inputs = case()
    expected = step(model, inputs)
    with pretended_gpu():
        launched = Launched(monkeypatch)
        made = step(model, inputs)
    assert launched.submitted
    assert not launched.compiled, "nothing was waited for"
    for own, exact in zip(made, expected, strict=True):
        assert_matches(own, exact, dtype=torch.float32, kind="gradient")


@CASES_OF_LAYERS
def test_a_step_that_comes_again_waits(launched: Launched, case: Callable[[], tuple[nn.Module, tuple[Any, ...]]]):
    model, inputs = case()
    for _ in range(8):
        step(model, inputs)
    # One that several calls of a step share is asked for once.
    assert launched.submitted
    assert launched.submitted.keys() <= launched.compiled.keys()


# Which cells the other one writes is looked at in each call, and that call waits.
SERVED = {name: case for name, case in CASES.items() if name != "pruned convolution, transposed"}


@pytest.mark.parametrize("case", SERVED.values(), ids=SERVED)
@pytest.mark.parametrize("begun", [False, True], ids=["plain", "with an initial value"])
def test_library_calls_serve_by_slices(launched: Launched, monkeypatch: pytest.MonkeyPatch, case: Case, begun: bool):
    """Where they would hold too much in between, they compute a slice of some index at a time."""
    monkeypatch.setattr(execution, "total", lambda *_: Cost(3.0 * artifact._ROOM, 0.0, 0.0))
    tensors, shape = case.draw(3), case.out_shape(3)
    learned = [n for n, tensor in tensors.items() if tensor.is_floating_point() and n not in case.static]
    leaves = {name: tensors[name].clone().requires_grad_() for name in learned}
    tensors |= leaves
    exact = case.oracle(tensors, 3)
    output = insum_nn.compile(case.expression).expression.split("[")[0].strip()
    initial = {output: torch.randn(exact.shape, dtype=exact.dtype, requires_grad=True)} if begun else {}
    seed = torch.randn(exact.shape, dtype=exact.dtype)
    expected = torch.autograd.grad(exact, leaves.values(), seed)
    program = insum_nn.compile(case.expression, out_shape=shape, facts=case.facts)
    made = program(tensors=tensors | initial)
    found = torch.autograd.grad(made, leaves.values(), seed)
    assert launched.submitted
    assert not launched.compiled
    assert_matches(made - sum(initial.values()), exact, dtype=torch.float64, kind="sum")
    for own, each in zip(found, expected, strict=True):
        assert_matches(own, each, dtype=torch.float64, kind="gradient")


@pytest.mark.parametrize("entries", [0, 5, 300])
@pytest.mark.parametrize("text", ["+= X[In[p],c] * Y[Out[p],d]", "+= V[p] * sin(X[In[p],c]) * Y[2*p+3,d]"])
@pytest.mark.parametrize("begun", [False, True], ids=["plain", "with an initial value"])
def test_library_calls_multiply_matrices_of_tiles(launched: Launched, text: str, begun: bool, entries: int):
    """Entries of one key are multiplied together; some have no key, others no factor."""
    keys, rows, columns = (torch.randint(-1, most, (entries,)) for most in (3, 7, 9))
    keys[keys == 1] = 2
    tensors = {"Off": keys, "In": rows, "Out": columns, "V": torch.randn(entries, dtype=torch.float64)}
    tensors |= {"X": torch.randn(7, 5, dtype=torch.float64), "Y": torch.randn(max(9, 2 * entries + 3), 4).double()}
    tensors["X"][6] = torch.inf
    tensors["Y"][8] = torch.nan
    rows[rows == 6], columns[columns == 8] = 0, 0
    expected = torch.randn(5, 3, 4, dtype=torch.float64) if begun else torch.zeros(5, 3, 4, dtype=torch.float64)
    initial = {"dW": expected.clone()} if begun else {}
    for p in range(entries):
        if "V" in text and 2 * p + 3 != 8 and keys[p] >= 0 and rows[p] >= 0:
            expected[:, keys[p]] += torch.outer(tensors["X"][rows[p]].sin() * tensors["V"][p], tensors["Y"][2 * p + 3])
        elif "V" not in text and min(keys[p], rows[p], columns[p]) >= 0:
            expected[:, keys[p]] += torch.outer(tensors["X"][rows[p]], tensors["Y"][columns[p]])
    given = {name: tensor for name, tensor in tensors.items() if f"{name}[" in f"Off[{text}"}
    made = insum_nn.insum(f"dW[c,Off[p],d] {text}", **given, **initial, out_shape=(5, 3, 4))
    assert_matches(made, expected, dtype=torch.float64, kind="sum")
    assert launched.submitted or not entries
    assert not launched.compiled


def sums(**options: Any) -> tuple[Any, dict[str, Tensor]]:
    x, edges, values = operands()
    program = insum_nn.compile("C[Row[p],n] += Val[p] * B[Col[p],n]", options=Options(**options))
    return program, {"Row": edges[0], "Col": edges[1], "Val": values, "B": x}


def test_how_often_library_calls_serve(launched: Launched):
    program, tensors = sums()
    for served in range(artifact._REPEATS + 1):
        assert program(**tensors, out_shape=(40, None)).abs().sum() > 0, served
    assert not launched.compiled
    # What kernels compute is zero here.
    assert program(**tensors, out_shape=(40, None)).abs().sum() == 0
    assert launched.compiled.keys() == launched.submitted.keys()


def test_a_step_that_finds_more_goes_on(launched: Launched):
    program, tensors = sums()
    other = insum_nn.compile("y[i] += x[i] * x[i]")
    for size in (3, 70, 500, 3000, 20000, 150000):
        other(x=torch.ones(size))
        program(**tensors, out_shape=(40, None))
    assert len(launched.submitted) > 3
    assert not launched.compiled


def test_kernels_serve_as_soon_as_they_are_compiled(launched: Launched):
    program, tensors = sums()
    assert program(**tensors, out_shape=(40, None)).abs().sum() > 0
    launched.compiled |= launched.submitted
    assert program(**tensors, out_shape=(40, None)).abs().sum() == 0


@pytest.mark.parametrize("options", [{"deterministic": True}, {"backend": "triton"}, {"tune": True}])
def test_what_must_not_be_served_waits(launched: Launched, options: dict[str, Any]):
    program, tensors = sums(**options)
    program(**tensors, out_shape=(40, None))
    assert launched.compiled


@pytest.mark.parametrize(
    "why", ["no process", "a graph is captured", "no room", "nothing is kept on disk", "same bits"]
)
def test_who_cannot_be_served_waits(launched: Launched, monkeypatch: pytest.MonkeyPatch, why: str):
    def no_room(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError

    if why == "no process":
        monkeypatch.setattr(background._background, "most", 0)
    elif why == "a graph is captured":
        monkeypatch.setattr(artifact, "capturing", lambda: True)
    elif why == "same bits":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    elif why == "no room":
        monkeypatch.setattr(Executables, "by_library", no_room)
    else:
        monkeypatch.setattr(background, "is_storable", lambda _: False)
    insum_nn.insum("y[i] += x[i] * x[i]", x=torch.ones(3))
    assert launched.compiled


def test_a_missing_kernel_is_a_matter_of_its_own_thread(launched: Launched):
    """While one thread's call may be served, another one needs a kernel that is waited for."""

    def other() -> None:
        with Pretence(), torch.no_grad():
            insum_nn.insum("y[i] += x[i] * x[i]", x=torch.ones(3), options=Options(backend="triton"))

    def both() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(other).result()

    background.run_or_compile(both)
    assert launched.compiled


def test_nothing_of_a_network_runs_twice(launched: Launched):
    model, inputs = graph()
    calls: list[object] = []
    model.register_forward_hook(lambda *_: calls.append(0))
    step(model, inputs)
    assert len(calls) == 1


def test_gradients_of_gradients_are_served(monkeypatch: pytest.MonkeyPatch):
    model, (x, y, *rest) = product()
    leaves = (x, y.requires_grad_(), rest[0])

    def forces() -> Sequence[Tensor]:
        found = torch.autograd.grad(model(*leaves[:2], *rest).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in found), leaves)

    expected = forces()
    with pretended_gpu():
        launched = Launched(monkeypatch)
        made = forces()
    assert launched.submitted
    assert not launched.compiled
    for own, exact in zip(made, expected, strict=True):
        assert_matches(own, exact, dtype=torch.float32, kind="gradient")


FIRST_STEPS = """
import torch
from insum_nn.compiler.kernels import background
from insum_nn.layers import GCNConv

torch.manual_seed(0)
layer = GCNConv(32, 48)
x, edges = torch.randn(500, 32), torch.randint(500, (2, 4000))
expected = layer.double()(x.double(), edges)
layer, x, edges = layer.float().cuda(), x.cuda(), edges.cuda()
out = layer(x, edges)
out.sum().backward()
assert background.shared().requested, "nothing was missing"
torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-4, atol=1e-4)
# Nothing is served in a graph.
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = layer(x, edges)
graph.replay()
torch.testing.assert_close(captured.double().cpu(), expected, rtol=1e-4, atol=1e-4)
for _ in range(10):
    out = layer(x, edges)
    out.sum().backward()
assert background.settle(60.0)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
    out = layer(x, edges)
    torch.cuda.synchronize()
assert any("insum_nn_kernel" in each.key for each in profile.key_averages()), profile.key_averages()
torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.gpu
def test_first_steps_of_a_process(tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "INSUM_NN_COMPILE_WORKERS": "3"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "INSUM_NN_CACHE_DIR": str(tmp_path / "ours")}
    subprocess.run([sys.executable, "-c", FIRST_STEPS], env=environment, check=True)


def test_other_threads_launch_meanwhile():
    seen: list[object] = []
    with ahead.collect() as collection:
        assert ahead.collecting() is collection
        thread = threading.Thread(target=lambda: seen.append(ahead.collecting()))
        thread.start()
        thread.join()
    assert seen == [None]

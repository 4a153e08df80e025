"""Kernels compiled in the background of a first step, and gradients that are rehearsed to find them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import insum_nn
from insum_nn import Options
from insum_nn.compiler.api import keep_inner
from insum_nn.compiler.kernels import ahead, background, launch, machine_code
from insum_nn.compiler.kernels.background import Background
from insum_nn.compiler.kernels.machine_code import KernelCode
from insum_nn.compiler.kernels.stored_code import find_code
from insum_nn.compiler.runtime import gradients_ahead, whole_step
from insum_nn.layers import BlockSparseLinear, GCNConv, spconv
from insum_nn.testing.tolerances import assert_matches
from tests.compiler.generated_cases import CASES
from tests.compiler.interpreted import interpreter
from tests.compiler.test_prepare import KERNEL, ROOT, Sums, code, operands
from tests.pretended_gpu import H200, Pretence, pretended_gpu

__all__ = ["interpreter"]


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
    pool.missed(kernels[0])
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
    pool.missed(kernels[1])
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


# Rehearsals.


class Launched:
    """A first step on a pretended GPU whose kernels compute zeros.

    Attributes:
        compiled: kernels in the order in which the step asked for them.
        submitted: what was found ahead, with the number of those compiled before.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: dict[KernelCode, None] = {}
        self.submitted: dict[KernelCode, int] = {}
        pool = Background(2)
        monkeypatch.setattr(pool, "_start", lambda: None)
        plain = pool.submit

        def submit(codes: Any) -> None:
            for each in codes:
                self.submitted.setdefault(each, len(self.compiled))
            plain(codes)

        monkeypatch.setattr(pool, "submit", submit)
        monkeypatch.setattr(background, "_background", pool)
        monkeypatch.setattr(background.cold, "due", False)
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


@pytest.mark.parametrize("case", [graph, gcn, blocks, voxels, product])
def test_the_forward_pass_finds_the_kernels_of_the_backward_pass(
    launched: Launched, case: Callable[[], tuple[nn.Module, tuple[Any, ...]]]
):
    model, inputs = case()
    versions = [each._version for each in (*model.parameters(), *inputs)]
    out = model(*inputs)
    forward = list(launched.compiled)
    found = dict(launched.submitted)
    assert versions == [each._version for each in (*model.parameters(), *inputs)]
    assert all(each.grad is None for each in model.parameters())
    torch.autograd.backward(out, torch.ones_like(out))
    backward = launched.compiled.keys() - set(forward)
    assert backward or case is gcn, "a sum over edges is that of its gradient"
    assert backward <= found.keys()
    # They are found before the first kernel is compiled.
    assert min(found.values()) == 0


def test_gradients_of_gradients_are_found_by_the_first_backward_pass(launched: Launched):
    model, inputs = product()
    out = model(*inputs)
    (grad,) = torch.autograd.grad(out.sum(), inputs[1], create_graph=True)
    known = set(launched.submitted) | set(launched.compiled)
    grad.square().sum().backward()
    assert len(launched.compiled.keys() - known) <= 1, "the one of another set of roles"


@pytest.mark.parametrize("factors", [2, 3])
def test_gradients_of_gradients_are_found_by_the_call_where_all_factors_record(launched: Launched, factors: int):
    model, (x, y, *rest) = product()
    y.requires_grad_(factors == 3)
    out = model(x, y, *rest)
    known = set(launched.submitted) | set(launched.compiled)
    found = torch.autograd.grad(out.square().sum(), [each for each in (x, y, rest[0]) if each.requires_grad])
    assert launched.compiled.keys() <= known
    # What this forward pass found is more than what its first backward pass needed.
    assert (len(known) > len(launched.compiled)) == (factors == 3)
    if factors == 3:
        model, (x, y, *rest) = product()
        found = torch.autograd.grad(
            model(x, y.requires_grad_(), *rest).square().sum(), (x, y, rest[0]), create_graph=True
        )
        torch.autograd.grad(sum(each.square().sum() for each in found), (x, y, rest[0]))
        assert len(launched.compiled.keys() - known) <= 1, "the one of another set of roles"


def test_gradients_of_gradients_are_not_differentiated_again(launched: Launched):
    model, (x, y, *rest) = product()
    leaves = (x, y.requires_grad_(), rest[0])
    out = model(x, y, *rest)
    upstream = torch.ones_like(out, requires_grad=True)
    found = torch.autograd.grad(out, leaves, upstream, create_graph=True)
    known = set(launched.submitted)
    torch.autograd.grad(found, (*leaves, upstream), [torch.ones_like(each) for each in found])
    assert launched.compiled.keys() == known, "all are found, and none in vain"


def test_a_rehearsal_saves_nothing_for_a_checkpoint(launched: Launched):
    """A checkpoint compares what the first forward pass saved with what the second saves, which rehearses nothing."""
    model, (x, y, *rest) = product()
    saved: list[list[torch.Size]] = []

    def keep(tensor: Tensor) -> Tensor:
        saved[-1].append(tensor.shape)
        return tensor

    for _ in range(2):
        saved.append([])
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(x, y.requires_grad_(), *rest)
    assert launched.submitted
    assert saved[0] == saved[1]


def test_gradients_of_inner_leaves_are_found_for_recorded_passes_alone(launched: Launched):
    model, (x, y, *rest) = product()
    keep_inner(y)
    out = model(x, y, *rest)
    known = set(launched.submitted) | set(launched.compiled)
    found = torch.autograd.grad(out.square().sum(), (x, y, rest[0]), create_graph=True)
    sum(each.square().sum() for each in found).backward()
    assert y.grad is None
    assert x.grad is not None
    assert len(launched.compiled.keys() - known) <= 1, "the one of another set of roles"


class Missing:
    """Runs a kernel in Triton's interpreter, as one whose machine code is missing at its first launch.

    Attributes:
        rehearse: what happens then, in a recorded call.
        collected: launches that were collected.
    """

    rehearse: Callable[[], None]
    collected: int

    def __init__(self, source: Any) -> None:
        # Kernels that are written by hand are not launched before their machine code is there.
        self.source, self.function, self.loaded = source, launch.function_of(source), not source.arguments

    def __call__(self, arguments: list[Any], grid: int) -> None:
        if not self.loaded:
            if ahead.collecting() is not None:
                Missing.collected += 1
                for argument, kind in zip(arguments, self.source.arguments, strict=False):
                    if kind.kind in ("out", "workspace", "additional"):
                        argument.zero_()
                return
            if background.cold.call is not None:
                Missing.rehearse()
            self.loaded = True
        self.function[(grid,)](*arguments)

    def on_device(self) -> None:
        """Nothing is loaded."""


# Of the case that is interpreted.
SIZE = 3


class OneStatement(nn.Module):
    def __init__(self, program: Any, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.program = program
        self.values = nn.ParameterDict({n: nn.Parameter(t) for n, t in tensors.items() if t.is_floating_point()})
        self.indices = {n: t for n, t in tensors.items() if n not in self.values}

    def forward(self) -> Tensor:
        return self.program(tensors={**self.indices, **self.values})


def _rehearse_call() -> None:
    call, background.cold.call = background.cold.call, None
    assert call is not None
    gradients_ahead._rehearse_call(*call)


def _rehearse_step() -> None:
    whole_step._rehearse_step(code("missing", KERNEL), True)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("rehearse", [_rehearse_call, _rehearse_step])
def test_a_rehearsal_leaves_no_zeros_to_the_call(rehearse: Callable[[], None], monkeypatch: pytest.MonkeyPatch):
    """Gradients that run as several statements are rehearsed in the middle of the call that they are of."""
    monkeypatch.setattr(launch, "_Interpret", Missing)
    monkeypatch.setattr(Missing, "rehearse", rehearse, raising=False)
    monkeypatch.setattr(Missing, "collected", 0, raising=False)
    case = CASES["convolution's weight gradient by pairs"]
    tensors = {n: t.double() if t.is_floating_point() else t for n, t in case.draw(SIZE).items()}
    with pretended_gpu():
        options = Options(backend="triton", tune=False)
        program = insum_nn.compile(case.expression, out_shape=case.out_shape(SIZE), facts=case.facts, options=options)
        model = OneStatement(program, tensors)
        out = model()
        seed = torch.randn(out.shape, dtype=torch.float64)
        out.backward(seed)
    assert Missing.collected > 2
    exact = {n: t.clone().requires_grad_() if t.is_floating_point() else t for n, t in tensors.items()}
    case.oracle(exact, SIZE).backward(seed)
    for name, learned in model.values.items():
        assert_matches(learned.grad, exact[name].grad, dtype=torch.float64, kind="gradient")


def test_a_process_that_compiles_nothing_rehearses_nothing(launched: Launched, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(background, "_background", None)
    monkeypatch.setattr(launch, "find_code", lambda kernel: kernel)
    model, inputs = graph()
    model(*inputs).sum().backward()
    assert not launched.submitted
    assert background._background is None


def test_without_gradients_only_the_forward_pass_is_rehearsed(launched: Launched):
    model, inputs = graph()
    with torch.no_grad():
        model.eval()(*inputs)
    assert launched.compiled
    assert launched.submitted.keys() == launched.compiled.keys()


def test_what_is_measured_is_left_to_the_step(launched: Launched, monkeypatch: pytest.MonkeyPatch):
    """A choice by measurements must not be made while nothing is launched."""
    from insum_nn.compiler.schedule import tune

    asked: list[bool] = []
    plain = tune.select_or_tune

    def noted(task: Any, options: Options, *rest: Any) -> Any:
        asked.append(ahead.rehearsing())
        return plain(task, options if ahead.rehearsing() else Options(), *rest)

    monkeypatch.setattr(tune, "select_or_tune", noted)
    monkeypatch.setattr(tune, "worth_selecting", lambda _: True)
    import insum_nn

    x, edges, values = operands()
    program = insum_nn.compile("C[Row[p],n] += Val[p] * B[Col[p],n]", options=Options(tune=True))
    x.requires_grad_()
    out = program(Row=edges[0], Col=edges[1], Val=values, B=x, out_shape=(40, None))
    assert any(asked), "the rehearsal came to a choice"
    assert launched.submitted.keys() == launched.compiled.keys()
    asked.clear()
    out.sum().backward()
    assert asked
    assert not any(asked), "nothing was remembered of the rehearsal"


def test_a_missing_kernel_is_a_matter_of_its_own_thread(launched: Launched, monkeypatch: pytest.MonkeyPatch):
    """While one thread is in a recorded call, another one needs a kernel."""
    rehearsed: list[object] = []
    monkeypatch.setattr(background.rehearsals, "call", rehearsed.append)
    monkeypatch.setattr(background.cold, "call", ("of this thread",))

    def other() -> None:
        with Pretence(), torch.no_grad():
            insum_nn.insum("y[i] += x[i] * x[i]", x=torch.ones(3), options=Options(backend="triton"))
        assert background.cold.due

    with ThreadPoolExecutor(1) as pool:
        pool.submit(other).result()
    assert launched.compiled
    assert not rehearsed
    assert not background.cold.due


def test_other_threads_launch_meanwhile():
    seen: list[object] = []
    with ahead.collect() as collection:
        assert ahead.collecting() is collection
        thread = threading.Thread(target=lambda: seen.append(ahead.collecting()))
        thread.start()
        thread.join()
    assert seen == [None]
    assert not ahead.rehearsing()

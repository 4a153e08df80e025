"""First steps of several processes on one cache folder: none waits for another, whatever becomes of that one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from insum_nn.compiler.kernels import background, launch
from insum_nn.compiler.tuning import database, timing
from tests.ranks import CONTEXT, device_of, meeting, new_process

KEY = {"kind": "schedule", "statement": "C[m] += A[m]"}


# Upper bound in seconds for a step of a small layer that does not wait for another rank; on a GPU it compiles kernels.
LONGEST = {"cpu": 5.0, "cuda": 20.0}


def begin_rank(kind: str, number: int, folder: str) -> torch.device:
    """Let this process find its caches in a folder; return its device."""
    os.environ["INSUM_NN_CACHE_DIR"] = f"{folder}/cache"
    os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return device_of(kind, number)


def inputs(device: torch.device) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A layer and its arguments, the same in every process."""
    from insum_nn.layers import GCNConv

    torch.manual_seed(0)
    layer = GCNConv(8, 4).to(device)
    return layer, torch.randn(20, 8).to(device), torch.randint(20, (2, 60)).to(device)


def step(kind: str, number: int, folder: str, out: Any) -> None:
    """A rank that takes two training steps from empty caches, and neither measures nor takes a lock."""
    device = begin_rank(kind, number, folder)

    def refuse(*_: object) -> Any:
        raise AssertionError("a first step measures, or waits for who does")

    timing.device_time = timing.time_whole = database.turn = refuse
    with meeting(device, number, folder):
        layer, x, edges = inputs(device)
        model = torch.nn.parallel.DistributedDataParallel(layer)
        seconds: list[float] = []
        for _ in range(2):
            begin = time.perf_counter()
            model(x + number, edges).square().sum().backward()
            seconds.append(time.perf_counter() - begin)
        out.put((number, seconds, layer.lin.weight.grad.tolist()))
        del model


def step_of_two(folder: Path, kind: str) -> list[Any]:
    """Run two ranks to their end, none of whose steps waits long; return what they put out, by number."""
    out = CONTEXT.Queue()
    ranks = [new_process(step, kind, number, str(folder), out) for number in range(2)]
    for process in ranks:
        process.start()
    found = sorted(out.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    assert all(seconds < LONGEST[kind] for _, both, _ in found for seconds in both)
    return found


@pytest.mark.slow
def test_ranks_step_from_empty_caches(tmp_path: Path, kind_of_ranks: str):
    (tmp_path / "cache").mkdir(mode=0o700)
    found = step_of_two(tmp_path, kind_of_ranks)
    assert [number for number, *_ in found] == [0, 1]
    assert found[0][2] == found[1][2], "gradients are averaged"
    assert not (tmp_path / "cache" / "locks").exists()


def hold(folder: str, out: Any) -> None:
    """A process that measures for ever."""
    os.environ["INSUM_NN_CACHE_DIR"] = folder
    with database.turn(KEY, 0.0) as mine:
        out.put(mine)
        time.sleep(300)


@pytest.mark.slow
def test_a_stalled_process_is_not_waited_for_and_a_killed_one_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    out = CONTEXT.Queue()
    holder = new_process(hold, str(tmp_path), out)
    holder.start()
    try:
        assert out.get(timeout=60)
        assert holder.pid is not None
        os.kill(holder.pid, signal.SIGSTOP)
        begin = time.monotonic()
        with database.turn(KEY, 0.2) as mine:
            assert not mine
        assert time.monotonic() - begin < 5
        with database.turn({**KEY, "bucket": [3]}, 0.0) as mine:
            assert mine, "other keys are free"
    finally:
        holder.kill()
        holder.join(60)
    with database.turn(KEY, 0.0) as mine:
        assert mine


def stall(kind: str, folder: str, out: Any) -> None:
    """A rank that stops for ever in the middle of its first step, after it has planned and kept what it planned."""
    device = begin_rank(kind, 0, folder)
    layer, x, edges = inputs(device)
    model = torch.nn.Sequential(layer)

    def wait(*_: object) -> None:
        out.send(os.getpid())
        time.sleep(300)

    layer.register_forward_hook(wait)
    model[0](x, edges)


def stall_as_it_compiles(kind: str, folder: str, out: Any) -> None:
    """A rank that stops for ever where it would compile its first kernel."""
    device = begin_rank(kind, 0, folder)

    def wait(*_: object) -> None:
        out.send(os.getpid())
        time.sleep(300)

    launch.compile_code = background.take = wait
    layer, x, edges = inputs(device)
    layer(x, edges)


# Nothing is compiled on a CPU. What the second compiles, the first would find.
STALLS = {"cpu": [stall], "cuda": [stall_as_it_compiles, stall]}


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_ranks_step_beside_those_that_stall_or_are_killed_in_their_first_step(
    tmp_path: Path, kind_of_ranks: str, end: signal.Signals
):
    (tmp_path / "cache").mkdir(mode=0o700)
    stalled: list[Any] = []
    try:
        for stop in STALLS[kind_of_ranks]:
            # A process that ends may hold the lock of a queue that it writes to.
            own = CONTEXT.Pipe(duplex=False)
            stalled.append(new_process(stop, kind_of_ranks, str(tmp_path), own[1]))
            stalled[-1].start()
            assert own[0].poll(60)
            os.kill(own[0].recv(), end)
        step_of_two(tmp_path, kind_of_ranks)
        assert not (tmp_path / "cache" / "locks").exists()
    finally:
        for process in stalled:
            process.kill()
            process.join(60)

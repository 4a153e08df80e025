"""First steps of several processes on one cache folder: none waits for another, whatever becomes of that one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from insum_nn.compiler.schedule import database, timing

KEY = {"kind": "schedule", "statement": "C[m] += A[m]"}


def step(number: int, folder: str, out: Any) -> None:
    """A rank that takes two training steps from empty caches, and neither measures nor takes a lock."""
    os.environ["INSUM_NN_CACHE_DIR"] = f"{folder}/cache"
    torch.set_num_threads(1)

    def refuse(*_: object) -> Any:
        raise AssertionError("a first step measures, or waits for who does")

    timing.device_time = timing.time_whole = database.turn = refuse
    from insum_nn.layers import GCNConv

    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=number, world_size=2)
    try:
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(GCNConv(8, 4))
        x, edges = torch.randn(20, 8), torch.randint(20, (2, 60))
        seconds: list[float] = []
        for _ in range(2):
            begin = time.perf_counter()
            model(x + number, edges).square().sum().backward()
            seconds.append(time.perf_counter() - begin)
        out.put((number, seconds, model.module.lin.weight.grad.tolist()))
        del model
    finally:
        distributed.destroy_process_group()


def step_of_two(context: Any, folder: Path) -> list[Any]:
    """Run two ranks to their end, none of whose steps waits long; return what they put out, by number."""
    out: Any = context.Queue()
    ranks = [context.Process(target=step, args=(number, str(folder), out)) for number in range(2)]
    for process in ranks:
        process.start()
    found = sorted(out.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    assert all(seconds < 5 for _, both, _ in found for seconds in both)
    return found


@pytest.mark.slow
def test_ranks_step_from_empty_caches(tmp_path: Path):
    (tmp_path / "cache").mkdir(mode=0o700)
    context = multiprocessing.get_context("spawn")
    found = step_of_two(context, tmp_path)
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
    context = multiprocessing.get_context("spawn")
    out: Any = context.Queue()
    holder = context.Process(target=hold, args=(str(tmp_path), out))
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


def stall(folder: str, out: Any) -> None:
    """A rank that stops for ever in the middle of its first step, after it has planned and kept what it planned."""
    os.environ["INSUM_NN_CACHE_DIR"] = f"{folder}/cache"
    torch.set_num_threads(1)
    from insum_nn.layers import GCNConv

    model = torch.nn.Sequential(GCNConv(8, 4))

    def wait(*_: object) -> None:
        out.send(os.getpid())
        time.sleep(300)

    model[0].register_forward_hook(wait)
    model[0](torch.randn(20, 8), torch.randint(20, (2, 60)))


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_ranks_step_beside_one_that_stalls_or_is_killed_in_its_first_step(tmp_path: Path, end: signal.Signals):
    (tmp_path / "cache").mkdir(mode=0o700)
    context = multiprocessing.get_context("spawn")
    # A process that ends may hold the lock of a queue that it writes to.
    own = context.Pipe(duplex=False)
    stalled = context.Process(target=stall, args=(str(tmp_path), own[1]))
    stalled.start()
    try:
        assert own[0].poll(120)
        os.kill(own[0].recv(), end)
        step_of_two(context, tmp_path)
        assert not (tmp_path / "cache" / "locks").exists()
    finally:
        stalled.kill()
        stalled.join(60)

"""Tests in which processes work together: on CPUs by Gloo, on two GPUs by NCCL.

Importing torch, the package and the packages below it takes a new process longer than most of these tests take.
Processes are therefore forked from a server that has imported them and done nothing else. It has not looked for a GPU,
which its forks could not use then.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["CONTEXT", "device_of", "meeting", "new_pool", "new_process", "run_ranks"]

CONTEXT: Any = multiprocessing.get_context("forkserver")
# A package that is not installed is left out.
_IMPORTED = [
    "pytest",
    "torch.distributed",
    "torch._dynamo",
    "insum_nn.compiler.runtime.execution",
    "insum_nn.layers.graph.gcn_conv",
    "insum_nn.layers.equivariant.tensor_product",
    "tests.ranks",
]


def _run(environment: Mapping[str, str], function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    # The server keeps the environment of the test that started it.
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)


def new_process(function: Callable[..., None], *arguments: Any) -> Any:
    """Return a process, not yet started, that calls a function under this process's environment variables.

    What it shares with this process, such as a queue, must be made by `CONTEXT`.
    """
    CONTEXT.set_forkserver_preload(_IMPORTED)
    return CONTEXT.Process(target=_run, args=(dict(os.environ), function, arguments))


def new_pool(processes: int) -> Any:
    """Return a pool of processes that have computed nothing yet."""
    CONTEXT.set_forkserver_preload(_IMPORTED)
    return CONTEXT.Pool(processes)


def _run_rank(rank: int, environment: Mapping[str, str], function: Callable[..., None], *arguments: Any) -> None:
    _run(environment, function, (rank, *arguments))


def run_ranks(function: Callable[..., None], *arguments: Any, ranks: int = 2) -> None:
    """Call a function with the number of a process and these arguments, in each of several processes, to their end."""
    CONTEXT.set_forkserver_preload(_IMPORTED)
    together: Any = torch.multiprocessing.start_processes
    together(_run_rank, (dict(os.environ), function, *arguments), nprocs=ranks, start_method="forkserver")


def device_of(kind: str, rank: int) -> torch.device:
    """Return the device of a process, and make it the current one."""
    if kind == "cpu":
        torch.set_num_threads(1)
        return torch.device(kind)
    device = torch.device(kind, rank)
    torch.cuda.set_device(device)
    return device


@contextmanager
def meeting(device: torch.device, rank: int, folder: str) -> Generator[None]:
    """Join a group of two processes that meet in a folder."""
    distributed: Any = torch.distributed
    backend = "gloo" if device.type == "cpu" else "nccl"
    distributed.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        yield
    finally:
        distributed.destroy_process_group()

"""The host time of a call: until its kernels are launched, which small problems cannot hide.

The problems are the tiny ones of the other cases. `autograd=off` runs under `no_grad`; with `on` the forward is
recorded, as in training. The baselines are those of the other cases, and for the sparse product a bare Triton launch,
the lower bound for a call of a compiled program.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.cases.block_linear import block_linear
from benchmarks.cases.gcn import gcn_layer
from benchmarks.cases.subm_conv import subm_conv
from benchmarks.cases.tensor_products import fctp, tp_conv
from benchmarks.registry import Problem, Setting, Work, case
from insum_nn.formats import COO, GroupCOO
from insum_nn.ops import spmm
from insum_nn.ops.spmm import spmm_program

__all__ = ["host"]

LAYERS: dict[str, Callable[[Setting], Problem]] = {
    "gcn": lambda setting: gcn_layer(setting, graph="cora", input="cached"),
    "subm_conv": lambda setting: subm_conv(setting, cloud="room", channels=32, dtype="float16"),
    "block_linear": lambda setting: block_linear(setting, block=32, density=0.5, dtype="float16"),
    "tp_conv": lambda setting: tp_conv(setting, shape="nequip", dtype="float32"),
    "fctp": lambda setting: fctp(setting, degree=1, channels=16, weights="shared", dtype="float32"),
}


@case(
    "host",
    tests=("tests/ops/test_spmm.py",),
    call=("program", *LAYERS),
    autograd=("off", "on"),
)
def host(setting: Setting, *, call: str, autograd: str) -> Problem:
    """The host's time of a forward, which does not wait for the device."""
    tiny = replace(setting, size="tiny")
    problem = _program(tiny, recorded=autograd == "on") if call == "program" else LAYERS[call](tiny)
    # Compiled ones take longer to compile than all else together takes to run.
    providers = {name: build for name, build in problem.providers.items() if "compiled" not in name}
    return replace(problem, providers=providers, modes=("fwd",), floors={}, clock="host", recorded=autograd == "on")


def _program(setting: Setting, *, recorded: bool) -> Problem:
    """A compiled program, and the operator around it: 64 rows, 8 entries in each, 64 columns."""
    generator, device = setting.generator(), setting.device
    rows, n = 64, 64
    row = torch.arange(rows, device=device).repeat_interleave(8)
    col = torch.rand(rows, rows, generator=generator, device=device).argsort(1)[:, :8].sort(1).values.reshape(-1)
    values = torch.randn(row.numel(), generator=generator, device=device)
    dense = torch.randn(rows, n, generator=generator, device=device).requires_grad_(recorded)
    coo = COO.from_coo((row, col), values, (rows, rows))
    crow = torch.arange(0, row.numel() + 1, 8, device=device)

    def program() -> Work:
        matrix = GroupCOO.from_coo(coo)
        compiled: Any = spmm_program(matrix)
        tensors = {**matrix.tensors, "B": dense}
        return Work(lambda: compiled(**tensors, out_shape=(rows, None)))

    def operator() -> Work:
        matrix = GroupCOO.from_coo(coo)
        return Work(lambda: spmm(matrix, dense))

    def csr() -> Work:
        matrix = torch.sparse_csr_tensor(crow.int(), col.int(), values, (rows, rows), check_invariants=False)
        return Work(lambda: torch.sparse.mm(matrix, dense))

    def bare() -> Work:
        peers.require_cuda(device)
        multiply: Callable[..., Tensor] = importlib.import_module("benchmarks.bare_launch").multiply
        plain, short, columns = dense.detach(), crow.int(), col.int()
        return Work(lambda: multiply(short, columns, values, plain))

    def oracle() -> Work:
        left, right = coo.to_dense().double(), dense.detach().double()
        return Work(lambda: left @ right)

    return Problem(
        providers={"insum_nn/program": program, "insum_nn": operator, "torch_csr": csr, "bare_launch": bare},
        oracle=oracle,
        tolerance=1e-5,
    )

"""`torch.autograd.grad(..., is_grads_batched=True)` beyond what `layer_case.py` says of every layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import Options
from insum_nn.formats import BlockCOO
from insum_nn.layers import GCNConv
from insum_nn.ops import spmm
from tests.compiler.interpreted import interpreter

__all__ = ["interpreter"]


def real(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=device, requires_grad=True)


def assert_as_one_by_one(run: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    out = run(*inputs)
    vectors = torch.randn(3, *out.shape, dtype=out.dtype, device=out.device)
    got = torch.autograd.grad(out, inputs, vectors, is_grads_batched=True, retain_graph=True)
    for at, vector in enumerate(vectors):
        want = torch.autograd.grad(out, inputs, vector, retain_graph=True)
        for many, one in zip(got, want, strict=True):
            torch.testing.assert_close(many[at], one)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("activation", [None, "silu"])
def test_generated_kernels(activation: str | None):
    row, col = torch.tensor([0, 1, 1, 3]), torch.tensor([2, 0, 1, 1])
    program = insum_nn.compile(
        "C[Row[p],n] += Val[p] * B[Col[p],n]",
        out_shape=(4, None),
        activation=activation,
        options=Options(backend="triton", tune=False),
    )
    cpu = torch.device("cpu")

    def run(value: Tensor, b: Tensor, start: Tensor) -> Tensor:
        return program(Row=row, Col=col, Val=value, B=b, C=start)

    assert_as_one_by_one(run, (real(4, device=cpu), real(3, 5, device=cpu), real(4, 5, device=cpu)))


def test_a_matrix_of_blocks(device: torch.device):
    dense = torch.randn(32, 32, dtype=torch.float64, device=device)
    dense[:16, 16:] = 0
    matrix = BlockCOO.from_dense(dense, block_shape=(16, 16))
    assert_as_one_by_one(lambda b: spmm(matrix, b), (real(32, 8, device=device),))


def test_batches_within_batches_are_refused(device: torch.device):
    """Which is torch's own function, and no public one."""
    x, layer = real(10, 5, device=device), GCNConv(5, 4).to(device, torch.float64)
    out = layer(x, torch.randint(0, 10, (2, 30), device=device))

    def within(vector: Tensor) -> Tensor:
        both = torch.stack([vector, vector])
        return torch.autograd.grad(out, x, both, is_grads_batched=True, retain_graph=True)[0]

    from torch._vmap_internals import _vmap

    with pytest.raises(NotImplementedError, match="batches within batches"):
        _vmap(within)(torch.ones(3, *out.shape, dtype=out.dtype, device=device))

"""`torch.autograd.grad(..., is_grads_batched=True)` and `jacobian(vectorize=True)`, as the peers' layers take them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import hessian, jacobian

import insum_nn
from insum_nn import Options
from insum_nn.formats import BlockCOO
from insum_nn.layers import (
    BlockSparseLinear,
    FullyConnectedTensorProduct,
    GCNConv,
    SparseConv3d,
    SparseConvTensor,
    SubMConv3d,
    TensorProductConv,
)
from insum_nn.ops import spmm
from tests.compiler.interpreted import interpreter

__all__ = ["interpreter"]

# What runs, and what is differentiated.
Made = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


def real(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=device, requires_grad=True)


def graph(device: torch.device) -> Made:
    edges = torch.randint(0, 10, (2, 30), device=device)
    layer = GCNConv(5, 4).to(device, torch.float64)
    weight = torch.rand(30, dtype=torch.float64, device=device, requires_grad=True)
    return lambda x, w, *_: layer(x, edges, w), (real(10, 5, device=device), weight, *layer.parameters())


def blocks(device: torch.device) -> Made:
    layer = BlockSparseLinear.from_linear(torch.nn.Linear(64, 48), density=0.5, block_shape=(16, 16))
    layer = layer.to(device, torch.float64)
    return lambda x, *_: layer(x), (real(7, 64, device=device), *layer.parameters())


def shared(device: torch.device) -> Made:
    layer = FullyConnectedTensorProduct("4x0e+4x1o", "2x0e+1x1o", "3x0e+4x1o").to(device, torch.float64)
    operands = (real(6, 16, device=device), real(6, 5, device=device))
    return lambda x, y, *_: layer(x, y), (*operands, *layer.parameters())


def edges(device: torch.device) -> Made:
    paths = [(0, 0, 0, "uvu", True), (1, 1, 0, "uvu", True), (0, 1, 1, "uvu", True)]
    layer = TensorProductConv("4x0e+4x1o", "1x0e+1x1o", "4x0e+4x1o", paths, shared_weights=False)
    layer = layer.to(device, torch.float64)
    receivers, senders = torch.randint(0, 6, (2, 20), device=device)
    count = layer.tensor_product.weight_numel
    operands = (real(6, 16, device=device), real(20, 4, device=device), real(20, count, device=device))
    return lambda x, y, w: layer(x, y, w, receivers, senders), operands


def cloud(kind: type[SubMConv3d | SparseConv3d], device: torch.device) -> Made:
    sites = torch.randint(0, 5, (40, 4), dtype=torch.int32)
    sites[:, 0] = 0
    sites = sites.unique(dim=0).to(device)
    layer = kind(4, 6, 3).to(device, torch.float64)

    def run(features: Tensor, *_: Tensor) -> Tensor:
        return layer(SparseConvTensor(features, sites, [5, 5, 5], 1)).features

    return run, (real(len(sites), 4, device=device), *layer.parameters())


CASES: dict[str, Callable[[torch.device], Made]] = {
    "graph": graph,
    "blocks": blocks,
    "shared": shared,
    "edges": edges,
    "submanifold": lambda device: cloud(SubMConv3d, device),
    "strided": lambda device: cloud(SparseConv3d, device),
}


def assert_as_one_by_one(run: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    out = run(*inputs)
    vectors = torch.randn(3, *out.shape, dtype=out.dtype, device=out.device)
    got = torch.autograd.grad(out, inputs, vectors, is_grads_batched=True, retain_graph=True)
    for at, vector in enumerate(vectors):
        want = torch.autograd.grad(out, inputs, vector, retain_graph=True)
        for many, one in zip(got, want, strict=True):
            torch.testing.assert_close(many[at], one)


@pytest.mark.parametrize("name", CASES)
def test_layers(device: torch.device, name: str):
    assert_as_one_by_one(*CASES[name](device))


@pytest.mark.parametrize("name", ["graph", "shared", "edges", "submanifold"])
def test_gradients_that_are_differentiated_in_turn(device: torch.device, name: str):
    run, inputs = CASES[name](device)

    out = run(*inputs) ** 3
    vectors = torch.randn(3, *out.shape, dtype=out.dtype, device=device)
    many = torch.autograd.grad(out, inputs, vectors, is_grads_batched=True, create_graph=True)
    ones = [torch.autograd.grad(out, inputs, vector, create_graph=True) for vector in vectors]
    found = [sum((g * g).sum() for g in grads) for grads in (many, [torch.stack(g) for g in zip(*ones, strict=True)])]
    got, want = (torch.autograd.grad(total, inputs, retain_graph=True) for total in found)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["graph", "shared"])
def test_jacobians_and_hessians(device: torch.device, name: str):
    run, (first, *rest) = CASES[name](device)
    others = [x.detach() for x in rest]

    def output(x: Tensor) -> Tensor:
        return run(x, *others)

    def energy(x: Tensor) -> Tensor:
        return (output(x) ** 3).sum()

    x = first.detach()
    torch.testing.assert_close(jacobian(output, x, vectorize=True), jacobian(output, x))
    torch.testing.assert_close(hessian(energy, x, vectorize=True), hessian(energy, x))


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
    run, (x, *rest) = CASES["graph"](device)
    others = [each.detach() for each in rest]
    out = run(x, *others)

    def within(vector: Tensor) -> Tensor:
        both = torch.stack([vector, vector])
        return torch.autograd.grad(out, x, both, is_grads_batched=True, retain_graph=True)[0]

    from torch._vmap_internals import _vmap

    with pytest.raises(NotImplementedError, match="batches within batches"):
        _vmap(within)(torch.ones(3, *out.shape, dtype=out.dtype, device=device))

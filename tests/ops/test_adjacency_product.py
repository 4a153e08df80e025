"""Products with an adjacency matrix: dense oracles, gradients of two orders, eager and recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx

from insum_nn.compiler.options import Options
from insum_nn.errors import InsumDeviceError, InsumShapeError
from insum_nn.ops.adjacency_product import adjacency_product
from insum_nn.sorted_rows import sort_pairs
from insum_nn.structure.adjacency import Adjacency
from insum_nn.testing.tolerances import assert_matches


def random_graph(nodes: int, edges: int) -> Tensor:
    """The last node has no edges; duplicates are there."""
    return torch.randint(max(nodes - 1, 1), (2, edges), generator=torch.Generator().manual_seed(0))


def dense(adjacency: Adjacency) -> Tensor:
    nodes, own = adjacency.num_nodes, adjacency
    return own.value.new_zeros(nodes, nodes).index_put((own.row, own.col), own.value, accumulate=True)


@pytest.mark.parametrize("options", [Options(), Options(deterministic=True)], ids=["", "deterministic"])
@pytest.mark.parametrize(("nodes", "edges", "width"), [(9, 31, 3), (4, 0, 2), (1, 5, 1), (30, 200, 7), (3, 4, 0)])
@pytest.mark.parametrize("biased", [False, True])
def test_product(options: Options, nodes: int, edges: int, width: int, biased: bool):
    graph = Adjacency.from_edges(random_graph(nodes, edges), num_nodes=nodes, dtype=torch.float64)
    x, bias = torch.randn(nodes, width, dtype=torch.float64), torch.randn(width, dtype=torch.float64)
    for _ in range(2):
        got = adjacency_product(x, graph, bias if biased else None, options=options)
        want = dense(graph) @ x + (bias if biased else 0)
        assert_matches(got, want, dtype=torch.float64, kind="sum")


def test_gradients_of_two_orders():
    edges = random_graph(6, 14)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(14, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return adjacency_product(x, Adjacency.from_edges(edges, weight, 6), bias)

    assert gradcheck(run, (x, weight, bias))
    assert gradgradcheck(run, (x, weight, bias), fast_mode=True)


def derived(run: Callable[..., Tensor], learned: bool) -> Callable[..., Sequence[Tensor]]:
    """The result, its gradients, and theirs, with respect to features, weights and bias."""

    def all_of(x: Tensor, bias: Tensor, *matrix: Tensor) -> list[Tensor]:
        x, bias = x.detach().requires_grad_(), bias.detach().requires_grad_()
        graph = Adjacency(*matrix)
        leaves = [x, bias]
        if learned:
            graph = graph._replace(value=graph.value.detach().requires_grad_())
            leaves.append(graph.value)
        found = [run(x, graph, bias)]
        for _ in range(2):
            total = found[-1].square().sum() if len(found) == 1 else sum(f.square().sum() for f in found[1:])
            found += torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True, materialize_grads=True)
        return [each.detach() for each in found]

    return all_of


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("record", [dispatch_functionalize, lambda run: run], ids=["functional", "make_fx"])
def test_recorded(learned: bool, record: Callable[[Any], Any]):
    run = derived(adjacency_product, learned)

    def inputs(nodes: int, edges: int) -> list[Tensor]:
        graph = Adjacency.from_edges(random_graph(nodes, edges), num_nodes=nodes)
        return [torch.randn(nodes, 4), torch.randn(4), *graph]

    recorded = make_fx(record(run), tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs(9, 30))
    targets = [str(node.target) for node in recorded.graph.nodes]
    assert not [target for target in targets if "sort" in target and "searchsorted" not in target]
    for sizes in ((9, 30), (21, 40)):
        given = inputs(*sizes)

        def plain(x: Tensor, graph: Adjacency, bias: Tensor) -> Tensor:
            return dense(graph) @ x + bias

        torch.testing.assert_close(recorded(*given), derived(plain, learned)(*given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_are_promoted(dtype: torch.dtype):
    graph = Adjacency.from_edges(random_graph(6, 14), torch.ones(14), 6, normalize=False)
    x = torch.randn(6, 3).to(dtype)
    out = adjacency_product(x, graph)
    assert out.dtype == torch.promote_types(dtype, torch.float32)
    assert_matches(out, dense(graph).double() @ x.double(), dtype=out.dtype, kind="sum")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert adjacency_product(torch.randn(6, 3), graph).dtype == torch.bfloat16


def test_errors():
    graph = Adjacency.from_edges(random_graph(6, 14), num_nodes=6)
    with pytest.raises(InsumShapeError, match="the adjacency does not fit"):
        adjacency_product(torch.randn(5, 3), graph)
    with pytest.raises(InsumDeviceError, match="different devices"):
        adjacency_product(torch.randn(6, 3, device="meta"), graph)


@pytest.mark.parametrize("extent", [1, 7, 1 << 20, 1 << 31])
def test_entries_are_sorted(extent: int):
    """Packed into one integer, and for extents that do not fit by two sorts."""
    row, col = torch.randint(extent, (2, 40)) if extent < 1 << 31 else (1 << 30) + torch.randint(5, (2, 40))
    row[::3], col[::2] = row[0], col[0]
    first, second, order = sort_pairs(row, col, extent)
    want = sorted(range(40), key=lambda at: (int(row[at]), int(col[at]), at))
    assert order.tolist() == want
    assert torch.equal(first, row[order])
    assert torch.equal(second, col[order])
    assert sort_pairs(row[:0], col[:0], extent)[2].shape == (0,)

"""Normalised convolutions against dense matrices: what is kept of an edge list, for how long, and for which calls."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("torch_geometric")

from insum_nn.compiler.options import Options
from insum_nn.layers.graph import messages
from insum_nn.layers.graph.gcn_conv import GCNConv
from insum_nn.tensor_cache import TensorCache
from insum_nn.testing.tolerances import assert_matches
from tests.allocations import largest_allocation


def skewed_graph(nodes: int, edges: int, seed: int = 0) -> Tensor:
    """A third of the edges meet in node 0, the last two nodes have none; duplicates and self-loops are there."""
    generator = torch.Generator().manual_seed(seed)
    graph = torch.randint(max(nodes - 2, 1), (2, edges), generator=generator)
    graph[1, ::3] = 0
    graph[0, 1::7] = 0
    return graph


def dense_matrix(edges: Tensor, weight: Tensor | None, nodes: int, layer: GCNConv) -> Tensor:
    """[receiver, sender] in float64, edge by edge as torch_geometric defines it; uses nothing of the package."""
    fill = 2.0 if layer.improved and weight is not None else 1.0
    loop_weight: dict[int, Tensor | float] = dict.fromkeys(range(nodes), fill)
    entries: list[tuple[int, int, Tensor | float]] = []
    for edge, (source, target) in enumerate(edges.t().tolist()):
        one = 1.0 if weight is None else weight[edge]
        receiver, sender = (target, source) if layer.flow == "source_to_target" else (source, target)
        if source != target or not layer.add_self_loops:
            entries.append((receiver, sender, one))
        else:
            loop_weight[source] = one
    if layer.add_self_loops:
        entries += [(node, node, one) for node, one in loop_weight.items()]
    matrix = torch.zeros(nodes, nodes, dtype=torch.float64)
    if entries:
        receivers, senders, ones = zip(*entries, strict=True)
        values = torch.stack([torch.as_tensor(one, dtype=torch.float64) for one in ones])
        matrix = matrix.index_put((torch.tensor(receivers), torch.tensor(senders)), values, accumulate=True)
    if not layer.normalize:
        return matrix
    degree = matrix.sum(1)
    root = torch.where(degree == 0, 0.0, torch.where(degree == 0, 1.0, degree) ** -0.5)
    return root[:, None] * matrix * root


def oracle(layer: GCNConv, x: Tensor, edges: Tensor, weight: Tensor | None) -> Tensor:
    dense = dense_matrix(edges, weight, x.shape[0], layer) @ x @ layer.lin.weight.double().t()
    return dense if layer.bias is None else dense + layer.bias.double()


KINDS = [
    {},
    {"normalize": False},
    {"add_self_loops": False},
    {"improved": True},
    {"flow": "target_to_source"},
    {"normalize": False, "flow": "target_to_source", "bias": False},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("nodes", "edges"), [(9, 31), (4, 0), (2, 7), (30, 200)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("wide", [2, 6])
def test_values_and_gradients(kind: dict[str, object], nodes: int, edges: int, weighted: bool, wide: int):
    layer, graph = GCNConv(4, wide, **kind).double(), skewed_graph(nodes, edges)
    x = torch.randn(nodes, 4, dtype=torch.float64, requires_grad=True)
    weight = (torch.rand(edges, dtype=torch.float64) + 0.1).requires_grad_() if weighted else None
    leaves = [x, *layer.parameters(), *([weight] if weight is not None and edges else [])]
    got, want = layer(x, graph, weight), oracle(layer, x, graph, weight)
    assert_matches(got, want, dtype=torch.float64, kind="sum")
    found = [torch.autograd.grad(out.pow(3).sum(), leaves, create_graph=True) for out in (got, want)]
    for a, b in zip(*found, strict=True):
        # Terms of a gradient may cancel.
        assert_matches(a, b, dtype=torch.float64, kind="gradient", scale=max(1.0, float(b.detach().abs().max())))
    twice = [torch.autograd.grad(sum(g.square().sum() for g in each), leaves) for each in found]
    for a, b in zip(*twice, strict=True):
        assert_matches(a, b, dtype=torch.float64, kind="second", scale=max(1.0, float(b.detach().abs().max())))


@pytest.mark.c
def test_no_tensor_of_edges_by_features():
    """Nothing the size of a message per edge is made, forwards or backwards, in gradients of values or second ones."""
    nodes, edges, width = 200, 6000, 64
    layer, graph = GCNConv(width, width).double(), torch.randint(nodes, (2, edges))
    weight = torch.rand(edges, dtype=torch.float64, requires_grad=True)
    x = torch.rand(nodes, width, dtype=torch.float64, requires_grad=True)

    def work() -> None:
        first = torch.autograd.grad(layer(x, graph, weight).square().sum(), (weight, x), create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in first), (weight, x))

    size = edges * width * 8
    assert largest_allocation(lambda: weight[:, None] * x[graph[0]]) >= size
    assert largest_allocation(work) < size / 2


def test_nothing_kept_serves_another_call():
    """One edge list and one tensor of weights, under every combination of what else decides the result, twice."""
    edges, weight = skewed_graph(9, 40), torch.rand(40) + 0.1
    kinds = [
        {"add_self_loops": loops, "improved": improved, "flow": flow, "normalize": True}
        for loops in (False, True)
        for improved in (False, True)
        for flow in ("source_to_target", "target_to_source")
    ] + [{"normalize": False}, {"normalize": False, "flow": "target_to_source"}]
    for kind in kinds * 2:
        for nodes, dtype, given in itertools.product((9, 11), (torch.float64, torch.float32), (weight, None)):
            for width in (2, 3):
                layer = GCNConv(width, 2, **kind).to(dtype)
                torch.nn.init.normal_(layer.bias)
                x, own = torch.randn(nodes, width, dtype=dtype), None if given is None else given.to(dtype)
                want = oracle(layer, x.double(), edges, None if own is None else own.double())
                assert_matches(layer(x, edges, own), want, dtype=dtype, kind="gradient")


def test_weights_written_to_are_read_again():
    layer, edges = GCNConv(2, 2).double(), skewed_graph(5, 9)
    x, weight = torch.randn(5, 2, dtype=torch.float64), torch.rand(9, dtype=torch.float64)
    layer(x, edges, weight)
    weight.mul_(torch.arange(1, 10))
    assert_matches(layer(x, edges, weight), oracle(layer, x, edges, weight), dtype=torch.float64, kind="sum")


def test_what_is_kept_dies_with_its_edges():
    messages._edge_lists.clear()
    layer, edges, weight, x = GCNConv(2, 2), skewed_graph(5, 9), torch.rand(9), torch.randn(5, 2)
    layer(x, edges, weight)
    layer(x, edges)
    assert len(messages._edge_lists) == 2
    del weight
    gc.collect()
    assert len(messages._edge_lists) == 1
    del edges
    gc.collect()
    assert len(messages._edge_lists) == 0


def test_the_cache_is_bounded():
    cache: TensorCache[object] = TensorCache(limit=2)
    tensors = [torch.zeros(1) for _ in range(3)]
    made = [cache.get([t], None, object) for t in tensors]
    assert len(cache) == 2
    assert cache.get([tensors[2]], None, object) is made[2]
    assert cache.get([tensors[0]], None, object) is not made[0]


def test_inference_mode():
    layer, edges, x, weight = GCNConv(2, 2), skewed_graph(5, 9), torch.randn(5, 2), torch.rand(9)
    want = layer(x, edges, weight)
    messages._edge_lists.clear()
    with torch.inference_mode():
        torch.testing.assert_close(layer(x, edges, weight), want)
        torch.testing.assert_close(layer(x.clone(), edges.clone(), weight.clone()), want)
    # What was kept there serves training.
    learned = x.clone().requires_grad_()
    layer(learned, edges, weight).sum().backward()
    assert learned.grad is not None


def test_nan_stays():
    graph = torch.tensor([[0, 1, 2], [1, 2, 3]])
    layer = GCNConv(1, 1, bias=False)
    out = layer(torch.tensor([[1.0], [float("nan")], [1.0], [1.0]]), graph)
    assert out.isnan().squeeze(1).tolist() == [False, True, True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", [Options(), Options(deterministic=True)], ids=["default", "deterministic"])
def test_on_a_gpu(gpu: torch.device, weighted: bool, options: Options):
    edges = skewed_graph(300, 5000)
    exact = GCNConv(33, 20).double()
    layer = GCNConv(33, 20, options=options).to(gpu)
    layer.load_state_dict(exact.state_dict())
    x = torch.randn(300, 33, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(5000, dtype=torch.float64, requires_grad=True) if weighted else None
    inputs = (x, weight) if weighted else (x,)
    want = oracle(exact, x, edges, weight)
    ours = [t.detach().to(gpu, torch.float32).requires_grad_() for t in inputs]
    got = layer(ours[0], edges.to(gpu), ours[1] if weighted else None)
    assert_matches(got, want, dtype=torch.float32, kind="gradient")
    found = [torch.autograd.grad(out.square().sum(), own) for out, own in ((got, ours), (want, inputs))]
    for a, b in zip(*found, strict=True):
        assert_matches(a, b, dtype=torch.float32, kind="second")


@pytest.mark.gpu
def test_deterministic_on_a_gpu(gpu: torch.device):
    edges = skewed_graph(200, 20000).to(gpu)
    layer = GCNConv(64, 64, options=Options(deterministic=True)).to(gpu)
    x = torch.randn(200, 64, device=gpu, requires_grad=True)
    weight = torch.rand(20000, device=gpu)

    def run() -> list[Tensor]:
        out = layer(x, edges.clone(), weight.clone())
        return [out, *torch.autograd.grad(out.square().sum(), (x, *layer.parameters()))]

    first = run()
    for _ in range(5):
        for a, b in zip(first, run(), strict=True):
            assert torch.equal(a, b)

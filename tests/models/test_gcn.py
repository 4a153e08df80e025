"""GCN against torch_geometric's, and trained."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torch_geometric")

from torch_geometric.nn.models import GCN as Peer

from insum_nn.layers.graph.gcn_conv import GCNConv
from insum_nn.models.gcn import GCN
from insum_nn.testing.tolerances import assert_matches

NODES = 20


def random_graph(seed: int = 0) -> Tensor:
    graph = torch.randint(NODES - 2, (2, 70), generator=torch.Generator().manual_seed(seed))
    return graph[:, graph[0] != graph[1]]


SETTINGS: list[dict[str, Any]] = [
    {"num_layers": 1},
    {"num_layers": 2, "out_channels": 5},
    {"num_layers": 3, "norm": "batch_norm", "act": "leaky_relu", "jk": "cat"},
    {"num_layers": 3, "norm": "layer_norm", "act_first": True, "jk": "max", "out_channels": 2},
    {"num_layers": 2, "jk": "lstm", "improved": True, "flow": "target_to_source"},
    {"num_layers": 2, "normalize": False, "bias": False},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equals_the_peer(settings: dict[str, Any]):
    ours, theirs = GCN(6, 8, **settings).double(), Peer(6, 8, **settings).double()
    assert repr(ours) == repr(theirs)
    assert all(isinstance(layer, GCNConv) for layer in ours.convs)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(NODES, 6, dtype=torch.float64, requires_grad=True)
    graph = random_graph()
    weight = torch.rand(graph.shape[1], dtype=torch.float64, requires_grad=True)
    got, want = ours(x, graph, weight), theirs(x, graph, weight)
    assert_matches(got, want, dtype=torch.float64, kind="sum")
    seed = torch.randn_like(got)
    grads = [
        torch.autograd.grad(out, [x, weight, *model.parameters()], seed, allow_unused=True)
        for out, model in ((got, ours), (want, theirs))
    ]
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_matches(a, b, dtype=torch.float64, kind="gradient", scale=max(float(b.abs().max()), 1.0))


def test_lazy_sizes():
    model = GCN(-1, 8, num_layers=2, out_channels=3)
    assert model(torch.randn(NODES, 6), random_graph()).shape == (NODES, 3)
    assert model.convs[0].lin.weight.shape == (8, 6)


def test_copies():
    model = GCN(6, 8, num_layers=2).eval()
    x, graph = torch.randn(NODES, 6), random_graph()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x, graph), model(x, graph))


def test_compiled_without_breaks():
    torch._dynamo.reset()
    model = GCN(6, 8, num_layers=3, out_channels=3, norm="layer_norm").double()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(NODES, 6, dtype=torch.float64, requires_grad=True)
    out, want = compiled(x, random_graph()), model(x, random_graph())
    assert_matches(out, want, dtype=torch.float64, kind="sum")
    pairs = (torch.autograd.grad(o.square().sum(), x)[0] for o in (out, want))
    assert_matches(*pairs, dtype=torch.float64, kind="gradient")


def test_learns_what_a_node_belongs_to():
    """Two dense communities, features that say nothing but who a node is: the graph has to be read."""
    half = NODES // 2
    inside = [(a, b) for a in range(NODES) for b in range(NODES) if a != b and (a < half) == (b < half)]
    graph = torch.tensor([*inside, (0, half), (half, 0)]).t()
    labels = (torch.arange(NODES) >= half).long()
    known = torch.tensor([1, half + 1])
    model = GCN(NODES, 8, num_layers=2, out_channels=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loss = torch.ones(())
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.eye(NODES), graph)[known], labels[known])
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    assert bool((model(torch.eye(NODES), graph).argmax(1) == labels).all())

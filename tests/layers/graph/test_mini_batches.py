"""Training on parts of graphs, as PyTorch Geometric draws and joins them: each step has another graph."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torch_geometric")

from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader, NodeLoader
from torch_geometric.nn.conv import GCNConv as Peer
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput
from torch_geometric.utils import dropout_edge

from insum_nn.layers import GCNConv
from insum_nn.layers.graph import messages
from insum_nn.testing.tolerances import assert_matches

NODES = 40


def whole_graph() -> Data:
    """Edges without loops, so that every part has those that are added to it; some nodes have no edge."""
    edges = torch.randint(NODES - 3, (2, 150))
    edges = edges[:, edges[0] != edges[1]]
    x, weights = torch.randn(NODES, 4, dtype=torch.float64), torch.rand(edges.shape[1], dtype=torch.float64)
    return Data(x=x, edge_index=edges, edge_weight=weights, y=torch.randint(3, (NODES,)))


class Network(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = kind(4, 8), kind(8, 3)

    def forward(self, x: Tensor, edges: Tensor, weights: Tensor | None = None) -> Tensor:
        return self.second(self.first(x, edges, weights).relu(), edges, weights)


def pair() -> tuple[Network, Network]:
    ours, theirs = Network(GCNConv).double(), Network(Peer).double()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def assert_trains_alike(models: tuple[Network, Network], data: Any, count: int | None = None) -> None:
    """A step on the first `count` nodes, which are those that a loader was asked for: outputs and all gradients."""
    found = []
    for model in models:
        x, weights = (t.detach().requires_grad_() for t in (data.x, data.edge_weight))
        out = model(x, data.edge_index, weights)
        loss = nn.functional.cross_entropy(out[:count], data.y[:count])
        found.append([out, *torch.autograd.grad(loss, [x, weights, *model.parameters()])])
    for got, want in zip(*found, strict=True):
        assert_matches(got, want, dtype=torch.float64, kind="gradient")


class Neighbours(BaseSampler):
    """At most three drawn neighbours of each node, twice: `NeighborLoader`'s own sampler needs a compiled package."""

    def __init__(self, edges: Tensor) -> None:
        self.edges = edges

    def sample_from_edges(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    def sample_from_nodes(self, index: NodeSamplerInput, **_: Any) -> SamplerOutput:
        nodes, drawn = index.node, torch.empty(0, dtype=torch.int64)
        reached = nodes
        for _hop in range(2):
            into = torch.isin(self.edges[1], reached).nonzero().squeeze(1)
            order = into[torch.randperm(len(into))]
            kept = [order[self.edges[1, order] == node][:3] for node in reached.unique()]
            drawn = torch.cat([drawn, *kept]).unique()
            reached = self.edges[0, drawn]
            nodes = torch.cat([nodes, reached[~torch.isin(reached, nodes)].unique()])
        place = torch.full((NODES,), -1).scatter(0, nodes, torch.arange(len(nodes)))
        sends, receives = place[self.edges[:, drawn]]
        return SamplerOutput(
            node=nodes, row=sends, col=receives, edge=drawn, batch=None, metadata=(index.input_id, None)
        )


def test_neighbours_of_a_few_nodes_at_a_time():
    data, models = whole_graph(), pair()
    loader = NodeLoader(data, Neighbours(data.edge_index), batch_size=7, shuffle=True)
    sizes, part = set(), None
    # Garbage of earlier tests may hold others.
    messages._edge_lists.clear()
    for part in loader:
        assert_trains_alike(models, part, part.batch_size)
        sizes.add((part.num_nodes, part.num_edges))
    assert len(loader) == 6
    assert len(sizes) > 3
    # What is kept of an edge list goes with it.
    del part
    gc.collect()
    assert len(messages._edge_lists) == 0


def test_edges_that_are_dropped_at_each_step():
    data, models = whole_graph(), pair()
    for share in (0.3, 0.3, 0.9, 1.0):
        edges, kept = dropout_edge(data.edge_index, p=share)
        part = copy.copy(data)
        part.edge_index, part.edge_weight = edges, data.edge_weight[kept]
        assert_trains_alike(models, part)
    models[0].eval()
    assert dropout_edge(data.edge_index, p=0.5, training=False)[0] is data.edge_index


def test_graphs_that_are_joined_to_one():
    graphs, models = [], pair()
    for nodes, edges in ((5, 9), (1, 0), (8, 30), (3, 2)):
        ends = torch.randint(nodes, (2, edges))
        ends = ends[:, ends[0] != ends[1]]
        x, y = torch.randn(nodes, 4, dtype=torch.float64), torch.randint(3, (nodes,))
        weights = torch.rand(ends.shape[1], dtype=torch.float64)
        graphs.append(Data(x=x, y=y, edge_index=ends, edge_weight=weights))
    joined = Batch.from_data_list(graphs)
    assert_trains_alike(models, joined)
    ours = models[0]
    alone = torch.cat([ours(g.x, g.edge_index, g.edge_weight) for g in graphs])
    assert_matches(ours(joined.x, joined.edge_index, joined.edge_weight), alone, dtype=torch.float64, kind="sum")
    for part in DataLoader(graphs, batch_size=3):
        assert_trains_alike(models, part)

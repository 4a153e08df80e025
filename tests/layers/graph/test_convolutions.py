"""Convolutions of one statement against torch_geometric's: values, derivatives, options, and what messages are for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torch_geometric")

import torch_geometric.nn as peers
from torch_geometric import EdgeIndex
from torch_geometric.explain import Explainer, GNNExplainer

from insum_nn import layers
from insum_nn.compiler.options import Options
from insum_nn.errors import InsumRangeError
from insum_nn.layers.graph import convolutions, messages
from insum_nn.testing.tolerances import assert_matches
from tests.layers.graph.test_attention import assert_same, largest_made, messages_refused, real
from tests.layers.graph.test_gcn_conv import random_graph

NODES, EDGES, WIDTH = 14, 45, 5

# Class, what makes its arguments (modules are new for each layer), and what edges carry: "w" weights, "f" features.
CASES: dict[str, tuple[str, Any, str]] = {
    "mean": ("SAGEConv", lambda: ((WIDTH, 3), {}), ""),
    "sum": ("SAGEConv", lambda: ((WIDTH, 3), {"aggr": "sum", "project": True, "normalize": True}), ""),
    "max": ("SAGEConv", lambda: ((WIDTH, 3), {"aggr": "max"}), ""),
    "min": ("SAGEConv", lambda: ((WIDTH, 3), {"aggr": "min", "root_weight": False}), ""),
    "isomorphism": ("GINConv", lambda: ((nn.Linear(WIDTH, 3),), {"train_eps": True}), ""),
    "isomorphism, other flow": ("GINConv", lambda: ((nn.Linear(WIDTH, 3),), {"flow": "target_to_source"}), ""),
    "edges": ("GINEConv", lambda: ((nn.Linear(WIDTH, 3),), {"edge_dim": 4}), "f"),
    "max of edges": ("GINEConv", lambda: ((nn.Linear(WIDTH, 3),), {"edge_dim": 4, "aggr": "max"}), "f"),
    "weights": ("GraphConv", lambda: ((WIDTH, 3), {}), "w"),
    "mean of weights": ("GraphConv", lambda: ((WIDTH, 3), {"aggr": "mean"}), "w"),
    "max of weights": ("GraphConv", lambda: ((WIDTH, 3), {"aggr": "max", "flow": "target_to_source"}), "w"),
    "Chebyshev": ("ChebConv", lambda: ((WIDTH, 3, 3), {}), "w"),
    "Chebyshev, other": ("ChebConv", lambda: ((WIDTH, 3, 2), {"normalization": None, "bias": False}), "w"),
    "simplified": ("SGConv", lambda: ((WIDTH, 3, 2), {}), "w"),
    "adaptive": ("TAGConv", lambda: ((WIDTH, 3), {}), "w"),
    "adaptive, plain": ("TAGConv", lambda: ((WIDTH, 3, 2), {"normalize": False}), "w"),
    "page rank": ("APPNP", lambda: ((3, 0.1), {}), "w"),
    "page rank, no loops": ("APPNP", lambda: ((3, 0.1), {"add_self_loops": False}), "w"),
    "light": ("LGConv", lambda: ((), {}), "w"),
    "gated": ("GatedGraphConv", lambda: ((6, 2), {}), "w"),
    "networks": ("NNConv", lambda: ((WIDTH, 3, nn.Linear(4, 3 * WIDTH)), {}), "f"),
    "mean of networks": ("NNConv", lambda: ((WIDTH, 3, nn.Linear(4, 3 * WIDTH)), {"aggr": "mean"}), "f"),
}
every_case = pytest.mark.parametrize("name", CASES)
# One of each class.
every_layer = pytest.mark.parametrize("name", list({kind: name for name, (kind, _, _) in CASES.items()}.values()))


@pytest.mark.parametrize("kind", ["SAGEConv", "GraphConv", "ChebConv", "TAGConv", "GATConv", "TransformerConv"])
def test_sizes_of_numpy(kind: str):
    """The peers take them for pairs of widths."""
    made: Any = getattr(layers, kind)
    more: dict[str, Any] = {"K": 2} if kind in ("ChebConv", "TAGConv") else {}
    torch.manual_seed(0)
    layer = made(np.int64(3), out_channels=np.int32(2), **{name: np.int64(value) for name, value in more.items()})
    torch.manual_seed(0)
    same = made(3, 2, **more)
    assert repr(layer) == repr(same)
    x, edges = torch.randn(4, 3), torch.tensor([[0, 1, 2], [1, 2, 3]])
    assert torch.equal(layer(x, edges), same(x, edges))


@pytest.mark.parametrize("name", ["adaptive", "page rank", "page rank, no loops", "light"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_batch_of_graphs(name: str, weighted: bool):
    """Under `torch.vmap` over the edges; the peer is called graph by graph, as its own normalisation fails there."""
    ours, theirs = pair(name)
    x = torch.randn(3, NODES, WIDTH, dtype=torch.float64)
    graphs = torch.stack([random_graph(NODES, EDGES, seed)[:, :30] for seed in range(3)])
    more = (torch.rand(3, 30, dtype=torch.float64),) if weighted else ()
    want = torch.stack([theirs(*one) for one in zip(x, graphs, *more, strict=True)])
    torch.testing.assert_close(torch.vmap(ours)(x, graphs, *more), want)


def pair(name: str, **more: Any) -> tuple[Any, Any]:
    """Our layer and the peer's with the same parameters, in float64."""
    kind, arguments, _ = CASES[name]
    made: list[Any] = []
    for home in (convolutions, peers):
        given, named = arguments()
        own = more if home is convolutions else {}
        # torch's oldest constructor takes no notice of the default device.
        made.append(getattr(home, kind)(*given, **named, **own).to(torch.get_default_device(), torch.float64))
    ours, theirs = made
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def inputs_of(name: str, nodes: int = NODES, edges: int = EDGES) -> tuple[list[Tensor], list[Tensor]]:
    """The arguments of a call, and those of them that are differentiable."""
    graph, x = random_graph(nodes, edges, loops=False), real(nodes, WIDTH)
    graph = graph[:, graph[0] != graph[1]]
    carried = CASES[name][2]
    if not carried:
        return [x, graph], [x]
    edge = real(graph.shape[1], 4) if carried == "f" else torch.rand(graph.shape[1], dtype=torch.float64) + 0.1
    edge.requires_grad_()
    return [x, graph, edge], [x, edge]


# Values and derivatives.


@every_case
@pytest.mark.usefixtures("made_on")
def test_equals_the_peer(name: str, monkeypatch: pytest.MonkeyPatch):
    ours, theirs = pair(name)
    arguments, leaves = inputs_of(name)
    assert_same(ours, theirs, leaves, *arguments)
    if CASES[name][2] == "w":
        assert_same(ours, theirs, leaves[:1], *arguments[:2])
    want = theirs(*arguments)
    messages_refused(monkeypatch)
    assert_matches(ours(*arguments), want, dtype=torch.float64, kind="sum")


# Of no edges torch_geometric's normalisation of this one is NaN.
@pytest.mark.parametrize("name", [name for name in CASES if name != "Chebyshev, other"])
@pytest.mark.parametrize(("nodes", "edges"), [(1, 0), (1, 3), (5, 0), (40, 300)])
@pytest.mark.usefixtures("made_on")
def test_other_sizes(name: str, nodes: int, edges: int):
    ours, theirs = pair(name)
    arguments, leaves = inputs_of(name, nodes, edges)
    assert_same(ours, theirs, leaves, *arguments)


@pytest.mark.parametrize("name", ["mean", "max", "isomorphism", "edges", "weights", "networks"])
@pytest.mark.parametrize("only_senders", [False, True])
@pytest.mark.usefixtures("made_on")
def test_bipartite_graphs(name: str, only_senders: bool):
    ours, theirs = pair(name)
    graph = torch.stack([torch.randint(NODES, (30,)), torch.randint(6, (30,))])
    features = [real(graph.shape[1], 4)] if CASES[name][2] == "f" else []
    senders, receivers = real(NODES, WIDTH), real(8, WIDTH)
    if only_senders:
        arguments = ((senders, None), graph, *features)
        got, want = (layer(*arguments, size=(NODES, 8)) for layer in (ours, theirs))
        assert got.shape[0] == 8
        assert_matches(got, want, dtype=torch.float64, kind="sum")
        return
    assert_same(ours, theirs, [senders, receivers, *features], (senders, receivers), graph, *features)


@pytest.mark.usefixtures("made_on")
def test_ties_share_the_gradient():
    ours, theirs = pair("max")
    graph = torch.tensor([[0, 1, 2, 3], [0, 0, 0, 1]])
    x = torch.ones(4, WIDTH, dtype=torch.float64, requires_grad=True)
    assert_same(ours, theirs, [x], x, graph)


@pytest.mark.parametrize("name", ["light", "adaptive", "page rank"])
def test_edges_are_normalised_once(name: str, monkeypatch: pytest.MonkeyPatch):
    made: list[object] = []
    plain = convolutions.gcn_norm
    monkeypatch.setattr(convolutions, "gcn_norm", lambda *args, **how: made.append(args) or plain(*args, **how))
    ours, theirs = pair(name)
    (x, graph, weight), _ = inputs_of(name)
    with torch.inference_mode():
        ours(x, graph)
    for _ in range(2):
        assert_matches(ours(x, graph), theirs(x, graph), dtype=torch.float64, kind="sum")
    assert len(made) == 1
    # Learned weights change with every step.
    assert_matches(ours(x, graph, weight), theirs(x, graph, weight), dtype=torch.float64, kind="sum")
    made.pop()
    graph[0, 0] = (graph[0, 0] + 1) % NODES
    assert_matches(ours(x, graph), theirs(x, graph), dtype=torch.float64, kind="sum")
    assert len(made) == 2


def test_cached_graphs_stay():
    ours, theirs = (home.APPNP(2, 0.1, cached=True).double() for home in (convolutions, peers))
    (x, graph), _ = inputs_of("mean")
    for given in (graph, graph.flip(0)):
        assert_matches(ours(x, given), theirs(x, given), dtype=torch.float64, kind="sum")


# Memory.


@pytest.mark.c
@pytest.mark.parametrize("name", ["mean", "isomorphism", "weights", "light"])
def test_nothing_has_an_axis_of_edges_and_one_of_features(name: str, monkeypatch: pytest.MonkeyPatch):
    nodes, edges = 20, 4000
    kind, arguments, _ = CASES[name]
    given, named = arguments()
    layer = getattr(convolutions, kind)(*given, **named)
    graph = torch.randint(nodes, (2, edges))
    x = torch.randn(nodes, WIDTH, requires_grad=True)
    messages_refused(monkeypatch)
    # Edges, of two ends in int64, and their weights.
    assert largest_made(lambda: layer(x, graph)) <= 2 * 8 * (edges + nodes)


# What is left to messages.


@every_layer
def test_messages_that_are_asked_for(name: str):
    ours, theirs = pair(name)
    arguments, _ = inputs_of(name)
    want = theirs(*arguments)
    seen: list[int] = []
    handle = ours.register_message_forward_hook(lambda _module, _inputs, out: seen.append(len(out)))
    assert_matches(ours(*arguments), want, dtype=torch.float64, kind="sum")
    assert seen
    handle.remove()


@pytest.mark.parametrize("aggr", [["mean", "max"], "mul", "var"])
def test_other_aggregations(aggr: Any):
    ours, theirs = (home.SAGEConv(WIDTH, 3, aggr=aggr).double() for home in (convolutions, peers))
    theirs.load_state_dict(ours.state_dict())
    (x, graph), _ = inputs_of("mean")
    assert_matches(ours(x, graph), theirs(x, graph), dtype=torch.float64, kind="sum")


def test_other_kinds_of_graphs():
    ours, theirs = pair("mean")
    (x, graph), _ = inputs_of("mean")
    want = theirs(x, graph)
    adjacency = EdgeIndex(graph, sparse_size=(NODES, NODES))
    assert_matches(ours(x, adjacency), want, dtype=torch.float64, kind="sum")
    several = torch.stack([x, 2 * x])
    assert_matches(ours(several, graph), theirs(several, graph), dtype=torch.float64, kind="sum")


def test_networks_of_maxima():
    """Channels are summed before edges are compared, which one statement does not say."""
    ours, theirs = (home.NNConv(WIDTH, 3, nn.Linear(4, 15), aggr="max").double() for home in (convolutions, peers))
    theirs.load_state_dict(ours.state_dict())
    (x, graph, edge), _ = inputs_of("networks")
    assert_matches(ours(x, graph, edge), theirs(x, graph, edge), dtype=torch.float64, kind="sum")


def test_subclasses_with_messages_of_their_own():
    class Doubled(convolutions.SAGEConv):
        def message(self, x_j: Tensor) -> Tensor:
            return 2 * x_j

    layer = Doubled(WIDTH, 3, bias=False, root_weight=False).double()
    plain = convolutions.SAGEConv(WIDTH, 3, bias=False, root_weight=False).double()
    plain.load_state_dict(layer.state_dict())
    (x, graph), _ = inputs_of("mean")
    assert_matches(layer(x, graph), 2 * plain(x, graph), dtype=torch.float64, kind="sum")


def test_a_class_that_is_given_messages_of_its_own_later(monkeypatch: pytest.MonkeyPatch):
    class Later(convolutions.SAGEConv):
        pass

    layer = Later(WIDTH, 3, bias=False, root_weight=False).double()
    (x, graph), _ = inputs_of("mean")
    before = layer(x, graph)
    monkeypatch.setattr(Later, "message", lambda _, x_j: 2 * x_j)
    assert_matches(layer(x, graph), 2 * before, dtype=torch.float64, kind="sum")


def test_explainers():
    ours, _ = pair("weights")
    settings: Any = {"explanation_type": "model", "edge_mask_type": "object", "node_mask_type": "attributes"}
    model: Any = {"mode": "regression", "task_level": "node", "return_type": "raw"}
    explainer = Explainer(ours, GNNExplainer(epochs=2), model_config=model, **settings)
    (x, graph, _), _ = inputs_of("weights")
    explanation = explainer(x.detach(), graph)
    assert explanation.edge_mask.shape == (graph.shape[1],)


def test_errors_of_the_peer():
    ours, theirs = pair("mean")
    (x, graph), _ = inputs_of("mean")
    for layer in (ours, theirs):
        with pytest.raises(ValueError, match="integer"):
            layer(x, graph.double())
        with pytest.raises(ValueError, match="expected size 9"):
            layer((x, x), graph, size=(9, NODES))
    with pytest.raises(InsumRangeError, match="'I'|'J'"):
        ours(x, torch.tensor([[0, NODES], [1, 2]]))


# As a module.


@pytest.mark.parametrize("name", ["mean", "max", "isomorphism", "weights", "gated"])
def test_torchscript(name: str):
    ours, theirs = pair(name)
    arguments, _ = inputs_of(name)
    want = theirs(*arguments)
    torch.jit.script(theirs)
    scripted = torch.jit.script(ours)
    assert_matches(scripted(*arguments), want, dtype=torch.float64, kind="sum")
    assert list(scripted.state_dict()) == list(theirs.state_dict())


def test_a_mean_counts_edges_once_for_each_edge_list(monkeypatch):
    counted: list[str] = []
    run = messages.run
    monkeypatch.setattr(messages, "run", lambda text, *rest: counted.append(text) or run(text, *rest))
    layer, x = convolutions.SAGEConv(3, 2, aggr="mean"), torch.randn(4, 3)
    edges = torch.tensor([[0, 1, 2, 0], [1, 2, 3, 3]])
    # What is made in inference mode serves in training.
    with torch.inference_mode():
        first = layer(x, edges)
    layer(x, edges).sum().backward()
    assert torch.equal(layer(x, edges), first)
    assert counted.count("N[I[e]] += W[e]") == 1
    edges[1, 3] = 1
    torch.testing.assert_close(layer(x, edges), layer(x, edges.clone()))
    assert counted.count("N[I[e]] += W[e]") == 3
    # What is read at every call, and features of another dtype.
    layer.options = Options(validate=True)
    for _ in range(2):
        layer(x, edges)
    layer.double()(x.double(), edges)
    assert counted.count("N[I[e]] += W[e]") == 6

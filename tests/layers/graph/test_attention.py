"""Graph attention against torch_geometric's: values, derivatives, options, memory, and what is left to its messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torch_geometric")

from torch_geometric import EdgeIndex
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import GATConv as PeerGAT
from torch_geometric.nn import GATv2Conv as PeerGATv2
from torch_geometric.nn import MessagePassing
from torch_geometric.nn import TransformerConv as PeerTransformer

from insum_nn.layers.graph.attention import GATConv, GATv2Conv, TransformerConv
from insum_nn.testing.tolerances import assert_matches
from tests.layers.graph.test_gcn_conv import random_graph

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")

LAYERS: dict[str, tuple[Any, Any]] = {
    "GATConv": (GATConv, PeerGAT),
    "GATv2Conv": (GATv2Conv, PeerGATv2),
    "TransformerConv": (TransformerConv, PeerTransformer),
}
every_layer = pytest.mark.parametrize("name", LAYERS)
NODES, EDGES, WIDTH = 14, 45, 5


def pair(name: str, *arguments: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Our layer and the peer's with the same parameters, in float64."""
    ours, theirs = (kind(*arguments, **kwargs).double() for kind in LAYERS[name])
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def messages_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a layer that forms messages fail."""

    def refused(*_: object, **__: object) -> Tensor:
        raise AssertionError("a message is formed")

    for name in ("propagate", "edge_updater"):
        monkeypatch.setattr(MessagePassing, name, refused)


# Values and derivatives.


def derivatives(layer: nn.Module, inputs: list[Tensor], *arguments: Any) -> list[list[Tensor]]:
    """The result, gradients of inputs and parameters, and gradients of a function of these."""
    leaves = [*inputs, *layer.parameters()]
    out = layer(*arguments)
    first = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True, allow_unused=True)
    second = torch.autograd.grad(sum((g**2).sum() for g in first if g is not None), leaves, allow_unused=True)
    gradients = [
        [torch.zeros_like(x) if g is None else g for g, x in zip(of, leaves, strict=True)] for of in (first, second)
    ]
    return [[out], *gradients]


def assert_same(ours: nn.Module, theirs: nn.Module, inputs: list[Tensor], *arguments: Any) -> None:
    """Some gradients cancel, as of what all scores of a node have in common: the largest ones tell rounding errors."""
    found = (derivatives(layer, inputs, *arguments) for layer in (ours, theirs))
    for kind, got, want in zip(("sum", "gradient", "second"), *found, strict=True):
        scale = max([1.0, *(float(b.detach().abs().max()) for b in want if b.numel())])
        for a, b in zip(got, want, strict=True):
            assert_matches(a, b, dtype=torch.float64, kind=kind, scale=10 * scale)  # type: ignore[arg-type]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "heads": {"heads": 3},
    "mean of heads": {"heads": 2, "concat": False},
    "edges": {"heads": 2, "edge_dim": 4},
    "no bias": {"heads": 2, "bias": False, "edge_dim": 4},
    "other flow": {"heads": 2, "flow": "target_to_source"},
}
OWN: dict[str, dict[str, dict[str, Any]]] = {
    "GATConv": {
        "no loops": {"add_self_loops": False, "negative_slope": 0.7},
        "filled loops": {"edge_dim": 4, "fill_value": 0.5},
        "residual": {"heads": 2, "residual": True},
    },
    "GATv2Conv": {
        "no loops": {"add_self_loops": False, "negative_slope": -0.1},
        "shared": {"heads": 2, "share_weights": True},
        "residual": {"heads": 2, "residual": True, "concat": False},
    },
    "TransformerConv": {
        "beta": {"heads": 2, "beta": True},
        "beta of means": {"heads": 2, "beta": True, "concat": False},
        "no root": {"heads": 2, "root_weight": False, "edge_dim": 4},
    },
}
GIVEN = [(name, which, {**OPTIONS, **OWN[name]}[which]) for name in LAYERS for which in (*OPTIONS, *OWN[name])]


@pytest.mark.parametrize(("name", "which", "options"), GIVEN, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.usefixtures("made_on")
def test_equals_the_peer(name: str, which: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    ours, theirs = pair(name, WIDTH, 3, **options)
    graph, x = random_graph(NODES, EDGES), real(NODES, WIDTH)
    features = (real(graph.shape[1], 4),) if "edge_dim" in options else ()
    arguments = (x, graph, *features)
    want_weights = theirs(*arguments, return_attention_weights=True)[1]
    want = theirs(*arguments)
    assert_same(ours, theirs, [x, *features], *arguments)
    messages_refused(monkeypatch)
    out, (edges, weights) = ours(*arguments, return_attention_weights=True)
    assert_matches(out, want, dtype=torch.float64, kind="sum")
    assert torch.equal(edges, want_weights[0])
    assert_matches(weights, want_weights[1], dtype=torch.float64, kind="sum")


# Of GATConv alone the peer's takes senders without receivers.
@pytest.mark.parametrize(("name", "only_senders"), [*((name, False) for name in LAYERS), ("GATConv", True)])
@pytest.mark.usefixtures("made_on")
def test_bipartite_graphs(name: str, only_senders: bool):
    loops = {} if name == "TransformerConv" else {"add_self_loops": False}
    ours, theirs = pair(name, (WIDTH, 4), 3, heads=2, **loops)
    graph = torch.stack([torch.randint(NODES, (30,)), torch.randint(6, (30,))])
    senders, receivers = real(NODES, WIDTH), real(8, 4)
    if only_senders:
        size = (NODES, 8)
        got, want = (layer((senders, None), graph, size=size) for layer in (ours, theirs))
        assert_matches(got, want, dtype=torch.float64, kind="sum")
        return
    assert_same(ours, theirs, [senders, receivers], (senders, receivers), graph)


@every_layer
@pytest.mark.parametrize(("nodes", "edges"), [(1, 0), (1, 3), (5, 0), (40, 300)])
@pytest.mark.usefixtures("made_on")
def test_other_sizes(name: str, nodes: int, edges: int):
    ours, theirs = pair(name, WIDTH, 3, heads=2, edge_dim=2)
    graph = random_graph(nodes, edges, loops=False)
    x, features = real(nodes, WIDTH), real(graph.shape[1], 2)
    assert_same(ours, theirs, [x, features], x, graph, features)


@every_layer
@pytest.mark.usefixtures("made_on")
def test_large_scores_and_strides(name: str):
    ours, theirs = pair(name, WIDTH, 3, heads=2)
    graph = random_graph(NODES, EDGES)
    x = (real(WIDTH, NODES) * 200).t()
    got, want = ours(x, graph.t().contiguous().t()), theirs(x, graph)
    assert bool(want.isfinite().all())
    assert_matches(got, want, dtype=torch.float64, kind="sum", scale=10 * float(want.detach().abs().max()))
    assert_matches(
        ours(x, graph.int()), want, dtype=torch.float64, kind="sum", scale=10 * float(want.detach().abs().max())
    )


def functional_weights(layer: Any, values: Tensor, graph: Tensor) -> Tensor:
    """The sums of the weights that a call uses: what nodes receive where all send 1."""
    query, key = torch.randn(2, 60, 8, 1, dtype=torch.float64)
    return layer.propagate(graph, query=query, key=key, value=values, edge_attr=None)


@every_layer
def test_dropout(name: str):
    """Weights that are kept grow by as much as others lack, and none is dropped out of training."""
    extra = {"root_weight": False} if name == "TransformerConv" else {}
    ours, theirs = pair(name, WIDTH, 1, heads=8, dropout=0.25, **extra)
    graph = random_graph(60, 2000)
    x = real(60, WIDTH)
    _, (_, dropped) = ours(x, graph, return_attention_weights=True)
    ours.eval()
    theirs.eval()
    out, (_, weights) = ours(x, graph, return_attention_weights=True)
    assert_matches(out, theirs(x, graph), dtype=torch.float64, kind="sum")
    if name == "TransformerConv":
        # It returns the weights before, as the peer's.
        assert_matches(dropped, weights, dtype=torch.float64, kind="sum")
        ours.train()
        values = torch.ones(60, 8, 1, dtype=torch.float64)
        sums = functional_weights(ours, values, graph)
        assert abs(float(sums.mean()) - 1) < 0.08
        assert float(sums.std()) > 0.02
        return
    zero = dropped == 0
    assert_matches(dropped[~zero], weights[~zero] / 0.75, dtype=torch.float64, kind="sum")
    assert abs(float(zero.double().mean()) - 0.25) < 0.02


# Memory.


def largest_made(run: Callable[[], Tensor]) -> int:
    """Bytes of the largest allocation of a call and its gradients, after one that compiles."""
    run().sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        run().sum().backward()
    events: Any = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    return max(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.c
@every_layer
def test_nothing_has_an_axis_of_edges_and_one_of_features(name: str, monkeypatch: pytest.MonkeyPatch):
    nodes, edges, channels, heads = 20, 4000, 16, 2
    ours, theirs = (kind(WIDTH, channels, heads=heads) for kind in LAYERS[name])
    graph = torch.randint(nodes, (2, edges))
    x = torch.randn(nodes, WIDTH, requires_grad=True)
    # All edges but loops, of which torch_geometric adds its own.
    assert largest_made(lambda: theirs(x, graph)) > 0.9 * 4 * edges * heads * channels
    messages_refused(monkeypatch)
    # Edges, of two ends in int64, and their weights.
    assert largest_made(lambda: ours(x, graph)) <= 2 * 8 * (edges + nodes)


@every_layer
def test_loops_are_added_once(name: str):
    if name == "TransformerConv":
        pytest.skip("it adds none")
    ours, _ = pair(name, WIDTH, 3)
    graph, x = random_graph(NODES, EDGES), real(NODES, WIDTH)
    (_, (first, _)), (_, (second, _)) = (ours(x, graph, return_attention_weights=True) for _ in "ab")
    assert first is second
    graph[0, 0] = (graph[0, 0] + 1) % NODES
    theirs = LAYERS[name][1](WIDTH, 3).double()
    theirs.load_state_dict(ours.state_dict())
    out, (changed, _) = ours(x, graph, return_attention_weights=True)
    assert changed is not first
    assert_matches(out, theirs(x, graph), dtype=torch.float64, kind="sum")


# What is left to messages.


@every_layer
def test_messages_that_are_asked_for(name: str):
    ours, theirs = pair(name, WIDTH, 3, heads=2)
    graph, x = random_graph(NODES, EDGES), real(NODES, WIDTH)
    want = theirs(x, graph)
    adjacency = EdgeIndex(graph, sparse_size=(NODES, NODES))
    assert_matches(ours(x, adjacency), theirs(x, adjacency), dtype=torch.float64, kind="sum")
    seen: list[int] = []
    handle = ours.register_message_forward_hook(lambda _module, _inputs, out: seen.append(len(out)))
    assert_matches(ours(x, graph), want, dtype=torch.float64, kind="sum")
    assert seen
    handle.remove()
    for aggr in ("mean", "max"):
        ours, theirs = pair(name, WIDTH, 3, aggr=aggr)
        assert_matches(ours(x, graph), theirs(x, graph), dtype=torch.float64, kind="sum")


@every_layer
def test_subclasses_with_messages_of_their_own(name: str):
    kind, peer = LAYERS[name]

    class Doubled(kind):  # type: ignore[misc]
        def message(self, *args: Any, **kwargs: Any) -> Tensor:
            return 2 * super().message(*args, **kwargs)

    # PyG reads the signature of `message`.
    Doubled.message.__signature__ = __import__("inspect").signature(peer.message)  # type: ignore[attr-defined]
    extra = {"root_weight": False} if name == "TransformerConv" else {}
    layer = Doubled(WIDTH, 3, bias=False, **extra).double()
    plain = kind(WIDTH, 3, bias=False, **extra).double()
    plain.load_state_dict(layer.state_dict())
    graph, x = random_graph(NODES, EDGES), real(NODES, WIDTH)
    assert_matches(layer(x, graph), 2 * plain(x, graph), dtype=torch.float64, kind="sum")


@every_layer
def test_explainers(name: str):
    ours, _ = pair(name, WIDTH, 3)
    settings: Any = {"explanation_type": "model", "edge_mask_type": "object", "node_mask_type": "attributes"}
    model: Any = {"mode": "regression", "task_level": "node", "return_type": "raw"}
    explainer = Explainer(ours, GNNExplainer(epochs=2), model_config=model, **settings)
    graph = random_graph(NODES, EDGES)
    explanation = explainer(real(NODES, WIDTH).detach(), graph)
    assert explanation.edge_mask.shape == (graph.shape[1],)


# As a module.

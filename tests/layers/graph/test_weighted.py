"""Layers with matrices of types and networks of edges against torch_geometric's: values, derivatives, modes, errors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torch_geometric")

import torch_geometric.nn as peers
from torch_geometric.nn.aggr import DegreeScalerAggregation, MultiAggregation, StdAggregation

from insum_nn import layers
from insum_nn.errors import InsumRangeError
from insum_nn.layers.swap import swap
from insum_nn.testing.tolerances import assert_matches
from tests.layers.graph.test_attention import assert_same, messages_refused, real
from tests.layers.graph.test_gcn_conv import random_graph

NODES, EDGES, WIDTH, RELATIONS, FEATURES = 14, 45, 6, 3, 4
SCALERS = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]
DEGREES = torch.tensor([1, 3, 2, 4])


def network(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(2 * WIDTH, 5), *more)


def pna(aggregators: list[str], scalers: list[str], **named: Any) -> Any:
    return lambda: ((WIDTH, 4, aggregators, scalers, DEGREES), named)


# Class, what makes its arguments, and what edges carry: "t" types, "f" features.
CASES: dict[str, tuple[str, Any, str]] = {
    "relations": ("RGCNConv", lambda: ((WIDTH, 4, RELATIONS), {}), "t"),
    "sums": ("RGCNConv", lambda: ((WIDTH, 4, RELATIONS), {"aggr": "sum", "root_weight": False}), "t"),
    "bases": ("RGCNConv", lambda: ((WIDTH, 4, RELATIONS), {"num_bases": 2, "bias": False}), "t"),
    "blocks": ("RGCNConv", lambda: ((WIDTH, 4, RELATIONS), {"num_blocks": 2}), "t"),
    "sums of blocks": ("RGCNConv", lambda: ((WIDTH, 4, RELATIONS), {"num_blocks": 2, "aggr": "add"}), "t"),
    "relations, other flow": ("RGCNConv", lambda: ((WIDTH, 4, RELATIONS), {"flow": "target_to_source"}), "t"),
    "fast": ("FastRGCNConv", lambda: ((WIDTH, 4, RELATIONS), {}), "t"),
    "fast blocks": ("FastRGCNConv", lambda: ((WIDTH, 4, RELATIONS), {"num_blocks": 2, "aggr": "sum"}), "t"),
    "neighbourhoods": ("PNAConv", pna(["mean", "min", "max", "std"], SCALERS[:3]), ""),
    "towers": ("PNAConv", pna(["sum", "var", "std"], SCALERS, towers=2, divide_input=True), ""),
    "towers of all": ("PNAConv", pna(["max"], SCALERS[1:2], towers=2, edge_dim=FEATURES, train_norm=True), "f"),
    "deep": ("PNAConv", pna(["mean", "std"], SCALERS[2:], towers=2, pre_layers=2, post_layers=2, act="tanh"), ""),
    "deep, of edges": ("PNAConv", pna(["min", "var"], ["identity"], pre_layers=2, edge_dim=FEATURES, act="elu"), "f"),
    "other flow": ("PNAConv", pna(["mean", "max"], SCALERS[3:], flow="target_to_source"), ""),
    "edges": ("EdgeConv", lambda: ((network(),), {}), ""),
    "edges, one layer": ("EdgeConv", lambda: ((nn.Linear(2 * WIDTH, 5, bias=False),), {"aggr": "mean"}), ""),
    "edges, deep": ("EdgeConv", lambda: ((network(nn.Sequential(nn.Tanh(), nn.Linear(5, 3))),), {"aggr": "sum"}), ""),
    "edges, other flow": ("EdgeConv", lambda: ((network(nn.Tanh()),), {"flow": "target_to_source"}), ""),
}
every_case = pytest.mark.parametrize("name", CASES)
# One of each class.
every_layer = pytest.mark.parametrize("name", list({kind: name for name, (kind, _, _) in CASES.items()}.values()))


def pair(name: str, **more: Any) -> tuple[Any, Any]:
    """Our layer and the peer's with the same parameters, in float64."""
    kind, arguments, _ = CASES[name]
    made: list[Any] = []
    for home in (layers, peers):
        given, named = arguments()
        own = more if home is layers else {}
        made.append(getattr(home, kind)(*given, **named, **own).to(torch.get_default_device(), torch.float64))
    ours, theirs = made
    for key, parameter in ours.named_parameters():
        if "avg_deg" not in key:
            nn.init.normal_(parameter)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def inputs_of(name: str, nodes: int = NODES, edges: int = EDGES) -> tuple[list[Tensor], list[Tensor]]:
    """The arguments of a call, and those of them that are differentiable."""
    graph, x = random_graph(nodes, edges), real(nodes, WIDTH)
    if CASES[name][2] == "t":
        return [x, graph, torch.randint(RELATIONS, (graph.shape[1],))], [x]
    if CASES[name][2] == "f":
        edge = real(graph.shape[1], FEATURES)
        return [x, graph, edge], [x, edge]
    return [x, graph], [x]


# Values and derivatives.


@every_case
@pytest.mark.usefixtures("made_on")
def test_equals_the_peer(name: str, monkeypatch: pytest.MonkeyPatch):
    ours, theirs = pair(name)
    arguments, leaves = inputs_of(name)
    assert_same(ours, theirs, leaves, *arguments)
    want = theirs(*arguments)
    messages_refused(monkeypatch)
    assert_matches(ours(*arguments), want, dtype=torch.float64, kind="sum")


@every_case
@pytest.mark.parametrize(("nodes", "edges"), [(1, 0), (1, 3), (5, 0), (40, 300)])
@pytest.mark.usefixtures("made_on")
def test_other_sizes(name: str, nodes: int, edges: int):
    ours, theirs = pair(name)
    arguments, leaves = inputs_of(name, nodes, edges)
    assert_same(ours, theirs, leaves, *arguments)


@pytest.mark.parametrize("name", ["relations", "blocks", "bases", "fast", "edges, deep"])
@pytest.mark.usefixtures("made_on")
def test_bipartite_graphs(name: str):
    ours, theirs = pair(name)
    graph = torch.stack([torch.randint(NODES, (30,)), torch.randint(6, (30,))])
    types = [torch.randint(RELATIONS, (30,))] if CASES[name][2] == "t" else []
    senders, receivers = real(NODES, WIDTH), real(8, WIDTH)
    assert_same(ours, theirs, [senders, receivers], (senders, receivers), graph, *types)


@pytest.mark.parametrize("kind", ["RGCNConv", "FastRGCNConv"])
@pytest.mark.parametrize("named", [{}, {"num_bases": 2}, {"aggr": "sum"}])
def test_node_numbers_in_place_of_features(kind: str, named: dict[str, Any]):
    ours, theirs = (
        getattr(home, name)(NODES, 4, RELATIONS, **named).double()
        for home, name in ((layers, kind), (peers, "RGCNConv"))
    )
    theirs.load_state_dict(ours.state_dict())
    _, graph, types = inputs_of("relations")[0]
    assert_same(ours, theirs, [], None, graph, types)
    numbers = torch.randint(NODES, (NODES,))
    assert_same(ours, theirs, [], numbers, graph, types)
    with pytest.raises(InsumRangeError):
        ours(numbers + 1 + NODES, graph, types)
    blocks = getattr(layers, kind)(NODES, 4, RELATIONS, num_blocks=2)
    with pytest.raises(ValueError, match="Block-diagonal"):
        blocks(numbers, graph, types)


def test_shares_of_relations_are_made_once_for_each_edge_list_and_its_types():
    ours, theirs = pair("relations")
    (x, graph, types), _ = inputs_of("relations")
    with torch.inference_mode():
        ours(x, graph, types)
    assert_matches(ours(x, graph, types), theirs(x, graph, types), dtype=torch.float64, kind="sum")
    types[:] = types.flip(0)
    assert_matches(ours(x, graph, types), theirs(x, graph, types), dtype=torch.float64, kind="sum")
    graph[0] = graph[0].flip(0)
    assert_matches(ours(x, graph, types), theirs(x, graph, types), dtype=torch.float64, kind="sum")


# Aggregations, which all convolutions share.


@pytest.mark.parametrize(
    "make",
    [
        lambda: ["mean", "max", "std"],
        lambda: "var",
        lambda: StdAggregation(),
        lambda: DegreeScalerAggregation(["sum", "min"], SCALERS, DEGREES, train_norm=True),
    ],
)
def test_several_aggregations(make: Any, monkeypatch: pytest.MonkeyPatch):
    # It does not know how many features a scaled aggregation has.
    width = (10 * WIDTH, WIDTH) if isinstance(make(), DegreeScalerAggregation) else WIDTH
    ours, theirs = (home.SAGEConv(width, 3, aggr=make()).double() for home in (layers, peers))
    theirs.load_state_dict(ours.state_dict())
    arguments, leaves = inputs_of("edges")
    assert_same(ours, theirs, leaves, *arguments)
    messages_refused(monkeypatch)
    ours(*arguments)


@pytest.mark.parametrize(
    "make",
    [
        lambda: MultiAggregation(["sum", "max"], mode="sum"),
        lambda: StdAggregation(semi_grad=True),
        lambda: MultiAggregation(["mean", "mul"]),
        lambda: MultiAggregation(["var"], [{"semi_grad": True}]),
    ],
)
def test_other_aggregations_are_the_peers(make: Any):
    ours, theirs = (home.SAGEConv(WIDTH, 3, aggr=make()).double() for home in (layers, peers))
    theirs.load_state_dict(ours.state_dict())
    arguments, leaves = inputs_of("edges")
    assert_same(ours, theirs, leaves, *arguments)


def test_maxima_over_relations():
    ours, theirs = (home.RGCNConv(WIDTH, 3, RELATIONS, aggr="max").double() for home in (layers, peers))
    theirs.load_state_dict(ours.state_dict())
    arguments, leaves = inputs_of("relations")
    assert_same(ours, theirs, leaves, *arguments)


@pytest.mark.parametrize("change", ["hook", "network's hook", "other network", "parametrized", "unknown scaler"])
def test_what_first_layers_cannot_say_is_the_peers(change: str):
    ours, theirs = pair("neighbourhoods" if change == "unknown scaler" else "edges, deep")
    arguments, _ = inputs_of("edges")
    seen: list[int] = []
    if change == "unknown scaler":
        ours.aggr_module.scaler = ["own"]
        with pytest.raises(ValueError, match="Unknown scaler"):
            ours(*arguments)
        return
    if "hook" in change:
        (ours.nn if change.startswith("network") else ours.nn[0]).register_forward_hook(lambda *_: seen.append(1))
    elif change == "other network":
        for layer in (ours, theirs):
            layer.nn = nn.Sequential(nn.Tanh(), nn.Linear(2 * WIDTH, 3)).double()
        theirs.load_state_dict(ours.state_dict())
    else:
        for layer in (ours, theirs):
            nn.utils.parametrizations.weight_norm(layer.nn[0])
    assert_matches(ours(*arguments), theirs(*arguments), dtype=torch.float64, kind="sum")
    assert len(seen) == ("hook" in change)


@pytest.mark.parametrize("wrong", [-1, RELATIONS])
def test_wrong_types(wrong: int):
    x, graph, types = inputs_of("relations")[0]
    types[1] = wrong
    for name in ("relations", "sums", "fast"):
        with pytest.raises(InsumRangeError):
            pair(name)[0](x, graph, types)
    with pytest.raises(InsumRangeError):
        layers.HeteroLinear(WIDTH, 2, RELATIONS).double()(x, torch.full((NODES,), wrong))


# As a module.


@every_case
def test_torch_compile(name: str):
    torch.compiler.reset()
    ours, _ = pair(name)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    arguments, leaves = inputs_of(name)
    got, want = compiled(*arguments), ours(*arguments)
    assert_matches(got, want, dtype=torch.float64, kind="sum")
    a, b = (torch.autograd.grad(out.sin().sum(), leaves) for out in (got, want))
    for g, w in zip(a, b, strict=True):
        assert_matches(g, w, dtype=torch.float64, kind="gradient", scale=10 * float(w.abs().max()))


# torch_geometric's own code cannot be scripted for the others.
@pytest.mark.parametrize("name", ["fast", "fast blocks", "towers of all", "deep, of edges", "edges", "edges, deep"])
def test_torchscript(name: str):
    ours, theirs = pair(name)
    arguments, _ = inputs_of(name)
    scripted = torch.jit.script(ours)
    assert_matches(scripted(*arguments), theirs(*arguments), dtype=torch.float64, kind="sum")
    assert list(scripted.state_dict()) == list(theirs.state_dict())


# Rows of types.


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 25])
@pytest.mark.usefixtures("made_on")
def test_rows_of_types(bias: bool, rows: int):
    ours, theirs = (home.HeteroLinear(WIDTH, 4, RELATIONS, bias=bias).double() for home in (layers, peers))
    theirs.load_state_dict(ours.state_dict())
    x, types = real(rows, WIDTH), torch.randint(RELATIONS, (rows,))
    if rows:
        assert_same(ours, theirs, [x], x, types)
        assert_same(ours, theirs, [x], x, types.sort().values)
        assert_matches(ours(x, types.int()), ours(x, types), dtype=torch.float64, kind="sum")
    assert ours(x, types).shape == (rows, 4)
    for kind in (torch.float32, torch.float16):
        got = copy.deepcopy(ours).to(kind)(x.to(kind), types)
        assert got.dtype == kind
        assert_matches(got, ours(x.to(kind).double(), types), dtype=kind, kind="second", scale=30.0)


def test_rows_of_types_as_a_module():
    peer = peers.HeteroLinear(WIDTH, 4, RELATIONS)
    x, types = torch.randn(9, WIDTH), torch.randint(RELATIONS, (9,))
    want, model = peer(x, types), nn.Sequential(peer)
    assert swap(model).swapped
    layer: Any = model[0]
    assert type(layer) is layers.HeteroLinear
    assert repr(layer).startswith(repr(peer))
    assert len(layer.expression.splitlines()) == 2
    assert layer.explain_statement(x, types)
    for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.jit.script(layer)):
        torch.testing.assert_close(same(x, types), want)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x, types), want)
    torch.testing.assert_close(torch.export.export(layer, (x, types)).module()(x, types), want)
    assert layer.to("meta")(x.to("meta"), types.to("meta")).shape == (9, 4)
    lazy = layers.HeteroLinear(-1, 4, RELATIONS)
    assert lazy(x, types).shape == (9, 4)
    assert lazy.weight.shape == (RELATIONS, WIDTH, 4)

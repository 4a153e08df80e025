"""GCNConv against torch_geometric's in float64: values, two orders of derivatives, every kind of input, bad input."""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torch_geometric")

from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv import GCNConv as Peer
from torch_geometric.typing import SparseTensor

import insum_nn
from insum_nn.compiler.options import Options
from insum_nn.errors import InsumDeviceError, InsumDtypeError, InsumShapeError
from insum_nn.layers.graph import convolutions
from insum_nn.layers.graph.convolutions import APPNP, LGConv, TAGConv
from insum_nn.layers.graph.gcn_conv import GCNConv
from insum_nn.ops.adjacency_product import ADJACENCY_PRODUCT
from insum_nn.structure.gcn_norm import gcn_norm
from insum_nn.testing.tolerances import assert_matches

# The peer's sparse path and its pow_ of degrees say things of their own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Converting sparse tensor to CSR:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
]

FLOWS = ("source_to_target", "target_to_source")
NODES = 14
SUM = "Y[I[e],f] += W[e] * X[J[e],f]"


def random_graph(nodes: int = NODES, edges: int = 45, seed: int = 0, loops: bool = True) -> Tensor:
    """Duplicates, isolated nodes, and at most one self-loop a node: of several the peer keeps one at random."""
    generator = torch.Generator().manual_seed(seed)
    graph = torch.randint(max(nodes - 3, 1), (2, edges), generator=generator, device="cpu")
    graph = graph.to(torch.get_default_device())
    is_loop = graph[0] == graph[1]
    graph = graph[:, ~is_loop]
    if loops and nodes > 4:
        graph = torch.cat([graph[:, :5], torch.tensor([[1, 4], [1, 4]]), graph[:, 5:]], 1)
    return graph


def pair(*arguments: Any, **kwargs: Any) -> tuple[GCNConv, Peer]:
    """Our layer and the peer's with the same parameters, in float64."""
    ours, theirs = GCNConv(*arguments, **kwargs).double(), Peer(*arguments, **kwargs).double()
    if ours.bias is not None:
        nn.init.normal_(ours.bias)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def derivatives(layer: nn.Module, inputs: list[Tensor], *arguments: Any) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The result, gradients of inputs and parameters, and gradients of a function of these."""
    leaves = [*inputs, *layer.parameters()]
    out = layer(*arguments)
    first = torch.autograd.grad(out.pow(2).sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves, allow_unused=True)
    zeros = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(second, leaves, strict=True)]
    return out, list(first), zeros


def assert_same(ours: nn.Module, theirs: nn.Module, inputs: list[Tensor], *arguments: Any) -> None:
    got, want = (derivatives(layer, inputs, *arguments) for layer in (ours, theirs))
    assert_matches(got[0], want[0], dtype=torch.float64, kind="sum")
    for place, kind in ((1, "gradient"), (2, "second")):
        for a, b in zip(got[place], want[place], strict=True):
            assert_matches(a, b, dtype=torch.float64, kind=kind)


# Values and derivatives.


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize(("improved", "loops", "normalize"), [(0, 1, 1), (1, 1, 1), (0, 0, 1), (0, 0, 0)])
@pytest.mark.parametrize(("narrow", "wide"), [(6, 3), (3, 6)])
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_the_peer(
    flow: str, improved: bool, loops: bool, normalize: bool, narrow: int, wide: int, weighted: bool
):
    layers = pair(narrow, wide, bool(improved), False, bool(loops), bool(normalize), flow=flow)
    graph = random_graph()
    x = torch.randn(NODES, narrow, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(graph.shape[1], dtype=torch.float64, requires_grad=True) if weighted else None
    assert_same(*layers, [x, weight] if weighted else [x], x, graph, weight)


@pytest.mark.parametrize(("nodes", "edges"), [(1, 0), (1, 4), (2, 1), (5, 0), (40, 300)])
@pytest.mark.parametrize("weighted", [False, True])
def test_other_sizes(nodes: int, edges: int, weighted: bool):
    layers = pair(3, 5, bias=False)
    graph = random_graph(nodes, edges, loops=False)
    x = torch.randn(nodes, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(graph.shape[1], dtype=torch.float64, requires_grad=True) if weighted else None
    assert_same(*layers, [x, weight] if weighted else [x], x, graph, weight)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("narrow", "wide"), [(4, 2), (2, 4)])
@pytest.mark.parametrize("node_dim", [-2, 1])
def test_batches_over_one_graph(weighted: bool, narrow: int, wide: int, node_dim: int):
    layers = pair(narrow, wide, node_dim=node_dim)
    graph = random_graph()
    x = torch.randn(3, NODES, narrow, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(graph.shape[1], dtype=torch.float64, requires_grad=True) if weighted else None
    assert_same(*layers, [x, weight] if weighted else [x], x, graph, weight)


def test_nodes_along_the_first_axis_of_a_batch():
    layer, graph = GCNConv(4, 5).double(), random_graph()
    x = torch.randn(2, 3, NODES, 4, dtype=torch.float64)
    want = torch.stack([torch.stack([layer(one, graph) for one in row]) for row in x])
    assert_matches(layer(x, graph), want, dtype=torch.float64, kind="sum")
    layer.node_dim = 0
    got = layer(x.movedim(2, 0), graph)
    assert_matches(got, want.movedim(2, 0), dtype=torch.float64, kind="sum")


@pytest.mark.parametrize("low", [-0.3, -2.0])
def test_negative_weights_and_nan(low: float):
    """A negative degree is NaN in the peer, and so it is here, in the same places."""
    ours, theirs = pair(3, 4)
    graph = random_graph()
    weight = torch.rand(graph.shape[1], dtype=torch.float64) * (1 - low) + low
    weight[7] = float("nan")
    x = torch.randn(NODES, 3, dtype=torch.float64)
    got, want = ours(x, graph, weight), theirs(x, graph, weight)
    assert want.isnan().any()
    assert not want.isnan().all()
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-12, atol=1e-12)


# Kinds of graphs and features.


def adjacency(graph: Tensor, weight: Tensor, layout: str) -> Tensor:
    """The transposed adjacency."""
    coo = torch.sparse_coo_tensor(graph.flip(0), weight, (NODES, NODES), check_invariants=True)
    coo = coo.coalesce()
    return {"coo": coo.clone, "csr": coo.to_sparse_csr}[layout]()


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("improved", [False, True])
def test_sparse_adjacency(layout: str, normalize: bool, improved: bool):
    ours, theirs = pair(3, 4, improved, normalize=normalize)
    graph = random_graph()
    weight = torch.rand(graph.shape[1], dtype=torch.float64)
    x = torch.randn(NODES, 3, dtype=torch.float64, requires_grad=True)
    adj = adjacency(graph, weight, layout)
    out, want = ours(x, adj), theirs(x, adjacency(graph, weight, "csr"))
    assert_matches(out, want, dtype=torch.float64, kind="sum")
    seed = torch.randn_like(out)
    got, want = (torch.autograd.grad(o, [x, m.lin.weight], seed) for o, m in ((out, ours), (want, theirs)))
    for a, b in zip(got, want, strict=True):
        assert_matches(a, b, dtype=torch.float64, kind="gradient")


@pytest.mark.parametrize("layout", ["csr"])
def test_gradients_reach_a_sparse_adjacency(layout: str):
    layer, graph = GCNConv(3, 4, add_self_loops=False).double(), random_graph()
    x = torch.randn(NODES, 3, dtype=torch.float64)
    weight = torch.rand(graph.shape[1], dtype=torch.float64, requires_grad=True)
    (want,) = torch.autograd.grad(layer(x, graph, weight).square().sum(), weight)
    leaf = weight.detach().clone().requires_grad_()
    (got,) = torch.autograd.grad(layer(x, adjacency(graph, leaf, layout)).square().sum(), leaf)
    assert_matches(got, want, dtype=torch.float64, kind="gradient")


def test_sparse_adjacency_written_to_is_read_again():
    layer, graph = GCNConv(3, 4).double(), random_graph()
    x, weight = torch.randn(NODES, 3, dtype=torch.float64), torch.rand(graph.shape[1], dtype=torch.float64)
    adj = adjacency(graph, weight, "csr")
    before = layer(x, adj)
    adj.values().mul_(torch.linspace(1, 3, adj.values().numel()))
    after = layer(x, adj)
    assert not torch.equal(before, after)
    assert torch.equal(after, layer(x, adj.clone()))


@pytest.mark.parametrize("shape", [(2, 5), (7, 5)])
def test_rectangular_adjacency(shape: tuple[int, int]):
    ours, theirs = pair(3, 4, normalize=False)
    rows, cols = torch.tensor([0, shape[0] - 1, 1]), torch.tensor([0, 4, 2])
    adj = torch.sparse_coo_tensor(torch.stack([rows, cols]), torch.rand(3).double(), shape, check_invariants=True)
    x = torch.randn(5, 3, dtype=torch.float64)
    out = ours(x, adj.to_sparse_csr())
    assert out.shape == (shape[0], 4)
    assert_matches(out, theirs(x, adj.to_sparse_csr()), dtype=torch.float64, kind="sum")
    for layer in (ours, theirs):
        with pytest.raises((ValueError, RuntimeError)):
            layer(x[:4], adj.to_sparse_csr())


def test_sparse_adjacencies_run_the_statement(fused_calls: list[int]):
    """Also one whose entries are in no order, or stand twice, and one that lists its entries by columns."""
    graph = random_graph()
    weight, x = torch.rand(graph.shape[1], dtype=torch.float64), torch.randn(NODES, 3, dtype=torch.float64)
    twice = torch.sparse_coo_tensor(graph.flip(0), weight, (NODES, NODES), check_invariants=True)
    columns = twice.to_dense().to_sparse_csc()
    plain = [("normalize", False)], [("normalize", False), ("aggr", "mean")]
    for kind in ([], [("add_self_loops", False)], [("improved", True)], *plain):
        ours, theirs = pair(3, 4, **dict(kind))
        for adj in (twice, *([columns] if kind in plain else [])):
            got, want = ours(x, adj), theirs(x, twice.coalesce().to_sparse_csr())
            assert_matches(got, want, dtype=torch.float64, kind="sum")
        assert not twice.is_coalesced()
    assert len(fused_calls) == 7
    with pytest.raises(ValueError, match="Flow direction"):
        GCNConv(3, 4, flow="target_to_source").double()(x, columns)


def test_a_sparse_tensor_of_another_package(fused_calls: list[int]):
    """What torch_geometric takes for `torch_sparse.SparseTensor`, which need not be installed."""

    class Listed(SparseTensor):
        def __init__(self, *parts: Tensor | None) -> None:
            self.parts = parts

        def size(self, _: int) -> int:
            return NODES

        def coo(self) -> tuple[Tensor | None, ...]:
            return self.parts

    graph = random_graph()
    layer, x = GCNConv(3, 4, normalize=False).double(), torch.randn(NODES, 3, dtype=torch.float64)
    weight = torch.rand(graph.shape[1], dtype=torch.float64, requires_grad=True)
    for given in (weight, weight.detach(), None):
        got, want = layer(x, Listed(graph[1], graph[0], given)), layer(x, graph, given)
        assert_matches(got, want, dtype=torch.float64, kind="sum")
        if given is weight:
            found = [torch.autograd.grad(each.square().sum(), weight)[0] for each in (got, want)]
            assert_matches(*found, dtype=torch.float64, kind="gradient")
    assert len(fused_calls) == 6


@pytest.mark.parametrize("kind", [TAGConv, LGConv, APPNP])
def test_other_layers_take_sparse_adjacencies(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch):
    arguments = {TAGConv: (3, 4), LGConv: (), APPNP: (3, 0.1)}[kind]
    ours, graph = kind(*arguments).double(), random_graph()
    theirs = kind.__bases__[-1](*arguments).double()
    theirs.load_state_dict(ours.state_dict())
    x, adj = torch.randn(NODES, 3).double(), adjacency(graph, torch.rand(graph.shape[1]).double(), "csr")
    want = theirs(x, adj)
    monkeypatch.setattr(torch.sparse, "mm", None)
    assert_matches(ours(x, adj), want, dtype=torch.float64, kind="sum")


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_edge_index_class(normalize: bool, weighted: bool):
    ours, theirs = pair(3, 4, normalize=normalize)
    graph = EdgeIndex(random_graph(), sparse_size=(NODES, NODES)).sort_by("col").values
    x = torch.randn(NODES, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(graph.shape[1], dtype=torch.float64, requires_grad=True) if weighted else None
    assert_same(ours, theirs, [x, weight] if weighted else [x], x, graph, weight)
    if not normalize:
        small = EdgeIndex(graph.as_tensor(), sparse_size=(NODES - 1, NODES - 1))
        for layer in (ours, theirs):
            with pytest.raises(ValueError, match=r"expected|does not fit"):
                layer(x, small)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_features(layout: torch.layout):
    ours, theirs = pair(3, 8)
    dense = torch.randn(NODES, 3, dtype=torch.float64) * (torch.rand(NODES, 3) < 0.4)
    x = dense.to_sparse(layout=layout)
    want = theirs(dense, random_graph())
    assert_matches(ours(x, random_graph()), want, dtype=torch.float64, kind="sum")


# State.


def test_cached_keeps_the_first_graph():
    ours, theirs = pair(3, 4, cached=True)
    first, other = random_graph(seed=1), random_graph(seed=2)
    x = torch.randn(NODES, 3, dtype=torch.float64)
    want = theirs(x, first)
    assert_matches(ours(x, first), want, dtype=torch.float64, kind="sum")
    assert ours._cached_edge_index is not None
    edges, weight = ours._cached_edge_index
    assert edges.tolist() == theirs._cached_edge_index[0].tolist()
    assert_matches(weight, theirs._cached_edge_index[1], dtype=torch.float64, kind="product")
    # Whatever comes later, a common misuse, is not looked at.
    assert torch.equal(ours(x, other), ours(x, first))
    assert_matches(ours(x, other), theirs(x, other), dtype=torch.float64, kind="sum")
    again = pickle.loads(pickle.dumps(ours))
    assert torch.equal(again(x, other), ours(x, first))
    ours.reset_parameters()
    assert ours._cached_edge_index is None
    theirs.reset_parameters()
    theirs.load_state_dict(ours.state_dict())
    assert_matches(ours(x, other), theirs(x, other), dtype=torch.float64, kind="sum")


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_cached_sparse_adjacency(layout: str):
    ours, theirs = pair(3, 4, cached=True)
    graph, x = random_graph(), torch.randn(NODES, 3, dtype=torch.float64)
    weight = torch.rand(graph.shape[1], dtype=torch.float64)
    want = theirs(x, adjacency(graph, weight, "csr"))
    for _ in range(2):
        assert_matches(ours(x, adjacency(graph, weight, layout)), want, dtype=torch.float64, kind="sum")
    assert ours._cached_edge_index is not None
    assert ours._cached_adj_t is None


def test_cached_serves_the_message_path_too():
    layer, graph = GCNConv(3, 4, cached=True).double(), random_graph()
    x = torch.randn(NODES, 3, dtype=torch.float64)
    want = layer(x, graph)
    layer.register_message_forward_hook(lambda *_: None)
    assert_matches(layer(x, graph), want, dtype=torch.float64, kind="sum")


def test_lazy_sizes():
    layer = GCNConv(-1, 32)
    assert isinstance(layer.lin.weight, nn.parameter.UninitializedParameter)
    assert str(layer).startswith("GCNConv(-1, 32)\n")
    out = layer(torch.randn(NODES, 5), random_graph())
    assert layer.lin.weight.shape == (32, 5)
    # The next call may take the other order.
    x = torch.randn(NODES, 5)
    want = Peer(5, 32)
    want.load_state_dict(layer.state_dict())
    assert out.shape == (NODES, 32)
    assert_matches(layer(x, random_graph()), want(x, random_graph()).double(), dtype=torch.float32, kind="sum")


def test_state_dict_is_the_peers():
    ours, theirs = GCNConv(3, 4), Peer(3, 4)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    lazy = GCNConv(-1, 4)
    lazy.load_state_dict(theirs.state_dict())
    assert torch.equal(lazy.lin.weight, theirs.lin.weight)
    assert list(GCNConv(3, 4, bias=False).state_dict()) == ["lin.weight"]


def test_what_the_layer_is():
    layer = GCNConv(16, 32)
    assert repr(layer).splitlines()[:2] == [repr(Peer(16, 32)), f"  {SUM}"]
    assert isinstance(layer, MessagePassing)
    assert isinstance(layer, Peer)
    assert layer.expression.splitlines() == [SUM, ADJACENCY_PRODUCT]
    assert GCNConv(3, 4, normalize=False).expression.splitlines()[0] == SUM
    assert type(layer).__module__ == "insum_nn.layers.graph.gcn_conv"


@pytest.mark.library_calls
@pytest.mark.parametrize("weighted", [False, True])
def test_explain_statement(weighted: bool):
    graph = random_graph()
    weight = torch.rand(graph.shape[1], requires_grad=True) if weighted else None
    for layer in (GCNConv(3, 4), GCNConv(4, 3), GCNConv(3, 4, cached=True), GCNConv(3, 4, normalize=False)):
        x = torch.randn(NODES, layer.in_channels, requires_grad=True)
        text = str(layer.explain_statement(x, graph, weight))
        sums = SUM if layer.normalize or weighted else SUM.replace("W[e] * ", "")
        assert (ADJACENCY_PRODUCT if layer.cached else sums) in text
        assert "combine: scatter" in text
        # What the layer adds after its own product is not part of the statement.
        assert ("copy(Y)  # the initial value" in text) == (layer.in_channels > layer.out_channels)


def test_torchscript_takes_the_message_path():
    layer, graph = GCNConv(3, 4).double(), random_graph()
    x, weight = torch.randn(NODES, 3, dtype=torch.float64), torch.rand(graph.shape[1], dtype=torch.float64)
    scripted = torch.jit.script(layer)
    assert_matches(scripted(x, graph, weight), layer(x, graph, weight), dtype=torch.float64, kind="sum")


# Which path is taken.


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    original = GCNConv._sum

    def counted(self, *arguments, **named):
        calls.append(1)
        return original(self, *arguments, **named)

    monkeypatch.setattr(GCNConv, "_sum", counted)
    return calls


def test_the_fused_path_is_the_usual_one(fused_calls: list[int]):
    GCNConv(3, 4)(torch.randn(NODES, 3), random_graph())
    GCNConv(3, 4, aggr="sum")(torch.randn(NODES, 3), random_graph())

    class Own(GCNConv):
        def reset_parameters(self):
            super().reset_parameters()

    Own(3, 4)(torch.randn(NODES, 3), random_graph())
    assert len(fused_calls) == 3


HOOKS = [
    f"register_{what}_forward_{when}"
    for what, when in itertools.product(("propagate", "message", "aggregate"), ("pre_hook", "hook"))
]


@pytest.mark.parametrize("register", HOOKS)
def test_hooks_see_messages(register: str, fused_calls: list[int]):
    layer, graph, x = GCNConv(3, 4), random_graph(), torch.randn(NODES, 3)
    want = layer(x, graph)
    seen: list[int] = []
    handle = getattr(layer, register)(lambda *_: seen.append(1))
    fused_calls.clear()
    assert_matches(layer(x, graph), want.double(), dtype=torch.float32, kind="sum")
    assert (seen, fused_calls) == ([1], [])
    handle.remove()
    layer(x, graph)
    assert (seen, fused_calls) == ([1], [1])


def test_hooks_that_change_messages_count():
    layer, graph, x = GCNConv(3, 4, bias=False), random_graph(), torch.randn(NODES, 3)
    layer.register_message_forward_hook(lambda module, inputs, out: 0 * out)
    assert not layer(x, graph).any()


@pytest.mark.parametrize("aggr", ["mean", "max", "min"])
@pytest.mark.parametrize(("narrow", "wide"), [(3, 5), (5, 3)])
def test_other_aggregations_are_the_peers(aggr: str, narrow: int, wide: int, fused_calls: list[int]):
    ours, theirs = pair(narrow, wide, aggr=aggr)
    x = torch.randn(NODES, narrow, dtype=torch.float64)
    assert_matches(ours(x, random_graph()), theirs(x, random_graph()), dtype=torch.float64, kind="sum")
    assert fused_calls == [1]


def test_subclasses_that_make_messages_are_heard(fused_calls: list[int]):
    class Doubled(GCNConv):
        def message(self, x_j: Tensor, edge_weight: Tensor | None) -> Tensor:
            return 2 * super().message(x_j, edge_weight)

    class DoubledAgain(Doubled):
        pass

    plain, x = GCNConv(3, 4, bias=False), torch.randn(NODES, 3)
    for kind in (Doubled, DoubledAgain):
        layer = kind(3, 4, bias=False)
        layer.load_state_dict(plain.state_dict())
        want = 2 * plain(x, random_graph())
        fused_calls.clear()
        assert_matches(layer(x, random_graph()), want.double(), dtype=torch.float32, kind="sum")
        assert fused_calls == []
    own = GCNConv(3, 4, bias=False)
    own.load_state_dict(plain.state_dict())
    own.message = lambda x_j, edge_weight: 2 * edge_weight.view(-1, 1) * x_j
    assert_matches(own(x, random_graph()), want.double(), dtype=torch.float32, kind="sum")


def test_decomposed_layers(fused_calls: list[int]):
    ours, theirs = pair(4, 8, decomposed_layers=2)
    x = torch.randn(NODES, 4, dtype=torch.float64)
    assert_matches(ours(x, random_graph()), theirs(x, random_graph()), dtype=torch.float64, kind="copy")
    assert fused_calls == []
    ours.decomposed_layers = 1
    assert_matches(ours(x, random_graph()), theirs(x, random_graph()), dtype=torch.float64, kind="sum")
    assert fused_calls == [1]


def test_explainers_get_gradients_of_messages():
    from torch_geometric.explain import Explainer, GNNExplainer, ModelConfig

    model = nn.ModuleList([GCNConv(3, 4), GCNConv(4, 2)])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x, edge_index).relu(), edge_index)

    explainer = Explainer(
        Net(),
        GNNExplainer(epochs=3),
        explanation_type="model",
        edge_mask_type="object",
        model_config=ModelConfig(mode="regression", task_level="node", return_type="raw"),
    )
    explanation = explainer(torch.randn(NODES, 3), random_graph(), index=1)
    assert explanation.edge_mask.shape == (random_graph().shape[1],)
    assert explanation.edge_mask.any()
    assert not any(layer.explain for layer in model)


def test_order_of_products():
    """The narrower side is carried along edges; gradients that nobody asks for cost nothing."""
    x, learned = torch.randn(NODES, 6), torch.randn(NODES, 6, requires_grad=True)
    assert GCNConv(6, 7)._aggregates_first(learned, None)
    assert not GCNConv(6, 5)._aggregates_first(learned, None)
    assert not GCNConv(6, 6)._aggregates_first(learned, None)
    # A first layer's features need no gradient, so carrying them costs one product instead of two.
    assert GCNConv(6, 4)._aggregates_first(x, None)
    assert not GCNConv(6, 3)._aggregates_first(x, None)
    with torch.no_grad():
        assert not GCNConv(6, 4)._aggregates_first(x, None)
    assert not GCNConv(6, 9)._aggregates_first(x.to_sparse(), None)
    assert not GCNConv(6, 9)._aggregates_first(x, torch.ones(3, dtype=torch.float64))


# Modes.


def test_sizes_change_without_new_programs():
    layer = GCNConv(5, 7)
    layer(torch.randn(9, 5), random_graph(9, 20)).sum().backward()
    before = insum_nn.cache_info().misses
    for nodes, edges in ((11, 31), (5, 3), (200, 900), (64, 64)):
        x = torch.randn(nodes, 5)
        layer(x, random_graph(nodes, edges)).sum().backward()
    assert insum_nn.cache_info().misses == before


def test_layers_share_the_graph(monkeypatch: pytest.MonkeyPatch):
    built: list[int] = []
    monkeypatch.setattr(convolutions, "gcn_norm", lambda *a, **k: (built.append(1), gcn_norm(*a, **k))[1])
    graph, x = random_graph(), torch.randn(NODES, 3)
    weight = torch.rand(graph.shape[1])
    first, second = GCNConv(3, 8), GCNConv(8, 2)
    for given in (None, weight):
        for _ in range(3):
            second(first(x, graph, given).relu(), graph, given).sum().backward()
    assert built == [1, 1]
    # What was written to is read again, and weights that are learned always are.
    for written in (graph, weight):
        written.copy_(written.clone())
        first(x, graph, weight)
    first(x, graph, weight.requires_grad_())
    first(x, graph, weight)
    assert built == [1] * 6


def test_kept_edges_are_sorted():
    layer, graph, x = GCNConv(3, 4), random_graph(), torch.randn(NODES, 3)
    for flow, receivers in zip(FLOWS, (1, 0), strict=True):
        layer = GCNConv(3, 4, flow=flow)
        edges, weights = layer._weighted(x, graph, None)
        assert bool((edges[receivers].diff() >= 0).all())
        want, values = gcn_norm(graph, None, NODES, flow=flow)
        found = zip(*edges.tolist(), weights.tolist(), strict=True)
        assert sorted(found) == sorted(zip(*want.tolist(), values.tolist(), strict=True))


# A batch of graphs of one size, under `torch.vmap` over the edges. The peer is called graph by graph: its own
# normalisation fails there.


def batch_of_graphs(batch: int = 3, edges: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """Features, weights and edges, among them self-loops, of which a node has at most one, as the peer defines."""
    graphs = torch.randint(NODES, (batch, 2, edges))
    graphs[:, 1] = torch.where(graphs[:, 0] == graphs[:, 1], (graphs[:, 1] + 1) % NODES, graphs[:, 1])
    graphs[:, :, 4] = 2
    x = torch.randn(batch, NODES, 4, dtype=torch.float64)
    return x, torch.rand(batch, edges, dtype=torch.float64) + 0.1, graphs


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"normalize": False}, {"flow": FLOWS[1], "improved": True}, {"add_self_loops": False}],
    ids=str,
)
@pytest.mark.parametrize("options", [Options(), Options(deterministic=True)], ids=["", "deterministic"])
@pytest.mark.parametrize("wide", [3, 5])
def test_a_batch_of_graphs(wide: int, options: Options, kwargs: dict[str, Any], weighted: bool):
    ours, theirs = pair(4, wide, **kwargs)
    ours.options = options
    x, weight, graphs = batch_of_graphs()
    for values in (x, weight):
        values.requires_grad_()
    got = torch.vmap(ours, (0, 0, 0 if weighted else None))(x, graphs, weight if weighted else None)
    each = zip(x, graphs, weight if weighted else [None] * 3, strict=True)
    want = torch.stack([theirs(*one) for one in each])
    assert_matches(got, want, dtype=torch.float64, kind="sum")
    seed, leaves = torch.randn_like(want), [x, weight] if weighted else [x]
    found = [
        torch.autograd.grad(out, [*leaves, *layer.parameters()], seed) for out, layer in ((got, ours), (want, theirs))
    ]
    for a, b in zip(*found, strict=True):
        assert_matches(a, b, dtype=torch.float64, kind="gradient")


def test_derivatives_of_a_batch_of_graphs():
    layer = GCNConv(4, 3).double()
    x, weight, graphs = batch_of_graphs()
    parameters = dict(layer.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor, graph: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x, graph, weight)).pow(3).sum()

    for derivative in (torch.func.grad(loss, (0, 1, 3)), torch.func.hessian(loss, 3)):
        got = torch.vmap(derivative, (None, 0, 0, 0))(parameters, x, graphs, weight)
        for at in range(3):
            want = derivative(parameters, x[at], graphs[at], weight[at])
            torch.testing.assert_close(torch.utils._pytree.tree_map(lambda many: many[at], got), want)  # noqa: B023
    within = torch.vmap(torch.vmap(layer), (None, 0))(x, torch.stack([graphs, graphs.flip(0)]))
    torch.testing.assert_close(within[1], torch.vmap(layer)(x, graphs.flip(0)))
    compiled = torch.compile(torch.vmap(layer, (0, 2, 0)), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, graphs.permute(1, 2, 0), weight), torch.vmap(layer)(x, graphs, weight))


def test_errors_of_a_batch_of_graphs():
    x, _, graphs = batch_of_graphs()
    with pytest.raises(InsumShapeError, match="'cached=True' keeps one graph"):
        torch.vmap(GCNConv(4, 3, cached=True).double())(x, graphs)
    graphs[1, 0, 3] = NODES
    with pytest.raises(IndexError, match=rf"minimum 0, maximum {NODES} in a batch of graphs"):
        torch.vmap(GCNConv(4, 3).double())(x, graphs)


def test_compiled_with_a_cache():
    torch._dynamo.reset()
    ours, theirs = pair(3, 4, cached=True)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    graph = torch.cat([random_graph(), torch.tensor([[2, 2], [2, 2]])], 1)
    x = torch.randn(NODES, 3, dtype=torch.float64)
    want = theirs(x, graph)
    for edges in (graph, graph, random_graph(seed=5)):
        assert_matches(compiled(x, edges), want, dtype=torch.float64, kind="sum")
    assert_matches(ours(x, graph), want, dtype=torch.float64, kind="sum")


@pytest.mark.compile
def test_compiled_by_inductor():
    torch._dynamo.reset()
    layer, graph = GCNConv(3, 4), random_graph()
    x = torch.randn(NODES, 3)
    compiled = torch.compile(layer, fullgraph=True)
    for _ in range(2):
        # Inductor may write over what it thinks dead: the graph's own tensors must not be among that.
        assert_matches(compiled(x, graph), layer(x, graph).double(), dtype=torch.float32, kind="sum")


@pytest.mark.parametrize(("narrow", "wide"), [(4, 8), (8, 4)])
def test_weights_of_another_dtype_promote_as_in_the_peer(narrow: int, wide: int):
    graph = random_graph()
    x, weight = torch.randn(NODES, narrow), torch.rand(graph.shape[1], dtype=torch.float64)
    ours, theirs = GCNConv(narrow, wide), Peer(narrow, wide)
    theirs.load_state_dict(ours.state_dict())
    got, want = ours(x, graph, weight), theirs(x, graph, weight)
    assert got.dtype == want.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_deterministic_switches():
    layer, graph = GCNConv(3, 4, options=Options(deterministic=True)), random_graph()
    x = torch.randn(NODES, 3, requires_grad=True)
    first = torch.autograd.grad(layer(x, graph).square().sum(), x)[0]
    assert torch.equal(torch.autograd.grad(layer(x, graph).square().sum(), x)[0], first)


def test_edges_that_are_made_inside_a_transform():
    layer, graph = GCNConv(3, 4), random_graph()
    x = torch.randn(NODES, 3)

    def loss(x: Tensor) -> Tensor:
        return layer(x, graph * (x[0, 0] == x[0, 0])).square().sum()

    got, twice = torch.func.grad(loss)(x), torch.func.jacfwd(torch.func.grad(loss))(x)
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(layer(leaf, graph).square().sum(), leaf)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(twice, torch.autograd.functional.hessian(loss, x))


def test_hooks_of_the_aggregation_fire():
    graph, x = random_graph(), torch.randn(NODES, 3)
    layer = GCNConv(3, 4)
    want = layer(x, graph)
    module, seen = layer.aggr_module, []
    for register in (module.register_forward_hook, module.register_forward_pre_hook):
        handle = register(lambda _, inputs, *rest: seen.append(inputs[0].shape))
        torch.testing.assert_close(layer(x, graph), want)
        handle.remove()
    for register in (module.register_full_backward_hook, module.register_full_backward_pre_hook):
        handle = register(lambda _, *grads: seen.append(grads[-1][0].shape))
        layer(x, graph).sum().backward()
        handle.remove()
    assert [len(shape) for shape in seen] == [2, 2, 2, 2]
    layer(x, graph)
    assert len(seen) == 4


# Bad input.


@pytest.mark.parametrize("kind", [GCNConv, Peer])
def test_errors_that_are_the_peers(kind: type):
    x, graph = torch.randn(NODES, 3), random_graph()
    layer = kind(3, 4)
    with pytest.raises(ValueError, match="does not support bipartite"):
        layer((x, x), graph)
    with pytest.raises(ValueError, match="adding self-loops"):
        kind(3, 4, normalize=False, add_self_loops=True)
    with pytest.raises(ValueError, match="'flow' to be either"):
        kind(3, 4, flow="sideways")
    for bad in (graph.double(), graph[0], torch.cat([graph, graph])):
        with pytest.raises(ValueError, match="Expected 'edge_index'"):
            kind(3, 4, normalize=False)(x, bad)
    with pytest.raises(ValueError, match="target_to_source"):
        kind(3, 4, normalize=False, flow=FLOWS[1])(x, adjacency(graph, torch.ones(graph.shape[1]), "csr"))
    with pytest.raises(IndexError, match=r"negative indices in 'edge_index'|holds -1"):
        kind(3, 4, normalize=False)(x, graph - 1)
    with pytest.raises(IndexError, match=r"indices in 'edge_index' that are larger than 13|< 14"):
        kind(3, 4, normalize=False)(x, graph + 10)
    with pytest.raises(RuntimeError):
        layer(torch.randn(NODES, 5), graph)


def test_errors_that_are_clearer():
    x, graph = torch.randn(NODES, 3), random_graph()
    layer = GCNConv(3, 4)
    with pytest.raises(IndexError, match="edge_index"):
        layer(x, graph + 10)
    with pytest.raises(InsumShapeError, match="one number per edge"):
        layer(x, graph, torch.ones(3))
    with pytest.raises(InsumShapeError, match="one number per edge"):
        layer(x, graph, torch.ones(graph.shape[1], 2))
    with pytest.raises(InsumDtypeError, match="floating-point to be normalised"):
        layer(x, graph, torch.ones(graph.shape[1], dtype=torch.int64))
    with pytest.raises(InsumShapeError, match="at least two dimensions"):
        layer(x[0], graph)
    with pytest.raises(InsumDeviceError, match="edge_weight.* is on meta"):
        layer(x, graph, torch.ones(graph.shape[1], device="meta"))
    with pytest.raises(InsumShapeError, match="last one that of features"):
        GCNConv(3, 4, node_dim=-1)(x, graph)


@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("narrow", "wide"), [(16, 40), (40, 16)])
@pytest.mark.parametrize("cached", [False, True])
def test_on_a_gpu(gpu: torch.device, weighted: bool, narrow: int, wide: int, cached: bool):
    graph = random_graph(300, 4000, loops=False)
    layer = GCNConv(narrow, wide, cached=cached).to(gpu)
    exact = copy.deepcopy(layer).cpu().double()
    x = torch.randn(300, narrow, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(graph.shape[1], dtype=torch.float64, requires_grad=True) if weighted else None
    inputs = [x, weight] if weighted else [x]
    ours = [t.detach().to(gpu, torch.float32).requires_grad_() for t in inputs]
    if weighted and cached:
        ours[1], inputs[1] = ours[1].detach(), inputs[1].detach()
        weighted_inputs = slice(0, 1)
    else:
        weighted_inputs = slice(0, None)
    edges = graph.to(gpu)
    got = derivatives(layer, ours[weighted_inputs], ours[0], edges, ours[1] if weighted else None)
    want = derivatives(exact, inputs[weighted_inputs], inputs[0], graph, inputs[1] if weighted else None)
    assert_matches(got[0], want[0], dtype=torch.float32, kind="second")
    for place in (1, 2):
        for a, b in zip(got[place], want[place], strict=True):
            scale = float(b.detach().abs().max()) or 1.0
            assert_matches(a, b, dtype=torch.float32, kind="second", scale=4 * scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_on_a_gpu(gpu: torch.device, dtype: torch.dtype):
    graph = random_graph(300, 4000, loops=False)
    layer = GCNConv(16, 40).to(gpu, dtype)
    exact = copy.deepcopy(layer).cpu().double()
    x = torch.randn(300, 16).to(dtype)
    out = layer(x.to(gpu), graph.to(gpu))
    assert_matches(out, exact(x.double(), graph), dtype=dtype, kind="second")
    with torch.autocast(gpu.type, dtype):
        mixed = copy.deepcopy(layer).float()(x.to(gpu).float(), graph.to(gpu))
    assert_matches(mixed.to(dtype), exact(x.double(), graph), dtype=dtype, kind="second")


@pytest.mark.gpu
def test_compiled_on_a_gpu(gpu: torch.device):
    torch._dynamo.reset()
    layer, graph = GCNConv(16, 40).to(gpu), random_graph(300, 4000).to(gpu)
    x = torch.randn(300, 16, device=gpu)
    compiled = torch.compile(layer, fullgraph=True)
    for _ in range(2):
        assert_matches(compiled(x, graph), layer(x, graph).double(), dtype=torch.float32, kind="gradient")


def test_the_missing_package_is_named():
    code = (
        "import sys\n"
        "sys.modules['torch_geometric'] = None\n"
        "from insum_nn.errors import MissingExtraError\n"
        "try:\n"
        "    import insum_nn.layers.graph.gcn_conv\n"
        "except MissingExtraError as error:\n"
        "    assert 'pip install torch_geometric' in str(error)\n"
        "else:\n"
        "    raise AssertionError\n"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr

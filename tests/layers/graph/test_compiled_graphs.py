"""Compiled graph convolutions: what is made of the graph in a call, with and without one that was prepared."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from triton.backends.compiler import GPUTarget

pytest.importorskip("torch_geometric")

from torch_geometric.data import Data
from torch_geometric.nn.conv import GCNConv as Peer

import insum_nn
from insum_nn.errors import InsumDeviceError, InsumShapeError
from insum_nn.layers.graph.gcn_conv import GCNConv
from insum_nn.structure.adjacency import Adjacency
from insum_nn.testing.tolerances import assert_matches
from tests.pretended_gpu import H200

inline_module = sys.modules["insum_nn.compiler.runtime.inline"]
Graph = Tensor | Adjacency


class Network(nn.Module):
    """Two convolutions, of which the first multiplies by the graph before its weights, the second after."""

    def __init__(self, kind: Callable[..., nn.Module] = GCNConv, **kwargs: Any) -> None:
        super().__init__()
        self.first, self.second = kind(4, 8, **kwargs), kind(8, 3, **kwargs)

    def forward(self, x: Tensor, graph: Graph, weight: Tensor | None = None) -> Tensor:
        return self.second(self.first(x, graph, weight).relu(), graph, weight)


def drawn(nodes: int, edges: int) -> tuple[Tensor, Tensor]:
    """Features and edges; at most one self-loop of each node, which is all that the peer defines."""
    generator = torch.Generator().manual_seed(nodes)
    graph = torch.randint(nodes, (2, edges), generator=generator)
    graph = torch.cat([graph[:, graph[0] != graph[1]], torch.tensor([[1], [1]])], 1)
    return torch.randn(nodes, 4, dtype=torch.float64, generator=generator), graph


def recorded(model: nn.Module, graphs: list[fx.GraphModule], **kwargs: Any) -> Any:
    """The compiled model, which keeps what AOTAutograd records of it, forward and then backward."""
    torch._dynamo.reset()

    def keep(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    return torch.compile(model, backend=backend, fullgraph=True, **kwargs)


def count(graphs: list[fx.GraphModule], name: str) -> int:
    targets = [node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    packets = [target.overloadpacket for target in targets if isinstance(target, torch._ops.OpOverload)]
    return sum(str(packet) == f"aten.{name}" for packet in packets)


def step(model: Any, module: nn.Module, x: Tensor, *graph: Any) -> list[Tensor]:
    x = x.detach().requires_grad_()
    out = model(x, *graph)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b, kind in zip(got, want, ["sum"] + ["gradient"] * len(want), strict=False):
        assert_matches(a, b, dtype=torch.float64, kind=kind)  # type: ignore[arg-type]


def pair(**kwargs: Any) -> tuple[Network, Network]:
    ours, theirs = Network(**kwargs).double(), Network(Peer, **kwargs).double()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("weighted", [False, True])
def test_a_prepared_graph_is_an_input(weighted: bool):
    ours, theirs = pair()
    graphs: list[fx.GraphModule] = []
    compiled = recorded(ours, graphs, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for nodes, edges in ((14, 45), (31, 80), (9, 20)):
            x, graph = drawn(nodes, edges)
            weight = torch.rand(graph.shape[1], dtype=torch.float64) if weighted else None
            prepared = Adjacency.from_edges(graph, weight, nodes, dtype=torch.float64)
            got = step(compiled, ours, x, prepared)
            assert_same(got, step(ours, ours, x, prepared))
            assert_same(got, step(theirs, theirs, x, graph, weight))
    assert len(graphs) == 2
    assert not any(count(graphs, name) for name in ("sort", "argsort", "cat", "index_select", "pow"))


# Dynamo's guards on inputs that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_gradients_reach_the_weights_of_a_prepared_graph():
    ours, theirs = pair()
    x, graph = drawn(14, 45)
    weight = torch.rand(graph.shape[1], dtype=torch.float64, requires_grad=True)
    prepared = Adjacency.from_edges(graph, weight, 14)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    outs = [model(x, prepared) for model in (compiled, ours)]
    outs.append(theirs(x, graph, weight))
    got = [torch.autograd.grad(out.square().sum(), weight, retain_graph=True)[0] for out in outs]
    assert_same(got[:2], [got[2]] * 2)


def test_a_cached_graph_is_an_input():
    ours, theirs = pair(cached=True)
    x, graph = drawn(14, 45)
    ours(x, graph)
    graphs: list[fx.GraphModule] = []
    compiled = recorded(ours, graphs)
    for edges in (graph, drawn(14, 30)[1]):
        assert_same(step(compiled, ours, x, edges), step(theirs, theirs, x, graph))
    assert not any(count(graphs, name) for name in ("sort", "cat", "pow"))
    # As the peer's users forget it.
    for model in (ours, theirs):
        for layer in (model.first, model.second):
            layer._cached_edge_index = None
    other = drawn(14, 30)[1]
    assert_same(step(compiled, ours, x, other), step(theirs, theirs, x, other))


def test_a_graph_is_cached_by_a_compiled_call():
    ours, theirs = pair(cached=True)
    x, graph = drawn(14, 45)
    graphs: list[fx.GraphModule] = []
    compiled = recorded(ours, graphs)
    want = step(theirs, theirs, x, graph)
    assert_same(step(compiled, ours, x, graph), want)
    first, made = len(graphs), count(graphs, "sort")
    assert made == 4
    for _ in range(3):
        assert_same(step(compiled, ours, x, drawn(14, 30)[1]), want)
    # Once more: for a graph that is there.
    assert len(graphs) == 2 * first
    assert count(graphs, "sort") == made


def test_an_edge_list_is_sorted_once_for_all_layers(monkeypatch: pytest.MonkeyPatch):
    ours, graphs = Network(options=insum_nn.Options(backend="triton")), []
    monkeypatch.setattr(inline_module, "require_triton", lambda _: None)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(get_current_target=lambda: GPUTarget(*H200)))
    compiled = recorded(ours, graphs, dynamic=True)
    x, graph = drawn(14, 45)
    for given in (graph, Adjacency.from_edges(graph, num_nodes=14)):
        graphs.clear()
        torch._dynamo.reset()
        # There is no GPU to launch anything on.
        with pytest.raises(Exception, match="get_current_stream|get_current_device|device"):
            step(compiled, ours, x.float(), given)
        launches = [n for graph in graphs for n in graph.graph.nodes if "triton_kernel" in str(n.target)]
        assert len(launches) == 4
        assert count(graphs, "sort") == (2 if given is graph else 0)
        assert count(graphs, "searchsorted") == (2 if given is graph else 0)


# Of torch's own exporter.
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_exported_with_a_cached_graph(strict: bool):
    ours, theirs = pair(cached=True)
    x, graph = drawn(14, 45)
    want = theirs(x, graph)
    ours(x, graph)
    program = torch.export.export(ours.eval(), (x, graph), strict=strict).run_decompositions()
    assert not count([program.graph_module], "sort")
    assert_matches(program.module()(x, graph), want, dtype=torch.float64, kind="sum")


def test_exported_with_a_prepared_graph():
    ours, theirs = pair()
    x, graph = drawn(14, 45)
    program = torch.export.export(ours.eval(), (x, Adjacency.from_edges(graph, num_nodes=14, dtype=torch.float64)))
    other = drawn(14, 45)[1].flip(0)
    prepared = Adjacency.from_edges(other, num_nodes=14, dtype=torch.float64)
    assert_matches(program.module()(x, prepared), theirs(x, other), dtype=torch.float64, kind="sum")


def test_data_moves_a_prepared_graph():
    x, graph = drawn(14, 45)
    data = Data(x=x, prepared=Adjacency.from_edges(graph, num_nodes=14)).to("meta")
    assert isinstance(data.prepared, Adjacency)
    assert {tensor.device.type for tensor in data.prepared} == {"meta"}


@pytest.mark.library_calls
def test_errors():
    x, graph = drawn(14, 45)
    layer, prepared = GCNConv(4, 3), Adjacency.from_edges(graph, num_nodes=14)
    with pytest.raises(InsumShapeError, match="the adjacency does not fit"):
        layer(x[:5].float(), prepared)
    with pytest.raises(InsumDeviceError, match="different devices"):
        layer.to("meta")(x.float().to("meta"), prepared)
    assert "combine: scatter" in str(GCNConv(4, 3).explain_statement(x.float(), prepared))

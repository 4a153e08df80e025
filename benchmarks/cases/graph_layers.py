"""Graph layers, ours and torch_geometric's, as users call them: one layer, with the same graph at every step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.cases.gcn import random_graph
from benchmarks.registry import Floor, Problem, Setting, Work, case

__all__ = ["graph_layer"]

# name -> nodes, edges; then the same for tests.
GRAPHS = {
    "molecule": ((30, 64), (12, 20)),
    "cora": ((2_708, 10_556), (60, 200)),
    "random10k": ((10_000, 160_000), (80, 500)),
    "random50k": ((50_000, 800_000), (80, 500)),
}
FEATURES, HEADS, CHANNELS, EDGE_FEATURES = 64, 4, 32, 16
WIDTH = HEADS * CHANNELS


class Layer(NamedTuple):
    """A class, its arguments, what edges carry ("weights", "features" or nothing), and numbers gathered for an edge."""

    kind: str
    arguments: Callable[[], tuple[Any, ...]]
    named: dict[str, Any]
    carried: str = ""
    gathered: int = FEATURES


def _sizes() -> tuple[int, int]:
    return FEATURES, FEATURES


def _network() -> tuple[nn.Module]:
    return (nn.Linear(FEATURES, FEATURES),)


def _aggregations() -> tuple[list[str], list[str], Tensor]:
    return (
        ["mean", "min", "max", "std"],
        ["identity", "amplification", "attenuation"],
        torch.ones(20, dtype=torch.int64),
    )


LAYERS = {
    "GATConv": Layer("GATConv", lambda: (FEATURES, CHANNELS, HEADS), {}, gathered=WIDTH),
    "GATv2Conv": Layer("GATv2Conv", lambda: (FEATURES, CHANNELS, HEADS), {"add_self_loops": False}, "", 2 * WIDTH),
    "TransformerConv": Layer(
        "TransformerConv", lambda: (FEATURES, CHANNELS, HEADS), {"edge_dim": EDGE_FEATURES}, "features", WIDTH
    ),
    "SAGEConv": Layer("SAGEConv", _sizes, {}),
    "SAGEConv-max": Layer("SAGEConv", _sizes, {"aggr": "max"}),
    "GINConv": Layer("GINConv", _network, {}),
    "GINEConv": Layer("GINEConv", _network, {"edge_dim": EDGE_FEATURES}, "features"),
    "GraphConv": Layer("GraphConv", _sizes, {}, "weights"),
    "TAGConv": Layer("TAGConv", _sizes, {}, "weights"),
    "APPNP": Layer("APPNP", lambda: (3, 0.1), {}, "weights"),
    "RGCNConv": Layer("RGCNConv", lambda: (*_sizes(), 8), {}, "types"),
    "PNAConv": Layer("PNAConv", lambda: (*_sizes(), *_aggregations()), {}),
    "EdgeConv": Layer(
        "EdgeConv", lambda: (nn.Sequential(nn.Linear(2 * FEATURES, FEATURES), nn.ReLU(), *_network()),), {}
    ),
    "NNConv": Layer("NNConv", lambda: (*_sizes(), nn.Linear(4, FEATURES * FEATURES)), {}, "few features"),
}


@case(
    "graph_layer",
    tests=tuple(f"tests/layers/graph/test_{name}.py" for name in ("attention", "convolutions", "weighted")),
    layer=tuple(LAYERS),
    graph=("molecule", "cora", "random50k"),
    quick={"layer": ("GATv2Conv", "TransformerConv", "SAGEConv-max"), "graph": ("random50k",)},
)
def graph_layer(setting: Setting, *, layer: str, graph: str, edges: str = "kept") -> Problem:
    """One layer of 64 channels, or 4 heads of 32: forward, and with the gradients of features and parameters.

    GATConv adds self-loops; GINEConv and TransformerConv have 16 features of each edge, NNConv 4.
    """
    nodes, count = GRAPHS[graph][setting.tiny]
    edge_index = random_graph(setting, nodes, count)
    # Sorted by the node that receives, as data sets mostly are.
    edge_index = edge_index[:, edge_index[1].argsort(stable=True)].contiguous()
    count, case = edge_index.shape[1], LAYERS[layer]

    def drawn(*shape: int) -> Tensor:
        return torch.rand(shape, generator=setting.generator(), device=setting.device)

    x = drawn(nodes, FEATURES) - 0.5
    carried = {"weights": (count,), "features": (count, EDGE_FEATURES), "few features": (count, 4)}.get(case.carried)

    def work(source: str, *, compiled: bool = False, exact: bool = False) -> Work:
        import torch_geometric.nn as peer

        from insum_nn import layers

        kind: Callable[..., nn.Module] = getattr(layers if source == "ours" else peer, case.kind)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(setting.seed)
            built = kind(*case.arguments(), **case.named)
        dtype = torch.float64 if exact else torch.float32
        built = built.to(setting.device, dtype)
        features = x.to(dtype, copy=True).requires_grad_()
        extra = () if carried is None else (drawn(*carried).to(dtype),)
        if case.carried == "types":
            extra = (torch.arange(count, device=setting.device) % 8,)
        call: Callable[..., Tensor] = torch.compile(built) if compiled else built

        def forward() -> Tensor:
            with warnings.catch_warnings():
                # The peer names a package that would make it faster, once.
                warnings.simplefilter("ignore", UserWarning)
                return call(features, edge_index.clone() if edges == "new" else edge_index, *extra)

        # A number that is added to all scores of a node changes no weight: what is left of its gradient is rounding.
        learned = [parameter for name, parameter in built.named_parameters() if name != "lin_key.bias"]
        return Work(forward, (features, *learned))

    providers = {"insum_nn": lambda: work("ours"), "pyg": lambda: work("pyg")}
    if setting.device.type == "cuda" and layer not in ("GATConv", "APPNP"):
        # Self-loops are of a number that a compiler does not know: what torch makes of them fails on a GPU.
        providers["pyg/compiled"] = lambda: work("pyg", compiled=True)
    floor = Floor(
        bytes=4 * nodes * (FEATURES + 3 * case.gathered) + 8 * count,
        flops=4 * nodes * FEATURES * case.gathered + 6 * count * case.gathered,
        gathered=4 * count * case.gathered,
        row=4 * case.gathered,
        table=4 * nodes * case.gathered,
    )
    return Problem(
        providers=providers,
        oracle=lambda: work("pyg", exact=True),
        tolerance=1e-4,
        # Gradients of attention's parameters sum over all edges, and almost cancel.
        gradient_tolerance=1e-2,
        floors={"fwd": floor},
        modes=("fwd", "fwdbwd"),
    )

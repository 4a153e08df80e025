"""Graph attention, ours and torch_geometric's, as users call it: one layer, with the same graph at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases.gcn import random_graph
from benchmarks.registry import Floor, Problem, Setting, Work, case

__all__ = ["graph_attention"]

# name -> nodes, edges; then the same for tests.
GRAPHS = {"cora": ((2_708, 10_556), (60, 200)), "random50k": ((50_000, 800_000), (80, 500))}
FEATURES, HEADS, CHANNELS, EDGE_FEATURES = 64, 4, 32, 16


@case(
    "graph_attention",
    tests=("tests/layers/graph/test_attention.py",),
    layer=("GATConv", "GATv2Conv", "TransformerConv"),
    graph=tuple(GRAPHS),
    quick={"layer": ("GATv2Conv", "TransformerConv"), "graph": ("random50k",)},
)
def graph_attention(setting: Setting, *, layer: str, graph: str) -> Problem:
    """One layer of 4 heads of 32 channels: forward, and forward with the gradients of features and parameters.

    GATConv adds self-loops, and TransformerConv has 16 features of each edge.
    """
    nodes, edges = GRAPHS[graph][setting.tiny]
    edge_index = random_graph(setting, nodes, edges)
    # Sorted by the node that receives, as data sets mostly are.
    edge_index = edge_index[:, edge_index[1].argsort(stable=True)].contiguous()
    count, width = edge_index.shape[1], HEADS * CHANNELS
    x = torch.randn(nodes, FEATURES, generator=setting.generator(), device=setting.device)
    given: dict[str, Any] = {"GATv2Conv": {"add_self_loops": False}, "TransformerConv": {"edge_dim": EDGE_FEATURES}}
    attributes = torch.randn(count, EDGE_FEATURES, generator=setting.generator(), device=setting.device)

    def work(source: str, *, compiled: bool = False, exact: bool = False) -> Work:
        import torch_geometric.nn as peer

        from insum_nn import layers

        kind: Callable[..., nn.Module] = getattr(layers if source == "ours" else peer, layer)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(setting.seed)
            built = kind(FEATURES, CHANNELS, heads=HEADS, **given.get(layer, {}))
        dtype = torch.float64 if exact else torch.float32
        built = built.to(setting.device, dtype)
        features = x.to(dtype, copy=True).requires_grad_()
        extra = (attributes.to(dtype),) if "edge_dim" in given.get(layer, {}) else ()
        call: Callable[..., Tensor] = torch.compile(built) if compiled else built
        # A number that is added to all scores of a node changes no weight: what is left of its gradient is rounding.
        learned = [parameter for name, parameter in built.named_parameters() if name != "lin_key.bias"]
        return Work(lambda: call(features, edge_index, *extra), (features, *learned))

    providers = {"insum_nn": lambda: work("ours"), "pyg": lambda: work("pyg")}
    if setting.device.type == "cuda" and layer != "GATConv":
        # Its self-loops are of a size that a compiler does not know: what torch makes of them fails on a GPU.
        providers["pyg/compiled"] = lambda: work("pyg", compiled=True)
    gathered = 4 * count * width * (2 if layer == "GATv2Conv" else 1)
    floor = Floor(
        bytes=4 * nodes * (FEATURES + 3 * width) + 8 * count,
        flops=4 * nodes * FEATURES * width + 6 * count * width,
        gathered=gathered,
        row=4 * width,
        table=4 * nodes * width,
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

"""A two-layer graph convolutional network, ours against torch_geometric's, as its users call it.

The same graph comes at every step, as in full-batch training; `cached` keeps the normalised graph in the layers, and
CSR hands over a sparse adjacency. In the last case every step brings a new graph, as mini-batches do: nothing that is
built from one can be kept.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.registry import Floor, Problem, Setting, Work, case

__all__ = ["gcn"]

# name -> nodes, edges, features, hidden, classes; then the same for tests.
GRAPHS = {
    "cora": ((2_708, 10_556, 1_433, 16, 7), (60, 200, 40, 16, 7)),
    "random300k": ((300_000, 3_000_000, 128, 128, 128), (80, 500, 16, 16, 16)),
}


class _Network(nn.Module):
    """Two convolutions and a ReLU."""

    def __init__(self, kind: Callable[..., nn.Module], sizes: tuple[int, int, int], **arguments: Any) -> None:
        super().__init__()
        features, hidden, classes = sizes
        self.first = kind(features, hidden, **arguments)
        self.second = kind(hidden, classes, **arguments)

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        return self.second(self.first(x, graph).relu(), graph)


def _random_graph(setting: Setting, nodes: int, edges: int) -> Tensor:
    """About `edges` distinct edges between different nodes, in random order."""
    generator = setting.generator()
    keys = torch.randint(nodes * nodes, (edges,), generator=generator, device=setting.device).unique()
    keys = keys[torch.randperm(keys.numel(), generator=generator, device=setting.device)]
    graph = torch.stack([keys // nodes, keys % nodes])
    return graph[:, graph[0] != graph[1]].contiguous()


@case(
    "gcn",
    tests=("tests/layers/test_gcn_conv.py",),
    graph=tuple(GRAPHS),
    input=("edge_index", "cached", "csr", "fresh"),
)
def gcn(setting: Setting, *, graph: str, input: str) -> Problem:
    """Forward and training step of a two-layer GCN."""
    nodes, edges, *sizes = GRAPHS[graph][setting.tiny]
    shape = (sizes[0], sizes[1], sizes[2])
    edge_index = _random_graph(setting, nodes, edges)
    x = torch.randn(nodes, shape[0], generator=setting.generator(), device=setting.device)

    def theirs_kind() -> Callable[..., nn.Module]:
        from torch_geometric.nn import GCNConv

        return GCNConv

    def ours_kind() -> Callable[..., nn.Module]:
        from insum_nn.layers.gcn_conv import GCNConv

        return GCNConv

    def made(kind: Callable[..., nn.Module]) -> nn.Module:
        torch.manual_seed(setting.seed)
        return _Network(kind, shape, cached=input == "cached").to(setting.device)

    def work(kind: Callable[..., nn.Module], *, compiled: bool = False, exact: bool = False) -> Work:
        network = made(kind)
        features, given = x, _given(edge_index, nodes, input)
        if exact:
            network, features = copy.deepcopy(network).double(), x.double()
            given = given.double() if given.layout != torch.strided else given
        call: Callable[[Tensor, Tensor], Tensor] = torch.compile(network) if compiled else network

        def forward() -> Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                return call(features, given.clone() if input == "fresh" else given)

        return Work(forward, tuple(network.parameters()))

    providers = {
        "insum_nn": lambda: work(ours_kind()),
        "pyg": lambda: work(theirs_kind()),
    }
    if setting.device.type == "cuda" and input in ("edge_index", "cached"):
        providers["insum_nn/compiled"] = lambda: work(ours_kind(), compiled=True)
        providers["pyg/compiled"] = lambda: work(theirs_kind(), compiled=True)
    entries = edge_index.shape[1] + nodes
    narrow = [min(shape[0], shape[1]), min(shape[1], shape[2])]
    flops = sum(2 * entries * width for width in narrow) + 2 * nodes * shape[1] * (shape[0] + shape[2])
    moved = 4 * nodes * (shape[0] + 2 * shape[1] + shape[2]) + 2 * 12 * entries
    return Problem(
        providers=providers,
        oracle=lambda: work(theirs_kind(), exact=True),
        # Two layers of sums in float32; gradients of parameters sum over all nodes, with much cancellation.
        tolerance=1e-4,
        floors={"fwd": Floor(bytes=moved, flops=flops)},
        modes=("fwd", "fwdbwd"),
    )


def _given(edge_index: Tensor, nodes: int, input: str) -> Tensor:
    if input != "csr":
        return edge_index
    ones = torch.ones(edge_index.shape[1], device=edge_index.device)
    coo = torch.sparse_coo_tensor(edge_index.flip(0), ones, (nodes, nodes), check_invariants=True)
    with warnings.catch_warnings():
        # torch says once that CSR support is in beta.
        warnings.simplefilter("ignore", UserWarning)
        return coo.coalesce().to_sparse_csr()

"""Graph convolutions, ours and torch_geometric's, as users call them: a layer, a network, a training step.

The same graph comes at every step, as in full-batch training; `cached` keeps the normalised graph in the layers, and
`csr` passes a sparse adjacency matrix. With `fresh` every step has a new graph, as mini-batches do, so that nothing
that is built from a graph can be cached.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.registry import Floor, Problem, Setting, Work, case

__all__ = ["gcn", "gcn_layer", "gcn_step"]

# name -> nodes, edges, features, hidden, classes; then the same for tests.
GRAPHS = {
    "cora": ((2_708, 10_556, 1_433, 16, 7), (60, 200, 40, 16, 7)),
    "citeseer": ((3_327, 9_104, 3_703, 16, 6), (60, 200, 40, 16, 6)),
    "random20k": ((20_000, 200_000, 64, 64, 64), (80, 500, 16, 16, 16)),
    "random300k": ((300_000, 3_000_000, 128, 128, 128), (80, 500, 16, 16, 16)),
}
OF_GPUS = ("cora", "citeseer", "random300k")
TESTS = ("tests/layers/graph/test_gcn_conv.py",)
# Two layers of sums in float32.
TOLERANCE = 1e-4
# Gradients of parameters sum over all nodes, with random signs, and almost cancel. So each of the 38 million values
# before the ReLU shows that rounding moves across zero: the errors of PyG's layers on random300k are 2.01e-3 (gcn) and
# 2.9e-4 (gcn_step).
GRADIENT_TOLERANCE = 3e-3

Kind = Callable[..., nn.Module]


class _Network(nn.Module):
    """Two convolutions and a ReLU."""

    def __init__(self, kind: Kind, sizes: tuple[int, int, int], **arguments: Any) -> None:
        super().__init__()
        features, hidden, classes = sizes
        self.first = kind(features, hidden, **arguments)
        self.second = kind(hidden, classes, **arguments)

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        return self.second(self.first(x, graph).relu(), graph)


def random_graph(setting: Setting, nodes: int, edges: int) -> Tensor:
    """About `edges` distinct edges between different nodes, in random order."""
    generator = setting.generator()
    keys = torch.randint(nodes * nodes, (edges,), generator=generator, device=setting.device).unique()
    keys = keys[torch.randperm(keys.numel(), generator=generator, device=setting.device)]
    graph = torch.stack([keys // nodes, keys % nodes])
    return graph[:, graph[0] != graph[1]].contiguous()


def pyg() -> Kind:
    from torch_geometric.nn import GCNConv

    return GCNConv


def ours() -> Kind:
    from insum_nn.layers.graph.gcn_conv import GCNConv

    return GCNConv


class _Inputs:
    """A graph, features and labels, and how a network is called on them."""

    def __init__(self, setting: Setting, graph: str, given: str) -> None:
        self.setting, self.given = setting, given
        nodes, edges, *sizes = GRAPHS[graph][setting.tiny]
        self.nodes, self.sizes = nodes, (sizes[0], sizes[1], sizes[2])
        self.edge_index = random_graph(setting, nodes, edges)
        self.x = torch.randn(nodes, sizes[0], generator=setting.generator(), device=setting.device)
        self.labels = torch.randint(sizes[2], (nodes,), generator=setting.generator(), device=setting.device)

    def bind(
        self, network: nn.Module, *, compiled: bool = False, exact: bool = False, learns: bool = False
    ) -> tuple[nn.Module, Tensor, Callable[[], Tensor]]:
        """A network on the device, its features, and its forward: `exact` in float64; `learns`: the features too."""
        dtype = torch.float64 if exact else torch.float32
        network = network.to(self.setting.device, dtype)
        features = self.x.to(dtype, copy=True).requires_grad_(learns)
        graph = _adjacency(self.edge_index, self.nodes).to(dtype) if self.given == "csr" else self.edge_index
        if compiled:
            # Networks of earlier cases share this one's code, of which torch keeps a limited number of versions.
            torch.compiler.reset()
        call: Callable[[Tensor, Tensor], Tensor] = torch.compile(network) if compiled else network

        def forward() -> Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                return call(features, graph.clone() if self.given == "fresh" else graph)

        return network, features, forward

    def made(self, build: Callable[[], nn.Module]) -> nn.Module:
        """A network of the setting's own seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.setting.seed)
            return build()

    def providers(self, work: Callable[..., Work], *, compiled: bool = False) -> dict[str, Callable[[], Work]]:
        """Return ours and PyG's; on a GPU, where it takes seconds, both compiled too."""
        found: dict[str, Callable[[], Work]] = {"insum_nn": lambda: work(ours()), "pyg": lambda: work(pyg())}
        if compiled and self.setting.device.type == "cuda" and self.given in ("edge_index", "cached"):
            found["insum_nn/compiled"] = lambda: work(ours(), compiled=True)
            found["pyg/compiled"] = lambda: work(pyg(), compiled=True)
        return found

    def floor(self, widths: tuple[int, ...]) -> Floor:
        """Count layers of these widths: features, matrix and result once; gathers at the narrower end of each layer."""
        entries = self.edge_index.shape[1] + self.nodes
        flops = moved = gathered = 0
        for wide, out in itertools.pairwise(widths):
            flops += 2 * entries * min(wide, out) + 2 * self.nodes * wide * out
            moved += 4 * self.nodes * (wide + out) + 12 * entries
            gathered += 4 * entries * min(wide, out)
        row = 4 * min(widths[:2])
        return Floor(bytes=moved, flops=flops, gathered=gathered, row=row, table=self.nodes * row)


def _adjacency(edge_index: Tensor, nodes: int) -> Tensor:
    ones = torch.ones(edge_index.shape[1], device=edge_index.device)
    coo = torch.sparse_coo_tensor(edge_index.flip(0), ones, (nodes, nodes), check_invariants=True)
    with warnings.catch_warnings():
        # torch says once that CSR support is in beta.
        warnings.simplefilter("ignore", UserWarning)
        return coo.coalesce().to_sparse_csr()


@case(
    "gcn",
    tests=TESTS,
    graph=OF_GPUS,
    input=("edge_index", "cached", "csr", "fresh"),
    quick={"graph": ("cora", "random300k"), "input": ("edge_index", "cached", "csr")},
)
def gcn(setting: Setting, *, graph: str, input: str) -> Problem:
    """A two-layer network: forward, and forward with the gradients of its parameters."""
    inputs = _Inputs(setting, graph, input)

    def work(kind: Kind, *, exact: bool = False) -> Work:
        built = inputs.made(lambda: _Network(kind, inputs.sizes, cached=input == "cached"))
        network, _, forward = inputs.bind(built, exact=exact)
        return Work(forward, tuple(network.parameters()))

    return Problem(
        providers=inputs.providers(work),
        oracle=lambda: work(pyg(), exact=True),
        tolerance=TOLERANCE,
        gradient_tolerance=GRADIENT_TOLERANCE,
        floors={"fwd": inputs.floor(inputs.sizes)},
        modes=("fwd", "fwdbwd"),
    )


@case(
    "gcn_layer",
    tests=TESTS,
    graph=OF_GPUS,
    input=("edge_index", "cached", "csr"),
    quick={"graph": ("cora", "random300k"), "input": ("edge_index", "cached")},
)
def gcn_layer(setting: Setting, *, graph: str, input: str) -> Problem:
    """One convolution, from features to hidden: forward, and forward with the gradients of features and parameters."""
    inputs = _Inputs(setting, graph, input)

    def work(kind: Kind, *, exact: bool = False) -> Work:
        built = inputs.made(lambda: kind(*inputs.sizes[:2], cached=input == "cached"))
        network, features, forward = inputs.bind(built, exact=exact, learns=True)
        return Work(forward, (features, *network.parameters()))

    return Problem(
        providers=inputs.providers(work),
        oracle=lambda: work(pyg(), exact=True),
        tolerance=TOLERANCE,
        floors={"fwd": inputs.floor(inputs.sizes[:2])},
        modes=("fwd", "fwdbwd"),
    )


@case(
    "gcn_step",
    tests=TESTS,
    graph=OF_GPUS,
    input=("edge_index", "cached", "csr"),
    quick={"graph": ("cora", "random300k"), "input": ("edge_index", "cached")},
)
def gcn_step(setting: Setting, *, graph: str, input: str) -> Problem:
    """A whole training step of the two-layer network: forward, cross entropy, backward, Adam.

    The learning rate is 0: the optimizer does all its work, and every step still sees the same numbers.
    """
    inputs = _Inputs(setting, graph, input)

    def work(kind: Kind, *, compiled: bool = False, exact: bool = False) -> Work:
        built = inputs.made(lambda: _Network(kind, inputs.sizes, cached=input == "cached"))
        network, _, forward = inputs.bind(built, compiled=compiled, exact=exact)
        parameters = list(network.parameters())
        optimizer = torch.optim.Adam(parameters, lr=0.0)

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(forward(), inputs.labels)
            loss.backward()
            optimizer.step()
            return loss

        def outcome(loss: Tensor) -> tuple[Tensor, ...]:
            return (loss.detach(), *(p.grad.clone() for p in parameters if p.grad is not None))

        return Work(step, output=outcome)

    return Problem(
        providers=inputs.providers(work, compiled=True),
        oracle=lambda: work(pyg(), exact=True),
        tolerance=GRADIENT_TOLERANCE,
        recorded=True,
    )

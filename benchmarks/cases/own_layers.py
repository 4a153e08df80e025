"""The layers of docs/write-your-own-layer.md against torch_geometric's; the same graph comes at each call."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.registry import Problem, Setting, Work, case

__all__ = ["own_layers"]

PAGE = Path(__file__).parents[2] / "docs" / "write-your-own-layer.md"
# name -> nodes, edges.
GRAPHS = {"3k": (3_000, 90_000), "30k": (30_000, 300_000)}
WIDTH, HEADS, RELATIONS = 64, 4, 8

LAYERS: dict[str, Callable[[Any], nn.Module]] = {
    "graph": lambda package: package.GraphConv(WIDTH, WIDTH),
    "gin": lambda package: package.GINConv(_network(), train_eps=True),
    "rgcn": lambda package: package.RGCNConv(WIDTH, WIDTH, RELATIONS),
    "gat": lambda package: package.GATConv(WIDTH, WIDTH // HEADS, heads=HEADS),
}


class _Page:
    """The layers that the page defines."""

    def __init__(self) -> None:
        text = PAGE.read_text(encoding="utf-8")
        blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for block in blocks:
            if re.match("import |class |[A-Z_]+ = ", block):
                exec(compile(block, PAGE.name, "exec", dont_inherit=True), vars(self))


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def pyg() -> Any:
    import torch_geometric.nn

    return torch_geometric.nn


@case("own_layers", tests=("tests/layers/test_own_layers.py",), layer=tuple(LAYERS), graph=tuple(GRAPHS))
def own_layers(setting: Setting, *, layer: str, graph: str) -> Problem:
    """One layer: forward, and forward with the gradients of features and parameters."""
    nodes, edges = (40, 200) if setting.tiny else GRAPHS[graph]
    generator = setting.generator()
    edge_index = torch.randint(nodes, (2, edges), generator=generator, device=setting.device)
    edge_type = torch.randint(RELATIONS, (edges,), generator=generator, device=setting.device)
    x = torch.randn(nodes, WIDTH, generator=generator, device=setting.device)
    more = (edge_type,) if layer == "rgcn" else ()

    def work(package: Any, dtype: torch.dtype = torch.float32) -> Work:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(setting.seed)
            reference = LAYERS[layer](pyg())
            built = LAYERS[layer](package)
        built.load_state_dict(copy.deepcopy(reference.state_dict()))
        built = built.to(setting.device, dtype)
        features = x.to(dtype, copy=True).requires_grad_()

        def forward() -> Tensor:
            return built(features, edge_index, *more)

        learned = dict(sorted(built.named_parameters()))
        return Work(forward, (features, *learned.values()))

    return Problem(
        providers={"insum_nn": lambda: work(_Page()), "pyg": lambda: work(pyg())},
        oracle=lambda: work(pyg(), torch.float64),
        # Sums of some tens of terms, gradients of parameters over all nodes.
        tolerance=1e-4,
        modes=("fwd", "fwdbwd"),
    )

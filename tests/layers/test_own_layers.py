"""The layers of docs/write-your-own-layer.md, as they stand there, against PyTorch Geometric's."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from insum_nn.testing import check_layer
from tests.source_tree import ROOT
from tests.test_docs import python_blocks, run_page

PAGE = ROOT / "docs" / "write-your-own-layer.md"
BLOCKS = python_blocks(PAGE)
MOST_LINES = 30

# Nodes, then sources and targets.
GRAPHS: dict[str, tuple[int, list[int], list[int]]] = {
    "isolated nodes": (6, [1, 4, 1], [4, 1, 2]),
    "self loops": (4, [0, 0, 2, 3, 3], [0, 1, 2, 3, 2]),
    "duplicate edges": (4, [0, 0, 0, 3, 3, 2], [1, 1, 1, 2, 2, 2]),
    "only self loops": (3, [0, 1, 1], [0, 1, 1]),
    "one node": (1, [0], [0]),
    "one node, no edges": (1, [], []),
    "no edges": (5, [], []),
    "one target": (7, [0, 1, 2, 3, 4, 5, 6], [3, 3, 3, 3, 3, 3, 3]),
}
IN, OUT, RELATIONS, HEADS = 5, 6, 3, 2

Kind = Callable[[Any], nn.Module]
KINDS: dict[str, Kind] = {
    "GraphConv": lambda package: package.GraphConv(IN, OUT),
    "GINConv": lambda package: package.GINConv(network(), train_eps=True),
    "RGCNConv": lambda package: package.RGCNConv(IN, OUT, RELATIONS),
    "GATConv": lambda package: package.GATConv(IN, OUT // HEADS, heads=HEADS),
}
# With arguments, as PyTorch Geometric's examples pass them.
VARIANTS: dict[str, Kind] = {
    "GraphConv, mean": lambda package: package.GraphConv(IN, OUT, aggr="mean"),
    "GraphConv, no bias": lambda package: package.GraphConv(IN, OUT, "mean", False),
    "RGCNConv, bases": lambda package: package.RGCNConv(IN, OUT, RELATIONS, num_bases=2),
    "RGCNConv, nothing added": lambda package: package.RGCNConv(IN, OUT, RELATIONS, root_weight=False, bias=False),
    "GATConv, mean of heads": lambda package: package.GATConv(IN, OUT, HEADS, False, 0.1),
    "GATConv, edges as they are": lambda package: package.GATConv(IN, OUT, add_self_loops=False, bias=False),
    "GATConv, dropout": lambda package: package.GATConv(IN, OUT, HEADS, dropout=0.6).eval(),
}


class Page:
    """What the page defines, by name."""

    def __init__(self) -> None:
        names: dict[str, Any] = {"__name__": "page"}
        for line, block, _ in BLOCKS:
            exec(compile("\n" * line + block, PAGE.name, "exec", dont_inherit=True), names)
        vars(self).update(names)


@pytest.fixture(scope="module")
def page() -> Page:
    return Page()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(IN, OUT), nn.Tanh(), nn.Linear(OUT, OUT))


def inputs(name: str, graph: tuple[int, list[int], list[int]]) -> list[Tensor]:
    nodes, sources, targets = graph
    edges = torch.tensor([sources, targets], dtype=torch.int64)
    more = [torch.arange(len(sources)) % RELATIONS] if name.startswith("RGCNConv") else []
    return [torch.randn(nodes, IN), edges, *more]


def random_graph(nodes: int, edges: int) -> tuple[int, list[int], list[int]]:
    return nodes, *torch.randint(nodes, (2, edges)).tolist()


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(PAGE.name, BLOCKS)


@pytest.mark.parametrize("name", KINDS)
def test_each_layer_is_short_and_of_public_names(name: str):
    (block,) = (block for _, block, _ in BLOCKS if f"class {name}(" in block)
    assert len(block[block.index("class ") :].splitlines()) <= MOST_LINES
    # It can be copied: the imports and its own block are all that it needs.
    names: dict[str, Any] = {}
    exec(BLOCKS[0][1] + block, names)
    KINDS[name](SimpleNamespace(**names))
    text = "".join(block for _, block, _ in BLOCKS)
    assert "insum_nn.compiler" not in text
    assert not re.search(r"\._(?!_)", text)


@pytest.mark.parametrize("name", KINDS | VARIANTS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_values_and_gradients_are_the_peer_s(page: Page, name: str, graph: str):
    peer = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(0)
    make = (KINDS | VARIANTS)[name]
    check_layer(make(page), make(peer), inputs(name, GRAPHS[graph]), compiled=False)


def test_dropout_is_of_the_normalised_weights(page: Page):
    """In the mean over many calls a weight is what it is without; a call has nothing of a dropped edge."""
    torch.manual_seed(0)
    layer = vars(page)["GATConv"](IN, OUT, dropout=0.5).double()
    x, edges = inputs("GATConv", GRAPHS["one target"])
    x = x.double()
    many = torch.stack([layer(x, edges) for _ in range(2000)])
    assert len(torch.unique(many[:, 0], dim=0)) == 2  # Its own edge alone: there or not.
    torch.testing.assert_close(many.mean(0), layer.eval()(x, edges), rtol=0, atol=0.1)


def test_arguments_that_are_not_taken_are_refused(page: Page):
    with pytest.raises(TypeError, match="edge_dim"):
        vars(page)["GATConv"](IN, OUT, edge_dim=3)
    with pytest.raises(ValueError, match="'add' or 'mean'"):
        vars(page)["GraphConv"](IN, OUT, "max")


@pytest.mark.parametrize("name", KINDS)
def test_larger_graphs(page: Page, name: str):
    peer = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(1)
    for nodes, edges in ((50, 400), (400, 50)):
        check_layer(KINDS[name](page), KINDS[name](peer), inputs(name, random_graph(nodes, edges)), compiled=False)


@pytest.mark.parametrize("name", KINDS)
def test_one_compiled_layer_serves_graphs_of_all_sizes(page: Page, name: str):
    torch.manual_seed(2)
    layer = KINDS[name](page).double()
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for graph in (random_graph(12, 40), random_graph(9, 70), GRAPHS["one target"], GRAPHS["self loops"]):
        x, *rest = inputs(name, graph)
        x = x.double().requires_grad_()
        found, wanted = compiled(x, *rest), layer(x, *rest)
        torch.testing.assert_close(found, wanted)
        weights = torch.randn_like(wanted)
        leaves = [x, *layer.parameters()]
        for got, want in zip(*(torch.autograd.grad(y, leaves, weights) for y in (found, wanted)), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("graph", ["no edges", "one node"])
def test_compiled_at_odd_sizes(page: Page, name: str, graph: str):
    peer = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(3)
    check_layer(KINDS[name](page), KINDS[name](peer), inputs(name, GRAPHS[graph]), dtypes=[torch.float64])


@pytest.mark.parametrize("name", KINDS)
def test_second_derivatives(page: Page, name: str):
    torch.manual_seed(4)
    layer = KINDS[name](page).double()
    x, *rest = inputs(name, GRAPHS["self loops"])
    x = x.double().requires_grad_()
    torch.autograd.gradgradcheck(lambda x: layer(x, *rest), [x], atol=1e-6)

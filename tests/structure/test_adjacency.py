"""Adjacency matrices sorted by both ends: against dense float64 ones."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from insum_nn.errors import InsumNameError, InsumRangeError, InsumShapeError
from insum_nn.structure.adjacency import Adjacency
from insum_nn.testing.tolerances import assert_matches

FLOWS = ("source_to_target", "target_to_source")


def random_graph(nodes: int, edges: int) -> Tensor:
    return torch.randint(max(nodes - 2, 1), (2, edges), generator=torch.Generator().manual_seed(0))


def dense(row: Tensor, col: Tensor, value: Tensor, nodes: int) -> Tensor:
    return torch.zeros(nodes, nodes, dtype=value.dtype).index_put((row, col), value, accumulate=True)


def expected(
    graph: Tensor,
    weight: Tensor | None,
    nodes: int,
    flow: str = FLOWS[0],
    improved: bool = False,
    add_self_loops: bool = True,
    normalize: bool = True,
) -> Tensor:
    """The dense matrix [receiver, sender] by its definition: of a node's self-loops the last one counts."""
    sends, receives = graph if flow == FLOWS[0] else graph.flip(0)
    values = torch.ones(graph.shape[1], dtype=torch.float64) if weight is None else weight
    if not normalize:
        return dense(receives, sends, values, nodes)
    own = torch.full((nodes,), 2.0 if improved and weight is not None else 1.0, dtype=torch.float64)
    if add_self_loops:
        loops = [int(at) for at in (sends == receives).nonzero()]
        for at in loops:
            own = own.index_put((sends[at],), values[at])
        others = sends != receives
        matrix = dense(receives[others], sends[others], values[others], nodes) + own.diag()
    else:
        matrix = dense(receives, sends, values, nodes)
    degree = matrix.sum(1)
    root = torch.where(degree > 0, degree.clamp(min=1e-300).rsqrt(), 0.0)
    return root[:, None] * matrix * root


@pytest.mark.parametrize(("nodes", "edges"), [(7, 25), (5, 0), (1, 3), (0, 0)])
@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("kwargs", [{}, {"improved": True}, {"add_self_loops": False}, {"normalize": False}], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_the_dense_matrix(nodes: int, edges: int, flow: Any, kwargs: dict[str, Any], weighted: bool):
    graph = random_graph(nodes, edges)
    weight = torch.rand(edges, dtype=torch.float64) if weighted else None
    found = Adjacency.from_edges(graph, weight, nodes, flow=flow, dtype=torch.float64, **kwargs)
    want = expected(graph, weight, nodes, flow, **kwargs)
    assert_matches(dense(found.row, found.col, found.value, nodes), want, dtype=torch.float64, kind="product")
    assert_matches(dense(found.t_col, found.t_row, found.t_value, nodes), want, dtype=torch.float64, kind="product")
    assert found.num_nodes == nodes
    assert found.t_value.equal(found.value[found.order])
    for row, begin in ((found.row, found.begin), (found.t_row, found.t_begin)):
        assert bool((row.diff() >= 0).all())
        assert begin.tolist() == [int((row < node).sum()) for node in range(nodes + 1)]


def test_nodes_are_counted():
    assert Adjacency.from_edges(torch.tensor([[0, 4], [1, 2]])).num_nodes == 5


def test_weights_are_differentiable():
    graph, weight = random_graph(6, 15), torch.rand(15, dtype=torch.float64, requires_grad=True)
    found = Adjacency.from_edges(graph, weight, 6)
    read = dense(found.row, found.col, found.value, 6), expected(graph, weight, 6)
    of_value, want = (torch.autograd.grad(matrix.square().sum(), weight)[0] for matrix in read)
    assert_matches(of_value, want, dtype=torch.float64, kind="gradient")


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("edges", "kwargs", "error"),
    [
        (torch.tensor([[0, 3], [1, 1]]), {"num_nodes": 3}, InsumRangeError),
        (torch.tensor([[0, -1], [1, 1]]), {"num_nodes": 3}, InsumRangeError),
        (torch.tensor([[0, 1]]), {"num_nodes": 3}, InsumShapeError),
        (torch.tensor([[0, 1], [1, 2]]), {"num_nodes": 3, "edge_weight": torch.ones(3)}, InsumShapeError),
        (torch.tensor([[0, 1], [1, 2]]), {"num_nodes": 3, "flow": "up"}, InsumNameError),
    ],
)
def test_errors(normalize: bool, edges: Tensor, kwargs: dict[str, Any], error: type[Exception]):
    with pytest.raises(error):
        Adjacency.from_edges(edges, normalize=normalize, **kwargs)


def test_recorded_with_symbolic_sizes():
    torch._dynamo.reset()

    def build(edges: Tensor, x: Tensor) -> Adjacency:
        return Adjacency.from_edges(edges, num_nodes=x.shape[0])

    compiled = torch.compile(build, fullgraph=True, backend="aot_eager", dynamic=True)
    for nodes, edges in ((9, 30), (31, 70)):
        graph, x = random_graph(nodes, edges), torch.empty(nodes)
        # Without self-loops, which a graph of fixed size keeps with weight 0.
        graph = graph[:, graph[0] != graph[1]]
        for got, want in itertools.zip_longest(compiled(graph, x), build(graph, x)):
            torch.testing.assert_close(got, want)

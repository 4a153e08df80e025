"""Normalised graphs: against dense float64 and against torch_geometric, to the letter."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from insum_nn.errors import InsumDtypeError, InsumNameError, InsumRangeError, InsumShapeError
from insum_nn.structure.gcn_norm import gcn_norm, inverse_root
from insum_nn.structure.graph_entries import with_self_loops
from insum_nn.testing.tolerances import assert_matches

FLOWS = ("source_to_target", "target_to_source")


def random_graph(nodes: int, edges: int, seed: int = 0, isolated: int = 0) -> Tensor:
    """Uniform ends: duplicates and self-loops come by themselves; the last nodes have no edges."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(max(nodes - isolated, 1), (2, edges), generator=generator)


def without_repeated_loops(edges: Tensor) -> Tensor:
    """At most one self-loop a node: of several the peer keeps one that it does not choose."""
    seen: set[int] = set()
    keep = []
    for at, (a, b) in enumerate(edges.t().tolist()):
        if a == b and a in seen:
            continue
        seen |= {a} if a == b else set()
        keep.append(at)
    return edges[:, keep]


def dense(edges: Tensor, weight: Tensor, nodes: int) -> Tensor:
    """[receiver or first end, second end], duplicates summed."""
    matrix = torch.zeros(nodes, nodes, dtype=weight.dtype)
    return matrix.index_put((edges[1], edges[0]), weight, accumulate=True)


CASES = list(itertools.product((False, True), (False, True), FLOWS, (False, True)))


@pytest.mark.parametrize(("improved", "loops", "flow", "weighted"), CASES)
@pytest.mark.parametrize(("nodes", "edges"), [(7, 23), (5, 0), (1, 3), (13, 60)])
def test_equals_the_peer(improved: bool, loops: bool, flow: str, weighted: bool, nodes: int, edges: int):
    peer = pytest.importorskip("torch_geometric.nn.conv.gcn_conv")
    graph = without_repeated_loops(random_graph(nodes, edges, isolated=2))
    weight = torch.rand(graph.shape[1], dtype=torch.float64) - 0.1 if weighted else None
    arguments = (graph, weight, nodes, improved, loops, flow, torch.float64)
    got_edges, got = gcn_norm(*arguments)
    want_edges, want = peer.gcn_norm(*arguments)
    assert got_edges.tolist() == want_edges.tolist()
    assert (got_edges is graph) == (want_edges is graph) == (not loops)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=1e-13, atol=0, equal_nan=True)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("loops", [False, True])
def test_equals_the_formula(loops: bool, flow: str):
    nodes = 9
    graph = without_repeated_loops(random_graph(nodes, 30, isolated=3))
    weight = torch.rand(graph.shape[1], dtype=torch.float64)
    edges, got = gcn_norm(graph, weight, nodes, add_self_loops=loops, flow=flow)
    matrix = dense(graph, weight, nodes)
    if flow == "target_to_source":
        matrix = matrix.t()
    if loops:
        matrix = torch.where(torch.eye(nodes, dtype=bool) & (matrix.diagonal() == 0), 1.0, matrix)
    root = torch.tensor([float(d) ** -0.5 if d else 0.0 for d in matrix.sum(1)], dtype=torch.float64)
    want = root[:, None] * matrix * root
    ends = edges if flow == "source_to_target" else edges.flip(0)
    assert_matches(dense(ends, got, nodes), want, dtype=torch.float64, kind="sum")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("flow", FLOWS)
def test_fixed_size_is_the_same_matrix(flow: str, weighted: bool):
    nodes = 11
    graph = torch.cat([random_graph(nodes, 40), torch.tensor([[3, 3, 5], [3, 3, 5]])], 1)
    weight = torch.rand(graph.shape[1], dtype=torch.float64) if weighted else None
    arguments = (graph, weight, nodes, True, True, flow, torch.float64)
    short, long = gcn_norm(*arguments), gcn_norm(*arguments, fixed_size=True)
    assert long[1].shape == (graph.shape[1] + nodes,)
    assert_matches(dense(*long, nodes), dense(*short, nodes), dtype=torch.float64, kind="sum")


def test_the_last_of_several_loops_counts_and_gets_the_gradient():
    graph = torch.tensor([[0, 0, 1, 0], [0, 1, 0, 0]])
    weight = torch.tensor([5.0, 1.0, 1.0, 3.0], dtype=torch.float64, requires_grad=True)
    assert with_self_loops(graph, 2)[1].tolist() == [1, 2, 3, 4]
    torch.autograd.gradcheck(lambda w: gcn_norm(graph, w, 2)[1], weight)
    (gradient,) = torch.autograd.grad(gcn_norm(graph, weight, 2)[1].square().sum(), weight)
    assert gradient[0] == 0
    assert gradient[3] != 0


@pytest.mark.parametrize(
    ("how", "want", "numbers"),
    [
        ({}, [[0, 1, 0, 1, 2], [1, 0, 0, 1, 2]], [0, 2, 3, 1, 3]),
        ({"kept": False}, [[0, 1, 0, 1, 2], [1, 0, 0, 1, 2]], None),
        ({"fixed_size": True}, [[0, 1, 1, 0, 1, 2], [1, 1, 0, 0, 1, 2]], [0, 1, 2, 3, 1, 3]),
    ],
)
def test_kinds_of_loops(how: dict[str, bool], want: list[list[int]], numbers: list[int] | None):
    edges, number = with_self_loops(torch.tensor([[0, 1, 1], [1, 1, 0]]), 3, **how)
    assert (edges.tolist(), None if number is None else number.tolist()) == (want, numbers)


def test_degrees_of_zero_and_below():
    degree = torch.tensor([0.0, -0.0, 4.0, -1.0, float("inf"), float("nan")], dtype=torch.float64, requires_grad=True)
    root = inverse_root(degree)
    assert root[:3].tolist() == [0.0, 0.0, 0.5]
    assert root[3:].isnan().tolist() == [True, False, True]
    (gradient,) = torch.autograd.grad(root[:3].sum(), degree)
    assert gradient[:3].tolist() == [0.0, 0.0, -0.0625]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_half_degrees_are_counted_in_float32(dtype: torch.dtype, weighted: bool):
    """Node 0 sends 5,000 edges to itself and to node 1: a half type counts to 2,048, or 256."""
    graph = torch.zeros(2, 5000, dtype=torch.int64)
    graph[1, ::2] = 1
    weight = torch.full((5000,), 1.0, dtype=dtype) if weighted else None
    edges, got = gcn_norm(graph, weight, 2, add_self_loops=False, dtype=dtype)
    assert edges.tolist() == graph.tolist()
    degree = torch.tensor([2500.0, 2500.0], dtype=torch.float64)
    want = degree[graph[0]] ** -0.5 * degree[graph[1]] ** -0.5
    assert_matches(got, want, dtype=dtype, kind="product")


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("loops", [False, True])
def test_gradients(loops: bool, flow: str):
    graph = random_graph(6, 17)
    weight = torch.rand(17, dtype=torch.float64).add(0.2).requires_grad_()

    def run(weight: Tensor) -> Tensor:
        return gcn_norm(graph, weight, 6, True, loops, flow)[1]

    torch.autograd.gradcheck(run, weight)
    torch.autograd.gradgradcheck(run, weight)


@pytest.mark.parametrize(
    ("edges", "weight", "error", "text"),
    [
        (torch.zeros(2, 3), None, InsumDtypeError, "must hold integers, got torch.float32"),
        (torch.zeros(2, 3, dtype=bool), None, InsumDtypeError, "must hold integers, got torch.bool"),
        (torch.zeros(3, 2, dtype=torch.int64), None, InsumShapeError, "edge_index.t()"),
        (torch.zeros(2, dtype=torch.int64), None, InsumShapeError, "must have two rows"),
        (torch.tensor([[0, -1], [1, 0]]), None, InsumRangeError, "negative indices"),
        (torch.tensor([[0, 1], [1, 4]]), None, InsumRangeError, "larger than 3"),
        (torch.tensor([[0], [1]]), torch.ones(2), InsumShapeError, "one number per edge"),
        (torch.tensor([[0], [1]]), torch.ones(1, 2), InsumShapeError, "one number per edge"),
        (torch.tensor([[0], [1]]), torch.ones(1, dtype=torch.int64), InsumDtypeError, "edge_weight.float()"),
    ],
)
def test_bad_input(edges: Tensor, weight: Tensor | None, error: type[Exception], text: str):
    with pytest.raises(error, match=text.replace("(", r"\(").replace(")", r"\)")):
        gcn_norm(edges, weight, 4)


def test_unknown_flow():
    with pytest.raises(InsumNameError, match="'flow' is 'up'"):
        gcn_norm(torch.zeros(2, 1, dtype=torch.int64), None, 1, flow="up")


def test_int32_edges_and_column_weights():
    graph = random_graph(5, 12)
    weight = torch.rand(12, 1, dtype=torch.float64)
    assert_matches(
        gcn_norm(graph.int(), weight, 5)[1], gcn_norm(graph, weight[:, 0], 5)[1], dtype=torch.float64, kind="copy"
    )


def test_on_a_device(device: torch.device):
    graph = torch.cat([random_graph(50, 400), torch.tensor([[3, 3, 5], [3, 3, 5]])], 1)
    weight = torch.rand(403, dtype=torch.float64)
    want = gcn_norm(graph, weight, 50)
    got = gcn_norm(graph.to(device), weight.to(device), 50)
    assert got[0].tolist() == want[0].tolist()
    assert_matches(got[1], want[1], dtype=torch.float64, kind="sum")

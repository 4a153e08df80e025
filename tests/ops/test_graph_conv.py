"""Products with a graph's matrix: dense oracles, every order of gradients, what is remembered and for how long."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from insum_nn import sorted_rows
from insum_nn.compiler.api import Program, built_program
from insum_nn.compiler.options import Options
from insum_nn.errors import InsumDeviceError, InsumDtypeError, InsumRangeError, InsumShapeError
from insum_nn.ops import graph_matrix as matrices
from insum_nn.ops.graph_conv import graph_conv
from insum_nn.ops.graph_matrix import GraphMatrix, Recipe, clear_graphs, graph_matrix, graph_product
from insum_nn.sorted_rows import sort_pairs
from insum_nn.structure.graph_entries import edge_entries
from insum_nn.tensor_cache import TensorCache
from insum_nn.testing.tolerances import assert_matches

PLAIN = Recipe(normalize=False, loops="none")


def skewed_graph(nodes: int, edges: int, seed: int = 0) -> Tensor:
    """A third of the edges meet in node 0, the last two nodes have none; duplicates and self-loops are there."""
    generator = torch.Generator().manual_seed(seed)
    graph = torch.randint(max(nodes - 2, 1), (2, edges), generator=generator)
    graph[1, ::3] = 0
    graph[0, 1::7] = 0
    return graph


def matrix_of(graph: GraphMatrix, values: Tensor) -> Tensor:
    zeros = values.new_zeros(graph.num_nodes, graph.num_nodes)
    return zeros.index_put((graph.entries.row, graph.entries.col), values, accumulate=True)


def make(nodes: int, edges: int) -> GraphMatrix:
    return GraphMatrix.of_entries(edge_entries(skewed_graph(nodes, edges), nodes, loops="none"))


@pytest.fixture(params=["as on a CPU", "as on a GPU"])
def index_dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Entries are int64 on a CPU, for torch's products, and int32 elsewhere."""
    if request.param == "as on a GPU":
        for where in (matrices, sorted_rows):
            monkeypatch.setattr(where, "entry_dtype", lambda device, most: torch.int32)


@pytest.mark.usefixtures("index_dtype")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("nodes", "edges", "width"), [(9, 31, 3), (4, 0, 2), (1, 5, 1), (30, 200, 7), (3, 4, 0)])
def test_product(transposed: bool, nodes: int, edges: int, width: int):
    graph = make(nodes, edges)
    values, x = torch.randn(edges, dtype=torch.float64), torch.randn(nodes, width, dtype=torch.float64)
    matrix = matrix_of(graph, values)
    want = (matrix.t() if transposed else matrix) @ x
    assert_matches(graph_product(graph, values, x, transposed=transposed), want, dtype=torch.float64, kind="sum")


@pytest.mark.usefixtures("index_dtype")
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_every_order(transposed: bool):
    graph = make(6, 15)
    values = torch.randn(15, dtype=torch.float64, requires_grad=True)
    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)

    def run(values: Tensor, x: Tensor) -> Tensor:
        return graph_product(graph, values, x, transposed=transposed)

    torch.autograd.gradcheck(run, (values, x))
    torch.autograd.gradgradcheck(run, (values, x), fast_mode=True)

    def first(x: Tensor) -> Tensor:
        return torch.autograd.grad(run(values, x).pow(3).sum(), values, create_graph=True)[0]

    torch.autograd.gradgradcheck(first, x, fast_mode=True)


@pytest.mark.parametrize(("nodes", "edges"), [(20, 90), (3, 40), (5, 0), (1, 3)])
def test_gradient_of_values_equals_the_dense_one(nodes: int, edges: int):
    graph = make(nodes, edges)
    values = torch.randn(edges, dtype=torch.float64, requires_grad=True)
    x = torch.randn(nodes, 5, dtype=torch.float64, requires_grad=True)
    seed = torch.randn(nodes, 5, dtype=torch.float64)
    got = torch.autograd.grad(graph_product(graph, values, x), (values, x), seed)
    want = torch.autograd.grad(matrix_of(graph, values) @ x, (values, x), seed)
    for a, b in zip(got, want, strict=True):
        assert_matches(a, b, dtype=torch.float64, kind="gradient")


def largest_allocation(work: Callable[[], object]) -> int:
    """Bytes of the largest piece of memory that one operation asks for."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    return max(event.self_cpu_memory_usage for event in profile.events() or ())


@pytest.mark.c
def test_no_tensor_of_edges_by_features():
    """Nothing the size of a message per edge is made, forwards or backwards, in gradients of values or second ones."""
    nodes, edges, width = 200, 6000, 64
    graph = make(nodes, edges)
    values = torch.rand(edges, dtype=torch.float64, requires_grad=True)
    x = torch.rand(nodes, width, dtype=torch.float64, requires_grad=True)

    def work() -> None:
        first = torch.autograd.grad(graph_product(graph, values, x).square().sum(), (values, x), create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in first), (values, x))

    messages = edges * width * 8
    assert largest_allocation(lambda: values[:, None] * x[graph.entries.col]) >= messages
    assert largest_allocation(work) < messages / 2


@pytest.mark.parametrize("extent", [1, 7, 1 << 20, 1 << 31])
def test_entries_are_sorted(extent: int):
    """Packed into one integer, and for extents that do not fit by two sorts."""
    row, col = torch.randint(extent, (2, 40)) if extent < 1 << 31 else (1 << 30) + torch.randint(5, (2, 40))
    row[::3], col[::2] = row[0], col[0]
    first, second, order = sort_pairs(row, col, extent)
    want = sorted(range(40), key=lambda at: (int(row[at]), int(col[at]), at))
    assert order.tolist() == want
    assert torch.equal(first, row[order])
    assert torch.equal(second, col[order])
    assert sort_pairs(row[:0], col[:0], extent)[2].shape == (0,)


# The whole operator.


def dense_matrix(edges: Tensor, weight: Tensor | None, nodes: int, recipe: Recipe) -> Tensor:
    """[receiver, sender] in float64, edge by edge as torch_geometric defines it; uses nothing of the package."""
    fill = 1.0 if weight is None else recipe.fill
    loop_weight: dict[int, Tensor | float] = dict.fromkeys(range(nodes), fill)
    entries: list[tuple[int, int, Tensor | float]] = []
    for edge, (source, target) in enumerate(edges.t().tolist()):
        one = 1.0 if weight is None else weight[edge]
        receiver, sender = (target, source) if recipe.flow == "source_to_target" else (source, target)
        if source != target or recipe.loops in ("none", "more"):
            entries.append((receiver, sender, one))
        elif recipe.loops == "remaining":
            loop_weight[source] = one
    if recipe.loops != "none":
        entries += [(node, node, one) for node, one in loop_weight.items()]
    matrix = torch.zeros(nodes, nodes, dtype=torch.float64)
    if entries:
        receivers, senders, ones = zip(*entries, strict=True)
        values = torch.stack([torch.as_tensor(one, dtype=torch.float64) for one in ones])
        matrix = matrix.index_put((torch.tensor(receivers), torch.tensor(senders)), values, accumulate=True)
    if not recipe.normalize:
        return matrix
    degree = matrix.sum(1)
    root = torch.where(degree == 0, 0.0, torch.where(degree == 0, 1.0, degree) ** -0.5)
    return root[:, None] * matrix * root


def oracle(x: Tensor, edges: Tensor, weight: Tensor | None, recipe: Recipe) -> Tensor:
    return dense_matrix(edges, weight, x.shape[0], recipe) @ x


RECIPES = [
    Recipe(),
    PLAIN,
    Recipe(loops="none"),
    Recipe(fill=2.0),
    Recipe(flow="target_to_source"),
    Recipe(normalize=False, loops="none", flow="target_to_source"),
    Recipe(loops="replaced", fill=3.0),
    Recipe(normalize=False, loops="more", fill=0.5, flow="target_to_source"),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_operator(recipe: Recipe, weighted: bool):
    edges = skewed_graph(12, 50)
    x = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(50, dtype=torch.float64, requires_grad=True) if weighted else None
    inputs = (x, weight) if weighted else (x,)
    got, want = graph_conv(x, edges, weight, recipe=recipe), oracle(x, edges, weight, recipe)
    assert_matches(got, want, dtype=torch.float64, kind="sum")
    firsts = [torch.autograd.grad(out.square().sum(), inputs, create_graph=True) for out in (got, want)]
    for a, b in zip(firsts[0], firsts[1], strict=True):
        assert_matches(a, b, dtype=torch.float64, kind="gradient")
    seconds = [torch.autograd.grad(sum(g.square().sum() for g in first), inputs) for first in firsts]
    for a, b in zip(seconds[0], seconds[1], strict=True):
        assert_matches(a, b, dtype=torch.float64, kind="second")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_registered_operator(recipe: Recipe, weighted: bool):
    edges = skewed_graph(7, 20)
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(20, dtype=torch.float64, requires_grad=True) if weighted else None
    inputs = (x, weight) if weighted else (x,)
    rest = (recipe.normalize, recipe.loops, recipe.fill, recipe.flow, Options().to_json())
    for transposed in (False, True):
        arguments = (x, edges, weight, *rest, transposed)
        torch.library.opcheck(torch.ops.insum_nn.graph_conv_call.default, arguments)
        got = torch.ops.insum_nn.graph_conv_call(*arguments)
        matrix = dense_matrix(edges, weight, 7, recipe)
        want = (matrix.t() if transposed else matrix) @ x
        assert_matches(got, want, dtype=torch.float64, kind="sum")
        pairs = [torch.autograd.grad(out.square().sum(), inputs) for out in (got, want)]
        for a, b in zip(pairs[0], pairs[1], strict=True):
            assert_matches(a, b, dtype=torch.float64, kind="gradient")


def test_transforms():
    edges = skewed_graph(6, 18)
    x, weight = torch.randn(3, 6, 2, dtype=torch.float64), torch.rand(18, dtype=torch.float64)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return graph_conv(x, edges, weight)

    want = torch.stack([run(one, weight) for one in x])
    assert_matches(torch.func.vmap(run, (0, None))(x, weight), want, dtype=torch.float64, kind="sum")
    got = torch.func.jacrev(run, argnums=1)(x[0], weight)
    torch.testing.assert_close(got, torch.autograd.functional.jacobian(lambda w: run(x[0], w), weight))
    torch.testing.assert_close(torch.func.jacfwd(run, argnums=1)(x[0], weight), got)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weighted", [False, True])
def test_precision(dtype: torch.dtype, weighted: bool):
    """Node 0 receives 3,000 edges: more than a sum in a half type can count to."""
    edges = skewed_graph(40, 9000)
    x = torch.randn(40, 16).to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    weight = torch.rand(9000).to(dtype) if weighted else None
    got = graph_conv(x, edges, weight)
    want = oracle(exact, edges, None if weight is None else weight.double(), Recipe())
    seed = torch.randn(40, 16).to(dtype)
    gradients = torch.autograd.grad(got, x, seed)[0], torch.autograd.grad(want, exact, seed.double())[0]
    for ours, theirs in ((got, want), gradients):
        # Row by row: a wrong degree of one node must not hide behind the size of the others.
        for row in range(40):
            scale = max(float(theirs[row].detach().abs().max()), 0.05 * float(theirs.detach().abs().max()))
            assert_matches(ours[row], theirs[row], dtype=dtype, kind="gradient", scale=scale)


def test_promotion_and_autocast():
    edges = skewed_graph(8, 20)
    x, weight = torch.randn(8, 3), torch.rand(20, dtype=torch.float64)
    assert graph_conv(x, edges, weight).dtype == torch.float64
    assert graph_conv(x.half(), edges, weight.float()).dtype == torch.float32
    assert graph_conv(x, edges, torch.arange(20), recipe=PLAIN).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        got = graph_conv(x, edges, weight.float())
    assert_matches(got, oracle(x.double(), edges, weight, Recipe()), dtype=torch.bfloat16, kind="gradient")


def test_nan_stays():
    edges = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
    weight = torch.tensor([1.0, float("nan"), 1.0, 1.0])
    out = graph_conv(torch.ones(4, 1), edges, weight)
    assert out.squeeze(1).isnan().tolist() == [True, True, False, False]
    out = graph_conv(torch.tensor([[1.0], [float("nan")], [1.0], [1.0]]), edges)
    assert out.squeeze(1).isnan().tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("edges", "weight", "error"),
    [
        (torch.tensor([[0, 9], [1, 0]]), None, InsumRangeError),
        (torch.tensor([[0, -1], [1, 0]]), None, InsumRangeError),
        (torch.zeros(3, 2, dtype=torch.int64), None, InsumShapeError),
        (torch.zeros(2, 2), None, InsumDtypeError),
        (torch.zeros(2, 2, dtype=torch.int64), torch.ones(3), InsumShapeError),
        (torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, dtype=torch.int64), InsumDtypeError),
        (torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, device="meta"), InsumDeviceError),
    ],
)
def test_bad_input(edges: Tensor, weight: Tensor | None, error: type[Exception]):
    with pytest.raises(error):
        graph_conv(torch.ones(3, 2), edges, weight)


# What is remembered.


def test_nothing_remembered_serves_another_call():
    """One edge list and one tensor of weights, under every combination of what else decides the result, twice."""
    edges, weight = skewed_graph(9, 40), torch.rand(40)
    recipes = [
        Recipe(normalize, loops, fill, flow)
        for normalize in (True, False)
        for loops in ("none", "remaining", "replaced", "more")
        for fill in (1.0, 2.0)
        for flow in ("source_to_target", "target_to_source")
    ]
    clear_graphs()
    for recipe in recipes * 2:
        for nodes, dtype, given in itertools.product((9, 11), (torch.float64, torch.float32), (weight, None)):
            for width in (2, 3):
                x, bias = torch.randn(nodes, width, dtype=dtype), torch.randn(width, dtype=dtype)
                want = oracle(x.double(), edges, None if given is None else given.double(), recipe)
                got = graph_conv(x, edges, given, recipe=recipe)
                assert_matches(got, want, dtype=dtype, kind="gradient")
                got = graph_conv(x, edges, given, bias, recipe=recipe)
                assert_matches(got, want + bias.double(), dtype=dtype, kind="gradient")


def test_products_of_a_graph_have_the_options_that_they_are_asked_for(monkeypatch: pytest.MonkeyPatch):
    made: list[Program] = []
    monkeypatch.setattr(matrices, "built_program", lambda *a: made.append(built_program(*a)) or made[-1])
    edges, x = skewed_graph(5, 9), torch.randn(5, 2)
    chosen = [Options(deterministic=True), Options(order="left"), Options(order="left", validate=True)]
    for options in chosen * 2:
        graph_conv(x, edges, options=options)
    assert [each.options for each in made] == chosen * 2
    assert made[:3] == made[3:], "a program is made once"


def test_a_graph_is_built_once(monkeypatch: pytest.MonkeyPatch):
    clear_graphs()
    built: list[int] = []
    original = GraphMatrix.__init__

    def counted(self, *args, **kwargs):
        built.append(1)
        original(self, *args, **kwargs)

    monkeypatch.setattr(GraphMatrix, "__init__", counted)
    edges, x = skewed_graph(5, 9), torch.randn(5, 2)
    for _ in range(3):
        graph_conv(x, edges)
    assert len(built) == 1
    graph_conv(x, edges, recipe=PLAIN)
    assert len(built) == 2
    graph_conv(x, edges.clone())
    assert len(built) == 3
    before = graph_conv(x, edges, recipe=PLAIN)
    edges[1] = edges[1].roll(1)
    after = graph_conv(x, edges, recipe=PLAIN)
    assert len(built) == 4
    assert not torch.equal(before, after)


def test_weights_written_to_are_read_again():
    edges, x, weight = skewed_graph(5, 9), torch.randn(5, 2, dtype=torch.float64), torch.rand(9, dtype=torch.float64)
    graph_conv(x, edges, weight)
    weight.mul_(torch.arange(1, 10))
    assert_matches(graph_conv(x, edges, weight), oracle(x, edges, weight, Recipe()), dtype=torch.float64, kind="sum")


def test_graphs_die_with_their_edges():
    clear_graphs()
    edges, weight, x = skewed_graph(5, 9), torch.rand(9), torch.randn(5, 2)
    graph_conv(x, edges, weight)
    assert len(matrices._graphs) == 1
    remembered = graph_matrix(edges, 5, Recipe()).remembered
    assert len(remembered) == 1
    del weight
    gc.collect()
    assert len(remembered) == 0
    del edges, remembered
    gc.collect()
    assert len(matrices._graphs) == 0


def test_the_cache_is_bounded():
    cache: TensorCache[object] = TensorCache(limit=2)
    tensors = [torch.zeros(1) for _ in range(3)]
    made = [cache.get([t], None, object) for t in tensors]
    assert len(cache) == 2
    assert cache.get([tensors[2]], None, object) is made[2]
    assert cache.get([tensors[0]], None, object) is not made[0]


def test_inference_mode():
    edges, x, weight = skewed_graph(5, 9), torch.randn(5, 2), torch.rand(9)
    want = graph_conv(x, edges, weight)
    clear_graphs()
    with torch.inference_mode():
        assert torch.equal(graph_conv(x, edges, weight), want)
        assert torch.equal(graph_conv(x.clone(), edges.clone(), weight.clone()), want)
    # What was remembered there serves training.
    learned = x.clone().requires_grad_()
    graph_conv(learned, edges, weight).sum().backward()
    assert learned.grad is not None


@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", [Options(), Options(deterministic=True)], ids=["default", "deterministic"])
def test_on_a_gpu(gpu: torch.device, weighted: bool, options: Options):
    edges = skewed_graph(300, 5000)
    x = torch.randn(300, 33, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(5000, dtype=torch.float64, requires_grad=True) if weighted else None
    inputs = (x, weight) if weighted else (x,)
    want = oracle(x, edges, weight, Recipe())
    ours = [t.detach().to(gpu, torch.float32).requires_grad_() for t in inputs]
    on_gpu = edges.to(gpu)
    got = graph_conv(ours[0], on_gpu, ours[1] if weighted else None, options=options)
    assert_matches(got, want, dtype=torch.float32, kind="gradient")
    firsts = [
        torch.autograd.grad(got.square().sum(), ours, create_graph=True),
        torch.autograd.grad(want.square().sum(), inputs, create_graph=True),
    ]
    for a, b in zip(firsts[0], firsts[1], strict=True):
        assert_matches(a, b, dtype=torch.float32, kind="second")
    seconds = [
        torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        for first, leaves in zip(firsts, (ours, inputs), strict=True)
    ]
    for a, b in zip(seconds[0], seconds[1], strict=True):
        assert_matches(a, b, dtype=torch.float32, kind="second")


@pytest.mark.gpu
def test_deterministic_on_a_gpu(gpu: torch.device):
    edges = skewed_graph(200, 20000).to(gpu)
    x = torch.randn(200, 64, device=gpu, requires_grad=True)
    weight = torch.rand(20000, device=gpu, requires_grad=True)

    def run() -> list[Tensor]:
        out = graph_conv(x, edges, weight, options=Options(deterministic=True))
        return [out, *torch.autograd.grad(out.square().sum(), (x, weight))]

    first = run()
    for _ in range(5):
        for a, b in zip(first, run(), strict=True):
            assert torch.equal(a, b)

"""Launches of generated kernels in traced graphs, as calls on a GPU are written, run by Triton's interpreter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor, fx
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget

import insum_nn
from insum_nn.compiler.runtime import inline as inline_module
from insum_nn.facts import IndexFacts
from insum_nn.layers import GCNConv, TensorProductConv
from insum_nn.ops.adjacency_product import adjacency_product
from insum_nn.structure.adjacency import Adjacency
from tests.compiler.interpreted import interpreter
from tests.compiler.traced_kernels import Interpreted, launches
from tests.pretended_gpu import H200

__all__ = ["interpreter"]

# To the tracer a CPU is a device like another; whether kernels run there is asked when the graph runs.
GENERATED = insum_nn.Options(backend="triton")


def record(run: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """What AOTAutograd and `torch.export` record of a function."""
    functional = dispatch_functionalize(run)
    return make_fx(functional, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Callable[..., fx.GraphModule]:
    """Traces a function as if there were a GPU."""
    monkeypatch.setattr(inline_module, "require_triton", lambda _: None)
    # torch asks for which device it compiles a kernel, to find what that writes.
    driver = SimpleNamespace(get_current_target=lambda: GPUTarget(*H200))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return record


def spmm(row: Tensor, col: Tensor, val: Tensor, dense: Tensor, rows: int, options: insum_nn.Options) -> Tensor:
    facts = {"Row": IndexFacts(masked=True), "Col": IndexFacts(masked=True)}
    tensors = {"Row": row, "Col": col, "Val": val, "B": dense}
    program = insum_nn.compile("C[Row[p],n] += Val[p] * B[Col[p],n]", facts=facts, options=options)
    return program(tensors=tensors, out_shape=(rows, None))


def matrix(rows: int, columns: int, entries: int, width: int) -> tuple[Tensor, ...]:
    row, col = torch.randint(-1, rows, (entries,)), torch.randint(-1, columns, (entries,))
    return row, col, torch.randn(entries), torch.randn(columns, width)


def gradients(run: Callable[..., Tensor], order: int) -> Callable[..., Sequence[Tensor]]:
    """The result, its gradients, and theirs, with respect to floating-point inputs."""

    def derived(*inputs: Tensor) -> list[Tensor]:
        inputs = tuple(x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs)
        leaves = [x for x in inputs if x.is_floating_point()]
        found = [run(*inputs)]
        for _ in range(order):
            total = found[-1].square().sum() if len(found) == 1 else sum(x.square().sum() for x in found[1:])
            found += torch.autograd.grad(total, leaves, create_graph=True)
        return [x.detach() for x in found]

    return derived


@pytest.mark.parametrize("order", [1, 2])
def test_a_product_and_its_gradients_are_launches(
    traced: Callable[..., fx.GraphModule], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, order: int
):
    torch.manual_seed(0)

    def product(row: Tensor, col: Tensor, val: Tensor, dense: Tensor, like: Tensor, options: Any = GENERATED) -> Tensor:
        return spmm(row, col, val, dense, like.shape[0], options)

    graph = traced(gradients(product, order), *matrix(40, 30, 200, 24), torch.arange(40))
    assert len(launches(graph)) >= 3
    assert not [n for n in graph.graph.nodes if "insum_nn" in str(n.target)]
    sizes = ((40, 30, 200, 24), (7, 50, 3, 24), (65, 4, 131, 24))
    inputs = [(*matrix(*size), torch.arange(size[0])) for size in sizes]

    def plain(*inputs: Tensor) -> Tensor:
        return product(*inputs, options=insum_nn.Options())

    wants = [gradients(plain, order)(*each) for each in inputs]
    ranges = request.getfixturevalue("interpreter")
    for each, want in zip(inputs, wants, strict=True):
        got = Interpreted(graph, ranges).run(*each)
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


def test_a_recorded_gradient_is_differentiated_again(
    traced: Callable[..., fx.GraphModule], request: pytest.FixtureRequest
):
    """As a potential with forces in its loss is compiled: `make_fx` for the forces, AOTAutograd for the loss."""
    torch.manual_seed(0)

    def inner(options: Any) -> Callable[..., tuple[Tensor, ...]]:
        def run(row: Tensor, col: Tensor, val: Tensor, dense: Tensor, like: Tensor) -> tuple[Tensor, ...]:
            out = spmm(row, col, val, dense, like.shape[0], options)
            return out, *torch.autograd.grad(out.square().sum(), (val, dense), create_graph=True)

        return run

    def loss(run: Callable[..., Any]) -> Callable[..., Sequence[Tensor]]:
        return gradients(lambda *inputs: sum(x.square().sum() for x in run(*inputs)), 1)

    row, col, val, dense = matrix(40, 30, 200, 24)
    leaves = row, col, val.requires_grad_(), dense.requires_grad_(), torch.arange(40)
    once = make_fx(inner(GENERATED), tracing_mode="symbolic", _allow_non_fake_inputs=True)(*leaves)
    assert not launches(once)
    graph = traced(loss(once), *leaves)
    # A product, its two gradients, and theirs.
    assert len(launches(graph)) >= 5
    assert not [n for n in graph.graph.nodes if "insum_nn" in str(n.target)]
    inputs = [(*matrix(*size), torch.arange(size[0])) for size in ((40, 30, 200, 24), (7, 50, 3, 24))]
    wants = [loss(inner(insum_nn.Options()))(*each) for each in inputs]
    ranges = request.getfixturevalue("interpreter")
    for each, want in zip(inputs, wants, strict=True):
        torch.testing.assert_close(Interpreted(graph, ranges).run(*each), want, rtol=2e-3, atol=2e-3)


def test_two_graph_convolutions_in_a_training_step(
    traced: Callable[..., fx.GraphModule], request: pytest.FixtureRequest
):
    torch.manual_seed(0)
    layers = [GCNConv(6, 20, options=GENERATED), GCNConv(20, 3, options=GENERATED)]
    weights = [p.detach() for layer in layers for p in layer.parameters()]

    def model(x: Tensor, *rest: Tensor) -> Tensor:
        *values, edges = rest
        first = torch.func.functional_call(layers[0], {"bias": values[0], "lin.weight": values[1]}, (x, edges))
        return torch.func.functional_call(
            layers[1], {"bias": values[2], "lin.weight": values[3]}, (first.relu(), edges)
        )

    def draw(nodes: int, edges: int) -> tuple[Tensor, ...]:
        return torch.randn(nodes, 6), *weights, torch.randint(nodes, (2, edges))

    graph = traced(gradients(model, 1), *draw(30, 90))
    # A product forward and one backward, in each layer.
    assert len(launches(graph)) == 4
    inputs = [draw(*sizes) for sizes in ((30, 90), (5, 3), (61, 400))]
    for layer in layers:
        layer.options = insum_nn.Options()
    wants = [gradients(model, 1)(*each) for each in inputs]
    ranges = request.getfixturevalue("interpreter")
    for each, want in zip(inputs, wants, strict=True):
        torch.testing.assert_close(Interpreted(graph, ranges).run(*each), want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_prepared_graph_is_an_input_of_launches(
    traced: Callable[..., fx.GraphModule], request: pytest.FixtureRequest, dtype: torch.dtype
):
    torch.manual_seed(0)

    def product(options: insum_nn.Options) -> Callable[..., Tensor]:
        def run(*inputs: Tensor) -> Tensor:
            x, bias, *matrix = inputs
            # The weights have gradients, and those transposed before are not read.
            matrix.insert(Adjacency._fields.index("t_value"), matrix[2].detach())
            return adjacency_product(x, Adjacency(*matrix), bias, options=options)

        return run

    def draw(nodes: int, edges: int) -> tuple[Tensor, ...]:
        matrix = Adjacency.from_edges(torch.randint(nodes, (2, edges)), num_nodes=nodes)
        cast = [each if each.is_floating_point() else each.to(dtype) for each in matrix if each is not matrix.t_value]
        return torch.randn(nodes, 20), torch.randn(20), *cast

    graph = traced(gradients(product(GENERATED), 1), *draw(30, 90))
    # The product, and its gradients by features and by weights of edges.
    assert len(launches(graph)) >= 3
    assert not [node for node in graph.graph.nodes if "sort" in str(node.target)]
    ranges = request.getfixturevalue("interpreter")
    for sizes in ((30, 90), (5, 3), (61, 400)):
        inputs = draw(*sizes)
        want = gradients(product(insum_nn.Options()), 1)(*inputs)
        got = Interpreted(graph, ranges).run(*inputs)
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


def test_no_two_launches_write_to_the_same_memory(traced: Callable[..., fx.GraphModule]):
    """Else Inductor copies memory that holds nothing before every launch."""
    layers = [GCNConv(8, 8, options=GENERATED) for _ in range(3)]

    def model(x: Tensor, edges: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x, edges).relu()
        return x

    graph = traced(gradients(model, 1), torch.randn(30, 8), torch.randint(30, (2, 90)))
    # As AOTAutograd does to what it records.
    merged = fx_graph_cse(graph.graph)
    written = [node.kwargs["kwargs"]["out"] for node in launches(fx.GraphModule(graph, merged))]
    assert len(set(written)) == len(written) == 6


def test_what_no_kernel_computes_is_made_of_operations_of_torch(traced: Callable[..., fx.GraphModule]):
    def largest(row: Tensor, val: Tensor, like: Tensor) -> Tensor:
        tensors = {"Row": row, "Val": val}
        shape = (like.shape[0], None)
        return insum_nn.insum("C[Row[p],n] max= Val[p,n]", tensors=tensors, out_shape=shape, options=GENERATED)

    row, val = torch.tensor([0, 2, 0]), torch.randn(3, 4)
    graph = traced(largest, row, val, torch.empty(4))
    assert not launches(graph)
    torch.testing.assert_close(graph(row, val, torch.empty(4))[[0, 2]], torch.stack([val[::2].amax(0), val[1]]))


def test_a_convolution_of_tensor_products_and_its_gradients_are_launches(
    traced: Callable[..., fx.GraphModule], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    """Static tables are written out while torch traces: no operation on them enters the graph."""
    torch.manual_seed(0)
    paths = [(a, b, c, "uvu", True) for a, b, c in ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0))]
    irreps = "4x0e + 4x1o", "0e + 1o", "4x0e + 4x1o"
    plain = TensorProductConv(*irreps, paths, shared_weights=False)
    generated = TensorProductConv(*irreps, paths, shared_weights=False, options=GENERATED)

    def potential(layer: TensorProductConv) -> Callable[..., Tensor]:
        return lambda x, y, w, edges: layer(x, y, w, edges[1], edges[0])

    def draw(nodes: int, edges: int) -> tuple[Tensor, ...]:
        weight = torch.randn(edges, plain.weight_numel)
        return torch.randn(nodes, 16), torch.randn(edges, 4), weight, torch.randint(nodes, (2, edges))

    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(sys.modules["insum_nn.ops.tensor_product_roles"], "paths_are_products", lambda _: False)
        graph = traced(gradients(potential(generated), 2), *draw(9, 40))
    assert len(launches(graph)) >= 10
    assert not [node for node in graph.graph.nodes if "insum_nn" in str(node.target)]
    inputs = [draw(*sizes) for sizes in ((23, 11), (4, 40))]
    wants = [gradients(potential(plain), 2)(*each) for each in inputs]
    ranges = request.getfixturevalue("interpreter")
    for each, want in zip(inputs, wants, strict=True):
        torch.testing.assert_close(Interpreted(graph, ranges).run(*each), want, rtol=2e-4, atol=5e-3)

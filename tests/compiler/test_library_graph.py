"""Graphs of library calls: every pass leaves what the reference interpreter computes, and the printed calls do too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor

from insum_nn.compiler.codegen.aten import print_aten
from insum_nn.compiler.ir.build import build
from insum_nn.compiler.ir.graph import Graph, Library, Step, store_of
from insum_nn.compiler.ir.nodes import Index, Node, Store
from insum_nn.compiler.ir.printer import show
from insum_nn.compiler.ir.verify import verify_graph
from insum_nn.compiler.lang.bind import Bound, Extents, bind, layout_of
from insum_nn.compiler.lang.derivative import derivatives
from insum_nn.compiler.lang.interpreter import interpret
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.lang.shapes import resolve_extents
from insum_nn.compiler.options import Options
from insum_nn.compiler.passes.library.library_graph import LibraryGraph, library_graph
from insum_nn.compiler.passes.library.steps import Target
from tests.compiler.generated_cases import CASES
from tests.compiler.ir_interpreter import interpret_graph
from tests.compiler.test_loop_nest import canonical, drawn_program

# Graphs are written without a device.
GPU = "cuda"
# The interpreter of the IR runs so many terms in a second or less.
FEW_TERMS = 3000
TARGETS = (
    *(Target(device, compiled) for device in ("cpu", GPU) for compiled in (False, True)),
    Target("cpu", compiled=True, bags=True),
)


def graph_of(bound: Bound, sizes: Mapping[str, int], target: Target) -> LibraryGraph:
    made = library_graph(build(bound), sizes, target)
    verify_graph(made.graph)
    return made


def check(bound: Bound, tensors: Mapping[str, Tensor], extents: Extents, initial: Tensor | None = None) -> None:
    """Both the graph and the calls that it is printed as give the reference's numbers."""
    want = interpret(bound.statement, tensors, extents, initial, drop_outside=bound.drop_outside)
    memory, sizes = canonical(bound, tensors, extents, initial)
    interpreted = set[Graph]()
    for target in TARGETS:
        graph = graph_of(bound, sizes, target).graph
        if math.prod(extents.indices) <= FEW_TERMS and graph not in interpreted:
            torch.testing.assert_close(interpret_graph(graph, memory, sizes)[0], want, rtol=0, atol=0)
            interpreted.add(graph)
        printed = print_aten(graph, target.device, Options(), compiled=target.compiled)
        arguments = [memory[buffer.name] for buffer in graph.inputs if buffer.name in memory]
        initial = arguments.pop() if initial is not None else None
        integers = [sizes[extent.size.name] for extent in graph.extents if extent.buffer is None]
        got = printed(*arguments, *integers, *([] if initial is None else [initial]))
        # Statements of numbers alone are of the default dtype.
        torch.testing.assert_close(got.to(want.dtype), want, rtol=1e-6, atol=1e-6)


def test_random_programs():
    checked = 0
    for seed in range(150):
        drawn = drawn_program(seed)
        if drawn is not None:
            check(*drawn)
            checked += 1
    assert checked > 60


def cases() -> Iterator[tuple[str, str, dict[str, Tensor], tuple[int | None, ...] | None]]:
    for name, case in CASES.items():
        torch.manual_seed(0)
        tensors = {n: t.mul(3).round() if t.is_floating_point() else t for n, t in case.draw(1).items()}
        yield name, case.expression, tensors, case.out_shape(1)


@pytest.mark.parametrize(("text", "tensors", "shape"), [pytest.param(*rest, id=name) for name, *rest in cases()])
def test_cases_and_their_gradients(text: str, tensors: dict[str, Tensor], shape: tuple[int | None, ...] | None):
    statement = parse(text)
    ordered = [tensors[name] for name in layout_of(statement).tensors]
    extents = resolve_extents(statement, ordered, None, {}, shape)
    bound = bind(statement, tensors, None)
    check(bound, tensors, extents)
    if statement.operator not in ("+=", "="):
        return
    for operand in layout_of(statement).value_tensors:
        derivative = derivatives(statement, operand)
        torch.manual_seed(1)
        named = {**tensors, derivative.seed: torch.randint(-3, 4, extents.output).to(bound.dtype)}
        for other in derivative.statements:
            own = {name: named[name] for name in layout_of(other).tensors}
            found = resolve_extents(other, list(own.values()), None, {}, tuple(tensors[operand].shape))
            check(bind(other, own, None, drop_outside=True), own, found)


SPMM = "C[Row[g],n] += Val[g,q] * B[Col[g,q],n]"
SPMM_SIZES = {"a": 3, "b": 4, "c": 2}


def spmm(target: Target) -> Graph:
    tensors = {
        "Row": torch.zeros(3).long(),
        "Val": torch.zeros(3, 2),
        "Col": torch.zeros(3, 2).long(),
        "B": torch.zeros(5, 4),
    }
    return graph_of(bind(parse(SPMM), tensors, None), SPMM_SIZES, target).graph


def test_graphs_print_as_text():
    text = show(spmm(Target(GPU))).splitlines()
    assert [line for line in text if line.startswith("  extent")] == [
        "  extent A: axis 0 of x0",
        "  extent B: axis 1 of t1",
        "  extent C: axis 1 of t0",
        "  extent OUT_0: an argument",
    ]
    stores = [line.strip() for line in text if "=" in line and "initial" not in line]
    assert stores == [
        "v0[a, c] = (t0[a, c] if x1[a, c] >= 0 else 0)",
        "v1[a, c, b] = (t1[x1[a, c], b] if x1[a, c] >= 0 else 0)",
        "v2[a, b] += v1[a, c, b] * v0[a, c]",
        "out[x0[a], b] += v2[a, b]   where x0[a] >= 0",
    ]
    assert any(line.startswith("  matmul (") for line in text)


def test_names_mean_nothing():
    tensors = {"Row": torch.zeros(3).long(), "V": torch.zeros(3), "B": torch.zeros(5, 4), "Col": torch.zeros(3).long()}
    first = bind(parse("C[Row[p],n] += V[p] * B[Col[p],n]"), tensors, None)
    renamed = {"V": tensors["Row"], "row": tensors["V"], "W": tensors["B"], "w": tensors["Col"]}
    second = bind(parse("B[V[n],p] += row[n] * W[w[n],p]"), renamed, None)
    for target in TARGETS:
        sizes = {"a": 3, "b": 4}
        assert graph_of(first, sizes, target).graph is graph_of(second, sizes, target).graph


def changed(graph: Graph, kind: type[Node], change: Callable[[Node], Node]) -> Graph:
    """The graph with the first node of a kind changed."""
    position = next(i for i, node in enumerate(graph.nodes) if isinstance(node, kind))
    nodes = list(graph.nodes)
    nodes[position] = change(nodes[position])  # type: ignore[call-overload]
    return Graph(graph.inputs, tuple(nodes), graph.outputs, graph.extents)


def with_store(node: Node, change: Callable[[Store], Store]) -> Node:
    assert isinstance(node, Step | Library)
    store = store_of(node.kernel)
    return node.replace({store: change(store)})


FAULTS: dict[str, tuple[Callable[[Graph], Graph], str]] = {
    "steps in the wrong order": (
        lambda g: Graph(g.inputs, g.nodes[::-1], g.outputs, g.extents),
        "not made yet",
    ),
    "two definitions": (lambda g: Graph(g.inputs, (g.nodes[0], *g.nodes), g.outputs, g.extents), "is made twice"),
    "a product that does not add": (
        lambda g: changed(
            g, Library, lambda n: with_store(n, lambda s: Store(s.buffer, s.subscripts, s.value, "set", s.where))
        ),
        "matmul that does not add",
    ),
    "a product of one factor": (
        lambda g: changed(
            g,
            Library,
            lambda n: with_store(n, lambda s: Store(s.buffer, s.subscripts, s.value.args[0], "add", s.where)),  # type: ignore[attr-defined]
        ),
        "matmul of 1 reads",
    ),
    "an index outside of its loop": (
        lambda g: changed(
            g, Step, lambda n: with_store(n, lambda s: Store(s.buffer, s.subscripts, Index("z"), "set", s.where))
        ),
        "z outside of its loop",
    ),
    "a sum of unknown extent, unrolled": (
        lambda g: changed(g, Step, lambda n: Step(n.kernel, (Index("a"),))),  # type: ignore[attr-defined]
        "unrolled without a known extent",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_verify_catches(name: str):
    graph = spmm(Target(GPU))
    with pytest.raises(AssertionError, match=FAULTS[name][1]):
        verify_graph(FAULTS[name][0](graph))

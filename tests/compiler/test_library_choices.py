"""Graphs of library calls of the four applications word for word, and the choices behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from insum_nn.compiler.ir.access import indices_of
from insum_nn.compiler.ir.build import Names, build
from insum_nn.compiler.ir.graph import Library, store_of
from insum_nn.compiler.ir.printer import show
from insum_nn.compiler.ir.verify import verify_graph
from insum_nn.compiler.lang.bind import Bound, bind
from insum_nn.compiler.lang.limits import slot_indices
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.passes.library.contraction_order import contraction_order
from insum_nn.compiler.passes.library.library_graph import LibraryGraph, library_graph
from insum_nn.compiler.passes.library.steps import Target
from insum_nn.testing.random_programs import random_program
from tests.golden_fixture import Golden

# Planning looks at no device, so a GPU's plans are made and compared without one.
GPU = "cuda"


def table(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


# Name: statement, tensors, extents of the indices that steer the plan.
APPLICATIONS: dict[str, tuple[str, dict[str, Tensor], dict[str, int]]] = {
    "spmm": (
        "C[Row[g],n] += Val[g,q] * B[Col[g,q],n]",
        {"Row": table(40), "Col": table(40, 4), "Val": torch.ones(40, 4), "B": torch.ones(16, 64)},
        {"g": 40, "q": 4, "n": 64},
    ),
    "block_spmm": (
        "C[Row[g],a,n] += Val[g,q,a,b] * B[Col[g,q],b,n]",
        {"Row": table(40), "Col": table(40, 4), "Val": torch.ones(40, 4, 32, 32), "B": torch.ones(16, 32, 64)},
        {"g": 40, "q": 4, "a": 32, "b": 32, "n": 64},
    ),
    "sparse_convolution": (
        "Out[Y[t,i],d] += In[X[t,i],c] * W[O[t],c,d]",
        {"Y": table(27, 64), "X": table(27, 64), "O": table(27), "In": torch.ones(50, 32), "W": torch.ones(27, 32, 16)},
        {"t": 27, "i": 64, "c": 32, "d": 16},
    ),
    "tensor_product": (
        "Z[z,I[p],w] += CG[p] * X[z,J[p],u] * Y[z,K[p]] * W[L[p],u,w]",
        {
            **{name: table(20) for name in "IJKL"},
            "CG": torch.ones(20),
            "X": torch.ones(100, 9, 8),
            "Y": torch.ones(100, 9),
            "W": torch.ones(5, 8, 16),
        },
        {"z": 100, "p": 20, "u": 8, "w": 16},
    ),
}

OTHERS: dict[str, tuple[str, dict[str, Tensor], dict[str, int]]] = {
    "dense_product": (
        "C[i,j] += A[i,k] * B[k,j]",
        {"A": torch.ones(3, 4), "B": torch.ones(4, 5)},
        {"i": 3, "k": 4, "j": 5},
    ),
    "convolution": (
        "O[p,q] += I[2*p+r-1,q+s] * F[r,s]",
        {"I": torch.ones(9, 9), "F": torch.ones(3, 3)},
        {"p": 4, "q": 7, "r": 3, "s": 3},
    ),
    "largest_neighbour": (
        "Y[Dst[e],f] max= -2 * X[Src[e],f] * w[e]",
        {"Dst": table(30), "Src": table(30), "X": torch.ones(10, 8), "w": torch.ones(30)},
        {"e": 30, "f": 8},
    ),
    "sums_apart": ("s += 3 * a[i] * b[j]", {"a": torch.ones(4), "b": torch.ones(5)}, {"i": 4, "j": 5}),
    "numbers": ("y[i] += 2 * 3", {}, {"i": 4}),
    "copy": ("y[j,i] = A[i,j]", {"A": torch.ones(3, 4)}, {"i": 3, "j": 4}),
}


def bound_of(name: str) -> tuple[Bound, dict[str, int]]:
    expression, tensors, sizes = {**APPLICATIONS, **OTHERS}[name]
    return bind(parse(expression), tensors, None), sizes


def graph_of(
    bound: Bound, sizes: Mapping[str, int], *, compiled: bool, order: str = "cost", bags: bool = False
) -> LibraryGraph:
    letters = Names(bound.statement).indices
    target = Target(bound.device_type, compiled, bags=bags, search=order == "cost")
    made = library_graph(build(bound), {letters[name]: size for name, size in sizes.items()}, target)
    verify_graph(made.graph)
    return made


def made_of(
    name: str, *, gpu: bool = False, dtype: torch.dtype | None = None, order: str = "cost", bags: bool = False
) -> LibraryGraph:
    """The graph for the CPU's libraries, for one that torch records, or for a GPU's compiler; made without a device."""
    bound, sizes = bound_of(name)
    if gpu:
        bound = replace(bound, device_type=GPU)
    if dtype is not None:
        bound = replace(bound, dtype=dtype)
    return graph_of(bound, sizes, compiled=gpu or bags, order=order, bags=bags)


def described(name: str, made: LibraryGraph) -> str:
    decisions = [f"{topic}: {choice}; {reason}" for topic, choice, reason in (d.text(show) for d in made.decisions)]
    return "\n".join([bound_of(name)[0].statement.text, "", show(made.graph), "", *decisions])


@pytest.mark.parametrize("name", [*APPLICATIONS, *OTHERS])
def test_graph_for_the_cpu(name: str, golden: Golden):
    golden(f"plan/{name}_cpu", described(name, made_of(name)))


@pytest.mark.parametrize("name", APPLICATIONS)
def test_graph_for_a_gpu(name: str, golden: Golden):
    golden(f"plan/{name}_cuda", described(name, made_of(name, gpu=True)))


def calls(made: LibraryGraph, function: str) -> list[Library]:
    return [node for node in made.graph.nodes if isinstance(node, Library) and node.function == function]


def test_a_dot_needs_three_extents_and_a_dtype():
    """`tl.dot` takes no float64, and no axis of length 1."""
    assert calls(made_of("block_spmm", gpu=True, dtype=torch.float16), "matmul")
    assert not calls(made_of("block_spmm", gpu=True, dtype=torch.float64), "matmul")
    assert not calls(made_of("spmm", gpu=True), "matmul")
    bound, sizes = bound_of("dense_product")
    for index in "ijk":
        made = graph_of(replace(bound, device_type=GPU), {**sizes, index: 1}, compiled=True)
        assert not calls(made, "matmul")
        assert any(decision.reason == "m, k or n is 1" for decision in made.decisions)
    (product,) = calls(graph_of(replace(bound, device_type=GPU), sizes, compiled=True), "matmul")
    # i and j of the output are a and b, k is c.
    store = store_of(product.kernel)
    assert (indices_of(*store.subscripts), indices_of(store.value)) == (("a", "b"), ("a", "c", "b"))


def test_integers_take_no_library_product():
    assert not calls(made_of("dense_product", dtype=torch.int64), "matmul")
    assert not calls(made_of("spmm", dtype=torch.int64, bags=True), "bag_product")


def test_which_statements_are_a_sum_of_bags():
    assert calls(made_of("spmm", bags=True), "bag_product")
    assert not calls(made_of("spmm"), "bag_product")
    assert not calls(made_of("spmm", gpu=True, bags=True), "bag_product")
    assert not calls(made_of("spmm", dtype=torch.bfloat16, bags=True), "bag_product")
    for name in ("block_spmm", "sparse_convolution", "tensor_product", "dense_product"):
        assert not calls(made_of(name, bags=True), "bag_product")
    # The dense factor twice: the entries' values vary with its columns.
    tensors = {"Row": table(5), "Col": table(5), "B": torch.ones(3, 4)}
    bound = bind(parse("C[Row[e],n] += B[Col[e],n] * B[Col[e],n]"), tensors, None)
    assert not calls(graph_of(bound, {"e": 5, "n": 4}, compiled=True, bags=True), "bag_product")


@pytest.mark.parametrize(
    ("text", "tensors", "slots"),
    [
        (*APPLICATIONS["spmm"][:2], ("q",)),
        (*APPLICATIONS["sparse_convolution"][:2], ()),
        ("y[i] += Val[i,q] * x[Col[i,q]]", {"Val": torch.ones(5, 3), "Col": table(5, 3), "x": torch.ones(7)}, ("q",)),
        (
            "y[i] += V[g,q,s] * x[E[g,q,s],i]",
            {"V": torch.ones(2, 3, 4), "E": table(2, 3, 4), "x": torch.ones(7, 5)},
            "gqs",
        ),
        ("y[i] += x[E[g],i]", {"E": table(5), "x": torch.ones(7, 5)}, ()),
        ("y[Row[p]] += x[Col[p]]", {"Row": table(5), "Col": table(5), "x": torch.ones(7)}, ()),
    ],
)
def test_slots_are_summed_axes_of_index_tensors_with_several(
    text: str, tensors: dict[str, Tensor], slots: Sequence[str]
):
    assert slot_indices(bind(parse(text), tensors, None)) == tuple(slots)


def test_the_order_of_products():
    by_cost, written = made_of("tensor_product"), made_of("tensor_product", order="left")
    assert any(decision.topic == "order" for decision in by_cost.decisions)
    assert by_cost.graph is not written.graph
    operands = [("p",), ("z", "p", "u"), ("z", "p"), ("p", "u", "w")]
    sizes = APPLICATIONS["tensor_product"][2]
    expected, cost, left = contraction_order(operands, ("z", "p", "w"), sizes)
    assert cost < left
    assert expected != contraction_order(operands, ("z", "p", "w"), sizes, search=False)[0]


def test_every_choice_has_a_reason():
    for name in (*APPLICATIONS, *OTHERS):
        for gpu in (False, True):
            for decision in made_of(name, gpu=gpu).decisions:
                _, choice, reason = decision.text(show)
                assert choice
                assert len(reason.split()) > 3


def test_random_programs_have_graphs_that_hold():
    """For a GPU too, which no CPU test would run."""
    for seed in range(300):
        program = random_program(seed)
        bound = bind(parse(program.expression), program.tensors, program.initial)
        sizes = dict.fromkeys(bound.layout.indices, 3)
        for device, compiled in (("cpu", False), ("cpu", True), (GPU, False), (GPU, True)):
            assert show(graph_of(replace(bound, device_type=device), sizes, compiled=compiled).graph)

"""Library calls of the four applications word for word, and the choices behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from insum_nn.compiler.codegen.calls import CallGraph
from insum_nn.compiler.codegen.contraction_order import contraction_order
from insum_nn.compiler.lang.bind import Bound, Extents, bind
from insum_nn.compiler.lang.limits import slot_indices
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime.library_calls import library_calls_of
from insum_nn.testing.random_programs import random_program
from tests.golden_fixture import Golden


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


def bound_of(name: str) -> tuple[Bound, Extents]:
    expression, tensors, sizes = {**APPLICATIONS, **OTHERS}[name]
    bound = bind(parse(expression), tensors, None)
    return bound, Extents(tuple(sizes[index] for index in bound.layout.indices), ())


def made_of(name: str, *, compiled: bool = False, dtype: torch.dtype | None = None, order: str = "cost") -> CallGraph:
    bound, extents = bound_of(name)
    if dtype is not None:
        bound = replace(bound, dtype=dtype)
    return library_calls_of(bound, extents, Options(order=order), compiled=compiled)


def described(name: str, graph: CallGraph) -> str:
    decisions = [f"{topic}: {choice}; {reason}" for topic, choice, reason in graph.decisions]
    return "\n".join([bound_of(name)[0].statement.text, "", graph.code, *decisions])


@pytest.mark.parametrize("name", [*APPLICATIONS, *OTHERS])
def test_library_calls(name: str, golden: Golden):
    golden(f"plan/{name}_cpu", described(name, made_of(name)))


@pytest.mark.parametrize("name", APPLICATIONS)
def test_calls_for_a_compiler(name: str, golden: Golden):
    golden(f"plan/{name}_compiled", described(name, made_of(name, compiled=True)))


def test_dense_products_are_products_of_a_library():
    for compiled in (False, True):
        assert made_of("dense_product", compiled=compiled).calls[0].target is torch.matmul
    # Torch multiplies no matrices of integers on a GPU.
    assert "matmul" not in made_of("dense_product", dtype=torch.int64).code
    # A compiler fuses the product of a vector with what stands around it.
    assert "matmul" in made_of("spmm").code
    assert "matmul" not in made_of("spmm", compiled=True).code


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
    assert any(topic == "order" for topic, _, _ in by_cost.decisions)
    assert by_cost.code != written.code
    operands = [("p",), ("z", "p", "u"), ("z", "p"), ("p", "u", "w")]
    sizes = APPLICATIONS["tensor_product"][2]
    expected, cost, left = contraction_order(operands, ("z", "p", "w"), sizes)
    assert cost < left
    assert expected != contraction_order(operands, ("z", "p", "w"), sizes, search=False)[0]


def test_every_choice_has_a_reason():
    for name in (*APPLICATIONS, *OTHERS):
        for _, choice, reason in made_of(name).decisions:
            assert choice
            assert len(reason.split()) > 3


def test_random_programs_have_calls():
    for seed in range(300):
        program = random_program(seed)
        bound = bind(parse(program.expression), program.tensors, program.initial)
        sizes = Extents((3,) * len(bound.layout.indices), ())
        for compiled in (False, True):
            assert library_calls_of(bound, sizes, Options(), compiled=compiled).forward

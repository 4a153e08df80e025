"""Plans of the four applications word for word, the choices behind them, and the faults that `verify` catches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from insum_nn.compiler.lang.bind import Bound, bind
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.options import Options
from insum_nn.compiler.plans.contraction import contraction_order
from insum_nn.compiler.plans.plan import Combine, Dot, Load, Multiply, Plan, Scale, SparseProduct, Sum
from insum_nn.compiler.plans.planner import make_plan, slot_indices
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


def plan_of(name: str, *, cuda: bool = False, dtype: torch.dtype | None = None, **options: object) -> Plan:
    """The plan for the CPU's libraries, or for a GPU's compiler: planning looks at no device."""
    bound, sizes = bound_of(name)
    if cuda:
        bound = replace(bound, device_type=GPU)
    if dtype is not None:
        bound = replace(bound, dtype=dtype)
    return make_plan(bound, sizes, Options(**options), compiled=cuda)


def described(plan: Plan) -> str:
    return "\n".join([str(plan.bound.statement), "", str(plan), "", *map(str, plan.decisions)])


@pytest.mark.parametrize("name", [*APPLICATIONS, *OTHERS])
def test_plan_for_the_cpu(name: str, golden: Golden):
    golden(f"plan/{name}_cpu", described(plan_of(name)))


@pytest.mark.parametrize("name", APPLICATIONS)
def test_plan_for_a_gpu(name: str, golden: Golden):
    golden(f"plan/{name}_cuda", described(plan_of(name, cuda=True)))


def steps(plan: Plan, kind: type) -> list[object]:
    return [step for step in plan.steps if isinstance(step, kind)]


def test_a_dot_needs_three_extents_and_a_dtype():
    """`tl.dot` takes no float64, and no axis of length 1."""
    assert steps(plan_of("block_spmm", cuda=True, dtype=torch.float16), Dot)
    assert not steps(plan_of("block_spmm", cuda=True, dtype=torch.float64), Dot)
    assert not steps(plan_of("spmm", cuda=True), Dot)
    bound, sizes = bound_of("dense_product")
    for index in "ijk":
        plan = make_plan(replace(bound, device_type=GPU), {**sizes, index: 1}, Options(), compiled=True)
        assert not steps(plan, Dot)
        assert "m, k or n is 1" in described(plan)
    plan = make_plan(replace(bound, device_type=GPU), sizes, Options(), compiled=True)
    assert [(step.m, step.k, step.n) for step in steps(plan, Dot)] == [(("i",), ("k",), ("j",))]


def test_integers_take_no_library_product():
    assert not steps(plan_of("dense_product", dtype=torch.int64), Dot)
    assert not steps(plan_of("spmm", dtype=torch.int64), SparseProduct)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch's CSR product needs MKL")
def test_which_statements_are_a_sparse_product():
    assert steps(plan_of("spmm"), SparseProduct)
    assert not steps(plan_of("spmm", cuda=True), SparseProduct)
    assert not steps(plan_of("spmm", dtype=torch.bfloat16), SparseProduct)
    for name in ("block_spmm", "sparse_convolution", "tensor_product", "dense_product"):
        assert not steps(plan_of(name), SparseProduct)


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
    by_cost = plan_of("tensor_product")
    written = plan_of("tensor_product", order="left")
    assert any(decision.topic == "order" for decision in by_cost.decisions)
    operands = [step.labels for step in steps(by_cost, Load)]
    expected, cost, left = contraction_order(operands, ("z", "p", "w"), APPLICATIONS["tensor_product"][2])
    assert cost < left
    assert str(by_cost) != str(written)
    assert expected != contraction_order(operands, ("z", "p", "w"), APPLICATIONS["tensor_product"][2], search=False)[0]


def test_every_choice_has_a_reason():
    for name in (*APPLICATIONS, *OTHERS):
        for cuda in (False, True):
            for decision in plan_of(name, cuda=cuda).decisions:
                assert decision.choice
                assert len(decision.reason.split()) > 3


def test_every_index_has_a_role():
    for name in (*APPLICATIONS, *OTHERS):
        for cuda in (False, True):
            plan = plan_of(name, cuda=cuda)
            assert [role.index for role in plan.roles] == list(plan.bound.layout.indices)


def test_random_programs_have_plans_that_hold():
    """`make_plan` verifies; planning for a GPU too, which no CPU test would run."""
    for seed in range(300):
        program = random_program(seed)
        bound = bind(parse(program.expression), program.tensors, program.start)
        sizes = dict.fromkeys(bound.layout.indices, 3)
        for device, compiled in (("cpu", False), ("cpu", True), (GPU, False), (GPU, True)):
            plan = make_plan(replace(bound, device_type=device), sizes, Options(), compiled=compiled)
            assert plan.verify() is plan
            assert str(plan)


# Planted faults.


def changed(plan: Plan, position: int, **fields: object) -> Plan:
    broken = replace(plan.steps[position], **fields)
    return replace(plan, steps=(*plan.steps[:position], broken, *plan.steps[position + 1 :]))


def place(plan: Plan, kind: type) -> int:
    return next(i for i, step in enumerate(plan.steps) if isinstance(step, kind))


FAULTS: dict[str, tuple[Callable[[], Plan], str]] = {
    "a value before its definition": (
        lambda: changed(plan_of("dense_product"), place(plan_of("dense_product"), Dot), left="t9"),
        "t9 is used before it is defined",
    ),
    "steps in the wrong order": (
        lambda: replace(plan_of("dense_product"), steps=plan_of("dense_product").steps[::-1]),
        "is used before it is defined",
    ),
    "two definitions": (lambda: changed(plan_of("dense_product"), 1, result="t0"), "t0 is defined twice"),
    "a label twice": (lambda: changed(plan_of("dense_product"), 0, labels=("i", "i")), "a label stands twice"),
    "a dot's left labels": (
        lambda: changed(plan_of("dense_product"), place(plan_of("dense_product"), Dot), m=()),
        "left labels differ",
    ),
    "a dot's right labels": (
        lambda: changed(plan_of("dense_product"), place(plan_of("dense_product"), Dot), n=()),
        "right labels differ",
    ),
    "a sum over a label that is not there": (
        lambda: changed(plan_of("sums_apart"), place(plan_of("sums_apart"), Sum), labels=("j",)),
        "labels appear from nowhere",
    ),
    "a scaled value with other labels": (
        lambda: changed(plan_of("sums_apart"), place(plan_of("sums_apart"), Scale), labels=("i",)),
        "labels appear from nowhere",
    ),
    "a product that loses a label": (
        lambda: changed(plan_of("tensor_product"), place(plan_of("tensor_product"), Multiply), labels=()),
        "labels do not add up",
    ),
    "a label kept and summed": (
        lambda: changed(plan_of("tensor_product"), place(plan_of("tensor_product"), Multiply), over=("p",)),
        "a label is both kept and summed",
    ),
    "a label that reaches the output unsummed": (
        lambda: replace(plan_of("dense_product"), combine=Combine("t0", "direct", ())),
        "unsummed labels reach the output: {'k'}",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_verify_catches(name: str):
    plan, message = FAULTS[name][0](), FAULTS[name][1]
    with pytest.raises(AssertionError, match=message):
        plan.verify()


def test_labels_of_a_value():
    plan = plan_of("dense_product")
    assert plan.labels_of("t0") == ("i", "k")
    with pytest.raises(KeyError):
        plan.labels_of("t9")

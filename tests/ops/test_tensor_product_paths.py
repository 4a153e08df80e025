"""Products with single copies, as one C function does them on a CPU; and what it is not for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("e3nn")

from insum_nn.compiler.api import statement_calls
from insum_nn.compiler.kernels.c_program import CProgram
from insum_nn.compiler.runtime import needed_gradients
from insum_nn.errors import InsumError, InsumRangeError
from insum_nn.ops.tensor_product import expressions, tensor_product
from insum_nn.ops.tensor_product_roles import Joint
from insum_nn.ops.tensor_product_spec import ProductLayout, TensorProductSpec
from insum_nn.testing.tolerances import assert_matches
from tests.layers.equivariant.tensor_product_cases import Case, assert_same_derivatives, one_mode
from tests.ops.test_tensor_product import conv_oracle_of, edges_of, inputs_of, oracle_of, spec_of

pytestmark = pytest.mark.c

KINDS = [("uvw", True), ("uvu", True), ("uvu", False)]
# A scalar and an irrep of each degree, in both orders, an entry that no path reads and one that none ends in.
MIXED = Case(
    "3x0e+2x1o+1x2e+2x0o",
    "1x0e+1x1o+1x2e",
    "4x0e+2x1o+3x2e+1x1e",
    (
        (0, 0, 0, "uvw", True),
        (1, 0, 1, "uvu", True),
        (1, 1, 0, "uvw", True),
        (1, 1, 2, "uvw", True),
        (1, 2, 1, "uvu", False),
        (2, 2, 2, "uvw", True),
        (0, 1, 1, "uvw", True),
    ),
)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The roles of every run that have statements."""
    found: list[str] = []
    call = Joint._at_once

    def counted(self: Joint, *given: Any) -> Sequence[Tensor] | None:
        made = call(self, *given)
        if made is not None:
            found.append("".join(dict.fromkeys(role for role, _ in self.steps)))
        return made

    monkeypatch.setattr(Joint, "_at_once", counted)
    return found


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "case", [*(one_mode(*kind, 4, 1, 5) for kind in KINDS), MIXED], ids=["uvw", "uvu", "bare", "mixed"]
)
def test_derivatives(case: Case, shared: bool, runs: list[str]):
    spec = spec_of(case, shared=shared)
    assert_same_derivatives(lambda *t: tensor_product(spec, *t), oracle_of(spec), inputs_of(spec, 5))
    # Gradients are made together.
    weighted = any(path.weighted for path in spec.paths)
    assert ("xyw" if weighted else "xy") in runs


@pytest.mark.parametrize("shared", [True, False])
def test_edges(shared: bool, runs: list[str]):
    """Some nodes have none."""
    spec = spec_of(MIXED, shared=shared, convolution=True)
    receivers, senders = (index.int() for index in edges_of(9, 150, sort=False))
    assert_same_derivatives(
        lambda x, y, w: tensor_product(spec, x, y, w, receivers, senders),
        conv_oracle_of(spec, receivers.long(), senders.long()),
        inputs_of(spec, 150, 9),
    )
    assert runs


def test_operands_as_they_lie():
    spec = spec_of(MIXED, shared=False)
    x, y, w = inputs_of(spec, 6)
    want = tensor_product(spec, x, y, w)
    wide = torch.randn(6, y.shape[1] + 3, dtype=y.dtype)
    wide[:, 1:-2] = y
    got = tensor_product(spec, x.T.contiguous().T, wide[:, 1:-2], w.flip(0).flip(0)[:, None].squeeze(1))
    torch.testing.assert_close(got, want)


def test_float32():
    spec = spec_of(MIXED, shared=True)
    given = inputs_of(spec, 40)
    got = tensor_product(spec, *(t.float() for t in given))
    assert_matches(got, oracle_of(spec)(*given), dtype=torch.float32, kind="sum")


@pytest.mark.parametrize(
    "case",
    [
        one_mode("uvw", True, 4, 3, 5),
        one_mode("uuu", True, 4, 3, 5),
        one_mode("uvu<v", True, 4, 4, 5),
    ],
    ids=["several copies", "uuu", "pairs"],
)
def test_others_are_left_to_other_products(case: Case, runs: list[str]):
    spec = spec_of(case, shared=True)
    given = inputs_of(spec, 3)
    torch.testing.assert_close(tensor_product(spec, *given), oracle_of(spec)(*given))
    assert not runs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types(dtype: torch.dtype):
    """The result and all gradients are rounded to the half type once."""
    spec = spec_of(MIXED, shared=True)
    given = [t.to(dtype).requires_grad_() for t in inputs_of(spec, 7)]
    wide = [t.detach().double().requires_grad_() for t in given]
    got, expected = tensor_product(spec, *given), oracle_of(spec)(*wide)
    slope = torch.randn_like(got)
    found = [got, *torch.autograd.grad(got, given, slope)]
    requested = [expected, *torch.autograd.grad(expected, wide, slope.double())]
    for a, b in zip(found, requested, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-5)


def test_a_transform_sees_statements(runs: list[str]):
    spec = spec_of(MIXED, shared=True)
    x, y, w = inputs_of(spec, 12)
    stacked = torch.vmap(lambda a, b: tensor_product(spec, a, b, w))(x.reshape(3, 4, -1), y.reshape(3, 4, -1))
    assert not runs
    torch.testing.assert_close(stacked.reshape(12, -1), oracle_of(spec)(x, y, w))


@pytest.mark.parametrize("entry", [-2, 5])
def test_edges_outside_are_refused(entry: int):
    spec = spec_of(MIXED, shared=True, convolution=True)
    receivers, senders = edges_of(5, 8, sort=False)
    senders[3] = entry
    with pytest.raises(InsumRangeError, match="Src"):
        tensor_product(spec, *inputs_of(spec, 8, 5), receivers, senders)


def test_operands_that_do_not_fit_are_refused_as_ever(runs: list[str]):
    spec = spec_of(MIXED, shared=False)
    x, y, w = inputs_of(spec, 6)
    for given in ((x, y[:4], w), (x, y, w[:5]), (x, y.float(), w)):
        with pytest.raises(InsumError):
            tensor_product(spec, *given)
    assert not runs


def test_edges_that_are_none_are_left_out(runs: list[str]):
    spec = spec_of(MIXED, shared=True, convolution=True)
    receivers, senders = edges_of(5, 8, sort=False)
    x, y, w = inputs_of(spec, 8, 5)
    keep = torch.arange(8) != 2
    want = conv_oracle_of(spec, receivers[keep], senders[keep])(x, y[keep], w)
    senders[2] = -1
    torch.testing.assert_close(tensor_product(spec, x, y, w, receivers, senders), want)
    assert runs


def test_gradients_of_edges_that_are_none_are_zero():
    spec = spec_of(MIXED, shared=False, convolution=True)
    receivers, senders = edges_of(5, 300, sort=False)
    given = [t.requires_grad_() for t in inputs_of(spec, 300, 5)]
    keep = torch.arange(300) % 7 != 2
    x, y, w = given
    want = conv_oracle_of(spec, receivers[keep], senders[keep])(x, y[keep], w[keep])
    expected = torch.autograd.grad(want.square().sum(), given)
    receivers[~keep] = -1
    found = tensor_product(spec, *given, receivers, senders)
    torch.testing.assert_close(found, want)
    for got, grad in zip(torch.autograd.grad(found.square().sum(), given), expected, strict=True):
        torch.testing.assert_close(got, grad)


@pytest.mark.parametrize("mode", ["uvw", "uvu", "uvv", "uuw", "uvuv"])
@pytest.mark.parametrize("muls", [(4, 1, 5), (1, 1, 1), (1, 1, 3)], ids=str)
def test_every_mode_of_single_copies(mode: str, muls: tuple[int, int, int], runs: list[str]):
    if mode == "uuw":
        muls = (1, 1, muls[2])
    spec = spec_of(one_mode(mode, True, *muls), shared=False)
    assert_same_derivatives(lambda *t: tensor_product(spec, *t), oracle_of(spec), inputs_of(spec, 5))
    assert runs


@pytest.mark.parametrize("shared", [True, False])
def test_components_first(shared: bool, runs: list[str]):
    """The other layout, and the same tensor in two places."""
    spec = replace(spec_of(MIXED, shared=shared), layout="ir_mul")
    x, y, w = inputs_of(spec, 40)
    twin = replace(spec_of(MIXED, shared=shared), layout="mul_ir")
    inward, outward = columns(twin, "x"), columns(twin, "z")
    want = tensor_product(twin, x[:, inward], y, w)
    torch.testing.assert_close(tensor_product(spec, x, y, w), want[:, outward.argsort()])
    assert runs


def columns(spec: TensorProductSpec, role: str) -> Tensor:
    """For each number of a representation, (copies, components), its place where components come first."""
    form = ProductLayout(spec)
    other = ProductLayout(replace(spec, layout="ir_mul"))
    found = torch.empty(form.dims[role], dtype=torch.int64)
    for number in range(len(form.entries[role])):
        found[torch.from_numpy(form.columns(role, number))] = torch.from_numpy(other.columns(role, number))
    return found


def test_operands_that_share_memory():
    """What is known of a call with one tensor in two places does not hold for two tensors of these shapes."""
    case = Case("1x0e+1x1o", "1x0e+1x1o", "1x0e+1x1o", tuple((a, b, 0, "uvw", True) for a, b in ((0, 0), (1, 1))))
    spec = spec_of(case, shared=True)
    x, y, w = inputs_of(spec, 6)
    torch.testing.assert_close(tensor_product(spec, x, x, w), oracle_of(spec)(x, x, w))
    torch.testing.assert_close(tensor_product(spec, x, y, w), oracle_of(spec)(x, y, w))


def test_gradients_that_are_not_requested(runs: list[str], monkeypatch: pytest.MonkeyPatch):
    """Forces are gradients of an energy: those of weights, which could have one, are not made."""
    monkeypatch.setattr(needed_gradients, "_by_name", {})
    spec = spec_of(MIXED, shared=True)
    x, y, w = (t.requires_grad_() for t in inputs_of(spec, 5))
    place = torch.randn_like(y, requires_grad=True)

    def energy() -> Tensor:
        return tensor_product(spec, x, y * place, w).square().sum()

    def asked(*leaves: Tensor) -> tuple[Tensor, ...]:
        value = energy()
        runs.clear()
        return torch.autograd.grad(value, leaves, create_graph=True)

    (force,) = asked(place)
    assert runs == ["y"]
    (alone,) = asked(w)
    assert runs == ["w"]
    assert torch.equal(asked(x, w)[1], alone)
    # A leaf that was asked for by name counts as such for a while, then is asked about again.
    for _ in range(needed_gradients._PASSES - 1):
        assert torch.equal(asked(w)[0], alone)
        assert runs == ["xw"]
    asked(w)
    assert runs == ["w"]
    runs.clear()
    force.square().sum().backward()
    assert {role for made in runs for role in made} == set("xywz")
    second = [t.grad for t in (x, w, place)]
    for t in (x, w, place):
        t.grad = None
    (again,) = torch.autograd.grad(oracle_of(spec)(x, y * place, w).square().sum(), place, create_graph=True)
    again.square().sum().backward()
    for got, leaf in zip(second, (x, w, place), strict=True):
        torch.testing.assert_close(got, leaf.grad)


def test_explained():
    case = Case("8x1o", "1x0e+1x1o+1x2e", "8x1o", tuple((0, y, 0, "uvw", True) for y in (0, 2)))
    spec = spec_of(case, shared=True)
    (call,) = statement_calls(lambda: tensor_product(spec, *inputs_of(spec, 5)))
    found = call.explain()
    assert found.backend == "c"
    assert found.reason == "the statement runs as 2, in one C function"
    assert any(decision.topic == "order" and ", then " in decision.choice for decision in found.decisions)


def test_who_asks_is_shown_what_one_function_runs(runs: list[str]):
    spec = spec_of(MIXED, shared=True)
    given = inputs_of(spec, 6)
    want = tensor_product(spec, *given)
    assert runs == ["z"]
    made: list[Tensor] = []
    calls = statement_calls(lambda: made.append(tensor_product(spec, *given)))
    assert tuple(call.program.expression for call in calls) == expressions(spec)
    assert runs == ["z"]
    torch.testing.assert_close(made[0], want)


def test_edges_that_change_are_looked_at_again():
    spec = spec_of(MIXED, shared=True, convolution=True)
    receivers, senders = edges_of(5, 8, sort=False)
    given = inputs_of(spec, 8, 5)
    tensor_product(spec, *given, receivers, senders)
    receivers[0] = 7
    with pytest.raises(InsumRangeError, match="Dst"):
        tensor_product(spec, *given, receivers, senders)


def test_one_text_serves_new_edges(monkeypatch: pytest.MonkeyPatch):
    """Facts of new edges are found; what is printed depends neither on them nor on how many there are."""
    texts: list[CProgram] = []
    printed = CProgram._print

    def counted(self: CProgram) -> None:
        texts.append(self)
        printed(self)

    monkeypatch.setattr(CProgram, "_print", counted)
    spec = spec_of(MIXED, shared=False, convolution=True)
    made = list[int]()
    for edges, nodes in ((8, 5), (8, 5), (30, 9), (1, 5)):
        receivers, senders = edges_of(nodes, edges, sort=False)
        given = inputs_of(spec, edges, nodes)
        found, want = (
            _twice_derived(product, given)
            for product in (
                lambda *t: tensor_product(spec, *t, receivers, senders),  # noqa: B023
                conv_oracle_of(spec, receivers, senders),
            )
        )
        for got, expected in zip(found, want, strict=True):
            torch.testing.assert_close(got, expected)
        made.append(len(texts))
    assert made[0] > 0
    assert made == made[:1] * 4


def _twice_derived(product: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """A product, its gradients, and those of their squares."""
    leaves = [t.detach().clone().requires_grad_() for t in given]
    result = product(*leaves)
    first = torch.autograd.grad(result.square().sum(), leaves, create_graph=True)
    total = torch.stack([t.square().sum() for t in first]).sum()
    return [result, *first, *torch.autograd.grad(total, leaves)]

"""Sparse convolution through the neighbour table: values and first and second derivatives against dense convolution."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from insum_nn.compiler.api import by_table, statement_calls
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime import statement_choice
from insum_nn.errors import InsumDtypeError, InsumRangeError
from insum_nn.layers.voxel.conv import SubMConv3d
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor
from insum_nn.ops.sparse_conv import (
    SPARSE_CONV,
    SPARSE_CONV_GROUPS,
    sparse_conv,
    sparse_conv_expression,
    table_statement,
)
from insum_nn.structure.coordinates import Coordinates
from insum_nn.structure.kernel_map import Geometry, KernelMap
from insum_nn.structure.kernel_map.build import build_kernel_map
from insum_nn.testing.tolerances import assert_matches
from tests.compiler.interpreted import interpreter
from tests.ops.conv_oracle import dense_conv, geometry, random_sites, read
from tests.ops.oracle import assert_gradients, assert_same, strided
from tests.ops.test_sparse_conv import label, operands

__all__ = ["interpreter"]

# `insum_nn.ops.sparse_conv` is also the function of that name.
CONV = sys.modules["insum_nn.ops.sparse_conv"]
EAGER = Options(backend="eager")
TRITON = Options(backend="triton", tune=False)
TABLE = "Out[Order[i],d] += In[Near[k,i],c] * W[d,k,c]"

# spatial shape, geometry, groups of channels
CASES = [
    ((9,), geometry("subm", (3,)), 1),
    ((9,), geometry("subm", (4,), dilation=2), 2),
    ((9,), geometry("conv", (3,), 3, 1, 2), 1),
    ((9,), geometry("transpose", (3,), 2, 1, output_padding=1), 1),
    ((6, 7), geometry("subm", (3, 5)), 1),
    ((6, 7), geometry("subm", (1, 1)), 1),
    ((6, 7), geometry("conv", (3, 2), (2, 1), (1, 0)), 1),
    ((6, 7), geometry("conv", (4, 1), (1, 3), (2, 0), (2, 1)), 3),
    ((6, 7), geometry("transpose", (2, 2), 2), 2),
    ((5, 6, 4), geometry("subm", (3, 3, 3)), 1),
    ((5, 6, 4), geometry("subm", (3, 2, 3)), 3),
    ((5, 6, 4), geometry("conv", (3, 3, 3), 2, 1), 1),
    ((5, 6, 4), geometry("conv", (2, 2, 2), 2), 2),
    ((5, 6, 4), geometry("transpose", (3, 3, 3), 2, 1, output_padding=1), 1),
]


@pytest.fixture
def ran(monkeypatch):
    """All devices and backends go by the table; the statements that ran are listed."""
    statements: list[str] = []
    inner = CONV._Conv._call

    def watch(*given, **how):
        call = inner(*given, **how)
        statements.append(call[0].expression)
        return call

    monkeypatch.setattr(statement_choice, "_everywhere", True)
    monkeypatch.setattr(CONV._Conv, "_call", watch)
    return statements


def oracle_of(near: KernelMap, how: Geometry, groups: int):
    """Dense convolution; for an inverse map, its transpose by automatic differentiation."""

    def forward(features, weight, bias):
        sites = near.outputs if near.inverted else near.inputs
        if not near.inverted:
            return read(dense_conv(features, weight, bias, sites, how, groups), near.out_indices)
        return inverse(features, weight, bias)

    def inverse(features, weight, bias):
        # The weights of the convolution that is transposed: channels out and in exchanged, in each group.
        folded = weight.unflatten(0, (groups, -1)).movedim(-1, 1)
        swapped = folded.movedim(2, -1).flatten(0, 1)
        zero = features.new_zeros(near.num_outputs, weight.shape[0], requires_grad=True)
        there = read(dense_conv(zero, swapped, None, near.outputs, how, groups), near.inputs.indices)
        return torch.autograd.grad(there, zero, features, create_graph=True)[0] + bias

    return forward


def check(case, *, inverse: bool, options: Options, dtype=torch.float64, device="cpu", channels: int = 6) -> None:
    shape, how, groups = case
    near = build_kernel_map(random_sites(shape, 2, 11, device=device), how)
    near = near.inverse if inverse else near
    leaves = operands(near.inputs, how, groups, dtype, channels)
    assert_same(
        lambda x, w, b: sparse_conv(x, w, near, b, groups=groups, options=options), oracle_of(near, how, groups), leaves
    )


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
@pytest.mark.parametrize("case", CASES, ids=label)
@pytest.mark.parametrize("listed", [False, True], ids=["table", "list"])
def test_equals_dense_convolution(case, inverse, listed, ran, monkeypatch):
    monkeypatch.setattr(statement_choice, "_LIST_BYTES", 8 if listed else 4)
    check(case, inverse=inverse, options=EAGER)
    h = "h," if case[2] > 1 else ""
    assert ran == [
        f"Out[Order[i],{h}d] += In[Near[k,i],{h}c] * W[{h}d,k,c]",
        f"dIn[Order[i],{h}c] += dOut[Near[k,i],{h}d] * W[{h}d,k,c]",
        f"dW[{h}d,Off[p],c] += dOut[OutIdx[p],{h}d] * In[InIdx[p],{h}c]"
        if listed
        else f"dW[{h}d,k,c] += dOut[Order[i],{h}d] * In[Near[k,i],{h}c]",
    ]


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("shape", "how"),
    [
        ((7,), geometry("subm", (3,))),
        ((4, 5), geometry("subm", (3, 2))),
        ((4, 5), geometry("conv", (3, 3), 2, 1)),
        ((4, 5), geometry("transpose", (2, 3), 2)),
        ((3, 3, 3), geometry("conv", (2, 2, 2), 2)),
    ],
    ids=["subm1", "subm2", "conv2", "transpose2", "conv3"],
)
def test_first_and_second_derivatives(shape, how, groups, inverse, ran, monkeypatch):
    monkeypatch.setattr(statement_choice, "_LIST_BYTES", 8)
    """Second derivatives of the convolution and of its gradients, by finite differences."""
    near = build_kernel_map(random_sites(shape, 1, 4), how)
    near = near.inverse if inverse else near
    leaves = operands(near.inputs, how, groups, channels=2)
    assert_gradients(lambda x, w, b: sparse_conv(x, w, near, b, groups=groups, options=EAGER), leaves)
    assert all("Order" in statement or statement.startswith("dW") for statement in ran)


@pytest.mark.parametrize("case", [CASES[6], CASES[8], CASES[10]], ids=label)
def test_second_derivatives_equal_those_of_dense_convolution(case, ran):
    shape, how, groups = case
    near = build_kernel_map(random_sites(shape, 2, 11), how)
    leaves = operands(near.inputs, how, groups)
    back = torch.randn(near.num_outputs, leaves[1].shape[0], dtype=torch.float64)
    found = []
    for function in (
        lambda x, w, b: sparse_conv(x, w, near, b, groups=groups, options=EAGER),
        oracle_of(near, how, groups),
    ):
        inputs = [t.detach().clone().requires_grad_() for t in (*leaves, back)]
        first = torch.autograd.grad(function(*inputs[:3]).tanh(), inputs[:3], inputs[3], create_graph=True)
        penalty = sum((g**2).sum() for g in first)
        found.append(torch.autograd.grad(penalty, inputs))
    for got, want in zip(*found, strict=True):
        assert_matches(got, want, dtype=torch.float64, kind="second")


def test_transforms_take_the_pairs(ran):
    """Whoever looks on is shown the compiler's operator, as under autograd."""
    near = build_kernel_map(random_sites((4, 5), 1, 6), geometry("subm", (3, 3)))
    leaves = operands(near.inputs, geometry("subm", (3, 3)), 1, channels=2)
    found = torch.func.jacrev(lambda *a: sparse_conv(a[0], a[1], near, a[2], options=EAGER), (0, 1, 2))(*leaves)
    assert all("Order" not in statement for statement in ran)
    right = torch.autograd.functional.jacobian(
        lambda *a: sparse_conv(a[0], a[1], near, a[2], options=EAGER), tuple(leaves)
    )
    assert any("Order" in statement for statement in ran)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)


def test_on_a_cpu_the_pairs_are_used_unless_kernels_are_asked_for():
    cpu = torch.device("cpu")
    assert not by_table(cpu, Options())
    assert not by_table(cpu, EAGER)
    assert by_table(cpu, TRITON)
    assert sparse_conv_expression(device="cpu") == sparse_conv_expression() == SPARSE_CONV
    assert sparse_conv_expression(device="cpu", groups=2) == SPARSE_CONV_GROUPS
    assert sparse_conv_expression(device="cpu", options=TRITON) == table_statement() == TABLE
    assert sparse_conv_expression(device="cpu", options=TRITON, groups=2) == table_statement(groups=2)
    assert "Order" not in sparse_conv_expression(device="cpu", options=TRITON, pointwise=True)


def test_on_a_gpu_the_table_is_used_where_kernels_are_generated(gpu, monkeypatch):
    near = build_kernel_map(random_sites((4, 5), 1, 6, device=gpu), geometry("subm", (3, 3)))
    features, weight, _ = operands(near.inputs, near.geometry, 1)
    for options, want in (
        (Options(), TABLE),
        (TRITON, TABLE),
        (EAGER, SPARSE_CONV),
    ):
        assert sparse_conv_expression(device=gpu, options=options) == want
        (call,) = statement_calls(lambda: sparse_conv(features, weight, near, options=options))  # noqa: B023
        assert call.program.expression == want
    monkeypatch.setattr(statement_choice, "generates_kernels", lambda: False)
    assert sparse_conv_expression(device=gpu) == SPARSE_CONV


def test_indices_are_validated_when_asked_for(ran):
    near = build_kernel_map(random_sites((5, 6), 1, 12), geometry("conv", (3, 3), 2))
    features, weight, _ = (t.requires_grad_() for t in operands(near.inputs, near.geometry, 1))
    options = Options(backend="eager", validate=True)
    want = sparse_conv(features, weight, near, options=options)
    want.sum().backward()
    assert len(ran) == 3
    # The table was made of the map's pairs, and is made of them again.
    near.table.sorted_neighbours[0, 0] = near.num_inputs
    torch.testing.assert_close(sparse_conv(features, weight, near, options=options), want)
    near.in_index[0, 0] = near.num_inputs
    with pytest.raises(InsumRangeError, match="in_index"):
        sparse_conv(features, weight, near, options=options)


def test_layers_show_the_statement_of_their_device(ran):
    layer = SubMConv3d(4, 4, 3, dtype=torch.float64, options=EAGER)
    sites = random_sites((5, 5, 5), 1, 20)
    x = SparseConvTensor(torch.randn(20, 4, dtype=torch.float64), sites.indices, [5, 5, 5], 1)
    assert layer.expression.splitlines() == [TABLE, SPARSE_CONV]
    assert TABLE in repr(layer)
    assert TABLE in str(layer.explain())
    assert TABLE in str(layer.explain(x))
    ran.clear()
    layer(x)
    assert ran == [TABLE]


def test_matches_the_reference_interpreter(ran):
    how = geometry("conv", (2, 2), 1, 1)
    near = build_kernel_map(random_sites((3, 4), 1, 5), how)
    features, weight, _ = operands(near.inputs, how, 1, channels=2)
    found = []
    (call,) = statement_calls(lambda: found.append(sparse_conv(features, weight, near, options=EAGER)))
    assert call.program.expression == TABLE
    want = call.program.reference(tensors=call.tensors, out_shape=call.out_shape)
    torch.testing.assert_close(found[0], want)


def test_tables_too_large_leave_the_pairs(ran, monkeypatch):
    near = build_kernel_map(random_sites((6, 6), 1, 20), geometry("subm", (3, 3)))
    features, weight, bias = operands(near.inputs, near.geometry, 1)
    want = sparse_conv(features, weight, near, bias, options=EAGER)
    assert ran == [TABLE]
    monkeypatch.setattr(CONV, "MOST_ENTRIES", 9 * 20 - 1)
    # What was chosen for a map stays.
    near = build_kernel_map(near.inputs, near.geometry)
    found = []
    (call,) = statement_calls(lambda: found.append(sparse_conv(features, weight, near, bias, options=EAGER)))
    torch.testing.assert_close(found[0], want)
    assert call.program.expression == SPARSE_CONV
    assert call.tensors["Out"] is bias
    assert ran == [TABLE]


@pytest.mark.parametrize("kind", ["subm", "conv", "transpose"])
def test_no_voxels_and_vanished_outputs(kind, ran):
    how = geometry(kind, (2, 2), 1 if kind == "subm" else 2)
    lonely = Coordinates(torch.tensor([[0, 1, 1]], dtype=torch.int32), (4, 4), 1)
    vanished = build_kernel_map(lonely, geometry("conv", (1, 1), 2))
    # The last has a voxel to write, and none to read.
    for near in (build_kernel_map(random_sites((4, 4), 2, 0), how), vanished, vanished.inverse):
        features, weight, bias = (t.requires_grad_() for t in operands(near.inputs, near.geometry, 1))
        result = sparse_conv(features, weight, near, bias, options=EAGER)
        assert result.shape == (near.num_outputs, 2)
        torch.testing.assert_close(result, bias.expand(near.num_outputs, 2))
        grads = torch.autograd.grad(result.sum(), (features, weight), create_graph=True)
        assert [g.shape for g in grads] == [features.shape, weight.shape]
        assert not any(g.any() for g in grads)
        torch.autograd.grad(sum((g**2).sum() for g in grads), (features, weight), allow_unused=True)
    assert ran


def test_offsets_without_pairs(ran):
    """Two voxels side by side: most cells of the kernel meet nothing, and their gradient is zero."""
    sites = Coordinates(torch.tensor([[0, 4, 4], [0, 4, 5]], dtype=torch.int32), (9, 9), 1)
    how = geometry("subm", (5, 5))
    near = build_kernel_map(sites, how)
    assert near.counts.count(0) == 22
    leaves = operands(sites, how, 1)
    assert_same(lambda x, w, b: sparse_conv(x, w, near, b, options=EAGER), oracle_of(near, how, 1), leaves)
    weight = leaves[1].requires_grad_()
    (grad,) = torch.autograd.grad(sparse_conv(leaves[0], weight, near, options=EAGER).sum(), weight)
    assert grad.flatten(1, 2).any(2).any(0).tolist() == [count > 0 for count in near.counts]


def test_non_contiguous_operands_and_gradients(ran):
    how = geometry("subm", (3, 3))
    near = build_kernel_map(random_sites((5, 6), 1, 12), how)
    leaves = [strided(t) for t in operands(near.inputs, how, 1)]
    assert not leaves[0].is_contiguous()
    assert_same(lambda x, w, b: sparse_conv(x, w, near, b, options=EAGER), oracle_of(near, how, 1), leaves)
    inputs = [t.clone().requires_grad_() for t in leaves]
    # The gradient of a sum is one number expanded.
    got = torch.autograd.grad(sparse_conv(*inputs[:2], near, inputs[2], options=EAGER).sum(), inputs)
    want = torch.autograd.grad(oracle_of(near, how, 1)(*inputs).sum(), inputs)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_only_the_gradients_asked_for_are_computed(ran):
    near = build_kernel_map(random_sites((5, 6), 1, 12), geometry("subm", (3, 3)))
    features, weight, _ = operands(near.inputs, near.geometry, 1)
    sparse_conv(features, weight.requires_grad_(), near, options=EAGER).sum().backward()
    assert [statement.split("[")[0] for statement in ran] == ["Out", "dW"]
    ran.clear()
    with torch.no_grad():
        assert not sparse_conv(features, weight, near, options=EAGER).requires_grad
    with torch.inference_mode():
        sparse_conv(features, weight, near, options=EAGER)
    assert ran == [TABLE, TABLE]


def test_a_table_made_in_inference_mode_serves_training(ran):
    near = build_kernel_map(random_sites((5, 6), 1, 12), geometry("conv", (3, 3), 2))
    features, weight, bias = operands(near.inputs, near.geometry, 1)
    with torch.inference_mode():
        sparse_conv(features, weight, near, bias, options=EAGER)
    assert not near.table.order.is_inference()
    run = lambda x, w, b: sparse_conv(x, w, near, b, options=EAGER)  # noqa: E731
    assert_same(run, oracle_of(near, near.geometry, 1), [features, weight, bias])


def test_autocast_takes_mixed_inputs(ran):
    how = geometry("subm", (3, 3, 3))
    near = build_kernel_map(random_sites((5, 5, 5), 1, 40), how)
    features, weight, bias = (t.requires_grad_() for t in operands(near.inputs, how, 1, torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = sparse_conv(features, weight, near, bias, options=EAGER)
        result.float().sum().backward()
    assert result.dtype == torch.bfloat16
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    wide = [t.detach().double().requires_grad_() for t in (features, weight, bias)]
    want = oracle_of(near, how, 1)(*wide)
    want.sum().backward()
    # Operands are rounded to bfloat16 too.
    torch.testing.assert_close(result.double(), want, rtol=0, atol=2e-2 * want.abs().max().item())
    torch.testing.assert_close(weight.grad.double(), wide[1].grad, rtol=0, atol=2e-2 * wide[1].grad.abs().max().item())


class TestAutocast:
    """Operands are cast, and a parameter gets its gradient in its own dtype."""

    how = geometry("subm", (3, 3, 3))

    def given(self, dtype=torch.float32):
        near = build_kernel_map(random_sites((5, 5, 5), 1, 60), self.how)
        features, weight, bias = operands(near.inputs, self.how, 1, dtype)
        return near, features.bfloat16().requires_grad_(), torch.nn.Parameter(weight), bias

    def run(self, near, features, weight, bias=None, options=EAGER):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return sparse_conv(features, weight, near, bias, options=options)

    @pytest.mark.parametrize("listed", [False, True], ids=["table", "list"])
    @pytest.mark.parametrize("options", [EAGER, TRITON], ids=["eager", "triton"])
    def test_gradients_are_those_of_the_cast_operands(self, listed, options, ran, interpreter, monkeypatch):
        monkeypatch.setattr(statement_choice, "_LIST_BYTES", 8 if listed else 1)
        near, features, weight, _ = self.given()
        for _ in range(2):
            result = self.run(near, features, weight, options=options)
            grad = torch.randn(result.shape).bfloat16()
            got = torch.autograd.grad(result, (features, weight), grad)
            exact = [t.detach().bfloat16().double().requires_grad_() for t in (features, weight)]
            total = oracle_of(near, self.how, 1)(*exact, torch.zeros(len(weight), dtype=torch.float64))
            want = torch.autograd.grad(total, exact, grad.double())
            assert [each.dtype for each in (result, *got)] == [torch.bfloat16, torch.bfloat16, torch.float32]
            torch.testing.assert_close(result.double(), total, rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(got[0].double(), want[0], rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(got[1].double(), want[1], rtol=1e-2, atol=1e-2)

    def test_second_derivatives(self, ran):
        near, features, weight, _ = self.given()
        leaves = features.detach().float().requires_grad_(), weight
        made = [*leaves, *(leaf.bfloat16() for leaf in leaves)]
        want_result = sparse_conv(*made[2:], near, options=EAGER)
        result = self.run(near, *leaves)
        assert torch.equal(result, want_result)
        found = []
        for own in (result, want_result):
            first = torch.autograd.grad(own.float().square().sum(), leaves, create_graph=True)
            second = torch.autograd.grad(sum(each.square().sum() for each in first), leaves)
            assert {each.dtype for each in (*first, *second)} == {torch.float32}
            found.append((*first, *second))
        for mine, other in zip(*found, strict=True):
            torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2 * other.abs().max().item())

    @pytest.mark.parametrize("recorded", [False, True], ids=["first", "second"])
    def test_a_parameter_that_was_updated_since(self, recorded, ran):
        near, features, weight, _ = self.given()
        want = torch.autograd.grad(self.run(near, features, weight).float().square().sum(), features)
        loss = self.run(near, features, weight).float().square().sum()
        with torch.no_grad():
            weight.zero_()
        assert torch.equal(torch.autograd.grad(loss, features, create_graph=recorded)[0], want[0])

    def test_a_parameter_of_two_layers(self, ran):
        near, features, _, _ = self.given()
        square = torch.nn.Parameter(torch.randn(6, 3, 3, 3, 6))
        once = self.run(near, features, square)
        self.run(near, once, square).float().sum().backward()
        exact = square.detach().bfloat16().double().requires_grad_()
        oracle, zero = oracle_of(near, self.how, 1), torch.zeros(6, dtype=torch.float64)
        oracle(oracle(features.detach().double(), exact, zero), exact, zero).sum().backward()
        assert square.grad.dtype == torch.float32
        torch.testing.assert_close(
            square.grad.double(), exact.grad, rtol=2e-2, atol=2e-2 * exact.grad.abs().max().item()
        )

    def test_kinds_checked_under_autocast_are_refused_outside(self, ran):
        near, features, weight, _ = self.given()
        self.run(near, features, weight)
        with pytest.raises(InsumDtypeError):
            sparse_conv(features, weight, near, options=EAGER)


class TestTransforms:
    how = geometry("conv", (3, 2), 2, 1)
    near = build_kernel_map(random_sites((5, 6), 2, 9), how)

    def run(self, x, w):
        return sparse_conv(x, w, self.near, options=EAGER)

    def test_forward_mode_and_vmap(self, ran):
        """They differentiate the statement over pairs, which the compiler knows how to."""
        x, w, _ = operands(self.near.inputs, self.how, 1)
        tangents = torch.randn_like(x), torch.randn_like(w)
        value, tangent = torch.func.jvp(self.run, (x, w), tangents)[:2]
        torch.testing.assert_close(value, self.run(x, w))
        torch.testing.assert_close(tangent, self.run(tangents[0], w) + self.run(x, tangents[1]))
        batch = torch.randn(3, *x.shape, dtype=x.dtype)
        each = torch.stack([self.run(row, w) for row in batch])
        torch.testing.assert_close(torch.func.vmap(self.run, (0, None))(batch, w), each)
        assert set(ran) == {TABLE}

    def test_batched_gradients(self, ran):
        x, w, _ = (t.requires_grad_() for t in operands(self.near.inputs, self.how, 1))
        result = self.run(x, w)
        backs = torch.randn(3, *result.shape, dtype=x.dtype)
        backward = lambda back: torch.autograd.grad(result, (x, w), back, retain_graph=True)  # noqa: E731
        together = torch.func.vmap(backward)(backs)
        single = [torch.autograd.grad(result, (x, w), back, retain_graph=True) for back in backs]
        for got, want in zip(together, zip(*single, strict=True), strict=True):
            torch.testing.assert_close(got, torch.stack(want))

    def test_recomputation(self, ran):
        x, w, _ = (t.requires_grad_() for t in operands(self.near.inputs, self.how, 1))
        plain = torch.autograd.grad(self.run(x, w).square().sum(), (x, w))
        again = torch.utils.checkpoint.checkpoint(self.run, x, w, use_reentrant=False)
        for got, want in zip(torch.autograd.grad(again.square().sum(), (x, w)), plain, strict=True):
            torch.testing.assert_close(got, want)


def interpret_kernels() -> None:
    """Values and gradients of tiny convolutions by kernels that Triton interprets; every backend but it is refused."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    torch.manual_seed(0)
    for case in (((3, 4), geometry("conv", (2, 2), 2), 1), ((5,), geometry("subm", (3,)), 2)):
        for inverse in (False, True):
            check(case, inverse=inverse, options=TRITON, dtype=torch.float32, channels=4)


def test_generated_kernels_on_the_cpu():
    # Triton reads the variable when it is imported, which here it may have been already.
    pytest.importorskip("triton")
    code = "from tests.ops.test_sparse_conv_table import interpret_kernels; interpret_kernels()"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr


WIDE = [(case, dtype) for case in CASES for dtype in (torch.float32, torch.float64)]
HALF = [(case, dtype) for case in (CASES[9], CASES[12]) for dtype in (torch.float16, torch.bfloat16)]


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
@pytest.mark.parametrize(
    ("case", "dtype"), [*WIDE, *HALF], ids=lambda x: str(x) if isinstance(x, torch.dtype) else label(x)
)
def test_generated_kernels_on_a_gpu(case, inverse, dtype, gpu):
    check(case, inverse=inverse, options=Options(tune=False), dtype=dtype, device=gpu)


@pytest.mark.parametrize("groups", [1, 2])
def test_derivatives_on_a_gpu(groups, gpu):
    how = geometry("conv", (3, 2), 2, 1)
    near = build_kernel_map(random_sites((4, 5), 1, 6, device=gpu), how)
    (call,) = statement_calls(lambda: sparse_conv(*operands(near.inputs, how, groups)[:2], near, groups=groups))
    assert call.program.expression.startswith("Out[Order")
    leaves = operands(near.inputs, how, groups, channels=2)
    assert_gradients(lambda x, w, b: sparse_conv(x, w, near, b, groups=groups), leaves)


def test_runs_repeat_their_bits_on_a_gpu(gpu):
    """Each output row has one writer, so also without the option for it."""
    near = build_kernel_map(random_sites((6, 6, 6), 1, 150, device=gpu), geometry("subm", (3, 3, 3)))
    features, weight, _ = (t.requires_grad_() for t in operands(near.inputs, near.geometry, 1, torch.float32))
    runs = []
    for _ in range(3):
        result = sparse_conv(features, weight, near, options=Options(deterministic=True))
        runs.append((result, *torch.autograd.grad(result.square().sum(), (features, weight))))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("channels", [32, 48, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_clouds_of_many_tiles_on_a_gpu(channels, dtype, gpu):
    """Steps that are skipped, sums in pieces, long lists of pairs in parts, voxels in any order; a map of the GPU."""
    filled = torch.rand(2, 24, 20, 16, generator=torch.Generator().manual_seed(1)) < 0.2
    rows = filled.nonzero().int()
    rows = rows[torch.randperm(len(rows))]
    how = geometry("subm", (3, 3, 3))
    wide, near = (build_kernel_map(Coordinates(r, (24, 20, 16), 2), how) for r in (rows, rows.to(gpu)))
    assert torch.equal(near.neighbours.cpu(), wide.neighbours)
    x, w = torch.randn(len(rows), channels), torch.randn(channels, 3, 3, 3, channels) / 40
    back = torch.randn(len(rows), channels)
    ours = [t.to(gpu, dtype).requires_grad_() for t in (x, w)]
    theirs = [t.detach().cpu().double().requires_grad_() for t in ours]
    back = back.to(dtype)
    got, want = sparse_conv(*ours, near, options=Options(tune=False)), sparse_conv(*theirs, wide, options=EAGER)
    results = [got, *torch.autograd.grad(got, ours, back.to(gpu))]
    expected = [want, *torch.autograd.grad(want, theirs, back.double())]
    for one, other, kind in zip(results, expected, ("sum", "gradient", "gradient"), strict=True):
        assert_matches(one, other, dtype=dtype, kind=kind)

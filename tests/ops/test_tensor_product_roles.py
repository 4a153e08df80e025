"""How a tensor product runs: its statements one by one, as generated kernels, and what a call shows to others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("e3nn")

import insum_nn
from insum_nn.compiler.api import Options, Program
from insum_nn.compiler.runtime import statement_choice
from insum_nn.ops import tensor_product_roles as roles_module
from insum_nn.ops import tensor_product_statement as statement_module
from insum_nn.ops.tensor_product import TensorProductSpec, tensor_product
from insum_nn.ops.tensor_product_roles import Joint, joint_of
from insum_nn.ops.tensor_product_spec import ProductLayout, others
from insum_nn.ops.tensor_product_statement import Statement, statements_of, terms_of
from insum_nn.structure.clebsch_gordan import nonzeros
from insum_nn.structure.irreps import dimension
from insum_nn.testing.tolerances import assert_matches
from tests.compiler.interpreted import interpreter
from tests.layers.equivariant.tensor_product_cases import (
    MODE_NAMES,
    Case,
    assert_same_derivatives,
    one_mode,
    random_case,
)
from tests.ops.test_tensor_product import conv_oracle_of, edges_of, inputs_of, oracle_of, spec_of

__all__ = ["interpreter"]

# The package shows the function under the module's name.
module = sys.modules["insum_nn.ops.tensor_product"]


@pytest.fixture
def gpu_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as a GPU does, here too: role by role, in steps of their own from short sums on."""
    monkeypatch.setattr(roles_module, "paths_are_products", lambda device: False)
    monkeypatch.setattr(statement_module, "LONG_SUM", 2)
    monkeypatch.setattr(module, "layout_of", lru_cache(lambda text: ProductLayout(TensorProductSpec.from_json(text))))


GPU_CASES = [
    *(one_mode(mode, True) for mode in MODE_NAMES),
    one_mode("uvw", True, 3, 1, 2),
    one_mode("uvw", True, 1, 3, 1),
    one_mode("uvuv", False),
    # Paths of other multiplicities between those that one statement computes: their weights lie apart.
    Case(
        "2x0e+2x1o+3x0e",
        "1x0e+1x1o",
        "4x0e+4x1o+5x1o",
        (
            (0, 0, 0, "uvw", True),
            (2, 1, 2, "uvw", True),
            (0, 1, 1, "uvw", True),
            (2, 0, 0, "uvw", True),
            (1, 0, 1, "uvw", True),
            (1, 0, 1, "uvw", True),
        ),
    ),
    *map(random_case, range(8)),
]


@pytest.mark.usefixtures("gpu_statements")
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_the_gpu_statements_have_the_same_derivatives(case: Case, shared: bool):
    spec = spec_of(case, shared=shared)
    assert_same_derivatives(lambda *t: tensor_product(spec, *t), oracle_of(spec), inputs_of(spec, 3))


@pytest.mark.usefixtures("gpu_statements")
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("mode", ["uvw", "uuw", "u<vw", "uvu"])
def test_the_gpu_statements_convolve_alike(mode: str, shared: bool):
    spec = spec_of(one_mode(mode, True, 3, 2, 4, lmax=1), shared=shared, convolution=True)
    receivers, senders = edges_of(6, 17, sort=False)
    assert_same_derivatives(
        lambda x, y, w: tensor_product(spec, x, y, w, receivers, senders),
        conv_oracle_of(spec, receivers, senders),
        inputs_of(spec, 17, 6),
    )


@pytest.mark.usefixtures("gpu_statements", "interpreter")
@pytest.mark.parametrize(
    ("kind", "kernels"),
    [
        ("weights of edges", ["wxyz"]),
        ("deterministic", ["wxy", "z"]),
        ("more sums than registers", ["wxy", "z"]),
        ("shared", ["xyz"]),
        ("one without weights", []),
    ],
)
def test_gradients_of_gradients_are_made_at_once(kind: str, kernels: list[str], monkeypatch: pytest.MonkeyPatch):
    """Of a convolution; where paths have no weights, those of the weights are sums over fewer paths."""
    found: list[Joint] = []
    call = Joint.__call__

    def watched(self: Joint, operands: Mapping[str, Tensor], *rest: Any, **how: bool) -> dict[str, Tensor]:
        if any(name[0] == "g" for name in operands):
            found.append(self)
        return call(self, operands, *rest, **how)

    monkeypatch.setattr(Joint, "__call__", watched)
    spec = spec_of(one_mode("uvu", True, 3, 1, lmax=1), shared=kind == "shared", convolution=True)
    spec = replace(spec, options=Options(backend="triton", tune=False, deterministic=kind == "deterministic"))
    # A row of the output has 8 sums of a column, of two registers each.
    monkeypatch.setattr(statement_choice, "_MOST_REGISTERS", 15 if kind == "more sums than registers" else 16)
    if kind == "one without weights":
        spec = replace(spec, paths=(spec.paths[0]._replace(weighted=False), *spec.paths[1:]))
    receivers, senders = edges_of(6, 17, sort=False)
    assert_same_derivatives(
        lambda x, y, w: tensor_product(spec, x, y, w, receivers, senders),
        conv_oracle_of(spec, receivers, senders),
        inputs_of(spec, 17, 6),
    )
    assert ["".join(sorted(each.roles)) for each in found] == kernels
    artifacts = [artifact for each in found for artifact in each.graph.artifacts.values()]
    assert all(artifact.reason.startswith("together") for artifact in artifacts)
    assert len(artifacts) == len(kernels)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("mode", ["uvw", "uvu"])
def test_the_matrix_of_a_product_by_kernels(mode: str, monkeypatch: pytest.MonkeyPatch):
    """Also in parts, where its tables would be too large for one kernel."""
    spec = replace(
        spec_of(one_mode(mode, True, 3, 2, 3, lmax=1), shared=mode == "uvw"),
        options=Options(backend="triton", tune=False),
    )
    x, y, w = inputs_of(spec, 4)
    monkeypatch.setattr(statement_module, "MOST_CELLS", 30)
    assert len(module.expressions(spec, "b")) > 1
    y, w = y.requires_grad_(), w.requires_grad_()
    product = torch.einsum("zi,zik->zk", x, module.tensor_product_right(spec, y, w))
    expected = oracle_of(spec)(x, y, w)
    assert_matches(product, expected, dtype=torch.float64, kind="sum")
    for got, wanted in zip(*(torch.autograd.grad(z.square().sum(), (y, w)) for z in (product, expected)), strict=True):
        assert_matches(got, wanted, dtype=torch.float64, kind="gradient")


def expected_of(spec: TensorProductSpec, role: str, given: Sequence[Tensor]) -> Tensor:
    """A role by the dense oracle."""
    operands = dict(zip(others(role), given, strict=True))
    named = {x: operands.get(x) for x in "xyw"}
    if role == "z":
        return oracle_of(spec)(*given)
    named[role] = torch.zeros_like(operands_of(spec, "z", given[0].shape[0])["xyw".index(role)], requires_grad=True)
    z = oracle_of(spec)(*(t for t in named.values() if t is not None))
    return torch.autograd.grad(z, named[role], operands["z"])[0]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("role", list("xyzw"))
@pytest.mark.parametrize("case", [one_mode("uvu", True), one_mode("uvw", True), *map(random_case, range(6))], ids=str)
def test_steps_parts_and_packed_operands(case: Case, role: str, shared: bool, monkeypatch: pytest.MonkeyPatch):
    """In two steps, in parts where one kernel could not unroll all coefficients, and with packed operands."""
    monkeypatch.setattr(statement_module, "LONG_SUM", 2)
    monkeypatch.setattr(statement_module, "pays_between", lambda length, terms, sums: terms > sums)
    spec = spec_of(case, shared=shared)
    given = operands_of(spec, role, 4)
    expected = expected_of(spec, role, given)

    def check(*, staged: bool = False) -> list[Statement]:
        monkeypatch.setattr(roles_module, "paths_are_products", lambda device: not staged)
        source = joint_of(ProductLayout(spec), role, given[0].device, torch.float64)
        operands = dict(zip(others(role), given, strict=True))
        assert_matches(source(operands, {role: 4})[role], expected, dtype=torch.float64, kind="sum")
        return [step for _, step in source.steps]

    whole = len(check())
    check(staged=True)
    with monkeypatch.context() as patch:
        patch.setattr(statement_module, "MOST_TERMS", 20)
        parts = check()
        assert len(parts) > whole or all(s.tables["CG"].numel() <= 20 for s in parts)
    monkeypatch.setattr(statement_module, "MOST_CELLS", 0)
    assert all(statement.packed for statement in check(staged=True))


def operands_of(spec: TensorProductSpec, role: str, z: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    x, y, w = inputs_of(spec, z, dtype=dtype)
    generator = torch.Generator().manual_seed(99)
    out = torch.randn(z, dimension(spec.out), dtype=torch.float64, generator=generator).to(dtype)
    named = {"x": x, "y": y, "w": w, "z": out}
    return tuple(named[o] for o in "xywz" if o != role)


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("role", list("xyzw"))
def test_terms_hold_every_coefficient_once(role: str, layout: str):
    spec = replace(spec_of(random_case(3), shared=True), layout=layout)
    product = ProductLayout(spec)
    dims = [product.dims[operand] for operand in "xyz"]
    found, expected = (np.zeros((len(spec.paths), *dims)) for _ in range(2))
    for group in product.groups:
        terms = terms_of(product, group, role)
        packed = [product.packed_columns(x, mul)[::mul] for x, mul in zip("xyz", group.muls, strict=True)]
        assert (np.diff(terms["path"] if role == "w" else terms["component"][:, "xyz".index(role)]) >= 0).all()
        cells = [first[component] for first, component in zip(packed, terms["component"].T, strict=True)]
        np.add.at(found, (np.array(group.paths)[terms["path"]], *cells), terms["value"])
    for number in product.live:
        path = spec.paths[number]
        index, value = nonzeros(*(product.entry(operand, path).l for operand in "xyz"))
        ends = [product.columns(x, end)[:, 0][own] for x, end, own in zip("xyz", path.ends, index, strict=True)]
        expected[(number, *ends)] = value * path.coefficient
    assert np.array_equal(found, expected)


def test_one_statement_for_all_entries():
    """Paths of equal multiplicities, whatever they end in, are one statement."""
    spec = spec_of(one_mode("uvw", True, 4, 1, 16), shared=True)
    layout = ProductLayout(spec)
    texts = {role: [statement.expression for statement in statements_of(layout, role)] for role in "xyzw"}
    assert texts["z"] == ["Z[z,K[p,w]] += CG[p] * X[z,I[p,u]] * Y[z,J[p]] * W[L[p],u,w]"]
    assert texts["w"] == ["dW[R[p],u,w] += CG[p] * X[z,I[p,u]] * Y[z,J[p]] * dZ[z,K[p,w]]"]
    assert [len(own) for own in texts.values()] == [1, 1, 1, 1]
    (staged,) = statements_of(layout, "y", staged=True)
    assert staged.expression == "dY[z,J[p]] += CG[p] * X[z,I[p,u]] * G[z,P[p],u]"
    assert staged.first is not None
    assert staged.first.expression == "G[z,p,u] += dZ[z,K[p,w]] * W[L[p],u,w]"
    # The sum over copies of the output runs once per pair, not once per coefficient.
    assert staged.first.width // 4 < staged.tables["CG"].numel()
    assert statements_of(ProductLayout(spec.with_shared(False)), "y", staged=True)[0].first is None


def test_node_attributes_meet_the_weights_once():
    """Scalars of many copies, as attributes of nodes are, multiply the weights once, not once for each component."""
    case = Case("16x0e+16x1o+16x2e", "64x0e", "16x0e+16x1o+16x2e", tuple((n, 0, n, "uvw", True) for n in range(3)))
    layout = ProductLayout(spec_of(case, shared=True))
    for role, second in (("z", "Z[z,K[p,w]] += CG[p] * X[z,I[p,u]]"), ("x", "dX[z,I[p,u]] += CG[p] * dZ[z,K[p,w]]")):
        (found,) = statements_of(layout, role, staged=True)
        assert found.expression == f"{second} * G[z,P[p],u,w]"
        assert found.first is not None
        assert found.first.expression == "G[z,p,u,w] += Y[z,J[p,v]] * W[L[p],u,v,w]"
        assert found.first.width == 3 * 16 * 16
    few = Case("16x0e+16x1o", "2x0e", "16x0e+16x1o", ((0, 0, 0, "uvw", True), (1, 0, 1, "uvw", True)))
    assert statements_of(ProductLayout(spec_of(few, shared=True)), "z", staged=True)[0].first is None
    assert statements_of(layout, "w", staged=True)[0].first is None


@pytest.mark.usefixtures("gpu_statements")
def test_two_steps_only_while_memory_lasts(monkeypatch: pytest.MonkeyPatch):
    spec = spec_of(one_mode("uvw", True, 2, 1, 3, lmax=1), shared=True)
    inputs = [t.requires_grad_() for t in inputs_of(spec, 5)]
    seen: list[str] = []
    original = Program.run_plain

    def watch(self: Program, *given: Any) -> Any:
        seen.append(self.spec.expression)
        return original(self, *given)

    monkeypatch.setattr(Program, "run_plain", watch)
    results = []
    for most in (2**28, 0):
        monkeypatch.setattr(statement_choice, "_MOST_BETWEEN", most)
        seen.clear()
        results.append(torch.autograd.grad(tensor_product(spec, *inputs).square().sum(), inputs[1])[0])
        assert any(text.startswith("G[") for text in seen) == bool(most)
    assert_matches(*results, dtype=torch.float64, kind="gradient")


INTERPRETED = """
import torch
from insum_nn.compiler.api import Options, compile
from insum_nn.compiler.runtime import statement_choice
from insum_nn.ops import tensor_product_roles as roles_module
from insum_nn.ops import tensor_product_statement as statement_module
from insum_nn.ops.tensor_product_roles import joint_of
from insum_nn.ops.tensor_product_spec import ProductLayout, others
from tests.layers.equivariant.tensor_product_cases import Case, one_mode
from tests.ops.test_tensor_product import spec_of
from tests.ops.test_tensor_product_roles import expected_of, operands_of
from insum_nn.testing.tolerances import assert_matches

statement_module.LONG_SUM = 2
small = one_mode("uvw", True, 2, 1, 3, lmax=1)
products = one_mode("uvw", True, 16, 1, 16, lmax=1)
paths = ((0, 0, 0, "uvw", True), (2, 0, 0, "uvw", True), (1, 1, 0, "uvw", True), (1, 1, 0, "uvw", False))
mixed = Case("2x0e+2x1o+3x0e", "1x0e+1x1o", "4x0e+4x1o+5x1o", paths[:3])
twice = Case("2x0e+2x1o", "1x0e+1x1o", "2x0e+2x1o", ((0, 0, 0, "uvu", True), (1, 1, 0, "uvu", False)))
cells = statement_module.MOST_CELLS
runs = (
    (small, True, 3, cells),
    (small, False, 3, cells),
    (products, True, 16, cells),
    (mixed, True, 3, cells),
    (twice, False, 3, cells),
    (small, True, 3, 0),
)
for case, shared, rows, cells in runs:
    statement_module.MOST_CELLS = cells
    spec = spec_of(case, shared=shared)
    for role in "xyzw":
        given = operands_of(spec, role, rows, torch.float32)
        expected = expected_of(spec, role, operands_of(spec, role, rows))
        roles_module.paths_are_products = lambda device, role=role: role != "y"
        source = joint_of(ProductLayout(spec), role, given[0].device, torch.float32)
        for _, step in source.steps:
            facts = dict(step.program.spec.facts)
            options = Options(backend="triton", tune=False)
            step.program = compile(
                step.expression, facts=facts, static=step.tables, options=options
            )
        for _ in range(2):
            got = source(dict(zip(others(role), given, strict=True)), {role: rows}, plain=True)
            assert_matches(got[role], expected, dtype=torch.float32, kind="sum")
        steps = [step for _, step in source.steps]
        calls = [list(step.program.spec.calls.values()) for step in steps]
        print(role, len(steps), sum(len(call.bodies) == 1 for (call,) in calls))
"""


def test_kernels():
    """Operands as they lie and packed, several groups that add up, cells that no path reaches; interpreted.

    In a process of its own, since Triton is told so when it is imported. The second call is a ready one.
    """
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(["", *sys.path])}
    command = [sys.executable, "-c", INTERPRETED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    shared, single = ["x 1 1", "y 2 2", "z 1 1", "w 1 1"], ["x 1 1", "y 1 1", "z 1 1", "w 1 1"]
    lines = done.stdout.split("\n")[:-1]
    assert lines[:12] == [*shared, *single, *shared]
    assert lines[12] == "x 2 2"
    assert lines[-4:] == shared


def test_ready_calls_notice_what_changed():
    """What runs a call serves other sizes and layouts, and none from before a clearing of the cache."""
    spec = spec_of(one_mode("uvw", True, 2, 1, 3, lmax=1), shared=True)
    given = operands_of(spec, "z", 4)
    source = joint_of(ProductLayout(spec), "z", given[0].device, torch.float64)

    def run(given: Sequence[Tensor], size: int) -> Tensor:
        return source(dict(zip("xyw", given, strict=True)), {"z": size}, plain=True)["z"]

    ((_, step),) = source.steps
    first = run(given, 4)
    assert_matches(run(given, 4), first, dtype=torch.float64, kind="sum")
    (printed,) = step.program.spec.calls.values()
    (body,) = printed.bodies.values()
    insum_nn.clear_cache()
    assert not step.program.spec.calls
    assert_matches(run(given, 4), first, dtype=torch.float64, kind="sum")
    (printed,) = step.program.spec.calls.values()
    (again,) = printed.bodies.values()
    assert again is not body
    fewer = [given[0][:3], given[1][:3], given[2]]
    assert_matches(run(fewer, 3), first[:3], dtype=torch.float64, kind="sum")
    strided = [given[0].t().contiguous().t(), *given[1:]]
    assert_matches(run(strided, 4), first, dtype=torch.float64, kind="sum")


def test_plain_calls_show_no_operator():
    """Registered operators are for those who record or transform calls; others pay only for the programs."""
    spec = spec_of(one_mode("uvw", True, 2, 1, 2, lmax=1), shared=True)
    inputs = [t.requires_grad_() for t in inputs_of(spec, 3)]

    def names(action: Callable[[], object]) -> set[str]:
        with torch.profiler.profile() as profile:
            action()
        return {event.name for event in profile.events() or ()}

    operator = "insum_nn::run"
    assert operator not in names(lambda: tensor_product(spec, *inputs).sum().backward())
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(t.detach()) for t in inputs]
        assert operator in names(lambda: tensor_product(spec, *fakes))


@pytest.mark.parametrize("by_path", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_transforms(shared: bool, by_path: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(roles_module, "paths_are_products", lambda device: by_path)
    spec = spec_of(one_mode("uvw", True, 2, 1, 3, lmax=1), shared=shared)
    inputs, tangents = inputs_of(spec, 3), inputs_of(spec, 3)
    oracle = oracle_of(spec)

    def ours(*t: Tensor) -> Tensor:
        return tensor_product(spec, *t)

    for numbers in ((0,), (1,), (2,), (0, 1, 2)):
        got = torch.func.grad(lambda *t: ours(*t).square().sum(), numbers)(*inputs)
        expected = torch.func.grad(lambda *t: oracle(*t).square().sum(), numbers)(*inputs)
        for a, b in zip(got, expected, strict=True):
            assert_matches(a, b, dtype=torch.float64, kind="gradient")
    got, expected = (torch.func.jvp(f, tuple(inputs), tuple(tangents))[1] for f in (ours, oracle))
    assert_matches(got, expected, dtype=torch.float64, kind="gradient")
    many = torch.stack([inputs[0], 2 * inputs[0], -inputs[0]])
    got = torch.func.vmap(lambda x: ours(x, *inputs[1:]))(many)
    assert_matches(got, torch.stack([oracle(x, *inputs[1:]) for x in many]), dtype=torch.float64, kind="sum")


def test_edges_arrive_as_they_were_given(monkeypatch: pytest.MonkeyPatch):
    """What is built from edges is remembered by the tensors' identity, in gradients too."""
    spec = spec_of(one_mode("uvu", True, lmax=1), shared=False, convolution=True)
    receivers, senders = edges_of(6, 17, sort=False)
    seen: list[Tensor] = []
    original = Program._plain

    def watch(self: Program, named: Mapping[str, Tensor]) -> tuple[list[Tensor], Tensor | None] | None:
        seen.extend(named[name] for name in ("Dst", "Src") if name in named)
        return original(self, named)

    monkeypatch.setattr(Program, "_plain", watch)
    ready = Program.run_plain

    def watch_ready(self: Program, ordered: Sequence[Tensor], *rest: Any) -> Tensor:
        seen.extend(t for name, t in zip(self.names, ordered, strict=True) if name in ("Dst", "Src"))
        return ready(self, ordered, *rest)

    monkeypatch.setattr(Program, "run_plain", watch_ready)
    inputs = [t.requires_grad_() for t in inputs_of(spec, 17, 6)]
    z = tensor_product(spec, *inputs, receivers, senders)
    first = torch.autograd.grad(z.square().sum(), inputs, create_graph=True)
    torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
    assert len(seen) > 8
    assert all(t is receivers or t is senders for t in seen)


def test_edges_written_to_before_the_gradients_are_refused():
    spec = spec_of(one_mode("uvu", True, lmax=1), shared=False, convolution=True)
    receivers, senders = edges_of(6, 17, sort=False)
    z = tensor_product(spec, *(t.requires_grad_() for t in inputs_of(spec, 17, 6)), receivers, senders)
    receivers.add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()

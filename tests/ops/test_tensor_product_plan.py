"""How a tensor product runs: the statements of a GPU against those of a CPU, and what a call shows to others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("e3nn")

import insum_nn
from insum_nn.compiler.api import Program
from insum_nn.ops import tensor_product_form as form_module
from insum_nn.ops.tensor_product import TensorProductSpec, tensor_product
from insum_nn.ops.tensor_product_direct import direct_of
from insum_nn.ops.tensor_product_form import Form, form_of
from insum_nn.ops.tensor_product_plan import plan_of
from insum_nn.structure.irreps import dimension
from insum_nn.testing.tolerances import assert_matches
from tests.layers.equivariant.tensor_product_cases import (
    MODE_NAMES,
    Case,
    assert_same_derivatives,
    one_mode,
    random_case,
)
from tests.ops.test_tensor_product import conv_oracle_of, edges_of, inputs_of, oracle_of, spec_of

# The package shows the function under the module's name.
module = sys.modules["insum_nn.ops.tensor_product"]


@pytest.fixture
def gpu_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the statements that a GPU takes, here too; steps of their own from short sums on."""
    monkeypatch.setattr(module, "_splits", lambda device: False)
    monkeypatch.setattr(form_module, "LONG", 2)
    monkeypatch.setattr(form_module, "form_of", lru_cache(lambda text: Form(TensorProductSpec.from_json(text))))
    monkeypatch.setattr(module, "form_of", form_module.form_of)


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


@pytest.mark.parametrize("role", list("xyzw"))
@pytest.mark.parametrize("case", [one_mode("uvu", True), one_mode("uvw", True), *map(random_case, range(6))], ids=str)
def test_statements_for_a_gpu_and_a_cpu_compute_the_same(case: Case, role: str, monkeypatch: pytest.MonkeyPatch):
    """And so do parts of them, where one kernel could not write out all coefficients."""
    monkeypatch.setattr(form_module, "LONG", 2)
    spec = spec_of(case, shared=True)
    given = operands_of(spec, role, 4)

    def run(split: bool, staged: bool) -> Tensor:
        plan = plan_of(Form(spec), role, given[0].device, torch.float64, split=split, staged=staged)
        return plan(given, (None, None), 4)

    expected = run(True, False)
    for staged in (False, True):
        assert_matches(run(False, staged), expected, dtype=torch.float64, kind="sum")
    whole = len(Form(spec).statements(role))
    monkeypatch.setattr(form_module, "POINTS", 20)
    parts = Form(spec).statements(role)
    assert len(parts) > whole or sum(int(s.tables["CG"].count_nonzero()) for s in parts) <= 20 * whole
    assert_matches(run(False, False), expected, dtype=torch.float64, kind="sum")


def operands_of(spec: TensorProductSpec, role: str, z: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    x, y, w = inputs_of(spec, z, dtype=dtype)
    generator = torch.Generator().manual_seed(99)
    out = torch.randn(z, dimension(spec.out), dtype=torch.float64, generator=generator).to(dtype)
    named = {"x": x, "y": y, "w": w, "z": out}
    return tuple(named[o] for o in "xywz" if o != role)


def test_one_statement_for_all_entries():
    """Paths of equal multiplicities, whatever they end in, are one statement on a GPU and one per entry on a CPU."""
    spec = spec_of(one_mode("uvw", True, 4, 1, 16), shared=True)
    form = form_of(spec.to_json())
    for role in "xyzw":
        assert len(form.statements(role)) == 1
    assert len(form.statements("z", split=True)) > 1
    assert form.statements("z")[0].expression == (
        "Z[z,k,w] += CG[k,r,q] * X[z,I[k,r,q],u] * Y[z,J[k,r,q]] * W[L[k,r],u,w]"
    )
    assert form.statements("w")[0].expression == ("dW[r,u,w] += CG[r,q] * X[z,I[r,q],u] * Y[z,J[r,q]] * dZ[z,K[r,q],w]")
    (staged,) = form.statements("y", staged=True)
    assert staged.expression == "dY[z,j] += CG[j,r,q] * X[z,I[j,r,q],u] * G[z,P[j,r,q],u]"
    assert staged.feed is not None
    assert staged.feed.expression == "G[z,p,u] += dZ[z,K[p],w] * W[L[p],u,w]"
    # The sum over copies of the output runs once per pair, not once per coefficient.
    assert staged.feed.width // 4 < int(staged.tables["CG"].count_nonzero())
    assert form_of(spec.with_shared(False).to_json()).statements("y", staged=True)[0].feed is None


@pytest.mark.usefixtures("gpu_statements")
def test_two_steps_only_while_memory_lasts(monkeypatch: pytest.MonkeyPatch):
    spec = spec_of(one_mode("uvw", True, 2, 1, 3, lmax=1), shared=True)
    inputs = [t.requires_grad_() for t in inputs_of(spec, 5)]
    seen: list[str] = []
    original = Program.__call__

    def watch(self: Program, **arguments: Any) -> Tensor:
        seen.append(self.expression)
        return original(self, **arguments)

    monkeypatch.setattr(Program, "__call__", watch)
    results = []
    for most in (2**28, 0):
        monkeypatch.setattr(module, "_MOST_BETWEEN", most)
        seen.clear()
        results.append(torch.autograd.grad(tensor_product(spec, *inputs).square().sum(), inputs[1])[0])
        assert any(text.startswith("G[") for text in seen) == bool(most)
    assert_matches(*results, dtype=torch.float64, kind="gradient")


INTERPRETED = """
import torch
from insum_nn.compiler.api import Options, compile
from insum_nn.ops import tensor_product_form as form_module
from insum_nn.ops.tensor_product_plan import plan_of
from insum_nn.ops.tensor_product_statement import Reading
from tests.layers.equivariant.tensor_product_cases import one_mode
from tests.ops.test_tensor_product import spec_of
from tests.ops.test_tensor_product_plan import operands_of
from insum_nn.testing.tolerances import assert_matches

form_module.LONG = 2
spec = spec_of(one_mode("uvw", True, 2, 1, 3, lmax=1), shared=True)
form = form_module.Form(spec)
for role in "xyzw":
    given = operands_of(spec, role, 2, torch.float32)
    expected = plan_of(form, role, given[0].device, torch.float32, split=True, staged=False)(given, (None, None), 2)
    plan = plan_of(form, role, given[0].device, torch.float32, split=False, staged=True)
    for step in (*plan.feeds, *plan.steps):
        source = step.source
        static = source.tables
        facts = dict(source.program._spec.facts)
        options = Options(backend="triton", tune=False)
        source.program = compile(source.expression, facts=facts, static=static, options=options)
    got = plan(given, (None, None), 2)
    assert_matches(got, expected, dtype=torch.float32, kind="sum")
    print(role, len(plan.steps))
"""


def test_kernels_of_the_gpu_statements():
    """As generated kernels, interpreted; in a process of its own, since Triton is told so when it is imported."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(["", *sys.path])}
    command = [sys.executable, "-c", INTERPRETED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == ["x 1", "y 1", "z 1", "w 1"]


DIRECT = """
import torch
from insum_nn.compiler.api import Options, compile
from insum_nn.ops import tensor_product_form as form_module
from insum_nn.ops.tensor_product_direct import direct_of
from insum_nn.ops.tensor_product_plan import plan_of
from tests.layers.equivariant.tensor_product_cases import Case, one_mode
from tests.ops.test_tensor_product import spec_of
from tests.ops.test_tensor_product_plan import operands_of
from insum_nn.testing.tolerances import assert_matches

form_module.LONG = 2
small = one_mode("uvw", True, 2, 1, 3, lmax=1)
products = one_mode("uvw", True, 16, 1, 16, lmax=1)
paths = ((0, 0, 0, "uvw", True), (2, 0, 0, "uvw", True), (1, 1, 0, "uvw", True), (1, 1, 0, "uvw", False))
mixed = Case("2x0e+2x1o+3x0e", "1x0e+1x1o", "4x0e+4x1o+5x1o", paths[:3])
twice = Case("2x0e+2x1o", "1x0e+1x1o", "2x0e+2x1o", ((0, 0, 0, "uvu", True), (1, 1, 0, "uvu", False)))
runs = ((small, True, 3), (small, False, 3), (products, True, 16), (mixed, True, 3), (twice, False, 3))
for case, shared, rows in runs:
    spec = spec_of(case, shared=shared)
    form = form_module.Form(spec)
    for role in "xyzw":
        given = operands_of(spec, role, rows, torch.float32)
        device = given[0].device
        expected = plan_of(form, role, device, torch.float32, split=True, staged=False)(given, (None, None), rows)
        direct = direct_of(form, role, device, torch.float32)
        for step in (s for pair in direct._steps for s in pair if s is not None):
            source = step.source
            facts = dict(source.program._spec.facts)
            options = Options(backend="triton", tune=False)
            step.program = compile(source.expression, facts=facts, static=source.tables, options=options)
            step.given = step.program.given(step.tables)
        for _ in range(2):
            got = direct(given, rows, "key")
            assert_matches(got, expected, dtype=torch.float32, kind="sum")
        made = [step for pair in direct._steps for step in pair if step is not None]
        print(role, len(made), sum(any(seen.ready for seen in step.given._seen.values()) for step in made))
"""


def test_kernels_of_the_direct_statements():
    """Operands as they lie, several groups that add up, cells that no path reaches; the second call is a ready one."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(["", *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", DIRECT], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    shared, single = ["x 1 1", "y 2 2", "z 1 1", "w 1 1"], ["x 1 1", "y 1 1", "z 1 1", "w 1 1"]
    assert done.stdout.split("\n")[:-1][:12] == [*shared, *single, *shared]
    assert done.stdout.split("\n")[12] == "x 2 2"


def test_ready_calls_notice_what_changed():
    """A call kept ready serves the same shapes only, and none from before a clearing of the cache."""
    spec = spec_of(one_mode("uvw", True, 2, 1, 3, lmax=1), shared=True)
    form = Form(spec)
    given = operands_of(spec, "z", 4)
    direct = direct_of(form, "z", given[0].device, torch.float64)
    assert direct is not None
    step = direct._steps[0][0]
    first = direct(given, 4, "of 4")
    assert_matches(direct(given, 4, "of 4"), first, dtype=torch.float64, kind="sum")
    (seen,) = step.given._seen.values()
    assert seen.ready is not None
    ready, operands = seen.ready, [step.named(given)[name] for name in step.program._names]
    assert ready.holds(operands)
    insum_nn.clear_cache()
    assert not ready.holds(operands)
    assert_matches(direct(given, 4, "of 4"), first, dtype=torch.float64, kind="sum")
    (seen,) = step.given._seen.values()
    assert seen.ready is not None
    assert seen.ready is not ready
    assert seen.ready.holds(operands)
    fewer = [given[0][:3], given[1][:3], given[2]]
    assert_matches(direct(fewer, 3, "of 3"), first[:3], dtype=torch.float64, kind="sum")
    strided = [given[0].t().contiguous().t(), *given[1:]]
    assert_matches(direct(strided, 4, "of 4"), first, dtype=torch.float64, kind="sum")
    along_edges = Form(spec_of(one_mode("uvu", True), shared=False, convolution=True))
    assert direct_of(along_edges, "z", given[0].device, torch.float64) is None


def test_plain_calls_show_no_operator():
    """The registered operator is for those who record or transform calls; others pay only for the programs."""
    spec = spec_of(one_mode("uvw", True, 2, 1, 2, lmax=1), shared=True)
    inputs = [t.requires_grad_() for t in inputs_of(spec, 3)]

    def names(action: Callable[[], object]) -> set[str]:
        with torch.profiler.profile() as profile:
            action()
        return {event.name for event in profile.events() or ()}

    operator = "insum_nn::tensor_product_call"
    assert operator not in names(lambda: tensor_product(spec, *inputs).sum().backward())
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(t.detach()) for t in inputs]
        assert operator in names(lambda: tensor_product(spec, *fakes))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_transforms(shared: bool, split: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_splits", lambda device: split)
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
    original = Program.__call__

    def watch(self: Program, *, tensors: dict[str, Tensor], **rest: Any) -> Tensor:
        seen.extend(tensors[name] for name in ("Dst", "Src") if name in tensors)
        return original(self, tensors=tensors, **rest)

    monkeypatch.setattr(Program, "__call__", watch)
    inputs = [t.requires_grad_() for t in inputs_of(spec, 17, 6)]
    z = tensor_product(spec, *inputs, receivers, senders)
    first = torch.autograd.grad(z.square().sum(), inputs, create_graph=True)
    torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
    assert len(seen) > 8
    assert all(t is receivers or t is senders for t in seen)

"""One `Options` object reaches every program that a layer runs, under every transform."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import Options, ops
from insum_nn.compiler.runtime.execution import Executables
from tests.layers.every_layer import EVERY_LAYER, OF_E3NN_IN_GRAPHS, with_parameters
from tests.source_tree import package_modules

# Nothing of it is a default, and no library product takes the place of a statement.
CHOSEN = Options(backend="eager", deterministic=True, specialize=False, order="left", tune=False)

Run = Callable[..., Tensor]
Values = tuple[Tensor, ...]


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> set[Options]:
    """The options of the programs that were prepared to run."""
    found: set[Options] = set()
    prepare = Executables.alone

    def recorded(self, whole):
        found.add(self.options)
        return prepare(self, whole)

    monkeypatch.setattr(Executables, "alone", recorded)
    # What was prepared before is not prepared again.
    insum_nn.clear_cache()
    return found


def loss(run: Run) -> Run:
    return lambda *values: run(*values).square().sum()


def eager(run: Run, values: Values) -> None:
    gradients = torch.autograd.grad(loss(run)(*values), values, create_graph=True)
    sum(g.square().sum() for g in gradients).backward()


def func_grad(run: Run, values: Values) -> None:
    torch.func.grad(loss(run), argnums=tuple(range(len(values))))(*values)


def func_jvp(run: Run, values: Values) -> None:
    torch.func.jvp(torch.func.grad(loss(run)), values, values)


def func_vmap(run: Run, values: Values) -> None:
    torch.func.vmap(run)(*(torch.stack([v, 2 * v]) for v in values))


def forward_mode(run: Run, values: Values) -> None:
    with torch.autograd.forward_ad.dual_level():
        run(*(torch.autograd.forward_ad.make_dual(v, v.detach()) for v in values))


TRANSFORMS = [eager, func_grad, func_jvp, func_vmap, forward_mode]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", EVERY_LAYER)
def test_differentiated(name: str, transform: Callable[[Run, Values], None], reached: set[Options]):
    case = EVERY_LAYER[name]
    transform(*with_parameters(case.module(CHOSEN), case.inputs(4)))
    assert reached == {CHOSEN}


@pytest.mark.parametrize("name", EVERY_LAYER)
def test_compiled(name: str, reached: set[Options]):
    case = EVERY_LAYER[name]
    module, inputs = case.module(CHOSEN), case.inputs(4)
    torch._dynamo.reset()
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
    wanted = set[Options]() if name in OF_E3NN_IN_GRAPHS else {CHOSEN}
    torch.compile(module, backend="aot_eager", fullgraph=True)(*leaves).square().sum().backward()
    assert reached == wanted


def test_programs_of_operators_take_options():
    """Also those that only run on a GPU."""
    for source in package_modules().values():
        # spconv's functions over tables have an argument for their one option.
        if not source.name.startswith(("insum_nn/ops/", "insum_nn/layers/")) or source.name.endswith("spconv/ops.py"):
            continue
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            where = f"{source.name}: line {node.lineno}"
            if node.func.id == "compile":
                assert "options" in {word.arg for word in node.keywords}, f"{where} leaves options out"
            words = [word.arg for word in node.keywords if node.func.id == "Options"]
            assert not any(words), f"{where} makes options of its own"


def test_every_operator_takes_options():
    # The first takes them with the spec; the others run no statement.
    others = {"tensor_product", "add", "same_structure", "register"}
    for name in set(ops.__all__) - others:
        operator = getattr(ops, name)
        if callable(operator) and not name.endswith(("_expression", "_program")) and not isinstance(operator, type):
            assert "options" in inspect.signature(operator).parameters, name


def test_texts_of_operators_name_the_release(monkeypatch: pytest.MonkeyPatch):
    """torch keys its caches of compiled graphs by them; programs that another release exported are read."""
    program = insum_nn.compile("y[Row[p]] += Val[p] * x[Col[p]]")
    text = program.spec.to_json()
    own = json.loads(text)
    assert own["options"]["release"] == insum_nn.__version__
    own["options"]["release"] = "0.0.1"
    assert type(program.spec).from_json(json.dumps(own)) == program.spec
    monkeypatch.setattr("insum_nn.compiler.options.__version__", "99.0")
    assert json.loads(Options(validate=True, backend="eager", order="left").to_json())["release"] == "99.0"
    assert Options.from_json(json.dumps({"backend": "eager"})) == Options(backend="eager")

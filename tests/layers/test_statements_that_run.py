"""What a layer prints is what runs: its statements, and no other product, convolution or scatter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("e3nn")

from insum_nn import layers
from insum_nn.compiler.runtime import artifact, autograd, dispatch, statement_choice
from insum_nn.compiler.runtime.dispatch import Spec
from insum_nn.compiler.runtime.execution import clear_cache
from insum_nn.layers.voxel import conv
from insum_nn.ops import tensor_product_roles
from insum_nn.ops.statements import program_of
from insum_nn.ops.tensor_product import expressions as expressions_of_product
from tests.layers.every_layer import EVERY_LAYER, NO_LAYERS, WITHOUT_OPTIONS
from tests.layers.layer_case import LayerCase

# Torch's operators that compute what a statement says. Sums, elementwise operators, views and integers are allowed.
STATEMENTS = (
    "mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "dot", "einsum", "convolution", "convolution_backward",
    "scatter", "scatter_add", "scatter_reduce", "index_add", "index_put", "index_reduce", "segment_reduce",
)  # fmt: skip

# Layers that hold a dense layer of another package as a child -> its name: PyG's `lin`. It is called as a module, whose
# hooks and parametrizations count, and is printed as a child.
CHILDREN = dict.fromkeys(("GCNConv", "GCNConv, narrowing", "GCNConv, no weights"), "lin")
# Those with several, of products with biases.
SEVERAL = ("SAGEConv", "SAGEConv, maxima", "GraphConv", "TAGConv", "NNConv", "PNAConv", "RGCNConv", "FastRGCNConv")
# And networks: a user's own, and e3nn's, with the statements of activations between products of matrices.
SEVERAL += ("EdgeConv", "FullyConnectedNet")

# Those that normalise edges: sums of weights, before their statements.
NORMALISES = {name: {"index_add"} for name in ("APPNP", "LGConv", "TAGConv")}
NORMALISES |= {name: {"index_add", "mm"} for name in CHILDREN}

# Layers whose statements are a program: what runs has the call's numbers, and what `=` names written out.
PROGRAMS = ("GATConv", "GATv2Conv", "TransformerConv")
LAYERS = {name: case for name, case in (EVERY_LAYER | WITHOUT_OPTIONS).items() if name not in PROGRAMS}


class Outside(TorchDispatchMode):
    """Collects what torch computes by itself on floating-point numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        if func.namespace == "aten" and name in STATEMENTS:
            some = result[0] if isinstance(result, tuple) else result
            if isinstance(some, Tensor) and some.is_floating_point():
                self.found.add(name)
        return result


def run(case: LayerCase, device: torch.device) -> nn.Module:
    """A module, after a forward and a backward pass."""
    module = case.module().to(device)
    inputs = [t.to(device) for t in case.inputs(5)]
    given = [t.requires_grad_() if t.is_floating_point() else t for t in inputs]
    module(*given).square().sum().backward()
    assert all(t.grad is not None for t in given if t.requires_grad)
    return module


# What is computed before a statement: file of the package -> what of it is floating-point. The rest are index tensors.
BEFORE_STATEMENTS = {
    "structure/gcn_norm.py": "the degrees of nodes, by which edge weights are normalised",
    "structure/kernel_map/kernel_map.py": "the number of pairs of each output, by which a mean is divided",
    "structure/kernel_map/tables.py": "",
    "structure/kernel_map/search.py": "",
    "structure/coordinates.py": "",
    "structure/graph_entries.py": "",
    "structure/site_grid.py": "",
}


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_else_is_called_without_a_dispatch_mode(name: str):
    """Under a mode torch records, so that a graph convolution is one operator; here our own Python is watched."""
    found: set[str] = set()

    def watch(frame: FrameType, event: str, called: Any) -> None:
        package, _, file = frame.f_code.co_filename.rpartition("/insum_nn/")
        if event == "c_call" and package and not file.startswith("compiler/"):
            if getattr(called, "__name__", "").rstrip("_") in STATEMENTS:
                found.add(file)

    module = LAYERS[name].module()
    inputs = [t.requires_grad_() if t.is_floating_point() else t for t in LAYERS[name].inputs(5)]
    previous = sys.getprofile()
    sys.setprofile(watch)
    try:
        module(*inputs).square().sum().backward()
    finally:
        sys.setprofile(previous)
    assert found <= BEFORE_STATEMENTS.keys()
    assert ("structure/gcn_norm.py" in found) == name.startswith(("GCNConv", "APPNP", "LGConv", "TAGConv"))


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_else_runs(name: str, device: torch.device):
    with Outside() as outside:
        run(LAYERS[name], device)
    if name in SEVERAL:
        assert outside.found <= {"mm", "addmm", *NORMALISES.get(name, ())}
    elif name in NORMALISES:
        assert outside.found == NORMALISES[name]
    else:
        assert outside.found == ({"mm"} if name in CHILDREN else set())


def test_children_of_other_packages_are_all_that_is_left():
    """Without them, no product of torch's own remains."""
    for name, attribute in CHILDREN.items():
        case = LAYERS[name]
        module = case.module()
        child: Any = module.get_submodule(f"layer.{attribute}")
        rows = child.weight.shape[0]

        def made(features: Tensor, rows: int = rows) -> Tensor:
            return features.sum(1, keepdim=True) * torch.ones(rows, dtype=features.dtype)

        child.forward = made
        inputs = [t.requires_grad_() if t.is_floating_point() else t for t in case.inputs(5)]
        with Outside() as outside:
            module(*inputs).square().sum().backward()
        assert outside.found == NORMALISES[name] - {"mm"}


def test_every_layer_is_among_them():
    names = {name.partition(",")[0].partition(".")[0] for name in (*LAYERS, *PROGRAMS)}
    # What has no statement of its own, and what no transform takes.
    assert {*layers.__all__} - names == NO_LAYERS


@pytest.mark.parametrize("name", LAYERS)
def test_statements_of_forward_are_printed(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    case = LAYERS[name]
    # The first step of a module in training finds the kernels of its gradients too.
    made = case.module().to(device).eval()
    inputs = [t.to(device) for t in case.inputs(5)]
    ran = ran_by(monkeypatch, lambda: made(*inputs))
    if name.endswith(".right"):
        # A product of its own, which the layer's `right` computes.
        layer: Any = made.get_submodule("layer")
        assert set(ran) <= set(expressions_of_product(layer.spec, "b"))
        return
    printed = {line.strip() for line in repr(made).splitlines()} | set(expressions(made))
    assert ran
    assert set(ran) <= printed


@pytest.mark.parametrize(
    "name",
    [name for name in LAYERS if name.startswith(("Sparse", "SubM", "ToDense", "AddTable", "Block", "Pruned"))],
)
def test_the_program_that_runs_is_explained(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    """Without an input, and with one."""
    made = LAYERS[name].module().to(device).eval()
    inputs = [t.to(device) for t in LAYERS[name].inputs(5)]
    layer: Any = made.get_submodule("layer")
    if isinstance(layer, layers.SparseSequential):
        layer = layer[-1]
    seen: list[Any] = []
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    ran = specs_of(monkeypatch, lambda: made(*inputs))
    assert program_of(layer._statements()[0], layer._facts(), layer.options).spec == ran[-1]
    explained = str(layer.explain(seen[0]))
    assert ran[-1].expression in explained
    # Only a call knows extents.
    assert "extents" in explained


# `right` is a product of its own; `AddTableMisaligned` reads which voxels its inputs share, which no graph can.
TRACED = [name for name in LAYERS if name != "AddTableMisaligned" and not name.endswith(".right")]


@pytest.mark.parametrize("name", TRACED)
def test_statements_of_graphs_are_printed(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    made = LAYERS[name].module().to(device).eval()
    inputs = [t.to(device) for t in LAYERS[name].inputs(5)]
    ran = ran_by(monkeypatch, lambda: make_fx(made)(*inputs))
    assert set(ran) <= set(expressions(made))
    # Layers of e3nn that run its own code there say so.
    assert ran or "e3nn's own code in graphs" in repr(made.get_submodule("layer"))


def test_large_maps_and_graphs_are_printed_where_others_take_a_table(monkeypatch: pytest.MonkeyPatch):
    """A GPU's rule is imitated."""
    monkeypatch.setattr(statement_choice, "_everywhere", True)
    case = LAYERS["SubMConv3d"]
    layer: Any = case.module().eval()
    inputs = case.inputs(5)
    table, pairs = expressions(layer)
    assert repr(layer.layer).splitlines()[1:] == [f"  {table}", f"  {conv._BY_PAIRS}:", f"    {pairs}"]

    assert ran_by(monkeypatch, lambda: layer(*inputs)) == [table]
    assert ran_by(monkeypatch, lambda: make_fx(layer)(*inputs)) == [pairs]
    monkeypatch.setattr(sys.modules["insum_nn.ops.sparse_conv"], "MOST_ENTRIES", 1)
    assert ran_by(monkeypatch, lambda: layer(*inputs)) == [pairs]


def test_one_row_of_weights_is_a_shared_one(monkeypatch: pytest.MonkeyPatch):
    layer = layers.FullyConnectedTensorProduct("2x0e", "2x0e", "2x0e", shared_weights=False)
    x, weight = torch.randn(3, 2), torch.randn(3, layer.weight_numel)
    each, one = layer.expression.splitlines()
    assert repr(layer).splitlines()[1:] == [f"  {each}", "  for one row of weights:", f"    {one}"]
    assert {*ran_by(monkeypatch, lambda: layer(x, x, weight))} == {each}
    assert {*ran_by(monkeypatch, lambda: layer(x, x, weight[:1]))} == {one}


def test_two_steps_are_printed_and_explained_where_they_run(monkeypatch: pytest.MonkeyPatch):
    """A GPU multiplies many scalars by the weights in a statement of its own; its rules are imitated here."""
    monkeypatch.setattr(tensor_product_roles, "paths_are_products", lambda device: False)
    layer = layers.FullyConnectedTensorProduct("32x0e+32x1o", "32x0e", "32x0e+32x1o")
    x, y = torch.randn(3, layer.irreps_in1.dim), torch.randn(3, 32)

    ran = ran_by(monkeypatch, lambda: layer(x, y))
    assert [text.partition("[")[0] for text in ran] == ["G", "Z"]
    *steps, one_step = layer.expression.splitlines()
    assert steps == ran
    assert repr(layer).splitlines()[1:] == [
        *(f"  {text}" for text in ran),
        "  for very many samples:",
        f"    {one_step}",
    ]
    for number, text in enumerate(ran):
        explained = layer.explain(x, y, statement=number)
        assert text in str(explained)
        assert f"statement: {number + 1} of 2" in str(explained)
    # What the first step makes of so many samples would take too much memory.
    monkeypatch.setattr(tensor_product_roles, "fits_between", lambda numbers: False)
    assert ran_by(monkeypatch, lambda: layer(x, y)) == [one_step]
    assert one_step in str(layer.explain(x, y))


@pytest.mark.parametrize(
    ("layer", "columns"),
    [
        (layers.Linear("32x0e+16x1o", "16x0e+16x1o"), 80),
        (layers.SphericalHarmonics("0e+1o+2e+3o", normalize=False), 3),
        (layers.Gate("4x0e", [torch.tanh], "2x0e", [torch.tanh], "2x1o"), 12),
    ],
)
def test_layers_around_products_explain_each_statement(layer: Any, columns: int):
    statements = layer.expression.splitlines()
    assert statements == [line.strip() for line in repr(layer).splitlines() if " += " in line]
    for number, text in enumerate(statements):
        assert text in str(layer.explain(torch.randn(5, columns), statement=number))


def ran_by(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> list[str]:
    """The statements that a call without gradients runs, in order."""
    return [spec.expression for spec in specs_of(monkeypatch, call)]


def specs_of(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> list[Spec]:
    """The programs of a call without gradients, in order."""
    ran: list[Spec] = []
    programs_of, inline = artifact.programs_of, autograd.inline

    def recorded(spec: Spec, *rest: Any) -> Any:
        ran.append(spec)
        return programs_of(spec, *rest)

    def written(spec: Spec, *rest: Any) -> Any:
        ran.append(spec)
        return inline(spec, *rest)

    clear_cache()
    with monkeypatch.context() as patch, torch.no_grad():
        for module in (artifact, dispatch):
            patch.setattr(module, "programs_of", recorded)
        # In graphs that torch records.
        patch.setattr(autograd, "inline", written)
        call()
    return ran


def expressions(module: nn.Module) -> list[str]:
    found: list[str] = []
    for part in module.modules():
        expression = getattr(part, "expression", None)
        found += expression.splitlines() if isinstance(expression, str) else []
    return found

"""What a layer prints is what runs: its statements, and no other product, convolution or scatter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("e3nn")

from insum_nn import layers
from insum_nn.compiler.runtime import dispatch
from insum_nn.compiler.runtime.composite import shared_paths
from insum_nn.compiler.runtime.dispatch import Spec
from insum_nn.compiler.runtime.execution import clear_cache
from insum_nn.ops.tensor_product_right import right_expressions
from tests.layers.every_layer import EVERY_LAYER, WITHOUT_OPTIONS, Case

# Torch's operators that compute what a statement says. Sums, elementwise operators, views and integers are allowed.
STATEMENTS = (
    "mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "dot", "einsum", "convolution", "convolution_backward",
    "scatter", "scatter_add", "scatter_reduce", "index_add", "index_put", "index_reduce", "segment_reduce",
)  # fmt: skip

# Layers that hold a dense layer of another package as a child -> the operators of that child. It is called as a module,
# whose hooks and parametrizations count, and is printed as a child: PyG's `lin`.
CHILDREN = {name: {"mm"} for name in ("GCNConv", "GCNConv, narrowing", "GCNConv, no weights")}

LAYERS = EVERY_LAYER | WITHOUT_OPTIONS


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


def run(case: Case, device: torch.device) -> nn.Module:
    """A module, after a forward and a backward pass."""
    module = case.module().to(device)
    inputs = [t.to(device) for t in case.inputs(5)]
    given = [t.requires_grad_() if t.is_floating_point() else t for t in inputs]
    module(*given).square().sum().backward()
    assert all(t.grad is not None for t in given if t.requires_grad)
    return module


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_else_runs(name: str, device: torch.device):
    with Outside() as outside:
        run(LAYERS[name], device)
    assert outside.found == CHILDREN.get(name, set())


def test_children_of_other_packages_are_all_that_is_left():
    """Without them, no product of torch's own remains."""
    for name in CHILDREN:
        case = LAYERS[name]
        module = case.module()
        child = module.get_submodule("layer").lin
        rows = child.weight.shape[0]

        def made(features: Tensor, rows: int = rows) -> Tensor:
            return features.sum(1, keepdim=True) * torch.ones(rows, dtype=features.dtype)

        child.forward = made
        inputs = [t.requires_grad_() if t.is_floating_point() else t for t in case.inputs(5)]
        with Outside() as outside:
            module(*inputs).square().sum().backward()
        assert outside.found == set()


def test_every_layer_is_among_them():
    names = {name.partition(",")[0].partition(".")[0] for name in LAYERS}
    # What has no statement of its own.
    assert {*layers.__all__} - names == {"SparseConvTensor", "SparseSequential"}


@pytest.mark.parametrize("name", LAYERS)
def test_statements_of_forward_are_printed(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    ran: list[str] = []
    prepare = dispatch.prepare

    def recorded(spec: Spec, *rest: Any) -> Any:
        ran.append(spec.expression)
        return prepare(spec, *rest)

    for module in (dispatch, shared_paths):
        monkeypatch.setattr(module, "prepare", recorded)
    case = LAYERS[name]
    # The first step of a module in training finds the kernels of its gradients too.
    made = case.module().to(device).eval()
    inputs = [t.to(device) for t in case.inputs(5)]
    clear_cache()
    with torch.no_grad():
        made(*inputs)
    if name.endswith(".right"):
        # A product of its own, which the layer's `right` computes.
        layer: Any = made.get_submodule("layer")
        assert set(ran) <= set(right_expressions(layer.spec))
        return
    printed = {line.strip() for line in repr(made).splitlines()} | set(expressions(made))
    assert ran
    assert set(ran) <= printed


def expressions(module: nn.Module) -> list[str]:
    found: list[str] = []
    for part in module.modules():
        expression = getattr(part, "expression", None)
        found += expression.splitlines() if isinstance(expression, str) else []
    return found

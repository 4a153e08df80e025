"""`make_fx(tracing_mode="symbolic")` of equivariant layers: one graph for all sizes, as NequIP compiles its models.

NequIP traces a model with the gradients in it twice, with other numbers of atoms and edges, wants equal graphs, and
trains through `torch.compile` of the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions
from torch.func import functional_call
from torch.fx import GraphModule
from torch.fx.experimental import _config
from torch.fx.experimental.proxy_tensor import make_fx

from tests.layers.every_layer import EVERY_LAYER

# What equivariant networks are made of; other layers are traced by layer_case.py.
EQUIVARIANT = [name for name in EVERY_LAYER if "Tensor" in name or name in ("Linear", "Gate", "SphericalHarmonics")]
# With parameters, and with weights and edges.
TRAINED = ("FullyConnectedTensorProduct", "TensorProductConv")


def traced(module: nn.Module, inputs: Sequence[Tensor], state: dict[str, Tensor]) -> GraphModule:
    """The module and its gradients by floating-point inputs."""

    def run(state: dict[str, Tensor], *inputs: Tensor) -> list[Tensor]:
        given = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
        out = functional_call(module, state, tuple(given))
        wanted = [x for x in given if x.requires_grad]
        return [out, *torch.autograd.grad(out.square().sum(), wanted, create_graph=True)]

    with _config.patch(use_duck_shape=False):
        tracer = make_fx(run, core_aten_decompositions(), tracing_mode="symbolic", _error_on_data_dependent_ops=True)
        return tracer(state, *(x.clone() for x in inputs))


@pytest.mark.parametrize("name", EQUIVARIANT)
def test_two_sizes_have_one_graph(name: str):
    case = EVERY_LAYER[name]
    module = case.module()
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    graph = traced(module, case.inputs(4), state)
    assert graph.code == traced(module, case.inputs(7), state).code
    if name not in TRAINED:
        return
    compiled = torch.compile(graph, backend="aot_eager", dynamic=True)
    for size in (4, 6, 9):
        inputs = case.inputs(size)
        got = compiled(state, *inputs)
        given = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
        out = module(*given)
        wanted = [x for x in given if x.requires_grad]
        want = [out, *torch.autograd.grad(out.square().sum(), wanted, create_graph=True)]
        torch.testing.assert_close(list(got), want)
        # The step of a training with forces: a gradient of gradients, by parameters and weights.
        leaves = [x for x in state.values() if x.requires_grad]
        if leaves:
            both = [torch.autograd.grad(sum(t.square().sum() for t in made[1:]), leaves) for made in (got, want)]
            torch.testing.assert_close(*both)

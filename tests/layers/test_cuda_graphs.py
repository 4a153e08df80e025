"""`torch.compile(mode="reduce-overhead")`: steps of training that Inductor records as CUDA graphs and replays.

What can be told without a GPU, that no recorded graph reads a value on the host, stands in layer_case.py.
"""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from tests.layers.every_layer import EVERY_LAYER

NAMES = ("GCNConv", "BlockSparseLinear", "PrunedConv2d", "FullyConnectedTensorProduct", "TensorProductConv")


# Inductor first captures an empty graph, and silences what torch says of it by a list that no error is put into.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.compile
@pytest.mark.parametrize("name", NAMES)
def test_replayed_steps_equal_eager_ones(name: str, gpu: torch.device):
    torch._dynamo.reset()
    counters.clear()
    case = EVERY_LAYER[name]
    module = case.module().to(gpu)
    compiled = torch.compile(module, mode="reduce-overhead", fullgraph=True)
    # The first steps warm up and record; each has other values in the same sizes.
    for step in range(1, 6):
        given = [x.to(gpu) for x in case.inputs(10)]
        inputs = [(step * x).requires_grad_() if x.is_floating_point() else x.roll(step, -1) for x in given]
        leaves = [*module.parameters(), *(x for x in inputs if x.requires_grad)]
        torch.compiler.cudagraph_mark_step_begin()
        found = []
        for run in (compiled, module):
            out = run(*inputs)
            gradients = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True, materialize_grads=True)
            # The next replay writes over what this one returned.
            found.append([out.detach().clone(), *(gradient.clone() for gradient in gradients)])
        torch.testing.assert_close(*found)
    assert counters["inductor"]["cudagraph_skips"] == 0

"""Every layer under every way of differentiating it: reverse, forward, batched, and one inside another."""

from __future__ import annotations

import pytest
from torch.autograd import gradcheck, gradgradcheck

from insum_nn import layers
from tests.layers.every_layer import EVERY_LAYER, with_parameters

# No layers by themselves: what others are called with, or made of.
NO_LAYERS = {"SparseConvTensor", "SparseSequential"}


def test_every_layer_has_a_case():
    modules = [m for case in EVERY_LAYER.values() for m in case.module().modules()]
    missing = [name for name in layers.__all__ if not any(type(m) is getattr(layers, name) for m in modules)]
    assert set(missing) <= NO_LAYERS


@pytest.mark.parametrize("name", EVERY_LAYER)
def test_gradients(name: str):
    case = EVERY_LAYER[name]
    run, values = with_parameters(case.module(), case.inputs(4))
    modes = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert gradcheck(run, values, fast_mode=True, **modes)
    assert gradgradcheck(run, values, fast_mode=True, check_batched_grad=True, check_fwd_over_rev=True)

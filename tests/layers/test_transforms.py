"""Every layer under torch's transforms: derivatives of every kind, and export with free sizes."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.export import Dim

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


@pytest.mark.parametrize("name", EVERY_LAYER)
def test_exported_graphs_take_any_size(name: str):
    """Below and above every threshold that chooses between ways of computing."""
    case = EVERY_LAYER[name]
    module = case.module()
    free = {size: Dim(size) for sizes in case.sizes for size in sizes.values()}
    named = tuple({axis: free[size] for axis, size in sizes.items()} for sizes in case.sizes)
    inferred = tuple(dict.fromkeys(sizes, Dim.AUTO) for sizes in case.sizes)
    for shapes, strict in ((named, True), (inferred, False)):
        program = torch.export.export(module, case.inputs(6), dynamic_shapes=(shapes,), strict=strict)
        bounds = [b for symbol, b in program.range_constraints.items() if str(symbol).startswith("s")]
        assert len(bounds) == len(free), "a size was fixed"
        assert all(bound.upper > 2**31 for bound in bounds), "a size was limited"
        for size in (1, 3, 300):
            inputs = case.inputs(size)
            torch.testing.assert_close(program.module()(*inputs), module(*inputs))

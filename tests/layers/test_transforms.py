"""Every layer under torch's transforms: derivatives of every kind, and export with free sizes."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.export import Dim

from insum_nn import layers
from tests.layers.every_layer import EVERY_LAYER, NO_LAYERS, with_parameters


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


# How many voxels a layer makes is not known to a traced graph; see test_sparse_jit.
TRACED = [name for name, case in EVERY_LAYER.items() if {0: "voxels"} not in case.sizes]


@pytest.mark.parametrize("name", TRACED)
def test_traced_graphs_take_any_size(name: str):
    """`torch.jit.trace`, as the peers' layers take it: saved and loaded, trained."""
    case = EVERY_LAYER[name]
    if "Tensor" in name or name == "Gate":
        # Said of e3nn's own checks of shapes too.
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
    module, buffer = case.module(), io.BytesIO()
    with torch.no_grad():
        assert torch.jit.trace(module, case.inputs(6)).graph is not None
    traced = torch.jit.trace(module, case.inputs(6))
    torch.jit.save(traced, buffer)
    buffer.seek(0)
    for run in (traced, torch.jit.load(buffer)):
        for size in (1, 3, 300):
            inputs = case.inputs(size)
            torch.testing.assert_close(run(*inputs), module(*inputs))
    found = []
    for run in (traced, module):
        inputs = [x.requires_grad_() if x.is_floating_point() else x for x in case.inputs(9)]
        leaves = [x for x in (*inputs, *module.parameters()) if x.requires_grad]
        found.append(torch.autograd.grad(run(*inputs).square().sum(), leaves))
    torch.testing.assert_close(*found)


def test_a_traced_convolution_takes_images_of_any_size():
    layer = layers.PrunedConv2d(2, 3, 3, stride=2, padding=1, density=0.5)
    traced = torch.jit.trace(layer, torch.randn(2, 2, 6, 7))
    for shape in ((2, 2, 6, 7), (1, 2, 9, 4), (3, 2, 3, 3)):
        x = torch.randn(shape)
        torch.testing.assert_close(traced(x), layer(x))


# Exported in both ways; all others in one of them by turns. A strict export traces as `torch.compile` does, which
# test_traced_graphs.py does with every layer.
IN_BOTH_WAYS = ("GCNConv", "BlockSparseLinear", "SparseConv3d", "TensorProductConv")


@pytest.mark.parametrize("name", EVERY_LAYER)
def test_exported_graphs_take_any_size(name: str):
    """Below and above every threshold that chooses between ways of computing."""
    case = EVERY_LAYER[name]
    module = case.module()
    free = {size: Dim(size) for sizes in case.sizes for size in sizes.values()}
    named = tuple({axis: free[size] for axis, size in sizes.items()} for sizes in case.sizes)
    inferred = tuple(dict.fromkeys(sizes, Dim.AUTO) for sizes in case.sizes)
    ways = [(named, True), (inferred, False)]
    if name not in IN_BOTH_WAYS:
        ways = [ways[list(EVERY_LAYER).index(name) % 2]]
    for shapes, strict in ways:
        program = torch.export.export(module, case.inputs(6), dynamic_shapes=(shapes,), strict=strict)
        bounds = [b for symbol, b in program.range_constraints.items() if str(symbol).startswith("s")]
        assert len(bounds) == len(free), "a size was fixed"
        assert all(bound.upper > 2**31 for bound in bounds), "a size was limited"
        for size in (1, 3, 300):
            inputs = case.inputs(size)
            torch.testing.assert_close(program.module()(*inputs), module(*inputs))

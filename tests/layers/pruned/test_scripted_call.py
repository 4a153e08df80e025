"""`torch.jit.script` of pruned layers, which takes `nn.Linear` and `nn.Conv2d`."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from insum_nn.layers import BlockSparseLinear, PrunedConv1d, PrunedConv2d, PrunedConv3d, SparseLinear

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning"),
]

LINES, IMAGES = [(5,), (2, 5), (2, 3, 5), (0, 5)], [(2, 4, 9, 8), (4, 9, 8), (3, 4, 11, 9), (0, 4, 9, 8)]
Case = tuple[Callable[[], nn.Module], Sequence[tuple[int, ...]]]
CASES: dict[str, Case] = {
    "linear": (lambda: BlockSparseLinear(5, 3, block_shape=2, density=0.5), LINES),
    "single numbers": (lambda: BlockSparseLinear(5, 3, block_shape=1, density=0.5), LINES),
    "sparse": (lambda: SparseLinear(5, 3, density=0.5), LINES),
    "one axis": (lambda: PrunedConv1d(4, 6, 3, 2, 1, density=0.5), [(2, 4, 9), (4, 8), (0, 4, 8)]),
    "three axes": (lambda: PrunedConv3d(4, 6, 2, 1, 1, 2, 2, density=0.5), [(2, 4, 3, 5, 4), (4, 4, 3, 3)]),
    "groups of blocks": (lambda: BlockSparseLinear(5, 3, False, block_shape=2, density=0.5, group_size=2), LINES),
    "conv": (lambda: PrunedConv2d(4, 6, 3, density=0.5), IMAGES),
    "conv with all": (
        lambda: PrunedConv2d(4, 6, (3, 2), stride=2, padding=1, dilation=2, groups=2, bias=False, density=0.5),
        IMAGES,
    ),
    "same": (lambda: PrunedConv2d(4, 6, 3, padding="same", density=0.5), IMAGES),
    "reflect": (lambda: PrunedConv2d(4, 6, 2, padding=3, padding_mode="reflect", density=0.5), IMAGES),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def results(module: nn.Module, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    output = module(x)
    return output, *torch.autograd.grad(output.square().sum(), [x, weight])


@each_case
def test_a_scripted_model_computes_what_the_layer_does(case: Case):
    make, shapes = case
    layer = make().double()
    model = torch.jit.script(nn.Sequential(layer, nn.ReLU()))
    file = io.BytesIO()
    torch.jit.save(model, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    # The scripted model trains the layer's own parameters.
    weights = layer.weight, dict(loaded.named_parameters())["0.call.weight"]
    for shape in shapes:
        x = torch.randn(shape, dtype=torch.float64)
        expected = results(nn.Sequential(layer, nn.ReLU()), x, weights[0])
        for scripted, weight in zip((model, loaded), weights, strict=True):
            for got, wanted in zip(results(scripted, x, weight), expected, strict=True):
                torch.testing.assert_close(got, wanted)
    x = torch.randn(shapes[0])
    torch.testing.assert_close(model.float()(x), layer.float()(x).relu())


def test_inputs_that_do_not_fit():
    scripted = torch.jit.script(PrunedConv2d(4, 6, 3))
    with pytest.raises(torch.jit.Error, match="Incorrect features or channels of the input"):
        scripted(torch.randn(2, 3, 9, 9))
    with pytest.raises(torch.jit.Error, match="Too few dimensions of the input"):
        scripted(torch.randn(9, 9))

"""`torch.jit.script` and `torch.jit.trace` of the equivariant layers, as e3nn's and OpenEquivariance's take them."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("e3nn")

from insum_nn.layers.equivariant.tensor_product import (
    ElementwiseTensorProduct,
    FullTensorProduct,
    FullyConnectedTensorProduct,
    TensorProduct,
    TensorSquare,
)
from insum_nn.layers.equivariant.tensor_product_conv import TensorProductConv

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

PATHS = [(0, 0, 0, "uvu", True), (1, 1, 0, "uvu", True), (0, 1, 1, "uvu", True)]
NODES, EDGES = "4x0e+4x1o", "1x0e+1x1o"


def real(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def along_edges(n: int, *weight: int) -> tuple[Tensor | None, ...]:
    rows, cols = torch.randint(0, n, (2, 2 * n))
    shape = {0: None, 1: weight, 2: (2 * n, *weight[1:])}[len(weight)]
    return real(n, 16), real(2 * n, 4), None if shape is None else real(*shape), rows, cols


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "fully connected": (
        lambda: FullyConnectedTensorProduct(NODES, EDGES, "3x0e+4x1o"),
        lambda n: (real(n, 16), real(n, 4)),
    ),
    "weights of samples": (
        lambda: TensorProduct(NODES, EDGES, NODES, PATHS, shared_weights=False),
        lambda n: (real(n, 16), real(n, 4), real(n, 12)),
    ),
    "full": (lambda: FullTensorProduct("2x0e+1o", "1o"), lambda n: (real(n, 5), real(n, 3))),
    "elementwise": (lambda: ElementwiseTensorProduct("2x0e+1o", "3x1o"), lambda n: (real(n, 5), real(n, 9))),
    "square": (lambda: TensorSquare("2x0e+1o"), lambda n: (real(n, 5),)),
    "square with weights": (lambda: TensorSquare("2x0e+1o", "3x0e+1o"), lambda n: (real(n, 5),)),
    "convolution": (lambda: TensorProductConv(NODES, EDGES, NODES, PATHS), lambda n: along_edges(n, 2 * n, 12)),
    "one weight": (lambda: TensorProductConv(NODES, EDGES, NODES, PATHS), lambda n: (*along_edges(n, 2 * n, 12),)),
    "shared weights": (
        lambda: TensorProductConv(NODES, EDGES, NODES, PATHS, shared_weights=True, internal_weights=False),
        lambda n: along_edges(n, 12),
    ),
    "weights inside": (
        lambda: TensorProductConv(NODES, EDGES, NODES, PATHS, internal_weights=True, layout="ir_mul"),
        along_edges,
    ),
}


@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.parametrize("name", CASES)
def test_compiled_by_torchscript(name: str, how: str):
    make, inputs = CASES[name]
    module = make().double()
    example = inputs(4)
    if how == "trace" and None in example:
        pytest.skip("torch.jit.trace takes no None")
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module) if how == "script" else torch.jit.trace(module, example), file)
    file.seek(0)
    loaded = torch.jit.load(file)
    if how == "script":
        # Nothing of this package is to be installed where it runs.
        assert "insum_nn::" not in str(loaded.inlined_graph)
    for size in (4, 7):
        given = inputs(size)
        if name == "one weight":
            if how == "trace":
                break
            given = (*given[:2], given[2][:1], *given[3:])
        given = tuple(x.requires_grad_() if x is not None and x.is_floating_point() else x for x in given)
        leaves = [x for x in given if x is not None and x.requires_grad]
        got, want = loaded(*given), module(*given)
        torch.testing.assert_close(got, want)
        grads = [torch.autograd.grad(out.square().sum(), leaves) for out in (got, want)]
        torch.testing.assert_close(*grads)


def test_scripts_of_right():
    square, product = TensorSquare("2x0e+1o"), FullTensorProduct("2x0e+1o", "1o").double()
    y = real(5, 3)
    torch.testing.assert_close(torch.jit.script(product).right(y), product.right(y))
    # e3nn has none of modes with pairs.
    with pytest.raises(torch.jit.Error, match="right"):
        torch.jit.script(square).right(real(5, 5))


def test_a_script_leaves_a_convolution_as_it_is():
    conv = TensorProductConv(NODES, EDGES, NODES, PATHS).double()
    before, given = repr(conv), along_edges(4, 8, 12)
    want = conv(*given)
    torch.jit.script(conv)
    assert (repr(conv), type(conv.tensor_product)) == (before, TensorProduct)
    assert torch.equal(conv(*given), want)


def test_a_convolution_inside_another_module():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = TensorProductConv(NODES, EDGES, NODES, PATHS).double()

        def forward(self, x: Tensor, y: Tensor, w: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
            return self.conv(x, y, w, rows, cols, None, 9) + 1

    block = Block()
    scripted = torch.jit.script(block)
    x, y, w, rows, cols = along_edges(6, 12, 12)
    assert scripted(x, y, w, rows, cols).shape == (9, 16)
    torch.testing.assert_close(scripted(x, y, w, rows, cols), block(x, y, w, rows, cols))
    with pytest.raises(torch.jit.Error, match="Incorrect last dimension for x"):
        scripted(x[:, 1:], y, w, rows, cols)
    with pytest.raises(torch.jit.Error, match="rows and cols must fit Y"):
        scripted(x, y, w, rows, cols[1:])
    rows[2] = -1
    with pytest.raises(RuntimeError, match="index -1 is out of bounds"):
        scripted(x, y, w, rows, cols)

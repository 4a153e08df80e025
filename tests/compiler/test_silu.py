from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from insum_nn.compiler.api import silu


def derivatives(act: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Of orders 0 to 3, along directions that differ."""
    directions = torch.linspace(-1, 2, 4 * x.numel(), dtype=x.dtype, device=x.device).reshape(4, *x.shape)
    found = [act(x)]
    for direction in directions[:3]:
        (slope,) = torch.autograd.grad(found[-1], x, direction, create_graph=True)
        found.append(slope)
    return found


@pytest.mark.parametrize("shape", [(7,), (3, 0), (5, 4), ()])
def test_derivatives(shape: tuple[int, ...], device: torch.device):
    torch.manual_seed(0)
    x = (3 * torch.randn(shape, dtype=torch.float64, device=device)).requires_grad_()
    torch.testing.assert_close(derivatives(silu, x), derivatives(functional.silu, x), rtol=1e-10, atol=1e-10)


def test_large_numbers():
    x = torch.tensor([-800.0, -100.0, 0.0, 100.0, 800.0], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(silu(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), x)
    assert slope.tolist() == pytest.approx([0, 0, 0.5, 1, 1])
    assert second.tolist() == pytest.approx([0, 0, 0.5, 0, 0])


def test_gradients_of_gradients_by_both():
    """The gradient's own gradient is asked for alone and together with that of the input."""
    x, grad = (torch.randn(6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    torch.autograd.gradgradcheck(silu, (x,))
    (slope,) = torch.autograd.grad(silu(x), x, grad, create_graph=True)
    (alone,) = torch.autograd.grad(slope.sum(), grad, retain_graph=True)
    both = torch.autograd.grad(slope.sum(), (grad, x))
    assert torch.equal(alone, both[0])


def batched(act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(act(x).sum(), x, create_graph=True)
    return torch.autograd.grad(slope, x, torch.eye(x.numel(), dtype=x.dtype), is_grads_batched=True)[0]


def hessian(act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.hessian(lambda x: act(x).sum())(x)


def traced(act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    def run(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return derivatives(act, x)[2]

    return make_fx(run)(x)(x)


@pytest.mark.parametrize("how", [batched, hessian, traced])
def test_transforms(how: Any):
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(how(silu, x), how(functional.silu, x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_dtypes(dtype: torch.dtype):
    x = torch.randn(50).to(dtype).requires_grad_()
    (first,), (wanted,) = (torch.autograd.grad(act(x).sum(), x) for act in (silu, functional.silu))
    assert torch.equal(first, wanted)


def test_little_is_kept():
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    x, grad = torch.randn(100, requires_grad=True), torch.randn(100, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        torch.autograd.grad(silu(x), x, grad, create_graph=True)
    assert {*kept} == {x.data_ptr(), grad.data_ptr()}

"""The first call of a layer, which makes what the later ones read, under a transform of torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import hessian, jacfwd, jvp, vmap

from insum_nn.ops.tensor_product_spec import layout_of
from insum_nn.structure.clebsch_gordan import nonzeros
from tests.layers.every_layer import EVERY_LAYER, with_parameters

Function = Callable[..., Tensor]


def forget() -> None:
    """Forget what products of other tests have made."""
    layout_of.cache_clear()
    nonzeros.cache_clear()


TRANSFORMS: dict[str, Callable[[Function, tuple[Tensor, ...]], object]] = {
    "jvp": lambda run, values: jvp(run, values, values),
    "jacfwd": lambda run, values: jacfwd(run)(*values),
    "hessian": lambda run, values: hessian(lambda *v: run(*v).square().sum())(*values),
    "vmap": lambda run, values: vmap(run)(*(torch.stack([v, 2 * v]) for v in values)),
}


@pytest.mark.parametrize("how", TRANSFORMS)
@pytest.mark.parametrize("name", EVERY_LAYER)
def test_the_first_call_is_as_the_second_and_leaves_nothing_behind(name: str, how: str):
    case, transform = EVERY_LAYER[name], TRANSFORMS[how]
    forget()
    run, values = with_parameters(case.module(), case.inputs(4))
    values = tuple(value.detach() for value in values)
    first = transform(run, values)
    # Were a kept constant one of the transform, what comes after it would fail, or have no gradients.
    leaves = [value.clone().requires_grad_() for value in values]
    after = torch.autograd.grad(run(*leaves).square().sum(), leaves, materialize_grads=True, allow_unused=True)
    torch.testing.assert_close(transform(run, values), first)
    forget()
    other, _ = with_parameters(case.module(), case.inputs(4))
    again = torch.autograd.grad(other(*leaves).square().sum(), leaves, materialize_grads=True, allow_unused=True)
    torch.testing.assert_close(after, again)

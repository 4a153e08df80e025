"""The comparison that every operator goes through: value and gradients against the same in dense float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from insum_nn.testing.tolerances import Kind, assert_matches

Function = Callable[..., Tensor]


def assert_same(
    run: Function, oracle: Function, leaves: Sequence[Tensor], *, kinds: tuple[Kind, Kind] = ("sum", "gradient")
) -> None:
    """`run(*leaves)` and its gradients match `oracle` on the same numbers in float64.

    Args:
        run: the operator, as a function of floating tensors alone.
        oracle: the same by dense operations; gets float64 tensors on the CPU.
        leaves: the inputs; their dtype is the result's. Strides are kept for `run`.
        kinds: rows of the tolerance table for the value and for the gradients.
    """
    dtype = leaves[0].dtype
    ours = [leaf.detach().requires_grad_() for leaf in leaves]
    theirs = [leaf.detach().to("cpu", torch.float64, copy=True).requires_grad_() for leaf in leaves]
    got, want = run(*ours), oracle(*theirs)
    assert_matches(got, want, dtype=dtype, kind=kinds[0])
    back = torch.randn(want.shape, dtype=torch.float64).to(dtype)
    found = torch.autograd.grad(got, ours, back.to(got.device))
    wanted = torch.autograd.grad(want, theirs, back.double(), allow_unused=True, materialize_grads=True)
    for ours_grad, their_grad in zip(found, wanted, strict=True):
        assert_matches(ours_grad, their_grad, dtype=dtype, kind=kinds[1])


def assert_gradients(run: Function, leaves: Sequence[Tensor]) -> None:
    """First and second derivatives agree with finite differences, in float64.

    The first entry by entry. The second, of which there are as many as pairs of entries, along random directions.
    """
    inputs = tuple(leaf.detach().clone().double().requires_grad_() for leaf in leaves)
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


def strided(tensor: Tensor) -> Tensor:
    """The same numbers with a gap after every element of the last axis, and the last two axes swapped in memory."""
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), torch.nan, dtype=tensor.dtype, device=tensor.device)
    wide[..., ::2] = tensor
    view = wide[..., ::2]
    return view if tensor.ndim < 2 else view.transpose(-1, -2).clone(memory_format=torch.contiguous_format).mT

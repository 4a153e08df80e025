"""Compare a layer with another one that computes the same: values, gradients, and both again when compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from insum_nn.testing.tolerances import assert_matches

__all__ = ["check_layer"]


def check_layer(
    layer: nn.Module,
    reference: nn.Module,
    inputs: Sequence[Tensor],
    *,
    dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32),
    compiled: bool = True,
) -> None:
    """Assert that a layer has the values and the gradients of another one, given that one's parameters.

    The reference runs in float64 on the numbers that the layer gets, rounded to its dtype; errors are judged by
    `insum_nn.testing.tolerances`, those of gradients against the largest of them.
    Gradients are those of every parameter by name and of every floating-point input, of a
    loss that weighs each element of the output differently.

    Args:
        layer: takes `reference.state_dict()` with the same keys; copied for each dtype.
        reference: computes the same by other means.
        inputs: of one call, positional; integer tensors are passed as they are.
        dtypes: of the layer and its floating-point inputs.
        compiled: also run `torch.compile(layer, fullgraph=True, dynamic=True)` with the backend `"aot_eager"`, which
            traces forward and backward with symbolic sizes, as every other backend does, and generates no code.

    Raises:
        AssertionError: a value or gradient differs, or the two have different parameters; the message names which.

    >>> check_layer(nn.Linear(2, 3), nn.Linear(2, 3), [torch.ones(4, 2)])
    """
    for dtype in dtypes:
        rounded = [t.to(dtype) if t.is_floating_point() else t for t in inputs]
        exact = copy.deepcopy(reference).to(dtype).double()
        own = copy.deepcopy(layer).to(dtype)
        own.load_state_dict(copy.deepcopy(reference).to(dtype).state_dict())
        expected = _results(exact, exact, [t.double() if t.is_floating_point() else t for t in rounded])
        runs: dict[str, Callable[..., Tensor]] = {"": own}
        if compiled:
            torch.compiler.reset()
            runs[", compiled"] = torch.compile(own, fullgraph=True, dynamic=True, backend="aot_eager")
        for mode, run in runs.items():
            _compare(_results(run, own, rounded), expected, dtype, f"{dtype}{mode}")


def _results(run: Callable[..., Tensor], owner: nn.Module, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """The output, and the gradient of each parameter and input by name."""
    taken = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    output = run(*taken)
    weights = torch.linspace(-1.0, 2.0, max(1, output.numel()), dtype=torch.float64)[: output.numel()]
    learned = {name: p for name, p in owner.named_parameters() if p.requires_grad}
    learned |= {f"input {place}": t for place, t in enumerate(taken) if t.requires_grad}
    found = {"the output": output.detach()}
    if output.requires_grad:
        upstream = weights.reshape(output.shape).to(output)
        # Where no path leads, zeros.
        grads = torch.autograd.grad(output, [*learned.values()], upstream, allow_unused=True, materialize_grads=True)
        found |= {f"the gradient of {name}": grad for name, grad in zip(learned, grads, strict=True)}
    return found


def _compare(found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype, where: str) -> None:
    assert found.keys() == expected.keys(), f"{where}: other parameters: {found.keys() ^ expected.keys()}"
    # Gradients are sums of like terms, which may cancel in all of one tensor: the shift of a softmax has none.
    scale = max((float(g.abs().max()) for g in list(expected.values())[1:] if g.numel()), default=None)
    for name, want in expected.items():
        kind, size = ("sum", None) if name == "the output" else ("gradient", scale)
        try:
            assert_matches(found[name], want, dtype=dtype, kind=kind, scale=size)
        except AssertionError as error:
            raise AssertionError(f"{where}: {name}: {error}") from None

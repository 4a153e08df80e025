"""Models of the packages nequip and mace-torch, their training step with forces: with our layers, and with others'.

`compiled` of nequip is its own compiled mode. Batches change from step to step, as those of a data loader do; with
`--replay` a step on one of them is captured in a CUDA graph, which MACE's own step, that reads its loss, cannot be.

    python -m benchmarks.run peer_models/model=nequip --busy --replay --save
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from torch import Tensor, nn

from benchmarks.peer_models import MODELS, PeerModel, peer_model
from benchmarks.registry import Problem, Setting, Work, case

__all__ = ["peer_models"]

TESTS = ("tests/layers/equivariant/test_tensor_product_conv.py", "tests/layers/test_swap.py")
# Relative to the largest element of the loss and of each gradient, which are second derivatives of the energy.
STEP = 2e-3


def _step(found: PeerModel, model: nn.Module, *, exact: bool = False) -> Work:
    """Timed are steps on one batch after the other; compared is a step on the first."""
    step, batches = found.trained(model), found.exact if exact else found.batches
    numbers = itertools.cycle(range(len(batches)))

    def outcome(_: object) -> tuple[Tensor, ...]:
        loss = step(batches[0])
        # By name: packages may hold the same parameters in another order.
        named = sorted((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
        return (loss, *(grad.clone() for _, grad in named))

    return Work(lambda: step(batches[next(numbers)]), output=outcome)


@case("peer_models", tests=TESTS, model=MODELS)
def peer_models(setting: Setting, *, model: str) -> Problem:
    """A training step of another package's model, forces in the loss."""
    found = peer_model(model, setting)

    def provider(name: str) -> Callable[[], Work]:
        return lambda: _step(found, found.models[name]())

    def oracle() -> Work:
        # All are made before a provider is built and timed.
        list(found.batches)
        return _step(found, found.reference(), exact=True)

    return Problem(
        providers={name: provider(name) for name in found.models},
        oracle=oracle,
        tolerance=STEP,
        recorded=True,
    )

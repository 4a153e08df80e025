"""Whole networks: training steps and inference, ours against the package that each layer is a replacement for.

A training step is forward, loss, backward and Adam at a learning rate of 0. Batches change from step to step, as those
of a data loader do; a GCN sees its whole graph. `compile_s` of a record is the first step with the caches as they are,
`peak_bytes` the step's peak of memory; run with `--busy` for the device-busy time and the launches:

    python -m benchmarks.run network --busy --runs 3 --save
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from benchmarks import networks
from benchmarks.networks import NETWORKS, Batch, Network, Step
from benchmarks.registry import Problem, Setting, Work, case

__all__ = ["network"]

TESTS = (
    "tests/models/test_gcn.py",
    "tests/models/test_minkunet.py",
    "tests/models/test_nequip.py",
)
# Relative to the largest element of the loss and of each gradient. Rounding of float32 puts values before a ReLU on
# the other side of zero, and batch normalisation divides by spreads of few voxels, for every provider.
STEP = {"gcn": 2e-3, "spunet": 2e-2, "minkunet": 2e-2, "nequip": 2e-3}
# Of the outputs in eval mode; with mixed precision of the loss and the outputs.
OUTPUTS = {"gcn": 1e-4, "spunet": 1e-3, "minkunet": 1e-3, "nequip": 1e-3}
MIXED = 0.1


def _step(found: Network, model: nn.Module, batches: Sequence[Batch], setting: Setting) -> Work:
    """Timed are steps on one batch after the other; compared is a step on the first."""
    step = Step(found, model, batches, setting.device)

    def outcome(_: object) -> tuple[Tensor, ...]:
        loss = step.on(batches[0])
        if found.dtype is not None:
            return (loss,)
        return (loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None))

    return Work(step, output=outcome)


def _inference(found: Network, model: nn.Module, batches: Sequence[Batch], setting: Setting) -> Work:
    def on(batch: Batch) -> Tensor:
        with networks.autocast(setting.device, found.dtype):
            return found.outputs(model, batch)

    # A network that was never trained would not normalise, and its values would leave float16's range layer by layer.
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
    if norms:
        with torch.no_grad():
            on(batches[0])
    model.eval()
    count = [0]

    def forward() -> Tensor:
        count[0] += 1
        return on(batches[(count[0] - 1) % len(batches)])

    return Work(forward, output=lambda _: on(batches[0]).detach())


@case(
    "network",
    tests=TESTS,
    network=NETWORKS,
    what=("step", "inference"),
    quick={"network": ("gcn_14k", "spunet_fp32", "nequip_864"), "what": ("step",)},
)
def network(setting: Setting, *, network: str, what: str) -> Problem:
    """A whole network: a training step, or inference in eval mode."""
    found = networks.network(network, setting)
    work: Callable[..., Work] = _step if what == "step" else _inference

    def oracle() -> Work:
        exact = found if found.dtype is None else networks.without_autocast(found)
        model, batches = found.reference(), networks.in_double(found.batches)
        made = work(exact, model, batches, setting)
        if found.dtype is None or what == "inference":
            return made
        return Work(made.forward, output=lambda raw: made.output(raw)[0])

    def provider(name: str) -> Callable[[], Work]:
        return lambda: work(found, found.models[name](), found.batches, setting)

    kind = network.partition("_")[0]
    limit = MIXED if found.dtype is not None else STEP[kind] if what == "step" else OUTPUTS[kind]
    return Problem(
        providers={name: provider(name) for name in found.models},
        oracle=oracle,
        tolerance=limit,
        recorded=what == "step",
    )

"""Small networks of each domain with the same loss in plain torch operators, and their training in two processes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import networks
from benchmarks.networks import Losses
from benchmarks.registry import Setting
from insum_nn.layers import BlockSparseLinear
from tests.ranks import device_of, meeting

__all__ = [
    "IN_PROCESSES",
    "IN_PROCESSES_STEPS",
    "NETWORKS",
    "RATES",
    "Losses",
    "Pair",
    "pair",
    "sgd",
    "steps",
    "train_as_a_rank",
]

Batch = tuple[Any, ...]
# By network: the learning rate at which a few steps change the loss by more than a hundredth.
RATES = {"gcn": 2.0, "unet": 0.05, "nequip": 1.0, "mlp": 0.1, "energies": 1.0}
NETWORKS = ("gcn", "unet", "nequip", "mlp")
# "energies" is the potential without forces in its loss.
IN_PROCESSES = (*NETWORKS, "energies")
# Momentum is there from the second on.
IN_PROCESSES_STEPS = 3


class _Masked(nn.Module):
    """A dense linear layer whose weight is multiplied by a mask."""

    def __init__(self, layer: BlockSparseLinear) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.to_dense().detach().clone())
        self.bias = nn.Parameter(layer.bias.detach().clone())
        self.register_buffer("mask", (self.weight != 0).to(self.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.mask, self.bias)


class Pair:
    """A network of our layers, the same of plain torch operators, and batches that differ.

    Attributes:
        ours: with the reference's weights.
        reference: plain.
        batches: arguments of both.
        rate: the learning rate.
    """

    def __init__(self, ours: Losses, reference: Losses, batches: Sequence[Batch], rate: float) -> None:
        self.ours, self.reference, self.batches, self.rate = ours.train(), reference.train(), list(batches), rate

    def wanted(self, count: int = 5, **options: Any) -> list[float]:
        """Losses of the reference."""
        return steps(self.reference, self.batches, self.rate, count, **options)

    def found(self, count: int = 5, **options: Any) -> list[float]:
        """Losses of ours."""
        return steps(self.ours, self.batches, self.rate, count, **options)


def _perceptron(setting: Setting) -> tuple[nn.Module, nn.Module, list[Batch]]:
    torch.manual_seed(0)
    layers = [BlockSparseLinear(24, 32, block_shape=8, density=0.5), BlockSparseLinear(32, 16, block_shape=8)]
    ours = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), nn.Linear(16, 3)).to(setting.device)
    reference = copy.deepcopy(ours)
    reference[0], reference[2] = _Masked(reference[0]), _Masked(reference[2])
    draws = [(torch.randn(rows, 24), torch.randn(rows, 3)) for rows in (10, 7)]
    return ours, reference, [tuple(t.to(setting.device) for t in draw) for draw in draws]


def pair(name: str, device: torch.device, dtype: torch.dtype = torch.float64) -> Pair:
    """Build a network of `IN_PROCESSES` and its reference."""
    setting = Setting(device, "tiny")
    if name == "mlp":
        ours, reference, batches = _perceptron(setting)
        loss: Any = lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1])  # noqa: E731
    else:
        case = {"gcn": "gcn_2k", "unet": "spunet_fp32", "nequip": "nequip_32", "energies": "nequip_32"}[name]
        found = networks.network(case, setting)
        ours, reference, batches, loss = found.models["insum_nn"](), found.reference(), found.batches, found.loss
        if name == "energies":
            loss = lambda model, batch: (model(*batch[:5]) / len(batch[0])).square().mean()  # noqa: E731
        if name == "gcn":
            # Another graph over the same nodes: orders of edges are found again.
            x, edges, labels = batches[0]
            batches = [*batches, (x, edges[:, 50:].flip(1), labels)]
    batches = networks.in_double(list(batches))
    if dtype != torch.float64:
        batches = [
            tuple(v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for v in b) for b in batches
        ]
    # Ours were built in float32.
    return Pair(Losses(ours.to(dtype), loss), Losses(reference.float().to(dtype), loss), batches, RATES[name])


def sgd(parameters: Any, rate: float) -> torch.optim.Optimizer:
    """Gradient descent with momentum."""
    return torch.optim.SGD(parameters, rate, momentum=0.9)


def steps(
    model: nn.Module,
    batches: Sequence[Batch],
    rate: float,
    count: int = 5,
    optimizer: Callable[[Any, float], torch.optim.Optimizer] = sgd,
    call: Callable[..., Tensor] | None = None,
) -> list[float]:
    """Train, and return the loss of each step.

    Args:
        model: returns the loss of a batch.
        batches: taken one after the other.
        rate: the learning rate.
        count: steps.
        optimizer: of parameters and a rate.
        call: in place of the model.
    """
    update, run = optimizer(model.parameters(), rate), model if call is None else call
    losses: list[float] = []
    for step in range(count):
        update.zero_grad()
        loss = run(*batches[step % len(batches)])
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses


def keeping_weights(model: Any, *batch: Any) -> Tensor:
    """Call a model with parts of their own that takes gradients itself, as `docs/how-to/distributed.md` says."""
    model.set_reshard_after_backward(False)
    loss = model(*batch)
    model.set_reshard_after_backward(True)
    return loss


def train_as_a_rank(rank: int, folder: str, kind: str) -> None:
    """Train every network on this process's share of the batches, and write the losses to files.

    Args:
        rank: of this process, one of two; each takes its own batch at each step.
        folder: where the processes meet and write.
        kind: of device.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    device = device_of(kind, rank)
    # Parts of their own: only where a part returns tensors.
    parts = {
        "gcn": ["convs.0", "convs.1"],
        "mlp": ["0", "2"],
        "energies": ["radial_basis", "radial", "layers.0", "layers.1"],
        "nequip": ["embedding", "radial", "layers.0", "layers.1", "readout.0"],
    }

    def train(model: Any, found: Pair, way: str, call: Any = None) -> None:
        losses = steps(model, [found.batches[rank]], found.rate, IN_PROCESSES_STEPS, call=call)
        torch.save(losses, f"{folder}/{way}-{rank}.pt")

    with meeting(device, rank, folder):
        mesh = init_device_mesh(kind, (2,))
        for name in IN_PROCESSES:
            found = pair(name, device)
            train(DistributedDataParallel(copy.deepcopy(found.ours)), found, f"ddp-{name}")
            if name == "nequip":
                train(fully_shard(copy.deepcopy(found.ours), mesh=mesh), found, "fsdp2-nequip-whole")
            for part in parts.get(name, []):
                fully_shard(found.ours.model.get_submodule(part), mesh=mesh)
            model: Any = fully_shard(found.ours, mesh=mesh)
            call = functools.partial(keeping_weights, model) if name == "nequip" else None
            train(model, found, f"fsdp2-{name}", call)
            # Wrappers go before the group: what waits for the group's threads must not hold the interpreter's lock.
            del model, call, found

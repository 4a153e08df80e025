"""Training as it is done: each way of taking a step gives the losses of the same network in plain torch operators."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("torch_geometric")
pytest.importorskip("e3nn")

from tests.layers.training_networks import (
    IN_PROCESSES,
    IN_PROCESSES_STEPS,
    NETWORKS,
    Losses,
    pair,
    sgd,
    steps,
    train_as_a_rank,
)
from tests.ranks import run_ranks

every_network = pytest.mark.parametrize("name", NETWORKS)


def same(got: list[float], wanted: list[float], of_change: float = 1e-4) -> None:
    """Losses agree to a fraction of what training changes."""
    change = abs(wanted[0] - wanted[-1])
    assert change > 0.005 * abs(wanted[0])
    assert got == pytest.approx(wanted, rel=0, abs=of_change * change)


@every_network
def test_plain_steps(name: str, device: torch.device):
    found = pair(name, device)
    same(found.found(), found.wanted())


# Activation checkpoints.


class Recomputed(nn.Module):
    """A module whose forward pass runs again in the backward pass."""

    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if not self.reentrant:
            return checkpoint(self.inner, *inputs, use_reentrant=False, **options)
        # Reentrant checkpoints see the tensors among their arguments only.
        if not hasattr(inputs[0], "replace_feature"):
            return checkpoint(lambda *given: self.inner(*given, **options), *inputs, use_reentrant=True)
        x = inputs[0]
        features = checkpoint(
            lambda features: self.inner(x.replace_feature(features)).features, x.features, use_reentrant=True
        )
        return x.replace_feature(features)


def with_checkpoints(losses: Losses, *, reentrant: bool) -> Losses:
    """Each convolution, residual block, round of messages or linear layer is computed twice."""
    model: Any = losses.model
    names = ["convs", "layers", "encoder", "decoder", *(["down", "up"] if not reentrant else [])]
    for blocks in [getattr(model, name) for name in names if hasattr(model, name)] or [model]:
        for at in range(len(blocks)):
            blocks[at] = Recomputed(blocks[at], reentrant=reentrant)
    return losses


# torch takes no `autograd.grad` through reentrant checkpoints, so none around a potential with forces.
CHECKPOINTED = [
    (name, reentrant) for name in NETWORKS for reentrant in (False, True) if (name, reentrant) != ("nequip", True)
]


@pytest.mark.parametrize(("name", "reentrant"), CHECKPOINTED)
def test_activation_checkpoints(name: str, device: torch.device, reentrant: bool):
    found = pair(name, device)
    wanted = found.wanted()
    if reentrant:
        # Gradients reach a reentrant checkpoint through its inputs.
        found.batches = [(batch[0].requires_grad_(), *batch[1:]) for batch in found.batches]
    with_checkpoints(found.ours, reentrant=reentrant)
    same(found.found(), wanted)


@every_network
def test_a_checkpoint_of_the_whole_forward_pass(name: str, device: torch.device):
    """Kernel maps and orders of edges are made twice."""
    found = pair(name, device)
    same(found.found(call=lambda *batch: checkpoint(found.ours, *batch, use_reentrant=False)), found.wanted())


# Mixed precision.


# e3nn's own Linear multiplies float32 by autocast's dtype, which torch refuses.
@pytest.mark.parametrize("name", ["gcn", "unet", "mlp"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_scaled_gradients(name: str, device: torch.device, dtype: torch.dtype):
    found = pair(name, device, torch.float32)
    wanted = pair(name, device).wanted()
    scaler = torch.amp.GradScaler(device.type, init_scale=256.0, enabled=dtype == torch.float16)
    update, got = sgd(found.ours.parameters(), found.rate), list[float]()
    for step in range(len(wanted)):
        update.zero_grad()
        with torch.autocast(device.type, dtype=dtype):
            loss = found.ours(*found.batches[step % len(found.batches)])
        scaler.scale(loss).backward()
        scaler.unscale_(update)
        nn.utils.clip_grad_norm_(found.ours.parameters(), 1e4)
        scaler.step(update)
        scaler.update()
        got.append(loss.item())
    same(got, wanted, 0.1)
    assert all(p.grad.dtype == torch.float32 for p in found.ours.parameters() if p.grad is not None)


def test_a_step_of_infinite_gradients_is_left_out(device: torch.device):
    found = pair("mlp", device, torch.float32)
    scaler, update = torch.amp.GradScaler(device.type, init_scale=2.0**120), sgd(found.ours.parameters(), 0.1)
    before = copy.deepcopy(found.ours.state_dict())
    with torch.autocast(device.type, dtype=torch.float16):
        loss = found.ours(*found.batches[0])
    scaler.scale(loss).backward()
    scaler.step(update)
    scaler.update()
    assert scaler.get_scale() == 2.0**119
    torch.testing.assert_close(found.ours.state_dict(), before, rtol=0, atol=0)


# What is made of several batches, and how parameters are updated.


@every_network
def test_accumulated_gradients(name: str, device: torch.device):
    found = pair(name, device)
    losses: list[list[float]] = []
    for model in (found.ours, found.reference):
        update, of_one = sgd(model.parameters(), found.rate), list[float]()
        for _ in range(4):
            update.zero_grad()
            total = 0.0
            for batch in found.batches:
                loss = model(*batch) / len(found.batches)
                loss.backward()
                total += loss.item()
            update.step()
            of_one.append(total)
        losses.append(of_one)
    same(*losses)


@every_network
@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_optimizers(name: str, device: torch.device, how: str):
    options = {"foreach": how == "foreach", "fused": how == "fused"}

    def adam(parameters: Any, rate: float, **options: bool) -> torch.optim.Optimizer:
        # Gradients that are zero but for rounding are not enlarged.
        return torch.optim.AdamW(parameters, rate / 100, eps=1e-3, **options)

    found = pair(name, device)
    same(found.found(optimizer=lambda *given: adam(*given, **options)), found.wanted(optimizer=adam))


# Copies of a network.


@every_network
def test_a_copy_in_the_middle(name: str, device: torch.device):
    found = pair(name, device)
    begun = found.found(2)
    twin = copy.deepcopy(found.ours)
    rest = [steps(model, found.batches, found.rate, 3) for model in (found.ours, twin)]
    wanted = [*found.wanted(2), *steps(found.reference, found.batches, found.rate, 3)]
    for each in rest:
        same([*begun, *each], wanted)


@every_network
def test_a_checkpoint_file_in_the_middle(name: str, device: torch.device):
    found, fresh = pair(name, device), pair(name, device)
    losses: list[float] = []

    def train(model: nn.Module, update: torch.optim.Optimizer, numbers: range) -> None:
        for step in numbers:
            update.zero_grad()
            loss = model(*found.batches[step % len(found.batches)])
            loss.backward()
            update.step()
            losses.append(loss.item())

    update, file = sgd(found.ours.parameters(), found.rate), io.BytesIO()
    train(found.ours, update, range(3))
    torch.save({"model": found.ours.state_dict(), "optimizer": update.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    with torch.no_grad():
        for parameter in fresh.ours.parameters():
            parameter.normal_()
    update = sgd(fresh.ours.parameters(), found.rate)
    fresh.ours.load_state_dict(state["model"])
    update.load_state_dict(state["optimizer"])
    train(fresh.ours, update, range(3, 5))
    same(losses, found.wanted())


@every_network
def test_moving_averages(name: str, device: torch.device):
    found = pair(name, device)
    losses: list[list[float]] = []
    for model in (found.ours, found.reference):
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.6), use_buffers=True)
        update, of_one = sgd(model.parameters(), found.rate), list[float]()
        for _ in range(3):
            update.zero_grad()
            model(*found.batches[0]).backward()
            update.step()
            averaged.update_parameters(model)
            of_one.append(averaged(*found.batches[0]).item())
        losses.append(of_one)
    same(*losses)


# Functions of the parameters.


@every_network
def test_functional_calls(name: str, device: torch.device):
    found = pair(name, device)
    weights = {key: p.detach().requires_grad_() for key, p in found.ours.named_parameters()}
    buffers = {key: b.clone() for key, b in found.ours.named_buffers()}
    losses, before = list[float](), copy.deepcopy(found.ours.state_dict())
    for number in range(5):
        loss = functional_call(found.ours, {**weights, **buffers}, found.batches[number % len(found.batches)])
        slopes = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True, allow_unused=True)
        weights = {
            key: (weight - found.rate * slope).detach().requires_grad_()
            for (key, weight), slope in zip(weights.items(), slopes, strict=True)
        }
        losses.append(loss.item())
    same(losses, found.wanted(optimizer=lambda parameters, rate: torch.optim.SGD(parameters, rate)))
    torch.testing.assert_close(found.ours.state_dict(), before, rtol=0, atol=0)


# torch.compile.


def traced(losses: Losses, batch: tuple[Any, ...]) -> Callable[..., Tensor]:
    """The loss as torch's operations, gradients of the forward pass included: AOTAutograd differentiates once."""
    named, buffers = dict(losses.named_parameters()), dict(losses.named_buffers())

    def run(weights: list[Tensor], *batch: Any) -> Tensor:
        return functional_call(losses, {**dict(zip(named, weights, strict=True)), **buffers}, batch)

    graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(list(named.values()), *batch)
    return lambda *batch: graph(list(named.values()), *batch)


@pytest.mark.parametrize("name", ["gcn", "mlp"])
def test_compiled_steps(name: str, device: torch.device):
    found = pair(name, device)
    torch._dynamo.reset()
    same(found.found(call=torch.compile(found.ours, backend="aot_eager", dynamic=True)), found.wanted())


# Dynamo looks at `.grad` of what a recorded launch is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.slow
def test_compiled_steps_with_forces(device: torch.device):
    found = pair("nequip", device)
    torch._dynamo.reset()
    found.batches = found.batches[:1]
    loss = torch.compile(traced(found.ours, found.batches[0]), backend="aot_eager", dynamic=False)
    same(found.found(call=loss), found.wanted())


# Several processes.


@pytest.mark.slow
def test_two_processes(tmp_path: Path, kind_of_ranks: str):
    run_ranks(train_as_a_rank, str(tmp_path), kind_of_ranks)
    for name in IN_PROCESSES:
        found = pair(name, torch.device(kind_of_ranks))
        update, wanted = sgd(found.reference.parameters(), found.rate), list[list[float]]()
        for _ in range(IN_PROCESSES_STEPS):
            update.zero_grad()
            both = [found.reference(*batch) for batch in found.batches[:2]]
            (sum(both) / 2).backward()
            update.step()
            wanted.append([loss.item() for loss in both])
        for way in (f"ddp-{name}", f"fsdp2-{name}", *(["fsdp2-nequip-whole"] if name == "nequip" else [])):
            for rank in range(2):
                same(torch.load(tmp_path / f"{way}-{rank}.pt"), [losses[rank] for losses in wanted])

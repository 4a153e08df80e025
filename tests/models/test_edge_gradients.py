from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("e3nn")

from insum_nn.models.edge_gradients import EdgeGradients
from insum_nn.models.nequip import NequIP
from tests.double import double

__all__ = ["double"]


def atoms() -> tuple[Tensor, ...]:
    """Positions, species, receivers, senders."""
    torch.manual_seed(1)
    receivers, senders = torch.tensor([[0, 0, 1, 1, 2, 2, 3, 3], [1, 2, 0, 3, 0, 3, 1, 2]])
    return 1.5 * torch.randn(4, 3), torch.tensor([1, 8, 1, 8]), receivers, senders


def found(model: NequIP, *, of_positions: bool, stress: bool) -> list[Tensor]:
    """Outputs, and the gradients of a loss on them by the weights."""
    positions, species, receivers, senders = atoms()
    positions.requires_grad_(of_positions)
    offsets = torch.linspace(-0.2, 0.2, 24).reshape(8, 3)
    if stress:
        given = positions, species, receivers, senders, offsets, torch.tensor([0, 0, 1, 1]), 2
        outputs = model.energy_forces_stress(*given, volumes=torch.tensor([3.0, 4.0]))
    else:
        outputs = model.energy_and_forces(positions, species, receivers, senders, offsets)
    sum(output.sin().sum() for output in outputs).backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(grad is not None for grad in grads)
    model.zero_grad()
    return [*outputs, *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("stress", [False, True])
@pytest.mark.parametrize(("lmax", "radial_hidden"), [(0, (5,)), (1, ()), (2, (5, 4))])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_those_through_positions(lmax: int, radial_hidden: tuple[int, ...], frozen: bool, stress: bool):
    """Whether or not the positions have gradients, outputs and gradients of weights are the same."""
    model = NequIP([1, 8], cutoff=6.0, num_layers=2, num_features=3, lmax=lmax, radial_hidden=radial_hidden).train()
    model.radial_basis.frequencies.requires_grad_(not frozen)
    through, short = (found(model, of_positions=own, stress=stress) for own in (True, False))
    torch.testing.assert_close(short, through, rtol=1e-9, atol=1e-11)


def test_second_derivatives_by_positions():
    model = NequIP([1, 8], cutoff=6.0, num_layers=1, num_features=3, lmax=1, radial_hidden=(5,)).train()
    positions, *rest = atoms()

    def forces(positions: Tensor) -> Tensor:
        return model.energy_and_forces(positions, *rest)[1]

    torch.autograd.gradcheck(forces, (positions.requires_grad_(),))


@pytest.mark.parametrize("training", [False, True])
def test_what_is_recorded(training: bool):
    model = NequIP([1, 8], cutoff=6.0, num_layers=1, num_features=3, lmax=1, radial_hidden=(5,)).train(training)
    outputs = model.energy_and_forces(*atoms())
    assert [output.requires_grad for output in outputs] == [training, training]


def test_a_backward_pass_computes_no_gradient_of_the_harmonics(monkeypatch: pytest.MonkeyPatch):
    leaves: list[Tensor] = []
    functions_of = EdgeGradients.functions_of

    def spied(self: EdgeGradients, *given: Tensor) -> tuple[Tensor, Tensor]:
        basis, leaf = functions_of(self, *given)
        leaves.append(leaf)
        return basis, leaf

    monkeypatch.setattr(EdgeGradients, "functions_of", spied)
    model = NequIP([1, 8], cutoff=6.0, num_layers=2, num_features=3, lmax=1, radial_hidden=(5,)).train()
    energy, forces = model.energy_and_forces(*atoms())
    (energy.sum() + forces.square().sum()).backward()
    assert [leaf.is_leaf for leaf in leaves] == [True]
    assert leaves[0].grad is None

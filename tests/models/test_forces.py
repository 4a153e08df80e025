"""Forces are the gradient of an energy, on each back end: their Jacobian is symmetric, and dynamics keep the energy.

Forces that are slightly wrong pass where they are compared with a tolerance, and heat or cool a long simulation.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("e3nn")

from insum_nn import Options
from insum_nn.models import NequIP
from tests.compiler.interpreted import interpreter

__all__ = ["interpreter"]

Forces = Callable[[Tensor], tuple[Tensor, Tensor]]
ATOMS, STEP = 4, 1e-4


@pytest.fixture(
    params=[
        ("auto", "cpu"),
        ("eager", "cpu"),
        ("triton", "cpu"),
        pytest.param(("auto", "cuda"), marks=pytest.mark.gpu),
        pytest.param(("triton", "cuda"), marks=pytest.mark.gpu),
    ],
    ids="-".join,
)
def forces(request: pytest.FixtureRequest) -> Forces:
    """Energy and forces of all pairs of four atoms, by a potential whose layers run on a back end."""
    backend, kind = request.param
    if (backend, kind) == ("triton", "cpu"):
        request.getfixturevalue("interpreter")
    device = torch.device(kind)
    model = NequIP([1, 8], cutoff=6.0, num_layers=1, num_features=2, lmax=1, radial_hidden=(4,), energy_scale=200.0)
    model = model.double().eval().to(device)
    for module in model.modules():
        if isinstance(getattr(module, "options", None), Options):
            module.options = Options(backend=backend)
    receivers, senders = (~torch.eye(ATOMS, dtype=torch.bool)).nonzero().t().to(device)
    species, offsets = torch.tensor([1, 8, 1, 8], device=device), torch.zeros(len(senders), 3, device=device).double()

    def of(positions: Tensor) -> tuple[Tensor, Tensor]:
        energy, found = model.energy_and_forces(positions.to(device), species, receivers, senders, offsets)
        return energy.detach().sum().cpu(), found.detach().cpu()

    return of


def start() -> Tensor:
    corners = torch.tensor([[0.0, 0, 0], [1.6, 0, 0], [0, 1.5, 0], [0, 0, 1.7]], dtype=torch.float64)
    return corners + 0.1 * torch.randn(ATOMS, 3, dtype=torch.float64)


def test_the_jacobian_of_forces_is_symmetric(forces: Forces):
    """By central differences of what is computed: their errors are of the order of the step's square."""
    at, columns, slopes = start(), [], []
    for place in range(at.numel()):
        step = torch.zeros(at.numel(), dtype=torch.float64)
        step[place] = STEP
        (above, right), (below, left) = (forces(at + sign * step.reshape(at.shape)) for sign in (1, -1))
        columns.append((right - left).flatten() / (2 * STEP))
        slopes.append((below - above) / (2 * STEP))
    jacobian = torch.stack(columns)
    largest = jacobian.abs().max()
    assert largest > 0.1
    torch.testing.assert_close(jacobian, jacobian.t(), rtol=0, atol=1e-6 * float(largest))
    torch.testing.assert_close(forces(at)[1].flatten(), torch.stack(slopes), rtol=1e-5, atol=1e-7)


def test_dynamics_keep_the_energy(forces: Forces):
    """Velocity Verlet keeps it to the order of the step's square, where forces are its gradient everywhere."""
    errors, exchanged, begin = [], 0.0, start()
    for step, count in ((0.04, 20), (0.02, 40)):
        at, velocity = begin, torch.zeros_like(begin)
        potential, force = forces(at)
        first, error = potential, 0.0
        for _ in range(count):
            velocity = velocity + step / 2 * force
            at = at + step * velocity
            potential, force = forces(at)
            velocity = velocity + step / 2 * force
            kinetic = float(velocity.square().sum() / 2)
            exchanged = max(exchanged, kinetic)
            error = max(error, abs(float(potential - first) + kinetic))
        errors.append(error)
    assert exchanged > 0.01
    assert errors[1] < 1e-2 * exchanged
    # Half the step, a quarter of the error.
    assert errors[1] < errors[0] / 3

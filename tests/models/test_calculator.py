"""Stresses against differences of energies, and the ase calculator against ase's own numerical derivatives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("e3nn")
pytest.importorskip("ase")

from ase import units
from ase.build import bulk, molecule
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.fd import calculate_numerical_forces, calculate_numerical_stress
from ase.md.verlet import VelocityVerlet

from insum_nn.datasets import Configuration, collate_atoms, copper_gold
from insum_nn.errors import InsumNameError, InsumShapeError
from insum_nn.models import NequIP, PotentialCalculator

CUTOFF = 3.0


def small(**options) -> NequIP:
    """A potential of float64 weights, whose random energies are of an atom's size."""
    torch.manual_seed(0)
    settings = {"cutoff": CUTOFF, "num_layers": 2, "num_features": 4, "lmax": 1, "num_basis": 4, "radial_hidden": (8,)}
    return NequIP([1, 6, 8, 29, 79], energy_scale=10.0, **{**settings, **options}).double().eval()


def crystal(seed: int = 0):
    """A periodic cell, sheared and rattled."""
    atoms = bulk("Cu", cubic=True)
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + 0.05 * np.random.default_rng(seed).normal(size=(3, 3))), True)
    atoms.rattle(0.1, seed=seed)
    return atoms


def strained(given: Configuration, strain: torch.Tensor) -> Configuration:
    assert given.cell is not None
    deformation = torch.eye(3, dtype=torch.float64) + strain
    return Configuration(given.positions @ deformation, given.species, given.cell @ deformation, given.periodic)


def test_stress_is_a_difference_of_energies():
    model, given = small(), [Configuration.from_ase(crystal(seed)) for seed in (0, 1)]
    batch = collate_atoms(given, CUTOFF)
    _, _, stresses = model.energy_forces_stress(*batch.model_inputs, volumes=batch.volumes)
    assert stresses.abs().max() > 1e-3
    assert torch.allclose(stresses, stresses.mT, atol=1e-14)
    step = 1e-5
    for number, configuration in enumerate(given):
        for i, j in ((0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2)):
            strain = torch.zeros(3, 3, dtype=torch.float64)
            strain[i, j] += step / 2
            strain[j, i] += step / 2
            up, down = (collate_atoms([strained(configuration, s)], CUTOFF) for s in (strain, -strain))
            with torch.no_grad():
                slope = (model(*up.model_inputs) - model(*down.model_inputs)) / (2 * step)
            expected = slope.item() / configuration.volume
            assert stresses[number, i, j].item() == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_energies_and_forces_are_those_without_stress():
    model = small()
    batch = collate_atoms([Configuration.from_ase(crystal(seed)) for seed in (0, 1)], CUTOFF)
    energy, forces = model.energy_and_forces(*batch.model_inputs)
    others = model.energy_forces_stress(*batch.model_inputs, volumes=batch.volumes)
    assert torch.equal(energy, others[0])
    assert torch.allclose(forces, others[1], atol=1e-12)
    assert not others[2].requires_grad


def test_a_loss_on_stress_reaches_the_weights():
    model = small().train()
    batch = collate_atoms(copper_gold(2), CUTOFF)
    _, _, stress = model.energy_forces_stress(*batch.model_inputs, volumes=batch.volumes)
    (stress - batch.stresses).square().mean().backward()
    weight = model.get_parameter("radial.weights.0")
    assert weight.grad is not None
    place = tuple(int(i) for i in torch.unravel_index(weight.grad.abs().argmax(), weight.shape))
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight[place] += sign * 1e-5
        _, _, stress = model.energy_forces_stress(*batch.model_inputs, volumes=batch.volumes)
        values.append((stress - batch.stresses).square().mean().item())
        with torch.no_grad():
            weight[place] -= sign * 1e-5
    assert weight.grad[place].item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)


@pytest.mark.parametrize("make", [crystal, lambda: molecule("CH3CH2OH"), lambda: molecule("CH3OH", vacuum=3.0)])
def test_the_calculator_equals_ase_s_differences(make):
    atoms = make()
    atoms.calc = PotentialCalculator(small())
    numerical = calculate_numerical_forces(atoms, eps=1e-4)
    assert np.abs(numerical).max() > 1e-3
    np.testing.assert_allclose(atoms.get_forces(), numerical, rtol=1e-5, atol=1e-6)
    if atoms.cell.rank == 3:
        numerical = calculate_numerical_stress(atoms, eps=1e-5)
        np.testing.assert_allclose(atoms.get_stress(), numerical, rtol=1e-5, atol=1e-8)
    else:
        with pytest.raises(PropertyNotImplementedError):
            atoms.get_stress()


def test_lone_atoms_are_added():
    atoms = crystal()
    plain, shifted = PotentialCalculator(small()), PotentialCalculator(small(), atom_energies={29: -1000.25})
    assert shifted.get_potential_energy(atoms) == pytest.approx(plain.get_potential_energy(atoms) - 4001.0, abs=1e-9)
    atoms.numbers[0] = 79
    with pytest.raises(InsumNameError, match=r"no energy for species \[79\]"):
        shifted.get_potential_energy(atoms)
    atoms.numbers[0] = 47
    with pytest.raises(InsumShapeError, match=r"knows no species \[47\]"):
        plain.get_potential_energy(atoms)


def test_a_calculator_keeps_its_model():
    model = small()
    calculator = PotentialCalculator(model)
    before = calculator.get_potential_energy(crystal())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert calculator.get_potential_energy(crystal(1)) != 0.0
    assert calculator.get_potential_energy(crystal()) == before


def test_dynamics_keep_the_energy():
    """Its error falls with the square of the step, as velocity Verlet's does: forces are the energy's derivative."""
    drifts = []
    for step in (2.0, 1.0):
        atoms = bulk("Cu", cubic=True) * (2, 1, 1)
        atoms.calc = PotentialCalculator(small())
        spread = np.sqrt(units.kB * 300 * atoms.get_masses())[:, None]
        atoms.set_momenta(spread * np.random.default_rng(0).normal(size=(len(atoms), 3)))
        dynamics = VelocityVerlet(atoms, step * units.fs)
        totals = []
        dynamics.attach(lambda totals=totals, atoms=atoms: totals.append(atoms.get_total_energy()))
        dynamics.run(int(40 / step))
        drifts.append(max(abs(total - totals[0]) for total in totals) / len(atoms))
    assert drifts[1] < 1e-4
    assert drifts[1] < 0.35 * drifts[0]

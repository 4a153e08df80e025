from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor

pytest.importorskip("e3nn")
pytest.importorskip("ase")

import e3nn
from ase.build import bulk, molecule
from e3nn import nn as e3nn_nn
from e3nn import o3

from insum_nn.datasets.extended_xyz import AtomBatch, Configuration, collate
from insum_nn.errors import InsumShapeError
from insum_nn.layers.equivariant.gate import Gate
from insum_nn.layers.equivariant.linear import Linear
from insum_nn.layers.equivariant.spherical_harmonics import SphericalHarmonics
from insum_nn.layers.equivariant.tensor_product import TensorProduct
from insum_nn.layers.equivariant.tensor_product_conv import TensorProductConv
from insum_nn.models.nequip import NequIP, RadialBasis
from tests.double import double

__all__ = ["double"]

CUTOFF = 3.0


def small(**options) -> NequIP:
    settings = {"cutoff": CUTOFF, "num_layers": 2, "num_features": 4, "lmax": 2, "num_basis": 4, "radial_hidden": (8,)}
    return NequIP([1, 6, 8, 29], **{**settings, **options})


def crystal(seed: int = 0) -> Configuration:
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.1, seed=seed)
    return Configuration.from_ase(atoms)


def ethanol() -> Configuration:
    return Configuration.from_ase(molecule("CH3CH2OH"))


def evaluate(model: NequIP, batch: AtomBatch) -> tuple[Tensor, Tensor]:
    return model.energy_and_forces(*batch.model_inputs)


@pytest.mark.parametrize("reflect", [1, -1])
@pytest.mark.parametrize("parity", [True, False])
@pytest.mark.parametrize("periodic", [True, False])
def test_rotations_reflections_translations(parity: bool, periodic: bool, reflect: int):
    model = small(parity=parity).eval()
    given = crystal() if periodic else ethanol()
    turn = o3.rand_matrix() * reflect
    cell = None if given.cell is None else given.cell @ turn.T
    turned = Configuration(given.positions @ turn.T + torch.randn(3), given.species, cell, given.periodic)
    energy, forces = evaluate(model, collate([given], CUTOFF))
    other_energy, other_forces = evaluate(model, collate([turned], CUTOFF))
    assert torch.allclose(energy, other_energy, rtol=1e-10)
    assert torch.allclose(forces @ turn.T, other_forces, atol=1e-10 * max(1.0, float(forces.abs().max())))
    assert forces.abs().max() > 1e-3


def test_permutations():
    model = small().eval()
    given = ethanol()
    order = torch.randperm(9)
    energy, forces = evaluate(model, collate([given], CUTOFF))
    mixed = Configuration(given.positions[order], given.species[order])
    other_energy, other_forces = evaluate(model, collate([mixed], CUTOFF))
    assert torch.allclose(energy, other_energy)
    assert torch.allclose(forces[order], other_forces)


@pytest.mark.parametrize("configuration", [crystal, ethanol])
def test_forces_are_differences_of_energies(configuration):
    model = small().eval()
    batch = collate([configuration()], CUTOFF)
    _, forces = evaluate(model, batch)
    step = 1e-5
    for atom, axis in ((0, 0), (1, 2), (3, 1)):
        moved = []
        for sign in (1, -1):
            positions = batch.positions.clone()
            positions[atom, axis] += sign * step
            moved.append(model(positions, *batch.model_inputs[1:]))
        expected = -(moved[0] - moved[1]) / (2 * step)
        assert forces[atom, axis].item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-8)


def test_a_larger_cell_is_the_same_crystal():
    """Twice the cell holds twice the energy, and each copy of an atom the same force."""
    model = small().eval()
    given = crystal()
    assert given.cell is not None
    doubled = Configuration(
        torch.cat([given.positions, given.positions + given.cell[0]]),
        given.species.repeat(2),
        given.cell * torch.tensor([[2.0], [1.0], [1.0]]),
        given.periodic,
    )
    energy, forces = evaluate(model, collate([given], CUTOFF))
    twice, both = evaluate(model, collate([doubled], CUTOFF))
    assert torch.allclose(2 * energy, twice)
    assert torch.allclose(forces.repeat(2, 1), both)


def test_configurations_of_a_batch_do_not_see_each_other():
    model = small().eval()
    given = [ethanol(), crystal(), crystal(1)]
    energies, forces = evaluate(model, collate(given, CUTOFF))
    alone = [evaluate(model, collate([c], CUTOFF)) for c in given]
    assert torch.allclose(energies, torch.cat([e for e, _ in alone]))
    assert torch.allclose(forces, torch.cat([f for _, f in alone]))


def test_training_on_forces_reaches_every_parameter():
    """The loss on forces differentiates twice; its gradient equals differences of the loss."""
    model = small().train()
    batch = collate([ethanol(), crystal()], CUTOFF)

    def loss() -> Tensor:
        energies, forces = evaluate(model, batch)
        return energies.square().mean() + forces.square().mean()

    loss().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert all(g is not None and g.isfinite().all() for g in grads.values())
    for name in ("radial.weights.0", "layers.0.radial_weight", "layers.1.mix_in.weight", "layers.0.itself.weight"):
        parameter, grad = model.get_parameter(name), grads[name]
        assert grad is not None
        place = tuple(int(i) for i in torch.unravel_index(grad.abs().argmax(), grad.shape))
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter[place] += sign * 1e-5
            values.append(loss().item())
            with torch.no_grad():
                parameter[place] -= sign * 1e-5
        assert grad[place].item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)


def test_forces_match_e3nns_products():
    """The same model with e3nn's tensor products, gathered and scattered by hand, has the same energies and forces."""
    model = small().eval()
    batch = collate([ethanol(), crystal()], CUTOFF)
    energy, forces = evaluate(model, batch)
    peer = copy.deepcopy(model)

    class Unfused(torch.nn.Module):
        def __init__(self, conv: TensorProductConv) -> None:
            super().__init__()
            own = conv.tensor_product
            rows = [(*tuple(i)[:5], i.path_weight**2) for i in own.instructions]
            options = {"irrep_normalization": "none", "path_normalization": "none", "shared_weights": False}
            self.product = o3.TensorProduct(own.irreps_in1, own.irreps_in2, own.irreps_out, rows, **options)

        def forward(self, x: Tensor, y: Tensor, w: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
            messages = self.product(x[cols], y, w)
            return messages.new_zeros(x.shape[0], messages.shape[1]).index_add(0, rows, messages)

    for layer in peer.layers:
        layer.convolution = Unfused(layer.convolution)
        own = layer.itself
        itself = o3.FullyConnectedTensorProduct(own.irreps_in1, own.irreps_in2, own.irreps_out)
        itself.load_state_dict(own.state_dict())
        layer.itself = itself
    peers_of = {Linear: o3.Linear, Gate: e3nn_nn.Gate, SphericalHarmonics: o3.SphericalHarmonics}
    for module in peer.modules():
        if type(module) in peers_of:
            # Ours are subclasses that hold what e3nn's hold.
            module.__class__ = peers_of[type(module)]
    other_energy, other_forces = evaluate(peer, batch)
    assert torch.allclose(energy, other_energy, rtol=1e-10)
    assert torch.allclose(forces, other_forces, atol=1e-10 * float(forces.abs().max()))


def test_it_is_built_from_our_products():
    model = small()
    products = [m for m in model.modules() if isinstance(m, o3.TensorProduct)]
    assert products
    assert all(isinstance(m, TensorProduct) for m in products)
    assert "Z[Dst[e],K[p,u]] += " in model.layers[0].convolution.expression


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state"])
def test_copies(how: str):
    model = small().eval()
    batch = collate([ethanol()], CUTOFF)
    expected = evaluate(model, batch)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        twin = small().eval()
        twin.load_state_dict(model.state_dict())
    for a, b in zip(evaluate(twin, batch), expected, strict=True):
        assert torch.equal(a, b)


def test_torch_compile_breaks_no_graph():
    if e3nn.__version__.startswith("0.4."):
        pytest.skip("torch.compile cannot look into e3nn 0.4")
    torch._dynamo.reset()
    model = small(lmax=1)
    batch = collate([ethanol()], CUTOFF)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(*batch.model_inputs), model(*batch.model_inputs))


def test_float32_on_each_device(device: torch.device):
    model = small().eval()
    batch = collate([ethanol(), crystal()], CUTOFF)
    energy, forces = evaluate(model, batch)
    single = model.to(device, torch.float32)
    got_energy, got_forces = evaluate(single, batch.to(device, torch.float32))
    assert torch.allclose(got_energy.cpu().double(), energy, rtol=1e-4)
    assert torch.allclose(got_forces.cpu().double(), forces, atol=1e-4 * float(forces.abs().max()))


def test_atoms_without_neighbours():
    model = small(energy_shift=[-1.0, -2.0, -3.0, -4.0]).eval()
    far = Configuration(torch.tensor([[0.0, 0, 0], [50.0, 0, 0]]), torch.tensor([1, 8]))
    energy, forces = evaluate(model, collate([far], CUTOFF))
    assert energy.isfinite().all()
    assert not forces.any()


def test_energies_are_smooth_at_the_cutoff():
    model = small().eval()
    energies = []
    for distance in (CUTOFF - 1e-4, CUTOFF - 1e-6, CUTOFF + 1e-4):
        pair = Configuration(torch.tensor([[0.0, 0, 0], [distance, 0, 0]]), torch.tensor([1, 8]))
        energies.append(evaluate(model, collate([pair], CUTOFF))[0].item())
    assert energies[0] == pytest.approx(energies[2], abs=1e-7)
    assert energies[1] == pytest.approx(energies[2], abs=1e-9)


@pytest.mark.parametrize("power", [2, 6])
def test_radial_basis(power: int):
    basis = RadialBasis(4.0, 5, power)
    r = torch.tensor([0.5, 2.0, 3.999999, 4.0, 7.0])
    values = basis(r)
    assert values.shape == (5, 5)
    assert values[2].abs().max() < 1e-4
    assert not values[3:].any()
    # At half the cutoff the first sine is 1.
    envelope = 1 - ((power + 1) * (power + 2) / 2 - power * (power + 2) / 2 + power * (power + 1) / 8) / 2**power
    assert values[1, 0].item() == pytest.approx(math.sqrt(0.5) / 2.0 * envelope)


def test_bad_input():
    model = small()
    batch = collate([ethanol()], CUTOFF)
    positions, species, *rest = batch.model_inputs
    with pytest.raises(InsumShapeError, match=r"knows no species \[7, 99\]"):
        model(
            positions, species.clone().index_fill(0, torch.tensor([0]), 7).index_fill(0, torch.tensor([2]), 99), *rest
        )
    with pytest.raises(InsumShapeError, match="do not describe atoms"):
        model(positions[:, :2], species, *rest)
    with pytest.raises(InsumShapeError, match="energy_shift has 1 energies for 2 species"):
        NequIP([1, 8], energy_shift=[1.0])


def test_a_configuration_without_a_cell_leaves_the_gradients_of_others_finite():
    model = NequIP([29], cutoff=3.0, num_layers=1, num_features=4, lmax=1).double().train()
    positions = torch.zeros(2, 3, dtype=torch.float64)
    receivers = torch.tensor([0, 0, 1, 1])
    offsets = torch.tensor([[2.5, 0.0, 0.0], [-2.5, 0.0, 0.0]] * 2, dtype=torch.float64)
    volumes = torch.tensor([15.6, torch.nan], dtype=torch.float64)
    inputs = (positions, torch.tensor([29, 29]), receivers, receivers, offsets, torch.tensor([0, 1]), 2)
    energy, forces, stress = model.energy_forces_stress(*inputs, volumes=volumes)
    assert stress[1].isnan().all()
    (energy.sum() + forces.square().sum() + stress[0].square().sum()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

ase = pytest.importorskip("ase")

from ase.build import bulk, molecule  # noqa: E402
from ase.calculators.emt import EMT  # noqa: E402

from insum_nn.datasets.extended_xyz import Configuration, collate, read_extended_xyz, statistics  # noqa: E402
from insum_nn.errors import InsumFormatError, InsumNameError, InsumShapeError  # noqa: E402


@pytest.fixture
def frames():
    found = []
    for seed in range(3):
        atoms = bulk("Cu", cubic=True)
        atoms.rattle(0.1, seed=seed)
        atoms.calc = EMT()
        atoms.get_forces()
        found.append(atoms)
    return found


def test_round_trip_through_a_file(tmp_path: Path, frames):
    from ase.io import write

    path = tmp_path / "frames.xyz"
    write(path, frames, format="extxyz")
    read = read_extended_xyz(path)
    assert len(read) == 3
    assert len(read_extended_xyz(path, limit=2)) == 2
    for configuration, atoms in zip(read, frames, strict=True):
        assert configuration.energy == pytest.approx(atoms.get_potential_energy(), abs=1e-6)
        assert np.allclose(configuration.forces, atoms.get_forces(), atol=1e-6)
        assert np.allclose(configuration.positions, atoms.positions, atol=1e-6)
        assert configuration.periodic == (True, True, True)
        assert np.allclose(configuration.cell, atoms.cell.array)
        assert configuration.species.tolist() == [29] * 4


def test_other_names_of_energy_and_forces(tmp_path: Path):
    text = '2\nProperties=species:S:1:pos:R:3:REF_f:R:3 REF_e=-1.5 pbc="F F F"\n'
    text += "H 0 0 0 0.5 0 0\nH 0 0 0.7 -0.5 0 0\n"
    path = tmp_path / "a.xyz"
    path.write_text(text)
    plain = read_extended_xyz(path)[0]
    assert plain.energy is None
    assert plain.forces is None
    named = read_extended_xyz(path, energy_key="REF_e", forces_key="REF_f")[0]
    assert named.energy == -1.5
    assert named.forces is not None
    assert named.forces[:, 0].tolist() == [0.5, -0.5]
    assert named.cell is None


def test_broken_files_name_the_place(tmp_path: Path):
    good = "1\nProperties=species:S:1:pos:R:3 energy=1.0\nH 0 0 0\n"
    path = tmp_path / "broken.xyz"
    path.write_text(good + "2\nProperties=species:S:1:pos:R:3\nH 0 0 0\n")
    with pytest.raises(InsumFormatError, match=r"configuration \d of .*broken\.xyz cannot be read") as info:
        read_extended_xyz(path)
    assert "fix: " in str(info.value)
    with pytest.raises(FileNotFoundError, match="no file"):
        read_extended_xyz(tmp_path / "absent.xyz")


@pytest.mark.parametrize("cutoff", [2.6, 3.7, 6.0])
def test_edges_of_a_periodic_cell(frames, cutoff: float):
    """Against all pairs with all images that can be near."""
    configuration = Configuration.from_ase(frames[0])
    receivers, senders, offsets = configuration.edges(cutoff)
    positions, cell = configuration.positions, configuration.cell
    assert cell is not None
    images = torch.cartesian_prod(*[torch.arange(-3, 4)] * 3).double() @ cell
    vectors = positions[None, :, None] + images[None, None] - positions[:, None, None]
    near = (vectors.norm(dim=-1) < cutoff) & (vectors.norm(dim=-1) > 1e-9)
    assert len(receivers) == int(near.sum())
    assert torch.equal(receivers, receivers.sort().values)
    found = positions[senders] + offsets - positions[receivers]
    assert torch.allclose(found.norm(dim=1).sort().values, vectors[near].norm(dim=-1).sort().values)


def test_edges_of_a_molecule():
    configuration = Configuration.from_ase(molecule("CH3CH2OH"))
    receivers, senders, offsets = configuration.edges(1.6)
    distance = torch.cdist(configuration.positions, configuration.positions)
    near = (distance < 1.6) & (distance > 0)
    assert torch.equal(torch.stack([receivers, senders], 1).unique(dim=0), near.nonzero())
    assert not offsets.any()


def test_collate_and_to(frames):
    configurations = [Configuration.from_ase(atoms) for atoms in frames]
    batch = collate(configurations, 3.0)
    assert batch.num_graphs == 3
    assert batch.batch.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert torch.equal(batch.batch[batch.receivers], batch.batch[batch.senders])
    assert batch.forces is not None
    assert batch.forces.shape == (12, 3)
    single = batch.to(dtype=torch.float32)
    assert single.positions.dtype == single.offsets.dtype == torch.float32
    assert single.receivers.dtype == torch.int64
    assert collate([*configurations[:1], Configuration.from_ase(molecule("H2"))], 3.0).energies is None
    with pytest.raises(InsumShapeError, match="no configurations"):
        collate([], 3.0)


def test_an_atom_alone_has_no_edges():
    batch = collate([Configuration(torch.zeros(1, 3, dtype=torch.float64), torch.tensor([1]))], 3.0)
    assert batch.receivers.shape == (0,)
    assert batch.offsets.shape == (0, 3)


def test_stress_is_read_in_each_of_its_forms(tmp_path: Path, frames):
    from ase.io import write

    expected = frames[0].get_stress(voigt=False)
    assert np.abs(expected).max() > 1e-3
    assert np.allclose(Configuration.from_ase(frames[0]).stress, expected)
    path = tmp_path / "stress.xyz"
    write(path, frames[0], format="extxyz")
    assert np.allclose(read_extended_xyz(path)[0].stress, expected, atol=1e-6)
    plain = frames[0].copy()
    for name, value in (("nine", expected.ravel()), ("six", frames[0].get_stress()), ("square", expected)):
        plain.info = {name: value}
        assert np.allclose(Configuration.from_ase(plain, stress_key=name).stress, expected), name
    plain.info = {"pressure": 1.0}
    with pytest.raises(InsumShapeError, match="a stress has shape"):
        Configuration.from_ase(plain, stress_key="pressure")


def test_volumes_and_stresses_of_a_batch(frames):
    atoms = frames[0].copy()
    atoms.pbc = False
    open_one, closed = Configuration.from_ase(atoms), Configuration.from_ase(frames[0])
    batch = collate([closed, open_one], 3.0)
    assert batch.volumes[0].item() == pytest.approx(frames[0].get_volume())
    assert batch.volumes[1].isnan()
    assert batch.stresses is None
    assert collate([closed, closed], 3.0).stresses.shape == (2, 3, 3)


def test_lone_atoms_are_subtracted_in_float64():
    pair = Configuration(torch.zeros(2, 3), torch.tensor([1, 8]), energy=-2000.000001)
    batch = collate([pair], 1.0, atom_energies={1: -13.0, 8: -1987.0})
    assert batch.energies.item() == pytest.approx(-1e-6, rel=1e-5)
    with pytest.raises(InsumNameError, match=r"no energy of a lone atom of \[8\]"):
        collate([pair], 1.0, atom_energies={1: -13.0})


def test_statistics_are_those_of_the_data():
    generator = torch.Generator().manual_seed(0)
    lone, found, forces = {1: -2.0, 6: -30.0}, [], []
    for count in range(1, 6):
        species = torch.tensor([1] * count + [6] * (6 - count))
        force = torch.randn(6, 3, generator=generator, dtype=torch.float64)
        positions = 2.0 * torch.arange(6.0, dtype=torch.float64)[:, None] * torch.eye(3, dtype=torch.float64)[0]
        energy = sum(lone[s] for s in species.tolist())
        found.append(Configuration(positions, species, energy=energy, forces=force))
        forces.append(force)
    got = statistics(found, cutoff=2.5)
    assert got.atom_energies == pytest.approx(lone)
    assert got.force_rms == pytest.approx(torch.cat(forces).square().mean().sqrt().item())
    assert got.average_neighbors == pytest.approx(10 / 6)
    options = {"species": [1, 6], "energy_scale": got.force_rms, "average_neighbors": got.average_neighbors}
    assert got.model_options == options
    with pytest.raises(InsumShapeError, match="of 1 configurations 0 have an energy and 0 have forces"):
        statistics([Configuration(torch.zeros(1, 3), torch.tensor([1]))], 1.0)


def test_generated_alloys():
    from insum_nn.datasets import copper_gold

    cells, again = copper_gold(8, seed=3), copper_gold(8, seed=3)
    assert all(
        torch.equal(a.positions, b.positions) and a.energy == b.energy for a, b in zip(cells, again, strict=True)
    )
    assert [int((c.species == 79).sum()) for c in cells] == [0, 1, 2, 3, 0, 1, 2, 3]
    for cell in cells[:2]:
        atoms = cell.to_ase()
        atoms.calc = EMT()
        assert atoms.get_potential_energy() == pytest.approx(cell.energy)
        assert np.allclose(atoms.get_forces(), cell.forces)
        assert np.allclose(atoms.get_stress(voigt=False), cell.stress)

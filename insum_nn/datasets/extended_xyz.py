"""Configurations of atoms with energies and forces: extended XYZ files, read by ase, as tensors and edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from insum_nn.errors import InsumFormatError, InsumNameError, InsumShapeError, import_extra

__all__ = ["AtomBatch", "AtomStatistics", "Configuration", "collate", "read_extended_xyz", "statistics"]


T = TypeVar("T")


def _ase(module: str) -> Any:
    return import_extra(module, "configurations of atoms")


@dataclass(frozen=True, eq=False)
class Configuration:
    """Atoms at one moment.

    Attributes:
        positions: (n, 3), in angstrom.
        species: (n,) atomic numbers.
        cell: (3, 3) vectors of the periodic cell as rows, or `None`.
        periodic: along which of them the cell repeats.
        energy: of the configuration in eV, or `None`.
        forces: (n, 3) in eV/angstrom, or `None`.
        stress: (3, 3) in eV/angstrom^3, positive where the cell is under tension, as in ase; or `None`.
    """

    positions: Tensor
    species: Tensor
    cell: Tensor | None = None
    periodic: tuple[bool, bool, bool] = (False, False, False)
    energy: float | None = None
    forces: Tensor | None = None
    stress: Tensor | None = None
    _edges: dict[float, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def from_ase(
        cls, atoms: Any, *, energy_key: str = "energy", forces_key: str = "forces", stress_key: str = "stress"
    ) -> Configuration:
        """Take an `ase.Atoms`, with energy, forces and stress of its calculator, its `info` or its `arrays`.

        Args:
            atoms: the atoms.
            energy_key: the name of the energy there.
            forces_key: that of the forces; 3BPA and most sets say `forces`, some `force`.
            stress_key: that of the stress: (3, 3), or the six entries of Voigt as ase orders them.

        Raises:
            InsumShapeError: the stress has another shape.

        >>> from ase import Atoms
        >>> Configuration.from_ase(Atoms("OH2", [[0, 0, 0], [1, 0, 0], [0, 1, 0]])).species.tolist()
        [8, 1, 1]
        """
        results = atoms.calc.results if atoms.calc is not None else {}
        energy = results.get(energy_key, atoms.info.get(energy_key))
        forces = results.get(forces_key, atoms.arrays.get(forces_key))
        stress = results.get(stress_key, atoms.info.get(stress_key))
        a, b, c = map(bool, atoms.pbc)
        return cls(
            _float64(atoms.positions),
            torch.from_numpy(np.array(atoms.numbers, np.int64)),
            _float64(atoms.cell.array) if a or b or c else None,
            (a, b, c),
            None if energy is None else float(energy),
            None if forces is None else _float64(forces),
            None if stress is None else _float64(_full_stress(np.array(stress, np.float64))),
        )

    @property
    def volume(self) -> float:
        """Of the periodic cell, in angstrom^3; NaN without one."""
        return float("nan") if self.cell is None else float(torch.linalg.det(self.cell).abs())

    def to_ase(self) -> Any:
        """The same as an `ase.Atoms`, without energy, forces and stress."""
        cell = None if self.cell is None else self.cell.numpy()
        return _ase("ase").Atoms(
            numbers=self.species.numpy(), positions=self.positions.numpy(), cell=cell, pbc=self.periodic
        )

    def edges(self, cutoff: float) -> tuple[Tensor, Tensor, Tensor]:
        """All pairs of atoms, or of an atom and an image of an atom, that are closer than `cutoff`; remembered.

        Returns:
            (e,) receivers, ascending; (e,) senders; (e, 3) what takes a sender to its image.

        >>> chain = Configuration(torch.zeros(1, 3), torch.tensor([6]), torch.eye(3) * 2.0, (True, False, False))
        >>> receivers, senders, offsets = chain.edges(2.5)
        >>> receivers.tolist(), senders.tolist(), sorted(offsets[:, 0].tolist())
        ([0, 0], [0, 0], [-2.0, 2.0])
        """
        if cutoff in self._edges:
            return self._edges[cutoff]
        atoms = self.to_ase()
        *ends, images = _ase("ase.neighborlist").neighbor_list("ijS", atoms, cutoff)
        receivers, senders = (torch.from_numpy(end.astype(np.int64)) for end in ends)
        self._edges[cutoff] = receivers, senders, _float64(images @ atoms.cell.array)
        return self._edges[cutoff]


def _float64(numbers: Any) -> Tensor:
    """Return a copy of numbers as a tensor."""
    return torch.from_numpy(np.array(numbers, np.float64))


def _full_stress(stress: NDArray[np.float64]) -> NDArray[np.float64]:
    """(3, 3) from itself, its nine entries, or the six of Voigt: xx, yy, zz, yz, xz, xy."""
    if stress.shape == (6,):
        return _ase("ase.stress").voigt_6_to_full_3x3_stress(stress)
    if stress.size != 9:
        details, fix = ["expected (3, 3), (9,) or (6,): xx, yy, zz, yz, xz, xy"], "pass the key of the stress."
        raise InsumShapeError(f"a stress has shape {stress.shape}", details=details, fix=fix, got=stress.shape)
    return stress.reshape(3, 3)


@dataclass(frozen=True, eq=False)
class AtomBatch:
    """Several configurations side by side, with their edges.

    Attributes:
        positions: (n, 3).
        species: (n,) atomic numbers.
        receivers: (e,), ascending.
        senders: (e,).
        offsets: (e, 3).
        batch: (n,) configuration of each atom.
        energies: (b,), or `None`; without those of the lone atoms where `collate` was given them.
        forces: (n, 3), or `None`.
        num_graphs: configurations.
        volumes: (b,) of the periodic cells; NaN where a configuration has none.
        stresses: (b, 3, 3), or `None`.
    """

    positions: Tensor
    species: Tensor
    receivers: Tensor
    senders: Tensor
    offsets: Tensor
    batch: Tensor
    energies: Tensor | None
    forces: Tensor | None
    num_graphs: int
    volumes: Tensor
    stresses: Tensor | None = None

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> AtomBatch:
        """Move everything; `dtype` is for the numbers that are not indices."""
        moved = {
            field.name: value.to(device=device, dtype=dtype if value.is_floating_point() else None)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)

    @property
    def model_inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int]:
        """What a potential takes, in its order."""
        return self.positions, self.species, self.receivers, self.senders, self.offsets, self.batch, self.num_graphs


def collate(
    configurations: Sequence[Configuration], cutoff: float, *, atom_energies: Mapping[int, float] | None = None
) -> AtomBatch:
    """Put configurations into one batch and find their edges.

    Energies, forces and stresses are there if all configurations have them.

    Args:
        configurations: at least one.
        cutoff: distance up to which atoms are neighbours.
        atom_energies: atomic number -> energy of a lone atom, which is subtracted from `energies` in float64: what is
            left is small, and is kept in float32 without loss.

    Raises:
        InsumShapeError: there are no configurations.
        InsumNameError: `atom_energies` lacks a species.

    >>> pair = Configuration(torch.tensor([[0.0, 0, 0], [1.0, 0, 0]]), torch.tensor([1, 1]), energy=-1.0)
    >>> batch = collate([pair, pair], 1.5)
    >>> batch.receivers.tolist(), batch.batch.tolist(), batch.energies.tolist()
    ([0, 1, 2, 3], [0, 0, 1, 1], [-1.0, -1.0])
    """
    if not configurations:
        raise InsumShapeError("there are no configurations to put together", fix="pass at least one.")
    edges = [c.edges(cutoff) for c in configurations]
    receivers, senders, offsets = (torch.cat(parts) for parts in zip(*edges, strict=True))
    sizes = torch.tensor([c.species.numel() for c in configurations])
    first = (sizes.cumsum(0) - sizes).repeat_interleave(torch.tensor([ends.numel() for ends, *_ in edges]))
    energies = _if_all([c.energy for c in configurations])
    forces, stresses = _if_all([c.forces for c in configurations]), _if_all([c.stress for c in configurations])
    if atom_energies is not None and energies is not None:
        energies = [e - _lone_energy(c, atom_energies) for e, c in zip(energies, configurations, strict=True)]
    positions, species = (torch.cat([getattr(c, name) for c in configurations]) for name in ("positions", "species"))
    return AtomBatch(
        positions,
        species,
        receivers + first,
        senders + first,
        offsets,
        torch.arange(len(sizes)).repeat_interleave(sizes),
        None if energies is None else torch.tensor(energies, dtype=torch.float64),
        None if forces is None else torch.cat(forces),
        len(sizes),
        torch.tensor([c.volume for c in configurations], dtype=torch.float64),
        None if stresses is None else torch.stack(stresses),
    )


def _if_all(values: Sequence[T | None]) -> list[T] | None:
    """Return values, if none is missing."""
    found = [value for value in values if value is not None]
    return found if len(found) == len(values) else None


def _lone_energy(configuration: Configuration, atom_energies: Mapping[int, float]) -> float:
    species = configuration.species.tolist()
    if unknown := sorted({*species} - {*atom_energies}):
        details, fix = [f"given for {sorted(atom_energies)}"], "give one for each atomic number that occurs."
        raise InsumNameError(f"there is no energy of a lone atom of {unknown}", details=details, fix=fix)
    return sum(atom_energies[s] for s in species)


@dataclass(frozen=True)
class AtomStatistics:
    """What a potential for a set of configurations is scaled by.

    Attributes:
        atom_energies: atomic number -> energy of a lone atom in eV, fitted by least squares; of several fits the
            smallest.
        force_rms: root of the mean square of the force components, in eV/angstrom.
        average_neighbors: mean number of neighbours of an atom.
    """

    atom_energies: dict[int, float]
    force_rms: float
    average_neighbors: float

    @property
    def species(self) -> list[int]:
        """The atomic numbers that occur, ascending."""
        return sorted(self.atom_energies)

    @property
    def model_options(self) -> dict[str, Any]:
        """The arguments of a potential that depend on the data, by the names that `insum_nn.models.NequIP` has."""
        scales = {"energy_scale": self.force_rms, "average_neighbors": self.average_neighbors}
        return {"species": self.species, **scales}


def statistics(configurations: Sequence[Configuration], cutoff: float) -> AtomStatistics:
    """Fit the energies of lone atoms, and find the spread of the forces and the number of neighbours.

    Args:
        configurations: with energies and forces; at least one.
        cutoff: distance up to which atoms are neighbours.

    Raises:
        InsumShapeError: there is no configuration, or one lacks energy or forces.

    >>> pair = Configuration(torch.tensor([[0.0, 0, 0], [1.0, 0, 0]]), torch.tensor([1, 1]), None, energy=-3.0,
    ...                      forces=torch.tensor([[2.0, 0, 0], [-2.0, 0, 0]]))
    >>> found = statistics([pair], cutoff=1.5)
    >>> round(found.atom_energies[1], 6), round(found.force_rms, 3), found.average_neighbors
    (-1.5, 1.155, 1.0)
    """
    energies = [c.energy for c in configurations if c.energy is not None]
    forces = [c.forces for c in configurations if c.forces is not None]
    if not configurations or min(len(energies), len(forces)) < len(configurations):
        raise InsumShapeError(
            f"of {len(configurations)} configurations {len(energies)} have an energy and {len(forces)} have forces",
            fix="pass configurations with both; energy_key and forces_key name where a file keeps them.",
        )
    species = sorted({s for c in configurations for s in c.species.tolist()})
    counts = torch.tensor([[int((c.species == s).sum()) for s in species] for c in configurations]).double()
    target = torch.tensor(energies, dtype=torch.float64)[:, None]
    fitted: list[float] = torch.linalg.lstsq(counts, target, driver="gelsd").solution.squeeze(1).tolist()
    edges = sum(c.edges(cutoff)[0].numel() for c in configurations)
    return AtomStatistics(
        dict(zip(species, fitted, strict=True)),
        float(torch.cat(forces).square().mean().sqrt()),
        edges / sum(c.species.numel() for c in configurations),
    )


def read_extended_xyz(path: str | Path, *, limit: int | None = None, **keys: str) -> list[Configuration]:
    """Read the configurations of an extended XYZ file.

    Args:
        path: the file.
        limit: read no more than these many.
        keys: `energy_key`, `forces_key` and `stress_key` of `Configuration.from_ase`.

    Raises:
        FileNotFoundError: there is no such file.
        InsumFormatError: a configuration cannot be read; the message names its place in the file.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    frames: list[Any] = []
    ase_io = _ase("ase.io")
    try:
        # What was read before a fault stays in the list.
        frames += ase_io.iread(path, index=":" if limit is None else f":{limit}", format="extxyz")
    except Exception as error:
        raise InsumFormatError(
            f"configuration {len(frames)} of {path} cannot be read",
            details=[f"{type(error).__name__}: {error}"],
            fix="check the number of atoms, and the line that describes the columns.",
            path=str(path),
            configuration=len(frames),
        ) from error
    return [Configuration.from_ase(atoms, **keys) for atoms in frames]

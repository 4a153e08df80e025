"""Configurations of atoms with energies and forces: extended XYZ files, read by ase, as tensors and edges."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from insum_nn.errors import InsumFormatError, InsumShapeError, MissingExtraError

__all__ = ["AtomBatch", "Configuration", "collate", "read_extended_xyz"]


def _ase(module: str) -> Any:
    try:
        return importlib.import_module(f"ase.{module}" if module else "ase")
    except ImportError as error:
        raise MissingExtraError(
            "configurations of atoms are read by ase, which is not installed",
            fix="run: pip install ase",
        ) from error


@dataclass(frozen=True, eq=False)
class Configuration:
    """Atoms at one moment.

    Attributes:
        positions: (n, 3), in angstrom.
        species: (n,) atomic numbers.
        cell: (3, 3) vectors of the periodic cell as rows, or `None`.
        periodic: along which of them the cell repeats.
        energy: of the configuration, or `None`.
        forces: (n, 3), or `None`.
    """

    positions: Tensor
    species: Tensor
    cell: Tensor | None = None
    periodic: tuple[bool, bool, bool] = (False, False, False)
    energy: float | None = None
    forces: Tensor | None = None
    _edges: dict[float, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def from_ase(cls, atoms: Any, *, energy_key: str = "energy", forces_key: str = "forces") -> Configuration:
        """Take an `ase.Atoms`, with energy and forces of its calculator, its `info` or its `arrays`.

        >>> from ase import Atoms
        >>> Configuration.from_ase(Atoms("OH2", [[0, 0, 0], [1, 0, 0], [0, 1, 0]])).species.tolist()
        [8, 1, 1]
        """
        results = atoms.calc.results if atoms.calc is not None else {}
        energy = results.get(energy_key, atoms.info.get(energy_key))
        forces = results.get(forces_key, atoms.arrays.get(forces_key))
        periodic = tuple(bool(p) for p in atoms.pbc)
        return cls(
            torch.from_numpy(np.array(atoms.positions, np.float64)),
            torch.from_numpy(np.array(atoms.numbers, np.int64)),
            torch.from_numpy(np.array(atoms.cell.array, np.float64)) if any(periodic) else None,
            (periodic[0], periodic[1], periodic[2]),
            None if energy is None else float(energy),
            None if forces is None else torch.from_numpy(np.array(forces, np.float64)),
        )

    def to_ase(self) -> Any:
        """The same as an `ase.Atoms`, without energy and forces."""
        cell = None if self.cell is None else self.cell.numpy()
        return _ase("").Atoms(
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
        find = _ase("neighborlist").neighbor_list
        receivers, senders, images = find("ijS", self.to_ase(), cutoff)
        shifts = torch.from_numpy(np.asarray(images, np.float64))
        offsets = shifts @ self.cell.double() if self.cell is not None else torch.zeros_like(shifts)
        found = torch.from_numpy(receivers.astype(np.int64)), torch.from_numpy(senders.astype(np.int64)), offsets
        self._edges[cutoff] = found
        return found


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
        energies: (b,), or `None`.
        forces: (n, 3), or `None`.
        num_graphs: configurations.
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
        return (
            self.positions,
            self.species,
            self.receivers,
            self.senders,
            self.offsets,
            self.batch,
            self.num_graphs,
        )


def collate(configurations: Sequence[Configuration], cutoff: float) -> AtomBatch:
    """Put configurations into one batch and find their edges.

    Energies and forces are there if all configurations have them.

    >>> pair = Configuration(torch.tensor([[0.0, 0, 0], [1.0, 0, 0]]), torch.tensor([1, 1]), energy=-1.0)
    >>> batch = collate([pair, pair], 1.5)
    >>> batch.receivers.tolist(), batch.batch.tolist(), batch.energies.tolist()
    ([0, 1, 2, 3], [0, 0, 1, 1], [-1.0, -1.0])
    """
    if not configurations:
        raise InsumShapeError("there are no configurations to put together", fix="pass at least one.")
    found = [c.edges(cutoff) for c in configurations]
    sizes = [c.species.numel() for c in configurations]
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    energies = [c.energy for c in configurations if c.energy is not None]
    forces = [c.forces for c in configurations if c.forces is not None]
    complete = len(configurations)
    return AtomBatch(
        torch.cat([c.positions for c in configurations]),
        torch.cat([c.species for c in configurations]),
        torch.cat([edges[0] + start for edges, start in zip(found, starts, strict=True)]),
        torch.cat([edges[1] + start for edges, start in zip(found, starts, strict=True)]),
        torch.cat([edges[2] for edges in found]),
        torch.arange(complete).repeat_interleave(torch.tensor(sizes)),
        torch.tensor(energies, dtype=torch.float64) if len(energies) == complete else None,
        torch.cat(forces) if len(forces) == complete else None,
        complete,
    )


def read_extended_xyz(
    path: str | Path, *, limit: int | None = None, energy_key: str = "energy", forces_key: str = "forces"
) -> list[Configuration]:
    """Read the configurations of an extended XYZ file.

    Args:
        path: the file.
        limit: read no more than these many.
        energy_key: where the file keeps the energy.
        forces_key: where it keeps the forces; 3BPA and most sets say `forces`, some `force`.

    Raises:
        FileNotFoundError: there is no such file.
        InsumFormatError: a configuration cannot be read; the message names its place in the file.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    configurations: list[Configuration] = []
    for atoms in _frames(path, limit):
        configurations.append(Configuration.from_ase(atoms, energy_key=energy_key, forces_key=forces_key))
    return configurations


def _frames(path: Path, limit: int | None) -> Iterator[Any]:
    number = 0
    iterator = _ase("io").iread(path, index=":" if limit is None else f":{limit}", format="extxyz")
    while True:
        try:
            atoms = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise InsumFormatError(
                f"configuration {number} of {path} cannot be read",
                details=[f"{type(error).__name__}: {error}"],
                fix="check the number of atoms, and the line that describes the columns.",
                path=str(path),
                configuration=number,
            ) from error
        number += 1
        yield atoms

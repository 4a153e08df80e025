"""A potential as an ase calculator: relaxation, molecular dynamics, phonons with what ase offers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from insum_nn.errors import InsumNameError, import_extra
from insum_nn.models.nequip import NequIP

ase_calculator = import_extra("ase.calculators.calculator", "PotentialCalculator")
ase_neighbors = import_extra("ase.neighborlist", "PotentialCalculator")
Calculator: Any = ase_calculator.Calculator

__all__ = ["PotentialCalculator"]


class PotentialCalculator(Calculator):
    """Energy, forces and stress of an `ase.Atoms` by a `NequIP`, in eV and angstrom.

    The model is copied; later training does not change the calculator. Neighbours are searched at each step.

    Args:
        model: the potential.
        atom_energies: atomic number -> energy of a lone atom, added to what the model gives: those that
            `insum_nn.datasets.collate_atoms` subtracted for its training. Default: none.
        device: where to compute; default where the model is.
        dtype: what to compute in. Dynamics that conserve energy, and relaxation to small forces, need float64.
        **kwargs: arguments of `ase.calculators.calculator.Calculator`.

    Raises:
        InsumNameError: on a calculation: an atom's species is in the model but not in `atom_energies`.
        InsumShapeError: on a calculation: the model does not know an atom's species.

    >>> from ase.build import bulk
    >>> atoms = bulk("Cu", cubic=True)
    >>> atoms.calc = PotentialCalculator(NequIP([29], cutoff=3.0, num_layers=1, num_features=4, lmax=1))
    >>> atoms.get_forces().shape, atoms.get_stress().shape
    ((4, 3), (6,))
    """

    implemented_properties: ClassVar[list[str]] = ["energy", "free_energy", "forces", "stress"]

    def __init__(
        self,
        model: NequIP,
        *,
        atom_energies: Mapping[int, float] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float64,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.device = torch.device(device) if device is not None else model.species_index.device
        self.dtype = dtype
        self.model: NequIP = copy.deepcopy(model).to(self.device, dtype).eval()
        self.atom_energies = None if atom_energies is None else dict(atom_energies)

    def calculate(
        self, atoms: Any = None, properties: Sequence[str] = ("energy",), system_changes: Sequence[str] | None = None
    ) -> None:
        """Fill `results`; ase calls it when positions, species or cell have changed."""
        changes = ase_calculator.all_changes if system_changes is None else system_changes
        super().calculate(atoms, list(properties), list(changes))
        receivers, senders, images = ase_neighbors.neighbor_list("ijS", self.atoms, self.model.cutoff)
        offsets = images @ self.atoms.cell.array
        inputs = (self._numbers(self.atoms.positions), self._integers(self.atoms.numbers))
        edges = (self._integers(receivers), self._integers(senders), self._numbers(offsets))
        if self.atoms.cell.rank == 3:
            volumes = self._numbers([self.atoms.get_volume()])
            energy, forces, stress = self.model.energy_forces_stress(*inputs, *edges, volumes=volumes)
            full = stress[0].double().cpu().numpy()
            self.results["stress"] = full[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]
        else:
            energy, forces = self.model.energy_and_forces(*inputs, *edges)
        total = float(energy) + self._lone_atoms()
        self.results |= {"energy": total, "free_energy": total, "forces": forces.double().cpu().numpy()}

    def _lone_atoms(self) -> float:
        if self.atom_energies is None:
            return 0.0
        species = self.atoms.numbers.tolist()
        unknown = sorted(set(species) - set(self.atom_energies))
        if unknown:
            raise InsumNameError(
                f"atom_energies has no energy for species {unknown}",
                details=[f"given for {sorted(self.atom_energies)}"],
                fix="give one for each atomic number that occurs.",
                expected=unknown,
            )
        return sum(self.atom_energies[s] for s in species)

    def _numbers(self, values: Any) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values, np.float64), dtype=self.dtype, device=self.device)

    def _integers(self, values: Any) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values, np.int64), device=self.device)

"""Generated crystals of copper and gold, labelled by ase's effective medium theory."""

from __future__ import annotations

from typing import Any

import numpy as np

from insum_nn.datasets.extended_xyz import Configuration
from insum_nn.errors import import_extra

__all__ = ["copper_gold"]


def copper_gold(count: int, seed: int = 0) -> list[Configuration]:
    """Make periodic cells of four atoms of copper and gold; the same for the same seed.

    In turn none to three of the atoms are gold. Lattice constants are from 3.65 to 3.95 angstrom, cells are strained
    by 2 % and atoms displaced by 0.12 angstrom (standard deviations).

    Source of the labels: Jacobsen, Stoltze, Norskov, A semi-empirical effective medium theory for metals and alloys
    (1996), as `ase.calculators.emt.EMT` computes it.

    Args:
        count: cells.
        seed: of numpy's generator.

    Returns:
        Configurations with energy (eV), forces (eV/angstrom) and stress (eV/angstrom^3).

    Raises:
        MissingExtraError: ase is not installed.

    >>> cells = copper_gold(2)
    >>> cells[1].species.sort().values.tolist(), cells[0].stress.shape
    ([29, 29, 29, 79], torch.Size([3, 3]))
    """
    build, emt = (import_extra(f"ase.{part}", "generated crystals") for part in ("build", "calculators.emt"))
    generator = np.random.default_rng(seed)
    cells: list[Configuration] = []
    for number in range(count):
        atoms: Any = build.bulk("Cu", cubic=True, a=float(generator.uniform(3.65, 3.95)))
        atoms.numbers[generator.permutation(4)[: number % 4]] = 79
        strain = generator.normal(0.0, 0.02, (3, 3))
        atoms.set_cell(atoms.cell.array @ (np.eye(3) + (strain + strain.T) / 2), scale_atoms=True)
        atoms.positions += generator.normal(0.0, 0.12, atoms.positions.shape)
        atoms.calc = emt.EMT()
        atoms.get_forces()
        atoms.get_stress()
        cells.append(Configuration.from_ase(atoms))
    return cells

"""NequIP's own compiled training step on a model whose tensor products were swapped for ours."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("nequip")

import ase.build
from nequip.data import AtomicDataDict
from nequip.data.ase import from_ase
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
from nequip.model import NequIPGNNModel
from nequip.utils.global_state import set_global_state

import insum_nn

pytestmark = [pytest.mark.peer, pytest.mark.slow, pytest.mark.filterwarnings("default")]

TYPES = ["H", "C", "O"]


def batch_of(*names: str) -> dict[str, Tensor]:
    found = []
    for seed, name in enumerate(names):
        atoms = ase.build.molecule(name)
        atoms.rattle(0.05, seed=seed)
        data = from_ase(atoms)
        for transform in (ChemicalSpeciesToAtomTypeMapper(TYPES), NeighborListTransform(r_max=4.0)):
            data = transform(data)
        found.append(data)
    return AtomicDataDict.batched_from_list(found)


def model_of(**mode: Any) -> torch.nn.Module:
    set_global_state()
    torch.manual_seed(0)
    return NequIPGNNModel(
        seed=0,
        model_dtype="float64",
        r_max=4.0,
        type_names=TYPES,
        num_layers=2,
        l_max=2,
        num_features=4,
        radial_mlp_width=8,
        avg_num_neighbors=5.0,
        per_type_energy_shifts=dict.fromkeys(TYPES, 0.5),
        **mode,
    ).double()


def step(model: torch.nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """Energies, forces, and the gradients of a loss of both, in the order of the parameters' names."""
    out = model(batch.copy())
    loss = out["total_energy"].square().mean() + out["forces"].square().mean()
    grads = torch.autograd.grad(loss, [p for _, p in sorted(model.named_parameters())], allow_unused=True)
    return [out["total_energy"], out["forces"], *(g for g in grads if g is not None)]


def test_a_compiled_training_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # NequIP writes its graphs to the current directory where they do not agree.
    monkeypatch.chdir(tmp_path)
    reference, model = model_of(compile_mode="eager"), model_of(compile_mode="compile")
    model.load_state_dict(copy.deepcopy(reference.state_dict()))
    report = insum_nn.swap(model)
    assert len(report.swapped) >= 2
    model.train()
    reference.train()
    for names in (("CH3CH2OH", "C6H6"), ("H2O", "CH4", "CH3OH")):
        batch = batch_of(*names)
        torch.testing.assert_close(step(model, batch), step(reference, batch), rtol=1e-8, atol=1e-10)

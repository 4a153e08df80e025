"""NequIP's own compiled training step, and its package, of a model whose tensor products were swapped for ours."""

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
from tests.packages import run_alone

pytestmark = [pytest.mark.peer, pytest.mark.slow, pytest.mark.filterwarnings("default")]

TYPES = ["H", "C", "O"]


def batch_of(*names: str, cell: float | None = None) -> dict[str, Tensor]:
    found = []
    for seed, name in enumerate(names):
        atoms = ase.build.molecule(name)
        if cell is not None:
            atoms.set_cell([cell] * 3)
            atoms.pbc = True
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
    assert sum(row.detail == "TensorProductScatter" for row in report.swapped) == 2
    model.train()
    reference.train()
    for names in (("CH3CH2OH", "C6H6"), ("H2O", "CH4", "CH3OH")):
        batch = batch_of(*names)
        torch.testing.assert_close(step(model, batch), step(reference, batch), rtol=1e-8, atol=1e-10)


def test_a_package_for_ase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What `nequip-compile --mode aotinductor --target ase` does after it has loaded a model."""
    from nequip.scripts._compile_utils import COMPILE_TARGET_DICT
    from nequip.utils.aot import aot_export_model

    monkeypatch.chdir(tmp_path)
    model = model_of(compile_mode="eager").eval()
    assert len(insum_nn.swap(model).swapped) >= 2
    target = COMPILE_TARGET_DICT["ase"]
    sizes = {"graph": "num_frames", "node": "num_nodes", "edge": "num_edges"}
    dims = target["batch_map_settings"]({kind: torch.export.Dim(name, min=2) for kind, name in sizes.items()})
    data = target["data_settings"](batch_of("CH3CH2OH", cell=7.0))
    package = str(tmp_path / "model.nequip.pt2")
    # It compares the package with the model itself.
    aot_export_model(model, torch.device("cpu"), target["input"], target["output"], data, dims, package)
    # Another molecule, where this package cannot be imported.
    other = target["data_settings"](batch_of("CH4", cell=6.0))

    def outputs(*inputs: Tensor) -> list[Tensor]:
        out = model(dict(zip(target["input"], inputs, strict=True)))
        return [out[name] for name in target["output"]]

    inputs = [other[name] for name in target["input"]]
    assert run_alone(outputs, [inputs], package, tmp_path, rtol=1e-8, atol=1e-8) == "equal"

"""MACE's own training step, of a model whose layers were swapped for ours, convolutions included."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("mace")

import insum_nn
from benchmarks.peer_models import peer_model
from benchmarks.registry import Setting

pytestmark = [pytest.mark.peer, pytest.mark.slow, pytest.mark.filterwarnings("default")]


def test_a_training_step_in_float64():
    found = peer_model("mace", Setting(torch.device("cpu"), "tiny"))
    reference = found.reference()
    model = copy.deepcopy(reference)
    report = insum_nn.swap(model)
    assert sum(row.detail == "EdgeTensorProduct" for row in report.swapped) == 2
    assert list(model.state_dict()) == list(reference.state_dict())
    model.load_state_dict(reference.state_dict())

    def outcome(own: nn.Module) -> list[Tensor]:
        loss = found.trained(own)(found.exact[0])
        return [loss, *(p.grad for _, p in sorted(own.named_parameters()) if p.grad is not None)]

    torch.testing.assert_close(outcome(model), outcome(reference), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("virials", [False, True])
def test_what_lammps_loads(virials: bool):
    """`mace_create_lammps_model` of a swapped model: TorchScript, in which nothing of this package is needed."""
    from e3nn.util import jit
    from mace.calculators import LAMMPS_MACE

    found = peer_model("mace", Setting(torch.device("cpu"), "tiny"))
    reference = found.reference().double()
    model = copy.deepcopy(reference)
    assert len(insum_nn.swap(model).swapped) > 10
    file = io.BytesIO()
    torch.jit.save(jit.compile(LAMMPS_MACE(model)), file)
    file.seek(0)
    loaded = torch.jit.load(file)
    assert "insum_nn::" not in str(loaded.inlined_graph)
    given = {name: value for name, value in found.exact[0].to_dict().items() if isinstance(value, Tensor)}
    atoms = len(given["positions"])
    # One system, of atoms that are this process's own or its neighbours'.
    given |= {"batch": torch.zeros_like(given["batch"]), "ptr": torch.tensor([0, atoms]), "cell": given["cell"][:3]}
    own = (torch.arange(atoms) % 3 > 0).double()
    results = []
    for run in (LAMMPS_MACE(reference), loaded):
        given["positions"] = given["positions"].detach().requires_grad_()
        results.append({name: value.detach() for name, value in run(given.copy(), own, virials).items()})
    assert results[0]["forces"].abs().max() > 1e-4
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-10)

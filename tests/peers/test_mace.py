"""MACE's own training step, of a model whose layers were swapped for ours, convolutions included."""

from __future__ import annotations

import copy

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

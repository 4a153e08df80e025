"""A step that is rehearsed to its end when its first kernel is missing: nothing is found late, nothing in vain."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from insum_nn.compiler.kernels.ahead import UndecidedError
from insum_nn.compiler.kernels.background import cold
from insum_nn.compiler.runtime.steps import whole_step
from insum_nn.compiler.runtime.steps.whole_step import call_step
from tests.compiler.test_background import Launched, launched
from tests.compiler.test_prepare import Sums, operands

__all__ = ["launched"]


Case = tuple[Any, tuple[Tensor, ...]]


# It comes before `launched` among the arguments of a test: e3nn asks a device for random numbers.
@pytest.fixture
def potential() -> Case:
    pytest.importorskip("e3nn")
    from insum_nn.models import NequIP

    torch.manual_seed(0)
    model = NequIP([1, 8], cutoff=2.0, num_layers=3, num_features=4, lmax=1, radial_hidden=(8,))
    edges = torch.tensor([[0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1]])
    positions = torch.tensor([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])
    return model, (positions, torch.tensor([8, 1, 1]), *edges)


def train(model: Any, given: tuple[Tensor, ...]) -> None:
    energy, forces = model.energy_and_forces(*given)
    (energy.sum() + forces.square().sum()).backward()


def test_all_kernels_of_a_step_are_found_before_the_first_is_waited_for(potential: Case, launched: Launched):
    model, given = potential
    versions = [each._version for each in (*model.parameters(), *model.buffers(), *given)]
    random = torch.get_rng_state()
    energy, forces = model.energy_and_forces(*given)
    assert len(launched.compiled) > 5
    assert versions == [each._version for each in (*model.parameters(), *model.buffers(), *given)]
    assert torch.equal(random, torch.get_rng_state())
    assert all(each.grad is None for each in model.parameters())
    (energy.sum() + forces.square().sum()).backward()
    assert all(each.grad is not None for each in model.layers.parameters())
    assert launched.compiled.keys() == launched.submitted.keys()
    assert set(launched.submitted.values()) == {0}
    assert cold.step is None


def test_without_gradients_of_parameters(potential: Case, launched: Launched):
    model, given = potential
    model.eval()
    _, forces = model.energy_and_forces(*given)
    assert not forces.requires_grad
    assert set(launched.submitted.values()) == {0}
    assert launched.compiled.keys() <= launched.submitted.keys()


def test_a_step_that_somebody_watches_runs_once(potential: Case, launched: Launched):
    model, given = potential
    calls: list[Any] = []
    model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    train(model, given)
    assert len(calls) == 1
    # Calls are rehearsed one by one.
    assert {*launched.submitted.values()} > {0}


class _Plain(nn.Module):
    """Sums over edges, random numbers and a choice of what goes wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = Sums()
        self.scale = nn.Parameter(torch.ones(()))

    def whole(self, x: Tensor, *rest: Any) -> Tensor:
        return nn.functional.dropout(self.sums(x * self.scale, *rest), 0.5) + torch.rand(())


@pytest.mark.usefixtures("launched")
def test_random_numbers_are_those_of_one_call():
    model, given = _Plain(), operands()
    torch.manual_seed(1)
    found = call_step(_Plain.whole, model, *given)
    torch.manual_seed(1)
    torch.testing.assert_close(found, model.whole(*given), rtol=0, atol=0)


def test_an_error_of_the_rehearsal_is_none_of_the_step(
    potential: Case, launched: Launched, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: Any) -> Any:
        raise ValueError("only in the rehearsal")

    monkeypatch.setattr(whole_step._Call, "forward", fail)
    train(*potential)
    assert launched.compiled
    assert cold.step is None


def test_a_choice_that_only_the_step_can_make(potential: Case, launched: Launched, monkeypatch: pytest.MonkeyPatch):
    plain, asked = whole_step._Call.forward, [0]

    def undecided(self: Any, *given: Any) -> Any:
        asked[0] += 1
        if asked[0] < 3:
            raise UndecidedError("it is tried when it runs")
        return plain(self, *given)

    monkeypatch.setattr(whole_step._Call, "forward", undecided)
    train(*potential)
    assert asked == [3]
    assert launched.compiled.keys() <= launched.submitted.keys()
    assert max(launched.submitted.values()) < 4


def test_an_error_of_the_step_is_raised(launched: Launched):
    def method(_: nn.Module, x: Tensor) -> Any:
        raise ValueError("in the step")

    with pytest.raises(ValueError, match="in the step"):
        call_step(method, _Plain(), torch.ones(3))
    assert cold.step is None
    assert not launched.compiled


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("wrap", [nn.Module.compile, torch.compile])
def test_what_is_compiled_is_not_rehearsed(wrap: Callable[[nn.Module], Any]):
    model = nn.Sequential(nn.Linear(2, 2))
    assert whole_step._is_plain(model)
    compiled = wrap(model[0])
    if compiled is not None:
        model[0] = compiled
    assert not whole_step._is_plain(model)


def test_what_talks_to_other_ranks_is_not_rehearsed():
    class Sharded(nn.Linear):
        __module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"

    assert not whole_step._is_plain(nn.Sequential(Sharded(2, 2)))


@pytest.mark.usefixtures("launched")
def test_nothing_holds_what_a_call_was_given():
    given = operands()
    alive = weakref.ref(given[2])
    gc.disable()
    try:
        for _ in range(2):
            call_step(lambda _, *rest: rest[2].sum(), _Plain(), *given)
        del given
        assert alive() is None
    finally:
        gc.enable()

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("e3nn")

from e3nn import nn as e3nn_nn

from insum_nn.models import radial
from insum_nn.models.radial import HiddenLayers, scale_of
from tests.double import double

__all__ = ["double"]


def networks(widths: list[int], outputs: list[int]) -> list[Any]:
    """Networks of e3nn, each with outputs of its own."""
    return [e3nn_nn.FullyConnectedNet([*widths, made], nn.functional.silu) for made in outputs]


def hidden_layers(peers: list[Any], widths: list[int]) -> HiddenLayers:
    """Their hidden layers."""
    found = HiddenLayers(len(peers), widths)
    with torch.no_grad():
        for number, weight in enumerate(found.weights):
            weight.copy_(torch.stack([getattr(peer, f"layer{number}").weight for peer in peers]))
    return found


def derivatives(values: Tensor, made: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """The outputs, the gradient of a function of them, and the gradients of a function of that gradient."""
    total = sum((output.sin() * (1 + number)).sum() for number, output in enumerate(made))
    (first,) = torch.autograd.grad(total, values, create_graph=True)
    return [*made, first, *torch.autograd.grad(first.square().sum(), [values, *weights])]


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 33])
@pytest.mark.parametrize("widths", [[3], [3, 5], [3, 6, 5]])
def test_they_are_e3nns_networks(widths: list[int], rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(radial, "_ROWS", 4)
    peers, values = networks(widths, [4, 2]), torch.randn(rows, widths[0], requires_grad=True)
    hidden = hidden_layers(peers, widths)
    last = [getattr(peer, f"layer{len(widths) - 1}").weight for peer in peers]
    scale = scale_of(widths[-1], first=len(widths) == 1)
    made = [h @ (w * scale) for h, w in zip(hidden(values), last, strict=True)]
    found = derivatives(values, made, [*hidden.weights, *last])
    of_peers = [[getattr(peer, f"layer{number}").weight for peer in peers] for number in range(len(widths))]
    wanted = derivatives(values, [peer(values) for peer in peers], [w for some in of_peers for w in some])
    count = len(made) + 2
    stacked = [torch.stack(wanted[count + 2 * n : count + 2 * n + 2]) for n in range(len(widths) - 1)]
    torch.testing.assert_close(found, [*wanted[:count], *stacked, *wanted[-2:]], rtol=1e-10, atol=1e-10)


class Inner(TorchDispatchMode):
    """The longest sum of each batched product."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bmm.default:
            self.found.append(args[0].shape[2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [600, 5000, 40_001])
def test_no_product_sums_over_all_rows(rows: int):
    """Of few and long sums a GPU computes each on one multiprocessor."""
    hidden, values = HiddenLayers(2, [3, 6, 5]), torch.randn(rows, 3, requires_grad=True)
    with Inner() as seen:
        derivatives(values, list(hidden(values)), list(hidden.weights))
    assert len(seen.found) > 10
    assert max(seen.found) <= 1024

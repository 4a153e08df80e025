"""Networks on radial functions that are evaluated together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from insum_nn.layers.equivariant.adoption import e3nn
from insum_nn.layers.equivariant.radial import activated, activation

__all__ = ["HiddenLayers", "scale_of"]

# Rows of a part, and parts at most, of a sum over rows that is cut into parts.
_ROWS = 512
_MOST_PARTS = 64


class HiddenLayers(nn.Module):
    """The hidden layers of several networks of equal widths on the same values, all evaluated together.

        h_0 = values,        h_i[l] = silu(h_(i-1)[l] @ W_i[l] * scale_of(width of h_(i-1)))        for network l

    `weights` holds a tensor for each layer, (networks, inputs, outputs). What is left of a network, its last layer, is
    one more product, by its weights times `scale_of`. Variances are those of `e3nn.nn.FullyConnectedNet`, but for the
    constant of the last activation, which the next layer's scale includes.

    Source: Geiger and Smidt, e3nn (2022), section 6.

    Args:
        count: networks.
        widths: number of the values, then of each hidden layer's outputs; alone: there are no hidden layers.

    >>> [hidden.shape for hidden in HiddenLayers(2, [8, 32, 16])(torch.randn(5, 8))]
    [torch.Size([5, 16]), torch.Size([5, 16])]
    """

    def __init__(self, count: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.count = count
        self._texts = [activation("silu", scale_of(read, first=at == 0), 1.0) for at, read in enumerate(widths[:-1])]
        weights = [torch.randn(count, read, made) for read, made in pairwise(widths)]
        self.weights = nn.ParameterList([nn.Parameter(weight) for weight in weights])

    def forward(self, values: Tensor) -> tuple[Tensor, ...]:
        """Evaluate.

        Args:
            values: (e, widths[0]); differentiable.

        Returns:
            For each network, (e, widths[-1]).
        """
        if not len(self.weights):
            return (values,) * self.count
        rows = values.shape[0]
        parts = _parts(rows)
        if missing := -rows % parts if parts > 1 else 0:
            values = nn.functional.pad(values, (0, 0, 0, missing))
        found = values.unflatten(0, (parts, -1)).expand(self.count, -1, -1, -1).flatten(0, 1)
        for weight, text in zip(self.weights, self._texts, strict=True):
            found = torch.bmm(found, weight[:, None].expand(-1, parts, -1, -1).flatten(0, 1))
            found = activated(found.flatten(0, 1), text).view(found.shape)
        whole = found.unflatten(0, (self.count, parts)).flatten(1, 2)
        return (whole[:, :rows] if missing else whole).unbind(0)


def scale_of(width: int, *, first: bool = False) -> float:
    """What the weights of a layer are multiplied by that reads so many values, activated unless it is the first."""
    return (1.0 if first else _ACTIVATED) / math.sqrt(width)


# What brings the second moment of silu of a normal variable to 1.
_ACTIVATED: float = e3nn.math.normalize2mom(nn.functional.silu).cst


def _parts(rows: int) -> int:
    """How many products of fewer rows stand for one: gradients of weights are sums over all rows.

    They have few outputs, and a batched product of matrices gives each tile of outputs to one multiprocessor, however
    long its sum. Sums of parts, which are added at the end, are as many times more tiles.
    """
    # A tracer's sizes are no numbers to decide by.
    if torch.compiler.is_compiling() or not isinstance(rows, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        return 1
    return max(1, min(_MOST_PARTS, rows // _ROWS))

"""Linear maps of which each row selects its own: experts, species, types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Self

import torch
from torch import Tensor, nn

from insum_nn.compiler.api import run_statements
from insum_nn.compiler.options import DEFAULT, Options, require_options
from insum_nn.errors import InsumShapeError
from insum_nn.layers.extents import extent
from insum_nn.layers.statement_layer import StatementLayer
from insum_nn.ops.statements import promoted

__all__ = ["GroupedLinear"]


class GroupedLinear(StatementLayer, nn.Module):
    """Linear maps, of which each row of the input selects one, or several.

        Y[t,o] += X[t,c] * W[E[t],c,o]                      one group for a row
        Y[t,k,o] += X[t,c] * W[E[t,k],c,o]                  several groups
        Y[t,o] += G[t,k] * X[t,c] * W[E[t,k],c,o]           several, added up with weights: a mixture of experts

    `X` may have the second axis too, `X[t,k,c]`: what an earlier layer made for each group. With a bias, `B[E[t,k],o]`
    is added in the same way. The compiler takes rows in the order of their groups: no row is copied, and no matrix.

    Source: Shazeer, Mirhoseini, Maziarz, Davis, Le, Hinton, Dean, Outrageously Large Neural Networks (ICLR 2017),
    eq. (1).

    Attributes:
        weight: (num_groups, in_features, out_features).
        bias: (num_groups, out_features) or `None`.

    >>> up, down = GroupedLinear(8, 16, 64), GroupedLinear(8, 64, 16)
    >>> x, gates = torch.randn(100, 16), torch.randn(100, 8).softmax(1)
    >>> weights, experts = gates.topk(2)
    >>> down(up(x, experts).relu(), experts, weights).shape
    torch.Size([100, 16])
    """

    __call__: Callable[..., Tensor]
    bias: nn.Parameter | None

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        options: Options = DEFAULT,
    ) -> None:
        """Make the parameters.

        Args:
            num_groups: maps.
            in_features: extent of the last dimension of the input.
            out_features: extent of the last dimension of the output.
            bias: add a learned constant of each group.
            device: of the parameters.
            dtype: of the parameters.
            options: compile options; see `insum_nn.Options`.

        Raises:
            InsumShapeError: an extent is negative.
        """
        super().__init__()
        names = {"num_groups": num_groups, "in_features": in_features, "out_features": out_features}
        shape = self.num_groups, self.in_features, self.out_features = [
            extent("GroupedLinear", name, value) for name, value in names.items()
        ]
        self.options = require_options(options)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        constants = torch.empty(shape[0], shape[2], device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if constants is None else nn.Parameter(constants))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw uniformly from +-1/sqrt(in_features), as `nn.Linear` does."""
        bound = max(self.in_features, 1) ** -0.5
        for parameter in self.parameters(recurse=False):
            parameter.uniform_(-bound, bound)

    @classmethod
    @torch.no_grad()
    def from_linears(cls, linears: Iterable[nn.Linear], *, options: Options = DEFAULT) -> Self:
        """Return a layer with copies of the parameters of dense ones, in their order.

        Raises:
            InsumShapeError: there are none, or they differ in shape, or some have no bias.
        """
        layers = [*linears]
        kinds = {(layer.in_features, layer.out_features, layer.bias is not None) for layer in layers}  # pyright: ignore[reportUnnecessaryComparison]
        if len(kinds) != 1:
            raise InsumShapeError(
                "GroupedLinear.from_linears takes layers that are alike",
                details=[f"(in_features, out_features, bias): {sorted(kinds)}"],
                fix="pass a list of nn.Linear of one shape, all with a bias or all without.",
                argument="linears",
            )
        first = layers[0].weight
        new = cls(len(layers), *kinds.pop(), device=first.device, dtype=first.dtype, options=options)
        new.weight.copy_(torch.stack([layer.weight.T for layer in layers]))
        if new.bias is not None:
            new.bias.copy_(torch.stack([layer.bias for layer in layers]))
        return new.train(layers[0].training)

    def _statements(self) -> tuple[str, ...]:
        return self._texts("E[t]", "X[t,c]", "t", "")

    def _elsewhere(self) -> Mapping[str, tuple[str, ...]]:
        several = self._texts("E[t,k]", "X[t,c]", "t,k", "")
        return {"of several groups": several, "weighted": self._texts("E[t,k]", "X[t,c]", "t", "G[t,k] * ")}

    def _texts(self, group: str, read: str, rows: str, gate: str) -> tuple[str, ...]:
        texts = f"Y[{rows},o] += {gate}{read} * W[{group},c,o]", f"Y[{rows},o] += {gate}B[{group},o]"
        return texts if self.bias is not None else texts[:1]

    def forward(self, input: Tensor, group: Tensor, weight: Tensor | None = None) -> Tensor:
        """Multiply each row by the matrices that it selects.

        Args:
            input: `X`, (t, in_features), or (t, k, in_features); differentiable.
            group: `E`, (t,) or (t, k), integers. Of a group of -1 nothing is added.
            weight: `G`, (t, k), by which the results of several groups are added up; differentiable.

        Returns:
            (t, out_features), or without weights of several groups (t, k, out_features).

        Raises:
            InsumShapeError: the shapes do not agree.
            InsumRangeError: a group lies outside.
            InsumDeviceError: devices differ.
        """
        several = group.ndim > 1
        read, rows = "X[t,k,c]" if input.ndim > 2 else "X[t,c]", "t,k" if several and weight is None else "t"
        texts = self._texts("E[t,k]" if several else "E[t]", read, rows, "" if weight is None else "G[t,k] * ")
        values = {"X": input, "W": self.weight, "G": weight, "B": self.bias}
        given = promoted({name: value for name, value in values.items() if value is not None})
        return run_statements("\n".join(texts), {**given, "E": group}, options=self.options)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Sizes."""
        sizes = f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}"

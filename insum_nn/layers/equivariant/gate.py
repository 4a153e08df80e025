"""A drop-in replacement for the gate of `e3nn.nn`."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.layers.equivariant.adoption import E3nnLayer, ProductLayer, construct, e3nn_nn, runs_directly
from insum_nn.layers.equivariant.tensor_product import TensorProduct

__all__ = ["Gate"]

Irreps = Any
# Kinds of the input's columns, in the order of `irreps_outs`.
_SCALARS, _GATES, _GATED = range(3)


class Gate(E3nnLayer, e3nn_nn.Gate):
    """Apply activations to scalars, and multiply the rest by activated scalars: `e3nn.nn.Gate`.

    The input is split into ranges of columns, and each activation is called once for neighbouring columns, so no
    part of the input is copied, forward or backward. The product is a `TensorProduct` of this package. While torch
    traces a call, and under autocast, e3nn's own code runs around it.

    Args:
        irreps_scalars: scalars that pass through an activation.
        act_scalars: activation of each of their entries, or `None`.
        irreps_gates: scalars that the rest is multiplied by.
        act_gates: activation of each of their entries, or `None`.
        irreps_gated: the rest.
        options: compile options.

    >>> from insum_nn.layers.equivariant.gate import Gate
    >>> gate = Gate("16x0o", [torch.tanh], "32x0o", [torch.tanh], "16x1e + 16x1o")
    >>> gate(torch.randn(5, 144)).shape
    torch.Size([5, 112])
    >>> Gate.from_e3nn(e3nn_nn.Gate("4x0e", [torch.tanh], "2x0e", [torch.tanh], "2x1o"))
    Gate (6x0e+2x1o -> 4x0e+2x1o)
      Z[z,K[p,u]] += CG[p] * X[z,I[p,u]] * Y[z,J[p,u]]
    """

    def __init__(
        self,
        irreps_scalars: Irreps,
        act_scalars: Any,
        irreps_gates: Irreps,
        act_gates: Any,
        irreps_gated: Irreps,
        *,
        options: Options = DEFAULT,
    ) -> None:
        construct(self, e3nn_nn.Gate, irreps_scalars, act_scalars, irreps_gates, act_gates, irreps_gated)
        self._prepare(options)

    def _prepare(self, options: Options) -> None:
        self.mul = TensorProduct.from_e3nn(self.mul, options=options)
        # Dynamo cannot guard e3nn's representations, so a call must not read them.
        self._columns: int = self.irreps_in.dim
        self._runs = _runs_of(self)

    @property
    def options(self) -> Options:
        """Compile options of the product."""
        return self.mul.options

    @options.setter
    def options(self, options: Options) -> None:
        self.mul.options = options

    def _statements(self) -> tuple[str, ...]:
        return self.mul._statements()

    def _elsewhere(self) -> dict[str, tuple[str, ...]]:
        return self.mul._elsewhere()

    explain, _EXPLAINED = ProductLayer.explain, 0

    def forward(self, features: Tensor) -> Tensor:
        """Activate and multiply.

        Args:
            features: (..., irreps_in.dim); differentiable.

        Returns:
            (..., irreps_out.dim).
        """
        if not runs_directly(features, self._columns):
            return e3nn_nn.Gate.forward(self, features)  # type: ignore[no-any-return]
        parts: tuple[dict[int, Tensor], ...] = ({}, {}, {})
        widths = [sum(width for _, _, width in run) for _, run in self._runs]
        for (act, run), whole in zip(self._runs, features.split(widths, -1), strict=True):
            active = whole if act is None else act(whole)
            pieces = (active,) if len(run) == 1 else active.split([width for _, _, width in run], -1)
            for (kind, place, _), piece in zip(run, pieces, strict=True):
                parts[kind][place] = piece
        scalars, gates, gated = ([found[place] for place in sorted(found)] for found in parts)
        if gates:
            scalars.append(self.mul(_together(gated), _together(gates)))
        return _together(scalars) if scalars else features.new_zeros(*features.shape[:-1], 0)


def _together(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


# An activation, or none, and the pieces that it is applied to: kind, first column of that kind, width.
_Run = tuple[Any, list[tuple[int, int, int]]]


def _runs_of(gate: Any) -> list[_Run]:
    """Return the parts of the input: neighbouring columns of one activation are one part."""
    cut = gate.sc.cut
    entries = cut.irreps_in.slices()
    columns: list[tuple[int, int, Any]] = [(_GATED, 0, None)] * cut.irreps_in.dim
    for kind, (irreps, sources) in enumerate(zip(cut.irreps_outs, cut.instructions, strict=True)):
        acts = [] if kind == _GATED else _activations((gate.act_scalars, gate.act_gates)[kind])
        for own, source in zip(irreps.slices(), sources, strict=True):
            for offset in range(own.stop - own.start):
                place = own.start + offset
                columns[entries[source].start + offset] = (kind, place, acts[place] if acts else None)
    runs: list[_Run] = []
    for _, same in groupby(columns, key=lambda column: id(getattr(column[2], "f", column[2]))):
        whole = list(same)
        run: list[tuple[int, int, int]] = []
        for kind, place, _ in whole:
            if run and (run[-1][0], run[-1][1] + run[-1][2]) == (kind, place):
                run[-1] = (*run[-1][:2], run[-1][2] + 1)
            else:
                run.append((kind, place, 1))
        runs.append((whole[0][2], run))
    return runs


def _activations(module: Any) -> list[Any]:
    """Return the activation of each column."""
    entries = zip(module.irreps_in, module.acts, strict=True)
    return [act for entry, act in entries for _ in range(entry.dim)]

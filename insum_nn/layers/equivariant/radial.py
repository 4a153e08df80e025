"""Networks and functions of the lengths of edges: e3nn's `FullyConnectedNet`, and radial functions with a cutoff."""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import Any, Self

import torch
from torch import Tensor, nn

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.layers.equivariant.adoption import E3NN_IN_GRAPHS, E3nnLayer, construct, e3nn_nn, runs_directly
from insum_nn.layers.equivariant.checks import InputError
from insum_nn.layers.statement_layer import StatementLayer, with_attributes
from insum_nn.ops.statements import run

__all__ = ["FullyConnectedNet", "RadialBasis", "RadialEmbedding", "activated", "activation"]

# Activations that statements have, by what e3nn's modules hold.
_ACTIVATIONS: dict[Any, str] = {
    getattr(home, name): name
    for home, names in ((nn.functional, "silu relu gelu softplus"), (torch, "tanh sigmoid relu sin abs"))
    for name in names.split()
}


def activated(values: Tensor, text: str, options: Options = DEFAULT) -> Tensor:
    """Run the statement of an activation on a matrix; differentiable."""
    return run(text, {}, {"A": values}, options, None)


def activation(act: str, inner: float, outer: float) -> str:
    """Return the statement of an activation between two constants.

    >>> activation("silu", 0.5, 2.0)
    'H[e,j] = 2.0 * silu(0.5 * A[e,j])'
    """
    return f"H[e,j] = {outer} * {act}({inner} * A[e,j])"


class FullyConnectedNet(E3nnLayer, e3nn_nn.FullyConnectedNet):
    """A network of linear layers and activations, with second moments of 1: `e3nn.nn.FullyConnectedNet`.

        H[e,j] = b * f(a * A[e,j]),        A = the matrix product of the layer before and its weights

    The constants of weights and activations are in the statements of the activations, and so is all that second
    derivatives need: a kernel for each layer's activation, its gradient, and the gradients of this. While torch traces
    a call, under autocast, without activations, or with ones that statements do not have, e3nn's own code runs.

    Source: Geiger and Smidt, e3nn (2022), section 6.

    Args:
        *args: of `e3nn.nn.FullyConnectedNet`: widths of the input, the hidden layers and the output; the activation.
        options: compile options.
        **kwargs: likewise.

    >>> network = FullyConnectedNet([8, 64, 16], nn.functional.silu)
    >>> network(torch.randn(5, 8)).shape
    torch.Size([5, 16])
    """

    def __init__(self, *args: Any, options: Options = DEFAULT, **kwargs: Any) -> None:
        construct(self, e3nn_nn.FullyConnectedNet, *args, **kwargs)
        self._prepare(options)

    @classmethod
    def from_e3nn(cls, module: Any, *, options: Options = DEFAULT) -> Self:
        """Return the same network as a module of e3nn, sharing its weights.

        Raises:
            InputError: the module is none, or e3nn's own code would run.
        """
        new = super().from_e3nn(module, options=options)
        if not new._texts:
            raise InputError("it has no activations that statements have", fix="leave it as it is.")
        return new

    def _prepare(self, options: Options) -> None:
        self.options = options
        self._texts: list[str] = []
        layers: Any = [*self.children()]
        acts = [_ACTIVATIONS.get(getattr(layer.act, "f", None)) for layer in layers]
        # The constants of a last layer that has no activation are those of the one before.
        plain = bool(layers) and layers[-1].act is None
        if None in acts[: len(acts) - plain]:
            return
        for act, layer, after in zip(acts, layers, [*layers[1:], None], strict=True):
            if act is not None:
                rest = _scale(after, after.var_out) if after is not None and after.act is None else 1.0
                outer = float(layer.act.cst) * layer.var_out**0.5 * rest
                self._texts.append(activation(act, _scale(layer), outer))

    def _statements(self) -> tuple[str, ...]:
        return tuple(self._texts)

    def _elsewhere(self) -> dict[str, tuple[str, ...]]:
        return {E3NN_IN_GRAPHS if self._texts else "e3nn's own code": ()}

    def forward(self, x: Tensor) -> Tensor:
        """Evaluate.

        Args:
            x: (e, inputs); differentiable.

        Returns:
            (e, outputs).
        """
        weights: list[Tensor] = [layer.weight for layer in self.children()]
        if not self._texts or x.dim() != 2 or not runs_directly(x, self.hs[0], *weights):
            return e3nn_nn.FullyConnectedNet.forward(self, x)  # type: ignore[no-any-return]
        for weight, text in zip_longest(weights, self._texts):
            x = x @ weight
            if text is not None:
                x = activated(x, text, self.options)
        return x


def _scale(layer: Any, var_out: float = 1.0) -> float:
    """Return what a layer's weights are multiplied by."""
    return (layer.h_in * layer.var_in / var_out) ** -0.5


def _radial(cutoff: float, power: int) -> str:
    """Return the statement of radial functions with a cutoff."""
    norm, p = math.sqrt(2 / cutoff), power
    parts = [f"{norm} / R[e]"]
    for exponent, factor in ((p - 1, -(p + 1) * (p + 2) / 2), (p, p * (p + 2)), (p + 1, -p * (p + 1) / 2)):
        parts.append(f"{factor * norm / cutoff} * (R[e] / {cutoff})**{exponent}")
    return f"E[e,n] = sin(F[n] * R[e]) * ({' + '.join(parts)}) * step({cutoff} - R[e])"


class RadialBasis(StatementLayer, nn.Module):
    """Bessel functions of a distance that end smoothly at the cutoff.

        b_n(r) = sqrt(2 / c) * sin(w_n r) / r * p(r / c),        w_n = n pi / c at first

    `p` is the polynomial that falls from 1 to 0 with `power - 1` derivatives that vanish at both ends. As a statement:

        E[e,n] = sin(F[n] * R[e]) * (a / R[e] + b * R[e]**4 + ..) * step(c - R[e])

    Source: Gasteiger, Gross, Guennemann, Directional Message Passing for Molecular Graphs (ICLR 2020), eqs. (7), (8).

    Args:
        cutoff: distance from which on everything is 0.
        count: number of functions.
        power: of the cutoff polynomial.
        options: compile options.

    >>> RadialBasis(5.0, 8)(torch.tensor([1.0, 5.0, 6.0]))[1:].abs().max().item() < 1e-6
    True
    """

    def __init__(self, cutoff: float, count: int = 8, power: int = 6, *, options: Options = DEFAULT) -> None:
        super().__init__()
        self.cutoff, self.power, self.options = cutoff, power, options
        self.EXPRESSION = _radial(cutoff, power)
        self.frequencies = nn.Parameter(torch.empty(count))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the frequencies to those of the start."""
        self.frequencies.copy_(math.pi / self.cutoff * torch.arange(1, len(self.frequencies) + 1))

    def forward(self, distance: Tensor) -> Tensor:
        """Evaluate.

        Args:
            distance: (e,); differentiable.

        Returns:
            (e, count).
        """
        return run(self.EXPRESSION, {}, {"F": self.frequencies, "R": distance}, self.options, None)


class RadialEmbedding(StatementLayer, nn.Module):
    """MACE's `RadialEmbeddingBlock` of Bessel functions, as one statement: see `RadialBasis`.

    `insum_nn.swap` makes one of a block, whose modules, buffers and keys it keeps. In graphs that torch records, and in
    TorchScript, MACE's own code runs.
    """

    bessel_fn: Any
    cutoff_fn: Any
    options: Options
    _peer: Any

    @classmethod
    def from_mace(cls, module: Any, *, options: Options = DEFAULT) -> RadialEmbedding:
        """Return the same functions as a block of MACE, sharing its buffers.

        Raises:
            InputError: the block has other functions than Bessel's, or changes lengths, or leaves out the cutoff.
        """
        if (
            type(module.bessel_fn).__name__ != "BesselBasis"
            or hasattr(module, "distance_transform")
            or not getattr(module, "apply_cutoff", True)
        ):
            fault = "it has other functions than Bessel's, or changes lengths, or leaves out the cutoff"
            raise InputError(fault, fix="leave the block as it is.")
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        with_attributes(new, module)
        new._peer, new.options = type(module), options
        new._read()
        # A state may bring another cutoff.
        new.register_load_state_dict_post_hook(RadialEmbedding._read)
        return new

    def _read(self, _: object = None) -> None:
        cutoff, power = self.cutoff_fn.r_max, self.cutoff_fn.p
        if not cutoff.is_meta:
            self.EXPRESSION = _radial(float(cutoff), int(power))

    def forward(
        self, edge_lengths: Tensor, node_attrs: Any, edge_index: Any, atomic_numbers: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Evaluate at lengths (e, 1), which alone count; differentiable: (e, functions), and none for MACE's cutoff."""
        frequencies = self.bessel_fn.bessel_weights
        if not runs_directly(edge_lengths, 1, frequencies):
            return self._peer.forward(self, edge_lengths, node_attrs, edge_index, atomic_numbers)  # type: ignore[no-any-return]
        named = {"F": frequencies, "R": edge_lengths.squeeze(1)}
        return run(self.EXPRESSION, {}, named, self.options, None), None

    def __prepare_scriptable__(self) -> Any:
        """Return MACE's own block, of the same buffers."""
        return with_attributes(object.__new__(self._peer), self)

"""A classifier of Tetris pieces in space that needs no rotated examples, chiral pieces included."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn

from insum_nn.layers.equivariant.adoption import e3nn_nn, o3
from insum_nn.layers.equivariant.tensor_product_conv import TensorProductConv
from insum_nn.models.nequip import RadialBasis, gated, plain_e3nn

__all__ = ["TETRIS_NAMES", "TetrisClassifier", "radius_edges", "tetris_pieces"]

TETRIS_NAMES = ("chiral", "mirrored", "square", "line", "corner", "L", "T", "zigzag")
"""The pieces, in the order of the classes; the first two are mirror images of each other."""

# The four unit cubes of each piece.
_CUBES = (
    ((0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 1, 0)),
    ((1, 1, 1), (1, 1, 2), (2, 1, 1), (2, 0, 1)),
    ((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)),
    ((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3)),
    ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)),
    ((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0)),
    ((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 1)),
    ((0, 0, 0), (1, 0, 0), (1, 1, 0), (2, 1, 0)),
)


def tetris_pieces() -> tuple[Tensor, Tensor, Tensor]:
    """The eight pieces: (32, 3) centres of their cubes, (32,) piece of each cube, (8,) classes.

    >>> positions, batch, labels = tetris_pieces()
    >>> positions.shape, batch.bincount().tolist()
    (torch.Size([32, 3]), [4, 4, 4, 4, 4, 4, 4, 4])
    """
    positions = torch.tensor(_CUBES, dtype=torch.get_default_dtype()).reshape(-1, 3)
    batch = torch.arange(len(_CUBES)).repeat_interleave(4)
    return positions, batch, torch.arange(len(_CUBES))


def radius_edges(positions: Tensor, batch: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """Receivers and senders of all pairs of different points of one piece that are closer than `radius`.

    Compares all pairs, so it is for few points.
    """
    near = torch.cdist(positions, positions) < radius
    near &= batch[:, None] == batch[None, :]
    near.fill_diagonal_(False)
    receivers, senders = near.nonzero().unbind(1)
    return receivers, senders


class _Layer(nn.Module):
    """A convolution with weights from the distance, and a gate."""

    def __init__(self, irreps_in: Any, irreps_edges: Any, irreps_out: Any, num_basis: int, *, gate: bool) -> None:
        super().__init__()
        irreps_in, irreps_edges = o3.Irreps(irreps_in), o3.Irreps(irreps_edges)
        reachable = {ir for _, a in irreps_in for _, b in irreps_edges for ir in a * b}
        self.gate = gated(irreps_out, reachable) if gate else None
        wanted = self.gate.irreps_in if self.gate is not None else o3.Irreps(irreps_out)
        self.irreps_out = self.gate.irreps_out if self.gate is not None else wanted
        instructions = [
            (i, j, k, "uvw", True)
            for i, (_, a) in enumerate(irreps_in)
            for j, (_, b) in enumerate(irreps_edges)
            for k, (_, ir) in enumerate(wanted)
            if ir in a * b
        ]
        self.convolution = TensorProductConv(irreps_in, irreps_edges, wanted, instructions)
        self.radial = e3nn_nn.FullyConnectedNet([num_basis, 32, self.convolution.weight_numel], nn.functional.silu)

    def forward(self, x: Tensor, harmonics: Tensor, radial: Tensor, receivers: Tensor, senders: Tensor) -> Tensor:
        z = self.convolution(x, harmonics, self.radial(radial), receivers, senders) * 0.5
        return z if self.gate is None else self.gate(z)


class TetrisClassifier(nn.Module):
    """Classify the eight Tetris pieces in any orientation; mirror images change the sign of the parity-odd output.

    Convolutions of mode uvw along the edges between near cubes, then one pseudoscalar and seven scalars a piece. The
    pseudoscalar, which a reflection negates, votes for the first chiral piece and against the second.

    Source: Geiger and Smidt, e3nn (2022), the Tetris example; Thomas et al., Tensor field networks (2018), section 5.

    Args:
        num_features: copies of each irrep.
        lmax: highest degree.
        num_layers: convolutions.
        radius: cubes closer than this see each other.

    >>> positions, batch, _ = tetris_pieces()
    >>> TetrisClassifier()(positions, batch, 8).shape
    torch.Size([8, 8])
    """

    def __init__(self, num_features: int = 8, lmax: int = 2, num_layers: int = 3, radius: float = 1.6) -> None:
        super().__init__()
        self.radius = radius
        edges = o3.Irreps.spherical_harmonics(lmax)
        hidden = o3.Irreps([(operator.index(num_features), (l, p)) for l in range(lmax + 1) for p in (1, -1)])
        with plain_e3nn():
            self.harmonics = o3.SphericalHarmonics(edges, normalize=True, normalization="component")
            self.radial_basis = RadialBasis(radius, 4)
            irreps = o3.Irreps("0e")
            layers: list[_Layer] = []
            for number in range(num_layers):
                last = number + 1 == num_layers
                layer = _Layer(irreps, edges, "0o + 7x0e" if last else hidden, 4, gate=not last)
                irreps = layer.irreps_out
                layers.append(layer)
            self.layers = nn.ModuleList(layers)

    def forward(self, positions: Tensor, batch: Tensor, num_pieces: int) -> Tensor:
        """Logits of the classes, (num_pieces, 8).

        Args:
            positions: (n, 3) centres of the cubes.
            batch: (n,) piece of each cube.
            num_pieces: number of pieces.
        """
        receivers, senders = radius_edges(positions, batch, self.radius)
        vectors = positions[senders] - positions[receivers]
        radial = self.radial_basis(torch.linalg.vector_norm(vectors, dim=1))
        harmonics = self.harmonics(vectors)
        x = positions.new_ones(positions.shape[0], 1)
        for layer in self.layers:
            x = layer(x, harmonics, radial, receivers, senders)
        sums = x.new_zeros(num_pieces, x.shape[1]).index_add(0, batch, x)
        odd, chiral, others = sums[:, :1], sums[:, 1:2], sums[:, 2:]
        return torch.cat([chiral + odd, chiral - odd, others], 1)

"""The gradient of an energy by the vectors of a graph's edges, for losses that differentiate it again by weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from insum_nn.layers.equivariant.adoption import keep_inner

__all__ = ["EdgeGradients"]


class EdgeGradients:
    """The functions of vectors that a potential reads, and the gradient of an energy through them.

        dE/dv = u dE/dr + (I - u u^T) dE/du / r,        v = r u

    If the vectors need no gradients themselves, a backward pass through this gradient reaches weights alone: what
    second derivatives by vectors there are, is never computed.

    Args:
        create_graph: the gradient is differentiated again.

    Attributes:
        vectors: (e, 3), once `functions_of` was called.
    """

    def __init__(self, *, create_graph: bool) -> None:
        self.create_graph = create_graph
        self.vectors: Tensor
        self._through: tuple[Tensor, ...] | None = None

    def functions_of(self, vectors: Tensor, radial_basis: Any, spherical_harmonics: Any) -> tuple[Tensor, Tensor]:
        """The values of radial functions and of spherical harmonics.

        Args:
            vectors: (e, 3); differentiable.
            radial_basis: a `RadialBasis`.
            spherical_harmonics: of a unit vector.
        """
        self.vectors, self._through = vectors, None
        distances = torch.linalg.vector_norm(vectors, dim=1)
        units = vectors / distances[:, None]
        if vectors.requires_grad:
            return radial_basis(distances), spherical_harmonics(units)
        basis = radial_basis(distances.requires_grad_())
        harmonics = spherical_harmonics(units.requires_grad_())
        leaf = harmonics.detach().requires_grad_()
        if self.create_graph:
            keep_inner(distances, units, leaf)
        self._through = distances, units, basis, harmonics, leaf
        return basis, leaf

    def of(self, energy: Tensor) -> Tensor:
        """The gradient, (e, 3), of an energy that was computed from the values of these functions."""
        through, self._through = self._through, None
        how: Any = {"create_graph": self.create_graph, "materialize_grads": True}
        if through is None:
            return torch.autograd.grad(energy, self.vectors, **how)[0]
        distances, units, basis, harmonics, leaf = through
        by_basis, by_leaf = torch.autograd.grad(energy, (basis, leaf), **how)
        (by_distance,) = torch.autograd.grad(basis, distances, by_basis, **how)
        by_unit = torch.zeros_like(units)
        if harmonics.requires_grad:
            # Those of degree 0 alone are constants.
            (by_unit,) = torch.autograd.grad(harmonics, units, by_leaf, **how)
        with torch.set_grad_enabled(self.create_graph):
            units, by_unit = units.detach(), by_unit / distances.detach()[:, None]
            along = by_distance[:, None] - (by_unit * units).sum(1, keepdim=True)
            return torch.addcmul(by_unit, units, along)

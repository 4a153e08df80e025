"""A drop-in replacement for the spherical harmonics of `e3nn.o3`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.layers.equivariant.adoption import E3NN_IN_GRAPHS, E3nnLayer, ProductLayer, o3, runs_directly
from insum_nn.ops.tensor_product import TensorProductSpec, checked_product
from insum_nn.structure.clebsch_gordan import nonzeros
from insum_nn.structure.irreps import Entry, Path

__all__ = ["SphericalHarmonics"]

Irreps = Any


class SphericalHarmonics(ProductLayer, E3nnLayer, o3.SphericalHarmonics):
    """Spherical harmonics of vectors: `e3nn.o3.SphericalHarmonics`.

        Y[z,K[p]] += CG[p] * Y'[z,I[p]] * X[z,J[p]]

    Those of each degree are the tensor product of those of the degree below with the vector, so that all derivatives
    are tensor products too. While torch traces a call, and under autocast, e3nn's own code runs.

    Source: Geiger and Smidt, e3nn (2022), section 3.

    Args:
        irreps_out: degrees: a number, a list of numbers, or a representation.
        normalize: divide the vectors by their lengths first.
        normalization: `"integral"` (default), `"component"` or `"norm"`.
        irreps_in: a vector, 1o, or a pseudovector, 1e.
        options: compile options.

    >>> from insum_nn.layers.equivariant.spherical_harmonics import SphericalHarmonics
    >>> harmonics = SphericalHarmonics("0e + 1o + 2e", True, "component")
    >>> harmonics(torch.randn(5, 3)).square().sum(1)
    tensor([9.0000, 9.0000, 9.0000, 9.0000, 9.0000])
    >>> SphericalHarmonics.from_e3nn(o3.SphericalHarmonics(2, True))(torch.randn(5, 3)).shape
    torch.Size([5, 5])
    """

    def __init__(
        self,
        irreps_out: Any,
        normalize: bool,
        normalization: str = "integral",
        irreps_in: Any = None,
        *,
        options: Options = DEFAULT,
    ) -> None:
        o3.SphericalHarmonics.__init__(self, irreps_out, normalize, normalization, irreps_in)
        self.options = options

    def _write_statements(self) -> None:
        # Values of the zonal harmonics at the pole, where all other harmonics are zero.
        area = 4 * math.pi if self.normalization == "integral" else 1.0
        squares = [1.0 if self.normalization == "norm" else (2 * l + 1) / area for l in range(self._lmax + 1)]
        self._poles = list(map(math.sqrt, squares))
        self._texts: list[str] = [spec.to_json() for spec in self._specs()]

    def _specs(self) -> list[TensorProductSpec]:
        """Return the tensor products that make the degrees from 2 on, each from the degree below and the vector."""
        specs: list[TensorProductSpec] = []
        for degree in range(2, self._lmax + 1):
            index, value = nonzeros(degree - 1, 1, degree)
            zonal = dict(zip(map(tuple, index.T.tolist()), value.tolist(), strict=True))[degree - 1, 1, degree]
            # The degree below is the vector itself at first.
            below = 1.0 if degree == 2 else self._poles[degree - 1]
            path = Path(0, 0, 0, "uuu", False, self._poles[degree] / (below * zonal), (1,))
            below_, vector, own = ((Entry(1, l, (-1) ** l),) for l in (degree - 1, 1, degree))
            specs.append(TensorProductSpec(below_, vector, own, (path,), True, options=self.options))
        return specs

    def _elsewhere(self) -> dict[str, tuple[str, ...]]:
        return super()._elsewhere() | {E3NN_IN_GRAPHS: ()}

    def forward(self, x: Tensor) -> Tensor:
        """Evaluate.

        Args:
            x: (..., 3); differentiable.

        Returns:
            (..., irreps_out.dim).
        """
        if not runs_directly(x, 3):
            return o3.SphericalHarmonics.forward(self, x)  # type: ignore[no-any-return]
        if self.normalize:
            x = torch.nn.functional.normalize(x, dim=-1)
        shape = x.shape[:-1]
        vector = x if x.dim() == 2 else x.reshape(-1, 3)
        degrees, none = [vector.new_full((vector.shape[0], 1), self._poles[0])], vector.new_empty(0)
        if self._lmax > 0:
            degrees.append(vector * self._poles[1])
        for text in self._texts:
            degrees.append(checked_product(text, vector if len(degrees) == 2 else degrees[-1], vector, none))
        chosen = [degrees[degree] for degree in self._ls_list]
        whole = chosen[0] if len(chosen) == 1 else torch.cat(chosen, 1)
        return whole if x.dim() == 2 else whole.reshape(*shape, whole.shape[1])

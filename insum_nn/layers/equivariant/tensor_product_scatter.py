"""NequIP's convolution: the same as `TensorProductConv`, under the names that NequIP's models use."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.layers.equivariant.tensor_product_conv import TensorProductConv

__all__ = ["TensorProductScatter"]


class TensorProductScatter(TensorProductConv):
    """Messages along edges as a model of the package nequip makes them, gather and scatter included.

        Z[Dst[e],K[p,u]] += CG[p] * X[Src[e],I[p],u] * Y[e,J[p]] * W[e,L[p],u]

    `insum_nn.swap` puts it in the place of `nequip.nn.TensorProductScatter`, whose parameters, buffers and keys it
    keeps. Shapes, dtypes and derivatives are those of `TensorProductConv`.

    Args:
        feature_irreps_in: representation of the nodes.
        irreps_edge_attr: representation of the edges.
        irreps_mid: representation of the result.
        instructions: as for `TensorProduct`.
        options: compile options.

    >>> import torch
    >>> layer = TensorProductScatter("8x0e", "0e", "8x0e", [(0, 0, 0, "uvu", True)])
    >>> receivers, senders = torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2])
    >>> layer(torch.randn(3, 8), torch.randn(3, 1), torch.randn(3, 8), receivers, senders).shape
    torch.Size([3, 8])
    """

    def __init__(
        self,
        feature_irreps_in: Any,
        irreps_edge_attr: Any,
        irreps_mid: Any,
        instructions: Any,
        *,
        options: Options = DEFAULT,
    ) -> None:
        super().__init__(feature_irreps_in, irreps_edge_attr, irreps_mid, instructions, options=options)
        self._rename()

    @classmethod
    def from_nequip(cls, module: Any) -> TensorProductScatter:
        """Return the same convolution as a module of NequIP, sharing its buffers."""
        new = cls.__new__(cls)
        TensorProductConv.__init__(new, module.tp)
        new._rename()
        new.model_dtype = module.model_dtype
        return new

    def _rename(self) -> None:
        product = self.tensor_product
        self._modules["tp"] = self._modules.pop("tensor_product")
        self.feature_irreps_in, self.irreps_edge_attr = product.irreps_in1, product.irreps_in2
        self.irreps_mid, self.instructions = product.irreps_out, product.instructions

    def __getattr__(self, name: str) -> Any:
        # Under this name `TensorProductConv` knows it.
        return super().__getattr__("tp" if name == "tensor_product" and "tp" in self._modules else name)

    def forward(  # type: ignore[override]
        self, x: Tensor, edge_attr: Tensor, edge_weight: Tensor, edge_dst: Tensor, edge_src: Tensor
    ) -> Tensor:
        """Convolve: features (n, d1) of nodes, (e, d2) and weights (e, weight_numel) of edges, ends (e,) of each edge.

        Returns:
            (n, irreps_mid.dim).
        """
        return self._convolve(x, edge_attr, edge_weight, edge_dst, edge_src, None, None)

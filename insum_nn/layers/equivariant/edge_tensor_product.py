"""MACE's convolution: the same as `TensorProductConv`, called as MACE's interactions call their product."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from insum_nn.layers.equivariant.tensor_product_conv import TensorProductConv

__all__ = ["EdgeTensorProduct"]


class EdgeTensorProduct(TensorProductConv):
    """Messages along edges as a model of the package mace makes them, gather and scatter included.

        Z[Dst[e],K[p,u]] += CG[p] * X[Src[e],I[p],u] * Y[e,J[p]] * W[e,L[p],u]

    `insum_nn.swap` puts it in the place of the attribute `conv_tp` of an interaction block, whose keys it keeps, and
    tells the block to hand it whole graphs, as the block does for other fused kernels. Without a graph it is the
    tensor product alone, for releases of mace that know no such kernels.

    Args:
        product: a tensor product, of e3nn or ours, whose weights belong to the edges.

    >>> import torch
    >>> from insum_nn.layers import TensorProduct
    >>> paths = [(0, 0, 0, "uvu", True)]
    >>> layer = EdgeTensorProduct(TensorProduct("8x0e", "0e", "8x0e", paths, shared_weights=False))
    >>> senders_and_receivers = torch.tensor([[1, 0, 2], [0, 1, 1]])
    >>> layer(torch.randn(3, 8), torch.randn(3, 1), torch.randn(3, 8), senders_and_receivers).shape
    torch.Size([3, 8])
    """

    def attach_to(self, block: Any, attached: bool = True) -> None:
        """Let an interaction block call this layer with node features and edges, not gathered features; or undo it."""
        vars(block).update(conv_fusion=True) if attached else vars(block).pop("conv_fusion")

    def forward(  # type: ignore[override]
        self, node_feats: Tensor, edge_attrs: Tensor, tp_weights: Tensor, edge_index: Tensor | None = None
    ) -> Tensor:
        """Convolve: features (n, d1) of nodes, (e, d2) and weights (e, weight_numel) of edges, (2, e) ends of each.

        Returns:
            (n, irreps_out.dim); of gathered features and no edges, the product (e, irreps_out.dim).
        """
        if edge_index is None:
            return self.tensor_product(node_feats, edge_attrs, tp_weights)
        return self._called(node_feats, edge_attrs, tp_weights, edge_index[1], edge_index[0], None, None)

    # Keys are those of the product that was here.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the product, under its own keys."""
        return self.tensor_product.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}tensor_product.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

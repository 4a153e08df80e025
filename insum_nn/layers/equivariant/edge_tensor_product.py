"""Parts of MACE's interactions: `TensorProductConv` as they call their product, and the channels of its result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from insum_nn.layers.equivariant.checks import InputError
from insum_nn.layers.equivariant.linear import Linear, axes_of, turned
from insum_nn.layers.equivariant.tensor_product_conv import TensorProductConv

__all__ = ["ChannelsOfIrreps", "EdgeTensorProduct"]


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


class ChannelsOfIrreps(torch.nn.Module):
    """A representation with equal multiplicities as (n, channels, components): MACE's `reshape_irreps`, by views.

    The linear map before it in an interaction block hands over components before channels, which it writes as fast.

    Args:
        module: of MACE.

    Raises:
        InputError: multiplicities differ.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.irreps, channels = module.irreps, {*module.muls}
        if len(channels) != 1 or getattr(module, "cueq_config", None) is not None:
            raise InputError("its multiplicities differ, or its layout", fix="leave the module as it is.")
        self.channels: int = channels.pop()
        self._axes = self._unlike = [(mul, size) for size, mul in axes_of(self.irreps, "ir_mul")]

    def attach_to(self, block: Any, attached: bool = True) -> None:
        """Let the block's linear map write components before channels, if it is one of ours; or undo it."""
        if isinstance(block.linear, Linear):
            block.linear._prepare(block.linear.options, layout_out="ir_mul" if attached else "mul_ir")
            self._axes = [(0, 0)] if attached else self._unlike

    def forward(self, tensor: Tensor) -> Tensor:
        """Reshape (n, channels * components)."""
        return turned(tensor, self._axes).view(tensor.shape[0], -1, self.channels).transpose(1, 2)

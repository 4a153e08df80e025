"""Layers that take the place of PyTorch Geometric's, spconv's, e3nn's and torch's own.

A layer is imported when it is first asked for, so that each needs only the peer whose base classes it shares:
`GCNConv` needs the extra `pyg`, the tensor products need `e3nn`; the others need nothing beyond torch.

`insum_nn.layers.spconv` holds the point-cloud layers under spconv's own names. Here, `SparseConv2d` is the
convolution with pruned filters; the point-cloud layer of that name is `insum_nn.layers.spconv.SparseConv2d`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from insum_nn.layers.block_sparse_linear import BlockSparseLinear
    from insum_nn.layers.gcn_conv import GCNConv
    from insum_nn.layers.sparse_conv2d import SparseConv2d
    from insum_nn.layers.sparse_conv_kinds import SparseConv3d, SparseConvTranspose3d, SparseInverseConv3d, SubMConv3d
    from insum_nn.layers.sparse_pool import SparseAvgPool3d, SparseMaxPool3d
    from insum_nn.layers.sparse_sequential import SparseSequential
    from insum_nn.layers.sparse_tensor import SparseConvTensor
    from insum_nn.layers.tensor_product import (
        ElementwiseTensorProduct,
        FullTensorProduct,
        FullyConnectedTensorProduct,
        TensorProduct,
        TensorSquare,
    )
    from insum_nn.layers.tensor_product_conv import TensorProductConv

__all__ = [
    "BlockSparseLinear",
    "ElementwiseTensorProduct",
    "FullTensorProduct",
    "FullyConnectedTensorProduct",
    "GCNConv",
    "SparseAvgPool3d",
    "SparseConv2d",
    "SparseConv3d",
    "SparseConvTensor",
    "SparseConvTranspose3d",
    "SparseInverseConv3d",
    "SparseMaxPool3d",
    "SparseSequential",
    "SubMConv3d",
    "TensorProduct",
    "TensorProductConv",
    "TensorSquare",
]

_HOMES = {
    "block_sparse_linear": ("BlockSparseLinear",),
    "gcn_conv": ("GCNConv",),
    "sparse_conv2d": ("SparseConv2d",),
    "sparse_conv_kinds": ("SparseConv3d", "SparseConvTranspose3d", "SparseInverseConv3d", "SubMConv3d"),
    "sparse_pool": ("SparseAvgPool3d", "SparseMaxPool3d"),
    "sparse_sequential": ("SparseSequential",),
    "sparse_tensor": ("SparseConvTensor",),
    "tensor_product": (
        "ElementwiseTensorProduct",
        "FullTensorProduct",
        "FullyConnectedTensorProduct",
        "TensorProduct",
        "TensorSquare",
    ),
    "tensor_product_conv": ("TensorProductConv",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Layers that take the place of PyTorch Geometric's, spconv's, e3nn's and torch's own.

A layer is imported at its first use, so that each needs only the package whose base classes it shares:
the graph layers need the extra `pyg`, the tensor products need `e3nn`; the others need nothing beyond torch.

`insum_nn.layers.spconv` holds the layers of sparse voxels under spconv's own names, in one to four dimensions.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from insum_nn.layers.equivariant.gate import Gate
    from insum_nn.layers.equivariant.linear import Linear
    from insum_nn.layers.equivariant.radial import FullyConnectedNet, RadialBasis
    from insum_nn.layers.equivariant.spherical_harmonics import SphericalHarmonics
    from insum_nn.layers.equivariant.symmetric_contraction import SymmetricContraction
    from insum_nn.layers.equivariant.tensor_product import *
    from insum_nn.layers.equivariant.tensor_product_conv import TensorProductConv
    from insum_nn.layers.equivariant.tensor_product_scatter import TensorProductScatter
    from insum_nn.layers.graph.attention import *
    from insum_nn.layers.graph.convolutions import *
    from insum_nn.layers.graph.gcn_conv import GCNConv
    from insum_nn.layers.graph.weighted import *
    from insum_nn.layers.grouped_linear import GroupedLinear
    from insum_nn.layers.pruned.block_sparse_linear import BlockSparseLinear, SparseLinear
    from insum_nn.layers.pruned.pruned_conv import PrunedConv1d, PrunedConv2d, PrunedConv3d
    from insum_nn.layers.voxel.conv import SparseConv3d, SparseConvTranspose3d, SparseInverseConv3d, SubMConv3d
    from insum_nn.layers.voxel.pool import SparseAvgPool3d, SparseMaxPool3d
    from insum_nn.layers.voxel.sequential import SparseSequential
    from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor

__all__ = ["ElementwiseTensorProduct", "FullTensorProduct", "FullyConnectedNet", "FullyConnectedTensorProduct", "Gate"]
__all__ += ["Linear", "RadialBasis", "SphericalHarmonics", "SymmetricContraction", "TensorProduct", "TensorProductConv"]
__all__ += ["TensorProductScatter", "TensorSquare"]
__all__ += ["APPNP", "ChebConv", "GATConv", "GATv2Conv", "GCNConv", "GINConv", "GINEConv", "GatedGraphConv"]
__all__ += ["GraphConv", "LGConv", "NNConv", "SAGEConv", "SGConv", "TAGConv", "TransformerConv"]
__all__ += ["EdgeConv", "FastRGCNConv", "HeteroLinear", "PNAConv", "RGCNConv"]
__all__ += ["BlockSparseLinear", "GroupedLinear", "PrunedConv1d", "PrunedConv2d", "PrunedConv3d", "SparseLinear"]
__all__ += ["SparseAvgPool3d", "SparseConv3d", "SparseConvTensor", "SparseConvTranspose3d", "SparseInverseConv3d"]
__all__ += ["SparseMaxPool3d", "SparseSequential", "SubMConv3d"]

_TENSOR_PRODUCTS = "ElementwiseTensorProduct FullTensorProduct FullyConnectedTensorProduct TensorProduct TensorSquare"
_GRAPHS = "APPNP ChebConv GINConv GINEConv GatedGraphConv GraphConv LGConv NNConv SAGEConv SGConv TAGConv"
_HOMES = {
    "grouped_linear": "GroupedLinear",
    "pruned.block_sparse_linear": "BlockSparseLinear SparseLinear",
    "graph.attention": "GATConv GATv2Conv TransformerConv",
    "graph.convolutions": _GRAPHS,
    "graph.gcn_conv": "GCNConv",
    "graph.weighted": "EdgeConv FastRGCNConv HeteroLinear PNAConv RGCNConv",
    "pruned.pruned_conv": "PrunedConv1d PrunedConv2d PrunedConv3d",
    "voxel.conv": "SparseConv3d SparseConvTranspose3d SparseInverseConv3d SubMConv3d",
    "voxel.pool": "SparseAvgPool3d SparseMaxPool3d",
    "voxel.sequential": "SparseSequential",
    "voxel.sparse_tensor": "SparseConvTensor",
    "equivariant.gate": "Gate",
    "equivariant.linear": "Linear",
    "equivariant.radial": "FullyConnectedNet RadialBasis",
    "equivariant.spherical_harmonics": "SphericalHarmonics",
    "equivariant.symmetric_contraction": "SymmetricContraction",
    "equivariant.tensor_product": _TENSOR_PRODUCTS,
    "equivariant.tensor_product_conv": "TensorProductConv",
    "equivariant.tensor_product_scatter": "TensorProductScatter",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""What makes our layer of a peer's: a table from the path of the peer's class to a converter."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from insum_nn.layers.statement_layer import with_attributes

__all__ = ["CONVERTERS", "Converter", "NotConvertible", "register_converter"]

Converter = Callable[[nn.Module], nn.Module]


class NotConvertible(Exception):
    """Raised by a converter that cannot replace a layer; the text is the reason."""


# Converters. Peers are known by the path of their class, so that none is imported before a model brings it.


# Arguments of the constructors of peers' layers that the layers keep under these names; older ones keep fewer.
_POOL = "ndim kernel_size stride padding dilation indice_key subm record_voxel_count name".split()
_CONV = "in_channels out_channels groups output_padding transposed inverse fp32_accum act_type act_alpha algo".split()


def _kept(module: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the attributes of these names that a layer has."""
    return {name: getattr(module, name) for name in names if hasattr(module, name)}


def _graph(module: Any) -> nn.Module:
    """Make a graph layer with the attributes of PyTorch Geometric's, of which it is a subclass."""
    asks = [value for name, value in vars(module).items() if name.endswith("_hooks") or name == "_explain"]
    if any(value is not None and value != {} for value in asks):
        raise NotConvertible("an explainer or a hook asks for its messages")
    kind: Any = getattr(importlib.import_module("insum_nn.layers"), type(module).__name__)
    return with_attributes(kind.__new__(kind), module)  # type: ignore[no-any-return]


def _equivariant(file: str, kind: str, method: str = "from_e3nn") -> Converter:
    """Return what makes an equivariant layer by a method of its class."""

    def convert(module: Any) -> nn.Module:
        ours = getattr(importlib.import_module(f"insum_nn.layers.equivariant.{file}"), kind)
        return getattr(ours, method)(module)  # type: ignore[no-any-return]

    return convert


def _mace_convolution(module: Any) -> nn.Module:
    if module.shared_weights:
        raise NotConvertible("its weights do not belong to edges")
    return importlib.import_module("insum_nn.layers.equivariant.edge_tensor_product").EdgeTensorProduct(module)  # type: ignore[no-any-return]


def _mace_reshape(module: Any) -> nn.Module:
    return importlib.import_module("insum_nn.layers.equivariant.edge_tensor_product").ChannelsOfIrreps(module)  # type: ignore[no-any-return]


def _reshape_elsewhere(_: Any) -> nn.Module:
    raise NotConvertible("no linear map stands before it, which could write in the order of its result")


def _spconv_convolution(module: Any) -> nn.Module:
    kernel = tuple(int(extent) for extent in module.kernel_size)
    expected = (module.out_channels, *kernel, module.in_channels // module.groups)
    if tuple(module.weight.shape) != expected:
        raise NotConvertible(f"its weight is {tuple(module.weight.shape)}, not (out, kernel.., in) = {expected}")
    new = _uninitialised(module)
    # The constructor that knows all arguments; those of fixed dimensions leave some out.
    given = _kept(module, [*_POOL, *_CONV])
    importlib.import_module("insum_nn.layers.voxel.conv").SparseConvolution.__init__(
        new, bias=module.bias is not None, device="meta", **given
    )
    new.weight, new.bias = module.weight, module.bias
    new._buffers.update(module._buffers)
    return new  # type: ignore[no-any-return]


def _spconv_pool(module: Any) -> nn.Module:
    new = _uninitialised(module)
    if not hasattr(module, "kernel_size"):
        new.__init__(module.name)
        return new  # type: ignore[no-any-return]
    base: Any = next(kind for kind in type(new).__mro__ if kind.__name__ == "_SparsePool")
    base.__init__(new, **_kept(module, _POOL))
    new._buffers.update(module._buffers)
    return new  # type: ignore[no-any-return]


def _spconv_module(module: Any) -> nn.Module:
    """Containers and small modules, which are nothing but their state and children."""
    new = _uninitialised(module)
    blank: dict[str, Any] = {"name": None, "_sparse_unique_name": ""} if not isinstance(module, nn.BatchNorm1d) else {}
    new.__dict__.update(blank)
    return with_attributes(new, module)  # type: ignore[no-any-return]


def _uninitialised(module: nn.Module) -> Any:
    """Return an instance of our class of the same name, whose constructor has yet to run."""
    kind = getattr(importlib.import_module("insum_nn.layers.spconv"), type(module).__name__, None)
    if kind is None:
        raise NotConvertible("there is no such kind here")
    return kind.__new__(kind)


def _names(prefix: str, kinds: Sequence[str], dims: Sequence[int]) -> list[str]:
    return [f"{prefix}.{kind}{dim}d" for kind in kinds for dim in dims]


def _known() -> dict[str, Converter]:
    found: dict[str, Converter] = {}
    for name in "GCN GAT GATv2 Transformer SAGE GIN Graph Cheb SG TAG LG NN RGCN PNA Edge".split():
        found[f"torch_geometric.nn.conv.{name.lower()}_conv.{name}Conv"] = _graph
    others = "gin_conv.GINEConv appnp.APPNP gated_graph_conv.GatedGraphConv rgcn_conv.FastRGCNConv"
    found |= dict.fromkeys([f"torch_geometric.nn.conv.{name}" for name in others.split()], _graph)
    found["torch_geometric.nn.dense.linear.HeteroLinear"] = _graph
    kinds = ("FullyConnectedTensorProduct", "ElementwiseTensorProduct", "FullTensorProduct", "TensorSquare")
    products = ["_tensor_product.TensorProduct", *(f"_sub.{kind}" for kind in kinds)]
    product = _equivariant("tensor_product", "TensorProduct")
    found |= dict.fromkeys([f"e3nn.o3._tensor_product.{name}" for name in products], product)
    found["e3nn.o3._linear.Linear"] = _equivariant("linear", "Linear")
    harmonics = _equivariant("spherical_harmonics", "SphericalHarmonics")
    found["e3nn.o3._spherical_harmonics.SphericalHarmonics"] = harmonics
    found["e3nn.nn._gate.Gate"] = _equivariant("gate", "Gate")
    scatter = _equivariant("tensor_product_scatter", "TensorProductScatter", "from_nequip")
    found["nequip.nn._tp_scatter_base.TensorProductScatter"] = scatter
    contraction = _equivariant("symmetric_contraction", "SymmetricContraction", "from_mace")
    found["e3nn.nn._fc.FullyConnectedNet"] = _equivariant("radial", "FullyConnectedNet")
    found["mace.modules.blocks.RadialEmbeddingBlock"] = _equivariant("radial", "RadialEmbedding", "from_mace")
    found["mace.modules.symmetric_contraction.SymmetricContraction"] = contraction
    for name in ("", "Residual", "Density", "DensityResidual", "AttResidual", "ResidualNonLinear"):
        found[f"mace.modules.blocks.RealAgnostic{name}InteractionBlock.conv_tp"] = _mace_convolution
    found["mace.modules.irreps_tools.reshape_irreps"] = _reshape_elsewhere
    for name in ("Residual", "DensityResidual", "AttResidual"):
        found[f"mace.modules.blocks.RealAgnostic{name}InteractionBlock.reshape"] = _mace_reshape
    kinds = ("SubMConv", "SparseConv", "SparseInverseConv", "SparseConvTranspose")
    found |= dict.fromkeys(_names("spconv.pytorch.conv", kinds, (1, 2, 3, 4)), _spconv_convolution)
    pools = _names("spconv.pytorch.pool", ("SparseMaxPool", "SparseAvgPool"), (1, 2, 3, 4))
    pools += ["spconv.pytorch.pool.SparseGlobalMaxPool", "spconv.pytorch.pool.SparseGlobalAvgPool"]
    found |= dict.fromkeys(pools, _spconv_pool)
    small = ("Sequential", "BatchNorm", "SyncBatchNorm", "ReLU", "Identity")
    found |= dict.fromkeys([f"spconv.pytorch.modules.Sparse{name}" for name in small], _spconv_module)
    # These two are defined in the package's own file.
    found |= dict.fromkeys([f"spconv.pytorch.{name}" for name in ("ToDense", "RemoveGrid")], _spconv_module)
    found["spconv.pytorch.identity.Identity"] = _spconv_module
    tables = ("JoinTable", "AddTable", "AddTableMisaligned", "ConcatTable")
    found |= dict.fromkeys([f"spconv.pytorch.tables.{name}" for name in tables], _spconv_module)
    return found


CONVERTERS: dict[str, Converter] = _known()
"""The path of a peer's class -> what makes our layer of an instance, sharing its parameters.

The path of a class and an attribute comes before: a layer there is called in a way of its own, and its replacement is
told of its owner by `attach_to`.
"""


def register_converter(path: str, converter: Converter) -> None:
    """Teach `swap` another class.

    Args:
        path: module and qualified name of the class; instances of subclasses are left alone.
        converter: takes the layer, returns its replacement, which shares the parameters; raises `NotConvertible` with
            the reason where it cannot. The layer itself stays as it is.
    """
    CONVERTERS[path] = converter

"""A small instance of every layer, as a module that takes nothing but tensors and so suits every transform."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from insum_nn import layers
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.layers import (
    BlockSparseLinear,
    ElementwiseTensorProduct,
    FullTensorProduct,
    FullyConnectedTensorProduct,
    GATConv,
    Gate,
    GATv2Conv,
    GCNConv,
    Linear,
    PrunedConv1d,
    PrunedConv2d,
    PrunedConv3d,
    SparseAvgPool3d,
    SparseConv3d,
    SparseConvTensor,
    SparseConvTranspose3d,
    SparseInverseConv3d,
    SparseLinear,
    SparseMaxPool3d,
    SparseSequential,
    SphericalHarmonics,
    SubMConv3d,
    TensorProduct,
    TensorProductConv,
    TensorProductScatter,
    TensorSquare,
    TransformerConv,
)
from insum_nn.layers.spconv import AddTableMisaligned, SparseGlobalAvgPool, SparseGlobalMaxPool, ToDense

__all__ = ["EVERY_LAYER", "MORE_MODES", "NO_LAYERS", "OF_E3NN_IN_GRAPHS", "WITHOUT_OPTIONS", "Case", "with_parameters"]

SHAPE = [4, 3, 4]

# No layers by themselves: what others are called with, or made of.
NO_LAYERS = {"SparseConvTensor", "SparseSequential"}
# Of these torch_geometric's own code comes first: edges whose number depends on values; or a GRU, not batched.
NO_LAYERS |= {"ChebConv", "SGConv", "GatedGraphConv"}
# It is made of a module of mace, which its own tests do without.
NO_LAYERS |= {"SymmetricContraction"}


class _On(nn.Module):
    """A layer, and how it is called with tensors."""

    def __init__(self, layer: nn.Module, call: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.call = call

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.layer(*inputs) if self.call is None else self.call(self.layer, *inputs)


@dataclass(frozen=True)
class Case:
    """A layer.

    Attributes:
        make: the module for compile options, in float64.
        inputs: its tensors for a batch of this size; the same ones for the same size.
        sizes: the name of the free extent of each dimension of each input.
    """

    make: Callable[[Options], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    sizes: tuple[Mapping[int, str], ...]

    def module(self, options: Options = DEFAULT) -> nn.Module:
        """The module, with the same weights whatever the options."""
        torch.manual_seed(0)
        return self.make(options).double()


def with_parameters(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The module as a function of its floating-point inputs and of its parameters, and these."""
    named = dict(module.named_parameters())
    floating = [at for at, tensor in enumerate(inputs) if tensor.is_floating_point()]

    def run(*values: Tensor) -> Tensor:
        given = list(inputs)
        for at, value in zip(floating, values, strict=False):
            given[at] = value
        return functional_call(module, dict(zip(named, values[len(floating) :], strict=True)), tuple(given))

    values = [*(inputs[at] for at in floating), *named.values()]
    return run, tuple(value.detach().clone().requires_grad_() for value in values)


def _real(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _whole(seed: int, below: int, *shape: int) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def _batch(*widths: int | tuple[int, ...]) -> dict[str, Any]:
    """Inputs (n, ..) that share their first dimension."""
    shapes = [width if isinstance(width, tuple) else (width,) for width in widths]

    def inputs(n: int) -> tuple[Tensor, ...]:
        return tuple(_real(at, n, *shape) for at, shape in enumerate(shapes))

    return {"inputs": inputs, "sizes": ({0: "batch"},) * len(widths)}


def _graph(channels: int, *, weighted: bool) -> dict[str, Any]:
    """Features, edges, and weights of the edges: three edges to two nodes, self-loops among them."""

    def inputs(n: int) -> tuple[Tensor, ...]:
        edges = _whole(1, n, 2, n + n // 2)
        weights = (_real(2, edges.shape[1]).abs() + 0.5,) if weighted else ()
        return _real(0, n, channels), edges, *weights

    return {"inputs": inputs, "sizes": ({0: "nodes"}, {1: "edges"}, *([{0: "edges"}] if weighted else []))}


def _edges(nodes: int, edges: int, weights: int) -> dict[str, Any]:
    def inputs(n: int) -> tuple[Tensor, ...]:
        count = n + n // 2
        ends = _whole(3, n, count), _whole(4, n, count)
        return _real(0, n, nodes), _real(1, count, edges), _real(2, count, weights), *ends

    return {"inputs": inputs, "sizes": ({0: "nodes"}, *({0: "edges"},) * 4)}


def _voxels(channels: int) -> dict[str, Any]:
    def inputs(n: int) -> tuple[Tensor, ...]:
        # The batch grows with the voxels, so that a grid always has room for them.
        cells = torch.randperm(2 * n, generator=torch.Generator().manual_seed(0))[:n].sort().values
        where, place = [], cells
        for extent in reversed(SHAPE):
            where.insert(0, place % extent)
            place = place // extent
        return _real(0, n, channels), torch.stack([place, *where], 1).int()

    return {"inputs": inputs, "sizes": ({0: "voxels"}, {0: "voxels"})}


Cloud = Callable[[nn.Module, SparseConvTensor], Tensor]


def _sparse(layer: nn.Module, cloud: SparseConvTensor) -> Tensor:
    return layer(cloud).features


def _whole_clouds(layer: nn.Module, cloud: SparseConvTensor) -> Tensor:
    return layer(cloud)


def _with_its_corner(layer: nn.Module, cloud: SparseConvTensor) -> Tensor:
    return layer([cloud, SparseConvTensor(cloud.features[:2], cloud.indices[:2], SHAPE, 64)]).features


def _cloud(make: Callable[[Options], nn.Module], of: Cloud = _sparse, channels: int = 2) -> Case:
    def call(layer: nn.Module, features: Tensor, sites: Tensor) -> Tensor:
        return of(layer, SparseConvTensor(features, sites, SHAPE, 64))

    return Case(lambda o: _On(make(o), call), **_voxels(channels))


def _right(layer: nn.Module, y: Tensor) -> Tensor:
    return layer.right(y)  # type: ignore[operator, no-any-return]


def _weighed(layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return layer(x, y, x.new_ones(layer.weight_numel))  # type: ignore[call-overload, no-any-return]


def _features(layer: nn.Module, x: Tensor, edges: Tensor, weight: Tensor) -> Tensor:
    return layer(x, edges, weight[:, None].expand(-1, x.shape[1]))  # type: ignore[no-any-return]


def _columns(layer: nn.Module, x: Tensor, edges: Tensor, weight: Tensor) -> Tensor:
    return layer(x, edges, weight[:, None])  # type: ignore[no-any-return]


def _typed(layer: nn.Module, x: Tensor, edges: Tensor) -> Tensor:
    return layer(x, edges, edges[0] % 2)  # type: ignore[no-any-return]


def _rows(layer: nn.Module, x: Tensor, edges: Tensor) -> Tensor:
    return layer(x, edges[0, : x.shape[0]] % 2)  # type: ignore[no-any-return]


_IN, _OTHER, _OUT = "2x0e+1x1o", "1x0e+1x1o", "2x0e+1x1o"
_PATHS = [(0, 0, 0, "uvu", True), (1, 1, 0, "uvu", True), (0, 1, 1, "uvu", True)]
_CONV = ("2x0e+2x1o", "1x0e+1x1o", "2x0e+2x1o", _PATHS)

EVERY_LAYER: dict[str, Case] = {
    "GCNConv": Case(lambda o: _On(GCNConv(2, 3, options=o)), **_graph(2, weighted=True)),
    "GCNConv, narrowing": Case(lambda o: _On(GCNConv(3, 2, options=o)), **_graph(3, weighted=True)),
    "GCNConv, no weights": Case(lambda o: _On(GCNConv(3, 2, options=o)), **_graph(3, weighted=False)),
    "GATConv": Case(lambda o: _On(GATConv(3, 2, 2, add_self_loops=False, options=o)), **_graph(3, weighted=False)),
    "GATv2Conv": Case(
        lambda o: _On(GATv2Conv(3, 2, 2, edge_dim=1, add_self_loops=False, options=o)), **_graph(3, weighted=True)
    ),
    "TransformerConv": Case(lambda o: _On(TransformerConv(3, 2, 2, options=o)), **_graph(3, weighted=False)),
    "SAGEConv": Case(lambda o: _On(layers.SAGEConv(3, 2, root_weight=False, options=o)), **_graph(3, weighted=False)),
    "SAGEConv, maxima": Case(lambda o: _On(layers.SAGEConv(3, 2, "max", options=o)), **_graph(3, weighted=False)),
    "GINConv": Case(lambda o: _On(layers.GINConv(nn.Identity(), options=o)), **_graph(3, weighted=False)),
    "GINEConv": Case(lambda o: _On(layers.GINEConv(nn.Identity(), options=o), _features), **_graph(3, weighted=True)),
    "GraphConv": Case(lambda o: _On(layers.GraphConv(3, 2, options=o)), **_graph(3, weighted=True)),
    "TAGConv": Case(lambda o: _On(layers.TAGConv(3, 2, 1, options=o)), **_graph(3, weighted=True)),
    "APPNP": Case(lambda o: _On(layers.APPNP(2, 0.5, add_self_loops=False, options=o)), **_graph(3, weighted=True)),
    "LGConv": Case(lambda o: _On(layers.LGConv(options=o)), **_graph(3, weighted=True)),
    "NNConv": Case(
        lambda o: _On(layers.NNConv(3, 2, nn.Linear(1, 6), options=o), _columns), **_graph(3, weighted=True)
    ),
    "RGCNConv": Case(lambda o: _On(layers.RGCNConv(3, 2, 2, options=o), _typed), **_graph(3, weighted=False)),
    "FastRGCNConv": Case(
        lambda o: _On(layers.FastRGCNConv(3, 2, 2, aggr="sum", options=o), _typed), **_graph(3, weighted=False)
    ),
    "PNAConv": Case(
        lambda o: _On(
            layers.PNAConv(3, 2, ["mean", "var"], ["identity"], torch.tensor([0, 2], device="cpu"), options=o)
        ),
        **_graph(3, weighted=False),
    ),
    "EdgeConv": Case(
        lambda o: _On(layers.EdgeConv(nn.Linear(6, 2), aggr="sum", options=o)), **_graph(3, weighted=False)
    ),
    "HeteroLinear": Case(lambda o: _On(layers.HeteroLinear(3, 2, 2, options=o), _rows), **_graph(3, weighted=False)),
    "GroupedLinear": Case(lambda o: _On(layers.GroupedLinear(2, 3, 2, options=o), _rows), **_graph(3, weighted=False)),
    "BlockSparseLinear": Case(
        lambda o: _On(BlockSparseLinear(5, 4, block_shape=2, density=0.5, options=o)), **_batch(5)
    ),
    "BlockSparseLinear, stored whole": Case(
        lambda o: _On(BlockSparseLinear(32, 16, block_shape=16, options=o)), **_batch(32)
    ),
    "BlockSparseLinear, oblong blocks": Case(
        lambda o: _On(BlockSparseLinear(64, 32, block_shape=(16, 32), density=0.5, options=o)), **_batch(64)
    ),
    "BlockSparseLinear, grouped": Case(
        lambda o: _On(BlockSparseLinear(6, 4, block_shape=2, density=0.7, group_size=2, options=o)), **_batch(6)
    ),
    "SparseLinear": Case(lambda o: _On(SparseLinear(5, 4, density=0.5, options=o)), **_batch(5)),
    "PrunedConv1d": Case(lambda o: _On(PrunedConv1d(2, 3, 2, padding=1, density=0.5, options=o)), **_batch((2, 5))),
    "PrunedConv3d": Case(lambda o: _On(PrunedConv3d(2, 3, 2, density=0.5, options=o)), **_batch((2, 3, 2, 3))),
    "PrunedConv2d": Case(lambda o: _On(PrunedConv2d(2, 3, 2, padding=1, density=0.5, options=o)), **_batch((2, 3, 3))),
    "SubMConv3d": _cloud(lambda o: SubMConv3d(2, 3, 3, options=o)),
    "SubMConv3d, groups": _cloud(lambda o: SubMConv3d(4, 4, 3, groups=2, options=o), channels=4),
    "SubMConv3d, pointwise": _cloud(lambda o: SubMConv3d(2, 2, 1, options=o)),
    "SparseConv3d": _cloud(lambda o: SparseConv3d(2, 3, 2, 2, options=o)),
    "SparseConvTranspose3d": _cloud(lambda o: SparseConvTranspose3d(2, 3, 2, 2, options=o)),
    "SparseInverseConv3d": _cloud(
        lambda o: SparseSequential(
            SparseConv3d(2, 2, 2, 2, indice_key="d", options=o), SparseInverseConv3d(2, 2, 2, "d", options=o)
        )
    ),
    "SparseMaxPool3d": _cloud(lambda o: SparseMaxPool3d(2, 2, options=o)),
    "SparseAvgPool3d": _cloud(lambda o: SparseAvgPool3d(2, 2, options=o)),
    "SparseGlobalMaxPool": _cloud(lambda o: SparseGlobalMaxPool(options=o), _whole_clouds),
    "SparseGlobalAvgPool": _cloud(lambda o: SparseGlobalAvgPool(options=o), _whole_clouds),
    "FullyConnectedTensorProduct": Case(
        lambda o: _On(FullyConnectedTensorProduct(_IN, _OTHER, _OUT, options=o)), **_batch(5, 4)
    ),
    "TensorProduct, weights of samples": Case(
        lambda o: _On(TensorProduct(_IN, _OTHER, _OUT, _PATHS[:1], shared_weights=False, options=o)), **_batch(5, 4, 2)
    ),
    "TensorProduct.right": Case(
        lambda o: _On(FullyConnectedTensorProduct(_IN, _OTHER, _OUT, options=o), _right), **_batch(4)
    ),
    "FullTensorProduct": Case(lambda o: _On(FullTensorProduct(_IN, _OTHER, options=o)), **_batch(5, 4)),
    "ElementwiseTensorProduct": Case(lambda o: _On(ElementwiseTensorProduct(_IN, "3x1o", options=o)), **_batch(5, 9)),
    "TensorSquare": Case(lambda o: _On(TensorSquare(_IN, options=o)), **_batch(5)),
    "Linear": Case(lambda o: _On(Linear(_IN, "3x0e+2x1o", biases=True, options=o)), **_batch(5)),
    "Gate": Case(lambda o: _On(Gate("2x0e", [torch.tanh], "1x0e", [torch.sigmoid], "1x1o", options=o)), **_batch(6)),
    "SphericalHarmonics": Case(lambda o: _On(SphericalHarmonics("0e+1o+2e", True, options=o)), **_batch(3)),
    "TensorProductConv": Case(lambda o: _On(TensorProductConv(*_CONV, options=o)), **_edges(8, 4, 6)),
    "TensorProductScatter": Case(lambda o: _On(TensorProductScatter(*_CONV, options=o)), **_edges(8, 4, 6)),
}


def _images(n: int) -> tuple[Tensor, ...]:
    return (_real(0, n, 2, n + 3, n + 5),)


# Other modes of these layers, for tests that take as long for a layer as a trace.
MORE_MODES: dict[str, Case] = {
    "GCNConv, not normalised": Case(
        lambda o: _On(GCNConv(2, 3, normalize=False, options=o)), **_graph(2, weighted=True)
    ),
    "GCNConv, other flow": Case(
        lambda o: _On(GCNConv(3, 2, flow="target_to_source", improved=True, options=o)), **_graph(3, weighted=True)
    ),
    "PrunedConv2d, strided": Case(
        lambda o: _On(PrunedConv2d(2, 3, 3, stride=2, padding=1, density=0.5, options=o)),
        _images,
        ({0: "batch", 2: "height", 3: "width"},),
    ),
    "FullyConnectedTensorProduct, weights of a call": Case(
        lambda o: _On(FullyConnectedTensorProduct(_IN, _OTHER, _OUT, internal_weights=False, options=o), _weighed),
        **_batch(5, 4),
    ),
}

# Layers that take no options, since peers' do not.
WITHOUT_OPTIONS: dict[str, Case] = {
    "ToDense": _cloud(lambda _: ToDense(), _whole_clouds),
    "AddTableMisaligned": _cloud(lambda _: AddTableMisaligned(), _with_its_corner),
}

# Layers that put e3nn's own operators into graphs that torch records.
OF_E3NN_IN_GRAPHS = ("Linear", "SphericalHarmonics")

"""Our layers beside those that they take the place of: same weights, same inputs, largest difference.

The layers of a model are compared while the model runs, on what they really see.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from insum_nn.layers.pruned.block_sparse_linear import BlockSparseLinear
from insum_nn.layers.voxel.conv import SparseConvolution
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor

# What the peer makes of a layer's inputs: from the layer, its arguments and its output.
Peer = Callable[..., Tensor]


@dataclass(frozen=True)
class Comparison:
    """Layers of a model beside a peer's.

    Attributes:
        layers: which were compared, and how many of each.
        difference: the largest absolute difference.
        largest: the largest absolute value that the peer gave.
    """

    layers: str
    difference: float
    largest: float


def compare(model: nn.Module, peers: Mapping[type, Peer], run: Callable[[], object]) -> Comparison:
    """Run a model and compare every layer of the given classes with what its peer makes of the same inputs.

    Args:
        model: holds the layers.
        peers: class of ours -> the peer's result.
        run: calls the model.

    Raises:
        RuntimeError: `run` reached none of the layers.
    """
    names: Counter[str] = Counter()
    worst: list[Tensor] = []
    largest: list[Tensor] = []

    def beside(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        with torch.no_grad():
            expected = peers[type(layer)](layer, output, *args, **kwargs)
        got = output.features if isinstance(output, SparseConvTensor) else output
        if got.shape != expected.shape or got.dtype != expected.dtype:
            raise RuntimeError(f"{layer} gave {got.dtype} {tuple(got.shape)}, its peer {tuple(expected.shape)}")
        names[_name(layer)] += 1
        worst.append((got.detach() - expected).abs().max())
        largest.append(expected.abs().max())

    handles = [m.register_forward_hook(beside, with_kwargs=True) for m in model.modules() if type(m) in peers]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    if not worst:
        raise RuntimeError("no layer ran that could be compared")
    layers = ", ".join(f"{count} {name}" for name, count in names.items())
    # The maximum of tensors, unlike Python's, keeps a NaN.
    return Comparison(layers, torch.stack(worst).max().item(), torch.stack(largest).max().item())


def _name(layer: nn.Module) -> str:
    if not isinstance(layer, SparseConvolution):
        return type(layer).__name__
    kind = "SubMConv" if layer.subm else "SparseInverseConv" if layer.inverse else "SparseConv"
    return f"{kind}{layer.ndim}d"


# Graphs.


def pyg_gcn_conv(
    layer: Any, output: Tensor, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None
) -> Tensor:
    """`torch_geometric.nn.GCNConv` with the layer's weights."""
    from torch_geometric.nn import GCNConv

    arguments = {name: getattr(layer, name) for name in ("improved", "add_self_loops", "normalize", "flow")}
    peer = GCNConv(layer.in_channels, layer.out_channels, bias=layer.bias is not None, **arguments)
    peer.load_state_dict(layer.state_dict())
    return peer.to(x.device)(x, edge_index, edge_weight)


# Point clouds.


def uses_spconv(device: torch.device) -> bool:
    """Whether spconv can stand beside our layers: its build for CPUs reads the weights in another order."""
    return device.type == "cuda" and importlib.util.find_spec("spconv") is not None


def sparse_conv_peer(device: torch.device) -> str:
    """What sparse convolutions are compared with."""
    if uses_spconv(device):
        return "spconv,\ndense conv3d where strided"
    why = "spconv needs a GPU" if importlib.util.find_spec("spconv") is not None else "spconv is not installed"
    return f"dense conv3d on the active sites\n({why})"


def sparse_convolution(layer: SparseConvolution, output: SparseConvTensor, x: SparseConvTensor) -> Tensor:
    """spconv's submanifold convolution where it can be had; else, and for strided ones, torch's dense one."""
    if layer.subm and uses_spconv(x.device):
        return spconv_submanifold(layer, x)
    return dense_convolution(layer, output, x)


def dense_convolution(layer: SparseConvolution, output: SparseConvTensor, x: SparseConvTensor) -> Tensor:
    """torch's convolution of the dense grid, read where the layer has written."""
    grid = x.features.new_zeros(x.batch_size, *x.spatial_shape, x.features.shape[1])
    grid[x.indices.long().unbind(1)] = x.features
    grid = grid.movedim(-1, 1)
    weight = layer.dense_weight.movedim(-1, 1)
    geometry = layer.geometry
    # The dense layer must not round to tf32, as it may by torch's defaults.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        if layer.inverse:
            known = x.find_indice_pair(layer.indice_key)
            if known is None:
                raise RuntimeError(f"no map is stored under {layer.indice_key!r}")
            there = known.geometry
            steps: dict[str, Any] = {"stride": there.stride, "padding": there.padding, "dilation": there.dilation}
            dense = functional.conv_transpose3d(grid, weight.transpose(0, 1), layer.bias, **steps)
        else:
            steps = {"stride": geometry.stride, "padding": geometry.padding, "dilation": geometry.dilation}
            dense = functional.conv3d(grid, weight, layer.bias, groups=layer.groups, **steps)
    return dense.movedim(1, -1)[output.indices.long().unbind(1)]


def spconv_submanifold(layer: SparseConvolution, x: SparseConvTensor) -> Tensor:
    """`spconv.pytorch.SubMConv3d` with the layer's weights."""
    peers: Any = importlib.import_module("spconv.pytorch")
    native = importlib.import_module("spconv.core").ConvAlgo.Native
    how: dict[str, Any] = {"bias": layer.bias is not None, "dilation": list(layer.dilation), "algo": native}
    peer = peers.SubMConv3d(layer.in_channels, layer.out_channels, list(layer.kernel_size), **how).to(x.device)
    peer.load_state_dict({name: value for name, value in layer.state_dict().items() if name in ("weight", "bias")})
    return peer(peers.SparseConvTensor(x.features, x.indices, list(x.spatial_shape), x.batch_size)).features


# Tensor products.


def _e3nn_product(product: Any) -> Any:
    """e3nn's tensor product of the same paths, with its own normalisation; weights are passed."""
    from e3nn import o3

    from insum_nn.models.nequip import plain_e3nn

    irreps = (product.irreps_in1, product.irreps_in2, product.irreps_out)
    how: dict[str, Any] = {"shared_weights": product.shared_weights, "internal_weights": False}
    with plain_e3nn():
        if isinstance(product, o3.FullyConnectedTensorProduct):
            return o3.FullyConnectedTensorProduct(*irreps, **how)
        return o3.TensorProduct(*irreps, [tuple(i)[:5] for i in product.instructions], **how)


def e3nn_product(layer: Any, output: Tensor, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """`e3nn.o3`'s tensor product with the layer's weights."""
    return _e3nn_product(layer).to(x)(x, y, layer.weight if weight is None else weight)


def e3nn_convolution(
    layer: Any, output: Tensor, x: Tensor, y: Tensor, weight: Tensor, receivers: Tensor, senders: Tensor
) -> Tensor:
    """e3nn's product of gathered features, a message an edge, added up."""
    messages = _e3nn_product(layer.tensor_product).to(x)(x[senders], y, weight)
    return x.new_zeros(output.shape[0], messages.shape[1]).index_add(0, receivers, messages)


def e3nn_peers() -> dict[type, Peer]:
    """Our classes of tensor products -> e3nn's."""
    from insum_nn.layers.equivariant.tensor_product import FullyConnectedTensorProduct
    from insum_nn.layers.equivariant.tensor_product_conv import TensorProductConv

    return {TensorProductConv: e3nn_convolution, FullyConnectedTensorProduct: e3nn_product}


# Blocks.


def dense_linear(layer: BlockSparseLinear, output: Tensor, x: Tensor) -> Tensor:
    """`nn.Linear` with the masked dense weight, whose blocks are put in place here."""
    (rows, cols), (a, b) = layer.grid_shape, layer.block_shape
    blocks = layer.weight.new_zeros(rows * cols, a, b).index_copy(0, layer.position, layer.weight)
    dense = blocks.view(rows, cols, a, b).transpose(1, 2).reshape(rows * a, cols * b)
    peer = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None).to(x)
    peer.weight.copy_(dense[: layer.out_features, : layer.in_features])
    if layer.bias is not None:
        peer.bias.copy_(layer.bias)
    return peer(x)


@functools.cache
def version(package: str) -> str:
    """A peer and its release, for a table."""
    return f"{package} {importlib.metadata.version(package)}"

"""Compare the layers of a model with the originals that they replace: same weights, same inputs."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from insum_nn.errors import InsumError, InsumShapeError
from insum_nn.structure.irreps import copies_outermost, entries_of

__all__ = ["REFERENCES", "Comparison", "Reference", "compare_layers"]


@dataclass(frozen=True)
class Reference:
    """What a class of layers is compared with.

    Attributes:
        compute: from the layer, its output and its arguments to what the original layer returns for the same arguments.
        name: the original's package with its version, from the device of the inputs.
    """

    compute: Callable[..., Tensor]
    name: Callable[[torch.device], str]


@dataclass(frozen=True)
class Comparison:
    """Layers of a model compared with the originals.

    Attributes:
        layers: class of layer -> how many were compared.
        peers: what they were compared with, in words.
        difference: the largest absolute difference.
        largest: the largest absolute value in the results of the originals.
    """

    layers: Mapping[str, int]
    peers: tuple[str, ...]
    difference: float
    largest: float

    @property
    def relative(self) -> float:
        """The largest difference over the largest value."""
        return self.difference / self.largest if self.largest else self.difference

    def __str__(self) -> str:
        layers = ", ".join(f"{count} {name}" for name, count in self.layers.items())
        return f"{layers}: {self.difference:.1e} of {self.largest:.2g} from {', '.join(self.peers)}"


def compare_layers(model: nn.Module, *inputs: Any, references: Mapping[str, Reference] | None = None) -> Comparison:
    """Run a model, and compare each of our layers in it with the original on the inputs that it receives.

    Gradients are not recorded. The model's mode stays what it is: call `model.eval()` first where batch statistics or
    dropout should not change.

    Args:
        model: holds layers of `insum_nn.layers`.
        *inputs: what the model is called with.
        references: class name -> what the class and its subclasses are compared with; default `REFERENCES`.

    Returns:
        Which layers were compared with what, and the largest difference.

    Raises:
        InsumError: the model called none of the layers.
        InsumShapeError: a layer's output has another shape or dtype than the original's.

    >>> from insum_nn.layers import BlockSparseLinear
    >>> compared = compare_layers(BlockSparseLinear(8, 4, block_shape=(2, 2), density=0.5), torch.ones(3, 8))
    >>> compared.layers, compared.peers, compared.relative < 1e-6
    ({'BlockSparseLinear': 1}, ('torch.nn.Linear with the dense weight',), True)
    """
    known = REFERENCES if references is None else references
    found = {name: reference for name, module in model.named_modules() if (reference := _reference(module, known))}
    names: Counter[str] = Counter()
    peers: dict[str, None] = {}
    pairs: list[tuple[Tensor, Tensor]] = []

    def compare(reference: Reference, layer: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        expected = reference.compute(layer, output, *args, **kwargs)
        got = getattr(output, "features", output)
        if got.shape != expected.shape or got.dtype != expected.dtype:
            raise InsumShapeError(
                f"{type(layer).__name__} returns another shape or dtype than the original",
                details=[
                    f"{layer}",
                    f"{got.dtype} {tuple(got.shape)}, the original {expected.dtype} {tuple(expected.shape)}",
                ],
                fix="report this as an error of insum_nn, with the layer's arguments.",
                expected=tuple(expected.shape),
                got=tuple(got.shape),
            )
        names[_kind(layer)] += 1
        peers[reference.name(got.device)] = None
        if got.numel():
            pairs.append(((got - expected).abs().max().double().cpu(), expected.abs().max().double().cpu()))

    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda layer, args, kwargs, output, reference=reference: compare(reference, layer, args, kwargs, output),
            with_kwargs=True,
        )
        for name, reference in found.items()
    ]
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    if not names:
        raise InsumError(
            "no layer was compared",
            details=[f"layers that can be compared: {', '.join(known)}"],
            fix="pass a model that calls such layers; insum_nn.swap puts them into a model.",
        )
    # The maximum of tensors, unlike Python's, keeps a NaN.
    difference, largest = torch.stack([torch.stack(pair) for pair in pairs]).amax(0).tolist() if pairs else (0.0, 0.0)
    return Comparison(dict(names), tuple(peers), difference, largest)


def _reference(module: nn.Module, known: Mapping[str, Reference]) -> Reference | None:
    """By class names, so that no peer is imported that the model does not need."""
    ours = [cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("insum_nn.")]
    return next((known[name] for name in ours if name in known), None)


def _kind(layer: Any) -> str:
    name = type(layer).__name__
    if name != "SparseConvolution":
        return name
    kind = "SubMConv" if layer.subm else "SparseInverseConv" if layer.inverse else "SparseConv"
    return f"{kind}{layer.ndim}d"


def _version(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"


# Graphs.


def _gcn_conv(layer: Any, output: Tensor, x: Any, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
    peers: Any = importlib.import_module("torch_geometric.nn")
    settings = {name: getattr(layer, name) for name in ("improved", "add_self_loops", "normalize", "flow")}
    peer = peers.GCNConv(layer.in_channels, layer.out_channels, bias=layer.bias is not None, **settings)
    peer.load_state_dict(layer.state_dict())
    return peer.to(output)(x, edge_index, edge_weight)


# Point clouds.


def _spconv_runs(device: torch.device) -> bool:
    """Whether spconv can be compared with: its build for CPUs reads the weights in another order."""
    return device.type != "cpu" and importlib.util.find_spec("spconv") is not None


def _sparse_convolution_name(device: torch.device) -> str:
    if _spconv_runs(device):
        return "spconv (submanifold), dense convolution (strided)"
    why = "needs a GPU" if importlib.util.find_spec("spconv") is not None else "is not installed"
    return f"dense convolution at the active sites (spconv {why})"


def _sparse_convolution(layer: Any, output: Any, x: Any) -> Tensor:
    """spconv's submanifold convolution where it runs; torch's dense one elsewhere, and for strided layers."""
    if layer.subm and layer.ndim == 3 and layer.groups == 1 and _spconv_runs(x.features.device):
        return _spconv_submanifold(layer, x)
    grid = x.features.new_zeros(x.batch_size, *x.spatial_shape, x.features.shape[1])
    grid[x.indices.long().unbind(1)] = x.features
    grid, weight = grid.movedim(-1, 1), layer.dense_weight.movedim(-1, 1)
    # An inverse layer goes back the way that the layer of the same key came.
    geometry = x.find_indice_pair(layer.indice_key).geometry if layer.inverse else layer.geometry
    steps = {"stride": geometry.stride, "padding": geometry.padding, "dilation": geometry.dilation}
    convolve: Any = getattr(functional, f"conv{'_transpose' * layer.inverse}{layer.ndim}d")
    # The dense layer must not round to tf32, as it may by torch's defaults.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        weight = weight.transpose(0, 1) if layer.inverse else weight
        dense = convolve(grid, weight, layer.bias, groups=layer.groups, **steps)
    return dense.movedim(1, -1)[output.indices.long().unbind(1)]


def _spconv_submanifold(layer: Any, x: Any) -> Tensor:
    peers: Any = importlib.import_module("spconv.pytorch")
    settings = {"bias": layer.bias is not None, "dilation": list(layer.dilation)}
    settings["algo"] = importlib.import_module("spconv.core").ConvAlgo.Native
    peer = peers.SubMConv3d(layer.in_channels, layer.out_channels, list(layer.kernel_size), **settings)
    peer = peer.to(x.features.device)
    peer.load_state_dict({name: value for name, value in layer.state_dict().items() if name in ("weight", "bias")})
    return peer(peers.SparseConvTensor(x.features, x.indices, list(x.spatial_shape), x.batch_size)).features


# Tensor products.


def _e3nn_product(product: Any) -> Any:
    """e3nn's tensor product of the same paths, normalised by e3nn where the layer has e3nn's default normalisation."""
    o3: Any = importlib.import_module("e3nn.o3")
    plain_e3nn: Any = importlib.import_module("insum_nn.models.nequip").plain_e3nn
    irreps = (product.irreps_in1, product.irreps_in2, product.irreps_out)
    options: dict[str, Any] = {"shared_weights": product.shared_weights, "internal_weights": False}
    with plain_e3nn():
        peer = o3.TensorProduct(*irreps, [tuple(i)[:5] for i in product.instructions], **options)
        own = torch.tensor([float(i.path_weight) for i in product.instructions], dtype=torch.float64)
        default = torch.tensor([float(i.path_weight) for i in peer.instructions], dtype=torch.float64)
        if not torch.allclose(own, default):
            rows = [(*tuple(i)[:5], i.path_weight**2) for i in product.instructions]
            options |= {"irrep_normalization": "none", "path_normalization": "none"}
            peer = o3.TensorProduct(*irreps, rows, **options)
    return peer


def _tensor_product(layer: Any, output: Tensor, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    return _e3nn_product(layer).to(output)(x, y, layer.weight if weight is None else weight)


def _tensor_square(layer: Any, output: Tensor, x: Tensor, weight: Tensor | None = None) -> Tensor:
    return _tensor_product(layer, output, x, x, weight)


def _tensor_product_conv(
    layer: Any, output: Tensor, x: Tensor, y: Tensor, weight: Tensor, receivers: Tensor, senders: Tensor
) -> Tensor:
    """e3nn's product of gathered features, one message for each edge, added up."""
    product = layer.tensor_product
    if layer.layout == "ir_mul":
        x, y = x[:, _columns(product.irreps_in1, x)], y[:, _columns(product.irreps_in2, y)]
    messages = _e3nn_product(product).to(output)(x[senders], y, weight)
    found = x.new_zeros(output.shape[0], messages.shape[1]).index_add(0, receivers, messages)
    return found[:, _columns(product.irreps_out, x).argsort()] if layer.layout == "ir_mul" else found


def _columns(irreps: Any, x: Tensor) -> Tensor:
    """Where e3nn's columns are in features whose copies are innermost."""
    return torch.tensor(copies_outermost(entries_of(irreps)), device=x.device)


# Blocks.


def _dense_linear(layer: Any, output: Tensor, x: Tensor) -> Tensor:
    """torch's linear layer with the dense weight, whose blocks are put in place here."""
    (rows, cols), (a, b) = layer.grid_shape, layer.block_shape
    blocks = layer.weight.new_zeros(rows * cols, a, b).index_copy(0, layer.position, layer.weight)
    dense = blocks.view(rows, cols, a, b).transpose(1, 2).reshape(rows * a, cols * b)
    return functional.linear(x, dense[: layer.out_features, : layer.in_features], layer.bias)


REFERENCES: Mapping[str, Reference] = MappingProxyType(
    {
        "GCNConv": Reference(_gcn_conv, lambda _: _version("torch_geometric")),
        "SparseConvolution": Reference(_sparse_convolution, _sparse_convolution_name),
        "TensorProductConv": Reference(_tensor_product_conv, lambda _: _version("e3nn")),
        "TensorSquare": Reference(_tensor_square, lambda _: _version("e3nn")),
        "TensorProduct": Reference(_tensor_product, lambda _: _version("e3nn")),
        "BlockSparseLinear": Reference(_dense_linear, lambda _: "torch.nn.Linear with the dense weight"),
    }
)
"""Class name of a layer -> what it and its subclasses are compared with."""

"""Whole networks as people train them: a GCN, sparse U-Nets (SpUNet's shape, MinkUNet), a NequIP potential.

`network(name, setting)` returns a `Network`: models by provider, batches that differ from each other as those of a data
loader do, and the loss. `train` makes a training step of it. Weights and batches are the same for every provider.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor, nn

from benchmarks import peers, sparse_reference
from benchmarks.clouds import room
from benchmarks.registry import Setting, Unavailable
from benchmarks.unet import UNet

__all__ = [
    "NETWORKS",
    "Batch",
    "Batches",
    "Losses",
    "Network",
    "Step",
    "autocast",
    "in_double",
    "network",
    "train",
    "without_autocast",
]

Batch = tuple[Any, ...]

NETWORKS = ("gcn_2k", "gcn_14k", "gcn_sampled", "spunet_fp16", "spunet_fp32", "minkunet", "nequip_32", "nequip_864")


@dataclass(frozen=True)
class Network:
    """One network.

    Attributes:
        models: provider -> what builds the model on the setting's device, with the same weights for every provider.
        reference: builds the same model in float64 from plain torch operators.
        batches: arguments of the model, then the labels; float32.
        loss: of a model and a batch.
        outputs: what inference returns, as a tensor.
        dtype: of autocast; `None` for float32 throughout.
    """

    models: Mapping[str, Callable[[], nn.Module]]
    reference: Callable[[], nn.Module]
    batches: Sequence[Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    outputs: Callable[[nn.Module, Batch], Tensor]
    dtype: torch.dtype | None = None


def network(name: str, setting: Setting) -> Network:
    """Build a network of `NETWORKS`."""
    kind, _, size = name.partition("_")
    if kind == "gcn":
        return _gcn(setting, size)
    if kind == "spunet":
        return _spunet(setting, half=size == "fp16")
    if kind == "minkunet":
        return _minkunet(setting)
    return _nequip(setting, cells=2 if size == "32" else 6)


class Losses(nn.Module):
    """A model that returns the loss of a batch, so that a wrapper of modules sees all of a step's forward pass.

    Forces are gradients inside the forward pass.
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Batch], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *batch: Any) -> Tensor:
        return self.loss(self.model, batch)


class Step:
    """A training step: forward, loss, backward, Adam; each call takes the next batch.

    The learning rate is 0, so that every step is on the same weights, after all the work of the optimizer.
    """

    def __init__(self, found: Network, model: nn.Module, batches: Sequence[Batch], device: torch.device) -> None:
        self.network, self.model, self.batches, self.device = found, model.train(), batches, device
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.0, fused=on_gpu, capturable=on_gpu)
        self.scaler = torch.amp.GradScaler(device.type, enabled=found.dtype is torch.float16)
        self.count = 0

    def __call__(self) -> Tensor:
        """Take the next batch; return the loss."""
        self.count += 1
        return self.on(self.batches[(self.count - 1) % len(self.batches)])

    def on(self, batch: Batch) -> Tensor:
        """Take one batch; return the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.device, self.network.dtype):
            loss = self.network.loss(self.model, batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Enter mixed precision where a network uses it."""
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def train(found: Network, provider: str, device: torch.device) -> Step:
    """Build a provider's model, and its training step."""
    return Step(found, found.models[provider](), found.batches, device)


class Batches(Sequence[Batch]):
    """Batches that are made when they are first asked for: who takes two steps does not wait for eight."""

    def __init__(self, make: Callable[[int], Batch], count: int) -> None:
        self.make, self.made = make, list[Batch | None]([None] * count)

    def __len__(self) -> int:
        return len(self.made)

    @overload
    def __getitem__(self, place: int) -> Batch: ...
    @overload
    def __getitem__(self, place: slice) -> list[Batch]: ...
    def __getitem__(self, place: int | slice) -> Batch | list[Batch]:
        if isinstance(place, slice):
            return [self[each] for each in range(len(self))[place]]
        number = range(len(self))[place]
        batch = self.made[number]
        if batch is None:
            batch = self.made[number] = self.make(number)
        return batch


def without_autocast(found: Network) -> Network:
    """Return the same network in one precision throughout."""
    return replace(found, dtype=None)


def in_double(batches: Sequence[Batch]) -> list[Batch]:
    """Convert the batches to float64."""

    def convert(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return [tuple(convert(value) for value in batch) for batch in batches]


def _seeded(setting: Setting, build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setting.seed)
        return build()


# Graphs ---------------------------------------------------------------------------------------------------------------


_GRAPHS = {"2k": (2_708, 10_556), "14k": (13_752, 491_722), "sampled": (4_000, 16_000)}


class _Prepared(nn.Module):
    """A graph network whose graphs are normalised and sorted once, as a transform of the data set does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.graphs = model, dict[int, Any]()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile what takes a prepared graph."""
        self.model.compile(*args, **kwargs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        graph = self.graphs.get(id(edge_index))
        if graph is None:
            adjacency: Any = importlib.import_module("insum_nn.structure.adjacency").Adjacency
            graph = self.graphs[id(edge_index)] = adjacency.from_edges(edge_index, num_nodes=x.shape[0])
        return self.model(x, graph)


def _gcn(setting: Setting, size: str) -> Network:
    """torch_geometric's GCN of three layers, 128 features wide, trained on the whole graph.

    Of "prepared" models the graph is normalised and sorted before. Of size "sampled", on graphs of 500 to 4,000 nodes,
    another at each step, as a `NeighborLoader` gives them.
    """
    from benchmarks.cases.gcn import random_graph

    nodes, edges = (60, 200) if setting.tiny else _GRAPHS[size]
    width, classes = (16, 4) if setting.tiny else (128, 10)

    def graph(number: int) -> Batch:
        own = nodes - 7 * number * nodes // 512
        edge_index = random_graph(setting, own, edges * own // nodes)
        x = torch.randn(own, width, generator=setting.generator(), device=setting.device)
        labels = torch.randint(classes, (own,), generator=setting.generator(), device=setting.device)
        return x, edge_index, labels

    def pyg() -> nn.Module:
        library: Any = importlib.import_module("torch_geometric.nn")
        return _seeded(setting, lambda: library.GCN(width, width, 3, classes)).to(setting.device)

    def ours() -> nn.Module:
        package: Any = importlib.import_module("insum_nn")
        model = pyg()
        package.swap(model)
        return model

    def compiled(build: Callable[[], nn.Module], mode: str | None = None) -> Callable[[], nn.Module]:
        def made() -> nn.Module:
            if setting.device.type != "cuda":
                raise Unavailable("compiled networks are timed on a GPU: the C++ takes minutes to compile")
            torch.compiler.reset()
            model = build()
            model.compile(mode=mode)
            return model

        return made

    def outputs(model: nn.Module, batch: Batch) -> Tensor:
        return model(*batch[:2])

    def prepared() -> nn.Module:
        return _Prepared(ours())

    ahead: dict[str, Callable[[], nn.Module]] = {
        "insum_nn/prepared": prepared,
        "insum_nn/prepared/compiled": compiled(prepared),
        "insum_nn/prepared/cuda_graphs": compiled(prepared, "reduce-overhead"),
    }
    return Network(
        models={
            "insum_nn": ours,
            "insum_nn/compiled": compiled(ours),
            "insum_nn/cuda_graphs": compiled(ours, "reduce-overhead"),
            # Each sampled graph is used once.
            **({} if size == "sampled" else ahead),
            "pyg": pyg,
            "pyg/compiled": compiled(pyg),
            "pyg/cuda_graphs": compiled(pyg, "reduce-overhead"),
        },
        reference=lambda: pyg().double(),
        batches=Batches(graph, 1 if size != "sampled" else 2 if setting.tiny else 64),
        loss=lambda model, batch: nn.functional.cross_entropy(outputs(model, batch), batch[2]),
        outputs=outputs,
    )


# Point clouds ---------------------------------------------------------------------------------------------------------


def _scene(setting: Setting, number: int, channels: int, classes: int) -> Batch:
    """Two rooms of 81,000 voxels each, turned at random; labels follow the height."""
    generator = torch.Generator().manual_seed(setting.seed * 1000 + number)
    clouds: list[Tensor] = []
    for part in range(2):
        points = room(*((16, 9, 2) if setting.tiny else (230, 50, 30)), seed=1 + 2 * number + part).double()
        angle = float(torch.rand(1, generator=generator)) * 2 * math.pi
        turn = torch.tensor([[math.cos(angle), -math.sin(angle), 0], [math.sin(angle), math.cos(angle), 0], [0, 0, 1]])
        cells = (points @ turn.double().T).floor().long().unique(dim=0)
        clouds.append(nn.functional.pad(cells - cells.amin(0), (1, 0), value=part))
    indices = torch.cat(clouds)
    shape = [-(-(int(extent) + 1) // 16) * 16 for extent in indices[:, 1:].amax(0)]
    features = torch.randn(len(indices), channels, generator=generator)
    labels = indices[:, 3] // 4 % classes
    return features.to(setting.device), indices.int().to(setting.device), shape, 2, labels.to(setting.device)


def _spunet(setting: Setting, *, half: bool) -> Network:
    channels, classes = 6, 13
    sizes: dict[str, Any] = (
        {"depths": (1,) * 8, "planes": (6, 8, 8, 10, 10, 8, 8, 6), "stem": 6} if setting.tiny else {}
    )
    dtype = None if not half else torch.float16 if setting.device.type == "cuda" else torch.bfloat16

    def reference() -> UNet:
        built = _seeded(setting, lambda: UNet(sparse_reference, channels, classes, **sizes))
        return built.to(setting.device, torch.float64)  # type: ignore[return-value]

    def model(find: Callable[[], Any]) -> Callable[[], nn.Module]:
        def made() -> nn.Module:
            built = UNet(find(), channels, classes, **sizes)
            built.load_state_dict(reference().float().state_dict())
            return built.to(setting.device)

        return made

    def outputs(built: nn.Module, batch: Batch) -> Tensor:
        return built(*batch[:4])

    return Network(
        models={
            "insum_nn": model(lambda: importlib.import_module("insum_nn.layers.spconv")),
            "spconv": model(lambda: peers.spconv("spconv", setting.device)),
            "spconv_triton": model(lambda: peers.spconv("spconv_triton", setting.device)),
        },
        reference=reference,
        batches=Batches(lambda number: _scene(setting, number, channels, classes), 2 if setting.tiny else 8),
        loss=lambda built, batch: nn.functional.cross_entropy(
            outputs(built, batch).to(torch.promote_types(batch[0].dtype, torch.float32)), batch[4]
        ),
        outputs=outputs,
        dtype=dtype,
    )


def _minkunet(setting: Setting) -> Network:
    """The network of `examples/train_s3dis.py`, in bfloat16 on a GPU; the reference is itself in float64."""
    channels, classes = 6, 13
    planes = (6, 8, 8, 10, 10, 8, 8, 6) if setting.tiny else (32, 64, 128, 256, 256, 128, 96, 96)

    def ours(dtype: torch.dtype = torch.float32) -> nn.Module:
        models: Any = importlib.import_module("insum_nn.models")
        built = _seeded(setting, lambda: models.MinkUNet(channels, classes, planes=planes, init_dim=planes[0]))
        return built.to(setting.device, dtype)

    def outputs(built: nn.Module, batch: Batch) -> Tensor:
        sparse: Any = importlib.import_module("insum_nn.layers.spconv")
        return built(sparse.SparseConvTensor(*batch[:4])).features

    return Network(
        models={"insum_nn": ours},
        reference=lambda: ours(torch.float64),
        batches=Batches(lambda number: _scene(setting, number, channels, classes), 2 if setting.tiny else 8),
        loss=lambda built, batch: nn.functional.cross_entropy(
            outputs(built, batch).to(torch.promote_types(batch[0].dtype, torch.float32)), batch[4]
        ),
        outputs=outputs,
        dtype=torch.bfloat16,
    )


# Atoms ----------------------------------------------------------------------------------------------------------------


def _crystal(setting: Setting, number: int, cells: int, cutoff: float) -> Batch:
    """A copper-gold crystal whose atoms are displaced at random, with all neighbours within the cutoff."""
    generator = torch.Generator().manual_seed(setting.seed * 1000 + number)
    spacing = 3.8
    corners = torch.cartesian_prod(*[torch.arange(cells)] * 3).reshape(-1, 3).double()
    sites = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5], [0.5, 0.5, 0.0]], dtype=torch.float64)
    positions = (corners[:, None] + sites).reshape(-1, 3) * spacing
    positions += 0.1 * torch.randn(positions.shape, generator=generator, dtype=torch.float64)
    species = torch.full((len(positions),), 29)
    species[torch.randperm(len(positions), generator=generator)[: len(positions) // 3]] = 79
    length = cells * spacing
    reach = math.ceil(cutoff / length)
    images = torch.cartesian_prod(*[torch.arange(-reach, reach + 1)] * 3).double() * length
    ends: list[Tensor] = []
    for image in images:
        vectors = positions[None, :] + image - positions[:, None]
        near = (vectors.norm(dim=2) < cutoff).nonzero()
        if not bool(image.any()):
            near = near[near[:, 0] != near[:, 1]]
        ends.append(torch.cat([near.double(), image.expand(len(near), 3)], 1))
    edges = torch.cat(ends)
    edges = edges[(edges[:, 0] * len(positions) + edges[:, 1]).argsort(stable=True)]
    receivers, senders = edges[:, :2].long().unbind(1)
    offsets = edges[:, 2:]
    floats = [t.float().to(setting.device) for t in (positions, offsets)]
    whole = [t.to(setting.device) for t in (species, receivers, senders)]
    forces = torch.sin(floats[0])
    return floats[0], *whole, floats[1], forces


class _PlainConvolution(nn.Module):
    """A convolution of e3nn: gather, e3nn's tensor product, index_add."""

    def __init__(self, product: nn.Module) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: Tensor, y: Tensor, w: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        messages = self.product(x.index_select(0, cols), y, w)
        return messages.new_zeros(x.shape[0], messages.shape[1]).index_add(0, rows, messages)


class _OpenEquivarianceConvolution(nn.Module):
    """A convolution of OpenEquivariance on weights in e3nn's order."""

    def __init__(self, convolution: Any, count: int, device: torch.device) -> None:
        super().__init__()
        self.convolution = convolution
        order = torch.arange(count, device=device, dtype=torch.float32)
        order = convolution.reorder_weights_from_e3nn(order[None], True)[0].round().long()
        self.order = None if torch.equal(order, torch.arange(count, device=device)) else order

    def forward(self, x: Tensor, y: Tensor, w: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        w = w if self.order is None else w.index_select(1, self.order)
        return self.convolution(x, y, w, rows, cols)


def _with_e3nn(model: Any, convolution: Callable[[Any], nn.Module]) -> nn.Module:
    """Replace our layers in a potential by e3nn's, with the same weights, and build its convolutions."""
    o3: Any = importlib.import_module("e3nn.o3")
    gates: Any = importlib.import_module("e3nn.nn")
    ours: Any = importlib.import_module("insum_nn.layers")
    peers_of = {ours.Linear: o3.Linear, ours.Gate: gates.Gate, ours.SphericalHarmonics: o3.SphericalHarmonics}
    for module in model.modules():
        if type(module) in peers_of:
            # Ours are subclasses that hold what e3nn's hold.
            module.__class__ = peers_of[type(module)]
    for layer in model.layers:
        own = layer.convolution.tensor_product
        rows = [(*tuple(i)[:5], i.path_weight**2) for i in own.instructions]
        options = {"irrep_normalization": "none", "path_normalization": "none", "shared_weights": False}
        product = o3.TensorProduct(own.irreps_in1, own.irreps_in2, own.irreps_out, rows, **options)
        layer.convolution = convolution(product)
        own = layer.itself
        layer.itself = o3.FullyConnectedTensorProduct(own.irreps_in1, own.irreps_in2, own.irreps_out)
        layer.itself.load_state_dict(own.state_dict())
        own = layer.gate.mul
        if own.irreps_out.dim:
            layer.gate.mul = o3.ElementwiseTensorProduct(own.irreps_in1, own.irreps_in2)
    return model


def _nequip(setting: Setting, *, cells: int) -> Network:
    """Four rounds of messages, 64 features of both parities up to degree 2; energies and forces in the loss."""
    cutoff = 3.0 if setting.tiny else 5.0
    sizes: dict[str, Any] = {"num_layers": 4, "num_features": 64, "lmax": 2, "radial_hidden": (64, 64)}
    if setting.tiny:
        sizes, cells = {"num_layers": 2, "num_features": 4, "lmax": 1, "radial_hidden": (8,)}, 1

    def ours(dtype: torch.dtype = torch.float32) -> nn.Module:
        from benchmarks.irreps import e3nn_in_double

        models: Any = importlib.import_module("insum_nn.models")
        with e3nn_in_double():
            model = _seeded(setting, lambda: models.NequIP([29, 79], cutoff=cutoff, average_neighbors=40.0, **sizes))
        return model.to(setting.device, dtype)

    def e3nn(dtype: torch.dtype = torch.float32) -> nn.Module:
        from benchmarks.irreps import e3nn_in_double

        model = ours(torch.float64).cpu()
        with e3nn_in_double():
            model = _with_e3nn(model, _PlainConvolution)
        return model.to(setting.device, dtype)

    def openequivariance() -> nn.Module:
        from benchmarks.irreps import e3nn_in_double

        library = peers.oeq(setting.device)

        def convolution(product: Any) -> nn.Module:
            problem = peers.oeq_problem(library, product, torch.float32)
            return _OpenEquivarianceConvolution(
                library.TensorProductConv(problem), product.weight_numel, setting.device
            )

        model = ours(torch.float64).cpu()
        with e3nn_in_double():
            model = _with_e3nn(model, convolution)
        return model.to(setting.device, torch.float32)

    def both(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        return model.energy_and_forces(*batch[:5])

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        energy, forces = both(model, batch)
        return (forces - batch[5]).square().mean() + 1e-3 * (energy / len(batch[0])).square().mean()

    return Network(
        models={"insum_nn": ours, "e3nn": e3nn, "oeq": openequivariance},
        reference=lambda: e3nn(torch.float64),
        batches=Batches(lambda number: _crystal(setting, number, cells, cutoff), 2 if setting.tiny else 8),
        loss=loss,
        outputs=lambda model, batch: both(model, batch)[1],
    )

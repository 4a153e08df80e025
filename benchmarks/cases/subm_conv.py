"""Submanifold convolutions of 3 x 3 x 3 cells against spconv, spconv-triton and WarpConvNet, and their kernel maps.

In `subm_conv` the map is built before the clock starts, as in every layer but the first that shares an `indice_key`.
`subm_map` times the map alone, and the map with one convolution of 32 channels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import clouds, peers
from benchmarks.clouds import CLOUDS, neighbour_table
from benchmarks.registry import Floor, Problem, Setting, Work, case

__all__ = ["subm_conv", "subm_map"]

TESTS = ("tests/layers/voxel/test_conv_layers.py", "tests/structure/kernel_map/test_kernel_map.py")
PEERS = ("spconv", "spconv_triton")

# Relative to the largest element. fp16 and bf16: sums in float32 and one rounding; for the weight's gradient operands
# are rounded too. tf32 rounds each factor to eleven bits.
TOLERANCE = {"float32": 1e-5, "tf32": 3e-3, "float16": 3e-3, "bfloat16": 2.4e-2}
# spconv may sum fp16 in fp16; the baselines' records state their errors.
LOOSE = {"float32": 3e-3, "tf32": 1e-2, "float16": 3e-2, "bfloat16": 1e-1}


def _ours() -> Any:
    return importlib.import_module("insum_nn.layers.spconv")


def _indices(points: Tensor) -> Tensor:
    """One cloud in a batch: the batch entry, then the coordinates."""
    return torch.cat([torch.zeros_like(points[:, :1]), points], 1).int()


def _oracle(table: Tensor, features: Tensor, weight: Tensor) -> Work:
    """Offset by offset: gather, dense product, add, in float64."""
    x, w = (t.detach().double().requires_grad_() for t in (features, weight))
    pairs = [((rows >= 0).nonzero().squeeze(1), rows[rows >= 0]) for rows in table]

    def product() -> Tensor:
        out = x.new_zeros(x.shape[0], w.shape[0])
        kernels = w.flatten(1, 3)
        for offset, (to, of) in enumerate(pairs):
            out = out.index_add(0, to, x.index_select(0, of) @ kernels[:, offset].T)
        return out

    return Work(product, (x, w))


@case(
    "subm_conv",
    tests=TESTS,
    cloud=CLOUDS,
    channels=(16, 32, 64, 128, 256),
    dtype=("float16", "bfloat16", "float32", "tf32"),
    quick={"cloud": ("room", "sweep"), "channels": (32, 64, 128), "dtype": ("float16",)},
)
def subm_conv(setting: Setting, *, cloud: str, channels: int, dtype: str) -> Problem:
    """One layer with as many channels out as in, with a cached map: forward, and forward with both gradients."""
    points, extents = clouds.cloud(setting, cloud)
    channels = min(channels, 24) if setting.tiny else channels
    kind = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    generator = setting.generator()
    features = torch.randn(len(points), channels, generator=generator, device=setting.device).to(kind)
    weight = torch.randn(channels, 3, 3, 3, channels, generator=generator, device=setting.device).mul(0.05).to(kind)
    table = neighbour_table(points)

    def layer(find: Callable[[], Any]) -> Work:
        module = find()
        conv = module.SubMConv3d(channels, channels, 3, bias=False, indice_key="map").to(setting.device, kind)
        with torch.no_grad():
            conv.weight.copy_(weight)
        x = features.clone().requires_grad_()
        # The first call builds the map, which the returned tensor holds under its key.
        with torch.no_grad():  # or the autograd graph would be kept alive
            known = conv(module.SparseConvTensor(x.detach(), _indices(points), list(extents), 1))
        return Work(lambda: conv(known.replace_feature(x)).features, (x, conv.weight))

    def warpconvnet() -> Work:
        convolution, voxels = peers.warpconvnet(setting.device)
        conv = convolution(channels, channels, 3, bias=False).to(setting.device, kind)
        # (offset, in, out), offsets in the order of spconv's.
        with torch.no_grad():
            conv.weight.copy_(weight.flatten(1, 3).permute(1, 2, 0))
        x = features.clone().requires_grad_()
        offsets = torch.tensor([0, len(points)], dtype=torch.int32)
        known = voxels(points.int(), x.detach(), offsets)
        # The first calls build the map, which stays with the coordinates, and choose among its kernels.
        with torch.no_grad():
            conv(known)

        def to_spconv(found: Sequence[Tensor]) -> Sequence[Tensor]:
            return [found[0], found[1].permute(2, 0, 1).reshape(weight.shape)]

        return Work(lambda: conv(known.replace(batched_features=x)).feature_tensor, (x, conv.weight), to_spconv)

    found = {name: _peer(setting, name, layer, tf32=dtype == "tf32") for name in PEERS}
    found["warpconvnet"] = warpconvnet
    used, width = int((table >= 0).sum()), channels * features.element_size()
    floor = Floor(
        bytes=4 * used + 2 * len(points) * width + weight.numel() * weight.element_size(),
        flops=2 * used * channels * channels,
        gathered=used * width,
        row=width,
        table=len(points) * width,
    )
    return Problem(
        providers={"insum_nn": lambda: layer(_ours), **found},
        oracle=lambda: _oracle(table, features, weight),
        tolerance=TOLERANCE[dtype],
        tolerances=dict.fromkeys(found, LOOSE[dtype]),
        floors={"fwd": floor},
        modes=("fwd", "fwdbwd"),
        precision="high" if dtype == "tf32" else "highest",
    )


def _peer(
    setting: Setting, name: str, layer: Callable[[Callable[[], Any]], Work], *, tf32: bool = False
) -> Callable[[], Work]:
    return lambda: layer(lambda: peers.spconv(name, setting.device, tf32=tf32))


@case("subm_map", tests=TESTS, cloud=CLOUDS, what=("map", "map_forward"), quick={"cloud": ("room", "sweep")})
def subm_map(setting: Setting, *, cloud: str, what: str) -> Problem:
    """The map of a cloud that was never seen before; with `map_forward` also one fp16 convolution of 32 channels.

    Maps are compared by each voxel's count of neighbours and the sum of their rows, since orders of offsets differ.
    """
    points, extents = clouds.cloud(setting, cloud)
    kind = torch.float16 if setting.device.type == "cuda" else torch.float32
    generator = setting.generator()
    features = torch.randn(len(points), 32, generator=generator, device=setting.device).to(kind)
    weight = torch.randn(32, 3, 3, 3, 32, generator=generator, device=setting.device).mul(0.05).to(kind)
    table, indices = neighbour_table(points), _indices(points)

    def fresh(module: Any) -> Any:
        # A new tensor of coordinates each time: nothing that is cached for an old one can be used.
        return module.SparseConvTensor(features, indices.clone(), list(extents), 1)

    def made(module: Any) -> Any:
        conv = module.SubMConv3d(32, 32, 3, bias=False, indice_key="map").to(setting.device, kind)
        with torch.no_grad():
            conv.weight.copy_(weight)
        return conv

    def forward(find: Callable[[], Any]) -> Work:
        module = find()
        conv = made(module)
        return Work(lambda: conv(fresh(module)).features)

    def ours() -> Work:
        module = _ours()
        conv = made(module)

        def summary(kernel_map: Any) -> Tensor:
            pairs = kernel_map.pairs
            return _summary(pairs.output, pairs.input, len(points))

        return Work(lambda: conv.kernel_map(fresh(module)), output=summary)

    def theirs(find: Callable[[], Any]) -> Work:
        module = find()
        made(module)
        allocator: Any = importlib.import_module(f"{module.__name__}.core").ThrustSortAllocator(setting.device)
        ones = [1, 1, 1]
        arguments = (1, list(extents), module.ConvAlgo.MaskImplicitGemm, [3, 3, 3], ones, ones, ones, [0, 0, 0])

        def summary(result: Any) -> Tensor:
            # (27, n), or both directions of it: the rows of the neighbours, -1 for none.
            rows = result[2].reshape(-1, 27, len(points))[0].long()
            to = torch.arange(len(points), device=rows.device).expand_as(rows)
            return _summary(to[rows >= 0], rows[rows >= 0], len(points))

        def build() -> Any:
            return module.ops.get_indice_pairs_implicit_gemm(
                indices.clone(), *arguments, subm=True, is_train=True, alloc=allocator
            )

        return Work(build, output=summary)

    def oracle() -> Work:
        if what == "map_forward":
            return _oracle(table, features, weight)
        to = torch.arange(len(points), device=points.device).expand_as(table)
        return Work(lambda: _summary(to[table >= 0], table[table >= 0], len(points)))

    only_map = what == "map"
    found = {name: _peer(setting, name, theirs if only_map else forward) for name in PEERS}
    name = str(kind).removeprefix("torch.")
    return Problem(
        providers={"insum_nn": ours if only_map else (lambda: forward(_ours)), **found},
        oracle=oracle,
        tolerance=0.0 if only_map else TOLERANCE[name],
        tolerances={} if only_map else dict.fromkeys(PEERS, LOOSE[name]),
        # Coordinates read once, pairs written once.
        floors={"fwd": Floor(bytes=16 * len(points) + 8 * int((table >= 0).sum()))},
    )


def _summary(to: Tensor, of: Tensor, voxels: int) -> Tensor:
    zeros = torch.zeros(voxels, dtype=torch.float64, device=to.device)
    return torch.stack([zeros.index_add(0, to, torch.ones_like(zeros[to])), zeros.index_add(0, to, of.double())])

"""Layers on a CPU, as users call them, beside what they replace: `make bench CASES='cpu_*'` measures all of them.

Graphs and layers of other modules, at sizes that suit a CPU. With `edges=new` and `input=fresh` every call
has index tensors that it has not seen, as batches do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import clouds, irreps, peers
from benchmarks.cases.block_linear import pruned_conv2d
from benchmarks.cases.gcn import gcn_layer
from benchmarks.cases.graph_layers import LAYERS, graph_layer
from benchmarks.cases.tensor_products import TESTS, fctp, tp_conv
from benchmarks.registry import Problem, Setting, Work, case
from insum_nn import insum

__all__ = ["cpu_uvu", "cpu_voxel", "cpu_weights"]

GRAPH_TESTS = tuple(f"tests/layers/graph/test_{name}.py" for name in ("attention", "convolutions", "weighted"))
VOXEL_TESTS = ("tests/layers/voxel/test_conv_layers.py",)
SHARES = (0.02, 0.04, 0.09, 0.2)

case(
    "cpu_pruned_conv2d",
    tests=("tests/layers/pruned/test_pruned_conv.py",),
    devices=("cpu",),
    channels=(64,),
    pattern=("MCRS",),
    density=SHARES,
    side=(56,),
    images=(1,),
)(pruned_conv2d)
case(
    "cpu_gcn_layer",
    tests=("tests/layers/graph/test_gcn_conv.py",),
    devices=("cpu",),
    graph=("cora", "random20k"),
    input=("edge_index", "fresh", "csr"),
)(gcn_layer)
case(
    "cpu_graph_layer",
    tests=GRAPH_TESTS,
    devices=("cpu",),
    # The time of NNConv is that of the dense network of its edges.
    layer=tuple(name for name in LAYERS if name != "NNConv"),
    graph=("molecule", "random10k"),
    edges=("kept", "new"),
)(graph_layer)
case(
    "cpu_fctp",
    tests=TESTS,
    devices=("cpu",),
    degree=(1, 2),
    channels=(16, 32),
    samples=(2_000,),
    weights=("shared",),
    dtype=("float32",),
)(fctp)
case(
    "cpu_tp_conv",
    tests=("tests/layers/equivariant/test_tensor_product_conv.py",),
    devices=("cpu",),
    shape=("small",),
    dtype=("float32",),
    edges=("kept", "new"),
)(tp_conv)


@case("cpu_uvu", tests=TESTS, devices=("cpu",), channels=(32,), samples=(500, 10_000))
def cpu_uvu(setting: Setting, *, channels: int, samples: int) -> Problem:
    """`TensorProduct` of `channels` x (0e + 1o + 2e) with spherical harmonics up to l = 2, weights for each sample."""
    channels, samples = (3, 7) if setting.tiny else (channels, samples)
    shape = irreps.channelwise(f"{channels}x0e+{channels}x1o+{channels}x2e", "1x0e+1x1o+1x2e", "0e+1o+2e")
    generator = setting.generator()

    def of(module: Any) -> Any:
        return module.TensorProduct(*shape[:4], shared_weights=False, internal_weights=False)

    reference = of(irreps.o3())
    sizes = reference.irreps_in1.dim, reference.irreps_in2.dim, reference.weight_numel
    operands = [torch.randn(samples, size, generator=generator) for size in sizes]

    def work(call: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> Work:
        leaves = tuple(t.to(dtype, copy=True).requires_grad_() for t in operands)
        return Work(lambda: call(*leaves), leaves)

    def exact(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return torch.cat(irreps.in_pieces(irreps.path_tables(reference, setting.device), x, y, w, 4))

    def theirs(build: Callable[..., Any]) -> Work:
        return work(build(lambda: of(irreps.o3()), setting.device, torch.float32))

    found = {"e3nn": lambda: theirs(peers.e3nn_product), "e3nn/compiled": lambda: theirs(peers.e3nn_compiled)}
    if setting.tiny:
        # Its C++ takes a minute to compile.
        del found["e3nn/compiled"]
    return Problem(
        providers={"insum_nn": lambda: work(of(importlib.import_module("insum_nn.layers"))), **found},
        oracle=lambda: work(exact, torch.float64),
        tolerance=2e-5,
        tolerances=dict.fromkeys(found, 1e-4),
        modes=("fwd", "fwdbwd"),
    )


VOXEL_LAYERS: dict[str, Callable[[Any, int], Any]] = {
    "subm": lambda module, c: module.SubMConv3d(c, c, 3, bias=False, indice_key="map"),
    "subm_kept": lambda module, c: module.SubMConv3d(c, c, 3, bias=False, indice_key="map"),
    "conv": lambda module, c: module.SparseConv3d(c, c, 3, 2, 1, bias=False),
    "max_pool": lambda module, _: module.SparseMaxPool3d(3, 2, 1),
}


@case(
    "cpu_voxel",
    tests=VOXEL_TESTS,
    devices=("cpu",),
    layer=tuple(VOXEL_LAYERS),
    channels=(16, 64),
)
def cpu_voxel(setting: Setting, *, layer: str, channels: int) -> Problem:
    """A convolution or a pool of 3 x 3 x 3 cells over about 40,000 voxels of a room, which each call sees first.

    `subm_kept`: a convolution after the first of its `indice_key`, which finds its map; `conv` and `max_pool` have
    stride 2.
    """
    points = clouds.room(24, 14, 3) if setting.tiny else clouds.room(160, 40, 14)
    channels = 5 if setting.tiny else channels
    extents = [int(extent) + 1 for extent in points.amax(0)]
    indices = torch.cat([torch.zeros_like(points[:, :1]), points], 1).int()
    generator = setting.generator()
    features = torch.randn(len(points), channels, generator=generator)
    weight = torch.randn(channels, 3, 3, 3, channels, generator=generator).mul(0.05)
    pairs, count = _pairs(points, extents, layer)

    def work(module: Any) -> Work:
        called = VOXEL_LAYERS[layer](module, channels)
        weights = list(called.parameters())
        with torch.no_grad():
            for parameter in weights:
                parameter.copy_(weight)
        x = features.clone().requires_grad_()
        known: Any = None
        if layer == "subm_kept":
            with torch.no_grad():
                known = called(module.SparseConvTensor(x.detach(), indices, extents, 1))

        def forward() -> Any:
            given = (
                module.SparseConvTensor(x, indices.clone(), extents, 1) if known is None else known.replace_feature(x)
            )
            found = called(given)
            # Where its rows lie is the same at each call.
            where.setdefault("indices", found.indices)
            return found.features

        where: dict[str, Tensor] = {}

        def order() -> Tensor:
            to = where["indices"].long()[:, 1:]
            return ((to[:, 0] << 40) + (to[:, 1] << 20) + to[:, 2]).argsort()

        def sent(back: Sequence[Tensor]) -> Sequence[Tensor]:
            return [torch.empty_like(back[0]).index_copy_(0, order(), back[0])]

        return Work(forward, (x, *weights), output=lambda found: found.index_select(0, order()), upstream=sent)

    def exact() -> Work:
        x = features.double().requires_grad_()
        w = weight.double().requires_grad_()

        def pooled() -> Tensor:
            # Of a window whose features are all negative spconv's pool gives 0.
            out = x.new_zeros(count, channels)
            for to, of in pairs:
                out = torch.maximum(out, torch.full_like(out, -torch.inf).index_copy(0, to, x.index_select(0, of)))
            return out

        def convolved() -> Tensor:
            out, kernels = x.new_zeros(count, channels), w.flatten(1, 3)
            for offset, (to, of) in enumerate(pairs):
                out = out.index_add(0, to, x.index_select(0, of) @ kernels[:, offset].T)
            return out

        return Work(pooled, (x,)) if layer == "max_pool" else Work(convolved, (x, w))

    return Problem(
        providers={
            "insum_nn": lambda: work(importlib.import_module("insum_nn.layers.spconv")),
            "spconv": lambda: work(peers.spconv_on_cpu()),
        },
        oracle=exact,
        # Gradients of weights sum forty thousand voxels.
        tolerance=2e-5,
        modes=("fwd", "fwdbwd"),
    )


def _pairs(points: Tensor, extents: Sequence[int], layer: str) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """For each offset of the kernel rows of outputs and inputs, and how many outputs there are, in order of cells.

    Found among keys of cells: nothing of the package that is measured.
    """
    offsets = torch.cartesian_prod(*[torch.arange(3)] * 3)
    if layer.startswith("subm"):
        table = clouds.neighbour_table(points)
        return [((rows >= 0).nonzero().squeeze(1), rows[rows >= 0]) for rows in table], len(points)
    last = torch.tensor([(extent - 1) // 2 for extent in extents])
    found: list[tuple[Tensor, Tensor]] = []
    for offset in offsets:
        at = points + 1 - offset
        rows = ((at % 2 == 0) & (at >= 0) & (at // 2 <= last)).all(1).nonzero().squeeze(1)
        cells = at[rows] // 2
        found.append(((cells[:, 0] << 40) + (cells[:, 1] << 20) + cells[:, 2], rows))
    keys = torch.cat([key for key, _ in found]).unique()
    return [(torch.searchsorted(keys, key), rows) for key, rows in found], len(keys)


Sums = Callable[..., Tensor]


def _neighbour_max(generator: torch.Generator, nodes: int, channels: int) -> tuple[list[Tensor], Sums, Sums]:
    to, source = torch.randint(nodes, (2, 10 * nodes), generator=generator)
    # Nodes without neighbours have 0 in the language.
    some = (torch.bincount(to, minlength=nodes) > 0)[:, None]

    def ours(x: Tensor) -> Tensor:
        return insum("M[D[e],c] max= X[S[e],c]", X=x, D=to.clone(), S=source.clone(), out_shape=(nodes, None))

    def theirs(x: Tensor) -> Tensor:
        low = x.new_full((nodes, channels), -torch.inf)
        return torch.where(some, low.scatter_reduce(0, to[:, None].expand(-1, channels), x[source], "amax"), 0.0)

    return [torch.randn(nodes, channels, generator=generator)], ours, theirs


def _species(generator: torch.Generator, nodes: int, channels: int) -> tuple[list[Tensor], Sums, Sums]:
    kinds = 10
    species = torch.randint(kinds, (nodes,), generator=generator)

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return insum("Y[n,o] += X[n,c] * W[Z[n],c,o]", X=x, W=w, Z=species.clone())

    def theirs(x: Tensor, w: Tensor) -> Tensor:
        out = x.new_zeros(nodes, channels)
        for kind in range(kinds):
            rows = (species == kind).nonzero().squeeze(1)
            out = out.index_add(0, rows, x[rows] @ w[kind])
        return out

    shapes = (nodes, channels), (kinds, channels, channels)
    return [torch.randn(shape, generator=generator) for shape in shapes], ours, theirs


def _experts(generator: torch.Generator, nodes: int, channels: int) -> tuple[list[Tensor], Sums, Sums]:
    tokens, experts, wide, out_wide = -(-nodes // 20), 8, 4 * channels, 8 * channels
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(tokens)])

    def ours(g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return insum("Y[t,o] += G[t,k] * X[t,c] * W[E[t,k],c,o]", G=g, X=x, W=w, E=chosen.clone())

    def theirs(g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        out = x.new_zeros(tokens, out_wide)
        for expert in range(experts):
            rows, slots = (chosen == expert).nonzero(as_tuple=True)
            out = out.index_add(0, rows, g[rows, slots, None] * (x[rows] @ w[expert]))
        return out

    shapes = (tokens, 2), (tokens, wide), (experts, wide, out_wide)
    return [torch.randn(shape, generator=generator) for shape in shapes], ours, theirs


STATEMENTS = {"species": _species, "experts": _experts, "neighbour_max": _neighbour_max}


@case("cpu_weights", tests=("tests/test_paper_expressions.py",), devices=("cpu",), of=tuple(STATEMENTS))
def cpu_weights(setting: Setting, *, of: str) -> Problem:
    """Statements without a layer: weights by species or expert beside a loop over them, the largest of ten neighbours.

    5,000 nodes of 64 channels and 10 species; 250 tokens, each to two of 8 experts of 256 x 512 weights. The index
    tensors are new at each call.
    """
    operands, ours, theirs = STATEMENTS[of](setting.generator(), *((30, 5) if setting.tiny else (5_000, 64)))

    def work(call: Sums, dtype: torch.dtype = torch.float32) -> Work:
        leaves = tuple(t.to(dtype, copy=True).requires_grad_() for t in operands)
        return Work(lambda: call(*leaves), leaves)

    return Problem(
        providers={"insum_nn": lambda: work(ours), "torch": lambda: work(theirs)},
        oracle=lambda: work(theirs, torch.float64),
        tolerance=2e-5,
        modes=("fwd", "fwdbwd"),
    )

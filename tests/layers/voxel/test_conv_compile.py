"""Sparse layers under `torch.compile(fullgraph=True)`, with kernel maps built inside the compiled region."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from insum_nn.layers.voxel.conv import (
    SparseConv3d,
    SparseInverseConv3d,
    SubMConv3d,
)
from insum_nn.layers.voxel.pool import SparseGlobalMaxPool, SparseMaxPool3d
from insum_nn.layers.voxel.sequential import SparseBatchNorm, SparseReLU, SparseSequential, ToDense
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor
from insum_nn.models import minkunet
from tests.ops.conv_oracle import random_sites

SHAPE = [6, 5, 7]


def cloud(shape=SHAPE, channels=4, count=25, seed=0) -> SparseConvTensor:
    sites = random_sites(shape, 2, count, seed=seed)
    features = torch.randn(sites.num_sites, channels, generator=torch.Generator().manual_seed(seed))
    return SparseConvTensor(features, sites.indices, shape, 2)


def network() -> SparseSequential:
    """Every kind of layer whose voxels differ from its input's, and back again."""
    return SparseSequential(
        SubMConv3d(4, 8, 3, indice_key="s0", bias=False),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        SparseConv3d(8, 8, 2, 2, indice_key="d"),
        SparseBatchNorm(8),
        SparseReLU(),
        SubMConv3d(8, 8, 3, groups=2, indice_key="s1"),
        SubMConv3d(8, 8, 3, indice_key="s1"),
        SparseMaxPool3d(2, indice_key="p"),
        SparseInverseConv3d(8, 8, 2, "p"),
        SparseInverseConv3d(8, 3, 2, "d"),
    )


def in_evaluation() -> nn.Module:
    """What is another computation in evaluation: both normalisations, here of voxels that a layer has made."""
    return SparseSequential(
        SparseConv3d(4, 8, 2, 2, indice_key="d"),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        SparseBatchNorm(8),
        SparseInverseConv3d(8, 3, 2, "d"),
    ).eval()


LAYERS = {
    "pointwise with a key": lambda: SparseConv3d(4, 4, 1, indice_key="k"),
    "global max": lambda: SparseSequential(SparseConv3d(4, 4, 2, 2), SparseGlobalMaxPool()),
    "dense": lambda: SparseSequential(SparseConv3d(4, 4, 3, 2, 1), ToDense(), nn.Conv3d(4, 2, 1)),
    "network": network,
    "in evaluation": in_evaluation,
}


def features_of(result: SparseConvTensor | torch.Tensor) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result.features


# Single layers are compiled by their cases, test_voxel_layers.py.
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    """Values, gradients, voxels and maps of clouds of several sizes, for which a layer is compiled twice at most."""
    torch._dynamo.reset()
    joint = name in ("dense", "global max", "pointwise with a key")
    model, x = LAYERS[name](), cloud()
    twin = copy.deepcopy(model)
    counted = CompileCounterWithBackend("aot_eager" if joint else "eager")
    # The second cloud has another size, which the first compilation did not know; where forward and backward are
    # traced together, which takes long, sizes are free from the beginning.
    compiled = torch.compile(twin, fullgraph=True, backend=counted, dynamic=True if joint else None)
    for seed, count in enumerate((25, 18, 22, 13, 30)):
        x = cloud(count=count, seed=seed)
        results, gradients = [], []
        for run, owner in ((model, model), (compiled, twin)):
            leaf = x.features.detach().requires_grad_()
            y = run(SparseConvTensor(leaf, x.indices, SHAPE, 2))
            features_of(y).square().sum().backward()
            results.append(y)
            gradients.append([leaf.grad, *(p.grad for p in owner.parameters())])
        torch.testing.assert_close(features_of(results[1]), features_of(results[0]))
        if isinstance(results[0], SparseConvTensor):
            assert torch.equal(results[1].indices, results[0].indices)
            assert results[1].spatial_shape == results[0].spatial_shape
            assert results[1].indice_dict.keys() == results[0].indice_dict.keys()
        for got, want in zip(gradients[1], gradients[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for got, want in zip(twin.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(got, want)
    assert counted.frame_count <= (1 if joint else 2)


def test_a_compiled_tensor_goes_on_in_eager():
    """Maps and voxels that were made in the compiled region serve layers outside of it."""
    torch._dynamo.reset()
    down = SparseConv3d(4, 4, 2, 2, indice_key="d")
    up = SparseInverseConv3d(4, 4, 2, "d")
    x = cloud()
    middle = torch.compile(down, fullgraph=True, backend="eager")(x)
    near = middle.find_indice_pair("d")
    near.validate()
    assert near.counts == down(x).find_indice_pair("d").counts
    torch.testing.assert_close(up(middle).features, up(down(x)).features)
    torch.testing.assert_close(middle.dense(), down(x).dense())
    assert torch.equal(up(middle).indices, x.indices)
    assert x.coordinates().describes(x.indices, SHAPE, 2)


def test_one_map_for_a_key():
    torch._dynamo.reset()
    counted = CompileCounterWithBackend("eager")
    layers = SparseSequential(*(SubMConv3d(4, 4, 3, indice_key="a") for _ in range(3)))
    torch.compile(layers, fullgraph=True, backend=counted)(cloud())
    (graph,) = counted.graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("insum_nn.kernel_map" in name for name in called) == 1
    assert sum("insum_nn.prove_sites" in name for name in called) == 1


def test_bad_voxels_are_refused_when_the_compiled_code_runs():
    torch._dynamo.reset()
    compiled = torch.compile(SubMConv3d(4, 4, 3), fullgraph=True, backend="aot_eager")
    x = cloud()
    compiled(x)
    outside, twice = x.indices.clone(), x.indices.clone()
    outside[3, 2] = 5
    twice[1] = twice[0]
    with pytest.raises(RuntimeError, match="'indices' holds voxels outside the grid"):
        compiled(SparseConvTensor(x.features, outside, SHAPE, 2))
    with pytest.raises(RuntimeError, match="'indices' holds the same voxel more than once"):
        compiled(SparseConvTensor(x.features, twice, SHAPE, 2))


def test_no_voxels_in_evaluation():
    torch._dynamo.reset()
    # All output voxels vanish: what follows runs on none.
    lonely = torch.tensor([[0, 3, 3, 3], [1, 1, 1, 1]], dtype=torch.int32)
    model = SparseSequential(
        SparseConv3d(4, 4, 1, 2, indice_key="d"), nn.BatchNorm1d(4), nn.ReLU(), SubMConv3d(4, 4, 3), ToDense()
    ).eval()
    x = SparseConvTensor(torch.randn(2, 4), lonely, SHAPE, 2)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert compiled(cloud()).shape == compiled(x).shape == model(x).shape
    torch.testing.assert_close(compiled(x), model(x))


def test_minkunet(monkeypatch):
    """One of its four coarser resolutions, and gradients; two are in `network`, whose maps are of the same kinds.

    In evaluation it is exported in test_traced_graphs.py.
    """
    torch._dynamo.reset()
    shape = [20, 17, 9]
    planes = (4, 4)
    monkeypatch.setattr(minkunet, "_LEVELS", len(planes) // 2)
    model = minkunet.MinkUNet(4, 5, layers=(1,) * len(planes), planes=planes, init_dim=4)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    x = cloud(shape, count=200)
    want, got = model(x), compiled(x)
    assert got.indices is x.indices
    torch.testing.assert_close(got.features, want.features)
    want.features.square().sum().backward()
    got.features.square().sum().backward()
    for theirs, ours in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.compile
def test_inductor():
    """Compiled by AOTInductor, other layers are in test_traced_graphs.py."""
    torch._dynamo.reset()
    model, x = SparseSequential(SparseConv3d(4, 8, 2, 2), nn.ReLU()), cloud()
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(x).features, model(x).features)

"""MinkUNet against a dense network of the same weights, its imports, and training in several processes."""

from __future__ import annotations

import copy
import socket
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from insum_nn.errors import InsumShapeError
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor
from insum_nn.models.minkunet import (
    MinkUNet,
    MinkUNet14,
    MinkUNet18,
    MinkUNet34,
    MinkUNet50,
    MinkUNet101,
    SparseBasicBlock,
    SparseBottleneck,
)
from insum_nn.structure.conv_weights import convert_state_dict, export_weight
from tests.ops.conv_oracle import random_sites
from tests.ranks import run_ranks

SMALL = {"layers": (1, 2, 1, 1, 1, 1, 1, 2), "planes": (4, 6, 6, 8, 8, 6, 4, 4), "init_dim": 4}


def cloud(shape=(40, 37, 19), count=300, batch=2, dtype=torch.float64, device="cpu") -> SparseConvTensor:
    sites = random_sites(shape, batch, count, device=device)
    return SparseConvTensor(torch.randn(sites.num_sites, 3, dtype=dtype).to(device), sites.indices, shape, batch)


def dense_minkunet(model: MinkUNet, grid: torch.Tensor) -> torch.Tensor:
    """The same network by torch's dense convolutions; equal to the sparse one where every site is active."""

    def conv(layer, x, **how):
        return F.conv2d(x, layer.dense_weight.movedim(-1, 1), layer.bias, **how)

    def norm(layer, x):
        return F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, eps=layer.eps)

    def block(blocks, x):
        for b in blocks:
            if isinstance(b, SparseBottleneck):
                y = norm(b.norm1, conv(b.conv1, x)).relu()
                y = norm(b.norm2, conv(b.conv2, y, padding=1)).relu()
                y = norm(b.norm3, conv(b.conv3, y))
            else:
                y = norm(b.norm1, conv(b.conv1, x, padding=1)).relu()
                y = norm(b.norm2, conv(b.conv2, y, padding=1))
            shortcut = x if b.downsample is None else norm(b.downsample[1], conv(b.downsample[0], x))
            x = (y + shortcut).relu()
        return x

    x = norm(model.bn0, conv(model.conv0p1s1, grid, padding=2)).relu()
    skips = [x]
    for level in range(4):
        x = conv(getattr(model, f"conv{level + 1}p{2**level}s2"), x, stride=2)
        x = block(getattr(model, f"block{level + 1}"), norm(getattr(model, f"bn{level + 1}"), x).relu())
        skips.append(x)
    for step in range(4):
        up = getattr(model, f"convtr{4 + step}p{2 ** (4 - step)}s2")
        x = F.conv_transpose2d(x, up.weight.movedim(-1, 0), stride=2)
        x = norm(getattr(model, f"bntr{4 + step}"), x).relu()
        x = block(getattr(model, f"block{5 + step}"), torch.cat([x, skips[3 - step]], dim=1))
    return conv(model.final, x)


class Bottlenecked(MinkUNet):
    BLOCK = SparseBottleneck


@pytest.mark.parametrize("kind", [MinkUNet, Bottlenecked])
def test_equals_a_dense_network_where_every_site_is_active(kind):
    model = kind(3, 5, ndim=2, **SMALL).double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.weight, 1, 0.2)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    model.eval()
    grid = torch.randn(2, 3, 32, 16, dtype=torch.float64)
    x = SparseConvTensor.from_dense(grid.movedim(1, -1))
    assert x.indices.shape[0] == 2 * 32 * 16
    want = dense_minkunet(model, grid)
    torch.testing.assert_close(model(x).dense(), want)
    back = torch.randn_like(want)
    parameters = list(model.parameters())
    ours = torch.autograd.grad(model(x).dense(), parameters, back)
    theirs = torch.autograd.grad(dense_minkunet(model, grid), parameters, back)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-9)


def test_published_widths_and_sizes():
    millions = {MinkUNet14: 11.6, MinkUNet18: 21.7, MinkUNet34: 37.9}
    for kind, size in millions.items():
        model = kind(3, 20)
        assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == size
        assert model.conv0p1s1.kernel_size == [5, 5, 5]
        widths = [getattr(model, f"block{k}")[-1].conv2.out_channels for k in range(1, 9)]
        assert widths == [32, 64, 128, 256, 256, 128, 96, 96]


def counted(layers, planes, expansion: int, inputs: int, outputs: int) -> int:
    """Parameters of the published architecture: convolutions without bias, two numbers per normalised channel."""

    def conv(read: int, written: int, cells: int) -> int:
        return read * written * cells + 2 * written

    def block(read: int, width: int) -> int:
        if expansion == 1:
            inner = conv(read, width, 27) + conv(width, width, 27)
        else:
            inner = conv(read, width, 1) + conv(width, width, 27) + conv(width, expansion * width, 1)
        return inner + (conv(read, expansion * width, 1) if read != expansion * width else 0)

    def stage(read: int, width: int, count: int) -> int:
        return block(read, width) + (count - 1) * block(expansion * width, width)

    total, width, skips = conv(inputs, 32, 125), 32, [32]
    for level in range(4):
        total += conv(width, width, 8) + stage(width, planes[level], layers[level])
        width = expansion * planes[level]
        skips.append(width)
    for level in range(4, 8):
        total += conv(width, planes[level], 8) + stage(planes[level] + skips[7 - level], planes[level], layers[level])
        width = expansion * planes[level]
    return total + width * outputs + outputs


@pytest.mark.parametrize(
    ("kind", "layers", "expansion"),
    [
        (MinkUNet14, (1,) * 8, 1),
        (MinkUNet18, (2,) * 8, 1),
        (MinkUNet34, (2, 3, 4, 6, 2, 2, 2, 2), 1),
        (MinkUNet50, (2, 3, 4, 6, 2, 2, 2, 2), 4),
        (MinkUNet101, (2, 3, 4, 23, 2, 2, 2, 2), 4),
    ],
)
def test_parameters_of_the_published_architectures(kind, layers, expansion):
    with torch.device("meta"):
        model = kind(3, 20)
    planes = (32, 64, 128, 256, 256, 128, 96, 96)
    assert sum(p.numel() for p in model.parameters()) == counted(layers, planes, expansion, 3, 20)
    blocks = [getattr(model, f"block{k}") for k in range(1, 9)]
    assert tuple(map(len, blocks)) == layers
    expected = SparseBasicBlock if expansion == 1 else SparseBottleneck
    assert all(type(block) is expected for stage in blocks for block in stage)
    assert [stage[-1].conv2.out_channels for stage in blocks] == list(planes)
    assert {"conv1.weight", "norm1.weight", "conv2.weight", "norm2.bias"} <= set(blocks[0][0].state_dict())


def test_bottleneck_networks_run():
    model = MinkUNet50(3, 5, planes=(2, 2, 3, 3, 3, 2, 2, 2), init_dim=2).double()
    x = cloud(count=60)
    y = model(x)
    assert y.features.shape == (120, 5)
    y.features.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_output_is_over_the_input_s_voxels():
    model, x = MinkUNet(3, 5, **SMALL).double(), cloud()
    y = model(x)
    assert y.features.shape == (600, 5)
    assert y.indices is x.indices
    assert y.spatial_shape == [40, 37, 19]
    assert x.indice_dict == {} == y.indice_dict
    # No voxel is lost at the upper edge of a grid whose extents are odd.
    corner = SparseConvTensor(x.features[:2], torch.tensor([[0, 39, 36, 18], [0, 0, 0, 0]]).int(), [40, 37, 19], 1)
    larger = SparseConvTensor(x.features[:2], corner.indices, [64, 64, 32], 1)
    model.eval()
    torch.testing.assert_close(model(corner).features, model(larger).features)


def test_a_batch_is_its_clouds():
    model, x = MinkUNet(3, 5, **SMALL).double().eval(), cloud()
    whole = model(x).features
    for entry in range(2):
        rows = x.indices[:, 0] == entry
        indices = x.indices[rows].clone()
        indices[:, 0] = 0
        alone = model(SparseConvTensor(x.features[rows], indices, x.spatial_shape, 1))
        torch.testing.assert_close(whole[rows], alone.features)


def test_order_of_points_does_not_matter():
    model, x = MinkUNet(3, 5, **SMALL).double(), cloud()
    order = torch.randperm(600)
    shuffled = SparseConvTensor(x.features[order], x.indices[order], x.spatial_shape, 2)
    torch.testing.assert_close(model(shuffled).features, model(x).features[order])


def test_no_voxels():
    model = MinkUNet(3, 5, **SMALL)
    x = SparseConvTensor(torch.ones(0, 3), torch.zeros(0, 4, dtype=torch.int32), [9, 9, 9], 1)
    assert model(x).features.shape == (0, 5)


def test_loads_weights_of_minkowski_engine():
    """A state under its names: `kernel` (cells, I, O), first axis fastest; norms under `bn`; a bias (1, O)."""
    model = MinkUNet14(3, 5)
    state = OrderedDict()
    for name, value in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        if leaf == "weight" and value.ndim > 2:
            state[f"{stem}.kernel"] = export_weight(torch.randn_like(value), "minkowski")
        elif stem == "final":
            state[name] = torch.randn(1, *value.shape)
        else:
            state[f"{stem}.bn.{leaf}"] = torch.randn_like(value.float()).to(value.dtype)
    assert state["conv0p1s1.kernel"].shape == (125, 3, 32)
    assert state["final.kernel"].shape == (96, 5)
    model.load_state_dict(convert_state_dict(state, "minkowski", model))
    kernel = state["conv1p1s2.kernel"]
    assert torch.equal(model.conv1p1s2.weight[:, 1, 0, 1], kernel[1 + 4].T)
    assert torch.equal(model.final.dense_weight.flatten(1).T, state["final.kernel"])
    assert torch.equal(model.bn1.weight, state["bn1.bn.weight"])
    assert torch.equal(model.final.bias, state["final.bias"][0])


def test_training_learns():
    model, x = MinkUNet(3, 5, **SMALL), cloud(dtype=torch.float32)
    labels = (x.indices[:, 1] // 8).long()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).features, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.gpu
def test_on_the_gpu(gpu):
    torch.manual_seed(0)
    model, x = MinkUNet(3, 5, **SMALL).double().eval(), cloud()
    want = model(x).features
    got = copy.deepcopy(model).to(gpu)(x.to(gpu)).features
    torch.testing.assert_close(got.cpu(), want)


def test_arguments():
    for name in ("layers", "planes"):
        with pytest.raises(InsumShapeError, match=f"'{name}' is"):
            MinkUNet(3, 5, **{name: (1, 2, 3)})


def _train(rank: int, size: int, port: int, folder: str) -> None:
    """One process of a data-parallel job: the gradients that every process ends up with."""
    torch.manual_seed(0)
    store = torch.distributed.TCPStore("localhost", port, size, rank == 0)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size, store=store)
    model = MinkUNet(3, 5, **SMALL).double()
    initial = copy.deepcopy(model.state_dict())
    parallel = nn.parallel.DistributedDataParallel(model)
    x = cloud()
    rows = x.indices[:, 0] == rank
    indices = x.indices[rows].clone()
    indices[:, 0] = 0
    # A step in which this process may have no voxels must leave the next one possible.
    count = 0 if rank == 1 else None
    parallel(SparseConvTensor(x.features[rows][:count], indices[:count], x.spatial_shape, 1)).features.sum().backward()
    parallel.zero_grad()
    parallel.eval()
    model.load_state_dict(initial)
    y = parallel(SparseConvTensor(x.features[rows], indices, x.spatial_shape, 1))
    y.features.square().mean().backward()
    torch.save([p.grad for p in model.parameters()], f"{folder}/{rank}.pt")
    # The wrapper goes before the group: what waits for the group's threads must not hold the interpreter's lock.
    del parallel, y
    torch.distributed.destroy_process_group()


def test_data_parallel_training(tmp_path):
    """Two processes, a cloud each, agree on the gradients of both clouds together; also after one had no voxels."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    torch.manual_seed(0)
    model, x = MinkUNet(3, 5, **SMALL).double().eval(), cloud()
    run_ranks(_train, 2, port, str(tmp_path))
    model(x).features.square().mean().backward()
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for parameter, a, b in zip(model.parameters(), first, second, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, parameter.grad)

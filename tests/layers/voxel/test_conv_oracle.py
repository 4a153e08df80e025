"""Sparse convolutions against torch's dense ones, whose geometry is made of the arguments alone.

Nothing here asks a layer, or this package, how a kernel moves: the grid is filled, padded and convolved by torch, and
read at voxels that are found by torch as well.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import insum_nn.layers.spconv as spconv

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}

# kernel_size, stride, padding, dilation; a padding that differs from the centre's tells whether it is read.
GEOMETRIES = [
    ((3,), (1,), (0,), (1,)),
    ((3,), (1,), (0,), (2,)),
    ((3,), (2,), (3,), (3,)),
    ((4,), (1,), (1,), (2,)),
    ((2,), (3,), (0,), (1,)),
    ((1,), (2,), (0,), (2,)),
    ((3, 2), (1, 2), (1, 0), (2, 3)),
    ((5, 1), (2, 1), (0, 0), (1, 2)),
    ((2, 3, 4), (1, 1, 1), (0, 2, 1), (3, 1, 2)),
    ((3, 3, 3), (2, 1, 2), (1, 1, 0), (1, 2, 1)),
]
SHAPES = {1: (13,), 2: (9, 8), 3: (7, 6, 8)}


def cloud(ndim: int, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(ndim)
    occupied = (torch.rand(2, *SHAPES[ndim], generator=generator) < 0.35).nonzero()
    order = torch.randperm(len(occupied), generator=generator)
    return torch.randn(len(occupied), channels, dtype=torch.float64), occupied[order].int()


def grid_of(features: torch.Tensor, indices: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """(2, channels, x_1, .., x_d)."""
    empty = torch.zeros(2, *shape, features.shape[1], dtype=features.dtype)
    return empty.index_put(indices.long().unbind(1), features).movedim(-1, 1)


def at(grid: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return grid.movedim(1, -1)[indices.long().unbind(1)]


def dense(kind: str, grid: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: Any) -> torch.Tensor:
    kernel, stride, padding, dilation = how
    ndim = len(kernel)
    if kind == "SparseConvTranspose":
        return TRANSPOSED[ndim](grid, weight.movedim(-1, 0), bias, stride, padding, 0, 1, dilation)
    if kind == "SparseConv":
        return CONV[ndim](grid, weight.movedim(-1, 1), bias, stride, padding, dilation)
    ends = [(k // 2 * d, (k - 1) * d - k // 2 * d) for k, d in zip(kernel, dilation, strict=True)]
    padded = F.pad(grid, [end for pair in reversed(ends) for end in pair])
    return CONV[ndim](padded, weight.movedim(-1, 1), bias, dilation=dilation)


@pytest.mark.parametrize("how", GEOMETRIES, ids=str)
@pytest.mark.parametrize("kind", ["SubMConv", "SparseConv", "SparseConvTranspose"])
def test_equals_the_dense_convolution(kind, how, device):
    kernel, stride = how[:2]
    ndim = len(kernel)
    features, indices = cloud(ndim, 3)
    layer = getattr(spconv, f"{kind}{ndim}d")(3, 2, *how, dtype=torch.float64, device=device)
    leaf = features.to(device).requires_grad_()
    y = layer(spconv.SparseConvTensor(leaf, indices.to(device), SHAPES[ndim], 2))
    mine = [leaf, layer.weight, layer.bias]
    theirs = [t.detach().cpu().requires_grad_() for t in (features, layer.dense_weight, layer.bias)]
    grid = dense(kind, grid_of(theirs[0], indices, SHAPES[ndim]), theirs[1], theirs[2], how)
    if kind == "SubMConv":
        voxels = indices
    else:
        ones, every = torch.ones(len(indices), 1, dtype=torch.float64), torch.ones(1, *kernel, 1, dtype=torch.float64)
        voxels = (dense(kind, grid_of(ones, indices, SHAPES[ndim]), every, None, how)[:, 0] > 0.5).nonzero()
    assert y.indices.tolist() == voxels.tolist()
    assert list(y.spatial_shape) == list(grid.shape[2:])
    want = at(grid, voxels)
    torch.testing.assert_close(y.features.cpu(), want)
    back = torch.randn_like(want)
    got_gradients = torch.autograd.grad(y.features, mine, back.to(device))
    want_gradients = list(torch.autograd.grad(want, theirs, back))
    # A kernel of one cell stores its numbers as spconv does, (I, O).
    if all(k == 1 for k in kernel) and (kind == "SubMConv" or all(s == 1 for s in stride)):
        want_gradients[1] = want_gradients[1].flatten(1).T.reshape(layer.weight.shape)
    for got, exact in zip(got_gradients, want_gradients, strict=True):
        torch.testing.assert_close(got.cpu(), exact)
    # The same pairs, through the function.
    table = spconv.ops.get_indice_pairs(
        indices, 2, SHAPES[ndim], None, *map(list, how), [0] * ndim, kind == "SubMConv", kind == "SparseConvTranspose"
    )
    assert table[0].tolist() == voxels.tolist()
    by_table = spconv.functional.indice_conv(features, layer.dense_weight.cpu(), *table[1:], len(voxels), None)
    torch.testing.assert_close(by_table + layer.bias.cpu(), want)


@pytest.mark.parametrize("how", [g for g in GEOMETRIES if len(g[0]) < 3 or g[1] != (1, 1, 1)], ids=str)
def test_an_inverse_convolution_is_the_transposed_one_at_the_old_voxels(how):
    kernel, stride, padding, dilation = how
    ndim = len(kernel)
    features, indices = cloud(ndim, 3)
    down = getattr(spconv, f"SparseConv{ndim}d")(3, 4, *how, bias=False, indice_key="a", dtype=torch.float64)
    up = getattr(spconv, f"SparseInverseConv{ndim}d")(4, 2, kernel, "a", dtype=torch.float64)
    middle = down(spconv.SparseConvTensor(features, indices, SHAPES[ndim], 2))
    y = up(middle)
    assert torch.equal(y.indices, indices)
    grid = grid_of(middle.features.detach(), middle.indices, tuple(middle.spatial_shape))
    parts = (SHAPES[ndim], grid.shape[2:], kernel, stride, padding, dilation)
    # What the strided convolution did not read at the upper end is written as well.
    extra = [x - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for x, m, k, s, p, d in zip(*parts, strict=True)]
    wide = F.pad(grid, [end for _ in kernel for end in (0, 2)])
    full = TRANSPOSED[ndim](wide, up.dense_weight.movedim(-1, 0), up.bias, stride, padding, 0, 1, dilation)
    assert all(e >= 0 for e in extra)
    torch.testing.assert_close(y.features, at(full, indices))

"""What is remembered of a tensor dies with it: no operator or layer keeps what a user has let go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

import insum_nn
from insum_nn.formats import ELL, BlockCOO, GroupCOO
from insum_nn.layers import BlockSparseLinear, GCNConv, SparseConv3d, SparseConvTensor, SparseInverseConv3d, SubMConv3d
from insum_nn.ops import block_linear, spmm

INT_DTYPES = (torch.int32, torch.int64)
# Makes new tensors, computes with them, gradients too, and returns those that nothing may keep.
Use = Callable[[torch.device], Iterable[Tensor]]


def ell(dtype: torch.dtype) -> Use:
    def use(device: torch.device) -> list[Tensor]:
        col, val = torch.randint(0, 9, (12, 3), dtype=dtype, device=device), torch.rand(12, 3, device=device)
        dense = torch.rand(9, 8, device=device, requires_grad=True)
        insum_nn.insum("C[i,n] += Val[i,q] * B[Col[i,q],n]", Col=col, Val=val, B=dense).sum().backward()
        return [col, val, dense]

    return use


def entries(dtype: torch.dtype) -> Use:
    def use(device: torch.device) -> list[Tensor]:
        row, col = torch.randint(0, 9, (2, 40), dtype=dtype, device=device).unbind(0)
        row, val = row.sort().values, torch.rand(40, device=device, requires_grad=True)
        dense = torch.rand(9, 8, device=device, requires_grad=True)
        named = {"Row": row, "Col": col, "Val": val, "B": dense}
        insum_nn.insum("C[Row[p],n] += Val[p] * B[Col[p],n]", out_shape=(9, None), **named).sum().backward()
        return list(named.values())

    return use


def matrix(make: Callable[[Tensor], insum_nn.formats.Format]) -> Use:
    def use(device: torch.device) -> list[Tensor]:
        sparse = make((torch.rand(16, 16) < 0.4).float().to(device))
        dense = torch.rand(16, 4, device=device, requires_grad=True)
        spmm(sparse, dense).sum().backward()
        if isinstance(sparse, BlockCOO):
            block_linear(torch.rand(3, 16, device=device, requires_grad=True), sparse).sum().backward()
        return [*sparse.tensors.values(), dense]

    return use


def graph(weighted: bool) -> Use:
    # One layer, and for weights one graph as well: what is kept with them outlives a step.
    layers: dict[torch.device, nn.Module] = {}
    graphs: dict[torch.device, Tensor] = {}

    def use(device: torch.device) -> list[Tensor]:
        layer = layers.setdefault(device, GCNConv(8, 4).to(device))
        edges = torch.randint(0, 20, (2, 50), device=device)
        x, weight = torch.rand(20, 8, device=device), torch.rand(50, device=device)
        if not weighted:
            layer(x, edges).sum().backward()
            return [x, edges]
        layer(x, graphs.setdefault(device, edges), weight).sum().backward()
        return [x, weight]

    return use


def clouds(device: torch.device) -> list[Tensor]:
    near, down = SubMConv3d(4, 4, 3, indice_key="a"), SparseConv3d(4, 4, 2, 2, indice_key="b")
    up = SparseInverseConv3d(4, 4, 2, indice_key="b")
    indices = torch.randint(0, 10, (100, 4), dtype=torch.int32, device=device)
    indices[:, 0] = 0
    indices = indices.unique(dim=0)
    features = torch.rand(len(indices), 4, device=device, requires_grad=True)
    found = nn.Sequential(near, down, up).to(device)(SparseConvTensor(features, indices, (10, 10, 10), 1))
    found.features.sum().backward()
    return [features, indices, found.features]


def blocks(device: torch.device) -> list[Tensor]:
    layer = BlockSparseLinear(64, 64, density=0.3, block_shape=(16, 16)).to(device)
    x = torch.rand(300, 64, device=device, requires_grad=True)
    layer(x).sum().backward()
    return [x, *layer.parameters(), *layer.buffers()]


USES: dict[str, Use] = {
    **{f"rows of equal length, {dtype}": ell(dtype) for dtype in INT_DTYPES},
    **{f"entries, {dtype}": entries(dtype) for dtype in INT_DTYPES},
    "ELL": matrix(ELL.from_dense),
    "GroupCOO": matrix(GroupCOO.from_dense),
    "BlockCOO": matrix(lambda dense: BlockCOO.from_dense(dense, block_shape=(4, 4))),
    "graphs": graph(weighted=False),
    "weights of one graph": graph(weighted=True),
    "clouds": clouds,
    "pruned": blocks,
}


@pytest.mark.parametrize("name", USES)
def test_nothing_outlives_its_user(name: str, device: torch.device):
    used = [weakref.ref(tensor) for _ in range(4) for tensor in USES[name](device)]
    gc.collect()
    assert used
    assert sum(ref() is not None for ref in used) == 0

"""Writes that torch does not count: `validate=True` and `validate()` follow them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import insum_nn
import insum_nn.ops as ops
from insum_nn import Options
from insum_nn.errors import InsumError, InsumRangeError
from insum_nn.formats import GroupCOO
from insum_nn.layers.voxel.conv import SparseConv3d, SubMConv3d
from insum_nn.layers.voxel.pool import SparseGlobalMaxPool, SparseMaxPool3d
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor
from tests.ops.test_edited_formats import Entry, each_format, fixed, meaning, sparse_dense

VALIDATE = Options(validate=True)


def write(tensor: Tensor, new: Tensor) -> None:
    """Write without a trace: the version stays."""
    version = tensor._version
    tensor.data.copy_(new)
    assert tensor._version == version


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_insum(backend: str):
    row, val, x = torch.tensor([2, 0, 1]), fixed(3), fixed(3, 4)
    expression, options = "y[Row[p],n] += Val[p] * x[p,n]", Options(backend=backend)  # type: ignore[arg-type]

    def run(**more: bool) -> Tensor:
        return insum_nn.insum(expression, Row=row, Val=val, x=x, out_shape=(3, 4), options=options, **more)

    run(), run(), run(validate=True)
    write(row, torch.tensor([1, 1, 0]))
    expected = torch.zeros(3, 4, dtype=torch.float64).index_add(0, row, val[:, None] * x)
    assert torch.equal(run(validate=True), expected)
    # What it read is kept.
    assert torch.equal(run(), expected)
    row.numpy()[0] = 3
    with pytest.raises(InsumRangeError):
        run(validate=True)


@each_format
def test_formats(entry: Entry):
    torch.manual_seed(0)
    matrix, dense = entry.from_dense(sparse_dense((6, 9), 0.9)), fixed(9, 3)
    left, right = fixed(6, 2), fixed(2, 9)
    for _ in range(3):
        ops.spmm(matrix, dense)
    ops.sddmm(matrix, left, right)
    part = matrix.index_parts[-1]
    index, vector = part.tensor, fixed(matrix.shape[part.dim])
    # The facts of builders still hold: columns within a row are exchanged with others.
    write(index, torch.where(index >= 0, (int(index.max()) - index), index))
    expected = meaning(matrix)
    assert expected is not None
    torch.testing.assert_close(ops.spmm(matrix, dense, options=VALIDATE), expected @ dense)
    sampled = ops.sddmm(matrix, left, right, options=VALIDATE)
    torch.testing.assert_close(sampled.to_dense(), expected * (left @ right))
    index.data.view(-1)[0] = 1000
    for call in (
        lambda: ops.spmm(matrix, dense, options=VALIDATE),
        lambda: ops.sddmm(matrix, left, right, options=VALIDATE),
        lambda: ops.multiply(matrix, fixed(6, 9), options=VALIDATE),
        lambda: ops.scale(matrix, vector, part.dim, options=VALIDATE),
        matrix.validate,
    ):
        with pytest.raises(InsumError):
            call()


def test_a_validated_format_has_new_structures():
    matrix, dense = GroupCOO.from_dense(torch.eye(3), group_size=1), torch.arange(6.0).reshape(3, 2)
    for _ in range(3):
        ops.spmm(matrix, dense)
    write(matrix.col, torch.tensor([[2], [1], [0]], dtype=matrix.col.dtype))
    assert torch.equal(ops.spmm(matrix.validate(), dense), dense.flip(0))


def test_graph_convolutions():
    geometric = pytest.importorskip("torch_geometric")
    from insum_nn.layers.graph.gcn_conv import GCNConv

    torch.manual_seed(1)
    layer, peer = GCNConv(4, 3, options=VALIDATE), geometric.nn.GCNConv(4, 3)
    peer.load_state_dict(layer.state_dict())
    x, weight = torch.randn(5, 4), torch.rand(6)
    edges = torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]])
    for _ in range(2):
        layer(x, edges, weight)
    write(edges, edges.flip(1).clone())
    write(weight, torch.rand(6))
    torch.testing.assert_close(layer(x, edges, weight), peer(x, edges, weight))
    edges.data[0, 0] = 5
    with pytest.raises(InsumRangeError):
        layer(x, edges, weight)


def test_sparse_convolutions_and_pools():
    torch.manual_seed(2)
    before = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [0, 2, 2, 2], [1, 1, 1, 1]], dtype=torch.int32)
    after = torch.tensor([[0, 3, 0, 0], [0, 2, 2, 1], [0, 2, 2, 2], [1, 1, 0, 1]], dtype=torch.int32)
    features = torch.randn(4, 2)

    def tensor(indices: Tensor) -> SparseConvTensor:
        return SparseConvTensor(features, indices, [4, 4, 4], 2)

    for make in (
        lambda **o: SubMConv3d(2, 3, 3, indice_key="a", **o),
        lambda **o: SparseConv3d(2, 3, 3, stride=2, padding=1, **o),
        lambda **o: SparseMaxPool3d(2, **o),
    ):
        layer = make(options=VALIDATE)
        x = tensor(before.clone())
        first = layer(x)
        x.indice_dict.update(first.indice_dict)
        write(x.indices, after)
        found, expected = layer(x), layer(tensor(after.clone()))
        assert torch.equal(found.indices, expected.indices)
        torch.testing.assert_close(found.features, expected.features)
        x.indices.data[0, 1] = 9
        with pytest.raises(InsumRangeError):
            layer(x)
    pool, x = SparseGlobalMaxPool(options=VALIDATE), tensor(before.clone())
    pool(x)
    write(x.indices[:, 0], torch.tensor([1, 1, 0, 0], dtype=torch.int32))
    torch.testing.assert_close(pool(x), torch.stack([features[2:].amax(0), features[:2].amax(0)]))


def test_what_is_not_seen_without_it_is_said():
    pytest.importorskip("torch_geometric")
    from insum_nn.formats import SparseFormat
    from insum_nn.layers.graph.gcn_conv import GCNConv

    for owner in (GCNConv, SparseFormat):
        assert "`.data`" in (owner.__doc__ or "")

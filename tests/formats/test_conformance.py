"""What one kind of format does, beyond the laws of all: blocks, groups, slots, ranks."""

from __future__ import annotations

import itertools

import pytest
import torch

from insum_nn.errors import (
    InsumFormatError,
    InsumOverflowError,
    InsumRangeError,
    InsumShapeError,
    MissingExtraError,
)
from insum_nn.facts import IndexFacts
from insum_nn.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO
from tests.formats.registry import random_entries, sparse_dense

# torch says both once per process, of its own sparse tensors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]


@pytest.mark.parametrize("cls", [BlockCOO, BlockGroupCOO])
def test_mask_of_the_grid_chooses_blocks(cls):
    dense = sparse_dense((5, 7))
    grid = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 1]], dtype=torch.bool)
    matrix = cls.from_dense(dense, block_shape=(2, 3), mask=grid).validate()
    assert matrix.num_blocks == 4
    wide = grid.repeat_interleave(2, 0).repeat_interleave(3, 1)[:5, :7]
    assert torch.equal(matrix.to_dense(), torch.where(wide, dense, 0.0))
    # 2x3 whole, 2x1 right edge, 1x3 bottom edge, 1x1 corner.
    assert matrix.nnz == 6 + 2 + 3 + 1


def test_uncoalesced_coo_keeps_order():
    indices, values = random_entries((5, 7), 9)
    matrix = COO.from_coo(indices, values, (5, 7), coalesce=False)
    assert torch.equal(torch.stack(matrix.indices).long(), indices)
    assert torch.equal(matrix.values, values)
    assert not matrix.facts["Row"].sorted


@pytest.mark.parametrize("block_shape", [(1, 1), (2, 3), (3, 2), (4, 4), (16, 1), (7, 16)], ids=str)
@pytest.mark.parametrize("cls", [BlockCOO, BlockGroupCOO])
def test_ragged_blocks(cls, block_shape):
    dense = sparse_dense((9, 10), density=0.2)
    matrix = cls.from_dense(dense, block_shape=block_shape).validate()
    assert torch.equal(matrix.to_dense(), dense)
    assert matrix.grid_shape == (-(-9 // block_shape[0]), -(-10 // block_shape[1]))
    turned = matrix.transpose().validate()
    assert turned.block_shape == block_shape[::-1]
    assert torch.equal(turned.to_dense(), dense.T)
    # Another grid, from blocks and from their scalars.
    assert torch.equal(cls.from_coo(matrix, block_shape=(3, 5)).validate().to_dense(), dense)
    assert torch.equal(COO.from_coo(matrix).validate().to_dense(), dense)
    assert matrix.nnz == COO.from_coo(matrix).nnz


@pytest.mark.parametrize("cls", [BlockCOO, BlockGroupCOO])
def test_from_blocks(cls):
    row, col = torch.tensor([2, 0, 2, 0]), torch.tensor([1, 1, 1, 0])
    values = torch.randn(4, 2, 3, dtype=torch.float64)
    dense = torch.zeros(6, 6, dtype=torch.float64)
    for r, c, block in zip(row.tolist(), col.tolist(), values, strict=True):
        dense[2 * r : 2 * r + 2, 3 * c : 3 * c + 3] += block
    cut = dense[:5, :5]
    for coalesce in (True, False):
        matrix = cls.from_blocks(row, col, values, (5, 5), coalesce=coalesce).validate()
        torch.testing.assert_close(matrix.to_dense(), cut)
        assert matrix.num_blocks == (3 if coalesce else 4)
        torch.testing.assert_close(matrix.transpose().validate().to_dense(), cut.T)
        assert matrix.transpose().num_blocks == matrix.num_blocks
        again = cls.from_coo(matrix).validate()
        torch.testing.assert_close(again.to_dense(), cut)
        assert again.num_blocks == 3
    with pytest.raises(InsumRangeError, match=r"row: expected 0 <= row\[p\] < 2; got 2 at \[0\]"):
        cls.from_blocks(row, col, values, (4, 6))
    with pytest.raises(InsumShapeError, match=r"needs values \(p, a, b\)"):
        cls.from_blocks(row, col, values[0], (6, 6))


def test_block_conversion_keeps_blocks():
    dense = torch.zeros(4, 4)
    dense[0, 0] = 1
    mask = torch.tensor([[1, 1], [0, 1]], dtype=torch.bool)
    blocks = BlockCOO.from_dense(dense, block_shape=(2, 2), mask=mask)
    grouped = BlockGroupCOO.from_coo(blocks, group_size=2)
    assert grouped.num_blocks == 3
    assert torch.equal(grouped.blocks().values, blocks.values)
    assert torch.equal(BlockCOO.from_coo(grouped).col, blocks.col)


@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("cls", [GroupCOO, ELL])
def test_three_dimensions_over_each(cls, dim, device):
    dense = sparse_dense((4, 5, 6)).to(device)
    tensor = cls.from_dense(dense, group_dim=dim).validate()
    assert torch.equal(tensor.to_dense(), dense)
    assert tensor.group_dim == dim
    assert [part.dim for part in tensor.index_parts if part.padded] == [d for d in range(3) if d != dim]
    assert set(tensor.facts) <= {"Index0", "Index1", "Index2"}
    for dims in itertools.permutations(range(3)):
        turned = tensor.transpose(dims).validate()
        assert torch.equal(turned.to_dense(), dense.permute(dims))
        assert turned.group_dim == dim
    assert torch.equal(tensor.transpose().to_dense(), dense.permute(2, 1, 0))
    negative = cls.from_dense(dense, group_dim=dim - 3)
    assert negative.group_dim == dim


def test_coo_of_one_dimension():
    dense = torch.tensor([0.0, 2.0, 0.0, 3.0])
    vector = COO.from_dense(dense).validate()
    assert vector.facts["Index0"].unique
    assert torch.equal(vector.to_dense(), dense)
    with pytest.raises(InsumShapeError, match="row needs a matrix"):
        _ = vector.row
    with pytest.raises(InsumShapeError, match="has no columns"):
        _ = vector.num_cols
    with pytest.raises(InsumShapeError, match="two dimensions or more"):
        GroupCOO.from_coo(vector)


def test_group_names_follow_the_grouped_dimension():
    dense = torch.tensor([[1.0, 2.0], [0.0, 3.0]])
    rows = GroupCOO.from_dense(dense, group_size=2)
    assert rows.row.tolist() == [0, 1]
    assert rows.col.tolist() == [[0, 1], [1, -1]]
    columns = GroupCOO.from_dense(dense, group_size=2, group_dim=1)
    assert columns.col.tolist() == [0, 1]
    assert columns.row.tolist() == [[0, -1], [0, 1]]
    assert list(columns.tensors) == ["Col", "Row", "Val"]
    by_row, by_column = ELL.from_dense(dense), ELL.from_dense(dense, group_dim=1)
    assert by_row.col.tolist() == [[0, 1], [1, -1]]
    assert by_column.row.tolist() == [[0, -1], [0, 1]]
    with pytest.raises(InsumFormatError, match="stores no row: it is the position"):
        _ = by_row.row


def test_facts_say_what_the_builder_knows():
    dense = torch.tensor([[1.0, 2.0, 0.0], [3.0, 4.0, 5.0]])
    exact = GroupCOO.from_dense(dense, group_size=1)
    assert exact.facts["Col"].masked is False
    assert not exact.facts["Row"].unique
    padded = GroupCOO.from_dense(dense, group_size=2)
    assert padded.facts["Col"].masked is True
    assert GroupCOO.from_dense(dense, group_size=4).facts["Row"].unique
    assert ELL.from_dense(dense).facts["Col"].masked is True
    assert ELL.from_dense(torch.ones(2, 3)).facts["Col"].masked is False
    assert all(f.proven and f.sorted for f in (exact.facts["Row"], padded.facts["Row"]))
    plain = COO((2, 2), (torch.tensor([0, 1]), torch.tensor([1, 0])), torch.ones(2))
    # What is not claimed is read once: ranges and order.
    assert plain.index_facts == ()
    assert plain.facts == {
        "Row": IndexFacts(sorted=True, masked=False, proven=True),
        "Col": IndexFacts(masked=False, proven=True),
    }


def test_ell_width():
    dense = torch.tensor([[1.0, 2.0], [0.0, 3.0]])
    assert ELL.from_dense(dense, width=5).validate().width == 5
    with pytest.raises(InsumFormatError, match="ELL of width 1 cannot hold 2 entries at one index of dimension 0"):
        ELL.from_dense(dense, width=1)


def test_int32_overflow_is_an_error():
    indices = torch.tensor([[2**31], [0]])
    with pytest.raises(InsumOverflowError, match=r"does not fit index_dtype=torch\.int32"):
        COO.from_coo(indices, torch.ones(1), (2**31 + 1, 1), index_dtype=torch.int32)

    fits = COO.from_coo(torch.tensor([[2**31 - 2], [0]]), torch.ones(1), (2**31 - 1, 1))
    assert fits.validate().index_dtype == torch.int32


@pytest.mark.parametrize("cls", [BlockCOO, BlockGroupCOO])
def test_bsr_keeps_its_blocks(cls):
    crow, col = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1])
    values = torch.zeros(3, 2, 3)
    values[0] = 1
    tensor = torch.sparse_bsr_tensor(crow, col, values, (4, 6))
    matrix = cls.from_torch(tensor).validate()
    assert matrix.block_shape == (2, 3)
    assert matrix.num_blocks == 3
    assert matrix.to_torch().values().shape == (3, 2, 3)
    ragged = cls.from_dense(torch.ones(5, 6), block_shape=(2, 3))
    with pytest.raises(InsumShapeError, match="multiple of the block"):
        ragged.to_torch()
    with pytest.raises(InsumShapeError, match="block_shape must be two extents"):
        cls.from_torch(torch.eye(3).to_sparse())


@pytest.mark.parametrize("cls", [BlockCOO, BlockGroupCOO])
def test_scipy_bsr_keeps_its_blocks(cls):
    sparse = pytest.importorskip("scipy.sparse")
    dense = sparse_dense((6, 12), density=0.2)
    matrix = cls.from_scipy(sparse.bsr_array(dense.numpy(), blocksize=(2, 4))).validate()
    assert matrix.block_shape == (2, 4)
    assert torch.equal(matrix.to_dense(), dense)
    assert cls.from_scipy(sparse.bsr_array(dense.numpy(), blocksize=(2, 4)), block_shape=(3, 3)).block_shape == (3, 3)


def test_scipy_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "scipy.sparse", None)
    with pytest.raises(MissingExtraError, match="pip install scipy"):
        COO.from_scipy(object())


@pytest.mark.parametrize("group_size", [0, -1, 2.0, "largest", True])
@pytest.mark.parametrize("cls", [GroupCOO, BlockGroupCOO])
def test_group_size_is_checked(cls, group_size):
    more = {"block_shape": (1, 1)} if cls is BlockGroupCOO else {}
    with pytest.raises(InsumFormatError, match="group_size must be an integer of at least 1 or 'auto'"):
        cls.from_dense(torch.eye(3), group_size=group_size, **more)


@pytest.mark.parametrize("block_shape", [(0, 1), (2,), (1, 2, 3), None])
def test_block_shape_is_checked(block_shape):
    with pytest.raises(InsumShapeError, match="block_shape must be two extents of at least 1"):
        BlockCOO.from_dense(torch.eye(3), block_shape=block_shape)
    with pytest.raises(InsumShapeError, match="a format of blocks needs a matrix"):
        BlockCOO.from_dense(torch.ones(2, 2, 2), block_shape=(1, 1))


def test_transpose_needs_a_permutation():
    tensor = COO.from_dense(torch.ones(2, 2, 2))
    with pytest.raises(InsumShapeError, match="transpose needs a permutation of 3 dimensions"):
        tensor.transpose((0, 0, 1))
    with pytest.raises(InsumShapeError, match="needs a matrix"):
        tensor.to_torch(torch.sparse_csr)


def test_transpose_can_change_the_group_size():
    dense = sparse_dense((6, 9))
    grouped = GroupCOO.from_dense(dense, group_size=4)
    assert grouped.transpose().group_size == 4
    assert grouped.transpose(group_size=2).validate().group_size == 2
    blocks = BlockGroupCOO.from_dense(dense, block_shape=(2, 3), group_size=3)
    assert blocks.transpose(group_size=1).validate().group_size == 1
    assert torch.equal(blocks.transpose(group_size="auto").to_dense(), dense.T)

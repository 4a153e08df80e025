"""Every format obeys the laws of `SparseFormat`, whatever it was built from."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from insum_nn.errors import (
    InsumDeviceError,
    InsumDtypeError,
    InsumFormatError,
    InsumOverflowError,
    InsumRangeError,
    InsumShapeError,
    MissingExtraError,
)
from insum_nn.facts import IndexFacts
from insum_nn.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO, SparseFormat
from tests.formats.registry import NOT_DENSE, REGISTRY, SHAPES, Entry, accumulate, random_entries, sparse_dense

# torch says both once per process, of its own sparse tensors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]

formats = pytest.mark.parametrize("entry", REGISTRY, ids=lambda entry: entry.name)
matrices = pytest.mark.parametrize("shape", SHAPES, ids=str)
any_rank = pytest.mark.parametrize("entry", [e for e in REGISTRY if e.any_rank], ids=lambda entry: entry.name)


def same_structure(left: SparseFormat, right: SparseFormat) -> bool:
    pairs = zip(left.index_parts, right.index_parts, strict=True)
    return left.facts == right.facts and all(torch.equal(a.tensor, b.tensor) for a, b in pairs)


# Laws -----------------------------------------------------------------------------------------------------------------


@formats
@matrices
def test_dense_round_trip(entry: Entry, shape, device):
    dense = sparse_dense(shape).to(device)
    matrix = entry.from_dense(dense).validate()
    assert matrix.shape == shape
    assert matrix.to_dense().shape == shape
    assert torch.equal(matrix.to_dense(), dense)
    assert matrix.device.type == device.type
    assert matrix.dtype == dense.dtype


@formats
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.int32, torch.bool], ids=str)
def test_dense_round_trip_of_other_dtypes(entry: Entry, dtype):
    dense = (sparse_dense((5, 7), dtype=torch.float32) * 4).to(dtype)
    assert torch.equal(entry.from_dense(dense).validate().to_dense(), dense)


@formats
def test_nan_and_inf_are_stored(entry: Entry):
    dense = torch.zeros(4, 6)
    dense[0, 1], dense[3, 5] = float("nan"), float("inf")
    got = entry.from_dense(dense).to_dense()
    assert torch.equal(got.isnan(), dense.isnan())
    assert torch.equal(got.isinf(), dense.isinf())


@formats
@matrices
def test_transpose(entry: Entry, shape, device):
    dense = sparse_dense(shape).to(device)
    matrix = entry.from_dense(dense)
    turned = matrix.transpose().validate()
    assert type(turned) is type(matrix)
    assert turned.shape == shape[::-1]
    assert torch.equal(turned.to_dense(), dense.T)
    back = turned.transpose().validate()
    assert torch.equal(back.to_dense(), dense)
    assert turned.index_dtype == matrix.index_dtype
    assert all(fact.proven for fact in turned.facts.values())


@pytest.mark.parametrize(
    ("source", "target"), list(itertools.product(REGISTRY, REGISTRY)), ids=lambda entry: entry.name
)
def test_conversions_commute(source: Entry, target: Entry):
    dense = sparse_dense((7, 10))
    through = target.from_coo(source.from_dense(dense)).validate()
    assert torch.equal(through.to_dense(), dense)
    # From scalars the structure is the same as the one built directly; blocks bring their zeros along.
    if "block_shape" not in source.options:
        assert same_structure(through, target.from_dense(dense))
        assert torch.equal(through.values, target.from_dense(dense).values)


@formats
def test_with_values_keeps_structure_and_facts(entry: Entry):
    matrix = entry.from_dense(sparse_dense((5, 7)))
    other = matrix.with_values(matrix.values * 3)
    assert same_structure(matrix, other)
    assert all(a.tensor is b.tensor for a, b in zip(matrix.index_parts, other.index_parts, strict=True))
    assert torch.equal(other.validate().to_dense(), matrix.to_dense() * 3)
    assert other.coalesced == matrix.coalesced
    with pytest.raises(InsumShapeError, match=r"values of .*with_values have another shape"):
        matrix.with_values(torch.zeros(*matrix.values.shape, 1))


@formats
def test_to(entry: Entry, device):
    matrix = entry.from_dense(sparse_dense((5, 7)))
    moved = matrix.to(device, torch.float32)
    assert moved.dtype == torch.float32
    assert moved.device.type == device.type
    assert {part.tensor.device.type for part in moved.index_parts} == {device.type}
    assert moved.index_dtype == matrix.index_dtype
    assert moved.facts == matrix.facts
    assert torch.equal(moved.to_dense().cpu(), matrix.to_dense().float())
    assert matrix.to(dtype=torch.float16).dtype == torch.float16
    meta = matrix.to("meta")
    assert {meta.device.type, *(part.tensor.device.type for part in meta.index_parts)} == {"meta"}


@formats
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies(entry: Entry, clone):
    matrix = entry.from_dense(sparse_dense((5, 7)))
    other = clone(matrix)
    assert same_structure(matrix, other.validate())
    assert torch.equal(matrix.values, other.values)
    assert other.values is not matrix.values
    assert repr(other) == repr(matrix)


@formats
@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_tensors_of_a_copy_are_its_own(entry: Entry, clone):
    """In inference mode too, where a copy makes new index tensors, whose writes torch counts."""
    matrix = entry.from_dense(sparse_dense((5, 7)))
    with torch.inference_mode():
        matrix = matrix.to(torch.float64)
        assert matrix.tensors
        other = clone(matrix)
    assert all(other.tensors[part.name] is part.tensor for part in other.index_parts)


@formats
@matrices
def test_entries_are_what_is_stored(entry: Entry, shape):
    dense = sparse_dense(shape)
    matrix = entry.from_dense(dense)
    entries = matrix.entries().validate()
    assert entries.nnz == matrix.nnz
    assert torch.equal(accumulate(shape, torch.stack(entries.indices), entries.values), dense)
    assert matrix.to_coo().validate().coalesced
    if "block_shape" not in entry.options:
        assert matrix.nnz == int((dense != 0).sum())


@formats
def test_frozen_and_named(entry: Entry):
    matrix = entry.from_dense(sparse_dense((5, 7)))
    with pytest.raises(AttributeError):
        matrix.values = torch.zeros(1)
    assert list(matrix.tensors) == [*matrix.facts, "Val"]
    assert set(matrix.facts) <= {"Row", "Col"}
    assert "Col" in matrix.facts or "Row" in matrix.facts
    assert matrix.num_rows == 5
    assert matrix.num_cols == 7
    assert matrix.nbytes == sum(t.numel() * t.element_size() for t in matrix.tensors.values())
    assert len(repr(matrix)) < 160


@formats
def test_torch_compile_sees_no_graph_break(entry: Entry):
    dense = sparse_dense((5, 7))
    matrix = entry.from_dense(dense)
    torch.compiler.reset()
    double = torch.compile(lambda v: matrix.with_values(v * 2).tensors["Val"], fullgraph=True, backend="eager")
    assert torch.equal(double(matrix.values), matrix.values * 2)


# Structure ------------------------------------------------------------------------------------------------------------


@formats
def test_mask_forces_explicit_zeros(entry: Entry):
    dense = sparse_dense((5, 7))
    mask = torch.rand(5, 7) < 0.5
    matrix = entry.from_dense(dense, mask=mask).validate()
    assert torch.equal(matrix.to_dense(), torch.where(mask, dense, 0.0))
    entries = matrix.entries()
    stored = torch.zeros(5, 7, dtype=torch.bool)
    stored[entries.indices] = True
    assert bool(stored[mask].all())
    if "block_shape" not in entry.options:
        assert torch.equal(stored, mask)
    # Explicit zeros survive every conversion and the transpose.
    assert entry.from_coo(matrix).nnz == matrix.nnz
    assert matrix.transpose().nnz == matrix.nnz
    assert COO.from_coo(matrix).nnz == matrix.nnz


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


@formats
def test_mask_errors(entry: Entry):
    dense = torch.zeros(4, 6)
    with pytest.raises(InsumDtypeError, match="mask must be bool"):
        entry.from_dense(dense, mask=torch.ones(4, 6))
    with pytest.raises(InsumShapeError, match="mask does not fit"):
        entry.from_dense(dense, mask=torch.ones(4, 5, dtype=torch.bool))
    with pytest.raises(InsumFormatError, match="needs a dense"):
        entry.from_dense(dense.to_sparse())
    for got, tensor in NOT_DENSE.items():
        with pytest.raises((InsumFormatError, InsumDtypeError), match=got):
            entry.from_dense(tensor)
        with pytest.raises((InsumFormatError, InsumDtypeError), match=f"values.*{got}"):
            entry.from_dense(dense).with_values(tensor)


@formats
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_duplicates_are_summed(entry: Entry, dtype, device):
    indices, values = random_entries((5, 7), 40)
    values = (values * 8).round().to(dtype)
    matrix = entry.from_coo(indices.to(device), values.to(device), (5, 7)).validate()
    assert torch.equal(matrix.to_dense().cpu(), accumulate((5, 7), indices, values))
    assert matrix.coalesced


@formats
def test_half_duplicates_accumulate_in_single(entry: Entry):
    # 2048 + 1 is 2048 in float16, so a half accumulator would never move.
    indices = torch.zeros(2, 1025, dtype=torch.int64)
    values = torch.ones(1025, dtype=torch.float16)
    values[0] = 2048
    assert entry.from_coo(indices, values, (2, 2)).to_dense()[0, 0] == 3072


@any_rank
def test_duplicates_can_stay(entry: Entry):
    indices, values = random_entries((5, 7), 40)
    matrix = entry.from_coo(indices, values, (5, 7), coalesce=False).validate()
    assert matrix.nnz == 40
    assert not matrix.coalesced
    torch.testing.assert_close(matrix.to_dense(), accumulate((5, 7), indices, values))
    assert matrix.transpose().validate().nnz == 40
    torch.testing.assert_close(matrix.transpose().to_dense(), accumulate((5, 7), indices, values).T)
    assert matrix.to_coo().nnz < 40


def test_uncoalesced_coo_keeps_order():
    indices, values = random_entries((5, 7), 9)
    matrix = COO.from_coo(indices, values, (5, 7), coalesce=False)
    assert torch.equal(torch.stack(matrix.indices).long(), indices)
    assert torch.equal(matrix.values, values)
    assert not matrix.facts["Row"].sorted


@formats
def test_non_contiguous_inputs(entry: Entry):
    dense = sparse_dense((14, 10)).T[::2, 1::2]
    assert not dense.is_contiguous()
    assert torch.equal(entry.from_dense(dense).validate().to_dense(), dense)
    indices, values = random_entries((5, 7), 40)
    wide_indices, wide_values = indices.T.contiguous().T, torch.stack([values, values], 1)[:, 0]
    assert not wide_values.is_contiguous()
    got = entry.from_coo(wide_indices, wide_values, (5, 7)).to_dense()
    torch.testing.assert_close(got, accumulate((5, 7), indices, values))


@formats
def test_empty(entry: Entry, device):
    for shape in SHAPES:
        indices = torch.zeros(2, 0, dtype=torch.int64, device=device)
        matrix = entry.from_coo(indices, torch.zeros(0, device=device), shape).validate()
        assert matrix.nnz == 0
        assert torch.equal(matrix.to_dense(), torch.zeros(shape, device=device))
        assert matrix.transpose().validate().nnz == 0
        assert matrix.to_coo().nnz == 0


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


@any_rank
@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 3, 2, 4), (3, 0, 2)], ids=str)
def test_any_rank(entry: Entry, shape):
    dense = sparse_dense(shape)
    tensor = entry.from_dense(dense).validate()
    assert torch.equal(tensor.to_dense(), dense)
    assert torch.equal(tensor.transpose().validate().to_dense(), dense.permute(*reversed(range(len(shape)))))
    indices, values = random_entries(shape, 0 if 0 in shape else 30)
    built = entry.from_coo(indices, values, shape).validate()
    torch.testing.assert_close(built.to_dense(), accumulate(shape, indices, values))


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


@any_rank
def test_group_dim_is_checked(entry: Entry):
    if "group_dim" not in entry.cls.__dataclass_fields__:
        pytest.skip("not a grouped format")
    with pytest.raises(InsumShapeError, match="group_dim got dimension 2 of a tensor with 2"):
        entry.from_dense(torch.eye(3), group_dim=2)


# Index dtypes and large extents ---------------------------------------------------------------------------------------


@formats
def test_index_dtype(entry: Entry):
    dense = sparse_dense((5, 7))
    assert entry.from_dense(dense).index_dtype == torch.int32
    assert entry.from_dense(dense, index_dtype=torch.int64).index_dtype == torch.int64
    indices, values = random_entries((5, 7), 12)
    assert entry.from_coo(indices.int(), values, (5, 7), index_dtype=torch.int64).index_dtype == torch.int64
    assert entry.from_dense(dense, index_dtype=torch.int64).transpose().index_dtype == torch.int64
    assert entry.from_torch(dense.to_sparse(), index_dtype=torch.int64).index_dtype == torch.int64
    with pytest.raises(InsumDtypeError, match=r"index_dtype must be torch\.int32 or torch\.int64"):
        entry.from_dense(dense, index_dtype=torch.int16)


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor):
                self.elements = max(self.elements, item.untyped_storage().nbytes() // item.element_size())
        return result


HYPERSPARSE = [e for e in REGISTRY if e.cls is not ELL]


@pytest.mark.parametrize("entry", HYPERSPARSE, ids=lambda entry: entry.name)
@pytest.mark.parametrize("extent", [10**7, 2**33, 2**40], ids=["1e7", "2^33", "2^40"])
def test_hypersparse_costs_by_entries(entry: Entry, extent):
    indices = torch.randint(extent, (2, 1000))
    indices[:, :3] = torch.tensor([[extent - 1, 0, extent - 1], [extent - 1, 0, 0]])
    values = torch.randn(1000, dtype=torch.float64)
    with LargestTensor() as seen:
        matrix = entry.from_coo(indices, values, (extent, extent)).validate()
        turned = matrix.transpose()
        entries = matrix.to_coo()
        _ = matrix.nnz
    # An entry brings at most one block of 6, in a group of 3, and a message-free check a few of them.
    assert seen.elements <= 40_000
    assert matrix.index_dtype == (torch.int32 if extent < 2**31 else torch.int64)
    order = sorted(range(1000), key=lambda p: indices[:, p].tolist())
    nonzero = entries.values != 0
    assert torch.equal(torch.stack(entries.indices)[:, nonzero].long(), indices[:, order])
    assert torch.equal(entries.values[nonzero], values[order])
    swapped = turned.to_coo()
    assert sorted(swapped.values.tolist()) == sorted(entries.values.tolist())


def test_int32_overflow_is_an_error():
    indices = torch.tensor([[2**31], [0]])
    with pytest.raises(InsumOverflowError, match=r"does not fit index_dtype=torch\.int32"):
        COO.from_coo(indices, torch.ones(1), (2**31 + 1, 1), index_dtype=torch.int32)

    fits = COO.from_coo(torch.tensor([[2**31 - 2], [0]]), torch.ones(1), (2**31 - 1, 1))
    assert fits.validate().index_dtype == torch.int32


# Gradients ------------------------------------------------------------------------------------------------------------


@formats
def test_gradients_of_every_conversion(entry: Entry):
    indices, values = random_entries((3, 4), 8)
    values.requires_grad_()
    weight = torch.randn(3, 4, dtype=torch.float64)

    def dense(v):
        return entry.from_coo(indices, v, (3, 4)).to_dense() ** 2

    def through(v):
        built = entry.from_coo(indices, v, (3, 4))
        return built.transpose().to_coo().with_values(built.transpose().to_coo().values ** 2).to_dense() * weight.T

    def back(v):
        return entry.from_torch(entry.from_coo(indices, v, (3, 4)).to_torch(torch.sparse_coo)).to_dense() ** 2

    for function in (dense, through, back):
        assert gradcheck(function, (values,))
        # torch's own sparse tensors are differentiable once only.
        assert function is back or gradgradcheck(function, (values,), fast_mode=True)


@formats
def test_gradient_through_from_dense_and_with_values(entry: Entry):
    dense = sparse_dense((4, 5)).requires_grad_()
    mask = dense.detach() != 0
    assert gradcheck(lambda d: entry.from_dense(d, mask=mask).to_dense() ** 2, (dense,))
    matrix = entry.from_dense(dense.detach())
    values = matrix.values.clone().requires_grad_()
    with_grad = matrix.with_values(values)
    assert with_grad.requires_grad
    assert not matrix.requires_grad
    assert not with_grad.detach().requires_grad
    assert gradcheck(lambda v: matrix.with_values(v).transpose().to_dense() ** 2, (values,))


# Torch and scipy ------------------------------------------------------------------------------------------------------

LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]


@formats
@matrices
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_torch_round_trip(entry: Entry, shape, layout, device):
    dense = sparse_dense(shape).to(device)
    matrix = entry.from_torch(dense.to_sparse(layout=layout)).validate()
    assert torch.equal(matrix.to_dense(), dense)
    tensor = matrix.to_torch(layout)
    assert tensor.layout == layout
    assert torch.equal(tensor.to_dense(), dense)
    parts = {
        torch.sparse_coo: lambda: torch.sparse_coo_tensor(
            tensor.indices(), tensor.values(), shape, is_coalesced=True, check_invariants=True
        ),
        torch.sparse_csr: lambda: torch.sparse_csr_tensor(
            tensor.crow_indices(), tensor.col_indices(), tensor.values(), shape, check_invariants=True
        ),
        torch.sparse_csc: lambda: torch.sparse_csc_tensor(
            tensor.ccol_indices(), tensor.row_indices(), tensor.values(), shape, check_invariants=True
        ),
    }
    assert torch.equal(parts[layout]().to_dense(), dense)


@pytest.mark.parametrize("layout", [torch.sparse_bsr, torch.sparse_bsc], ids=str)
@formats
def test_torch_blocks(entry: Entry, layout):
    dense = sparse_dense((6, 12), density=0.2)
    tensor = dense.to_sparse(layout=layout, blocksize=(2, 3))
    matrix = entry.from_torch(tensor).validate()
    assert torch.equal(matrix.to_dense(), dense)
    if "block_shape" in entry.options:
        again = matrix.to_torch(layout)
        assert again.layout == layout
        assert tuple(again.values().shape[1:]) == entry.options["block_shape"]
        assert torch.equal(again.to_dense(), dense)
    else:
        with pytest.raises(InsumFormatError, match="cannot make layout"):
            matrix.to_torch(layout)


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


@formats
def test_torch_gradients_of_compressed_layouts(entry: Entry):
    dense = sparse_dense((4, 6))
    for layout in (torch.sparse_csr, torch.sparse_csc):
        source = dense.to_sparse(layout=layout)
        values = source.values().clone().requires_grad_()
        plain = source.col_indices() if layout == torch.sparse_csr else source.row_indices()
        pointers = source.crow_indices() if layout == torch.sparse_csr else source.ccol_indices()
        make = torch.sparse_csr_tensor if layout == torch.sparse_csr else torch.sparse_csc_tensor
        (entry.from_torch(make(pointers, plain, values, (4, 6))).to_dense() ** 2).sum().backward()
        torch.testing.assert_close(values.grad, 2 * values.detach())
        values.grad = None
        matrix = entry.from_coo(entry.from_torch(make(pointers, plain, values, (4, 6))))
        (matrix.to_torch(layout).values() ** 2).sum().backward()
        torch.testing.assert_close(values.grad, 2 * values.detach())


@formats
def test_torch_unsorted_and_explicit_zeros(entry: Entry):
    # torch does not check the order inside a row unless asked.
    tensor = torch.sparse_csr_tensor(
        torch.tensor([0, 2, 3]), torch.tensor([2, 0, 1]), torch.tensor([1.0, 2.0, 0.0]), (2, 3)
    )
    matrix = entry.from_torch(tensor).validate()
    assert torch.equal(matrix.to_dense(), torch.tensor([[2.0, 0.0, 1.0], [0.0, 0.0, 0.0]]))
    if "block_shape" not in entry.options:
        assert matrix.nnz == 3
    loose = torch.sparse_coo_tensor(torch.tensor([[1, 0, 1], [2, 0, 2]]), torch.tensor([1.0, 2.0, 4.0]), (2, 3))
    assert entry.from_torch(loose).validate().to_dense()[1, 2] == 5


@formats
def test_torch_wild_indices_are_refused(entry: Entry):
    wild = torch.sparse_coo_tensor(
        torch.tensor([[0], [9]]), torch.ones(1), (2, 3), is_coalesced=True, check_invariants=False
    )
    with pytest.raises(InsumRangeError, match=r"expected 0 <= col\[p\] < 3; got 9 at \[0\]"):
        entry.from_torch(wild)


@formats
def test_torch_refusals(entry: Entry):
    with pytest.raises(InsumFormatError, match="needs a sparse tensor, got a dense one"):
        entry.from_torch(torch.eye(3))
    hybrid = torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 3), (2, 3))
    with pytest.raises(InsumShapeError, match="1 sparse and 1 dense dimensions"):
        entry.from_torch(hybrid)
    batch = torch.eye(3).expand(2, 3, 3).to_sparse_csr()
    with pytest.raises(InsumShapeError, match="no batch dimension"):
        entry.from_torch(batch)


@formats
@matrices
@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "bsr", "lil"])
def test_scipy_round_trip(entry: Entry, shape, kind):
    sparse = pytest.importorskip("scipy.sparse")
    if kind == "bsr" and 0 in shape:
        pytest.skip("scipy cannot build an empty BSR")
    dense = sparse_dense(shape)
    matrix = entry.from_scipy(sparse.coo_array(dense.numpy()).asformat(kind)).validate()
    assert torch.equal(matrix.to_dense(), dense)
    back = matrix.to_scipy()
    assert back.shape == shape
    assert torch.equal(torch.from_numpy(back.toarray()), dense)
    old = sparse.csr_matrix(dense.numpy())
    assert torch.equal(entry.from_scipy(old).to_dense(), dense)


@pytest.mark.parametrize("cls", [BlockCOO, BlockGroupCOO])
def test_scipy_bsr_keeps_its_blocks(cls):
    sparse = pytest.importorskip("scipy.sparse")
    dense = sparse_dense((6, 12), density=0.2)
    matrix = cls.from_scipy(sparse.bsr_array(dense.numpy(), blocksize=(2, 4))).validate()
    assert matrix.block_shape == (2, 4)
    assert torch.equal(matrix.to_dense(), dense)
    assert cls.from_scipy(sparse.bsr_array(dense.numpy(), blocksize=(2, 4)), block_shape=(3, 3)).block_shape == (3, 3)


@formats
def test_scipy_duplicates_dtypes_and_refusals(entry: Entry, device):
    sparse = pytest.importorskip("scipy.sparse")
    source = sparse.coo_array(([1.0, 2.0, 3.0], ([0, 0, 1], [1, 1, 0])), shape=(2, 2))
    matrix = entry.from_scipy(source, device=device)
    assert matrix.device.type == device.type
    assert matrix.to_dense().tolist() == [[0.0, 3.0], [3.0, 0.0]]
    source.data[:] = 7
    assert matrix.to_dense().tolist() == [[0.0, 3.0], [3.0, 0.0]]
    with pytest.raises(InsumFormatError, match="needs a scipy sparse array, got ndarray"):
        entry.from_scipy(source.toarray())
    with pytest.raises(InsumDtypeError, match="torch has no dtype for scipy's"):
        entry.from_scipy(source.astype("longdouble"))
    with pytest.raises(InsumDtypeError, match=r"scipy has no dtype for torch\.bfloat16"):
        matrix.to(dtype=torch.bfloat16).to_scipy()


def test_scipy_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "scipy.sparse", None)
    with pytest.raises(MissingExtraError, match="pip install scipy"):
        COO.from_scipy(object())


# Bad arguments --------------------------------------------------------------------------------------------------------


@formats
def test_from_coo_refusals(entry: Entry):
    indices, values = torch.tensor([[0, 1], [1, 5]]), torch.ones(2)
    with pytest.raises(InsumRangeError, match=r"col: expected 0 <= col\[p\] < 5; got 5 at \[1\] \(1 of 2 entries\)"):
        entry.from_coo(indices, values, (2, 5))
    with pytest.raises(InsumRangeError, match=r"row: expected 0 <= row\[p\] < 2; got -1 at \[0\]"):
        entry.from_coo(indices - 1, values, (2, 5))
    with pytest.raises(InsumShapeError, match="expected 3 index tensors; got 2"):
        entry.from_coo(indices, values, (2, 5, 6))
    with pytest.raises(InsumShapeError, match=r"row: expected shape \(3,\) as values; got shape \(2,\)"):
        entry.from_coo(indices, torch.ones(3), (2, 6))
    with pytest.raises(InsumDtypeError, match=r"row: expected int32 or int64; got float32"):
        entry.from_coo(indices.float(), values, (2, 6))
    with pytest.raises(InsumDeviceError, match=r"row: expected device cpu of values; got meta"):
        entry.from_coo(indices.to("meta"), values, (2, 6))
    with pytest.raises(InsumShapeError, match="needs the shape of the dense tensor"):
        entry.from_coo(indices, values)
    with pytest.raises(InsumShapeError, match="needs one value per entry"):
        entry.from_coo(indices, None, (2, 6))
    with pytest.raises(InsumShapeError, match="extents of at least 0"):
        entry.from_coo(indices, values, (2, -1))
    for shape in ((2.5, 6), "26", 6):
        with pytest.raises(InsumShapeError, match="got the shape"):
            entry.from_coo(indices, values, shape)
    with pytest.raises(InsumDtypeError, match=r"needs a torch\.Tensor for row, got list"):
        entry.from_coo([[0, 1], [1, 5]], values, (2, 6))
    with pytest.raises(InsumDtypeError, match=r"needs a torch\.Tensor for values, got list"):
        entry.from_coo(indices, [1.0, 2.0], (2, 6))
    with pytest.raises(InsumDtypeError, match=r"from_dense needs a torch\.Tensor for dense, got list"):
        entry.from_dense([[1.0]])
    with pytest.raises(InsumDtypeError, match=r"from_torch needs a torch\.Tensor for tensor, got list"):
        entry.from_torch([[1.0]])
    with pytest.raises(InsumShapeError, match="expected 2 index tensors; got 1"):
        entry.from_coo(torch.tensor(0), values, (2, 6))
    with pytest.raises(InsumFormatError, match="got values or shape together with a COO"):
        entry.from_coo(COO.from_dense(torch.eye(2)), values)


@formats
def test_from_coo_proves_what_a_constructor_took_on_trust(entry: Entry):
    wild = COO((2, 3), (torch.tensor([0, 1]), torch.tensor([0, 3])), torch.ones(2))
    with pytest.raises(InsumRangeError, match=r"col: expected 0 <= col\[p\] < 3; got 3 at \[1\]"):
        entry.from_coo(wild)
    fine = COO((2, 3), (torch.tensor([1, 0]), torch.tensor([0, 2])), torch.ones(2))
    assert all(fact.proven for fact in entry.from_coo(fine).validate().facts.values())


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

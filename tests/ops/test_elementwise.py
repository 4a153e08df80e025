from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn.errors import InsumDeviceError, InsumDtypeError, InsumFormatError, InsumShapeError
from insum_nn.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO, SparseFormat
from insum_nn.ops import add, multiply, multiply_expression, same_structure, scale, scale_cols, scale_rows
from insum_nn.ops.elementwise import scale_expression
from tests.formats.registry import REGISTRY, SHAPES, Entry, random_entries, sparse_dense
from tests.ops.oracle import assert_gradients, assert_same, strided
from tests.ops.tensors import ND_SHAPES, each_nd_format

each_format = pytest.mark.parametrize("entry", REGISTRY, ids=lambda e: e.name)


def assert_multiplied(tensor: SparseFormat, dense: Tensor) -> None:
    reference = tensor.to("cpu", torch.float64)
    assert_same(
        lambda values, b: multiply(tensor.with_values(values), b).to_dense(),
        lambda values, b: reference.with_values(values).to_dense() * b,
        [tensor.values, dense],
    )
    multiply(tensor, dense).validate()


def along(vector: Tensor, dim: int, ndim: int) -> Tensor:
    return vector.reshape([-1 if d == dim % ndim else 1 for d in range(ndim)])


def assert_scaled(tensor: SparseFormat, dim: int) -> None:
    reference = tensor.to("cpu", torch.float64)
    assert_same(
        lambda values, s: scale(tensor.with_values(values), s, dim).to_dense(),
        lambda values, s: reference.with_values(values).to_dense() * along(s, dim, tensor.ndim),
        [tensor.values, torch.randn(tensor.shape[dim], device=tensor.device).to(tensor.dtype)],
    )


@each_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matrices(entry: Entry, shape: tuple[int, int]):
    matrix = entry.from_dense(sparse_dense(shape))
    assert_multiplied(matrix, torch.randn(shape, dtype=torch.float64))
    assert_scaled(matrix, 0)
    assert_scaled(matrix, 1)


@each_nd_format
@pytest.mark.parametrize("shape", ND_SHAPES[1:], ids=str)
def test_tensors(entry: Entry, shape: tuple[int, ...]):
    tensor = entry.from_dense(sparse_dense(shape))
    assert_multiplied(tensor, torch.randn(shape, dtype=torch.float64))
    for dim in range(len(shape)):
        assert_scaled(tensor, dim)


def test_one_dimension():
    tensor = COO.from_dense(sparse_dense((9,)))
    assert_multiplied(tensor, torch.randn(9, dtype=torch.float64))
    assert_scaled(tensor, -1)


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(entry: Entry, dtype: torch.dtype):
    matrix = entry.from_dense(sparse_dense((17, 20), dtype=torch.float32).to(dtype))
    assert_multiplied(matrix, torch.randn(17, 20).to(dtype))
    assert_scaled(matrix, 0)


@each_format
def test_non_contiguous_and_nothing_stored(entry: Entry):
    assert_multiplied(entry.from_dense(sparse_dense((13, 11))), strided(torch.randn(13, 11, dtype=torch.float64)))
    empty = entry.from_dense(torch.zeros(7, 5, dtype=torch.float64))
    assert_multiplied(empty, torch.randn(7, 5, dtype=torch.float64))
    assert_scaled(empty, 1)


def test_each_duplicate_is_multiplied():
    indices, values = random_entries((9, 6), 40)
    matrix = GroupCOO.from_coo(indices, values, (9, 6), coalesce=False)
    assert_multiplied(matrix, torch.randn(9, 6, dtype=torch.float64))


@pytest.mark.parametrize("cls", [BlockCOO, BlockGroupCOO])
def test_beyond_the_edge_stays_zero(cls: type[BlockCOO] | type[BlockGroupCOO]):
    matrix = cls.from_dense(sparse_dense((5, 7)), block_shape=(4, 4))
    for result in (multiply(matrix, torch.full((5, 7), 2.0).double()), scale_rows(matrix, torch.ones(5).double())):
        result.validate()
        assert result.facts == matrix.facts


@each_format
def test_finite_differences(entry: Entry):
    matrix = entry.from_dense(sparse_dense((4, 5), density=0.5))
    run = lambda values, b: multiply(matrix.with_values(values), b).values  # noqa: E731
    assert_gradients(run, [matrix.values, torch.randn(4, 5)])
    for dim in (0, 1):
        run = lambda values, s, dim=dim: scale(matrix.with_values(values), s, dim).values  # noqa: E731
        assert_gradients(run, [matrix.values, torch.randn(matrix.shape[dim])])


@each_format
def test_two_sparse_tensors(entry: Entry):
    matrix = entry.from_dense(sparse_dense((13, 11)))
    other = torch.randn_like(matrix.values) * (matrix.values != 0)
    for function, oracle in ((multiply, torch.mul), (add, torch.add)):
        assert_same(
            lambda x, y, f=function: f(matrix.with_values(x), matrix.with_values(y)).to_dense(),
            lambda x, y, f=oracle: f(matrix.with_values(x).to_dense(), matrix.with_values(y).to_dense()),
            [matrix.values, other],
        )
    small = entry.from_dense(sparse_dense((3, 4)))
    assert_gradients(
        lambda x, y: multiply(small.with_values(x), small.with_values(y)).values,
        [small.values, torch.randn_like(small.values)],
    )


def test_structures():
    dense = sparse_dense((13, 11))
    matrix = GroupCOO.from_dense(dense, group_size=2)
    assert same_structure(matrix, GroupCOO.from_dense(3 * dense, group_size=2))
    shifted = dense.roll(1, 0)
    for other in (
        COO.from_dense(dense),
        GroupCOO.from_dense(dense, group_size=3),
        GroupCOO.from_dense(dense, group_size=2, group_dim=1),
        GroupCOO.from_dense(dense, group_size=2, index_dtype=torch.int64),
        GroupCOO.from_dense(shifted, group_size=2),
        GroupCOO.from_dense(torch.nn.functional.pad(dense, (0, 1)), group_size=2),
    ):
        assert not same_structure(matrix, other)
        with pytest.raises(InsumFormatError, match="store different entries"):
            add(matrix, other)
        with pytest.raises(InsumFormatError, match="store different entries"):
            multiply(matrix, other)
    blocks = BlockCOO.from_dense(torch.ones(4, 4), block_shape=(2, 2))
    assert not same_structure(blocks, BlockCOO.from_dense(torch.ones(4, 4), block_shape=(2, 4)))


def test_rows_and_columns():
    matrix = ELL.from_dense(torch.ones(2, 3))
    assert scale_rows(matrix, torch.tensor([2.0, 3.0])).to_dense().tolist() == [[2] * 3, [3] * 3]
    assert scale_cols(matrix, torch.tensor([2.0, 3.0, 4.0])).to_dense().tolist() == [[2, 3, 4]] * 2


@pytest.mark.gpu
@each_format
def test_gpu(entry: Entry, gpu: torch.device):
    matrix = entry.from_dense(sparse_dense((67, 50), dtype=torch.float32).to(gpu))
    assert_multiplied(matrix, torch.randn(67, 50, device=gpu))
    assert_scaled(matrix, 0)
    assert_scaled(matrix, 1)


def test_expressions():
    matrix = GroupCOO.from_dense(torch.eye(2))
    assert multiply_expression(matrix) in inspect.getdoc(multiply)
    assert scale_expression(matrix, 1) in inspect.getdoc(scale)
    blocks = BlockGroupCOO.from_dense(torch.eye(2), block_shape=(1, 1))
    assert multiply_expression(blocks) in inspect.getdoc(multiply)
    insum_nn.compile(multiply_expression(blocks))


MATRIX = COO.from_dense(torch.ones(3, 4))


def test_message_of_a_wrong_extent():
    with pytest.raises(InsumShapeError) as caught:
        multiply(MATRIX, torch.ones(4, 3))
    assert str(caught.value) == (
        "multiply: 'other' has extent 4 along axis 0, the sparse tensor requires 3\n"
        "  D[p] += Val[p] * B[Row[p],Col[p]]\n"
        "                   ^\n"
        "  expected other (B) of shape (3, 4); got (4, 3)\n"
        "  fix: give axis 0 of other the extent 3.\n"
        "also, InsumShapeError: multiply: 'other' has extent 3 along axis 1, the sparse tensor requires 4\n"
        "  D[p] += Val[p] * B[Row[p],Col[p]]\n"
        "                   ^\n"
        "  expected other (B) of shape (3, 4); got (4, 3)\n"
        "  fix: give axis 1 of other the extent 4."
    )


def test_other_arguments_are_refused():
    with pytest.raises(InsumShapeError, match="'vector' has extent 3 along axis 0, the sparse tensor requires 4"):
        scale_cols(MATRIX, torch.ones(3))
    with pytest.raises(InsumShapeError, match="got mode 2 of a tensor with 2 dimensions"):
        scale(MATRIX, torch.ones(3), 2)
    with pytest.raises(InsumFormatError, match="'other' must be a dense tensor, got int"):
        multiply(MATRIX, 3)
    with pytest.raises(InsumFormatError, match="cannot take a Tensor for 'tensor'"):
        multiply(torch.ones(3, 4), MATRIX)
    with pytest.raises(InsumFormatError, match="cannot take a Tensor for 'other'"):
        add(MATRIX, torch.ones(3, 4))
    for function in (add, multiply):
        with pytest.raises(InsumDtypeError, match="'other' is torch.float64, 'tensor' is torch.float32"):
            function(MATRIX, MATRIX.to(dtype=torch.float64))
        with pytest.raises(InsumDeviceError, match="'other' is on meta, 'tensor' on cpu"):
            function(MATRIX, MATRIX.to("meta"))
    with pytest.raises(InsumDtypeError, match="'vector' is torch.float64"):
        scale_rows(MATRIX, torch.ones(3, dtype=torch.float64))
    with pytest.raises(InsumDeviceError, match="'other' is on meta"):
        multiply(MATRIX, torch.ones(3, 4, device="meta"))

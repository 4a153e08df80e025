from __future__ import annotations

import inspect

import pytest
import torch

import insum_nn
from insum_nn.errors import InsumDeviceError, InsumDtypeError, InsumFormatError, InsumShapeError
from insum_nn.formats import COO, ELL, BlockCOO, GroupCOO, SparseFormat
from insum_nn.ops import ttm, ttm_expression
from insum_nn.testing.tolerances import assert_matches
from tests.formats.registry import Entry, random_entries, sparse_dense
from tests.ops.oracle import assert_gradients, assert_same, strided
from tests.ops.tensors import each_nd_format, each_nd_shape


def assert_contracted(tensor: SparseFormat, mode: int, columns: int = 3) -> None:
    reference = tensor.to("cpu", torch.float64)
    assert_same(
        lambda values, u: ttm(tensor.with_values(values), u, mode),
        lambda values, u: torch.movedim(
            torch.tensordot(reference.with_values(values).to_dense(), u, ([mode], [0])), -1, mode
        ),
        [tensor.values, torch.randn(tensor.shape[mode], columns, device=tensor.device).to(tensor.dtype)],
    )


@each_nd_format
@each_nd_shape
def test_value_and_gradients(entry: Entry, shape: tuple[int, ...]):
    tensor = entry.from_dense(sparse_dense(shape))
    for mode in range(len(shape)):
        assert_contracted(tensor, mode)


@each_nd_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(entry: Entry, dtype: torch.dtype):
    tensor = entry.from_dense(sparse_dense((9, 7, 11), dtype=torch.float32).to(dtype))
    assert_contracted(tensor, 0, columns=17)
    assert_contracted(tensor, 2)


@pytest.mark.parametrize("cls", [COO, ELL, GroupCOO])
def test_duplicates(cls: type[COO] | type[ELL] | type[GroupCOO]):
    indices, values = random_entries((5, 6, 3), 40)
    assert_contracted(cls.from_coo(indices, values, (5, 6, 3), coalesce=False), 1)


def test_one_dimension():
    assert_contracted(COO.from_dense(sparse_dense((7,))), 0)


@each_nd_format
def test_no_columns_and_nothing_stored(entry: Entry):
    assert_contracted(entry.from_dense(sparse_dense((3, 4, 2))), 0, columns=0)
    assert_contracted(entry.from_dense(torch.zeros(3, 4, 2, dtype=torch.float64)), 1)


def test_non_contiguous():
    tensor = GroupCOO.from_dense(sparse_dense((5, 6, 4)))
    matrix = torch.randn(4, 3, dtype=torch.float64)
    assert_matches(ttm(tensor, strided(matrix), -1), tensor.to_dense() @ matrix, dtype=torch.float64, kind="sum")


@each_nd_format
def test_finite_differences(entry: Entry):
    tensor = entry.from_dense(sparse_dense((3, 4, 2), density=0.5))
    run = lambda values, u: ttm(tensor.with_values(values), u, 1)  # noqa: E731
    assert_gradients(run, [tensor.values, torch.randn(4, 2)])


@pytest.mark.gpu
@each_nd_format
def test_gpu(entry: Entry, gpu: torch.device):
    tensor = entry.from_dense(sparse_dense((19, 17, 23), dtype=torch.float32).to(gpu))
    for mode in range(3):
        assert_contracted(tensor, mode, columns=16)


def test_expressions():
    assert ttm_expression(GroupCOO.from_dense(torch.ones(1, 1, 1)), 2) in inspect.getdoc(ttm)
    assert ttm_expression(ELL.from_dense(torch.ones(2, 2)), 1) == "Y[m,r] += Val[m,q] * U[Col[m,q],r]"
    insum_nn.compile(ttm_expression(COO.from_dense(torch.ones(1, 1, 1, 1)), 3))


TENSOR = COO.from_dense(torch.ones(2, 3, 4))


def test_message_of_a_wrong_extent():
    with pytest.raises(InsumShapeError) as caught:
        ttm(TENSOR, torch.ones(4, 5), 1)
    assert str(caught.value) == (
        "ttm: 'matrix' has extent 4 along axis 0, the sparse tensor requires 3\n"
        "  Y[Index0[p],r,Index2[p]] += Val[p] * U[Index1[p],r]\n"
        "                                       ^\n"
        "  expected matrix (U) of shape (3, r); got (4, 5)\n"
        "  fix: give axis 0 of matrix the extent 3."
    )


def test_other_arguments_are_refused():
    with pytest.raises(InsumShapeError, match="got mode -4 of a tensor with 3 dimensions"):
        ttm(TENSOR, torch.ones(2, 5), -4)
    with pytest.raises(InsumShapeError, match="'matrix' must have 2 dimensions, got 1"):
        ttm(TENSOR, torch.ones(2), 0)
    with pytest.raises(InsumDtypeError, match="'matrix' is torch.float16"):
        ttm(TENSOR, torch.ones(2, 5).half(), 0)
    with pytest.raises(InsumDeviceError, match="'matrix' is on meta"):
        ttm(TENSOR, torch.ones(2, 5, device="meta"), 0)
    with pytest.raises(InsumFormatError, match="cannot take a BlockCOO for 'tensor'"):
        ttm(BlockCOO.from_dense(torch.ones(2, 2), block_shape=(1, 1)), torch.ones(2, 1), 0)

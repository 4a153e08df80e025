from __future__ import annotations

import inspect
import string
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn.errors import InsumDeviceError, InsumDtypeError, InsumFormatError, InsumShapeError
from insum_nn.formats import COO, ELL, BlockCOO, GroupCOO, SparseFormat
from insum_nn.ops import mttkrp, mttkrp_expression
from insum_nn.testing.tolerances import assert_matches
from tests.formats.registry import Entry, random_entries, sparse_dense
from tests.ops.oracle import assert_gradients, assert_same, strided
from tests.ops.tensors import each_nd_format, each_nd_shape


def dense_mttkrp(dense: Tensor, factors: Sequence[Tensor], mode: int) -> Tensor:
    letters = string.ascii_lowercase[: dense.ndim]
    others = [letter for dim, letter in enumerate(letters) if dim != mode]
    return torch.einsum(f"{letters},{','.join(f'{o}r' for o in others)}->{letters[mode]}r", dense, *factors)


def with_gap(factors: Sequence[Tensor], mode: int) -> list[Tensor | None]:
    return [*factors[:mode], None, *factors[mode:]]


def assert_contracted(tensor: SparseFormat, mode: int, rank: int = 3) -> None:
    dtype, device = tensor.dtype, tensor.device
    extents = [extent for dim, extent in enumerate(tensor.shape) if dim != mode]
    reference = tensor.to("cpu", torch.float64)
    assert_same(
        lambda values, *f: mttkrp(tensor.with_values(values), with_gap(f, mode), mode),
        lambda values, *f: dense_mttkrp(reference.with_values(values).to_dense(), f, mode),
        [tensor.values, *(torch.randn(extent, rank, device=device).to(dtype) for extent in extents)],
        kinds=("gradient", "second"),
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
    assert_contracted(tensor, 0, rank=17)
    assert_contracted(tensor, 2)


@pytest.mark.parametrize("cls", [COO, ELL, GroupCOO])
def test_duplicates(cls: type[COO] | type[ELL] | type[GroupCOO]):
    indices, values = random_entries((5, 6, 3), 40)
    assert_contracted(cls.from_coo(indices, values, (5, 6, 3), coalesce=False), 1)


@each_nd_format
def test_rank_zero_and_nothing_stored(entry: Entry):
    assert_contracted(entry.from_dense(sparse_dense((3, 4, 2))), 0, rank=0)
    assert_contracted(entry.from_dense(torch.zeros(3, 4, 2, dtype=torch.float64)), 1)


def test_non_contiguous():
    tensor = GroupCOO.from_dense(sparse_dense((5, 6, 4)))
    first, second = torch.randn(5, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    found = mttkrp(tensor, [strided(first), None, strided(second)], 1)
    assert_matches(found, dense_mttkrp(tensor.to_dense(), [first, second], 1), dtype=torch.float64, kind="sum")


def test_negative_mode_and_unread_factor():
    tensor = COO.from_dense(sparse_dense((5, 6, 4)))
    factors = [torch.randn(5, 3).double(), torch.randn(6, 3).double(), torch.tensor(torch.nan)]
    assert torch.equal(mttkrp(tensor, factors, -1), mttkrp(tensor, [*factors[:2], None], 2))


@each_nd_format
def test_finite_differences(entry: Entry):
    tensor = entry.from_dense(sparse_dense((3, 4, 2), density=0.5))
    assert_gradients(
        lambda values, a, b: mttkrp(tensor.with_values(values), [a, None, b], 1),
        [tensor.values, torch.randn(3, 2), torch.randn(2, 2)],
    )


@pytest.mark.gpu
@each_nd_format
def test_gpu(entry: Entry, gpu: torch.device):
    tensor = entry.from_dense(sparse_dense((19, 17, 23), dtype=torch.float32).to(gpu))
    for mode in range(3):
        assert_contracted(tensor, mode, rank=16)


def test_expressions():
    assert mttkrp_expression(GroupCOO.from_dense(torch.ones(1, 1, 1)), 0) in inspect.getdoc(mttkrp)
    matrix = ELL.from_dense(torch.ones(2, 2))
    assert mttkrp_expression(matrix, 1) == "M[Col[m,q],r] += Val[m,q] * F0[m,r]"
    insum_nn.compile(mttkrp_expression(COO.from_dense(torch.ones(1, 1, 1, 1)), 3))


TENSOR = COO.from_dense(torch.ones(2, 3, 4))


def test_message_of_unequal_ranks():
    with pytest.raises(InsumShapeError) as caught:
        mttkrp(TENSOR, [None, torch.ones(3, 5), torch.ones(4, 6)], 0)
    assert str(caught.value) == (
        "mttkrp: 'factors[2]' has extent 6 along axis 1, 'factors[1]' requires 5\n"
        "  M[Index0[p],r] += Val[p] * F1[Index1[p],r] * F2[Index2[p],r]\n"
        "                                               ^^\n"
        "  expected factors[2] (F2) of shape (4, 5); got (4, 6)\n"
        "  fix: give axis 1 of factors[2] the extent 5."
    )


def test_other_arguments_are_refused():
    good = [torch.ones(2, 5), torch.ones(3, 5), torch.ones(4, 5)]
    with pytest.raises(InsumShapeError, match="got 2 factors for a tensor with 3 dimensions"):
        mttkrp(TENSOR, good[:2], 0)
    with pytest.raises(InsumShapeError, match="got mode 3 of a tensor with 3 dimensions"):
        mttkrp(TENSOR, good, 3)
    with pytest.raises(InsumShapeError, match="got mode True"):
        mttkrp(TENSOR, good, True)
    with pytest.raises(InsumFormatError, match=r"'factors\[1\]' must be a dense tensor, got NoneType"):
        mttkrp(TENSOR, [good[0], None, good[2]], 0)
    with pytest.raises(InsumDtypeError, match=r"'factors\[1\]' is torch.float64"):
        mttkrp(TENSOR, [None, good[1].double(), good[2]], 0)
    with pytest.raises(InsumDeviceError, match=r"'factors\[1\]' is on meta"):
        mttkrp(TENSOR, [None, good[1].to("meta"), good[2]], 0)
    with pytest.raises(InsumShapeError, match="two dimensions or more"):
        mttkrp(COO.from_dense(torch.ones(3)), [None], 0)
    with pytest.raises(InsumFormatError, match=r"(?s)cannot take a BlockCOO.*GroupCOO.from_coo\(tensor\)"):
        mttkrp(BlockCOO.from_dense(torch.ones(2, 2), block_shape=(1, 1)), [None, torch.ones(2, 1)], 0)

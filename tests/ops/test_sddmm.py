from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import Options
from insum_nn.errors import InsumDeviceError, InsumDtypeError, InsumFormatError, InsumShapeError
from insum_nn.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO, SparseFormat
from insum_nn.ops import sddmm, sddmm_expression, spmm
from insum_nn.ops.sddmm import SDDMM
from insum_nn.testing.tolerances import assert_matches
from tests.formats.registry import REGISTRY, SHAPES, Entry, random_entries, sparse_dense
from tests.ops.oracle import assert_gradients, assert_same, strided

each_format = pytest.mark.parametrize("entry", REGISTRY, ids=lambda e: e.name)


def assert_sampled(pattern: SparseFormat, a: Tensor, b: Tensor) -> None:
    """Against the dense product times the dense pattern; padding must come back as it was, zero."""
    reference = pattern.to("cpu", torch.float64)
    assert_same(
        lambda values, a, b: sddmm(pattern.with_values(values), a, b).to_dense(),
        lambda values, a, b: reference.with_values(values).to_dense() * (a @ b),
        [pattern.values, a, b],
        kinds=("gradient", "second"),
    )
    sampled = sddmm(pattern, a, b)
    assert type(sampled) is type(pattern)
    assert all(x.tensor is y.tensor for x, y in zip(sampled.index_parts, pattern.index_parts, strict=True))
    assert sampled.facts == pattern.facts
    sampled.validate()


@each_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("inner", [1, 6, 0])
def test_value_and_gradients(entry: Entry, shape: tuple[int, int], inner: int):
    a = torch.randn(shape[0], inner, dtype=torch.float64)
    b = torch.randn(inner, shape[1], dtype=torch.float64)
    assert_sampled(entry.from_dense(sparse_dense(shape)), a, b)


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(entry: Entry, dtype: torch.dtype):
    pattern = entry.from_dense(sparse_dense((37, 50), dtype=torch.float32).to(dtype))
    assert_sampled(pattern, torch.randn(37, 19).to(dtype), torch.randn(19, 50).to(dtype))


@each_format
def test_nothing_stored(entry: Entry):
    pattern = entry.from_dense(torch.zeros(7, 5, dtype=torch.float64))
    assert_sampled(pattern, torch.randn(7, 3, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64))


@each_format
def test_non_contiguous(entry: Entry):
    a, key = torch.randn(13, 6, dtype=torch.float64), torch.randn(11, 6, dtype=torch.float64)
    pattern = entry.from_dense(sparse_dense((13, 11)))
    assert_sampled(pattern, strided(a), key.T)
    assert_sampled(pattern.with_values(strided(pattern.values)), a, strided(key.T.contiguous()))


@pytest.mark.parametrize("cls", [COO, ELL, GroupCOO])
def test_each_duplicate_is_sampled(cls: type[COO] | type[ELL] | type[GroupCOO]):
    indices, values = random_entries((9, 6), 40)
    pattern = cls.from_coo(indices, values, (9, 6), coalesce=False)
    assert_sampled(pattern, torch.randn(9, 4, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64))


@pytest.mark.parametrize("block_shape", [(1, 1), (2, 5), (32, 32)], ids=str)
@pytest.mark.parametrize("cls", [BlockCOO, BlockGroupCOO])
def test_ragged_blocks(cls: type[BlockCOO] | type[BlockGroupCOO], block_shape: tuple[int, int]):
    pattern = cls.from_dense(sparse_dense((21, 34), density=0.1), block_shape=block_shape)
    assert_sampled(pattern, torch.randn(21, 7, dtype=torch.float64), torch.randn(7, 34, dtype=torch.float64))


@each_format
def test_finite_differences(entry: Entry):
    pattern = entry.from_dense(sparse_dense((4, 5), density=0.5))
    assert_gradients(
        lambda values, a, b: sddmm(pattern.with_values(values), a, b).values,
        [pattern.values, torch.randn(4, 3), torch.randn(3, 5)],
    )


def test_attention():
    """What the operator is for: score along the edges, then gather by the scores."""
    edges = GroupCOO.from_dense((sparse_dense((8, 8)) != 0).double())
    query, key, value = (torch.randn(8, 4, dtype=torch.float64) for _ in range(3))
    result = spmm(sddmm(edges, query, key.T), value)
    assert_matches(result, (edges.to_dense() * (query @ key.T)) @ value, dtype=torch.float64, kind="second")


@each_format
def test_backends_agree(entry: Entry):
    pattern = entry.from_dense(sparse_dense((13, 11)))
    a, b = torch.randn(13, 3, dtype=torch.float64), torch.randn(3, 11, dtype=torch.float64)
    chosen = sddmm(pattern, a, b).values
    for options in (Options(backend="eager"), Options(order="left")):
        assert_matches(sddmm(pattern, a, b, options=options).values, chosen, dtype=torch.float64, kind="sum")


@pytest.mark.gpu
@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gpu(entry: Entry, dtype: torch.dtype, gpu: torch.device):
    pattern = entry.from_dense(sparse_dense((67, 50), dtype=torch.float32).to(gpu, dtype))
    a, b = torch.randn(67, 33, device=gpu), torch.randn(33, 50, device=gpu)
    assert_sampled(pattern, a.to(dtype), b.to(dtype))


def test_expressions_are_those_of_the_docstring():
    text = inspect.getdoc(sddmm)
    for expression in SDDMM.values():
        assert expression in text
        insum_nn.compile(expression)
    assert sddmm_expression(COO.from_dense(torch.eye(2))) == SDDMM["COO"]


PATTERN = COO.from_dense(torch.ones(3, 4))


def test_message_of_unequal_inner_extents():
    with pytest.raises(InsumShapeError) as caught:
        sddmm(PATTERN, torch.ones(3, 2), torch.ones(5, 4))
    assert str(caught.value) == (
        "sddmm: 'b' has extent 5 along axis 0, 'a' requires 2\n"
        "  D[p] += Val[p] * A[Row[p],k] * Bt[Col[p],k]\n"
        "                                 ^^\n"
        "  expected b (Bt) of shape (2, 4); got (5, 4)\n"
        "  fix: give axis 0 of b the extent 2."
    )


def test_other_arguments_are_refused():
    with pytest.raises(InsumShapeError, match=r"'a' has extent 4 along axis 0, the sparse tensor requires 3"):
        sddmm(PATTERN, torch.ones(4, 2), torch.ones(2, 4))
    with pytest.raises(InsumShapeError, match="'b' must have 2 dimensions, got 1"):
        sddmm(PATTERN, torch.ones(3, 2), torch.ones(2))
    with pytest.raises(InsumDtypeError, match="'b' is torch.float64, the sparse values are torch.float32"):
        sddmm(PATTERN, torch.ones(3, 2), torch.ones(2, 4, dtype=torch.float64))
    with pytest.raises(InsumDeviceError, match="'a' is on meta"):
        sddmm(PATTERN, torch.ones(3, 2, device="meta"), torch.ones(2, 4))
    with pytest.raises(InsumFormatError, match="cannot take a Tensor for 'pattern'"):
        sddmm(torch.eye(3), torch.ones(3, 2), torch.ones(2, 3))
    with pytest.raises(InsumShapeError, match="takes a matrix for 'pattern'"):
        sddmm(COO.from_dense(torch.ones(2, 2, 2)), torch.ones(2, 1), torch.ones(1, 2))


@pytest.mark.parametrize("kind", [ELL, GroupCOO])
def test_an_unused_slot_stays_zero_where_a_row_is_infinite(kind: type[ELL | GroupCOO]):
    dense = torch.tensor([[1.0, 2.0, 3.0], [0.0, 4.0, 0.0]])
    pattern = kind.from_dense(dense)
    if kind is GroupCOO:
        pattern = GroupCOO.from_dense(dense, group_size=2)
    a, b = torch.full((2, 2), float("inf"), requires_grad=True), torch.ones(2, 3, requires_grad=True)
    found = sddmm(pattern, a, b).values
    unused = pattern.values == 0
    assert unused.any()
    assert not found[unused].any()
    assert found[~unused].isinf().all()
    (of_b,) = torch.autograd.grad(found.sum(), b)
    assert not of_b.isnan().any()

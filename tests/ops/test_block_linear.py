"""The block-sparse linear map against a dense one in float64: values, first and second derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from insum_nn.compiler.api import Explanation, statement_calls
from insum_nn.compiler.options import Options
from insum_nn.errors import InsumDeviceError, InsumDtypeError, InsumFormatError, InsumShapeError
from insum_nn.formats import COO, BlockCOO, BlockGroupCOO
from insum_nn.ops.block_linear import (
    BLOCK_LINEAR,
    block_linear,
    block_linear_expression,
    block_linear_stored,
)
from insum_nn.testing.tolerances import assert_matches
from tests.ops.oracle import assert_gradients, assert_same, strided

# out_features, in_features, block shape, density of blocks
SHAPES = [
    (8, 8, (4, 4), 0.5),
    (13, 21, (4, 5), 0.5),
    (5, 40, (8, 16), 0.6),
    (40, 5, (16, 8), 0.6),
    (1, 1, (1, 1), 1.0),
    (7, 9, (1, 1), 0.4),
    (5, 6, (1, 3), 0.5),
    (64, 96, (32, 32), 0.3),
    (130, 70, (128, 64), 0.5),
    (9, 7, (3, 2), 0.0),
    (0, 6, (2, 2), 0.0),
    (6, 0, (2, 2), 0.0),
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
BOTH = [BlockCOO, BlockGroupCOO]


def block_weight(
    shape: tuple[int, int, tuple[int, int], float], dtype: torch.dtype = torch.float64, group: int | None = None
) -> BlockCOO | BlockGroupCOO:
    m, k, (a, b), density = shape
    mask = torch.rand(-(-m // a), -(-k // b)) < density
    dense = torch.randn(m, k, dtype=torch.float64).to(dtype)
    if group is None:
        return BlockCOO.from_dense(dense, block_shape=(a, b), mask=mask)
    return BlockGroupCOO.from_dense(dense, block_shape=(a, b), mask=mask, group_size=group)


def explained(*call: Any) -> Explanation:
    return statement_calls(lambda: block_linear_stored(*call))[-1].explain()


def assert_linear(weight: BlockCOO | BlockGroupCOO, x: Tensor, bias: Tensor | None) -> None:
    own = weight.to("cpu", torch.float64)
    leaves = [weight.values, x] + ([] if bias is None else [bias])
    assert_same(
        lambda values, x, *rest: block_linear(x, weight.with_values(values), *rest),
        lambda values, x, *rest: functional.linear(x, own.with_values(values).to_dense(), *rest),
        leaves,
    )


@each_shape
@pytest.mark.parametrize("group", [None, 1, 2, 3])
@pytest.mark.parametrize("lead", [(), (3,), (2, 5), (0,), (2, 0, 3)], ids=str)
def test_value_and_gradients(shape, group, lead):
    m, k = shape[:2]
    weight = block_weight(shape, group=group)
    assert_linear(weight, torch.randn(*lead, k, dtype=torch.float64), torch.randn(m, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [None, 2])
def test_dtypes(dtype, group):
    weight = block_weight((37, 50, (8, 16), 0.5), dtype, group)
    assert_linear(weight, torch.randn(17, 50).to(dtype), torch.randn(37).to(dtype))


@pytest.mark.parametrize("group", [None, 2])
def test_non_contiguous(group):
    weight = block_weight((13, 21, (4, 5), 0.5), group=group)
    x = strided(torch.randn(6, 21, dtype=torch.float64))
    assert not x.is_contiguous()
    assert_linear(weight, x, None)
    assert_linear(weight, torch.randn(21, 4, 3, dtype=torch.float64).movedim(0, -1), None)
    assert_linear(weight.with_values(strided(weight.values)), x, None)
    assert block_linear(x, weight).is_contiguous()


@pytest.mark.parametrize("group", [None, 2])
def test_finite_differences(group):
    weight = block_weight((5, 6, (2, 4), 0.7), group=group)
    assert_gradients(
        lambda v, x, b: block_linear(x, weight.with_values(v), b), [weight.values, torch.randn(3, 6), torch.randn(5)]
    )


def test_second_derivatives_equal_the_dense_ones():
    weight = block_weight((13, 21, (4, 5), 0.5))
    x = torch.randn(7, 21, dtype=torch.float64)
    results: list[list[Tensor]] = []
    for run in (
        lambda x, v: block_linear(x, weight.with_values(v)),
        lambda x, v: x @ weight.with_values(v).to_dense().T,
    ):
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight.values)]
        first = torch.autograd.grad(run(*leaves).pow(3).sum(), leaves, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert_matches(ours, theirs, dtype=torch.float64, kind="second")


def test_stored_blocks_with_slots_equal_their_format():
    groups = block_weight((13, 21, (4, 5), 0.6), group=2)
    blocks = groups.blocks()
    slot = torch.full(groups.col.shape, -1)
    slot[groups.col >= 0] = torch.arange(blocks.num_blocks)
    index = {"Row": groups.row, "Col": groups.col, "Slot": slot.to(torch.int32)}
    assert (slot < 0).any(), "the case must have an unused slot"
    x = torch.randn(6, 21, dtype=torch.float64)
    assert_same(
        lambda values, x: block_linear_stored(x, values, index, groups.shape),
        lambda values, x: x @ blocks.with_values(values).to_dense().T,
        [blocks.values, x],
    )


@pytest.mark.library_calls
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("side", "share", "dense"), [(16, 0.5, True), (16, 0.1, False), (64, 0.5, False)])
def test_many_blocks_are_multiplied_as_a_dense_weight(side: int, share: float, dense: bool, bias: bool):
    """The numbers are those of the dense weight in float64, and what is explained are the two statements that run."""
    grid, samples = 256 // side, 512
    mask = torch.zeros(grid * grid, dtype=torch.bool)
    mask[torch.randperm(grid * grid)[: int(share * grid * grid)]] = True
    row, col = mask.reshape(grid, grid).nonzero(as_tuple=True)
    index = {"Row": row, "Col": col}
    leaves = [torch.randn(samples, 256), torch.randn(row.shape[0], side, side)]
    leaves += [torch.randn(256)] if bias else []

    def exact(x: Tensor, values: Tensor, *rest: Tensor) -> Tensor:
        tiles = x.new_zeros(grid, grid, side, side).index_put((row, col), values)
        return functional.linear(x, tiles.transpose(1, 2).reshape(256, 256), *rest)

    assert_same(lambda x, values, *rest: block_linear_stored(x, values, index, (256, 256), *rest), exact, leaves)
    explanation = explained(*leaves[:2], index, (256, 256))
    ran = [str(part.statement) for part in explanation.parts]
    assert ran == (["T[Row[p],a,Col[p],b] += W[p,a,b]", "Y[n,i,a] += T[i,a,j,b] * X_read[n,j,b]"] if dense else [])
    compiled = torch.compile(
        lambda x, w: block_linear_stored(x, w, index, (256, 256)), backend="aot_eager", fullgraph=True
    )
    want = block_linear_stored(*leaves[:2], index, (256, 256), options=Options(backend="eager"))
    torch.testing.assert_close(compiled(*leaves[:2]), want, atol=1e-3, rtol=1e-3)
    assert not explained(leaves[0][:9], leaves[1], index, (256, 256)).parts


def test_a_feature_that_no_block_reads_does_not_count():
    weight = BlockCOO.from_dense(torch.ones(2, 4), block_shape=(2, 2), mask=torch.tensor([[True, False]]))
    x = torch.tensor([[1.0, 2.0, torch.nan, torch.inf]])
    assert block_linear(x, weight).tolist() == [[3.0, 3.0]]
    x[0, 0] = torch.nan
    assert block_linear(x, weight).isnan().all()


@pytest.mark.library_calls
def test_no_grid_wide_intermediate_in_the_statement():
    """What is gathered has a cell per stored block and input row, never one per place of the grid."""
    weight = block_weight((64, 96, (8, 8), 0.1))
    assert weight.num_blocks < 96
    index = {"Row": weight.row, "Col": weight.col}
    text = str(explained(torch.randn(5, 96, dtype=torch.float64), weight.values, index, weight.shape))
    assert "torch.matmul" in text


@pytest.mark.parametrize(
    "options", [Options(backend="eager"), Options(deterministic=True), Options(validate=True)], ids=str
)
def test_options(options):
    weight = block_weight((13, 21, (4, 5), 0.5))
    x = torch.randn(3, 21, dtype=torch.float64)
    assert_matches(block_linear(x, weight, options=options), x @ weight.to_dense().T, dtype=torch.float64, kind="sum")


@pytest.mark.library_calls
@pytest.mark.parametrize("density", [0.01, 0.5])
def test_single_numbers_are_a_plain_sparse_matrix(density: float):
    """No dense matrix is made at each call."""
    weight = block_weight((200, 150, (1, 1), density), torch.float32)
    index = {part.name: part.tensor for part in weight.index_parts}
    explained_call = explained(torch.randn(64, 150), weight.values, index, weight.shape)
    assert str(explained_call.statement) == "Y[n,Row[p]] += W[p] * X[n,Col[p]]"
    assert "combine: scatter" in str(explained_call)


def test_expressions():
    assert block_linear_expression(block_weight((4, 4, (1, 1), 1.0))) == "Y[n,Row[p]] += W[p] * X[n,Col[p]]"
    grouped = block_weight((4, 4, (1, 1), 1.0), group=2)
    assert block_linear_expression(grouped) == "Y[n,Row[g]] += W[g,q] * X[n,Col[g,q]]"
    assert block_linear_expression(block_weight(SHAPES[0])) == BLOCK_LINEAR["BlockCOO"]
    assert block_linear_expression(block_weight(SHAPES[0], group=2)) == BLOCK_LINEAR["BlockGroupCOO"]


def test_wrong_features():
    weight = block_weight(SHAPES[1])
    with pytest.raises(InsumShapeError) as caught:
        block_linear(torch.randn(3, 20, dtype=torch.float64), weight)
    assert str(caught.value) == (
        "block_linear: 'input' has 20 features, the weight reads 21\n"
        "  Y[n,Row[p],a] += W[p,a,b] * X[n,Col[p],b]\n"
        "                              ^\n"
        "  expected shape (..., 21); got (3, 20)\n"
        "  fix: pass an input whose last dimension is 21."
    )


def test_wrong_dtypes():
    weight = block_weight(SHAPES[1])
    with pytest.raises(InsumDtypeError) as caught:
        block_linear(torch.randn(3, 21), weight)
    assert str(caught.value) == (
        "block_linear: 'input' is torch.float32, the weight is torch.float64\n"
        "  Y[n,Row[p],a] += W[p,a,b] * X[n,Col[p],b]\n"
        "                   ^          ^\n"
        "  fix: pass input.to(torch.float64), or run under torch.autocast."
    )
    with pytest.raises(InsumDtypeError, match="must be floating, got torch.int64"):
        block_linear(torch.ones(3, 21, dtype=torch.int64), weight)


def test_all_faults_are_named():
    weight = block_weight(SHAPES[1])
    with pytest.raises(InsumShapeError) as caught:
        block_linear(torch.randn(()), weight, torch.randn(12, dtype=torch.float64))
    text = str(caught.value)
    assert "'input' has no features" in text
    assert "'bias' has shape (12,)" in text
    assert "'input' is torch.float32" in text


def test_other_device():
    weight = block_weight(SHAPES[1])
    with pytest.raises(InsumDeviceError, match="'weight' is on cpu, 'input' on meta"):
        block_linear(torch.randn(3, 21, dtype=torch.float64, device="meta"), weight)


def test_no_format_of_blocks():
    with pytest.raises(InsumFormatError, match=r"(?s)cannot take a COO for 'weight'.*BlockGroupCOO.from_coo\(weight\)"):
        block_linear(torch.randn(3, 2), COO.from_dense(torch.eye(2)))


def test_on_each_device(device):
    weight = block_weight((37, 50, (8, 16), 0.5), torch.float32, 2).to(device)
    assert_linear(weight, torch.randn(17, 50, device=device), torch.randn(37, device=device))

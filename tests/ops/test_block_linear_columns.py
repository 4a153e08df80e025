"""The linear map of blocks on transposed samples against a dense one, and when it is taken."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from insum_nn.compiler.api import statement_calls, takes_columns
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.formats import BlockCOO
from insum_nn.ops.block_linear import BlockColumns, block_linear_stored
from insum_nn.testing.tolerances import assert_matches
from tests.ops.oracle import assert_same

# block rows, block columns, block shape, samples
SHAPES = [(3, 5, (4, 6), 17), (1, 1, (8, 8), 1), (4, 2, (3, 5), 0), (2, 7, (16, 1), 5)]


def blocks(
    rows: int, cols: int, shape: tuple[int, int], *, share: float = 0.6, **kind: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks in random places, one block row without any, and their values."""
    mask = torch.rand(rows, cols) < share
    mask[rows // 2] = False
    mask[0, 0] = True
    row, col = mask.nonzero(as_tuple=True)
    return row, col, torch.randn(row.shape[0], *shape, **kind)  # type: ignore[call-overload]


def tiles(values: Tensor, row: Tensor, col: Tensor, grid: tuple[int, int]) -> Tensor:
    """The dense matrix, by torch alone."""
    a, b = values.shape[-2:]
    dense = values.new_zeros(*grid, a, b).index_put((row, col), values)
    return dense.permute(0, 2, 1, 3).reshape(grid[0] * a, grid[1] * b)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_derivatives_equal_the_dense_product(shape):
    rows, cols, block, samples = shape
    row, col, weight = blocks(rows, cols, block, dtype=torch.float64)
    x = torch.randn(samples, cols * block[1], dtype=torch.float64)
    form = BlockColumns(row, col, (rows, cols), DEFAULT)
    assert_same(lambda x, w: form(x, w), lambda x, w: x @ tiles(w, row, col, (rows, cols)).t(), [x, weight])


def test_the_second_derivative_is_right():
    row, col, weight = blocks(3, 4, (2, 3), dtype=torch.float64)
    x = torch.randn(5, 12, dtype=torch.float64)
    form = BlockColumns(row, col, (3, 4), DEFAULT)
    assert torch.autograd.gradgradcheck(form, (x.requires_grad_(), weight.requires_grad_()), fast_mode=True)


def test_rows_start_from_a_bias():
    row, col, weight = blocks(3, 4, (2, 3), dtype=torch.float64)
    x, bias = torch.randn(5, 12, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    form = BlockColumns(row, col, (3, 4), DEFAULT)
    dense = lambda x, w, b: x @ tiles(w, row, col, (3, 4)).t() + b  # noqa: E731
    assert_same(lambda x, w, b: form(x, w, b.reshape(3, 2)), dense, [x, weight, bias])
    leaves = [x.requires_grad_(), weight.requires_grad_(), bias.reshape(3, 2).requires_grad_()]
    assert torch.autograd.gradgradcheck(form, leaves, fast_mode=True)


def test_transforms():
    """Whoever looks on is shown the compiler's operator."""
    row, col, weight = blocks(3, 4, (2, 3), dtype=torch.float64)
    x, bias = torch.randn(5, 12, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    form = BlockColumns(row, col, (3, 4), DEFAULT)

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return x @ tiles(weight, row, col, (3, 4)).t() + bias.reshape(-1)

    arguments = (x, weight, bias)
    for found, right in zip(
        torch.func.jacrev(form, (0, 1, 2))(*arguments), torch.func.jacrev(plain, (0, 1, 2))(*arguments), strict=True
    ):
        torch.testing.assert_close(found, right)
    torch.testing.assert_close(
        torch.func.vmap(form, (0, None, None))(x[:, None], weight, bias), plain(x, weight, bias)[:, None]
    )


@pytest.mark.parametrize("learned", [("x",), ("w",), ("x", "w")])
def test_only_what_gradients_read_is_kept(learned: tuple[str, ...]):
    row, col, weight = blocks(3, 4, (2, 3), dtype=torch.float64)
    x = torch.randn(5, 12, dtype=torch.float64).requires_grad_("x" in learned)
    result = BlockColumns(row, col, (3, 4), DEFAULT)(x, weight.requires_grad_("w" in learned))
    kept = [t.data_ptr() for t in result.grad_fn.saved_tensors if t is not None]  # type: ignore[union-attr]
    assert (x.data_ptr() in kept) == ("w" in learned)
    assert (weight.data_ptr() in kept) == ("x" in learned)


def test_calls_of_other_kinds_follow_one_another():
    """The same places in a larger grid, and the same shapes in another dtype, with or without a bias."""
    row, col, _ = blocks(3, 4, (2, 3))
    for grid in ((3, 4), (5, 4), (3, 6), (3, 4)):
        form = BlockColumns(row, col, grid, DEFAULT)
        for dtype, samples in itertools.product((torch.float32, torch.float64, torch.float16, torch.float32), (5, 4)):
            weight, x = torch.randn(row.shape[0], 2, 3).to(dtype), torch.randn(samples, grid[1] * 3).to(dtype)
            bias = torch.randn(grid[0], 2).to(dtype)
            want = x.double() @ tiles(weight.double(), row, col, grid).t()
            assert_matches(form(x, weight), want, dtype=dtype, kind="sum")
            assert_matches(form(x, weight, bias), want + bias.double().reshape(-1), dtype=dtype, kind="sum")


def test_a_cpu_and_small_problems_go_the_other_way():
    assert not takes_columns(torch.randn(512, 32), torch.randn(2, 16, 16), (2, 2), DEFAULT)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # the oracle's, in a thread that ran none yet
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_the_layers_product_on_a_gpu(dtype, bias):
    # Few enough that the dense product is not taken.
    row, col, weight = (t.cuda() for t in blocks(7, 5, (32, 32), share=0.15))
    weight = (weight / 8).to(dtype)
    shape = (7 * 32 - 9, 5 * 32 - 3)
    x, b = torch.randn(2, 150, shape[1], device="cuda").to(dtype), torch.randn(shape[0], device="cuda").to(dtype)
    leaves = [x, weight, *([b] if bias else [])]
    for leaf in leaves:
        leaf.requires_grad_()
    index = {"Row": row, "Col": col}
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wide = tiles(exact[1], row, col, (7, 5))[: shape[0], : shape[1]]
    requested = functional.linear(exact[0], wide, exact[2] if bias else None)
    found = block_linear_stored(x, weight, index, shape, b if bias else None)
    sent = torch.randn_like(found)
    got = torch.autograd.grad(found, leaves, sent)
    right = torch.autograd.grad(requested, exact, sent.double())
    close = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}[dtype]
    for a, e in zip((found, *got), (requested, *right), strict=True):
        assert (a.double() - e).abs().max() <= close * e.abs().max()
    assert "X[Col[p],b,n]" in str(statement_calls(lambda: block_linear_stored(x, weight, index, shape))[-1].explain())


@pytest.mark.gpu
def test_autocast_and_compilation_on_a_gpu():
    row, col, weight = (t.cuda() for t in blocks(4, 4, (32, 32)))
    x = torch.randn(300, 128, device="cuda")
    index = {"Row": row, "Col": col}
    dense = tiles(weight, row, col, (4, 4))
    with torch.autocast("cuda", dtype=torch.float16):
        found = block_linear_stored(x, weight, index, (128, 128))
        assert found.dtype == torch.float16
    assert torch.allclose(found.float(), x @ dense.t(), atol=0.1, rtol=0.02)
    compiled = torch.compile(lambda x: block_linear_stored(x, weight, index, (128, 128)), fullgraph=True)
    assert torch.allclose(compiled(x), x @ dense.t(), atol=1e-3)


def test_formats_are_not_affected():
    weight = BlockCOO.from_dense(torch.randn(64, 64), block_shape=(16, 16))
    index = {part.name: part.tensor for part in weight.index_parts}
    x = torch.randn(300, 64)
    found = block_linear_stored(x, weight.values, index, (64, 64), options=Options())
    assert torch.allclose(found, x @ weight.to_dense().t(), atol=1e-4)

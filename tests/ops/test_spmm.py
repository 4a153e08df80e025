from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import Options
from insum_nn.errors import (
    InsumDeviceError,
    InsumDtypeError,
    InsumFormatError,
    InsumRangeError,
    InsumShapeError,
)
from insum_nn.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO, SparseFormat
from insum_nn.ops import arguments, contract, sddmm, spmm, spmm_expression, spmm_program
from insum_nn.ops.spmm import SPMM
from insum_nn.testing.tolerances import assert_matches
from tests.formats.registry import NOT_DENSE, REGISTRY, SHAPES, Entry, random_entries, sparse_dense
from tests.ops.oracle import assert_gradients, assert_same, strided

each_format = pytest.mark.parametrize("entry", REGISTRY, ids=lambda e: e.name)


def assert_product(matrix: SparseFormat, dense: Tensor) -> None:
    assert_same(
        lambda values, operand: spmm(matrix.with_values(values), operand),
        lambda values, operand: matrix.to("cpu", torch.float64).with_values(values).to_dense() @ operand,
        [matrix.values, dense],
    )


@each_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("columns", [(), (1,), (5,), (0,)], ids=str)
def test_value_and_gradients(entry: Entry, shape: tuple[int, int], columns: Sequence[int]):
    matrix = entry.from_dense(sparse_dense(shape))
    assert_product(matrix, torch.randn(shape[1], *columns, dtype=torch.float64))


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(entry: Entry, dtype: torch.dtype):
    matrix = entry.from_dense(sparse_dense((37, 50), dtype=torch.float32).to(dtype))
    assert_product(matrix, torch.randn(50, 17).to(dtype))
    assert_product(matrix, torch.randn(50).to(dtype))


@each_format
def test_nothing_stored(entry: Entry):
    matrix = entry.from_dense(torch.zeros(7, 5, dtype=torch.float64))
    assert_product(matrix, torch.randn(5, 3, dtype=torch.float64))


@each_format
def test_non_contiguous(entry: Entry):
    matrix = entry.from_dense(sparse_dense((13, 11)))
    dense = strided(torch.randn(11, 6, dtype=torch.float64))
    assert not dense.is_contiguous()
    assert_product(matrix, dense)
    values = strided(matrix.values)
    assert torch.equal(values, matrix.values)
    assert_product(matrix.with_values(values), dense)
    assert spmm(matrix, dense).is_contiguous()


@pytest.mark.parametrize("cls", [COO, ELL, GroupCOO])
def test_duplicates(cls: type[COO] | type[ELL] | type[GroupCOO]):
    indices, values = random_entries((9, 6), 40)
    matrix = cls.from_coo(indices, values, (9, 6), coalesce=False)
    assert matrix.nnz == 40
    assert_product(matrix, torch.randn(6, 4, dtype=torch.float64))


@pytest.mark.parametrize("cls", [BlockCOO, BlockGroupCOO])
def test_duplicate_blocks(cls: type[BlockCOO] | type[BlockGroupCOO]):
    row, col = torch.tensor([2, 0, 2, 1, 2]), torch.tensor([1, 0, 1, 1, 0])
    matrix = cls.from_blocks(row, col, torch.randn(5, 3, 2, dtype=torch.float64), (8, 3), coalesce=False)
    assert_product(matrix, torch.randn(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("block_shape", [(1, 1), (2, 5), (16, 3), (32, 32)], ids=str)
@pytest.mark.parametrize("cls", [BlockCOO, BlockGroupCOO])
def test_ragged_blocks(cls: type[BlockCOO] | type[BlockGroupCOO], block_shape: tuple[int, int]):
    matrix = cls.from_dense(sparse_dense((21, 34), density=0.1), block_shape=block_shape)
    assert_product(matrix, torch.randn(34, 7, dtype=torch.float64))


@pytest.mark.parametrize(("shape", "rows"), [((21, 34), 4), ((16, 9), 16), ((5, 7), 3), ((0, 4), 2)], ids=str)
def test_row_blocks_times_two_dense_matrices(shape: tuple[int, int], rows: int):
    a = sparse_dense(shape, density=0.1)
    blocks = BlockGroupCOO.from_dense(a, block_shape=(rows, 1), group_size=3)
    # The distinct columns of each block of rows, each of them once.
    for block, part in enumerate(a.split(rows)):
        stored = blocks.col[blocks.row == block]
        assert stored[stored >= 0].tolist() == part.ne(0).any(0).nonzero().squeeze(1).tolist()
    statement = "Y[Row[g],a,h] += Val[g,q,a,b] * X[Col[g,q],b,f] * W[f,h]"

    def run(values: Tensor, x: Tensor, w: Tensor) -> Tensor:
        out_shape = (blocks.grid_shape[0], rows, w.shape[1])
        matrix = blocks.with_values(values)
        return contract(statement, matrix, X=x[:, None], W=w, out_shape=out_shape).flatten(0, 1)[: shape[0]]

    def oracle(values: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return blocks.with_values(values).to_dense() @ x @ w

    assert_same(run, oracle, [blocks.values, torch.randn(shape[1], 5).double(), torch.randn(5, 2).double()])


@each_format
def test_int64_indices(entry: Entry):
    matrix = entry.from_dense(sparse_dense((8, 9)), index_dtype=torch.int64)
    assert_product(matrix, torch.randn(9, 4, dtype=torch.float64))


@each_format
def test_finite_differences(entry: Entry):
    matrix = entry.from_dense(sparse_dense((5, 4), density=0.5))
    run = lambda values, dense: spmm(matrix.with_values(values), dense)  # noqa: E731
    assert_gradients(run, [matrix.values, torch.randn(4, 3)])
    assert_gradients(run, [matrix.values, torch.randn(4)])


@pytest.mark.parametrize("entry", [e for e in REGISTRY if not issubclass(e.cls, (BlockCOO, BlockGroupCOO))], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_unused_slots_read_nothing(entry: Entry, bad: float):
    dense = torch.ones(4, 5, dtype=torch.float64)
    dense[2, :] = dense[:, 0] = 0
    dense[3, 2:4] = 0
    matrix = entry.from_dense(dense)
    operand = torch.ones(5, 2, dtype=torch.float64)
    operand[0] = bad
    assert_matches(spmm(matrix, operand), dense[:, 1:] @ operand[1:], dtype=torch.float64, kind="sum")


def test_raw_indices_without_facts_are_proven_at_the_call():
    row, col = torch.tensor([2, 0]), torch.tensor([1, 3])
    matrix = COO((3, 4), (row, col), torch.ones(2))
    assert spmm(matrix, torch.eye(4)).tolist() == [[0, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]]
    outside = COO((3, 4), (row, torch.tensor([1, 4])), torch.ones(2))
    with pytest.raises(InsumRangeError, match="col: expected 0 <= col"):
        spmm(outside, torch.eye(4))


def test_unsorted_groups():
    ordered = GroupCOO.from_dense(sparse_dense((9, 7)), group_size=2)
    order = torch.randperm(ordered.num_groups)
    shuffled = GroupCOO(ordered.shape, 0, ordered.row[order], (ordered.col[order],), ordered.values[order]).validate()
    assert_product(shuffled, torch.randn(7, 3, dtype=torch.float64))


def test_a_row_of_many_entries():
    dense = torch.zeros(3, 5000)
    dense[1] = torch.randn(5000)
    for matrix in (COO.from_dense(dense), ELL.from_dense(dense), GroupCOO.from_dense(dense)):
        assert_product(matrix, torch.randn(5000, 3))


def test_hypersparse():
    rows, cols = torch.tensor([5, 9_999_999]), torch.tensor([0, 1])
    matrix = GroupCOO.from_coo((rows, cols), torch.tensor([2.0, 3.0]), (10_000_000, 2))
    result = spmm(matrix, torch.ones(2))
    assert result.nonzero().flatten().tolist() == rows.tolist()


def test_structure_may_change_in_place():
    row, col = torch.tensor([0, 1]), torch.tensor([0, 1])
    matrix = COO((2, 2), (row, col), torch.tensor([1.0, 2.0]))
    dense = torch.tensor([[1.0], [10.0]])
    assert spmm(matrix, dense).tolist() == [[1], [20]]
    for _ in range(2):
        col.copy_(torch.tensor([1, 0]))
        assert spmm(matrix, dense).tolist() == [[10], [2]]
        col.copy_(torch.tensor([0, 1]))
        assert spmm(matrix, dense).tolist() == [[1], [20]]
    col[0] = 2
    with pytest.raises(InsumRangeError):
        spmm(matrix, dense)


@each_format
@pytest.mark.parametrize("shape", [(13, 11), (8, 12), (0, 3), (5, 0)], ids=str)
def test_a_matrix_that_comes_again(entry: Entry, shape: tuple[int, int]):
    """Whatever the operand; nothing is checked less."""
    matrix = entry.from_dense(sparse_dense(shape))
    dense = matrix.to_dense()
    for _ in range(2):
        spmm(matrix, torch.randn(shape[1], 3, dtype=torch.float64))
    for columns in (3, 1, 0, 3, 7):
        plain = torch.randn(shape[1], columns, dtype=torch.float64)
        for operand in (plain, strided(plain)):
            assert_matches(spmm(matrix, operand), dense @ operand, dtype=torch.float64, kind="sum")
    assert spmm(matrix, torch.ones(shape[1], dtype=torch.float64)).shape == shape[:1]
    with pytest.raises(InsumShapeError):
        spmm(matrix, torch.ones(shape[1] + 1, 2, dtype=torch.float64))
    with pytest.raises(InsumDtypeError):
        spmm(matrix, torch.ones(shape[1], 2))
    with pytest.raises(InsumDeviceError):
        spmm(matrix, torch.ones(shape[1], 2, dtype=torch.float64, device="meta"))


@each_format
def test_a_structure_is_shared_by_its_values(entry: Entry):
    """Other values find what was made ready for the structure; copies of it start anew."""
    matrix = entry.from_dense(sparse_dense((16, 12)))
    dense = torch.randn(12, 3, dtype=torch.float64)
    for scale in (1.0, 2.0, 3.0, 4.0):
        other = matrix.with_values(scale * matrix.values)
        assert_matches(spmm(other, dense), scale * matrix.to_dense() @ dense, dtype=torch.float64, kind="sum")
    assert matrix.detach().shared is matrix.with_values(matrix.values.float()).shared is matrix.shared
    half = matrix.with_values(matrix.values.float())
    for _ in range(2):
        assert spmm(half, dense.float()).dtype == torch.float32
        assert spmm(matrix, dense).dtype == torch.float64
    for copied in (copy.deepcopy(matrix), pickle.loads(pickle.dumps(matrix)), matrix.transpose().transpose()):
        assert copied.shared is not matrix.shared
        assert_matches(spmm(copied, dense), matrix.to_dense() @ dense, dtype=torch.float64, kind="sum")
        torch.testing.assert_close(copied.values, matrix.values)


@each_format
def test_a_matrix_that_comes_again_is_differentiated(entry: Entry):
    matrix = entry.from_dense(sparse_dense((16, 12)))
    values = matrix.values.requires_grad_()
    seed, dense = torch.randn(16, 3, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    first = torch.autograd.grad(spmm(matrix, dense), (values, dense), seed)
    for _ in range(3):
        for a, b in zip(torch.autograd.grad(spmm(matrix, dense), (values, dense), seed), first, strict=True):
            torch.testing.assert_close(a, b)
    mapped = torch.func.vmap(lambda x: spmm(matrix, x))(torch.stack([dense, 2 * dense]).detach())
    torch.testing.assert_close(mapped[1], 2 * spmm(matrix, dense).detach())
    with torch.no_grad():
        values.mul_(2)
    torch.testing.assert_close(spmm(matrix, dense), mapped[1])
    with torch.autocast("cpu", torch.bfloat16):
        assert spmm(matrix.to(torch.float32).detach(), dense.float().detach()).dtype == torch.bfloat16
        half = matrix.to(torch.float32).detach()
        for _ in range(3):
            assert spmm(half, dense.float().detach()).dtype == torch.bfloat16


@each_format
def test_backends_agree(entry: Entry):
    matrix = entry.from_dense(sparse_dense((13, 11)))
    dense = torch.randn(11, 3, dtype=torch.float64)
    chosen = spmm(matrix, dense)
    for options in (Options(backend="eager"), Options(deterministic=True), Options(order="left")):
        assert_matches(spmm(matrix, dense, options=options), chosen, dtype=torch.float64, kind="sum")


@pytest.mark.gpu
@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gpu(entry: Entry, dtype: torch.dtype, gpu: torch.device):
    matrix = entry.from_dense(sparse_dense((67, 50), dtype=torch.float32).to(gpu, dtype))
    assert_product(matrix, torch.randn(50, 33, device=gpu).to(dtype))


def test_autocast():
    matrix = GroupCOO.from_dense(sparse_dense((6, 5), dtype=torch.float32))
    linear = torch.nn.Linear(3, 4)
    x = torch.randn(5, 3)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = linear(x)
        assert hidden.dtype == torch.bfloat16
        result = spmm(matrix, hidden)
        assert spmm(matrix, x).dtype == torch.bfloat16
    assert_matches(result, matrix.to_dense().double() @ linear(x).double(), dtype=torch.bfloat16, kind="gradient")
    result.float().sum().backward()
    assert linear.weight.grad is not None


def test_a_traced_function_has_no_break():
    matrix = GroupCOO.from_dense(sparse_dense((6, 5), dtype=torch.float32))
    function = torch.compile(lambda x: spmm(matrix, x).relu(), backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 3, requires_grad=True)
    torch.testing.assert_close(function(x), spmm(matrix, x).relu())
    function(x).sum().backward()
    assert_matches(x.grad, torch.autograd.grad(spmm(matrix, x).relu().sum(), x)[0], dtype=x.dtype, kind="gradient")


def test_expressions_are_those_of_the_docstring():
    text = inspect.getdoc(spmm)
    for expression in SPMM.values():
        assert expression in text
        insum_nn.compile(expression)
    assert spmm_expression(GroupCOO.from_dense(torch.eye(2))) == "C[Row[g],n] += Val[g,q] * B[Col[g,q],n]"


def test_programs_are_shared():
    matrix = GroupCOO.from_dense(torch.eye(3), group_size=1)
    other = GroupCOO.from_dense(2 * torch.eye(3), group_size=1)
    assert spmm_program(matrix) is spmm_program(other)
    assert "Col" in str(spmm_program(matrix).explain(**matrix.tensors, B=torch.ones(3, 2), out_shape=(3, None)))


MATRIX = GroupCOO.from_dense(torch.eye(4)[:3])


def test_message_of_a_wrong_extent():
    with pytest.raises(InsumShapeError) as caught:
        spmm(MATRIX, torch.ones(3, 2))
    assert str(caught.value) == (
        "spmm: 'dense' has extent 3 along axis 0, the sparse tensor requires 4\n"
        "  C[Row[g],n] += Val[g,q] * B[Col[g,q],n]\n"
        "                            ^\n"
        "  expected dense (B) of shape (4, n); got (3, 2)\n"
        "  fix: give axis 0 of dense the extent 4."
    )
    assert caught.value.fields["got"] == 3


def test_message_of_a_wrong_dtype():
    with pytest.raises(InsumDtypeError) as caught:
        spmm(MATRIX, torch.ones(4, 2, dtype=torch.float64))
    assert str(caught.value) == (
        "spmm: 'dense' is torch.float64, the sparse values are torch.float32\n"
        "  C[Row[g],n] += Val[g,q] * B[Col[g,q],n]\n"
        "                 ^^^        ^\n"
        "  fix: pass dense.to(torch.float32), or convert the format with to(dtype=torch.float64)."
    )


def test_all_faults_are_told_at_once():
    with pytest.raises(InsumShapeError) as caught:
        spmm(MATRIX, torch.ones(3, 2, 2, dtype=torch.float64, device="meta"))
    assert [type(other) for other in caught.value.others] == [InsumDtypeError, InsumDeviceError]
    assert "is on meta, the sparse tensor on cpu" in str(caught.value)


def test_other_arguments_are_refused():
    with pytest.raises(InsumFormatError, match=r"'dense' must be a dense tensor, got ndarray"):
        spmm(MATRIX, torch.ones(4).numpy())
    with pytest.raises(
        InsumFormatError, match=r"'dense' must be a dense tensor, got a tensor of layout torch.sparse_coo"
    ):
        spmm(MATRIX, torch.eye(4).to_sparse())
    for got, tensor in NOT_DENSE.items():
        with pytest.raises(InsumFormatError, match=f"'dense' must be a dense tensor, got {got}"):
            spmm(MATRIX, tensor)
        with pytest.raises(InsumFormatError, match=f"'b' must be a dense tensor, got {got}"):
            sddmm(MATRIX, torch.ones(3, 2), tensor)
    with pytest.raises(InsumFormatError, match=r"(?s)cannot take a Tensor for 'matrix'.*GroupCOO.from_dense\(matrix\)"):
        spmm(torch.eye(3), torch.ones(3))
    with pytest.raises(InsumFormatError, match=r"from_torch"):
        spmm(torch.eye(3).to_sparse(), torch.ones(3))
    with pytest.raises(InsumShapeError, match="takes a matrix for 'matrix', got 3 dimensions"):
        spmm(COO.from_dense(torch.ones(2, 2, 2)), torch.ones(2))
    with pytest.raises(InsumShapeError, match="must have 2 dimensions, got 0"):
        spmm(MATRIX, torch.tensor(1.0))


def test_a_format_without_statements_does_not_run_those_of_another(monkeypatch: pytest.MonkeyPatch):
    class Added:
        ndim = 2

    monkeypatch.setattr(arguments, "FORMATS", (*arguments.FORMATS, Added))
    monkeypatch.setattr(arguments, "require_format", lambda *_: None)
    assert arguments.matrix_layout(Added(), "spmm", "matrix") == "Added"  # type: ignore[arg-type]


@pytest.mark.parametrize("kinds", [(COO, GroupCOO, ELL), (GroupCOO, COO)])
def test_what_is_recommended_does_not_depend_on_the_order_of_formats(kinds: tuple[type[COO], ...]):
    with pytest.raises(InsumFormatError, match=r"GroupCOO.from_dense\(matrix\)"):
        arguments.require_format(torch.eye(3), "spmm", "matrix", kinds)


@pytest.mark.library_calls
@pytest.mark.parametrize("kind", [BlockCOO, BlockGroupCOO])
def test_many_blocks_are_multiplied_as_a_dense_matrix(kind: type[BlockCOO | BlockGroupCOO]):
    """Values, both gradients, and what is explained; block row 3 and block column 5 have no blocks."""
    mask = torch.rand(31, 32) < 0.6
    mask[3], mask[:, 5] = False, False
    dense = torch.randn(490, 510) * mask.repeat_interleave(16, 0).repeat_interleave(16, 1)[:490, :510]
    matrix = kind.from_dense(dense, block_shape=(16, 16))
    other = torch.randn(510, 400)
    assert_same(
        lambda values, other: spmm(matrix.with_values(values), other),
        lambda values, other: matrix.to("cpu", torch.float64).with_values(values).to_dense() @ other,
        [matrix.values, other],
    )
    other[5 * 16 : 6 * 16] = torch.nan
    assert spmm(matrix, other).isfinite().all()
    operand = torch.randn(32, 16, 400)
    explanation = spmm_program(matrix).explain(tensors={**matrix.tensors, "B": operand}, out_shape=(31, 16, None))
    assert [str(part.statement).partition(" ")[2] for part in explanation.parts][1] == "+= T[i,a,j,b] * B_read[j,b,n]"

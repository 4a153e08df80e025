"""Several axes addressed by index tensors that are unique together: each term has a place of its own, and is stored."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import IndexFacts, Options
from insum_nn.compiler.lang.bind import bind
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.schedule.form import Form, make_form
from insum_nn.errors import InsumError, InsumFormatError, InsumRangeError
from insum_nn.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO, SparseFormat
from tests.compiler.interpreted import interpreter

__all__ = ["interpreter"]

GENERATED = Options(backend="triton", tune=False)
PAIRS = {
    "Row": IndexFacts(masked=False, proven=True, unique_with=("Col",)),
    "Col": IndexFacts(masked=False, proven=True),
}
BLOCKS = "D[Row[p],a,Col[p],b] += Val[p,a,b]"


def distinct(count: int, rows: int, cols: int) -> dict[str, Tensor]:
    places = torch.randperm(rows * cols)[:count]
    return {"Row": places // cols, "Col": places % cols}


def form_of(expression: str, facts: Mapping[str, IndexFacts], **tensors: Tensor) -> Form:
    bound = bind(parse(expression), tensors, None, facts=facts)
    sizes = dict.fromkeys(bound.layout.indices, 4)
    output = (9,) * len(bound.statement.output.subscripts)
    return make_form(bound, sizes, output, {}, deterministic=False)


def dense_blocks(t: Mapping[str, Tensor], rows: int, cols: int) -> Tensor:
    a, b = t["Val"].shape[-2:]
    dense = torch.zeros(rows, a, cols, b, dtype=torch.float64)
    for p in range(t["Row"].shape[0]):
        if min(int(t["Row"][p]), int(t["Col"][p])) >= 0:
            dense[t["Row"][p], :, t["Col"][p]] += t["Val"][p].double()
    return dense


# Numbers.


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("holes", [False, True])
# As many blocks as there are rows, and as many as there are places, where the output needs no zeros.
@pytest.mark.parametrize("count", [1, 5, 13, 35])
@pytest.mark.parametrize("initial", [False, True])
def test_blocks_are_stored(dtype: torch.dtype, holes: bool, count: int, initial: bool):
    tensors = {**distinct(count, 5, 7), "Val": torch.randn(count, 3, 6).to(dtype)}
    facts = dict(PAIRS)
    if holes:
        # A missing row, a missing column; and a place that two of them share without meeting.
        tensors["Row"][0] = -1
        tensors["Col"][count // 2] = -1
        facts = {name: IndexFacts(masked=True, proven=True, unique_with=f.unique_with) for name, f in facts.items()}
    first = torch.randn(5, 3, 7, 6).to(dtype)
    program = insum_nn.compile(BLOCKS, facts=facts, out_shape=(5, None, 7, None), options=GENERATED)
    given = {**tensors, "D": first} if initial else tensors
    got = program(tensors=given)
    want = dense_blocks(tensors, 5, 7)
    if initial:
        want = (want + first.double()).to(dtype).double()
    torch.testing.assert_close(got.double(), want, rtol=1e-3 if dtype == torch.float16 else 1e-12, atol=1e-3)
    explained = program.explain(tensors=given)
    assert next(d.choice for d in explained.decisions if d.topic == "combine") == "place"
    source = explained.kernel_source()
    assert source is not None
    assert "atomic" not in source


@pytest.mark.usefixtures("interpreter")
def test_the_same_bits_without_atomics():
    """`deterministic=True` takes the generated kernel as it is; one that had to add to memory is refused."""
    tensors = {**distinct(9, 5, 7), "Val": torch.randn(9, 3, 6)}
    options = Options(backend="triton", tune=False, deterministic=True)
    program = insum_nn.compile(BLOCKS, facts=PAIRS, out_shape=(5, None, 7, None), options=options)
    assert "place" in [d.choice for d in program.explain(tensors=tensors).decisions]
    with pytest.raises(InsumFormatError, match="in no fixed order"):
        insum_nn.compile(BLOCKS, out_shape=(5, None, 7, None), options=options)(tensors=tensors)


@pytest.mark.usefixtures("interpreter")
def test_gradients():
    tensors = {**distinct(9, 5, 7), "Val": torch.randn(9, 3, 6, dtype=torch.float64, requires_grad=True)}
    program = insum_nn.compile(BLOCKS, facts=PAIRS, out_shape=(5, None, 7, None), options=GENERATED)
    weights = torch.randn(5, 3, 7, 6, dtype=torch.float64)
    (got,) = torch.autograd.grad(program(tensors=tensors), tensors["Val"], weights)
    torch.testing.assert_close(got, weights.permute(0, 2, 1, 3)[tensors["Row"], tensors["Col"]])


@pytest.mark.usefixtures("interpreter")
def test_sums_inside_a_place():
    """Indices that are summed do not count: they are added before the store."""
    tensors = {**distinct(9, 5, 7), "A": torch.randn(9, 4), "B": torch.randn(4, 3)}
    expression = "D[Row[p],Col[p],n] += A[p,k] * B[k,n]"
    program = insum_nn.compile(expression, facts=PAIRS, out_shape=(5, 7, None), options=GENERATED)
    want = torch.zeros(5, 7, 3).index_put((tensors["Row"], tensors["Col"]), tensors["A"] @ tensors["B"])
    torch.testing.assert_close(program(tensors=tensors), want)
    assert "place" in [d.choice for d in program.explain(tensors=tensors).decisions]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("kind", ["blocks", "groups", "twice"])
def test_dense_matrices_of_formats(kind: str):
    dense = torch.randn(10, 12) * (torch.rand(5, 4) < 0.5).repeat_interleave(2, 0).repeat_interleave(3, 1)
    matrix: BlockCOO | BlockGroupCOO = BlockCOO.from_dense(dense, block_shape=(2, 3))
    expression = BLOCKS
    if kind == "groups":
        matrix = BlockGroupCOO.from_dense(dense, block_shape=(2, 3), group_size=2)
        expression = "D[Row[g],a,Col[g,q],b] += Val[g,q,a,b]"
    if kind == "twice":
        zero = torch.zeros(2, dtype=torch.int64)
        matrix = BlockCOO.from_blocks(zero, zero, torch.ones(2, 2, 3), (10, 12), coalesce=False)
        dense = matrix.to_dense()
    program = insum_nn.compile(expression, facts=matrix.facts, out_shape=(5, None, 4, None), options=GENERATED)
    torch.testing.assert_close(program(tensors=matrix.tensors).reshape(10, 12), dense)


# Which statements.

VALUE = torch.ones(4)


@pytest.mark.parametrize(
    ("expression", "shapes", "expected"),
    [
        ("D[Row[p],Col[p]] += Val[p]", {"Row": (4,), "Col": (4,), "Val": (4,)}, "place"),
        ("D[Col[p],Row[p]] += Val[p]", {"Row": (4,), "Col": (4,), "Val": (4,)}, "place"),
        ("D[Row[g],Col[g,q]] += Val[g,q]", {"Row": (4,), "Col": (4, 4), "Val": (4, 4)}, "place"),
        ("D[Row[g],Col[g,q],n] += Val[g,q] * B[n]", {"Row": (4,), "Col": (4, 4), "Val": (4, 4), "B": (4,)}, "place"),
        # Another axis does not make two terms meet.
        ("D[Row[p],Col[p],Z[p]] += Val[p]", {"Row": (4,), "Col": (4,), "Z": (4,), "Val": (4,)}, "place"),
        # But it does if it has an index of its own.
        ("D[Row[p],Col[p],Z[p,r]] += Val[p,r]", {"Row": (4,), "Col": (4,), "Z": (4, 4), "Val": (4, 4)}, "atomic"),
        ("D[Row[p],Col[r]] += Val[p,r]", {"Row": (4,), "Col": (4,), "Val": (4, 4)}, "atomic"),
        ("D[Row[p],Row[p]] += Val[p]", {"Row": (4,), "Val": (4,)}, "atomic"),
        ("D[Row[p],Other[p]] += Val[p]", {"Row": (4,), "Other": (4,), "Val": (4,)}, "atomic"),
        ("D[Row[p],Col[p]+1] += Val[p]", {"Row": (4,), "Col": (4,), "Val": (4,)}, "atomic"),
        ("D[Row[p],Col[p],p] += Val[p]", {"Row": (4,), "Col": (4,), "Val": (4,)}, "place"),
        ("D[Row[g,q],Col[q]] += Val[g,q]", {"Row": (4, 4), "Col": (4,), "Val": (4, 4)}, "atomic"),
        ("D[Row[g,g],Col[g]] += Val[g]", {"Row": (4, 4), "Col": (4,), "Val": (4,)}, "place"),
    ],
)
def test_what_is_a_place(expression: str, shapes: dict[str, tuple[int, ...]], expected: str):
    index = {a.name for s in parse(expression).output.subscripts for a in s.index_accesses()}
    tensors = {n: torch.zeros(s, dtype=torch.int64) if n in index else torch.ones(s) for n, s in shapes.items()}
    assert form_of(expression, PAIRS, **tensors).strategy == expected


def test_one_unique_tensor_is_enough():
    facts = {"Row": IndexFacts(unique=True, masked=False, proven=True)}
    tensors = {"Row": torch.arange(4), "Col": torch.zeros(4, dtype=torch.int64), "Val": VALUE}
    assert form_of("D[Row[p],Col[p]] += Val[p]", facts, **tensors).strategy == "place"


# Facts of formats.


def test_formats_say_so():
    dense = torch.randn(4, 6)
    for matrix in (
        COO.from_dense(dense),
        GroupCOO.from_dense(dense, group_size=2),
        BlockCOO.from_dense(dense, block_shape=(2, 2)),
        BlockGroupCOO.from_dense(dense, block_shape=(2, 2), group_size=2),
    ):
        assert matrix.facts["Row"].unique_with == ("Col",), matrix
        matrix.validate()
    assert COO.from_dense(torch.ones(2, 2, 2)).facts["Index0"].unique_with == ("Index1", "Index2")


def test_formats_that_cannot_say_so():
    dense = torch.randn(4, 6)
    row = torch.zeros(2, dtype=torch.int64)
    formats: list[SparseFormat] = [
        # The position takes the place of one index.
        ELL.from_dense(dense),
        BlockCOO.from_blocks(row, row, torch.ones(2, 2, 2), (4, 4), coalesce=False),
    ]
    for matrix in formats:
        assert not any(f.unique_with for f in matrix.facts.values()), matrix


# Proofs.


@pytest.mark.parametrize(
    ("row", "col", "fails"),
    [
        ([0, 0, 1], [0, 1, 0], False),
        ([0, 0, 1], [0, 0, 1], True),
        ([0, 0, -1, -1], [-1, -1, 2, 2], False),
    ],
)
def test_validate_proves_the_claim(row: list[int], col: list[int], fails: bool):
    tensors = {"Row": torch.tensor(row), "Col": torch.tensor(col), "Val": torch.ones(len(row))}
    facts = {"Row": IndexFacts(unique_with=("Col",))}
    options = Options(validate=True)
    program = insum_nn.compile("D[Row[p],Col[p]] += Val[p]", facts=facts, out_shape=(3, 3), options=options)
    if not fails:
        program(tensors=tensors)
        return
    with pytest.raises(InsumRangeError, match=r"declared unique with Col, but \(0, 0\) occurs more than once"):
        program(tensors=tensors)


def test_a_format_proves_the_claim():
    place = torch.zeros(2, dtype=torch.int64)
    facts = (IndexFacts(masked=False, unique_with=("Col",)), IndexFacts(masked=False))
    matrix = BlockCOO((4, 4), (2, 2), place, place, torch.ones(2, 2, 2), facts)
    with pytest.raises(InsumError, match=r"row: expected no combination with Col twice.*got \(0, 0\) more than once"):
        matrix.validate()
    BlockCOO((4, 4), (2, 2), place, torch.arange(2), torch.ones(2, 2, 2), facts).validate()


def test_the_claim_is_shown_and_pickles():
    tensors = {"Row": torch.tensor([0, 1]), "Col": torch.tensor([0, 1]), "Val": torch.ones(2)}
    program = insum_nn.compile("D[Row[p],Col[p]] += Val[p]", facts=PAIRS, out_shape=(3, 3))
    again = pickle.loads(pickle.dumps(program))
    assert again == program
    traced = torch.compile(lambda: program(tensors=tensors), backend="eager", fullgraph=True)()
    torch.testing.assert_close(traced, torch.diag(torch.tensor([1.0, 1.0, 0.0])))


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_densified_on_a_gpu(gpu: torch.device, share: float):
    count = int(share * 128 * 128)
    index = {name: t.to(gpu) for name, t in distinct(count, 128, 128).items()}
    values = torch.randn(count, 32, 32).to(gpu).half()
    values.requires_grad_()
    program = insum_nn.compile(BLOCKS, facts=PAIRS, out_shape=(128, None, 128, None))
    got = program(tensors={**index, "Val": values}).reshape(4096, 4096)
    want = torch.zeros(128, 128, 32, 32, dtype=torch.float16, device=got.device)
    want[index["Row"], index["Col"]] = values.detach()
    assert torch.equal(got, want.transpose(1, 2).reshape(4096, 4096))
    (back,) = torch.autograd.grad(got, values, want.transpose(1, 2).reshape(4096, 4096))
    assert torch.equal(back, values)

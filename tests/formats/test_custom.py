"""Formats that are defined outside of the package: the one of docs/write-your-own-format.md, and broken ones."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from insum_nn import IndexFacts, Options
from insum_nn.errors import InsumError, InsumFormatError, InsumNameError, InsumRangeError, InsumShapeError
from insum_nn.formats import COO, ELL, CustomFormat, IndexPart
from insum_nn.ops import contract, register, spmm, spmm_expression
from insum_nn.ops.custom import registered
from insum_nn.testing import check_format
from tests.source_tree import ROOT
from tests.test_docs import python_blocks, run_page

# torch says both once per process, of its own sparse tensors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]

PAGE = ROOT / "docs" / "write-your-own-format.md"
BLOCKS = python_blocks(PAGE)
MOST_LINES = 60


@pytest.fixture(scope="module")
def dia() -> Any:
    # A module, since Dynamo looks for the names of a class where it was defined.
    module = ModuleType("own_format_page")
    sys.modules[module.__name__] = module
    for line, block, _ in BLOCKS:
        exec(compile("\n" * line + block, PAGE.name, "exec", dont_inherit=True), vars(module))
    return module.DIA


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(PAGE.name, BLOCKS)


def test_the_format_is_short_and_of_public_names():
    code = [block for _, block, _ in BLOCKS if "class DIA" in block or "register(" in block or block.startswith("from")]
    assert sum(len(block.splitlines()) for block in code) <= MOST_LINES
    assert not any("insum_nn.compiler" in block or "self._" in block for block in code)


@dataclass(frozen=True, eq=False, repr=False)
class Rows(CustomFormat):
    """A slot in each row for each of its entries, and one more: a user's ELL, with a layout."""

    col: Tensor
    spare: int = 1

    value_axes = "mq"

    @property
    def index_parts(self) -> tuple[IndexPart, ...]:
        return (IndexPart("Col", "col", self.col, "mq", 1),)

    @classmethod
    def from_entries(cls, coo: COO, spare: int = 1) -> Rows:
        ell = ELL.from_coo(coo, index_dtype=coo.index_dtype)
        pad = torch.nn.functional.pad
        return cls(coo.shape, pad(ell.values, (0, spare)), pad(ell.col, (0, spare), value=-1), spare)

    def entries(self) -> COO:
        row, slot = (self.col >= 0).nonzero(as_tuple=True)
        return COO(self.shape, (row.to(self.col.dtype), self.col[row, slot]), self.values[row, slot])

    def layout(self) -> dict[str, int]:
        return {"spare": self.spare}

    def axis_extents(self) -> dict[str, int]:
        return {"m": self.num_rows}


register(Rows, spmm="C[m,n] += Val[m,q] * B[Col[m,q],n]", sddmm="D[m,q] += Val[m,q] * A[m,k] * Bt[Col[m,q],k]")


@pytest.mark.parametrize("spare", [0, 1, 3])
def test_a_format_with_slots_and_a_layout(spare: int):
    check_format(Rows, spare=spare)
    assert Rows.from_dense(torch.eye(3), spare=spare).transpose().col.shape == (3, 1 + spare)


class Shifted(Rows):
    @classmethod
    def from_entries(cls, coo: COO, spare: int = 1) -> Rows:
        made = super().from_entries(coo, spare)
        return cls(made.shape, made.values * 2, made.col, spare)


class Detached(Rows):
    def entries(self) -> COO:
        coo = super().entries()
        return coo.with_values(coo.values.detach())


class Padded(Rows):
    def entries(self) -> COO:
        coo = super().entries()
        if not coo.nnz:
            return coo
        again = [torch.cat([index, index[:1]]) for index in coo.indices]
        return COO(self.shape, tuple(again), torch.cat([coo.values, coo.values[:1] * 0]))


class Forgetful(Rows):
    def layout(self) -> dict[str, int]:
        return {"spare": 2}

    def transpose(self) -> Rows:
        return self


class Narrow(Rows):
    @classmethod
    def from_entries(cls, coo: COO, spare: int = 1) -> Rows:
        made = super().from_entries(coo, spare)
        return cls(made.shape, made.values, made.col.long(), spare)


class Stray(Rows):
    @classmethod
    def from_entries(cls, coo: COO, spare: int = 1) -> Rows:
        made = super().from_entries(coo, spare)
        return cls(made.shape, made.values + (made.col < 0), made.col, spare)


BROKEN = {
    Shifted: "from_dense",
    Detached: "gradient",
    Forgetful: "transpose",
    Narrow: "index_dtype|casts|changes",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_law_is_named(kind: type[Rows]):
    with pytest.raises(AssertionError, match=BROKEN[kind]):
        check_format(kind)


def test_a_broken_law_of_slots_is_an_error():
    with pytest.raises(InsumFormatError, match="0 in unused slots"):
        check_format(Stray)


def test_a_wrong_expression_is_seen():
    class Doubled(Rows): ...

    register(Doubled, spmm="C[m,n] += Val[m,q] * B[Col[m,q],n] * 2")
    with pytest.raises(AssertionError, match="operators"):
        check_format(Doubled)


def test_expressions_go_with_subclasses_and_not_with_others(dia: Any):
    class Other(Rows): ...

    matrix = Other.from_dense(torch.eye(3))
    assert spmm_expression(matrix) == registered("spmm", Rows)
    assert torch.equal(spmm(matrix, torch.ones(3, 2)), torch.ones(3, 2))

    @dataclass(frozen=True, eq=False, repr=False)
    class Unknown(CustomFormat):
        col: Tensor
        value_axes = "mq"
        index_parts = Rows.index_parts  # type: ignore[assignment]
        entries = Rows.entries
        axis_extents = Rows.axis_extents

        @classmethod
        def from_entries(cls, coo: COO) -> Unknown:
            rows = Rows.from_entries(coo)
            return cls(rows.shape, rows.values, rows.col)

    with pytest.raises(InsumFormatError, match=r"(?s)spmm cannot take a Unknown.*insum_nn.ops.register"):
        spmm(Unknown.from_dense(torch.eye(3)), torch.ones(3, 2))


def test_what_is_registered_is_checked():
    with pytest.raises(InsumFormatError, match="format of your own, got ELL"):
        register(ELL, spmm="C[m,n] += Val[m,q] * B[Col[m,q],n]")
    with pytest.raises(InsumFormatError, match="format of your own, got 3"):
        register(3)  # type: ignore[arg-type]
    with pytest.raises(InsumNameError, match="no operator 'ttm'"):
        register(Rows, ttm="C[m,n] += Val[m,q] * B[Col[m,q],n]")
    with pytest.raises(InsumNameError, match="other tensors"):
        register(Rows, spmm="C[m,n] += Val[m,q] * X[Col[m,q],n]")
    with pytest.raises(InsumError):
        register(Rows, spmm="C[m,n] +")
    assert registered("spmm", Rows) == "C[m,n] += Val[m,q] * B[Col[m,q],n]"


def test_facts_are_read_once_and_fall_with_a_write():
    matrix = Rows.from_dense(torch.tensor([[0.0, 2.0], [3.0, 4.0]]))
    assert matrix.facts["Col"].proven
    assert matrix.facts["Col"].masked is True
    b = torch.randn(2, 3)
    torch.testing.assert_close(spmm(matrix, b), matrix.to_dense() @ b)
    matrix.col[0, 0] = 0
    torch.testing.assert_close(spmm(matrix, b), torch.tensor([[2.0, 0.0], [3.0, 4.0]]) @ b)
    matrix.col[0, 0] = 2
    with pytest.raises(InsumRangeError):
        spmm(matrix, b)
    with pytest.raises(InsumRangeError):
        contract("s[m] += Val[m,q] * v[Col[m,q]]", matrix, v=torch.ones(2), out_shape=(2,))


def test_claims_are_proven_or_refused():
    col, values = torch.tensor([[0, 1], [1, -1]]), torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    claimed = Rows((2, 2), values, col, index_facts=(IndexFacts(unique=True),))
    with pytest.raises(InsumFormatError, match="no value twice"):
        contract("s[m] += Val[m,q] * v[Col[m,q]]", claimed, v=torch.ones(2), out_shape=(2,))
    distinct = Rows((2, 2), values, torch.tensor([[0, 1], [-1, -1]]), index_facts=(IndexFacts(unique=True),))
    distinct = distinct.with_values(values * torch.tensor([[1.0], [0.0]]))
    assert distinct.validate().facts["Col"].unique
    with pytest.raises(InsumRangeError):
        Rows((2, 2), values, col + 1).validate()
    with pytest.raises(InsumShapeError):
        Rows((3, 2), values, col)
    with pytest.raises(InsumShapeError, match="2 extents"):
        Rows((2, 2, 2), values, col)


def test_contract_takes_the_tensors_that_a_statement_reads():
    coo = COO.from_dense(torch.tensor([[0.0, 2.0], [3.0, 4.0]], dtype=torch.float64))
    assert contract("s[Row[p]] += Val[p]", coo, out_shape=(2,)).tolist() == [2.0, 7.0]
    bias = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert contract("s[Row[p]] += Val[p]", coo, s=bias, options=Options(validate=True)).tolist() == [3.0, 7.0]
    with pytest.raises(InsumNameError, match="an operand 'Row'"):
        contract("s[Row[p]] += Val[p]", coo, Row=coo.row, out_shape=(2,))
    with pytest.raises(InsumFormatError, match="takes a sparse format"):
        contract("s[Row[p]] += Val[p]", torch.eye(2), out_shape=(2,))  # type: ignore[arg-type]


def test_under_compile(dia: Any):
    dense = torch.tensor([[0.0, 2.0, 0.0], [3.0, 4.0, 1.0]], dtype=torch.float64)
    torch.compiler.reset()
    for matrix in (Rows.from_dense(dense), dia.from_dense(dense)):
        values = matrix.values.clone().requires_grad_()

        def product(v: Tensor, b: Tensor, held: Any = matrix) -> tuple[Tensor, Tensor]:
            other = held.with_values(v)
            return spmm(other, b), contract(f"s += Val[{','.join(held.value_axes)}]", other)

        compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
        b = torch.randn(3, 4, dtype=torch.float64)
        for found, want in zip(compiled(values, b), (dense @ b, dense.sum()), strict=True):
            torch.testing.assert_close(found, want)

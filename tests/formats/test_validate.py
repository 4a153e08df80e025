"""`validate` and the constructors find each planted fault, and say so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from insum_nn.errors import (
    InsumDeviceError,
    InsumDtypeError,
    InsumError,
    InsumFormatError,
    InsumRangeError,
    InsumShapeError,
)
from insum_nn.facts import IndexFacts
from insum_nn.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO, SparseFormat
from tests.formats.registry import NOT_DENSE, REGISTRY

DENSE = torch.tensor(
    [
        [1.0, 2.0, 3.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, 4.0, 0.0, 0.0, 5.0],
        [6.0, 0.0, 0.0, 0.0, 0.0],
        [7.0, 0.0, 8.0, 9.0, 0.0],
    ]
)

coo = COO.from_dense(DENSE)
group = GroupCOO.from_dense(DENSE, group_size=2)
group_columns = GroupCOO.from_dense(DENSE, group_size=2, group_dim=1)
group3 = GroupCOO.from_dense(DENSE.reshape(5, 1, 5).expand(5, 2, 5), group_size=4)
ell = ELL.from_dense(DENSE)
block = BlockCOO.from_dense(DENSE, block_shape=(2, 2))
block_group = BlockGroupCOO.from_dense(DENSE, block_shape=(2, 2), group_size=3)


def edited(tensor: Tensor, position: tuple[int, ...], value: float) -> Tensor:
    copy = tensor.clone()
    copy[position] = value
    return copy


def changed(matrix: Any, **fields: Any) -> Any:
    """The format with fields replaced, the claim of order dropped unless given."""
    return replace(matrix, **{"coalesced": False, **fields})


def facts_of(matrix: SparseFormat, place: int, **claims: Any) -> tuple[IndexFacts, ...]:
    return tuple(replace(fact, **claims) if i == place else fact for i, fact in enumerate(matrix.index_facts))


# (name, the faulty format, class of the error, the line of the message)
VALUE_FAULTS: list[tuple[str, Callable[[], SparseFormat], type[InsumError], str]] = [
    (
        "coo row too large",
        lambda: changed(coo, indices=(edited(coo.row, (8,), 5), coo.col)),
        InsumRangeError,
        "row: expected 0 <= row[p] < 5; got 5 at [8] (1 of 9 entries)",
    ),
    (
        "coo col negative: it has no unused slots",
        lambda: changed(coo, indices=(coo.row, edited(coo.col, (0,), -1))),
        InsumRangeError,
        "col: expected 0 <= col[p] < 5; got -1 at [0] (1 of 9 entries)",
    ),
    (
        "coo claim of sorted",
        lambda: changed(coo, indices=(coo.row.flip(0), coo.col)),
        InsumFormatError,
        "row: expected ascending entries (its facts say sorted=True); got 3 at [3] after 4",
    ),
    (
        "coo claim of unique",
        lambda: changed(coo, index_facts=facts_of(coo, 0, unique=True)),
        InsumFormatError,
        "row: expected no value twice (its facts say unique=True); got 0 again at [1]",
    ),
    (
        "coo claim of order",
        lambda: replace(coo, indices=(coo.row, edited(coo.col, (0,), 2))),
        InsumFormatError,
        "entries: expected each entry once, in ascending order (coalesced=True); got (0, 1) after (0, 2) (entry 1)",
    ),
    (
        "coo claim of no duplicates",
        lambda: replace(coo, indices=(coo.row, edited(coo.col, (1,), 0))),
        InsumFormatError,
        "entries: expected each entry once, in ascending order (coalesced=True); got (0, 0) after (0, 0) (entry 1)",
    ),
    (
        "group index too large",
        lambda: changed(group, group_index=edited(group.row, (-1,), 7)),
        InsumRangeError,
        "row: expected 0 <= row[g] < 5; got 7 at [5] (1 of 6 entries)",
    ),
    (
        "group index of no group",
        lambda: changed(group, group_index=edited(group.row, (0,), -1)),
        InsumRangeError,
        "row: expected 0 <= row[g] < 5; got -1 at [0] (1 of 6 entries)",
    ),
    (
        "group slot too large",
        lambda: changed(group, indices=(edited(group.col, (2, 1), 5),)),
        InsumRangeError,
        "col: expected 0 <= col[g,q] < 5, or -1 in an unused slot; got 5 at [2,1] (1 of 12 entries)",
    ),
    (
        "group slot below -1",
        lambda: changed(group, indices=(edited(group.col, (1, 1), -2),)),
        InsumRangeError,
        "col: expected 0 <= col[g,q] < 5, or -1 in an unused slot; got -2 at [1,1] (1 of 12 entries)",
    ),
    (
        "group value in an unused slot",
        lambda: changed(group, values=edited(group.values, (1, 1), 0.5)),
        InsumFormatError,
        "values: expected 0 in unused slots; got 0.5 at [1,1] (1 of 12 entries)",
    ),
    (
        "group value NaN in an unused slot",
        lambda: changed(group, values=edited(group.values, (1, 1), float("nan"))),
        InsumFormatError,
        "values: expected 0 in unused slots; got nan at [1,1] (1 of 12 entries)",
    ),
    (
        "group claim of no unused slots",
        lambda: changed(group, index_facts=facts_of(group, 1, masked=False)),
        InsumFormatError,
        "col: expected no unused slot (its facts say masked=False); got -1 at [1,1] (3 of 12 entries)",
    ),
    (
        "group claim of sorted",
        lambda: changed(group, group_index=edited(group.row, (0,), 4)),
        InsumFormatError,
        "row: expected ascending entries (its facts say sorted=True); got 0 at [1] after 4",
    ),
    (
        "group claim of sorted slots, unused ones skipped",
        lambda: changed(group, index_facts=facts_of(group, 1, sorted=True)),
        InsumFormatError,
        "col: expected ascending entries (its facts say sorted=True); got 1 at [2,0] after 2",
    ),
    (
        "group claim of one group per row",
        lambda: changed(group, index_facts=facts_of(group, 0, unique=True)),
        InsumFormatError,
        "row: expected no value twice (its facts say unique=True); got 0 again at [1]",
    ),
    (
        "group claim of order inside a group",
        lambda: replace(group, indices=(group.col.flip(1),), values=group.values.flip(1)),
        InsumFormatError,
        "entries: expected each entry once, in ascending order (coalesced=True); got (0, 0) after (0, 1) (entry 1)",
    ),
    (
        "group by columns: the names follow",
        lambda: changed(group_columns, group_index=edited(group_columns.col, (5,), 5)),
        InsumRangeError,
        "col: expected 0 <= col[g] < 5; got 5 at [5] (1 of 6 entries)",
    ),
    (
        "group of three dimensions: unused in one index only",
        lambda: changed(group3, indices=(edited(group3.indices[0], (0, 1), -1), group3.indices[1])),
        InsumFormatError,
        "indices[1]: expected -1 exactly where indices[0] is -1; got 1 at [0,1], where indices[0] is -1",
    ),
    (
        "group of three dimensions: the other way round",
        lambda: changed(group3, indices=(group3.indices[0], edited(group3.indices[1], (0, 1), -1))),
        InsumFormatError,
        "indices[1]: expected -1 exactly where indices[0] is -1; got -1 at [0,1], where indices[0] is not -1",
    ),
    (
        "ell slot too large",
        lambda: changed(ell, indices=(edited(ell.col, (4, 0), 9),)),
        InsumRangeError,
        "col: expected 0 <= col[m,q] < 5, or -1 in an unused slot; got 9 at [4,0] (1 of 15 entries)",
    ),
    (
        "ell value in an unused slot",
        lambda: changed(ell, values=edited(ell.values, (1, 0), 2)),
        InsumFormatError,
        "values: expected 0 in unused slots; got 2.0 at [1,0] (1 of 15 entries)",
    ),
    (
        "ell claim of no unused slots",
        lambda: changed(ell, index_facts=(IndexFacts(masked=False),)),
        InsumFormatError,
        "col: expected no unused slot (its facts say masked=False); got -1 at [1,0] (6 of 15 entries)",
    ),
    (
        "ell claim of order",
        lambda: replace(ell, indices=(edited(ell.col, (0, 2), 0),)),
        InsumFormatError,
        "entries: expected each entry once, in ascending order (coalesced=True); got (0, 0) after (0, 1) (entry 2)",
    ),
    (
        "block row beyond the grid",
        lambda: changed(block, row=edited(block.row, (-1,), 3)),
        InsumRangeError,
        "row: expected 0 <= row[p] < 3; got 3 at [5] (1 of 6 entries)",
    ),
    (
        "block value beyond the edge",
        lambda: changed(block, values=edited(block.values, (4, 1, 0), 3)),
        InsumFormatError,
        "values: expected 0 beyond the edge of shape (5, 5); got 3.0 at [4,1,0] (1 of 24 entries)",
    ),
    (
        "block claim of order",
        lambda: replace(block, col=edited(block.col, (0,), 1)),
        InsumFormatError,
        "entries: expected each entry once, in ascending order (coalesced=True); got (0, 1) after (0, 1) (entry 1)",
    ),
    (
        "block group column beyond the grid",
        lambda: changed(block_group, col=edited(block_group.col, (0, 0), 3)),
        InsumRangeError,
        "col: expected 0 <= col[g,q] < 3, or -1 in an unused slot; got 3 at [0,0] (1 of 9 entries)",
    ),
    (
        "block group value in an unused slot",
        lambda: changed(block_group, values=edited(block_group.values, (1, 2, 0, 0), 1)),
        InsumFormatError,
        "values: expected 0 in unused slots; got 1.0 at [1,2,0,0] (1 of 36 entries)",
    ),
    (
        "block group value beyond the edge",
        lambda: changed(block_group, values=edited(block_group.values, (2, 0, 1, 1), 3)),
        InsumFormatError,
        "values: expected 0 beyond the edge of shape (5, 5); got 3.0 at [2,0,1,1] (1 of 36 entries)",
    ),
]


def plant(matrix: SparseFormat, **fields: Any) -> SparseFormat:
    """A copy changed behind the constructor's back."""
    copy = object.__new__(type(matrix))
    for name, value in {**vars(matrix), **fields}.items():
        object.__setattr__(copy, name, value)
    return copy


# (name, a valid format, fields of it, class from the constructor, the line of the message)
STRUCTURE_FAULTS: list[tuple[str, Any, dict[str, Any], type[InsumError], str]] = [
    (
        "coo lengths",
        coo,
        {"values": torch.ones(8)},
        InsumShapeError,
        "values: expected (p,) with p = 9 as in row; got shape (8,)",
    ),
    (
        "coo rank of values",
        coo,
        {"values": torch.ones(9, 1)},
        InsumShapeError,
        "values: expected axes (p,); got shape (9, 1)",
    ),
    (
        "coo number of indices",
        coo,
        {"indices": (coo.row,)},
        InsumShapeError,
        "indices: expected 2 index tensors, one per dimension; got 1",
    ),
    (
        "coo float index",
        coo,
        {"indices": (coo.row.float(), coo.col)},
        InsumDtypeError,
        "row: expected int32 or int64; got float32",
    ),
    (
        "coo mixed index dtypes",
        coo,
        {"indices": (coo.row, coo.col.long())},
        InsumDtypeError,
        "col: expected int32 as in row; got int64",
    ),
    (
        "coo index on another device",
        coo,
        {"indices": (coo.row, coo.col.to("meta"))},
        InsumDeviceError,
        "col: expected device cpu of values; got meta",
    ),
    (
        "coo list for a tensor",
        coo,
        {"values": [1.0] * 9},
        InsumDtypeError,
        "values: expected a dense tensor (p,); got list",
    ),
    *(
        (
            f"coo {field} of {got}",
            coo,
            {field: (coo.row, tensor) if field == "indices" else tensor},
            InsumDtypeError,
            f"{'col' if field == 'indices' else field}: expected a dense tensor (p,); got {got}",
        )
        for field in ("indices", "values")
        for got, tensor in NOT_DENSE.items()
    ),
    (
        "coo number of facts",
        coo,
        {"index_facts": (IndexFacts(),)},
        InsumFormatError,
        "index_facts: expected 2 IndexFacts, or () for unknown; got 1",
    ),
    (
        "group slots",
        group,
        {"values": torch.ones(6, 3)},
        InsumShapeError,
        "values: expected (g, q) with q = 2 as in col; got shape (6, 3)",
    ),
    (
        "group groups",
        group,
        {"values": torch.ones(5, 2)},
        InsumShapeError,
        "values: expected (g, q) with g = 6 as in row; got shape (5, 2)",
    ),
    (
        "group dimension",
        group,
        {"group_dim": 2},
        InsumShapeError,
        "group_dim: expected 0 <= group_dim < 2; got 2",
    ),
    (
        "group rank",
        group,
        {"shape": (25,)},
        InsumShapeError,
        "shape: expected two dimensions or more; got (25,)",
    ),
    (
        "group number of indices",
        group,
        {"indices": ()},
        InsumShapeError,
        "indices: expected 1 index tensors; got 0",
    ),
    (
        "ell rows",
        ell,
        {"values": torch.ones(4, 3)},
        InsumShapeError,
        "values: expected (m, q) with m = 5 as in shape; got shape (4, 3)",
    ),
    (
        "block shape of values",
        block,
        {"values": torch.ones(6, 2, 3)},
        InsumShapeError,
        "values: expected (p, a, b) with b = 2 as in shape; got shape (6, 2, 3)",
    ),
    (
        "block rank",
        block,
        {"shape": (5, 5, 1)},
        InsumShapeError,
        "shape: expected two dimensions; got (5, 5, 1)",
    ),
    (
        "block group slots",
        block_group,
        {"values": torch.ones(3, 1, 2, 2)},
        InsumShapeError,
        "values: expected (g, q, a, b) with q = 3 as in col; got shape (3, 1, 2, 2)",
    ),
    (
        "block group index dtype",
        block_group,
        {"row": block_group.row.short()},
        InsumDtypeError,
        "row: expected int32 or int64; got int16",
    ),
]


def ids(cases: list[Any]) -> list[str]:
    return [case[0].replace(" ", "-") for case in cases]


@pytest.mark.parametrize(("name", "build", "error", "line"), VALUE_FAULTS, ids=ids(VALUE_FAULTS))
def test_validate_finds(name, build, error, line):
    faulty = build()
    with pytest.raises(error) as caught:
        faulty.validate()
    assert type(caught.value) is error
    assert caught.value.message == f"{type(faulty).__name__} of shape {faulty.shape} breaks its laws"
    assert [detail for detail in caught.value.details if detail.startswith(line)], str(caught.value)
    assert len(caught.value.details) == 1, str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize(("name", "matrix", "fields", "error", "line"), STRUCTURE_FAULTS, ids=ids(STRUCTURE_FAULTS))
def test_constructor_refuses_and_validate_finds(name, matrix, fields, error, line):
    with pytest.raises(error) as caught:
        replace(matrix, **fields)
    assert type(caught.value) is error
    assert caught.value.details == (line,)
    with pytest.raises(InsumFormatError) as late:
        plant(matrix, **fields).validate()
    assert late.value.details == (line,)


def test_every_format_has_planted_faults():
    planted = {type(build()) for _, build, _, _ in VALUE_FAULTS}
    assert planted == {entry.cls for entry in REGISTRY}
    assert {type(matrix) for _, matrix, _, _, _ in STRUCTURE_FAULTS} == planted


def test_message_of_a_range_fault():
    with pytest.raises(InsumRangeError) as caught:
        changed(group, indices=(edited(group.col, (2, 1), 5),)).validate()
    assert str(caught.value) == (
        "GroupCOO of shape (5, 5) breaks its laws\n"
        "  col: expected 0 <= col[g,q] < 5, or -1 in an unused slot; got 5 at [2,1] (1 of 12 entries)\n"
        "  fix: enlarge the shape or drop those entries; negative values do not wrap."
    )
    assert isinstance(caught.value, IndexError)
    assert caught.value.fields["position"] == (2, 1)
    assert caught.value.fields["field"] == "col"


def test_message_lists_all_faults():
    faulty = changed(
        group,
        group_index=edited(group.row, (0,), 9),
        indices=(edited(group.col, (0, 1), -1),),
        index_facts=facts_of(group, 1, masked=False),
    )
    with pytest.raises(InsumFormatError) as caught:
        faulty.validate()
    assert str(caught.value) == (
        "GroupCOO of shape (5, 5) breaks its laws\n"
        "  row: expected 0 <= row[g] < 5; got 9 at [0] (1 of 6 entries)\n"
        "  row: expected ascending entries (its facts say sorted=True); got 0 at [1] after 9\n"
        "  col: expected no unused slot (its facts say masked=False); got -1 at [0,1] (4 of 12 entries)\n"
        "  values: expected 0 in unused slots; got 2.0 at [0,1] (1 of 12 entries)\n"
        "  fix: enlarge the shape or drop those entries; negative values do not wrap."
    )
    assert isinstance(caught.value, ValueError)
    assert len(caught.value.fields["faults"]) == 4


def test_message_of_a_constructor():
    with pytest.raises(InsumShapeError) as caught:
        GroupCOO((3, 4), 0, torch.zeros(2, dtype=torch.int64), (torch.zeros(2, 3),), torch.zeros(2, 4))
    assert str(caught.value) == (
        "GroupCOO of shape (3, 4) cannot hold these tensors\n"
        "  values: expected (g, q) with q = 3 as in col; got shape (2, 4)\n"
        "  fix: give values and col the same extent of q."
    )


@pytest.mark.parametrize("shape", [(), (5, -1), (5, 5.0), None])
def test_shape_is_checked(shape):
    with pytest.raises(InsumShapeError, match="COO (got the shape|needs the shape)"):
        replace(coo, shape=shape)


def test_message_of_from_coo():
    indices = torch.tensor([[0, 1, 7], [1, -1, 2]])
    with pytest.raises(InsumRangeError) as caught:
        COO.from_coo(indices, torch.ones(3), (2, 3))
    assert str(caught.value) == (
        "COO.from_coo cannot build shape (2, 3) from these entries\n"
        "  row: expected 0 <= row[p] < 2; got 7 at [2] (1 of 3 entries)\n"
        "  col: expected 0 <= col[p] < 3; got -1 at [1] (1 of 3 entries)\n"
        "  fix: enlarge the shape or drop those entries; negative values do not wrap."
    )


def test_proven_facts_are_proven_too():
    # `proven` promises what the range check proves, so a false claim is found there.
    claimed = tuple(IndexFacts(masked=False, proven=True) for _ in range(2))
    with pytest.raises(InsumRangeError):
        COO((2, 2), (torch.tensor([0, 2]), torch.tensor([0, 0])), torch.ones(2), claimed).validate()


def test_validate_runs_on_the_device(device):
    moved = group.to(device)
    assert moved.validate() is moved
    bad = moved.with_values(torch.ones_like(moved.values))
    with pytest.raises(InsumFormatError, match=r"0 in unused slots; got 1\.0 at \[1,1\] \(3 of 12 entries\)"):
        bad.validate()


def test_formats_are_frozen_dataclasses():
    for entry in REGISTRY:
        assert dataclasses.is_dataclass(entry.cls)
        assert entry.cls.__dataclass_params__.frozen
        assert not entry.cls.__dataclass_params__.eq

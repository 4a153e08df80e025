"""The case of every format, in each way to build it."""

from __future__ import annotations

from insum_nn import formats
from insum_nn.formats import SparseFormat
from tests.formats.format_case import AnyRankCase, FormatCase
from tests.formats.registry import BY_NAME, REGISTRY

# What formats are derived from.
BASES = {"BlockFormat", "CustomFormat", "SparseFormat"}


def test_every_format_has_a_case():
    kinds = {name: getattr(formats, name) for name in formats.__all__}
    public = {name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, SparseFormat)}
    cases = [case for name, case in globals().items() if name.startswith("Test")]
    assert public - {case.entry.cls.__name__ for case in cases} == BASES
    assert {case.entry.name for case in cases} == {entry.name for entry in REGISTRY}
    assert all(case.entry.any_rank == issubclass(case, AnyRankCase) for case in cases)


class TestCOO(AnyRankCase):
    entry = BY_NAME["coo"]


class TestELL(AnyRankCase):
    entry = BY_NAME["ell"]


class TestELLColumns(AnyRankCase):
    entry = BY_NAME["ell-columns"]


class TestGroupCOO(AnyRankCase):
    entry = BY_NAME["group-auto"]


class TestGroupCOOOf1(AnyRankCase):
    entry = BY_NAME["group-1"]


class TestGroupCOOOf3(AnyRankCase):
    entry = BY_NAME["group-3"]


class TestGroupCOOColumns(AnyRankCase):
    entry = BY_NAME["group-columns"]


class TestBlockCOO(FormatCase):
    entry = BY_NAME["block"]


class TestBlockCOOOfScalars(FormatCase):
    entry = BY_NAME["block-1x1"]


class TestBlockGroupCOO(FormatCase):
    entry = BY_NAME["block-group-auto"]


class TestBlockGroupCOOOf2(FormatCase):
    entry = BY_NAME["block-group-2"]


class TestBlockGroupCOOOfRows(FormatCase):
    entry = BY_NAME["row-block"]

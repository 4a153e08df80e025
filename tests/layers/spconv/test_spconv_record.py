"""Our layers give what spconv 2.3.8 gave for the same parameters, to the last whole number."""

from __future__ import annotations

import json

import pytest

import insum_nn.layers.spconv as spconv
from tests.layers.spconv.spconv_record import CASES, RECORD, digest


@pytest.mark.parametrize("case", CASES)
def test_equals_the_record(case):
    assert digest(spconv, case) == json.loads(RECORD.read_text())[case]

"""Sparse tensors of more than two dimensions, in each format that takes them."""

from __future__ import annotations

import pytest

from tests.formats.registry import REGISTRY

ND_SHAPES: list[tuple[int, ...]] = [(5, 7), (4, 3, 5), (1, 6, 2), (3, 2, 2, 4), (0, 3, 2), (2, 0, 3)]

each_nd_format = pytest.mark.parametrize("entry", [e for e in REGISTRY if e.any_rank], ids=lambda e: e.name)
each_nd_shape = pytest.mark.parametrize("shape", ND_SHAPES, ids=str)

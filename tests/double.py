"""A fixture for modules of tests whose oracles are of e3nn's layers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

__all__ = ["double"]


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """Make float64 the default: e3nn rounds its coefficients to the default dtype. For every test of a module."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)

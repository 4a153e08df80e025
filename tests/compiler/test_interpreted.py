"""The test bench of generated kernels sees an address outside; see test_device_kernels.py for a whole kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.compiler.interpreted import Ranges


def test_a_range_ends_with_its_tensor():
    ranges, memory = Ranges(), torch.zeros(64)
    first, second, inside = memory[:8], memory[16:24], memory[18:20]
    base = memory.data_ptr()
    with pytest.raises(AssertionError, match="reads 1 cells"):
        ranges.check(np.array([base]), True, "reads")
    ranges.enter((second, first, inside, 3, torch.zeros(0)))
    held = [*range(8), *range(16, 24)]
    ranges.check(np.array([base + 4 * n for n in held]), True, "reads")
    for n in (-1, 8, 15, 24):
        with pytest.raises(AssertionError, match="writes 1 cells outside of every tensor"):
            ranges.check(np.array([base, base + 4 * n]), True, "writes")
        ranges.check(np.array([base, base + 4 * n]), np.array([True, False]), "writes")

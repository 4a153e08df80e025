"""The test bench of generated kernels sees what it is there to see; see test_device_kernels.py for whole kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter as interpreter_module
from triton.runtime.interpreter import TensorHandle

from tests.compiler.interpreted import Ranges, interpreter

__all__ = ["interpreter"]

SEMANTIC: Any = interpreter_module.interpreter_semantic
LEAST, LARGEST = -(2**31), 2**31 - 1


def number(*values: int) -> Any:
    kind = tl.block_type(tl.int32, [len(values)])
    return tl.core.tensor(TensorHandle(np.array(values, dtype=np.int32), tl.int32), kind)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("operation", "left", "right"),
    [("add", (LARGEST, 0), (1, 0)), ("sub", (0, LEAST), (0, 1)), ("mul", (1, 2**16), (1, 2**15))],
)
def test_an_integer_that_overflows_is_an_error(operation: str, left: tuple[int, ...], right: tuple[int, ...]):
    run = getattr(SEMANTIC, operation)
    with pytest.raises(AssertionError, match=f"int32 overflow detected for operation {operation}"):
        run(number(*left), number(*right), True)
    fits = run(number(LARGEST - 1, LEAST + 1), number(1, 1), True)
    assert fits.handle.data.dtype == np.int32


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

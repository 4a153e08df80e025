"""Rows that are divided by a hand-written kernel, against the same divided by torch's operators."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from insum_nn.compiler.kernels import row_partition
from insum_nn.compiler.kernels.row_partition import RowPartition, keep_lengths, partition_of

Made = TypeVar("Made")

__all__ = ["LENGTHS", "divided", "wait_for_kernel"]

# Terms of each row: also more rows than a program looks at together, and more ranges of one.
LENGTHS = {
    "few": [5, 0, 64, 1, 0, 7, 130, 2, 0],
    "none divided before": [1, 1, 4000],
    "many": [(7 * row) % 23 for row in range(600)],
    "one": [9],
}


def divided(
    lengths: list[int],
    chunk: int,
    device: torch.device | str,
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
    missing: int = 0,
) -> RowPartition:
    """A partition of rows by the kernel, compared with torch's; without missing entries, lengths are known."""
    index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).int()
    index = torch.nn.functional.pad(index, (missing, 0), value=-1).to(device)
    with patch.object(row_partition, "divide_rows", lambda *_: None):
        want = partition_of(index.clone(), len(lengths), False, chunk)
    if not missing:
        keep_lengths(index, lengths, torch.tensor(lengths, device=device))
    with within():
        got = partition_of(index, len(lengths), False, chunk)
    assert got.split
    for field in fields(RowPartition):
        one, other = getattr(got, field.name), getattr(want, field.name)
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other, field.name
        assert not isinstance(one, Tensor) or not one.data_ptr() % 16
    return got


def wait_for_kernel(run: Callable[[], Made | None]) -> Made:
    """Return what a kernel makes, as soon as it can be launched: until its machine code is there, that is `None`."""
    until = time.monotonic() + 60
    while (made := run()) is None:
        assert time.monotonic() < until
        time.sleep(0.05)
    return made

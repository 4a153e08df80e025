"""Rows that are divided by a hand-written kernel, against the same divided on the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import TypeVar

import torch
from torch import Tensor

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
) -> RowPartition:
    """A partition of rows whose lengths are known on both sides, compared with that of rows that are not known."""
    index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).int().to(device)
    want = partition_of(index.clone(), len(lengths), False, chunk)
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

"""How far a result may lie from its float64 oracle: one table, a reason beside each number.

An error is the largest absolute difference over the largest magnitude of the oracle. Element by element a ratio would
be unbounded wherever the exact sum cancels, so no honest bound exists for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from insum_nn.dtypes import FLOATS

__all__ = ["TOLERANCES", "Kind", "Tolerance", "assert_matches", "tolerance"]

Kind = Literal["copy", "product", "sum", "gradient", "second"]
"""What was done: moved without arithmetic; one product per result; a sum of products; a first or second derivative."""


class Tolerance(NamedTuple):
    """A bound on the error and why it is that large."""

    bound: float
    reason: str


_EXACT = Tolerance(0.0, "numbers are moved, not computed")

TOLERANCES: Mapping[tuple[torch.dtype, Kind], Tolerance] = MappingProxyType(
    {
        **{(dtype, "copy"): _EXACT for dtype in FLOATS},
        (torch.float64, "product"): Tolerance(1e-15, "up to three factors, each product rounds by 1.1e-16"),
        (torch.float64, "sum"): Tolerance(1e-12, "10,000 terms in another order than the oracle's, 1.1e-16 each"),
        (torch.float64, "gradient"): Tolerance(1e-12, "a sum like the value's, over other indices"),
        (torch.float64, "second"): Tolerance(1e-11, "sums of sums: a tenfold of one"),
        (torch.float32, "product"): Tolerance(3e-7, "up to three factors, each product rounds by 6e-8"),
        (torch.float32, "sum"): Tolerance(1e-5, "10,000 terms: roundings of 6e-8 grow with the root of the count"),
        (torch.float32, "gradient"): Tolerance(1e-5, "a sum like the value's, over other indices"),
        (torch.float32, "second"): Tolerance(5e-5, "sums of sums of rounded sums"),
        (torch.float16, "product"): Tolerance(2e-3, "up to three factors; a store in float16 rounds by 4.9e-4"),
        (torch.float16, "sum"): Tolerance(2e-3, "summed in float32; a product's and the sum's store round by 4.9e-4"),
        (torch.float16, "gradient"): Tolerance(3e-3, "reads a rounded value beside what the sum itself rounds"),
        (torch.float16, "second"): Tolerance(5e-3, "reads rounded gradients"),
        (torch.bfloat16, "product"): Tolerance(1.2e-2, "up to three factors; a store in bfloat16 rounds by 3.9e-3"),
        (torch.bfloat16, "sum"): Tolerance(1.2e-2, "summed in float32; stores of products and sum round by 3.9e-3"),
        (torch.bfloat16, "gradient"): Tolerance(2e-2, "reads a rounded value beside what the sum itself rounds"),
        (torch.bfloat16, "second"): Tolerance(4e-2, "reads rounded gradients"),
    }
)


def tolerance(dtype: torch.dtype, kind: Kind) -> float:
    """The bound for results of `dtype`.

    >>> tolerance(torch.float64, "copy")
    0.0
    """
    return TOLERANCES[dtype, kind].bound


def assert_matches(
    actual: Tensor, expected: Tensor, *, dtype: torch.dtype, kind: Kind, scale: float | None = None
) -> None:
    """Assert that a result has the oracle's shape and numbers, and the requested dtype.

    Args:
        actual: of `dtype`, any device.
        expected: the oracle, from the same (rounded) inputs; compared in float64.
        dtype: what `actual` must have; picks the row of the table.
        kind: picks the column.
        scale: the size of the terms that were summed, where they cancel in every element; default the largest
            magnitude of `expected`.

    Raises:
        AssertionError: with the largest error and where it is. NaN equals nothing, not even NaN.

    >>> assert_matches(torch.ones(2), torch.ones(2, dtype=torch.float64), dtype=torch.float32, kind="sum")
    """
    assert actual.dtype == dtype, f"expected dtype {dtype}, got {actual.dtype}"
    assert actual.shape == expected.shape, f"expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
    if expected.numel() == 0:
        return
    got = actual.detach().to(device="cpu", dtype=torch.float64)
    want = expected.detach().to(device="cpu", dtype=torch.float64)
    # Equal infinities differ by nothing; every other non-finite difference is an error.
    difference = torch.where(got == want, 0.0, (got - want).abs())
    if scale is None:
        finite = want[want.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 0.0
    bound = tolerance(dtype, kind) * scale
    bad = ~(difference <= bound)
    if not bool(bad.any()):
        return
    worst = int(torch.where(difference.isnan(), torch.inf, difference).argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), want.shape))
    relative = difference.flatten()[worst].item() / scale if scale else float("inf")
    raise AssertionError(
        f"{int(bad.sum())} of {want.numel()} elements differ; worst at {where}: got {got[where].item()}, "
        f"expected {want[where].item()} (relative error {relative:.3g}, allowed {tolerance(dtype, kind):.3g} for "
        f"{kind} in {dtype}: {TOLERANCES[dtype, kind].reason})"
    )

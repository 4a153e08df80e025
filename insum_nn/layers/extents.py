"""Arguments that are one integer for each axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from insum_nn.errors import InsumShapeError

__all__ = ["IntOrInts", "expand_nd", "expand_pair"]

IntOrInts = int | Sequence[int]


def expand_nd(owner: str, name: str, ndim: int, value: object, least: int) -> list[int]:
    """Return one number repeated, or d numbers after a check.

    Raises:
        InsumShapeError: there are not d integers, or one is below `least`.

    >>> expand_nd("SubMConv3d", "kernel_size", 3, 5, 1)
    [5, 5, 5]
    """
    given: list[Any] = [value] * ndim if isinstance(value, int) else []
    if isinstance(value, Iterable) and not isinstance(value, str):
        given = [*cast("Iterable[Any]", value)]
    values = [int(v) for v in given]
    if len(values) != ndim or values != given or min(values) < least:
        raise InsumShapeError(
            f"{owner}: '{name}' is {value}",
            details=[f"expected {ndim} integers of at least {least}, or one for all"],
            fix=f"pass one integer, or {ndim} of them.",
            argument=name,
            expected=ndim,
            got=value,
        )
    return values


def expand_pair(owner: str, name: str, value: object, least: int) -> tuple[int, int]:
    """Return `expand_nd` of two dimensions.

    >>> expand_pair("PrunedConv2d", "stride", 2, 1)
    (2, 2)
    """
    rows, cols = expand_nd(owner, name, 2, value, least)
    return rows, cols

"""Arguments of constructors: integers, Python's or NumPy's, of sizes and for each axis; and a class's own dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from insum_nn.errors import InsumShapeError
from insum_nn.formats.arguments import expand_nd

__all__ = ["IntOrInts", "OfDimension", "arguments_of", "channels", "expand_nd", "expand_pair", "extent"]

IntOrInts = int | Sequence[int]


class OfDimension:
    """Base of classes of one spatial dimension, which a subclass names: `class SubMConv2d(_SubM, ndim=2)`."""

    NDIM: ClassVar[int]

    def __init_subclass__(cls, *, ndim: int | None = None, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if ndim is not None:
            cls.NDIM = ndim  # pyright: ignore[reportConstantRedefinition] - once for each class


def arguments_of(local: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a constructor by name, from its `locals()`; those of `**rest` too.

    Each constructor here names its arguments as the constructor that it calls does, and hands them all on. So the first
    thing in it must be this call: a variable that is assigned before would be handed on too.
    """
    named = {key: value for key, value in local.items() if key not in ("self", "__class__", "rest")}
    return {**named, **local.get("rest", {})}


def extent(owner: str, name: str, value: object, least: int = 0) -> int:
    """Return `expand_nd` of one dimension: a size, as an int."""
    return expand_nd(owner, name, 1, value, least)[0]


def channels(owner: str, in_channels: object, out_channels: object, groups: object) -> tuple[int, int, int]:
    """Return numbers of channels and of groups, as ints.

    Raises:
        InsumShapeError: one is no integer or too small, or the groups do not divide the channels.
    """
    read, written = extent(owner, "in_channels", in_channels), extent(owner, "out_channels", out_channels)
    count = extent(owner, "groups", groups, 1)
    if read % count or written % count:
        raise InsumShapeError(
            f"{owner}: 'groups' is {count}, with {read} channels in and {written} out",
            details=["expected a number that divides both"],
            fix="choose groups that divide in_channels and out_channels.",
            argument="groups",
            got=groups,
        )
    return read, written, count


def expand_pair(owner: str, name: str, value: object, least: int) -> tuple[int, int]:
    """Return `expand_nd` of two dimensions.

    >>> expand_pair("PrunedConv2d", "stride", 2, 1)
    (2, 2)
    """
    rows, cols = expand_nd(owner, name, 2, value, least)
    return rows, cols

"""What is known about a tensor without reading it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["UNKNOWN", "IndexFacts", "StaticTable"]


@dataclass(frozen=True, slots=True)
class IndexFacts:
    """Facts about one index tensor; set by the builder that guarantees them.

    A fact is a promise: the compiler drops checks, masks or atomics because of it.
    `validate()` of a format, or `validate=True` of a call, proves it against the values.

    Attributes:
        sorted: ascending over the flattened tensor; entries of -1 do not count.
        unique: no value other than -1 stands twice.
        masked: `True`: may hold -1 ("no entry"); `False`: holds none; `None`: unknown.
        proven: every entry is -1 or lies inside the axis that it selects along.
        unique_with: names of index tensors together with which its values are unique: no combination of entries at
            one place, none of them -1, stands twice. Places are matched from the first axis on: `Row[g]` with
            `Col[g,q]`.
    """

    sorted: bool = False
    unique: bool = False
    masked: bool | None = None
    proven: bool = False
    unique_with: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # JSON knows no tuples.
        object.__setattr__(self, "unique_with", tuple(self.unique_with))


UNKNOWN = IndexFacts()


@dataclass(frozen=True, slots=True)
class StaticTable:
    """A tensor whose values are known when a statement is compiled: its shape, and its values row by row.

    Generated kernels write the terms of such tables out as straight-line code. It is a promise like a fact: a call
    passes a tensor of these values.

    >>> import torch
    >>> StaticTable.of(torch.tensor([[1, 2], [3, 4]])).at((1, 0))
    3
    """

    shape: tuple[int, ...]
    values: tuple[int | float, ...]

    @staticmethod
    def of(tensor: Tensor) -> StaticTable:
        """The table of a tensor's values, read now."""
        return StaticTable(tuple(tensor.shape), tuple(tensor.detach().reshape(-1).tolist()))

    def at(self, place: Sequence[int]) -> int | float:
        """The value at a place; -1 outside of the table."""
        flat = 0
        for extent, position in zip(self.shape, place, strict=True):
            if not 0 <= position < extent:
                return -1
            flat = flat * extent + position
        return self.values[flat]

"""What is known about a tensor without reading it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["NO_FACTS", "UNKNOWN", "IndexFacts", "NamedFacts", "StaticTable", "Tables", "repeated"]


@dataclass(frozen=True, slots=True)
class IndexFacts:
    """Facts about one index tensor; set by the builder that guarantees them.

    The compiler drops masks or atomics because of a fact. A builder's fact holds until torch counts a write to the
    tensor; a caller's is read once for each tensor and version of it. `validate()` of a format, or `validate=True` of a
    call, reads it again.

    Attributes:
        sorted: ascending over the flattened tensor; entries of -1 do not count.
        unique: no value but -1 occurs twice.
        masked: `True`: may hold -1 ("no entry"); `False`: holds none, which is an error where it is not proven and not
            so; `None`: unknown.
        proven: every entry is -1 or lies inside the axis that it selects along.
        unique_with: names of index tensors together with which its values are unique: no combination of entries at
            one place, none of them -1, occurs twice. Places are matched from the first axis on: `Row[g]` with
            `Col[g,q]`.
    """

    sorted: bool = False
    unique: bool = False
    masked: bool | None = None
    proven: bool = False
    unique_with: tuple[str, ...] = ()


UNKNOWN = IndexFacts()


class NamedFacts(dict[str, IndexFacts]):
    """Facts by the names of index tensors, as a part of a program's key.

    >>> hash(NamedFacts(Row=UNKNOWN, Col=UNKNOWN)) == hash(NamedFacts(Col=UNKNOWN, Row=UNKNOWN))
    True
    """

    __slots__ = ("_hash",)

    def __hash__(self) -> int:  # type: ignore[override]
        try:
            return self._hash
        except AttributeError:
            self._hash: int = hash(frozenset(self.items()))
            return self._hash

    def __reduce__(self) -> tuple[type[NamedFacts], tuple[dict[str, IndexFacts]]]:
        # Hashes of texts differ between processes.
        return NamedFacts, (dict(self),)


NO_FACTS = NamedFacts()


def repeated(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """A combination of entries that stands at several places, which contradicts `unique_with`; `None`: there is none.

    >>> repeated([torch.tensor([0, 1]), torch.tensor([[3, -1], [3, 4]])]) is None
    True
    >>> repeated([torch.tensor([0, 1]), torch.tensor([[3, -1], [4, 4]])])
    (1, 4)
    """
    rank = max(tensor.ndim for tensor in tensors)
    aligned = [t.detach().reshape(*t.shape, *[1] * (rank - t.ndim)) for t in tensors]
    entries = torch.stack([t.long().reshape(-1) for t in torch.broadcast_tensors(*aligned)])
    found, counts = entries[:, (entries != -1).all(0)].unique(dim=1, return_counts=True)
    twice = found[:, counts > 1]
    return tuple(twice[:, 0].tolist()) if twice.shape[1] else None


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

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """Its values as integers of 64 bits, or as numbers of a floating-point dtype."""
        own = dtype if self.is_floating else torch.int64
        return torch.tensor(self.values, dtype=own, device="cpu").reshape(self.shape)

    @property
    def is_floating(self) -> bool:
        """Whether its values are floating-point numbers."""
        return any(isinstance(value, float) for value in self.values)

    def at(self, place: Sequence[int]) -> int | float:
        """The value at a place; -1 outside of the table."""
        flat = 0
        for extent, position in zip(self.shape, place, strict=True):
            if not 0 <= position < extent:
                return -1
            flat = flat * extent + position
        return self.values[flat]


# Static tables by name.
Tables = tuple[tuple[str, StaticTable], ...]

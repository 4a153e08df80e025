"""What formats of groups share: slots, of which some are unused, for entries with one index in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from insum_nn.facts import IndexFacts
from insum_nn.formats import arguments, checks, convert
from insum_nn.formats.base import IndexPart, RowsAndColumns, dim_field, dim_name
from insum_nn.formats.coo import COO, ThroughCOO

__all__ = ["Entries", "GroupedFormat"]

Entries = tuple[Tensor, list[Tensor], Tensor]
"""Indices along the grouped dimension, ascending, those of the other ones, and values."""


class GroupedFormat(ThroughCOO, RowsAndColumns):
    """Groups of `q` slots; the entries of a group share their index of one dimension.

    Attributes:
        group_dim: the grouped dimension.
        indices: (groups, q) for each other dimension, in ascending order of dimensions; -1 in unused slots.
        values: `Val`, (groups, q); 0 in unused slots.
    """

    group_dim: int
    indices: tuple[Tensor, ...]

    _lay_out: ClassVar[Callable[..., Any]]
    """Stores the entries of a COO, sorted by a dimension, with indices of a dtype."""

    @classmethod
    def _of(cls, coo: COO, index_dtype: torch.dtype | None, *, group_dim: int = 0, **layout: Any) -> Self:
        dtype = arguments.choose_index_dtype(coo.shape, index_dtype)
        (dim,) = arguments.check_dims((group_dim,), coo.ndim, "group_dim")
        others = [index for other, index in enumerate(coo.indices) if other != dim]
        entries = convert.sort_by_key(coo.indices[dim], others, coo.values, ordered=coo._claims[dim].sorted)
        return cls._lay_out(coo, dim, entries, dtype, **layout)

    def __post_init__(self) -> None:
        object.__setattr__(self, "indices", tuple(self.indices))
        self._store()

    @abstractmethod
    def _keys(self) -> Tensor:
        """Return the index of each group along `group_dim`, (groups,)."""

    @abstractmethod
    def _has_ascending_keys(self) -> bool:
        """Return whether the facts say that `_keys()` ascend."""

    @property
    def other_dims(self) -> tuple[int, ...]:
        """The dimensions of `indices`."""
        return tuple(dim for dim in range(self.ndim) if dim != self.group_dim)

    @property
    def nnz(self) -> int:
        """Used slots; reads the device unless the facts say that every slot is used."""
        self._verify()
        return self.values.numel() if self._full() else int((self.indices[0] >= 0).sum())

    def entries(self) -> COO:
        """Return the entries of used slots, in stored order; differentiable in the values."""
        known = self._verify()
        return self._entries()._guaranteed_if(known)

    def _entries(self) -> COO:
        keys, others, values = convert.used_slots(self._keys(), self.indices, self.values, full=self._full())
        indices, proven = [*others], self._proven()
        indices.insert(self.group_dim, keys)
        plain = IndexFacts(masked=False, proven=proven)
        grouped = replace(plain, sorted=self._has_ascending_keys())
        facts = tuple(grouped if dim == self.group_dim else plain for dim in range(self.ndim))
        return COO(self.shape, tuple(indices), values, facts, self.coalesced and self.group_dim == 0)

    def _permuted(self, dims: Sequence[int] | None, **layout: Any) -> Self:
        """Lay out the entries with permuted dimensions: distinct where this format's are."""
        permuted = self.entries().transpose(dims)
        own = replace(permuted, coalesced=True) if self.coalesced else permuted
        return self._of(own, self.index_dtype, group_dim=self.group_dim, **layout)

    def _other_parts(self) -> Iterator[IndexPart]:
        for place, (dim, index) in enumerate(zip(self.other_dims, self.indices, strict=True)):
            name, field = dim_name(dim, self.ndim), dim_field(dim, self.ndim, f"indices[{place}]")
            yield IndexPart(name, field, index, self.value_axes, dim)

    def _ordered_indices(self) -> tuple[Tensor, ...]:
        coo = self._entries()
        return (coo.indices[self.group_dim], *(coo.indices[dim] for dim in self.other_dims))

    def _shape_faults(self) -> list[checks.Fault]:
        shape, dim, count = self.shape, self.group_dim, len(self.indices)
        faults = super()._shape_faults()
        if len(shape) < 2:
            fix = "use COO, or reshape to (1, n)."
            faults.append(checks.Fault("shape", "shape", "two dimensions or more", str(shape), fix))
        elif not 0 <= dim < len(shape):
            fix = "name a dimension of shape."
            faults.append(checks.Fault("group_dim", "shape", f"0 <= group_dim < {len(shape)}", str(dim), fix))
        elif count != len(shape) - 1:
            fix = "pass one index tensor per dimension other than group_dim."
            faults.append(checks.Fault("indices", "shape", f"{len(shape) - 1} index tensors", str(count), fix))
        return faults

    def _repr_parts(self) -> list[str]:
        return [] if self.ndim == 2 and self.group_dim == 0 else [f"group_dim={self.group_dim}"]

"""GroupCOO: entries grouped along one dimension, in groups of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from insum_nn.facts import IndexFacts
from insum_nn.formats import convert
from insum_nn.formats.base import IndexPart, dim_field, dim_name
from insum_nn.formats.coo import COO
from insum_nn.formats.group_size import GroupSize
from insum_nn.formats.grouped import Entries, GroupedFormat

__all__ = ["GroupCOO"]


@dataclass(frozen=True, eq=False, repr=False)
class GroupCOO(GroupedFormat):
    """Groups of `q` slots that share their index of one dimension.

        D[Row[g], Col[g,q]] += Val[g,q]                     grouped along dimension 0
        D[Row[g,q], Col[g]] += Val[g,q]                     grouped along dimension 1
        D[Index0[g,q], Index1[g], Index2[g,q]] += Val[g,q]  of three dimensions, grouped along dimension 1

    Source: Won, Ahrens, Amarasinghe, Emer, Insum (ASPLOS 2026), section 4.1. A group size of 1 is COO; the largest
    occupancy gives ELL without its empty rows.

    Attributes:
        shape: extents of the tensor, two or more.
        group_dim: the grouped dimension.
        group_index: (g,), int32 or int64: the index along `group_dim`. Builders leave it ascending.
        indices: a (g, q) tensor for each other dimension, in ascending order of dimensions; -1 in unused slots.
        values: `Val`, (g, q); 0 in unused slots, so that nothing of a dense operand leaks through them.
        index_facts: facts of `group_index`, then of each of `indices`.
        coalesced: entries ascend by the grouped dimension, then by the others; none twice.

    >>> matrix = GroupCOO.from_dense(torch.tensor([[1.0, 2.0, 3.0], [0.0, 4.0, 0.0]]), group_size=2)
    >>> matrix.row.tolist(), matrix.col.tolist(), matrix.values.tolist()
    ([0, 0, 1], [[0, 1], [2, -1], [1, -1]], [[1.0, 2.0], [3.0, 0.0], [4.0, 0.0]])
    """

    shape: tuple[int, ...]
    group_dim: int
    group_index: Tensor
    indices: tuple[Tensor, ...]
    values: Tensor
    index_facts: tuple[IndexFacts, ...] = ()
    coalesced: bool = False

    value_axes = "gq"
    _index_fields = ("group_index", "indices")

    @classmethod
    def _lay_out(cls, coo: COO, dim: int, entries: Entries, dtype: torch.dtype, group_size: GroupSize = "auto") -> Self:
        groups = convert.group_entries(*entries, group_size, dtype)
        grouped = cls(coo.shape, dim, groups.keys, groups.indices, groups.values, groups.facts, coo.coalesced)
        return grouped._guaranteed()

    # Properties.

    @property
    def group_size(self) -> int:
        """Slots per group, `q`."""
        return self.values.shape[1]

    @property
    def num_groups(self) -> int:
        """Groups, `g`."""
        return self.values.shape[0]

    @property
    def index_parts(self) -> tuple[IndexPart, ...]:
        """The grouped dimension (g,), then (g, q) per other dimension."""
        dim, ndim = self.group_dim, self.ndim
        first = IndexPart(dim_name(dim, ndim), dim_field(dim, ndim, "group_index"), self.group_index, "g", dim)
        return (first, *self._other_parts())

    # Conversions.

    def transpose(self, dims: Sequence[int] | None = None, *, group_size: GroupSize | None = None) -> Self:
        """Permute the dimensions and group again along the same place, `group_dim`.

        Args:
            dims: A permutation of the dimensions; default reverses them.
            group_size: As in `from_coo`; default this format's own.

        Returns:
            A GroupCOO of the permuted shape, differentiable in the values. Duplicates are kept.

        Raises:
            InsumShapeError: `dims` is no permutation.
        """
        return self._permuted(dims, group_size=max(1, self.group_size) if group_size is None else group_size)

    # Pieces.

    def _with_tensors(self, indices: Sequence[Tensor], values: Tensor) -> Self:
        return self._replace(group_index=indices[0], indices=tuple(indices[1:]), values=values)

    def _keys(self) -> Tensor:
        return self.group_index

    def _has_ascending_keys(self) -> bool:
        return self._claims[0].sorted

    def _repr_parts(self) -> list[str]:
        return [*super()._repr_parts(), f"num_groups={self.num_groups}", f"group_size={self.group_size}"]

"""ELL: every row has the same number of slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from insum_nn.errors import InsumFormatError
from insum_nn.facts import IndexFacts
from insum_nn.formats import convert
from insum_nn.formats.base import IndexPart
from insum_nn.formats.coo import COO
from insum_nn.formats.grouped import Entries, GroupedFormat

__all__ = ["ELL"]


@dataclass(frozen=True, eq=False, repr=False)
class ELL(GroupedFormat):
    """`q` slots for each index of one dimension, used or not.

        D[m, Col[m,q]] += Val[m,q]          along dimension 0
        D[Row[m,q], m] += Val[m,q]          along dimension 1: `m` counts columns

    The index along `group_dim` is the position, so nothing is scattered; memory goes with that extent times the
    largest occupancy, empty rows included. Where most rows are empty, take `GroupCOO`.

    Attributes:
        shape: extents of the tensor, two or more.
        group_dim: the dimension whose index is the position.
        indices: an (m, q) tensor for each other dimension, int32 or int64, in ascending order of dimensions; -1 in
            unused slots. `m` is `shape[group_dim]`.
        values: `Val`, (m, q); 0 in unused slots.
        index_facts: facts of each of `indices`.
        coalesced: entries ascend by the position, then by `indices`; none twice.

    >>> matrix = ELL.from_dense(torch.tensor([[1.0, 2.0], [0.0, 4.0]]))
    >>> matrix.col.tolist(), matrix.values.tolist()
    ([[0, 1], [1, -1]], [[1.0, 2.0], [4.0, 0.0]])
    """

    shape: tuple[int, ...]
    group_dim: int
    indices: tuple[Tensor, ...]
    values: Tensor
    index_facts: tuple[IndexFacts, ...] = ()
    coalesced: bool = False

    value_axes = "mq"
    _index_fields = ("indices",)

    @classmethod
    def _lay_out(cls, coo: COO, dim: int, entries: Entries, dtype: torch.dtype, width: int | None = None) -> Self:
        keys, others, values = entries
        _, counts = torch.unique_consecutive(keys, return_counts=True)
        needed = int(counts.max()) if coo.nnz else 0
        if width is not None and (width < needed or width < 0):
            raise InsumFormatError(
                f"{cls.__name__} of width {width} cannot hold {needed} entries at one index of dimension {dim}",
                fix=f"pass width={needed} or more, or leave it out.",
                expected=needed,
                got=width,
            )
        grid = (coo.shape[dim], needed if width is None else width)
        slots = keys.long() * grid[1] + convert.ranks_in_runs(counts, coo.nnz)
        full = grid[0] * grid[1] == coo.nnz
        indices = tuple(convert.fill_slots(index.to(dtype), slots, grid, -1) for index in others)
        values = convert.fill_slots(values, slots, grid)
        facts = (IndexFacts(masked=not full, proven=True),) * len(others)
        return cls(coo.shape, dim, indices, values, facts, coo.coalesced)._guaranteed()

    # Properties.

    @property
    def width(self) -> int:
        """Slots per row, `q`."""
        return self.values.shape[1]

    @property
    def index_parts(self) -> tuple[IndexPart, ...]:
        """One (m, q) tensor per dimension other than `group_dim`."""
        return tuple(self._other_parts())

    # Conversions.

    def transpose(self, dims: Sequence[int] | None = None) -> Self:
        """Permute the dimensions and lay out again along the same place, `group_dim`.

        Args:
            dims: A permutation of the dimensions; default reverses them.

        Returns:
            An ELL of the permuted shape, as wide as needed, differentiable in the values. Duplicates are kept.

        Raises:
            InsumShapeError: `dims` is no permutation.
        """
        return self._permuted(dims)

    # Pieces.

    def _with_tensors(self, indices: Sequence[Tensor], values: Tensor) -> Self:
        return self._replace(indices=tuple(indices), values=values)

    def _keys(self) -> Tensor:
        return torch.arange(self.values.shape[0], dtype=self.index_dtype, device=self.device)

    def _has_ascending_keys(self) -> bool:
        return True

    def _fixed_extents(self) -> dict[str, int]:
        return {"m": self.shape[self.group_dim]}

    def _repr_parts(self) -> list[str]:
        return [*super()._repr_parts(), f"width={self.width}"]

"""BlockGroupCOO: dense blocks grouped by block row, in groups of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from insum_nn.formats import arguments, convert
from insum_nn.formats import blocks as shared
from insum_nn.formats.base import SparseFormat
from insum_nn.formats.block_coo import BlockCOO
from insum_nn.formats.blocks import BlockFormat
from insum_nn.formats.convert import Blocks
from insum_nn.formats.coo import entry_facts
from insum_nn.formats.group_size import GroupSize

__all__ = ["BlockGroupCOO"]


@dataclass(frozen=True, eq=False, repr=False)
class BlockGroupCOO(BlockFormat):
    """Groups of `q` blocks that share their block row.

        D[A*Row[g] + a, B*Col[g,q] + b] += Val[g,q,a,b]     blocks of A rows and B columns

    With blocks of one column, `block_shape=(A, 1)`, a group lists the distinct columns of A rows, with the rows'
    values in each: the row blocks of GraphCUDA.

    Source: Won, Ahrens, Amarasinghe, Emer, Insum (ASPLOS 2026), section 4.1.

    Attributes:
        shape: (m, k); need not be a multiple of the block.
        block_shape: (A, B), rows and columns of one block.
        row: (g,) row in the grid of blocks, int32 or int64. Builders leave it ascending.
        col: (g, q) column in the grid of blocks; -1 in unused slots.
        values: `Val`, (g, q, a, b); differentiable; 0 in unused slots and beyond the shape.
        index_facts: facts of `row` and of `col`.
        coalesced: blocks ascend by (row, col), none twice.

    >>> dense = torch.block_diag(torch.ones(2, 4), torch.ones(2, 2))
    >>> matrix = BlockGroupCOO.from_dense(dense, block_shape=(2, 2), group_size=2)
    >>> matrix.row.tolist(), matrix.col.tolist()
    ([0, 1], [[0, 1], [2, -1]])
    """

    value_axes = "gqab"

    # Builders.

    @classmethod
    def from_dense(
        cls,
        dense: Tensor,
        *,
        block_shape: tuple[int, int],
        group_size: GroupSize = "auto",
        mask: Tensor | None = None,
        index_dtype: torch.dtype | None = None,
    ) -> Self:
        """Store the blocks of a dense matrix that hold a nonzero.

        Args:
            dense: (m, k); differentiable.
            block_shape: Rows and columns of one block.
            group_size: Slots per group, or `"auto"`: the rule of `choose_group_size`.
            mask: As in `BlockCOO.from_dense`.
            index_dtype: torch.int32 or torch.int64; default int32 where every extent fits.

        Returns:
            A coalesced BlockGroupCOO.

        Raises:
            InsumShapeError: `dense` is no matrix, or `mask` or `block_shape` do not fit it.
            InsumFormatError: `group_size` is below 1, or `dense` is sparse.
        """
        found = shared.blocks_from_dense(dense, block_shape, mask)
        return cls._of(*found, index_dtype, group_size=group_size)

    @classmethod
    def from_blocks(
        cls,
        row: Tensor,
        col: Tensor,
        values: Tensor,
        shape: Sequence[int],
        *,
        group_size: GroupSize = "auto",
        coalesce: bool = True,
        index_dtype: torch.dtype | None = None,
    ) -> Self:
        """Group blocks given by their coordinates in the grid.

        Args:
            row: (p,), int32 or int64.
            col: (p,), int32 or int64.
            values: (p, a, b); differentiable. What lies beyond `shape` is dropped.
            shape: (m, k).
            group_size: Slots per group, or `"auto"`: the rule of `choose_group_size`.
            coalesce: Sort by (row, col) and sum duplicates. Otherwise duplicates keep a slot each, and blocks of a
                row keep their order.
            index_dtype: torch.int32 or torch.int64; default int32 where every extent fits.

        Returns:
            A BlockGroupCOO whose indices are proven.

        Raises:
            InsumRangeError: an index lies outside the grid.
            InsumShapeError: lengths disagree.
            InsumDtypeError: indices are not int32 or int64.
            InsumFormatError: `group_size` is below 1.

        >>> row, col = torch.tensor([0, 0, 1]), torch.tensor([1, 0, 0])
        >>> BlockGroupCOO.from_blocks(row, col, torch.ones(3, 2, 2), (4, 4), group_size=2).col.tolist()
        [[0, 1], [0, -1]]
        """
        owner = f"{cls.__name__}.from_blocks"
        found = shared.blocks_from_caller(row, col, values, shape, owner, coalesce=coalesce)
        return cls._of(*found, index_dtype, group_size=group_size)

    @classmethod
    def from_coo(
        cls,
        indices: SparseFormat | Tensor | Sequence[Tensor],
        values: Tensor | None = None,
        shape: Sequence[int] | None = None,
        *,
        block_shape: tuple[int, int] | None = None,
        group_size: GroupSize = "auto",
        index_dtype: torch.dtype | None = None,
    ) -> Self:
        """Pack scalar entries, or another format, into grouped blocks; duplicates are summed.

        Args:
            indices: (2, p), or two tensors (p,), int32 or int64; or any format of this package.
            values: (p,); differentiable. Left out with a format.
            shape: (m, k). Left out with a format.
            block_shape: Rows and columns of one block; default those of a format of blocks.
            group_size: Slots per group, or `"auto"`: the rule of `choose_group_size`.
            index_dtype: torch.int32 or torch.int64; default int32 where every extent fits.

        Returns:
            A coalesced BlockGroupCOO.

        Raises:
            InsumRangeError: an index lies outside `shape`.
            InsumShapeError: no block shape, no matrix, or lengths disagree.
            InsumDtypeError: indices are not int32 or int64.
            InsumFormatError: `group_size` is below 1.

        >>> entries = torch.tensor([[0, 0, 3], [1, 2, 2]])
        >>> BlockGroupCOO.from_coo(entries, torch.ones(3), (4, 4), block_shape=(2, 2), group_size=2).col.tolist()
        [[0, 1], [1, -1]]
        """
        found = shared.blocks_from_entries(indices, values, shape, block_shape, f"{cls.__name__}.from_coo")
        return cls._of(*found, index_dtype, group_size=group_size)

    @classmethod
    def _of(
        cls,
        blocks: Blocks,
        shape: tuple[int, int],
        index_dtype: torch.dtype | None,
        *,
        group_size: GroupSize = "auto",
        proven: bool = True,
    ) -> Self:
        dtype = arguments.choose_index_dtype(shape, index_dtype)
        entries = convert.sort_by_key(blocks.row, [blocks.col], blocks.values, ordered=blocks.coalesced)
        groups = convert.group_entries(*entries, group_size, dtype, proven=proven)
        block_shape = (blocks.values.shape[1], blocks.values.shape[2])
        (col,) = groups.indices
        grouped = cls(shape, block_shape, groups.keys, col, groups.values, groups.facts, blocks.coalesced)
        return grouped._guaranteed_if(proven)

    # Properties.

    @property
    def group_size(self) -> int:
        """Slots per group, `q`."""
        return self.col.shape[1]

    @property
    def num_groups(self) -> int:
        """Groups, `g`."""
        return self.col.shape[0]

    @property
    def num_blocks(self) -> int:
        """Used slots; reads the device unless the facts say that every slot is used."""
        self._verify()
        return self.col.numel() if self._full() else int((self.col >= 0).sum())

    # Conversions.

    def _blocks(self) -> BlockCOO:
        row, (col,), values = convert.used_slots(self.row, [self.col], self.values, full=self._full())
        ordered = bool(self.index_facts) and self.index_facts[0].sorted
        facts = entry_facts(2, ordered=ordered, proven=self._proven())
        return BlockCOO(self.shape, self.block_shape, row, col, values, facts, self.coalesced)

    def transpose(self, *, group_size: GroupSize | None = None) -> Self:
        """Swap rows and columns, of the grid and of each block, and group again by block row.

        Args:
            group_size: As in `from_coo`; default this format's own.

        Returns:
            A BlockGroupCOO of shape (k, m), differentiable in the values. Duplicates are kept.
        """
        turned = self.blocks().transpose()
        blocks = Blocks(turned.row, turned.col, turned.values, turned.coalesced)
        size = max(1, self.group_size) if group_size is None else group_size
        shape, proven = (self.shape[1], self.shape[0]), self._proven()
        return self._of(blocks, shape, self.index_dtype, group_size=size, proven=proven)

    # Pieces.

    def _full(self) -> bool:
        return bool(self.index_facts) and self.index_facts[1].masked is False

    def _repr_parts(self) -> list[str]:
        return [f"block_shape={self.block_shape}", f"num_groups={self.num_groups}", f"group_size={self.group_size}"]

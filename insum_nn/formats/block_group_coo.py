"""BlockGroupCOO: dense blocks grouped by block row, in groups of equal length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from insum_nn.formats import arguments, convert
from insum_nn.formats.blocks import BlockCOO, BlockFormat
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

    @classmethod
    def _of(cls, blocks: BlockCOO, index_dtype: torch.dtype | None, *, group_size: GroupSize = "auto") -> Self:
        dtype, proven = arguments.choose_index_dtype(blocks.shape, index_dtype), blocks._proven()
        entries = convert.sort_by_key(blocks.row, [blocks.col], blocks.values, ordered=blocks.coalesced)
        keys, (col,), values, facts = convert.group_entries(*entries, group_size, dtype, proven=proven)
        grouped = cls(blocks.shape, blocks.block_shape, keys, col, values, facts, blocks.coalesced)
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
        facts = entry_facts(2, ordered=self._claims[0].sorted, proven=self._proven())
        return BlockCOO(self.shape, self.block_shape, row, col, values, facts, self.coalesced)

    def transpose(self, *, group_size: GroupSize | None = None) -> Self:
        """Swap rows and columns, of the grid and of each block, and group again by block row.

        Args:
            group_size: As in `from_coo`; default this format's own.

        Returns:
            A BlockGroupCOO of shape (k, m), differentiable in the values. Duplicates are kept.
        """
        size = max(1, self.group_size) if group_size is None else group_size
        return self._of(self.blocks().transpose(), self.index_dtype, group_size=size)

    # Pieces.

    def _repr_parts(self) -> list[str]:
        return [f"block_shape={self.block_shape}", f"num_groups={self.num_groups}", f"group_size={self.group_size}"]

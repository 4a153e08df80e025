"""BlockCOO: dense blocks with the coordinates of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from insum_nn.formats import arguments, convert
from insum_nn.formats import blocks as shared
from insum_nn.formats.base import SparseFormat
from insum_nn.formats.blocks import BlockFormat
from insum_nn.formats.convert import Blocks
from insum_nn.formats.coo import entry_facts

__all__ = ["BlockCOO"]


@dataclass(frozen=True, eq=False, repr=False)
class BlockCOO(BlockFormat):
    """Rectangular dense blocks, each with its place in a grid.

        D[A*Row[p] + a, B*Col[p] + b] += Val[p,a,b]         blocks of A rows and B columns

    Source: Won, Ahrens, Amarasinghe, Emer, Insum (ASPLOS 2026), section 4.1.

    Attributes:
        shape: (m, k); need not be a multiple of the block.
        block_shape: (A, B), rows and columns of one block.
        row: (p,) row in the grid of blocks, int32 or int64.
        col: (p,) column in the grid of blocks.
        values: `Val`, (p, a, b); differentiable; 0 beyond the shape.
        index_facts: facts of `row` and of `col`.
        coalesced: blocks ascend by (row, col), none twice.

    >>> matrix = BlockCOO.from_dense(torch.tensor([[1.0, 2.0, 0.0], [0.0, 3.0, 4.0]]), block_shape=(2, 2))
    >>> matrix.row.tolist(), matrix.col.tolist(), matrix.values.tolist()
    ([0, 0], [0, 1], [[[1.0, 2.0], [0.0, 3.0]], [[0.0, 0.0], [4.0, 0.0]]])
    """

    value_axes = "pab"

    # Builders.

    @classmethod
    def from_dense(
        cls,
        dense: Tensor,
        *,
        block_shape: tuple[int, int],
        mask: Tensor | None = None,
        index_dtype: torch.dtype | None = None,
    ) -> Self:
        """Store the blocks of a dense matrix that hold a nonzero.

        Args:
            dense: (m, k); differentiable.
            block_shape: Rows and columns of one block.
            mask: bool. Of the shape of `dense`: store the blocks it touches, with 0 where it is false. Of the shape
                of the grid of blocks: store exactly these blocks, zeros included.
            index_dtype: torch.int32 or torch.int64; default int32 where every extent fits.

        Returns:
            A coalesced BlockCOO.

        Raises:
            InsumShapeError: `dense` is no matrix, or `mask` or `block_shape` do not fit it.
            InsumDtypeError: `mask` is not bool.
            InsumFormatError: `dense` is sparse.

        >>> BlockCOO.from_dense(torch.zeros(4, 4), block_shape=(2, 2), mask=torch.eye(2) > 0).num_blocks
        2
        """
        found = shared.blocks_from_dense(dense, block_shape, mask)
        return cls._of(*found, index_dtype)

    @classmethod
    def from_blocks(
        cls,
        row: Tensor,
        col: Tensor,
        values: Tensor,
        shape: Sequence[int],
        *,
        coalesce: bool = True,
        index_dtype: torch.dtype | None = None,
    ) -> Self:
        """Store blocks given by their coordinates in the grid.

        Args:
            row: (p,), int32 or int64.
            col: (p,), int32 or int64.
            values: (p, a, b); differentiable. What lies beyond `shape` is dropped.
            shape: (m, k).
            coalesce: Sort by (row, col) and sum duplicates. Otherwise order and duplicates stay.
            index_dtype: torch.int32 or torch.int64; default int32 where every extent fits.

        Returns:
            A BlockCOO whose indices are proven.

        Raises:
            InsumRangeError: an index lies outside the grid.
            InsumShapeError: lengths disagree.
            InsumDtypeError: indices are not int32 or int64.
            InsumDeviceError: tensors of two devices.

        >>> zero = torch.zeros(1, dtype=torch.int64)
        >>> BlockCOO.from_blocks(zero, zero, torch.ones(1, 2, 2), (2, 3)).to_dense().tolist()
        [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]
        """
        owner = f"{cls.__name__}.from_blocks"
        return cls._of(*shared.blocks_from_caller(row, col, values, shape, owner, coalesce=coalesce), index_dtype)

    @classmethod
    def from_coo(
        cls,
        indices: SparseFormat | Tensor | Sequence[Tensor],
        values: Tensor | None = None,
        shape: Sequence[int] | None = None,
        *,
        block_shape: tuple[int, int] | None = None,
        index_dtype: torch.dtype | None = None,
    ) -> Self:
        """Pack scalar entries, or another format, into the blocks that they touch; duplicates are summed.

        Args:
            indices: (2, p), or two tensors (p,), int32 or int64; or any format of this package.
            values: (p,); differentiable. Left out with a format.
            shape: (m, k). Left out with a format.
            block_shape: Rows and columns of one block; default those of a format of blocks.
            index_dtype: torch.int32 or torch.int64; default int32 where every extent fits.

        Returns:
            A coalesced BlockCOO.

        Raises:
            InsumRangeError: an index lies outside `shape`.
            InsumShapeError: no block shape, no matrix, or lengths disagree.
            InsumDtypeError: indices are not int32 or int64.

        >>> entries = torch.tensor([[0, 3], [1, 2]])
        >>> BlockCOO.from_coo(entries, torch.ones(2), (4, 4), block_shape=(2, 2)).row.tolist()
        [0, 1]
        """
        found = shared.blocks_from_entries(indices, values, shape, block_shape, f"{cls.__name__}.from_coo")
        return cls._of(*found, index_dtype)

    @classmethod
    def _of(cls, blocks: Blocks, shape: tuple[int, int], index_dtype: torch.dtype | None) -> Self:
        dtype = arguments.choose_index_dtype(shape, index_dtype)
        _, a, b = blocks.values.shape
        facts = entry_facts(2, ordered=blocks.coalesced)
        row, col = blocks.row.to(dtype).contiguous(), blocks.col.to(dtype).contiguous()
        return cls(shape, (a, b), row, col, blocks.values, facts, blocks.coalesced)._guaranteed()

    # Properties.

    @property
    def num_blocks(self) -> int:
        """Stored blocks."""
        return self.values.shape[0]

    def occupancy(self) -> Tensor:
        """Return the number of blocks in each block row that has any, (n,) int64, in ascending order of rows."""
        self._verify()
        ordered = bool(self.index_facts) and self.index_facts[0].sorted
        rows = self.row if ordered else self.row.sort().values
        return torch.unique_consecutive(rows, return_counts=True)[1]

    # Conversions.

    def _blocks(self) -> BlockCOO:
        return self

    def coalesce(self) -> Self:
        """Sort blocks by (row, col) and sum duplicates; `self` if that is so already."""
        known = self._verify()
        if self.coalesced:
            return self
        merged = shared.merge_blocks(Blocks(self.row, self.col, self.values, coalesced=False), self.shape)
        own = (merged.row, merged.col, merged.values, entry_facts(2, ordered=True, proven=self._proven()))
        return type(self)(self.shape, self.block_shape, *own, coalesced=True)._guaranteed_if(known)

    def transpose(self) -> Self:
        """Swap rows and columns, of the grid and of each block, and sort again; duplicates are kept."""
        known = self._verify()
        order = convert.lexicographic_order((self.col, self.row), self.grid_shape[::-1])
        values = self.values[order].transpose(1, 2).contiguous()
        shape, block_shape = (self.shape[1], self.shape[0]), (self.block_shape[1], self.block_shape[0])
        row, col, facts = self.col[order], self.row[order], entry_facts(2, ordered=True, proven=self._proven())
        turned = type(self)(shape, block_shape, row, col, values, facts, self.coalesced)
        return turned._guaranteed_if(known)

    # Pieces.

    def _repr_parts(self) -> list[str]:
        return [f"block_shape={self.block_shape}", f"num_blocks={self.num_blocks}"]

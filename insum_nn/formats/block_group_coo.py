"""BlockGroupCOO: dense blocks grouped by block row, in groups of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from insum_nn.facts import IndexFacts
from insum_nn.formats import arguments, checks, convert
from insum_nn.formats import blocks as shared
from insum_nn.formats.base import IndexPart, SparseFormat
from insum_nn.formats.block_coo import BlockCOO
from insum_nn.formats.blocks import BlockFormat
from insum_nn.formats.convert import Blocks
from insum_nn.formats.group_size import GroupSize

__all__ = ["BlockGroupCOO"]


@dataclass(frozen=True, eq=False, repr=False)
class BlockGroupCOO(BlockFormat):
    """Groups of `q` blocks that share their block row.

        D[A*Row[g] + a, B*Col[g,q] + b] += Val[g,q,a,b]     blocks of A rows and B columns

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

    shape: tuple[int, ...]
    block_shape: tuple[int, int]
    row: Tensor
    col: Tensor
    values: Tensor
    index_facts: tuple[IndexFacts, ...] = ()
    coalesced: bool = False

    value_axes = "gqab"
    _index_fields = ("row", "col")

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_shape", arguments.check_block_shape(self.block_shape))
        self._store()

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
        blocks, shape = shared.blocks_from_dense(dense, block_shape, mask)
        return cls._group(shape, blocks, group_size, index_dtype)

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
        blocks, extents = shared.blocks_given(row, col, values, shape, f"{cls.__name__}.from_blocks")
        merged = shared.merge_blocks(blocks, extents) if coalesce else blocks
        return cls._group(extents, merged, group_size, index_dtype)

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
        blocks, extents = shared.blocks_from_entries(indices, values, shape, block_shape, f"{cls.__name__}.from_coo")
        return cls._group(extents, blocks, group_size, index_dtype)

    @classmethod
    def from_torch(
        cls,
        tensor: Tensor,
        *,
        block_shape: tuple[int, int] | None = None,
        group_size: GroupSize = "auto",
        index_dtype: torch.dtype | None = None,
    ) -> Self:
        """Group a torch sparse matrix; BSR and BSC keep their blocks unless `block_shape` asks for others."""
        blocks, extents = shared.blocks_from_torch(tensor, block_shape, f"{cls.__name__}.from_torch")
        return cls._group(extents, blocks, group_size, index_dtype)

    @classmethod
    def from_scipy(
        cls,
        matrix: object,
        *,
        block_shape: tuple[int, int] | None = None,
        group_size: GroupSize = "auto",
        device: torch.device | str | None = None,
        index_dtype: torch.dtype | None = None,
    ) -> Self:
        """Group a scipy sparse matrix; BSR keeps its block shape unless `block_shape` asks for another."""
        blocks, extents = shared.blocks_from_scipy(matrix, block_shape, device, f"{cls.__name__}.from_scipy")
        return cls._group(extents, blocks, group_size, index_dtype)

    @classmethod
    def _group(
        cls,
        shape: tuple[int, int],
        blocks: Blocks,
        group_size: GroupSize,
        index_dtype: torch.dtype | None,
        *,
        proven: bool = True,
    ) -> Self:
        dtype = arguments.choose_index_dtype(shape, index_dtype)
        row, col, values = blocks.row, blocks.col, blocks.values
        if not blocks.coalesced:
            order = row.argsort(stable=True)
            row, col, values = row[order], col[order], values[order]
        layout = convert.group_layout(row, group_size)
        full = layout.num_slots == row.shape[0]
        facts = (
            IndexFacts(sorted=True, unique=layout.one_group_per_key, masked=False, proven=proven),
            IndexFacts(masked=not full, proven=proven),
        )
        grouped = cls(
            shape,
            (values.shape[1], values.shape[2]),
            layout.group_index.to(dtype),
            layout.scatter(col.to(dtype), fill=-1),
            layout.scatter(values),
            facts,
            blocks.coalesced,
        )
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

    @property
    def nnz(self) -> int:
        """Stored scalars inside `shape`, zeros of a block included; reads the device unless every slot is used."""
        own = self.blocks()
        return shared.count_inside(own.row, own.col, self.shape, self.block_shape)

    @property
    def index_parts(self) -> tuple[IndexPart, ...]:
        """`Row` (g,) and `Col` (g, q)."""
        return IndexPart("Row", "row", self.row, "g", 0), IndexPart("Col", "col", self.col, "gq", 1)

    # Conversions.

    def blocks(self) -> BlockCOO:
        """The blocks of used slots, in stored order; differentiable in the values."""
        known = self._verify()
        return self._blocks()._guaranteed_if(known)

    def _blocks(self) -> BlockCOO:
        row = self.row[:, None].expand(self.col.shape).reshape(-1)
        col, values = self.col.reshape(-1), self.values.reshape(-1, *self.block_shape)
        if not self._full():
            used = (col >= 0).nonzero().squeeze(1)
            row, col, values = row[used], col[used], values[used]
        proven, ordered = self._proven(), bool(self.index_facts) and self.index_facts[0].sorted
        facts = (IndexFacts(sorted=ordered, masked=False, proven=proven), IndexFacts(masked=False, proven=proven))
        return BlockCOO(self.shape, self.block_shape, row, col, values, facts, self.coalesced)

    def transpose(self, *, group_size: GroupSize | None = None) -> Self:
        """Swap rows and columns, of the grid and of each block, and group anew by block row.

        Args:
            group_size: As in `from_coo`; default this format's own.

        Returns:
            A BlockGroupCOO of shape (k, m), differentiable in the values. Duplicates are kept.
        """
        turned = self.blocks().transpose()
        blocks = Blocks(turned.row, turned.col, turned.values, turned.coalesced)
        size = max(1, self.group_size) if group_size is None else group_size
        return self._group((self.shape[1], self.shape[0]), blocks, size, self.index_dtype, proven=self._proven())

    # Pieces.

    def _with_tensors(self, indices: Sequence[Tensor], values: Tensor) -> Self:
        return self._replace(row=indices[0], col=indices[1], values=values)

    def _ordered_indices(self) -> tuple[Tensor, ...]:
        own = self._blocks()
        return own.row, own.col

    def _full(self) -> bool:
        return bool(self.index_facts) and self.index_facts[1].masked is False

    def _proven(self) -> bool:
        return bool(self.index_facts) and all(facts.proven for facts in self.index_facts)

    def _value_faults(self) -> list[checks.Fault]:
        fault = self._overhang_fault(self.row[:, None].expand(self.col.shape), self.col)
        return super()._value_faults() + ([fault] if fault is not None else [])

    def _repr_parts(self) -> list[str]:
        return [f"block_shape={self.block_shape}", f"num_groups={self.num_groups}", f"group_size={self.group_size}"]

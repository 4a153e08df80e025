"""Formats of dense blocks: what they share, and BlockCOO, which lists blocks by their coordinates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from insum_nn.errors import InsumShapeError
from insum_nn.facts import IndexFacts
from insum_nn.formats import arguments, checks, convert
from insum_nn.formats.base import IndexPart, SparseFormat
from insum_nn.formats.coo import COO, ThroughCOO, as_coo, entry_facts
from insum_nn.sorted_rows import compressed_rows

__all__ = ["BlockCOO", "BlockFormat"]


@dataclass(frozen=True, eq=False, repr=False)
class BlockFormat(ThroughCOO):
    """A matrix of dense blocks on a grid that covers it.

    The shape need not be a multiple of the block: what an edge block holds beyond the shape is 0.

    Attributes:
        shape: (m, k).
        block_shape: rows and columns of one block.
        row: row in the grid of blocks, of each block or group, int32 or int64.
        col: column in the grid of each block; -1 in unused slots.
        values: `Val`, the blocks.
        index_facts: facts of `row` and of `col`.
        coalesced: blocks ascend by (row, col), none twice.
    """

    shape: tuple[int, ...]
    block_shape: tuple[int, int]
    row: Tensor
    col: Tensor
    values: Tensor
    index_facts: tuple[IndexFacts, ...] = ()
    coalesced: bool = False

    _index_fields = ("row", "col")

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_shape", arguments.check_block_shape(self.block_shape))
        self._store()

    _of: ClassVar[Callable[..., Any]]
    """Stores the blocks of a `BlockCOO`, with indices of a dtype or `None`, and what else a builder was given."""

    # Builders.

    @classmethod
    def from_dense(
        cls,
        dense: Tensor,
        *,
        block_shape: tuple[int, int],
        mask: Tensor | None = None,
        index_dtype: torch.dtype | None = None,
        **layout: Any,
    ) -> Self:
        """Store the blocks of a dense matrix that hold a nonzero.

        Args:
            dense: (m, k); differentiable.
            block_shape: Rows and columns of one block.
            mask: bool. Of the shape of `dense`: store the blocks it touches, with 0 where it is false. Of the shape
                of the grid of blocks: store exactly these blocks, zeros included.
            index_dtype: torch.int32 or torch.int64; default int32 where every extent fits.
            layout: Of `BlockGroupCOO`, `group_size`: slots per group, or `"auto"`: the rule of `choose_group_size`.

        Returns:
            A coalesced format.

        Raises:
            InsumShapeError: `dense` is no matrix, or `mask` or `block_shape` do not fit it.
            InsumDtypeError: `mask` is not bool.
            InsumFormatError: `dense` is sparse, or `group_size` is below 1.

        >>> BlockCOO.from_dense(torch.zeros(4, 4), block_shape=(2, 2), mask=torch.eye(2) > 0).num_blocks
        2
        """
        shape = arguments.require_dense(dense, "from_dense", "dense").shape
        extents = arguments.require_matrix(shape, "a format of blocks")
        own = convert.dense_blocks(dense, arguments.check_block_shape(block_shape), mask)
        return cls._of(_coalesced(extents, *own), index_dtype, **layout)

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
        **layout: Any,
    ) -> Self:
        """Store blocks given by their coordinates in the grid.

        Args:
            row: (p,), int32 or int64.
            col: (p,), int32 or int64.
            values: (p, a, b); differentiable. What lies beyond `shape` is dropped.
            shape: (m, k).
            coalesce: Sort by (row, col) and sum duplicates. Otherwise duplicates stay, in their order; groups ascend
                all the same.
            index_dtype: torch.int32 or torch.int64; default int32 where every extent fits.
            layout: As in `from_dense`.

        Returns:
            A format whose indices are proven.

        Raises:
            InsumRangeError: an index lies outside the grid.
            InsumShapeError: lengths disagree.
            InsumDtypeError: indices are not int32 or int64.
            InsumDeviceError: tensors of two devices.
            InsumFormatError: `group_size` is below 1.

        >>> zero = torch.zeros(1, dtype=torch.int64)
        >>> BlockCOO.from_blocks(zero, zero, torch.ones(1, 2, 2), (2, 3)).to_dense().tolist()
        [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]
        """
        owner = f"{cls.__name__}.from_blocks"
        extents = arguments.require_matrix(arguments.check_shape(shape, owner), "a format of blocks")
        if arguments.require_dense(values, owner, "values").ndim != 3:
            raise InsumShapeError(
                f"{owner} needs values (p, a, b), got shape {tuple(values.shape)}",
                fix="pass one (a, b) block per entry.",
            )
        block_shape = arguments.check_block_shape(values.shape[1:])
        convert.check_entries(owner, convert.block_grid(extents, block_shape), (row, col), values, ("row", "col"))
        outside = _overhang(row, col, extents, block_shape)
        if outside is not None:
            values = values.masked_fill(outside, 0)
        facts = entry_facts(2, ordered=False)
        own = BlockCOO(extents, block_shape, row.long(), col.long(), values, facts)._guaranteed()
        return cls._of(own.coalesce() if coalesce else own, index_dtype, **layout)

    @classmethod
    def from_coo(  # pyright: ignore[reportIncompatibleMethodOverride] - duplicates are summed in any case
        cls,
        indices: SparseFormat | Tensor | Sequence[Tensor],
        values: Tensor | None = None,
        shape: Sequence[int] | None = None,
        *,
        block_shape: tuple[int, int] | None = None,
        index_dtype: torch.dtype | None = None,
        **layout: Any,
    ) -> Self:
        """Pack scalar entries, or another format, into the blocks that they touch; duplicates are summed.

        A format of blocks of this shape keeps its structure.

        Args:
            indices: (2, p), or two tensors (p,), int32 or int64; or any format of this package.
            values: (p,); differentiable. Left out with a format.
            shape: (m, k). Left out with a format.
            block_shape: Rows and columns of one block; default those of a format of blocks.
            index_dtype: torch.int32 or torch.int64; default int32 where every extent fits.
            layout: As in `from_dense`.

        Returns:
            A coalesced format.

        Raises:
            InsumRangeError: an index lies outside `shape`.
            InsumShapeError: no block shape, no matrix, or lengths disagree.
            InsumDtypeError: indices are not int32 or int64.
            InsumFormatError: `group_size` is below 1.

        >>> entries = torch.tensor([[0, 3], [1, 2]])
        >>> BlockCOO.from_coo(entries, torch.ones(2), (4, 4), block_shape=(2, 2)).row.tolist()
        [0, 1]
        """
        own = indices.block_shape if isinstance(indices, BlockFormat) else None
        chosen = arguments.check_block_shape(own if block_shape is None else block_shape)
        if isinstance(indices, BlockFormat) and own == chosen and values is None and shape is None:
            same = indices.blocks().coalesce()
            if same._proven():
                return cls._of(same, index_dtype, **layout)
            return cls.from_blocks(same.row, same.col, same.values, same.shape, index_dtype=index_dtype, **layout)
        coo = as_coo(indices, values, shape, f"{cls.__name__}.from_coo")
        extents = arguments.require_matrix(coo.shape, "a format of blocks")
        packed = convert.pack_blocks(coo.row, coo.col, coo.values, extents, chosen)
        return cls._of(_coalesced(extents, *packed), index_dtype, **layout)

    @classmethod
    def from_torch(
        cls,
        tensor: Tensor,
        *,
        block_shape: tuple[int, int] | None = None,
        index_dtype: torch.dtype | None = None,
        **layout: Any,
    ) -> Self:
        """Store a torch sparse matrix; BSR and BSC keep their blocks unless `block_shape` asks for others.

        See `COO.from_torch`, and `from_coo` for the other arguments.
        """
        convert.check_torch(tensor)
        layout["index_dtype"] = index_dtype
        if tensor.layout in (torch.sparse_bsr, torch.sparse_bsc):
            (row, col), values = convert.uncompressed(tensor), tensor.values()
            if block_shape is None or tuple(block_shape) == tuple(values.shape[1:]):
                return cls.from_blocks(row, col, values, tensor.shape, **layout)
        return super().from_torch(tensor, block_shape=block_shape, **layout)

    @classmethod
    def from_scipy(cls, matrix: object, *, block_shape: tuple[int, int] | None = None, **layout: Any) -> Self:
        """Store a scipy sparse matrix; BSR keeps its block shape unless `block_shape` asks for another.

        See `COO.from_scipy`, and `from_coo` for the other arguments.
        """
        if block_shape is None and getattr(matrix, "format", None) == "bsr":
            block_shape = getattr(matrix, "blocksize", None)
        return super().from_scipy(matrix, block_shape=block_shape, **layout)

    @abstractmethod
    def _blocks(self) -> BlockCOO:
        """`blocks` without a check of the facts."""

    def blocks(self) -> BlockCOO:
        """Return the stored blocks without padding, in stored order; differentiable in the values."""
        known = self._verify()
        return self._blocks()._guaranteed_if(known)

    @property
    def index_parts(self) -> tuple[IndexPart, ...]:
        """`Row` and `Col`, with the first axes of the values."""
        axes = self.value_axes.removesuffix("ab")
        return IndexPart("Row", "row", self.row, axes[0], 0), IndexPart("Col", "col", self.col, axes, 1)

    @property
    def nnz(self) -> int:
        """Stored scalars inside `shape`, zeros of a block included; may read the device."""
        own = self.blocks()
        outside = _overhang(own.row, own.col, self.shape, self.block_shape)
        return own.values.numel() - (0 if outside is None else int(outside.sum()))

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """Rows and columns of the grid of blocks."""
        return convert.block_grid(self.shape, self.block_shape)

    @property
    def ragged(self) -> bool:
        """Whether edge blocks reach beyond the shape."""
        return any(extent % block for extent, block in zip(self.shape, self.block_shape, strict=True))

    def entries(self) -> COO:
        """Return the scalars of every stored block inside `shape`, block after block, zeros included."""
        own = self.blocks()
        indices, values = convert.expand_blocks(own.row, own.col, own.values, self.shape)
        facts = IndexFacts(masked=False, proven=own._proven())
        flat = tuple(index.to(self.index_dtype) for index in indices)
        return COO(self.shape, flat, values, (facts, facts))._guaranteed_if(own._proven())

    def to_dense(self) -> Tensor:
        """Return the dense matrix; duplicate blocks are summed (fp16 and bf16 in float32)."""
        own = self.blocks()
        (a, b), (rows, cols) = self.block_shape, convert.block_grid(self.shape, self.block_shape)
        slots = own.row.long() * cols + own.col
        # Coalesced blocks land in cells of their own: a copy, exact and deterministic.
        place = convert.scatter_rows if own.coalesced else convert.sum_rows
        tiles = place(own.values, slots, rows * cols).reshape(rows, cols, a, b)
        return tiles.transpose(1, 2).reshape(rows * a, cols * b)[: self.shape[0], : self.shape[1]]

    def to_torch(self, layout: torch.layout = torch.sparse_bsr) -> Tensor:
        """Return torch's own sparse matrix, differentiable in the values (by torch's rules, so once only).

        Args:
            layout: torch.sparse_bsr or torch.sparse_bsc, which need a shape that is a multiple of the block; or a
                layout of `COO.to_torch`.

        Raises:
            InsumShapeError: blocks reach beyond the shape.
            InsumFormatError: another layout.
        """
        if layout not in (torch.sparse_bsr, torch.sparse_bsc):
            return self.to_coo().to_torch(layout)
        if self.ragged:
            raise InsumShapeError(
                f"{layout} needs a shape that is a multiple of the block",
                details=[f"shape {self.shape}, block_shape {self.block_shape}"],
                fix="pad the matrix, or ask for torch.sparse_csr.",
                shape=self.shape,
                block_shape=self.block_shape,
            )
        by_row = layout == torch.sparse_bsr
        own = (self.blocks() if by_row else self.blocks().transpose()).coalesce()
        pointers = compressed_rows(own.row, own.grid_shape[0])
        values = own.values if by_row else own.values.transpose(1, 2).contiguous()
        make = torch.sparse_bsr_tensor if by_row else torch.sparse_bsc_tensor
        return make(pointers, own.col, values, size=self.shape, check_invariants=False)

    def _fixed_extents(self) -> dict[str, int]:
        return {"a": self.block_shape[0], "b": self.block_shape[1]}

    def _shape_faults(self) -> list[checks.Fault]:
        faults = super()._shape_faults()
        if len(self.shape) != 2:
            fix = "pass the shape of a matrix."
            faults.append(checks.Fault("shape", "shape", "two dimensions", str(self.shape), fix))
        return faults

    def _with_tensors(self, indices: Sequence[Tensor], values: Tensor) -> Self:
        return self._replace(row=indices[0], col=indices[1], values=values)

    def _ordered_indices(self) -> tuple[Tensor, ...]:
        own = self._blocks()
        return own.row, own.col

    def _value_faults(self) -> list[checks.Fault]:
        faults = super()._value_faults()
        row = self.row if self.row.ndim == self.col.ndim else self.row[:, None].expand(self.col.shape)
        outside = _overhang(row, self.col, self.shape, self.block_shape)
        if outside is None:
            return faults
        # Values beyond the shape are 0. A block that is not on the grid at all is the fault of its index.
        on_grid = (row < self.grid_shape[0]) & (self.col < self.grid_shape[1])
        stray = outside & on_grid[..., None, None] & (self.values != 0)
        fix = "rebuild it with from_blocks, which cuts the edge blocks."
        fault = checks.entry_fault("values", self.values, stray, f"0 beyond the edge of shape {self.shape}", fix)
        return faults if fault is None else [*faults, fault]


def _overhang(row: Tensor, col: Tensor, shape: Sequence[int], block_shape: tuple[int, int]) -> Tensor | None:
    """Return which elements of each block lie beyond the shape, (..., a, b) bool; `None` where no block can."""
    if shape[0] % block_shape[0] == 0 and shape[1] % block_shape[1] == 0:
        return None
    beyond: list[Tensor] = []
    for index, extent, block in zip((row, col), shape, block_shape, strict=True):
        offsets = torch.arange(block, device=index.device)
        beyond.append(index.long()[..., None] * block + offsets >= extent)
    return beyond[0][..., :, None] | beyond[1][..., None, :]


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

    @classmethod
    def _of(cls, blocks: BlockCOO, index_dtype: torch.dtype | None) -> Self:
        dtype, facts = arguments.choose_index_dtype(blocks.shape, index_dtype), blocks.index_facts
        row, col = blocks.row.to(dtype).contiguous(), blocks.col.to(dtype).contiguous()
        return cls(blocks.shape, blocks.block_shape, row, col, blocks.values, facts, blocks.coalesced)._guaranteed()

    # Properties.

    @property
    def num_blocks(self) -> int:
        """Stored blocks."""
        return self.values.shape[0]

    def occupancy(self) -> Tensor:
        """Return the number of blocks in each block row that has any, (n,) int64, in ascending order of rows."""
        self._verify()
        rows = self.row if self._claims[0].sorted else self.row.sort().values
        return torch.unique_consecutive(rows, return_counts=True)[1]

    # Conversions.

    def _blocks(self) -> BlockCOO:
        return self

    def coalesce(self) -> Self:
        """Sort blocks by (row, col) and sum duplicates (fp16 and bf16 in float32); `self` if that is so already."""
        known = self._verify()
        if self.coalesced:
            return self
        order = convert.lexicographic_order((self.row, self.col), self.grid_shape)
        (row, col), values = convert.merge_duplicates((self.row[order], self.col[order]), self.values[order])
        facts = entry_facts(2, ordered=True, proven=self._proven())
        merged = type(self)(self.shape, self.block_shape, row, col, values, facts, coalesced=True)
        return merged._guaranteed_if(known)

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


def _coalesced(shape: tuple[int, int], row: Tensor, col: Tensor, values: Tensor) -> BlockCOO:
    """Return blocks that a builder made: ascending, none twice."""
    block_shape = (values.shape[1], values.shape[2])
    made = BlockCOO(shape, block_shape, row, col, values, entry_facts(2, ordered=True), coalesced=True)
    return made._guaranteed()

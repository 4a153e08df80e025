"""What formats of dense blocks share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from insum_nn.errors import InsumShapeError
from insum_nn.facts import IndexFacts
from insum_nn.formats import arguments, checks, convert
from insum_nn.formats.base import IndexPart, SparseFormat
from insum_nn.formats.convert import Blocks
from insum_nn.formats.coo import COO, as_coo, scipy_tensors
from insum_nn.sorted_rows import compressed_rows

if TYPE_CHECKING:
    from insum_nn.formats.block_coo import BlockCOO

__all__ = [
    "BlockFormat",
    "blocks_from_caller",
    "blocks_from_dense",
    "blocks_from_entries",
    "merge_blocks",
]


@dataclass(frozen=True, eq=False, repr=False)
class BlockFormat(SparseFormat):
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
    """Stores blocks, of a shape, with indices of a dtype or `None`, and what else a builder was given."""

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
        owner = f"{cls.__name__}.from_torch"
        convert.check_torch(tensor)
        if tensor.layout in (torch.sparse_bsr, torch.sparse_bsc):
            row, col, values = convert.compressed_blocks(tensor)
            if block_shape is None or tuple(block_shape) == tuple(values.shape[1:]):
                return cls._of(*blocks_from_caller(row, col, values, tensor.shape, owner), index_dtype, **layout)
        coo = COO.from_torch(tensor, index_dtype=torch.int64)
        return cls._of(*blocks_from_entries(coo, None, None, block_shape, owner), index_dtype, **layout)

    @classmethod
    def from_scipy(
        cls,
        matrix: object,
        *,
        block_shape: tuple[int, int] | None = None,
        device: torch.device | str | None = None,
        index_dtype: torch.dtype | None = None,
        **layout: Any,
    ) -> Self:
        """Store a scipy sparse matrix; BSR keeps its block shape unless `block_shape` asks for another.

        See `COO.from_scipy`, and `from_coo` for the other arguments.
        """
        if block_shape is None and getattr(matrix, "format", None) == "bsr":
            block_shape = getattr(matrix, "blocksize", None)
        shape, indices, values = scipy_tensors(matrix, device)
        found = blocks_from_entries(indices, values, shape, block_shape, f"{cls.__name__}.from_scipy")
        return cls._of(*found, index_dtype, **layout)

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
        return _count_inside(own.row, own.col, self.shape, self.block_shape)

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
        if layout == torch.sparse_bsr:
            own = self.blocks().coalesce()
            pointers = compressed_rows(own.row, own.grid_shape[0])
            return torch.sparse_bsr_tensor(pointers, own.col, own.values, size=self.shape, check_invariants=False)
        own = self.blocks().transpose().coalesce()
        pointers = compressed_rows(own.row, own.grid_shape[0])
        values = own.values.transpose(1, 2).contiguous()
        return torch.sparse_bsc_tensor(pointers, own.col, values, size=self.shape, check_invariants=False)

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
        fault = self._overhang_fault()
        return super()._value_faults() + ([fault] if fault is not None else [])

    def _overhang_fault(self) -> checks.Fault | None:
        """Return a value other than 0 in the part of an edge block that lies beyond the shape."""
        row = self.row if self.row.ndim == self.col.ndim else self.row[:, None].expand(self.col.shape)
        outside = _overhang(row, self.col, self.shape, self.block_shape)
        if outside is None:
            return None
        # A block that is not on the grid at all is the fault of its index.
        on_grid = (row < self.grid_shape[0]) & (self.col < self.grid_shape[1])
        stray = outside & on_grid[..., None, None] & (self.values != 0)
        fix = "rebuild it with from_blocks, which cuts the edge blocks."
        return checks.entry_fault("values", self.values, stray, f"0 beyond the edge of shape {self.shape}", fix)


def _overhang(row: Tensor, col: Tensor, shape: Sequence[int], block_shape: tuple[int, int]) -> Tensor | None:
    """Return which elements of each block lie beyond the shape, (..., a, b) bool; `None` where no block can."""
    if shape[0] % block_shape[0] == 0 and shape[1] % block_shape[1] == 0:
        return None
    beyond: list[Tensor] = []
    for index, extent, block in zip((row, col), shape, block_shape, strict=True):
        offsets = torch.arange(block, device=index.device)
        beyond.append(index.long()[..., None] * block + offsets >= extent)
    return beyond[0][..., :, None] | beyond[1][..., None, :]


def _count_inside(row: Tensor, col: Tensor, shape: Sequence[int], block_shape: tuple[int, int]) -> int:
    """Elements of the blocks (p,) that lie inside the shape."""
    a, b = block_shape
    if shape[0] % a == 0 and shape[1] % b == 0:
        return row.numel() * a * b
    rows = (shape[0] - row.long() * a).clamp(max=a)
    cols = (shape[1] - col.long() * b).clamp(max=b)
    return int((rows * cols).sum())


def merge_blocks(blocks: Blocks, shape: Sequence[int]) -> Blocks:
    """Return blocks sorted by (row, col), duplicates summed (fp16 and bf16 in float32)."""
    if blocks.coalesced:
        return blocks
    grid = convert.block_grid(shape, arguments.check_block_shape(blocks.values.shape[1:]))
    order = convert.lexicographic_order((blocks.row, blocks.col), grid)
    indices = (blocks.row[order], blocks.col[order])
    (row, col), values = convert.merge_duplicates(indices, blocks.values[order])
    return Blocks(row, col, values, coalesced=True)


def blocks_from_dense(
    dense: Tensor, block_shape: tuple[int, int], mask: Tensor | None
) -> tuple[Blocks, tuple[int, int]]:
    """Return blocks of a dense matrix that hold a nonzero, or that `mask` touches."""
    shape = arguments.require_matrix(arguments.require_dense(dense, "from_dense", "dense").shape, "a format of blocks")
    return convert.dense_blocks(dense, arguments.check_block_shape(block_shape), mask), shape


def blocks_from_caller(
    row: Tensor, col: Tensor, values: Tensor, shape: Sequence[int], owner: str, *, coalesce: bool = True
) -> tuple[Blocks, tuple[int, int]]:
    """Return blocks from a caller: checked, proven, cut at the edges of `shape`, and merged unless told otherwise."""
    extents = arguments.require_matrix(arguments.check_shape(shape, owner), "a format of blocks")
    if arguments.require_dense(values, owner, "values").ndim != 3:
        raise InsumShapeError(
            f"{owner} needs values (p, a, b), got shape {tuple(values.shape)}", fix="pass one (a, b) block per entry."
        )
    block_shape = arguments.check_block_shape(values.shape[1:])
    convert.check_entries(owner, convert.block_grid(extents, block_shape), (row, col), values, ("row", "col"))
    outside = _overhang(row, col, extents, block_shape)
    if outside is not None:
        values = values.masked_fill(outside, 0)
    blocks = Blocks(row.long(), col.long(), values, coalesced=False)
    return merge_blocks(blocks, extents) if coalesce else blocks, extents


def blocks_from_entries(
    indices: SparseFormat | Tensor | Sequence[Tensor],
    values: Tensor | None,
    shape: Sequence[int] | None,
    block_shape: tuple[int, int] | None,
    owner: str,
) -> tuple[Blocks, tuple[int, int]]:
    """Return the arguments of a `from_coo` as coalesced blocks; a format of such blocks keeps its structure."""
    own = indices.block_shape if isinstance(indices, BlockFormat) else None
    chosen = arguments.check_block_shape(own if block_shape is None else block_shape)
    if isinstance(indices, BlockFormat) and own == chosen and values is None and shape is None:
        source = indices.blocks().coalesce()
        if not all(facts.proven for facts in source.facts.values()):
            return blocks_from_caller(source.row, source.col, source.values, source.shape, owner)
        blocks = Blocks(source.row.long(), source.col.long(), source.values, coalesced=True)
        return blocks, arguments.require_matrix(source.shape, owner)
    coo = as_coo(indices, values, shape, owner)
    extents = arguments.require_matrix(coo.shape, "a format of blocks")
    return convert.pack_blocks(coo.row, coo.col, coo.values, extents, chosen), extents

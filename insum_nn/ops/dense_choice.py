"""The dense matrix of blocks, for products that torch's library forms faster than kernels over the blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from insum_nn.compiler.api import Explanation, compile_built, contract, gathers_blocks
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.facts import IndexFacts
from insum_nn.kept import TensorCache
from insum_nn.ops.arguments import run
from insum_nn.structure.constants import plain_tensors

__all__ = ["block_tiles", "explain_tiles"]


def explain_tiles(
    values: Tensor,
    index: Mapping[str, Tensor],
    grid: tuple[int, int],
    facts: Mapping[str, IndexFacts],
    options: Options = DEFAULT,
    *,
    measure: bool = False,
) -> Explanation:
    """What becomes of the statement that `block_tiles` runs for ungrouped blocks; the arguments are the same."""
    shape = (grid[0], values.shape[1], grid[1], values.shape[2])
    if _gathers(values, facts, options):
        named = {"Val": values, "Slot": _slots(index["Row"], index["Col"], grid)}
        return compile_built(_GATHER, facts=_SLOT, options=options).explain(
            tensors=named, out_shape=shape, measure=measure
        )
    named = {"Row": index["Row"], "Col": index["Col"], "Val": values}
    return compile_built(_BLOCKS, facts=facts, options=options).explain(tensors=named, out_shape=shape, measure=measure)


def block_tiles(
    values: Tensor,
    index: Mapping[str, Tensor],
    grid: Sequence[int],
    facts: Mapping[str, IndexFacts],
    options: Options = DEFAULT,
) -> Tensor:
    """The dense matrix of blocks, (rows * a, cols * b); differentiable.

        D[Row[p],a,Col[p],b] += Val[p,a,b]
        D[Row[g],a,Col[g,q],b] += Val[g,q,a,b]          with groups of blocks that share their row
        D[i,a,j,b] += Val[Slot[i,j],a,b]                on a GPU, where each block stands once: one pass, no zeros first

    It is formed at each call, of constant values too: a write through `values.data` leaves no trace by which a
    kept matrix could be told to be stale, and the matrix takes more memory than the blocks do.

    Args:
        values: `Val`.
        index: `Row` and `Col`.
        grid: block rows and columns of the matrix.
        facts: of `Row` and `Col`; blocks that stand once each (`unique_with`) are stored, others are added.
        options: compile options.

    >>> index = {"Row": torch.tensor([0, 1]), "Col": torch.tensor([0, 1])}
    >>> block_tiles(torch.ones(2, 1, 2), index, (2, 2), {}).tolist()
    [[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]
    """
    (rows, cols), (a, b) = grid, values.shape[-2:]
    named = {"Row": index["Row"], "Col": index["Col"]}
    if _gathers(values, facts, options):
        tiles = contract(_Gathered(named, (rows, cols), facts, options, values.ndim), "D", values)
    else:
        tiles = _scattered(values, named, (rows, cols), facts, options)
    return tiles.reshape(rows * a, cols * b)


def _scattered(
    values: Tensor,
    index: Mapping[str, Tensor],
    grid: tuple[int, int],
    facts: Mapping[str, IndexFacts],
    options: Options,
) -> Tensor:
    """(rows, a, cols, b) from blocks that are written to their places; differentiable."""
    expression, (a, b) = _BLOCKS if values.ndim == 3 else _GROUPS, values.shape[-2:]
    return run(expression, facts, {**index, "Val": values}, options, (grid[0], a, grid[1], b))


_BLOCKS = "D[Row[p],a,Col[p],b] += Val[p,a,b]"
_GROUPS = "D[Row[g],a,Col[g,q],b] += Val[g,q,a,b]"
_GATHER = "D[i,a,j,b] += Val[Slot[i,j],a,b]"
_ADJOINT = {3: "Val[p,a,b] += D[Row[p],a,Col[p],b]", 4: "Val[g,q,a,b] += D[Row[g],a,Col[g,q],b]"}
_EACH_OTHER = MappingProxyType({"D": ("Val",), "Val": ("D",)})
_SLOT = {"Slot": IndexFacts(masked=True, unique=True, proven=True)}


def _gathers(values: Tensor, facts: Mapping[str, IndexFacts], options: Options) -> bool:
    """Whether the matrix is gathered: on a GPU, where it is known that no block has a place twice."""
    if options.validate:
        # The places of blocks are an index tensor of their own: `Row` and `Col` are to be read.
        return False
    once = any({name, *f.unique_with} == {"Row", "Col"} and f.proven for name, f in facts.items())
    return once and gathers_blocks(values, options)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """The dense matrix, gathered from the blocks, and its gradient, gathered at the blocks."""

    index: Mapping[str, Tensor]
    grid: tuple[int, int]
    facts: Mapping[str, IndexFacts]
    options: Options
    rank: int

    @property
    def operands(self) -> Mapping[str, tuple[str, ...]]:
        return _EACH_OTHER

    def in_modes(self, wanted: str, operands: tuple[Tensor, ...], start: Tensor | None = None) -> Tensor:
        """By `Row` and `Col`, which programs differentiate."""
        if wanted == "D":
            return _scattered(operands[0], self.index, self.grid, self.facts, self.options)
        return self._blocks(operands[0])

    def eager(
        self, wanted: str, operands: tuple[Tensor, ...], made: dict[str, Tensor], start: Tensor | None = None
    ) -> Tensor:
        if wanted == "Val":
            return self._blocks(operands[0])
        blocks = operands[0].flatten(0, -3)
        named = {"Val": blocks, "Slot": _slots(self.index["Row"], self.index["Col"], self.grid)}
        return run(_GATHER, _SLOT, named, self.options, (self.grid[0], blocks.shape[1], self.grid[1], blocks.shape[2]))

    def _blocks(self, dense: Tensor) -> Tensor:
        return run(_ADJOINT[self.rank], self.facts, {**self.index, "D": dense}, self.options, (None,) * self.rank)


_known: TensorCache[Tensor] = TensorCache(limit=256)


def _slots(row: Tensor, col: Tensor, grid: tuple[int, int]) -> Tensor:
    """(rows, cols) the number of the block that stands there, or -1; kept for as long as the index tensors."""

    def build() -> Tensor:
        with plain_tensors(row, col):
            rows = row.reshape(-1, *(1,) * (col.ndim - 1)).expand_as(col).reshape(-1).long()
            cols = col.reshape(-1).long()
            stored = (rows >= 0) & (cols >= 0)
            # Slots without a block are written to a cell that is cut off.
            place = torch.where(stored, rows * grid[1] + cols, grid[0] * grid[1])
            slots = torch.full((grid[0] * grid[1] + 1,), -1, dtype=torch.int32, device=row.device)
            slots[place] = torch.arange(cols.shape[0], dtype=torch.int32, device=row.device)
            return slots[:-1].reshape(grid)

    return _known.get([row, col], grid, build)

"""Kernel maps as a table with one column per output, for kernels that keep an output tile and run over its offsets.

At one offset an output meets at most one input, so a map is a table `neighbours` of (offset, output). A tile of outputs
has to run over every offset that any of its members has; the fewer kinds of members it has, the less of that is in
vain. So outputs are sorted by their mask: the offsets that they have, as bits.

Nothing here reads the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from insum_nn.facts import IndexFacts

__all__ = ["MASK_BITS", "TABLE_FACTS", "NeighbourTable", "neighbour_rows", "order_by_mask"]

# Offsets to a word of a mask: words are int64 and never negative, so that they sort as their bits read.
MASK_BITS = 56
# Offsets whose bits are put together at a time: what that takes is this times as large as a word.
_BITS_AT_ONCE = 8
# What the builder guarantees of a table's index tensors. `masked` holds also where every output meets an input at every
# offset: one program serves the tables of all maps.
TABLE_FACTS: Mapping[str, IndexFacts] = {
    "Order": IndexFacts(unique=True, masked=False, proven=True),
    "Near": IndexFacts(masked=True, proven=True),
}


@dataclass(frozen=True, eq=False)
class NeighbourTable:
    """A kernel map by outputs.

    Laws: `neighbours[o, p]` is the input that output p meets at offset o, or -1; `order` is a permutation of the
    outputs in which masks ascend, equal ones by row. Of two masks that is the smaller whose last differing offset is
    missing.

    Attributes:
        neighbours: (o, m) int32.
        masks: (w, m) int64, w = ceil(o / 56): bit b of word v says whether the output has offset 56 v + b.
        order: (m,) int32.

    >>> rows = torch.tensor([[-1, 0, -1], [0, 1, 2], [1, -1, -1]], dtype=torch.int32)
    >>> table = order_by_mask(rows)
    >>> table.masks.tolist(), table.order.tolist(), table.tile_offsets(2).tolist()
    ([[6, 3, 2]], [2, 1, 0], [[True, True, False], [False, True, True]])
    """

    neighbours: Tensor
    masks: Tensor
    order: Tensor

    @property
    def num_offsets(self) -> int:
        """Kernel offsets, `o`."""
        return self.neighbours.shape[0]

    @property
    def num_outputs(self) -> int:
        """Rows that own a column, `m`."""
        return self.neighbours.shape[1]

    @cached_property
    def sorted_neighbours(self) -> Tensor:
        """(o, m) int32, contiguous: the columns of `neighbours` in the order of `order`; kept once built."""
        return self.neighbours.index_select(1, self.order)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The index tensors by their names in expressions: `Order[i]` meets `Near[k,i]` at offset k."""
        return {"Order": self.order, "Near": self.sorted_neighbours}

    def tile_offsets(self, tile: int) -> Tensor:
        """Which offsets each tile of consecutive outputs of `order` has to run over.

        Args:
            tile: outputs of a tile; the last tile may have fewer.

        Returns:
            (ceil(m / tile), o) bool.
        """
        present = self.sorted_neighbours >= 0
        missing = -self.num_outputs % tile
        if missing:
            present = torch.cat([present, present.new_zeros(self.num_offsets, missing)], dim=1)
        return present.unflatten(1, (present.shape[1] // tile, tile)).any(2).T.contiguous()


def neighbour_rows(offset: Tensor, in_index: Tensor, out_index: Tensor, volume: int, outputs: int) -> Tensor:
    """The inputs of every (offset, output), from groups of pairs.

        Table[Off[g],OutIdx[g,q]] = InIdx[g,q]

    Args:
        offset: `Off`, (g,).
        in_index: `InIdx`, (g, q); -1 in unused slots.
        out_index: `OutIdx`, (g, q); -1 in the same slots. At one offset every output stands at most once.
        volume: offsets, o.
        outputs: rows of the result, m.

    Returns:
        (o, m) int32; -1 where there is no pair.
    """
    # Unused slots write into one cell more, after the last.
    place = torch.where(out_index >= 0, offset.long()[:, None] * outputs + out_index, volume * outputs)
    table = torch.full((volume * outputs + 1,), -1, dtype=torch.int32, device=in_index.device)
    table.scatter_(0, place.reshape(-1), in_index.int().reshape(-1))
    return table[:-1].view(volume, outputs)


def order_by_mask(neighbours: Tensor) -> NeighbourTable:
    """Sort the outputs of a table (o, m) by the offsets that they have; see `NeighbourTable`."""
    volume, outputs = neighbours.shape
    device = neighbours.device
    masks = torch.zeros(-(-volume // MASK_BITS), outputs, dtype=torch.int64, device=device)
    for start in range(0, volume, _BITS_AT_ONCE):
        word, first = divmod(start, MASK_BITS)
        present = (neighbours[start : start + _BITS_AT_ONCE] >= 0).long()
        bits = torch.arange(first, first + present.shape[0], device=device)
        masks[word] += (present << bits[:, None]).sum(0)
    # From the least word to the greatest, each keeping the order of those before it where it does not decide.
    order = torch.arange(outputs, device=device)
    for word in masks:
        order = order[word[order].argsort(stable=True)]
    return NeighbourTable(neighbours, masks, order.int())

"""The two forms of a kernel map: pairs in groups by offset, and a table with one column for each output.

Groups have equal length, so that a whole group shares one slice of the weights.

The table serves kernels that keep a tile of outputs and run over its offsets. At one offset an output meets at most one
input, so a map is a table `neighbours` of (offset, output). A tile has to run over every offset that any of its outputs
has; the fewer kinds of outputs it holds, the fewer of those products are of missing entries. So outputs are sorted by
their mask: the offsets that they have, as bits. Nothing of it reads the device; numbers of offsets are sent there once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from insum_nn.facts import IndexFacts, NamedFacts
from insum_nn.structure.kernel_map.device_kernels import (
    TableMemory,
    exchanged_table,
    pair_lists,
    sorted_table,
)
from insum_nn.structure.kernel_map.mask_bits import MASK_BITS, compared_offsets
from insum_nn.structure.transfers import constant

__all__ = [
    "GROUP_SIZE",
    "LIST_FACTS",
    "MASK_BITS",
    "MOST_ENTRIES",
    "TABLE_FACTS",
    "Groups",
    "NeighbourTable",
    "Pairs",
    "groups_in_graph",
    "groups_of_table",
    "list_of_groups",
    "list_of_table",
    "neighbour_rows",
    "order_by_mask",
]

# What holds of the lists of pairs.
LIST_FACTS = NamedFacts(
    {
        "Off": IndexFacts(sorted=True, masked=False, proven=True),
        "OutIdx": IndexFacts(masked=False, proven=True),
        "InIdx": IndexFacts(masked=False, proven=True),
    }
)

GROUP_SIZE = 128
"""Slots of a group in graphs."""

# Else the longest that leaves few slots unused is taken.
_GROUP_SIZES = (GROUP_SIZE, 64, 32, 16)
_MAX_UNUSED = 0.25
_POWERS = tuple(1 << bit for bit in range(MASK_BITS))
# Cells past each row of a table that is written in any order, for what is not to be written; a power of two.
_SPARE = 1024
# Entries of the largest table: past it (1 GiB of int32, in either direction) the pairs take far less memory.
MOST_ENTRIES = 1 << 28
# What the builder guarantees of a table's index tensors. `masked` holds also where every output meets an input at every
# offset: one program serves the tables of all maps.
TABLE_FACTS = NamedFacts(
    {
        "Order": IndexFacts(unique=True, masked=False, proven=True),
        "Near": IndexFacts(masked=True, proven=True),
    }
)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Triples (offset, output row, input row), ascending by offset, then output, then input: int64 (p,) each."""

    offset: Tensor
    output: Tensor
    input: Tensor


class Groups(NamedTuple):
    """Pairs in groups.

    Attributes:
        offset: `Off`, (g,) int32, ascending; in graphs g = min(p, p // 128 + o), of which the last may have no pair.
        in_index: `InIdx`, (g, q) int32; -1 in unused slots.
        out_index: `OutIdx`, the same of outputs.
        filled: (o,) int64: pairs of each offset.
        slots: (p,) int64: where each pair stands; from its length a tracer knows the number of pairs.
        counts: `filled` as numbers, where they were read.
    """

    offset: Tensor
    in_index: Tensor
    out_index: Tensor
    filled: Tensor
    slots: Tensor
    counts: tuple[int, ...] | None = None


def groups_in_graph(
    near: Tensor, count: int | None = None, plan: Callable[[Tensor], tuple[int, int]] | None = None
) -> Groups:
    """Return the pairs of a table (o, m) of the input row that each output meets at each offset, or -1, in groups.

    Args:
        near: the table, outputs by row.
        count: its pairs; default: the device is read.
        plan: given the pairs of each offset, tells slots of a group and how many groups there are; default: as in
            graphs, which cannot read them.
    """
    volume, device = near.shape[0], near.device
    offset, output = _places(near >= 0, count).T.contiguous().unbind(0)
    pairs = offset.shape[0]
    starts = torch.searchsorted(offset, torch.arange(volume + 1, device=device))
    filled = starts[1:] - starts[:-1]
    # At each offset at most one group is not full, and none is empty: without rows to point at there is no group.
    most: Any = torch.sym_min(pairs, pairs // GROUP_SIZE + volume) if plan is None else 0
    size, number = (GROUP_SIZE, most) if plan is None else plan(filled)
    own = (filled + (size - 1)).div(size, rounding_mode="floor")
    ends = own.cumsum(0)
    slots = torch.arange(pairs, device=device) + ((ends - own) * size - starts[:-1])[offset]
    groups = torch.searchsorted(ends, torch.arange(number, device=device), right=True).clamp(max=volume - 1)
    empty = torch.full((number * size,), -1, dtype=torch.int32, device=device)
    tables = [empty.scatter(0, slots, rows.int()).view(number, size) for rows in (near[offset, output], output)]
    return Groups(groups.int(), tables[0], tables[1], filled, slots)


def _places(present: Tensor, count: int | None) -> Tensor:
    """Return the positions of true elements, (count, dimensions); reads the device where the count is unknown."""
    return present.nonzero_static(size=count) if count else present.nonzero()


def groups_of_table(neighbours: Tensor, counts: tuple[int, ...] | None = None) -> Groups:
    """Return the groups of a table of neighbours (o, m), outputs by row; one operator under `torch.compile`.

    A group has 128, 64, 32 or 16 slots: the most that leave at most a quarter as many slots unused as there are pairs.

    Args:
        neighbours: the table.
        counts: the pairs of each offset; default: they are read.

    >>> groups = groups_of_table(torch.tensor([[0, 1], [-1, -1], [-1, 2]], dtype=torch.int32))
    >>> groups.offset.tolist(), groups.in_index[:, :2].tolist(), groups.out_index[:, :2].tolist(), groups.counts
    ([0, 2], [[0, 1], [2, -1]], [[0, 1], [1, -1]], (2, 0, 1))
    """
    if torch.compiler.is_compiling():
        group: Any = torch.ops.insum_nn.kernel_map_groups if torch.compiler.is_dynamo_compiling() else _groups
        return Groups(*group(neighbours))
    read = counts

    def plan(filled: Tensor) -> tuple[int, int]:
        nonlocal read
        read = tuple(filled.tolist()) if read is None else read
        return _choose_group_size(read)

    return groups_in_graph(neighbours, None if counts is None else sum(counts), plan)._replace(counts=read)


def list_of_table(neighbours: Tensor, count: int | None = None) -> dict[str, Tensor]:
    """Return the pairs of a table of neighbours (o, m), outputs by row, as `Off`, `OutIdx`, `InIdx`: int32 (p,) each.

    Ascending by offset, then output.

    Args:
        neighbours: the table.
        count: its pairs; default: the device is read.
    """
    # Each begins at a multiple of 16 bytes, or the machine code of what reads them would depend on their number.
    places = _places(neighbours >= 0, count and -(-count // 4) * 4)
    found = places.T.to(torch.int32, memory_format=torch.contiguous_format)
    offset, output = places[:count].unbind(1)
    offsets, outputs = found[:, :count].unbind(0)
    return {"Off": offsets, "OutIdx": outputs, "InIdx": neighbours[offset, output]}


def list_of_groups(groups: Groups) -> dict[str, Tensor]:
    """Return the same from groups."""
    cell = (groups.in_index >= 0).view(-1).nonzero().squeeze(1)
    offset = groups.offset[:, None].expand(groups.in_index.shape).reshape(-1)
    parts = {"Off": offset, "OutIdx": groups.out_index.reshape(-1), "InIdx": groups.in_index.reshape(-1)}
    return {name: part.index_select(0, cell) for name, part in parts.items()}


torch.library.define("insum_nn::kernel_map_groups", "(Tensor near) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")


def _groups(near: Tensor) -> tuple[Tensor, ...]:
    return tuple(groups_in_graph(near.long())[:5])


torch.library.impl("insum_nn::kernel_map_groups", "CompositeImplicitAutograd", _groups)


def _choose_group_size(counts: Sequence[int]) -> tuple[int, int]:
    """Return slots of a group, and the groups."""
    total, size, groups = sum(counts), 0, 0
    for size in _GROUP_SIZES:
        groups = sum(-(-count // size) for count in counts)
        if size * groups - total <= _MAX_UNUSED * total:
            break
    return size, groups


@dataclass(frozen=True, eq=False)
class NeighbourTable:
    """A kernel map by outputs.

    Laws: `order` is a permutation of the outputs; `sorted_neighbours[o, i]` is the input that output `order[i]` meets
    at offset o, or -1. Masks ascend, where of two masks that is the smaller whose last differing offset is missing; in
    the table that `mirrored` gives, those of the table it is made from do. A mask tells of each offset whether it is
    missing; of kernels with more than 31, only of 31 offsets that are spread over the kernel. Sorted by these, tiles
    have fewer offsets than sorted by all, where hardly two masks are equal and the last offsets decide alone.

    Attributes:
        order: (m,) int32.
        sorted_neighbours: (o, m) int32, contiguous.
        words: (m,) int32: the masks in that order, where they hold all offsets and are known.
        memory: one int32 tensor that holds the table and what `TableMemory` lists, where hand-written kernels sorted
            it; else `None`.
        at: the offsets of these parts in `memory`.
        counted: whether `memory` holds the number of pairs of each offset.

    >>> rows = torch.tensor([[-1, 0, -1], [0, 1, 2], [1, -1, -1]], dtype=torch.int32)
    >>> table = order_by_mask(rows)
    >>> table.words.tolist(), table.order.tolist()
    ([2, 3, 6], [2, 1, 0])
    """

    order: Tensor
    sorted_neighbours: Tensor
    words: Tensor | None = None
    memory: Tensor | None = None
    at: TableMemory | None = None
    counted: bool = False

    @property
    def counts(self) -> Tensor:
        """(o,) int32 or int64: pairs of each offset."""
        memory, at = self.memory, self.at
        if memory is None or at is None or not self.counted:
            return (self.sorted_neighbours >= 0).sum(1)
        return memory.as_strided((at.volume,), (1,), at.counts)

    @property
    def neighbours(self) -> Tensor:
        """(o, m) int32: the columns in the order of the outputs' rows; not kept."""
        return torch.empty_like(self.sorted_neighbours).index_copy_(1, self.order.long(), self.sorted_neighbours)

    def pair_list(self, count: int) -> dict[str, Tensor]:
        """Return every pair once, as `list_of_table` does; of one offset, in the order of the columns."""
        lists, memory, at = None, self.memory, self.at
        if memory is not None and at is not None and self.counted:
            lists = pair_lists(memory, at, count)
        if lists is None:
            found = list_of_table(self.sorted_neighbours, count)
            return found | {"OutIdx": self.order[found["OutIdx"]]}
        return {"Off": lists[0], "OutIdx": lists[1], "InIdx": lists[2]}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The index tensors by their names in expressions: `Order[i]` meets `Near[k,i]` at offset k."""
        return {"Order": self.order, "Near": self.sorted_neighbours}

    def mirrored(self) -> NeighbourTable:
        """Return the table of a map whose offsets are those of this one read backwards; shares `order`.

        The inverse of a submanifold map of odd extents is one: a voxel is another's neighbour where that is its
        neighbour on the other side.
        """
        return NeighbourTable(self.order, self.sorted_neighbours.flip(0))

    def exchanged(self, inputs: int) -> Tensor:
        """Return (o, n) int32: the output that each of n inputs meets at each offset, or -1."""
        near, order, device = self.sorted_neighbours, self.order, self.order.device
        found = exchanged_table(near, order, inputs)
        if found is not None:
            return found
        # What is missing is written past the inputs, to many cells, as many writes to one cell would wait in line: -1
        # modulo the number of a spare cell is the cell before it. All other entries are less, and stay.
        columns = torch.arange(near.shape[1], dtype=torch.int32, device=device)
        spare = columns.bitwise_and(constant((_SPARE - 1,), device)).add_(inputs + 1)
        table = torch.full((near.shape[0], inputs + _SPARE), -1, dtype=torch.int32, device=device)
        return table.scatter_(1, near.remainder(spare), order.expand(near.shape))[:, :inputs]


def neighbour_rows(offset: Tensor, in_index: Tensor, out_index: Tensor, volume: int, outputs: int) -> Tensor:
    """Return the inputs of every (offset, output), from groups of pairs.

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


def order_by_mask(neighbours: Tensor, rows: Tensor | None = None) -> NeighbourTable:
    """Sort the outputs of a table by the offsets that they have; see `NeighbourTable`.

    Args:
        neighbours: (o, m) int32.
        rows: (m,) int32: the output of each column; default: the column. Outputs of equal masks stay in the order of
            the columns.
    """
    found = sorted_table(neighbours, rows)
    if found is not None:
        return NeighbourTable(*found)
    volume, device = neighbours.shape[0], neighbours.device
    compared = neighbours
    if volume > MASK_BITS:
        compared = neighbours.index_select(0, constant(compared_offsets(volume), device))
    bits = constant(_POWERS[: compared.shape[0]], device, torch.int32)[:, None]
    words, order = ((compared >= 0) * bits).sum(0, dtype=torch.int32).sort(stable=True)
    owners = order.int() if rows is None else rows.index_select(0, order)
    return NeighbourTable(owners, neighbours.index_select(1, order), None if volume > MASK_BITS else words)

"""The pairs of a kernel map, cut into groups of equal length, so that a whole group shares one slice of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from insum_nn.facts import IndexFacts

__all__ = [
    "LIST_FACTS",
    "Groups",
    "Pairs",
    "group_pairs",
    "groups_of_table",
    "identity_groups",
    "list_of_groups",
    "list_of_table",
]

# What holds of the lists of pairs.
LIST_FACTS: Mapping[str, IndexFacts] = {
    "Off": IndexFacts(sorted=True, masked=False, proven=True),
    "OutIdx": IndexFacts(masked=False, proven=True),
    "InIdx": IndexFacts(masked=False, proven=True),
}

# Slots of a group: the longest that leaves few slots unused is taken.
_GROUP_SIZES = (128, 64, 32, 16)
_MAX_UNUSED = 0.25
# What int32 can number. The compiler is told, for a statement asks whether its index tensors can address its operands.
_MOST = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Pairs:
    """Triples (offset, output row, input row), ascending by offset, then output, then input: int64 (p,) each."""

    offset: Tensor
    output: Tensor
    input: Tensor


class Groups(NamedTuple):
    """Pairs in groups.

    Attributes:
        offset: `Off`, (g,) int32.
        in_index: `InIdx`, (g, q) int32.
        out_index: `OutIdx`, (g, q) int32.
        filled: (o,) int64: pairs of each offset.
        counts: `filled` as numbers, where they were read.
    """

    offset: Tensor
    in_index: Tensor
    out_index: Tensor
    filled: Tensor
    counts: tuple[int, ...] | None


def group_pairs(pairs: Pairs, volume: int, group_size: int | None = None) -> Groups:
    """Cut the pairs of each offset into groups.

    Args:
        pairs: ascending by offset.
        volume: kernel offsets.
        group_size: slots of a group; default: the longest of 128, 64, 32 and 16 that leaves at most a quarter as many
            slots unused as there are pairs.

    Returns:
        `Off` (g,), `InIdx` (g, q), `OutIdx` (g, q), all int32, and the pairs of each offset, (o,) and as numbers.

    >>> rows = torch.tensor([0, 1, 2])
    >>> group_pairs(Pairs(torch.tensor([0, 0, 2]), rows, rows), 3, group_size=2)[:2]
    (tensor([0, 2], dtype=torch.int32), tensor([[ 0,  1],
            [ 2, -1]], dtype=torch.int32))
    """
    device = pairs.offset.device
    filled = torch.bincount(pairs.offset, minlength=volume)
    counts: tuple[int, ...] = tuple(filled.tolist())
    size = group_size or _choose_group_size(counts)
    num_groups = sum(-(-count // size) for count in counts)
    groups = (filled + (size - 1)) // size
    first_slot = (groups.cumsum(0) - groups) * size
    first_pair = filled.cumsum(0) - filled
    slots = torch.arange(sum(counts), device=device) + (first_slot - first_pair)[pairs.offset]
    offset = torch.arange(volume, dtype=torch.int32, device=device).repeat_interleave(groups, output_size=num_groups)
    tables: list[Tensor] = []
    for rows in (pairs.input, pairs.output):
        table = torch.full((num_groups * size,), -1, dtype=torch.int32, device=device)
        tables.append(table.scatter_(0, slots, rows.int()).reshape(num_groups, size))
    return Groups(offset, tables[0], tables[1], filled, counts)


def identity_groups(count: int, device: torch.device) -> Groups:
    """Groups of the identity of rows; no element is read."""
    size = _choose_group_size((count,))
    rows = torch.arange(-(-count // size) * size, dtype=torch.int32, device=device)
    table = torch.where(rows < count, rows, -1).reshape(-1, size)
    offset = torch.zeros(table.shape[0], dtype=torch.int32, device=device)
    return Groups(offset, table, table, torch.full((1,), count, device=device), (count,))


def groups_of_table(neighbours: Tensor) -> Groups:
    """The groups of a table of neighbours (o, m), outputs by row; one operator under `torch.compile`."""
    if torch.compiler.is_compiling():
        offset, in_index, out_index, filled = torch.ops.insum_nn.kernel_map_groups(neighbours)
        return Groups(offset, in_index, out_index, filled, None)
    offset, output = (neighbours >= 0).nonzero(as_tuple=True)
    return group_pairs(Pairs(offset, output, neighbours[offset, output].long()), neighbours.shape[0])


def list_of_table(neighbours: Tensor) -> dict[str, Tensor]:
    """The pairs of a table of neighbours (o, m), outputs by row, as `Off`, `OutIdx`, `InIdx`: int32 (p,) each.

    Ascending by offset, then output. Reads the device.
    """
    outputs = neighbours.shape[1]
    cell = (neighbours >= 0).view(-1).nonzero().squeeze(1)
    offset = cell.div(max(1, outputs), rounding_mode="floor")
    output = torch.sub(cell, offset, alpha=outputs).int()
    return {"Off": offset.int(), "OutIdx": output, "InIdx": neighbours.reshape(-1).index_select(0, cell)}


def list_of_groups(groups: Groups) -> dict[str, Tensor]:
    """The same from groups."""
    cell = (groups.in_index >= 0).view(-1).nonzero().squeeze(1)
    offset = groups.offset[:, None].expand(groups.in_index.shape).reshape(-1)
    parts = {"Off": offset, "OutIdx": groups.out_index.reshape(-1), "InIdx": groups.in_index.reshape(-1)}
    return {name: part.index_select(0, cell) for name, part in parts.items()}


@torch.library.custom_op("insum_nn::kernel_map_groups", mutates_args=())
def _groups(neighbours: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = groups_of_table(neighbours)
    return found.offset, found.in_index, found.out_index, found.filled


@_groups.register_fake
def _groups_fake(neighbours: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    context = torch.library.get_ctx()
    groups, slots = context.new_dynamic_size(max=_MOST), context.new_dynamic_size(max=_MOST)
    return (
        neighbours.new_empty(groups),
        neighbours.new_empty(groups, slots),
        neighbours.new_empty(groups, slots),
        neighbours.new_empty(neighbours.shape[0], dtype=torch.int64),
    )


def _choose_group_size(counts: Sequence[int]) -> int:
    total = sum(counts)
    for size in _GROUP_SIZES:
        slots = size * sum(-(-count // size) for count in counts)
        if slots - total <= _MAX_UNUSED * total:
            return size
    return _GROUP_SIZES[-1]

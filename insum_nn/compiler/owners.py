"""Which program walks which terms: the terms of a scattered sum by the output row that owns them, built once and kept.

Sorting the terms costs more than one sum, and a training loop scatters by the same index tensor again and again. So
what is built from an index tensor is kept for as long as the tensor lives and is not written to.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from insum_nn.compiler.bind import Extents
from insum_nn.compiler.kernel_form import Form

__all__ = ["Owners", "clear_owners", "known_owners", "owners_for", "owners_of", "steps_of"]

# Index tensors whose owners are kept.
_LIMIT = 256
# Rows up to which they are divided on the host.
_FEW_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Owners:
    """The terms of every output row, as ranges.

    Attributes:
        rows: number of ranges.
        begin: (rows + 1,) where each range begins; without division a range ends where the next begins.
        end: (rows,) where each ends, if rows are divided.
        target: (rows,) the output row of a range, or -1 - s for a part of a divided row, whose sum is left in slot s.
        owner: (rows,) the output row that a range belongs to, divided or not.
        order: (terms,) the terms in the order of their rows; `None`: they are in order.
        slots: parts of divided rows.
        divided: (d,) the output rows that are divided, ascending.
        first: (d + 1,) the slot of the first part of each, and the number of slots; parts of a row are in order.
    """

    rows: int
    begin: Tensor
    end: Tensor | None = None
    target: Tensor | None = None
    owner: Tensor | None = None
    order: Tensor | None = None
    slots: int = 0
    divided: Tensor | None = None
    first: Tensor | None = None

    @property
    def split(self) -> bool:
        return self.end is not None

    def collect(self, parts: Tensor) -> Tensor:
        """The sums of divided rows from those of their parts (slots, ...), added in order."""
        assert self.first is not None
        shape = (self.first.shape[0] - 1, *parts.shape[1:])
        if parts[0].numel() == 0:
            return parts.new_zeros(shape)
        flat = parts.reshape(parts.shape[0], -1)
        return torch.segment_reduce(flat, "sum", offsets=self.first, axis=0, unsafe=True).reshape(shape)


Key = tuple[int, ...]
Built = TypeVar("Built")
_known: dict[Key, tuple[weakref.ref[Tensor], Owners]] = {}


def clear_owners() -> None:
    """Forget everything that was built."""
    _known.clear()
    _steps.clear()


def _key(index: Tensor, *rest: int) -> Key:
    return (id(index), 0 if index.is_inference() else index._version, *rest)


def _find(known: dict[Key, tuple[weakref.ref[Tensor], Built]], key: Key, index: Tensor) -> Built | None:
    found = known.get(key)
    return found[1] if found is not None and found[0]() is index else None


def _keep(known: dict[Key, tuple[weakref.ref[Tensor], Built]], key: Key, index: Tensor, built: Built) -> None:
    """Keep what was built from a tensor until it dies; a tensor without versions could change unseen."""
    if index.is_inference():
        return
    while len(known) >= _LIMIT:
        del known[next(iter(known))]
    known[key] = (weakref.ref(index, lambda _: known.pop(key, None)), built)


def known_owners(index: Tensor, rows: int, permuted: bool, share: int) -> Owners | None:
    """The owners of an index tensor, if they were built before."""
    return _find(_known, _key(index, rows, permuted, share), index)


def owners_for(form: Form, tensors: Sequence[Tensor], extents: Extents, share: int) -> Owners | None:
    """The owners of a form's terms in a call; `None` where nothing owns them."""
    if form.owner is None:
        return None
    index = tensors[form.bound.layout.tensors.index(form.owner.name)]
    return owners_of(index, extents.output[form.owner_axis], form.permuted, share)


def owners_of(index: Tensor, rows: int, permuted: bool, share: int) -> Owners:
    """The owners of the terms of an index tensor.

    Args:
        index: the output row of each term; terms with -1 have none.
        rows: output rows.
        permuted: the terms are not in order.
        share: most terms in a range; rows with more are divided.
    """
    found = known_owners(index, rows, permuted, share)
    if found is None:
        with torch.inference_mode(False), torch.no_grad():
            found = _build(index, rows, permuted, share)
        _keep(_known, _key(index, rows, permuted, share), index, found)
    return found


def _build(index: Tensor, rows: int, permuted: bool, share: int) -> Owners:
    flat = index.reshape(-1).contiguous()
    small = torch.int32 if max(flat.numel(), rows) < 2**31 else torch.int64
    order = None
    if permuted:
        flat, positions = flat.sort(stable=True)
        flat = flat.contiguous()
        order = positions.to(small)
    bounds = torch.arange(rows + 1, device=flat.device, dtype=flat.dtype)
    begin = torch.searchsorted(flat, bounds, out_int32=small == torch.int32)
    # Few rows are divided on the host, which then reads the device once rather than at every size it needs.
    known = begin.cpu() if rows <= _FEW_ROWS else begin
    length = known[1:] - known[:-1]
    longest = int(length.max()) if rows else 0
    if longest <= share:
        return Owners(rows, begin, order=order)
    parts = (length + (share - 1)).div(share, rounding_mode="floor").clamp_min_(1)
    owner = torch.repeat_interleave(torch.arange(rows, device=known.device), parts)
    before = parts.cumsum(0) - parts
    within = torch.arange(owner.shape[0], device=known.device) - before[owner]
    low = known[owner] + within * share
    high = torch.minimum(low + share, known[owner + 1])
    apart = parts[owner] > 1
    slot = apart.cumsum(0) - 1
    target = torch.where(apart, -1 - slot, owner)
    divided = (parts > 1).nonzero().squeeze(1)
    ends = parts[divided].cumsum(0)
    low, high, target, owner = torch.stack([low, high, target, owner]).to(small).to(flat.device).unbind(0)
    first = torch.nn.functional.pad(ends, (1, 0)).to(flat.device)
    slots = int(ends[-1])
    return Owners(owner.shape[0], low, high, target, owner, order, slots, divided.to(flat.device), first)


# For each tile of an index tensor's columns, the rows in which some column has an entry.
_steps: dict[Key, tuple[weakref.ref[Tensor], Tensor]] = {}


def steps_of(index: Tensor, tile: int) -> Tensor:
    """Which rows of an index tensor (k, i) have an entry in each tile of its columns; kept like `Owners`.

    Returns:
        (tiles, 1 + k) int32: the number of such rows, then the rows, ascending, then what is not to be read.
    """
    key = _key(index, tile)
    found = _find(_steps, key, index)
    if found is not None:
        return found
    with torch.inference_mode(False), torch.no_grad():
        rows, columns = index.shape
        tiles = -(-columns // tile)
        whole = columns // tile * tile
        # Entries are numbers from -1 on: the greatest of a tile tells whether there is one.
        most = index.new_empty(rows, tiles)
        torch.amax(index[:, :whole].unflatten(1, (-1, tile)), 2, out=most[:, : whole // tile])
        if whole < columns:
            torch.amax(index[:, whole:], 1, out=most[:, -1])
        present = most >= 0
        numbers = torch.arange(rows, dtype=torch.int32, device=index.device)[:, None]
        order = torch.where(present, numbers, numbers + rows).t().sort(1).values
        steps = torch.cat([present.sum(0, dtype=torch.int32)[:, None], order], 1)
    _keep(_steps, key, index, steps)
    return steps

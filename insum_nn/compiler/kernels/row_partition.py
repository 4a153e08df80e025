"""Which program walks which terms: the terms of a scattered sum by the output row that owns them, built once and kept.

Long rows are divided among several programs.

Sorting the terms costs more than one sum, and a training loop scatters by the same index tensor again and again. So
what is built from an index tensor is kept for as long as the tensor lives and is not written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from insum_nn.compiler.ir.schedule import UNDIVIDED, Schedule
from insum_nn.compiler.kernels.row_structures import divide_rows, tile_rows
from insum_nn.compiler.lang.bind import Extents
from insum_nn.compiler.passes.tile import WORD_BITS
from insum_nn.compiler.schedule.form import Form
from insum_nn.tensor_cache import TensorCache

__all__ = [
    "RowPartition",
    "bitmasks_of",
    "clear_partitions",
    "divisions_of",
    "keep_bitmasks",
    "keep_lengths",
    "new_bitmasks_of",
    "partition_for",
    "partition_of",
    "rows_of",
    "tiles_of",
]

# What is kept at most, of some hundreds of index tensors.
_LIMIT = 2048
# Rows up to which the host knows the length of each, and one kernel divides them.
_FEW_ROWS = 4096


@dataclass(frozen=True, slots=True)
class RowPartition:
    """The terms of every output row, as ranges.

    Attributes:
        rows: number of ranges.
        begin: (rows + 1,) where each range begins; without division a range ends where the next begins.
        end: (rows,) where each ends, if rows are divided.
        target: (rows,) the output row of a range, or -1 - s for a part of a divided row, whose sum is left in slot s.
        row_of: (rows,) the output row that a range belongs to, divided or not.
        order: (terms,) the terms in the order of their rows; `None`: they are in order.
        slots: parts of divided rows.
        divided: (d,) the output rows that are divided, ascending.
        first: (d + 1,) the slot of the first part of each, and the number of slots; parts of a row are in order.
        whole: every term has an output row.
        longest: terms of the longest row.
    """

    rows: int
    begin: Tensor
    end: Tensor | None = None
    target: Tensor | None = None
    row_of: Tensor | None = None
    order: Tensor | None = None
    slots: int = 0
    divided: Tensor | None = None
    first: Tensor | None = None
    whole: bool = False
    longest: int = 0

    @property
    def split(self) -> bool:
        return self.target is not None


# The divisions of an index tensor, by the most terms in a range.
Divisions = dict[int, RowPartition]


@dataclass(slots=True)
class _Rows:
    """The rows of an index tensor: on the host where they are few, and on the device where they are needed there.

    Attributes:
        begins: (rows + 1,) where the terms of each begin, and the last ones end; `None`: there are many.
        begin: the same on the device; `None`: it is sent when it is needed.
        lengths: (rows,) how many terms each has, on the device; `None`: this was not given.
    """

    begins: NDArray[np.integer[Any]] | None
    begin: Tensor | None = None
    lengths: Tensor | None = None

    def on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Where the terms of each begin, on the device."""
        if self.begin is None:
            assert self.begins is not None
            # The device reads such memory by itself: the host does not wait until it comes to that.
            host = torch.empty(len(self.begins), dtype=dtype, device="cpu", pin_memory=device.type != "cpu")
            host.numpy()[:] = self.begins
            self.begin = host.to(device, non_blocking=True)
        return self.begin

    def sizes(self, terms: int, chunk: int) -> list[int]:
        """Terms of the longest row and of all; of rows with more than `chunk`, how many they are, and their parts."""
        if self.begins is not None:
            # NumPy takes a fraction of torch's time for so few numbers.
            counts = self.begins[1:] - self.begins[:-1]
            found = [int(counts.max(initial=0)), int(self.begins[-1] - self.begins[0]), 0, 0]
            if found[0] > chunk:
                parts = (counts + (chunk - 1)) // chunk
                more = parts > 1
                found[2:] = int(np.count_nonzero(more)), int(parts @ more)
            return found
        assert self.begin is not None
        lengths = self.begin.diff()
        sizes = [lengths.max().long(), lengths.sum()]
        if chunk < terms:
            parts = (lengths + (chunk - 1)) // chunk
            more = parts > 1
            sizes += [more.sum(), (parts * more).sum()]
        # The host reads all at once.
        return [*torch.stack(sizes).tolist(), 0, 0][:4]


# Of each index tensor: divisions by number of rows and whether terms are permuted, "order", "lengths", and "bitmasks".
_structures: TensorCache[Any] = TensorCache(_LIMIT)


def clear_partitions() -> None:
    """Forget everything that was built."""
    _structures.clear()


def partition_for(form: Form, tensors: Sequence[Tensor], extents: Extents, schedule: Schedule) -> RowPartition | None:
    """The row partition of a form's terms in a call; `None` where programs own no rows."""
    if form.row_index is None:
        return None
    index = tensors[form.row_index_place]
    chunk = schedule.chunk if form.stack is None else -schedule.m
    return partition_of(index, rows_of(form, tensors, extents.output), form.permuted, chunk)


def rows_of(form: Form, tensors: Sequence[Tensor], output: Sequence[int]) -> int:
    """How many rows the terms of a call have: those of its output, or the matrices that its entries select of."""
    return output[form.row_axis] if form.stack is None else tensors[form.stack[0]].shape[form.stack[1]]


def partition_of(index: Tensor, rows: int, permuted: bool, chunk: int) -> RowPartition:
    """The row partition of the terms of an index tensor.

    Args:
        index: the output row of each term; terms with -1 have none.
        rows: output rows.
        permuted: the terms are not in order.
        chunk: most terms in a range; rows with more are divided. If it is negative, see `tiles_of`.
    """
    divisions = divisions_of(index, rows, permuted)
    found = divisions.get(chunk)
    if found is None:
        undivided = divisions.get(UNDIVIDED)
        if undivided is not None and undivided.longest <= chunk:
            found = undivided
        else:
            found = _build(index, rows, permuted, chunk)
        divisions[chunk] = found
    return found


def divisions_of(index: Tensor, rows: int, permuted: bool) -> Divisions:
    """The row partitions of an index tensor that were made; see `partition_of`, which makes others."""
    found: Divisions | None = _structures.of(index, (rows, permuted))
    return _structures.keep((index,), (rows, permuted), {}) if found is None else found


def _ordered(index: Tensor, rows: int, permuted: bool) -> tuple[Tensor, Tensor | None, torch.dtype]:
    """The row of each term in order, the terms in that order, and an integer type for their numbers."""
    flat = index.reshape(-1).contiguous()
    small = torch.int32 if max(flat.numel(), rows) < 2**31 else torch.int64
    if not permuted:
        return flat, None, small
    # The order is the same for every way to divide the terms.
    order: Tensor | None = _structures.of(index, "order")
    if order is None:
        # Of 32 bits a sort takes half the launches.
        flat, positions = flat.to(small).sort(stable=True)
        order = positions.to(small)
        _structures.keep((index,), "order", order)
        return flat.contiguous(), order, small
    return flat[order], order, small


def tiles_of(flat: Tensor, order: Tensor | None, rows: int, size: int, dtype: torch.dtype) -> RowPartition:
    """Ranges of at most `size` terms of one row: as many as there can be, of which the last ones have none.

    How many have some is only known on the device, which nothing waits for.

    Args:
        flat: the row of each term, in order; terms with -1 have none.
        order: the terms in this order.
        rows: how many rows there are.
        size: terms of a tile.
        dtype: of their numbers.
    """
    bounds = torch.arange(rows + 1, device=flat.device, dtype=flat.dtype)
    begin = torch.searchsorted(flat, bounds, out_int32=dtype == torch.int32)
    parts = (begin.diff() + (size - 1)) // size
    count = flat.shape[0] // size + rows
    tile = torch.arange(count, device=flat.device, dtype=dtype)
    # Those behind the last one have the last row, from its end on.
    behind = parts.cumsum(0, dtype=dtype)
    row = torch.searchsorted(behind, tile, right=True).clamp(max=rows - 1)
    low = (begin[:-1] - (behind - parts) * size)[row] + tile * size
    return RowPartition(count, low, torch.minimum(low + size, begin[1:][row]), row_of=row.to(dtype), order=order)


# What is built for later calls too is of ordinary tensors, whatever mode the caller is in.
@torch.inference_mode(False)
@torch.no_grad()
def _build(index: Tensor, rows: int, permuted: bool, chunk: int) -> RowPartition:
    flat, order, small = _ordered(index, rows, permuted)
    if chunk < 0:
        made = tile_rows(flat, rows, -chunk, flat.shape[0] // -chunk + rows) if flat.is_cuda else None
        if made is None:
            return tiles_of(flat, order, rows, -chunk, small)
        low, high, row = made
        return RowPartition(low.shape[0], low, high, row_of=row, order=order)
    known, terms = _structures.of(index, "lengths"), flat.shape[0]
    # What is sent while a graph is captured would be sent by its replays.
    if (
        known is None
        or known.begins.shape[0] != rows + 1
        or (flat.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        bounds = torch.arange(rows + 1, device=flat.device, dtype=flat.dtype)
        begin = torch.searchsorted(flat, bounds, out_int32=small == torch.int32)
        known = _Rows(None if rows > _FEW_ROWS else begin.cpu().numpy(), begin)
        if rows <= _FEW_ROWS:
            # The device is not read again to divide them otherwise.
            _structures.keep((index,), "lengths", known)
    longest, owned, divided, slots = known.sizes(terms, chunk)
    whole, ranges = owned == terms, rows - divided + slots
    if longest <= chunk:
        begin = known.on(flat.device, small) if known.begin is None else known.begin
        return RowPartition(rows, begin, order=order, whole=whole, longest=longest)
    made = None
    if known.begins is not None and terms + chunk < 1 << 31:
        lengths = known.on(flat.device, small).diff() if known.lengths is None else known.lengths
        made = divide_rows(lengths, int(known.begins[0]), chunk, ranges, divided)
    made = made or _divide(known.on(flat.device, small), chunk, ranges, divided)
    low, high, target, row_of, of, first = made
    return RowPartition(ranges, low, high, target, row_of, order, slots, of, first, whole, longest)


def _divide(begin: Tensor, chunk: int, ranges: int, divided: int) -> tuple[Tensor, ...]:
    """What `divide_rows` returns, by torch's operators."""
    rows, device = torch.arange(begin.shape[0] - 1, device=begin.device), begin.device
    parts = ((begin.diff() + (chunk - 1)) // chunk).clip(1)
    more = parts > 1
    row = torch.repeat_interleave(parts, output_size=ranges)
    steps = torch.arange(ranges, device=device)
    # Range number r of all is the range r - before of its row, where `before` ranges are of earlier rows.
    before = parts.cumsum(0) - parts
    low = (begin[:-1] - before * chunk)[row] + steps * chunk
    high = torch.minimum(low + chunk, begin[1:][row])
    # Of a divided row, it is the part r - whole of all, where `whole` ranges are whole rows before it.
    whole = (~more).cumsum(0)
    target = torch.where(more, whole - 1, rows)[row] - steps * more[row]
    # Each begins at a multiple of 16 bytes, or the machine code would depend on how many ranges there are.
    packed = torch.empty((4, -(-ranges // 4) * 4), dtype=begin.dtype, device=device)
    packed[:, :ranges] = torch.stack((low, high, target, row))
    of = more.nonzero_static(size=divided).squeeze(1)
    first = torch.nn.functional.pad(parts[of].cumsum(0, dtype=torch.int64), (1, 0))
    return *packed[:, :ranges].unbind(0), of, first


def keep_lengths(index: Tensor, lengths: Sequence[int], on_device: Tensor | None = None) -> None:
    """Take how often each row stands in an index tensor in which no term is without a row, where the host knows it.

    Args:
        index: ascending.
        lengths: terms of each row.
        on_device: the same numbers, (rows,) int32 or int64, on the device of `index`; they must not be modified.
    """
    if 0 < len(lengths) <= _FEW_ROWS:
        begins = np.array((0, *lengths), dtype=np.int64).cumsum()
        _structures.keep((index,), "lengths", _Rows(begins, lengths=on_device))


def bitmasks_of(index: Tensor) -> Tensor:
    """Which rows of an index tensor (k, i) have an entry in each of its columns; kept like `RowPartition`.

    Returns:
        (ceil(k / 31), i) int32: bit b of word w says whether row 31 w + b has one.
    """
    found: Tensor | None = _structures.of(index, "bitmasks")
    if found is not None:
        return found
    with torch.inference_mode(False), torch.no_grad():
        return _structures.keep((index,), "bitmasks", new_bitmasks_of(index.contiguous()))


def new_bitmasks_of(index: Tensor) -> Tensor:
    """`bitmasks_of` by torch's operators, which a graph may record; nothing is kept."""
    bits = (1 << torch.arange(WORD_BITS, dtype=torch.int32, device=index.device))[:, None]
    rest = index.shape[0] % WORD_BITS
    whole = index.shape[0] - rest
    # All bitmasks that are full at once.
    parts = [((index[:whole].unflatten(0, (-1, WORD_BITS)) >= 0) * bits).sum(1, dtype=torch.int32)] if whole else []
    if rest or not whole:
        parts.append(((index[whole:] >= 0) * bits[:rest]).sum(0, dtype=torch.int32, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def keep_bitmasks(index: Tensor, bitmasks: Tensor) -> None:
    """Take (i,) int32 as the bitmasks of an index tensor of at most 31 rows, where they are known from elsewhere."""
    _structures.keep((index,), "bitmasks", bitmasks[None])

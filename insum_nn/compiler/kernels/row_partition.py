"""Which program walks which terms: the terms of a scattered sum by the output row that owns them, built once and kept.

Long rows are divided among several programs.

Sorting the terms costs more than one sum, and a training loop scatters by the same index tensor again and again. So
what is built from an index tensor is kept for as long as the tensor lives and is not written to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from insum_nn.compiler.ir.schedule import UNDIVIDED, Schedule
from insum_nn.compiler.kernels.row_structures import divide_rows, row_bitmasks, tile_rows
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
    "longest_row",
    "new_bitmasks_of",
    "partition_for",
    "partition_of",
    "rows_of",
    "tiles_of",
]

Built = TypeVar("Built")
Array = NDArray[np.integer[Any]]
# A tensor, or an array: the same arithmetic on a device and on the host.
Numbers = Any
_ARRAYS = {torch.int32: np.int32, torch.int64: np.int64}
# What is kept at most, of some hundreds of index tensors.
_LIMIT = 2048
# Rows up to which they are divided on the host.
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
class _Lengths:
    """The rows of an index tensor with few of them, on the host.

    Attributes:
        begins: where the terms of each begin.
        counts: how many terms each has; `None`: this was not given.
        on_device: the same on the device.
    """

    begins: Array
    counts: Sequence[int] | None = None
    on_device: Tensor | None = None


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
            found = _kept(_build, index, rows, permuted, chunk)
        divisions[chunk] = found
    return found


def _kept(build: Callable[..., Built], *arguments: Any) -> Built:
    """What is built for later calls too, of ordinary tensors, whatever mode the caller is in."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return build(*arguments)
    return build(*arguments)


def divisions_of(index: Tensor, rows: int, permuted: bool) -> Divisions:
    """The row partitions of an index tensor that were made; see `partition_of`, which makes others."""
    found: Divisions | None = _structures.of(index, (rows, permuted))
    return _structures.keep((index,), (rows, permuted), {}) if found is None else found


def longest_row(index: Tensor, rows: int, permuted: bool) -> int:
    """Terms of the longest row; see `partition_of`, which then finds the rows that no chunk divides."""
    return partition_of(index, rows, permuted, UNDIVIDED).longest


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


def _build(index: Tensor, rows: int, permuted: bool, chunk: int) -> RowPartition:
    if chunk < 0:
        flat, order, small = _ordered(index, rows, permuted)
        made = tile_rows(flat, rows, -chunk, flat.shape[0] // -chunk + rows) if flat.is_cuda else None
        if made is None:
            return tiles_of(flat, order, rows, -chunk, small)
        low, high, row = made
        return RowPartition(low.shape[0], low, high, row_of=row, order=order)
    known = _cached_lengths(index, rows)
    if known is not None and not permuted and (divided := _divide_known(index, known, chunk)) is not None:
        return divided
    flat, order, small = _ordered(index, rows, permuted)
    begin = None
    if known is None:
        bounds = torch.arange(rows + 1, device=flat.device, dtype=flat.dtype)
        begin = torch.searchsorted(flat, bounds, out_int32=small == torch.int32)
        if rows > _FEW_ROWS:
            return _divide(flat, order, begin, chunk)
        # Few rows are divided on the host, which then reads the device once rather than at every size it needs. NumPy
        # takes a fraction of torch's time for so few numbers.
        known = _structures.keep((index,), "lengths", _Lengths(begin.cpu().numpy()))
    begins = known.begins
    lengths = begins[1:] - begins[:-1]
    longest = int(lengths.max()) if rows else 0
    whole = int(begins[-1] - begins[0]) == flat.shape[0]
    if longest <= chunk:
        begin = _send({small: [begins]}, flat.device)[0] if begin is None else begin
        return RowPartition(rows, begin, order=order, whole=whole, longest=longest)
    parts = _parts(lengths, chunk)
    more = parts > 1
    ranges, slots = int(parts.sum()), int(parts[more].sum())
    steps = np.arange(ranges)
    low, high, target, row_of = _ranges(begins, np.arange(rows), steps, parts, more, chunk, lambda of: of.repeat(parts))
    divided = more.nonzero()[0]
    first = np.zeros(divided.shape[0] + 1, dtype=np.int64)
    parts[divided].cumsum(out=first[1:])
    # Where both are of one dtype they are sent as one group.
    groups: dict[torch.dtype, list[Array]] = {torch.int64: [divided, first]}
    groups.setdefault(small, []).extend((low, high, target, row_of))
    divided, first, low, high, target, row_of = _send(groups, flat.device)
    return RowPartition(ranges, low, high, target, row_of, order, slots, divided, first, whole, longest)


def _divide_known(index: Tensor, known: _Lengths, chunk: int) -> RowPartition | None:
    """Divide rows in order by a kernel; `None`: their lengths are not on the device, or none is divided."""
    counts, terms = known.counts, index.numel()
    if counts is None or known.on_device is None or terms + chunk >= 1 << 31 or (longest := max(counts)) <= chunk:
        return None
    # A loop over so few numbers takes a fraction of NumPy's time.
    ranges = slots = divided = 0
    for count in counts:
        parts = (count + (chunk - 1)) // chunk
        ranges += parts or 1
        if parts > 1:
            slots += parts
            divided += 1
    made = divide_rows(known.on_device, chunk, ranges, divided)
    if made is None:
        return None
    low, high, target, row_of, rows, first = made
    whole = sum(counts) == terms
    return RowPartition(ranges, low, high, target, row_of, None, slots, rows, first, whole, longest)


def _divide(flat: Tensor, order: Tensor | None, begin: Tensor, chunk: int) -> RowPartition:
    """Divide rows where they are; the host reads all sizes at once."""
    rows, terms, small = begin.shape[0] - 1, flat.shape[0], begin.dtype
    lengths = begin.diff()
    sizes_on_device = [lengths.max().long(), lengths.sum()]
    parts = more = lengths
    if chunk < terms:
        parts = _parts(lengths, chunk)
        more = parts > 1
        sizes_on_device += [parts.sum(), more.sum(), (parts * more).sum()]
    longest, owned, *sizes = torch.stack(sizes_on_device).tolist()
    whole = owned == terms
    if longest <= chunk:
        return RowPartition(rows, begin, order=order, whole=whole, longest=longest)
    ranges, count, slots = sizes
    row = torch.repeat_interleave(parts, output_size=ranges)
    divided = more.nonzero_static(size=count).squeeze(1)
    # Each begins at a multiple of 16 bytes, or the machine code would depend on how many ranges there are.
    packed = torch.empty((4, -(-ranges // 4) * 4), dtype=small, device=flat.device)
    steps, numbers = torch.arange(ranges, device=flat.device), torch.arange(rows, device=flat.device)
    packed[:, :ranges] = torch.stack(_ranges(begin, numbers, steps, parts, more, chunk, lambda of: of[row]))
    low, high, target, own = packed[:, :ranges].unbind(0)
    first = torch.nn.functional.pad(parts[divided].cumsum(0, dtype=torch.int64), (1, 0))
    return RowPartition(ranges, low, high, target, own, order, slots, divided, first, whole, longest)


def _ranges(
    begin: Numbers,
    rows: Numbers,
    steps: Numbers,
    parts: Numbers,
    more: Numbers,
    chunk: int,
    spread: Callable[[Numbers], Numbers],
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Where each range of the rows' parts begins and ends, its target and its row; tensors or arrays.

    Args:
        begin: where each row begins.
        rows: 0, 1, .. for each row.
        steps: 0, 1, .. for each range.
        parts: ranges of each row.
        more: a row has several.
        chunk: most terms in a range.
        spread: gives each range what its row has.
    """
    where, minimum = (torch.where, torch.minimum) if isinstance(begin, Tensor) else (np.where, np.minimum)
    # Range number r of all is the range r - before of its row, where `before` ranges are of earlier rows.
    before = parts.cumsum(0) - parts
    low = spread(begin[:-1] - before * chunk) + steps * chunk
    high = minimum(low + chunk, spread(begin[1:]))
    # Of a divided row, it is the part r - whole of all, where `whole` ranges are whole rows before it.
    whole = (~more).cumsum(0)
    target = spread(where(more, whole - 1, rows)) - steps * spread(more)
    return low, high, target, spread(rows)


def _parts(lengths: Numbers, chunk: int) -> Numbers:
    """How many ranges each row becomes."""
    parts = (lengths + (chunk - 1)) // chunk
    # NumPy's own `clip` looks up the limits of the dtype at each call.
    return parts.clip(1) if isinstance(parts, Tensor) else np.maximum(parts, 1)


def _send(parts: Mapping[torch.dtype, Sequence[Array]], device: torch.device) -> list[Tensor]:
    """Send arrays to a device, together, as tensors of these dtypes.

    Each begins at a multiple of 16 bytes, or the machine code would depend on how many ranges there are.
    """
    if device.type == "cpu":
        return [torch.from_numpy(part.astype(_ARRAYS[dtype])) for dtype, group in parts.items() for part in group]
    dtypes = [dtype for dtype, group in parts.items() for _ in group]
    arrays = [part for group in parts.values() for part in group]
    # In words of 32 bits: of each array, and up to the next.
    sizes: list[int] = []
    for dtype, part in zip(dtypes, arrays, strict=True):
        words = part.shape[0] * (dtype.itemsize // 4)
        sizes += (words, -words % 4)
    # The device reads such memory by itself: the host does not wait until it comes to that.
    packed = torch.empty(sum(sizes), dtype=torch.int32, device="cpu", pin_memory=True)
    host, begin = packed.numpy(), 0
    for dtype, part, words, gap in zip(dtypes, arrays, sizes[::2], sizes[1::2], strict=True):
        host[begin : begin + words].view(_ARRAYS[dtype])[:] = part
        begin += words + gap
    sent = packed.to(device, non_blocking=True).split_with_sizes(sizes)[::2]
    return [each if dtype == torch.int32 else each.view(dtype) for dtype, each in zip(dtypes, sent, strict=True)]


def keep_lengths(index: Tensor, lengths: Sequence[int], on_device: Tensor | None = None) -> None:
    """Take how often each row stands in an index tensor in which no term is without a row, where the host knows it.

    Args:
        index: ascending.
        lengths: terms of each row.
        on_device: the same numbers, (rows,) int32 or int64, on the device of `index`; they must not be modified.
    """
    if 0 < len(lengths) <= _FEW_ROWS:
        begins = np.array((0, *lengths), dtype=np.int64).cumsum()
        _structures.keep((index,), "lengths", _Lengths(begins, lengths, on_device))


def _cached_lengths(index: Tensor, rows: int) -> _Lengths | None:
    known: _Lengths | None = _structures.of(index, "lengths")
    # What is sent while a graph is captured would be sent by its replays.
    if known is None or known.begins.shape[0] != rows + 1:
        return None
    return None if index.is_cuda and torch.cuda.is_current_stream_capturing() else known


def bitmasks_of(index: Tensor) -> Tensor:
    """Which rows of an index tensor (k, i) have an entry in each of its columns; kept like `RowPartition`.

    Returns:
        (ceil(k / 31), i) int32: bit b of word w says whether row 31 w + b has one.
    """
    found: Tensor | None = _structures.of(index, "bitmasks")
    return _structures.keep((index,), "bitmasks", _kept(_new_bitmasks, index)) if found is None else found


def _new_bitmasks(index: Tensor) -> Tensor:
    found = row_bitmasks(index.contiguous()) if index.is_cuda else None
    return new_bitmasks_of(index) if found is None else found


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

"""Tables of neighbours by a few hand-written kernels, on devices that Triton serves.

The host is what limits there: torch's operators, of which the same table takes 15 to 50, cost it far more than the
device. Every function returns `None` where its kernels cannot be launched, or not yet; the caller then does the same
by torch's operators, bit for bit.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from insum_nn.structure.coordinates import Coordinates, spans_of
from insum_nn.structure.kernel_map import device_texts
from insum_nn.structure.kernel_map.device_texts import COLUMNS
from insum_nn.structure.kernel_map.geometry import Geometry
from insum_nn.structure.kernel_map.mask_bits import mask_powers
from insum_nn.structure.site_grid import first_rows, fits, grid_numbers
from insum_nn.structure.transfers import constant, read_later

__all__ = [
    "SortedTable",
    "exchanged_table",
    "pair_lists",
    "reached_cells",
    "reached_table",
    "site_marks",
    "sorted_table",
    "submanifold_table",
]

# Numbers below this leave room for a block more in 32 bits.
_NARROW = (1 << 31) - (1 << 16)
# An extent up to this, and a kernel's reach beyond it, add up in 32 bits.
_EXTENT = 1 << 30
_INT = "*i32"
_POINTERS = {torch.int32: "*i32", torch.int64: "*i64"}


class SortedTable(NamedTuple):
    """What `NeighbourTable` holds."""

    order: Tensor
    sorted_neighbours: Tensor
    words: Tensor
    place: Tensor
    parts: Tensor


def _numbers(count: int) -> tuple[None, ...]:
    return (None,) * count


@lru_cache(maxsize=1)
def _table_kernels() -> Any:
    """`masks`, `permute`, `exchange`, `pairs`."""
    from insum_nn.compiler.kernels.written import WrittenKernel, WrittenKernels

    return WrittenKernels(
        [
            WrittenKernel(device_texts.masks(), (*[_INT] * 4, *_numbers(3)), warps=8),
            WrittenKernel(device_texts.permute(), (_INT, "*i64", *[_INT] * 4, *_numbers(2)), warps=8),
            WrittenKernel(device_texts.exchange(), (*[_INT] * 3, *_numbers(3)), warps=8),
            WrittenKernel(device_texts.pairs(), (*[_INT] * 3, "*i64", *[_INT] * 3, *_numbers(2))),
        ]
    )


@lru_cache(maxsize=16)
def _site_kernels(dims: int, dtype: torch.dtype) -> Any:
    """`number`, `look_up`."""
    from insum_nn.compiler.kernels.written import WrittenKernel, WrittenKernels

    indices = _POINTERS[dtype]
    return WrittenKernels(
        [
            WrittenKernel(device_texts.number(dims), (indices, _INT, *_numbers(5 + dims)), warps=8),
            WrittenKernel(device_texts.look_up(dims), (indices, *[_INT] * 5, *_numbers(7 + 4 * dims)), warps=8),
        ]
    )


@lru_cache(maxsize=16)
def _reach_kernels(dims: int, dtype: torch.dtype, kind: Any) -> Any:
    """`mark`, `write`."""
    from insum_nn.compiler.kernels.written import WrittenKernel, WrittenKernels

    indices, numbers = _POINTERS[dtype], _numbers(4 + 6 * dims)
    return WrittenKernels(
        [
            WrittenKernel(device_texts.mark(dims, kind), (indices, _INT, *numbers), warps=8),
            WrittenKernel(device_texts.write(dims, kind), (indices, *[_INT] * 3, indices, None, *numbers), warps=8),
        ]
    )


def _launchers(device: torch.device, kernels: Any, *key: object) -> Any:
    """What launches kernels; `None`: they are not there, or torch traces, and tensors have no memory."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return None
    return kernels(*key).launchers(device)


def _even(count: int) -> int:
    """At least so many numbers, so that those after them begin at a multiple of 16 bytes."""
    return -(-count // 4) * 4


class _Memory:
    """Memory of a sorted table (volume, columns), in one piece; filled by `masks` or `look_up`, then by `permute`."""

    __slots__ = ("_ends", "_whole", "blocks", "columns", "parts", "volume")

    def __init__(self, volume: int, columns: int, device: torch.device) -> None:
        self.volume, self.columns, self.blocks = volume, columns, -(-columns // COLUMNS)
        table, row = _even(volume * columns), _even(columns)
        self._ends = (table, table + row, table + 2 * row)
        size = table + 2 * row + volume * self.blocks
        self._whole = torch.empty(size, dtype=torch.int32, device=device)
        self.parts = self._whole.as_strided((volume, self.blocks), (self.blocks, 1), table + 2 * row)

    def sort(self, permute: Any, near: Tensor, words: Tensor, names: Tensor) -> SortedTable:
        """Put the columns of `near` in the order of their words; of equal words, the first column stands first."""
        whole, columns, volume = self._whole, self.columns, self.volume
        words, order = words.sort(stable=True)
        rows = whole.as_strided((columns,), (1,), self._ends[0])
        place = whole.as_strided((columns,), (1,), self._ends[1])
        permute([near, order, names, whole, rows, place, columns, volume], self.blocks)
        table = whole.as_strided((volume, columns), (columns, 1), 0)
        return SortedTable(rows, table, words, place, self.parts)


def _powers(volume: int, device: torch.device) -> Tensor:
    return constant(mask_powers(volume), device, torch.int32)


def sorted_table(near: Tensor, names: Tensor | None = None) -> SortedTable | None:
    """Sort the columns of a table by the offsets that they have.

    Args:
        near: (o, m) int32.
        names: (m,) int32: the row of each column; default: the column.
    """
    (volume, columns), device = near.shape, near.device
    kernels = _launchers(device, _table_kernels) if 0 < volume * columns < _NARROW else None
    if kernels is None:
        return None
    masks, permute, *_ = kernels
    # Made by torch's operators, a table may be a view: its kernel may have been compiled since.
    near = near.contiguous()
    memory, words = _Memory(volume, columns, device), torch.empty(columns, dtype=torch.int32, device=device)
    masks([near, words, memory.parts, _powers(volume, device), columns, volume, memory.blocks], memory.blocks)
    return memory.sort(permute, near, words, first_rows(columns, device) if names is None else names.contiguous())


class _Grid(NamedTuple):
    """The rows of sites at their cells; behind these, two marks for `Coordinates.raise_marks`."""

    indices: Tensor
    table: Tensor
    flag: int
    look_up: Any
    numbers: tuple[int, ...]

    @property
    def marks(self) -> Tensor:
        """(2,); the second is made by a look-up."""
        return self.table[self.flag :]


def _grid(sites: Coordinates, reach: int) -> _Grid | None:
    """Write the rows of sites, which need not be proven, at their cells, where the grid is small."""
    indices, extents, device, columns = sites.indices, sites.extents, sites.device, sites.num_sites
    spans = spans_of(extents, reach)
    margin = spans[1] - extents[1]
    if not fits(spans, margin, columns, device) or indices.numel() >= _NARROW:
        return None
    kernels = _launchers(device, _site_kernels, sites.ndim, indices.dtype)
    if kernels is None:
        return None
    number, look_up = kernels
    indices, (_, cells, lead, _) = indices.contiguous(), grid_numbers(spans, margin)
    flag = lead + cells
    table = torch.full((flag + 2,), -1, dtype=torch.int32, device=device)
    number([indices, table, lead, flag, columns, margin, *extents], -(-columns // COLUMNS))
    return _Grid(indices, table, flag, look_up, (lead, flag + 1, columns, margin, *extents))


def submanifold_table(sites: Coordinates, geometry: Geometry, *, proven: bool) -> SortedTable | None:
    """Return the table of a submanifold map, where a grid of its cells is small; see `submanifold_neighbours`.

    Args:
        sites: the voxels.
        geometry: the kernel's movement.
        proven: they are in range and without repetition; else it is checked when all has been launched.
    """
    volume, columns, device = geometry.volume, sites.num_sites, sites.device
    moves = zip(geometry.kernel_size, geometry.dilation, geometry.padding, strict=True)
    reach = max(max(abs(padding), abs((extent - 1) * step - padding)) for extent, step, padding in moves)
    kernels = _launchers(device, _table_kernels) if volume * columns < _NARROW else None
    grid = None if kernels is None else _grid(sites, reach)
    if kernels is None or grid is None:
        return None
    memory, table = _Memory(volume, columns, device), _even(volume * columns)
    near = torch.empty(table + columns, dtype=torch.int32, device=device)
    words = near.as_strided((columns,), (1,), table)
    tensors = [grid.indices, grid.table, near, words, memory.parts, _powers(volume, device)]
    geometric = (*geometry.kernel_size, *geometry.dilation, *geometry.padding)
    grid.look_up([*tensors, *grid.numbers, *geometric, volume, memory.blocks], memory.blocks)
    # Look-ups are safe without the answer: the device goes on while it is on its way.
    answer = None if proven else read_later(grid.marks)
    found = memory.sort(kernels[1], near, words, first_rows(columns, device))
    if answer is not None:
        sites.raise_marks(answer())
    return found


def site_marks(sites: Coordinates) -> Tensor | None:
    """Return (2,) what `Coordinates.raise_marks` reads, where a grid of the sites is small."""
    grid = _grid(sites, 0)
    if grid is None:
        return None
    # Of no neighbour, a look-up compares each site's row with that in its cell.
    words = torch.empty(sites.num_sites, dtype=torch.int32, device=sites.device)
    tensors = [grid.indices, grid.table, words, words, words, words]
    grid.look_up([*tensors, *grid.numbers, *[1] * (3 * sites.ndim), 0, 0], -(-sites.num_sites // COLUMNS))
    return grid.marks


class _Reached(NamedTuple):
    """Cells that a kernel reaches, and what is needed to write its table.

    Attributes:
        total: (1,) the number of outputs.
    """

    sites: Coordinates
    geometry: Geometry
    shape: tuple[int, ...]
    spans: tuple[int, ...]
    indices: Tensor
    numbers: Tensor
    arguments: list[int]
    write: Any
    total: Tensor


def reached_cells(sites: Coordinates, geometry: Geometry, shape: tuple[int, ...]) -> _Reached | None:
    """Number the cells of a grid that a strided or transposed kernel reaches, where the grid is small.

    See `reached_neighbours`. What lies outside leads nowhere.
    """
    indices, device, dims, columns = sites.indices, sites.device, sites.ndim, sites.num_sites
    spans = spans_of((sites.batch_size, *shape))
    ends = zip(sites.spatial_shape, shape, geometry.padding, strict=True)
    narrow = all(padding >= 0 and max(extent, reached) + 2 * padding < _EXTENT for extent, reached, padding in ends)
    if not narrow or not fits(spans, 0, columns, device) or indices.numel() >= _NARROW:
        return None
    kernels = _launchers(device, _reach_kernels, dims, indices.dtype, geometry.kind)
    # Which sorts the table.
    if kernels is None or _launchers(device, _table_kernels) is None:
        return None
    mark, write = kernels
    moves = (geometry.kernel_size, geometry.stride, geometry.padding, geometry.dilation)
    flat = [number for move in moves for number in move]
    arguments = [columns, spans[1] - shape[0], *sites.extents, *shape, *flat, geometry.volume]
    marks = torch.zeros(math.prod(spans), dtype=torch.int32, device=device)
    indices = indices.contiguous()
    mark([indices, marks, *arguments], -(-columns // COLUMNS))
    numbers = marks.cumsum_(0)
    return _Reached(sites, geometry, shape, spans, indices, numbers, arguments, write, numbers[-1:])


def reached_table(found: _Reached, count: int) -> tuple[Coordinates, Tensor] | None:
    """Return the outputs, and the inputs that each meets, (o, count) int32; by rows of outputs."""
    sites, volume, device = found.sites, found.geometry.volume, found.sites.device
    if not 0 < volume * count < _NARROW:
        return None
    near = torch.full((volume, count), -1, dtype=torch.int32, device=device)
    keys = torch.empty(count, dtype=torch.int32, device=device)
    indices = torch.empty((count, 1 + sites.ndim), dtype=found.indices.dtype, device=device)
    tensors = [found.indices, found.numbers, near, keys, indices]
    found.write([*tensors, count, *found.arguments], -(-sites.num_sites // COLUMNS))
    return Coordinates.of_cells(indices, keys, found.shape, sites.batch_size), near


def exchanged_table(near: Tensor, order: Tensor, inputs: int) -> Tensor | None:
    """Return (o, n) int32: the output that each of n inputs meets at each offset, or -1; see `NeighbourTable`."""
    volume, columns = near.shape
    small = 0 < volume * max(columns, inputs) < _NARROW
    kernels = _launchers(near.device, _table_kernels) if small and columns else None
    if kernels is None:
        return None
    table = torch.full((volume, inputs), -1, dtype=torch.int32, device=near.device)
    kernels[2]([near.contiguous(), order.contiguous(), table, columns, volume, inputs], -(-columns // COLUMNS))
    return table


def pair_lists(
    near: Tensor, place: Tensor, parts: Tensor, filled: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the offset, the output and the input of each entry of a sorted table, (count,) int32 each.

    Ascending by offset, then output.

    Args:
        near: (o, m) int32, sorted.
        place: (m,) int32: the column of each output.
        parts: (o, b) int32: entries of each offset in each block of outputs.
        filled: (o,) int64: entries of each offset.
        count: all entries.
    """
    kernels = _launchers(near.device, _table_kernels) if count else None
    if kernels is None:
        return None
    # Each begins at a multiple of 16 bytes, or the machine code of what reads them would depend on their number.
    even = _even(count)
    whole = torch.empty(3 * even, dtype=torch.int32, device=near.device)
    lists = [whole.as_strided((count,), (1,), part * even) for part in range(3)]
    (volume, blocks), columns = parts.shape, near.shape[1]
    kernels[3]([near, place, parts, filled, *lists, columns, blocks], volume * blocks)
    return lists[0], lists[1], lists[2]

"""Tables of neighbours by a few hand-written kernels, on devices that Triton serves.

The host is what limits there: torch's operators, of which the same table takes 15 to 50, cost it far more than the
device. Every function returns `None` where its kernels cannot be launched, or not yet; the caller then does the same
by torch's operators, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from insum_nn.structure.cell_numbers import KEY_LIMIT
from insum_nn.structure.coordinates import Coordinates, key_dtype, spans_of
from insum_nn.structure.kernel_map import device_texts
from insum_nn.structure.kernel_map.device_texts import COLUMNS
from insum_nn.structure.kernel_map.geometry import Geometry
from insum_nn.structure.kernel_map.mask_bits import MASK_BITS, mask_powers
from insum_nn.structure.site_grid import GridNumbers, fits, grid_numbers
from insum_nn.structure.transfers import constant, read_later

__all__ = [
    "SortedTable",
    "TableMemory",
    "exchanged_table",
    "pair_lists",
    "reached_map",
    "site_marks",
    "sorted_table",
    "submanifold_table",
]

# Numbers below this leave room for a block more in 32 bits.
_NARROW = (1 << 31) - (1 << 16)
# An extent up to this, and a kernel's reach beyond it, add up in 32 bits.
_EXTENT = 1 << 30


class TableMemory(NamedTuple):
    """Where the parts of a table (volume, columns) begin in the memory of one, int32.

    The table itself stands first; then the row of each column.

    Attributes:
        words: (columns,) the offsets of each column as bits, of no more than `MASK_BITS` offsets.
        parts: (volume, blocks) entries of each offset in each block of columns.
        counts: (volume,) entries of each offset; before them, two marks for `Coordinates.raise_marks`.
        size: of all.
    """

    volume: int
    columns: int
    blocks: int
    rows: int
    words: int
    parts: int
    counts: int
    size: int

    @staticmethod
    def of(volume: int, columns: int) -> TableMemory:
        """Return that of a table; all begins at multiples of 16 bytes, as machine code of kernels takes for granted."""
        blocks, end = -(-columns // COLUMNS), 0
        begins: list[int] = []
        # The table, rows, words, and the entries of blocks with the two marks; the counts come last.
        for size in (volume * columns, columns, columns, volume * blocks + 2):
            end = end + size + 3 & -4
            begins.append(end)
        # A call of the class is one of Python's functions.
        return tuple.__new__(TableMemory, (volume, columns, blocks, *begins, end + volume))


# What `NeighbourTable` holds.
SortedTable = tuple[Tensor, Tensor, Tensor | None, Tensor, TableMemory, bool]
# The outputs of a map, its table, and the entries of each offset, where these were read with what is checked.
DeviceMap = tuple[Coordinates, SortedTable, tuple[int, ...] | None]


# Offsets whose keys are bytes, which are sorted in a quarter of the passes.
_NARROW_KEY = 8


def _key(volume: int) -> torch.dtype:
    return torch.uint8 if volume <= _NARROW_KEY else torch.int32


def _written(*kernels: tuple[str, tuple[torch.dtype, ...]]) -> Any:
    from insum_nn.compiler.kernels.written import written

    return written(*kernels, warps=8)


_INT = torch.int32


@lru_cache(maxsize=2)
def _table_kernels(keys: torch.dtype) -> Any:
    """`masks`, `permute`, `exchange`, `pairs`."""
    return _written(
        (device_texts.masks(), (_INT, keys, _INT)),
        (device_texts.permute(), (_INT, torch.int64, _INT, _INT)),
        (device_texts.exchange(), (_INT, _INT, _INT)),
        (device_texts.pairs(), (_INT, _INT, _INT, _INT)),
    )


@lru_cache(maxsize=16)
def _site_kernels(dims: int, dtype: torch.dtype, keys: torch.dtype) -> Any:
    """`number`, `look_up`."""
    looking = (dtype, _INT, _INT, keys, _INT, _INT)
    return _written((device_texts.number(dims), (dtype, _INT, _INT)), (device_texts.look_up(dims), looking))


@lru_cache(maxsize=16)
def _cell_kernels(dims: int, dtype: torch.dtype, cells: torch.dtype, keys: torch.dtype) -> Any:
    """`cell`, `search`."""
    searching = (cells, _INT, _INT, keys, _INT, _INT)
    return _written((device_texts.cell(dims), (dtype, cells, _INT)), (device_texts.search(dims), searching))


@lru_cache(maxsize=16)
def _reach_kernels(dims: int, dtype: torch.dtype, kind: Any) -> Any:
    """`mark`, `write`."""
    writing = (dtype, _INT, _INT, _INT, dtype, _INT)
    return _written((device_texts.mark(dims, kind), (dtype, _INT)), (device_texts.write(dims, kind), writing))


def _launchers(device: torch.device, kernels: Any, *key: object) -> Any:
    """What launches kernels; `None`: they are not there, or torch traces, and tensors have no memory."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return None
    return kernels(*key).launchers(device)


def _sort(
    permute: Any, at: TableMemory, memory: Tensor, near: Tensor, keys: Tensor, names: Tensor | None, *, counted: bool
) -> SortedTable:
    """Put the columns of `near` in the order of their keys; of equal keys, the first column stands first."""
    _, order = keys.sort(stable=True)
    columns, named = at.columns, near if names is None else names
    numbers = [at.rows, at.words, at.parts, columns, at.volume, int(names is not None), at.blocks]
    permute([near, order, named, memory, *numbers], at.blocks)
    table = memory.as_strided((at.volume, columns), (columns, 1), 0)
    words = memory.as_strided((columns,), (1,), at.words) if at.volume <= MASK_BITS else None
    return memory.as_strided((columns,), (1,), at.rows), table, words, memory, at, counted


def _powers(volume: int, device: torch.device) -> Tensor:
    return constant(mask_powers(volume), device, torch.int32)


def sorted_table(near: Tensor, names: Tensor | None = None) -> SortedTable | None:
    """Sort the columns of a table by the offsets that they have.

    Args:
        near: (o, m) int32.
        names: (m,) int32: the row of each column; default: the column.
    """
    (volume, columns), device = near.shape, near.device
    small = 0 < volume * columns < _NARROW
    kernels = _launchers(device, _table_kernels, _key(volume)) if small else None
    if kernels is None:
        return None
    at = TableMemory.of(volume, columns)
    memory = torch.empty(at.size, dtype=torch.int32, device=device)
    # Made by torch's operators, a table may be a view: its kernel may have been compiled since.
    return _sorted(kernels, at, memory, near.contiguous(), names if names is None else names.contiguous())


def _sorted(
    kernels: Any, at: TableMemory, memory: Tensor, near: Tensor, names: Tensor | None = None, *, counted: bool = False
) -> SortedTable:
    device = near.device
    keys = torch.empty(at.columns, dtype=_key(at.volume), device=device)
    kernels[0]([near, keys, _powers(at.volume, device), at.columns, at.volume], at.blocks)
    return _sort(kernels[1], at, memory, near, keys, names, counted=counted)


def _grid_of(sites: Coordinates, reach: int) -> tuple[int, GridNumbers] | None:
    """Return margin and numbers of a grid of the sites' cells, where it is small."""
    indices, extents = sites.indices, sites.extents
    spans = spans_of(extents, reach)
    margin = spans[1] - extents[1]
    if indices.numel() >= _NARROW or not fits(spans, margin, indices.shape[0], indices.device):
        return None
    return margin, grid_numbers(spans, margin)


def submanifold_table(sites: Coordinates, geometry: Geometry, *, proven: bool) -> DeviceMap | None:
    """Return the table of a submanifold map, where a key can number the cells; see `submanifold_neighbours`.

    Args:
        sites: the voxels.
        geometry: the kernel's movement.
        proven: they are in range and without repetition; else it is checked when all has been launched.
    """
    volume, columns, device = geometry.volume, sites.num_sites, sites.device
    if not 0 < volume * columns < _NARROW or sites.indices.numel() >= _NARROW:
        return None
    grid = _grid_of(sites, geometry.reach)
    look_up = _searched(sites, geometry) if grid is None else _in_grid(sites, geometry, grid)
    kernels = None if look_up is None else _launchers(device, _table_kernels, _key(volume))
    if look_up is None or kernels is None:
        return None
    at = TableMemory.of(volume, columns)
    memory = torch.empty(at.size, dtype=torch.int32, device=device)
    near = torch.empty(volume * columns, dtype=torch.int32, device=device)
    keys = torch.empty(columns, dtype=_key(volume), device=device)
    names = look_up(near, keys, memory, at)
    # Look-ups are safe without the answer: the device goes on while it is on its way.
    answer = None if proven else read_later(memory.as_strided((2 + volume,), (1,), at.counts - 2))
    found = _sort(kernels[1], at, memory, near, keys, names, counted=True)
    if answer is None:
        return sites, found, None
    outside, twice, *counts = answer()
    sites.raise_marks((outside, twice))
    return sites, found, tuple(counts)


# Writes the neighbours of sites, the keys of these columns, and into a table's memory two marks and the counts of
# offsets; returns the row of each column, or `None` where it is the column.
_LookUp = Callable[[Tensor, Tensor, Tensor, TableMemory], Tensor | None]


def _in_grid(sites: Coordinates, geometry: Geometry, grid: tuple[int, GridNumbers]) -> _LookUp | None:
    """Look neighbours up by their cells."""
    volume, columns, device, indices = geometry.volume, sites.num_sites, sites.device, sites.indices.contiguous()
    kernels = _launchers(device, _site_kernels, sites.ndim, indices.dtype, _key(volume))
    if kernels is None:
        return None
    margin, (_, cells, lead, _) = grid

    def look_up(near: Tensor, keys: Tensor, memory: Tensor, at: TableMemory) -> None:
        table = torch.full((lead + cells,), -1, dtype=torch.int32, device=device)
        numbers = [at.counts, lead, columns, margin]
        kernels[0]([indices, table, memory, *numbers, volume, *sites.extents], at.blocks)
        tensors = [indices, table, near, keys, memory, _powers(volume, device)]
        kernels[1]([*tensors, *numbers, *sites.extents, *_moves(geometry), volume], at.blocks)

    return look_up


def _searched(sites: Coordinates, geometry: Geometry) -> _LookUp | None:
    """Look neighbours up among the sorted numbers of cells: a column is the site of a key, in their order."""
    volume, columns, device, indices = geometry.volume, sites.num_sites, sites.device, sites.indices.contiguous()
    spans = spans_of(sites.extents, geometry.reach)
    # Neighbours of cells on the rim have numbers too.
    if max(spans) >= _EXTENT or math.prod(spans) > KEY_LIMIT // 2:
        return None
    dtype, margin = key_dtype(spans), spans[1] - sites.spatial_shape[0]
    kernels = _launchers(device, _cell_kernels, sites.ndim, indices.dtype, dtype, _key(volume))
    if kernels is None:
        return None

    def look_up(near: Tensor, keys: Tensor, memory: Tensor, at: TableMemory) -> Tensor:
        cells = torch.empty(columns, dtype=dtype, device=device)
        kernels[0]([indices, cells, memory, at.counts, columns, margin, volume, *sites.extents], at.blocks)
        known, order = cells.sort(stable=True)
        rows = order.int()
        tensors = [known, rows, near, keys, memory, _powers(volume, device)]
        numbers = [at.counts, 1 << columns.bit_length() - 1, columns, margin]
        kernels[1]([*tensors, *numbers, *sites.spatial_shape, *_moves(geometry), volume], at.blocks)
        return rows

    return look_up


def _moves(geometry: Geometry) -> tuple[int, ...]:
    return (*geometry.kernel_size, *geometry.dilation, *geometry.padding)


def site_marks(sites: Coordinates) -> Tensor | None:
    """Return (2,) what `Coordinates.raise_marks` reads, where a grid of the sites is small."""
    indices, device, dims = sites.indices, sites.device, sites.ndim
    grid = _grid_of(sites, 0)
    kernels = None if grid is None else _launchers(device, _site_kernels, dims, indices.dtype, torch.int32)
    if grid is None or kernels is None:
        return None
    (number, look_up), indices, columns = kernels, indices.contiguous(), indices.shape[0]
    (margin, (_, cells, lead, _)), blocks = grid, -(-columns // COLUMNS)
    table = torch.full((lead + cells,), -1, dtype=torch.int32, device=device)
    # Of no neighbour, a look-up compares each site's row with that in its cell. Behind the words stand the marks.
    even = columns + 3 & -4
    words = torch.empty(even + 2, dtype=torch.int32, device=device)
    number([indices, table, words, even + 2, lead, columns, margin, 0, *sites.extents], blocks)
    tensors, extents = [indices, table, words, words, words, words], sites.extents
    look_up([*tensors, even + 2, lead, columns, margin, *extents, *[1] * (3 * dims), 0], blocks)
    return words.as_strided((2,), (1,), even)


def reached_map(sites: Coordinates, geometry: Geometry, shape: tuple[int, ...], *, proven: bool) -> DeviceMap | None:
    """Return the outputs that a strided or transposed kernel reaches, its table, and the entries of each offset.

    See `reached_neighbours`. Where a grid of their cells is small; what lies outside leads nowhere. The device is read
    once.
    """
    indices, dims, volume = sites.indices, sites.ndim, geometry.volume
    columns, device = indices.shape[0], indices.device
    spans = spans_of((sites.batch_size, *shape))
    ends = zip(sites.spatial_shape, shape, geometry.padding, strict=True)
    for extent, reached, padding in ends:
        if padding < 0 or max(extent, reached) + 2 * padding >= _EXTENT:
            return None
    if not fits(spans, 0, columns, device) or indices.numel() >= _NARROW:
        return None
    own = _launchers(device, _reach_kernels, dims, indices.dtype, geometry.kind)
    kernels = None if own is None else _launchers(device, _table_kernels, _key(volume))
    if own is None or kernels is None:
        return None
    mark, write = own
    cells, blocks, indices = math.prod(spans), -(-columns // COLUMNS), indices.contiguous()
    moves = (*geometry.kernel_size, *geometry.stride, *geometry.padding, *geometry.dilation)
    numbers = [cells, columns, spans[1] - shape[0], *sites.extents, *shape, *moves, volume]
    # Behind the cells stand the counts of offsets.
    marks = torch.zeros(cells + volume, dtype=torch.int32, device=device)
    mark([indices, marks, *numbers], blocks)
    marks.as_strided((cells,), (1,)).cumsum_(0)
    answer = marks.as_strided((1 + volume,), (1,), cells - 1)
    checked = None if proven else site_marks(sites)
    if not proven and checked is None:
        sites.prove()
    # The only read of the device.
    count, *counts = (answer if checked is None else torch.cat([answer, checked])).tolist()
    if checked is not None:
        sites.raise_marks(counts[volume:])
    if not 0 < volume * count < _NARROW:
        return None
    at = TableMemory.of(volume, count)
    memory = torch.empty(at.size, dtype=torch.int32, device=device)
    near = torch.full((volume, count), -1, dtype=torch.int32, device=device)
    keys = torch.empty(count, dtype=torch.int32, device=device)
    outputs = torch.empty((count, 1 + dims), dtype=indices.dtype, device=device)
    write([indices, marks, near, keys, outputs, memory, at.counts, count, *numbers], blocks)
    found = Coordinates.of_cells(outputs, keys, shape, sites.batch_size)
    return found, _sorted(kernels, at, memory, near, counted=True), tuple(counts[:volume])


def exchanged_table(near: Tensor, order: Tensor, inputs: int) -> Tensor | None:
    """Return (o, n) int32: the output that each of n inputs meets at each offset, or -1; see `NeighbourTable`."""
    volume, columns = near.shape
    small = 0 < volume * max(columns, inputs) < _NARROW
    kernels = _launchers(near.device, _table_kernels, _key(volume)) if small and columns else None
    if kernels is None:
        return None
    table = torch.full((volume, inputs), -1, dtype=torch.int32, device=near.device)
    kernels[2]([near.contiguous(), order.contiguous(), table, columns, volume, inputs], -(-columns // COLUMNS))
    return table


def pair_lists(memory: Tensor, at: TableMemory, count: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the offset, the output and the input of each entry of a sorted table, (count,) int32 each.

    By offset, then in the order of the table's columns.

    Args:
        memory: of a table with counts.
        at: where its parts begin.
        count: all entries.
    """
    kernels = _launchers(memory.device, _table_kernels, _key(at.volume)) if count else None
    if kernels is None:
        return None
    # Each begins at a multiple of 16 bytes, or the machine code of what reads them would depend on their number.
    even = count + 3 & -4
    whole = torch.empty(3 * even, dtype=torch.int32, device=memory.device)
    offset = whole.as_strided((count,), (1,), 0)
    output = whole.as_strided((count,), (1,), even)
    entry = whole.as_strided((count,), (1,), 2 * even)
    numbers = [at.rows, at.parts, at.counts, at.columns, at.blocks]
    kernels[3]([memory, offset, output, entry, *numbers], at.volume * at.blocks)
    return offset, output, entry

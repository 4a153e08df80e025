"""Sets of grid sites: the check of their coordinates, and the row of a given site.

A site is a row `(batch, x_1, .., x_d)`. Sites are compared by one key, their place in the grid read row by row. Every
axis but the first has a margin after it, so that a step beyond either end of an axis leads to cells that no site has:
the key of a neighbour is the key of the site and a constant. Keys are 32 bits wide where these can number the cells.

Where a grid has more cells than the key can number, leading axes are replaced by their rank among the sites that are
there, which keeps the order and needs no more than the number of sites.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor

from insum_nn.dtypes import INDEX_DTYPES
from insum_nn.errors import InsumFormatError, InsumRangeError, InsumShapeError
from insum_nn.faults import Faults
from insum_nn.structure.cell_numbers import KEY_LIMIT, CellNumbers, assert_distinct
from insum_nn.structure.site_grid import SiteGrid, fits, steps_of
from insum_nn.structure.transfers import constant

__all__ = ["MAX_EXTENT", "Coordinates", "SiteKeys", "check_indices", "key_dtype", "spans_of", "unique_sites"]

# Numbers of cells up to this have keys of 32 bits: adding an offset, at most one cell number more, never wraps.
_NARROW_LIMIT = 1 << 30
# Cells after each axis, the least of any key. Most kernels reach no further, so that their maps share one sorted list.
_MARGIN = 4
# The largest extent of an axis: coordinates are stored as int32.
MAX_EXTENT = 1 << 31


@dataclass(frozen=True, eq=False, repr=False)
class Coordinates:
    """Distinct sites of a batch of grids.

    The constructor checks rank, dtype and shape; `prove` reads the values once. Keys are sorted on the device of
    `indices` when they are first asked for, and kept.

    Attributes:
        indices: (n, 1 + d), int32 or int64: the batch entry, then d coordinates.
        spatial_shape: d extents.
        batch_size: grids in the batch.
        origin: the tensor that `indices` is a copy of, for `describes`.

    >>> sites = Coordinates(torch.tensor([[0, 2], [0, 0], [1, 1]]), (3,), 2)
    >>> sites.prove().extents
    (2, 3)
    """

    indices: Tensor
    spatial_shape: tuple[int, ...]
    batch_size: int
    origin: InitVar[Tensor | None] = None
    _of: Tensor = field(init=False)
    _version: int | None = field(init=False, default=None)
    # What was computed from the sites. A dictionary of its own: `cached_property` takes a lock, which cannot be traced.
    _cache: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self, origin: Tensor | None) -> None:
        object.__setattr__(self, "spatial_shape", tuple(self.spatial_shape))
        _check_static(self.indices, self.spatial_shape, self.batch_size)
        of = self.indices if origin is None else origin
        object.__setattr__(self, "_of", of)
        # Inference tensors count no changes, and a tensor that is only traced has none.
        counted = not torch.compiler.is_compiling() and not of.is_inference()
        object.__setattr__(self, "_version", of._version if counted else None)

    def __repr__(self) -> str:
        return f"Coordinates(sites={self.num_sites}, spatial_shape={self.spatial_shape}, batch_size={self.batch_size})"

    def describes(self, indices: Tensor, spatial_shape: Sequence[int], batch_size: int) -> bool:
        """Return whether these are the sites of the same `indices` object, unchanged since, in the same grid."""
        own = indices is self._of or indices is self.indices
        same = own and batch_size == self.batch_size and tuple(spatial_shape) == self.spatial_shape
        if torch.compiler.is_compiling():
            return same
        return same and (self._version is None or self._of._version == self._version)

    @property
    def num_sites(self) -> int:
        """Sites, `n`."""
        return self.indices.shape[0]

    @property
    def ndim(self) -> int:
        """Spatial dimensions, `d`."""
        return len(self.spatial_shape)

    @property
    def device(self) -> torch.device:
        """Where the sites are stored."""
        return self.indices.device

    @property
    def extents(self) -> tuple[int, ...]:
        """The batch size, then the spatial shape."""
        return (self.batch_size, *self.spatial_shape)

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """The columns of `indices` as contiguous int64 tensors; kept."""
        found = self._cache.get("columns")
        if found is None:
            found = self._cache["columns"] = self.indices.T.long().contiguous().unbind(0)
        return found

    @property
    def _keys(self) -> SiteKeys:
        found = self._cache.get("keys")
        if found is None:
            spans, known = spans_of(self.extents), self._cache.get("numbers")
            if known is None:
                found = SiteKeys.build(self.indices, spans)
            else:
                rows = torch.arange(self.num_sites, device=self.device)
                found = SiteKeys(CellNumbers(spans), known.to(key_dtype(spans)), rows)
            self._cache["keys"] = found
        return found

    def keys(self, reach: int) -> SiteKeys | None:
        """Sorted keys in which steps of up to `reach` along every axis never lead to another site's key by mistake.

        `None` where the grid has more cells than a key can number.
        """
        found = self._keys
        if found.numbers.ranks or reach <= _MARGIN:
            return None if found.numbers.ranks else found
        return found.with_spans(self.indices, spans_of(self.extents, reach))

    @classmethod
    def of_keys(cls, keys: Tensor, spatial_shape: tuple[int, ...], batch_size: int, dtype: torch.dtype) -> Coordinates:
        """Return the sites of ascending distinct keys, which are those of `spans_of((batch_size, *spatial_shape))`."""
        spans = spans_of((batch_size, *spatial_shape))
        wide = keys[:, None].div(constant(steps_of(spans), keys.device), rounding_mode="floor")
        indices = wide.remainder_(constant(spans, keys.device)).to(dtype)
        return cls.of_cells(indices, keys, spatial_shape, batch_size)

    @classmethod
    def of_cells(cls, indices: Tensor, keys: Tensor, spatial_shape: tuple[int, ...], batch_size: int) -> Coordinates:
        """Return sites of which the keys of `of_keys` are known too."""
        sites = cls(indices, spatial_shape, batch_size)
        sites._cache["numbers"] = keys
        sites._cache["cells"] = spans_of((batch_size, *spatial_shape)), keys
        return sites

    def grid(self, reach: int = _MARGIN) -> SiteGrid | None:
        """Return a dense grid of row numbers with margins of `reach` or more, where it is cheaper than a search.

        Kept until `drop_grid`. The sites need not be proven.
        """
        found = self._cache.get("grid")
        if found is not None and found.reach >= reach:
            return found
        reach = max(reach, _MARGIN)
        spans = spans_of(self.extents, reach)
        if not fits(spans, reach, self.num_sites, self.device):
            return None
        # Several maps over the sites share their cells, which are known from the beginning of sites made from keys.
        known = self._cache.get("cells")
        cells = known[1].long() if known is not None and known[0] == spans else None
        found = self._cache["grid"] = SiteGrid.build(self.indices, spans, reach, cells)
        self._cache["cells"] = spans, found.cells
        return found

    def drop_grid(self) -> None:
        """Give the grid's memory back, which may be far more than that of the sites."""
        self._cache.pop("grid", None)

    def prove(self) -> Coordinates:
        """Check every coordinate, and that no site occurs twice; reads the device once.

        Under `torch.compile` one operator does, when the compiled code runs.

        Returns:
            These sites, checked.

        Raises:
            InsumRangeError: a coordinate is negative or not below its extent.
            InsumFormatError: a site occurs twice.
        """
        if torch.compiler.is_compiling():
            # What follows reads the operator's result, so that no part of it can go before the check, or without it.
            prove = torch.ops.insum_nn.prove_sites if torch.compiler.is_dynamo_compiling() else _prove
            checked = prove(self.indices, list(self.spatial_shape), self.batch_size)
            return Coordinates(checked, self.spatial_shape, self.batch_size, origin=self.indices)
        facts = self.facts()
        self.drop_grid()
        if facts is not None:
            self.raise_faults(facts.tolist())
        return self

    def facts(self, *, by_cells: bool = False) -> Tensor | None:
        """(2 (1 + d) + 1,) what `raise_faults` reads: least and greatest of each column, and whether a site repeats.

        `None` where there are no sites. `by_cells`: make the `grid` also where sorting costs less than it, since it
        will be wanted.
        """
        if not self.num_sites:
            return None
        grid = self.grid() if by_cells or self.device.type == "cuda" else None
        twice = self._keys.repeats() if grid is None else grid.repeats()
        # Cells of rows that lie outside mean nothing; they are checked after the limits, but read with them.
        return torch.cat([*torch.aminmax(self.indices, dim=0), twice[None]])

    def raise_faults(self, facts: Sequence[int]) -> None:
        """Raise what `prove` raises where the values of `facts` say so."""
        lows, highs, twice = facts[: self.ndim + 1], facts[self.ndim + 1 : -1], facts[-1]
        outside = min(lows) < 0 or any(high >= extent for high, extent in zip(highs, self.extents, strict=True))
        self.raise_marks((outside, twice))

    def raise_marks(self, marks: Sequence[int]) -> None:
        """Raise what `prove` raises: of two marks, 1 where a coordinate lies outside or a site repeats.

        No other value means a fault.
        """
        if marks[0] == 1:
            raise _outside(self)
        if marks[1] == 1:
            raise _duplicate(self)

    @property
    def cells(self) -> Tensor:
        """(n,) int64: each site's place in the dense grid (batch, x_1, .., x_d), read row by row.

        Raises:
            InsumShapeError: the grid has more cells than int64 can number.
        """
        if math.prod(self.extents) > KEY_LIMIT:
            raise InsumShapeError(
                f"a dense grid of shape {self.extents} has more cells than can be numbered",
                fix="keep the tensor sparse, or make spatial_shape smaller.",
                got=self.extents,
            )
        key = self.columns[0]
        for extent, column in zip(self.spatial_shape, self.columns[1:], strict=True):
            key = key * extent + column
        return key


@dataclass(frozen=True, eq=False)
class SiteKeys:
    """Sorted keys of sites.

    Attributes:
        numbers: what numbers the cells, of `spans` cells along each axis, its margin among them.
        keys: (n,) sorted; int32 where there are few cells, else int64.
        order: (n,) int64: the row of each key.
    """

    numbers: CellNumbers
    keys: Tensor
    order: Tensor

    @classmethod
    def build(cls, indices: Tensor, spans: tuple[int, ...]) -> SiteKeys:
        """Number the sites (n, 1 + d) and sort the numbers."""
        numbers = CellNumbers(spans)
        small = math.prod(spans) <= KEY_LIMIT
        keys, order = (_number(indices, spans) if small else numbers.of(indices.long().unbind(1))).sort(stable=True)
        return cls(numbers, keys, order)

    def with_spans(self, indices: Tensor, spans: tuple[int, ...]) -> SiteKeys | None:
        """Return the same sites, in the same order, in a grid of other margins; `None` where it is too large."""
        if math.prod(spans) > KEY_LIMIT:
            return None
        return SiteKeys(CellNumbers(spans), _number(indices, spans).index_select(0, self.order), self.order)

    @property
    def steps(self) -> tuple[int, ...]:
        """By how much a key grows with each coordinate."""
        return steps_of(tuple(self.numbers.extents))

    def repeats(self) -> Tensor:
        """0-d bool: whether a key stands again."""
        return (self.keys[1:] == self.keys[:-1]).any()


def spans_of(extents: Sequence[int], reach: int = _MARGIN) -> tuple[int, ...]:
    """Return cells of each axis with a margin after every one but the first, for steps of up to `reach`.

    >>> spans_of((2, 10, 10)), steps_of(spans_of((2, 10, 10)))
    ((2, 14, 14), (196, 14, 1))
    """
    # Without a function for each extent: every map comes here.
    batch, *spans = extents
    margin = max(reach, _MARGIN)
    for axis, extent in enumerate(spans):
        spans[axis] = extent + margin
    return (batch, *spans)


def key_dtype(spans: Sequence[int]) -> torch.dtype:
    """Return the dtype of keys of cells in a grid with margins."""
    return torch.int32 if math.prod(spans) <= _NARROW_LIMIT else torch.int64


def _number(indices: Tensor, spans: Sequence[int]) -> Tensor:
    """Return (n,) the cell of each site; its dtype is that of keys. What lies outside gets any number."""
    key, *columns = indices.to(key_dtype(spans)).unbind(1)
    for extent, column in zip(spans[1:], columns, strict=True):
        key = torch.add(column, key, alpha=extent)
    return key


def unique_sites(columns: Sequence[Tensor], extents: Sequence[int]) -> tuple[tuple[Tensor, ...], Tensor]:
    """Distinct sites in lexicographic order, and the place of each given site among them.

    Args:
        columns: 1 + d int64 tensors (p,); every value lies inside its extent.
        extents: 1 + d.

    Returns:
        Columns (m,) of the distinct sites, and the place (p,) of each given one.

    >>> columns, place = unique_sites([torch.tensor([0, 0, 0]), torch.tensor([5, 2, 5])], (1, 6))
    >>> columns[1].tolist(), place.tolist()
    ([2, 5], [1, 0, 1])
    """
    known, place = torch.unique(CellNumbers(extents).of(columns), return_inverse=True)
    # Any row of a site tells its coordinates, so it does not matter which of them is kept.
    rows = torch.empty_like(known).scatter_(0, place, torch.arange(place.shape[0], device=place.device))
    return tuple(column[rows] for column in columns), place


def check_indices(indices: Tensor, spatial_shape: Sequence[int], rows: int | None = None) -> None:
    """Raise unless `indices` are integers (n, 1 + d); `rows`: as many as features.

    Raises:
        InsumDtypeError: no int32 or int64.
        InsumShapeError: other shapes.
    """
    columns = 1 + len(spatial_shape)
    fits = indices.ndim == 2 and indices.shape[1] == columns and (rows is None or indices.shape[0] == rows)
    if fits and indices.dtype in INDEX_DTYPES:
        return
    faults = Faults()
    faults.dtype_among("indices", indices.dtype, INDEX_DTYPES, fix="pass indices.int().", field="indices")
    owner, expected = ("voxel", "n") if rows is None else ("row of features", rows)
    message = f"must have one row (batch, {columns - 1} coordinates) per {owner}"
    fix = "put the batch entry into column 0, and give spatial_shape one extent per coordinate"
    fix += "." if rows is None else "; after replace_feature with features of other voxels set x.indices."
    known = [f"spatial_shape {list(spatial_shape)}"]
    faults.shape("indices", indices, (expected, columns), message=message, details=known, fix=fix, field="indices")
    faults.raise_all()


def _check_static(indices: Tensor, spatial_shape: tuple[int, ...], batch_size: int) -> None:
    check_indices(indices, spatial_shape)
    faults = Faults()
    if not spatial_shape or min(spatial_shape) < 1 or max(spatial_shape) > MAX_EXTENT:
        details, fix = [f"expected one extent or more, each from 1 to {MAX_EXTENT}"], "give the size of the grid."
        faults.add(InsumShapeError, "spatial_shape", f"is {spatial_shape}", details=details, fix=fix, got=spatial_shape)
    if batch_size < 1:
        details, fix = ["expected at least 1; an empty batch has rows (0, ..) only"], "pass the number of clouds."
        faults.add(InsumShapeError, "batch_size", f"is {batch_size}", details=details, fix=fix, got=batch_size)
    faults.raise_all()


def _outside(sites: Coordinates) -> InsumRangeError:
    indices = sites.indices
    wrong = (indices < 0) | (indices >= torch.tensor(sites.extents, device=indices.device))
    details: list[str] = []
    for axis in wrong.any(0).nonzero().squeeze(1).tolist():
        column, bad = indices[:, axis], wrong[:, axis].nonzero().squeeze(1)
        row, extent, what = int(bad[0]), sites.extents[axis], f"coordinate {axis - 1}" if axis else "batch entry"
        details.append(
            f"indices[:,{axis}] ({what}): expected 0 <= value < {extent}; got minimum {int(column.min())}, "
            f"maximum {int(column.max())} ({bad.numel()} of {column.numel()} rows; "
            f"first at row {row}: {indices[row].tolist()})"
        )
    return InsumRangeError(
        "'indices' holds voxels outside the grid",
        details=[f"spatial_shape {sites.spatial_shape}, batch_size {sites.batch_size}", *details],
        fix="enlarge spatial_shape or batch_size, or drop those rows; negative coordinates do not wrap.",
        field="indices",
        row=int(wrong.any(1).nonzero()[0]),
        expected=sites.extents,
    )


def _duplicate(sites: Coordinates) -> InsumFormatError:
    table = sites._keys
    again = (table.keys[1:] == table.keys[:-1]).nonzero().squeeze(1)
    rows = torch.stack([table.order[again], table.order[again + 1]], dim=1)
    first, second = rows[rows[:, 1].argmin()].tolist()
    return InsumFormatError(
        "'indices' holds the same voxel more than once",
        details=[
            f"row {second} repeats row {first}: {sites.indices[second].tolist()} "
            f"({again.numel()} of {sites.num_sites} rows repeat another)"
        ],
        fix="merge the points of a voxel first (voxelise the cloud), or drop the repeated rows.",
        field="indices",
        row=second,
        first=first,
    )


torch.library.define("insum_nn::prove_sites", "(Tensor indices, int[] spatial_shape, int batch_size) -> Tensor")


def _prove(indices: Tensor, spatial_shape: Sequence[int], batch_size: int) -> Tensor:
    assert_distinct(indices, (batch_size, *spatial_shape))
    return indices.clone()


torch.library.impl("insum_nn::prove_sites", "CompositeImplicitAutograd", _prove)

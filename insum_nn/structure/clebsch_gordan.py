"""Clebsch-Gordan coefficients as static tables of indices and values.

The coefficients of all paths of a tensor product form one sparse tensor over (component of in1, component of in2,
component of out, path). A `Table` lists it row by row: a row is a component of whatever is computed (the output, or an
input whose gradient is wanted), and its slots hold the products that meet there. So every component has one owner,
and nothing is ever written twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from insum_nn.errors import MissingExtraError
from insum_nn.structure.constants import plain_tensors

__all__ = ["Entries", "Table", "divide", "make_table", "nonzeros", "path_table"]


@lru_cache(maxsize=512)
def nonzeros(l1: int, l2: int, l3: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Where the coupling of degrees `l1`, `l2` to `l3` is not zero, and its values there.

    Source: `e3nn.o3.wigner_3j`, whose real basis and sign this is; computed in float64.

    Returns:
        (3, nnz) components i, j, k, and (nnz,) values.

    Raises:
        MissingExtraError: e3nn is not installed.

    >>> index, values = nonzeros(1, 1, 1)
    >>> index.shape, round(float(np.square(values).sum()), 6)
    ((3, 6), 1.0)
    """
    try:
        from e3nn.o3 import wigner_3j
    except ImportError as error:
        raise MissingExtraError(
            "Clebsch-Gordan coefficients are computed by e3nn, which is not installed",
            fix="run: pip install e3nn",
        ) from error
    # torch makes the result on its default device, which may hold no float64, and for the transform or mode that is
    # active, where it may have no values.
    with plain_tensors(), _disable_current_modes(), torch.device("cpu"):
        dense: NDArray[np.float64] = wigner_3j(l1, l2, l3, dtype=torch.float64).numpy()
    # Entries below are rounding errors of the change of basis; true ones are never this small.
    index = np.stack(np.nonzero(np.abs(dense) > 1e-10)).astype(np.int64)
    return index, dense[tuple(index)]


@dataclass(frozen=True, slots=True)
class Entries:
    """The coefficients of several paths as one list.

    Attributes:
        path: (p,) number of the path among those given.
        component: (3, p) component of in1, in2 and out, counted through all entries of one multiplicity.
        value: (p,) coefficient, with the path's normalisation.
    """

    path: NDArray[np.int64]
    component: NDArray[np.int64]
    value: NDArray[np.float64]

    @classmethod
    def from_paths(
        cls, degrees: Sequence[tuple[int, int, int]], starts: Sequence[tuple[int, int, int]], scales: Sequence[float]
    ) -> Entries:
        """Collect paths.

        Args:
            degrees: l of in1, in2, out of each path.
            starts: first component of each path's entry of in1, in2, out.
            scales: factor of each path.
        """
        found = [nonzeros(*d) for d in degrees]
        if not found:
            return cls(np.zeros(0, np.int64), np.zeros((3, 0), np.int64), np.zeros(0))
        return cls(
            np.concatenate([np.full(v.size, number, np.int64) for number, (_, v) in enumerate(found)]),
            np.concatenate([i + np.array(s)[:, None] for (i, _), s in zip(found, starts, strict=True)], axis=1),
            np.concatenate([v * scale for (_, v), scale in zip(found, scales, strict=True)]),
        )

    def select(self, mask: NDArray[np.bool_]) -> Entries:
        """The coefficients where `mask` is true."""
        return Entries(self.path[mask], self.component[:, mask], self.value[mask])


@dataclass(frozen=True, slots=True)
class Table:
    """Coefficients by owner: `value[row, slot...]` multiplies components `first[row, slot...]` and `second[...]`.

    Laws: every index is inside, so nothing is masked; a slot that a row does not need repeats another slot of that
    row with the value 0, so it brings in no number that the row does not depend on.

    Attributes:
        value: (row, q), or (row, r, q) when a row's slots are divided by path; float64.
        first: components of the first other operand; shape of `value`.
        second: components of the second other operand; shape of `value`.
        path: (row, r) path of each division, or `None`.
    """

    value: Tensor
    first: Tensor
    second: Tensor
    path: Tensor | None


# Buckets a list of rows is divided into at most, and the share of all slots that one more must save.
_BUCKETS = 4
_WORTH = 0.12


def divide(row: NDArray[np.int64], path: NDArray[np.int64] | None) -> list[NDArray[np.int64]]:
    """Divide rows so that rows of like length are together, because short rows are filled up to the longest.

    Args:
        row: (p,) row of each coefficient.
        path: (p,) its path, if a row's slots are divided by path.

    Returns:
        The rows of each part; together, all rows that occur.

    >>> [part.tolist() for part in divide(np.array([0, 1, 2, 2, 2, 2, 2, 2, 3]), None)]
    [[0, 1, 3], [2]]
    """
    rows, place = np.unique(row, return_inverse=True)
    count = np.bincount(place)
    paths, longest = np.ones_like(count), count
    if path is not None:
        pairs, length = np.unique(np.stack([place, path]), axis=1, return_counts=True)
        paths = np.bincount(pairs[0])
        longest = np.zeros_like(count)
        np.maximum.at(longest, pairs[0], length)
    order = (
        np.lexsort((paths, longest)) if int(paths.max(initial=1)) == 1 else np.argsort(paths * longest, kind="stable")
    )
    paths, longest = paths[order], longest[order]

    total, most = rows.size, min(_BUCKETS, rows.size)
    # Fewest slots for the first `stop` rows in n parts, and where the last part starts.
    fewest = np.full((most + 1, total + 1), np.inf)
    fewest[0, 0] = 0.0
    starts = np.zeros((most + 1, total + 1), np.int64)
    # Of the rows from each start to `stop`: most paths, and the longest.
    widest, tallest = np.zeros_like(paths), np.zeros_like(longest)
    for stop in range(1, total + 1):
        np.maximum(widest[:stop], paths[stop - 1], out=widest[:stop])
        np.maximum(tallest[:stop], longest[stop - 1], out=tallest[:stop])
        slots = np.arange(stop, 0, -1) * widest[:stop] * tallest[:stop]
        counts = fewest[:-1, :stop] + slots
        starts[1:, stop] = counts.argmin(1)
        fewest[1:, stop] = counts.min(1)
    whole = fewest[:, total]
    parts = 1
    while parts < most and whole[parts] - whole[parts + 1] > _WORTH * whole[1]:
        parts += 1
    cuts = [total]
    for n in range(parts, 0, -1):
        cuts.insert(0, int(starts[n, cuts[0]]))
    return [np.sort(rows[order[a:b]]) for a, b in pairwise(cuts)]


def make_table(entries: Entries, owner: int, rows: NDArray[np.int64], *, by_path: bool) -> Table:
    """List coefficients by one operand's components.

    Args:
        entries: the coefficients.
        owner: 0, 1 or 2: whose components are the rows (in1, in2, out).
        rows: components to list, in this order; each occurs in `entries`, and coefficients of others are left out.
        by_path: divide a row's slots by path.
    """
    first, second = (axis for axis in range(3) if axis != owner)
    entries = entries.select(np.isin(entries.component[owner], rows))
    position = np.full(int(entries.component[owner].max(initial=-1)) + 1, -1, np.int64)
    position[rows] = np.arange(rows.size)
    row = position[entries.component[owner]]
    keys = [row, entries.path] if by_path else [row]
    slots = _Slots(keys, rows.size)
    shown = [slots.spread(values) for values in (entries.component[first], entries.component[second])]
    value = slots.spread(entries.value, zero=True)
    path = slots.spread(entries.path)[:, :, 0] if by_path else None
    as_tensor = torch.from_numpy
    return Table(
        as_tensor(value), as_tensor(shown[0]), as_tensor(shown[1]), None if path is None else as_tensor(path.copy())
    )


def path_table(entries: Entries, count: int) -> tuple[Tensor, Tensor]:
    """List coefficients by path: (path, q) values, and (3, path, q) components; padded as a `Table` is."""
    slots = _Slots([entries.path], count)
    components = np.stack([slots.spread(axis) for axis in entries.component])
    return torch.from_numpy(slots.spread(entries.value, zero=True)), torch.from_numpy(components)


class _Slots:
    """Divides a list into rows (and divisions of a row), and fills short ones up by repetition."""

    def __init__(self, keys: Sequence[NDArray[np.int64]], rows: int) -> None:
        self.order = np.lexsort(tuple(reversed(keys)))
        self.rows = rows
        sorted_keys = [key[self.order] for key in keys]
        # Start of each run of equal keys.
        starts = self._starts(sorted_keys)
        length = np.diff(np.append(starts, self.order.size))
        width = int(length.max(initial=1))
        slot = np.minimum(np.arange(width), length[:, None] - 1)
        index = starts[:, None] + slot
        used = np.arange(width) < length[:, None]
        if len(keys) == 2:
            run_row = sorted_keys[0][starts]
            first = self._starts([run_row])
            count = np.diff(np.append(first, run_row.size))
            division = np.minimum(np.arange(int(count.max(initial=1))), count[:, None] - 1)
            present = np.arange(division.shape[1]) < count[:, None]
            index = index[first[:, None] + division]
            used = used[first[:, None] + division] & present[:, :, None]
        self.index = self.order[index]
        self.used = used

    @staticmethod
    def _starts(keys: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        if keys[0].size == 0:
            return np.zeros(0, np.int64)
        change = np.zeros(keys[0].size, bool)
        change[0] = True
        for key in keys:
            change[1:] |= key[1:] != key[:-1]
        return np.flatnonzero(change)

    def spread(self, values: NDArray[Any], *, zero: bool = False) -> NDArray[Any]:
        shown = values[self.index]
        return np.where(self.used, shown, 0) if zero else shown

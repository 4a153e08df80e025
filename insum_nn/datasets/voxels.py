"""Points to voxels and back: majority labels, mean features, the voxel of each point."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from insum_nn.errors import InsumFormatError, InsumOverflowError, InsumShapeError

__all__ = ["Voxels", "voxelize"]


@dataclass(frozen=True, eq=False)
class Voxels:
    """The voxels that hold a point.

    Attributes:
        coordinates: (v, d) int32, distinct, in lexicographic order, the smallest of each axis 0.
        spatial_shape: the extent of each axis.
        labels: (v,) int64: the label that most of a voxel's points have, the smaller one of a tie; points labelled -1
            have no vote, and a voxel of such alone is -1. `None` without labels.
        features: (v, f) float32: means over a voxel's points. `None` without features.
        counts: (v,) int64: points in each voxel.
        inverse: (n,) int64: the voxel of each point.
    """

    coordinates: NDArray[np.int32]
    spatial_shape: tuple[int, ...]
    labels: NDArray[np.int64] | None
    features: NDArray[np.float32] | None
    counts: NDArray[np.int64]
    inverse: NDArray[np.int64]

    def __len__(self) -> int:
        return self.coordinates.shape[0]


def voxelize(
    points: NDArray[np.floating],
    voxel_size: float,
    *,
    labels: NDArray[np.integer] | None = None,
    features: NDArray[np.generic] | None = None,
) -> Voxels:
    """Sort points into cubes.

    Args:
        points: (n, d), finite.
        voxel_size: edge of a cube.
        labels: (n,), -1 for none.
        features: (n, f).

    Raises:
        InsumShapeError: lengths disagree.
        InsumFormatError: a coordinate is not finite, or `voxel_size` is not positive.
        InsumOverflowError: the grid has more cells than int64 can number.

    >>> cubes = voxelize(np.array([[0.0, 0.0], [0.1, 0.0], [1.2, 0.0]]), 0.5, labels=np.array([3, 3, 1]))
    >>> cubes.coordinates.tolist(), cubes.labels.tolist(), cubes.inverse.tolist()
    ([[0, 0], [2, 0]], [3, 1], [0, 0, 1])
    """
    points = np.asarray(points)
    shapes = [getattr(part, "shape", None) for part in (points, labels, features)]
    if points.ndim != 2 or any(shape is not None and shape[:1] != points.shape[:1] for shape in shapes):
        raise InsumShapeError(
            "voxelize: points, labels and features do not go together",
            details=[f"expected (n, d), (n,) and (n, f); got {', '.join(map(str, shapes))}"],
            fix="give each point one label and one row of features.",
            got=tuple(shapes),
        )
    if not voxel_size > 0:
        raise InsumFormatError(f"voxelize: 'voxel_size' is {voxel_size}", fix="pass a positive length.", got=voxel_size)
    broken = np.flatnonzero(~np.isfinite(points).all(1))
    if len(broken):
        what = f"voxelize: point {broken[0]} is {points[broken[0]].tolist()}"
        details = [f"{len(broken)} of {len(points)} points are not finite"]
        raise InsumFormatError(what, details=details, fix="remove those points.", row=int(broken[0]))
    wide = points.astype(np.float64)
    cells = np.floor((wide - wide.min(0, initial=np.inf)) / voxel_size)
    extents = [int(top) + 1 for top in cells.max(0, initial=0)]
    if math.prod(extents) > 1 << 62 or max(extents) > 1 << 31:
        what, fix = f"a grid of {' x '.join(map(str, extents))} voxels cannot be numbered", "use larger voxels."
        raise InsumOverflowError(what, details=[f"voxel_size {voxel_size}"], fix=fix, got=tuple(extents))
    key = np.ravel_multi_index(tuple(cells.astype(np.int64).T), extents)
    _, first, inverse, counts = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    majority = None if labels is None else _majority(np.asarray(labels).astype(np.int64), inverse, len(counts))
    means = None if features is None else _means(np.asarray(features), inverse, counts)
    return Voxels(cells[first].astype(np.int32), tuple(extents), majority, means, counts, inverse)


def _majority(labels: NDArray[np.int64], inverse: NDArray[np.int64], voxels: int) -> NDArray[np.int64]:
    voting = labels >= 0
    kinds = int(labels.max(initial=0)) + 1
    result = np.full(voxels, -1, np.int64)
    # One key for a (voxel, label) pair that occurs: memory goes with points, not with voxels times labels.
    pairs, votes = np.unique(inverse[voting] * kinds + labels[voting], return_counts=True)
    # Of a voxel's pairs the last one is kept: that of most votes, of these that of the smallest label.
    pairs = pairs[np.lexsort((-pairs, votes))]
    result[pairs // kinds] = pairs % kinds
    return result


def _means(features: NDArray[np.generic], inverse: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.float32]:
    sums = [np.bincount(inverse, column, len(counts)) for column in features.astype(np.float64).T]
    return (np.reshape(sums, (len(sums), len(counts))) / counts).T.astype(np.float32, order="C")

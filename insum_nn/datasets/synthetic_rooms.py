"""Furnished rooms made of boxes: labelled, coloured points that need no download."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from insum_nn.datasets.rooms import CLASSES, Room
from insum_nn.datasets.s3dis import VoxelSample, voxel_sample

__all__ = ["SyntheticRooms", "generate_room"]

_COLORS: dict[str, tuple[int, int, int]] = {
    "ceiling": (225, 222, 214),
    "floor": (140, 112, 88),
    "wall": (205, 196, 178),
    "beam": (168, 158, 146),
    "column": (182, 180, 176),
    "window": (150, 186, 210),
    "door": (128, 82, 52),
    "table": (186, 146, 100),
    "chair": (52, 56, 66),
    "sofa": (150, 58, 52),
    "bookcase": (110, 78, 50),
    "board": (240, 242, 240),
    "clutter": (120, 130, 90),
}


@dataclass(frozen=True)
class _Box:
    """A box whose faces are sampled; `thickness` 0 along an axis makes it a panel."""

    label: str
    low: tuple[float, float, float]
    high: tuple[float, float, float]

    def areas(self) -> NDArray[np.float64]:
        """Areas of the six faces, two per axis."""
        x, y, z = (b - a for a, b in zip(self.low, self.high, strict=True))
        pairs = np.repeat([y * z, x * z, x * y], 2)
        # A flat panel has one face, not two at the same place.
        flat = [extent == 0 for extent in (x, y, z) for _ in range(2)]
        second = np.arange(6) % 2 == 1
        return np.where(flat & second, 0.0, pairs)


def _parts(label: str, boxes: Sequence[tuple[Sequence[float], Sequence[float]]], at: Sequence[float]) -> list[_Box]:
    """Boxes given by corners relative to a place."""
    shifted = [[tuple(float(c + o) for c, o in zip(corner, at, strict=True)) for corner in box] for box in boxes]
    return [_Box(label, low, high) for low, high in shifted]  # type: ignore[arg-type]


def _table(at: Sequence[float], width: float, depth: float) -> list[_Box]:
    legs = [((x, y, 0), (x + 0.06, y + 0.06, 0.7)) for x in (0, width - 0.06) for y in (0, depth - 0.06)]
    return _parts("table", [((0, 0, 0.7), (width, depth, 0.75)), *legs], at)


def _chair(at: Sequence[float]) -> list[_Box]:
    legs = [((x, y, 0), (x + 0.04, y + 0.04, 0.42)) for x in (0, 0.4) for y in (0, 0.4)]
    return _parts("chair", [((0, 0, 0.42), (0.44, 0.44, 0.47)), ((0, 0.4, 0.47), (0.44, 0.44, 0.95)), *legs], at)


def _sofa(at: Sequence[float], width: float) -> list[_Box]:
    boxes = [((0, 0, 0.1), (width, 0.8, 0.42)), ((0, 0, 0.42), (width, 0.2, 0.8))]
    arms = [((x, 0, 0.42), (x + 0.18, 0.8, 0.6)) for x in (0, width - 0.18)]
    return _parts("sofa", [*boxes, *arms], at)


def _bookcase(at: Sequence[float], width: float, height: float) -> list[_Box]:
    shelves = [((0, 0, z), (width, 0.3, z + 0.03)) for z in np.arange(0.05, height, 0.38)]
    sides = [((x, 0, 0), (x + 0.03, 0.3, height)) for x in (0, width - 0.03)]
    return _parts("bookcase", [((0, 0, 0), (width, 0, height)), *sides, *shelves], at)


def _shell(size: NDArray[np.float64], generator: np.random.Generator) -> list[_Box]:
    """Floor, ceiling, walls and what hangs on or stands at them."""
    x, y, z = (float(extent) for extent in size)
    boxes = [_Box("floor", (0, 0, 0), (x, y, 0)), _Box("ceiling", (0, 0, z), (x, y, z))]
    boxes += [_Box("wall", (0, 0, 0), (x, 0, z)), _Box("wall", (0, y, 0), (x, y, z))]
    boxes += [_Box("wall", (0, 0, 0), (0, y, z)), _Box("wall", (x, 0, 0), (x, y, z))]
    door = float(generator.uniform(0.3, x - 1.3))
    boxes.append(_Box("door", (door, 0.0, 0.0), (door + 0.95, 0.05, 2.1)))
    window = float(generator.uniform(0.3, y - 1.9))
    boxes.append(_Box("window", (x - 0.04, window, 1.0), (x, window + 1.5, 2.2)))
    board = float(generator.uniform(0.3, y - 1.9))
    boxes.append(_Box("board", (0.0, board, 1.0), (0.04, board + 1.6, 2.0)))
    boxes.append(_Box("beam", (0.0, y / 2 - 0.15, z - 0.3), (x, y / 2 + 0.15, z)))
    boxes.append(_Box("column", (x - 0.35, y - 0.35, 0.0), (x, y, z)))
    return boxes


def _furniture(size: NDArray[np.float64], generator: np.random.Generator) -> list[_Box]:
    x, y = float(size[0]), float(size[1])
    boxes: list[_Box] = []
    width, depth = generator.uniform(1.1, 1.7), generator.uniform(0.7, 0.9)
    corner = (float(generator.uniform(0.9, x - width - 0.9)), float(generator.uniform(1.2, y - depth - 1.2)), 0.0)
    boxes += _table(corner, width, depth)
    for side in (-0.5, depth + 0.06):
        boxes += _chair((corner[0] + float(generator.uniform(0.05, width - 0.5)), corner[1] + side, 0.0))
    boxes += _sofa((float(generator.uniform(0.3, 0.6)), y - 0.9, 0.0), float(generator.uniform(1.4, 1.9)))
    boxes += _bookcase((x - 1.9, 0.12, 0.0), float(generator.uniform(0.8, 1.2)), float(generator.uniform(1.6, 2.0)))
    for _ in range(int(generator.integers(3, 7))):
        spot = generator.uniform([0.2, 0.2], [x - 0.5, y - 0.5])
        extent = generator.uniform(0.1, 0.3, 3)
        base = 0.75 if generator.random() < 0.4 else 0.0
        if base:
            spot = np.array(corner[:2]) + generator.uniform(0.1, 0.4, 2)
        low = (float(spot[0]), float(spot[1]), base)
        boxes.append(_Box("clutter", low, tuple(float(a + b) for a, b in zip(low, extent, strict=True))))  # type: ignore[arg-type]
    return boxes


def _sample(box: _Box, count: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Points on a box's faces, evenly by area."""
    areas = box.areas()
    faces = generator.choice(6, size=count, p=areas / areas.sum())
    low, high = np.array(box.low), np.array(box.high)
    points = generator.uniform(low, high, (count, 3))
    axis, upper = faces // 2, faces % 2
    points[np.arange(count), axis] = np.where(upper == 1, high[axis], low[axis])
    return points


def generate_room(seed: int, *, num_points: int = 60_000) -> Room:
    """Make a furnished room of all 13 classes; the same for the same seed.

    Args:
        seed: draws size, furniture, colours and noise.
        num_points: points in all, spread by area.

    Returns:
        A room of 4 to 6 by 4.5 to 6.5 by 2.6 to 3.1 metres, with noise of 4 mm.

    >>> room = generate_room(0, num_points=2000)
    >>> len(room), sorted(set(room.labels.tolist())) == list(range(13))
    (2000, True)
    """
    generator = np.random.default_rng(seed)
    size = generator.uniform([4.0, 4.5, 2.6], [6.0, 6.5, 3.1])
    boxes = _shell(size, generator) + _furniture(size, generator)
    areas = np.array([box.areas().sum() for box in boxes])
    # Each box has a few points, however small; the rest go by area.
    least = min(8, num_points // len(boxes))
    counts = least + generator.multinomial(num_points - least * len(boxes), areas / areas.sum())
    points = np.concatenate([_sample(box, int(count), generator) for box, count in zip(boxes, counts, strict=True)])
    labels = np.repeat([CLASSES.index(box.label) for box in boxes], counts)
    tints = np.array([_COLORS[box.label] for box in boxes]) + generator.normal(0, 14, (len(boxes), 3))
    light = 0.75 + 0.25 * points[:, 2:] / size[2]
    colors = np.repeat(tints, counts, axis=0) * light + generator.normal(0, 9, points.shape)
    points = points + generator.normal(0, 0.004, points.shape)
    order = generator.permutation(num_points)
    return Room(
        f"synthetic_{seed}",
        points[order].astype(np.float32),
        np.clip(np.rint(colors[order]), 0, 255).astype(np.uint8),
        labels[order].astype(np.int64),
    )


class SyntheticRooms(Dataset[VoxelSample]):
    """Generated rooms as voxels, for use where S3DIS is not available.

    Args:
        count: rooms.
        first_seed: the seed of the first; the others follow.
        num_points: points of each.
        voxel_size: edge in metres.
        transform: applied to each `Room` before it is cut into voxels.

    >>> rooms = SyntheticRooms(2, num_points=1000, voxel_size=0.2)
    >>> len(rooms), rooms[0].features.shape[1]
    (2, 6)
    """

    def __init__(
        self,
        count: int,
        *,
        first_seed: int = 0,
        num_points: int = 60_000,
        voxel_size: float = 0.05,
        transform: Callable[[Room], Room] | None = None,
    ) -> None:
        self.count = count
        self.first_seed = first_seed
        self.num_points = num_points
        self.voxel_size = voxel_size
        self.transform = transform

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> VoxelSample:
        room = self.room(index)
        return voxel_sample(room if self.transform is None else self.transform(room), self.voxel_size)

    def room(self, index: int) -> Room:
        """The points of a room."""
        if not 0 <= index < self.count:
            raise IndexError(index)
        return generate_room(self.first_seed + index, num_points=self.num_points)

"""Furnished rooms made of boxes: labelled, coloured points that need no download."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from insum_nn.datasets.rooms import CLASSES, Room
from insum_nn.datasets.s3dis import VoxelRooms

__all__ = ["SyntheticRooms", "generate_room"]

# What each class is made of, in the order of the classes.
_COLORS = np.frombuffer(
    bytes.fromhex("e1ded6 8c7058 cdc4b2 a89e92 b6b4b0 96bad2 805234 ba9264 343842 963a34 6e4e32 f0f2f0 78825a"),
    np.uint8,
).reshape(-1, 3)
_Corner = Sequence[float] | NDArray[np.float64]


class _Box(NamedTuple):
    """A box whose faces are sampled; one that is flat along an axis is a panel."""

    label: int
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    def areas(self) -> NDArray[np.float64]:
        """Areas of the six faces, two per axis; a panel has one face, not two at the same place."""
        extent = self.high - self.low
        pair = np.roll(extent, 1) * np.roll(extent, 2)
        return np.stack([pair, np.where(extent == 0, 0.0, pair)], axis=1).ravel()


def _boxes(label: str, corners: Iterable[tuple[_Corner, _Corner]], at: _Corner = (0, 0, 0)) -> list[_Box]:
    """Boxes given by corners relative to a place."""
    return [_Box(CLASSES.index(label), np.add(low, at), np.add(high, at)) for low, high in corners]


def _table(at: _Corner, width: float, depth: float) -> list[_Box]:
    legs = [((x, y, 0), (x + 0.06, y + 0.06, 0.7)) for x in (0, width - 0.06) for y in (0, depth - 0.06)]
    return _boxes("table", [((0, 0, 0.7), (width, depth, 0.75)), *legs], at)


def _chair(at: _Corner) -> list[_Box]:
    legs = [((x, y, 0), (x + 0.04, y + 0.04, 0.42)) for x in (0, 0.4) for y in (0, 0.4)]
    return _boxes("chair", [((0, 0, 0.42), (0.44, 0.44, 0.47)), ((0, 0.4, 0.47), (0.44, 0.44, 0.95)), *legs], at)


def _sofa(at: _Corner, width: float) -> list[_Box]:
    arms = [((x, 0, 0.42), (x + 0.18, 0.8, 0.6)) for x in (0, width - 0.18)]
    return _boxes("sofa", [((0, 0, 0.1), (width, 0.8, 0.42)), ((0, 0, 0.42), (width, 0.2, 0.8)), *arms], at)


def _bookcase(at: _Corner, width: float, height: float) -> list[_Box]:
    shelves = [((0, 0, z), (width, 0.3, z + 0.03)) for z in np.arange(0.05, height, 0.38)]
    sides = [((x, 0, 0), (x + 0.03, 0.3, height)) for x in (0, width - 0.03)]
    return _boxes("bookcase", [((0, 0, 0), (width, 0, height)), *sides, *shelves], at)


def _shell(size: NDArray[np.float64], generator: np.random.Generator) -> list[_Box]:
    """Floor, ceiling, walls and what hangs on or stands at them."""
    x, y, z = size
    door, window, board = generator.uniform(0.3, [x - 1.3, y - 1.9, y - 1.9])
    walls = [((0, 0, 0), (x, 0, z)), ((0, y, 0), (x, y, z)), ((0, 0, 0), (0, y, z)), ((x, 0, 0), (x, y, z))]
    boxes = _boxes("floor", [((0, 0, 0), (x, y, 0))]) + _boxes("ceiling", [((0, 0, z), (x, y, z))])
    boxes += _boxes("wall", walls) + _boxes("door", [((door, 0, 0), (door + 0.95, 0.05, 2.1))])
    boxes += _boxes("window", [((x - 0.04, window, 1), (x, window + 1.5, 2.2))])
    boxes += _boxes("board", [((0, board, 1), (0.04, board + 1.6, 2))])
    boxes += _boxes("beam", [((0, y / 2 - 0.15, z - 0.3), (x, y / 2 + 0.15, z))])
    return boxes + _boxes("column", [((x - 0.35, y - 0.35, 0), (x, y, z))])


def _furniture(size: NDArray[np.float64], generator: np.random.Generator) -> list[_Box]:
    x, y, _ = size
    width, depth = generator.uniform([1.1, 0.7], [1.7, 0.9])
    corner = np.array([*generator.uniform([0.9, 1.2], [x - width - 0.9, y - depth - 1.2]), 0])
    boxes = _table(corner, width, depth)
    for side in (-0.5, depth + 0.06):
        boxes += _chair(np.add(corner, [generator.uniform(0.05, width - 0.5), side, 0]))
    boxes += _sofa((generator.uniform(0.3, 0.6), y - 0.9, 0), generator.uniform(1.4, 1.9))
    boxes += _bookcase((x - 1.9, 0.12, 0), *generator.uniform([0.8, 1.6], [1.2, 2.0]))
    for _ in range(generator.integers(3, 7)):
        spot = generator.uniform([0.2, 0.2], [x - 0.5, y - 0.5])
        extent = generator.uniform(0.1, 0.3, 3)
        on_table = generator.random() < 0.4
        low = np.array([*spot, 0])
        if on_table:
            low = np.add(corner, [*generator.uniform(0.1, 0.4, 2), 0.75])
        boxes += _boxes("clutter", [(low, low + extent)])
    return boxes


def _sample(box: _Box, count: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Points on a box's faces, evenly by area."""
    areas = box.areas()
    faces = generator.choice(6, size=count, p=areas / areas.sum())
    points = generator.uniform(box.low, box.high, (count, 3))
    axis, upper = faces // 2, faces % 2
    points[np.arange(count), axis] = np.where(upper == 1, box.high[axis], box.low[axis])
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
    classes = np.array([box.label for box in boxes])
    tints = _COLORS[classes] + generator.normal(0, 14, (len(boxes), 3))
    light = 0.75 + 0.25 * points[:, 2:] / size[2]
    colors = np.repeat(tints, counts, axis=0) * light + generator.normal(0, 9, points.shape)
    points = (points + generator.normal(0, 0.004, points.shape)).astype(np.float32)
    order = generator.permutation(num_points)
    colors = np.clip(np.rint(colors), 0, 255).astype(np.uint8)
    return Room(f"synthetic_{seed}", points[order], colors[order], np.repeat(classes, counts)[order])


class SyntheticRooms(VoxelRooms):
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
        super().__init__(voxel_size, transform)
        self.count, self.first_seed, self.num_points = count, first_seed, num_points

    def __len__(self) -> int:
        return self.count

    def room(self, index: int) -> Room:
        """The points of a room."""
        if not 0 <= index < self.count:
            raise IndexError(index)
        return generate_room(self.first_seed + index, num_points=self.num_points)

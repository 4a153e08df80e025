"""Voxel clouds of two kinds: the surfaces of furnished rooms, and the sweep of a rotating laser scanner."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.registry import Setting, Unavailable

__all__ = ["CLOUDS", "Cloud", "cloud", "neighbour_table", "room", "sweep"]

Cloud = tuple[Tensor, tuple[int, int, int]]
"""(n, 3) int64 coordinates in lexicographic order, none twice, and the grid's extents."""

CLOUDS = ("room", "sweep", "kitti")
_VOXEL = 0.05


def cloud(setting: Setting, name: str) -> Cloud:
    """A cloud by name; a small one of the same kind where the setting is tiny. `kitti` is a file, the others are made.

    Raises:
        Unavailable: the file is not under the setting's root.
    """
    if name == "room":
        points = room(24, 14, 3) if setting.tiny else room(400, 60, 40)
    elif name == "sweep" or setting.tiny:
        points = voxels(sweep(24, 240, reach=3.5) if setting.tiny else sweep(64, 2_050))
    else:
        path = None if setting.root is None else setting.root / "lidar" / "semantickitti_00_000000.bin"
        if path is None or not path.exists():
            raise Unavailable("lidar/semantickitti_00_000000.bin is not under --root or INSUM_DATA")
        points = voxels(torch.from_file(str(path), size=path.stat().st_size // 4).reshape(-1, 4)[:, :3].double())
    extents = points.amax(0) + 1
    return points.to(setting.device), (int(extents[0]), int(extents[1]), int(extents[2]))


def voxels(points: Tensor) -> Tensor:
    """The cells of 5 cm that hold a point, moved to begin at 0."""
    cells = (points / _VOXEL).floor().long()
    return torch.unique(cells - cells.amin(0), dim=0)


def room(side: int, height: int, boxes: int, seed: int = 1) -> Tensor:
    """A floor, two walls and hollow boxes on the floor, one voxel thick; 15 % of the voxels are missing.

    Source of the sizes: a floor of 400 x 400 and walls of 60 give about 236,000 voxels with 8.1 neighbours each,
    itself counted, as a scan of a large room at 5 cm does.
    """
    generator = torch.Generator().manual_seed(seed)
    shells = [_sheet(2, (0, 0, 0), (side, side)), _sheet(1, (0, 0, 0), (side, height))]
    shells.append(_sheet(0, (0, 0, 0), (side, height)))
    largest = min(30, side // 3)
    for _ in range(boxes):
        spot = torch.randint(2, side - largest, (2,), generator=generator).tolist()
        size = torch.randint(min(8, largest // 2), largest, (3,), generator=generator).tolist()
        for axis in range(3):
            across = (size[0 if axis else 1], size[1 if axis == 2 else 2])
            for offset in (0, size[axis]):
                corner = [spot[0], spot[1], 0]
                corner[axis] += offset
                shells.append(_sheet(axis, (corner[0], corner[1], corner[2]), across))
    points = torch.cat(shells)
    return torch.unique(points[torch.rand(len(points), generator=generator) > 0.15], dim=0)


def _sheet(normal: int, corner: tuple[int, int, int], size: tuple[int, int]) -> Tensor:
    """A rectangle of voxels across an axis."""
    cells = torch.cartesian_prod(torch.arange(size[0]), torch.arange(size[1]))
    flat = torch.zeros(len(cells), 3, dtype=torch.int64)
    flat[:, [axis for axis in range(3) if axis != normal]] = cells
    return flat + torch.tensor(corner)


def sweep(beams: int, steps: int, *, reach: float = 60.0, seed: int = 2) -> Tensor:
    """Points where the beams of a scanner 1.7 m above a street first meet the ground, a wall or a box, with noise.

    Beams point from 24.8 degrees down to 2 up, as those of a 64-beam scanner; density falls with the distance.
    """
    generator = torch.Generator().manual_seed(seed)
    pitch = torch.deg2rad(torch.linspace(-24.8, 2.0, beams, dtype=torch.float64))
    turn = torch.arange(steps, dtype=torch.float64) * (2 * math.pi / steps)
    up, around = torch.meshgrid(pitch, turn, indexing="ij")
    ray = torch.stack([up.cos() * around.cos(), up.cos() * around.sin(), up.sin()], -1).reshape(-1, 3)
    ground = torch.where(ray[:, 2] < 0, -1.7 / ray[:, 2], math.inf)
    nearest = torch.minimum(ground, 12.0 / ray[:, 1].abs())
    for _ in range(60):
        # Cars, trunks, poles: boxes that stand on the ground, axis by axis where a ray enters and leaves.
        spot = (torch.rand(2, generator=generator, dtype=torch.float64) - 0.5) * torch.tensor([80.0, 22.0])
        if spot.abs().amax() < 3:
            continue
        half = torch.rand(3, generator=generator, dtype=torch.float64) * torch.tensor([2.0, 0.9, 1.0]) + 0.15
        centre = torch.cat([spot, (half[2] - 1.7)[None]])
        slabs = torch.stack([(centre - half) / ray, (centre + half) / ray])
        enter, leave = slabs.amin(0).amax(1), slabs.amax(0).amin(1)
        hit = (enter > 0) & (enter < leave)
        nearest = torch.where(hit, torch.minimum(nearest, enter), nearest)
    nearest = nearest + 0.01 * torch.randn(nearest.shape, generator=generator, dtype=torch.float64)
    kept = nearest < reach
    return ray[kept] * nearest[kept, None]


def neighbour_table(points: Tensor, kernel: int = 3) -> Tensor:
    """(kernel^3, n): the row of the voxel at each offset from a voxel, or -1; offsets in lexicographic order.

    Found by binary search among the voxels' keys: nothing of the package that is measured.
    """
    half = kernel // 2
    span = points.amax(0) + 2 * kernel
    stride = torch.stack([span[1] * span[2], span[2], torch.ones_like(span[2])])
    keys = ((points + kernel) * stride).sum(1)
    order = keys.argsort()
    ordered = keys[order]
    steps = torch.arange(-half, half + 1, device=points.device)
    rows: list[Tensor] = []
    for offset in torch.cartesian_prod(steps, steps, steps):
        wanted = keys + (offset * stride).sum()
        place = torch.searchsorted(ordered, wanted).clamp_max(len(keys) - 1)
        rows.append(torch.where(ordered[place] == wanted, order[place], -1))
    return torch.stack(rows)

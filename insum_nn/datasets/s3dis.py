"""S3DIS: rooms of six buildings as coloured points, read in the owner's own layout."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from insum_nn.compiler.tuning.cache_folder import read, sealed, unsealed, write
from insum_nn.datasets.rooms import CLASSES, UNLABELLED, Room, in_float32, is_point_file, read_point_file, read_points
from insum_nn.datasets.voxels import voxelize
from insum_nn.errors import InsumNameError
from insum_nn.faults import check_choice

__all__ = ["S3DIS", "VoxelBatch", "VoxelRooms", "VoxelSample", "collate", "read_room", "voxel_sample"]

_SPLITS = {"train": (1, 2, 3, 4, 6), "val": (5,)}
# In the published annotations a few stairs stand beside the 13 classes; by custom they count as clutter.
_ALIASES = {"stairs": "clutter"}
_CACHE_FORMAT = 1


def read_room(path: str | Path, *, broken: Literal["raise", "skip"] = "raise") -> Room:
    """Read one room.

    Args:
        path: a folder with `Annotations/<class>_<number>.txt`, or with `<room>.txt` alone (no labels); or a file:
            `.txt` with lines `x y z r g b`, or what `read_point_file` reads: `.ply`, `.pcd`, `.las`, `.laz`.
        broken: `"raise"` names file and line of the first line that is no point; `"skip"` leaves such lines out, with a
            warning.

    Returns:
        The room. Where float32 would move a point by more than half a millimetre, as map coordinates, points count from
        the room's smallest corner, rounded down.

    Raises:
        InsumNameError: a class is none of S3DIS, or there is nothing to read.
        InsumFormatError: a line is no point, or the file is cut or damaged.
        MissingExtraError: the package that reads a point file is not installed.
    """
    path = Path(path)
    alone = path.is_file()
    if alone and is_point_file(path):
        return read_point_file(path, broken=broken)
    files = [path] if alone else _room_files(path)
    labels = [UNLABELLED if alone else _label_of(file) for file in files]
    points, colors = zip(*(read_points(file, broken=broken) for file in files), strict=True)
    name = f"{path.parent.name}/{path.name}" if path.parent.name.startswith("Area_") else path.stem
    whole, counts = in_float32(path, np.concatenate(points)), [len(part) for part in points]
    return Room(name, whole, np.concatenate(colors), np.repeat(np.array(labels, np.int64), counts))


def _room_files(folder: Path) -> list[Path]:
    """The annotations of a room, or its points without labels."""
    files = sorted(file for file in (folder / "Annotations").glob("*.txt") if not file.name.startswith("."))
    if not files:
        files = [file for file in (folder / f"{folder.name}.txt", folder / "room.txt") if file.is_file()][:1]
    if not files:
        details = [f"expected {folder}/Annotations/<class>_<number>.txt, or {folder}/{folder.name}.txt"]
        fix = "pass the folder of a room, as Area_1/office_1."
        raise InsumNameError(f"there is no room at {folder}", details=details, fix=fix, path=str(folder))
    return files


def _label_of(file: Path) -> int:
    if file.parent.name != "Annotations":
        return UNLABELLED
    word = file.stem.partition("_")[0]
    word = _ALIASES.get(word, word)
    check_choice(f"the class of {file}", word, CLASSES, InsumNameError)
    return CLASSES.index(word)


@dataclass(frozen=True, eq=False)
class VoxelSample:
    """A room as voxels.

    Attributes:
        room: its points.
        indices: (v, 3) int32 coordinates.
        spatial_shape: extents of the grid.
        features: (v, 6) float32: place in the room in metres (x and y from its middle, z from its floor), then colour
            from -1 to 1.
        labels: (v,) int64, -1 for none.
        inverse: (n,) int64: the voxel of each point, so that `prediction[inverse]` labels the points.
    """

    room: Room
    indices: Tensor
    spatial_shape: tuple[int, ...]
    features: Tensor
    labels: Tensor
    inverse: Tensor


@dataclass(frozen=True, eq=False)
class VoxelBatch:
    """Several samples as one sparse tensor's members.

    Attributes:
        features: (v, 6).
        indices: (v, 4) int32, the sample's number first.
        spatial_shape: large enough for all.
        batch_size: samples.
        labels: (v,).
        samples: what the batch was made of.
    """

    features: Tensor
    indices: Tensor
    spatial_shape: tuple[int, ...]
    batch_size: int
    labels: Tensor
    samples: tuple[VoxelSample, ...]

    def to(self, device: torch.device | str) -> VoxelBatch:
        """The batch on a device; the samples stay where they are."""
        moved = {name: getattr(self, name).to(device) for name in ("features", "indices", "labels")}
        return replace(self, **moved)


def voxel_sample(room: Room, voxel_size: float = 0.05) -> VoxelSample:
    """Cut a room into voxels with mean features and majority labels.

    Args:
        room: points, colours, labels.
        voxel_size: edge in metres.
    """
    points = room.points.astype(np.float64)
    if len(points):
        low, high = points.min(0), points.max(0)
        points = points - np.array([(low[0] + high[0]) / 2, (low[1] + high[1]) / 2, low[2]])
    features = np.concatenate([points, room.colors / 127.5 - 1], axis=1)
    voxels = voxelize(room.points, voxel_size, labels=room.labels, features=features)
    arrays: Any = (voxels.coordinates, voxels.features, voxels.labels, voxels.inverse)
    indices, means, labels, inverse = map(torch.from_numpy, arrays)
    return VoxelSample(room, indices, voxels.spatial_shape, means, labels, inverse)


def collate(samples: Sequence[VoxelSample]) -> VoxelBatch:
    """Join samples into a batch; `collate_fn` of a data loader."""
    rows = [torch.nn.functional.pad(s.indices, (1, 0), value=place) for place, s in enumerate(samples)]
    shape = tuple(np.max([s.spatial_shape for s in samples], axis=0).tolist())
    features, labels = torch.cat([s.features for s in samples]), torch.cat([s.labels for s in samples])
    return VoxelBatch(features, torch.cat(rows), shape, len(samples), labels, tuple(samples))


class VoxelRooms(Dataset[VoxelSample]):
    """Rooms as voxels: a subclass says how many there are, and what the points of each are.

    Args:
        voxel_size: edge in metres.
        transform: applied to each `Room` before it is cut into voxels.
    """

    def __init__(self, voxel_size: float, transform: Callable[[Room], Room] | None) -> None:
        self.voxel_size, self.transform = voxel_size, transform

    def __getitem__(self, index: int) -> VoxelSample:
        room = self.room(index)
        return voxel_sample(room if self.transform is None else self.transform(room), self.voxel_size)

    def room(self, index: int) -> Room:
        """The points of a room."""
        raise NotImplementedError


class S3DIS(VoxelRooms):
    """The rooms of S3DIS as voxels.

    Expects the owner's layout `root/Area_<k>/<room>/Annotations/<class>_<number>.txt`; nothing is downloaded. By custom
    areas 1 to 4 and 6 are for training and area 5 for validation. Parsed rooms are kept in a cache on disk, keyed by
    the names, sizes and times of their files.

    Args:
        root: the folder that holds `Area_1` and so on.
        split: `"train"`, `"val"`, or `None` for all areas.
        areas: numbers of areas, in place of a split.
        rooms: names `Area_3/hallway_3` (or `hallway_3`) to keep; default all.
        voxel_size: edge in metres.
        cache: folder of the cache; `"auto"`: `s3dis` in the package's cache folder (`INSUM_NN_CACHE_DIR`); `None`: no
            cache. A folder that others may write to is not used, and one that cannot be written keeps nothing.
        broken: what to do with a line that is no point; see `read_room`.
        transform: applied to each `Room` before it is cut into voxels.

    Raises:
        InsumNameError: no room is found.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        split: Literal["train", "val"] | None = None,
        areas: Sequence[int] | None = None,
        rooms: Sequence[str] | None = None,
        voxel_size: float = 0.05,
        cache: str | Path | None = "auto",
        broken: Literal["raise", "skip"] = "raise",
        transform: Callable[[Room], Room] | None = None,
    ) -> None:
        super().__init__(voxel_size, transform)
        self.broken: Literal["raise", "skip"] = broken
        self.cache = "s3dis" if cache == "auto" else None if cache is None else Path(cache)
        if split is not None:
            check_choice("split", split, [*_SPLITS], InsumNameError)
            areas = _SPLITS[split] if areas is None else areas
        folders = sorted(Path(root).glob("Area_*"))
        names = {*(rooms or [])}
        self.paths = [
            room
            for folder in folders
            if areas is None or folder.name in {f"Area_{area}" for area in areas}
            for room in sorted(folder.glob("*"))
            if _is_room(room) and (rooms is None or names & {room.name, f"{folder.name}/{room.name}"})
        ]
        if not self.paths:
            details = [
                f"areas asked for: {'all' if areas is None else [*areas]}; there: {[f.name for f in folders]}",
                f"rooms asked for: {'all' if rooms is None else [*rooms]}",
                "expected Area_<k>/<room>/Annotations/<class>_<number>.txt",
            ]
            fix = "pass the folder that holds Area_1 and so on."
            raise InsumNameError(f"no room of S3DIS under {root}", details=details, fix=fix, path=str(root))

    def __len__(self) -> int:
        return len(self.paths)

    def room(self, index: int) -> Room:
        """The points of a room, from the cache where it is up to date."""
        path = self.paths[index]
        if self.cache is None:
            return read_room(path, broken=self.broken)
        file = f"{path.parent.name}-{path.name}-{_fingerprint(path, self.broken)}.npz"
        if (held := unsealed(read(self.cache, file))) is not None:
            with np.load(io.BytesIO(held)) as arrays:
                labels = arrays["labels"].astype(np.int64)
                return Room(f"{path.parent.name}/{path.name}", arrays["points"], arrays["colors"], labels)
        room, data = read_room(path, broken=self.broken), io.BytesIO()
        np.savez(data, points=room.points, colors=room.colors, labels=room.labels.astype(np.int8))
        write(self.cache, file, sealed(data.getvalue()))
        return room


def _is_room(path: Path) -> bool:
    return path.is_dir() and ((path / "Annotations").is_dir() or (path / f"{path.name}.txt").is_file())


def _fingerprint(path: Path, broken: str) -> str:
    """Changes whenever a file of the room does."""
    digest = hashlib.sha256(f"{_CACHE_FORMAT} {path.resolve()} {broken}".encode())
    for file in _room_files(path):
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]

"""Rooms as coloured, labelled points: the classes of S3DIS, and files of points."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insum_nn.errors import InsumFormatError, InsumShapeError, MissingExtraError

__all__ = ["CLASSES", "PALETTE", "UNLABELLED", "Room", "is_point_file", "read_point_file", "read_points", "write_ply"]

CLASSES: tuple[str, ...] = (
    "ceiling",
    "floor",
    "wall",
    "beam",
    "column",
    "window",
    "door",
    "table",
    "chair",
    "sofa",
    "bookcase",
    "board",
    "clutter",
)
"""The 13 classes of S3DIS; a label is a place in this list."""

UNLABELLED = -1

PALETTE: NDArray[np.uint8] = np.array(
    [
        [144, 202, 240],
        [193, 154, 107],
        [214, 214, 205],
        [160, 82, 45],
        [112, 128, 144],
        [64, 196, 196],
        [230, 120, 50],
        [120, 94, 240],
        [220, 38, 127],
        [140, 20, 60],
        [34, 139, 34],
        [40, 40, 40],
        [255, 193, 7],
    ],
    dtype=np.uint8,
)
"""(13, 3): a colour for each class."""


@dataclass(frozen=True, eq=False)
class Room:
    """One room.

    Attributes:
        name: `Area_k/room`, or the file's stem.
        points: (n, 3) float32, metres.
        colors: (n, 3) uint8.
        labels: (n,) int64: places in `CLASSES`, or `UNLABELLED`.
    """

    name: str
    points: NDArray[np.float32]
    colors: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __post_init__(self) -> None:
        count = self.points.shape[0]
        shapes = (self.points.shape, self.colors.shape, self.labels.shape)
        if shapes != ((count, 3), (count, 3), (count,)):
            raise InsumShapeError(
                f"room '{self.name}': points, colors and labels do not go together",
                details=[f"expected (n, 3), (n, 3) and (n,); got {', '.join(map(str, shapes))}"],
                fix="give each point three coordinates, three colours and one label.",
                got=shapes,
            )

    def __len__(self) -> int:
        return self.points.shape[0]

    def __repr__(self) -> str:
        low, high = self.points.min(0, initial=np.inf), self.points.max(0, initial=-np.inf)
        size = " x ".join(f"{max(0.0, b - a):.1f}" for a, b in zip(low, high, strict=True))
        return f"Room('{self.name}', {len(self)} points, {size} m, {len(np.unique(self.labels))} classes)"


def read_points(path: str | Path, *, broken: str = "raise") -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Read lines `x y z r g b`.

    Args:
        path: a text file.
        broken: `"raise"`, or `"skip"` to leave out lines that are no point, with a warning.

    Returns:
        (n, 3) float32 and (n, 3) uint8; both empty for an empty file.

    Raises:
        InsumFormatError: a line is no point; the message names file and line. Or the file is no text.
    """
    path = Path(path)
    _check_broken(broken)
    if is_point_file(path):
        raise InsumFormatError(
            f"{path} is a point cloud in a binary format, not text", fix="call read_point_file.", file=str(path)
        )
    text = path.read_bytes()
    if not text.strip():
        return np.empty((0, 3), np.float32), np.empty((0, 3), np.uint8)
    try:
        rows = np.loadtxt(text.decode("ascii").splitlines(), dtype=np.float64, ndmin=2, comments=None)
    except (ValueError, UnicodeDecodeError):
        rows = None
    if rows is None or rows.shape[1] != 6 or not _are_points(rows).all():
        rows = _line_by_line(path, text, broken)
    return rows[:, :3].astype(np.float32), rows[:, 3:].astype(np.uint8)


def _check_broken(broken: str) -> None:
    if broken not in ("raise", "skip"):
        raise InsumFormatError(f"broken={broken!r} is unknown", fix="pass 'raise' or 'skip'.", got=broken)


def _are_points(rows: NDArray[np.float64]) -> NDArray[np.bool_]:
    colors = rows[:, 3:]
    whole = (colors >= 0) & (colors <= 255) & (colors == np.floor(colors))
    return np.isfinite(rows[:, :3]).all(1) & whole.all(1)


def _line_by_line(path: Path, text: bytes, broken: str) -> NDArray[np.float64]:
    rows: list[list[float]] = []
    bad: list[tuple[int, str]] = []
    for number, line in enumerate(text.split(b"\n"), start=1):
        parts = line.split()
        if not parts:
            continue
        try:
            row = [float(part) for part in parts]
        except ValueError:
            row = []
        if len(row) == 6 and bool(_are_points(np.array([row]))[0]):
            rows.append(row)
        else:
            bad.append((number, line.decode("latin-1").strip()))
    if bad:
        number, line = bad[0]
        where = f"{path}, line {number}: {line!r} is no point"
        if broken == "raise":
            raise InsumFormatError(
                where,
                details=[
                    "expected six numbers x y z r g b, colours from 0 to 255",
                    f"{len(bad)} broken line{'s' * (len(bad) != 1)} in this file: "
                    f"{', '.join(str(n) for n, _ in bad[:10])}{', ..' * (len(bad) > 10)}",
                ],
                fix="correct the line, or pass broken='skip'.",
                file=str(path),
                line=number,
                lines=tuple(n for n, _ in bad),
            )
        warnings.warn(f"{where}; {len(bad)} such lines are left out", stacklevel=3)
    return np.array(rows, dtype=np.float64).reshape(-1, 6)


_OPEN3D = (".ply", ".pcd")


def is_point_file(path: str | Path) -> bool:
    """Whether a file is one that `read_point_file` reads, rather than text: by its suffix, or as LAS begins."""
    path = Path(path)
    return path.suffix.lower() in _OPEN3D or _is_las(path)


def _is_las(path: Path) -> bool:
    suffix = path.suffix.lower()
    if suffix in (".las", ".laz", *_OPEN3D) or not path.is_file():
        return suffix in (".las", ".laz")
    with path.open("rb") as file:
        return file.read(4) == b"LASF"


def read_point_file(path: str | Path, *, classes: Sequence[str] | None = None) -> Room:
    """Read a PLY or PCD file by Open3D, a LAS or LAZ file by laspy.

    Args:
        path: a file with positions; colours, and labels under `classification`, `label` or `class`, are read if there.
        classes: names of the file's labels, in their order; each must be one of `CLASSES`. Default: `CLASSES`; but the
            classification of LAS is a list of its own, so that its points have no labels then.

    Returns:
        A room; colours are 0 and labels `UNLABELLED` where the file has none. Points of LAS count from the file's
        smallest corner, rounded down: float32 holds no map's coordinates.

    Raises:
        MissingExtraError: Open3D, or laspy, is not installed.
        InsumFormatError: the file holds no point, or a label that `classes` does not name.
    """
    path = Path(path)
    if _is_las(path):
        return _read_las(path, classes)
    classes = CLASSES if classes is None else classes
    cloud = _open3d().t.io.read_point_cloud(str(path))
    held = {key: cloud.point[key].numpy() for key in cloud.point}
    if "positions" not in held or held["positions"].shape[0] == 0:
        raise InsumFormatError(
            f"{path} holds no points",
            details=[f"attributes read: {', '.join(held) or 'none'}"],
            fix="check that the file exists and is a PLY or PCD point cloud.",
            file=str(path),
        )
    points = held["positions"].astype(np.float32)
    colors = held.get("colors", np.zeros_like(points))
    if np.issubdtype(colors.dtype, np.floating):
        colors = np.rint(colors * 255)
    labels = np.full(len(points), UNLABELLED, np.int64)
    key = next((name for name in ("classification", "label", "class") if name in held), None)
    if key is not None:
        labels = _renumber(held[key].reshape(-1).astype(np.int64), classes, path)
    return Room(path.stem, points, colors.astype(np.uint8), labels)


def _renumber(labels: NDArray[np.int64], classes: Sequence[str], path: Path) -> NDArray[np.int64]:
    strangers = [name for name in classes if name not in CLASSES]
    if strangers or (len(labels) and (labels.max() >= len(classes) or labels.min() < UNLABELLED)):
        raise InsumFormatError(
            f"{path}: labels and classes do not go together",
            details=[
                f"labels {labels.min()} to {labels.max()}; {len(classes)} classes given",
                f"names that are none of S3DIS: {strangers or 'none'}",
            ],
            fix=f"pass classes= in the file's own order, out of {', '.join(CLASSES)}.",
            file=str(path),
        )
    table = np.array([CLASSES.index(name) for name in classes] + [UNLABELLED])
    return table[labels]


def _read_las(path: Path, classes: Sequence[str] | None) -> Room:
    laspy = _laspy()
    try:
        cloud: Any = laspy.read(str(path))
    except (laspy.LaspyException, ValueError, OSError) as error:
        raise InsumFormatError(
            f"{path} is no LAS file that laspy reads: {error}", fix="check the file.", file=str(path)
        ) from error
    found = np.asarray(cloud.xyz, np.float64)
    if not len(found):
        raise InsumFormatError(f"{path} holds no points", fix="check that the file is whole.", file=str(path))
    names = set(cloud.point_format.dimension_names)
    colors = np.zeros(found.shape, np.uint16)
    if {"red", "green", "blue"} <= names:
        colors = np.stack([np.asarray(cloud[name], np.uint16) for name in ("red", "green", "blue")], axis=1)
        # They have 16 bits; some write 8 of them.
        colors = colors >> 8 if colors.max() > 255 else colors
    labels = np.full(len(found), UNLABELLED, np.int64)
    if classes is not None:
        labels = _renumber(np.asarray(cloud.classification).astype(np.int64), classes, path)
    points = found - np.floor(found.min(0))
    return Room(path.stem, points.astype(np.float32), colors.astype(np.uint8), labels)


def _laspy() -> Any:
    try:
        return importlib.import_module("laspy")
    except ImportError as error:
        raise MissingExtraError(
            "laspy is not installed, and LAS and LAZ files need it",
            fix="run: pip install 'laspy[lazrs]'; or give rooms as text files.",
            package="laspy",
        ) from error


def _open3d() -> ModuleType:
    try:
        return importlib.import_module("open3d")
    except ImportError as error:
        raise MissingExtraError(
            "Open3D is not installed, and PLY and PCD files need it",
            fix="run: pip install open3d; or give rooms as text files.",
            package="open3d",
        ) from error


def write_ply(
    path: str | Path, points: NDArray[np.floating], colors: NDArray[np.uint8], labels: NDArray[np.integer] | None = None
) -> Path:
    """Write points as a binary PLY, which any viewer opens.

    Args:
        path: the file to write.
        points: (n, 3).
        colors: (n, 3) uint8.
        labels: (n,), stored as `classification`.

    Returns:
        The path.
    """
    path = Path(path)
    fields = [("x", "<f4"), ("y", "<f4"), ("z", "<f4"), ("red", "u1"), ("green", "u1"), ("blue", "u1")]
    names = {"<f4": "float", "u1": "uchar", "<i4": "int"}
    fields += [("classification", "<i4")] if labels is not None else []
    table = np.empty(len(points), dtype=fields)
    for axis, name in enumerate("xyz"):
        table[name] = points[:, axis]
    for channel, name in enumerate(("red", "green", "blue")):
        table[name] = colors[:, channel]
    if labels is not None:
        table["classification"] = labels
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {len(points)}"]
    header += [f"property {names[kind]} {name}" for name, kind in fields] + ["end_header", ""]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("\n".join(header).encode("ascii") + table.tobytes())
    return path

"""Rooms as coloured, labelled points: the classes of S3DIS, and files of points."""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insum_nn.errors import InsumFormatError, InsumShapeError, import_extra, plural
from insum_nn.faults import check_choice

__all__ = [
    "CLASSES",
    "PALETTE",
    "UNLABELLED",
    "Room",
    "in_float32",
    "is_point_file",
    "read_point_file",
    "read_points",
    "write_ply",
]

CLASSES: tuple[str, ...] = tuple(
    "ceiling floor wall beam column window door table chair sofa bookcase board clutter".split()
)
"""The 13 classes of S3DIS; a label is a place in this list."""

UNLABELLED = -1

PALETTE: NDArray[np.uint8] = np.frombuffer(
    bytes.fromhex("90caf0 c19a6b d6d6cd a0522d 708090 40c4c4 e67832 785ef0 dc267f 8c143c 228b22 282828 ffc107"),
    np.uint8,
).reshape(-1, 3)
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
            details = [f"expected (n, 3), (n, 3) and (n,); got {', '.join(map(str, shapes))}"]
            fix = "give each point three coordinates, three colours and one label."
            what = f"room '{self.name}': points, colors and labels do not go together"
            raise InsumShapeError(what, details=details, fix=fix, got=shapes)

    def __len__(self) -> int:
        return self.points.shape[0]

    def __repr__(self) -> str:
        low, high = self.points.min(0, initial=np.inf), self.points.max(0, initial=-np.inf)
        size = " x ".join(f"{max(0.0, b - a):.1f}" for a, b in zip(low, high, strict=True))
        return f"Room('{self.name}', {len(self)} points, {size} m, {len(np.unique(self.labels))} classes)"


def read_points(path: str | Path, *, broken: str = "raise") -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """Read lines `x y z r g b`.

    Args:
        path: a text file.
        broken: `"raise"`, or `"skip"` to leave out lines that are no point, with a warning.

    Returns:
        (n, 3) float64 and (n, 3) uint8; both empty for an empty file.

    Raises:
        InsumFormatError: a line is no point; the message names file and line. Or the file is no text.
    """
    path = Path(path)
    check_choice("broken", broken, ("raise", "skip"))
    lines = path.read_bytes().splitlines()
    try:
        # NumPy warns of a file of blank lines.
        rows = np.loadtxt(lines if any(map(bytes.strip, lines)) else ["nan"], ndmin=2, comments=None, encoding="ascii")
    except ValueError:
        rows = np.empty((1, 0))
    if rows.shape[1] != 6 or not _are_points(rows).all():
        rows = _line_by_line(path, lines, broken)
    return rows[:, :3], rows[:, 3:].astype(np.uint8)


def _error(path: Path, what: str, *details: str, fix: str = "correct the file.", **fields: Any) -> InsumFormatError:
    return InsumFormatError(f"{path}{what}", details=details, fix=fix, file=str(path), **fields)


def _are_points(rows: NDArray[np.float64]) -> NDArray[np.bool_]:
    return np.isfinite(rows).all(-1) & (rows[..., 3:] == (rows[..., 3:].clip(0, 255) // 1)).all(-1)


def _line_by_line(path: Path, lines: Sequence[bytes], broken: str) -> NDArray[np.float64]:
    rows: list[list[float]] = []
    bad: list[int] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = [float(part) for part in line.split()]
        except ValueError:
            row = [math.nan]
        if len(row) == 6 and _are_points(np.array(row)):
            rows.append(row)
        elif row:
            bad.append(number)
    if bad:
        what = f", line {bad[0]}: {lines[bad[0] - 1].decode('latin-1').strip()[:80]!r} is no point"
        if broken == "raise":
            expected = "expected six numbers x y z r g b, colours from 0 to 255"
            shown = f"{', '.join(map(str, bad[:10]))}{', ..' * (len(bad) > 10)}"
            several = f"{plural(len(bad), 'broken line')} in this file: {shown}"
            fix = "correct the line, or pass broken='skip'."
            raise _error(path, what, expected, several, fix=fix, line=bad[0], lines=tuple(bad))
        warnings.warn(f"{path}{what}; {len(bad)} such lines are left out", stacklevel=3)
    return np.array(rows).reshape(-1, 6)


_LABELS = ("classification", "label", "class", "labels", "semantic", "sem_class", "category")
_COLORS = (("red", "green", "blue"), ("r", "g", "b"), ("diffuse_red", "diffuse_green", "diffuse_blue"))
_LAS = (".las", ".laz")
# What float32 may move a point by, in metres.
_ROUNDING = 5e-4
_Table = dict[str, NDArray[Any]]


def is_point_file(path: str | Path) -> bool:
    """Whether a file is one that `read_point_file` reads, rather than text."""
    return Path(path).suffix.lower() in (".ply", ".pcd", *_LAS)


def read_point_file(path: str | Path, *, classes: Sequence[str] | None = None, broken: str = "raise") -> Room:
    """Read a PLY file by plyfile, PCD by Open3D, LAS or LAZ by laspy.

    Args:
        path: a file with properties `x y z`. Colours are read from `red green blue` or `r g b`, from 0 to 255 or 65535,
            floating-point numbers also from 0 to 1; labels from `classification`, `label`, `class` and their like.
            CloudCompare's prefix `scalar_` and capital letters make no difference.
        classes: names of the file's labels, in their order; each must be one of `CLASSES`. Default: `CLASSES`; but the
            classification of LAS is a list of its own, so that its points have no labels then.
        broken: `"raise"`, or `"skip"` to leave out points that are not finite, with a warning.

    Returns:
        A room; colours are 0 and labels `UNLABELLED` where the file has none. Where float32 would move a point by more
        than half a millimetre, as map coordinates, and always of LAS, points count from the file's smallest corner,
        rounded down.

    Raises:
        MissingExtraError: the package that reads the format is not installed.
        InsumFormatError: the file is cut or damaged, holds no point, or a property holds what is no coordinate, colour
            or label that `classes` names.
    """
    path = Path(path)
    check_choice("broken", broken, ("raise", "skip"))
    las = path.suffix.lower() in _LAS
    read = _read_las if las else _read_pcd if path.suffix.lower() == ".pcd" else _read_ply
    found = {n.lower().removeprefix("scalar_"): values for n, values in (read(path) if path.is_file() else {}).items()}
    if las and classes is None:
        del found["classification"]
    if not {*"xyz"} <= found.keys() or not len(found["x"]):
        known, fix = f"properties read: {', '.join(found) or 'none'}", "check that the file exists and has x, y and z."
        raise _error(path, " holds no points", known, fix=fix)
    if broken == "skip" and not (finite := np.isfinite([found[axis] for axis in "xyz"]).all(0)).all():
        warnings.warn(f"{path}: {(~finite).sum()} points that are not finite are left out", stacklevel=2)
        found = {name: values[finite] for name, values in found.items()}
    points = np.stack([_numbers(path, found, axis) for axis in "xyz"], axis=1)
    labels = _labels(path, found, classes or CLASSES)
    return Room(path.stem, in_float32(path, points, always=las), _colors(path, found), labels)


def _numbers(path: Path, found: _Table, name: str, whole: bool = False) -> NDArray[np.float64]:
    """A property of the points as numbers that are finite."""
    values = found[name]
    if values.dtype.kind not in "biuf":
        raise _error(path, f": property '{name}' holds no numbers")
    with np.errstate(invalid="ignore"):
        numbers = values.astype(np.float64)
    wrong = ~np.isfinite(numbers) | (whole & (numbers != np.floor(numbers)))
    if wrong.any():
        row, kind = int(wrong.argmax()), "whole" if whole else "finite"
        details = f"expected {kind} numbers; {wrong.sum()} of {len(wrong)} are not"
        raise _error(path, f": property '{name}' of point {row} is {values[row]}", details)
    return numbers


def in_float32(path: Path, points: NDArray[np.float64], always: bool = False) -> NDArray[np.float32]:
    """Points in metres, counted from their smallest corner where float32 does not hold them as they are."""
    with np.errstate(over="ignore", invalid="ignore"):
        if len(points) and (always or not np.abs(points.astype(np.float32) - points).max() <= _ROUNDING):
            points = points - np.floor(points.min(0))
        narrow = points.astype(np.float32)
        lost = np.abs(narrow - points).max(0, initial=0)
    axis = int(lost.argmax())
    what = f": property '{'xyz'[axis]}' spans {points[:, axis].max(initial=0):g}"
    if not np.isfinite(lost[axis]):
        raise _error(path, f"{what}, which float32 does not hold")
    if lost[axis] > _ROUNDING:
        warnings.warn(f"{path}{what}, and points are rounded by up to {lost[axis]:g}", stacklevel=3)
    return narrow


def _colors(path: Path, found: _Table) -> NDArray[np.uint8]:
    names = next((each for each in _COLORS if not found.keys().isdisjoint(each)), None)
    if names is None:
        return np.zeros((len(found["x"]), 3), np.uint8)
    if missing := [name for name in names if name not in found]:
        raise _error(path, f" has no property '{missing[0]}' beside {', '.join({*names} & found.keys())}")
    colors = np.stack([_numbers(path, found, name) for name in names], axis=1)
    if any(found[name].dtype.kind == "f" for name in names):
        scaled = np.rint(colors * 255 if colors.max() <= 1 else colors)
    else:
        # Files with 16 bits; some write 8 of them.
        scaled = np.floor(colors / 256) if colors.max() > 255 else colors
    if scaled.min() < 0 or scaled.max() > 255:
        name = names[int(np.argmax(np.maximum(-scaled.min(0), scaled.max(0))))]
        span = f"got {colors.min():g} to {colors.max():g}"
        raise _error(path, f": property '{name}' is no colour", "expected 0 to 255, or 65535, or 1 as floats", span)
    return scaled.astype(np.uint8)


def _labels(path: Path, found: _Table, classes: Sequence[str]) -> NDArray[np.int64]:
    name = next((each for each in _LABELS if each in found), None)
    if name is None:
        known = {*"xyz", "alpha", *(name for names in _COLORS for name in names)}
        if others := [each for each, values in found.items() if each not in known and values.dtype.kind in "iu"]:
            warnings.warn(f"{path}: {', '.join(others)} not read; labels are read from {_LABELS[:3]}", stacklevel=3)
        return np.full(len(found["x"]), UNLABELLED, np.int64)
    labels = _numbers(path, found, name, whole=True)
    strangers = [each for each in classes if each not in CLASSES]
    if strangers or labels.max() >= len(classes) or labels.min() < UNLABELLED:
        span = f"'{name}' from {labels.min():.0f} to {labels.max():.0f}; {len(classes)} classes given"
        unknown = f"names that are none of S3DIS: {strangers or 'none'}"
        fix = f"pass classes= in the file's own order, out of {', '.join(CLASSES)}."
        raise _error(path, ": labels and classes do not go together", span, unknown, fix=fix)
    return np.array([*map(CLASSES.index, classes), UNLABELLED])[labels.astype(np.int64)]


@contextmanager
def _library(name: str, path: Path, package: str = "") -> Generator[Any]:
    """A package that reads a format; what it raises for a damaged file becomes an error that names the file."""
    library = import_extra(name, f"{path.suffix} files", package)
    try:
        with np.errstate(all="ignore"):
            yield library
    except Exception as error:
        kind = "LAS" if name == "laspy" else path.suffix[1:].upper()
        what = f" is no {kind} file that {name} reads: {error}"
        raise _error(path, what, fix="check that the file is whole.") from error


def _read_ply(path: Path) -> _Table:
    with _library("plyfile", path) as plyfile:
        data = plyfile.PlyData.read(str(path))
        points = data["vertex"].data
    if data.text:
        _warn_without_end(path, path.read_bytes())
    return {name: np.asarray(points[name]) for name in points.dtype.names}


def _warn_without_end(path: Path, text: bytes) -> None:
    if not text.endswith((b"\n", b"\r")):
        warnings.warn(f"{path} ends within a line: its last number may be cut off", stacklevel=4)


def _read_las(path: Path) -> _Table:
    with _library("laspy", path, "'laspy[lazrs]'") as laspy:
        with path.open("rb") as file:
            # laspy reads as many of them as the header says, of 54 bytes at least, past the end of the file too.
            records = int.from_bytes(file.read(104)[100:], "little")
        if records * 54 > path.stat().st_size:
            raise ValueError(f"it has no room for the {records} records of its header")
        cloud = laspy.read(str(path))
        if len(cloud.points) != cloud.header.point_count:
            raise ValueError(f"it has {len(cloud.points)} of {cloud.header.point_count} points")
        names = {"x", "y", "z", "red", "green", "blue", "classification"}
        return {name: np.asarray(cloud[name]) for name in names & {"x", "y", "z", *cloud.point_format.dimension_names}}


def _read_pcd(path: Path) -> _Table:
    with _library("open3d", path) as open3d:
        header: dict[bytes, list[bytes]] = {}
        with path.open("rb") as file:
            while b"DATA" not in header and (line := file.readline()):
                header |= {word: rest for word, *rest in [line.split()] if rest}
            if header.get(b"DATA") == [b"ascii"]:
                return _read_ascii(path, file.read(), header)
        cloud = open3d.t.io.read_point_cloud(str(path)).point
        found = {name: cloud[name].numpy() for name in cloud}
        for name, parts in (("positions", "xyz"), ("colors", _COLORS[0])):
            found |= dict(zip(parts, found.pop(name, np.empty((0, 0))).T, strict=False))
        return {name: values.reshape(len(values), -1)[:, 0] for name, values in found.items()}


def _read_ascii(path: Path, text: bytes, header: dict[bytes, list[bytes]]) -> _Table:
    """The points of a PCD file that is text: Open3D takes the memory behind its end, and cuts numbers to their type."""
    _warn_without_end(path, text)
    names = [name.decode() for name in header[b"FIELDS"]]
    columns = zip(header[b"TYPE"], header[b"SIZE"], header.get(b"COUNT", [b"1"] * len(names)), strict=True)
    # Numbered, as several fields may have the name `_`.
    kinds = [(f"f{n}", (k + size).decode().lower(), (int(count),)) for n, (k, size, count) in enumerate(columns)]
    with warnings.catch_warnings():
        # NumPy before 2.4 warns, and cuts, where a whole number is expected and another is there.
        warnings.simplefilter("error")
        rows = np.loadtxt(text.decode("ascii").split("\n"), kinds, ndmin=1)
    if len(rows) != int(header[b"POINTS"][0]):
        raise ValueError(f"its header says {header[b'POINTS'][0].decode()} lines, it has {len(rows)}")
    found = {name: rows[f"f{n}"].reshape(len(rows), -1)[:, 0] for n, name in enumerate(names)}
    for name in found.keys() & {"rgb", "rgba"}:
        packed = found.pop(name).view(np.uint32)
        found |= {part: packed >> shift & 255 for part, shift in zip(_COLORS[0], (16, 8, 0), strict=True)}
    return found


def write_ply(
    path: str | Path, points: NDArray[np.floating], colors: NDArray[np.uint8], labels: NDArray[np.integer] | None = None
) -> Path:
    """Write points by plyfile as a binary PLY, which any viewer opens.

    Args:
        path: the file to write.
        points: (n, 3); float64 is written as double.
        colors: (n, 3) uint8.
        labels: (n,), stored as `classification`.

    Returns:
        The path.

    Raises:
        MissingExtraError: plyfile is not installed.
    """
    path = Path(path)
    columns: list[NDArray[Any]] = [*points.astype(np.result_type(points, np.float32)).T, *colors.astype(np.uint8).T]
    columns += [] if labels is None else [labels.astype(np.int32)]
    fields = [*zip(("x", "y", "z", *_COLORS[0], "classification"), (column.dtype for column in columns), strict=False)]
    plyfile = import_extra("plyfile", "PLY files")
    vertices = plyfile.PlyElement.describe(np.rec.fromarrays(columns, dtype=fields), "vertex")
    path.parent.mkdir(parents=True, exist_ok=True)
    plyfile.PlyData([vertices]).write(str(path))
    return path

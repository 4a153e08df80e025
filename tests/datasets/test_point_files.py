"""Files of points as they are met: cut, of other types, ranges, names and line ends; against the numbers written."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from insum_nn.datasets.rooms import UNLABELLED, Room, read_point_file, read_points, write_ply
from insum_nn.datasets.s3dis import read_room
from insum_nn.errors import InsumFormatError

pytest.importorskip("plyfile")

XYZ = ["float x", "float y", "float z"]
RGB = ["uchar red", "uchar green", "uchar blue"]
CODES = {"char": "b", "uchar": "B", "short": "h", "ushort": "H", "int": "i", "uint": "I", "float": "f", "double": "d"}


def ply(path: Path, properties: list[str], rows: list[tuple[Any, ...]], form: str = "<", end: str = "\n") -> Path:
    """A PLY file, little-endian (`<`), big-endian (`>`) or as text (empty)."""
    name = {"<": "binary_little_endian", ">": "binary_big_endian", "": "ascii"}[form]
    header = ["ply", f"format {name} 1.0", f"element vertex {len(rows)}", *(f"property {p}" for p in properties)]
    head = (end.join([*header, "end_header"]) + end).encode()
    if form:
        codes = form + "".join(CODES[p.split()[0]] for p in properties)
        path.write_bytes(head + b"".join(struct.pack(codes, *row) for row in rows))
    else:
        path.write_bytes(head + "".join(" ".join(map(str, row)) + end for row in rows).encode())
    return path


def pcd(path: Path, fields: str, rows: list[str], types: str = "", sizes: str = "", end: str = "\n") -> Path:
    """A PCD file as text."""
    count = len(fields.split())
    head = [f"FIELDS {fields}", f"SIZE {sizes or '4 ' * count}", f"TYPE {types or 'F ' * count}", f"POINTS {len(rows)}"]
    head = ["VERSION 0.7", *head[:3], f"COUNT {'1 ' * count}", f"WIDTH {len(rows)}", "HEIGHT 1", head[3], "DATA ascii"]
    path.write_bytes((end.join([*head, *rows]) + end).encode())
    return path


@pytest.mark.parametrize("form", ["<", ">", ""])
@pytest.mark.parametrize("kind", ["uchar", "short", "ushort", "int", "uint", "float", "double"])
def test_labels_and_colours_of_all_types(tmp_path: Path, form: str, kind: str):
    colors = [f"{kind} {name}" for name in ("red", "green", "blue")]
    path = ply(
        tmp_path / "a.ply", [*XYZ, *colors, f"{kind} label"], [(1, 2, 3, 9, 127, 0, 12), (4, 5, 6, 0, 0, 1, 0)], form
    )
    if kind in ("float", "double") and form == "":
        path.write_text(path.read_text().replace("127", "127.0"))
    room = read_room(path)
    assert room.points.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert room.colors.tolist() == [[9, 127, 0], [0, 0, 1]]
    assert room.labels.tolist() == [12, 0]


@pytest.mark.parametrize(
    ("kind", "given", "expected"), [("ushort", 65535, 255), ("ushort", 512, 2), ("float", 0.5, 128)]
)
def test_ranges_of_colours(tmp_path: Path, kind: str, given: float, expected: int):
    colors = [f"{kind} {name}" for name in ("r", "g", "b")]
    room = read_room(ply(tmp_path / "a.ply", [*XYZ, *colors], [(1, 2, 3, given, 0, 0)]))
    assert room.colors.tolist() == [[expected, 0, 0]]


@pytest.mark.parametrize("name", ["scalar_Label", "Classification", "class", "scalar_label", "labels"])
def test_names_of_labels(tmp_path: Path, name: str):
    room = read_room(ply(tmp_path / "a.ply", ["double X", "double Y", "double Z", f"float {name}"], [(1, 2, 3, 7)]))
    assert room.labels.tolist() == [7]
    assert not room.colors.any()


def test_labels_of_an_unknown_name_are_named(tmp_path: Path):
    path = ply(tmp_path / "a.ply", [*XYZ, *RGB, "uchar alpha", "int segment"], [(1, 2, 3, 4, 5, 6, 255, 8)])
    with pytest.warns(UserWarning, match=r"a\.ply: segment not read; labels are read from \('classification'"):
        assert read_room(path).labels.tolist() == [UNLABELLED]


@pytest.mark.parametrize(
    ("properties", "row", "text"),
    [
        ([*XYZ, "float label"], (1, 2, 3, 1.5), "property 'label' of point 1 is 1.5"),
        ([*XYZ, "float label"], (1, 2, 3, float("nan")), "property 'label' of point 1 is nan"),
        ([*XYZ, "int label"], (1, 2, 3, 13), "'label' from 0 to 13; 13 classes given"),
        ([*XYZ, "int label"], (1, 2, 3, -2), "'label' from -2 to 0; 13 classes given"),
        ([*XYZ, "uint label"], (1, 2, 3, 2**32 - 1), "'label' from 0 to 4294967295"),
        (XYZ, (1, float("inf"), 3), "property 'y' of point 1 is inf"),
        (["double x", "float y", "float z"], (1e300, 2, 3), r"property 'x' spans 1e\+300, which float32 does not hold"),
        ([*XYZ, "int red", "int green", "int blue"], (1, 2, 3, 0, -1, 0), "property 'green' is no colour"),
        ([*XYZ, "int red", "int green", "int blue"], (1, 2, 3, 0, 0, 70000), "property 'blue' is no colour"),
        ([*XYZ, "float red", "float green", "float blue"], (1, 2, 3, 300, 0, 0), "property 'red' is no colour"),
        ([*XYZ, "uchar red", "uchar blue"], (1, 2, 3, 0, 0), "has no property 'green' beside"),
        (XYZ[:2], (1, 2), "holds no points"),
    ],
)
def test_what_is_no_value_of_a_property_is_named(
    tmp_path: Path, properties: list[str], row: tuple[Any, ...], text: str
):
    path = ply(tmp_path / "a.ply", properties, [(0,) * len(row), row])
    with pytest.raises(InsumFormatError, match=rf"a\.ply(?s:.*){text}"):
        read_room(path)


@pytest.mark.parametrize(
    "change", ["uchar red|list uchar uchar red", "1 2 3 4 5 6|1 2 3 300 5 6", "vertex 1|vertex 99999999999", "ply|plx"]
)
def test_text_that_does_not_fit_its_header(tmp_path: Path, change: str):
    path = ply(tmp_path / "a.ply", [*XYZ, *RGB], [(1, 2, 3, 4, 5, 6)], "")
    path.write_text(path.read_text().replace(*change.split("|"), 1))
    with pytest.raises(InsumFormatError, match=r"a\.ply"):
        read_room(path)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends(tmp_path: Path, end: str):
    files = [
        ply(tmp_path / f"{n}.ply", [*XYZ, *RGB], [(1, 2, 3, 4, 5, 6)] * 2, form, end) for n, form in enumerate("<>")
    ]
    files.append(ply(tmp_path / "c.ply", [*XYZ, *RGB], [(1, 2, 3, 4, 5, 6)] * 2, "", end))
    files.append(tmp_path / "d.txt")
    files[-1].write_bytes(f"1 2 3 4 5 6{end}1 2 3 4 5 6{end}".encode())
    for file in files:
        room = read_room(file)
        assert room.points.tolist() == [[1, 2, 3]] * 2, file
        assert room.colors.tolist() == [[4, 5, 6]] * 2, file
    (tmp_path / "d.txt").write_bytes(f"1 2 3 4 5 6{end}1 2 3{end}".encode())
    with pytest.raises(InsumFormatError, match="line 2: '1 2 3' is no point"):
        read_points(tmp_path / "d.txt")


def of_las(path: Path) -> Path:
    laspy = pytest.importorskip("laspy")
    cloud = laspy.LasData(laspy.LasHeader(point_format=2, version="1.2"))
    cloud.x = cloud.y = cloud.z = np.arange(500)
    cloud.write(str(path))
    return path


CUT: dict[str, Callable[[Path], Path]] = {
    "binary.ply": lambda path: write_ply(path, np.full((500, 3), 7.0), np.zeros((500, 3), np.uint8)),
    "text.ply": lambda path: ply(path, [*XYZ, *RGB], [(1, 2, 3, 4, 5, 6)] * 500, ""),
    "text.pcd": lambda path: pcd(path, "x y z label", ["1 2 3 4"] * 500, "F F F I"),
    "a.las": of_las,
    "a.laz": of_las,
}


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("part", [0.0, 0.01, 0.1, 0.5, 0.9, 0.997])
def test_a_cut_file_is_an_error(tmp_path: Path, name: str, part: float):
    if name.endswith("pcd"):
        pytest.importorskip("open3d")
    path = CUT[name](tmp_path / name)
    assert len(read_point_file(path)) == 500
    whole = path.read_bytes()
    path.write_bytes(whole[: int(part * len(whole))])
    with pytest.raises((InsumFormatError, UserWarning), match=name):
        read_point_file(path)


def test_a_last_number_may_be_cut_off(tmp_path: Path):
    path = ply(tmp_path / "a.ply", [*XYZ, *RGB], [(1, 2, 3, 4, 5, 66)], "")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.warns(UserWarning, match=r"a\.ply ends within a line"):
        read_room(path)


def test_a_header_that_counts_more_records_than_there_is_room_for(tmp_path: Path):
    path = of_las(tmp_path / "a.las")
    path.write_bytes(path.read_bytes()[:100] + b"\xff\xff\xff\xff" + path.read_bytes()[104:])
    with pytest.raises(InsumFormatError, match="no room for the 4294967295 records"):
        read_room(path)


def test_pcd_as_text(tmp_path: Path):
    pytest.importorskip("open3d")
    rows = ["1 2 3 4278255873 5", "4 5 6 66051 0"]
    for end in ("\n", "\r\n"):
        room = read_room(pcd(tmp_path / "a.pcd", "x y z rgb label", rows, "F F F U U", end=end))
        assert room.points.tolist() == [[1, 2, 3], [4, 5, 6]]
        assert room.colors.tolist() == [[1, 1, 1], [1, 2, 3]]
        assert room.labels.tolist() == [5, 0]
    path = pcd(tmp_path / "a.pcd", "_ x y normal _ z label", ["9 1 2 7 7 7 9 3 5"] * 2, "F F F F F F U")
    path.write_text(path.read_text().replace("COUNT 1 1 1 1", "COUNT 1 1 1 3"))
    room = read_room(path)
    assert room.points.tolist() == [[1, 2, 3]] * 2
    assert room.labels.tolist() == [5, 5]
    packed = struct.unpack("<f", struct.pack("<I", 66051))[0]
    room = read_room(pcd(tmp_path / "a.pcd", "x y z rgb", [f"1 2 3 {packed!r}"]))
    assert room.colors.tolist() == [[1, 2, 3]]
    for row in ("1 2 3 4.5", "1 2 3 99999999999", "1 2 3 x", "1 2 3"):
        with pytest.raises(InsumFormatError, match=r"a\.pcd is no PCD file"):
            read_room(pcd(tmp_path / "a.pcd", "x y z label", [row], "F F F I"))


# Map coordinates.

FAR = [(627285.12, 4841948.34, 10.0), (627285.12, 4841948.44, 12.5)]


def assert_shifted(room: Room) -> None:
    np.testing.assert_allclose(room.points, np.array(FAR) - np.floor(np.min(FAR, 0)), atol=1e-6)


def test_map_coordinates_count_from_the_smallest_corner(tmp_path: Path):
    rows = [(*point, 1, 2, 3) for point in FAR]
    for form in ("<", ">", ""):
        assert_shifted(read_room(ply(tmp_path / "a.ply", ["double x", "double y", "double z", *RGB], rows, form)))
    assert_shifted(read_room(write_ply(tmp_path / "b.ply", np.array(FAR), np.zeros((2, 3), np.uint8))))
    text = [" ".join(map(str, row)) + "\n" for row in rows]
    (tmp_path / "a.txt").write_text("".join(text))
    assert_shifted(read_room(tmp_path / "a.txt"))
    # All parts of a room count from the same corner.
    folder = tmp_path / "office_1" / "Annotations"
    folder.mkdir(parents=True)
    for name, line in zip(("chair_1", "table_1"), text, strict=True):
        (folder / f"{name}.txt").write_text(line)
    assert_shifted(read_room(folder.parent))
    # What float32 holds stays where it is.
    near = ply(tmp_path / "a.ply", ["double x", "double y", "double z"], [(-21.3, 5.25, 1.0), (700.001, 2.0, 0.5)])
    np.testing.assert_allclose(read_room(near).points, [(-21.3, 5.25, 1.0), (700.001, 2.0, 0.5)], rtol=1e-6)
    wide = ply(tmp_path / "a.ply", ["double x", "double y", "double z"], [(0.1, 0, 0), (0, 1e9 + 0.7, 0)])
    with pytest.warns(UserWarning, match=r"a\.ply: property 'y' spans 1e\+09, and points are rounded by up to"):
        read_room(wide)


def test_points_that_are_not_finite_can_be_left_out(tmp_path: Path):
    path = ply(tmp_path / "a.ply", [*XYZ, "int label"], [(1, 2, 3, 4), (float("nan"), 0, 0, 5), (4, 5, 6, 7)])
    with pytest.warns(UserWarning, match="1 points that are not finite are left out"):
        room = read_room(path, broken="skip")
    assert (room.points.tolist(), room.labels.tolist()) == ([[1, 2, 3], [4, 5, 6]], [4, 7])

"""Reading S3DIS: the owner's layout, broken lines, the cache, voxels and back."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from insum_nn.compiler.tuning.cache_folder import own_folder
from insum_nn.datasets.rooms import CLASSES, PALETTE, UNLABELLED, Room, read_point_file, read_points, write_ply
from insum_nn.datasets.s3dis import S3DIS, collate, read_room, voxel_sample
from insum_nn.datasets.synthetic_rooms import SyntheticRooms, generate_room
from insum_nn.datasets.voxels import voxelize
from insum_nn.errors import InsumFormatError, InsumNameError, InsumOverflowError, InsumShapeError, MissingExtraError


def write_points(path: Path, rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(" ".join(map(str, row)) + "\n" for row in rows))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two areas in the owner's layout."""
    root = tmp_path / "S3DIS"
    for area, room, parts in [
        (
            1,
            "office_1",
            {"floor_1": [(0, 0, 0, 10, 20, 30), (1, 0, 0, 11, 21, 31)], "chair_2": [(0.5, 0.5, 0.4, 0, 255, 7)]},
        ),
        (1, "office_2", {"stairs_1": [(0, 0, 0, 1, 2, 3)]}),
        (5, "hall_1", {"wall_1": [(2, 2, 2, 9, 9, 9)], "ceiling_1": [(2, 2, 3, 8, 8, 8)]}),
    ]:
        for name, rows in parts.items():
            write_points(root / f"Area_{area}" / room / "Annotations" / f"{name}.txt", rows)
        write_points(root / f"Area_{area}" / room / f"{room}.txt", [row for rows in parts.values() for row in rows])
    (root / "Area_1" / "Icon\r").write_text("")
    (root / "Area_1" / "office_1" / "Annotations" / ".DS_Store").write_text("")
    (root / "Area_1" / "office_1" / "Annotations" / "._floor_1.txt").write_text("not points")
    return root


class TestReading:
    def test_annotations(self, root):
        room = read_room(root / "Area_1" / "office_1")
        assert room.name == "Area_1/office_1"
        # Files in the order of their names.
        assert room.labels.tolist() == [CLASSES.index("chair"), CLASSES.index("floor"), CLASSES.index("floor")]
        assert room.colors.tolist() == [[0, 255, 7], [10, 20, 30], [11, 21, 31]]
        assert room.points.dtype == np.float32
        assert room.colors.dtype == np.uint8
        np.testing.assert_allclose(room.points[0], [0.5, 0.5, 0.4])
        assert "3 points, 1.0 x 0.5 x 0.4 m, 2 classes" in repr(room)

    def test_stairs_are_clutter_and_other_words_an_error(self, root):
        assert read_room(root / "Area_1" / "office_2").labels.tolist() == [CLASSES.index("clutter")]
        bad = write_points(root / "Area_1" / "office_2" / "Annotations" / "lamp_1.txt", [(0, 0, 0, 1, 2, 3)])
        with pytest.raises(InsumNameError, match="the class of .*lamp_1.txt is 'lamp'"):
            read_room(bad.parent.parent)

    def test_a_room_without_annotations_has_no_labels(self, root):
        import shutil

        folder = root / "Area_5" / "hall_1"
        shutil.rmtree(folder / "Annotations")
        assert read_room(folder).labels.tolist() == [UNLABELLED] * 2
        (folder / "hall_1.txt").rename(folder / "room.txt")
        assert len(read_room(folder)) == 2
        assert len(read_room(folder / "room.txt")) == 2
        (folder / "room.txt").unlink()
        with pytest.raises(InsumNameError, match="there is no room at"):
            read_room(folder)

    @pytest.mark.parametrize(
        ("line", "shown"),
        [
            ("1.0 2.0 3.0 185\x10187 10 10", r"'1.0 2.0 3.0 185\x10187 10 10'"),
            ("1 2 3 4 5", "'1 2 3 4 5'"),
            ("1 2 3 4 5 6 7", "'1 2 3 4 5 6 7'"),
            ("1 2 x 4 5 6", "'1 2 x 4 5 6'"),
            ("1 2 nan 4 5 6", "'1 2 nan 4 5 6'"),
            ("1 2 inf 4 5 6", "'1 2 inf 4 5 6'"),
            ("1 2 3 4 5 256", "'1 2 3 4 5 256'"),
            ("1 2 3 -4 5 6", "'1 2 3 -4 5 6'"),
            ("1 2 3 4.5 5 6", "'1 2 3 4.5 5 6'"),
            ("# a word", "'# a word'"),
            ("1 2 3 4 5 \xff", "'1 2 3 4 5 ÿ'"),
        ],
    )
    def test_broken_lines_are_named(self, tmp_path, line, shown):
        path = tmp_path / "wall_1.txt"
        path.write_bytes(f"0 0 0 1 2 3\n\n{line}\n1 1 1 4 5 6\n{line}\n".encode("latin-1"))
        with pytest.raises(InsumFormatError) as caught:
            read_points(path)
        assert caught.value.fields["line"] == 3
        assert caught.value.fields["lines"] == (3, 5)
        assert f"wall_1.txt, line 3: {shown} is no point" in str(caught.value)
        with pytest.warns(UserWarning, match="2 such lines are left out"):
            points, colors = read_points(path, broken="skip")
        assert points.tolist() == [[0, 0, 0], [1, 1, 1]]
        assert colors.tolist() == [[1, 2, 3], [4, 5, 6]]
        with pytest.raises(InsumFormatError, match="broken is 'drop'"):
            read_points(path, broken="drop")

    def test_empty_and_last_line_without_end(self, tmp_path):
        path = tmp_path / "a.txt"
        path.write_text("")
        points, colors = read_points(path)
        assert points.shape == colors.shape == (0, 3)
        path.write_text("\n \n")
        assert len(read_points(path)[0]) == 0
        path.write_text("1 2 3 4 5 6")
        assert len(read_points(path)[0]) == 1
        path.write_text("1 2 3 4 5 6\r\n1 2 3 4 5 6\r\n")
        assert len(read_points(path)[0]) == 2


class TestPointFiles:
    @pytest.mark.parametrize(("package", "suffix"), [("plyfile", "ply"), ("open3d", "pcd")])
    def test_without_a_reader_its_package_is_named(self, monkeypatch, tmp_path, package, suffix):
        monkeypatch.setitem(sys.modules, package, None)
        (tmp_path / f"a.{suffix}").write_bytes(bytes(10))
        with pytest.raises(MissingExtraError, match=f"pip install {package}"):
            read_room(tmp_path / f"a.{suffix}")

    def test_writing_needs_plyfile(self, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "plyfile", None)
        with pytest.raises(MissingExtraError, match="pip install plyfile"):
            write_ply(tmp_path / "a.ply", np.zeros((1, 3)), np.zeros((1, 3), np.uint8))

    @pytest.mark.parametrize("name", ["a.las", "a.LAZ"])
    def test_without_laspy_the_package_is_named(self, monkeypatch, tmp_path, name):
        monkeypatch.setitem(sys.modules, "laspy", None)
        (tmp_path / name).write_bytes(b"LASF" + bytes(400))
        with pytest.raises(MissingExtraError, match=r"pip install 'laspy\[lazrs\]'"):
            read_room(tmp_path / name)
        with pytest.raises(InsumFormatError, match=rf"{name}, line 1: 'LASF.*' is no point"):
            read_points(tmp_path / name)

    @pytest.mark.parametrize("name", ["cloud.las", "cloud.laz"])
    def test_las(self, tmp_path, name):
        laspy = pytest.importorskip("laspy")
        las = laspy.create(point_format=3, file_version="1.2")
        corner = np.array([4_500_123.25, 600_100.5, 12.0])
        offsets = np.array([[0.0, 0, 0], [1.5, 0.25, 3], [0.01, 2, 0.12]])
        las.xyz = corner + offsets
        las.red, las.green, las.blue = np.array([[256, 65535, 0], [512, 0, 0], [0, 0, 768]], np.uint16).T
        las.classification = np.array([0, 1, 1], np.uint8)
        las.write(str(tmp_path / name))
        room = read_room(tmp_path / name)
        np.testing.assert_allclose(room.points, offsets + np.array([0.25, 0.5, 0]), atol=1e-6)
        assert room.colors.tolist() == [[1, 255, 0], [2, 0, 0], [0, 0, 3]]
        assert (room.labels == UNLABELLED).all()
        named = read_point_file(tmp_path / name, classes=("sofa", "wall"))
        assert [CLASSES[k] for k in named.labels] == ["sofa", "wall", "wall"]
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:100])
        with pytest.raises(InsumFormatError, match="is no LAS file that laspy reads"):
            read_room(tmp_path / name)

    @pytest.mark.parametrize("labelled", [True, False])
    def test_ply_there_and_back(self, tmp_path, labelled):
        pytest.importorskip("plyfile")
        room = generate_room(3, num_points=500)
        labels = room.labels if labelled else None
        back = read_room(write_ply(tmp_path / "b" / "room.ply", room.points, room.colors, labels))
        assert back.name == "room"
        np.testing.assert_array_equal(back.points, room.points)
        np.testing.assert_array_equal(back.colors, room.colors)
        np.testing.assert_array_equal(back.labels, room.labels if labelled else np.full(500, UNLABELLED))

    def test_pcd_and_other_orders_of_classes(self, tmp_path):
        open3d = pytest.importorskip("open3d")
        cloud = open3d.t.geometry.PointCloud(np.eye(3, dtype=np.float32))
        cloud.point["classification"] = np.array([[0], [1], [1]], np.int32)
        open3d.t.io.write_point_cloud(str(tmp_path / "a.pcd"), cloud)
        room = read_point_file(tmp_path / "a.pcd", classes=("sofa", "wall"))
        np.testing.assert_array_equal(room.points, np.eye(3))
        assert [CLASSES[k] for k in room.labels] == ["sofa", "wall", "wall"]
        assert not room.colors.any()
        for classes in (("sofa",), ("sofa", "lamp")):
            with pytest.raises(InsumFormatError, match="labels and classes do not go together"):
                read_point_file(tmp_path / "a.pcd", classes=classes)
        with pytest.raises(InsumFormatError, match="holds no points"):
            read_point_file(tmp_path / "missing.pcd")


class TestDataset:
    def test_splits_areas_and_rooms(self, root, tmp_path):
        cache = tmp_path / "cache"
        names = [f"{p.parent.name}/{p.name}" for p in S3DIS(root, cache=cache).paths]
        assert names == ["Area_1/office_1", "Area_1/office_2", "Area_5/hall_1"]
        assert len(S3DIS(root, split="train", cache=cache)) == 2
        assert len(S3DIS(root, split="val", cache=cache)) == 1
        assert len(S3DIS(root, areas=[5], cache=cache)) == 1
        assert len(S3DIS(root, rooms=["office_2", "Area_5/hall_1"], cache=cache)) == 2
        with pytest.raises(InsumNameError, match="split is 'test'"):
            S3DIS(root, split="test")
        with pytest.raises(InsumNameError, match=r"asked for: \[2\]; there: \['Area_1', 'Area_5'\]"):
            S3DIS(root, areas=[2])
        with pytest.raises(InsumNameError, match="no room of S3DIS under"):
            S3DIS(tmp_path / "nowhere")

    def test_cache_follows_the_files(self, root, tmp_path, monkeypatch):
        from insum_nn.datasets import s3dis

        reads: list[Path] = []
        read = s3dis.read_room
        monkeypatch.setattr(s3dis, "read_room", lambda path, **more: reads.append(path) or read(path, **more))
        cache = tmp_path / "cache"
        data = S3DIS(root, areas=[1], rooms=["office_1"], cache=cache)
        first, again = data.room(0), data.room(0)
        assert len(reads) == 1
        np.testing.assert_array_equal(first.points, again.points)
        np.testing.assert_array_equal(first.labels, again.labels)
        assert again.labels.dtype == np.int64
        # A changed file, and a damaged cache, are read anew.
        write_points(root / "Area_1" / "office_1" / "Annotations" / "table_1.txt", [(0, 0, 1, 5, 5, 5)])
        assert len(data.room(0)) == 4
        assert len(reads) == 2
        for file in cache.glob("*.npz"):
            file.write_bytes(file.read_bytes()[:100])
        assert len(data.room(0)) == 4
        assert len(reads) == 3
        assert not list(cache.glob("*.tmp"))
        S3DIS(root, areas=[1], cache=None).room(0)
        assert len(reads) == 4

    def test_default_cache_is_in_the_user_s_folder(self, root, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        S3DIS(root, areas=[5])[0]
        assert len(list((tmp_path / "xdg" / "insum_nn" / "s3dis").glob("Area_5-hall_1-*.npz"))) == 1

    @pytest.mark.parametrize("mask", [0, 0o002, 0o022])
    def test_the_cache_is_in_the_package_s_own_folder(self, root, tmp_path, monkeypatch, mask):
        monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "ours"))
        before = os.umask(mask)
        try:
            S3DIS(root, areas=[5])[0]
        finally:
            os.umask(before)
        assert len(list((tmp_path / "ours" / "s3dis").iterdir())) == 1
        # The compiler uses it too.
        assert own_folder("plans") == tmp_path / "ours" / "plans"

    def test_without_a_folder_rooms_are_read_each_time(self, root, monkeypatch):
        monkeypatch.setenv("INSUM_NN_CACHE_DIR", f"{__file__}/cache")
        data = S3DIS(root, areas=[5])
        assert len(data.room(0)) == len(data.room(0)) == 2

    @pytest.mark.parametrize("planted", ["bytes", "npz", "flipped", "cut"])
    def test_entries_that_were_not_written_here_are_not_believed(self, root, tmp_path, planted):
        data = S3DIS(root, areas=[5], cache=tmp_path / "cache")
        room = data.room(0)
        (file,) = (tmp_path / "cache").iterdir()
        whole = file.read_bytes()
        if planted == "npz":
            np.savez(file, points=room.points + 1, colors=room.colors, labels=room.labels + 99)
        else:
            flipped = whole[:-200] + bytes([whole[-200] ^ 1]) + whole[-199:]
            file.write_bytes({"bytes": b"PK\x03\x04", "flipped": flipped, "cut": whole[:-1]}[planted])
        again = data.room(0)
        np.testing.assert_array_equal(again.points, room.points)
        np.testing.assert_array_equal(again.labels, room.labels)
        assert file.read_bytes() == whole, "it is written again"

    def test_samples_and_batches(self, root, tmp_path):
        data = S3DIS(root, voxel_size=0.5, cache=tmp_path)
        sample = data[0]
        assert sample.indices.tolist() == [[0, 0, 0], [1, 1, 0], [2, 0, 0]]
        assert sample.spatial_shape == (3, 2, 1)
        # Place: x and y from the middle, z from the floor; colour from -1 to 1.
        torch.testing.assert_close(sample.features[1], torch.tensor([0.0, 0.25, 0.4, -1.0, 1.0, 7 / 127.5 - 1]))
        assert sample.labels[sample.inverse].tolist() == sample.room.labels.tolist()
        batch = collate([data[0], data[2]])
        assert batch.batch_size == 2
        assert batch.spatial_shape == (3, 2, 3)
        assert batch.indices[:, 0].tolist() == [0, 0, 0, 1, 1]
        assert batch.indices.dtype == torch.int32
        assert batch.to("cpu").labels.tolist() == batch.labels.tolist()
        turned = S3DIS(root, cache=None, transform=lambda r: Room(r.name, -r.points, r.colors, r.labels))
        assert turned[0].room.points.max() == 0

    def test_data_loader_with_workers(self, root, tmp_path):
        data = S3DIS(root, cache=tmp_path)
        loader = torch.utils.data.DataLoader(data, batch_size=3, collate_fn=collate, num_workers=1)
        (batch,) = list(loader)
        assert len(batch.samples) == 3


class TestVoxels:
    def test_against_a_dictionary(self):
        generator = np.random.default_rng(0)
        points = generator.normal(size=(500, 3)) - 5
        labels = generator.integers(-1, 4, 500)
        features = generator.normal(size=(500, 2))
        voxels = voxelize(points, 0.7, labels=labels, features=features)
        cells: dict[tuple[int, ...], list[int]] = {}
        low = points.min(0)
        for row, point in enumerate(points):
            cells.setdefault(tuple(np.floor((point - low) / 0.7).astype(int).tolist()), []).append(row)
        assert [tuple(c) for c in voxels.coordinates.tolist()] == sorted(cells)
        assert voxels.spatial_shape == tuple((voxels.coordinates.max(0) + 1).tolist())
        for place, cell in enumerate(sorted(cells)):
            members = cells[cell]
            assert (voxels.inverse[members] == place).all()
            assert voxels.counts[place] == len(members)
            np.testing.assert_allclose(voxels.features[place], features[members].mean(0), rtol=1e-5, atol=1e-6)
            votes = [labels[m] for m in members if labels[m] >= 0]
            want = min(set(votes), key=lambda k: (-votes.count(k), k)) if votes else -1
            assert voxels.labels[place] == want

    def test_empty_single_and_without_labels(self):
        none = voxelize(np.zeros((0, 3)), 0.1, labels=np.zeros(0, int), features=np.zeros((0, 2)))
        assert len(none) == 0
        assert none.labels.shape == (0,)
        assert none.features.shape == (0, 2)
        one = voxelize(np.full((1, 2), 7.0), 0.1)
        assert one.coordinates.tolist() == [[0, 0]]
        assert one.labels is None
        assert one.features is None

    @pytest.mark.parametrize(
        ("points", "size", "more", "error", "text"),
        [
            (np.zeros((2, 3)), 0.0, {}, InsumFormatError, "'voxel_size' is 0.0"),
            (np.zeros((2, 3)), np.nan, {}, InsumFormatError, "'voxel_size' is nan"),
            (np.array([[0.0], [np.nan]]), 1.0, {}, InsumFormatError, r"point 1 is \[nan\]"),
            (np.zeros((2, 3)), 1.0, {"labels": np.zeros(3, int)}, InsumShapeError, "do not go together"),
            (np.zeros(2), 1.0, {}, InsumShapeError, "do not go together"),
            (np.array([[0.0] * 3, [1e9] * 3]), 1e-3, {}, InsumOverflowError, "cannot be numbered"),
        ],
    )
    def test_bad_input(self, points, size, more, error, text):
        with pytest.raises(error, match=text):
            voxelize(points, size, **more)


class TestSyntheticRooms:
    def test_same_seed_same_room(self):
        first, second, other = generate_room(5, num_points=4000), generate_room(5, num_points=4000), generate_room(6)
        np.testing.assert_array_equal(first.points, second.points)
        np.testing.assert_array_equal(first.colors, second.colors)
        assert len(other) == 60_000
        assert first.points.min() > -0.1

    @pytest.mark.parametrize("seed", range(8))
    def test_every_class_stands_in_the_room(self, seed):
        room = generate_room(seed, num_points=5000)
        assert sorted(set(room.labels.tolist())) == list(range(13))
        low, high = room.points.min(0), room.points.max(0)
        assert (high - low < [6.1, 6.6, 3.2]).all()
        floor = room.points[room.labels == CLASSES.index("floor")]
        assert abs(floor[:, 2].mean()) < 0.01

    def test_as_a_dataset(self):
        rooms = SyntheticRooms(2, num_points=2000, voxel_size=0.2)
        assert len(list(iter(rooms))) == 2
        assert rooms[1].room.name == "synthetic_1"
        with pytest.raises(IndexError):
            rooms[2]

    def test_palette_tells_classes_apart(self):
        assert len({tuple(color) for color in PALETTE.tolist()}) == len(CLASSES) == 13


def test_room_refuses_lengths_that_disagree():
    with pytest.raises(InsumShapeError, match="do not go together"):
        Room("a", np.zeros((2, 3), np.float32), np.zeros((2, 3), np.uint8), np.zeros(3, np.int64))


def test_a_sample_without_points():
    room = Room("a", np.zeros((0, 3), np.float32), np.zeros((0, 3), np.uint8), np.zeros(0, np.int64))
    sample = voxel_sample(room)
    assert sample.features.shape == (0, 6)
    assert collate([sample, sample]).indices.shape == (0, 4)

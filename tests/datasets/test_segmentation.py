from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from insum_nn.datasets import Room, SyntheticRooms, class_colors, draw_rooms, generate_room, random_pose


def test_a_pose_keeps_shape_and_labels():
    room = generate_room(0, num_points=500)
    before = room.points.copy()
    torch.manual_seed(0)
    turned, other = random_pose(room), random_pose(room)
    assert np.array_equal(room.points, before)
    assert np.array_equal(turned.labels, room.labels)
    assert not np.allclose(turned.points, other.points)
    # Distances all change by one factor, and heights by the same one: a turn, perhaps a mirror, and a scale.
    distances = [np.linalg.norm(r.points - r.points[0], axis=1)[1:] for r in (room, turned)]
    factor = distances[1] / distances[0]
    assert 0.95 <= factor.min() <= factor.max() <= 1.05
    assert np.allclose(factor, factor[0], rtol=1e-4)
    assert np.allclose(turned.points[:, 2], room.points[:, 2] * factor[0], atol=1e-4)


def test_generated_rooms_are_transformed():
    calls = []
    rooms = SyntheticRooms(1, num_points=500, voxel_size=0.2, transform=lambda room: calls.append(room) or room)
    assert torch.equal(rooms[0].features, SyntheticRooms(1, num_points=500, voxel_size=0.2)[0].features)
    assert [room.name for room in calls] == ["synthetic_0"]


def test_pictures(tmp_path: Path):
    pytest.importorskip("matplotlib")
    room = generate_room(0, num_points=2000)
    bare = Room("bare", room.points, room.colors, np.full(len(room), -1))
    nothing = Room("nothing", np.zeros((0, 3), np.float32), np.zeros((0, 3), np.uint8), np.zeros(0, np.int64))
    path = draw_rooms([(room, room.labels), (bare, room.labels)], tmp_path / "deep" / "two.png")
    assert path.stat().st_size > 20_000
    assert draw_rooms([(bare, room.labels)], tmp_path / "bare.png").stat().st_size > 10_000
    assert draw_rooms([(nothing, nothing.labels)], tmp_path / "nothing.png").exists()
    assert class_colors(np.array([-1, 0])).dtype == np.uint8

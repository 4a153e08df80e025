from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from insum_nn.datasets import (
    CLASSES,
    Room,
    SegmentationScores,
    SyntheticRooms,
    class_colors,
    draw_rooms,
    generate_room,
    random_pose,
)
from insum_nn.errors import InsumShapeError


def labels(seed: int, count: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """True and predicted classes; some points have no true class, some classes do not occur."""
    generator = np.random.default_rng(seed)
    return generator.integers(-1, 9, count), generator.integers(0, 13, count)


def test_scores_equal_their_definition():
    truth, predicted = labels(0)
    scores = SegmentationScores.of(truth, predicted)
    known = truth >= 0
    assert scores.accuracy == (truth == predicted)[known].mean()
    expected = {}
    for number, name in enumerate(CLASSES):
        true, said = (truth == number)[known], (predicted == number)[known]
        if true.any():
            expected[name] = (true & said).sum() / (true | said).sum()
    assert scores.iou == pytest.approx(expected)
    assert scores.mean_iou == pytest.approx(np.mean(list(expected.values())))
    assert f"mean IoU {scores.mean_iou:.2%}" in str(scores)


def test_scores_of_several_rooms_are_those_of_all_points():
    parts = [labels(seed, count) for seed, count in ((0, 10), (1, 500))]
    rooms = [(Room("r", np.zeros((len(t), 3), np.float32), np.zeros((len(t), 3), np.uint8), t), p) for t, p in parts]
    whole = SegmentationScores.of(np.concatenate([t for t, _ in parts]), np.concatenate([p for _, p in parts]))
    assert np.array_equal(SegmentationScores.of_rooms(rooms).counts, whole.counts)
    assert np.array_equal(SegmentationScores.of_rooms([]).counts, np.zeros((13, 13)))


def test_without_labels_there_is_no_score():
    scores = SegmentationScores.of(np.full(3, -1), np.zeros(3, int))
    assert np.isnan(scores.accuracy)
    assert np.isnan(scores.mean_iou)
    with pytest.raises(InsumShapeError, match="do not go together"):
        SegmentationScores.of(np.zeros(2, int), np.zeros(3, int))


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

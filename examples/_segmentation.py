"""What the point-cloud examples share: scores and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _training
import numpy as np
from numpy.typing import NDArray

from insum_nn.datasets.rooms import CLASSES, PALETTE, Room

PICTURE_POINTS = 60_000
UNKNOWN = np.array([200, 200, 200], np.uint8)


def confusion(truth: NDArray[np.int64], predicted: NDArray[np.int64]) -> NDArray[np.int64]:
    """(classes, classes) counts, truth by row; points without a label do not count."""
    known = truth >= 0
    count = len(CLASSES)
    return np.bincount(truth[known] * count + predicted[known], minlength=count * count).reshape(count, count)


def scores(matrix: NDArray[np.int64]) -> tuple[float, float, dict[str, float]]:
    """Point accuracy, mean intersection over union of the classes that are there, and each of these."""
    hit = np.diag(matrix)
    union = matrix.sum(0) + matrix.sum(1) - hit
    there = matrix.sum(1) > 0
    each = {name: hit[i] / union[i] for i, name in enumerate(CLASSES) if there[i]}
    total = matrix.sum()
    return (float(hit.sum() / total) if total else 0.0), float(np.mean(list(each.values()) or [0.0])), each


def score_table(each: dict[str, float]) -> str:
    return "\n".join(f"  {name:<10}{value:7.1%}" for name, value in each.items())


def class_colors(labels: NDArray[np.int64]) -> NDArray[np.uint8]:
    return np.where(labels[:, None] >= 0, PALETTE[labels], UNKNOWN).astype(np.uint8)


def draw_room(room: Room, labels: Mapping[str, NDArray[np.int64]], title: str, path: Path) -> Path:
    """Draw a room from above and in perspective: its colours, its true classes where known, and other labels of it.

    Ceilings are left out, or nothing else could be seen from above.

    Args:
        room: points, colours and true classes.
        labels: what a column is called -> a class for each point.
        title: of the whole picture.
        path: a file.
    """
    from matplotlib.patches import Patch

    columns = ({"true classes": room.labels} if (room.labels >= 0).any() else {}) | dict(labels)
    judged = next(iter(columns.values()))
    keep = np.flatnonzero(judged != CLASSES.index("ceiling"))
    if len(keep) > PICTURE_POINTS:
        keep = np.random.default_rng(0).choice(keep, PICTURE_POINTS, replace=False)
    # Painted from below to above.
    keep = keep[np.argsort(room.points[keep, 2], kind="stable")]
    points = room.points[keep]
    dot = float(np.clip(60_000 / max(1, len(keep)), 1.5, 9.0))
    panels = {"points": room.colors[keep]} | {name: class_colors(row[keep]) for name, row in columns.items()}
    shown = {label for row in columns.values() for label in row[keep].tolist()}
    figure = _training.new_figure(4.4 * len(panels), 8.6)
    low, high = points.min(0, initial=np.inf), points.max(0, initial=-np.inf)
    for column, (name, colors) in enumerate(panels.items()):
        flat = figure.add_subplot(2, len(panels), column + 1)
        flat.scatter(points[:, 0] - low[0], points[:, 1] - low[1], c=colors / 255, s=dot, linewidths=0)
        flat.set_aspect("equal")
        flat.set_title(f"{name}, from above")
        flat.set_xlabel("x (m)")
        if column == 0:
            flat.set_ylabel("y (m)")
        below = figure.add_subplot(2, len(panels), len(panels) + column + 1, projection="3d")
        _perspective(below, points, (low, high), colors, dot)
        below.set_title(f"{name}, in perspective", y=1.0)
    patches = [
        Patch(facecolor=tuple((PALETTE[i] / 255).tolist()), edgecolor=_training.GREY, linewidth=0.5, label=CLASSES[i])
        for i in sorted(shown)
        if i >= 0
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(13, len(patches)), frameon=False)
    figure.suptitle(f"{title} (without its ceiling)", fontsize=13)
    return _training.save_figure(figure, path, dpi=110)


def _perspective(
    axes: Any,
    points: NDArray[np.float32],
    box: tuple[NDArray[np.float32], NDArray[np.float32]],
    colors: NDArray[np.uint8],
    dot: float,
) -> None:
    # The walls between the viewer and the room are cut away, so that one looks inside.
    low, high = box
    inside = (points[:, 0] < high[0] - 0.08 * (high[0] - low[0])) & (points[:, 1] > low[1] + 0.08 * (high[1] - low[1]))
    points, colors = points[inside], colors[inside]
    axes.scatter(points[:, 0], points[:, 1], points[:, 2], c=colors / 255, s=dot, linewidths=0, depthshade=False)
    extent = np.maximum(high - low, 1e-3)
    # A room that is higher than wide would reach into the title.
    axes.set_box_aspect(extent, zoom=1.25 if extent[2] < 0.7 * extent[:2].max() else 0.95)
    axes.view_init(elev=32, azim=-50)
    axes.set_proj_type("persp")
    axes.set_axis_off()


def plot_curve(losses: Sequence[float], accuracies: Sequence[float], title: str, path: Path) -> Path:
    """Loss and accuracy on the voxels of each epoch."""
    figure = _training.new_figure(8, 3.2)
    panels = {"cross entropy of training voxels": losses, "training voxels labelled right": accuracies}
    for axes, (label, values) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        axes.plot(range(1, len(values) + 1), values, color=_training.BLUE)
        axes.set_xlabel("epoch")
        axes.set_ylabel(label)
        axes.set_ylim(0, None if values is losses else 1.02)
        _training.grid(axes)
    figure.suptitle(title)
    return _training.save_figure(figure, path, dpi=120)

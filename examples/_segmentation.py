"""What the point-cloud examples share: scores, pictures, the choice of a device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from insum_nn.datasets.rooms import CLASSES, PALETTE, Room

PICTURE_POINTS = 60_000
UNKNOWN = np.array([200, 200, 200], np.uint8)


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


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


def draw_room(room: Room, predicted: NDArray[np.int64], title: str, path: Path) -> Path:
    """Colours, true classes and predicted classes of a room, from above and in perspective.

    Ceilings are left out, or nothing else could be seen from above.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    above = CLASSES.index("ceiling")
    judged = room.labels if (room.labels >= 0).any() else predicted
    keep = np.flatnonzero(judged != above)
    if len(keep) > PICTURE_POINTS:
        keep = np.random.default_rng(0).choice(keep, PICTURE_POINTS, replace=False)
    # Painted from below to above.
    keep = keep[np.argsort(room.points[keep, 2], kind="stable")]
    points = room.points[keep]
    dot = float(np.clip(60_000 / max(1, len(keep)), 1.5, 9.0))
    panels = {"points": room.colors[keep], "predicted": class_colors(predicted[keep])}
    shown = set(predicted[keep].tolist())
    if (room.labels >= 0).any():
        panels = {"points": panels["points"], "true": class_colors(room.labels[keep]), "predicted": panels["predicted"]}
        shown |= set(room.labels[keep].tolist())
    figure = Figure(figsize=(4.6 * len(panels), 9.4), layout="constrained")
    FigureCanvasAgg(figure)
    for column, (name, colors) in enumerate(panels.items()):
        flat = figure.add_subplot(2, len(panels), column + 1)
        flat.scatter(points[:, 0], points[:, 1], c=colors / 255, s=dot, linewidths=0)
        flat.set_aspect("equal")
        flat.set_title(f"{name}, from above")
        flat.set_xlabel("x (m)")
        flat.set_ylabel("y (m)")
        below = figure.add_subplot(2, len(panels), len(panels) + column + 1, projection="3d")
        _perspective(below, points, colors, name, dot)
    patches = [Patch(color=tuple((PALETTE[i] / 255).tolist()), label=CLASSES[i]) for i in sorted(shown) if i >= 0]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(7, len(patches)), frameon=False)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def _perspective(axes: Any, points: NDArray[np.float32], colors: NDArray[np.uint8], name: str, dot: float) -> None:
    # The walls between the viewer and the room are cut away, so that one looks inside.
    low, high = points.min(0), points.max(0)
    inside = (points[:, 0] < high[0] - 0.08 * (high[0] - low[0])) & (points[:, 1] > low[1] + 0.08 * (high[1] - low[1]))
    points, colors = points[inside], colors[inside]
    axes.scatter(points[:, 0], points[:, 1], points[:, 2], c=colors / 255, s=dot, linewidths=0, depthshade=False)
    axes.set_box_aspect(np.maximum(high - low, 1e-3), zoom=1.15)
    axes.view_init(elev=32, azim=-50)
    axes.set_proj_type("persp")
    axes.set_title(f"{name}, in perspective")
    axes.set_axis_off()


def plot_curve(losses: Sequence[float], accuracies: Sequence[float], title: str, path: Path) -> Path:
    """Loss and accuracy on the voxels of each epoch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = {"cross entropy": losses, "voxel accuracy": accuracies}
    for axes, (label, values) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        axes.plot(range(1, len(values) + 1), values, color="#0b6e99")
        axes.set_xlabel("epoch")
        axes.set_ylabel(label)
        axes.grid(linewidth=0.4, alpha=0.5)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path

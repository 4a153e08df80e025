"""Augmentation and pictures of labelled rooms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from insum_nn.datasets.rooms import CLASSES, PALETTE, UNLABELLED, Room
from insum_nn.errors import import_extra

__all__ = ["class_colors", "draw_rooms", "random_pose"]

_UNLABELLED_COLOR = np.array([200, 200, 200], np.uint8)
_MAX_DRAWN = 30_000


def random_pose(room: Room) -> Room:
    """Turn a room by quarters about its vertical axis, mirror, scale by 0.95 to 1.05 and tint it at random.

    A `transform` of `S3DIS` and `SyntheticRooms`. Draws from torch's generator, which data loaders seed in each worker.

    Args:
        room: any room; it is not changed.

    Returns:
        A room with the same labels.
    """
    draw = torch.rand(6).tolist()
    points = room.points.copy()
    for _ in range(int(4 * draw[0])):
        points[:, 0], points[:, 1] = -points[:, 1], points[:, 0].copy()
    points[:, 0] *= -1 if draw[1] < 0.5 else 1
    points *= np.float32(0.95 + 0.1 * draw[2])
    tint = 0.85 + 0.3 * np.array(draw[3:], np.float32)
    return replace(room, points=points, colors=np.clip(room.colors * tint, 0, 255).astype(np.uint8))


def class_colors(labels: NDArray[np.integer]) -> NDArray[np.uint8]:
    """Colours of classes, (n, 3): those of `PALETTE`, grey for points without a class.

    >>> class_colors(np.array([8, -1])).tolist()
    [[220, 38, 127], [200, 200, 200]]
    """
    return np.where(labels[:, None] >= 0, PALETTE[labels], _UNLABELLED_COLOR).astype(np.uint8)


def draw_rooms(rooms: Sequence[tuple[Room, NDArray[np.integer]]], path: str | Path, *, dpi: int = 90) -> Path:
    """Draw rooms in perspective: their colours, their true classes where there are any, and predicted ones.

    Ceilings and the two walls nearest to the viewer are left out, so that the picture looks inside. Needs matplotlib.

    Args:
        rooms: one or more rooms, with a class for each point of it; a row of the picture each.
        path: the file to write; its suffix chooses the format.
        dpi: pixels per inch, of 3.3 inches for each panel.

    Returns:
        The path.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figures, patches = (import_extra(f"matplotlib.{part}", "pictures of rooms") for part in ("figure", "patches"))
    labelled = any((room.labels >= 0).any() for room, _ in rooms)
    titles = ["colours", *["true classes"] * labelled, "predicted classes"]
    figure: Any = figures.Figure(figsize=(3.3 * len(titles), 3.0 * len(rooms) + 0.5), layout="constrained")
    panels = figure.subplots(len(rooms), len(titles), squeeze=False, subplot_kw={"projection": "3d"})
    shown: set[int] = set()
    for row, (room, predicted) in zip(panels, rooms, strict=True):
        keep = _visible(room, predicted)
        classes = [*[room.labels[keep]] * labelled, predicted[keep]]
        for axes, colors in zip(row, [room.colors[keep], *map(class_colors, classes)], strict=True):
            _scatter(axes, room.points[keep], colors)
        # To the left of its row, so that a long name overlaps neither another title nor another room.
        place = {"transform": row[0].transAxes, "rotation": 90, "va": "center", "ha": "right"}
        row[0].text2D(0, 0.5, room.name, fontsize=9, **place)
        shown |= {*np.concatenate(classes).tolist()} - {UNLABELLED}
    for axes, title in zip(panels[0], titles, strict=True):
        axes.set_title(title, fontsize=9)
    handles = [patches.Patch(facecolor=tuple(PALETTE[i] / 255), label=CLASSES[i]) for i in sorted(shown)]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(7, len(handles)), frameon=False, fontsize=8)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    return path


def _visible(room: Room, predicted: NDArray[np.integer]) -> NDArray[np.intp]:
    """Places of the points to draw, from the lowest to the highest."""
    if not len(room):
        return np.zeros(0, np.intp)
    classes = np.where(room.labels >= 0, room.labels, predicted)
    low, high = room.points.min(0), room.points.max(0)
    near = 0.08 * (high - low)
    inside = (room.points[:, 0] < high[0] - near[0]) & (room.points[:, 1] > low[1] + near[1])
    keep = np.flatnonzero(inside & (classes != CLASSES.index("ceiling")))
    if len(keep) > _MAX_DRAWN:
        keep = np.random.default_rng(0).choice(keep, _MAX_DRAWN, replace=False)
    return keep[np.argsort(room.points[keep, 2], kind="stable")]


def _scatter(axes: Any, points: NDArray[np.float32], colors: NDArray[np.uint8]) -> None:
    size = float(np.clip(40_000 / max(1, len(points)), 1.0, 6.0))
    axes.scatter(*points.T, c=colors / 255, s=size, linewidths=0, depthshade=False)
    extent = np.maximum(np.ptp(points, axis=0), 1e-3) if len(points) else np.ones(3)
    # A room that is higher than wide would reach into the title.
    axes.set_box_aspect(extent, zoom=1.3 if extent[2] < 0.7 * extent[:2].max() else 1.0)
    axes.view_init(elev=32, azim=-50)
    axes.set_proj_type("persp")
    axes.set_axis_off()

"""Label the points of a room with a trained MinkUNet; write a picture and a PLY.

    python examples/segment_room.py --size tiny                         a generated room
    python examples/segment_room.py --root DIR --checkpoint FILE        S3DIS: Area_5/storage_3
    python examples/segment_room.py --room office.ply --checkpoint FILE

The second line, with the checkpoint that `train_s3dis.py --root DIR` writes, is the full setting. A room is a folder of
S3DIS, a text file of lines `x y z r g b`, or a PLY or PCD file (those two need Open3D). Where no checkpoint is given, a
model is trained first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

# The examples are scripts side by side, no package.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _segmentation
import _training
import train_s3dis

from insum_nn.datasets.rooms import Room, write_ply
from insum_nn.datasets.s3dis import read_room, voxel_sample
from insum_nn.datasets.synthetic_rooms import generate_room


def load_room(options: argparse.Namespace) -> Room:
    """The room asked for, or one that the model has not seen."""
    if options.room is not None:
        inside = options.root / options.room if options.root is not None else options.room
        return read_room(inside if inside.exists() else options.room)
    if options.root is not None:
        return read_room(options.root / "Area_5" / "storage_3")
    points = (train_s3dis.TINY_SOURCE if options.size == "tiny" else train_s3dis.Source()).points
    return generate_room(1000, num_points=points)


def find_checkpoint(options: argparse.Namespace, device: torch.device) -> Path:
    """The checkpoint given or lying in --out; trained now, or to its end, where there is none."""
    if options.checkpoint is not None:
        return options.checkpoint
    folder = options.out / "model"
    tiny = options.size == "tiny"
    settings = train_s3dis.TINY if tiny else train_s3dis.Settings()
    if options.epochs is not None:
        settings = replace(settings, epochs=options.epochs)
    path = folder / "minkunet.pt"
    if options.resume or not path.exists():
        print(f"training a model for {path}")
        source = replace(train_s3dis.TINY_SOURCE if tiny else train_s3dis.Source(), root=options.root)
        train_s3dis.run(settings, device, folder, source=source, resume=options.resume)
    return path


def main(argv: Sequence[str] | None = None, *, size: str = "full") -> float:
    """Label a room, print scores where it has labels, write picture and PLY.

    Args:
        argv: command line arguments; none by default.
        size: "tiny" or "full", unless `argv` says.

    Returns:
        The share of points labelled right; NaN for a room without labels.
    """
    parser = _training.argument_parser(__doc__, "segment_room", size)
    parser.add_argument("--root", type=Path, help="folder of S3DIS")
    parser.add_argument("--room", type=Path, help="folder or file; also relative to --root")
    parser.add_argument("--checkpoint", type=Path, help="of train_s3dis.py; default the one in --out")
    parser.add_argument("--epochs", type=int, help="of the training, where there is no checkpoint")
    options = parser.parse_args(argv or [])

    device = _training.choose_device(options.device)
    checkpoint = find_checkpoint(options, device)
    model, settings = train_s3dis.load_model(checkpoint, device)
    room = load_room(options)
    sample = voxel_sample(room, settings.voxel_size)
    print(f"{room}: {len(sample.indices)} voxels of {settings.voxel_size} m; {device}")
    predicted = train_s3dis.predict(model, sample, device)
    stem = room.name.replace("/", "_")
    accuracy = float("nan")
    if (room.labels >= 0).any():
        accuracy, mean, each = _segmentation.scores(_segmentation.confusion(room.labels, predicted))
        print(f"point accuracy {accuracy:.2%}, mean IoU {mean:.2%}")
        print(_segmentation.score_table(each))
    labels = {"predicted classes": predicted}
    print(f"picture: {_segmentation.draw_room(room, labels, room.name, options.out / f'{stem}.png')}")
    ply = write_ply(options.out / f"{stem}.ply", room.points, _segmentation.class_colors(predicted), predicted)
    print(f"points in class colours: {ply}")
    return accuracy


if __name__ == "__main__":
    main(sys.argv[1:])

"""Label the points of a room with a trained MinkUNet; write a picture and a PLY file.

    python examples/segment_room.py --size tiny                                           a generated room
    python examples/segment_room.py --checkpoint minkunet.pt --room Area_5/storage_3      a folder of S3DIS
    python examples/segment_room.py --checkpoint minkunet.pt --room office.ply            or .txt, .pcd, .las, .laz

The checkpoint is what `train_s3dis.py` writes to its --out; without one, a model is trained first, at --size.
"""

import argparse
from pathlib import Path

import torch
import train_s3dis  # the example of training

from insum_nn.datasets import (
    CLASSES,
    class_colors,
    draw_rooms,
    generate_room,
    read_room,
    voxel_sample,
    write_ply,
)
from insum_nn.models import MinkUNet


def load_model(path, device):
    state = torch.load(path, map_location=device)
    model = MinkUNet(6, len(CLASSES), planes=state["planes"], init_dim=state["planes"][0]).to(device)
    model.load_state_dict(state["model"])
    return model, state["voxel_size"]


def main(argv=None, *, size="full"):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "full"), default=size)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("outputs/segment_room"))
    parser.add_argument("--root", type=Path, default=Path(), help="--room is relative to this folder")
    parser.add_argument("--room", type=Path, help="folder of S3DIS, or a file of points; default: a generated room")
    parser.add_argument(
        "--checkpoint", type=Path, help="of train_s3dis.py; default: the one in --out, trained if missing"
    )
    args = parser.parse_args(argv)
    checkpoint = args.checkpoint or args.out / "minkunet.pt"
    if args.checkpoint is None and not checkpoint.exists():
        train_s3dis.main(["--size", args.size, "--device", args.device, "--out", str(args.out)])
    model, voxel_size = load_model(checkpoint, args.device)

    points = 20_000 if args.size == "tiny" else 120_000
    room = generate_room(1000, num_points=points) if args.room is None else read_room(args.root / args.room)
    sample = voxel_sample(room, voxel_size)
    print(f"{room}: {len(sample.indices)} voxels of {voxel_size} m")
    labelled = list(train_s3dis.test(model, [sample], args.device))
    if (room.labels >= 0).any():
        train_s3dis.print_scores(labelled)
    draw_rooms(labelled, args.out / "segment_room.png")
    predicted = labelled[0][1]
    ply = write_ply(args.out / "segment_room.ply", room.points, class_colors(predicted), predicted)
    print(f"points in the colours of their classes: {ply}")


if __name__ == "__main__":
    main()

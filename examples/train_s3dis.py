"""Segment rooms with a MinkUNet, whose layers are used as `spconv.pytorch`'s.

    python examples/train_s3dis.py --size tiny          overfits one generated room; half a minute on a CPU
    python examples/train_s3dis.py --size small         120 generated rooms, tested on three others; minutes on a CPU
    python examples/train_s3dis.py                      as many rooms of six times as many points; a minute on a GPU
    python examples/train_s3dis.py --root DIR           S3DIS: trained on areas 1-4 and 6, tested on area 5; for a GPU
    python examples/train_s3dis.py --size tiny --root DIR --overfit Area_3/hallway_3 Area_5/storage_3 --voxel-size 0.05

DIR: `Area_<k>/<room>/Annotations/<class>_<number>.txt`. Model: Choy et al., 4D Spatio-Temporal ConvNets (CVPR 2019).
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import accuracy_score, jaccard_score
from torch.utils.data import DataLoader

from insum_nn.datasets import CLASSES, S3DIS, SyntheticRooms, collate_voxels, draw_rooms, random_pose
from insum_nn.layers import SparseConvTensor
from insum_nn.models import MinkUNet

TINY = dict(rooms=1, points=20_000, epochs=80, batch_size=1, lr=1e-2, voxel_size=0.1, width=0.25, workers=0)
FULL = dict(rooms=120, points=120_000, epochs=12, batch_size=2, lr=4e-3, voxel_size=0.02, width=1.0, workers=4)
SIZES = {"tiny": TINY, "small": TINY | dict(rooms=120, epochs=4, voxel_size=0.03), "full": FULL}


def load_data(args):
    """Rooms to train on, each time in another pose unless they are to be overfitted, and rooms to test on."""
    overfit = args.overfit or (args.root is None and args.size == "tiny")
    pose, size = None if overfit else random_pose, args.voxel_size
    if args.root is None:
        train_rooms = SyntheticRooms(args.rooms, num_points=args.points, voxel_size=size, transform=pose)
        test_rooms = SyntheticRooms(3, first_seed=1000, num_points=args.points, voxel_size=size)
    else:
        train_rooms = S3DIS(args.root, split=pose and "train", rooms=args.overfit, voxel_size=size, transform=pose)
        test_rooms = S3DIS(args.root, split="val", voxel_size=size)
    return (list(train_rooms),) * 2 if overfit else (train_rooms, test_rooms)


def sparse(batch):
    return SparseConvTensor(batch.features, batch.indices, batch.spatial_shape, batch.batch_size)


def train(model, loader, optimizer, schedule, device):
    model.train()
    losses = []
    for batch in (batch.to(device) for batch in loader):
        optimizer.zero_grad()
        with torch.autocast(batch.features.device.type, torch.bfloat16, enabled=batch.features.is_cuda):
            logits = model(sparse(batch)).features
        loss = torch.nn.functional.cross_entropy(logits.float(), batch.labels, ignore_index=-1)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def test(model, rooms, device):
    """Each room with the predicted class of each of its points."""
    model.eval()
    for sample in rooms:
        logits = model(sparse(collate_voxels([sample]).to(device))).features
        yield sample.room, logits.argmax(1).cpu()[sample.inverse].numpy()


def print_scores(labelled):
    pairs = np.concatenate([(room.labels, classes) for room, classes in labelled], axis=1)
    truth, predicted = pairs[:, pairs[0] >= 0]
    accuracy, classes = accuracy_score(truth, predicted), np.unique(truth)
    ious = jaccard_score(truth, predicted, labels=classes, average=None)
    each = ", ".join(f"{CLASSES[n]} {iou:.1%}" for n, iou in zip(classes, ious, strict=True))
    print(f"point accuracy {accuracy:.2%}, mean IoU {ious.mean():.2%}: {each}")
    return accuracy


def main(argv=None, *, size="full"):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default=size, help="selects from the defaults below")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("outputs/train_s3dis"))
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    parser.add_argument("--root", type=Path, help="folder of S3DIS; default: generated rooms")
    parser.add_argument("--overfit", nargs="+", metavar="AREA/ROOM", help="train and test on these rooms alone")
    for key, value in FULL.items():
        parser.add_argument("--" + key.replace("_", "-"), type=type(value), help=str([s[key] for s in SIZES.values()]))
    args = parser.parse_args(argv)
    vars(args).update({key: value for key, value in SIZES[args.size].items() if getattr(args, key) is None})
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint = args.out / "minkunet.pt"
    torch.manual_seed(0)
    train_rooms, test_rooms = load_data(args)
    loader = DataLoader(train_rooms, args.batch_size, shuffle=True, collate_fn=collate_voxels, num_workers=args.workers)
    planes = [int(args.width * channels) for channels in MinkUNet.PLANES]
    model = MinkUNet(6, len(CLASSES), planes=planes, init_dim=planes[0]).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, None, args.epochs, len(loader), pct_start=0.2)
    parts, losses = {"model": model, "optimizer": optimizer, "schedule": schedule}, []
    if args.resume:
        losses = (state := torch.load(checkpoint))["losses"]
        torch.set_rng_state(state["random"])
        for name, part in parts.items():
            part.load_state_dict(state[name])
    for epoch in range(len(losses), args.epochs):
        losses.append(train(model, loader, optimizer, schedule, args.device))
        print(f"epoch {epoch + 1} of {args.epochs}: loss {losses[-1]:.4f}", flush=True)
        state = {"losses": losses, "random": torch.get_rng_state(), "planes": planes, "voxel_size": args.voxel_size}
        torch.save(state | {name: part.state_dict() for name, part in parts.items()}, checkpoint)
    labelled = list(test(model, test_rooms, args.device))
    accuracy = print_scores(labelled)
    draw_rooms(labelled[:2], args.out / "train_s3dis.png")
    x = sparse(collate_voxels([test_rooms[0]]).to(args.device))
    return model, (x,), f"{losses[0]:.3g}", f"{losses[-1]:.2g}", f"{accuracy:.1%} of points"


if __name__ == "__main__":
    main()

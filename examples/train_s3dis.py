"""Train a MinkUNet to label the points of rooms.

    python examples/train_s3dis.py                           generated rooms, which need no download
    python examples/train_s3dis.py --root DIR                S3DIS: learn Area_3/hallway_3 by heart
    python examples/train_s3dis.py --root DIR --split train  all rooms of areas 1 to 4 and 6 that are there

DIR holds `Area_<k>/<room>/Annotations/<class>_<number>.txt` as the owner lays it out. Nothing is downloaded. The model
is that of Choy, Gwak, Savarese, 4D Spatio-Temporal ConvNets (CVPR 2019); each of its convolutions is one statement.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

# The examples are scripts side by side, no package.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _segmentation

from insum_nn.datasets.rooms import CLASSES, Room
from insum_nn.datasets.s3dis import S3DIS, VoxelBatch, VoxelSample, collate, voxel_sample
from insum_nn.datasets.synthetic_rooms import SyntheticRooms
from insum_nn.layers.sparse_tensor import SparseConvTensor
from insum_nn.models.minkunet import MinkUNet

Rooms = S3DIS | SyntheticRooms
FEATURES = 6
HALLWAY = ("Area_3/hallway_3",)


@dataclass(frozen=True)
class Settings:
    """What a run is made of."""

    voxel_size: float = 0.03
    layers: tuple[int, ...] = (1,) * 8
    planes: tuple[int, ...] = (32, 64, 128, 256, 256, 128, 96, 96)
    init_dim: int = 32
    epochs: int = 120
    batch_size: int = 2
    learning_rate: float = 4e-3
    weight_decay: float = 1e-4
    augment: bool = False
    seed: int = 0


TINY = Settings(0.16, planes=(16, 16, 32, 32, 32, 32, 16, 16), init_dim=16, epochs=60, batch_size=1, learning_rate=1e-2)


@dataclass
class Curve:
    """A number per epoch: mean loss, and the share of training voxels labelled right on the way."""

    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)


# Data.


class Turned(Dataset[VoxelSample]):
    """Rooms turned by quarters, mirrored and tinted at random, a new way each time."""

    def __init__(self, rooms: Rooms, voxel_size: float) -> None:
        self.rooms = rooms
        self.voxel_size = voxel_size

    def __len__(self) -> int:
        return len(self.rooms)

    def __getitem__(self, index: int) -> VoxelSample:
        room = self.rooms.room(index)
        draw = torch.rand(6).tolist()
        points = room.points.copy()
        for _ in range(int(4 * draw[0])):
            points[:, 0], points[:, 1] = -points[:, 1].copy(), points[:, 0].copy()
        if draw[1] < 0.5:
            points[:, 0] *= -1
        points *= 0.95 + 0.1 * draw[2]
        tint = 0.85 + 0.3 * np.array(draw[3:], np.float32)
        colors = np.clip(room.colors * tint, 0, 255).astype(np.uint8)
        return voxel_sample(Room(room.name, points, colors, room.labels), self.voxel_size)


def load_rooms(options: argparse.Namespace, settings: Settings) -> tuple[Rooms, Rooms]:
    """Rooms to train on, and one to look at that was not trained on."""
    if options.root is None:
        tiny = options.size == "tiny"
        train, points = (1, 9_000) if tiny else (12, 120_000)
        made: dict[str, Any] = {"num_points": points, "voxel_size": settings.voxel_size}
        return SyntheticRooms(train, **made), SyntheticRooms(1, first_seed=1000, **made)
    rooms = None if options.split else tuple(options.rooms)
    found = S3DIS(options.root, split=options.split, rooms=rooms, voxel_size=settings.voxel_size)
    held = S3DIS(options.root, split="val", voxel_size=settings.voxel_size)
    return found, held


# Training.


def make_model(settings: Settings) -> MinkUNet:
    torch.manual_seed(settings.seed)
    return MinkUNet(FEATURES, len(CLASSES), layers=settings.layers, planes=settings.planes, init_dim=settings.init_dim)


def sparse(batch: VoxelBatch) -> SparseConvTensor:
    return SparseConvTensor(batch.features, batch.indices, batch.spatial_shape, batch.batch_size)


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 products on a GPU that has them; float32 elsewhere."""
    usable = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=usable)


@dataclass
class Trainer:
    """Model, optimizer and schedule of a run."""

    settings: Settings
    device: torch.device
    steps: int
    curve: Curve = field(default_factory=Curve)

    def __post_init__(self) -> None:
        self.model = make_model(self.settings).to(self.device)
        rate, decay = self.settings.learning_rate, self.settings.weight_decay
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=decay)
        total = self.settings.epochs * self.steps
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, rate, total_steps=total, pct_start=0.2)

    def epoch(self, loader: Iterator[VoxelBatch] | DataLoader[VoxelSample]) -> None:
        """One pass over the rooms."""
        self.model.train()
        losses: list[Tensor] = []
        hits, count = 0, 0
        for batch in loader:
            batch = batch.to(self.device)  # type: ignore[union-attr]
            self.optimizer.zero_grad()
            with autocast(self.device):
                logits = self.model(sparse(batch)).features
            loss = nn.functional.cross_entropy(logits.float(), batch.labels, ignore_index=-1)
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            losses.append(loss.detach())
            hits += int((logits.argmax(1) == batch.labels).sum())
            count += int((batch.labels >= 0).sum())
        self.curve.loss.append(torch.stack(losses).mean().item())
        self.curve.accuracy.append(hits / max(1, count))

    def save(self, path: Path) -> None:
        """Write everything that a later run needs to go on."""
        state = {
            "settings": asdict(self.settings),
            "steps": self.steps,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "curve": asdict(self.curve),
            "random": torch.get_rng_state(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        # A run that is killed while it writes leaves the file before this one whole.
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Go on where a checkpoint was written.

        Raises:
            SystemExit: it was written with other settings.
        """
        state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        saved = settings_of(state)
        if saved != self.settings or state["steps"] != self.steps:
            raise SystemExit(f"{path} was written with {saved}, not with {self.settings}; leave --resume out")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.curve = Curve(**state["curve"])
        torch.set_rng_state(state["random"].cpu())


def settings_of(state: dict[str, Any]) -> Settings:
    held: dict[str, Any] = state["settings"]
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in held.items()}
    return Settings(**values)


def load_model(path: Path, device: torch.device) -> tuple[MinkUNet, Settings]:
    """The model of a checkpoint, for prediction."""
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    settings = settings_of(state)
    model = make_model(settings).to(device)
    model.load_state_dict(state["model"])
    return model.eval(), settings


@torch.no_grad()
def predict(model: MinkUNet, sample: VoxelSample, device: torch.device) -> np.ndarray:
    """A class for each point of a room: that of its voxel."""
    batch = collate([sample]).to(device)
    with autocast(device):
        logits = model.eval()(sparse(batch)).features
    return logits.argmax(1).cpu().numpy()[sample.inverse.numpy()]


def train(
    rooms: Rooms,
    settings: Settings,
    device: torch.device,
    *,
    checkpoint: Path,
    resume: bool = False,
    every: int = 10,
    on_epoch: Callable[[Curve], None] | None = None,
) -> Trainer:
    """Train on rooms.

    Args:
        rooms: what to train on.
        settings: how.
        device: where.
        checkpoint: a file written every so many epochs and at the end.
        resume: continue from that file when it is there.
        every: epochs between two checkpoints.
        on_epoch: called after each epoch.

    Returns:
        The trainer, with model and curve.
    """
    data = Turned(rooms, settings.voxel_size) if settings.augment else rooms
    loader = DataLoader(data, batch_size=settings.batch_size, shuffle=True, collate_fn=collate)
    trainer = Trainer(settings, device, len(loader))
    if resume and checkpoint.exists():
        trainer.load(checkpoint)
    # Without random turns a room is the same each time, so it is cut into voxels once.
    fixed = list(loader) if not settings.augment and len(loader) == 1 else None
    for epoch in range(len(trainer.curve.loss), settings.epochs):
        trainer.epoch(loader if fixed is None else fixed)  # type: ignore[arg-type]
        if on_epoch is not None:
            on_epoch(trainer.curve)
        if (epoch + 1) % every == 0:
            trainer.save(checkpoint)
    trainer.save(checkpoint)
    return trainer


def train_with_progress(rooms: Rooms, settings: Settings, device: torch.device, **more: Any) -> Trainer:
    """`train` under a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("MinkUNet", total=settings.epochs)

        def show(curve: Curve) -> None:
            text = f"MinkUNet: loss {curve.loss[-1]:.3f}, voxels {curve.accuracy[-1]:.1%}"
            progress.update(task, completed=len(curve.loss), description=text)

        return train(rooms, settings, device, on_epoch=show, **more)


def parse(argv: Sequence[str], size: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder of S3DIS; without it rooms are generated")
    parser.add_argument("--split", choices=("train", "val"), help="all rooms of a split, in place of --rooms")
    parser.add_argument("--rooms", nargs="+", default=HALLWAY, metavar="AREA/ROOM", help="default Area_3/hallway_3")
    parser.add_argument("--size", choices=("tiny", "full"), default=size, help="tiny: coarse voxels, a narrow model")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--voxel-size", type=float, help="in metres")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("outputs") / "train_s3dis", help="pictures and checkpoint")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    return parser.parse_args(argv)


def choose_settings(options: argparse.Namespace) -> Settings:
    settings = replace(TINY if options.size == "tiny" else Settings(), seed=options.seed)
    # One room is learned by heart; many are turned and tinted.
    several = options.split is not None or (options.root is None and options.size == "full")
    settings = replace(settings, augment=several or (options.root is not None and len(options.rooms) > 1))
    given = {
        "epochs": options.epochs,
        "batch_size": options.batch_size,
        "voxel_size": options.voxel_size,
        "learning_rate": options.lr,
    }
    return replace(settings, **{name: value for name, value in given.items() if value is not None})


def main(argv: Sequence[str] | None = None, *, size: str = "full") -> float:
    """Train, print scores, write pictures.

    Args:
        argv: command line arguments; none by default.
        size: "tiny" or "full", unless `argv` says.

    Returns:
        The share of points of the training rooms that are labelled right.
    """
    options = parse(argv or [], size)
    settings = choose_settings(options)
    device = _segmentation.choose_device(options.device)
    rooms, held = load_rooms(options, settings)
    print(f"{len(rooms)} rooms, the first {rooms.room(0)}; voxels of {settings.voxel_size} m; {device}")
    checkpoint = options.out / "minkunet.pt"
    trainer = train_with_progress(
        rooms, settings, device, checkpoint=checkpoint, resume=options.resume, every=max(1, settings.epochs // 6)
    )
    model = trainer.model
    print(f"each convolution is {model.conv0p1s1.expression}")
    matrix = np.zeros((len(CLASSES),) * 2, np.int64)
    for index in range(len(rooms)):
        sample = rooms[index]
        predicted = predict(model, sample, device)
        matrix += _segmentation.confusion(sample.room.labels, predicted)
        if index == 0:
            title = f"{sample.room.name}, trained on"
            print(
                f"picture: {_segmentation.draw_room(sample.room, predicted, title, options.out / 'trained_room.png')}"
            )
    accuracy, mean, each = _segmentation.scores(matrix)
    print(f"trained rooms: point accuracy {accuracy:.2%}, mean IoU {mean:.2%}")
    print(_segmentation.score_table(each))
    sample = held[0]
    predicted = predict(model, sample, device)
    other, other_mean, _ = _segmentation.scores(_segmentation.confusion(sample.room.labels, predicted))
    print(f"{sample.room.name}, not trained on: point accuracy {other:.2%}, mean IoU {other_mean:.2%}")
    title = f"{sample.room.name}, not trained on"
    print(f"picture: {_segmentation.draw_room(sample.room, predicted, title, options.out / 'other_room.png')}")
    curve = trainer.curve
    path = _segmentation.plot_curve(curve.loss, curve.accuracy, "MinkUNet", options.out / "curve.png")
    print(f"plot: {path}\ncheckpoint: {checkpoint}")
    return accuracy


if __name__ == "__main__":
    main(sys.argv[1:])

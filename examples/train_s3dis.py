"""Train a MinkUNet to label the points of rooms.

    python examples/train_s3dis.py --size tiny               one generated room, by heart
    python examples/train_s3dis.py                           twelve generated rooms, which need no download
    python examples/train_s3dis.py --root DIR                S3DIS: learn Area_3/hallway_3 by heart, to 97 % and more
    python examples/train_s3dis.py --root DIR --split train  all rooms of areas 1 to 4 and 6 that are there

The second and the third line are the full setting, for a GPU. DIR holds the annotations as the owner lays them out:
`Area_<k>/<room>/Annotations/<class>_<number>.txt`. Nothing is downloaded. The model is that of Choy, Gwak, Savarese, 4D
Spatio-Temporal ConvNets (CVPR 2019); each of its convolutions is one statement.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

# The examples are scripts side by side, no package.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _peers
import _segmentation
import _training

from insum_nn.datasets.rooms import CLASSES, Room
from insum_nn.datasets.s3dis import S3DIS, VoxelBatch, VoxelSample, collate, voxel_sample
from insum_nn.datasets.synthetic_rooms import SyntheticRooms
from insum_nn.layers.voxel.conv import SparseConvolution
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor
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


TINY = Settings(0.1, planes=(16, 16, 32, 32, 32, 32, 16, 16), init_dim=16, epochs=100, batch_size=1, learning_rate=1e-2)

# Layers are compared with dense ones on voxels at least this large, so that the dense grids fit.
COMPARED_AT = 0.1


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


@dataclass(frozen=True)
class Source:
    """Where rooms come from: S3DIS, or a generator.

    Attributes:
        root: folder of S3DIS; `None`: rooms are generated.
        split: all rooms of a split of S3DIS, in place of `rooms`.
        rooms: names of rooms of S3DIS.
        generated: how many rooms to generate.
        points: points of a generated room.
    """

    root: Path | None = None
    split: Literal["train", "val"] | None = None
    rooms: tuple[str, ...] = HALLWAY
    generated: int = 12
    points: int = 120_000

    @property
    def several(self) -> bool:
        """Whether there is more to learn than one room by heart."""
        if self.root is None:
            return self.generated > 1
        return self.split is not None or len(self.rooms) > 1

    def load(self, voxel_size: float) -> tuple[Rooms, Rooms]:
        """Rooms to train on, and one to look at that was not trained on."""
        if self.root is None:
            made: dict[str, Any] = {"num_points": self.points, "voxel_size": voxel_size}
            return SyntheticRooms(self.generated, **made), SyntheticRooms(1, first_seed=1000, **made)
        rooms = None if self.split else self.rooms
        found = S3DIS(self.root, split=self.split, rooms=rooms, voxel_size=voxel_size)
        return found, S3DIS(self.root, split="val", voxel_size=voxel_size)


TINY_SOURCE = Source(generated=1, points=20_000)


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

    def epoch(self, batches: Iterable[VoxelBatch]) -> None:
        """One pass over the rooms."""
        self.model.train()
        losses: list[Tensor] = []
        hits, count = 0, 0
        for batch in batches:
            batch = batch.to(self.device)
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

    @property
    def parts(self) -> dict[str, Any]:
        """What has a state that a later run needs to go on."""
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def save(self, path: Path) -> None:
        """Write everything that a later run needs to go on."""
        current = _training.snapshot(self.device, **self.parts)
        curve = asdict(self.curve)
        _training.save_checkpoint(path, self.settings, current=current, curve=curve, steps=self.steps)

    def go_on(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was written."""
        if state["steps"] != self.steps:
            raise SystemExit(f"the checkpoint has {state['steps']} steps an epoch, not {self.steps}: other rooms")
        _training.restore(state["current"], self.device, **self.parts)
        self.curve = Curve(**state["curve"])


def load_model(path: Path, device: torch.device) -> tuple[MinkUNet, Settings]:
    """The model of a checkpoint, for prediction."""
    state = _training.read_checkpoint(path)
    settings = Settings(**state["settings"])
    model = make_model(settings)
    model.load_state_dict(state["current"]["model"])
    return model.to(device).eval(), settings


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
    on_epoch: Callable[[Curve], None] | None = None,
) -> Trainer:
    """Train on rooms.

    Args:
        rooms: what to train on.
        settings: how.
        device: where.
        checkpoint: a file written six times on the way, and at the end.
        resume: continue from that file when it is there.
        on_epoch: called after each epoch.

    Returns:
        The trainer, with model and curve.
    """
    data = Turned(rooms, settings.voxel_size) if settings.augment else rooms
    # Rooms that are turned anew are cut into voxels beside the training, where there are cores to do it.
    workers = min(4, (os.cpu_count() or 1) // 4) if settings.augment else 0
    loader: Any = DataLoader(
        data,
        batch_size=settings.batch_size,
        shuffle=True,
        collate_fn=collate,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    trainer = Trainer(settings, device, len(loader))
    state = _training.resumed(checkpoint, settings, resume=resume)
    if state is not None:
        trainer.go_on(state)
    # Without random turns a room is the same each time, so it is cut into voxels once.
    batches: Iterable[VoxelBatch] = list(loader) if not settings.augment and len(loader) == 1 else loader
    for epoch in range(len(trainer.curve.loss), settings.epochs):
        trainer.epoch(batches)
        if on_epoch is not None:
            on_epoch(trainer.curve)
        if (epoch + 1) % max(1, settings.epochs // 6) == 0 or epoch + 1 == settings.epochs:
            trainer.save(checkpoint)
    return trainer


# Showing it.


def beside_peer(model: MinkUNet, room: Room, settings: Settings, device: torch.device) -> _peers.Comparison:
    """The network's convolutions on a room beside the peer's."""
    batch = collate([voxel_sample(room, max(settings.voxel_size, COMPARED_AT))]).to(device)
    peers = {SparseConvolution: _peers.sparse_convolution}
    with torch.no_grad():
        return _peers.compare(model.eval(), peers, lambda: model(sparse(batch)))


def judge(model: MinkUNet, rooms: Iterable[VoxelSample], device: torch.device, what: str) -> float:
    """Print and return the share of points labelled right; print the intersection over union of each class too."""
    matrix = np.zeros((len(CLASSES),) * 2, np.int64)
    best = np.zeros_like(matrix)
    for sample in rooms:
        matrix += _segmentation.confusion(sample.room.labels, predict(model, sample, device))
        best += _segmentation.confusion(sample.room.labels, sample.labels[sample.inverse].numpy())
    accuracy, mean, each = _segmentation.scores(matrix)
    limit = _segmentation.scores(best)[0]
    print(f"{what}: point accuracy {accuracy:.2%} (voxels allow {limit:.2%}), mean IoU {mean:.2%}")
    print(_segmentation.score_table(each))
    return accuracy


def run(
    settings: Settings, device: torch.device, out: Path, *, source: Source, resume: bool = False
) -> _training.Outcome:
    """Train with a progress bar, compare the layers with the peer's, draw.

    Args:
        settings: how to train; several rooms are turned and tinted, one is learned by heart.
        device: where.
        out: folder of pictures and checkpoint.
        source: what to train on.
        resume: continue from the checkpoint in `out`.

    Returns:
        What came out; the score is the share of points of the training rooms that are labelled right.
    """
    settings = replace(settings, augment=source.several)
    rooms, held = source.load(settings.voxel_size)
    first, other = rooms[0], held[0]
    print(f"{len(rooms)} rooms, voxels of {settings.voxel_size} m; {device}")
    print(f"the first: {first.room}, {len(first.indices)} voxels")
    untrained = make_model(settings).to(device)
    before = predict(untrained, first, device), predict(untrained, other, device)
    with _training.progress("MinkUNet", settings.epochs) as bar:

        def show(curve: Curve) -> None:
            bar(len(curve.loss), f"loss {curve.loss[-1]:.3f}, voxels {curve.accuracy[-1]:.1%}")

        trainer = train(rooms, settings, device, checkpoint=out / "minkunet.pt", resume=resume, on_epoch=show)
    model, curve = trainer.model, trainer.curve
    print(f"each convolution is {model.conv0p1s1.expression}")
    accuracy = judge(model, (rooms[i] for i in range(len(rooms))), device, "trained on")
    judge(model, [other], device, f"{other.room.name}, not trained on")
    pictures: list[Path] = []
    for name, sample, early in (("trained_room", first, before[0]), ("other_room", other, before[1])):
        labels = {"before training": early, "after training": predict(model, sample, device)}
        title = f"{sample.room.name}, {'trained on' if sample is first else 'not trained on'}"
        pictures.append(_segmentation.draw_room(sample.room, labels, title, out / f"{name}.png"))
    pictures.append(_segmentation.plot_curve(curve.loss, curve.accuracy, "MinkUNet", out / "curve.png"))
    found = beside_peer(model, first.room, settings, device)
    where = first.room.name if len(rooms) == 1 else f"{len(rooms)} rooms"
    return _training.Outcome(
        model=f"MinkUNet, {where}\nvoxels of {settings.voxel_size} m",
        layers=found.layers,
        peer=_peers.sparse_conv_peer(device),
        difference=found.difference,
        largest=found.largest,
        loss_before=curve.loss[0],
        loss_after=curve.loss[-1],
        accuracy=f"{accuracy:.1%} of points",
        score=accuracy,
        pictures=tuple(pictures),
    )


def main(argv: Sequence[str] | None = None, *, size: str = "full") -> float:
    """Train, print scores, write pictures.

    Args:
        argv: command line arguments; none by default.
        size: "tiny" or "full", unless `argv` says.

    Returns:
        The share of points of the training rooms that are labelled right.
    """
    parser = _training.argument_parser(__doc__, "train_s3dis", size)
    parser.add_argument("--root", type=Path, help="folder of S3DIS; without it rooms are generated")
    parser.add_argument("--split", choices=("train", "val"), help="all rooms of a split, in place of --rooms")
    parser.add_argument("--rooms", nargs="+", default=HALLWAY, metavar="AREA/ROOM", help="default Area_3/hallway_3")
    _training.add_settings(
        parser, Settings(), TINY, epochs="", batch_size="rooms", voxel_size="metres", learning_rate="", seed=""
    )
    options = parser.parse_args(argv or [])
    made = TINY_SOURCE if options.size == "tiny" else Source()
    source = replace(made, root=options.root, split=options.split, rooms=tuple(options.rooms))
    settings = _training.chosen_settings(options, Settings(), TINY)
    device = _training.choose_device(options.device)
    outcome = run(settings, device, options.out, source=source, resume=options.resume)
    outcome.report()
    return outcome.score


if __name__ == "__main__":
    main(sys.argv[1:])

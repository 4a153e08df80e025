"""Tell the eight Tetris pieces apart, two of them mirror images, having seen each in one orientation only.

    python examples/tetris.py                       the full setting: 100 % on turned and mirrored pieces
    python examples/tetris.py --size tiny

The network's layers are convolutions by tensor products; the program prints the statements of one. Nothing is
downloaded. Source: Geiger and Smidt, e3nn: Euclidean Neural Networks (2022), the Tetris example.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from e3nn import o3
from torch import Tensor
from torch.nn import functional

# The examples are scripts side by side, no package.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _peers
import _training

from insum_nn.models.tetris import TETRIS_NAMES, TetrisClassifier, tetris_pieces

# A reflection turns each chiral piece into the other, and leaves the rest what they are.
MIRRORED = torch.tensor([1, 0, 2, 3, 4, 5, 6, 7])


@dataclass(frozen=True)
class Settings:
    """What a run is made of."""

    features: int = 8
    lmax: int = 2
    layers: int = 3
    steps: int = 200
    learning_rate: float = 0.01
    seed: int = 0


TINY = Settings(features=4, steps=60)


@dataclass
class Curve:
    """Loss on the pieces as they are, accuracy on turned ones; a number per step, before it is taken."""

    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)


def random_rotations(count: int, generator: torch.Generator) -> Tensor:
    """Rotations drawn evenly, (count, 3, 3)."""
    angles = 2 * torch.pi * torch.rand(3, count, generator=generator)
    return o3.angles_to_matrix(angles[0], torch.acos(angles[1] / torch.pi - 1), angles[2])


def turned(positions: Tensor, batch: Tensor, generator: torch.Generator) -> Tensor:
    """Each piece in an orientation of its own, at a place of its own."""
    pieces = int(batch.max()) + 1
    rotations = random_rotations(pieces, generator).to(positions)
    shifts = 5 * torch.randn(pieces, 3, generator=generator).to(positions)
    return torch.einsum("nij,nj->ni", rotations[batch], positions) + shifts[batch]


def accuracy(model: TetrisClassifier, positions: Tensor, batch: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return (model(positions, batch, len(labels)).argmax(1) == labels).float().mean().item()


def score(model: TetrisClassifier, device: torch.device) -> float:
    """The accuracy on a hundred turned copies of each piece, half of them mirrored."""
    positions, batch, labels = (t.to(device) for t in tetris_pieces())
    generator = torch.Generator().manual_seed(1)
    found: list[float] = []
    for _ in range(50):
        view = turned(positions, batch, generator)
        found.append(accuracy(model, view, batch, labels))
        found.append(accuracy(model, -view, batch, MIRRORED.to(device)))
    return sum(found) / len(found)


def train(
    settings: Settings,
    device: torch.device,
    *,
    checkpoint: Path | None = None,
    resume: bool = False,
    on_step: Callable[[Curve], None] | None = None,
) -> tuple[TetrisClassifier, Curve]:
    """Train on the eight pieces; the checkpoint is written every quarter of the run."""
    torch.manual_seed(settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    positions, batch, labels = (t.to(device) for t in tetris_pieces())
    model = TetrisClassifier(settings.features, settings.lmax, settings.layers).to(device)
    optimizer = torch.optim.Adam(model.parameters(), settings.learning_rate)
    parts = {"model": model, "optimizer": optimizer, "generator": generator}
    curve = Curve()
    state = _training.resumed(checkpoint, settings, resume=resume, free=("steps",))
    if state is not None:
        _training.restore(state["current"], device, **parts)
        curve = Curve(**state["curve"])
    every = max(1, settings.steps // 4)
    for step in range(len(curve.loss), settings.steps):
        loss = functional.cross_entropy(model(positions, batch, len(labels)), labels)
        curve.accuracy.append(accuracy(model, turned(positions, batch, generator), batch, labels))
        curve.loss.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if on_step is not None:
            on_step(curve)
        if checkpoint is not None and ((step + 1) % every == 0 or step + 1 == settings.steps):
            current = _training.snapshot(device, **parts)
            _training.save_checkpoint(checkpoint, settings, current=current, curve=asdict(curve))
    return model, curve


# Showing it.

_CORNERS = torch.cartesian_prod(*[torch.tensor([-0.5, 0.5])] * 3)
# The six faces of a cube as loops over `_CORNERS`.
_FACES = ((0, 1, 3, 2), (4, 5, 7, 6), (0, 1, 5, 4), (2, 3, 7, 6), (0, 2, 6, 4), (1, 3, 7, 5))
_COLORS = ("#0b6e99", "#d1495b", "#edae49", "#81b29a", "#9b5de5", "#f15bb5", "#00a6d6", "#8d99ae")


def draw(model: TetrisClassifier, curve: Curve, path: Path) -> Path:
    """Draw each piece as it was turned, with what the network says of it, and the curve of the training."""
    device = next(model.parameters()).device
    positions, batch, labels = tetris_pieces()
    rotations = random_rotations(len(labels), torch.Generator().manual_seed(4))
    with torch.no_grad():
        views = torch.einsum("nij,nj->ni", rotations[batch], positions)
        logits = model(views.to(device), batch.to(device), len(labels))
    probability = logits.softmax(1).cpu()
    figure = _training.new_figure(13, 5.6)
    halves: Any = figure.subfigures(1, 2, width_ratios=(8, 5))
    pieces, side = halves
    pieces.suptitle("pieces never seen turned like this: the class, and what the network says")
    for piece in range(len(labels)):
        axes: Any = pieces.add_subplot(2, 4, piece + 1, projection="3d")
        guess = int(probability[piece].argmax())
        right = guess == piece
        said = f"{TETRIS_NAMES[guess]}, {probability[piece, guess]:.1%}"
        axes.set_title(f"{TETRIS_NAMES[piece]}\n{said}", fontsize=10, color="black" if right else _training.RED, y=0.96)
        draw_piece(axes, positions[batch == piece], rotations[piece], _COLORS[piece])
    side.suptitle("training")
    loss, share = side.subplots(2, 1, sharex=True)
    steps = range(len(curve.loss))
    # Below this a loss in float32 is rounding.
    loss.semilogy(steps, [value if value > 1e-8 else math.nan for value in curve.loss], color=_training.BLUE)
    loss.set_ylabel("cross entropy,\npieces as they are")
    share.plot(steps, curve.accuracy, color=_training.RED)
    share.set_ylim(-0.02, 1.05)
    share.set_ylabel("share right,\npieces turned at random")
    share.set_xlabel("step")
    _training.grid(loss, share)
    return _training.save_figure(figure, path, dpi=140)


def draw_piece(axes: Any, cubes: Tensor, rotation: Tensor, color: str) -> None:
    from matplotlib.colors import to_rgb
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection

    # One collection for the whole piece, so that its faces are painted from behind to the front.
    corners = torch.stack([(cube - cubes.mean(0) + _CORNERS) @ rotation.T for cube in cubes])
    faces = corners[:, list(_FACES)].flatten(0, 1)
    normals = 2 * (corners[:, list(_FACES)].mean(2) - corners.mean(1, keepdim=True)).flatten(0, 1)
    light = 0.75 + 0.25 * normals @ torch.tensor([0.2, -0.6, 0.77])
    colors = light[:, None] * torch.tensor(to_rgb(color))
    shown: dict[str, Any] = {"facecolors": colors.numpy(), "edgecolors": "white", "linewidths": 0.7}
    axes.add_collection3d(Poly3DCollection(list(faces.numpy()), **shown))
    for limit in (axes.set_xlim, axes.set_ylim, axes.set_zlim):
        limit(-1.6, 1.6)
    axes.set_box_aspect((1, 1, 1), zoom=1.2)
    axes.set_axis_off()


def run(settings: Settings, device: torch.device, out: Path, *, resume: bool = False) -> _training.Outcome:
    """Train with a progress bar, compare the layers with e3nn's, draw.

    Args:
        settings: what to train.
        device: where.
        out: folder of picture and checkpoint.
        resume: continue from the checkpoint in `out`.

    Returns:
        What came out; the score is the accuracy on turned and mirrored pieces.
    """
    with _training.progress("Tetris", settings.steps) as bar:

        def show(curve: Curve) -> None:
            bar(len(curve.loss), f"loss {curve.loss[-1]:.4f}, turned pieces {curve.accuracy[-1]:.1%}")

        model, curve = train(settings, device, checkpoint=out / "tetris.pt", resume=resume, on_step=show)
    layer: Any = model.layers[1]
    print("a layer's statements:\n  " + layer.convolution.expression.replace("\n", "\n  "))
    positions, batch, labels = (t.to(device) for t in tetris_pieces())
    with torch.no_grad():
        logits = model(positions, batch, len(labels))
        found = _peers.compare(model, _peers.e3nn_peers(), lambda: model(positions, batch, len(labels)))
    share = score(model, device)
    return _training.Outcome(
        model=f"Tetris classifier\nlmax {settings.lmax}",
        layers=found.layers,
        peer=_peers.version("e3nn"),
        difference=found.difference,
        largest=found.largest,
        loss_before=curve.loss[0],
        loss_after=functional.cross_entropy(logits, labels).item(),
        accuracy=f"{share:.1%} of pieces,\nturned and mirrored",
        score=share,
        pictures=(draw(model, curve, out / "tetris.png"),),
    )


def main(argv: Sequence[str] | None = None, *, size: str = "full") -> float:
    """Train, print the accuracies, draw the pieces.

    Args:
        argv: command line arguments; none by default.
        size: "tiny" or "full", unless `argv` says.

    Returns:
        The accuracy on a hundred turned copies of each piece, half of them mirrored.
    """
    parser = _training.argument_parser(__doc__, "tetris", size)
    helps = {"steps": "", "features": "copies of each irrep", "lmax": "highest degree", "learning_rate": "", "seed": ""}
    _training.add_settings(parser, Settings(), TINY, **helps)
    options = parser.parse_args(argv or [])
    settings = _training.chosen_settings(options, Settings(), TINY)
    outcome = run(settings, _training.choose_device(options.device), options.out, resume=options.resume)
    outcome.report()
    return outcome.score


if __name__ == "__main__":
    main(sys.argv[1:])

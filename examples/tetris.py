"""Tell the eight Tetris pieces apart, two of them mirror images, having seen each in one orientation only.

    python examples/tetris.py                       train, test on turned and mirrored pieces, draw them
    python examples/tetris.py --size tiny

The network's layers are convolutions by tensor products; the program prints the statement of one. Source: Geiger and
Smidt, e3nn: Euclidean Neural Networks (2022), the Tetris example.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from e3nn import o3
from torch import Tensor
from torch.nn import functional

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


@dataclass
class Curve:
    """Loss on the pieces as they are, accuracy on turned ones; a number per step."""

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
    curve = Curve()
    if resume and checkpoint is not None and checkpoint.exists():
        state: dict[str, Any] = torch.load(checkpoint, map_location=device, weights_only=True)
        if state["settings"] | {"steps": settings.steps} != asdict(settings):
            raise SystemExit(f"{checkpoint} was written with other settings; leave --resume out")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["generator"].cpu())
        curve = Curve(**state["curve"])
    for step in range(len(curve.loss), settings.steps):
        loss = functional.cross_entropy(model(positions, batch, len(labels)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.loss.append(loss.item())
        curve.accuracy.append(accuracy(model, turned(positions, batch, generator), batch, labels))
        if on_step is not None:
            on_step(curve)
        if checkpoint is not None and (step + 1) % max(1, settings.steps // 4) == 0:
            state = {
                "settings": asdict(settings),
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "generator": generator.get_state(),
                "curve": asdict(curve),
            }
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            partial = checkpoint.with_suffix(".partial")
            torch.save(state, partial)
            partial.replace(checkpoint)
    return model, curve


def difference_to_e3nn(model: TetrisClassifier) -> float:
    """Largest difference between our convolution and e3nn's product of gathered features, added up by hand."""
    layer: Any = model.layers[1]
    conv = layer.convolution
    own = conv.tensor_product
    peer = o3.TensorProduct(
        own.irreps_in1,
        own.irreps_in2,
        own.irreps_out,
        [(*tuple(i)[:5], i.path_weight**2) for i in own.instructions],
        irrep_normalization="none",
        path_normalization="none",
        shared_weights=False,
    )
    generator = torch.Generator().manual_seed(0)
    x, y, w = (
        torch.randn(n, d, generator=generator)
        for n, d in ((20, own._in1_dim), (90, own._in2_dim), (90, own.weight_numel))
    )
    rows, cols = torch.randint(0, 20, (2, 90), generator=generator)
    expected = torch.zeros(20, own.irreps_out.dim).index_add(0, rows, peer(x[cols], y, w))
    device = next(model.parameters()).device
    got = conv(*(t.to(device) for t in (x, y, w, rows, cols)))
    return (got.cpu() - expected).abs().max().item()


def train_with_progress(settings: Settings, device: torch.device, **more: Any) -> tuple[TetrisClassifier, Curve]:
    """`train` under a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("tetris", total=settings.steps)

        def show(curve: Curve) -> None:
            text = f"tetris: loss {curve.loss[-1]:.4f}, turned pieces {curve.accuracy[-1]:.1%}"
            progress.update(task, completed=len(curve.loss), description=text)

        return train(settings, device, on_step=show, **more)


# Showing it.

_CORNERS = torch.cartesian_prod(*[torch.tensor([-0.5, 0.5])] * 3)
# The six faces of a cube as loops over `_CORNERS`.
_FACES = ((0, 1, 3, 2), (4, 5, 7, 6), (0, 1, 5, 4), (2, 3, 7, 6), (0, 2, 6, 4), (1, 3, 7, 5))
_COLORS = ("#0b6e99", "#e07a5f", "#f2cc8f", "#81b29a", "#9b5de5", "#f15bb5", "#00bbf9", "#6c757d")


def draw(model: TetrisClassifier, curve: Curve, path: Path) -> Path:
    """Draw each piece as it was turned, with what the network says of it, and the curve of the training."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection

    device = next(model.parameters()).device
    positions, batch, labels = tetris_pieces()
    rotations = random_rotations(len(labels), torch.Generator().manual_seed(4))
    with torch.no_grad():
        views = torch.einsum("nij,nj->ni", rotations[batch], positions)
        logits = model(views.to(device), batch.to(device), len(labels))
    probability = logits.softmax(1).cpu()
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 6)
    for piece in range(len(labels)):
        axes: Any = figure.add_subplot(grid[piece // 4, piece % 4], projection="3d")
        cubes = positions[batch == piece]
        centre = cubes.mean(0)
        for cube in cubes:
            corners = (cube - centre + _CORNERS) @ rotations[piece].T
            faces = [corners[list(face)].numpy() for face in _FACES]
            axes.add_collection3d(
                Poly3DCollection(faces, facecolor=_COLORS[piece], edgecolor="white", linewidth=0.6, alpha=0.95)
            )
        guess = int(probability[piece].argmax())
        mark = "" if guess == piece else "  (wrong)"
        axes.set_title(
            f"{TETRIS_NAMES[piece]}: {TETRIS_NAMES[guess]} {probability[piece, guess]:.0%}{mark}", fontsize=9
        )
        axes.set_xlim(-1.8, 1.8)
        axes.set_ylim(-1.8, 1.8)
        axes.set_zlim(-1.8, 1.8)
        axes.set_box_aspect((1, 1, 1))
        axes.set_axis_off()
    side = figure.add_subplot(grid[:, 4:])
    steps = range(1, len(curve.loss) + 1)
    side.semilogy(steps, curve.loss, color="#0b6e99", label="cross entropy, pieces as they are")
    side.set_xlabel("step")
    side.set_ylabel("cross entropy", color="#0b6e99")
    other = side.twinx()
    other.plot(steps, curve.accuracy, color="#e07a5f", linewidth=1)
    other.set_ylim(-0.02, 1.05)
    other.set_ylabel("accuracy on turned pieces", color="#e07a5f")
    side.grid(linewidth=0.4, alpha=0.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    return path


def parse(argv: Sequence[str], size: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "full"), default=size, help="tiny: 60 steps of a narrower network")
    parser.add_argument("--steps", type=int, help="default 200, or 60 at size tiny")
    parser.add_argument("--features", type=int, help="default 8, or 4 at size tiny")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("outputs") / "tetris", help="folder of picture and checkpoint")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, *, size: str = "full") -> float:
    """Train, print the accuracies, draw the pieces.

    Args:
        argv: command line arguments; none by default.
        size: "tiny" or "full", unless `argv` says.

    Returns:
        The accuracy on a hundred turned copies of each piece, half of them mirrored.
    """
    options = parse(argv or [], size)
    tiny = options.size == "tiny"
    name = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    settings = Settings(
        features=options.features or (4 if tiny else Settings.features),
        steps=options.steps or (60 if tiny else Settings.steps),
        learning_rate=0.02 if tiny else Settings.learning_rate,
        seed=options.seed,
    )
    model, curve = train_with_progress(settings, device, checkpoint=options.out / "tetris.pt", resume=options.resume)
    layer: Any = model.layers[1]
    print("A layer's statements:\n  " + layer.convolution.expression.replace("\n", "\n  "))
    positions, batch, labels = (t.to(device) for t in tetris_pieces())
    generator = torch.Generator().manual_seed(1)
    scores = []
    for _ in range(50):
        view = turned(positions, batch, generator)
        scores += [accuracy(model, view, batch, labels), accuracy(model, -view, batch, MIRRORED.to(device))]
    score = sum(scores) / len(scores)
    print(f"loss {curve.loss[0]:.3f} before, {curve.loss[-1]:.2e} after {len(curve.loss)} steps")
    print(f"accuracy on turned and mirrored pieces: {score:.2%}")
    print(f"largest difference of a layer to e3nn's: {difference_to_e3nn(model):.1e}")
    print(f"picture: {draw(model, curve, options.out / 'tetris.png')}")
    return score


if __name__ == "__main__":
    main(sys.argv[1:])

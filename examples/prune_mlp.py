"""Prune a network by blocks: accuracy against the share of the weights that is kept.

    python examples/prune_mlp.py

A dense network learns scikit-learn's handwritten digits. Then, for each density, `insum_nn.layers.swap` replaces its
hidden layers by block-sparse ones that keep the heaviest blocks, and these are fine-tuned. Beside it a network that is
sparse from the start, whose blocks move while it learns: the lightest are dropped, and grown where the dense gradient
is largest (Evci et al., Rigging the Lottery, ICML 2020). Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from insum_nn.layers.block_sparse_linear import BlockSparseLinear
from insum_nn.layers.swap import swap
from insum_nn.structure.pruning import cosine_fraction

Way = Literal["dense", "pruned", "from scratch"]


@dataclass(frozen=True)
class Settings:
    """What a run is made of."""

    densities: tuple[float, ...] = (0.5, 0.25, 0.1, 0.05, 0.02)
    hidden: int = 256
    block: int = 16
    epochs: int = 60
    fine_tuning: int = 30
    batch: int = 64
    learning_rate: float = 2e-3
    # Epochs between two moves of blocks, and the share that moves at first.
    rewire_every: int = 3
    rewired: float = 0.3
    seeds: int = 3


@dataclass(frozen=True)
class Digits:
    """The digits: (n, 64) pixels of mean 0 and deviation 1, and labels; 500 are held back for testing."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Result:
    """One trained network: test accuracy before and after training, and the weights its hidden layers store."""

    seed: int
    way: Way
    density: float
    before: float
    after: float
    stored: int


def load_digits(device: torch.device) -> Digits:
    from sklearn.datasets import load_digits as load

    data: Any = load()
    x, y = torch.tensor(data.data, dtype=torch.float32), torch.tensor(data.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = ((x - x.mean()) / x.std())[order].to(device), y[order].to(device)
    return Digits(x[500:], y[500:], x[:500], y[:500])


def make_model(settings: Settings, device: torch.device) -> nn.Sequential:
    width = settings.hidden
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    return nn.Sequential(*layers).to(device)


def sparsify(model: nn.Module, settings: Settings, density: float) -> nn.Module:
    """A copy whose hidden layers keep the heaviest blocks; the last layer, which has ten rows, stays dense."""
    pruned = copy.deepcopy(model)
    how = {"density": density, "block_shape": (settings.block, settings.block)}
    swap(pruned, block_sparse={"0": how, "2": how})
    return pruned


def sparse_layers(model: nn.Module) -> list[BlockSparseLinear]:
    return [module for module in model.modules() if isinstance(module, BlockSparseLinear)]


def stored_weights(model: nn.Module) -> int:
    """Weights of the hidden layers."""
    return sum(p.numel() for name, p in model.named_parameters() if name in ("0.weight", "2.weight"))


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    return (model(digits.test_x).argmax(1) == digits.test_y).float().mean().item()


def train(model: nn.Module, digits: Digits, settings: Settings, epochs: int, *, rewire: bool = False) -> None:
    """Adam on shuffled batches; with `rewire` blocks move in the first three quarters."""
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for epoch in range(epochs):
        # Drawn on the CPU: the same batches on every device.
        for batch in torch.randperm(len(digits.y)).split(settings.batch):
            batch = batch.to(digits.y.device)
            optimizer.zero_grad()
            functional.cross_entropy(model(digits.x[batch]), digits.y[batch]).backward()
            optimizer.step()
        schedule.step()
        if rewire and (epoch + 1) % settings.rewire_every == 0 and epoch < 3 * epochs // 4:
            fraction = cosine_fraction(epoch, 3 * epochs // 4, settings.rewired)
            move_blocks(model, digits, optimizer, fraction)


def move_blocks(model: nn.Module, digits: Digits, optimizer: torch.optim.Optimizer, fraction: float) -> None:
    """Drop the lightest blocks of each layer and grow as many where the gradient of the dense weight is largest."""
    layers = sparse_layers(model)
    optimizer.zero_grad()
    with layers[0].record_gradients() as first, layers[1].record_gradients() as second:
        functional.cross_entropy(model(digits.x), digits.y).backward()
    optimizer.zero_grad()
    for layer, record in zip(layers, (first, second), strict=True):
        layer.rewire(fraction, optimizer, scores=record.scores())


def run_all(
    digits: Digits,
    settings: Settings,
    *,
    checkpoint: Path | None = None,
    resume: bool = False,
    on_result: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Train a dense network per seed, and two sparse ones per seed and density.

    Args:
        digits: the data.
        settings: what to train.
        checkpoint: a file written after each network.
        resume: continue from that file when it is there; the numbers are those of an uninterrupted run.
        on_result: called with each finished network.

    Returns:
        The results, the dense network of each seed first.
    """
    device = digits.x.device
    results: list[Result] = []
    dense_state: dict[str, Tensor] | None = None
    if resume and checkpoint is not None and checkpoint.exists():
        results, dense_state = _load(checkpoint, settings, device)

    def keep(result: Result, model: nn.Module) -> None:
        results.append(result)
        if on_result is not None:
            on_result(result)
        if checkpoint is not None:
            _save(checkpoint, settings, results, model)

    ways: list[tuple[Way, float]] = [("dense", 1.0)]
    for density in settings.densities:
        ways.append(("pruned", density))
        ways.append(("from scratch", density))
    finished = len(results)
    for seed in range(finished // len(ways), settings.seeds):
        # Every network draws from a seed of its own, so that a resumed run draws what the interrupted one would have.
        torch.manual_seed(seed)
        dense = make_model(settings, device)
        if dense_state is not None:
            dense.load_state_dict(dense_state)
        for number, (way, density) in enumerate(ways):
            if seed * len(ways) + number < finished:
                continue
            torch.manual_seed(1000 * seed + number)
            model = dense if way == "dense" else sparsify(dense, settings, density)
            if way == "from scratch":
                model = sparsify(make_model(settings, device), settings, density)
            before = accuracy(model, digits)
            epochs = settings.fine_tuning if way == "pruned" else settings.epochs
            train(model, digits, settings, epochs, rewire=way == "from scratch")
            keep(Result(seed, way, density, before, accuracy(model, digits), stored_weights(model)), dense)
        dense_state = None
    return results


def _load(path: Path, settings: Settings, device: torch.device) -> tuple[list[Result], dict[str, Tensor] | None]:
    """The finished networks, and the weights of the dense one of the last seed."""
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    saved = Settings(**state["settings"])
    if replace(saved, seeds=settings.seeds) != settings:
        raise SystemExit(f"{path} was written with {saved}, not with {settings}; leave --resume out")
    results = [Result(**result) for result in state["results"]]
    each = 1 + 2 * len(settings.densities)
    # Between two seeds there is no dense network to go on with.
    return results[: each * settings.seeds], state["dense"] if len(results) % each else None


def _save(path: Path, settings: Settings, results: Sequence[Result], dense: nn.Module) -> None:
    stored = {"settings": asdict(settings), "results": [asdict(r) for r in results], "dense": dense.state_dict()}
    path.parent.mkdir(parents=True, exist_ok=True)
    # A run that is killed while it writes leaves the file before this one whole.
    partial = path.with_suffix(".partial")
    torch.save(stored, partial)
    partial.replace(path)


# Showing it.


def mean(results: Sequence[Result], way: Way, density: float, which: Literal["before", "after"] = "after") -> float:
    found = [getattr(r, which) for r in results if r.way == way and r.density == density]
    return sum(found) / len(found)


def table(results: Sequence[Result], settings: Settings) -> str:
    """One row per density: mean accuracies, and what is stored."""
    rows: list[tuple[str, ...]] = [("density", "weights", "pruned", "fine-tuned", "sparse from scratch")]
    stored = {r.density: r.stored for r in results}
    rows.append(("1", f"{stored[1.0]:,}", f"{mean(results, 'dense', 1.0):.1%}", "", ""))
    for density in settings.densities:
        numbers = (
            mean(results, "pruned", density, "before"),
            mean(results, "pruned", density),
            mean(results, "from scratch", density),
        )
        rows.append((f"{density:g}", f"{stored[density]:,}", *(f"{x:.1%}" for x in numbers)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(c.rjust(width) for c, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def plot(results: Sequence[Result], settings: Settings, path: Path) -> Path:
    """Draw accuracy by density: the mean over seeds, and each seed as a point."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    dense = mean(results, "dense", 1.0)
    axes.axhline(dense, color="#6c757d", linewidth=1, linestyle="--", label=f"dense ({dense:.1%})")
    curves: list[tuple[str, Way, Literal["before", "after"], str]] = [
        ("heaviest blocks kept", "pruned", "before", "#adb5bd"),
        ("the same, fine-tuned", "pruned", "after", "#0b6e99"),
        ("sparse from scratch, blocks moving", "from scratch", "after", "#d1495b"),
    ]
    for label, way, which, color in curves:
        means = [mean(results, way, density, which) for density in settings.densities]
        axes.plot(settings.densities, means, color=color, label=label)
        own = [r for r in results if r.way == way]
        axes.scatter([r.density for r in own], [getattr(r, which) for r in own], color=color, s=12, alpha=0.6)
    axes.set_xscale("log")
    axes.set_xticks(settings.densities, [f"{density:g}" for density in settings.densities])
    axes.minorticks_off()
    axes.set_xlabel(f"share of the {settings.block} x {settings.block} blocks of the hidden layers that is kept")
    axes.set_ylabel("test accuracy")
    axes.grid(linewidth=0.4, alpha=0.5)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def run_with_progress(digits: Digits, settings: Settings, **more: Any) -> list[Result]:
    """`run_all` under a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        each = 1 + 2 * len(settings.densities)
        task = progress.add_task("dense network", total=settings.seeds * each)

        def show(result: Result) -> None:
            text = f"seed {result.seed}, {result.way}, density {result.density:g}: {result.after:.1%}"
            place = 0 if result.way == "dense" else 1 + 2 * settings.densities.index(result.density)
            done = result.seed * each + place + (result.way == "from scratch") + 1
            progress.update(task, completed=done, description=text)

        return run_all(digits, settings, on_result=show, **more)


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def parse(argv: Sequence[str], size: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "full"), default=size, help="tiny: one seed, two densities")
    parser.add_argument("--densities", type=float, nargs="+", help="default 0.5 0.25 0.1 0.05 0.02")
    parser.add_argument("--hidden", type=int, help="default 256, or 128 at size tiny")
    parser.add_argument("--block", type=int, default=Settings.block, help="rows and columns of a block")
    parser.add_argument("--epochs", type=int, help="default 60, or 10 at size tiny; half of them for fine-tuning")
    parser.add_argument("--seeds", type=int, help="default 3, or 1 at size tiny")
    parser.add_argument("--lr", type=float, default=Settings.learning_rate)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("outputs") / "prune_mlp", help="folder of plot and checkpoint")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, *, size: str = "full") -> float:
    """Train, print a table, draw accuracy against density.

    Args:
        argv: command line arguments; none by default.
        size: "tiny" or "full", unless `argv` says.

    Returns:
        The mean test accuracy after pruning to the largest density and fine-tuning.
    """
    options = parse(argv or [], size)
    tiny = options.size == "tiny"
    epochs = options.epochs or (10 if tiny else Settings.epochs)
    settings = Settings(
        tuple(options.densities or ((0.5, 0.1) if tiny else Settings.densities)),
        options.hidden or (128 if tiny else Settings.hidden),
        options.block,
        epochs,
        max(1, epochs // 2),
        learning_rate=options.lr,
        seeds=options.seeds or (1 if tiny else Settings.seeds),
    )
    digits = load_digits(choose_device(options.device))
    print(f"{len(digits.y)} digits to learn from, {len(digits.test_y)} to test on")
    print(sparsify(make_model(settings, digits.x.device), settings, settings.densities[0]))
    checkpoint = options.out / "checkpoint.pt"
    results = run_with_progress(digits, settings, checkpoint=checkpoint, resume=options.resume)
    print(f"\n{table(results, settings)}\n")
    print(f"accuracy against density: {plot(results, settings, options.out / 'accuracy.png')}")
    return mean(results, "pruned", max(settings.densities))


if __name__ == "__main__":
    main(sys.argv[1:])

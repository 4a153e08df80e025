"""Prune a network by blocks: accuracy against the share of the weights that is kept.

    python examples/prune_mlp.py                    the full setting: five densities, three seeds
    python examples/prune_mlp.py --size tiny

A dense network learns scikit-learn's handwritten digits. Then, for each density, `insum_nn.swap` replaces its hidden
layers by block-sparse ones that keep the heaviest blocks, and these are fine-tuned. Beside it a network that is sparse
from the start, whose blocks move while it learns: the lightest are dropped, and grown where the dense gradient is
largest (Evci et al., Rigging the Lottery, ICML 2020). Nothing is downloaded.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

# The examples are scripts side by side, no package.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _peers
import _training

from insum_nn import swap
from insum_nn.layers.pruned.block_sparse_linear import BlockSparseLinear
from insum_nn.structure.pruning import cosine_fraction

Way = Literal["dense", "pruned", "from scratch"]


@dataclass(frozen=True)
class Settings:
    """What a run is made of."""

    densities: tuple[float, ...] = (0.5, 0.25, 0.1, 0.05, 0.02)
    hidden: int = 256
    block: int = 16
    epochs: int = 60
    batch: int = 64
    learning_rate: float = 2e-3
    # Epochs between two moves of blocks, and the share that moves at first.
    rewire_every: int = 3
    rewired: float = 0.3
    seeds: int = 3

    @property
    def fine_tuning(self) -> int:
        """Epochs after pruning."""
        return max(1, self.epochs // 2)

    @property
    def each(self) -> int:
        """Networks of one seed."""
        return 1 + 2 * len(self.densities)


TINY = Settings(densities=(0.5, 0.2, 0.1), hidden=128, epochs=16, seeds=1)


@dataclass(frozen=True)
class Digits:
    """The digits: (n, 64) pixels of mean 0 and deviation 1, and labels; 500 are held back for testing."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Result:
    """One trained network.

    Attributes:
        seed: what it was drawn from.
        way: how it came to be.
        density: share of the hidden layers' blocks that is kept.
        loss: test cross entropy before and after training.
        accuracy: test accuracy before and after training.
        stored: weights of the hidden layers.
        beside: its block-sparse layers beside dense ones with the same weights.
    """

    seed: int
    way: Way
    density: float
    loss: tuple[float, float]
    accuracy: tuple[float, float]
    stored: int
    beside: _peers.Comparison | None


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
def judge(model: nn.Module, digits: Digits) -> tuple[float, float]:
    """Cross entropy and accuracy on the digits that are held back."""
    scores = model(digits.test_x)
    right = (scores.argmax(1) == digits.test_y).float().mean()
    return functional.cross_entropy(scores, digits.test_y).item(), right.item()


@torch.no_grad()
def beside_dense(model: nn.Module, digits: Digits) -> _peers.Comparison | None:
    """The block-sparse layers beside dense ones with the same weights; `None` where there are none."""
    if not sparse_layers(model):
        return None
    return _peers.compare(model, {BlockSparseLinear: _peers.dense_linear}, lambda: model(digits.test_x))


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
    state = _training.resumed(checkpoint, settings, resume=resume, free=("seeds",))
    if state is not None:
        results = [restored(row) for row in state["results"]][: settings.each * settings.seeds]
        # Between two seeds there is no dense network to go on with.
        dense_state = state["dense"] if len(results) % settings.each else None

    def keep(result: Result, dense: nn.Module) -> None:
        results.append(result)
        if on_result is not None:
            on_result(result)
        if checkpoint is not None:
            rows = [asdict(r) for r in results]
            _training.save_checkpoint(checkpoint, settings, results=rows, dense=dense.state_dict())

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
            before = judge(model, digits)
            epochs = settings.fine_tuning if way == "pruned" else settings.epochs
            train(model, digits, settings, epochs, rewire=way == "from scratch")
            loss, accuracy = zip(before, judge(model, digits), strict=True)
            stored, beside = stored_weights(model), beside_dense(model, digits)
            keep(Result(seed, way, density, loss, accuracy, stored, beside), dense)
        dense_state = None
    return results


def restored(row: dict[str, Any]) -> Result:
    """A result of a checkpoint."""
    beside = None if row["beside"] is None else _peers.Comparison(**row["beside"])
    values: dict[str, Any] = {**row, "beside": beside}
    return Result(**values)


# Showing it.


def mean(results: Sequence[Result], way: Way, density: float, what: str = "accuracy", *, before: bool = False) -> float:
    """Over the seeds, the accuracy or the loss of networks that came to be in one way, before or after training."""
    found = [getattr(r, what)[0 if before else 1] for r in results if r.way == way and r.density == density]
    return sum(found) / len(found)


def table(results: Sequence[Result], settings: Settings) -> str:
    """One row per density: mean accuracies, and what is stored."""
    rows: list[tuple[str, ...]] = [("density", "weights", "pruned", "fine-tuned", "sparse from scratch")]
    stored = {r.density: r.stored for r in results}
    rows.append(("1", f"{stored[1.0]:,}", f"{mean(results, 'dense', 1.0):.1%}", "", ""))
    for density in settings.densities:
        numbers = (
            mean(results, "pruned", density, before=True),
            mean(results, "pruned", density),
            mean(results, "from scratch", density),
        )
        rows.append((f"{density:g}", f"{stored[density]:,}", *(f"{x:.1%}" for x in numbers)))
    return _training.table(rows, right=range(5))


def plot(results: Sequence[Result], settings: Settings, path: Path) -> Path:
    """Draw accuracy by density: the mean over seeds, and each seed as a point."""
    figure = _training.new_figure(7, 4.4)
    axes = figure.subplots()
    dense = mean(results, "dense", 1.0)
    axes.axhline(dense, color="black", linewidth=1, linestyle="--", label=f"dense network ({dense:.1%})")
    curves: list[tuple[str, Way, bool, str]] = [
        ("pruned: its heaviest blocks alone", "pruned", True, "#adb5bd"),
        ("pruned and fine-tuned", "pruned", False, _training.BLUE),
        ("sparse from scratch, blocks move", "from scratch", False, _training.RED),
    ]
    for label, way, before, color in curves:
        means = [mean(results, way, density, before=before) for density in settings.densities]
        axes.plot(settings.densities, means, color=color, label=label, marker="o", markersize=4)
        own = [r for r in results if r.way == way]
        if settings.seeds > 1:
            values = [r.accuracy[0 if before else 1] for r in own]
            axes.scatter([r.density for r in own], values, color=color, s=10, alpha=0.4)
    axes.set_xscale("log")
    axes.set_xticks(settings.densities, [f"{density:.0%}" for density in settings.densities])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel(f"blocks of {settings.block} x {settings.block} that the hidden layers keep")
    axes.set_ylabel("test digits labelled right")
    seeds = f"mean of {settings.seeds} seeds; small dots: each" if settings.seeds > 1 else "one seed"
    axes.set_title(f"scikit-learn's digits, network of 64-{settings.hidden}-{settings.hidden}-10, {seeds}", fontsize=10)
    _training.grid(axes)
    axes.legend(frameon=False, loc="lower right")
    return _training.save_figure(figure, path)


def run(settings: Settings, device: torch.device, out: Path, *, resume: bool = False) -> _training.Outcome:
    """Train with a progress bar, compare the layers with dense ones, draw.

    Args:
        settings: what to train.
        device: where.
        out: folder of picture and checkpoint.
        resume: continue from the checkpoint in `out`.

    Returns:
        What came out; losses and score are those of the networks pruned to the largest density, before and after
        fine-tuning.
    """
    digits = load_digits(device)
    print(f"{len(digits.y)} digits to learn from, {len(digits.test_y)} to test on; {device}")
    print(sparsify(make_model(settings, device), settings, settings.densities[0]))
    with _training.progress("digits", settings.seeds * settings.each) as bar:

        def show(result: Result) -> None:
            place = 0 if result.way == "dense" else 1 + 2 * settings.densities.index(result.density)
            done = result.seed * settings.each + place + (result.way == "from scratch") + 1
            bar(done, f"seed {result.seed}, {result.way}, {result.density:.0%}: {result.accuracy[1]:.1%}")

        checkpoint = out / "checkpoint.pt"
        results = run_all(digits, settings, checkpoint=checkpoint, resume=resume, on_result=show)
    print(f"\n{table(results, settings)}\n")
    most = max(settings.densities)
    compared = [r.beside for r in results if r.beside is not None]
    worst = max(compared, key=lambda c: c.difference)
    share, dense = mean(results, "pruned", most), mean(results, "dense", 1.0)
    return _training.Outcome(
        model=f"MLP, digits, {most:.0%} of blocks\n64-{settings.hidden}-{settings.hidden}-10",
        layers=worst.layers,
        peer="nn.Linear\nwith the masked weight",
        difference=worst.difference,
        largest=worst.largest,
        loss_before=mean(results, "pruned", most, "loss", before=True),
        loss_after=mean(results, "pruned", most, "loss"),
        accuracy=f"{share:.1%} of test digits\n(dense {dense:.1%})",
        score=share,
        pictures=(plot(results, settings, out / "accuracy.png"),),
    )


def main(argv: Sequence[str] | None = None, *, size: str = "full") -> float:
    """Train, print a table, draw accuracy against density.

    Args:
        argv: command line arguments; none by default.
        size: "tiny" or "full", unless `argv` says.

    Returns:
        The mean test accuracy after pruning to the largest density and fine-tuning.
    """
    parser = _training.argument_parser(__doc__, "prune_mlp", size)
    _training.add_settings(
        parser,
        Settings(),
        TINY,
        densities="shares of the blocks to keep",
        hidden="width of the hidden layers",
        block="rows and columns of a block",
        epochs="half of them for fine-tuning",
        seeds="",
        learning_rate="",
    )
    options = parser.parse_args(argv or [])
    settings = _training.chosen_settings(options, Settings(), TINY)
    outcome = run(settings, _training.choose_device(options.device), options.out, resume=options.resume)
    outcome.report()
    return outcome.score


if __name__ == "__main__":
    main(sys.argv[1:])

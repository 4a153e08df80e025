"""Train a two-layer graph convolutional network whose products are our `spmm`.

    python examples/train_gcn.py                                    KarateClub, which comes with torch_geometric
    python examples/train_gcn.py --dataset Cora --root DIR          the published split, 10 seeds

DIR holds `Cora/raw/ind.cora.*` as torch_geometric lays it out, or the files `ind.cora.*` themselves. Nothing is
downloaded. Source of model and settings: Kipf, Welling, Semi-Supervised Classification with Graph Convolutional
Networks (ICLR 2017).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from insum_nn.formats import GroupCOO, SparseFormat
from insum_nn.ops import spmm

PLANETOID_PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")


@dataclass(frozen=True)
class Settings:
    """What a run is made of; the defaults are the published ones."""

    dataset: str = "KarateClub"
    hidden: int = 16
    dropout: float = 0.5
    learning_rate: float = 0.01
    weight_decay: float = 5e-4
    epochs: int = 200
    seeds: int = 10


@dataclass(frozen=True)
class Graph:
    """A node classification problem; both matrices are built once and used at every step."""

    features: GroupCOO
    adjacency: GroupCOO
    labels: Tensor
    masks: dict[str, Tensor]
    num_classes: int


@dataclass
class Curve:
    """Loss and accuracy of one seed, a number per epoch."""

    train_loss: list[float] = field(default_factory=list)
    val_loss: list[float] = field(default_factory=list)
    train_accuracy: list[float] = field(default_factory=list)
    test_accuracy: list[float] = field(default_factory=list)


class GraphConvolution(nn.Module):
    """`A (X W) + b`: a dense product, then one sparse one.

    `forward` takes X dense or sparse; a sparse X turns the first product into a sparse one too.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor | SparseFormat, adjacency: SparseFormat) -> Tensor:
        projected = spmm(x, self.weight) if isinstance(x, SparseFormat) else x @ self.weight
        return spmm(adjacency, projected) + self.bias


class GCN(nn.Module):
    """Two graph convolutions with dropout before each and a ReLU between."""

    def __init__(self, in_features: int, hidden: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.first = GraphConvolution(in_features, hidden)
        self.second = GraphConvolution(hidden, num_classes)

    def forward(self, x: SparseFormat, adjacency: SparseFormat) -> Tensor:
        # Dropping stored values drops entries of the matrix: the others are zero with or without it.
        x = x.with_values(functional.dropout(x.values, self.dropout, self.training))
        hidden = self.first(x, adjacency).relu()
        return self.second(functional.dropout(hidden, self.dropout, self.training), adjacency)


# Data.


def normalized_adjacency(edge_index: Tensor, num_nodes: int) -> GroupCOO:
    """`D^-1/2 (A + I) D^-1/2`, a row per receiving node."""
    from torch_geometric.nn.conv.gcn_conv import gcn_norm

    norm: Callable[..., Any] = gcn_norm
    edges, weight = norm(edge_index, num_nodes=num_nodes, add_self_loops=True)
    return GroupCOO.from_coo((edges[1], edges[0]), weight, (num_nodes, num_nodes))


def load_graph(dataset: str, root: Path | None = None, device: torch.device | str = "cpu") -> Graph:
    """KarateClub, Cora or CiteSeer with the features of each node scaled to sum to 1."""
    from torch_geometric.datasets import KarateClub, Planetoid

    if dataset == "KarateClub":
        data: Any = KarateClub()[0]
        masks = {"train": data.train_mask, "val": data.train_mask, "test": ~data.train_mask}
    else:
        data = Planetoid(str(planetoid_folder(dataset, root)), dataset)[0]
        masks = {"train": data.train_mask, "val": data.val_mask, "test": data.test_mask}
    x = data.x / data.x.sum(1, keepdim=True).clamp(min=1)
    return Graph(
        features=GroupCOO.from_dense(x).to(device),
        adjacency=normalized_adjacency(data.edge_index, data.num_nodes).to(device),
        labels=data.y.to(device),
        masks={name: mask.nonzero().squeeze(1).to(device) for name, mask in masks.items()},
        num_classes=int(data.y.max()) + 1,
    )


def planetoid_folder(dataset: str, root: Path | None) -> Path:
    """A folder in torch_geometric's layout that may be written to: `root` itself, or a cache of links."""
    if root is None:
        raise SystemExit(f"--dataset {dataset} needs --root: the folder that holds ind.{dataset.lower()}.*")
    names = [f"ind.{dataset.lower()}.{part}" for part in PLANETOID_PARTS]
    nested = root / dataset / "raw"
    source = nested if (nested / names[0]).exists() else root
    missing = [name for name in names if not (source / name).exists()]
    if missing:
        raise SystemExit(f"neither {nested} nor {root} holds all of ind.{dataset.lower()}.*; missing {missing[0]}")
    if source is nested and os.access(root / dataset, os.W_OK):
        return root
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "insum_nn" / "planetoid" / hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:16]
    raw = folder / dataset / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for name in names:
        link = raw / name
        if not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to((source / name).resolve())
    return folder


# Training.


def make_model(graph: Graph, settings: Settings, seed: int) -> tuple[GCN, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = GCN(graph.features.num_cols, settings.hidden, graph.num_classes, settings.dropout)
    model.to(graph.labels.device)
    groups = [
        {"params": model.first.parameters(), "weight_decay": settings.weight_decay},
        {"params": model.second.parameters(), "weight_decay": 0.0},
    ]
    return model, torch.optim.Adam(groups, lr=settings.learning_rate)


def train_epoch(model: GCN, optimizer: torch.optim.Optimizer, graph: Graph) -> float:
    """One step on all training nodes; their loss before it, dropout included."""
    model.train()
    optimizer.zero_grad()
    scores = model(graph.features, graph.adjacency)
    nodes = graph.masks["train"]
    loss = functional.cross_entropy(scores[nodes], graph.labels[nodes])
    loss.backward()
    optimizer.step()
    return loss.item()


def _record(curve: Curve, model: GCN, graph: Graph, loss: float) -> None:
    model.eval()
    with torch.no_grad():
        scores = model(graph.features, graph.adjacency)
    correct = (scores.argmax(1) == graph.labels).float()
    val = graph.masks["val"]
    curve.train_loss.append(loss)
    curve.val_loss.append(functional.cross_entropy(scores[val], graph.labels[val]).item())
    curve.train_accuracy.append(correct[graph.masks["train"]].mean().item())
    curve.test_accuracy.append(correct[graph.masks["test"]].mean().item())


def train(
    graph: Graph,
    settings: Settings,
    *,
    checkpoint: Path | None = None,
    resume: bool = False,
    every: int = 50,
    on_epoch: Callable[[int, Curve], None] | None = None,
) -> list[Curve]:
    """Train every seed from its own start.

    Args:
        graph: the problem.
        settings: what to train.
        checkpoint: a file written every so many epochs and after each seed.
        resume: continue from that file when it is there; the numbers are those of an uninterrupted run.
        every: epochs between two checkpoints.
        on_epoch: called after each epoch with the seed and its curve so far.

    Returns:
        A curve per seed.
    """
    finished: list[Curve] = []
    current: dict[str, Any] | None = None
    if resume and checkpoint is not None and checkpoint.exists():
        finished, current = _load(checkpoint, settings, graph.labels.device)
    for seed in range(len(finished), settings.seeds):
        model, optimizer = make_model(graph, settings, seed)
        curve = Curve() if current is None else _restore(current, model, optimizer)
        current = None
        for epoch in range(len(curve.train_loss), settings.epochs):
            loss = train_epoch(model, optimizer, graph)
            _record(curve, model, graph, loss)
            if on_epoch is not None:
                on_epoch(seed, curve)
            if checkpoint is not None and (epoch + 1) % every == 0:
                _save(checkpoint, settings, finished, _snapshot(model, optimizer, curve))
        finished.append(curve)
        if checkpoint is not None:
            _save(checkpoint, settings, finished, None)
    return finished


def _snapshot(model: GCN, optimizer: torch.optim.Optimizer, curve: Curve) -> dict[str, Any]:
    device = next(model.parameters()).device
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "curve": asdict(curve),
        "random": torch.get_rng_state(),
        "device_random": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def _restore(current: dict[str, Any], model: GCN, optimizer: torch.optim.Optimizer) -> Curve:
    model.load_state_dict(current["model"])
    optimizer.load_state_dict(current["optimizer"])
    torch.set_rng_state(current["random"].cpu())
    device = next(model.parameters()).device
    if current["device_random"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(current["device_random"].cpu(), device)
    return Curve(**current["curve"])


def _load(path: Path, settings: Settings, device: torch.device) -> tuple[list[Curve], dict[str, Any] | None]:
    """The finished seeds, and the snapshot of the one that was interrupted."""
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    saved = Settings(**state["settings"])
    if replace(saved, seeds=settings.seeds) != settings:
        raise SystemExit(f"{path} was written with {saved}, not with {settings}; leave --resume out")
    return [Curve(**curve) for curve in state["finished"]][: settings.seeds], state["current"]


def _save(path: Path, settings: Settings, finished: Sequence[Curve], current: dict[str, Any] | None) -> None:
    state = {"settings": asdict(settings), "finished": [asdict(curve) for curve in finished], "current": current}
    path.parent.mkdir(parents=True, exist_ok=True)
    # A run that is killed while it writes leaves the file before this one whole.
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


# Showing it.


def selected_accuracies(curves: Sequence[Curve]) -> Tensor:
    """Each seed's test accuracy at the epoch of its lowest validation loss."""
    epochs = [min(range(len(curve.val_loss)), key=curve.val_loss.__getitem__) for curve in curves]
    chosen = [curve.test_accuracy[epoch] for curve, epoch in zip(curves, epochs, strict=True)]
    return torch.tensor(chosen, dtype=torch.float64)


def plot(curves: Sequence[Curve], title: str, path: Path) -> Path:
    """Draw loss and accuracy by epoch: the mean over seeds, and the range of all of them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = {"cross entropy": ("train_loss", "val_loss"), "accuracy": ("train_accuracy", "test_accuracy")}
    for axes, (label, names) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for name, color in zip(names, ("#6c757d", "#0b6e99"), strict=True):
            values = torch.tensor([getattr(curve, name) for curve in curves])
            epochs = range(1, values.shape[1] + 1)
            axes.plot(epochs, values.mean(0), color=color, label=name.replace("_", " "))
            axes.fill_between(epochs, values.amin(0), values.amax(0), color=color, alpha=0.2, linewidth=0)
        axes.set_xlabel("epoch")
        axes.set_ylabel(label)
        axes.grid(linewidth=0.4, alpha=0.5)
        axes.legend(frameon=False)
    figure.suptitle(f"{title}, {len(curves)} seed{'s' * (len(curves) != 1)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def train_with_progress(graph: Graph, settings: Settings, **more: Any) -> list[Curve]:
    """`train` under a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task(settings.dataset, total=settings.seeds * settings.epochs)

        def show(seed: int, curve: Curve) -> None:
            text = (
                f"{settings.dataset} seed {seed}: loss {curve.train_loss[-1]:.3f}, test {curve.test_accuracy[-1]:.1%}"
            )
            progress.update(task, completed=seed * settings.epochs + len(curve.train_loss), description=text)

        return train(graph, settings, on_epoch=show, **more)


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def parse(argv: Sequence[str], size: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=("KarateClub", "Cora", "CiteSeer"), default="KarateClub")
    parser.add_argument("--root", type=Path, help="folder of the raw files of Cora and CiteSeer")
    parser.add_argument("--size", choices=("tiny", "full"), default=size, help="tiny: one seed, 30 epochs")
    parser.add_argument("--epochs", type=int, help="default 200, or 30 at size tiny")
    parser.add_argument("--seeds", type=int, help="default 10, or 1 at size tiny")
    parser.add_argument("--hidden", type=int, default=Settings.hidden)
    parser.add_argument("--dropout", type=float, default=Settings.dropout)
    parser.add_argument("--lr", type=float, default=Settings.learning_rate)
    parser.add_argument("--weight-decay", type=float, default=Settings.weight_decay, help="of the first layer")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("outputs") / "train_gcn", help="folder of plot and checkpoint")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, *, size: str = "full") -> float:
    """Train, print the mean test accuracy, write the plot.

    Args:
        argv: command line arguments; none by default.
        size: "tiny" or "full", unless `argv` says.

    Returns:
        The mean over the seeds of the test accuracy at the lowest validation loss.
    """
    options = parse(argv or [], size)
    tiny = options.size == "tiny"
    settings = Settings(
        options.dataset,
        options.hidden,
        options.dropout,
        options.lr,
        options.weight_decay,
        epochs=options.epochs or (30 if tiny else Settings.epochs),
        seeds=options.seeds or (1 if tiny else Settings.seeds),
    )
    graph = load_graph(settings.dataset, options.root, choose_device(options.device))
    print(f"{settings.dataset}: features {graph.features}")
    print(f"{' ' * len(settings.dataset)}  adjacency {graph.adjacency}")
    stem = settings.dataset.lower()
    curves = train_with_progress(
        graph,
        settings,
        checkpoint=options.out / f"{stem}.pt",
        resume=options.resume,
        every=max(1, settings.epochs // 4),
    )
    accuracies = selected_accuracies(curves)
    last = sum(curve.test_accuracy[-1] for curve in curves) / len(curves)
    spread = f", std {accuracies.std():.2%}" if len(curves) > 1 else ""
    print(
        f"{settings.dataset}: test accuracy {accuracies.mean():.2%} at the lowest validation loss "
        f"({len(curves)} seed{'s' * (len(curves) != 1)}{spread}); {last:.2%} after the last epoch"
    )
    print(f"plot: {plot(curves, settings.dataset, options.out / f'{stem}.png')}")
    return accuracies.mean().item()


if __name__ == "__main__":
    main(sys.argv[1:])

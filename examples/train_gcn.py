"""Train a two-layer graph convolutional network: torch_geometric's, its convolutions swapped for ours.

    python examples/train_gcn.py --size tiny                        KarateClub, which comes with torch_geometric
    python examples/train_gcn.py --dataset Cora --root DIR          the published split, 10 seeds
    python examples/train_gcn.py --dataset CiteSeer --root DIR

DIR holds `Cora/raw/ind.cora.*` as torch_geometric lays it out, or the files `ind.cora.*` themselves. Nothing is
downloaded. The last two lines are the full setting; the published accuracies are 81.5 % and 70.3 %.
Source of model and settings: Kipf, Welling, Semi-Supervised Classification with Graph Convolutional Networks (ICLR
2017).
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# The examples are scripts side by side, no package.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _peers
import _training

from insum_nn import swap
from insum_nn.layers.graph.gcn_conv import GCNConv

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


TINY = Settings(epochs=120, seeds=3)


@dataclass(frozen=True)
class Graph:
    """A node classification problem: (n, F) features, (2, e) edges, (n,) labels, and the nodes of each split."""

    features: Tensor
    edge_index: Tensor
    labels: Tensor
    splits: dict[str, Tensor]
    num_classes: int


@dataclass
class Curve:
    """Loss and accuracy of one seed without dropout: before training, then a number per epoch."""

    train_loss: list[float] = field(default_factory=list)
    val_loss: list[float] = field(default_factory=list)
    train_accuracy: list[float] = field(default_factory=list)
    test_accuracy: list[float] = field(default_factory=list)

    @property
    def epochs(self) -> int:
        """Epochs trained."""
        return len(self.val_loss) - 1


class GCN(nn.Module):
    """torch_geometric's GCN with dropout on its input too; `swapped` says which of its layers are ours."""

    def __init__(self, in_features: int, hidden: int, num_classes: int, dropout: float) -> None:
        from torch_geometric.nn import GCN as PeerGCN

        super().__init__()
        self.dropout = dropout
        self.body = PeerGCN(in_features, hidden, num_layers=2, out_channels=num_classes, dropout=dropout)
        self.swapped = swap(self.body).swapped

    @property
    def layers(self) -> list[GCNConv]:
        """The convolutions."""
        return [module for module in self.body.modules() if isinstance(module, GCNConv)]

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.body(functional.dropout(x, self.dropout, self.training), edge_index)


# Data.


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
        features=x.to(device),
        edge_index=data.edge_index.to(device),
        labels=data.y.to(device),
        splits={name: mask.nonzero().squeeze(1).to(device) for name, mask in masks.items()},
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
    model = GCN(graph.features.shape[1], settings.hidden, graph.num_classes, settings.dropout)
    model.to(graph.labels.device)
    first, second = model.layers
    groups = [
        {"params": first.parameters(), "weight_decay": settings.weight_decay},
        {"params": second.parameters(), "weight_decay": 0.0},
    ]
    return model, torch.optim.Adam(groups, lr=settings.learning_rate)


def train_epoch(model: GCN, optimizer: torch.optim.Optimizer, graph: Graph) -> None:
    """One step on all training nodes."""
    model.train()
    optimizer.zero_grad()
    nodes = graph.splits["train"]
    functional.cross_entropy(model(graph.features, graph.edge_index)[nodes], graph.labels[nodes]).backward()
    optimizer.step()


def record(curve: Curve, model: GCN, graph: Graph) -> None:
    model.eval()
    with torch.no_grad():
        scores = model(graph.features, graph.edge_index)
    losses = functional.cross_entropy(scores, graph.labels, reduction="none")
    correct = (scores.argmax(1) == graph.labels).float()
    curve.train_loss.append(losses[graph.splits["train"]].mean().item())
    curve.val_loss.append(losses[graph.splits["val"]].mean().item())
    curve.train_accuracy.append(correct[graph.splits["train"]].mean().item())
    curve.test_accuracy.append(correct[graph.splits["test"]].mean().item())


def train(
    graph: Graph,
    settings: Settings,
    *,
    checkpoint: Path | None = None,
    resume: bool = False,
    on_epoch: Callable[[int, Curve], None] | None = None,
) -> tuple[GCN, list[Curve]]:
    """Train every seed from its own start.

    Args:
        graph: the problem.
        settings: what to train.
        checkpoint: a file written every quarter of a seed's epochs and after each seed.
        resume: continue from that file when it is there; the numbers are those of an uninterrupted run.
        on_epoch: called after each epoch with the seed and its curve so far.

    Returns:
        The network of the last seed, and a curve per seed.
    """
    device = graph.labels.device
    every = max(1, settings.epochs // 4)
    state = _training.resumed(checkpoint, settings, resume=resume, free=("seeds",))
    curves = [] if state is None else [Curve(**curve) for curve in state["finished"]]
    if settings.seeds <= len(curves):
        raise SystemExit(f"there is nothing to train: {len(curves)} of {settings.seeds} seeds are finished")
    while True:
        seed = len(curves)
        model, optimizer = make_model(graph, settings, seed)
        curve = Curve()
        if state is None:
            record(curve, model, graph)
        else:
            _training.restore(state["current"], device, model=model, optimizer=optimizer)
            curve, state = Curve(**state["curve"]), None
        while curve.epochs < settings.epochs:
            train_epoch(model, optimizer, graph)
            record(curve, model, graph)
            if on_epoch is not None:
                on_epoch(seed, curve)
            if checkpoint is not None and (curve.epochs % every == 0 or curve.epochs == settings.epochs):
                current = _training.snapshot(device, model=model, optimizer=optimizer)
                finished = [asdict(c) for c in curves]
                _training.save_checkpoint(checkpoint, settings, finished=finished, current=current, curve=asdict(curve))
        curves.append(curve)
        if len(curves) == settings.seeds:
            return model, curves


# Showing it.


def selected_accuracies(curves: Sequence[Curve]) -> Tensor:
    """Each seed's test accuracy at the epoch of its lowest validation loss."""
    epochs = [min(range(len(curve.val_loss)), key=curve.val_loss.__getitem__) for curve in curves]
    chosen = [curve.test_accuracy[epoch] for curve, epoch in zip(curves, epochs, strict=True)]
    return torch.tensor(chosen, dtype=torch.float64)


def plot(curves: Sequence[Curve], settings: Settings, path: Path) -> Path:
    """Draw loss and accuracy by epoch: the mean over seeds, and the range of all of them."""
    figure = _training.new_figure(9, 3.6)
    loss, accuracy = figure.subplots(1, 2)
    shown = [
        (loss, "train_loss", "training nodes", _training.GREY),
        (loss, "val_loss", "validation nodes", _training.BLUE),
        (accuracy, "train_accuracy", "training nodes", _training.GREY),
        (accuracy, "test_accuracy", "test nodes", _training.BLUE),
    ]
    for axes, name, label, color in shown:
        if name == "val_loss" and settings.dataset == "KarateClub":
            # This graph has no nodes for validation: those trained on stand in.
            continue
        values = torch.tensor([getattr(curve, name) for curve in curves])
        epochs = range(values.shape[1])
        axes.plot(epochs, values.mean(0), color=color, label=label)
        axes.fill_between(epochs, values.amin(0), values.amax(0), color=color, alpha=0.2, linewidth=0)
    loss.set_ylabel("cross entropy, without dropout")
    loss.set_ylim(bottom=0)
    accuracy.set_ylabel("share of nodes labelled right")
    accuracy.set_ylim(0, 1.02)
    for axes in (loss, accuracy):
        axes.set_xlabel("epoch")
        axes.legend(frameon=False)
    _training.grid(loss, accuracy)
    band = "" if len(curves) == 1 else ": mean and range"
    figure.suptitle(f"GCN on {settings.dataset}, {len(curves)} seed{'s' * (len(curves) != 1)}{band}")
    return _training.save_figure(figure, path)


def write_kernel(model: GCN, graph: Graph, path: Path) -> Path:
    """What became of a layer's statement: loop nest, plan, code and a picture as a page, and in short as text."""
    explanation = model.layers[0].explain_statement(graph.features, graph.edge_index)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(explanation.html(), encoding="utf-8")
    path.with_suffix(".txt").write_text(explanation.short(), encoding="utf-8")
    return path


def run(
    settings: Settings, device: torch.device, out: Path, *, root: Path | None = None, resume: bool = False
) -> _training.Outcome:
    """Train with a progress bar, compare the layers with torch_geometric's, draw.

    Args:
        settings: what to train.
        device: where.
        out: folder of pictures and checkpoint.
        root: folder of the raw files, which KarateClub does not need.
        resume: continue from the checkpoint in `out`.

    Returns:
        What came out; the score is the mean test accuracy at the lowest validation loss.
    """
    graph = load_graph(settings.dataset, root, device)
    nodes, features = graph.features.shape
    print(f"{settings.dataset}: {nodes} nodes, {features} features, {graph.edge_index.shape[1]} edges; {device}")
    stem = settings.dataset.lower()
    with _training.progress(settings.dataset, settings.seeds * settings.epochs) as bar:

        def show(seed: int, curve: Curve) -> None:
            text = f"seed {seed}: loss {curve.train_loss[-1]:.3f}, test {curve.test_accuracy[-1]:.1%}"
            bar(seed * settings.epochs + curve.epochs, text)

        checkpoint = out / f"{stem}.pt"
        model, curves = train(graph, settings, checkpoint=checkpoint, resume=resume, on_epoch=show)
    print(f"swapped {', '.join(row.name for row in model.swapped)}: {model.layers[0].expression}")
    with torch.no_grad():
        found = _peers.compare(
            model.eval(), {GCNConv: _peers.pyg_gcn_conv}, lambda: model(graph.features, graph.edge_index)
        )
    accuracies = selected_accuracies(curves)
    last = sum(curve.test_accuracy[-1] for curve in curves) / len(curves)
    spread = f", std {accuracies.std():.2%} over {len(curves)} seeds" if len(curves) > 1 else ""
    print(f"test accuracy {accuracies.mean():.2%} at the lowest validation loss{spread}; {last:.2%} after training")
    return _training.Outcome(
        model=f"GCN, {settings.dataset}\n{features}-{settings.hidden}-{graph.num_classes}",
        layers=found.layers,
        peer=_peers.version("torch_geometric"),
        difference=found.difference,
        largest=found.largest,
        loss_before=sum(curve.val_loss[0] for curve in curves) / len(curves),
        loss_after=sum(curve.val_loss[-1] for curve in curves) / len(curves),
        accuracy=f"{accuracies.mean():.1%} of test nodes",
        score=accuracies.mean().item(),
        pictures=(plot(curves, settings, out / f"{stem}.png"), write_kernel(model, graph, out / "kernel.html")),
    )


def main(argv: Sequence[str] | None = None, *, size: str = "full") -> float:
    """Train, print the mean test accuracy, write the plot.

    Args:
        argv: command line arguments; none by default.
        size: "tiny" or "full", unless `argv` says.

    Returns:
        The mean over the seeds of the test accuracy at the lowest validation loss.
    """
    parser = _training.argument_parser(__doc__, "train_gcn", size)
    parser.add_argument("--dataset", choices=("KarateClub", "Cora", "CiteSeer"), help="default KarateClub")
    parser.add_argument("--root", type=Path, help="folder of the raw files of Cora and CiteSeer")
    _training.add_settings(
        parser,
        Settings(),
        TINY,
        epochs="",
        seeds="",
        hidden="features between the layers",
        dropout="",
        learning_rate="",
        weight_decay="of the first layer",
    )
    options = parser.parse_args(argv or [])
    settings = _training.chosen_settings(options, Settings(), TINY)
    device = _training.choose_device(options.device)
    outcome = run(settings, device, options.out, root=options.root, resume=options.resume)
    outcome.report()
    return outcome.score


if __name__ == "__main__":
    main(sys.argv[1:])

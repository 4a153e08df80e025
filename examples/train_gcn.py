"""Classify the nodes of a graph with a graph convolutional network, written as with torch_geometric.

    python examples/train_gcn.py                                 KarateClub, which comes with torch_geometric
    python examples/train_gcn.py --dataset Cora --root DIR       the published split; the paper has 81.5 %
    python examples/train_gcn.py --dataset CiteSeer --root DIR   the paper has 70.3 %

DIR holds the raw files `ind.cora.*`, or `Cora/raw/ind.cora.*`; nothing is downloaded. Model and settings: Kipf and
Welling, Semi-Supervised Classification with Graph Convolutional Networks (ICLR 2017).
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.nn import functional
from tqdm import tqdm

from insum_nn.datasets import karate_club, planetoid
from insum_nn.layers import GCNConv  # in place of: from torch_geometric.nn import GCNConv


class GCN(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels):
        super().__init__()
        self.conv1 = GCNConv(in_channels, hidden_channels)
        self.conv2 = GCNConv(hidden_channels, out_channels)

    def forward(self, x, edge_index):
        x = functional.dropout(x, p=0.5, training=self.training)
        x = self.conv1(x, edge_index).relu()
        x = functional.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index)


def train(model, data, optimizer):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = functional.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()


@torch.no_grad()
def test(model, data):
    """Losses and accuracies of the training, validation and test nodes."""
    model.eval()
    out = model(data.x, data.edge_index)
    right = (out.argmax(1) == data.y).float()
    masks = (data.train_mask, data.val_mask, data.test_mask)
    losses = [functional.cross_entropy(out[mask], data.y[mask]).item() for mask in masks]
    return losses, [right[mask].mean().item() for mask in masks]


def main(argv=None, *, size="full"):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "full"), default=size, help="tiny: three seeds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("outputs/train_gcn"))
    parser.add_argument("--dataset", choices=("KarateClub", "Cora", "CiteSeer", "PubMed"), default="KarateClub")
    parser.add_argument("--root", type=Path, help="folder of the raw files of Planetoid")
    parser.add_argument("--epochs", type=int, help="200; KarateClub 60: later it overfits its four labels")
    parser.add_argument("--seeds", type=int, help="10; tiny 3")
    args = parser.parse_args(argv)
    seeds = args.seeds or (3 if args.size == "tiny" else 10)
    epochs = args.epochs or (60 if args.dataset == "KarateClub" else 200)
    if args.dataset != "KarateClub" and args.root is None:
        parser.error(f"--dataset {args.dataset} needs --root")
    args.out.mkdir(parents=True, exist_ok=True)

    data = karate_club() if args.dataset == "KarateClub" else planetoid(args.dataset, args.root)
    data = data.to(args.device)
    curves, chosen = [], []
    bar = tqdm(total=seeds * epochs, disable=None)
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = GCN(data.num_features, 16, int(data.y.max()) + 1).to(args.device)
        groups = [{"params": model.conv1.parameters(), "weight_decay": 5e-4}, {"params": model.conv2.parameters()}]
        optimizer = torch.optim.Adam(groups, lr=0.01)
        history = [test(model, data)]
        for _ in range(epochs):
            train(model, data, optimizer)
            history.append(test(model, data))
            bar.update()
        curves.append(history)
        # The test accuracy at the lowest validation loss.
        chosen.append(min(history, key=lambda epoch: epoch[0][1])[1][2])
        bar.set_postfix(seed=seed, test=f"{chosen[-1]:.1%}")
    bar.close()
    accuracy = torch.tensor(chosen)
    print(
        f"{args.dataset}: test accuracy {accuracy.mean():.2%}, standard deviation {accuracy.std():.2%}, {seeds} seeds"
    )
    print(f"a layer's statements, here and in compiled graphs:\n{model.conv1.expression}")

    # (seeds, epochs, loss or accuracy, train or validation or test)
    curves = torch.tensor(curves)
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axes, values, name in zip(panels, curves.unbind(2), ("cross entropy", "accuracy"), strict=True):
        for split, label in ((0, "training nodes"), (2, "test nodes")):
            axes.plot(values[:, :, split].mean(0), label=label)
            low, high = values[:, :, split].amin(0), values[:, :, split].amax(0)
            axes.fill_between(range(values.shape[1]), low, high, alpha=0.2)
        axes.set(xlabel="epoch", ylabel=name, ylim=(0, None))
    panels[0].legend(frameon=False)
    figure.suptitle(f"GCN on {args.dataset}: mean and range of {seeds} seeds")
    figure.savefig(args.out / "train_gcn.png", dpi=80)
    before, after = (f"{curves[:, epoch, 0, 0].mean():.3g}" for epoch in (0, -1))
    return model, (data.x, data.edge_index), before, after, f"{accuracy.mean():.1%} of test nodes"


if __name__ == "__main__":
    main()

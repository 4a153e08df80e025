"""Prune the layers of a network by blocks and fine-tune it: accuracy against the fraction of the blocks that is kept.

    python examples/prune_mlp.py                    five densities, three seeds
    python examples/prune_mlp.py --size tiny

A dense network learns scikit-learn's handwritten digits. For each density `insum_nn.swap` replaces its hidden layers by
`BlockSparseLinear` with the blocks of the largest norm, and these are fine-tuned; for comparison, another is trained
sparse from the start, whose blocks move (Evci et al., Rigging the Lottery, ICML 2020).
"""

import argparse
import copy
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from tqdm import tqdm

from insum_nn import swap
from insum_nn.layers import BlockSparseLinear
from insum_nn.structure.pruning import cosine_fraction


def load_data(device):
    """Pixels and classes: 1,297 digits to train on, 500 to test on."""
    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = ((x - x.mean()) / x.std())[order].float().to(device), y[order].to(device)
    return (x[500:], y[500:]), (x[:500], y[:500])


def make_model(width, device):
    layers = nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    return nn.Sequential(*layers).to(device)


def sparsify(model, density, block):
    """A copy with block-sparse hidden layers; the last layer, which has ten rows, stays dense."""
    settings = {"density": density, "block_shape": (block, block)}
    return swap(copy.deepcopy(model), block_sparse={"0": settings, "2": settings}).model


def train(model, data, epochs, *, move_blocks=False):
    x, y = data
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for epoch in range(epochs):
        for batch in torch.randperm(len(y)).to(y.device).split(64):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        schedule.step()
        if move_blocks and epoch % 3 == 2 and epoch < 3 * epochs // 4:
            rewire(model, data, optimizer, fraction=cosine_fraction(epoch, 3 * epochs // 4))


def rewire(model, data, optimizer, fraction):
    """Drop the blocks of the smallest norm, grow as many where the gradient of the dense weight is largest."""
    first, second = (layer for layer in model if isinstance(layer, BlockSparseLinear))
    with first.record_gradients() as one, second.record_gradients() as two:
        functional.cross_entropy(model(data[0]), data[1]).backward()
    optimizer.zero_grad()
    for layer, record in ((first, one), (second, two)):
        layer.rewire(fraction, optimizer, scores=record.scores())


@torch.no_grad()
def test(model, data):
    """Cross entropy and accuracy."""
    out = model(data[0])
    return functional.cross_entropy(out, data[1]).item(), (out.argmax(1) == data[1]).float().mean().item()


def main(argv=None, *, size="full"):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "full"), default=size)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("outputs/prune_mlp"))
    parser.add_argument("--block", type=int, default=16, help="rows and columns of a block")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    tiny = args.size == "tiny"
    width, epochs, seeds = (128, 16, 1) if tiny else (256, 60, 3)
    densities = (0.1, 0.2, 0.5) if tiny else (0.02, 0.05, 0.1, 0.25, 0.5)

    data, test_data = load_data(args.device)
    names = ("dense", "pruned", "pruned, fine-tuned", "sparse from the start")
    results = torch.zeros(seeds, len(densities), len(names), 2)  # cross entropy and accuracy on the test digits
    for seed, place in tqdm([(seed, place) for seed in range(seeds) for place in range(len(densities))], disable=None):
        torch.manual_seed(1000 * seed)
        if place == 0:
            dense = make_model(width, args.device)
            train(dense, data, epochs)
        pruned = sparsify(dense, densities[place], args.block)
        found = [test(dense, test_data), test(pruned, test_data)]
        train(pruned, data, epochs // 2)
        scratch = sparsify(make_model(width, args.device), densities[place], args.block)
        train(scratch, data, epochs, move_blocks=True)
        results[seed, place] = torch.tensor([*found, test(pruned, test_data), test(scratch, test_data)])
    results = results.mean(0)
    for density, row in zip(densities, results[:, :, 1].tolist(), strict=True):
        print(f"{density:4.0%} of the blocks:", ", ".join(f"{n} {a:.1%}" for n, a in zip(names, row, strict=True)))

    figure, axes = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
    axes.semilogx(densities, results[:, :, 1], marker="o", label=names)
    axes.set_xticks(densities, [f"{density:.0%}" for density in densities])
    axes.set(xlabel=f"blocks of {args.block} x {args.block} that the hidden layers keep", ylabel="test accuracy")
    axes.minorticks_off()
    axes.legend(frameon=False)
    figure.savefig(args.out / "prune_mlp.png", dpi=80)
    (_, (before, _), (after, accuracy), _) = results[-1].tolist()
    result = f"{accuracy:.1%} of digits, {densities[-1]:.0%} of blocks"
    return pruned, (test_data[0],), f"{before:.3g}", f"{after:.2g}", result


if __name__ == "__main__":
    main()

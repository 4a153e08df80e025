"""Classify the eight Tetris pieces in space, two of them mirror images, from one orientation of each.

    python examples/tetris.py                       100 % of pieces that are turned and mirrored at random
    python examples/tetris.py --size tiny           a smaller network, fewer steps; seconds on a CPU

The layers are tensor products along edges, as e3nn's Tetris example has them: Geiger and Smidt, e3nn: Euclidean Neural
Networks (2022). The program prints the statements of one.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from e3nn import o3
from mpl_toolkits.mplot3d.art3d import Poly3DCollection
from torch.nn import functional
from tqdm import trange

from insum_nn.models import TetrisClassifier, tetris_pieces
from insum_nn.models.tetris import TETRIS_NAMES

# A reflection turns each chiral piece into the other, and leaves the rest what they are.
MIRRORED = torch.tensor([1, 0, 2, 3, 4, 5, 6, 7])
CORNERS = torch.cartesian_prod(*[torch.tensor([-0.5, 0.5])] * 3)
FACES = torch.tensor([[0, 1, 3, 2], [4, 5, 7, 6], [0, 1, 5, 4], [2, 3, 7, 6], [0, 2, 6, 4], [1, 3, 7, 5]])


def turned(positions, batch, generator):
    """Each piece in an orientation of its own."""
    angles = 2 * torch.pi * torch.rand(3, 8, generator=generator)
    rotations = o3.angles_to_matrix(angles[0], torch.acos(angles[1] / torch.pi - 1), angles[2]).to(positions)
    return torch.einsum("nij,nj->ni", rotations[batch], positions)


def train(model, positions, batch, labels, optimizer):
    model.train()
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(positions, batch, 8), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model, positions, batch, labels, views):
    """The accuracy on turned pieces, and on their mirror images."""
    model.eval()
    generator, right = torch.Generator().manual_seed(1), 0
    for _ in range(views):
        view = turned(positions, batch, generator)
        right += (model(view, batch, 8).argmax(1) == labels).sum().item()
        right += (model(-view, batch, 8).argmax(1) == MIRRORED.to(labels)).sum().item()
    return right / (16 * views)


@torch.no_grad()
def draw(model, positions, batch, losses, path):
    """The pieces in orientations never seen, with the class that the network gives each, and the training loss."""
    logits = model(turned(positions, batch, torch.Generator().manual_seed(4)), batch, 8)
    probability, guess = logits.softmax(1).cpu().max(1)
    corners = (positions[:, None] + CORNERS.to(positions)).flatten(0, 1)
    corners = turned(corners, batch.repeat_interleave(8), torch.Generator().manual_seed(4)).cpu().reshape(8, 4, 8, 3)
    figure = plt.figure(figsize=(9, 5), layout="constrained")
    pieces, curve = figure.subfigures(1, 2, width_ratios=(2.5, 1))
    for piece in range(8):
        axes = pieces.add_subplot(2, 4, piece + 1, projection="3d")
        cubes = corners[piece] - corners[piece].mean((0, 1))
        sides = cubes[:, FACES].flatten(0, 1).numpy()
        axes.add_collection3d(Poly3DCollection(sides, facecolors=f"C{piece}", edgecolors="white", shade=True))
        axes.set(xlim=(-1.6, 1.6), ylim=(-1.6, 1.6), zlim=(-1.6, 1.6))
        axes.set_box_aspect((1, 1, 1), zoom=1.3)
        axes.set_axis_off()
        said = f"{TETRIS_NAMES[guess[piece]]}, {probability[piece]:.1%}"
        axes.set_title(f"{TETRIS_NAMES[piece]}\n{said}", fontsize=9, color="black" if guess[piece] == piece else "red")
    axes = curve.subplots()
    axes.semilogy(losses)
    axes.set(xlabel="step", ylabel="cross entropy of the pieces as they are")
    figure.savefig(path, dpi=80)


def main(argv=None, *, size="full"):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "full"), default=size)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("outputs/tetris"))
    parser.add_argument("--steps", type=int, help="200; tiny 60")
    parser.add_argument("--lmax", type=int, default=2, help="highest degree of features and harmonics")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)

    positions, batch, labels = (tensor.to(args.device) for tensor in tetris_pieces())
    features, steps = (4, 60) if args.size == "tiny" else (8, 200)
    model = TetrisClassifier(features, args.lmax, num_layers=3).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in (bar := trange(args.steps or steps, disable=None)):
        losses.append(train(model, positions, batch, labels, optimizer))
        bar.set_postfix(loss=losses[-1])
    accuracy = test(model, positions, batch, labels, views=50)
    print(f"accuracy {accuracy:.1%} on pieces turned and mirrored at random; a layer's statements:")
    print(model.layers[1].convolution.expression)
    draw(model, positions, batch, losses, args.out / "tetris.png")
    return model, (positions, batch, 8), f"{losses[0]:.3g}", f"{losses[-1]:.2g}", f"{accuracy:.1%} of turned pieces"


if __name__ == "__main__":
    main()

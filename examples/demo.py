"""The shortest tour: train a network built on one indirect einsum, and look at its kernel.

python examples/demo.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

# The examples are scripts side by side, no package.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import train_gcn

from insum_nn.ops import spmm_program

EXPLAIN_LINES = 25


def show_kernel(graph: train_gcn.Graph, folder: Path, width: int) -> Path:
    """Print the head of what became of the layer's product; write the whole as a page with a picture."""
    adjacency = graph.adjacency
    program = spmm_program(adjacency)
    dense = torch.randn(adjacency.num_cols, width, device=adjacency.device)
    explanation = program.explain(tensors={**adjacency.tensors, "B": dense}, out_shape=(adjacency.num_rows, None))
    lines = str(explanation).splitlines()
    print("\n".join(lines[:EXPLAIN_LINES]))
    if len(lines) > EXPLAIN_LINES:
        print(f"... {len(lines) - EXPLAIN_LINES} more lines in the page below")
    page = folder / "kernel.html"
    folder.mkdir(parents=True, exist_ok=True)
    page.write_text(explanation.html(), encoding="utf-8")
    return page


def table(settings: train_gcn.Settings, curves: Sequence[train_gcn.Curve], graph: train_gcn.Graph) -> str:
    """One row per seed: the loss of the first and of the last epoch, and the accuracy on nodes not trained on."""
    accuracies = train_gcn.selected_accuracies(curves)
    model = f"GCN {graph.features.num_cols}-{settings.hidden}-{graph.num_classes}"
    rows = [("model", "seed", "loss before", "loss after", "test accuracy")]
    for seed, (curve, accuracy) in enumerate(zip(curves, accuracies.tolist(), strict=True)):
        rows.append((model, str(seed), f"{curve.val_loss[0]:.3f}", f"{curve.val_loss[-1]:.3f}", f"{accuracy:.1%}"))
    rows.append((model, "mean", "", "", f"{accuracies.mean():.1%}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main(argv: Sequence[str] | None = None, *, size: str = "full") -> float:
    """Train on KarateClub, print kernel and results, write the pictures.

    Args:
        argv: command line arguments; none by default.
        size: "tiny" or "full", unless `argv` says.

    Returns:
        The mean accuracy on the nodes that were not trained on.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "full"), default=size)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("outputs") / "demo")
    options = parser.parse_args(argv or [])

    settings = train_gcn.Settings(seeds=3)
    if options.size == "tiny":
        settings = replace(settings, seeds=1, epochs=20)
    graph = train_gcn.load_graph(settings.dataset, device=train_gcn.choose_device(options.device))
    print(f"A two-layer graph network on {settings.dataset}: {graph.adjacency}")
    print(f"Each layer is A (X W) + b, and A (X W) is one statement: {spmm_program(graph.adjacency).expression}\n")
    curves = train_gcn.train_with_progress(graph, settings)
    print("\nWhat became of the statement:\n")
    page = show_kernel(graph, options.out, settings.hidden)
    picture = train_gcn.plot(curves, settings.dataset, options.out / "training.png")
    print(f"\n{table(settings, curves, graph)}\n")
    print(f"loss and accuracy by epoch: {picture}\nthe statement, its plan and code: {page}")
    return train_gcn.selected_accuracies(curves).mean().item()


if __name__ == "__main__":
    main(sys.argv[1:])

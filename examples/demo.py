"""Train a small network of each kind, and compare each of its layers with the one that it replaces.

    python examples/demo.py                  about a minute on a CPU; what `make demo` runs
    python examples/demo.py --size full      the full size of each example: for a GPU

Layers are compared on the inputs that they receive in the trained network, with the same weights; no data are loaded.
"""

import argparse
import contextlib
import textwrap
import time
from itertools import zip_longest
from pathlib import Path

import prune_mlp
import tetris
import torch
import train_forces
import train_gcn
import train_s3dis

from insum_nn.testing.comparison import compare_layers

# The largest difference in float32 of two orders of a layer's sums, relative to the largest result: some hundred
# roundings of 6e-8 each.
ROUNDING = 1e-5
EXAMPLES = {
    "GCN, KarateClub": train_gcn,
    "MinkUNet, a room": train_s3dis,
    "Tetris classifier": tetris,
    "NequIP, Cu and Au": train_forces,
    "MLP, digits": prune_mlp,
}
HEADER = ("model", "layers", "compared with", "largest difference", "loss before", "loss after", "accuracy")


def run(example, args, device):
    """Train; what the example prints goes to a file in its folder."""
    name = example.__name__
    folder = args.out / name
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with (folder / "report.txt").open("w", encoding="utf-8") as report, contextlib.redirect_stdout(report):
        model, inputs, *numbers = example.main(["--size", args.size, "--device", device, "--out", str(folder)])
    model.eval()
    compared = compare_layers(model, *inputs)
    print(f"{name}.py: {time.perf_counter() - start:.0f} s")
    return model, inputs, compared, numbers


def table(rows):
    """Aligned columns; a cell may have several lines."""
    lines = [line for row in rows for line in zip_longest(*(cell.split("\n") for cell in row), fillvalue="")]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def explain(model, x, edge_index, path):
    """What became of the statement of a GCN's layer: loops, decisions and code as a text; in short the first two."""
    explanation = model.conv1.explain_statement(x, edge_index)
    path.write_text(f"{explanation}\n", encoding="utf-8")
    decisions = "\n".join(f"- {decision}" for decision in explanation.decisions)
    return f"{explanation.loop_nest}\n{decisions}"


def main(argv=None, *, size="tiny"):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "full"), default=size)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("outputs/demo"))
    args = parser.parse_args(argv)

    found = {title: run(example, args, args.device) for title, example in EXAMPLES.items()}
    rows = [HEADER]
    for title, (_, _, compared, numbers) in found.items():
        layers = "\n".join(f"{count} {name}" for name, count in compared.layers.items())
        peers = "\n".join(textwrap.wrap(", ".join(compared.peers), 32))
        rows.append((title, layers, peers, f"{compared.difference:.1e} of {compared.largest:.2g}", *numbers))
    print(f"\n{table(rows)}\n")
    print("largest difference: to the layers compared with, same weights and inputs, float32; of the largest value")
    model, inputs, *_ = found["GCN, KarateClub"]
    page = args.out / "train_gcn" / "kernel.txt"
    short = explain(model, *inputs, page)
    print(f"pictures and reports: {args.out}/*/; {page} shows a layer's statement at every stage, in short:")
    print(textwrap.indent(short, "  "))
    worst = max(compared.relative for _, _, compared, _ in found.values())
    if not worst <= ROUNDING:
        raise SystemExit(f"a layer differs from the one that it replaces by {worst:.1e} of the largest value")


if __name__ == "__main__":
    main()

"""All four layers, each swapped into a network that is trained here, and one table of what came out.

    python examples/demo.py --size tiny             about a minute on a CPU; what `make demo` runs
    python examples/demo.py                         generated data too, at full size: for a GPU

The layers: GCNConv, sparse convolutions, tensor products, BlockSparseLinear. Each is compared with the peer's layer,
with the same weights and on what it saw in the network. Nothing is downloaded.
"""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

# The examples are scripts side by side, no package.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _training
import prune_mlp
import tetris
import torch
import train_forces
import train_gcn
import train_s3dis

# From device and folder, and whether to resume.
Run = Callable[..., _training.Outcome]


def runs(*, tiny: bool) -> dict[str, Run]:
    """The examples that need no data, by name: device and folder -> outcome."""
    if not tiny:
        return {
            "train_gcn": partial(train_gcn.run, train_gcn.Settings()),
            "train_s3dis": partial(train_s3dis.run, train_s3dis.Settings(), source=train_s3dis.Source()),
            "tetris": partial(tetris.run, tetris.Settings()),
            "train_forces": partial(train_forces.run, train_forces.Settings()),
            "prune_mlp": partial(prune_mlp.run, prune_mlp.Settings()),
        }
    return {
        "train_gcn": partial(train_gcn.run, train_gcn.TINY),
        "train_s3dis": partial(train_s3dis.run, train_s3dis.TINY, source=train_s3dis.TINY_SOURCE),
        "tetris": partial(tetris.run, tetris.TINY),
        "train_forces": partial(train_forces.run, train_forces.TINY),
        "prune_mlp": partial(prune_mlp.run, prune_mlp.TINY),
    }


def run_all(chosen: dict[str, Run], device: torch.device, out: Path) -> list[_training.Outcome]:
    """Run examples one after the other; what they print goes to a file beside their pictures."""
    outcomes: list[_training.Outcome] = []
    for name, run in chosen.items():
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        with (folder / "report.txt").open("w", encoding="utf-8") as report, redirect_stdout(report):
            outcome = run(device, folder)
            outcome.report()
        outcomes.append(outcome)
        print(f"{name}.py: {time.perf_counter() - start:.0f} s")
    return outcomes


def main(argv: Sequence[str] | None = None, *, size: str = "full") -> float:
    """Run the examples that need no data, print one table, say where the pictures lie.

    Args:
        argv: command line arguments; none by default.
        size: "tiny" or "full", unless `argv` says.

    Returns:
        The largest difference of a layer to its peer, relative to the largest value that the peer gave.

    Raises:
        SystemExit: a layer differs from its peer by more than rounding in float32.
    """
    parser = _training.argument_parser(__doc__, "demo", size)
    options = parser.parse_args(argv or [])
    device = _training.choose_device(options.device)
    chosen = runs(tiny=options.size == "tiny")
    if options.resume:
        chosen = {name: partial(run, resume=True) for name, run in chosen.items()}
    outcomes = run_all(chosen, device, options.out)
    print(f"\n{_training.outcome_table(outcomes)}\n")
    print("max difference: to the peer's layers, same weights and inputs, float32; of the largest value that they gave")
    for name, outcome in zip(chosen, outcomes, strict=True):
        pictures = ", ".join(picture.name for picture in outcome.pictures)
        print(f"pictures and report: {options.out / name} ({pictures})")
        for page in (picture for picture in outcome.pictures if picture.suffix == ".html"):
            print(f"what {page.name} shows, in short:\n{textwrap.indent(page.with_suffix('.txt').read_text(), '  ')}")
    worst = max(outcome.difference / outcome.largest for outcome in outcomes)
    if not worst <= _training.ROUNDING:
        raise SystemExit(f"a layer differs from its peer by {worst:.1e} of the largest value")
    return worst


if __name__ == "__main__":
    main(sys.argv[1:])

"""Options that several commands of `benchmarks` have."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch

__all__ = ["add_limits", "add_machine", "add_out"]


def add_machine(parser: argparse.ArgumentParser, devices: Sequence[str] | None = None) -> None:
    """Add what is measured on: `--device`, `--size` and `--commit`.

    Args:
        parser: of the command.
        devices: the devices that it takes; any that torch knows without them.
    """
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=devices, default=default, help="cuda where there is a GPU, else cpu")
    parser.add_argument("--size", choices=["tiny", "full"], default="full", help="tiny: seconds on a CPU, for tests")
    parser.add_argument("--commit", help="commit of the files, where they are a copy without history")


def add_limits(parser: argparse.ArgumentParser, *, of: str, providers: str = "", budget: float = math.inf) -> None:
    """Add what bounds a run: `--budget`, `--limit` and `--providers`.

    Args:
        parser: of the command.
        of: what `--limit` is the longest time of.
        providers: default regular expression of providers.
        budget: default seconds of the whole run.
    """
    parser.add_argument("--budget", type=float, default=budget, metavar="SECONDS", help="stop cleanly after so long")
    parser.add_argument("--limit", type=float, default=120.0, metavar="SECONDS", help=f"longest time of {of}")
    parser.add_argument("--providers", default=providers, metavar="REGEX", help="run only these")


def add_out(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add where results go: `--out`, or `--save` for a new file of the history.

    Args:
        parser: of the command.
        required: whether the command needs one of them.
    """
    target = parser.add_mutually_exclusive_group(required=required)
    target.add_argument("--out", type=Path, metavar="FILE", help="the JSON file to write")
    target.add_argument("--save", action="store_true", help="write to benchmarks/results/history and update current")

"""What the examples share: arguments, devices, checkpoints, progress, pictures, and the table at the end."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

S = TypeVar("S")

# Largest difference in float32 of two ways to add up a layer's products, relative to the largest result: some hundred
# roundings of 6e-8 each.
ROUNDING = 1e-5

BLUE, RED, GREY = "#0b6e99", "#d1495b", "#6c757d"

# Settings whose flag is shorter than their name.
_FLAGS = {"learning_rate": "lr"}


# Arguments.


def argument_parser(doc: str | None, name: str, size: str) -> argparse.ArgumentParser:
    """A parser with the arguments that every example takes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "full"), default=size, help="tiny: seconds on a CPU")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1; default a GPU where there is one")
    parser.add_argument("--out", type=Path, default=Path("outputs") / name, help="folder of pictures and checkpoint")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    return parser


def add_settings(parser: argparse.ArgumentParser, full: Any, tiny: Any, **helps: str) -> None:
    """An argument for each named field of a dataclass of settings, with both sizes' defaults in its help."""
    for name, text in helps.items():
        large, small = (_as_typed(getattr(settings, name)) for settings in (full, tiny))
        default = f"default {large}" + (f", or {small} at size tiny" if small != large else "")
        value = getattr(full, name)
        many = isinstance(value, tuple)
        kind: Any = type(value[0] if many else value)
        how: dict[str, Any] = {"dest": name, "type": kind, "metavar": kind.__name__.upper()}
        flag = "--" + _FLAGS.get(name, name).replace("_", "-")
        parser.add_argument(flag, nargs="+" if many else None, help=f"{text}; {default}".lstrip("; "), **how)


def _as_typed(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def chosen_settings(options: argparse.Namespace, full: S, tiny: S) -> S:
    """The settings of the size that was asked for, with what else was given."""
    base: Any = tiny if options.size == "tiny" else full
    given = {field.name: getattr(options, field.name, None) for field in fields(base)}
    changes = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if v is not None}
    return replace(base, **changes)


def choose_device(name: str) -> torch.device:
    """A device by its name; "auto": a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"--device {name}: torch sees no GPU")
    return device


# Checkpoints.


def snapshot(device: torch.device, **parts: Any) -> dict[str, Any]:
    """States of models, optimizers, schedules and generators, and of torch's own generators."""
    state = {
        name: part.get_state() if isinstance(part, torch.Generator) else part.state_dict()
        for name, part in parts.items()
    }
    state["random"] = torch.get_rng_state()
    state["device_random"] = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return state


def restore(state: dict[str, Any], device: torch.device, **parts: Any) -> None:
    """Put a `snapshot` back, so that a resumed run gives the numbers of an unbroken one."""
    for name, part in parts.items():
        if isinstance(part, torch.Generator):
            part.set_state(state[name])
        else:
            part.load_state_dict(state[name])
    torch.set_rng_state(state["random"])
    if state["device_random"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["device_random"], device)


def save_checkpoint(path: Path, settings: Any, **state: Any) -> None:
    """Write a checkpoint; a run that is killed while it writes leaves the file before this one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save({"settings": asdict(settings), **state}, partial)
    partial.replace(path)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint, on the CPU: what takes states in puts them where it is itself."""
    return torch.load(path, map_location="cpu", weights_only=True)


def resumed(path: Path | None, settings: Any, *, resume: bool, free: Sequence[str] = ()) -> dict[str, Any] | None:
    """The checkpoint to go on from, or `None`.

    Args:
        path: where it is, if anywhere.
        settings: those of this run.
        resume: whether to go on at all.
        free: names of settings that may differ.

    Raises:
        SystemExit: it was written with other settings.
    """
    if not resume or path is None or not path.exists():
        return None
    state = read_checkpoint(path)
    old, new = state["settings"], asdict(settings)
    other = [f"{name} {old.get(name)}" for name, value in new.items() if old.get(name) != value and name not in free]
    if other:
        raise SystemExit(f"{path} was written with other settings ({', '.join(other)}); leave --resume out")
    return state


# Progress.


@contextmanager
def progress(name: str, total: int) -> Generator[Callable[[int, str], None]]:
    """A progress bar on stderr; the function given is told how much is done, and what to say of it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=total)
        yield lambda done, text: bar.update(task, completed=done, description=f"{name}: {text}")


# Pictures.


def new_figure(width: float, height: float) -> Figure:
    """A figure of so many inches that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path, dpi: int = 150) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    return path


def grid(*panels: Any) -> None:
    """Thin lines behind curves."""
    for axes in panels:
        axes.grid(linewidth=0.4, alpha=0.5)
        axes.set_axisbelow(True)


# What came out.


@dataclass(frozen=True)
class Outcome:
    """What an example has to show; in the table, texts break where they have line breaks.

    Attributes:
        model: the network and what it learned.
        layers: ours in it, and how many of each.
        peer: what they were compared with.
        difference: largest absolute difference to the peer's layers with the same weights and inputs, in float32.
        largest: largest absolute value that the peer's layers gave.
        loss_before: the loss at the start.
        loss_after: the same loss at the end.
        accuracy: in words, with its unit.
        score: the accuracy as a number.
        pictures: where they lie.
    """

    model: str
    layers: str
    peer: str
    difference: float
    largest: float
    loss_before: float
    loss_after: float
    accuracy: str
    score: float
    pictures: tuple[Path, ...]

    @property
    def compared(self) -> str:
        """The difference, and the size of what was compared."""
        return f"{self.difference:.1e} of {self.largest:.2g}"

    def report(self) -> None:
        """Print it."""
        peer, accuracy = (text.replace("\n", " ") for text in (self.peer, self.accuracy))
        print(f"loss {self.loss_before:.4g} before, {self.loss_after:.4g} after; {accuracy}")
        print(f"largest difference of {self.layers} to {peer}: {self.compared}")
        for picture in self.pictures:
            print(f"picture: {picture}")


def table(rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Rows as aligned columns, two spaces between; those in `right` flush right. Cells may have several lines."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        lines += zip_longest(*(cell.split("\n") for cell in row), fillvalue="")
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = (
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
    return "\n".join(line.rstrip() for line in text)


def outcome_table(outcomes: Sequence[Outcome]) -> str:
    """One row for each example."""
    header = ("model", "layers swapped", "peer", "max difference", "loss before", "after", "accuracy")
    rows = [
        (
            o.model,
            o.layers.replace(", ", "\n"),
            o.peer,
            o.compared,
            f"{o.loss_before:.3g}",
            f"{o.loss_after:.2g}",
            o.accuracy,
        )
        for o in outcomes
    ]
    return table([header, *rows], right=(3, 4, 5))

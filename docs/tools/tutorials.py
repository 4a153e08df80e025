"""Runs a tutorial: its Python blocks in order, in one namespace, as a reader who copies them would.

    python docs/tools/tutorials.py docs/tutorials/train-a-gcn.md                print what each block prints
    python docs/tools/tutorials.py PAGE --size tiny --record FOLDER             also write record.json and the figures

A page says in a comment what its tiny size is: `<!-- tiny: epochs = 2; hidden = 8 -->` replaces the assignments of
these names that stand at the beginning of a line. Figures that a block leaves open are saved after it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Block", "Record", "at_tiny_size", "python_blocks", "run"]

FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TINY = re.compile(r"^<!-- tiny: (.*) -->$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code: the number of lines before it, and its text."""

    line: int
    code: str


@dataclass(frozen=True)
class Record:
    """What a run left: the output and the names of the figures of each block, the time, and where it ran."""

    outputs: list[str]
    figures: list[list[str]]
    seconds: float
    where: str


def python_blocks(text: str) -> list[Block]:
    """The blocks of a page that are fenced as `python`."""
    return [Block(text.count("\n", 0, found.start(1)), found.group(1)) for found in FENCE.finditer(text)]


def at_tiny_size(text: str) -> str:
    r"""The page with the sizes of its `tiny` comment.

    Raises:
        ValueError: there is no such comment, or a name in it is not assigned once.

    >>> print(at_tiny_size("<!-- tiny: n = 2 -->\nn = 100  # many\n"))
    <!-- tiny: n = 2 -->
    n = 2
    <BLANKLINE>
    """
    said = TINY.search(text)
    if said is None:
        raise ValueError("the page has no comment <!-- tiny: name = value; ... -->")
    for assignment in said.group(1).split("; "):
        name = assignment.split(" = ")[0]
        text, count = re.subn(rf"^{name} = .*$", assignment, text, flags=re.MULTILINE)
        if count != 1:
            raise ValueError(f"{name} is assigned {count} times, not once")
    return text


def run(text: str, name: str, folder: Path | None, *, show: bool = False) -> Record:
    """Run the blocks of a page.

    Args:
        text: the page.
        name: what tracebacks and figures are called by.
        folder: where figures go; `None` leaves them.
        show: print what each block printed when it ends.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import torch
    from matplotlib import pyplot

    pyplot.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 110})
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs: list[str] = []
    figures: list[list[str]] = []
    start = time.perf_counter()
    for block in python_blocks(text):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            # Line breaks in front put the page's own line numbers into a traceback.
            exec(compile("\n" * block.line + block.code, name, "exec", dont_inherit=True), names)
        outputs.append(said.getvalue().rstrip())
        if show and outputs[-1]:
            print(outputs[-1], flush=True)
        saved: list[str] = []
        if folder is not None:
            for number in pyplot.get_fignums():
                saved.append(f"{name}-{sum(map(len, figures)) + len(saved) + 1}.png")
                pyplot.figure(number).savefig(folder / saved[-1], bbox_inches="tight")
        figures.append(saved)
        pyplot.close("all")
    device = "CUDA" if torch.cuda.is_available() else "CPU"
    threads = torch.get_num_threads()
    where = f"torch {torch.__version__.partition('+')[0]}, {device}, {threads} thread{'s' if threads > 1 else ''}"
    return Record(outputs, figures, time.perf_counter() - start, where)


def main() -> None:
    """Run one page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--size", choices=("tiny", "full"), default="full")
    parser.add_argument("--record", type=Path, help="folder for record.json and the figures")
    options = parser.parse_args()
    text = options.page.read_text(encoding="utf-8")
    if options.size == "tiny":
        text = at_tiny_size(text)
    if options.record is not None:
        options.record.mkdir(parents=True, exist_ok=True)
    record = run(text, options.page.stem, options.record, show=options.record is None)
    if options.record is not None:
        (options.record / "record.json").write_text(json.dumps(asdict(record)), encoding="utf-8")
    print(f"{options.page.stem}: {record.seconds:.0f} s ({record.where})")


if __name__ == "__main__":
    main()

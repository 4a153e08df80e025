"""Run the Python blocks of Markdown pages: in the tests, and by itself against an installed wheel.

python tests/markdown_blocks.py --installed-in FOLDER README.md
"""

from __future__ import annotations

import argparse
import doctest
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL


class BlockError(AssertionError):
    """A block's output is not what the page shows."""


class Block(NamedTuple):
    """A block fenced as `python`: the number of lines before it, its text, and what its page says that it needs."""

    line: int
    text: str
    needs: str | None = None


def python_blocks(page: Path) -> list[Block]:
    """Return the page's blocks fenced as `python`; the comment `<!-- needs: .. -->` may stand in front of one."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^(?:<!-- needs: (\S+) -->\n)?```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(text.count("\n", 0, match.start(2)), match.group(2), match.group(1)) for match in found]


def run_page(name: str, blocks: Iterable[Block]) -> None:
    """Run blocks in order, in one namespace; those with a `>>>` are compared with the output that they show.

    Raises:
        BlockError: an output differs.
    """
    names: dict[str, object] = {"__name__": "__main__"}
    for line, block, _ in blocks:
        if ">>> " not in block:
            # Line breaks in front put the page's own line numbers into a traceback.
            exec(compile("\n" * line + block, name, "exec", dont_inherit=True), names)
            continue
        test = doctest.DocTestParser().get_doctest(block, names, name, name, line)
        report: list[str] = []
        outcome = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append, clear_globs=False)
        if outcome.failed:
            raise BlockError("".join(report))
        names = test.globs


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Run the Python blocks of Markdown pages.")
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--installed-in", type=Path, required=True, help="folder that insum_nn must be imported from")
    options = parser.parse_args()
    import insum_nn

    assert insum_nn.__file__ is not None
    where = Path(insum_nn.__file__).resolve()
    if not where.is_relative_to(options.installed_in.resolve()):
        print(f"insum_nn was imported from {where}", file=sys.stderr)
        return 1
    pages = [(page, python_blocks(page)) for page in options.pages]
    if not any(blocks for _, blocks in pages):
        print("no page has a Python block", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for page, blocks in pages:
            run_page(page.name, blocks)
    print(f"insum_nn {insum_nn.__version__}: {sum(len(blocks) for _, blocks in pages)} blocks ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())

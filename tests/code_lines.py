"""Lines of code of each folder of the package, and how many it may have. `python -m tests.code_lines` prints them.

A line counts if a token stands on it that is no comment and no docstring.
"""

from __future__ import annotations

import ast
import io
import itertools
import tokenize
from collections.abc import Mapping
from typing import NamedTuple, TypeGuard

from tests.source_tree import PACKAGE, Source, package_modules


class Budget(NamedTuple):
    """How many lines of code a folder may have."""

    lines: int  # at most so many now
    target: int  # where the present rebuilding of the compiler ends


# Folder of insum_nn, or the whole package -> its budget. A budget only falls: whoever deletes code lowers it to what is
# then there, and a feature that needs lines takes them from elsewhere.
BUDGETS: dict[str, Budget] = {
    "compiler": Budget(16405, 13000),
    "ops": Budget(2185, 1800),
    "layers": Budget(4945, 4800),
    "formats": Budget(1870, 2100),
    "structure": Budget(2442, 2700),
    "datasets": Budget(879, 900),
    "models": Budget(648, 700),
    "schedules": Budget(2, 2),
    "testing": Budget(798, 800),
    PACKAGE: Budget(30924, 27500),
}

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """The number of lines of a Python file that hold code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    held = (range(t.start[0], t.end[0] + 1) for t in tokens if t.type not in _NO_CODE)
    documented = (node.body[0] for node in ast.walk(ast.parse(text)) if _has_docstring(node))
    docstrings = (range(string.lineno, (string.end_lineno or 0) + 1) for string in documented)
    return len({*itertools.chain(*held)} - {*itertools.chain(*docstrings)})


def _has_docstring(node: ast.AST) -> TypeGuard[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    return documented and ast.get_docstring(node, clean=False) is not None


def counted(modules: Mapping[str, Source]) -> dict[str, int]:
    """The lines of code of each folder of the package, and of the package with its single files."""
    counts: dict[str, int] = {PACKAGE: 0}
    for source in modules.values():
        lines = code_lines(source.text)
        counts[PACKAGE] += lines
        folder, _, rest = source.name.removeprefix(f"{PACKAGE}/").partition("/")
        if rest:
            counts[folder] = counts.get(folder, 0) + lines
    return counts


def over_budget(counts: Mapping[str, int], budgets: Mapping[str, Budget]) -> list[str]:
    """A line for each folder that has more lines than its budget, or none."""
    return [
        f"{folder} has {count} lines of code, its budget is {budgets[folder].lines}. Budgets only fall: delete "
        "what the change replaces, or take the lines from elsewhere."
        for folder, count in counts.items()
        if folder in budgets and count > budgets[folder].lines
    ]


def main() -> None:
    """Print each folder's lines, budget and target."""
    print(f"{'code lines':12}{'now':>8}{'budget':>8}{'target':>8}")
    counts = counted(package_modules())
    for folder, budget in BUDGETS.items():
        print(f"{folder:12}{counts[folder]:8}{budget.lines:8}{budget.target:8}")


if __name__ == "__main__":
    main()

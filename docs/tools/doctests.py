"""Fences the doctests of docstrings, which Markdown would take for quotations."""

from __future__ import annotations

from typing import Any

import griffe

__all__ = ["FencedDoctests", "fenced"]


def fenced(text: str) -> str:
    r"""The text with a fence around each run of doctest lines; a blank line ends a run.

    >>> print(fenced("Say.\\n\\n>>> 1\\n1\\n"))
    Say.
    <BLANKLINE>
    ```pycon
    >>> 1
    1
    ```
    """
    lines: list[str] = []
    inside = in_fence = False
    for line in text.splitlines():
        in_fence ^= line.lstrip().startswith("```")
        if not inside and not in_fence and line.startswith(">>> "):
            lines.append("```pycon")
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    if inside:
        lines.append("```")
    return "\n".join(lines)


class FencedDoctests(griffe.Extension):
    """Applies `fenced` to every docstring that is loaded."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)

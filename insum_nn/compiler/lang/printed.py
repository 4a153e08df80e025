"""Python printed for one statement or kernel: what every call of it does, without loops over what never changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["function_of_lines"]


def function_of_lines(lines: Sequence[str], names: dict[str, Any], what: str) -> Callable[..., Any]:
    """Return the function that lines of Python define.

    Args:
        lines: its head, and its body without the first level of indentation.
        names: what it reads besides its arguments.
        what: what tracebacks call it.
    """
    head, *body = lines
    exec(compile("\n".join([head, *(f"    {line}" for line in body)]), f"<insum_nn {what}>", "exec"), names)
    return names[head.removeprefix("def ").partition("(")[0]]  # type: ignore[no-any-return]

"""Python printed for one statement or kernel: what every call of it does, without loops over what never changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["Attempt", "Body", "Lists", "Made", "Pool", "Run", "Sizes", "function_of_lines"]

Sizes = tuple[int, ...]
# The tensors of a call.
Pool = Sequence[Tensor]
# The extents, or the output's shape, of each of its statements.
Lists = Sequence[Sizes]
# All its outputs.
Made = tuple[Tensor, ...]
# From these and an initial value of the first output, all outputs.
Body = Callable[[Pool, Lists, Lists, Tensor | None], Made]
# The same, or `None`: something else runs the call.
Attempt = Callable[[Pool, Lists, Lists, Tensor | None], Made | None]
# From the tensors of one statement at sizes that it was made for, and an initial value, its output.
Run = Callable[[Sequence[Tensor], Tensor | None], Tensor]


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

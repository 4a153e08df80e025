"""Decisions of passes with their reasons, stored separately from the graph that the passes made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from insum_nn.compiler.ir.nodes import Expr

__all__ = ["Decision", "Words"]

# Text in which expressions stand, so that a reader meets them in the names of the statement.
Words = str | tuple[str | Expr, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice and its reason."""

    topic: Words
    choice: Words
    reason: Words

    def text(self, show: Callable[[Expr], str]) -> tuple[str, str, str]:
        """Topic, choice and reason, with expressions as `show` writes them."""

        def words(parts: Words) -> str:
            return parts if isinstance(parts, str) else "".join(p if isinstance(p, str) else show(p) for p in parts)

        return words(self.topic), words(self.choice), words(self.reason)

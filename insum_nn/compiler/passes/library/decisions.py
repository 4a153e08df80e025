"""Decisions of passes with their reasons, stored separately from the graph that the passes made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from insum_nn.compiler.ir.nodes import Expr

__all__ = ["Decision", "Phrase"]

# Text in which expressions stand, so that a reader meets them in the names of the statement.
Phrase = str | tuple[str | Expr, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice and its reason."""

    topic: Phrase
    choice: Phrase
    reason: Phrase

    def text(self, show: Callable[[Expr], str]) -> tuple[str, str, str]:
        """Topic, choice and reason, with expressions as `show` writes them."""

        def joined(parts: Phrase) -> str:
            return parts if isinstance(parts, str) else "".join(p if isinstance(p, str) else show(p) for p in parts)

        return joined(self.topic), joined(self.choice), joined(self.reason)

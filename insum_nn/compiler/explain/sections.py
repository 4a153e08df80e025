"""The sections of an explanation, as text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["section", "table"]


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows under a head; without a head, pairs of a term and its value."""
    lines = [head, *rows] if head else list(rows)
    columns = max(map(len, lines), default=0)
    widths = [max((len(row[i]) for row in lines if i < len(row)), default=0) for i in range(columns)]
    padded = ((f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)) for row in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def section(title: str, body: str) -> str:
    """Return a titled part."""
    return "\n".join([title, *(f"  {line}".rstrip() for line in body.split("\n"))])

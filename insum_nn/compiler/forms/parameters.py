"""The parameters of a kernel: what each stands for, and what of the memory layout its text depends on."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Argument", "Strides"]


@dataclass(frozen=True, slots=True)
class Argument:
    """A kernel's parameter: `kind` and what it belongs to (`tensor` pointer, `stride`, `dim`, `extent`, ...)."""

    kind: str
    name: str = ""
    axis: int = -1


@dataclass(frozen=True, slots=True)
class Strides:
    """How tensors lie in memory, as far as a kernel's text depends on it.

    Attributes:
        contiguous: for each tensor of the layout.
        wide: some offset needs 64 bits.
        split: the owner's rows are divided among programs.
        start: how the starting value is addressed; see `start_steps`.
    """

    contiguous: tuple[bool, ...]
    wide: bool = False
    split: bool = False
    start: tuple[str, ...] | None = None

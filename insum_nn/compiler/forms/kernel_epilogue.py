"""How a generated kernel finishes a sum: whether it does, and the strides of the initial value."""

from __future__ import annotations

from torch import Tensor

from insum_nn.compiler.forms.form import Form
from insum_nn.compiler.forms.schedule import Schedule

__all__ = ["finishes", "start_steps"]


def finishes(form: Form, schedule: Schedule) -> bool:
    """Whether a program has all terms of what it stores, so that it may add the start and activate."""
    return form.combine in ("direct", "place", "own") and schedule.splits == 1


def start_steps(start: Tensor | None) -> tuple[str, ...] | None:
    """How a starting value is addressed: `None` as the output is, else per axis a known step, or "" for an argument."""
    if start is None or start.is_contiguous():
        return None
    return tuple(_step(extent, step) for extent, step in zip(start.shape, start.stride(), strict=True))


def _step(extent: int, step: int) -> str:
    return "0" if extent == 1 or step == 0 else "1" if step == 1 else ""

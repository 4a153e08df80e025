"""What is kept of tensors, and how it is forgotten.

Orders, offsets and readings of an index tensor are kept for as long as it lives and its version stays. A write that
torch does not count leaves the version as it is; whoever is asked to read everything again forgets what is kept first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

__all__ = ["forget", "forgets"]

Forget = Callable[[Tensor], None]
_forgetters: list[Forget] = []


def forgets(forgetter: Forget) -> Forget:
    """Register what drops everything that is kept of one tensor."""
    _forgetters.append(forgetter)
    return forgetter


def forget(tensors: Iterable[Tensor]) -> None:
    """Drop everything that is kept of these tensors."""
    for tensor in tensors:
        for forgetter in _forgetters:
            forgetter(tensor)

"""What is kept of tensors, how it is forgotten, and until when it holds.

Orders, offsets and readings of an index tensor are kept for as long as it lives and its version stays. A write that
torch does not count leaves the version as it is; a request to read everything again first forgets what is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from torch import Tensor

__all__ = ["forget", "forgets", "unwritten"]

Forget = Callable[[Tensor], None]
_forgetters: list[Forget] = []
# Versions at which the tensors of builders were first met.
_met: dict[int, tuple[weakref.ref[Tensor], int]] = {}


def forgets(forgetter: Forget) -> Forget:
    """Register what drops everything that is kept of one tensor."""
    _forgetters.append(forgetter)
    return forgetter


def forget(tensors: Iterable[Tensor]) -> None:
    """Drop everything that is kept of these tensors."""
    for tensor in tensors:
        for forgetter in _forgetters:
            forgetter(tensor)


def unwritten(tensor: Tensor) -> bool:
    """Whether a builder's tensor is as it was when this was first asked; of inference tensors nothing is known.

    A builder calls this before it returns its tensors, so that every later write counts.
    """
    if tensor.is_inference():
        return True
    key = id(tensor)
    found = _met.get(key)
    if found is not None and found[0]() is tensor:
        return found[1] == tensor._version

    def gone(ref: weakref.ref[Tensor]) -> None:
        if (kept := _met.get(key)) is not None and kept[0] is ref:
            del _met[key]

    _met[key] = weakref.ref(tensor, gone), tensor._version
    return True

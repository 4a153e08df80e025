"""Facts that somebody claims of index tensors: until when they are believed, and whether they hold.

Builders set facts of tensors that they have just made. Such a fact holds for the version of the tensor at which it is
first met; a write that torch counts ends it. What a caller claims is never believed unread.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from insum_nn.facts import IndexFacts, repeated
from insum_nn.kept import forgets, unwritten

__all__ = ["Origin", "standing", "trusted"]

# Of a builder; of a format whose tensors could not be looked at, since a tracer followed the call; of a caller.
Origin = Literal["builder", "format", "caller"]

# Claims of order that were read.
_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@forgets
def _forget(tensor: Tensor) -> None:
    _read.pop(tensor, None)


def trusted(tensor: Tensor, facts: IndexFacts, origin: Origin) -> bool:
    """Whether facts of a tensor need not be read."""
    if origin == "builder":
        return unwritten(tensor)
    if origin == "format" and facts.proven and tensor.is_cuda:
        # Nothing can be read while a graph is captured; the calls before it have read the same memory.
        return torch.cuda.is_current_stream_capturing()
    return False


def standing(name: str, claim: IndexFacts, named: Mapping[str, Tensor]) -> IndexFacts:
    """A claim without what does not hold of order and uniqueness; ranges are checked where extents are known."""
    if not (claim.sorted or claim.unique or claim.unique_with):
        return claim
    tensor = named[name]
    others = [named[other] for other in claim.unique_with if other in named]
    together = [tensor, *others]
    if any(t.is_inference() for t in together):
        return _held(claim, together)
    key = (claim, tensor._version, *((id(t), t._version) for t in others))
    known: tuple[object, list[weakref.ref[Tensor]], IndexFacts] | None = _read.get(tensor)
    # Another tensor may have taken the place of one that died.
    if known is not None and known[0] == key and all(ref() is t for ref, t in zip(known[1], others, strict=True)):
        return known[2]
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        # Nothing can be read; the check of ranges raises.
        return replace(claim, sorted=False, unique=False, unique_with=())
    found = _held(claim, together)
    _read[tensor] = key, [weakref.ref(t) for t in others], found
    return found


def _held(claim: IndexFacts, together: list[Tensor]) -> IndexFacts:
    flat = together[0].detach().reshape(-1)
    entries = flat[flat != -1]
    ascending = claim.sorted and bool((entries[1:] >= entries[:-1]).all())
    once = claim.unique and entries.unique().numel() == entries.numel()
    pairs = bool(claim.unique_with) and len(together) == 1 + len(claim.unique_with) and repeated(together) is None
    return replace(claim, sorted=ascending, unique=once, unique_with=claim.unique_with if pairs else ())

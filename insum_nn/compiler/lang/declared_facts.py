"""Verify the facts that are declared for index tensors, and decide how long they stay valid.

Builders declare facts of tensors that they have just made. Such a fact is valid for the version of the tensor at which
it is first seen; an in-place write that torch counts invalidates it. Facts that a caller declares are always verified.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from insum_nn.facts import IndexFacts, repeated
from insum_nn.tensor_cache import kept_of, unwritten

__all__ = ["Origin", "is_trusted", "verified"]

# A builder; a format whose tensors could not be read, since the call was traced; a caller.
Origin = Literal["builder", "format", "caller"]


def is_trusted(tensor: Tensor, facts: IndexFacts, origin: Origin) -> bool:
    """Return whether the facts of a tensor need no verification."""
    if origin == "builder":
        return unwritten(tensor)
    if origin == "format" and facts.proven and tensor.is_cuda:
        # Nothing can be read while a CUDA graph is captured; the warm-up calls have read the same memory.
        return torch.cuda.is_current_stream_capturing()
    return False


def verified(name: str, declared: IndexFacts, named: Mapping[str, Tensor]) -> IndexFacts:
    """Return the declared facts without those of order and uniqueness that do not hold.

    Ranges are checked where extents are known.
    """
    if not (declared.sorted or declared.unique or declared.unique_with):
        return declared
    tensor = named[name]
    others = [named[other] for other in declared.unique_with if other in named]
    together = [tensor, *others]
    if any(t.is_inference() for t in together):
        return _holding(declared, together)
    key = (declared, tensor._version, *((id(t), t._version) for t in others))
    kept = kept_of(tensor)
    cached: tuple[object, list[weakref.ref[Tensor]], IndexFacts] | None = kept.verified
    # The identifier of a tensor that was freed may have been reused.
    if cached is not None and cached[0] == key and all(ref() is t for ref, t in zip(cached[1], others, strict=True)):
        return cached[2]
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        # Nothing can be read; the check of ranges raises.
        return replace(declared, sorted=False, unique=False, unique_with=())
    found = _holding(declared, together)
    kept.verified = key, [weakref.ref(t) for t in others], found
    return found


def _holding(declared: IndexFacts, together: list[Tensor]) -> IndexFacts:
    flat = together[0].detach().reshape(-1)
    entries = flat[flat != -1]
    ascending = declared.sorted and bool((entries[1:] >= entries[:-1]).all())
    once = declared.unique and entries.unique().numel() == entries.numel()
    pairs = bool(declared.unique_with) and len(together) == 1 + len(declared.unique_with) and repeated(together) is None
    return replace(declared, sorted=ascending, unique=once, unique_with=declared.unique_with if pairs else ())

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

from insum_nn.errors import plural
from insum_nn.facts import UNKNOWN, IndexFacts, repeated
from insum_nn.tensor_cache import kept_of, unwritten

__all__ = ["Origin", "broken_facts", "is_trusted", "verified"]

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
    if any(t.is_inference() for t in (tensor, *others)):
        return _holding(name, declared, named)
    key = (declared, tensor._version, *((id(t), t._version) for t in others))
    kept = kept_of(tensor)
    cached: tuple[object, list[weakref.ref[Tensor]], IndexFacts] | None = kept.verified
    # The identifier of a tensor that was freed may have been reused.
    if cached is not None and cached[0] == key and all(ref() is t for ref, t in zip(cached[1], others, strict=True)):
        return cached[2]
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        # Nothing can be read; the check of ranges raises.
        return replace(declared, sorted=False, unique=False, unique_with=())
    found = _holding(name, declared, named)
    kept.verified = key, [weakref.ref(t) for t in others], found
    return found


def broken_facts(name: str, declared: IndexFacts, named: Mapping[str, Tensor]) -> dict[str, str]:
    """Return which declared facts of a tensor do not hold, each with the reason."""
    flat = named[name].detach().reshape(-1)
    entries = flat[flat != -1]
    broken: dict[str, str] = {}
    if declared.masked is False and len(entries) != len(flat):
        first, count = int((flat == -1).nonzero()[0]), plural(len(flat) - len(entries), "entry")
        broken["masked"] = f"masked=False, but it holds {count} of -1, the first at position {first}"
    if declared.sorted:
        down = (entries[1:] < entries[:-1]).nonzero()
        if len(down):
            before, after = int(entries[down[0]]), int(entries[down[0] + 1])
            at = int((flat != -1).nonzero()[int(down[0]) + 1])
            broken["sorted"] = f"sorted, but {after} at position {at} follows {before}"
    if declared.unique:
        values, counts = entries.unique(return_counts=True)
        twice = values[counts > 1]
        if len(twice):
            broken["unique"] = f"unique, but {int(twice[0])} occurs more than once"
    if declared.unique_with and all(other in named for other in declared.unique_with):
        twice = repeated([named[name], *(named[other] for other in declared.unique_with)])
        if twice is not None:
            with_others = ", ".join(declared.unique_with)
            broken["unique_with"] = f"unique with {with_others}, but {twice} occurs more than once"
    return broken


def _holding(name: str, declared: IndexFacts, named: Mapping[str, Tensor]) -> IndexFacts:
    broken = {*broken_facts(name, replace(declared, masked=None), named)}
    if not all(other in named for other in declared.unique_with):
        broken.add("unique_with")
    return replace(declared, **{field: getattr(UNKNOWN, field) for field in broken})

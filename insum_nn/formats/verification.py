"""When the facts of a format hold: what was read of its index tensors, and at which versions of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from insum_nn.errors import InsumBackendError
from insum_nn.facts import UNKNOWN, IndexFacts
from insum_nn.formats import checks
from insum_nn.formats.checks import Fault
from insum_nn.tensor_cache import forget

__all__ = ["IndexPart", "Verifiable", "Verified", "versions_of"]

_PLAIN = (Tensor, torch.nn.Parameter)


class IndexPart(NamedTuple):
    """One index tensor of a format.

    Attributes:
        name: its name in expressions, `"Col"`.
        field: where it is found on the format, `"col"`.
        tensor: int32 or int64.
        axes: a letter per axis, `"gq"`.
        dim: the dimension of `grid_shape` that it selects along.
    """

    name: str
    field: str
    tensor: Tensor
    axes: str
    dim: int

    @property
    def padded(self) -> bool:
        """Whether the format allows -1 ("unused slot") in it: it has an axis of slots."""
        return "q" in self.axes


class Verified(NamedTuple):
    """What holds of a structure's index tensors at these versions of them."""

    versions: tuple[int, ...]
    facts: tuple[IndexFacts, ...]
    coalesced: bool


class _Measured(NamedTuple):
    """What one reading tells of an index tensor."""

    smallest: int
    largest: int
    ascending: bool

    @property
    def facts(self) -> IndexFacts:
        """Its facts, given that every entry lies inside or is -1."""
        masked = self.smallest < 0
        return IndexFacts(sorted=self.ascending and not masked, masked=masked, proven=True)


def versions_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the version of each tensor: how often torch counted a write to it."""
    return tuple([tensor._version for tensor in tensors])


def _readable(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors have values to read: no tracer, no transform, no fake tensors."""
    if torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(type(t) in _PLAIN and not t.is_meta and not is_functorch_wrapped_tensor(t) for t in tensors)


def _measure(parts: Sequence[IndexPart]) -> tuple[list[_Measured], bool]:
    """Read the index tensors of a format, which waits for the device once.

    Returns:
        What was read of each, and whether those with unused slots agree about which these are.

    Raises:
        InsumBackendError: a CUDA graph is being captured.
    """
    numbers: list[Tensor] = []
    for part in parts:
        flat = part.tensor.detach().reshape(-1)
        if flat.numel():
            ascending = (flat[1:] >= flat[:-1]).all().long()
            numbers += [*(end.long() for end in torch.aminmax(flat)), ascending]
    padded = [part.tensor.detach() == -1 for part in parts if part.padded]
    numbers += [(padded[0] == other).all().long() for other in padded[1:]]
    if not numbers:
        return [_Measured(0, -1, True)] * len(parts), True
    if numbers[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise InsumBackendError(
            "the index tensors of a format were not read since they were written to, and cannot be read while a CUDA "
            "graph is captured",
            fix="call validate() of the format, or run the operation once, before capturing.",
        )
    read = iter(torch.stack(numbers).tolist())
    found = [
        _Measured(next(read), next(read), bool(next(read))) if part.tensor.numel() else _Measured(0, -1, True)
        for part in parts
    ]
    return found, all(read)


class Verifiable(ABC):
    """Index tensors with facts, which fall when one of the tensors is written to.

    Attributes:
        index_facts: see `SparseFormat`.
        coalesced: see `SparseFormat`.
    """

    shape: tuple[int, ...]
    index_facts: tuple[IndexFacts, ...]
    coalesced: bool

    _index_fields: ClassVar[tuple[str, ...]]
    """The fields that hold index tensors, or tuples of them."""

    _verified: Verified | None
    """Up to which versions of the index tensors the facts hold; `None`: they are a caller's claims."""

    # What a format has.

    @property
    @abstractmethod
    def index_parts(self) -> tuple[IndexPart, ...]:
        """The index tensors with their names, in a fixed order."""

    @abstractmethod
    def _ordered_indices(self) -> tuple[Tensor, ...]:
        """Return indices of the used slots, flattened, in the order of dimensions that `coalesced` speaks of."""

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """The extents that index tensors select along: `shape`, or the grid of blocks."""
        return self.shape

    @property
    def shared(self) -> dict[str, Any]:
        """What operators keep for this structure, by their names: one dictionary for all formats that share it.

        It stays behind when a format is copied or pickled.
        """
        shared = self.__dict__.get("_shared")
        if shared is None:
            shared = {}
            object.__setattr__(self, "_shared", shared)
        return shared

    @property
    def _claims(self) -> tuple[IndexFacts, ...]:
        """Facts of each index tensor, where nothing is known too."""
        return self.index_facts or (UNKNOWN,) * len(self.index_parts)

    def _full(self) -> bool:
        """Return whether the facts say that every slot is used."""
        return self._claims[-1].masked is False

    # When facts hold.

    def _own_versions(self) -> None:
        """Begin with facts that are claims, and with index tensors whose writes torch counts."""
        object.__setattr__(self, "_verified", None)
        if not torch.compiler.is_dynamo_compiling():
            for name in self._index_fields:
                object.__setattr__(self, name, _all_versioned(getattr(self, name)))

    def _guaranteed(self) -> Self:
        """This format, whose builder guarantees its facts: nothing is read before an index tensor is written to."""
        if not torch.compiler.is_dynamo_compiling():
            versions = versions_of(self._index_tensors())
            object.__setattr__(self, "_verified", Verified(versions, self.index_facts, self.coalesced))
        return self

    def _guaranteed_if(self, known: bool) -> Self:
        """Return this format, with guaranteed facts if the format that it is made from has verified ones."""
        return self._guaranteed() if known else self

    def _holds(self) -> bool:
        """Return whether the facts are known to hold of the index tensors as they are now."""
        if torch.compiler.is_dynamo_compiling():
            # The traced program reads the tensors when it runs.
            return True
        verified = self._verified
        return verified is not None and verified.versions == versions_of(self._index_tensors())

    def _verify(self) -> bool:
        """Make the facts hold of the index tensors as they are now, by reading them where that is not known.

        Returns:
            Whether they hold; not where the tensors cannot be read, and were not before.

        Raises:
            InsumError: as `validate`.
        """
        if self._holds():
            return True
        tensors = self._index_tensors()
        known: Verified | None = self.shared.get("verified")
        if known is not None and known.versions == versions_of(tensors):
            self._take(known)
            return True
        if not _readable(tensors):
            return False
        parts, claimed = self.index_parts, self._verified is None
        measured, agreed = _measure(parts)
        inside = all(
            low >= (-1 if part.padded else 0) and high < self.grid_shape[part.dim]
            for part, (low, high, _) in zip(parts, measured, strict=True)
        )
        if not inside or not agreed:
            self._raise(self._index_faults(claims=False) + self._slot_faults())
        if claimed:
            self._raise(self._index_faults(claims=True) + self._order_faults())
        self._keep(measured, claimed=claimed)
        return True

    def _forget(self) -> None:
        """Forget what is kept of the index tensors; facts of tensors that were written to fall."""
        self.shared.clear()
        forget(self._index_tensors())
        if self._verified is not None and not self._holds():
            self._take(Verified((), (), coalesced=False))

    def _keep_measured(self) -> None:
        """Keep that the facts were found to hold."""
        if not self._holds() and _readable(self._index_tensors()):
            self._keep(_measure(self.index_parts)[0], claimed=True)

    def _keep(self, measured: Sequence[_Measured], *, claimed: bool) -> None:
        claims = self._claims if claimed else (UNKNOWN,) * len(measured)
        facts = tuple(
            replace(
                read.facts,
                sorted=claim.sorted or read.facts.sorted,
                unique=claim.unique,
                unique_with=claim.unique_with,
            )
            for claim, read in zip(claims, measured, strict=True)
        )
        verified = Verified(versions_of(self._index_tensors()), facts, claimed and self.coalesced)
        self.shared["verified"] = verified
        self._take(verified)

    def _take(self, verified: Verified) -> None:
        object.__setattr__(self, "_verified", verified)
        object.__setattr__(self, "index_facts", verified.facts)
        object.__setattr__(self, "coalesced", verified.coalesced)

    def _index_tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        for name in self._index_fields:
            value = getattr(self, name)
            found += value if isinstance(value, tuple) else (value,)
        return found

    # Faults.

    def _raise(self, faults: Sequence[Fault]) -> None:
        title = f"{type(self).__name__} of shape {self.shape} breaks its laws"
        checks.raise_faults(title, faults, by_kind=False)

    def _index_faults(self, *, claims: bool) -> list[Fault]:
        """Return entries outside of the axes that they select along; facts that are claimed and do not hold."""
        found: list[Fault | None] = []
        known = self._claims if claims else (UNKNOWN,) * len(self.index_parts)
        named = {part.name: part.tensor for part in self.index_parts}
        for part, facts in zip(self.index_parts, known, strict=True):
            extent = self.grid_shape[part.dim]
            found.append(checks.range_fault(part.field, part.axes, part.tensor, extent, padded=part.padded))
            if facts.masked is False and part.padded:
                found.append(checks.mask_claim_fault(part.field, part.tensor))
            if facts.sorted:
                found.append(checks.sorted_fault(part.field, part.tensor))
            if facts.unique:
                found.append(checks.unique_fault(part.field, part.tensor))
            if facts.unique_with:
                together = [named[name] for name in facts.unique_with if name in named]
                found.append(checks.joint_fault(part.field, facts.unique_with, [part.tensor, *together]))
        return [fault for fault in found if fault is not None]

    def _slot_faults(self) -> list[Fault]:
        """Index tensors that disagree about which slots are unused."""
        padded = [part for part in self.index_parts if part.padded]
        found = [
            checks.unused_where_used_fault(part.field, part.tensor, padded[0].field, padded[0].tensor == -1)
            for part in padded[1:]
        ]
        return [fault for fault in found if fault is not None]

    def _order_faults(self) -> list[Fault]:
        """Return entries out of order, or twice, where none are claimed to be."""
        fault = checks.ascending_fault(self._ordered_indices()) if self.coalesced else None
        return [] if fault is None else [fault]


def _all_versioned(value: object) -> object:
    """Return index tensors whose writes torch counts: themselves, or copies of those made in inference mode."""
    if isinstance(value, tuple):
        return tuple(map(_all_versioned, cast("tuple[object, ...]", value)))
    if not isinstance(value, Tensor) or not value.is_inference():
        return value
    with torch.inference_mode(False):
        return value.clone()

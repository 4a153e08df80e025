"""Faults of a format: how they are found, collected and told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from insum_nn.errors import (
    InsumDeviceError,
    InsumDtypeError,
    InsumError,
    InsumFormatError,
    InsumRangeError,
    InsumShapeError,
)
from insum_nn.facts import repeated

__all__ = [
    "Fault",
    "ascending_fault",
    "at_position",
    "count_of",
    "first_true",
    "joint_fault",
    "mask_claim_fault",
    "raise_faults",
    "range_fault",
    "sorted_fault",
    "unique_fault",
    "unused_value_fault",
    "unused_where_used_fault",
]

Kind = Literal["shape", "dtype", "device", "range", "law"]

_CLASSES: dict[Kind, type[InsumError]] = {
    "shape": InsumShapeError,
    "dtype": InsumDtypeError,
    "device": InsumDeviceError,
    "range": InsumRangeError,
    "law": InsumFormatError,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One broken law of one field."""

    field: str
    kind: Kind
    expected: str
    got: str
    fix: str
    position: tuple[int, ...] | None = None

    @property
    def line(self) -> str:
        """The fault as one line of a message."""
        return f"{self.field}: expected {self.expected}; got {self.got}"


def raise_faults(title: str, faults: Sequence[Fault], *, by_kind: bool) -> None:
    """Raise one error that lists every fault; nothing if there is none.

    Args:
        title: First line of the message.
        faults: What was found, in the order of the fields.
        by_kind: Choose the class by what is wrong (constructors); otherwise only a pure range
            error keeps its own class (`validate`).
    """
    if not faults:
        return
    first = faults[0]
    alike = all(fault.kind == first.kind for fault in faults)
    error = _CLASSES[first.kind] if alike and (by_kind or first.kind == "range") else InsumFormatError
    raise error(
        title,
        details=[fault.line for fault in faults],
        fix=first.fix,
        faults=tuple(faults),
        field=first.field,
        position=first.position,
        expected=first.expected,
        got=first.got,
    )


def first_true(bad: Tensor) -> tuple[tuple[int, ...], int] | None:
    """Return the position of the first true element in reading order, and how many are true."""
    where = bad.nonzero()
    if where.shape[0] == 0:
        return None
    return tuple(int(i) for i in where[0].tolist()), int(where.shape[0])


def range_fault(field: str, letters: str, tensor: Tensor, extent: int, *, padded: bool) -> Fault | None:
    """Return an entry outside `[0, extent)`; -1 passes where slots may be unused."""
    found = first_true((tensor < (-1 if padded else 0)) | (tensor >= extent))
    if found is None:
        return None
    position, count = found
    subscript = ",".join(letters)
    expected = f"0 <= {field}[{subscript}] < {extent}" + (", or -1 in an unused slot" if padded else "")
    return Fault(
        field,
        "range",
        expected,
        f"{int(tensor[position])} at {at_position(position)} ({count_of(count, tensor)})",
        "enlarge the shape or drop those entries; negative values do not wrap.",
        position,
    )


def mask_claim_fault(field: str, tensor: Tensor) -> Fault | None:
    """Return an unused slot in a tensor that is said to have none."""
    found = first_true(tensor == -1)
    if found is None:
        return None
    position, count = found
    return Fault(
        field,
        "law",
        "no unused slot (its facts say masked=False)",
        f"-1 at {at_position(position)} ({count_of(count, tensor)})",
        "set masked=True or None in its IndexFacts.",
        position,
    )


def sorted_fault(field: str, tensor: Tensor) -> Fault | None:
    """Return a descent in a tensor that is said to ascend; -1 does not count."""
    used = (tensor.reshape(-1) != -1).nonzero().squeeze(1)
    entries = tensor.reshape(-1)[used]
    found = first_true(entries[1:] < entries[:-1])
    if found is None:
        return None
    (index,), _ = found
    position = _unravel(int(used[index + 1]), tensor)
    return Fault(
        field,
        "law",
        "ascending entries (its facts say sorted=True)",
        f"{int(entries[index + 1])} at {at_position(position)} after {int(entries[index])}",
        "sort the entries with a builder, or set sorted=False in its IndexFacts.",
        position,
    )


def unique_fault(field: str, tensor: Tensor) -> Fault | None:
    """Return a value that occurs twice in a tensor that is said to hold each once; -1 does not count."""
    used = (tensor.reshape(-1) != -1).nonzero().squeeze(1)
    entries, order = tensor.reshape(-1)[used].sort(stable=True)
    repeats = used[order[1:][entries[1:] == entries[:-1]]]
    if repeats.numel() == 0:
        return None
    position = _unravel(int(repeats.min()), tensor)
    return Fault(
        field,
        "law",
        "no value twice (its facts say unique=True)",
        f"{int(tensor[position])} again at {at_position(position)}",
        "merge the entries with a builder, or set unique=False in its IndexFacts.",
        position,
    )


def joint_fault(field: str, others: Sequence[str], tensors: Sequence[Tensor]) -> Fault | None:
    """Return a combination of entries that occurs twice, where the facts of the first tensor say that none does."""
    twice = repeated(tensors) if len(tensors) == 1 + len(others) else None
    if twice is None:
        return None
    return Fault(
        field,
        "law",
        f"no combination with {', '.join(others)} twice (its facts say unique_with)",
        f"{twice} more than once",
        "merge the entries with a builder, or drop unique_with from its IndexFacts.",
    )


def unused_where_used_fault(field: str, tensor: Tensor, other: str, unused: Tensor) -> Fault | None:
    """Two index tensors of one format that disagree about which slots are unused."""
    found = first_true((tensor == -1) != unused)
    if found is None:
        return None
    position, count = found
    state = "-1" if bool(unused[position]) else "not -1"
    return Fault(
        field,
        "law",
        f"-1 exactly where {other} is -1",
        f"{int(tensor[position])} at {at_position(position)}, where {other} is {state} ({count_of(count, unused)})",
        "mark an unused slot in every index tensor.",
        position,
    )


def unused_value_fault(values: Tensor, unused: Tensor) -> Fault | None:
    """Return a value other than 0 in an unused slot."""
    stray = (values != 0) & unused.reshape(unused.shape + (1,) * (values.ndim - unused.ndim))
    found = first_true(stray)
    if found is None:
        return None
    position, count = found
    return Fault(
        "values",
        "law",
        "0 in unused slots",
        f"{values[position].item()} at {at_position(position)} ({count_of(count, values)})",
        "multiply the values by the mask of used slots before storing them.",
        position,
    )


def ascending_fault(indices: Sequence[Tensor]) -> Fault | None:
    """Return entries that are not in strictly ascending order of `indices` (first dimension first)."""
    if indices[0].numel() < 2:
        return None
    less = torch.zeros_like(indices[0][1:], dtype=torch.bool)
    equal = torch.ones_like(less)
    for index in indices:
        less |= equal & (index[:-1] < index[1:])
        equal &= index[:-1] == index[1:]
    found = first_true(~less)
    if found is None:
        return None
    (entry,), _ = found
    before = tuple(int(index[entry]) for index in indices)
    after = tuple(int(index[entry + 1]) for index in indices)
    return Fault(
        "entries",
        "law",
        "each entry once, in ascending order (coalesced=True)",
        f"{after} after {before} (entry {entry + 1})",
        "rebuild it with from_coo, or set coalesced=False.",
        (entry + 1,),
    )


def at_position(position: tuple[int, ...]) -> str:
    """Return a position as a message shows it, `[2,1]`."""
    return "[" + ",".join(str(i) for i in position) + "]"


def count_of(count: int, tensor: Tensor) -> str:
    """Return how many entries of a tensor a message speaks of."""
    return f"{count} of {tensor.numel()} entries"


def _unravel(flat: int, tensor: Tensor) -> tuple[int, ...]:
    position: list[int] = []
    for extent in reversed(tensor.shape):
        position.append(flat % extent)
        flat //= extent
    return tuple(reversed(position))

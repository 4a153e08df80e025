"""Faults of a format: how they are found, collected and told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from insum_nn.dtypes import INDEX_DTYPES
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
    "entry_fault",
    "joint_fault",
    "kind_faults",
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


def entry_fault(
    field: str,
    tensor: Tensor,
    bad: Tensor,
    expected: str,
    fix: str,
    *,
    kind: Kind = "law",
    note: Callable[[tuple[int, ...]], str] = lambda _: "",
) -> Fault | None:
    """Return the first entry, in reading order, at which `bad` is true; `note` adds to what is said of its place."""
    found = bad.nonzero()
    if found.shape[0] == 0:
        return None
    position: tuple[int, ...] = tuple(found[0].tolist())
    counted = f"{found.shape[0]} of {tensor.numel()} entries"
    got = f"{tensor[position].item()} at {_at(position)}{note(position)} ({counted})"
    return Fault(field, kind, expected, got, fix, position)


def kind_faults(field: str, index: Tensor, device: torch.device) -> list[Fault]:
    """Return what is wrong with the dtype of an index tensor, and with its device, which should be that of values."""
    faults: list[Fault] = []
    if index.dtype not in INDEX_DTYPES:
        got = str(index.dtype).removeprefix("torch.")
        faults.append(Fault(field, "dtype", "int32 or int64", got, f"pass {field}.long()."))
    if index.device != device:
        expected, fix = f"device {device} of values", "move every tensor to one device."
        faults.append(Fault(field, "device", expected, str(index.device), fix))
    return faults


def range_fault(field: str, letters: str, tensor: Tensor, extent: int, *, padded: bool) -> Fault | None:
    """Return an entry outside `[0, extent)`; -1 passes where slots may be unused."""
    bad = (tensor < (-1 if padded else 0)) | (tensor >= extent)
    expected = f"0 <= {field}[{','.join(letters)}] < {extent}" + (", or -1 in an unused slot" if padded else "")
    fix = "enlarge the shape or drop those entries; negative values do not wrap."
    return entry_fault(field, tensor, bad, expected, fix, kind="range")


def mask_claim_fault(field: str, tensor: Tensor) -> Fault | None:
    """Return an unused slot in a tensor that is said to have none."""
    expected, fix = "no unused slot (its facts say masked=False)", "set masked=True or None in its IndexFacts."
    return entry_fault(field, tensor, tensor == -1, expected, fix)


def sorted_fault(field: str, tensor: Tensor) -> Fault | None:
    """Return a descent in a tensor that is said to ascend; -1 does not count."""
    used, entries = _used(tensor)
    descents = (entries[1:] < entries[:-1]).nonzero()
    if descents.numel() == 0:
        return None
    index = int(descents[0])
    position = _unravel(used[index + 1], tensor)
    return Fault(
        field,
        "law",
        "ascending entries (its facts say sorted=True)",
        f"{int(entries[index + 1])} at {_at(position)} after {int(entries[index])}",
        "sort the entries with a builder, or set sorted=False in its IndexFacts.",
        position,
    )


def unique_fault(field: str, tensor: Tensor) -> Fault | None:
    """Return a value that occurs twice in a tensor that is said to hold each once; -1 does not count."""
    used, entries = _used(tensor)
    entries, order = entries.sort(stable=True)
    repeats = used[order[1:][entries[1:] == entries[:-1]]]
    if repeats.numel() == 0:
        return None
    position = _unravel(repeats.min(), tensor)
    return Fault(
        field,
        "law",
        "no value twice (its facts say unique=True)",
        f"{int(tensor[position])} again at {_at(position)}",
        "merge the entries with a builder, or set unique=False in its IndexFacts.",
        position,
    )


def _used(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the flat places of entries that are not -1, and these."""
    flat = tensor.reshape(-1)
    used = (flat != -1).nonzero().squeeze(1)
    return used, flat[used]


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
    return entry_fault(
        field,
        tensor,
        (tensor == -1) != unused,
        f"-1 exactly where {other} is -1",
        "mark an unused slot in every index tensor.",
        note=lambda position: f", where {other} is {'-1' if bool(unused[position]) else 'not -1'}",
    )


def unused_value_fault(values: Tensor, unused: Tensor) -> Fault | None:
    """Return a value other than 0 in an unused slot."""
    stray = (values != 0) & unused.reshape(unused.shape + (1,) * (values.ndim - unused.ndim))
    fix = "multiply the values by the mask of used slots before storing them."
    return entry_fault("values", values, stray, "0 in unused slots", fix)


def ascending_fault(indices: Sequence[Tensor]) -> Fault | None:
    """Return entries that are not in strictly ascending order of `indices` (first dimension first)."""
    if indices[0].numel() < 2:
        return None
    less = torch.zeros_like(indices[0][1:], dtype=torch.bool)
    equal = torch.ones_like(less)
    for index in indices:
        less |= equal & (index[:-1] < index[1:])
        equal &= index[:-1] == index[1:]
    descents = (~less).nonzero()
    if descents.numel() == 0:
        return None
    entry = int(descents[0])
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


def _at(position: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, position))}]"


def _unravel(flat: Tensor, tensor: Tensor) -> tuple[int, ...]:
    return tuple(int(place) for place in torch.unravel_index(flat, tensor.shape))

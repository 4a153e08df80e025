"""Check the values of index tensors, once per tensor and version.

Checking values reads from the device, so it must not happen at every call. The statistics that are read (smallest and
largest entry, whether ascending) are cached for as long as the tensor lives and is not modified. Builders of formats
and kernel maps declare facts that they guarantee; their tensors are not read at all until they are written to.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.lang.bind import Extents, layout_of
from insum_nn.compiler.lang.declared_facts import Origin, broken_facts, is_trusted, verified
from insum_nn.compiler.lang.limits import INT64_MAX
from insum_nn.compiler.lang.misses import labels_of
from insum_nn.compiler.lang.shapes import interval, overflow
from insum_nn.compiler.lang.syntax import Access, Index, Statement, Subscript
from insum_nn.errors import (
    InsumBackendError,
    InsumError,
    InsumRangeError,
    plural,
    raise_collected,
)
from insum_nn.facts import UNKNOWN, IndexFacts
from insum_nn.tensor_cache import Kept, forget, kept_of

__all__ = [
    "Points",
    "cell_numbers",
    "check_index_values",
    "completed",
    "is_inside",
    "lowest_entry",
    "stats_of",
    "writes_sums",
]


def stats_of(tensor: Tensor, *, again: bool = False) -> Kept:
    """Return the smallest and largest entry, and whether entries ascend; kept per tensor and version.

    Raises:
        InsumBackendError: the device cannot be read because a CUDA graph is being captured.
    """
    found, version = kept_of(tensor), 0 if tensor.is_inference() else tensor._version
    if found.version == version and not again:
        return found
    if tensor.numel() == 0:
        return found.read(version, 0, -1, True)
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise InsumBackendError(
            "an index tensor's values are not validated yet, and cannot be read while a CUDA graph is captured",
            fix="run the program once on these tensors before capturing.",
        )
    flat = tensor.detach().reshape(-1)
    low, high = flat.aminmax()
    ascending = (flat[1:] >= flat[:-1]).all().to(flat.dtype)
    smallest, largest, sorted_ = torch.stack([low, high, ascending]).tolist()
    return found.read(version, smallest, largest, bool(sorted_))


def check_index_values(
    statement: Statement,
    tensors: Sequence[Tensor],
    extents: Extents,
    facts: Mapping[str, IndexFacts],
    *,
    drop_outside: bool = False,
    validate: bool = False,
    origin: Origin = "builder",
) -> dict[str, IndexFacts]:
    """Check every index value that a call would use, and complete the facts.

    Args:
        statement: the statement.
        tensors: the tensors read, in the layout's order.
        extents: the call's sizes.
        facts: by name.
        drop_outside: writes out of bounds are dropped instead of raising.
        validate: read everything again, and verify the builder's facts too.
        origin: who declares the facts. Those of a builder are trusted until a tensor is written to, others are verified
            once per version of a tensor: facts about order that do not hold are ignored, entries out of bounds raise.

    Returns:
        Facts of every index tensor, with `masked` and `proven` known.

    Raises:
        InsumRangeError: an entry is out of bounds; the message names the first one.
    """
    layout = layout_of(statement)
    promised = {name: facts.get(name, UNKNOWN) for name in layout.tensors if name in layout.index_tensors}
    named = dict(zip(layout.tensors, tensors, strict=True))
    if validate:
        # And what is cached about them: torch counts no writes through `.data`, NumPy or DLPack.
        forget(named[name] for name in promised)
        raise_collected(_contradicted(statement, named, promised))
        promised = {name: replace(f, proven=False, masked=None) for name, f in promised.items()}
    declared = promised
    if not validate:
        unverified = {n for n, f in promised.items() if f != UNKNOWN and not is_trusted(named[n], f, origin)}
        if unverified:
            declared = {n: verified(n, f, named) if n in unverified else f for n, f in promised.items()}
            promised = {n: replace(f, proven=False) if n in unverified else f for n, f in declared.items()}
    if all(f.proven and f.masked is not None for f in promised.values()) and not writes_sums(statement):
        return promised
    complete: dict[str, IndexFacts] = {}
    read: dict[str, Kept] = {}
    for name, own in declared.items():
        if own.proven and own.masked is not None:
            # Ranges that a caller declares are checked below.
            complete[name] = own
            continue
        stats = read[name] = stats_of(named[name], again=validate)
        complete[name] = completed(own, own.sorted or stats.ascending, stats.low < 0)
    if 0 not in extents.indices:
        raise_collected(_outside(statement, named, extents, promised, read, drop_outside=drop_outside))
    return complete


@lru_cache(maxsize=1024)
def completed(facts: IndexFacts, ascending: bool, masked: bool) -> IndexFacts:
    """What is known of an index tensor whose entries were read."""
    return replace(facts, sorted=ascending, masked=masked, proven=True)


def is_inside(subscript: Subscript, extent: int, named: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Tensor:
    """Return whether a subscript lies inside an axis in every term without a missing entry; a tensor for a graph."""
    values, valid = _points(named, labels_of(subscript), sizes).subscript(subscript)
    return (~valid | ((values >= 0) & (values < extent))).all()


@lru_cache(maxsize=1024)
def writes_sums(statement: Statement) -> bool:
    """Return whether a sum with index tensors addresses the output; its range depends on the values of each call."""
    return any(
        subscript.indirect is None and any(True for _ in subscript.index_accesses())
        for subscript in statement.output.subscripts
    )


def _outside(
    statement: Statement,
    named: Mapping[str, Tensor],
    extents: Extents,
    promised: Mapping[str, IndexFacts],
    read: dict[str, Kept],
    *,
    drop_outside: bool,
) -> Iterator[InsumError]:
    """Yield an error for each subscript with entries outside of the axis that they address.

    Args:
        statement: the statement.
        named: its tensors.
        extents: the call's sizes.
        promised: facts of index tensors.
        read: what was read of them; completed where more is.
        drop_outside: writes out of bounds are dropped instead of raising.
    """
    sizes: dict[str, int] = {}
    for number, name, axis, plain, inner in _addressed(statement):
        is_output = number == 0
        if plain and promised[inner[0]].proven:
            continue
        for each in inner:
            if each not in read:
                read[each] = stats_of(named[each])
        extent = extents.output[axis] if is_output else named[name].shape[axis]
        if plain:
            entry = read[inner[0]]
            if lowest_entry(promised[inner[0]]) <= entry.low and entry.high < extent:
                continue
        access = next(itertools.islice(statement.accesses(), number, None))
        subscript, stats = access.subscripts[axis], {each: read[each] for each in inner}
        sizes = sizes or dict(zip(layout_of(statement).indices, extents.indices, strict=True))
        below = any(s.low < lowest_entry(promised[name]) for name, s in stats.items())
        bounded = plain or (is_output and not drop_outside)
        # A term with a missing entry does not contribute.
        entries = {each: (s.low if plain else max(s.low, 0), s.high) for each, s in stats.items()}
        low, high = interval(subscript, sizes, entries)
        if not -INT64_MAX <= low <= high <= INT64_MAX and all(s.low <= s.high for s in stats.values()):
            where = "with the largest entries of its index tensors "
            yield overflow(statement, subscript, low, high, where, "entries or coefficients")
            continue
        beyond = bounded and (low < (-1 if plain else 0) or high >= extent)
        if below or beyond:
            yield from _exact(statement, access, axis, extent if bounded else None, named, sizes, promised)


@lru_cache(maxsize=1024)
def _addressed(statement: Statement) -> tuple[tuple[int, str, int, bool, tuple[str, ...]], ...]:
    """Return every subscript that reads index tensors.

    Of each the number and the name of its access, its axis, whether it is one entry alone, and the tensors' names; not
    the nodes themselves, since equal statements may have other places in another text.
    """
    found = [
        (number, access.name, axis, each.indirect is not None, tuple(inner.name for inner in each.index_accesses()))
        for number, access in enumerate(statement.accesses())
        for axis, each in enumerate(access.subscripts)
    ]
    return tuple(each for each in found if each[4])


def _exact(
    statement: Statement,
    access: Access,
    axis: int,
    extent: int | None,
    named: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    promised: Mapping[str, IndexFacts],
) -> Iterator[InsumError]:
    """Evaluate a subscript at every point: some entries of its index tensors may never be read."""
    subscript = access.subscripts[axis]
    labels = labels_of(subscript)
    points = _points(named, labels, sizes)
    values, valid = torch.broadcast_tensors(*points.subscript(subscript))
    for inner, entries, reached in points.read:
        lowest = lowest_entry(promised[inner.name])
        bad = reached & (entries < lowest)
        if bool(bad.any()):
            yield _below(statement, inner, entries, bad, labels, lowest)
            return
    if extent is None or not bool((bad := valid & ((values < 0) | (values >= extent))).any()):
        return
    shown = values[valid]
    count, total = int(bad.sum()), int(valid.sum())
    where = _first(bad, labels, subscript)
    smallest, largest = int(shown.min()), int(shown.max())
    what = "writes" if access is statement.output else "points"
    name = subscript.indirect.name if subscript.indirect is not None else str(subscript)
    kind = "index tensor" if subscript.indirect is not None else "the subscript"
    needed = (
        f"allocate {access.name} with at least {largest + 1} rows"
        if axis == 0
        else f"give {access.name} at least {largest + 1} entries along axis {axis}"
    )
    yield InsumRangeError(
        f"{kind} '{name}' {what} outside axis {axis} of '{access.name}'",
        expression=statement.text,
        spans=[subscript.span],
        details=[
            f"expected 0 <= {subscript} < {extent}; got minimum {smallest}, maximum {largest} "
            f"({count} of {plural(total, 'entry')}{where})"
        ],
        fix=f"{needed}, or drop those entries. Negative values do not wrap; -1 means no entry.",
        tensor=name,
        expected=extent,
        got=(smallest, largest),
    )


def _first(bad: Tensor, labels: Sequence[str], of: Access | Subscript) -> str:
    # Axes of other indices have one place, or there is none.
    places, own = zip(labels, bad.nonzero()[0], strict=False), labels_of(of)
    first = ", ".join(f"{label} = {int(at)}" for label, at in places if label in own)
    return f"; first at {first}" if first else ""


def lowest_entry(facts: IndexFacts) -> int:
    """Return the smallest entry that an index tensor may hold."""
    return 0 if facts.masked is False else -1


def _below(
    statement: Statement, inner: Access, entries: Tensor, bad: Tensor, labels: Sequence[str], lowest: int
) -> InsumRangeError:
    value = int(entries[bad][0])
    missing = (
        "write -1 for no entry" if lowest else "leave out the terms that have no entry (masked=False: there are none)"
    )
    return InsumRangeError(
        f"index tensor '{inner.name}' holds {value}",
        expression=statement.text,
        spans=[inner.span],
        details=[
            f"expected {inner} >= {lowest}; got minimum {int(entries[bad].min())} "
            f"({int(bad.sum())} of {plural(bad.numel(), 'entry')}{_first(bad, labels, inner)})"
        ],
        fix=f"{missing}, or count from 0: negative values do not wrap.",
        tensor=inner.name,
        got=value,
    )


class Points:
    """Evaluate subscripts and accesses at many places at once.

    Args:
        tensor: values by the name of a tensor, of NumPy or of torch.
        places: values of indices, which broadcast together.
        zero: of the same kind.

    Attributes:
        read: each access, its values, and where there are any.
    """

    def __init__(self, tensor: Callable[[str], Any], places: Mapping[str, Any], zero: Any) -> None:
        self.tensor, self.places, self.zero = tensor, places, zero
        self.read: list[tuple[Access, Any, Any]] = []

    def subscript(self, subscript: Subscript) -> tuple[Any, Any]:
        """Return what a subscript is, and where no entry of it is missing."""
        position, there = self.zero + subscript.offset, self.zero == 0
        for term in subscript.terms:
            if isinstance(term.atom, Index):
                position = position + term.coefficient * self.places[term.atom.name]
            else:
                entry, inside = self.access(term.atom)
                position, there = position + term.coefficient * entry, there & inside & (entry >= 0)
        return position, there

    def access(self, access: Access) -> tuple[Any, Any]:
        """Return a tensor's values, and where there are any."""
        tensor, flat, inside = self.tensor(access.name), self.zero, self.zero == 0
        for subscript, extent in zip(access.subscripts, tensor.shape, strict=True):
            at, there = self.subscript(subscript)
            inside = inside & there & (at >= 0) & (at < extent)
            flat = flat * extent + at.clip(0, torch.sym_max(extent - 1, 0))
        # Nothing is read of a tensor without elements; a symbolic size is not compared.
        empty = 0 in [extent for extent in tensor.shape if type(extent) is int]
        values = self.zero - 1 if empty else tensor.reshape(-1)[flat]
        self.read.append((access, values, inside))
        return values, inside


def _points(named: Mapping[str, Tensor], labels: Sequence[str], sizes: Mapping[str, int]) -> Points:
    """Return all points of an index space, an axis for each label."""
    device, axes = next(iter(named.values())).device, range(len(labels))
    places = {
        label: torch.arange(sizes[label], device=device).view([-1 if axis == own else 1 for axis in axes])
        for own, label in enumerate(labels)
    }
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return Points(lambda name: named[name].detach().long(), places, zero)


def _contradicted(
    statement: Statement, named: Mapping[str, Tensor], facts: Mapping[str, IndexFacts]
) -> Iterator[InsumError]:
    """Verify the declared facts, and yield an error for each tensor of which some do not hold."""
    for name, declared in facts.items():
        broken = broken_facts(name, declared, named)
        if broken:
            yield InsumRangeError(
                f"index tensor '{name}' contradicts a fact that is declared for it",
                expression=statement.text,
                spans=[access.name_span for access in statement.accesses() if access.name == name],
                details=[f"declared {line}" for line in broken.values()],
                fix="rebuild it with a format's builder, or do not declare the fact.",
                tensor=name,
            )


def cell_numbers(
    access: Access,
    axes: Sequence[int],
    labels: Sequence[str],
    named: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    shape: Sequence[int],
) -> Tensor:
    """Number the cells that the points of an index space address along some axes of an access.

    Args:
        access: the access.
        axes: the axes that are numbered, the last one fastest.
        labels: the indices of their subscripts.
        named: the tensors of the statement.
        sizes: extents of indices.
        shape: of the tensor that is addressed.

    Returns:
        int64, an axis for each label; -1 where an entry is missing or the cell would be out of bounds.
    """
    points = _points(named, labels, sizes)
    found, valid = points.zero, points.zero == 0
    for axis in axes:
        values, present = points.subscript(access.subscripts[axis])
        valid = valid & present & (values >= 0) & (values < shape[axis])
        found = found * shape[axis] + values
    return torch.where(valid, found, -1).expand([sizes[label] for label in labels])

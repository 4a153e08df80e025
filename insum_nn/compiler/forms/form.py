"""Bound -> `Form`: what a generated kernel computes, before a schedule says how its indices are spread.

Three things happen to a statement here. Index tensors whose values are known (`static`) are replaced by numbers: the
indices that address them are written out, point by point. An index tensor that says where a term is added becomes the
*owner* of its terms, so that a program can walk the terms of one output row instead of adding to memory. And the
factors are divided into the two sides of a matrix product, if they are one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from insum_nn.compiler.forms.points import ENTRY, LONGEST, OWNER, Beside, Point, Product, Read, Sub
from insum_nn.compiler.forms.tables import WrittenOut, write_out
from insum_nn.compiler.lang.bind import Bound
from insum_nn.compiler.lang.syntax import Access, Index, Number, Subscript
from insum_nn.facts import StaticTable

__all__ = ["Combining", "Form", "FormError", "UnorderedError", "make_form"]

Combining = Literal["direct", "place", "own", "atomic"]


# How many times the mean the longest row may have where rows count as even.
_EVEN = 4.0


class FormError(Exception):
    """No kernel of the generator's kind computes the statement; the text says why."""


class UnorderedError(FormError):
    """Terms meet in memory, and deterministic options do not allow that."""


@dataclass(frozen=True)
class Form:
    """What a kernel computes.

    Attributes:
        bound: the statement.
        sizes: extents of a call, of the owner's rows, and of the longest of these if known; they steer choices.
        points: the points written out; a single one where nothing is.
        combine: how terms reach the output.
        owner: the access that owns terms, with `combine == "own"`.
        owner_axis: the output axis it addresses.
        entries: its indices.
        permuted: the owner's terms are not in order, but listed in a permutation.
        parallel: indices of the output that are left.
        reduce: indices summed over that are left, without those of the owner's terms.
        tables: the static tensors that are written out; a kernel does not read them.
        written: how they are.
        beside: further outputs, of statements that read what this one does; `bound` reads what any of them does. With
            them there may be no points: the owner then says in which order terms are walked, and nothing else.
        outputs: with further outputs: the form of each output's own statement, of the first only if there are points.
    """

    bound: Bound
    sizes: Mapping[str, int]
    points: tuple[Point, ...]
    combine: Combining
    owner: Access | None
    owner_axis: int
    entries: tuple[str, ...]
    permuted: bool
    parallel: tuple[str, ...]
    reduce: tuple[str, ...]
    tables: frozenset[str]
    written: WrittenOut
    beside: tuple[Beside, ...] = ()
    outputs: tuple[Form, ...] = ()

    @property
    def statements(self) -> tuple[tuple[Point, ...], ...]:
        """The points of every output."""
        return (self.points, *(each.points for each in self.beside))

    @cached_property
    def static(self) -> dict[str, int]:
        return dict(self.bound.static)

    @cached_property
    def depends(self) -> tuple[frozenset[str], ...]:
        """For each factor, the indices that any of its reads varies with."""
        count = len(self.points[0].reads)
        return tuple(frozenset(i for p in self.points for i in p.reads[n].indices()) for n in range(count))

    @cached_property
    def product(self) -> Product | None:
        """The matrix product with the most work per value read, if there is one."""
        return _find_product(self)

    @cached_property
    def accumulators(self) -> int:
        """How many cells the points add to."""
        return len({str(point.target) for point in self.points})

    def size(self, index: str) -> int:
        """The extent of an index in the call; of an owner's terms, their mean number."""
        if index == OWNER:
            return self.rows
        if index == ENTRY:
            return max(1, round(math.prod(self.sizes[x] for x in self.entries) / max(1, self.rows)))
        return self.sizes[index]

    @cached_property
    def owner_place(self) -> int:
        """The position of the owner's index tensor among the statement's; -1 without an owner."""
        return -1 if self.owner is None else self.bound.layout.tensors.index(self.owner.name)

    @property
    def rows(self) -> int:
        return self.sizes.get(OWNER, 1)

    @property
    def terms(self) -> int:
        """Terms of each of an owner's entries: over what it is summed beside them."""
        return max(1, math.prod(self.sizes[x] for x in self.reduce))

    @property
    def terms_of_all(self) -> int:
        """Entries of all rows."""
        return math.prod(self.sizes[x] for x in self.entries)

    @property
    def longest(self) -> int | None:
        """Terms of the longest row, where that is known."""
        entries = self.sizes.get(LONGEST)
        return None if entries is None else entries * self.terms

    @property
    def stretch(self) -> float | None:
        """How many times as long as the mean the longest row of terms is, where that is known."""
        longest = self.sizes.get(LONGEST)
        entries = math.prod(self.sizes[x] for x in self.entries)
        return None if longest is None or not entries else longest * self.rows / entries

    @property
    def even(self) -> bool:
        """Whether rows of terms are known to be of like length."""
        return self.stretch is not None and self.stretch <= _EVEN

    @property
    def wide(self) -> bool:
        """Sums are formed in float32, and the output is of a half type."""
        return self.bound.dtype in (torch.float16, torch.bfloat16)

    def covers(self, output: Sequence[int]) -> bool:
        """Whether every cell of an output of this shape is written, as long as terms do not meet in memory."""
        if not self.points:
            return True
        if self.combine == "place":
            # Unique, and as many as there are cells: every one of them.
            subscripts = enumerate(self.bound.statement.output.subscripts)
            placed = {axis: s.indirect for axis, s in subscripts if s.indirect and s.indirect.name not in self.tables}
            entries = math.prod(self.sizes[name] for name in {i.name for a in placed.values() for i in a.indices()})
            masked = any(self.bound.facts_of(access.name).masked is not False for access in placed.values())
            if masked or entries != math.prod(output[axis] for axis in placed):
                return False
        known = [axis for axis, sub in enumerate(self.points[0].target.subs) if sub.part or not sub.terms]
        lengths = [output[axis] for axis in known]
        written: set[tuple[int, ...]] = set()
        for target in {point.target for point in self.points}:
            for cell in itertools.product(*(self._cells(target.subs[axis]) for axis in known)):
                if all(0 <= at < extent for at, extent in zip(cell, lengths, strict=True)):
                    written.add(cell)
        return len(written) == math.prod(lengths)

    def _cells(self, sub: Sub) -> list[int]:
        """Where a subscript of numbers and steps points."""
        cells = [sub.offset]
        for step, index in sub.terms:
            assert isinstance(index, str)
            cells = [cell + step * n for cell in cells for n in range(self.static[index])]
        return cells


class _Reader:
    """Turns accesses into reads: points filled in, static tensors looked up, the owner's access named."""

    def __init__(self, point: Mapping[str, int], written: WrittenOut, owner: Access | None) -> None:
        self.point = point
        self.written = written
        self.owner = owner

    def read(self, access: Access, *, nested: bool = False) -> Read:
        return Read(access.name, tuple(self.sub(s, nested) for s in access.subscripts))

    def sub(self, subscript: Subscript, nested: bool) -> Sub:
        # Index tensors are proven to point into what they address; where they address each other, kernels look again.
        safe = subscript.plain is not None or (subscript.indirect is not None and not nested)
        offset = subscript.offset
        part = False
        terms: dict[str | Read, int] = {}
        for term in subscript.terms:
            atom: str | Read
            if isinstance(term.atom, Index):
                atom = term.atom.name
                if atom in self.point:
                    part = True
                    offset += term.coefficient * self.point[atom]
                    continue
            elif self.owner is not None and term.atom == self.owner:
                atom = OWNER
            elif term.atom.name in self.written.tables:
                entry = self.written.affine(term.atom, self.point)
                if entry is None:
                    raise FormError("a static index tensor has no entry at some point")
                start, steps = entry
                part = True
                offset += term.coefficient * start
                for index, step in steps.items():
                    terms[index] = terms.get(index, 0) + term.coefficient * step
                continue
            else:
                atom = self.read(term.atom, nested=True)
            terms[atom] = terms.get(atom, 0) + term.coefficient
        return Sub(tuple((c, a) for a, c in terms.items() if c), offset, safe, part)


def make_form(
    bound: Bound,
    sizes: Mapping[str, int],
    output: Sequence[int],
    tables: Mapping[str, StaticTable],
    *,
    deterministic: bool,
    prefer_own: bool,
) -> Form:
    """The form of a bound statement.

    Args:
        bound: what is known of the statement and its tensors.
        sizes: extents of the first call.
        output: the output's shape in the first call.
        tables: static tensors by name.
        deterministic: several programs must not add to one cell.
        prefer_own: sort an owner's terms if they are not sorted.

    Raises:
        FormError: the statement is not of the generator's kind.
    """
    statement = bound.statement
    if statement.operator not in ("+=", "="):
        raise FormError(f"the generator sums; {statement.operator} goes another way")
    if not bound.dtype.is_floating_point:
        raise FormError("factors are integers")
    if not statement.reads:
        raise FormError("no tensor is read")
    written = write_out(bound, tables)
    used, unrolled = frozenset(written.tables), written.names
    if not written.places:
        raise FormError("all known factors are 0")
    if all(access.name in used for access in statement.reads):
        raise FormError("every factor is static")
    combine, axis = _combining(bound, written)
    owner = statement.output.subscripts[axis].indirect if combine == "own" else None
    entries = tuple(i.name for i in owner.indices()) if owner is not None else ()
    permuted = owner is not None and not _in_order(bound, owner)
    if any(not math.isfinite(v) for table in written.tables.values() for v in table.values):
        raise FormError("a static tensor holds values that are not finite")
    number = math.prod(f.value for f in statement.factors if isinstance(f, Number))
    points: list[Point] = []
    for place in written.places:
        reader = _Reader(place, written, owner)
        known = math.prod(written.factor(f, place) for f in statement.reads if f.name in used)
        reads = tuple(reader.read(f) for f in statement.reads if f.name not in used)
        points.append(Point(reader.read(statement.output), float(number * known), reads))
    kept = dict.fromkeys(i.name for i in statement.output.indices() if i.name not in unrolled)
    parallel = tuple(i for i in kept if i not in entries)
    reduce = tuple(i for i in bound.layout.indices if i not in kept and i not in unrolled and i not in entries)
    known_sizes = dict(sizes)
    if owner is not None:
        parallel = (OWNER, *parallel)
        known_sizes[OWNER] = output[axis]
    form = Form(
        bound, known_sizes, tuple(points), combine, owner, axis, entries, permuted, parallel, reduce, used, written
    )
    if owner is not None and (permuted and not (prefer_own or deterministic)):
        return _atomic(form, statement.output, written)
    if owner is not None and not deterministic and form.product is None:
        # Terms that meet only by adding to memory may still be one matrix product, which is worth more.
        scattered = _atomic(form, statement.output, written)
        if scattered.product is not None:
            return scattered
    if form.combine == "atomic" and deterministic:
        raise UnorderedError("several terms meet in one cell, in no fixed order")
    return form


def _atomic(form: Form, output: Access, written: WrittenOut) -> Form:
    """The same statement, every term added to memory."""
    statement = form.bound.statement
    points = tuple(
        Point(
            _Reader(place, written, None).read(output),
            point.number,
            tuple(_Reader(place, written, None).read(f) for f in statement.reads if f.name not in written.tables),
        )
        for place, point in zip(written.places, form.points, strict=True)
    )
    parallel = (*form.entries, *(i for i in form.parallel if i != OWNER))
    return Form(
        form.bound, form.sizes, points, "atomic", None, -1, (), False, parallel, form.reduce, form.tables, written
    )


def _combining(bound: Bound, written: WrittenOut) -> tuple[Combining, int]:
    """How terms reach the output, and the axis that is addressed by an index tensor."""
    statement = bound.statement
    subscripts = statement.output.subscripts
    plain = [s.plain for s in subscripts]
    # What tables address is known, but points must not share cells unless they share all of them.
    known = [axis for axis, s in enumerate(subscripts) if plain[axis] is None and written.literal(s)]
    stepped = {i.name for axis in known for i in subscripts[axis].indices()} & written.steps
    if stepped & {i.name for axis, s in enumerate(subscripts) if axis not in known for i in s.indices()}:
        return "atomic", -1
    if not written.apart(statement.output, [a for a in range(len(plain)) if a in known or plain[a] in written.names]):
        return "atomic", -1
    loose = [
        axis
        for axis in range(len(subscripts))
        if axis not in known and (plain[axis] is None or plain.count(plain[axis]) > 1)
    ]
    named = [i.name for a in loose for i in subscripts[a].indices()]
    if not loose:
        # A static table may send several points to one cell; their sums share an accumulator.
        return "direct", -1
    if set(named) & {p for p in plain if p is not None}:
        return "atomic", -1
    if len(loose) > 1 and _jointly_unique(bound, [subscripts[axis] for axis in loose], written.names, written.tables):
        return "place", loose[0]
    if len(loose) > 1 or len(set(named)) != len(named):
        return "atomic", -1
    (axis,) = loose
    owner = subscripts[axis].indirect
    if (
        owner is None
        or owner.name in written.tables
        or any(s.plain is None or s.plain in written.names for s in owner.subscripts)
    ):
        return "atomic", -1
    facts = bound.facts_of(owner.name)
    if facts.unique:
        return "place", axis
    return "own", axis


def _jointly_unique(
    bound: Bound, subscripts: Sequence[Subscript], unrolled: Iterable[str], tables: Container[str]
) -> bool:
    """Whether index tensors that address several axes send no two of their entries to one cell."""
    read = [s.indirect for s in subscripts]
    accesses = [a for a in read if a is not None and a.name not in tables]
    places = [tuple(s.plain for s in a.subscripts) for a in accesses]
    longest = max(places, key=len, default=())
    if len(accesses) < len(read) or len(set(longest)) < len(longest) or set(longest) & {None, *unrolled}:
        return False
    # An entry of each at every place of the longest one.
    if any(longest[: len(place)] != place for place in places):
        return False
    names = {a.name for a in accesses}
    facts = [(name, bound.facts_of(name)) for name in names]
    known = [{name, *f.unique_with} for name, f in facts if f.unique_with] + [{name} for name, f in facts if f.unique]
    whole = {a.name for a, place in zip(accesses, places, strict=True) if place == longest}
    return any(group <= names and group & whole for group in known)


def _in_order(bound: Bound, owner: Access) -> bool:
    facts = bound.facts_of(owner.name)
    # Entries of -1 may stand anywhere between sorted ones.
    return facts.sorted and facts.masked is False


# The matrix product.


def _find_product(form: Form) -> Product | None:
    """Divide the factors into two sides that share summed indices and have written ones of their own."""
    depends = form.depends
    if form.bound.dtype == torch.float64 or len(depends) < 2 or len(depends) > 6:
        return None
    reduced = {*form.reduce, *((ENTRY,) if form.owner is not None else ())}
    own = [_named(d, form) for d in depends]
    best: tuple[float, Product] | None = None
    for sides in itertools.product((0, 1), repeat=len(depends) - 1):
        chosen = (0, *sides)
        if not any(chosen):
            continue
        left = [n for n, side in enumerate(chosen) if side == 0]
        right = [n for n, side in enumerate(chosen) if side == 1]
        l_has, r_has = (frozenset[str]().union(*(own[n] for n in side)) for side in (left, right))
        # A program owns one row at a time.
        m = _sorted_like(form, l_has - r_has - reduced - {OWNER})
        n = _sorted_like(form, r_has - l_has - reduced - {OWNER})
        k = [i for i in (ENTRY, *form.reduce) if i in l_has & r_has & reduced]
        if ENTRY in l_has ^ r_has:
            continue
        product = _weigh(form, left, right, m, k, n)
        if product is not None and (best is None or product[0] > best[0]):
            best = product
    return None if best is None else best[1]


def _weigh(
    form: Form, left: Sequence[int], right: Sequence[int], m: list[str], k: list[str], n: list[str]
) -> tuple[float, Product] | None:
    sizes = [math.prod(form.size(i) for i in axis) for axis in (m, k, n)]
    if not (m and k and n) or min(sizes) < 8 or max(sizes[0], sizes[2]) < 16:
        return None
    # Reads of either side per product, the fewer the better.
    work = math.prod(min(s, 128) for s in sizes)
    reads = min(sizes[0], 128) * min(sizes[1], 128) * len(left) + min(sizes[1], 128) * min(sizes[2], 128) * len(right)
    return work / reads, Product(tuple(left), tuple(right), tuple(m), tuple(k), tuple(n))


def _named(depends: frozenset[str], form: Form) -> frozenset[str]:
    """Dependencies with the indices of an owner's terms as one."""
    inner = {ENTRY if i in form.entries else i for i in depends}
    return frozenset(inner)


def _sorted_like(form: Form, names: frozenset[str]) -> list[str]:
    return [i for i in form.parallel if i in names]

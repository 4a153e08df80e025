"""Cut a statement in two, with an intermediate tensor between, where factors need not be multiplied entry by entry.

    Y[D[e],o] += Inv[D[e],T[e]] * X[S[e],c] * W[T[e],c,o]

forms a product for every entry `e`, channel `c` and output `o`. There are four kinds of cuts:

    at distinct addresses    H[i,r,o] += X[i,c] * W[r,c,o]                Y[D[e],o] += H[S[e],T[e],o] * Inv[D[e],T[e]]
    entry by entry           H[e,o] += X[S[e],c] * W[T[e],c,o]            Y[D[e],o] += H[e,o] * Inv[D[e],T[e]]
    sum over entries first   H[D[e],T[e],c] += X[S[e],c]                  Y[i,o] += H[i,r,c] * Inv[i,r] * W[r,c,o]
    blocks in another order  H[p,b,a] += W[p,a,b]                         Y[n,Row[p],a] += H[p,b,a] * X[n,Col[p],b]

The third kind also makes a dense matrix of blocks: `H[Row[p],a,Col[p],b] += W[p,a,b]`, then `Y[n,i,a] += H[i,a,j,b] *
X[n,j,b]`, of `Y[n,Row[p],a] += W[p,a,b] * X[n,Col[p],b]`.

In the first kind some subscripts of the factors are read by the second statement instead, at the same places, so the
same terms miss; the first statement loops over the addressed axis by an index of its own. In the third kind the first
statement writes where the second one's subscripts pointed. Cells that no term reads then meet a zero, and must not show
if they are not finite: such factors are passed with those cells cleared (`Clear`), and so are the gradients of elements
that no term reads. What cells that are read by some terms hold may meet the zeros of others.

The pass works on the syntax tree, since the back ends in use take statements; it says what may be cut, and
`schedule.product_cost` what pays. Neither knows names, and the derivatives of a statement that is cut are derived from
the whole and cut by themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from insum_nn.compiler.lang.bind import Bound
from insum_nn.compiler.lang.derivative import fresh_name
from insum_nn.compiler.lang.misses import Miss, labels_of, misses_of
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.lang.syntax import Access, Factor, Statement, Subscript
from insum_nn.facts import StaticTable

__all__ = ["Axis", "Clear", "Cut", "Place", "cuts_of", "index_names"]

# Factors of a statement whose subsets are all tried, and subscripts of them that are kept or replaced in all ways.
_MAX_FACTORS = 6
_MAX_SUBSCRIPTS = 3
_LETTERS = "ijlmrstuvxyz"

# An axis of a tensor; the output's name stands for the output.
Axis = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Place:
    """An access along some of its axes."""

    access: Access
    axes: tuple[int, ...]

    @property
    def subscripts(self) -> tuple[Subscript, ...]:
        return tuple(self.access.subscripts[axis] for axis in self.axes)

    @property
    def indices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(index.name for subscript in self.subscripts for index in subscript.indices()))


@dataclass(frozen=True, slots=True)
class Clear:
    """Cells that no term addresses are set to 0, since the second statement passes by all cells.

    Attributes:
        name: of the tensor with these cells cleared: a factor of the second statement, or its output.
        place: what addresses the cells in the whole statement.
        terms: where else a term may miss, and then addresses none.
    """

    name: str
    place: Place
    terms: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """A statement as two.

    Attributes:
        first: writes the intermediate tensor.
        second: reads it, and writes the output.
        intermediate: name of the intermediate tensor.
        shape: for each of its axes, whose extent it has: that of an index of the whole statement, or of an axis, or
            which extent.
        fresh: indices that the whole statement lacks, with the axis that each runs over, or its extent.
        equal: axes addressed by one subscript, which share an index: the cut is right where they have one extent.
        clears: what the second statement reads with cleared cells.
        unwritten: its output is cleared likewise.
        drops: the first statement's writes may lie outside, as the reads that they replace.
        tables: static tables that the whole statement lacks.
    """

    first: Statement
    second: Statement
    intermediate: str
    shape: tuple[str | Axis | int, ...]
    fresh: Mapping[str, Axis | int]
    equal: tuple[tuple[Axis, ...], ...] = ()
    clears: tuple[Clear, ...] = ()
    unwritten: Clear | None = None
    drops: bool = False
    tables: Mapping[str, StaticTable] = field(default_factory=dict[str, StaticTable])

    def __str__(self) -> str:
        return f"{self.first}; {self.second}"


@lru_cache(maxsize=1024)
def cuts_of(bound: Bound, taken: frozenset[str] = frozenset()) -> tuple[Cut, ...]:
    """Return every way to cut a statement in two; none for `max=` and `min=`, whose products do not sum.

    A cut is left out if a factor that varies with a missing entry could meet a zero where it had taken no part.

    Args:
        bound: the statement.
        taken: names that no further tensor may have.
    """
    statement = bound.statement
    if not (statement.combining.adds and statement.is_product) or not 2 <= len(statement.reads) <= _MAX_FACTORS:
        return ()
    return tuple(_Cutter(bound, taken).all())


def _replaceable(access: Access) -> Iterator[tuple[int, Subscript]]:
    """The subscripts that are more than one index, with their axes."""
    for axis, subscript in enumerate(access.subscripts):
        if subscript.plain is None and any(True for _ in subscript.indices()):
            yield axis, subscript


def index_names(accesses: Sequence[Access]) -> dict[str, None]:
    """The indices of accesses, those of their index tensors included, in reading order."""
    return dict.fromkeys(index.name for access in accesses for index in access.indices())


class _Cutter:
    def __init__(self, bound: Bound, taken: frozenset[str]) -> None:
        self.bound = bound
        self.statement = bound.statement
        self.output = bound.statement.output
        self.reads = bound.statement.reads
        self.taken = {*taken, self.output.name, *self.statement.tensors(), *self.statement.indices()}
        self.made = fresh_name("T", self.taken)

    def all(self) -> Iterator[Cut]:
        places = range(len(self.reads))
        for count in range(1, len(self.reads) + 1):
            for chosen in itertools.combinations(places, count):
                inside = [self.reads[at] for at in chosen]
                outside = [access for at, access in enumerate(self.reads) if at not in chosen]
                yield from self.product_first(inside, outside)
                if outside:
                    yield from self.sum_first(inside, outside)
        for access in self.reads:
            yield from self.turned(access)

    def others(self, inside: Sequence[Access]) -> list[Factor]:
        """The factors that are not multiplied first, numbers among them."""
        return [f for f in self.statement.factors if not any(f is access for access in inside)]

    def fresh(self, subscripts: Mapping[Subscript, Sequence[Axis]]) -> dict[Subscript, str]:
        """An index of its own for each subscript."""
        names: dict[Subscript, str] = {}
        for subscript in subscripts:
            taken = {*self.taken, *names.values(), self.made}
            free = (letter for letter in _LETTERS if letter not in taken)
            names[subscript] = next(free, None) or fresh_name("i", taken)
        return names

    # Some factors first: at the addresses that they have, or entry by entry.

    def product_first(self, inside: Sequence[Access], outside: Sequence[Access]) -> Iterator[Cut]:
        """Multiply some factors, and read the product in their place."""
        found: dict[Subscript, list[Axis]] = {}
        for access in inside:
            for axis, subscript in _replaceable(access):
                found.setdefault(subscript, []).append((access.name, axis))
        counts = range(len(found) + 1) if len(found) <= _MAX_SUBSCRIPTS else (0, len(found))
        for count in reversed(counts):
            for chosen in itertools.combinations(found, count):
                if chosen or outside:
                    cut = self.product(inside, outside, {subscript: found[subscript] for subscript in chosen})
                    if cut is not None:
                        yield cut

    def product(
        self, inside: Sequence[Access], outside: Sequence[Access], replaced: Mapping[Subscript, Sequence[Axis]]
    ) -> Cut | None:
        names = self.fresh(replaced)
        needed = {*index_names([*outside, self.output]), *(i.name for s in replaced for i in s.indices())}
        # The axes of the product, in the order in which its factors have them.
        written: dict[str, tuple[str, str | Axis]] = {}
        summed = False
        for access in inside:
            for subscript in access.subscripts:
                if subscript in replaced:
                    written[names[subscript]] = str(subscript), replaced[subscript][0]
                    continue
                for index in subscript.indices():
                    if index.name in needed:
                        written[index.name] = index.name, index.name
                    else:
                        summed = True
        if not summed:
            return None
        factors = [_with(access, names) for access in inside]
        read = _access(self.made, [text for text, _ in written.values()])
        first = parse(f"{_access(self.made, list(written))} += {' * '.join(factors)}")
        second = self.second(str(self.output), [read, *map(str, self.others(inside))])
        simplified = [_without(access, replaced) for access in inside]
        missed = list(dict.fromkeys(miss for access in simplified for miss in misses_of(access, self.bound)))
        if not self.is_exact(missed, outside, second):
            return None
        # A factor that varies with a miss must still do so where it is multiplied.
        for access, other in zip(inside, simplified, strict=True):
            if any(
                set(m.labels) <= set(labels_of(access)) and not set(m.labels) <= set(labels_of(other)) for m in missed
            ):
                return None
        return Cut(
            first,
            second,
            self.made,
            tuple(extent for _, extent in written.values()),
            {names[s]: axes[0] for s, axes in replaced.items()},
            tuple(tuple(axes) for axes in replaced.values() if len(axes) > 1),
        )

    def second(self, output: str, factors: Sequence[str]) -> Statement:
        return parse(f"{output} {self.statement.operator} {' * '.join(factors)}")

    def is_exact(self, missed: Iterable[Miss], outside: Sequence[Access], second: Statement) -> bool:
        """Whether the zeros that stand for these missing terms meet no factor that took no part in them.

        What the second statement misses by itself is as it was. A factor that varies with what is missing must not be
        multiplied by the zero; in a gradient, no factor may be.
        """
        again = {miss for access in (*second.reads, second.output) for miss in misses_of(access, self.bound)}
        left = [set(miss.labels) for miss in missed if miss not in again]
        return not left or not (self.bound.drop_outside or any(m <= set(labels_of(a)) for m in left for a in outside))

    # Blocks in another order.

    def turned(self, access: Access) -> Iterator[Cut]:
        """Copy the blocks of a factor, so that neighbours in memory are what is written: lanes of a CPU's vectors."""
        own, entries = [subscript.plain for subscript in access.subscripts], index_names([*self.output.nested()])
        lane = self.output.subscripts[-1].plain if entries else None
        order = [index for index in own if index is not None and index != lane]
        if self.bound.device_type != "cpu" or lane not in own[:-1] or not entries.keys() & set(own):
            return
        if lane is None or len(order) + 1 < len(own) or own[-1] in index_names([self.output]):
            return
        copy = _access(self.made, [*order, lane])
        second = self.second(str(self.output), [copy, *map(str, self.others([access]))])
        yield Cut(parse(f"{copy} += {access}"), second, self.made, (*order, lane), {})

    # The sum over entries first.

    def sum_first(self, inside: Sequence[Access], outside: Sequence[Access]) -> Iterator[Cut]:
        """Sum some factors where the subscripts of the others and of the output point, then loop over those axes."""
        indices = index_names(inside)
        replaced: dict[Subscript, list[Axis]] = {}
        for access in (self.output, *outside):
            for axis, subscript in _replaceable(access):
                own = {index.name for index in subscript.indices()}
                if not own & set(indices):
                    continue
                if not own <= set(indices):
                    return
                replaced.setdefault(subscript, []).append((access.name, axis))
        if not replaced:
            return
        gone = {index.name for subscript in replaced for index in subscript.indices()}
        needed = index_names([_without(access, replaced) for access in (self.output, *outside)])
        free = [name for name in indices if name in needed]
        if gone & set(needed) or not free:
            return
        own = set(index_names([self.output]))
        blocks = len(replaced) > 1 and bool(set(free) & own and set(free) - own)
        # Stored entries by row and column are the sparse structure itself in dense form: every zero is multiplied.
        # That can pay for blocks alone, whose rows and columns are indices of their own.
        if len(replaced) > 1 and not blocks and not any(True for access in inside for _ in access.nested()):
            return
        if set(free) <= own:
            # What the second statement sums stands in front of what it writes, so that it reads a matrix as it lies.
            replaced = dict(sorted(replaced.items(), key=lambda item: item[0] in self.output.subscripts))
        names = self.fresh(replaced)
        axes = self.axes(inside, outside, replaced, free) if blocks else [*replaced, *free]
        written = _access(self.made, list(map(str, axes)))
        first = parse(f"{written} += {' * '.join(map(str, inside))}")
        terms = self.terms(inside, outside, replaced, set(indices) - set(needed))
        factors, clears = [_access(self.made, [names[s] if s in names else str(s) for s in axes])], list[Clear]()
        for factor in self.others(inside):
            place = _place(factor, replaced) if isinstance(factor, Access) else None
            if place is None or not isinstance(factor, Access):
                factors.append(str(factor))
                continue
            taken = {*self.taken, self.made, *names.values(), *(clear.name for clear in clears)}
            clears.append(Clear(fresh_name(f"{factor.name}_read", taken), place, terms))
            factors.append(clears[-1].name + _with(factor, names)[len(factor.name) :])
        second = self.second(_with(self.output, names), factors)
        # What misses among the terms that are summed leaves a sum without them, or none, and then a cleared cell.
        missed = (miss for access in inside for miss in misses_of(access, self.bound))
        if not self.is_exact((miss for miss in missed if set(miss.labels) & set(needed)), outside, second):
            return
        place = _place(self.output, replaced) if self.bound.drop_outside else None
        yield Cut(
            first,
            second,
            self.made,
            tuple(replaced[s][0] if s in replaced else str(s) for s in axes),
            {names[s]: where[0] for s, where in replaced.items()},
            tuple(tuple(where) for where in replaced.values() if len(where) > 1),
            tuple(clears),
            None if place is None else Clear(self.output.name, place, terms),
            any(subscript.indirect is None for subscript in replaced),
        )

    def axes(
        self,
        inside: Sequence[Access],
        outside: Sequence[Access],
        replaced: Mapping[Subscript, Sequence[Axis]],
        free: Sequence[str],
    ) -> list[Subscript | str]:
        """The axes of a sum over blocks: the rows of a matrix, then its columns."""
        # Each place stands in front of the index inside of the block, so that the library reads one matrix.
        last = [s.plain for access in inside for s in access.subscripts if s.plain in free][-1:]
        found: list[Subscript | str] = []
        for access in sorted((self.output, *outside), key=lambda access: set(last) <= set(index_names([access]))):
            found += [s if s in replaced else str(s) for s in access.subscripts if s in replaced or s.plain in free]
        return list(dict.fromkeys([*found, *free]))

    def terms(
        self,
        inside: Sequence[Access],
        outside: Sequence[Access],
        replaced: Container[Subscript],
        summed: Container[str],
    ) -> tuple[Place, ...]:
        """Where the terms of the first statement may miss, by the indices that it sums."""
        found: list[Place] = []
        for access in inside:
            axes = [axis for axis, s in _replaceable(access) if all(i.name in summed for i in s.indices())]
            found.append(Place(access, tuple(axes)))
        places = (_place(access, replaced) for access in (self.output, *outside))
        found += [place for place in places if place is not None]
        return tuple(p for p in found if p.axes and misses_of(replace(p.access, subscripts=p.subscripts), self.bound))


def _place(access: Access, subscripts: Container[Subscript]) -> Place | None:
    axes = tuple(axis for axis, subscript in enumerate(access.subscripts) if subscript in subscripts)
    return Place(access, axes) if axes else None


def _access(name: str, subscripts: Sequence[str]) -> str:
    return f"{name}[{','.join(subscripts)}]" if subscripts else name


def _with(access: Access, names: Mapping[Subscript, str]) -> str:
    """The access with some subscripts replaced by an index."""
    return _access(access.name, [names.get(subscript) or str(subscript) for subscript in access.subscripts])


def _without(access: Access, subscripts: Container[Subscript]) -> Access:
    """The access without some subscripts, to ask what indices and misses the others have."""
    return replace(access, subscripts=tuple(s for s in access.subscripts if s not in subscripts))

"""Sum the terms of each cell: what the innermost statements add to accumulators, and what follows the loops.

Factors are set to 0 where their term takes no part only as far as other factors of the term do not vanish by
themselves; conditions that are the same for all terms of a cell select its sum; and with a matrix product the factors
are divided into the two sides of a `dot`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from insum_nn.compiler.ir.access import indices_in
from insum_nn.compiler.ir.nodes import (
    Buffer,
    Cast,
    Const,
    Dot,
    Expr,
    Index,
    Load,
    Node,
    Op,
    Precision,
    Stmt,
    Store,
    conjunction,
    conjuncts,
    walk,
)
from insum_nn.compiler.passes.terms import Term, factored, guards, loose, select, vanishes, widened
from insum_nn.compiler.passes.unify_variants import rolled
from insum_nn.dtypes import is_widened

__all__ = ["Cell", "Space", "Sums", "cell_sum", "summed"]

Sides = tuple[tuple[int, ...], tuple[int, ...]]
K = 1


@dataclass(frozen=True, slots=True)
class Cell:
    """An output cell of a tile: its accumulator and its terms."""

    total: Buffer
    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Space:
    """The loops around a sum.

    Attributes:
        axis_of: the tile axis of a tile loop's index.
        lanes: lanes of each tile axis.
        inside: for an index whose loop may run past its end, the condition under which it has not.
        summed: indices of the loops over what is summed.
        exact: terms that take no part never matter.
        dtype: of the output.
    """

    axis_of: Mapping[Index, int]
    lanes: Mapping[int, int]
    inside: Mapping[Index, Expr]
    summed: frozenset[Index]
    exact: bool
    dtype: str

    @property
    def past_ends(self) -> list[Expr]:
        """The conditions under which no loop over what is summed has run past its end."""
        return [condition for index, condition in self.inside.items() if index in self.summed]

    def axes(self, *exprs: Expr) -> frozenset[int]:
        """The tile axes that any of these vary with."""
        return frozenset(self.axis_of[i] for e in exprs for i in indices_in(e) if i in self.axis_of)

    def cells(self, axes: Iterable[int]) -> int:
        return math.prod(self.lanes[axis] for axis in axes)

    def guards(self, factor: Expr) -> set[Expr]:
        """The conditions without which a factor is 0: a load past the end of a loop gives 0 too."""
        past = (self.inside[i] for i in indices_in(factor) if i in self.inside) if vanishes(factor) else ()
        return {*guards(factor), *past}

    def of_cell(self, condition: Expr) -> bool:
        """Whether a condition is the same for all terms of a cell."""
        return indices_in(condition).isdisjoint(self.summed)


@dataclass(slots=True)
class Sums:
    """Accumulators, the statements inside of all loops, and what each cell's are after them.

    That is its value; of an extremum also what parts of it are: the extremum, and a flag that says that it has a term.
    """

    buffers: list[Buffer] = field(default_factory=list[Buffer])
    body: tuple[Stmt, ...] = ()
    totals: list[tuple[Expr, ...]] = field(default_factory=list[tuple[Expr, ...]])


def summed(cells: Sequence[Cell], space: Space, product: Sides | None, precision: Precision) -> Sums:
    """The sums of cells.

    Args:
        cells: with their terms.
        space: the loops around them.
        product: positions of the factors on either side of a matrix product.
        precision: of float32 in the matrix unit.
    """
    if product is not None:
        return _Products(space, product, precision).sums(cells)
    found = Sums()
    body: list[Stmt] = []
    for cell in cells:
        value, where, settled = cell_sum(cell.terms, space)
        found.buffers.append(cell.total)
        body.append(Store(cell.total, (), value, "add", where))
        found.totals.append((select(settled, Load(cell.total, ())),))
    found.body = tuple(body)
    return found


# Products element by element.


def cell_sum(terms: Sequence[Term], space: Space) -> tuple[Expr, Expr | None, list[Expr]]:
    """What a cell's terms add, where it is added, and the conditions by which the sum is selected."""
    # Terms have most factors in common.
    guarded = cache(space.guards)
    needed = [loose(term.factors, [*term.conditions, *space.past_ends], guarded) for term in terms]
    shared = [c for c in needed[0] if all(c in each for each in needed)]
    settled = [c for c in shared if space.of_cell(c)]
    where = [c for c in shared if c not in settled]
    rest = [tuple(c for c in each if c not in shared) for each in needed]
    factors = [term.factors for term in terms]
    if len(terms) == 1:
        factors[0], where = _by_factor(factors[0], where, space)
    every = [(t.number, f, own) for t, f, own in zip(terms, factors, rest, strict=True)]
    return _total(every, space), conjunction(where), settled


def _by_factor(
    factors: Sequence[Expr], conditions: Sequence[Expr], space: Space
) -> tuple[tuple[Expr, ...], list[Expr]]:
    """Select factors by conditions that have fewer lanes there than in the product; the other conditions."""
    found, rest = list(factors), list[Expr]()
    whole = space.cells(space.axes(*factors, *conditions))
    for condition in conditions:
        lacking = [n for n, factor in enumerate(found) if condition not in space.guards(factor)]
        if sum(space.cells(space.axes(found[n], condition)) for n in lacking) >= whole:
            rest.append(condition)
            continue
        for n in lacking:
            found[n] = select([condition], found[n])
    return tuple(found), rest


def _total(terms: Sequence[tuple[float, Sequence[Expr], Sequence[Expr]]], space: Space) -> Expr:
    """A sum of products, each 0 where its conditions do not hold."""
    groups: dict[tuple[Expr, ...], list[tuple[float, tuple[Expr, ...]]]] = {}
    wide = cache(widened)

    @cache
    def lanes(factor: Expr) -> int:
        return len(space.axes(factor))

    for number, factors, conditions in terms:
        groups.setdefault(tuple(conditions), []).append((number, tuple(map(wide, factors))))
    total: Expr | None = None
    for conditions, each in groups.items():
        part = select(conditions, factored(each, lanes))
        total = part if total is None else Op("add", (total, part))
    assert total is not None
    return total


# Matrix products.


class _Products:
    """Sums of matrix products; those with one right side stand together, so that few operands are alive at a time."""

    def __init__(self, space: Space, sides: Sides, precision: Precision) -> None:
        self.space = space
        self.sides = sides
        self.precision: Precision = precision if space.dtype == "float32" else "ieee"

    def sums(self, cells: Sequence[Cell]) -> Sums:
        found = Sums([cell.total for cell in cells])
        body: list[Stmt] = []
        rights: dict[Expr, list[tuple[Cell, list[Term], list[Expr]]]] = {}
        settled = {cell.total: self.settled(cell) for cell in cells}
        for cell in cells:
            groups: dict[Expr, list[Term]] = {}
            for term in cell.terms:
                left, right = self.divided(term)
                value = self.operand([Term(1.0, right, self.needs(right, left, settled[cell.total]))])
                groups.setdefault(value, []).append(term)
            for value, terms in groups.items():
                rights.setdefault(value, []).append((cell, terms, settled[cell.total]))
        # The matrix unit's own three products take four times the code, much of it for infinities.
        many = self.precision == "tf32x3" and (len(cells) > 1 or any(len(cell.terms) > 1 for cell in cells))
        blocks: list[tuple[Stmt, ...]] = []
        for right_value, groups_of in rights.items():
            block: list[Stmt] = []
            for cell, terms, settled_of_cell in groups_of:
                lefts = [
                    Term(t.number, left, self.needs(left, right, settled_of_cell))
                    for t in terms
                    for left, right in [self.divided(t)]
                ]
                for one, other in self.parts(self.operand(lefts), right_value, many):
                    precision = "tf32" if many else self.precision
                    block.append(Store(cell.total, (), Dot(one, other, precision), "add"))
            blocks.append(tuple(block))
        body += rolled(blocks, exact=self.space.dtype == "float64")
        for cell in cells:
            total = Load(cell.total, ())
            live = self.any_term(cell, settled[cell.total])
            if live is not None:
                buffer, stores = live
                found.buffers.append(buffer)
                body += stores
                total = select([Op("less", (Const(0), Load(buffer, ())))], total)
            found.totals.append((select(settled[cell.total], total),))
        found.body = tuple(body)
        return found

    @staticmethod
    def parts(left: Expr, right: Expr, many: bool) -> list[tuple[Expr, Expr]]:
        """The products that make one in float32: of parts of 10 bits of mantissa, where they are written out."""
        if not many:
            return [(left, right)]
        (high, low), (high_right, low_right) = (
            (whole, Op("sub", (each, whole))) for each in (left, right) for whole in [Op("high_bits", (each,))]
        )
        return [(low, high_right), (high, low_right), (high, high_right)]

    def divided(self, term: Term) -> tuple[tuple[Expr, ...], tuple[Expr, ...]]:
        left, right = (tuple(term.factors[n] for n in side) for side in self.sides)
        return left, right

    def settled(self, cell: Cell) -> list[Expr]:
        """The conditions that are the same for all terms of a cell."""
        each = [loose(term.factors, term.conditions, self.space.guards) for term in cell.terms]
        shared = [c for c in each[0] if all(c in other for other in each)]
        return [c for c in shared if self.space.of_cell(c)]

    def needs(self, factors: Sequence[Expr], others: Sequence[Expr], settled: Sequence[Expr]) -> tuple[Expr, ...]:
        """The conditions by which one side is selected: its own, and those of the other side along the sum.

        Of the latter only those that a factor's own subscripts vary with: another factor may be multiplied by zero.
        """
        own = loose(factors, [c for factor in factors for c in guards(factor)])
        found = dict.fromkeys(c for c in own if c not in settled)
        for condition in (c for factor in others for c in guards(factor)):
            lacking = [factor for factor in factors if condition not in guards(factor)]
            along = self.space.axes(condition) <= {K} and condition not in settled
            if along and any(indices_in(condition) <= _own_indices(factor) for factor in lacking):
                found[condition] = None
        return tuple(found)

    def operand(self, terms: Sequence[Term]) -> Expr:
        """One side of a matrix product, in the dtype of its factors."""
        first = terms[0]
        if len(terms) == 1 and first.number == 1.0 and len(first.factors) == 1:
            factor = first.factors[0]
            if isinstance(factor, Load) and factor.fill == 0:
                # A masked load goes straight to shared memory, which a selected value does not.
                return Load(
                    factor.buffer, factor.subscripts, conjunction([*conjuncts(factor.where), *first.conditions])
                )
            return select(first.conditions, factor)
        total = _total([(t.number, t.factors, t.conditions) for t in terms], self.space)
        dtype = next((n.buffer.dtype for f in first.factors for n in walk(f) if isinstance(n, Load)), "float32")
        return Cast(total, dtype) if is_widened(dtype) else total

    def any_term(self, cell: Cell, settled: Sequence[Expr]) -> tuple[Buffer, list[Stmt]] | None:
        """Whether a cell has a term that takes part, and the statements that find out.

        A gradient is exactly 0 where it has none, whatever the factors are.
        """
        found: list[list[Expr]] = []
        for term in cell.terms if self.space.exact else ():
            left, right = self.divided(term)
            every = [c for c in term.conditions if c not in settled]
            safe = [
                {c for factor in a for c in guards(factor)} | {*self.needs(a, b, settled)}
                for a, b in ((left, right), (right, left))
            ]
            open_ = [c for c in every if not all(c in side for side in safe)]
            if not open_:
                return None
            found.append(every if len(self.space.axes(*every)) < 3 else open_)
        if not found or len(self.space.axes(*(c for each in found for c in each))) > 2:
            return None
        live = Buffer(f"{cell.total.name}_live", "int32", (), local=True)
        inside = [{i for c in each for i in indices_in(c) if i in self.space.inside} for each in found]
        wheres = [[*each, *(self.space.inside[i] for i in used)] for each, used in zip(found, inside, strict=True)]
        return live, [Store(live, (), Const(1), "max", conjunction(where)) for where in wheres]


def _own_indices(factor: Expr) -> frozenset[Index]:
    """The indices of a factor's own subscripts, outside of index tensors."""
    found: set[Index] = set()
    waiting: list[tuple[Node, bool]] = [(factor, False)]
    while waiting:
        node, inside = waiting.pop()
        if isinstance(node, Index):
            found.add(node)
        elif isinstance(node, Load):
            waiting += [(s, True) for s in node.subscripts if not inside]
        elif isinstance(node, Op) and node.name == "select":
            waiting.append((node.args[1], inside))
        else:
            waiting += [(child, inside) for child in node.children()]
    return frozenset(found)

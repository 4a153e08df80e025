"""Statements that are two: a sparse sum and a dense product with a tensor between them.

`C[Row[g],n] += Val[g,q] * X[Col[g,q],k] * W[k,n]` forms every product of an entry with a weight, which is as many times
too much work as a row has entries. The sum over entries and the product with `W` may be taken one after the other, in
either order, and so may those of its gradients:

    dense last     T[Row[g],k] += Val[g,q] * X[Col[g,q],k]       C[i,n] += T[i,k] * W[k,n]
    dense first    T[j,n] += X[j,k] * W[k,n]                     C[Row[g],n] += Val[g,q] * T[Col[g,q],n]
    over rows      T[Row[g],k] += Val[g,q] * X[Col[g,q],k]       dW[k,n] += T[i,k] * dC[i,n]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from insum_nn.compiler.lang.derivative import fresh_name
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.lang.syntax import Access, Factor, Statement

__all__ = ["Split", "find_splits"]


@dataclass(frozen=True, slots=True)
class Split:
    """A statement as two.

    Attributes:
        first: writes `made`.
        second: reads it, and writes the output.
        made: name of the tensor between.
        dense_first: `first` is the dense product; else `second` is.
        extents: for each axis of `made`, whose extent it has: an index, or (tensor, axis); the output is "".
        fresh: indices that the whole statement lacks, with the axis that each runs over, likewise.
        inner: of a product with a weight after the sum: the index that it sums and the index that it makes.
        weight: name of that weight.
    """

    first: Statement
    second: Statement
    made: str
    dense_first: bool
    extents: tuple[str | tuple[str, int], ...]
    fresh: Mapping[str, tuple[str, int]]
    inner: tuple[str, str] | None = None
    weight: str = ""

    @property
    def dense(self) -> Statement:
        return self.first if self.dense_first else self.second

    @property
    def sparse(self) -> Statement:
        return self.second if self.dense_first else self.first

    def sizes(
        self, indices: Mapping[str, int], shapes: Mapping[str, Sequence[int]], output: Sequence[int]
    ) -> tuple[dict[str, int], tuple[int, ...]]:
        """The extents of all indices of both parts, and the shape of the tensor between."""

        def extent(of: tuple[str, int]) -> int:
            name, axis = of
            return shapes[name][axis] if name else output[axis]

        whole = {**indices, **{name: extent(of) for name, of in self.fresh.items()}}
        return whole, tuple(whole[e] if isinstance(e, str) else extent(e) for e in self.extents)

    def __str__(self) -> str:
        return f"{self.first}; {self.second}"


@lru_cache(maxsize=1024)
def find_splits(statement: Statement) -> tuple[Split, ...]:
    """Every way to take a statement as a sparse sum and a dense product.

    >>> [str(s) for s in find_splits(parse("C[Row[p],n] += Val[p] * X[Col[p],k] * W[k,n]"))]
    ['T[Row[p],k] += Val[p] * X[Col[p],k]; C[i,n] += T[i,k] * W[k,n]', \
'T[i,n] += X[i,k] * W[k,n]; C[Row[p],n] += Val[p] * T[Col[p],n]']
    >>> [str(s) for s in find_splits(parse("dW[k,n] += dC[Row[p],n] * X[Col[p],k]"))]
    ['T[Row[p],k] += X[Col[p],k]; dW[k,n] += T[i,k] * dC[i,n]', \
'T[Col[p],n] += dC[Row[p],n]; dW[k,n] += T[i,n] * X[i,k]']
    """
    if statement.operator not in ("+=", "=") or not statement.index_tensors() or len(statement.reads) < 2:
        return ()
    return tuple(_Splitter(statement).all())


class _Splitter:
    def __init__(self, statement: Statement) -> None:
        self.statement = statement
        self.taken = {statement.output.name, *statement.tensors(), *statement.indices()}
        self.made = fresh_name("T", self.taken)
        self.written = {i.name for i in statement.output.indices()}
        self.looked_up = {i.name for a in statement.accesses() for n in a.nested() for i in n.indices()}

    def all(self) -> Iterator[Split]:
        for factor in self.statement.reads:
            plain = [s.plain for s in factor.subscripts]
            if len(plain) == 2:
                a, b = plain
                if a is not None and b is not None and a != b and not {a, b} & self.looked_up:
                    for inner, outer in ((a, b), (b, a)):
                        yield from self.last(factor, inner, outer)
                        yield from self.first(factor, inner, outer)
                yield from self.over_rows(factor)

    def others(self, factor: Access) -> list[Factor]:
        return [f for f in self.statement.factors if f is not factor]

    def carriers(self, factor: Access, index: str) -> list[Access]:
        """The other factors that vary with an index."""
        others = [f for f in self.others(factor) if isinstance(f, Access)]
        return [f for f in others if any(i.name == index for i in f.indices())]

    def names(self, count: int) -> list[str]:
        """Indices that nobody has."""
        found: list[str] = []
        for _ in range(count):
            free = (letter for letter in "ijlmrstuvxyz" if letter not in self.taken and letter not in found)
            found.append(next(free, None) or fresh_name(f"i{len(found)}", {*self.taken, *found}))
        return found

    def last(self, weight: Access, inner: str, outer: str) -> Iterator[Split]:
        """The sum first, over everything but the weight."""
        output = self.statement.output
        places = [axis for axis, s in enumerate(output.subscripts) if s.plain == outer]
        if inner in self.written or len(places) != 1 or self.carriers(weight, outer):
            return
        if not self.carriers(weight, inner):
            return
        if [i.name for i in output.indices()].count(outer) != 1:
            return
        (place,) = places
        between = [inner if axis == place else str(s) for axis, s in enumerate(output.subscripts)]
        rest = " * ".join(map(str, self.others(weight)))
        first = parse(f"{self.made}[{','.join(between)}] += {rest}")
        if not first.index_tensors():
            return
        names = self.names(len(between))
        read = [inner if axis == place else names[axis] for axis in range(len(between))]
        write = [outer if axis == place else names[axis] for axis in range(len(between))]
        second = parse(f"{output.name}[{','.join(write)}] += {self.made}[{','.join(read)}] * {weight}")
        extents = tuple(inner if axis == place else ("", axis) for axis in range(len(between)))
        fresh = {name: ("", axis) for axis, name in enumerate(names) if axis != place}
        yield Split(first, second, self.made, False, extents, fresh, (inner, outer), weight.name)

    def first(self, weight: Access, inner: str, outer: str) -> Iterator[Split]:
        """The weight first, times the one factor that it shares a summed index with."""
        carriers = self.carriers(weight, inner)
        if inner in self.written or len(carriers) != 1:
            return
        (carrier,) = carriers
        plain = [s.plain for s in carrier.subscripts]
        if [i.name for i in carrier.indices()].count(inner) != 1 or inner not in plain:
            return
        if any(i.name == outer for i in carrier.indices()):
            return
        if outer not in self.written and not self.carriers(weight, outer):
            return
        place = plain.index(inner)
        names = self.names(len(plain))
        read = [inner if axis == place else names[axis] for axis in range(len(plain))]
        write = [outer if axis == place else names[axis] for axis in range(len(plain))]
        first = parse(f"{self.made}[{','.join(write)}] += {carrier.name}[{','.join(read)}] * {weight}")
        found = [outer if axis == place else str(s) for axis, s in enumerate(carrier.subscripts)]
        kept = [f"{self.made}[{','.join(found)}]" if f is carrier else str(f) for f in self.others(weight)]
        second = parse(f"{self.statement.output} += {' * '.join(kept)}")
        if not second.index_tensors():
            return
        extents = tuple(outer if axis == place else (carrier.name, axis) for axis in range(len(plain)))
        fresh = {name: (carrier.name, axis) for axis, name in enumerate(names) if axis != place}
        yield Split(first, second, self.made, True, extents, fresh)

    def over_rows(self, factor: Access) -> Iterator[Split]:
        """A factor whose rows are looked up: everything else is summed for each of its rows."""
        output = [s.plain for s in self.statement.output.subscripts]
        indirect = [axis for axis, s in enumerate(factor.subscripts) if s.indirect is not None]
        if len(indirect) != 1 or len(output) != 2 or None in output or output[0] == output[1]:
            return
        (axis,) = indirect
        outer, inner = factor.subscripts[1 - axis].plain, next(o for o in output)
        inner = output[1] if output[0] == outer else inner
        if outer is None or outer not in output or outer in self.looked_up or inner in self.looked_up:
            return
        owner = factor.subscripts[axis].indirect
        assert owner is not None
        if self.carriers(factor, outer) or any(i.name in self.written for i in owner.indices()):
            return
        if not self.carriers(factor, str(inner)):
            return
        rest = " * ".join(map(str, self.others(factor)))
        first = parse(f"{self.made}[{owner},{inner}] += {rest}")
        (row,) = self.names(1)
        read = [outer, outer]
        read[axis] = row
        second = parse(f"{self.statement.output} += {self.made}[{row},{inner}] * {factor.name}[{','.join(read)}]")
        extents = ((factor.name, axis), str(inner))
        yield Split(first, second, self.made, False, extents, {row: (factor.name, axis)})

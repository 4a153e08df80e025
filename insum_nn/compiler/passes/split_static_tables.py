"""Cut a sum over static tables in two where one side of it addresses fewer places than there are entries.

    Z[z,K[p,w]] += CG[p] * X[z,I[p,u]] * Y[z,J[p]] * W[L[p],u,w]

is `T[z,Q[p],u] += CG[p] * X[z,I[p,u]] * Y[z,J[p]]`, then `Z[z,K2[q,w]] += T[z,q,u] * W[L2[q],u,w]`: `q` counts the
pairs of a path and a component of the output, of which there are fewer than coefficients, and matrices are multiplied
by once for each. Where the grouped factors stand on the other side, as in the gradient of `Y`, they are multiplied
first: `T[z,q,u] += W[L2[q],u,w] * dZ[z,K2[q,w]]`, then `dY[z,J[p]] += CG[p] * X[z,I[p,u]] * T[z,Q[p],u]`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from insum_nn.compiler.lang.bind import Bound
from insum_nn.compiler.lang.derivative import fresh_name
from insum_nn.compiler.lang.misses import labels_of, misses_of
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.lang.syntax import Access, Index, Number, renamed
from insum_nn.compiler.passes.cut_products import Cut, index_names
from insum_nn.facts import StaticTable, Tables

__all__ = ["split_static_tables"]

# Two statements are chosen if they multiply less than this share of what one does.
_SHARE = 0.7
# In place of the extents of first axes that no table has, such as the number of samples.
_NOMINAL = 1024


def split_static_tables(bound: Bound, static: Tables, extents: Mapping[str, int]) -> Cut | None:
    """Return a statement over static tables as two; `None`: they would not save enough, or it is not of this kind.

    Args:
        bound: the statement.
        static: its static tables, which share one index.
        extents: of its indices.
    """
    tables = dict(static)
    named = {i.name for a in bound.statement.accesses() if a.name in tables for i in a.indices()}
    firsts = {a.subscripts[0].plain for a in bound.statement.accesses() if a.subscripts}
    sizes = tuple((name, _NOMINAL if name in firsts and name not in named else n) for name, n in extents.items())
    return _split(bound, static, sizes)


@lru_cache(maxsize=512)
def _split(bound: Bound, static: Tables, sizes: tuple[tuple[str, int], ...]) -> Cut | None:
    statement, tables = bound.statement, dict(static)
    entry = _entry(statement.accesses(), tables)
    # What is between two statements is as large as the messages of all edges, which none stores.
    adds = statement.combining.adds and statement.is_product
    if entry is None or not adds or not tables.keys() >= {*statement.index_tensors()}:
        return None
    return min(_Splitter(bound, tables, entry, dict(sizes)).all(), key=lambda each: each[0], default=(0, None))[1]


def _entry(accesses: Iterator[Access], tables: Collection[str]) -> str | None:
    """The index of the tables' entries: the first one of each, which addresses nothing else."""
    found: set[str | None] = set()
    others: set[str] = set()
    for access in accesses:
        plain = [s.plain for s in access.subscripts]
        if access.name in tables:
            found.add(plain[0] if plain and None not in plain else None)
            others.update(str(name) for name in plain[1:])
        else:
            others.update(str(name) for name in plain)
            others.update(t.atom.name for s in access.subscripts for t in s.terms if isinstance(t.atom, Index))
    (entry, *more) = found or {None}
    return None if more or entry in others else entry


class _Splitter:
    """The ways to cut a statement, each with its multiplications.

    Args:
        bound: the statement.
        tables: its static tables.
        entry: the index of their entries.
        sizes: extents of its indices.
    """

    def __init__(self, bound: Bound, tables: Mapping[str, StaticTable], entry: str, sizes: dict[str, int]) -> None:
        self.bound, self.statement, self.tables, self.entry = bound, bound.statement, tables, entry
        taken = {self.statement.output.name, *self.statement.tensors(), *self.statement.indices()}
        own: list[str] = []
        for base in ("T", "Q", "q", *(f"{n}_{n}" for n in self.statement.tensors() if n in tables)):
            own.append(fresh_name(base, {*taken, *own}))
        self.made, self.group_table, self.group, *tables_of_groups = own
        self.names = dict(zip((n for n in self.statement.tensors() if n in tables), tables_of_groups, strict=True))
        self.sizes = sizes
        self.numbers = {name: _numbered(_rows(table)) for name, table in tables.items()}

    def work(self, indices: Collection[str], entries: int) -> float:
        return float(entries * math.prod(self.sizes[name] for name in indices if name != self.entry))

    def all(self) -> Iterator[tuple[float, Cut]]:
        """Every cut that pays, with its multiplications."""
        reads, output = self.statement.reads, self.statement.output
        count = self.sizes[self.entry]
        most = _SHARE * self.work({i.name for a in (output, *reads) for i in a.indices()}, count)
        for size in range(1, len(reads)):
            # The last factors first, as a gradient is one: derivatives by several factors share what is made of it.
            for chosen in reversed([*itertools.combinations(range(len(reads)), size)]):
                inside = [reads[at] for at in chosen]
                outside = [access for at, access in enumerate(reads) if at not in chosen]
                inner, outer = index_names(inside), index_names([output, *outside])
                if not any(a.subscripts and a.name not in self.tables for a in inside) or self.misses(inside, outside):
                    continue
                axes = sorted((name for name in inner if name in outer and name != self.entry), key=self.inner)
                both = dict.fromkeys((*axes, *outer))
                for side in ([*outside, output], inside):
                    grouped = side is inside
                    if self.work(inner, 1 if grouped else count) + self.work(both, count if grouped else 1) >= most:
                        continue
                    groups = self.groups(side)
                    fewer = len({*groups})
                    first, second = (fewer, count) if grouped else (count, fewer)
                    work = self.work(inner, first) + self.work(both, second)
                    if fewer < count and work + self.work(axes, fewer) < most:
                        yield work, self.cut(inside, outside, axes, groups, first_grouped=grouped)

    def inner(self, name: str) -> tuple[bool, int]:
        """Where an index stands among the axes of a tensor: samples first."""
        accesses = [a for a in self.statement.accesses() if a.subscripts]
        firsts = sum(
            name in labels_of(replace(a, subscripts=a.subscripts[:1])) for a in accesses if a.name not in self.tables
        )
        return any(name in labels_of(a) for a in accesses if a.name in self.tables), -firsts

    def misses(self, inside: Sequence[Access], outside: Sequence[Access]) -> bool:
        """Whether a term may be missing by the first factors alone: the others would be multiplied by a zero."""
        again = {m for a in (*outside, self.statement.output) for m in misses_of(a, self.bound)}
        return any(miss not in again for a in inside for miss in misses_of(a, self.bound))

    def groups(self, side: Sequence[Access]) -> list[int]:
        """For each entry, the number of what the tables of some accesses hold there."""
        names = {n.name for a in side for n in (a, *a.nested()) if n.name in self.tables}
        rows = [self.numbers[name] for name in sorted(names)]
        return _numbered([tuple([row[at] for row in rows]) for at in range(self.sizes[self.entry])])

    def cut(
        self,
        inside: Sequence[Access],
        outside: Sequence[Access],
        axes: Sequence[str],
        groups: Sequence[int],
        *,
        first_grouped: bool,
    ) -> Cut:
        grouped = [*inside] if first_grouped else [*outside, self.statement.output]
        names = {n.name for a in grouped for n in (a, *a.nested()) if n.name in self.tables}
        first_of = {group: at for at, group in reversed([*enumerate(groups)])}
        tables = {self.group_table: StaticTable((len(groups),), tuple(groups))}
        for name in names:
            rows = _rows(self.tables[name])
            values = itertools.chain.from_iterable(rows[first_of[group]] for group in range(len(first_of)))
            tables[self.names[name]] = StaticTable((len(first_of), *self.tables[name].shape[1:]), tuple(values))
        numbers = [str(f) for f in self.statement.factors if isinstance(f, Number)]
        others = [str(self.grouped(a) if not first_grouped else a) for a in outside]
        output = self.grouped(self.statement.output) if not first_grouped else self.statement.output
        # Behind the samples, where the factors of most statements have the entries.
        near, far = f"{self.group_table}[{self.entry}]", self.group
        places = [*axes[:1], "", *axes[1:]]
        written, read = (
            f"{self.made}[{','.join(each or at for each in places)}]"
            for at in ((far, near) if first_grouped else (near, far))
        )
        first = f"{written} += {' * '.join(str(self.grouped(a) if first_grouped else a) for a in inside)}"
        second = f"{output} {self.statement.operator} {' * '.join([read, *others, *numbers])}"
        shape = tuple(each or len(first_of) for each in places)
        fresh = {self.group: len(first_of)}
        return Cut(parse(first), parse(second), self.made, shape, fresh, tables=tables)

    def grouped(self, access: Access) -> Access:
        """An access that reads the tables of the groups."""
        return renamed(access, self.names, {self.entry: self.group})


def _rows(table: StaticTable) -> list[tuple[int | float, ...]]:
    width = math.prod(table.shape[1:])
    return [table.values[at * width : (at + 1) * width] for at in range(table.shape[0])]


def _numbered(rows: Sequence[Hashable]) -> list[int]:
    """For each row, the number of the first one that is equal, among those that are different."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(row, len(numbers)) for row in rows]

"""Tile the loops of a kernel with several outputs: what else is made of the terms that a program walks for its rows.

    free row in 0 .. M:                                        grid row in 0 .. M:
      free b in 0 .. 64:                                         alloc acc0[b] = 0
        sum entry in r0[row] .. r0[row + 1]:                     serial entry in r0[row] .. r0[row + 1]:
          out[row, b] += t0[entry, b] * t1[entry]       ->         alloc part0[b]
          out1[entry] += t0[entry, b] * t2[row, b]                 tile b in 0 .. 64:
                                                                     acc0[b] += t0[entry, b] * t1[entry]
                                                                     part0[b] = t0[entry, b] * t2[row, b]
                                                                   alloc sum0 = 0
                                                                   tile b in 0 .. 64:
                                                                     sum0 += part0[b]
                                                                   out1[entry] = sum0
                                                                 tile b in 0 .. 64:
                                                                   out[row, b] = acc0[b]

A program has sums for the rows that it owns, and writes all else as it goes: rows of terms, which are its own, and rows
that another index tensor addresses, to which other programs add as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from insum_nn.compiler.ir.access import indices_in
from insum_nn.compiler.ir.graph import ROW
from insum_nn.compiler.ir.nodes import (
    Alloc,
    Buffer,
    Combine,
    Expr,
    If,
    Index,
    Kernel,
    Load,
    Stmt,
    Store,
    conjunction,
    conjuncts,
)
from insum_nn.compiler.passes.sum_terms import cell_sum
from insum_nn.compiler.passes.terms import select
from insum_nn.compiler.passes.tile import M, N, Tiler

__all__ = ["OutputsTiler"]


@dataclass
class _Cell:
    """A cell of an output: the first store to it, its local sum, what its terms add, and what selects the sum."""

    store: Store
    total: Buffer
    sum: Stmt
    settled: Sequence[Expr]


class OutputsTiler(Tiler):
    """Places the loops of a kernel whose first output may have the rows that programs own.

    The columns of a tile are one loop, and nothing is multiplied by the matrix unit.
    """

    def kernel(self) -> Kernel:
        groups: dict[tuple[Buffer, tuple[Expr, ...]], list[Store]] = {}
        for store in self.stores:
            groups.setdefault((store.buffer, store.subscripts), []).append(store)
        cells = [self.cell(number, stores) for number, stores in enumerate(groups.values())]
        owned = [cell for cell in cells if self.owned(cell.store)]
        further = [cell for cell in cells if not self.owned(cell.store)]
        # After all reads, which can then be moved ahead of the stores.
        body = (*self.columns([cell.sum for cell in cells]), *self.written(further))
        stores = [
            each
            for cell in owned
            for each in self.stored(cell.store, [select(cell.settled, Load(cell.total, self.column(cell.total)))])
        ]
        inner = self.summing((*(Alloc(cell.total, None) for cell in further), *body))
        inner = (*(Alloc(cell.total) for cell in owned), *inner, *self.columns(_together(stores)))
        if M in self.axes:
            inner = (self.with_body(self.axes[M], inner),)
        return self.in_programs(inner, 1, "zero")

    def owned(self, store: Store) -> bool:
        """Whether a program owns the rows that a store writes to."""
        return self.source.axis >= 0 and store.buffer is self.source.kernel.results[0].buffer

    def column(self, buffer: Buffer) -> tuple[Expr, ...]:
        return (self.axes[N].index,) if buffer.shape else ()

    def columns(self, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
        """The loop over the columns of a tile."""
        if not body or N not in self.axes:
            return tuple(body)
        return (self.with_body(self.axes[N], tuple(body)),)

    def cell(self, number: int, stores: Sequence[Store]) -> _Cell:
        """A cell with its terms, which are summed for each column of the tile."""
        store, space = stores[0], self.space()
        shape = (self.loops[self.axes[N].index.name].end,) if N in self.axes else ()
        owned = self.owned(store)
        total = Buffer(f"{'acc' if owned else 'part'}{number}", self.wide, shape, local=True)
        if not owned:
            # The sum of one entry: over columns, or over nothing.
            columns = frozenset({self.axes[N].index} if N in self.axes else ())
            space = replace(space, summed=columns - _along(store))
        value, where, settled = cell_sum(self.terms_of(stores), space)
        if owned:
            return _Cell(store, total, Store(total, self.column(total), value, "add", where), settled)
        return _Cell(store, total, Store(total, self.column(total), select(conjuncts(where), value)), settled)

    def written(self, cells: Sequence[_Cell]) -> tuple[Stmt, ...]:
        """The statements that write the cells of an entry: those that are sums over columns first."""
        totals, sums, stores, wide = list[Stmt](), list[Stmt](), list[Stmt](), list[Stmt]()
        for cell in cells:
            column, along = self.column(cell.total), N not in self.axes or self.axes[N].index in _along(cell.store)
            value = Load(cell.total, column)
            if not along:
                total = Buffer(f"sum{len(totals)}", self.wide, (), local=True)
                totals.append(Alloc(total))
                sums.append(Store(total, (), value, "add"))
                value = Load(total, ())
            store, where = cell.store, conjunction(self.address_of(cell.store))
            combine: Combine = "set" if self.alone(store) else "add"
            made = Store(store.buffer, store.subscripts, select(cell.settled, value), combine, where)
            (wide if along else stores).append(made)
        return (*totals, *self.columns(sums), *stores, *self.columns(wide))

    def alone(self, store: Store) -> bool:
        """Whether one program has all terms of a cell: those of one entry, over all columns."""
        if not any(subscript in self.source.entries for subscript in store.subscripts):
            return False
        places = _along(store)
        if self.tiling.n is not None:
            return self.axes[N].index in places or self.single(N, self.tiling.n)
        return all(Index(name) in places for name in self.tiling.grid if name != ROW.name)


def _together(statements: Sequence[Stmt]) -> list[Stmt]:
    """The statements, those under one condition in one branch."""
    found: list[Stmt] = []
    for each in statements:
        last = found[-1] if found else None
        if isinstance(each, If) and isinstance(last, If) and each.condition is last.condition:
            found[-1] = If(each.condition, (*last.then, *each.then), (*last.otherwise, *each.otherwise))
        else:
            found.append(each)
    return found


def _along(store: Store) -> frozenset[Index]:
    """The loops that the place of a store varies with."""
    return frozenset(indices_in(*store.subscripts))

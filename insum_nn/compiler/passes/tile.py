"""Tile the loops of an algorithm: which run as programs, as lanes of a tile, one after the other.

free m in 0 .. M:                               grid m_program in 0 .. cdiv(M, 16):
  free b in 0 .. B:                               grid b_program in 0 .. cdiv(B, 64):
    sum a in r0[m] .. r0[m + 1]:            ->      tile m in m_program * 16 .. m_program * 16 + 16 of M:
      out[m, b] += t0[a] * t1[x1[a], b]               tile b in b_program * 64 .. b_program * 64 + 64 of B:
                                                        alloc acc = 0
                                                        serial a_step in r0[m] .. r0[m + 1] step 8:
                                                          tile a in a_step .. a_step + 8 of r0[m + 1]:
                                                            acc += t0[a] * t1[x1[a], b]
                                                        out[m, b] = acc
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from insum_nn.compiler.ir.access import indices_in
from insum_nn.compiler.ir.build import INITIAL
from insum_nn.compiler.ir.graph import ENTRY, loops_of, statements_in, stores_of
from insum_nn.compiler.ir.nodes import (
    Alloc,
    Buffer,
    Cast,
    Combine,
    Const,
    Expr,
    If,
    Index,
    Initial,
    Kernel,
    Load,
    Loop,
    Node,
    Op,
    Precision,
    Result,
    Size,
    Stmt,
    Store,
    add,
    conjunction,
    conjuncts,
    multiply,
    replacing,
    walk,
)
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.lang.combining import selecting
from insum_nn.compiler.passes.extrema import selected
from insum_nn.compiler.passes.own_rows import RowWalk
from insum_nn.compiler.passes.sum_terms import Cell, Space, summed
from insum_nn.compiler.passes.terms import Term, term_of
from insum_nn.compiler.passes.unify_variants import switch
from insum_nn.dtypes import dtype_of

__all__ = ["WORD_BITS", "K", "Lanes", "M", "N", "Tiler", "Tiling", "parts_of"]

SPLIT, PART = Index("split"), Index("part")
# Steps to a word of 32 bits whose sign is not used.
WORD_BITS = 31
M, K, N = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Lanes:
    """Loops on the lanes of one tile axis, slowest first; `block` values of the first at a time.

    `lanes` is a power of two, at least `block` times the extents of the others, which are known. `whole`: the extent of
    the first is a multiple of `block`.
    """

    indices: tuple[str, ...]
    lanes: int
    block: int
    inner: tuple[int, ...] = ()
    whole: bool = False

    @property
    def first(self) -> str:
        """The slowest index."""
        return self.indices[0]

    @property
    def each(self) -> int:
        """Lanes of one value of the first index."""
        return math.prod(self.inner)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Where loops go, by the names of their indices.

    Attributes:
        combine: how sums reach the output: `set`, where each cell is one program's, or `add` in memory.
        m: rows of the tile.
        k: what is summed.
        n: columns of the tile.
        grid: loops of which a program has one value.
        loops: summed loops that are stepped through one by one, outermost first.
        product: positions of the factors on the left and on the right side of a matrix product, formed by `dot`.
        precision: of float32 in the matrix unit.
        few: loops of no more steps than a word has bits.
    """

    m: Lanes | None = None
    k: Lanes | None = None
    n: Lanes | None = None
    grid: tuple[str, ...] = ()
    loops: tuple[str, ...] = ()
    combine: Combine = "set"
    product: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    precision: Precision = "ieee"
    few: frozenset[str] = frozenset()

    @property
    def axes(self) -> dict[int, Lanes]:
        """The lanes of each axis of the tile."""
        every = {M: self.m, K: self.k, N: self.n}
        return {number: lanes for number, lanes in every.items() if lanes is not None}


def parts_of(kernel: Kernel) -> int:
    """Programs among which the cells of a tile of a placed kernel are divided."""
    counts = (each.end for each in statements_in(kernel.body) if isinstance(each, Loop) and each.index is PART)
    return next((int(count.value) for count in counts if isinstance(count, Const)), 1)


@dataclass
class Tiler:
    """Places the loops of one walk as a schedule and its tiling say."""

    source: RowWalk
    schedule: Schedule
    tiling: Tiling

    def __post_init__(self) -> None:
        loops, stores = loops_of(self.source.kernel), stores_of(self.source.kernel)
        self.loops = {loop.index.name: loop for loop in loops}
        self.axes: dict[int, Loop] = {}
        self.renamed: dict[Node, Node] = {}
        self.lane_conditions: dict[Index, Expr] = {}
        for number, lanes in self.tiling.axes.items():
            self.axes[number] = self.tile_loop(number, lanes)
        for name in self.tiling.loops:
            loop = self.loops[name]
            if not indices_in(loop.end).isdisjoint(each.index for each in self.axes.values()):
                # Lanes of different rows run for as long as the longest of them.
                self.lane_conditions[loop.index] = Op("less", (loop.index, loop.end))
        # Loops on shared lanes are the one loop that they became.
        self.stores = tuple(map(replacing(self.renamed), stores)) if self.renamed else stores

    # Loops.

    def tile_loop(self, number: int, lanes: Lanes) -> Loop:
        """The loop over the lanes of a tile axis; several loops on one axis become one."""
        first, each = self.loops[lanes.first], lanes.each
        index, begin, end = first.index, first.begin, first.end
        if lanes.inner:
            index = Index(f"{first.index.name}_lanes")
            begin, end = multiply(begin, Const(each)), multiply(end, Const(each))
            self.renamed[first.index] = Op("floordiv", (index, Const(each)))
            rest = each
            for name, extent in zip(lanes.indices[1:], lanes.inner, strict=True):
                rest //= extent
                outer: Expr = index if rest == 1 else Op("floordiv", (index, Const(rest)))
                self.renamed[Index(name)] = Op("mod", (outer, Const(extent)))
        if self.single(number, lanes):
            low = begin
        elif number == K:
            low = Index(f"{index.name}_step")
        else:
            low = multiply(Index(f"{index.name}_program"), Const(lanes.block * each))
        extent = end.value if isinstance(end, Const) else None
        limit: Expr | None = end
        if lanes.whole or (extent is not None and extent % (lanes.block * each) == 0):
            limit = None
        if lanes.lanes != lanes.block * each:
            stop = add(low, Const(lanes.block * each))
            limit = stop if limit is None else Op("minimum", (limit, stop))
        if limit is not None:
            self.lane_conditions[index] = Op("less", (index, limit))
        axis = 2 - number if self.transposed else number
        return Loop(index, low, add(low, Const(lanes.lanes)), "tile", (), limit=limit, axis=axis)

    @property
    def transposed(self) -> bool:
        """The matrix unit gets the product with its sides exchanged."""
        return self.tiling.product is not None and self.schedule.swap

    def single(self, number: int, lanes: Lanes) -> bool:
        """Whether one tile has all values of its loops."""
        first = self.loops[lanes.first]
        if number == M and lanes.first == ENTRY.name:
            # Its entries are no more than lanes.
            return True
        if not isinstance(first.end, Const) or first.begin is not Const(0) or first.end.value > lanes.block:
            return False
        return number != K or self.schedule.splits == 1 or bool(self.tiling.loops)

    def kernel(self) -> Kernel:
        """The kernel; one program stores a cell, unless sums meet in memory or are split."""
        cells: dict[tuple[Expr, ...], list[Store]] = {}
        for store in self.stores:
            cells.setdefault(store.subscripts, []).append(store)
        parts = _divided(list(cells.values()), self.schedule.groups)
        blocks = [self.block(part) for part in parts]
        inner = blocks[0]
        if len(blocks) > 1:
            inner = switch(PART, blocks, exact=self.wide == "float64")
        return self.in_programs(inner, len(blocks), "none" if self.covers() else "zero")

    def in_programs(self, inner: tuple[Stmt, ...], parts: int, initial: Initial) -> Kernel:
        """The kernel of what each program does."""
        kernel = self.source.kernel
        for index, count in reversed(self.programs(parts)):
            inner = (Loop(index, Const(0), count, "grid", inner),)
        results = tuple(Result(self.parts(r.buffer), initial) for r in kernel.results)
        used = {node.buffer for node in walk(*inner) if isinstance(node, Load | Store) and not node.buffer.local}
        written = {r.buffer for r in results}
        extra = sorted(used - written - {*kernel.inputs}, key=lambda b: b.name)
        inputs = tuple(b for b in (*kernel.inputs, *extra) if b in used)
        return Kernel(inputs, results, inner, kernel.exact)

    @staticmethod
    def with_body(loop: Loop, body: tuple[Stmt, ...]) -> Loop:
        return Loop(loop.index, loop.begin, loop.end, loop.role, body, loop.step, loop.limit, loop.axis)

    def covers(self) -> bool:
        """Whether the subscripts alone show that every cell of the output is written."""
        each = [store.subscripts for store in self.stores]
        plain = all(isinstance(s, Index) for subscripts in each for s in subscripts)
        return plain and len({*each[0]}) == len(each[0]) and self.tiling.combine == "set"

    def block(self, groups: Sequence[Sequence[Store]]) -> tuple[Stmt, ...]:
        """The tile for some of its cells."""
        cells = [
            Cell(Buffer(f"acc{number}", self.wide, (), local=True), self.terms_of(group))
            for number, group in enumerate(groups)
        ]
        mode, space = selecting(self.stores[0].combine), self.space()
        if mode is None:
            sums = summed(cells, space, self.tiling.product, self.tiling.precision)
        else:
            sums = selected(cells, space, mode.name)
        before = tuple(map(Alloc, sums.buffers))
        if mode is not None:
            allocs = [Alloc(b, 0 if b.dtype == "int32" else mode.identity) for b in sums.buffers]
            started = [each for group, cell in zip(groups, cells, strict=True) for each in self.started(group[0], cell)]
            before = (*allocs, *started)
        pairs = zip(groups, sums.totals, strict=True)
        stores = [each for group, total in pairs for each in self.stored(group[0], total)]
        inner: tuple[Stmt, ...] = (*before, *self.summing(sums.body), *stores)
        for number in (N, M):
            if number in self.axes:
                inner = (self.with_body(self.axes[number], inner),)
        return inner

    def stepped(self, lanes: Lanes, body: tuple[Stmt, ...], chunk: tuple[Expr, Expr] | None) -> tuple[Stmt, ...]:
        """The lanes along a sum, in as many steps as it takes."""
        body = (self.with_body(self.axes[K], body),)
        if self.single(K, lanes):
            return body
        first = self.loops[lanes.first]
        begin, end = chunk or (multiply(first.begin, Const(lanes.each)), multiply(first.end, Const(lanes.each)))
        index = Index(f"{self.axes[K].index.name}_step")
        return (Loop(index, begin, end, "serial", body, lanes.block * lanes.each),)

    def programs(self, parts: int) -> list[tuple[Index, Expr]]:
        """The grid, outermost first."""
        found: list[tuple[Index, Expr]] = []
        # Long code: programs that run at one time should be in the same part of it, which the cache holds.
        if parts > 1 and self.tiling.product is not None:
            found.append((PART, Const(parts)))
        if self.schedule.splits > 1:
            found.append((SPLIT, Const(self.schedule.splits)))
        found += [(Index(name), self.loops[name].end) for name in self.tiling.grid]
        for number, lanes in self.tiling.axes.items():
            if number != K and not self.single(number, lanes):
                first = self.loops[lanes.first]
                count: Expr = Op("cdiv", (first.end, Const(lanes.block)))
                if isinstance(first.end, Const):
                    count = Const(-(-first.end.value // lanes.block))
                elif lanes.block == 1:
                    count = first.end
                found.append((Index(f"{self.axes[number].index.name}_program"), count))
        if parts > 1 and self.tiling.product is None:
            found.append((PART, Const(parts)))
        return found

    def summing(self, sums: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """The loops over what is summed, outermost first, the lanes along it last."""
        lanes, loops = self.tiling.k, [self.loops[name] for name in self.tiling.loops]
        split = self.schedule.splits > 1
        body = sums
        if lanes is not None:
            first = self.loops[lanes.first]
            whole = multiply(first.end, Const(lanes.each))
            chunk = self.chunk(whole, lanes.block * lanes.each) if split and not loops else None
            body = self.stepped(lanes, body, chunk)
        for loop in reversed(loops):
            begin, end = loop.begin, loop.end
            if split and loop is loops[0]:
                begin, end = self.chunk(end, 1)
            elif (entries := self.may_be_missing(loop)) is not None:
                body = (self.over_present(loop, entries, body),)
                continue
            body = (Loop(loop.index, begin, end, "serial", body),)
        return body

    def may_be_missing(self, loop: Loop) -> Buffer | None:
        """An index tensor that is read at a step and a row of the tile, and may lack entries there."""
        rows = self.tiling.m
        if self.tiling.product is None or rows is None or rows.inner or rows.block != rows.lanes:
            return None
        place = (loop.index, Index(rows.indices[0]))
        for node in walk(self.stores[0].value):
            if isinstance(node, Load) and node.subscripts == place and node.buffer.dtype.startswith("int"):
                return node.buffer if node.buffer.facts.masked is not False else None
        return None

    def over_present(self, loop: Loop, entries: Buffer, body: tuple[Stmt, ...]) -> Loop:
        """The loop over the steps at which some row of the tile has an entry; the others add nothing.

        A word for each row has a bit for each of its steps.
        """
        row, steps, limit = self.axes[M].index, loop.end, entries.shape[1]
        count: Expr = Op("cdiv", (steps, Const(WORD_BITS)))
        words = Buffer(f"{entries.name}_bitmasks", "int32", (count, limit))
        in_one_word = isinstance(steps, Const) and steps.value <= WORD_BITS
        if in_one_word or loop.index.name in self.tiling.few:
            return Loop(loop.index, Const(0), steps, "serial", body, word=Load(words, (Const(0), row)))
        number = Index(f"{loop.index.name}_word")
        begin = multiply(number, Const(WORD_BITS))
        end = Op("minimum", (add(begin, Const(WORD_BITS)), steps))
        inner = Loop(loop.index, begin, end, "serial", body, word=Load(words, (number, row)))
        return Loop(number, Const(0), count, "serial", (inner,))

    def chunk(self, end: Expr, step: int) -> tuple[Expr, Expr]:
        """The range of a split sum that a program has."""
        steps = end if step == 1 else Op("cdiv", (end, Const(step)))
        length = multiply(Op("cdiv", (steps, Const(self.schedule.splits))), Const(step))
        begin = multiply(SPLIT, length)
        return begin, Op("minimum", (add(begin, length), end))

    def space(self) -> Space:
        """What a sum has to know of the loops around it."""
        summed_loops = {Index(name) for name in self.tiling.loops}
        if K in self.axes:
            summed_loops |= {self.axes[K].index, Index(f"{self.axes[K].index.name}_step")}
        return Space(
            {loop.index: number for number, loop in self.axes.items()},
            {number: each.lanes for number, each in self.tiling.axes.items()},
            self.lane_conditions,
            frozenset(summed_loops),
            self.source.kernel.exact,
            self.source.kernel.results[0].buffer.dtype,
        )

    @property
    def wide(self) -> str:
        return dtype_of(self.source.kernel.results[0].buffer.dtype).wide.name

    # The output.

    def address_of(self, store: Store) -> tuple[Expr, ...]:
        """The conditions without which a store has no address."""
        if store.where is None:
            return ()
        found: list[Expr] = []
        for subscript, extent in zip(store.subscripts, store.buffer.shape, strict=True):
            for node in walk(subscript):
                if isinstance(node, Expr):
                    found += [Op("at_least", (node, Const(0))), Op("less", (node, extent))]
        present = set(conjuncts(store.where))
        return tuple(c for c in found if c in present)

    def terms_of(self, stores: Sequence[Store]) -> tuple[Term, ...]:
        """The terms of a cell, without the conditions that its address needs anyway."""
        address, terms = self.address_of(stores[0]), map(term_of, stores)
        return tuple(t._replace(conditions=tuple(c for c in t.conditions if c not in address)) for t in terms)

    def parts(self, buffer: Buffer) -> Buffer:
        """The output, or, of what several programs have parts of, these parts."""
        if self.schedule.splits == 1:
            return buffer
        return self.of_parts(buffer.name, Const(self.schedule.splits), buffer.shape)

    def of_parts(self, name: str, count: Expr, shape: Sequence[Expr]) -> Buffer:
        """Memory for parts of cells: of an extremum, the part and a flag."""
        pair = () if selecting(self.stores[0].combine) is None else (Const(2),)
        return Buffer(name, self.wide, (count, *pair, *shape))

    def part(
        self, buffer: Buffer, at: Expr, rest: Sequence[Expr], total: Sequence[Expr], where: Expr | None
    ) -> tuple[Stmt, ...]:
        """The statements that write a part of a cell."""
        if len(total) == 1:
            return (Store(buffer, (at, *rest), total[0], "set", where),)
        values = enumerate(Cast(value, self.wide) for value in total[1:])
        return tuple(Store(buffer, (at, Const(n), *rest), value, "set", where) for n, value in values)

    def started(self, store: Store, cell: Cell) -> list[Stmt]:
        """The statements that make the initial value a term of an extremum, or of each part of it."""
        where = conjunction(self.address_of(store))
        live = Buffer(f"{cell.total.name}_live", "int32", (), local=True)
        at_row = replacing({} if self.source.target is None else {self.source.target: self.source.row})
        return [
            each
            for value in self.initial(at_row(store), where)
            for each in (Store(cell.total, (), value, store.combine, where), Store(live, (), Const(1), "max", where))
        ]

    def initial(self, store: Store, where: Expr | None) -> list[Expr]:
        """The initial value of a cell, if there is one."""
        found = [b for b in self.source.kernel.inputs if b.name == INITIAL]
        return [Cast(Load(buffer, store.subscripts, where), self.wide) for buffer in found]

    def stored(self, store: Store, total: Sequence[Expr]) -> Sequence[Stmt]:
        """The statements that write a cell."""
        result = self.source.kernel.results[0]
        where = conjunction(self.address_of(store))
        if self.schedule.splits > 1:
            return self.part(self.parts(result.buffer), SPLIT, store.subscripts, total, where)
        subscripts, value, axis = store.subscripts, total[0], self.source.axis
        target = None if self.source.target is None else subscripts[axis]
        if self.tiling.combine == "add":
            return [Store(result.buffer, subscripts, value, "add", where)]
        whole_rows = None if target is None else Op("at_least", (target, Const(0)))
        for initial in self.initial(store, conjunction([where, whole_rows])) if store.combine == "add" else ():
            value = Op("add", (value, initial))
        if result.activation is not None:
            value = Op(result.activation, (value,))
        whole = Store(result.buffer, subscripts, value, "set", where)
        if target is None:
            return [whole]
        rest = [n for n in range(len(subscripts)) if n != axis]
        workspace = self.of_parts("workspace", Size("slots"), [result.buffer.shape[n] for n in rest])
        part = self.part(workspace, Op("sub", (Const(-1), target)), [subscripts[n] for n in rest], total, where)
        return [If(Op("less", (target, Const(0))), part, (whole,))]


def _divided(cells: Sequence[Sequence[Store]], parts: int) -> list[list[Sequence[Store]]]:
    """Cells divided into parts of like work."""
    if parts >= len(cells):
        return [[group] for group in cells]
    total = sum(4 + len(group) for group in cells)
    found: list[list[Sequence[Store]]] = [[] for _ in range(max(1, parts))]
    done = 0
    for group in cells:
        found[min(len(found) - 1, done * len(found) // total)].append(group)
        done += 4 + len(group)
    return [part for part in found if part]

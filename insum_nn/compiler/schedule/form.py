"""Bound -> `Form`: the algorithm that a generated kernel computes, before a schedule places its loops.

The algorithm is a kernel of the loop-nest IR in which static tables are unrolled, so that each of its stores is one
term. Three things are decided about it here: how terms reach the output, which index tensor says the output rows that
programs own (the *row index*), and which factors are the two sides of a matrix product. Indices go by their names in
the IR; extents of a call are kept in addition to it, for choices that depend on sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import NamedTuple

from insum_nn.compiler.ir import graph
from insum_nn.compiler.ir.access import affine_terms, indices_in
from insum_nn.compiler.ir.build import build
from insum_nn.compiler.ir.canonical import canonical_key, names_of
from insum_nn.compiler.ir.graph import ROW, loops_of, stores_of
from insum_nn.compiler.ir.nodes import Buffer, Expr, Index, Kernel, Load, Store, operands, replacing
from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.lang.syntax import Apply, Factor, Number, leaves
from insum_nn.compiler.passes.gather_writes import cells_of, gather_writes
from insum_nn.compiler.passes.pipeline import unroll
from insum_nn.compiler.passes.terms import term_of
from insum_nn.compiler.schedule.choose_unrolling import Unrolling, choose_unrolling
from insum_nn.compiler.schedule.output_strategy import OutputStrategy, in_order, output_strategy
from insum_nn.compiler.schedule.plan import Plan
from insum_nn.compiler.tuning.database import size_bucket
from insum_nn.dtypes import dtype_of
from insum_nn.facts import StaticTable
from insum_nn.locks import cached_property

__all__ = [
    "CELLS",
    "ENTRY",
    "ROW_LOOP",
    "AdditionalOutput",
    "Form",
    "FormError",
    "Product",
    "atoms",
    "input_of",
    "make_form",
    "reads_of",
]

# The loop over the rows that programs own, the loop over the entries of one, and, among sizes alone, the cells of the
# whole output.
ROW_LOOP, ENTRY, CELLS = ROW.name, graph.ENTRY.name, "cells"


class FormError(Exception):
    """No kernel of the generator's kind computes the statement; the text says why."""


class Product(NamedTuple):
    """The matrix product inside a statement: which factors make either side, and the indices of its three axes."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    m: tuple[str, ...]
    k: tuple[str, ...]
    n: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AdditionalOutput:
    """A further output of a kernel that walks terms row by row.

    Attributes:
        shape: of a row; there is one for each term, or what terms add to is scattered.
        reduced: it is summed over the columns of the tile.
        like: a tensor and an axis of it, which has as many entries as this output has rows.
        scattered: terms meet in memory.
    """

    shape: tuple[int, ...]
    reduced: bool
    like: tuple[str, int]
    scattered: bool = False

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps along its axes, the first of which counts rows."""
        return tuple(math.prod(self.shape[axis:]) for axis in range(len(self.shape) + 1))


@dataclass(frozen=True)
class Form:
    """What a kernel computes.

    Attributes:
        bound: the statement.
        make: its algorithm, made once when it is first asked for.
        sizes: extents of a call, and the number of rows that programs own; they steer choices.
        strategy: how terms reach the output.
        row_index: the read of an index tensor that says the output row of each term, with `strategy == "own"`.
        row_axis: the output axis it addresses; -1: it selects a matrix of `stack`.
        entries: its indices.
        permuted: the terms of rows are not in order, but listed in a permutation.
        parallel: indices of the output that are left.
        reduce: indices summed over that are left, without `entries`.
        tables: the static tensors that are unrolled; a kernel does not read them.
        plan: what was decided for it.
        additional: further outputs, of statements that read what this one does; `bound` reads what any of them does.
        stack: where entries are taken by the matrix that they select of a stack: its place among the statement's
            tensors, and the axis of its matrices.
        cells: indices of the output that the statement lacks, since it writes at affine subscripts, and their axes.
    """

    bound: Bound
    make: Callable[[], Kernel]
    sizes: Mapping[str, int]
    strategy: OutputStrategy
    row_index: Load | None
    row_axis: int
    entries: tuple[str, ...]
    permuted: bool
    parallel: tuple[str, ...]
    reduce: tuple[str, ...]
    tables: frozenset[str]
    plan: Plan
    additional: tuple[AdditionalOutput, ...] = ()
    stack: tuple[int, int] | None = None
    cells: Mapping[str, int] = field(default_factory=dict[str, int])

    def named(self, bound: Bound) -> Form:
        """The same for a statement that differs in names."""
        renamed = dict(zip(self.bound.statement.tensors(), bound.statement.tensors(), strict=True))
        return replace(self, bound=bound, tables=frozenset(renamed[name] for name in self.tables))

    @property
    def algorithm(self) -> Kernel:
        """Its kernel, whose loops are not placed; static tables are unrolled."""
        return self.make()

    @cached_property
    def stores(self) -> tuple[tuple[Store, ...], ...]:
        """The terms of each output, at the rows of `row_index`.

        With additional outputs the first may have none: `row_index` then says in which order terms are walked, and
        nothing else.
        """
        at_rows = replacing({} if self.row_index is None else {self.row_index: ROW})
        each: dict[Buffer, list[Store]] = {result.buffer: [] for result in self.algorithm.results}
        for store in stores_of(self.algorithm):
            each[store.buffer].append(at_rows(store))
        return (*([()] if len(each) == len(self.additional) else []), *map(tuple, each.values()))

    @property
    def unrolled(self) -> tuple[Store, ...]:
        """The unrolled terms of the first output; a single one where nothing is unrolled."""
        return self.stores[0]

    @cached_property
    def static(self) -> dict[str, int]:
        """Extents that are compiled in."""
        names = names_of(self.bound.statement).indices
        return {names[name]: extent for name, extent in self.bound.static}

    @cached_property
    def factors(self) -> tuple[tuple[Load, ...], ...]:
        """The reads of each term of the first output."""
        return tuple(tuple(reads_of(store)) for store in self.unrolled)

    @cached_property
    def product(self) -> Product | None:
        """The matrix product with the most work per value read, if there is one."""
        return self.plan.get("product", lambda: _find_product(self))

    @cached_property
    def accumulators(self) -> int:
        """How many cells the terms add to."""
        return len({store.subscripts for store in self.unrolled})

    def size(self, index: str) -> int:
        """The extent of an index in the call; of a row's terms, their mean number."""
        if index == ROW_LOOP:
            return self.rows
        if index == ENTRY:
            return max(1, round(self.terms_of_all / max(1, self.rows)))
        return self.sizes[index]

    @cached_property
    def row_index_place(self) -> int:
        """The position of the index tensor of rows among the statement's; -1 without one."""
        if self.row_index is None:
            return -1
        tensors = names_of(self.bound.statement).tensors
        return [tensors[name] for name in self.bound.layout.tensors].index(self.row_index.buffer.name)

    @property
    def rows(self) -> int:
        return self.sizes.get(ROW_LOOP, 1)

    @property
    def terms(self) -> int:
        """Terms of each entry of a row: over all other indices that are summed."""
        return max(1, math.prod(self.sizes[x] for x in self.reduce))

    @property
    def terms_of_all(self) -> int:
        """Entries of all rows."""
        return math.prod(self.sizes[x] for x in self.entries)

    @cached_property
    def places(self) -> dict[str, int]:
        """The position of each index among the extents of a call."""
        names = names_of(self.bound.statement).indices
        return {names[index]: place for place, index in enumerate(self.bound.layout.indices)}

    @cached_property
    def _ends(self) -> dict[Index, Expr]:
        """Where each loop ends."""
        return {loop.index: loop.end for loop in loops_of(self.algorithm)}

    def whole_axis(self, access: Load | Store, axis: int) -> str | None:
        """The index that goes over a whole axis of a tensor, if there is one; parts of it may be tables' entries."""
        subscript, extent = access.subscripts[axis], access.buffer.shape[axis]
        if not isinstance(subscript, Index):
            return None
        return subscript.name if subscript is ROW or extent is self._ends[subscript] else None


# What stands in a term.


@lru_cache(maxsize=1 << 14)
def reads_of(store: Store) -> tuple[Load, ...]:
    """The tensors that a term is made of."""
    return tuple(read for factor in term_of(store).factors for read in operands(factor))


@lru_cache(maxsize=1 << 14)
def atoms(subscript: Expr) -> tuple[tuple[Index | Load, int], ...]:
    """The indices and entries that a subscript adds up, each once, with their coefficients."""
    found: dict[Index | Load, int] = {}
    for coefficient, atom in affine_terms(subscript)[0]:
        assert isinstance(atom, Index | Load)
        found[atom] = found.get(atom, 0) + coefficient
    return tuple((atom, coefficient) for atom, coefficient in found.items() if coefficient)


# The form of a statement.


def _is_one(factor: Factor) -> bool:
    return isinstance(factor, Apply) and factor.function == "one"


def make_form(
    bound: Bound,
    sizes: Mapping[str, int],
    output: Sequence[int],
    tables: Mapping[str, StaticTable],
    *,
    deterministic: bool,
    gathered: bool = False,
) -> Form:
    """The form of a bound statement.

    Args:
        bound: what is known of the statement and its tensors.
        sizes: extents of the first call, by the statement's indices.
        output: the output's shape in the first call.
        tables: static tensors by name.
        deterministic: several programs must not add to one cell.
        gathered: affine writes become affine reads.

    Raises:
        FormError: the statement is not of the generator's kind.
    """
    statement = bound.statement
    if not bound.dtype.is_floating_point:
        raise FormError("factors are integers")
    if all(isinstance(leaf, Number) for factor in statement.factors if not _is_one(factor) for leaf in leaves(factor)):
        raise FormError("no tensor is read")
    names = names_of(statement)
    extents = Extents(tuple([sizes[name] for name in bound.layout.indices]), tuple(output))
    plan = Plan({**canonical_key(bound, tables), "bucket": list(size_bucket(extents))})
    unrolling = cache(lambda: choose_unrolling(bound, tables))
    kernel, cells = build(bound), dict[str, int]()
    make = cache(lambda: _unroll(kernel, bound, unrolling()))
    strategy, axis, static, unrolled = plan.get("combine", lambda: _combined(bound, unrolling(), make))
    if gathered and not unrolled:
        kernel = gather_writes(kernel)
        make = cache(lambda: _unroll(kernel, bound, unrolling()))
        cells = cells_of(kernel)
        plan = plan.at(gathered=True)
        strategy, axis = plan.get("combine", lambda: output_strategy(make(), steps=False, gathered=True))
    read = statement.output.subscripts[axis].indirect if strategy == "own" else None
    row_index, entries, permuted = None, (), False
    if read is not None:
        entries = tuple(names.indices[index.name] for index in read.indices())
        row_index = Load(input_of(kernel, names.tensors[read.name]), tuple(map(Index, entries)))
        permuted = not in_order(row_index)
    loops = [loop for loop in loops_of(kernel) if loop.index.name not in unrolled]
    free, summed = ([loop.index.name for loop in loops if loop.role == role] for role in ("free", "sum"))
    own_sizes = {names.indices[name]: extent for name, extent in sizes.items()}
    own_sizes[CELLS] = math.prod(output)
    own_sizes.update((name, output[at]) for name, at in cells.items())
    parallel = tuple(i for i in free if i not in entries)
    if row_index is not None:
        parallel = (ROW_LOOP, *parallel)
        own_sizes[ROW_LOOP] = output[axis]

    form = Form(
        bound,
        make,
        own_sizes,
        strategy,
        row_index,
        axis,
        entries,
        permuted,
        parallel,
        tuple(summed),
        frozenset(name for name, own in names.tensors.items() if own in static),
        plan,
        cells=cells,
    )
    if form.strategy == "atomic" and not gathered and (deterministic or form.product is None):
        other = make_form(bound, sizes, output, tables, deterministic=deterministic, gathered=True)
        if other.strategy != "atomic":
            return other
    if row_index is not None and not deterministic and form.product is None:
        # Terms that meet only by adding to memory may still be one matrix product, which is worth more.
        scattered = _atomic(form)
        if scattered.product is not None:
            return scattered
    if form.strategy == "atomic" and (deterministic or not statement.combining.adds):
        raise FormError("several terms meet in one cell, in no fixed order")
    return form


def input_of(kernel: Kernel, name: str) -> Buffer:
    """The input of a kernel by its name."""
    return next(buffer for buffer in kernel.inputs if buffer.name == name)


def _combined(
    bound: Bound, unrolling: Unrolling, make: Callable[[], Kernel]
) -> tuple[OutputStrategy, int, list[str], list[str]]:
    """How terms reach the output and along which axis, and the names in the IR of what is unrolled: tables, indices.

    Raises:
        FormError: the statement is not of the generator's kind.
    """
    if not unrolling.places:
        raise FormError("all known factors are 0")
    if all(access.name in unrolling.tables for access in bound.statement.reads):
        raise FormError("every factor is static")
    strategy, axis = output_strategy(make(), steps=bool(unrolling.tables))
    if not all(all(map(math.isfinite, table.values)) for table in unrolling.tables.values()):
        raise FormError("a static tensor holds values that are not finite")
    names = names_of(bound.statement)
    tables = [names.tensors[name] for name in unrolling.tables if name in names.tensors]
    return strategy, axis, tables, [names.indices[name] for name in unrolling.names]


def _unroll(kernel: Kernel, bound: Bound, unrolling: Unrolling) -> Kernel:
    """The kernel with its static tables as numbers."""
    names = names_of(bound.statement)
    points = [{names.indices[name]: value for name, value in place.items()} for place in unrolling.places]
    tables = {names.tensors[name]: table for name, table in unrolling.tables.items() if name in names.tensors}
    return unroll(kernel, tables, [names.indices[name] for name in unrolling.names], points)


def _atomic(form: Form) -> Form:
    """The same statement, every term added to memory."""
    return replace(
        form,
        strategy="atomic",
        row_index=None,
        row_axis=-1,
        entries=(),
        permuted=False,
        parallel=(*form.entries, *(i for i in form.parallel if i != ROW_LOOP)),
        plan=form.plan.at(atomic=True),
    )


# The matrix product.


def _find_product(form: Form) -> Product | None:
    """Divide the factors into two sides that share summed indices and have written ones of their own."""
    if not (form.bound.statement.is_product and form.bound.statement.combining.adds):
        return None
    depends = [frozenset(i.name for i in indices_in(*{*reads})) for reads in zip(*form.factors, strict=True)]
    if not dtype_of(form.bound.dtype).has_dot or len(depends) < 2 or len(depends) > 6:
        return None
    reduced = {*form.reduce, *((ENTRY,) if form.row_index is not None and not form.stack else ())}
    own = [_named(d, form) for d in depends]
    best: tuple[float, Product] | None = None
    for sides in itertools.product((0, 1), repeat=len(depends) - 1):
        chosen = (0, *sides)
        if not any(chosen):
            continue
        left = [n for n, side in enumerate(chosen) if side == 0]
        right = [n for n, side in enumerate(chosen) if side == 1]
        l_has, r_has = (frozenset[str]().union(*(own[n] for n in side)) for side in (left, right))
        if form.stack and ENTRY in r_has:
            # Entries are the rows of a tile.
            left, right, l_has, r_has = right, left, r_has, l_has
        # A program owns one row at a time.
        m = _sorted_like(form, l_has - r_has - reduced - {ROW_LOOP})
        n = _sorted_like(form, r_has - l_has - reduced - {ROW_LOOP})
        k = [i for i in (ENTRY, *form.reduce) if i in l_has & r_has & reduced]
        if form.stack and ENTRY in m:
            m = [ENTRY]
        elif form.stack or ENTRY in l_has ^ r_has:
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
    """Dependencies with the indices of a row's terms as one."""
    inner = {ENTRY if i in form.entries else i for i in depends}
    return frozenset(inner)


def _sorted_like(form: Form, names: frozenset[str]) -> list[str]:
    return [i for i in form.parallel if i in names]

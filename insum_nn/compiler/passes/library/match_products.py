"""Find the library's products in an algorithm, and take them out of it.

A product with a sparse matrix, in compressed rows:

    out[x0[a], b] += t0[a] * t1[x1[a], b]    ->    v0[x0[a], b] += t0[a] * t1[x1[a], b]    by csr_product
                                                   out[c, b] += v0[c, b]

A product of two dense matrices at some entries only:

    out[a] += t0[a] * t1[x0[a], b] * t2[x1[a], b]    ->    v0[a] += t1[x0[a], b] * t2[x1[a], b]    by sampled_product
                                                           out[a] += t0[a] * v0[a]
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from insum_nn.compiler.ir.access import Labels, indices_of, miss_conditions, plain_labels, scattered_axes
from insum_nn.compiler.ir.graph import GraphNode, Library, factors_of, loops_of, store_of
from insum_nn.compiler.ir.nodes import Buffer, Expr, Index, Load, Result, Store, conjunction
from insum_nn.compiler.passes.library.contraction_order import multiply_in_order
from insum_nn.compiler.passes.library.read_factors import read_factors
from insum_nn.compiler.passes.library.steps import Cut, product

__all__ = ["Sampled", "SparseMatch", "find_sparse_product", "match_csr_product", "match_sampled_product"]

_LIBRARY_DTYPES = ("float32", "float64")
_ROW = "row"


@dataclass(frozen=True, slots=True)
class SparseMatch:
    """The parts of a product with a sparse matrix.

    Attributes:
        factor: position of the dense factor.
        axis: of the dense factor, that an entry's column selects; its other axes are plain.
        row_axis: the axis of the output that an entry's row selects.
        entries: the indices of the entries, the row's first.
    """

    factor: int
    axis: int
    row_axis: int
    entries: Labels


def match_csr_product(cut: Cut) -> list[GraphNode] | None:
    """The steps of `Out[Row[e],n] += Val[e] * B[Col[e],n]` by torch's CSR product; `None`: it is none."""
    target = cut.target
    if target.compiled or target.device != "cpu" or cut.dtype not in _LIBRARY_DTYPES or not target.csr:
        return None
    store = store_of(cut.kernel)
    reads, number = factors_of(store.value)
    found = find_sparse_product(store, tuple(loop.index.name for loop in loops_of(cut.kernel)))
    if found is None:
        return None
    dense = reads[found.factor]
    others = [read for position, read in enumerate(reads) if position != found.factor]
    if any(miss_conditions(read) for read in others) or (not others and number != 1):
        # Its entries are those that have a row and a column.
        return None
    texts = [*others]
    steps, others = read_factors(cut, others)
    if others:
        made, value = multiply_in_order(cut, others, number, found.entries, texts)
        steps, others = steps + made, [value]
    output, shape = store.subscripts, store.buffer.shape
    row, row_extent = output[found.row_axis], shape[found.row_axis]
    free = plain_labels([s for axis, s in enumerate(output) if axis != found.row_axis])
    extents = (row_extent, *(extent for axis, extent in enumerate(shape) if axis != found.row_axis))
    rows = Buffer(cut.buffer(()).name, cut.dtype, extents)
    loops = (*indices_of(row), *free)
    sums = tuple(label for label in found.entries if label not in loops)
    call = cut.step(
        Result(rows, "zero"), (row, *map(Index, free)), product([*others, dense]), loops, sums,
        combine="add", where=store.where,
    )  # fmt: skip
    cut.decide(
        "library", "CSR product", "one sparse matrix times one dense one; the library needs no [entries, n] tensor"
    )
    cell = tuple(Index(_ROW) if axis == found.row_axis else s for axis, s in enumerate(output))
    write = cut.write(cell, Load(rows, (Index(_ROW), *map(Index, free))), (_ROW, *free), ends={_ROW: row_extent})
    return [*steps, Library("csr_product", call.kernel), write]


def find_sparse_product(store: Store, indices: Labels) -> SparseMatch | None:
    """The parts of a store that adds up such products, under loops over some indices."""
    output = store.subscripts
    rows = [axis for axis, s in enumerate(output) if isinstance(s, Load)]
    reads = factors_of(store.value)[0]
    for position, dense in enumerate(reads):
        others = reads[:position] + reads[position + 1 :]
        picked = [axis for axis, s in enumerate(dense.subscripts) if isinstance(s, Load)]
        if len(picked) > 1 or any(not isinstance(s, Index | Load) for s in dense.subscripts):
            continue
        for axis in picked or range(len(dense.subscripts)):
            for row_axis in rows or range(len(output)):
                entries = _sparse_entries(output, indices, dense, others, axis, row_axis)
                if entries is not None:
                    return SparseMatch(position, axis, row_axis, entries)
    return None


def _sparse_entries(
    output: Sequence[Expr], indices: Labels, dense: Load, others: Sequence[Load], axis: int, row_axis: int
) -> Labels | None:
    row, col = output[row_axis], dense.subscripts[axis]
    if not isinstance(row, Load) and not isinstance(col, Load):
        return None
    free = plain_labels([s for i, s in enumerate(dense.subscripts) if i != axis])
    written = [s for i, s in enumerate(output) if i != row_axis]
    if not free or len(free) < len(dense.subscripts) - 1 or len(set(free)) < len(free):
        return None
    if len(written) != len(free) or set(map(Index, free)) != set(written):
        return None
    entries = indices_of(row, col)
    if set(entries) & set(free) or set(entries) | set(free) != set(indices):
        return None
    if any(set(indices_of(read)) & set(free) for read in others):
        return None
    if not _simple(row) or not _simple(col):
        return None
    # A gather without any sum is no matrix product.
    if not isinstance(row, Load) and len(entries) == 1:
        return None
    return entries


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled product that was taken out: its step, when an entry takes part, the store without the product."""

    step: GraphNode
    result: Load
    conditions: tuple[Expr, ...]
    store: Store


def match_sampled_product(cut: Cut) -> Sampled | None:
    """`A[Row[p],k] * B[Col[p],k]`, summed over k, by torch's sampled product."""
    if cut.target.compiled or cut.target.device != "cpu" or cut.dtype not in _LIBRARY_DTYPES:
        return None
    store = store_of(cut.kernel)
    reads, number = factors_of(store.value)
    for i, j in itertools.combinations(range(len(reads)), 2):
        others = [read for k, read in enumerate(reads) if k not in (i, j)]
        parts = _sampled_parts(store, reads[i], reads[j], others)
        if parts is not None:
            inner, entries = parts
            pair = (reads[i], reads[j])
            conditions = tuple(dict.fromkeys(c for read in pair for c in miss_conditions(read)))
            made, result = cut.intermediate(entries, product([*pair]), inner, where=conjunction(conditions))
            cut.decide(
                "library", "sampled product", "a dense product at some entries only; the library needs no gathered rows"
            )
            rest = Store(store.buffer, store.subscripts, product([result, *others], number), store.combine, store.where)
            return Sampled(Library("sampled_product", made.kernel), result, conditions, rest)
    return None


def _sampled_parts(store: Store, near: Load, far: Load, others: Sequence[Load]) -> tuple[Labels, Labels] | None:
    """The summed indices, and those of the entries."""
    inner = set(indices_of(near)) & set(indices_of(far))
    inner -= set(indices_of(*store.subscripts, *others))
    chosen: list[Expr] = []
    for read in (near, far):
        free = [s for s in read.subscripts if not (isinstance(s, Index) and s.name in inner)]
        plain = [s.name for s in read.subscripts if isinstance(s, Index) and s.name in inner]
        if len(free) != 1 or not _simple(free[0]) or sorted(plain) != sorted(inner):
            return None
        chosen.append(free[0])
    row, col = chosen
    entries = indices_of(row, col)
    # Two plain subscripts are a dense product; without a sum there is only a gather.
    if not inner or set(entries) & inner or (isinstance(row, Index) and isinstance(col, Index)):
        return None
    # Another factor may narrow the entries only after the fact, so it must speak of them as they are.
    if any(scattered_axes(read.subscripts) or not set(indices_of(read)) <= set(entries) for read in others):
        return None
    return tuple(label for label in indices_of(near) if label in inner), entries


def _simple(subscript: Expr) -> bool:
    """A plain index, or an index tensor read at different plain indices."""
    return isinstance(subscript, Index) or (isinstance(subscript, Load) and not scattered_axes(subscript.subscripts))

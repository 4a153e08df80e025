"""Find the product with a sparse matrix that graphs which torch records form as sums of bags.

    out[x0[a], b] += t0[a] * t1[x1[a], b]    ->    v0[x0[a], b] += t0[a] * t1[x1[a], b]    by bag_product
                                                   out[c, b] += v0[c, b]

An affine subscript with entries of index tensors selects too, as in `t1[a+x1[b], c]`; where it lies outside of the
dense matrix there is no entry.

Several subscripts may select a row or a column together, `t1[x1[a], x2[a], b]`, and an index may stand among them in
both, as the heads `h` do in `out[x0[a], h, b] += t0[a, h] * t1[x1[a], h, b]`: there is an entry for each `a` and `h`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from insum_nn.compiler.ir.access import Labels, affine_terms, indices_of, miss_conditions, plain_labels, scattered_axes
from insum_nn.compiler.ir.graph import GraphNode, Library, factors_of, loops_of, store_of
from insum_nn.compiler.ir.nodes import Buffer, Expr, Index, Load, Result, Store
from insum_nn.compiler.passes.library.contraction_order import multiply_in_order
from insum_nn.compiler.passes.library.read_factors import read_factors
from insum_nn.compiler.passes.library.steps import Cut, product
from insum_nn.dtypes import dtype_of

__all__ = ["match_bag_product"]

_ROW = "row"


@dataclass(frozen=True, slots=True)
class _Match:
    """The parts of a product with a sparse matrix.

    Attributes:
        factor: position of the dense factor.
        axes: of the dense factor, that an entry's column selects; its other axes are plain.
        row_axes: the axes of the output that an entry's row selects.
        entries: the indices of the entries, the row's first.
    """

    factor: int
    axes: tuple[int, ...]
    row_axes: tuple[int, ...]
    entries: Labels


def match_bag_product(cut: Cut) -> list[GraphNode] | None:
    """The steps of `Out[Row[e],n] += Val[e] * B[Col[e],n]` by sums of bags; `None`: it is none."""
    if cut.target.device != "cpu" or not dtype_of(cut.dtype).has_sparse_products or not cut.target.bags:
        return None
    store = store_of(cut.kernel)
    reads, number = factors_of(store.value)
    found = _find(store, tuple(loop.index.name for loop in loops_of(cut.kernel)))
    if found is None:
        return None
    dense = reads[found.factor]
    others = [read for position, read in enumerate(reads) if position != found.factor]
    output, shape = store.subscripts, store.buffer.shape
    rows = [output[axis] for axis in found.row_axes]
    # Entries without a row or a column take no part, whatever their value.
    left_out = {*miss_conditions(Load(store.buffer, output)), *miss_conditions(dense)}
    if any(set(miss_conditions(read)) - left_out for read in others) or (not others and number != 1):
        return None
    steps, factors = read_factors(cut, others)
    if factors:
        made, value = multiply_in_order(cut, factors, number, found.entries, others)
        steps, factors = steps + made, [value]
    free = plain_labels([s for axis, s in enumerate(output) if axis not in found.row_axes])
    names = {axis: f"{_ROW}{place or ''}" for place, axis in enumerate(found.row_axes)}
    extents = [shape[axis] for axis in found.row_axes]
    extents += [extent for axis, extent in enumerate(shape) if axis not in found.row_axes]
    product_rows = Buffer(cut.buffer(()).name, cut.dtype, tuple(extents))
    loops = (*indices_of(*rows), *free)
    sums = tuple(label for label in found.entries if label not in loops)
    call = cut.step(
        Result(product_rows, "zero"), (*rows, *map(Index, free)), product([*factors, dense]), loops, sums,
        combine="add", where=store.where,
    )  # fmt: skip
    cut.decide(
        "library", "sum of bags", "one sparse matrix times one dense one; the library needs no [entries, n] tensor"
    )
    cell = tuple(Index(names[axis]) if axis in names else s for axis, s in enumerate(output))
    over = (*names.values(), *free)
    ends = {name: shape[axis] for axis, name in names.items()}
    write = cut.write(cell, Load(product_rows, tuple(map(Index, over))), over, ends=ends)
    return [*steps, Library("bag_product", call.kernel), write]


def _find(store: Store, indices: Labels) -> _Match | None:
    """The parts of a store that adds up such products, under loops over some indices."""
    output = store.subscripts
    reads = factors_of(store.value)[0]
    if not all(map(_simple, output)):
        return None
    for position, dense in enumerate(reads):
        if all(map(_simple, dense.subscripts)):
            others = reads[:position] + reads[position + 1 :]
            entries = _entry_labels([*output, *dense.subscripts], others)
            rows, columns = _selected(output, entries), _selected(dense.subscripts, entries)
            found = _sparse_entries(output, dense.subscripts, indices, others, rows, columns)
            if found is not None:
                return _Match(position, columns, rows, found)
    return None


def _entry_labels(subscripts: Sequence[Expr], others: Sequence[Load]) -> set[str]:
    """The indices of a product's entries: those of index tensors, and of its other factors."""
    return set(indices_of(*_pointers(subscripts), *others))


def _selected(subscripts: Sequence[Expr], entries: set[str]) -> tuple[int, ...]:
    """The axes that entries select along."""
    return tuple(axis for axis, s in enumerate(subscripts) if set(indices_of(s)) <= entries)


def _sparse_entries(
    output: Sequence[Expr],
    dense: Sequence[Expr],
    indices: Labels,
    others: Sequence[Load],
    row_axes: tuple[int, ...],
    axes: tuple[int, ...],
) -> Labels | None:
    rows, columns = [output[axis] for axis in row_axes], [dense[axis] for axis in axes]
    pointers = _pointers([*rows, *columns])
    free = plain_labels([s for axis, s in enumerate(dense) if axis not in axes])
    written = plain_labels([s for axis, s in enumerate(output) if axis not in row_axes])
    if not (pointers and rows and columns and free) or len(set(free)) < len(free):
        return None
    if len(written) != len(free) or set(written) != set(free):
        return None
    entries = indices_of(*rows, *columns)
    if set(entries) & set(free) or set(entries) | set(free) != set(indices) or set(indices_of(*others)) & set(free):
        return None
    if max(len(rows), len(columns)) > 1 and _blocked(rows, columns):
        return None
    # A gather without any sum is no matrix product.
    if plain_labels(rows) == entries:
        return None
    return entries


def _blocked(rows: Sequence[Expr], columns: Sequence[Expr]) -> bool:
    """Whether a row or a column alone has an index of no index tensor: an axis of blocks, multiplied whole."""
    entries = (atom for s in (*rows, *columns) for _, atom in affine_terms(s)[0] if isinstance(atom, Load))
    return bool((set(plain_labels(rows)) ^ set(plain_labels(columns))) - set(indices_of(*entries)))


def _pointers(subscripts: Sequence[Expr]) -> list[Expr]:
    """The subscripts with entries of index tensors."""
    return [s for s in subscripts if not isinstance(s, Index)]


def _simple(subscript: Expr) -> bool:
    """A plain index, an index tensor read at different plain indices, or a sum of such with an index tensor among them.

    A convolution's windows are slices, which a library reads as they lie.
    """
    if isinstance(subscript, Index):
        return True
    atoms = [atom for _, atom in affine_terms(subscript)[0]]
    loads = [atom for atom in atoms if isinstance(atom, Load)]
    return bool(loads) and not any(scattered_axes(load.subscripts) for load in loads)

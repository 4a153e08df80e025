"""Walk entries by the matrix of a stack that multiplies them, so that neighbours share what is read of it.

    free a in 0 .. A:                               free row in 0 .. M:
      free b in 0 .. B:                      ->       free entry in begin[row] .. begin[row + 1]:
        sum c in 0 .. C:                                free b in 0 .. B:
          out[a, b] += t0[a, c] * t1[x0[a], c, b]         sum c in 0 .. C:
                                                            out[e, b] += t0[e, c] * t1[row, c, b]

with e = order[entry].

The walk is the one of rows that are owned (`own_rows`), but the rows are those of a factor. For a GPU
`schedule/group_by_key.py` decides on it.
"""

from __future__ import annotations

from insum_nn.compiler.ir.access import indices_in
from insum_nn.compiler.ir.graph import ROW, extent_of, factors_of, loops_of, stores_of
from insum_nn.compiler.ir.nodes import Expr, Index, Kernel, Load, Store, walk
from insum_nn.compiler.passes.cpu.transpose_operands import swapped_axis
from insum_nn.compiler.passes.gather_writes import nested
from insum_nn.compiler.passes.own_rows import RowWalk, own_rows

__all__ = ["group_entries", "plain_entry"]


def plain_entry(subscript: Expr) -> bool:
    """Whether a subscript is an entry that is read at different indices, as a walk by rows takes it."""
    if not isinstance(subscript, Load) or subscript.where is not None or not subscript.subscripts:
        return False
    parts = subscript.subscripts
    return all(isinstance(s, Index) for s in parts) and len({*parts}) == len(parts)


def group_entries(kernel: Kernel) -> tuple[RowWalk, Load, Expr] | None:
    """Walk a kernel of one store by the matrices of a stack, if it has one that a sum and all dense columns share.

    Returns:
        The walk, the read that selects a matrix, and how many matrices there are.
    """
    stores = stores_of(kernel)
    selected = _selected(kernel, stores[0]) if len(stores) == 1 and stores[0].combine == "add" else None
    if selected is None:
        return None
    entry, count = selected
    walk_ = own_rows(kernel, entry, -1, permuted=True, rows=count)
    walked = walk_.kernel
    # The rows are no index of the output, but bound the entries, of which each is in one row only.
    body = nested(loops_of(walked), stores_of(walked), frozenset((ROW,)))
    grouped = Kernel(walked.inputs, walked.results, body, walked.exact)
    return RowWalk(grouped, -1, walk_.entries), entry, count


def _selected(kernel: Kernel, store: Store) -> tuple[Load, Expr] | None:
    loops = loops_of(kernel)
    by_index = {loop.index: loop for loop in loops}
    sums: dict[Expr, int | None] = {loop.index: extent_of(loop) for loop in loops if loop.role == "sum"}
    looked_up = indices_in(
        *(s for node in walk(store) if isinstance(node, Load | Store) for s in node.subscripts if isinstance(s, Load))
    )
    dense = {loop.index for loop in loops if loop.role == "free"} - looked_up
    factors = [f for f in factors_of(store.value) if isinstance(f, Load) and len(f.subscripts) > 2]
    for factor in sorted(factors, key=lambda each: each.subscripts[-1] in sums):
        *_, last = factor.subscripts
        if sums.keys().isdisjoint(factor.subscripts) or not dense <= indices_in(factor):
            continue
        for subscript, extent in zip(factor.subscripts, factor.buffer.shape, strict=True):
            if plain_entry(subscript) and subscript not in store.subscripts:
                assert isinstance(subscript, Load)
                # A matrix whose rows are summed is shared by lanes that are added up at the end: of short rows that
                # costs more, unless a copy of it is read.
                copied = swapped_axis(factor, store.subscripts[-1:], by_index, subscript) is not None
                if sums.get(last) is None or copied:
                    return subscript, extent
    return None

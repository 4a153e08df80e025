"""Keep the factors of terms that miss out of a sum: as they are read, or as the sum is written.

    out[b] += t0[b, a] * (t1[x0[a]] if x0[a] >= 0 else 0)   where x0[a] >= 0
    ->
    out[b] += (t0[b, a] if x0[a] >= 0 else 0) * (t1[x0[a]] if x0[a] >= 0 else 0)

A factor that varies with every index of a condition is read as 0 where the condition is false. Where each cell of the
sum varies with it, fewer values are set to 0 when the sum is written, and what does not vary with the condition is kept
out too. What does neither (a convolution's weight) is multiplied by a zero.
"""

from __future__ import annotations

from insum_nn.compiler.ir.access import entries, indices_of, miss_conditions
from insum_nn.compiler.ir.graph import factors_of
from insum_nn.compiler.ir.nodes import Const, Expr, Index, Load, Op, Store, conjunction, conjuncts
from insum_nn.compiler.passes.library.steps import Cut, product

__all__ = ["guard_factors", "path_conditions"]


def guard_factors(cut: Cut, store: Store) -> Store:
    """The store with its terms' conditions at the reads, and with those alone that a write needs.

    Args:
        cut: the algorithm.
        store: its store, a sum of products.
    """
    reads, number = factors_of(store.value)
    output = indices_of(*store.subscripts)
    paths = {read: miss_conditions(read) for read in reads}
    every = dict.fromkeys(condition for path in paths.values() for condition in path)
    guards: dict[Load, dict[Expr, None]] = {read: {} for read in reads}
    at_write: dict[Expr, None] = {}
    unguarded = False
    for condition in every:
        labels = set(indices_of(condition))
        others = [read for read in reads if condition not in paths[read]]
        varying = [read for read in others if labels <= set(indices_of(read))]
        # In a gradient every factor counts; else one that does not vary with the miss may be multiplied by zero.
        needed = others if cut.kernel.exact else varying
        if needed and labels <= set(output):
            each = sum(cut.cells(indices_of(read)) for read in varying)
            if len(varying) < len(needed) or cut.cells(output) <= each:
                at_write[condition] = None
                continue
        for read in varying:
            guards[read][condition] = None
        unguarded |= len(varying) < len(others)
    if unguarded and cut.kernel.exact:
        # A gradient is exactly 0 where all terms miss, whatever the factors are.
        at_write |= every
    guarded = [
        Load(read.buffer, read.subscripts, conjunction((read.where, *guards[read])), read.fill) for read in reads
    ]
    where = conjunction((*path_conditions(store), *at_write))
    return Store(store.buffer, store.subscripts, product([*guarded], number), store.combine, where)


def path_conditions(store: Store) -> tuple[Expr, ...]:
    """The conditions of a store that are about the address it writes to."""
    own: set[Expr] = set()
    for subscript, extent in zip(store.subscripts, store.buffer.shape, strict=True):
        own |= {Op("at_least", (entry, Const(0))) for entry in entries(subscript)}
        if not isinstance(subscript, Index | Load):
            own |= {Op("at_least", (subscript, Const(0))), Op("less", (subscript, extent))}
    return tuple(condition for condition in conjuncts(store.where) if condition in own)

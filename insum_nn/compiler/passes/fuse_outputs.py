"""Make one kernel of several that go over the same loops, so that what they read is read once.

free a in 0 .. A:                                         free a in 0 .. A:
free b in 0 .. 64:                                        free b in 0 .. 64:
out[x0[a], 0, b] += t0[a, b] * t2[x1[a], 1, b]            out[x0[a], 0, b] += t0[a, b] * t2[x1[a], 1, b]
and                                                ->         out1[a, b] += t1[x0[a], 0, b] * t2[x1[a], 1, b]
free a in 0 .. A:
free b in 0 .. 64:
out1[a, b] += t1[x0[a], 0, b] * t2[x1[a], 1, b]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from insum_nn.compiler.ir.graph import around, loops_of, stores_of
from insum_nn.compiler.ir.nodes import Buffer, Expr, Index, Kernel, Load, Loop, Store
from insum_nn.compiler.ir.printer import show
from insum_nn.compiler.passes.terms import term_of

__all__ = ["clusters", "fuse_outputs"]


def fuse_outputs(kernels: Sequence[Kernel]) -> Kernel:
    """The algorithm that has the results of all; loops of one index are one, and what adds to one result is one sum."""
    loops: dict[Index, Loop] = {}
    for kernel in kernels:
        own = loops_of(kernel)
        assert not loops or loops.keys() == {loop.index for loop in own}, "kernels over other loops"
        for loop in own:
            if loop.role == "free" or loop.index not in loops:
                loops[loop.index] = loop
    body = around(loops.values(), tuple(store for kernel in kernels for store in stores_of(kernel)))
    inputs = tuple(dict.fromkeys(buffer for kernel in kernels for buffer in kernel.inputs))
    results = tuple(dict.fromkeys(result for kernel in kernels for result in kernel.results))
    return Kernel(inputs, results, body, all(kernel.exact for kernel in kernels))


def clusters(kernel: Kernel) -> tuple[tuple[int, ...], ...]:
    """The stores of a fused kernel, by position, in the order in which they are to be computed.

    Those that share most come together, so that what they read and sum is alive for a short while: each cluster has
    the terms that meet one cell of one tensor, the one of which most cells of the others meet one cell only.
    """
    stores = stores_of(kernel)
    of_result = {r.buffer: [n for n, store in enumerate(stores) if store.buffer is r.buffer] for r in kernel.results}
    read = [{f.buffer: f.subscripts for f in term_of(store).factors if isinstance(f, Load)} for store in stores]
    for buffer, own in of_result.items():
        kind = _stands_for(buffer, own, stores, read) or buffer
        for position in own:
            read[position][kind] = stores[position].subscripts
    cells = [{b: str([*map(show, subscripts)]) for b, subscripts in each.items()} for each in read]
    shared = set.intersection(*(set(each) for each in cells))
    if not shared:
        return (tuple(range(len(stores))),)

    def separation(kind: Buffer) -> tuple[int, int]:
        """Rank a tensor: by how many cells share terms with one of its own only, then by how few pairs share any."""
        cells_of: dict[tuple[Buffer, str], set[str]] = {}
        for each in cells:
            for cell in each.items():
                cells_of.setdefault(cell, set()).add(each[kind])
        return sum(len(mine) == 1 for mine in cells_of.values()), -sum(len(mine) for mine in cells_of.values())

    kind = max(sorted(shared, key=lambda b: b.name), key=separation)
    # In one order for all results, so that equal sums are recognised.
    order = sorted(shared, key=lambda b: (b is not kind, b.name))
    found: dict[str, list[int]] = {}
    for own in of_result.values():
        for position in sorted(own, key=lambda n: [cells[n][b] for b in order]):
            found.setdefault(cells[position][kind], []).append(position)
    return tuple(map(tuple, found.values()))


def _stands_for(
    result: Buffer,
    own: Iterable[int],
    stores: Sequence[Store],
    read: Sequence[dict[Buffer, tuple[Expr, ...]]],
) -> Buffer | None:
    """The tensor that other results read where this one is written, if there is one: it is this one's gradient."""
    places = {stores[position].subscripts for position in own}
    own_buffers = {buffer for position in own for buffer in read[position]}
    seen: dict[Buffer, set[tuple[Expr, ...]]] = {}
    for store, cells in zip(stores, read, strict=True):
        for buffer, subscripts in cells.items():
            if store.buffer is not result and buffer not in own_buffers:
                seen.setdefault(buffer, set()).add(subscripts)
    return next((buffer for buffer, cells in seen.items() if places <= cells), None)

"""Say whether two points of the free loops of an algorithm may write one cell, and whether all cells are written."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from collections.abc import Set as AbstractSet

import numpy as np
import numpy.typing as npt

from insum_nn.compiler.ir.access import affine_terms, coefficient, indices_in
from insum_nn.compiler.ir.graph import ENTRY, ROW, loops_of, stores_of
from insum_nn.compiler.ir.lowered import WrittenCells
from insum_nn.compiler.ir.nodes import Const, Expr, Index, Kernel, Load, Loop, walk

__all__ = ["written_cells"]

# Cells up to which they are listed.
_MOST = 1 << 18


def written_cells(kernel: Kernel, entries: Sequence[Expr] = (), unique: Container[str] = ()) -> WrittenCells:
    """Compare the subscripts of all stores.

    Args:
        kernel: the algorithm.
        entries: what an entry of a walk by rows stands at.
        unique: index tensors whose entries are taken for unique.
    """
    loops = {loop.index: loop for loop in loops_of(kernel)}
    targets = [*dict.fromkeys(store.subscripts for store in stores_of(kernel))]
    free = {index for index, loop in loops.items() if loop.role == "free"}
    known = _identified(targets[0], entries, unique)
    columns = zip(*targets, strict=True)
    apart = frozenset(c[0] for c in columns if isinstance(c[0], Index) and all(s is c[0] for s in c))
    # Entries stand for their rows.
    identified = len(targets) == 1 and free <= {*known, *({ROW} if ENTRY in known else ())}
    once, whole = _counted(targets, loops, stores_of(kernel)[0].buffer.shape, free, known)
    return WrittenCells(identified or once, whole, apart)


def _identified(target: Sequence[Expr], entries: Sequence[Expr], unique: Container[str]) -> set[Index]:
    """The indices that follow from where a store writes."""
    found = {s for s in target if isinstance(s, Index)}
    reads = [s for s in target if isinstance(s, Load) and s.where is None]
    facts = [(read.buffer.name, read.buffer.facts) for read in reads]
    groups = [{name, *f.unique_with} for name, f in facts if f.unique_with]
    for names in (*groups, *({name} for name, f in facts if f.unique or name in unique)):
        group = [read for read in reads if read.buffer.name in names]
        # An entry of each at every place of the longest one.
        longest = max((each.subscripts for each in group), key=len)
        together = all(longest[: len(each.subscripts)] == each.subscripts for each in group)
        if together and {each.buffer.name for each in group} == names:
            found |= {index for index in longest if isinstance(index, Index)}
    if entries and {*entries} <= {*target}:
        found.add(ENTRY)
    return found


def _counted(
    targets: Sequence[tuple[Expr, ...]],
    loops: dict[Index, Loop],
    shape: Sequence[Expr],
    free: Iterable[Index],
    known: AbstractSet[Index],
) -> tuple[bool, bool]:
    """Count the cells along the axes in which subscripts are more than one index or known entry alone."""
    axes, first = [*range(len(targets[0]))], targets[0]
    told = [
        a for a in axes if isinstance(first[a], Index) or (isinstance(first[a], Load) and indices_in(first[a]) <= known)
    ]
    alike = [a for a in told if all(t[a] is first[a] for t in targets)]
    plain = [s for a in alike if isinstance(s := first[a], Index)]
    common = indices_in(*(first[a] for a in alike))
    rest = [a for a in axes if a not in alike]
    if len({*plain}) < len(plain) or not {*free} <= common | indices_in(*(t[a] for t in targets for a in rest)):
        return False, False
    whole = len(plain) == len(alike) and all(
        loops[i].begin is Const(0) and loops[i].end is shape[a] for a in alike if isinstance(i := first[a], Index)
    )
    if not rest:
        return True, whole
    found, count = list[npt.NDArray[np.int64]](), 0
    for target in targets:
        subscripts = [target[a] for a in rest]
        inner = sorted(indices_in(*subscripts), key=lambda index: index.name)
        ends = [loops[index].end for index in inner]
        lookups = any(isinstance(n, Load) for n in walk(*subscripts))
        if common & {*inner} or lookups or any(coefficient(s, i) is None for s in subscripts for i in inner):
            return False, False
        if any(not isinstance(end, Const) for end in ends):
            return len(targets) == 1 and _digits(subscripts, loops), False
        extents = [int(end.value) for end in ends if isinstance(end, Const)]
        count += math.prod(extents)
        if count > _MOST:
            return False, False
        at = dict(zip(inner, np.indices((*extents, 1)).reshape(len(inner) + 1, -1)[:-1], strict=True))
        terms = [affine_terms(s) for s in subscripts]
        columns = [offset + sum(k * at[a] for k, a in own if isinstance(a, Index)) for own, offset in terms]
        found.append(np.stack([np.broadcast_to(c, math.prod(extents)) for c in columns], -1))
    cells = [shape[a] for a in rest]
    sized = all(isinstance(extent, Const) for extent in cells)
    different = len(np.unique(np.concatenate(found), axis=0))
    full = whole and sized and different == math.prod(int(e.value) for e in cells if isinstance(e, Const))
    return different == count, full


def _digits(subscripts: Sequence[Expr], loops: dict[Index, Loop]) -> bool:
    """Whether indices stand in subscripts as digits in a number: each step is longer than all shorter ones reach."""
    seen = list[Expr]()
    for subscript in subscripts:
        terms, reached = sorted(affine_terms(subscript)[0], key=lambda term: abs(term[0])), 0
        for place, (step, index) in enumerate(terms):
            end = loops[index].end if isinstance(index, Index) else None
            if abs(step) <= reached or not (isinstance(end, Const) or place == len(terms) - 1):
                return False
            reached += abs(step) * (int(end.value) - 1) if isinstance(end, Const) else 0
            seen.append(index)
    return len(seen) == len({*seen})

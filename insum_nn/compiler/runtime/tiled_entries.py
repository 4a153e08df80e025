"""Take the entries of a sum in tiles of one key, so that library calls multiply matrices.

    dW[Off[p],c,d] += X[In[p],c] * dY[Out[p],d]

is `dW[K[t],c,d] += X[In[E[t,q]],c] * dY[Out[E[t,q]],d]`: tile `t` has entries `E[t,0]`, `E[t,1]`, ... of key `K[t]`,
and -1 behind the last. What is added up is a matrix for each tile, not for each entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from insum_nn.compiler.kernels.row_partition import tiles_of
from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.lang.derivative import fresh_name
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.lang.syntax import Statement, replaced, substituted
from insum_nn.compiler.runtime.statement_cuts import bound_part
from insum_nn.facts import IndexFacts

__all__ = ["tiled"]

_TILE = 32


def tiled(bound: Bound, tensors: Sequence[Tensor], extents: Extents) -> tuple[Bound, Sequence[Tensor], Extents]:
    """Return a statement, its tensors and its sizes, in tiles if each key has many entries; otherwise as they are."""
    statement, sizes = bound.statement, dict(zip(bound.layout.indices, extents.indices, strict=True))
    output, same = statement.output, (bound, tensors, extents)
    (axis, *more) = [n for n, s in enumerate(output.subscripts) if s.plain is None] or [0, 0]
    key = None if more else output.subscripts[axis].indirect
    entry = key.subscripts[0].plain if key is not None and len(key.subscripts) == 1 else None
    plain = {s.plain for s in output.subscripts}
    # A factor with all axes of the output is added up as it is.
    added = any(plain - {None} <= {s.plain for s in read.subscripts} for read in statement.reads)
    if key is None or entry is None or entry in plain or added or not statement.combining.adds:
        return same
    rows = extents.output[axis]
    if not 0 < _TILE * rows <= sizes[entry]:
        return same
    names = list[str]()
    for base in "KEtq":
        names.append(fresh_name(base, {output.name, *statement.tensors(), *sizes, *names}))
    of_tile, entries, tile, place = names
    # Two subscripts: where a tile goes, and its entries.
    made = parse(f"A[{of_tile}[{tile}]] += B[{entries}[{tile},{place}]]")
    subscripts = [*output.subscripts]
    (subscripts[axis],), (within,) = made.output.subscripts, made.reads[0].subscripts
    factors = tuple(
        replaced(factor, lambda access: substituted(access, {entry: within})) for factor in statement.factors
    )
    changed = Statement(replace(output, subscripts=tuple(subscripts)), statement.operator, factors, "")
    named = dict(zip(bound.layout.tensors, tensors, strict=True))
    flat, order = named[key.name].sort(stable=True)
    tiles = tiles_of(flat, order, rows, _TILE, torch.int64)
    assert tiles.end is not None
    assert tiles.row_of is not None
    at = tiles.begin[:, None] + torch.arange(_TILE, device=flat.device)
    at = torch.where(at < tiles.end[:, None], order[at.clamp(max=order.shape[0] - 1)], -1)
    named |= {of_tile: tiles.row_of, entries: at}
    sizes |= {tile: tiles.rows, place: _TILE}
    known = {of_tile: IndexFacts(masked=False), entries: IndexFacts()}
    part = bound_part(bound, parse(str(changed)), {name: (torch.int64, facts) for name, facts in known.items()})
    layout = part.layout
    indices = tuple(sizes[name] for name in layout.indices)
    return part, [named[name] for name in layout.tensors], Extents(indices, extents.output)

"""Cut a statement in several where these take much less work, one after the other.

    Y[D[e],o] += Inv[D[e],R[e]] * X[S[e],c] * W[R[e],c,o]

is `T[i,j,o] += X[i,c] * W[j,c,o]`, then `Y[D[e],o] += T[S[e],R[e],o] * Inv[D[e],R[e]]`. Each statement has the program
that it would have alone. The choice is by counts (`schedule.product_cost`), made once for a statement and all sizes
within a factor of 1.4, on every device and for derivative statements too; nothing is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from insum_nn.compiler.lang.bind import Bound, Extents, layout_of
from insum_nn.compiler.lang.epilogue import PLAIN
from insum_nn.compiler.lang.misses import labels_of
from insum_nn.compiler.lang.syntax import Statement
from insum_nn.compiler.options import Options
from insum_nn.compiler.passes.cut_products import Axis, Cut, cuts_of
from insum_nn.compiler.passes.split_static_tables import split_static_tables
from insum_nn.compiler.runtime.backends import choose_backend
from insum_nn.compiler.runtime.read_cells import UnreadCells
from insum_nn.compiler.schedule.product_cost import Cost, Sizes, cost_of, machine_of, multiplies_blocks
from insum_nn.dtypes import is_widened
from insum_nn.facts import UNKNOWN, IndexFacts, Tables

__all__ = ["WHOLE", "Part", "Tree", "both_of", "bound_part", "decide", "fits", "price_of", "sizes_of", "total"]

# A statement is cut if that costs less than this share of the whole: counts are no times. For products of blocks they
# agree with times measured on a CPU and a GPU, so there they decide.
_SHARE = 0.7
# Bytes that an intermediate tensor may have: so many times those of what is read and written, or this many.
_ROOM, _LEAST_ROOM = 4.0, 2.0**26
# Cuts whose parts are cut in turn: the best ones, to this depth.
_BEAM, _DEPTH = 3, 2
# What is known of the tables that a cut makes.
_ENTRIES = IndexFacts(masked=False, proven=True)


class Tree(NamedTuple):
    """What is decided of a statement: it stays whole, or is cut, and both parts are decided alike."""

    cut: Cut | None = None
    both: tuple[Tree, ...] = ()

    def parts(self, whole: Part) -> tuple[Part, ...]:
        """The statements that it makes of one, in their order."""
        if self.cut is None:
            return (whole,)
        (one, other), (first, second) = self.both, both_of(self.cut, whole)
        # What the whole reads with cleared cells is made before its first part.
        first = replace(first, clears=whole.clears)
        second = replace(second, writes=whole.writes, unwritten=(*second.unwritten, *whole.unwritten))
        return (*one.parts(first), *other.parts(second))


WHOLE = Tree()


@dataclass(frozen=True, slots=True)
class Part:
    """One of the statements.

    Attributes:
        bound: the statement.
        sizes: its sizes.
        writes: the tensor that it makes; "" for the last one.
        static: its static tables.
        clears: tensors that it reads with some cells cleared.
        unwritten: cells of its output that are cleared.
    """

    bound: Bound
    sizes: Sizes
    writes: str
    static: Tables = ()
    clears: tuple[UnreadCells, ...] = ()
    unwritten: tuple[UnreadCells, ...] = ()

    @property
    def extents(self) -> Extents:
        layout = self.bound.layout
        return Extents(tuple(self.sizes.indices[i] for i in layout.indices), tuple(self.sizes.output))


def sizes_of(
    bound: Bound, tensors: Sequence[Tensor], extents: Extents, hint: Callable[[int], int] = lambda size: size
) -> Sizes:
    """The sizes of a call; `hint` is the number by which to choose for a size."""
    indices = dict(zip(bound.layout.indices, map(hint, extents.indices), strict=True))
    shapes = {name: tuple(map(hint, tensor.shape)) for name, tensor in zip(bound.layout.tensors, tensors, strict=True)}
    return Sizes(indices, shapes, tuple(map(hint, extents.output)), bound.dtype.itemsize)


# Sizes of parts.


def _extent(of: str | Axis | int, sizes: Sizes, output: str) -> int:
    if isinstance(of, int):
        return of
    if isinstance(of, str):
        return sizes.indices[of]
    name, axis = of
    return sizes.output[axis] if name == output else sizes.shapes[name][axis]


def fits(cut: Cut, whole: Part) -> bool:
    """Whether axes that share an index have one extent."""
    output = whole.bound.statement.output.name
    return all(len({_extent(axis, whole.sizes, output) for axis in axes}) == 1 for axes in cut.equal)


def both_of(cut: Cut, whole: Part) -> tuple[Part, Part]:
    """The two parts of a statement that is cut; the second writes what the whole writes."""
    bound, sizes, output = whole.bound, whole.sizes, whole.bound.statement.output.name
    indices = {**sizes.indices, **{name: _extent(axis, sizes, output) for name, axis in cut.fresh.items()}}
    made = tuple(_extent(of, sizes, output) for of in cut.shape)
    shapes = {
        **sizes.shapes,
        **{clear.name: sizes.shapes[clear.place.access.name] for clear in cut.clears},
        **{name: table.shape for name, table in cut.tables.items()},
        cut.intermediate: made,
    }
    inner = replace(sizes, indices=indices, shapes=shapes)
    first, second = _bound(bound, cut, last=False), _bound(bound, cut, last=True)
    clears = tuple(UnreadCells(clear, sizes, output) for clear in cut.clears)
    unwritten = () if cut.unwritten is None else (UnreadCells(cut.unwritten, sizes, output),)
    tables = {**dict(whole.static), **cut.tables}
    one, other = (
        tuple((name, tables[name]) for name in part.layout.tensors if name in tables) for part in (first, second)
    )
    return (
        Part(first, replace(inner, output=made), cut.intermediate, one),
        Part(second, inner, "", other, clears, unwritten),
    )


def _bound(bound: Bound, cut: Cut, *, last: bool) -> Bound:
    """What is known of a part, from what is known of the whole."""
    tables = {name: (torch.int64, _ENTRIES) for name, table in cut.tables.items() if not table.is_floating}
    return replace(
        bound_part(bound, cut.second if last else cut.first, tables),
        has_initial=last and bound.has_initial,
        drop_outside=bound.drop_outside or (cut.drops and not last),
        epilogue=bound.epilogue if last else PLAIN,
    )


def bound_part(bound: Bound, statement: Statement, made: Mapping[str, tuple[torch.dtype, IndexFacts]]) -> Bound:
    """Another statement over tensors of a bound one, with index tensors that are made for it."""
    known = dict(zip(bound.layout.tensors, zip(bound.index_dtypes, bound.facts, strict=True), strict=True)) | {**made}
    dtypes, facts = zip(*[known.get(n, (bound.dtype, UNKNOWN)) for n in layout_of(statement).tensors], strict=True)
    return replace(bound, statement=statement, index_dtypes=dtypes, facts=facts)


# The decision.


def decide(whole: Part, options: Options, tensors: Sequence[Tensor]) -> Tree | None:
    """Return the decision for the sizes of a call; `None`: it waits for entries that cannot be counted now."""
    bound, sizes = whole.bound, whole.sizes
    if whole.static:
        # A kernel for a GPU shares what their entries have in common by itself; half types would be rounded in between.
        here = bound.device_type == "cpu" and options.order == "cost" and options.backend in ("auto", "c", "eager")
        cut = split_static_tables(bound, whole.static, sizes.indices) if here and not is_widened(bound.dtype) else None
        return WHOLE if cut is None else Tree(cut, (WHOLE, WHOLE))
    read = sum(math.prod(shape) for shape in sizes.shapes.values())
    room = max(_LEAST_ROOM, _ROOM * sizes.width * (read + math.prod(sizes.output)))
    taken = frozenset((bound.statement.output.name, *sizes.shapes))
    best = partial(_best, taken=taken, depth=_DEPTH, options=options, room=room)
    tree, _ = best(whole)
    masked = [name for name in bound.statement.index_tensors() if bound.facts_of(name).masked is not False]
    # A kernel over the whole may skip missing entries.
    if tree.cut is not None and masked and choose_backend(bound, options)[0] == "triton":
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return None
        named = dict(zip(bound.layout.tensors, tensors, strict=True))
        accesses = [nested for access in bound.statement.accesses() for nested in access.nested()]
        shares = {name: float((named[name] >= 0).double().mean()) for name in masked}
        present = tuple((frozenset(labels_of(a)), shares[a.name]) for a in accesses if a.name in shares)
        tree, _ = best(replace(whole, sizes=replace(sizes, present=present)))
    return tree


def _best(whole: Part, taken: frozenset[str], depth: int, options: Options, room: float) -> tuple[Tree, Cost]:
    """The cheapest way to compute a statement, and its parts, without an intermediate tensor of more bytes."""
    bound, width, price = whole.bound, whole.sizes.width, price_of(whole, options)
    if depth == 0 or price.total <= 2 * machine_of(bound.device_type, width, pairwise=True).call:
        return WHOLE, price
    found: list[tuple[float, int, Cut, Part, Part]] = []
    for number, cut in enumerate(cuts_of(bound, taken)):
        if not fits(cut, whole):
            continue
        first, second = both_of(cut, whole)
        if width * math.prod(first.sizes.output) <= room:
            found.append((total((first, second), options).total, number, cut, first, second))
    best: tuple[Tree, Cost] = WHOLE, price
    share = 1.0 if multiplies_blocks(bound.statement) else _SHARE
    found.sort(key=lambda each: each[:2])
    for _, _, cut, first, second in found[:_BEAM]:
        # A name that is made inside of one part must not hide what the other reads.
        names = taken | {cut.intermediate, *(clear.name for clear in cut.clears)}
        (one, before), (other, after) = (_best(part, names, depth - 1, options, room) for part in (first, second))
        cost = before + after + _clearing(second)
        limit = share * price.total if best[0].cut is None else best[1].total
        if cost.total < limit:
            best = Tree(cut, (one, other)), cost
    return best


def price_of(part: Part, options: Options) -> Cost:
    """What a statement costs by the backend that would run it."""
    bound, sizes = part.bound, part.sizes
    pairwise = choose_backend(bound, options)[0] not in ("c", "triton")
    ordered = frozenset(name for name in bound.statement.index_tensors() if bound.facts_of(name).sorted)
    # A generated kernel's dense product would be no faster than its products of blocks.
    adds = not options.deterministic
    library = options.backend == "auto" and adds
    machine = machine_of(bound.device_type, sizes.width, pairwise=pairwise, library=library, adds=adds)
    return cost_of(bound.statement, sizes, machine, ordered)


def _clearing(part: Part) -> Cost:
    """What it costs to copy factors with some cells cleared."""
    moved = 2.0 * part.sizes.width * sum(math.prod(part.sizes.shapes[each.clear.name]) for each in part.clears)
    return Cost(moved, 0.0, moved)


def total(parts: Sequence[Part], options: Options) -> Cost:
    """What several statements cost."""
    return sum((price_of(part, options) + _clearing(part) for part in parts), Cost(0.0, 0.0, 0.0))

"""Read an operand through a copy with zeros around it, so that terms that would miss it need no conditions.

    free p in 0 .. P:                                free p in 0 .. P:
      sum r in 0 .. R:                       ->        sum r in 0 .. R:
        out[p] += t0[p + r] * t1[r]                      out[p] += t0_wide[p + r] * t1[r]
          where p + r < P

A term that misses then adds zero times its other factor, so that one has to be finite: who runs the kernel asks that
first, and runs the one with conditions if it is not, or if the copy were large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from insum_nn.compiler.ir.access import affine_terms, indices_in, is_index, is_sum
from insum_nn.compiler.ir.graph import ENTRY, around, extent_of, factors_of, loops_of, stores_of
from insum_nn.compiler.ir.lowered import ROOM, Copied, Reach, highest
from insum_nn.compiler.ir.nodes import (
    Buffer,
    Cast,
    Const,
    Expr,
    Index,
    Kernel,
    Load,
    Loop,
    Node,
    Op,
    Size,
    Stmt,
    Store,
    add,
    conjunction,
    conjuncts,
    multiply,
    operands,
    replacing,
    walk,
)
from insum_nn.compiler.passes.cpu.transpose_operands import swap

__all__ = ["pad_operands"]


def pad_operands(kernel: Kernel, lanes: Loop | None) -> tuple[Kernel, tuple[Copied, ...], tuple[Buffer, ...]]:
    """Return a kernel that reads copies, these, and what has to be finite then; no copies if none helps.

    Args:
        kernel: the algorithm.
        lanes: the loop along vectors: where entries address the last axis of an operand, it is read transposed.
    """
    loops = {loop.index: loop for loop in loops_of(kernel)}
    reached, finite = dict[Buffer, dict[int, dict[Reach, None]]](), dict[Buffer, None]()
    stores, missed = stores_of(kernel), list[dict[Expr, Reach]]()
    for store in stores:
        missed.append(own := _missed(store, loops))
        for read in operands(store.value):
            for axis, subscript in enumerate(read.subscripts):
                if subscript in own:
                    reached.setdefault(read.buffer, {}).setdefault(axis, {})[own[subscript]] = None
            if not own.keys() <= {*read.subscripts}:
                finite[read.buffer] = None
    swapped = _swapped(stores, lanes, reached)
    copies = dict[Node, Buffer]()
    for source, axes in reached.items():
        name = f"{source.name}_wide"
        shape = [Size(f"{name}_{axis}") if axis in axes else extent for axis, extent in enumerate(source.shape)]
        copies[source] = Buffer(name, source.dtype, swap(shape, swapped.get(source)), source.facts)
    changed, moved = dict[Node, Node](), list[Stmt]()
    for store, own in zip(stores, missed, strict=True):
        for read in operands(store.value):
            kept = conjunction([c for c in conjuncts(read.where) if not _asks(c, own)])
            subscripts = swap(read.subscripts, swapped.get(read.buffer))
            changed[read] = Load(copies.get(read.buffer, read.buffer), subscripts, kept, read.fill)
        value, where = replacing(changed)(store.value), [c for c in conjuncts(store.where) if not _asks(c, own)]
        moved.append(Store(store.buffer, store.subscripts, value, store.combine, conjunction(where)))
    body = around(loops.values(), tuple(moved))
    inputs = (*kernel.inputs, *copies.values())
    made = tuple(
        Copied(copies[b], b, {a: tuple(each) for a, each in axes.items()}, swapped.get(b))
        for b, axes in reached.items()
    )
    return Kernel(inputs, kernel.results, body, kernel.exact), made, tuple(finite)


def _swapped(
    stores: Sequence[Store], lanes: Loop | None, reached: dict[Buffer, dict[int, dict[Reach, None]]]
) -> dict[Buffer, int]:
    """The operands that are read far apart along the lanes, and the axis along these; they have no zeros."""
    # What also addresses something is read there too.
    found, other = dict[Buffer, int](), {*reached}
    for read in (read for store in stores if lanes for read in operands(store.value)):
        *others, last = read.subscripts or (Const(0),)
        if lanes is None or lanes.index not in others or not isinstance(last, Load) or lanes.index in indices_in(last):
            other.add(read.buffer)
        elif found.setdefault(read.buffer, others.index(lanes.index)) != others.index(lanes.index):
            other.add(read.buffer)
    found = {b: axis for b, axis in found.items() if b not in other and not is_index(b)}
    reached.update({buffer: {} for buffer in found})
    return found


def _asks(condition: Expr, subscripts: Mapping[Expr, Reach]) -> bool:
    return isinstance(condition, Op) and condition.args[0] in subscripts


def _missed(store: Store, loops: Mapping[Index, Loop]) -> dict[Expr, Reach]:
    """The subscripts at which a term that misses an operand may read zeros, and from where to where they run."""
    reads, conditions = factors_of(store.value), conjuncts(store.where)
    # A product of two numbers that are finite may not be.
    if store.combine != "add" or len(reads) > 2 or not all(isinstance(f, Load) for f in reads):
        return {}
    found = dict[Expr, Reach]()
    for condition in conditions:
        if not isinstance(condition, Op) or condition.name != "less":
            continue
        subscript, extent = condition.args
        users = [n for n in walk(store) if isinstance(n, Load) and subscript in n.subscripts]
        padded = users and all(
            user in reads
            and not is_index(user.buffer)
            and len(user.subscripts) < len(loops)
            and all(e is extent for s, e in zip(user.subscripts, user.buffer.shape, strict=True) if s is subscript)
            for user in users
        )
        reach = _reach(subscript, extent, loops) if padded else None
        if reach is not None and Op("at_least", (subscript, Const(0))) in conditions:
            found[subscript] = reach
    return found


def _reach(subscript: Expr, extent: Expr, loops: Mapping[Index, Loop]) -> Reach | None:
    """From where to where a subscript runs; `None`: that is not known, or most of it misses the axis."""
    if not isinstance(subscript, Op) or not is_sum(subscript):
        return None
    terms, offset = affine_terms(subscript)
    low, high, unknown = Const(offset), Const(offset), 0
    for factor, atom in terms:
        atom = atom.value if isinstance(atom, Cast) else atom
        if isinstance(atom, Load) and is_index(atom.buffer):
            last: Expr = highest(atom.buffer)
        elif isinstance(atom, Index) and atom is not ENTRY and loops[atom].begin is Const(0):
            last = add(loops[atom].end, Const(-1))
            unknown += extent_of(loops[atom]) is None
        else:
            return None
        ends = add(low, step := multiply(Const(factor), last)), add(high, step)
        low, high = (ends[0], high) if factor < 0 else (low, ends[1])
    cells = [each.value for each in (extent, low, high) if isinstance(each, Const)]
    return None if unknown > 1 or (len(cells) == 3 and cells[2] - cells[1] >= 2 * cells[0] + ROOM) else (low, high)

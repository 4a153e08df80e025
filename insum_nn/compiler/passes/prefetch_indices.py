"""Prefetch index tensors: read those of a row's next terms while these are summed.

    serial entry in low .. high:                           a0 = order[low]    a1 = order[low + 1]    b0 = x1[order[low]]
      acc += t1[x1[order[entry]]] * t0[order[entry]]  ->   serial entry in low .. high:
                                                             a2 = order[entry + 2]    b1 = x1[a1]
                                                             acc += t1[b0] * t0[a0]
                                                             b0 = b1    a0 = a1    a1 = a2

(all reads of next terms only where there are such). A term of a row is a chain of reads, and a step that writes what it
made to memory keeps the reads of the next one from being moved before it. The loop then waits for one read a step, not
for the whole chain.
"""

from __future__ import annotations

from collections.abc import Sequence

from insum_nn.compiler.ir.nodes import (
    Alloc,
    Buffer,
    Const,
    Expr,
    Kernel,
    Load,
    Loop,
    Node,
    Op,
    Stmt,
    Store,
    add,
    conjunction,
    replacing,
    walk,
)
from insum_nn.compiler.passes.own_rows import ENTRY
from insum_nn.compiler.passes.terms import indices_of

__all__ = ["prefetch_indices"]

# Reads that follow each other: the order of the terms, and what an index tensor says of a term. Of more, registers are
# worth more than the wait.
_CHAIN = 2


def prefetch_indices(kernel: Kernel) -> Kernel:
    """The placed kernel whose loop over the entries of one row, if it has one, reads index tensors ahead."""
    return Kernel(kernel.inputs, kernel.results, _block(kernel.body), kernel.exact)


def _block(statements: Sequence[Stmt]) -> tuple[Stmt, ...]:
    found: list[Stmt] = []
    for statement in statements:
        if not isinstance(statement, Loop):
            found.append(statement)
        elif statement.role == "serial" and statement.index is ENTRY:
            found += _ahead(statement)
        elif statement.role == "grid":
            # Rows on the lanes of a tile have ranges of their own.
            found.append(_with_body(statement, _block(statement.body)))
        else:
            found.append(statement)
    return tuple(found)


def _with_body(loop: Loop, body: tuple[Stmt, ...]) -> Loop:
    rest = loop.step, loop.limit, loop.axis, loop.word
    return Loop(loop.index, loop.begin, loop.end, loop.role, body, *rest)


def _ahead(loop: Loop) -> list[Stmt]:
    """The loop, and what is read before its first step."""
    inner = {node.index for statement in loop.body for node in walk(statement) if isinstance(node, Loop)}
    chains = _chains(loop.body)
    read = [each for each, height in chains.items() if height <= _CHAIN and not indices_of(each) & inner]
    if not read:
        return [loop]
    # By how many steps each is read ahead.
    longest = max(chains[each] for each in read)
    steps = {each: longest - chains[each] + 1 for each in read}
    names = {
        each: [f"{each.buffer.name}_{number}_{n}" for n in range(steps[each] + 1)] for number, each in enumerate(read)
    }
    carried = {each: [Buffer(name, each.buffer.dtype, (), local=True) for name in names[each]] for each in read}
    before: list[Stmt] = [Alloc(buffer, None) for each in read for buffer in carried[each]]
    head, tail = list[Stmt](), list[Stmt]()
    for each in read:
        count, buffers = steps[each], carried[each]
        before += [Store(buffers[n], (), _at(each, add(loop.begin, Const(n)), loop, {})) for n in range(count)]
        inside = [node for node in walk(each) if node is not each and node in carried]
        known = {node: Load(carried[node][count], ()) for node in inside if isinstance(node, Load)}
        head.append(Store(buffers[count], (), _at(each, add(ENTRY, Const(count)), loop, known)))
        tail += [Store(buffers[n], (), Load(buffers[n + 1], ())) for n in range(count)]
    now: dict[Node, Node] = {each: Load(carried[each][0], ()) for each in read}
    body = tuple(map(replacing(now), loop.body))
    return [*before, _with_body(loop, (*head, *body, *tail))]  # type: ignore[arg-type]


def _chains(statements: Sequence[Stmt]) -> dict[Load, int]:
    """The reads of index tensors at an entry, and how many follow each other up to each."""
    reads = dict.fromkeys(node for node in walk(*statements) if isinstance(node, Load) and _is_index(node))
    found: dict[Load, int] = {}
    for each in sorted(reads, key=lambda load: sum(_is_index(node) for node in walk(load))):
        inner = (node for node in walk(each) if isinstance(node, Load) and node is not each)
        inside = (found[load] for load in inner if load in found)
        found[each] = 1 + max(inside, default=0)
    return found


def _at(read: Load, entry: Expr, loop: Loop, known: dict[Load, Load]) -> Expr:
    """A read for another entry, where there is one; `known`: what was read for it already."""
    changed: dict[Node, Node] = {**known, ENTRY: entry}
    present = Op("less", (entry, loop.end))
    for node in sorted((n for n in walk(read) if _is_index(n) and n not in known), key=lambda n: len([*walk(n)])):
        moved = node.rebuild(lambda child: child.replace(changed))
        assert isinstance(moved, Load)
        changed[node] = Load(moved.buffer, moved.subscripts, conjunction([moved.where, present]), moved.fill)
    found = changed[read]
    assert isinstance(found, Expr)
    return found


def _is_index(node: Node) -> bool:
    return (
        isinstance(node, Load)
        and not node.buffer.local
        and node.buffer.dtype.startswith("int")
        and ENTRY in indices_of(node)
    )

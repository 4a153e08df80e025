"""Make one block of blocks that are identical up to literals: long code costs seconds to compile and to fetch.

if part < 1:                                     which = part
acc += t0[i, 3] * 0.5                   ->     acc += t0[i, 3 + which * 2] * (0.25 if which = 1 else 0.5)
else:
acc += t0[i, 5] * 0.25

Gradients of fully connected products of degree 2 and 3 (11 and 33 blocks, of which 5 and 3 are left) compile for sm_90
in 3.1 and 5.9 s instead of 7.5 and 29.7.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields

from insum_nn.compiler.ir.nodes import Buffer, Const, Expr, If, Index, Loop, Node, Op, Stmt, add, multiply

__all__ = ["Variant", "rolled", "switch", "unify_variants"]

Block = tuple[Stmt, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """A block that stands for one or several, which `which` counts."""

    count: int
    block: Block


def switch(part: Index, blocks: Sequence[Block], *, exact: bool) -> Block:
    """The statements that run one of several blocks, by the value of an index.

    Args:
        part: the index.
        blocks: one for each of its values.
        exact: fractions must not pass through float32, so that blocks with different ones stay apart.
    """
    _, variants = unify_variants(part, blocks, exact=exact)
    first = sum(variant.count for variant in variants[:-1])
    chain = variants[-1].block
    for variant in reversed(variants[:-1]):
        chain = (If(Op("less", (part, Const(first))), variant.block, chain),)
        first -= variant.count
    return chain


def unify_variants(part: Index, blocks: Sequence[Block], *, exact: bool) -> tuple[list[int], list[Variant]]:
    """Variants for consecutive values of `part`, and which block each value stands for."""
    groups: dict[object, list[int]] = {}
    for number, block in enumerate(blocks):
        groups.setdefault(tuple(_Shape(exact).of(stmt) for stmt in block), []).append(number)
    order: list[int] = []
    variants: list[Variant] = []
    for members in groups.values():
        which: Expr = add(part, Const(-len(order))) if order else part
        found = [_Merge(which).of(stmts) for stmts in zip(*(blocks[n] for n in members), strict=True)]
        variants.append(Variant(len(members), tuple(s for s in found if isinstance(s, Stmt))))
        order += members
    return order, variants


TERM = Index("term")
# Statements of a block from which on its like ones become a loop.
_LONG = 24


def rolled(blocks: Sequence[Block], *, exact: bool) -> Block:
    """Statements that run blocks one after the other, in any order: of those alike one stands in a loop.

    acc += dot(a[i, 3], b[7])                       serial term in 0 .. 2:
    acc += dot(a[i, 5], b[9])               ->        acc += dot(a[i, 3 + term * 2], b[7 + term * 2])
    """
    if sum(map(len, blocks)) < _LONG:
        return tuple(itertools.chain.from_iterable(blocks))
    order, variants = unify_variants(TERM, blocks, exact=exact)
    found: list[Stmt] = []
    done = 0
    for variant in variants:
        if variant.count == 1:
            found += blocks[order[done]]
        else:
            # The variants count on.
            end = Const(done + variant.count)
            found.append(Loop(TERM, Const(done), end, "serial", variant.block))
        done += variant.count
    return tuple(found)


class _Shape:
    """What blocks have in common that differ in literals alone."""

    def __init__(self, exact: bool) -> None:
        self.exact = exact
        self.memo: dict[tuple[Node, bool], object] = {}

    def of(self, node: Node, fixed: bool = False) -> object:
        """A key; `fixed`: numbers count, as those that the compiler has to know."""
        key = node, fixed
        if key not in self.memo:
            self.memo[key] = self.compute(node, fixed)
        return self.memo[key]

    def compute(self, node: Node, fixed: bool) -> object:
        if isinstance(node, Buffer):
            return node
        if isinstance(node, Const) and not fixed and not isinstance(node.value, bool):
            if isinstance(node.value, float):
                return node if self.exact else "fraction"
            return "number"
        parts: list[object] = [type(node)]
        for field, part in zip(fields(node), node.parts(), strict=True):  # type: ignore[arg-type]
            is_fixed = fixed or (isinstance(node, Loop) and field.name != "body")
            if isinstance(part, Node):
                parts.append(self.of(part, is_fixed))
            elif isinstance(part, tuple):
                parts.append(tuple(self.of(p, is_fixed) if isinstance(p, Node) else p for p in part))
            else:
                parts.append((type(part), part))
        return tuple(parts)


class _Merge:
    """One node of several of one shape."""

    def __init__(self, which: Expr) -> None:
        self.which = which
        self.memo: dict[tuple[Node, ...], Node] = {}

    def of(self, nodes: tuple[Node, ...]) -> Node:
        if all(node is nodes[0] for node in nodes):
            return nodes[0]
        if nodes not in self.memo:
            self.memo[nodes] = self.compute(nodes)
        return self.memo[nodes]

    def compute(self, nodes: tuple[Node, ...]) -> Node:
        if isinstance(nodes[0], Const):
            return self.chosen([node.value for node in nodes if isinstance(node, Const)], nodes[0].dtype)
        columns = zip(*(node.parts() for node in nodes), strict=True)
        parts: list[object] = []
        for column in columns:
            if isinstance(column[0], Node):
                parts.append(self.of(column))
            elif isinstance(column[0], tuple):
                parts.append(
                    tuple(self.of(each) if isinstance(each[0], Node) else each[0] for each in zip(*column, strict=True))
                )
            else:
                parts.append(column[0])
        return type(nodes[0])(*parts)

    def chosen(self, values: Sequence[int | float], dtype: str) -> Expr:
        """A number for each value of `which`: evenly spaced, or picked one by one."""
        if all(isinstance(value, int) for value in values):
            step = values[1] - values[0]
            if all(b - a == step for a, b in itertools.pairwise(values)):
                return add(multiply(self.which, Const(int(step))), Const(int(values[0])))
        found: Expr = Const(values[0], dtype)
        for number, value in enumerate(values[1:], 1):
            found = Op("select", (Op("equal", (self.which, Const(number))), Const(value, dtype), found))
        return found

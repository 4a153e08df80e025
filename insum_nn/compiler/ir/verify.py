"""Check that a kernel is well formed, before it is printed."""

from __future__ import annotations

from insum_nn.compiler.ir.nodes import (
    OPERATIONS,
    Alloc,
    Buffer,
    Expr,
    If,
    Index,
    Kernel,
    Load,
    Loop,
    Node,
    Op,
    Stmt,
    Store,
    walk,
)
from insum_nn.compiler.lang.combining import COMBINING

__all__ = ["verify_kernel"]

_PLACED = ("grid", "tile", "serial")


def verify_kernel(kernel: Kernel, *, placed: bool) -> None:
    """Check one kernel.

    Args:
        kernel: the kernel.
        placed: every loop has been given a place; otherwise none has.

    Raises:
        AssertionError: a loop of the wrong kind or a second loop of one index, an index outside of its loop, a buffer
            that is no parameter and not allocated, a subscript too many or too few, an operation of another arity.
    """
    defined = {*kernel.inputs, *(result.buffer for result in kernel.results)}
    names = [buffer.name for buffer in defined]
    assert len(names) == len(set(names)), f"two buffers of one name: {sorted(names)}"
    _check_block(kernel.body, frozenset(), defined, placed, inside_tile=False)


_MODES = {"set", *(mode.name for mode in COMBINING.values())}


def _check_block(
    statements: tuple[Stmt, ...], loops: frozenset[Index], defined: set[Buffer], placed: bool, *, inside_tile: bool
) -> None:
    defined = set(defined)
    # Terms of one kernel have much in common; buffers become more within a block, so what was right stays so.
    checked: set[Node] = set()
    for statement in statements:
        if isinstance(statement, Loop):
            assert (statement.role in _PLACED) == placed, f"a loop of role {statement.role}"
            assert statement.index not in loops, f"two loops of {statement.index.name}"
            assert not (statement.role == "grid" and inside_tile), "a grid loop inside of a program"
            for bound in (statement.begin, statement.end, statement.limit, statement.word):
                if bound is not None:
                    _check_expr(bound, loops, defined, checked)
            inside = inside_tile or statement.role != "grid"
            _check_block(statement.body, loops | {statement.index}, defined, placed, inside_tile=inside)
        elif isinstance(statement, Alloc):
            assert statement.buffer.local, f"{statement.buffer.name} is allocated and not local"
            defined.add(statement.buffer)
        elif isinstance(statement, If):
            _check_expr(statement.condition, loops, defined, checked)
            for block in (statement.then, statement.otherwise):
                _check_block(block, loops, defined, placed, inside_tile=inside_tile)
        else:
            assert isinstance(statement, Store)
            _check_access(statement.buffer, statement.subscripts, defined)
            assert statement.combine in _MODES, f"no store combines by {statement.combine}"
            for expr in (*statement.subscripts, statement.value, statement.where):
                if expr is not None:
                    _check_expr(expr, loops, defined, checked)


def _check_expr(expr: Expr, loops: frozenset[Index], defined: set[Buffer], checked: set[Node]) -> None:
    for node in walk(expr, seen=checked):
        if isinstance(node, Index):
            assert node in loops, f"{node.name} outside of its loop"
        elif isinstance(node, Load):
            _check_access(node.buffer, node.subscripts, defined)
        elif isinstance(node, Op):
            assert len(node.args) == OPERATIONS[node.name].arity, f"{node.name} of {len(node.args)} operands"


def _check_access(buffer: Buffer, subscripts: tuple[Expr, ...], defined: set[Buffer]) -> None:
    assert buffer in defined, f"{buffer.name} is not known here"
    assert len(subscripts) == len(buffer.shape), f"{buffer.name} has {len(buffer.shape)} axes"

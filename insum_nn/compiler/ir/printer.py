"""Print kernels as text that a person can read; equal text means equal nodes up to facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from insum_nn.compiler.ir.nodes import (
    OPERATIONS,
    Alloc,
    Buffer,
    Cast,
    Const,
    Dot,
    Expr,
    If,
    Index,
    Kernel,
    Load,
    Loop,
    Node,
    Op,
    Size,
    Stmt,
    Store,
)
from insum_nn.compiler.lang.combining import COMBINING

__all__ = ["show"]


def show(node: Node) -> str:
    """Print a node as text."""
    if isinstance(node, Kernel):
        return "\n".join(_kernel(node))
    if isinstance(node, Stmt):
        return "\n".join(_statement(node, ""))
    assert isinstance(node, Expr)
    return _expr(node)


def _kernel(kernel: Kernel) -> Iterator[str]:
    results = [
        _declared(r.buffer)
        + ("" if r.initial == "none" else f" initial {r.initial}")
        + ("" if r.activation is None else f" then {r.activation}")
        for r in kernel.results
    ]
    exact = ", exact" if kernel.exact else ""
    yield f"kernel{exact} ({', '.join(map(_declared, kernel.inputs))}) -> {', '.join(results)}:"
    for statement in kernel.body:
        yield from _statement(statement, "  ")


def _declared(buffer: Buffer) -> str:
    facts = [n for n in ("sorted", "unique", "masked") if getattr(buffer.facts, n)]
    return " ".join([f"{buffer.name}: {buffer.dtype}{_subscripts(buffer.shape)}", *facts])


def _subscripts(subscripts: Sequence[Expr]) -> str:
    return f"[{', '.join(_bare(s) for s in subscripts)}]" if subscripts else ""


def _statement(statement: Stmt, indent: str) -> Iterator[str]:
    if isinstance(statement, Loop):
        limit = "" if statement.limit is None else f" of {_bare(statement.limit)}"
        span = f"in {_bare(statement.begin)} .. {_bare(statement.end)}{limit}"
        step = "" if statement.step == 1 else f" step {statement.step}"
        bits = "" if statement.word is None else f" by the bits of {_bare(statement.word)}"
        yield f"{indent}{statement.role} {statement.index.name} {span}{step}{bits}:"
        for inner in statement.body:
            yield from _statement(inner, indent + "  ")
    elif isinstance(statement, Alloc):
        initial = "" if statement.initial is None else f" = {statement.initial}"
        yield f"{indent}alloc {_declared(statement.buffer)}{initial}"
    elif isinstance(statement, If):
        yield f"{indent}if {_bare(statement.condition)}:"
        for inner in statement.then:
            yield from _statement(inner, indent + "  ")
        if statement.otherwise:
            yield f"{indent}else:"
            for inner in statement.otherwise:
                yield from _statement(inner, indent + "  ")
    else:
        assert isinstance(statement, Store)
        sign = _SIGNS[statement.combine]
        where = "" if statement.where is None else f"   where {_bare(statement.where)}"
        target = f"{statement.buffer.name}{_subscripts(statement.subscripts)}"
        yield f"{indent}{target} {sign} {_bare(statement.value)}{where}"


# A store that overwrites, and the operator of each mode; both sums add.
_SIGNS = {**{mode.name: mode.operator for mode in reversed(COMBINING.values())}, "set": "="}


def _bare(node: Expr) -> str:
    """Print an expression without its outermost parentheses."""
    text = _expr(node)
    return text[1:-1] if isinstance(node, Op) and text.startswith("(") else text


def _expr(node: Expr) -> str:
    if isinstance(node, Const):
        return repr(node.value)
    if isinstance(node, Size):
        return node.name.upper()
    if isinstance(node, Index):
        return node.name
    if isinstance(node, Load):
        text = f"{node.buffer.name}{_subscripts(node.subscripts)}"
        return text if node.where is None else f"({text} if {_bare(node.where)} else {node.fill})"
    if isinstance(node, Cast):
        return f"{node.dtype}({_bare(node.value)})"
    if isinstance(node, Dot):
        return f"dot({_bare(node.left)}, {_bare(node.right)})"
    assert isinstance(node, Op)
    return OPERATIONS[node.name].text.format(*map(_expr, node.args))

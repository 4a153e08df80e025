"""What an algorithm consists of: the loops around its stores, and the factors of what it stores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from insum_nn.compiler.ir.build import INITIAL
from insum_nn.compiler.ir.nodes import Const, Expr, If, Index, Kernel, Loop, Op, Stmt, Store, operands

__all__ = ["ENTRY", "ROW", "around", "extent_of", "factor_dtype", "factors_of", "loops_of", "statements_in"]
__all__ += ["stores_of"]

# Of loops over the rows of an output, and over the entries of one: see `passes/own_rows.py`.
ROW, ENTRY = Index("row"), Index("entry")


def loops_of(kernel: Kernel) -> list[Loop]:
    """Return the loops around the stores of an algorithm, outer first."""
    loops: list[Loop] = []
    body = kernel.body
    while len(body) == 1 and isinstance(body[0], Loop):
        loops.append(body[0])
        body = body[0].body
    return loops


def statements_in(block: Iterable[Stmt]) -> Iterator[Stmt]:
    """Yield statements and all inside of them, outer before inner."""
    for statement in block:
        yield statement
        if isinstance(statement, Loop):
            yield from statements_in(statement.body)
        elif isinstance(statement, If):
            yield from statements_in((*statement.then, *statement.otherwise))


def around(loops: Iterable[Loop], body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """Return statements inside of loops, which stand in order, outer first."""
    for loop in reversed([*loops]):
        body = (Loop(loop.index, loop.begin, loop.end, loop.role, body),)
    return body


def extent_of(loop: Loop) -> int | None:
    """The extent of a loop, if it is compiled in."""
    return int(loop.end.value) if isinstance(loop.end, Const) and loop.begin is Const(0) else None


def stores_of(kernel: Kernel) -> tuple[Store, ...]:
    """Return the stores of an algorithm, inside of all of its loops."""
    loops = loops_of(kernel)
    body = loops[-1].body if loops else kernel.body
    stores = tuple(each for each in body if isinstance(each, Store))
    assert len(stores) == len(body)
    return stores


def factors_of(value: Expr) -> list[Expr]:
    """Return the factors of a product, in order: reads, numbers and functions."""
    found: list[Expr] = []
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Op) and each.name == "mul":
            waiting += reversed(each.args)
        else:
            found.append(each)
    return found


def factor_dtype(kernel: Kernel) -> str:
    """Return the dtype of the factors of an algorithm: the output's where there are none."""
    read = [load.buffer for store in stores_of(kernel) for load in operands(store.value)]
    read += [buffer for buffer in kernel.inputs if buffer.name == INITIAL]
    return (read or [kernel.results[0].buffer])[0].dtype

"""What an algorithm consists of: the loops around its stores, and the factors of what it stores."""

from __future__ import annotations

from insum_nn.compiler.ir.nodes import Expr, Kernel, Loop, Op, Store

__all__ = ["factors_of", "loops_of", "store_of", "stores_of"]


def loops_of(kernel: Kernel) -> list[Loop]:
    """Return the loops around the stores of an algorithm, outer first."""
    loops: list[Loop] = []
    body = kernel.body
    while len(body) == 1 and isinstance(body[0], Loop):
        loops.append(body[0])
        body = body[0].body
    return loops


def store_of(kernel: Kernel) -> Store:
    """Return the one store of an algorithm."""
    (store,) = stores_of(kernel)
    return store


def stores_of(kernel: Kernel) -> tuple[Store, ...]:
    """Return the stores of an algorithm, inside of all of its loops."""
    loops = loops_of(kernel)
    body = loops[-1].body if loops else kernel.body
    stores = tuple(each for each in body if isinstance(each, Store))
    assert len(stores) == len(body)
    return stores


def factors_of(value: Expr) -> list[Expr]:
    """Return the factors of a product, in order: reads, numbers and functions."""
    if isinstance(value, Op) and value.name == "mul":
        return [factor for arg in value.args for factor in factors_of(arg)]
    return [value]

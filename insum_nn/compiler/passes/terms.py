"""Terms of a sum: a number, factors, and the conditions under which the term takes part.

A read that misses gives 0, but 0 times a factor that is not finite is none. So what its condition does not guard
already is selected by it: the smallest factor, the product, or, where the condition is the same for all terms of a
sum, the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from insum_nn.compiler.ir.graph import factors_of
from insum_nn.compiler.ir.nodes import Cast, Const, Expr, Load, Op, Store, conjuncts
from insum_nn.dtypes import dtype_of, is_widened

__all__ = ["Term", "factored", "guards", "loose", "select", "term_of", "vanishes", "widened"]

ZERO, ONE = Const(0.0, "float64"), Const(1.0, "float64")


class Term(NamedTuple):
    """One product: `number` times `factors`, where all `conditions` hold."""

    number: float
    factors: tuple[Expr, ...]
    conditions: tuple[Expr, ...] = ()


# Asked of each store by what chooses a schedule, and by the pass that sums them.
@lru_cache(maxsize=1 << 14)
def term_of(store: Store) -> Term:
    """The term that a store adds."""
    every = factors_of(store.value)
    number = math.prod([factor.value for factor in every if isinstance(factor, Const)], start=1.0)
    return Term(number, tuple([f for f in every if not isinstance(f, Const)]), conjuncts(store.where))


def guards(factor: Expr) -> tuple[Expr, ...]:
    """The conditions without which a factor is 0."""
    if isinstance(factor, Load):
        return conjuncts(factor.where) if factor.fill == 0 else ()
    if isinstance(factor, Cast):
        return guards(factor.value)
    if isinstance(factor, Op) and factor.name == "select":
        condition, chosen, other = factor.args
        return (*conjuncts(condition), *guards(chosen)) if isinstance(other, Const) and other.value == 0 else ()
    return ()


def vanishes(factor: Expr) -> bool:
    """Whether a factor is what one read gives, and so is 0 where nothing is read: functions of a read need not be."""
    if isinstance(factor, Op) and factor.name == "select":
        factor = factor.args[1]
    return isinstance(factor.value if isinstance(factor, Cast) else factor, Load)


def loose(
    factors: Sequence[Expr], conditions: Iterable[Expr], guarded: Callable[[Expr], Collection[Expr]] = guards
) -> list[Expr]:
    """The conditions, each once, that some factor is not guarded by; `guarded` says which ones guard a factor."""
    wanted = dict.fromkeys(conditions)
    each = [guarded(factor) for factor in factors] if wanted else []
    return [c for c in wanted if not each or any(c not in found for found in each)]


def select(conditions: Sequence[Expr], value: Expr) -> Expr:
    """A value, 0 where a condition does not hold."""
    for condition in conditions:
        value = Op("select", (condition, value, ZERO))
    return value


def widened(factor: Expr) -> Expr:
    """A factor as it takes part in sums: in the dtype in which they are formed."""
    if isinstance(factor, Load) and is_widened(factor.buffer.dtype):
        return Cast(factor, dtype_of(factor.buffer.dtype).wide.name)
    if isinstance(factor, Op):
        condition = factor.args[:1] if factor.name == "select" else ()
        return Op(factor.name, (*condition, *map(widened, factor.args[len(condition) :])))
    return factor


def factored(terms: Sequence[tuple[float, Sequence[Expr]]], lanes: Callable[[Expr], int]) -> Expr:
    """A sum of products with common factors set before brackets, those of most lanes outermost."""
    count = len(terms[0][1])
    columns = [{factors[n] for _, factors in terms} for n in range(count)]
    order = sorted(range(count), key=lambda n: (-max(map(lanes, columns[n])), len(columns[n])))
    return _bracket([(number, tuple(factors[n] for n in order)) for number, factors in terms])


def _bracket(terms: Sequence[tuple[float, tuple[Expr, ...]]]) -> Expr:
    if not terms[0][1]:
        return Const(float(sum([number for number, _ in terms])), "float64")
    groups: dict[Expr, list[tuple[float, tuple[Expr, ...]]]] = {}
    for number, factors in terms:
        groups.setdefault(factors[0], []).append((number, factors[1:]))
    total: Expr | None = None
    for head, rest in groups.items():
        inner = _bracket(rest)
        product = head if inner is ONE else Op("mul", (head, inner))
        total = product if total is None else Op("add", (total, product))
    assert total is not None
    return total

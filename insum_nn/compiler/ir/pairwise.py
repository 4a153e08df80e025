"""Choose the order in which factors are multiplied two at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

__all__ = ["Pair", "cheapest_order", "written_order"]

Labels = frozenset[str]
# The cost of a product: from the indices that it runs over, those of its result, and whether it is the last one.
Price = Callable[[Labels, Labels, bool], float]

# Up to this many factors every order is tried (3^n steps); beyond, the cheapest pair is taken each time.
_EXACT_LIMIT = 8


@dataclass(frozen=True, slots=True)
class Pair:
    """A product of two operands.

    Attributes:
        left: number of an operand; results are counted behind the factors.
        right: number of the other.
        indices: what it runs over.
        result: the indices of the result, after summing those that no other operand and not the output has.
        cost: its price.
    """

    left: int
    right: int
    indices: Labels
    result: Labels
    cost: float


class _Subsets:
    """Products of the factors whose bits are set in a number."""

    def __init__(self, factors: Sequence[Labels], keep: Labels, price: Price) -> None:
        self.factors, self.keep, self.price = factors, keep, price
        self.full = (1 << len(factors)) - 1
        self.labels = cache(self._labels)

    def _labels(self, subset: int) -> Labels:
        """The indices of a product; a factor's own are summed with it."""
        if subset & (subset - 1) == 0:
            return self.factors[subset.bit_length() - 1]
        inside = Labels().union(*(own for at, own in enumerate(self.factors) if subset >> at & 1))
        return inside & self.keep.union(*(own for at, own in enumerate(self.factors) if not subset >> at & 1))

    def step(self, a: int, b: int) -> float:
        return self.price(self.labels(a) | self.labels(b), self.labels(a | b), a | b == self.full)

    def pairs(self, splits: Mapping[int, int]) -> list[Pair]:
        """The products of a tree, whose nodes are divided as `splits` says."""
        found: list[Pair] = []

        def visit(subset: int) -> int:
            if subset & (subset - 1) == 0:
                return subset.bit_length() - 1
            a = splits[subset]
            b = subset ^ a
            left, right = visit(a), visit(b)
            found.append(Pair(left, right, self.labels(a) | self.labels(b), self.labels(subset), self.step(a, b)))
            return len(self.factors) + len(found) - 1

        visit(self.full)
        return found


def written_order(factors: Sequence[Labels], keep: Labels, price: Price) -> list[Pair]:
    """Return the products from left to right; `keep` are the indices of the output."""
    subsets = _Subsets(factors, keep, price)
    return subsets.pairs({(2 << at) - 1: (1 << at) - 1 for at in range(1, len(factors))})


def cheapest_order(factors: Sequence[Labels], keep: Labels, price: Price) -> list[Pair]:
    """Return the products in the order of the lowest price; `keep` are the indices of the output."""
    subsets = _Subsets(factors, keep, price)
    return subsets.pairs(_best(subsets) if len(factors) <= _EXACT_LIMIT else _greedy(subsets))


def _best(subsets: _Subsets) -> dict[int, int]:
    best: dict[int, tuple[float, int]] = {1 << at: (0.0, 0) for at in range(len(subsets.factors))}
    for subset in range(1, subsets.full + 1):
        if subset & (subset - 1) == 0:
            continue
        part, found = (subset - 1) & subset, (math.inf, 0)
        while part:
            other = subset ^ part
            if part < other:
                found = min(found, (best[part][0] + best[other][0] + subsets.step(part, other), part))
            part = (part - 1) & subset
        best[subset] = found
    return {subset: part for subset, (_, part) in best.items()}


def _greedy(subsets: _Subsets) -> dict[int, int]:
    alive = [1 << at for at in range(len(subsets.factors))]
    splits: dict[int, int] = {}
    while len(alive) > 1:
        _, a, b = min((subsets.step(a, b), a, b) for i, a in enumerate(alive) for b in alive[i + 1 :])
        splits[a | b] = a
        alive = [s for s in alive if s not in (a, b)] + [a | b]
    return splits

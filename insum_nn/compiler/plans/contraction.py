"""The order in which three or more factors are multiplied, two at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

__all__ = ["contraction_order"]

Labels = tuple[str, ...]
# An intermediate cell is written and read again, which costs about as much as this many multiplications.
_CELL_COST = 4.0
# Up to this many factors every order is tried (3^n steps); beyond, the cheapest pair is taken each time.
_EXACT_LIMIT = 8


def contraction_order(
    operands: Sequence[Labels], keep: Labels, sizes: Mapping[str, int], *, search: bool = True
) -> tuple[list[tuple[int, int]], float, float]:
    """Choose pairwise products.

    Args:
        operands: labels of each factor.
        keep: labels of the result; every other label is summed as soon as no later factor needs it.
        sizes: extents.
        search: `False` keeps the written order.

    Returns:
        Pairs of operand numbers (a result takes the next free number), the cost, and the cost from left to right.

    >>> sizes = {"z": 1000, "p": 10, "u": 64, "w": 64}
    >>> contraction_order([("p",), ("z", "p", "u"), ("z", "p"), ("p", "u", "w")], ("z", "p", "w"), sizes)[0]
    [(0, 2), (1, 4), (5, 3)]
    """
    cost = _Cost(operands, keep, sizes)
    left = cost.left_to_right()
    if not search:
        return left[0], left[1], left[1]
    best = cost.exact() if len(operands) <= _EXACT_LIMIT else cost.greedy()
    return (*min(best, left, key=lambda found: found[1]), left[1])


class _Cost:
    def __init__(self, operands: Sequence[Labels], keep: Labels, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.count = len(operands)
        self.labels = [frozenset(labels) for labels in operands]
        self.keep = frozenset(keep)

    def volume(self, labels: frozenset[str]) -> float:
        return float(math.prod(self.sizes[label] for label in labels))

    def kept(self, subset: int) -> frozenset[str]:
        """Labels of the product of a subset, after summing what nobody else needs."""
        inside: frozenset[str] = frozenset()
        outside = self.keep
        for i, labels in enumerate(self.labels):
            if subset >> i & 1:
                inside |= labels
            else:
                outside |= labels
        return inside & outside

    def step(self, a: int, b: int) -> float:
        labels = (self.kept(a) if a & (a - 1) else self.labels[a.bit_length() - 1]) | (
            self.kept(b) if b & (b - 1) else self.labels[b.bit_length() - 1]
        )
        work = self.volume(labels)
        if a | b != (1 << self.count) - 1:
            return work + _CELL_COST * self.volume(self.kept(a | b))
        # On a tie the sum comes last: what precedes it is pointwise and fuses into the reading of its operands.
        return work if labels == self.keep else 0.999 * work

    def left_to_right(self) -> tuple[list[tuple[int, int]], float]:
        pairs: list[tuple[int, int]] = []
        total, done, last = 0.0, 1, 0
        for i in range(1, self.count):
            total += self.step(done, 1 << i)
            done |= 1 << i
            pairs.append((last, i))
            last = self.count + i - 1
        return pairs, total

    def exact(self) -> tuple[list[tuple[int, int]], float]:
        full = (1 << self.count) - 1
        best: dict[int, tuple[float, int]] = {1 << i: (0.0, 0) for i in range(self.count)}
        for subset in range(1, full + 1):
            if subset & (subset - 1) == 0:
                continue
            part = (subset - 1) & subset
            found = (math.inf, 0)
            while part:
                other = subset ^ part
                if part < other:
                    total = best[part][0] + best[other][0] + self.step(part, other)
                    found = min(found, (total, part))
                part = (part - 1) & subset
            best[subset] = found
        return self.unfold({s: part for s, (_, part) in best.items()}, full), best[full][0]

    def greedy(self) -> tuple[list[tuple[int, int]], float]:
        subsets = [1 << i for i in range(self.count)]
        splits: dict[int, int] = {}
        total = 0.0
        while len(subsets) > 1:
            pairs = [(self.step(a, b), a, b) for i, a in enumerate(subsets) for b in subsets[i + 1 :]]
            price, a, b = min(pairs)
            total += price
            splits[a | b] = a
            subsets = [s for s in subsets if s not in (a, b)] + [a | b]
        return self.unfold(splits, subsets[0]), total

    def unfold(self, splits: Mapping[int, int], full: int) -> list[tuple[int, int]]:
        pairs: list[tuple[int, int]] = []

        def visit(subset: int) -> int:
            if subset & (subset - 1) == 0:
                return subset.bit_length() - 1
            part = splits[subset]
            left, right = visit(part), visit(subset ^ part)
            pairs.append((left, right))
            return self.count + len(pairs) - 1

        visit(full)
        return pairs

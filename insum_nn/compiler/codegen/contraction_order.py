"""Choose in which order three or more factors are multiplied two at a time.

out[a, d] += t0[a, b] * t1[b, c] * t2[c, d]    ->    v0[b, d] += t1[b, c] * t2[c, d]
                                                     out[a, d] += t0[a, b] * v0[b, d]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from insum_nn.compiler.ir.access import Labels
from insum_nn.compiler.ir.pairwise import Pair, cheapest_order, written_order

__all__ = ["contraction_order", "order_text"]

# An intermediate cell is written and read again, which costs about as much as this many multiplications.
_CELL_COST = 4.0


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
    written = frozenset(keep)

    def volume(labels: frozenset[str]) -> float:
        return float(math.prod(sizes[label] for label in labels))

    def price(labels: frozenset[str], result: frozenset[str], last: bool) -> float:
        if not last:
            return volume(labels) + _CELL_COST * volume(result)
        # On a tie the sum comes last: what precedes it is pointwise and fuses into the reading of its operands.
        return volume(labels) if labels == written else 0.999 * volume(labels)

    factors = [frozenset(labels) for labels in operands]
    left = best = written_order(factors, written, price)
    if search:
        best = min(cheapest_order(factors, written, price), left, key=_total)
    return [(pair.left, pair.right) for pair in best], _total(best), _total(left)


def _total(pairs: Sequence[Pair]) -> float:
    return sum(pair.cost for pair in pairs)


def order_text(order: Sequence[tuple[int, int]], factors: Sequence[str]) -> str:
    """Return an order as text.

    >>> order_text([(0, 2), (1, 3)], ["A[i,j]", "C[i]", "B[j]"])
    '(A[i,j] , B[j]) then (C[i] , result)'
    """
    names = [*factors, *("result" for _ in order)]
    return " then ".join(f"({names[left]} , {names[right]})" for left, right in order)

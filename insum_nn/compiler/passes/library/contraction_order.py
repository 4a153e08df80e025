"""Multiply three or more factors two at a time, in the cheapest order.

    out[a, d] += t0[a, b] * t1[b, c] * t2[c, d]    ->    v0[b, d] += t1[b, c] * t2[c, d]
                                                         v1[a, d] += t0[a, b] * v0[b, d]
                                                         out[a, d] += v1[a, d]

An index that no other factor and no output has is summed before or in the product that has it last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from insum_nn.compiler.ir.access import Labels, plain_labels
from insum_nn.compiler.ir.graph import GraphNode
from insum_nn.compiler.ir.nodes import Expr, Load
from insum_nn.compiler.ir.pairwise import Pair, cheapest_order, written_order
from insum_nn.compiler.passes.library.match_matmul import multiply
from insum_nn.compiler.passes.library.steps import Cut, product, wide

__all__ = ["contraction_order", "multiply_in_order"]

# An intermediate cell is written and read again, which costs about as much as this many multiplications.
_CELL_COST = 4.0


def multiply_in_order(
    cut: Cut, reads: Sequence[Load], number: int | float, keep: Labels, texts: Sequence[Expr]
) -> tuple[list[GraphNode], Load]:
    """Steps that multiply reads whose axes are indices, summing the indices outside of `keep`, and the result's read.

    Args:
        cut: the algorithm.
        reads: one at least.
        number: a number that the result is multiplied by.
        keep: indices of the result.
        texts: what the reads stand for, for the decision.
    """
    steps: list[GraphNode] = []

    def emit(labels: Labels, value: Expr, sums: Labels = ()) -> Load:
        made, result = cut.intermediate(labels, value, sums, dtype=wide(cut.dtype))
        steps.append(made)
        return result

    operands = list(reads)
    for position, read in enumerate(operands):
        own = plain_labels(read.subscripts)
        others = {x for i, other in enumerate(operands) if i != position for x in plain_labels(other.subscripts)}
        labels = tuple(label for label in own if label in others or label in keep)
        if labels != own:
            operands[position] = emit(labels, read, tuple(label for label in own if label not in labels))
    for left, right, needed in _pairs(cut, operands, keep, texts):
        step, result = multiply(cut, operands[left], operands[right], needed)
        steps.append(step)
        operands.append(result)
    result = operands[-1]
    if number != 1:
        result = emit(plain_labels(result.subscripts), product([result], number))
    return steps, result


def _pairs(
    cut: Cut, operands: Sequence[Load], keep: Labels, texts: Sequence[Expr]
) -> Iterator[tuple[int, int, set[str]]]:
    """Positions of what is multiplied, results counted behind the operands, and the indices needed later."""
    count = len(operands)
    labels = [set(plain_labels(read.subscripts)) for read in operands]
    order = [(0, 1)] if count == 2 else []
    if count > 2:
        operand_labels = [plain_labels(read.subscripts) for read in operands]
        order, cost, left_cost = contraction_order(operand_labels, keep, cut.sizes, search=cut.target.search)
        cut.decide(
            "order",
            _order_text(order, texts),
            f"{cost:.3g} products and intermediate cells instead of {left_cost:.3g} from left to right",
        )
    alive = dict(enumerate(labels))
    for number, (left, right) in enumerate(order, start=count):
        both = alive.pop(left) | alive.pop(right)
        needed = {*keep, *(label for own in alive.values() for label in own)}
        yield left, right, needed
        alive[number] = both & needed


def _order_text(order: Sequence[tuple[int, int]], texts: Sequence[Expr]) -> tuple[str | Expr, ...]:
    """`(A[i,j] , B[j]) then (C[i] , result)`."""
    parts: list[str | Expr] = []
    for left, right in order:
        parts += [" then (" if parts else "("]
        for position, between in ((left, " , "), (right, ")")):
            parts += [texts[position] if position < len(texts) else "result", between]
    return tuple(parts)


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

"""The chosen order of products is the cheapest there is, and the products add up."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest

from insum_nn.compiler.codegen.contraction_order import contraction_order

Labels = tuple[str, ...]
# As documented in the module: an intermediate cell costs as much as four products; the last step is a little
# cheaper where it also sums, so that ties are broken towards summing last.
CELL, LAST = 4.0, 0.999


def all_orders(count: int) -> Iterator[list[tuple[int, int]]]:
    """Every way to multiply `count` operands two at a time."""

    def expand(alive: tuple[int, ...], fresh: int) -> Iterator[list[tuple[int, int]]]:
        if len(alive) == 1:
            yield []
            return
        for a, b in itertools.combinations(alive, 2):
            rest = (*(x for x in alive if x not in (a, b)), fresh)
            for others in expand(rest, fresh + 1):
                yield [(a, b), *others]

    yield from expand(tuple(range(count)), count)


def price(order: Sequence[tuple[int, int]], operands: Sequence[Labels], keep: Labels, sizes: dict[str, int]) -> float:
    """What an order costs: every product, and every cell of an intermediate result."""
    alive = {i: set(labels) for i, labels in enumerate(operands)}
    total = 0.0
    for number, (a, b) in enumerate(order, start=len(operands)):
        inside = alive.pop(a) | alive.pop(b)
        needed = set(keep).union(*alive.values()) if alive else set(keep)
        work = float(math.prod(sizes[label] for label in inside))
        result = inside & needed
        if alive:
            total += work + CELL * math.prod(sizes[label] for label in result)
        else:
            total += work if inside == set(keep) else LAST * work
        alive[number] = result
    assert len(alive) == 1
    return total


def draw(rng: random.Random, count: int) -> tuple[list[Labels], Labels, dict[str, int]]:
    names = "abcdefgh"[: rng.randint(2, 8)]
    sizes = {name: rng.choice((1, 2, 3, 5, 16, 64, 1000)) for name in names}
    operands = [tuple(rng.sample(names, rng.randint(0, min(4, len(names))))) for _ in range(count)]
    used = sorted(set().union(*operands))
    return operands, tuple(rng.sample(used, rng.randint(0, len(used)))), sizes


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_the_cheapest_of_all_orders(count: int):
    rng = random.Random(f"contraction {count}")
    for _ in range(150 if count < 5 else 25):
        operands, keep, sizes = draw(rng, count)
        order, cost, left = contraction_order(operands, keep, sizes)
        assert cost == pytest.approx(price(order, operands, keep, sizes))
        best = min(price(other, operands, keep, sizes) for other in all_orders(count))
        assert cost == pytest.approx(best), (operands, keep, sizes)
        written = [(0, 1), *((count + i - 1, i + 1) for i in range(1, count - 1))]
        assert left == pytest.approx(price(written, operands, keep, sizes))
        assert cost <= left


@pytest.mark.parametrize("count", [6, 8, 9, 12, 20, 40])
def test_many_factors(count: int):
    """Each operand is used once, and the order is never worse than the written one; past eight it is greedy."""
    rng = random.Random(f"many {count}")
    for _ in range(5):
        operands, keep, sizes = draw(rng, count)
        order, cost, left = contraction_order(operands, keep, sizes)
        used = [x for pair in order for x in pair]
        assert sorted(used) == list(range(2 * count - 2))
        assert cost == pytest.approx(price(order, operands, keep, sizes))
        assert cost <= left * (1 + 1e-12)


def test_greedy_finds_the_chain():
    """A matrix chain whose only cheap order is from the right."""
    count = 12
    names = "abcdefghijklm"
    sizes = {name: 100 for name in names} | {"m": 1}
    operands = [(names[i], names[i + 1]) for i in range(count)]
    order, cost, left = contraction_order(operands, ("a", "m"), sizes)
    assert order[0] == (10, 11)
    assert cost < left / 20


def test_clebsch_gordan_before_the_matrix_product():
    """The tensor product of the papers: coefficients first, the large product last."""
    sizes = {"z": 1000, "p": 10, "u": 64, "w": 64}
    operands = [("p",), ("z", "p", "u"), ("z", "p"), ("p", "u", "w")]
    order, cost, left = contraction_order(operands, ("z", "p", "w"), sizes)
    assert order[-1][0] == 3 or order[-1][1] == 3
    assert (0, 2) in order
    assert cost < left


def test_the_written_order_on_request():
    operands = [("a", "b"), ("b", "c"), ("c", "d")]
    sizes = {"a": 100, "b": 100, "c": 100, "d": 1}
    assert contraction_order(operands, ("a", "d"), sizes, search=False)[0] == [(0, 1), (3, 2)]
    assert contraction_order(operands, ("a", "d"), sizes)[0] == [(1, 2), (0, 3)]


def test_operands_without_labels():
    assert contraction_order([(), ()], (), {})[0] == [(0, 1)]
    order, _, _ = contraction_order([(), ("i",), ()], ("i",), {"i": 5})
    assert sorted(x for pair in order for x in pair) == [0, 1, 2, 3]


def test_extents_of_zero():
    order, cost, _ = contraction_order([("i", "j"), ("j", "k"), ("k",)], ("i",), {"i": 0, "j": 3, "k": 4})
    assert len(order) == 2
    assert cost >= 0

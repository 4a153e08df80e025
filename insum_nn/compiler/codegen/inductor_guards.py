"""What compiled code assumes of sizes: trees of JSON, written from sympy's expressions and checked without it.

A tree is an integer, the name of a size, or a list of an operation and its operands.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import reduce
from typing import Any

__all__ = ["Guard", "Tree", "checked", "compiled", "tree_of"]

Tree = Any
Guard = Callable[[Mapping[str, int]], Any]

# Guards are short; what is deeper or longer than any was not written here.
_DEPTH = 64
_NODES = 4096
_BITS = 4096
_DIGITS = 1 << 64


def _power(base: Any, exponent: Any) -> Any:
    if exponent != int(exponent) or abs(exponent) * max(1, abs(base.numerator).bit_length()) > _BITS:
        raise ValueError(f"{base} to the power of {exponent} is no size")
    return Fraction(base) ** int(exponent) if exponent < 0 else base ** int(exponent)


def _divide(a: Any, b: Any) -> Any:
    return Fraction(a) / b


# By the names of sympy's and torch's classes.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "Add": lambda *terms: sum(terms),
    "Mul": lambda *factors: reduce(operator.mul, factors, 1),
    "Pow": _power,
    "PowByNatural": _power,
    "Max": max,
    "Min": min,
    "Abs": abs,
    "floor": math.floor,
    "ceiling": math.ceil,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "CeilDiv": lambda a, b: -(-a // b),
    "IntTrueDiv": _divide,
    "ModularIndexing": lambda a, b, c: a // b % c,
    "Identity": lambda a: a,
    "ToFloat": lambda a: a,
    "Where": lambda condition, a, b: a if condition else b,
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "StrictLessThan": operator.lt,
    "LessThan": operator.le,
    "StrictGreaterThan": operator.gt,
    "GreaterThan": operator.ge,
    "And": lambda *parts: all(parts),
    "Or": lambda *parts: any(parts),
    "Not": operator.not_,
}


def tree_of(expression: Any) -> Tree:
    """Return the tree of a sympy expression.

    Raises:
        ValueError: it holds something that has no place in a guard.
    """
    if expression.is_Symbol:
        return str(expression)
    if expression.is_Integer:
        return int(expression)
    if expression.is_Rational:
        return ["IntTrueDiv", int(expression.p), int(expression.q)]
    if expression.is_Boolean and not expression.args:
        return ["And"] if bool(expression) else ["Or"]
    name = type(expression).__name__
    if name not in _OPERATIONS:
        raise ValueError(f"{expression} has no form on disk: {name}")
    return [name, *(tree_of(argument) for argument in expression.args)]


def checked(trees: object, names: Sequence[str]) -> tuple[Tree, ...]:
    """Trees from a file.

    Raises:
        ValueError: they are none, or speak of other sizes than `names`.
    """
    if not isinstance(trees, list):
        raise ValueError("guards are no list")
    left = [(tree, 0) for tree in trees]
    count = 0
    while left:
        tree, depth = left.pop()
        count += 1
        if depth > _DEPTH or count > _NODES:
            raise ValueError("a guard is too long")
        if type(tree) is int and abs(tree) < _DIGITS:
            continue
        if isinstance(tree, str) and tree in names:
            continue
        if not (isinstance(tree, list) and tree and isinstance(tree[0], str) and tree[0] in _OPERATIONS):
            raise ValueError(f"{str(tree)[:40]!r} is no guard")
        left += [(operand, depth + 1) for operand in tree[1:]]
    return tuple(trees)


def compiled(tree: Tree) -> Guard:
    """Return the function that evaluates a tree at sizes."""
    if isinstance(tree, str):
        return lambda sizes: sizes[tree]
    if not isinstance(tree, list):
        return lambda sizes: tree
    operation, operands = _OPERATIONS[tree[0]], [compiled(operand) for operand in tree[1:]]
    return lambda sizes: operation(*[operand(sizes) for operand in operands])

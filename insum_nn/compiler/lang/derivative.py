"""Differentiate statements: the adjoint of an indirect einsum is an indirect einsum.

For `Out[o] += F1[a] * F2[b] * ...` the derivative with respect to one occurrence of `F1` is

    dF1[a] += dOut[o] * F2[b] * ...

over the same index space: the tensor that was read is written, the one that was written is read. Index tensors are the
same, so that the same terms miss. A term whose read was out of bounds did not contribute, so the derivative drops that
write instead of raising.

A factor that is a function is replaced by its derivative, by the chain rule.

`max=` and `min=` send the gradient to the terms that attain the extremum of their cell: one more factor of the
derivative asks whether a term does. On a tie they share it equally, so another statement counts them in each cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from insum_nn.compiler.lang.functions import OPERATIONS
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.lang.syntax import Access, Apply, Factor, Number, Statement, leaves, replaced
from insum_nn.errors import InsumNameError

__all__ = ["Derivative", "apart", "counting", "derivatives", "directional", "fresh_name", "roundings"]


@dataclass(frozen=True, slots=True)
class Derivative:
    """The derivative statements of one operand: one per occurrence; their results add up.

    Attributes:
        statements: each writes `output`.
        output: name of the tensor written: the operand's gradient, or the output's tangent.
        seed: name of the incoming tensor: the gradient of the statement's output, divided by how many terms attain an
            extremum, or the operand's tangent.
        extremum: names under which the output of `max=` and `min=` is read, and the share of each term of a cell in
            its tangent.
    """

    statements: tuple[Statement, ...]
    output: str
    seed: str
    extremum: tuple[str, ...]


def fresh_name(base: str, taken: set[str]) -> str:
    """Return `base`, with underscores appended until the name is free."""
    while base in taken:
        base += "_"
    return base


def derivatives(statement: Statement, operand: str) -> Derivative:
    """Differentiate a statement with respect to one tensor.

    Raises:
        InsumNameError: `operand` is not a factor of the statement.

    >>> from insum_nn.compiler.lang.parser import parse
    >>> print(derivatives(parse("C[Row[p],n] += Val[p] * B[Col[p],n]"), "B").statements[0])
    dB[Col[p],n] += dC[Row[p],n] * Val[p]
    >>> print(derivatives(parse("P[e,h] = exp(S[e,h] - M[I[e],h])"), "S").statements[0])
    dS[e,h] += dP[e,h] * exp(S[e,h] - M[I[e],h])
    >>> print(derivatives(parse("Y[I[e],f] max= X[J[e],f]"), "X").statements[0])
    dX[J[e],f] += dY[I[e],f] * eq(X[J[e],f], Y[I[e],f])
    """
    if operand not in {access.name for access in statement.reads}:
        factors = ", ".join(dict.fromkeys(access.name for access in statement.reads)) or "none"
        raise InsumNameError(
            f"'{operand}' is not a factor of the statement",
            expression=statement.text,
            spans=[a.name_span for a in statement.accesses() if a.name == operand],
            details=[f"differentiable factors: {factors}"],
            fix="differentiate with respect to one of those; index tensors have no gradient.",
            tensor=operand,
        )
    taken = {statement.output.name, *statement.tensors(), *statement.indices()}
    seed = fresh_name(f"d{statement.output.name}", taken)
    output = fresh_name(f"d{operand}", taken | {seed})
    extra = _attains(statement, statement.output.name)
    read = _renamed(statement.output, seed)
    statements: list[Statement] = []
    for access, before, after in _occurrences(statement, operand):
        factors = [read, *before, *after, *extra]
        statements.append(parse(f"{_renamed(access, output)} += {' * '.join(factors)}"))
    return Derivative(tuple(statements), output, seed, (statement.output.name,) * len(extra))


def directional(statement: Statement, operand: str) -> Derivative:
    """Return the directional derivative of the output: the statement with each occurrence of the factor replaced.

    >>> from insum_nn.compiler.lang.parser import parse
    >>> print(directional(parse("C[Row[p],n] += Val[p] * B[Col[p],n]"), "B").statements[0])
    C[Row[p],n] += Val[p] * dB[Col[p],n]
    """
    taken = {statement.output.name, *statement.tensors(), *statement.indices()}
    seed = fresh_name(f"d{operand}", taken)
    extremum, share = (fresh_name(name, taken | {seed}) for name in ("extremum", "share"))
    extra = _attains(statement, extremum) and [*_attains(statement, extremum), _renamed(statement.output, share)]
    statements: list[Statement] = []
    for access, before, after in _occurrences(statement, operand):
        factors = [*before, _renamed(access, seed), *after, *extra]
        statements.append(parse(f"{statement.output} += {' * '.join(factors)}"))
    return Derivative(tuple(statements), statement.output.name, seed, (extremum, share) if extra else ())


def counting(statement: Statement, number: float = 1) -> Statement:
    """Return the statement that counts, in each cell, the terms that attain its extremum, times a number.

    >>> from insum_nn.compiler.lang.parser import parse
    >>> print(counting(parse("Y[I[e],f] max= X[J[e],f]")))
    count[I[e],f] += eq(X[J[e],f], Y[I[e],f])
    """
    name = fresh_name("count", {statement.output.name, *statement.tensors(), *statement.indices()})
    factors = [str(number)] * (number != 1) + _attains(statement, statement.output.name)
    return parse(f"{_renamed(statement.output, name)} += {' * '.join(factors)}")


def apart(statement: Statement) -> tuple[Statement, Statement]:
    """Return the statement that stores the terms of an extremum, over all indices, and the one that selects of them.

    The same terms miss in both: what is not to be written has no gradient, whatever it would be multiplied by.

    >>> from insum_nn.compiler.lang.parser import parse
    >>> print(*apart(parse("Y[I[e],f] max= exp(X[J[e],f])")), sep="; ")
    terms[e,f] += exp(X[J[e],f]) * one(Y[I[e],f]); Y[I[e],f] max= terms[e,f] * one(X[J[e],f])
    """
    name = fresh_name("terms", {statement.output.name, *statement.tensors(), *statement.indices()})
    indices = [*statement.indices()]
    terms = f"{name}[{','.join(indices)}]" if indices else name
    of_output, of_reads = (
        [f"one({each})" for each in dict.fromkeys(accesses) if any(s.plain is None for s in each.subscripts)]
        for accesses in ((statement.output,), statement.reads)
    )
    return (
        parse(f"{terms} += {' * '.join([*map(str, statement.factors), *of_output])}"),
        parse(f"{statement.output} {statement.operator} {' * '.join([terms, *of_reads])}"),
    )


def roundings(*factors: Factor) -> float:
    """Return how often the product of some factors is rounded; infinity: it is approximated, or not one to count.

    A result that is rounded once is bitwise equal in every backend. With more roundings, backends may differ in the
    last bits.
    """
    changing = [each for each in factors if not _is_sign(each)]
    return max(len(changing) - 1, 0) + sum(map(_roundings, factors))


def _is_sign(factor: Factor) -> bool:
    if isinstance(factor, Apply):
        return factor.function == "one"
    return isinstance(factor, Number) and abs(factor.value) == 1


def _roundings(factor: Factor) -> float:
    if not isinstance(factor, Apply):
        return 0
    if factor.function == "mul":
        return roundings(*factor.args)
    own = {"add": len(factor.args) - 1, "leaky_relu": 1}.get(factor.function)
    if own is None:
        own = 0 if OPERATIONS[factor.function].integers else math.inf
    return own + sum(map(_roundings, factor.args))


def _occurrences(statement: Statement, operand: str) -> Iterator[tuple[Access, list[str], list[str]]]:
    """Yield each access to a tensor that the value varies with, and what multiplies its change there.

    The latter is divided at its place among the factors. What a function's derivative no longer reads still says which
    terms take part: it becomes a `one`.
    """
    given = statement.factors
    for position, factor in enumerate(given):
        own = [leaf for leaf in leaves(factor) if isinstance(leaf, Access)]
        for access in dict.fromkeys(leaf for leaf in own if leaf.name == operand):
            held = [at for at, other in enumerate(given) if access in leaves(other)]
            if not any(isinstance(given[at], Apply) for at in held):
                held = [position]
            elif held[0] < position:
                continue
            # Several factors of one access, functions among them, change together: one statement, not one for each.
            product = _times(*(given[at] for at in held))
            change = _change(product, access)
            if change is None:
                continue
            parts = [] if isinstance(change, Number) and change.value == 1 else [str(change)]
            others = [f for at, f in enumerate(given) if at not in held]
            read = {leaf for leaf in leaves(change, *others) if isinstance(leaf, Access)}
            shown = {index.name for each in (statement.output, access, *read) for index in each.indices()}
            for lost in dict.fromkeys(leaf for leaf in leaves(product) if isinstance(leaf, Access)):
                counts = any(subscript.plain is None for subscript in lost.subscripts)
                counts |= not shown.issuperset(index.name for index in lost.indices())
                if counts and lost not in read and lost != access:
                    parts.append(f"one({lost})")
            after = [str(f) for at, f in enumerate(given) if at > position and at not in held]
            yield access, [*map(str, given[:position])], [*parts, *after]


def _change(factor: Factor, access: Access) -> Factor | None:
    """Return the derivative of a factor by an access; `None`: 0."""
    if factor == access:
        return Number(1, access.span)
    if not isinstance(factor, Apply):
        return None
    changes = [_change(arg, access) for arg in factor.args]
    found: list[Factor] = []
    for place, change in enumerate(changes):
        if change is None:
            continue
        others = factor.args[:place] + factor.args[place + 1 :]
        if factor.function == "add":
            found.append(change)
        elif factor.function == "mul":
            found.append(_times(*others, change))
        elif (local := _local(factor, place)) is not None:
            found.append(_times(*local, change))
    return Apply("add", tuple(found), factor.span) if len(found) > 1 else found[0] if found else None


def _local(factor: Apply, place: int) -> tuple[Factor, ...] | None:
    """Return the factors of a function's derivative by one of its arguments; `None`: 0."""
    u = factor.args[0]
    if factor.function == "pow":
        exponent = factor.args[1]
        assert isinstance(exponent, Number)
        if exponent.value in (0, 1):
            # Not 0 times an infinite power of 0.
            return (exponent,) if exponent.value else None
        lower = Number(exponent.value - 1, exponent.span)
        return exponent, (u if lower.value == 1 else Apply("pow", (u, lower), factor.span))
    rule = OPERATIONS[factor.function].derivatives[place]
    if rule is None:
        return None
    given = dict(zip("uv", factor.args, strict=False))
    return tuple(replaced(each, lambda name: given[name.name]) for each in parse(f"r += {rule}").factors)


def _times(*factors: Factor) -> Factor:
    """Return a product without factors of 1."""
    rest = [f for f in factors if not (isinstance(f, Number) and f.value == 1)]
    return Apply("mul", tuple(rest), rest[0].span) if len(rest) > 1 else rest[0] if rest else factors[0]


def _attains(statement: Statement, extremum: str) -> list[str]:
    """Return the factor that is 1 where a term attains the extremum, which is read by a name; `+=`: none."""
    if statement.combining.adds:
        return []
    return [f"eq({' * '.join(map(str, statement.factors))}, {_renamed(statement.output, extremum)})"]


def _renamed(access: Access, name: str) -> str:
    return name + str(access)[len(access.name) :]

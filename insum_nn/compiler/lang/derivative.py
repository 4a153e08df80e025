"""Differentiate statements: the adjoint of an indirect einsum is an indirect einsum.

For `Out[o] += F1[a] * F2[b] * ...` the derivative with respect to one occurrence of `F1` is

    dF1[a] += dOut[o] * F2[b] * ...

over the same index space: the tensor that was read is written, the one that was written is read. Index tensors are the
same, so that the same terms miss. A term whose read was out of bounds did not contribute, so the derivative drops that
write instead of raising.

`max=` and `min=` send the gradient to the terms that attained the extremum, in equal shares on a tie: the derivative
has one more factor, a tensor over the whole index space that holds the share of each term.
"""

from __future__ import annotations

from dataclasses import dataclass

from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.lang.syntax import Access, Statement
from insum_nn.errors import InsumNameError

__all__ = ["Derivative", "derivatives", "directional", "fresh_name"]


@dataclass(frozen=True, slots=True)
class Derivative:
    """The derivative statements of one operand: one per occurrence; their results add up.

    Attributes:
        statements: each writes `output`.
        output: name of the tensor written: the operand's gradient, or the output's tangent.
        seed: name of the incoming tensor: the gradient of the statement's output, or the operand's tangent.
        share: name of the tensor of shares for `max=` and `min=`; `None` otherwise.
        operand: the operand's name.
    """

    statements: tuple[Statement, ...]
    output: str
    seed: str
    share: str | None
    operand: str


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
    """
    factors = enumerate(statement.factors)
    positions = [i for i, factor in factors if isinstance(factor, Access) and factor.name == operand]
    if not positions:
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
    share, extra = _share(statement, taken | {seed, output})
    statements: list[Statement] = []
    for position in positions:
        access = statement.factors[position]
        assert isinstance(access, Access)
        written = output + str(access)[len(access.name) :]
        read = seed + str(statement.output)[len(statement.output.name) :]
        others = [str(f) for i, f in enumerate(statement.factors) if i != position]
        statements.append(parse(f"{written} += {' * '.join([read, *others, *extra])}"))
    return Derivative(tuple(statements), output, seed, share, operand)


def directional(statement: Statement, operand: str) -> Derivative:
    """Return the directional derivative of the output: the statement with each occurrence of the factor replaced.

    >>> from insum_nn.compiler.lang.parser import parse
    >>> print(directional(parse("C[Row[p],n] += Val[p] * B[Col[p],n]"), "B").statements[0])
    C[Row[p],n] += Val[p] * dB[Col[p],n]
    """
    taken = {statement.output.name, *statement.tensors(), *statement.indices()}
    seed = fresh_name(f"d{operand}", taken)
    share, extra = _share(statement, taken | {seed})
    statements: list[Statement] = []
    for position, factor in enumerate(statement.factors):
        if not isinstance(factor, Access) or factor.name != operand:
            continue
        factors = [str(f) for f in statement.factors]
        factors[position] = seed + factors[position][len(operand) :]
        statements.append(parse(f"{statement.output} += {' * '.join([*factors, *extra])}"))
    return Derivative(tuple(statements), statement.output.name, seed, share, operand)


def _share(statement: Statement, taken: set[str]) -> tuple[str | None, list[str]]:
    """Return the name of the extra factor of modes that select a term, and its access over the index space."""
    if statement.combining.adds:
        return None, []
    name = fresh_name("share", taken)
    indices = statement.indices()
    return name, [f"{name}[{','.join(indices)}]" if indices else name]

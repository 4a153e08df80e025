"""Parse texts of several statements, whose later ones read what earlier ones write.

    S[e,h] = Q[I[e],h,c] * K[J[e],h,c]
    M[I[e],h] max= detach(S[e,h])
    Z[I[e],h] += exp(S[e,h] - M[I[e],h])
    Y[I[e],h,c] += exp(S[e,h] - M[I[e],h]) / Z[I[e],h] * V[J[e],h,c]

Statements end at a semicolon, or at the end of a line outside of brackets; `#` begins a comment. The result is the
tensor of the last statement, or those that `return` names.

A cell of a tensor made by `=` that no term wrote is absent: to read it is a miss. So `=` names its right-hand side,
which is read in its place where it sums nothing; where it sums, a reader asks by `one` for what its terms ask for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from insum_nn.compiler.lang.parser import check_text, parse
from insum_nn.compiler.lang.syntax import Access, Apply, Factor, Statement, Subscript, leaves, replaced, substituted
from insum_nn.errors import (
    InsumAliasError,
    InsumError,
    InsumNameError,
    InsumShapeError,
    InsumSyntaxError,
    plural,
    raise_collected,
)

__all__ = ["ProgramText", "is_program", "parse_program"]

_RETURN = re.compile(r"return\s+(\w+(?:\s*,\s*\w+)*)")
# Characters up to which what `=` names is written where it is read.
_SHORT = 500


@dataclass(frozen=True, slots=True)
class ProgramText:
    """A program of several statements.

    Attributes:
        statements: as they are written.
        steps: as they run, in order: without those whose right-hand sides are read in their place.
        results: names of the tensors that are returned.
    """

    statements: tuple[Statement, ...]
    steps: tuple[Statement, ...]
    results: tuple[str, ...]

    def __str__(self) -> str:
        lines = [*map(str, self.statements)]
        if self.results != (self.statements[-1].output.name,):
            lines.append(f"return {', '.join(self.results)}")
        return "\n".join(lines)

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the tensors that statements write."""
        return tuple(dict.fromkeys(s.output.name for s in self.statements))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors that are passed, in reading order."""
        names = dict.fromkeys(name for statement in self.statements for name in statement.tensors())
        return tuple(name for name in names if name not in self.written)


def is_program(text: object) -> bool:
    """Return whether a text is of several statements, or of one with comments or line ends."""
    return isinstance(text, str) and not {*";#\n"}.isdisjoint(text)


def _lines(text: str) -> Iterator[str]:
    depth, line = 0, ""
    for character in re.sub(r"#[^\n]*", "", text) + "\n":
        depth += (character in "[(") - (character in "])")
        if character in ";\n" and depth <= 0:
            if line.strip():
                yield line.strip()
            line, depth = "", 0
        else:
            line += " " if character == "\n" else character
    # What a bracket leaves open is a line, whose parser says so.
    if line.strip():
        yield line.strip()


def parse_program(text: str) -> ProgramText:
    """Parse several statements, or one with comments.

    Raises:
        InsumSyntaxError: a line is no statement, or a sum by `=` cannot be read as it is.
        InsumNameError: a tensor is read before it is complete, is never used, or is returned and never written.
        InsumAliasError: a tensor that is written directs what is read or written.
        InsumShapeError: a tensor has two ranks.

    >>> program = parse_program("S[i] = exp(x[i]); Z += S[i]; Y[i] = S[i] / Z")
    >>> print(*program.steps, sep="; ")
    Z += exp(x[i]); Y[i] = exp(x[i]) / Z
    """
    check_text(text)
    statements: list[Statement] = []
    results: tuple[str, ...] | None = None
    for line in _lines(text):
        if results is not None:
            fix = "put it behind all statements."
            raise InsumSyntaxError("'return' is not the last line", expression=line, fix=fix)
        if found := _RETURN.fullmatch(line):
            results = tuple([name.strip() for name in found[1].split(",")])
        else:
            statements.append(parse(line))
    if not statements:
        raise InsumSyntaxError("the text has no statement", expression=text, fix="write one, such as y[i] += x[i].")
    results = results or (statements[-1].output.name,)
    raise_collected([*_faults(statements, results)])
    return ProgramText(tuple(statements), _lowered(statements, results), results)


def _faults(statements: list[Statement], results: tuple[str, ...]) -> Iterator[InsumError]:
    """Yield what is wrong with the order in which tensors are written and read."""
    written = {s.output.name for s in statements}
    operators: dict[str, list[str]] = {}
    read: set[str] = set()
    ranks: dict[str, int] = {}
    for statement in statements:
        output = statement.output
        for access in statement.accesses():
            rank = len(access.subscripts)
            if ranks.setdefault(access.name, rank) != rank:
                yield InsumShapeError(
                    f"'{access.name}' has {plural(rank, 'subscript')} here, and {ranks[access.name]} before",
                    expression=statement.text,
                    spans=[access.span],
                    fix="give it one subscript for each dimension.",
                    tensor=access.name,
                    got=rank,
                )
        for access in (each for outer in (output, *statement.reads) for each in outer.nested()):
            if access.name in written:
                yield InsumAliasError(
                    f"'{access.name}' is computed by the program, so it cannot be an index tensor",
                    expression=statement.text,
                    spans=[access.name_span],
                    fix="compute it before, and pass it under another name.",
                    tensor=access.name,
                )
        for access in statement.reads:
            if access.name in written and access.name not in operators and access.name != output.name:
                yield InsumNameError(
                    f"'{access.name}' is read before it is written",
                    expression=statement.text,
                    spans=[access.name_span],
                    fix="put the statements that write it in front of this one.",
                    tensor=access.name,
                )
        read |= {access.name for access in statement.reads}
        if output.name in read - {a.name for a in statement.reads}:
            yield InsumNameError(
                f"'{output.name}' is written after it was read",
                expression=statement.text,
                spans=[output.name_span],
                fix="put all statements that write it in front of those that read it, or use another name.",
                tensor=output.name,
            )
        before = operators.setdefault(output.name, [])
        if before and (statement.operator != "+=" or before[-1] not in ("+=", "=")):
            yield InsumNameError(
                f"'{output.name}' was written by '{before[-1]}', and '{statement.operator}' follows",
                expression=statement.text,
                spans=[output.name_span],
                fix="only '+=' may follow, on '+=' or '='; use another name.",
                tensor=output.name,
            )
        before.append(statement.operator)
    for name in dict.fromkeys((*results, *written)):
        if name not in written:
            what, fix = "returned and never written", "correct the name."
        elif name not in read and name not in results:
            what, fix = "computed and never used", "delete its statement, or return it."
        elif results.count(name) > 1:
            what, fix = "returned twice", "return it once, and use the result twice."
        else:
            continue
        text = "; ".join(s.text for s in statements)
        yield InsumNameError(f"'{name}' is {what}", expression=text, fix=fix, tensor=name)


# What `=` names.


def _lowered(statements: list[Statement], results: tuple[str, ...]) -> tuple[Statement, ...]:
    """Return the statements that run."""
    writers: dict[str, list[Statement]] = {}
    for statement in statements:
        writers.setdefault(statement.output.name, []).append(statement)
    names = {name: own[0] for name, own in writers.items() if len(own) == 1 and own[0].operator == "="}
    kept: dict[str, Statement] = {}
    steps: list[Statement] = []

    def written_out(statement: Statement, *, whole: bool) -> Statement:
        guards: dict[Access, None] = {}

        def read(access: Access) -> Factor:
            source = names.get(access.name)
            if source is None:
                return access
            made = kept[access.name]
            places = {s.plain: given for s, given in zip(made.output.subscripts, access.subscripts, strict=True)}
            direct = all(s.plain is not None or s.indirect is not None for s in access.subscripts)
            if whole and _is_name(made) and direct and len(str(made)) < _SHORT:
                moved = [replaced(factor, lambda each: substituted(each, places)) for factor in made.factors]
                ones = [f for f in moved if isinstance(f, Apply) and f.function == "one"]
                guards.update(dict.fromkeys(f.args[0] for f in ones if isinstance(f.args[0], Access)))
                value = [f for f in moved if f not in ones] or [*moved]
                return value[0] if len(value) == 1 else Apply("mul", tuple(value), access.span)
            guards.update(dict.fromkeys(_asked(source, made, places)))
            return access

        factors = [replaced(factor, read) for factor in statement.factors]
        here = {leaf for leaf in leaves(*factors) if isinstance(leaf, Access)}
        factors += [Apply("one", (guard,), guard.span) for guard in guards if guard not in here]
        return parse(str(Statement(statement.output, statement.operator, tuple(factors), "")))

    for statement in statements:
        try:
            step: Statement | None = written_out(statement, whole=True)
        except InsumSyntaxError:
            step = None
        if step is None or _is_large(step):
            # Its derivatives would be longer or deeper than a statement may be: what `=` names is computed before.
            step = written_out(statement, whole=False)
        # What is unchanged keeps its text, and with it the places in it that errors show.
        kept[statement.output.name] = step = statement if step == statement else step
        steps.append(step)
    needed = {*results}
    found: list[Statement] = []
    for step in reversed(steps):
        if step.output.name in needed:
            needed |= {access.name for access in step.reads}
            found.insert(0, step)
    return tuple(found)


def _is_large(statement: Statement) -> bool:
    """Return whether a statement has half the factors, or is half as deep, as one may be."""
    depths = accumulate((c == "(") - (c == ")") for c in str(statement))
    return len(statement.factors) > 32 or max(depths) > 16


def _is_name(statement: Statement) -> bool:
    """Return whether a statement by `=` sums nothing, and has each cell at one point of its loops."""
    plain = [s.plain for s in statement.output.subscripts]
    return None not in plain and len({*plain}) == len(plain) and {*plain} == {*statement.indices()}


def _asked(source: Statement, made: Statement, places: Mapping[str | None, Subscript]) -> Iterator[Access]:
    """Yield what a reader of a cell has to find for the cell to have a term, the same for all terms.

    Raises:
        InsumSyntaxError: its terms do not miss together.
    """
    plain = {s.plain for s in made.output.subscripts}
    summed = {*made.indices()} - plain
    nothing = Subscript((), 0, source.output.span)
    for access in made.reads:
        uneven = [s for s in access.subscripts if s.plain is None and not s.terms == ()]
        if not uneven:
            continue
        if None in plain or any(index.name in summed for s in uneven for index in s.indices()):
            raise InsumSyntaxError(
                f"whether a cell of '{source.output.name}' has a term cannot be told where it is read",
                expression=source.text,
                spans=[source.output.span],
                fix=f"write '{source.output.name}' by '+=': cells without a term are then 0.",
            )
        yield substituted(access, {**places, **dict.fromkeys(summed, nothing)})
    if None in plain:
        raise InsumSyntaxError(
            f"'=' writes '{source.output.name}' at entries, and it is read",
            expression=source.text,
            spans=[source.output.span],
            fix="write it by '+=': cells without a term are then 0.",
        )

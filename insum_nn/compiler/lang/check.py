"""Check what depends on names alone: written indices must be read, the output must not be read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from insum_nn.compiler.lang.syntax import Access, Apply, Statement, leaves
from insum_nn.errors import (
    InsumAliasError,
    InsumError,
    InsumNameError,
    InsumShapeError,
    InsumSyntaxError,
    Span,
    raise_collected,
)

__all__ = ["check_names", "check_statement"]


def check_statement(statement: Statement, sized: Collection[str] = ()) -> None:
    """Check a statement on its own.

    Args:
        statement: the parsed statement.
        sized: indices whose extent is given by `sizes=`; such an index may be written without being read.

    Raises:
        InsumNameError: an index is written but never read.
        InsumAliasError: the output is also read.
        InsumShapeError: one tensor is used with two ranks.
        InsumSyntaxError: a summand does not vary with an index that is summed.
    """
    checks = (_output_read, _two_ranks, _summands_that_lack_an_index)
    raise_collected([*_written_never_read(statement, sized), *chain(*(check(statement) for check in checks))])


def _written_never_read(statement: Statement, sized: Collection[str]) -> Iterator[InsumError]:
    read = {index.name for access in statement.reads for index in access.indices()}
    seen: dict[str, list[Span]] = {}
    for index in statement.output.indices():
        # An index of an index tensor in the output is read there: Row[g] gives g its extent.
        if index.name not in read:
            seen.setdefault(index.name, []).append(index.span)
    nested = {index.name for access in statement.output.nested() for index in access.indices()}
    for name, spans in seen.items():
        if name in sized or name in nested:
            continue
        names_read = ", ".join(sorted(read)) or "none"
        instead = "write one of those, multiply" if read else "multiply"
        yield InsumNameError(
            f"index '{name}' is written but never read",
            expression=statement.text,
            spans=spans,
            details=[f"indices read on the right: {names_read}"],
            fix=f"{instead} by a tensor that carries '{name}', or repeat the result along a new axis with "
            f"sizes={{'{name}': ...}}.",
            index=name,
            expected=tuple(sorted(read)),
        )


def _output_read(statement: Statement) -> Iterator[InsumError]:
    output = statement.output
    inner = [access for access in statement.accesses() if access is not output and access.name == output.name]
    if not inner:
        return
    first = inner[0]
    why = (
        f"'{statement.operator}' scatters in no fixed order, so this read would race"
        if any(first is access for read in statement.reads for access in (read, *read.nested()))
        else "an index tensor cannot be rewritten while it directs the writing"
    )
    copy = f"{output.name}0"
    renamed = copy + str(first)[len(first.name) :]
    yield InsumAliasError(
        f"'{output.name}' is written and read by the same statement",
        expression=statement.text,
        spans=[output.name_span, *(access.name_span for access in inner)],
        details=[why],
        fix=f"pass a copy under another name, e.g. {copy}={output.name}.clone(), and read {renamed}.",
        tensor=output.name,
    )


def _two_ranks(statement: Statement) -> Iterator[InsumError]:
    by_name: dict[str, list[Access]] = {}
    for access in statement.accesses():
        by_name.setdefault(access.name, []).append(access)
    for name, accesses in by_name.items():
        ranks = sorted({len(access.subscripts) for access in accesses})
        if len(ranks) > 1 and name != statement.output.name:
            yield InsumShapeError(
                f"tensor '{name}' is used with {' and with '.join(map(str, ranks))} subscripts",
                expression=statement.text,
                spans=[access.span for access in accesses],
                fix=f"give every access to '{name}' one subscript per dimension.",
                tensor=name,
                got=tuple(ranks),
            )


def _summands_that_lack_an_index(statement: Statement) -> Iterator[InsumError]:
    """Refuse `Y[i] += A[i,k] + b[i]`, where b would be added once, or for each k: nothing tells which is meant."""
    value = statement.factors[0]
    if len(statement.factors) > 1 or not isinstance(value, Apply) or value.function != "add":
        return
    if not statement.combining.adds:
        return
    written = {index.name for index in statement.output.indices()}
    for summand in value.args:
        own = {i.name for leaf in leaves(summand) if isinstance(leaf, Access) for i in leaf.indices()}
        lacking = [name for name in statement.indices() if name not in written and name not in own]
        if lacking:
            names = ", ".join(f"'{name}'" for name in lacking)
            yield InsumSyntaxError(
                f"a summand does not vary with {names}, over which the statement sums",
                expression=statement.text,
                spans=[summand.span],
                fix="add it by a statement of its own.",
            )


def check_names(
    text: str,
    required: Sequence[str],
    written: Sequence[str],
    passed: Collection[str],
    statement: Statement | None = None,
) -> None:
    """Compare names of tensors with those that were passed.

    Args:
        text: the statement or the program.
        required: tensors that it reads.
        written: tensors that it writes, and that may be passed.
        passed: what was passed.
        statement: the statement; errors show where its tensors stand, and name its indices.

    Raises:
        InsumNameError: a tensor is missing, or one was passed that is not used.
    """
    faults: list[InsumError] = []
    what = "program" if statement is None else "statement"
    unused = [name for name in passed if name not in required and name not in written]
    for name in required:
        if name in passed:
            continue
        accesses = () if statement is None else statement.accesses()
        if statement is not None and name in statement.indices():
            fix = f"pass a tensor of its values under another name; the index '{name}' has no value as a factor."
        elif unused:
            fix = f"pass {name}=..., or rename: '{unused[0]}' was passed and is not used."
        else:
            fix = f"pass {name}=..."
        faults.append(
            InsumNameError(
                f"tensor '{name}' was not passed",
                expression=text,
                spans=[access.name_span for access in accesses if access.name == name],
                details=[f"passed: {', '.join(sorted(passed)) or 'none'}"],
                fix=fix,
                tensor=name,
            )
        )
    if unused and not faults:
        names = ", ".join(f"'{name}'" for name in unused)
        many = len(unused) > 1
        faults.append(
            InsumNameError(
                f"{'tensors' if many else 'tensor'} {names} {'are' if many else 'is'} not used by the {what}",
                expression=text,
                details=[f"tensors of the {what}: {', '.join((*written, *required))}"],
                fix=f"drop {'them' if many else 'it'}, or use {'them' if many else 'it'} in the expression.",
                tensor=unused[0],
            )
        )
    raise_collected(faults)

"""The canonical form of a bound statement: the same for every choice of names.

    C[Row[g],n] += Val[g,q] * B[Col[g,q],n]         out[x0[a],b] += t0[a,c] * t1[x1[a,c],b]

Programs, schedules and files on disk are kept under it, so that statements which differ in names share them. The names
themselves are the IR's. What is kept must not hold names of a user: they come back where a message is written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from insum_nn.compiler.ir.build import OUTPUT, Names
from insum_nn.compiler.lang.bind import Bound, show_dtype
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.lang.syntax import Statement, renamed, replaced
from insum_nn.errors import InsumError
from insum_nn.facts import IndexFacts, StaticTable, Tables

__all__ = [
    "canonical",
    "canonical_key",
    "canonical_tables",
    "digest",
    "messages_name",
    "named_as",
    "names_of",
    "shown_statement",
]


@lru_cache(maxsize=2048)
def names_of(statement: Statement) -> Names:
    """Return the canonical name of each tensor and index of a statement."""
    return Names(statement)


def _renamed(statement: Statement) -> Statement:
    """Return the statement in canonical names; not cached, as statements that differ in `2` and `2.0` are equal."""
    names = names_of(statement)
    output = replace(renamed(statement.output, names.tensors, names.indices), name=OUTPUT)
    factors = tuple(replaced(f, lambda each: renamed(each, names.tensors, names.indices)) for f in statement.factors)
    # Parsed again, so that its text and the places in it belong to the new names.
    return parse(str(Statement(output, statement.operator, factors, "")))


@lru_cache(maxsize=2048)
def canonical(bound: Bound) -> Bound:
    """Return a bound statement in canonical names; its tensors and indices keep their order.

    >>> import torch
    >>> from insum_nn.compiler.lang.bind import bind
    >>> named = {"Row": torch.tensor([0, 1]), "row": torch.ones(2)}
    >>> print(canonical(bind(parse("y[Row[p]] += row[p]"), named, None)).statement)
    out[x0[a]] += t0[a]
    """
    names = names_of(bound.statement)
    return replace(
        bound,
        statement=_renamed(bound.statement),
        facts=tuple(map(names.facts, bound.facts)),
        static=tuple(sorted((names.indices[name], extent) for name, extent in bound.static)),
    )


def canonical_tables(statement: Statement, tables: Tables) -> Tables:
    """Return a statement's static tensors by their canonical names, without those that it does not read.

    The derivative by a static tensor no longer reads it.
    """
    if not tables:
        return ()
    names = names_of(statement).tensors
    return tuple(sorted((names[name], table) for name, table in tables if name in names))


def named_as(bound: Bound, own: Bound) -> Bound:
    """Return a bound statement in its own names, with the extents that are compiled into its canonical form."""
    indices = {short: name for name, short in names_of(bound.statement).indices.items()}
    return replace(bound, static=tuple(sorted((indices[short], extent) for short, extent in own.static)))


def digest(value: object) -> str:
    """Return a short name for a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# Fields of a `Bound` that a key spells out; the others print as what they are.
_SPELLED = ("statement", "dtype", "index_dtypes", "facts", "static")


def canonical_key(bound: Bound, tables: Mapping[str, StaticTable]) -> dict[str, Any]:
    """Return all that a kernel for a bound statement depends on but its sizes, in canonical names, as JSON.

    Facts that every call has proven, or that are unknown, are left out; of static tensors it holds digests.
    """
    own = canonical(bound)
    layout = own.layout
    index = [at for at, name in enumerate(layout.tensors) if name in layout.index_tensors]
    facts = {layout.tensors[at]: _declared(own.facts[at]) for at in index}
    return {
        "statement": str(own.statement),
        "dtype": show_dtype(own.dtype),
        "index_dtypes": {layout.tensors[at]: show_dtype(own.index_dtypes[at]) for at in index},
        "facts": {name: declared for name, declared in facts.items() if declared},
        "static": dict(own.static),
        "tables": {
            name: digest([table.shape, table.values])
            for name, table in canonical_tables(bound.statement, tuple(tables.items()))
        },
        **{field.name: str(getattr(own, field.name)) for field in fields(own) if field.name not in _SPELLED},
    }


def _declared(facts: IndexFacts) -> dict[str, Any]:
    """Return the facts that tell kernels apart."""
    declared: dict[str, Any] = {name: True for name in ("sorted", "unique") if getattr(facts, name)}
    if facts.masked is not None:
        declared["masked"] = facts.masked
    if facts.unique_with:
        declared["unique_with"] = list(facts.unique_with)
    return declared


# The user's statement, while something is done for it under its canonical form.
_shown: ContextVar[Statement | None] = ContextVar("insum_nn_statement", default=None)


def shown_statement(statement: Statement) -> Statement:
    """Return the user's statement for which a canonical one, or a part of it, is compiled; itself if there is none."""
    return _shown.get() or statement


class messages_name:
    """Let messages of what is done under the canonical form of a statement show the statement itself."""

    def __init__(self, statement: Statement) -> None:
        self.statement = statement

    def __enter__(self) -> None:
        self._token = _shown.set(self.statement)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _shown.reset(self._token)
        if isinstance(error, InsumError) and error.expression == _renamed(self.statement).text:
            text, fields = self.statement.text, error.fields
            raise type(error)(
                error.message, expression=text, spans=(), details=error.details, fix=error.fix, **fields
            ) from error.__cause__

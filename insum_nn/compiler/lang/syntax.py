"""Represent one statement as a syntax tree: frozen nodes, each with a span, and their printer.

    statement := access operator factor { "*" factor }        operators: `combining.py`
    factor    := access | number | identifier
    access    := name "[" subscript { "," subscript } "]"
    subscript := an affine sum of index variables and accesses, with integer coefficients

Spans are ignored by comparisons, so `parse(str(s)) == s` for every statement `s`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from insum_nn.compiler.lang.combining import COMBINING, Combining
from insum_nn.errors import Span

__all__ = ["Access", "Factor", "Index", "Number", "Statement", "Subscript", "Term"]


@dataclass(frozen=True, slots=True)
class Index:
    """An index variable, such as `i`."""

    name: str
    span: Span = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Term:
    """`coefficient * atom` inside a subscript; the coefficient is never 0."""

    coefficient: int
    atom: Index | Access
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Subscript:
    """An affine sum of terms plus a constant: `2*p+r-1`, `Col[g,q]`, `3`.

    Terms are merged: no two terms have the same atom.
    """

    terms: tuple[Term, ...]
    offset: int
    span: Span = field(compare=False, repr=False)

    @property
    def plain(self) -> str | None:
        """Return the index's name if the subscript is a single index, without coefficient and offset."""
        if self.offset == 0 and len(self.terms) == 1 and self.terms[0].coefficient == 1:
            atom = self.terms[0].atom
            if isinstance(atom, Index):
                return atom.name
        return None

    @property
    def indirect(self) -> Access | None:
        """Return the index tensor's access if the subscript is that access alone."""
        if self.offset == 0 and len(self.terms) == 1 and self.terms[0].coefficient == 1:
            atom = self.terms[0].atom
            if isinstance(atom, Access):
                return atom
        return None

    def index_accesses(self) -> Iterator[Access]:
        """Yield the index tensors that this subscript reads directly, without those nested in them."""
        for term in self.terms:
            if isinstance(term.atom, Access):
                yield term.atom

    def indices(self) -> Iterator[Index]:
        """Yield every occurrence of an index variable from left to right, nested ones included."""
        for term in self.terms:
            if isinstance(term.atom, Index):
                yield term.atom
            else:
                yield from term.atom.indices()

    def __str__(self) -> str:
        text = ""
        for term in self.terms:
            magnitude = abs(term.coefficient)
            sign = "-" if term.coefficient < 0 else "+" if text else ""
            text += sign + (f"{magnitude}*" if magnitude != 1 else "") + str(term.atom)
        if self.offset or not text:
            text += f"{self.offset:+d}" if text else str(self.offset)
        return text


@dataclass(frozen=True, slots=True)
class Access:
    """A tensor read or written at subscripts; without subscripts, a 0-d tensor."""

    name: str
    subscripts: tuple[Subscript, ...]
    span: Span = field(compare=False, repr=False)
    name_span: Span = field(compare=False, repr=False)

    def indices(self) -> Iterator[Index]:
        for subscript in self.subscripts:
            yield from subscript.indices()

    def nested(self) -> Iterator[Access]:
        """Yield every access of an index tensor inside the subscripts, outer before inner."""
        for subscript in self.subscripts:
            for access in subscript.index_accesses():
                yield access
                yield from access.nested()

    def __str__(self) -> str:
        if not self.subscripts:
            return self.name
        return f"{self.name}[{','.join(map(str, self.subscripts))}]"


@dataclass(frozen=True, slots=True)
class Number:
    """A literal factor."""

    value: int | float
    span: Span = field(compare=False, repr=False)

    def __str__(self) -> str:
        return repr(self.value)


Factor = Access | Number


@dataclass(frozen=True, slots=True)
class Statement:
    """`output operator factor * factor * ...`."""

    output: Access
    operator: str
    factors: tuple[Factor, ...]
    text: str = field(compare=False, repr=False)
    _hash: int = field(default=0, init=False, compare=False, repr=False)

    def __hash__(self) -> int:
        # Statements are keys of caches; hashing the tree at each look-up would cost more than a small kernel.
        if not self._hash:
            object.__setattr__(self, "_hash", hash((self.output, self.operator, self.factors)) or 1)
        return self._hash

    def __str__(self) -> str:
        return f"{self.output} {self.operator} {' * '.join(map(str, self.factors))}"

    @property
    def combining(self) -> Combining:
        """Return how terms of one cell become one number."""
        return COMBINING[self.operator]

    @property
    def reads(self) -> tuple[Access, ...]:
        """Return the factors that are tensors."""
        return tuple(f for f in self.factors if isinstance(f, Access))

    def indices(self) -> tuple[str, ...]:
        """Return the names of all index variables: the output's first, then in reading order."""
        names: dict[str, None] = {}
        for access in (self.output, *self.reads):
            names.update((index.name, None) for index in access.indices())
        return tuple(names)

    def index_tensors(self) -> tuple[str, ...]:
        """Return the names of the tensors inside subscripts, in reading order."""
        names: dict[str, None] = {}
        for access in (self.output, *self.reads):
            names.update((nested.name, None) for nested in access.nested())
        return tuple(names)

    def tensors(self) -> tuple[str, ...]:
        """Return the names of the tensors that are read: index tensors of the output first, then in reading order."""
        names: dict[str, None] = {nested.name: None for nested in self.output.nested()}
        for access in self.reads:
            names[access.name] = None
            names.update((nested.name, None) for nested in access.nested())
        return tuple(names)

    def accesses(self) -> Iterator[Access]:
        """Yield every access, the output's first, outer before inner."""
        for access in (self.output, *self.reads):
            yield access
            yield from access.nested()

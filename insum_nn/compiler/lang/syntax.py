"""Represent one statement as a syntax tree: frozen nodes, each with a span, and their printer.

    statement  := access operator expression                  operators: `combining.py`
    expression := product { ("+" | "-") product }
    product    := unary { ("*" | "/") unary }
    unary      := "-" unary | atom [ "**" number ]
    atom       := number | access | function "(" expression { "," expression } ")" | "(" expression ")"
    access     := name [ "[" subscript { "," subscript } "]" ]
    subscript  := an affine sum of index variables and accesses, with integer coefficients

The right-hand side is a product of factors: accesses, numbers, and functions of these (`Apply`), as sums and quotients
are. Spans are ignored by comparisons, so `parse(str(s)) == s` for every statement `s`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from insum_nn.compiler.lang.combining import COMBINING, Combining
from insum_nn.compiler.lang.functions import SIGNS
from insum_nn.errors import Span

__all__ = ["Access", "Apply", "Factor", "Index", "Number", "Statement", "Subscript", "Term"]
__all__ += ["leaves", "renamed", "replaced", "substituted"]


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


@dataclass(frozen=True, slots=True)
class Apply:
    """A function of `functions.py` of factors."""

    function: str
    args: tuple[Factor, ...]
    span: Span = field(compare=False, repr=False)

    def __str__(self) -> str:
        return f"({self.text})" if self.function in SIGNS else self.text

    @property
    def text(self) -> str:
        """The same without parentheses around it."""
        first, *rest = self.args
        if self.function == "add":
            text = _text(first)
            for summand in rest:
                each = _text(summand)
                # A quotient's sign is its dividend's.
                moved = each.startswith("-") and not (isinstance(summand, Apply) and summand.function == "div")
                text += f" - {each[1:]}" if moved else f" + {each}"
            return text
        if self.function == "mul":
            minus = isinstance(first, Number) and repr(first.value) == "-1" and not isinstance(rest[0], Number)
            return ("-" if minus else f"{first} * ") + " * ".join(map(str, rest))
        if self.function == "div":
            return f"{first} / {rest[0]}"
        if self.function == "pow":
            return f"({first})**{rest[0]}" if str(first).startswith("-") else f"{first}**{rest[0]}"
        return f"{self.function}({', '.join(map(_text, self.args))})"


Factor = Access | Number | Apply


def _text(factor: Factor) -> str:
    """A factor where no sign is next to it; a difference keeps what it subtracts together."""
    return factor.text if isinstance(factor, Apply) else str(factor)


def leaves(*factors: Factor) -> Iterator[Access | Number]:
    """Yield the accesses and numbers that factors are made of, from left to right."""
    for factor in factors:
        if isinstance(factor, Apply):
            yield from leaves(*factor.args)
        else:
            yield factor


def replaced(factor: Factor, change: Callable[[Access], Factor]) -> Factor:
    """Return a factor with each of its accesses changed."""
    if isinstance(factor, Apply):
        return replace(factor, args=tuple(replaced(arg, change) for arg in factor.args))
    return change(factor) if isinstance(factor, Access) else factor


def renamed(access: Access, tensors: Mapping[str, str], indices: Mapping[str, str]) -> Access:
    """Return an access with other names, in its subscripts too; what these mappings lack keeps its name."""
    span = access.span
    given = {name: Subscript((Term(1, Index(new, span), span),), 0, span) for name, new in indices.items()}
    return substituted(access, {**given}, tensors)


def substituted(
    access: Access, places: Mapping[str | None, Subscript], tensors: Mapping[str, str] = MappingProxyType({})
) -> Access:
    """Return an access with other subscripts in place of indices, and other names of tensors."""
    subscripts = tuple(_substituted(s, places, tensors) for s in access.subscripts)
    return replace(access, name=tensors.get(access.name, access.name), subscripts=subscripts)


def _substituted(subscript: Subscript, places: Mapping[str | None, Subscript], tensors: Mapping[str, str]) -> Subscript:
    atoms: dict[Index | Access, int] = {}
    offset = subscript.offset
    for term in subscript.terms:
        inner = ((1, term.atom),)
        if isinstance(term.atom, Access):
            inner = ((1, substituted(term.atom, places, tensors)),)
        elif (given := places.get(term.atom.name)) is not None:
            inner = tuple((each.coefficient, each.atom) for each in given.terms)
            offset += term.coefficient * given.offset
        for coefficient, atom in inner:
            atoms[atom] = atoms.get(atom, 0) + term.coefficient * coefficient
    terms = tuple(Term(coefficient, atom, subscript.span) for atom, coefficient in atoms.items() if coefficient)
    return Subscript(terms, offset, subscript.span)


@dataclass(frozen=True, slots=True)
class Statement:
    """`output operator factor * factor * ...`.

    A factor that is a product is several factors, so the factors of a statement are accesses, numbers and functions.
    """

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
        first = self.factors[0]
        value = _text(first) if len(self.factors) == 1 else " * ".join(map(str, self.factors))
        return f"{self.output} {self.operator} {value}"

    @property
    def combining(self) -> Combining:
        """Return how terms of one cell become one number."""
        return COMBINING[self.operator]

    @property
    def reads(self) -> tuple[Access, ...]:
        """Return the tensors that are read, those in functions too, from left to right."""
        return tuple(f for f in leaves(*self.factors) if isinstance(f, Access))

    @property
    def is_product(self) -> bool:
        """Return whether no factor is a function."""
        return not any(isinstance(f, Apply) for f in self.factors)

    def indices(self) -> tuple[str, ...]:
        """Return the names of all index variables: the output's first, then in reading order."""
        accesses = (self.output, *self.reads)
        return tuple(dict.fromkeys(index.name for access in accesses for index in access.indices()))

    def index_tensors(self) -> tuple[str, ...]:
        """Return the names of the tensors inside subscripts, in reading order."""
        accesses = (self.output, *self.reads)
        return tuple(dict.fromkeys(nested.name for access in accesses for nested in access.nested()))

    def tensors(self) -> tuple[str, ...]:
        """Return the names of the tensors that are read: index tensors of the output first, then in reading order."""
        _, *others = self.accesses()
        return tuple(dict.fromkeys(access.name for access in others))

    def accesses(self) -> Iterator[Access]:
        """Yield every access, the output's first, outer before inner."""
        for access in (self.output, *self.reads):
            yield access
            yield from access.nested()
